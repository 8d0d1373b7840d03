"""States in and out of WGMMA accumulators.

A chain thread holds 64 values of S^T [64 value rows x 128 keys] as two fp32 tensors of shape (8, 4), one of keys 0 to 63
and one of keys 64 to 127. In each, value 4*(j % 2) + 2*r + e of column j // 2 belongs to value row 16*warp + lane // 4 + 8*r
and to key 8*j + 2*(lane % 4) + e of the tensor's 64, with j from 0 to 7 and r, e from 0 to 1.

kind: dtype of a state in memory, "fp32" or "bf16"; None: there is no such state. v_first: it is [V, K], otherwise [K, V].
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.wy64.record import HALF, HEAD_DIM


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
    """STATE_BYTES at `address` = state: [16][128 threads][4] fp32, 16 bytes per thread and instruction, coalesced."""
    address += ptx.thread_index() * 16
    for j in cutlass.range_constexpr(16):
        values = [state[j // 8][4 * (j % 2) + e, j % 8 // 2] for e in range(4)]
        ptx.stg_v4_f32(address + j * 2048, *values)


def size(kind):
    """Bytes of an element."""
    return 0 if kind is None else 4 if kind == "fp32" else 2


def state_offset(seq, head, heads, kind):
    """Byte offset of the state of (sequence, head) in a tensor [sequences, heads] of states."""
    return (Int64(seq) * heads + head) * (size(kind) * HEAD_DIM * HEAD_DIM)


def image(kind, v_first):
    """(rows, bytes of a row, pitch in bytes) of one value half of a state in shared memory.

    A row holds the keys of a value or, not v_first, the values of a key. The pitch spreads what a warp reads at once over
    all banks.
    """
    rows, row = (HALF, HEAD_DIM * size(kind)) if v_first else (HEAD_DIM, HALF * size(kind))
    return rows, row, row + (32 if v_first and kind == "fp32" else 16)


def image_bytes(kind, v_first):
    """Shared memory that `fetch_state` fills."""
    rows, _, pitch = image(kind, v_first)
    return rows * pitch


@cute.jit
def fetch_state(target, full, source, value_half, kind: cutlass.Constexpr, v_first: cutlass.Constexpr):
    """Bulk copies of one value half of the state at `source`, 16-byte aligned, into an image at `target`; by a whole warp.

    Their bytes and one arrival complete the mbarrier `full`.
    """
    rows, row, pitch = const_expr(image(kind, v_first))
    source_pitch = const_expr(row if v_first else 2 * row)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, rows * row)
    cute.arch.sync_warp()
    lane = cute.arch.lane_idx()
    source += value_half * (rows * row if v_first else row)
    for i in cutlass.range_constexpr(rows // 32):
        at = 32 * i + lane
        ptx.bulk_load(target + at * pitch, source + at * source_pitch, Int32(row), full.toint())


def _steps(kind, v_first):
    """Bytes from key to key and from value to value of a state in global memory."""
    row = HEAD_DIM * size(kind)
    return (size(kind), row) if v_first else (row, size(kind))


def half_offset(kind, v_first):
    """Byte offset of the second value half of a state in global memory."""
    return HALF * _steps(kind, v_first)[1]


def _pairs(address, key_step, value_step):
    """For each pair of a thread's values of neighbouring keys: (tensor, row, column) of the first, addresses of both."""
    tid = ptx.thread_index()
    start = address + (16 * (tid // 32) + tid % 32 // 4) * value_step + 2 * (tid % 4) * key_step
    for j in range(16):
        for r in range(2):
            first = start + 8 * j * key_step + 8 * r * value_step
            yield (j // 8, 4 * (j % 2) + 2 * r, j % 8 // 2), first, first + key_step


@cute.jit
def load_state(address, kind: cutlass.Constexpr, v_first: cutlass.Constexpr, state):
    """state = the image at `address`."""
    pitch = const_expr(image(kind, v_first)[2])
    steps = const_expr((size(kind), pitch) if v_first else (pitch, size(kind)))
    for (part, row, column), first, second in _pairs(address, *steps):
        if const_expr(v_first and kind == "fp32"):
            pair = ptx.lds_v2_f32(first)
        elif const_expr(v_first):
            pair = ptx.unpack_bf16x2(ptx.lds_b32(first))
        elif const_expr(kind == "fp32"):
            pair = (ptx.lds_f32(first), ptx.lds_f32(second))
        else:
            pair = ptx.unpack_bf16x2(ptx.lds_b16(first) | (ptx.lds_b16(second) << 16))
        state[part][row, column], state[part][row + 1, column] = pair


@cute.jit
def read_state(address, value_half, kind: cutlass.Constexpr, v_first: cutlass.Constexpr, state):
    """state = one value half of the state at `address` in global memory, which nothing writes during the launch."""
    steps = const_expr(_steps(kind, v_first))
    for (part, row, column), first, second in _pairs(address + value_half * (HALF * steps[1]), *steps):
        if const_expr(v_first and kind == "fp32"):
            pair = [ptx.as_f32(word) for word in ptx.ldg_nc_v2_b32(first)]
        elif const_expr(v_first):
            pair = ptx.unpack_bf16x2(ptx.ldg_nc_b32(first))
        elif const_expr(kind == "fp32"):
            pair = (ptx.ldg_nc_f32(first), ptx.ldg_nc_f32(second))
        else:
            pair = (ptx.ldg_nc_bf16(first), ptx.ldg_nc_bf16(second))
        state[part][row, column], state[part][row + 1, column] = pair


@cute.jit
def store_state(address, value_half, kind: cutlass.Constexpr, v_first: cutlass.Constexpr, state):
    """One value half of the state at `address` in global memory = state."""
    steps = const_expr(_steps(kind, v_first))
    for (part, row, column), first, second in _pairs(address + value_half * (HALF * steps[1]), *steps):
        low, high = state[part][row, column], state[part][row + 1, column]
        if const_expr(v_first and kind == "fp32"):
            ptx.stg_v2_f32(first, low, high)
        elif const_expr(v_first):
            ptx.stg_b32(first, ptx.pack_bf16x2(low, high))
        elif const_expr(kind == "fp32"):
            ptx.stg_f32(first, low)
            ptx.stg_f32(second, high)
        else:
            words = ptx.pack_bf16x2(low, high)
            ptx.stg_b16(first, words)
            ptx.stg_b16(second, words >> 16)


@cute.jit
def load_global_state(address, value_half, v_first: cutlass.Constexpr, state):
    """state = one value half of the fp32 state at `address` in global memory."""
    steps = const_expr(_steps("fp32", v_first))
    for (part, row, column), first, second in _pairs(address + value_half * (HALF * steps[1]), *steps):
        if const_expr(v_first):
            pair = ptx.ldg_v2_f32(first)
        else:
            pair = (ptx.ldg_f32(first), ptx.ldg_f32(second))
        state[part][row, column], state[part][row + 1, column] = pair


@cute.jit
def store_rounded(address, k: cutlass.Constexpr, words, v_first: cutlass.Constexpr):
    """Keys 16*k to 16*k + 31 of one value half of a bf16 state at `address` in global memory, 16 bytes per thread and store.

    words[b][j]: the pairs of a thread's A operand, key block k + b. A thread has word [o // 2][2 * (o % 2) + r] of the 8 x 8
    tile of key octet o and values 8*r to 8*r + 7. Neighbours exchange words until each has 8 neighbouring elements.
    """
    key_step, value_step = const_expr(_steps("bf16", v_first))
    tid = ptx.thread_index()
    group, lane_of_quad = tid % 32 // 4, tid % 4
    address += 16 * (tid // 32) * value_step + 16 * k * key_step
    if const_expr(v_first):  # four octets of a value's keys
        address += group * value_step + 8 * lane_of_quad * key_step
        for r in cutlass.range_constexpr(2):
            tiles = [words[o // 2][2 * (o % 2) + r] for o in range(4)]
            ptx.stg_words(address + 8 * r * value_step, ptx.transpose_quad(tiles, lane_of_quad))
    else:  # two octets of a key's values, of two octets of keys
        address += (8 * (lane_of_quad // 2) + group) * key_step + 8 * (lane_of_quad % 2) * value_step
        for b in cutlass.range_constexpr(2):
            tiles = [ptx.movmatrix(word) for word in words[b]]
            ptx.stg_words(address + 16 * b * key_step, ptx.transpose_quad(tiles, lane_of_quad))
