"""Sequences of one chunk that begin from a state zero: prepare computes their outputs and final states itself.

Then V' = U, S = K_end^T U and O = A U: no record is written, and the chain passes the sequence by. The products have the
chain's operands, 16 tokens at a time in its order.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.wy64 import states
from fla_kda_backend.kernels.wy64.prepare.loads import HEAD, INDEX, ROWS, SEQUENCES, TEAM, TOKEN, G, K
from fla_kda_backend.kernels.wy64.prepare.steps import TILE_BYTES
from fla_kda_backend.kernels.wy64.record import BANDS, CHUNK, HALF, HEAD_DIM


class PrepareDirect:
    """A kernel inherits it. direct: whether it does so; final, state_v_first: of the final states."""

    direct = False

    def whole(self, p, n):
        """1 if the team's chunk number n is a whole sequence, else 0."""
        rows, index = ptx.lds_b32(p.plan(n) + ROWS), ptx.lds_b32(p.plan(n) + INDEX)
        return ptx.less_b32(index, 1, ptx.less_b32(rows, CHUNK + 1, 1, 0), 0)

    @cute.jit
    def results(self, p, n, x, w_at, band, half, lane):
        """Final state to global memory, O to the place of W. x: blocks of V^T."""
        u = [words for (words,) in self.eliminate(p.smem, x, None, w_at, lane)]
        for i in cutlass.range_constexpr(BANDS):
            acc = [[cutlass.Float32(0.0)] * 4] * 2
            for j in cutlass.range_constexpr(i + 1):
                a = ptx.ldmatrix_x4(self.a_block(p.smem, i, j, lane))
                acc = [ptx.mma_bf16(u[j], (a[m], a[m + 2]), acc[m]) for m in range(2)]
            o = [ptx.pack_bf16x2(acc[m][2 * r], acc[m][2 * r + 1]) for m in range(2) for r in range(2)]
            ptx.stmatrix_x4_trans(w_at + i * 2048, o)
        if cutlass.const_expr(self.final is not None):
            self.store_final(p, n, u, band, half, lane)

    @cute.jit
    def store_final(self, p, n, u, band, half, lane):
        size = cutlass.const_expr(states.size(self.final))
        key_step, value_step = (size, HEAD_DIM * size) if self.state_v_first else (HEAD_DIM * size, size)
        seq, head = ptx.lds_b32(p.plan(n) + SEQUENCES) - 1, ptx.lds_b32(p.plan(n) + HEAD)
        (final_state,) = ptx.pin([p.final_state])
        address = final_state + (Int64(seq) * p.heads + head) * (size * HEAD_DIM * HEAD_DIM)
        address += (half * HALF + 16 * band + (lane >> 2)) * value_step + 2 * (lane & 3) * key_step
        k_at = self.tile(p, n, K) + self.block_at(0, 0, lane)
        for t in cutlass.range(HEAD_DIM // 16, unroll=2):  # keys 16 * t on
            keys_at = (k_at ^ ((t & 3) << 5)) + (t >> 2) * (TILE_BYTES // 2)
            acc = [[cutlass.Float32(0.0)] * 4] * 2
            for j in cutlass.range_constexpr(BANDS):
                k = ptx.ldmatrix_x4_trans(keys_at + j * 2048)
                acc = [ptx.mma_bf16(u[j], k[2 * m : 2 * m + 2], acc[m]) for m in range(2)]
            for m in cutlass.range_constexpr(2):
                for r in cutlass.range_constexpr(2):
                    first = address + Int64(8 * m * key_step + 8 * r * value_step)
                    low, high = acc[m][2 * r], acc[m][2 * r + 1]
                    if cutlass.const_expr(self.final == "fp32"):
                        if cutlass.const_expr(self.state_v_first):
                            ptx.stg_v2_f32(first, low, high)
                        else:
                            ptx.stg_f32(first, low)
                            ptx.stg_f32(first + key_step, high)
                    else:
                        words = ptx.pack_bf16x2(low, high)
                        if cutlass.const_expr(self.state_v_first):
                            ptx.stg_b32(first, words)
                        else:
                            ptx.stg_b16(first, words)
                            ptx.stg_b16(first + key_step, words >> 16)
            address += 16 * key_step

    @cute.jit
    def store_out(self, p, n):
        """O, which all warps have left in the place of W, to its rows."""
        thread = self.thread()
        rows, token, head = (ptx.lds_b32(p.plan(n) + at) for at in (ROWS, TOKEN, HEAD))
        (out,) = ptx.pin([p.out])
        piece, row = thread & 15, thread >> 4
        source = self.tile(p, n, G) + (piece >> 3) * (TILE_BYTES // 2) + row * 128 + (((piece & 7) ^ (row & 7)) << 4)
        step = Int64(p.heads) * (HEAD_DIM * 2)
        target = out + (Int64(token) + row) * step + (head * (HEAD_DIM * 2) + piece * 16)
        for i in cutlass.range_constexpr(16 * CHUNK // TEAM):
            if row + Int32(16 * i) < rows:
                ptx.stg_once_words(target + step * (16 * i), ptx.lds_v4_b32(source + 2048 * i))
        ptx.fence_proxy_async()  # these reads before the copy that the tile takes next
