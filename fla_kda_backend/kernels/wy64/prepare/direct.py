"""Sequences of one chunk that begin from a state zero: prepare computes their outputs and final states itself.

Then V' = U, S = K_end^T U and O = A U: no record is written, and the chain passes the sequence by. The products take the
operands that the chain would take, 16 tokens at a time in the chain's order.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.wy64 import states
from fla_kda_backend.kernels.wy64.prepare.blocks import a_block_address
from fla_kda_backend.kernels.wy64.prepare.elimination import eliminate
from fla_kda_backend.kernels.wy64.prepare.fragments import zeros
from fla_kda_backend.kernels.wy64.prepare.memory import TEAM_THREADS, TILE_BYTES, ChunkInfo, Tensor
from fla_kda_backend.kernels.wy64.prepare.tiles import block_offset
from fla_kda_backend.kernels.wy64.record import BANDS, CHUNK, HALF, HEAD_DIM


class Direct:
    """enabled: whether prepare does so in this launch."""

    def __init__(self, variant, schedule, teams, tiles):
        self.enabled, self.teams, self.tiles = schedule.direct, teams, tiles
        self.final_state, self.state_v_first = variant.final_state, variant.state_v_first

    def is_whole(self, memory, n):
        """1 if the team's chunk number n is a whole sequence, else 0."""
        rows, index = memory.info(n, ChunkInfo.ROWS), memory.info(n, ChunkInfo.INDEX)
        return ptx.less_b32(index, 1, ptx.less_b32(rows, CHUNK + 1, 1, 0), 0)

    @cute.jit
    def results(self, args, memory, x, w_at, coord):
        """Final state to global memory, O to the place of W. x: per band, blocks of V^T; w_at as `eliminate` takes it."""
        u = [words for (words,) in eliminate(memory.base, x, None, w_at, coord.lane)]
        for i in cutlass.range_constexpr(BANDS):
            acc = zeros()
            for j in cutlass.range_constexpr(i + 1):
                a = ptx.ldmatrix_x4(a_block_address(memory.base, i, j, coord.lane))
                acc = [ptx.mma_bf16(u[j], (a[m], a[m + 2]), acc[m]) for m in range(2)]
            o = [ptx.pack_bf16x2(acc[m][2 * r], acc[m][2 * r + 1]) for m in range(2) for r in range(2)]
            ptx.stmatrix_x4_trans(w_at + i * 2048, o)
        if const_expr(self.final_state is not None):
            self.store_final(args, memory, u, coord)

    @cute.jit
    def store_final(self, args, memory, u, coord):
        n, lane = coord.n, coord.lane
        size = const_expr(states.size(self.final_state))
        key_step, value_step = (size, HEAD_DIM * size) if self.state_v_first else (HEAD_DIM * size, size)
        seq, head = memory.info(n, ChunkInfo.SEQUENCES) - 1, memory.info(n, ChunkInfo.HEAD)
        (final_state,) = ptx.pin([args.final_state])
        address = final_state + (Int64(seq) * args.heads + head) * (size * HEAD_DIM * HEAD_DIM)
        address += (coord.half * HALF + 16 * coord.band + coord.group) * value_step + 2 * coord.quad * key_step
        k_at = self.tiles.address(memory, n, Tensor.K) + block_offset(0, 0, lane)
        for t in cutlass.range(HEAD_DIM // 16, unroll=2):  # keys 16 * t on
            keys_at = (k_at ^ ((t & 3) << 5)) + (t >> 2) * (TILE_BYTES // 2)
            acc = zeros()
            for j in cutlass.range_constexpr(BANDS):
                k = ptx.ldmatrix_x4_trans(keys_at + j * 2048)
                acc = [ptx.mma_bf16(u[j], k[2 * m : 2 * m + 2], acc[m]) for m in range(2)]
            for m in cutlass.range_constexpr(2):
                for r in cutlass.range_constexpr(2):
                    first = address + Int64(8 * m * key_step + 8 * r * value_step)
                    low, high = acc[m][2 * r], acc[m][2 * r + 1]
                    if const_expr(self.final_state == "fp32"):
                        if const_expr(self.state_v_first):
                            ptx.stg_v2_f32(first, low, high)
                        else:
                            ptx.stg_f32(first, low)
                            ptx.stg_f32(first + key_step, high)
                    else:
                        words = ptx.pack_bf16x2(low, high)
                        if const_expr(self.state_v_first):
                            ptx.stg_b32(first, words)
                        else:
                            ptx.stg_b16(first, words)
                            ptx.stg_b16(first + key_step, words >> 16)
            address += 16 * key_step

    @cute.jit
    def store_out(self, args, memory, n):
        """O, which all warps have left in the place of W, to its rows in global memory."""
        thread = self.teams.thread()
        rows, token, head = (memory.info(n, field) for field in (ChunkInfo.ROWS, ChunkInfo.TOKEN, ChunkInfo.HEAD))
        (out,) = ptx.pin([args.out])
        piece, row = thread & 15, thread >> 4
        source = self.tiles.address(memory, n, Tensor.G)
        source += (piece >> 3) * (TILE_BYTES // 2) + row * 128 + (((piece & 7) ^ (row & 7)) << 4)
        step = Int64(args.heads) * (HEAD_DIM * 2)
        target = out + (Int64(token) + row) * step + (head * (HEAD_DIM * 2) + piece * 16)
        for i in cutlass.range_constexpr(16 * CHUNK // TEAM_THREADS):
            if row + Int32(16 * i) < rows:
                ptx.stg_once_words(target + step * (16 * i), ptx.lds_v4_b32(source + 2048 * i))
        ptx.fence_proxy_async()  # these reads before the copy that the tile takes next
