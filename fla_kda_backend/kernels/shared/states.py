"""States in and out of WGMMA accumulators.

A chain thread holds 64 values of S^T [64 value rows x 128 keys] as two fp32 tensors (keys 0-63, 64-127) of shape (8,
4): value 4*(j % 2) + 2*r + e of column j // 2 belongs to value row 16*warp + lane // 4 + 8*r and key 8*j + 2*(lane %
4) + e (j from 0 to 7; 64 more in the second tensor).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from . import ptx
from .wy64 import HALF, HEAD_DIM

CARRY_BYTES = HEAD_DIM * HALF * 4  # one half of a state in accumulator order: [16][128 threads][4] fp32


@cute.jit
def load_carry(address, state):
    """state = what store_carry left at `address`."""
    address += ptx.thread_index() * 16
    for j in cutlass.range_constexpr(16):
        values = ptx.ldg_v4_f32(address + j * 2048)
        for e in cutlass.range_constexpr(4):
            state[j // 8][4 * (j % 2) + e, j % 8 // 2] = values[e]


@cute.jit
def store_carry(address, state):
    """CARRY_BYTES at `address`, 16 bytes a thread and instruction, coalesced."""
    address += ptx.thread_index() * 16
    for j in cutlass.range_constexpr(16):
        values = [state[j // 8][4 * (j % 2) + e, j % 8 // 2] for e in range(4)]
        ptx.stg_v4_f32(address + j * 2048, *values)


def _pairs(dtype, address, half, v_first):
    """For each pair of registers: (tensor, row, column) of its first value, addresses of both."""
    size = dtype.width // 8
    tid = ptx.thread_index()
    key_step, value_step = (size, HEAD_DIM * size) if v_first else (HEAD_DIM * size, size)
    start = address + (half * HALF + 16 * (tid // 32) + tid % 32 // 4) * value_step + 2 * (tid % 4) * key_step
    for j in range(16):
        for r in range(2):
            first = start + 8 * j * key_step + 8 * r * value_step
            yield (j // 8, 4 * (j % 2) + 2 * r, j % 8 // 2), first, first + key_step


@cute.jit
def load_state(address, half, dtype: cutlass.Constexpr, v_first: cutlass.Constexpr, state):
    """state = one half of the [V, K] (v_first) or [K, V] state at `address`; dtype None: zeros."""
    if const_expr(dtype is None):
        for part in state:
            part.fill(0.0)
    else:
        for (part, row, column), first, second in _pairs(dtype, address, half, v_first):
            if const_expr(v_first and dtype is Float32):
                pair = ptx.ldg_v2_f32(first)
            elif const_expr(v_first):
                pair = ptx.unpack_bf16x2(ptx.ldg_b32(first))
            elif const_expr(dtype is Float32):
                pair = (ptx.ldg_f32(first), ptx.ldg_f32(second))
            else:
                pair = (ptx.ldg_bf16(first), ptx.ldg_bf16(second))
            state[part][row, column], state[part][row + 1, column] = pair


@cute.jit
def store_state(address, half, dtype: cutlass.Constexpr, v_first: cutlass.Constexpr, state):
    """The reverse of load_state; dtype None: nothing is written."""
    if const_expr(dtype is not None):
        for (part, row, column), first, second in _pairs(dtype, address, half, v_first):
            low, high = state[part][row, column], state[part][row + 1, column]
            if const_expr(v_first and dtype is Float32):
                ptx.stg_v2_f32(first, low, high)
            elif const_expr(v_first):
                ptx.stg_b32(first, ptx.pack_bf16x2(low, high))
            elif const_expr(dtype is Float32):
                ptx.stg_f32(first, low)
                ptx.stg_f32(second, high)
            else:
                words = ptx.pack_bf16x2(low, high)
                ptx.stg_b16(first, words)
                ptx.stg_b16(second, words >> 16)
