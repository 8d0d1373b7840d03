"""A warp's part of a head's state [128 keys, BV value columns], in registers and in memory.

In registers it is a tensor [tiles, 8 blocks of 16 keys, ..] in the layout of an m16n8 accumulator: bf16 pairs, or robust:
fp32. With lane = 4g + t, element e of (tile j, block) is key 16 * block + g + 8 * (e // 2) and MMA column 2t + e % 2. MMA
column n of tile j is the warp's column (n // 2) * 2 * tiles + 2 * j + n % 2: a lane's columns lie side by side in memory,
from `2 * tiles * t` on.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.column_split.record import LOG2_CHUNK
from fla_kda_backend.kernels.variant import DTYPE_BYTES

DIM = 128
STATE_BYTES = DIM * DIM * 2  # of a bf16 state


class State:
    """The functions of a state tensor.

    Args:
        robust: fp32 in registers, else bf16.
        tiles: of 8 columns, per warp.
        v_first: the call's states are [V, K], else [K, V].
        log2_tokens: 2**log2_tokens tokens lie between two intermediate states.
    """

    def __init__(self, robust, tiles, v_first, log2_tokens):
        self.robust, self.tiles, self.v_first, self.log2_tokens = robust, tiles, v_first, log2_tokens

    # ---- in registers ---------------------------------------------------------------------------------------------
    @cute.jit
    def zeros(self):
        if const_expr(self.robust):
            state = cute.make_rmem_tensor((self.tiles, 8, 4), Float32)
            state.fill(0.0)
        else:
            state = cute.make_rmem_tensor((self.tiles, 8, 2), Int32)
            state.fill(0)
        return state

    def word(self, state, j, block, r):
        """Elements 2r and 2r + 1 as a bf16 pair."""
        if self.robust:
            return ptx.pack_bf16x2(state[j, block, 2 * r], state[j, block, 2 * r + 1])
        return state[j, block, r]

    def operand_word(self, state, j, block, r):
        """The same as a register of a B operand."""
        return ptx.movmatrix(self.word(state, j, block, r))

    @cute.jit
    def update(self, state, j, block, decay, k_end, u):
        """decay * S + k_end^T u of a block; decay: of the lane's keys g and g + 8."""
        if const_expr(self.robust):
            c = ptx.mma_bf16(k_end, u, [state[j, block, e] * decay[e // 2] for e in range(4)])
            for e in cutlass.range_constexpr(4):
                state[j, block, e] = c[e]
        else:
            c = ptx.mma_bf16(k_end, u, [Float32(0.0)] * 4)
            for r in cutlass.range_constexpr(2):
                low, high = ptx.unpack_bf16x2(state[j, block, r])
                low, high = ptx.fma(decay[r], low, c[2 * r]), ptx.fma(decay[r], high, c[2 * r + 1])
                state[j, block, r] = ptx.pack_bf16x2(low, high)

    # ---- in memory ------------------------------------------------------------------------------------------------
    def steps(self, dtype, v_first):
        """Bytes from a key to the next, and from a column to the next."""
        size = DTYPE_BYTES[dtype]
        return (size, DIM * size) if v_first else (DIM * size, size)

    @cute.jit
    def load(self, state, address, dtype: cutlass.Constexpr, v_first: cutlass.Constexpr):
        """address: of key 0 of the lane's first column."""
        key_step, column_step = const_expr(self.steps(dtype, v_first))
        read = ptx.ldg_f32 if dtype == "fp32" else ptx.ldg_bf16
        key = address + Int64(cute.arch.lane_idx() // 4) * key_step
        for j in cutlass.range_constexpr(self.tiles):
            for block in cutlass.range_constexpr(8):
                for r in cutlass.range_constexpr(2):
                    at = key + Int64(2 * j * column_step + (16 * block + 8 * r) * key_step)
                    pair = (read(at), read(at + Int64(column_step)))
                    if const_expr(self.robust):
                        state[j, block, 2 * r], state[j, block, 2 * r + 1] = pair
                    else:
                        state[j, block, r] = ptx.pack_bf16x2(pair[0], pair[1])

    @cute.jit
    def store(self, state, address, dtype: cutlass.Constexpr, v_first: cutlass.Constexpr):
        """address: as for `load`. An fp32 state of the exact setting is the widened bf16 one."""
        key_step, column_step = const_expr(self.steps(dtype, v_first))
        key = address + Int64(cute.arch.lane_idx() // 4) * key_step
        for j in cutlass.range_constexpr(self.tiles):
            for block in cutlass.range_constexpr(8):
                for r in cutlass.range_constexpr(2):
                    at = key + Int64(2 * j * column_step + (16 * block + 8 * r) * key_step)
                    if const_expr(dtype == "fp32" and self.robust):
                        ptx.stg_f32(at, state[j, block, 2 * r])
                        ptx.stg_f32(at + Int64(column_step), state[j, block, 2 * r + 1])
                    elif const_expr(dtype == "fp32"):
                        low, high = ptx.unpack_bf16x2(state[j, block, r])
                        ptx.stg_f32(at, low)
                        ptx.stg_f32(at + Int64(column_step), high)
                    else:
                        word = self.word(state, j, block, r)
                        ptx.stg_b16(at, word)
                        ptx.stg_b16(at + Int64(column_step), word >> 16)

    @cute.jit
    def store_intermediate(self, state, operand, first, chunk, column, heads):
        """The rounded state before 16-token chunk `chunk` of the sequence, if an intermediate state belongs there.

        operand: the words of `operand_word`; first: address of the state before the sequence's first chunk; column: the
        warp's first. In [V, K] a word of the operand holds two neighbouring keys of a column, in [K, V] a word of the state
        two neighbouring columns of a key: each is stored as it is.
        """
        log2 = const_expr(self.log2_tokens - LOG2_CHUNK)
        if chunk & ((1 << log2) - 1) == 0:
            g, t = cute.arch.lane_idx() // 4, cute.arch.lane_idx() % 4
            address = first + Int64(chunk >> log2) * Int64(heads) * STATE_BYTES
            if const_expr(self.v_first):
                address += Int64((column + g // 2 * (2 * self.tiles) + g % 2) * (2 * DIM) + 4 * t)
            else:
                address += Int64(g * (2 * DIM) + (column + t * (2 * self.tiles)) * 2)
            for j in cutlass.range_constexpr(self.tiles):
                for block in cutlass.range_constexpr(8):
                    for r in cutlass.range_constexpr(2):
                        key = const_expr(16 * block + 8 * r)
                        if const_expr(self.v_first):
                            ptx.stg_b32(address + Int64(2 * j * (2 * DIM) + 2 * key), operand[j, block, r])
                        else:
                            ptx.stg_b32(address + Int64(key * (2 * DIM) + 4 * j), self.word(state, j, block, r))
