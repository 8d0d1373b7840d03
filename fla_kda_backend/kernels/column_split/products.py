"""The rows that a chunk's decay scales, and the scores, for decays that are bounded over a chunk of 16 tokens.

With c the sum of the log2 decays from the chunk's start, 2^-c stays in the range of bf16: one product of k_start or q_start
with k_inv gives all entries of L or of the scores. Formulas and roundings stand in prepare.py; levels.py does the same for
decays without a bound.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.column_split.layout import word_at
from fla_kda_backend.kernels.column_split.record import DECAY_PAIR, K_END, K_START, Q_START, ROW_BYTES, SCORES, decay_at


def scaled(x, factors):
    """Two fp32 times two factors, rounded to a bf16 pair."""
    return ptx.pack_bf16x2(ptx.mul(x[0], factors[0]), ptx.mul(x[1], factors[1]))


def write_decay(smem, pair, c):
    """2^c of two channels, c the sum over the chunk."""
    at = smem + decay_at(pair)
    ptx.sts_f32(at, ptx.ex2(c[0]))
    ptx.sts_f32(at + DECAY_PAIR, ptx.ex2(c[1]))


class Products:
    """robust: the arithmetic; layout: a Layout."""

    def __init__(self, robust, layout):
        self.robust, self.layout = robust, layout

    @cute.jit
    def write_rows(self, y, smem, pair, token_half, scale):
        """Replace q^ by q_start and k^ by k_inv, write k_start and decay. To be called by the whole CTA.

        y [8 tokens][2 channels] becomes c. Returns what `write_k_end` takes.
        """
        if token_half == 0:
            self.running_sum(y, (Float32(0.0), Float32(0.0)))
            ptx.sts_v2_f32(self.sum_at(smem, pair), y[7, 0], y[7, 1])
        cute.arch.sync_threads()
        if token_half == 1:
            self.running_sum(y, ptx.lds_v2_f32(self.sum_at(smem, pair)))
            if const_expr(self.robust):
                ptx.sts_v2_f32(self.sum_at(smem, pair), y[7, 0], y[7, 1])
            write_decay(smem, pair, (y[7, 0], y[7, 1]))
        return self.scale_rows(y, smem, pair, token_half, scale)

    def sum_at(self, smem, pair):
        """Address of c of two channels: at token 7, later at token 15."""
        return smem + self.layout.half_sums + pair * 8

    @cute.jit
    def running_sum(self, y, start):
        """y becomes its inclusive sum over the tokens, beginning at `start`."""
        for j in cutlass.range_constexpr(2):
            c = start[j]
            for i in cutlass.range_constexpr(8):
                c = ptx.add(c, y[i, j])
                y[i, j] = c

    @cute.jit
    def scale_rows(self, c, smem, pair, token_half, scale):
        """Replace q^ by q_start and k^ by k_inv, write k_start; returns the words that k_end is made of: k_inv, or k^."""
        kept = cute.make_rmem_tensor((8,), Int32)
        rounded_scale = ptx.pack_bf16x2(scale, scale)
        for i in cutlass.range_constexpr(8):
            at = word_at(pair, token_half, i)
            shrink = self.factors(ptx.ex2(c[i, 0]), ptx.ex2(c[i, 1]))
            grow = self.factors(ptx.ex2(-c[i, 0]), ptx.ex2(-c[i, 1]))
            k_hat = ptx.lds_b32(smem + self.layout.k_tile + at)
            q_hat = ptx.lds_b32(smem + Q_START + at)
            k_inv = self.times(k_hat, grow)
            ptx.sts_b32(smem + K_START + at, self.times(k_hat, shrink))
            if const_expr(self.robust):
                ptx.sts_b32(smem + Q_START + at, self.times(q_hat, [ptx.mul(x, scale) for x in shrink]))
            else:
                ptx.sts_b32(smem + Q_START + at, self.times(self.times(q_hat, shrink), rounded_scale))
            ptx.sts_b32(smem + self.layout.k_tile + at, k_inv)
            kept[i] = k_hat if self.robust else k_inv
        return kept

    def factors(self, low, high):
        """What `times` multiplies by: FlashKDA rounds it."""
        return (low, high) if self.robust else ptx.pack_bf16x2(low, high)

    def times(self, word, factors):
        """A bf16 pair times `factors`, rounded; FlashKDA flushes denormals before."""
        return scaled(ptx.unpack_bf16x2(word), factors) if self.robust else ptx.mul_bf16x2_ftz(word, factors)

    @cute.jit
    def write_k_end(self, kept, c, smem, pair, token_half):
        """To be called after a barrier behind `write_rows`, with its result and its c."""
        if const_expr(self.robust):  # k_end = bf16(k^ * 2^(c_15 - c))
            total = ptx.lds_v2_f32(self.sum_at(smem, pair))
            for i in cutlass.range_constexpr(8):
                k = ptx.unpack_bf16x2(kept[i])
                rest = [k[j] * ptx.ex2(total[j] - c[i, j]) for j in range(2)]
                ptx.sts_b32(smem + K_END + word_at(pair, token_half, i), ptx.pack_bf16x2(rest[0], rest[1]))
        else:  # k_end = bf16(k_inv * bf16(decay))
            at = smem + decay_at(pair)
            decay = ptx.pack_bf16x2(ptx.lds_f32(at), ptx.lds_f32(at + DECAY_PAIR))
            for i in cutlass.range_constexpr(8):
                ptx.sts_b32(smem + K_END + word_at(pair, token_half, i), self.times(kept[i], decay))

    @cute.jit
    def multiply(self, rows, k_inv, lane):
        """rows . k_inv^T of two tiles by one warp: two m16n8 accumulators (keys 0 to 7, 8 to 15), k16 blocks ascending."""
        zero = Float32(0.0)
        c = [[zero] * 4, [zero] * 4]
        row_a = lane % 16
        row_b = lane % 8 + 8 * (lane // 16)
        for block in cutlass.range_constexpr(8):
            a = ptx.ldmatrix_x4(rows + row_a * ROW_BYTES + ((2 * block + lane // 16) ^ (row_a % 8)) * 16)
            b = ptx.ldmatrix_x4(k_inv + row_b * ROW_BYTES + ((2 * block + (lane // 8) % 2) ^ (row_b % 8)) * 16)
            c[0] = ptx.mma_bf16(a, (b[0], b[1]), c[0])
            c[1] = ptx.mma_bf16(a, (b[2], b[3]), c[1])
        return [list(c[0]), list(c[1])]

    @cute.jit
    def keys(self, smem, lane):
        """k_start . k_inv^T, whose strictly lower part times beta is L."""
        return self.multiply(smem + K_START, smem + self.layout.k_tile, lane)

    @cute.jit
    def write_scores(self, smem, lane, scale):
        """The record's scores, by one warp; robust: their diagonal from the table of q^ . k^."""
        c = self.multiply(smem + Q_START, smem + self.layout.k_tile, lane)
        if const_expr(self.robust):
            table = smem + self.layout.diagonal
            diagonal = [ptx.mul(ptx.lds_f32(table + (lane // 4 + 8 * r) * 4), scale) for r in range(2)]
        for tile in cutlass.range_constexpr(2):
            for e in cutlass.range_constexpr(4):
                i, j = lane // 4 + 8 * (e // 2), 8 * tile + 2 * (lane % 4) + e % 2
                c[tile][e] = c[tile][e] if i >= j else Float32(0.0)
                if const_expr(self.robust):
                    c[tile][e] = diagonal[e // 2] if i == j else c[tile][e]
        fragment = [ptx.pack_bf16x2(c[t][2 * r], c[t][2 * r + 1]) for t in range(2) for r in range(2)]
        ptx.sts_v4_b32(smem + SCORES + lane * 16, fragment)
