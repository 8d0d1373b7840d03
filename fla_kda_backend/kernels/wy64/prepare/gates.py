"""The log2 decays y of a chunk's tokens and their sums; the formulas stand in prepare_wy64.

Fragments and `smem`, `band`, `half` as in prepare_steps. A warp reads its 16 tokens x 64 channels of g as B operands:
the words of 8 channels are tokens 2 * quad, 2 * quad + 1 and those 8 further down, of channel `group`. The products
with constant 0/1 matrices that sum over tokens come out in the order of an accumulator.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.wy64.prepare.steps import BAND_SUM, BIAS, LOG2E, RATE, TILE_BYTES

# |y| < 8 of the bounded gate is summed in fp16 times 2^13: it fills the range, 2^-30 is still normal. Other gates: times
# 2^8, in two terms that saturate at -2^16 each, so that y >= -511 and what is less is a zero decay all the same.
GATE_ONE, GATE_UNIT = 8192.0, 0x0800  # 2^-13 in fp16
WIDE_ONE, WIDE_UNIT = 256.0, 0x1C00  # 2^-8 in fp16
# log2(1 + t) / t on [0, 1] within 1.4e-6 of itself in fp32; minimax
LOG2_1P = (1.44269321, -0.721159469, 0.477668338, -0.339088892, 0.215284317, -0.0957973665, 0.0204011293)


def _zero():
    return [Float32(0.0)] * 4


class Gates:
    """A kernel inherits it. gate, gate_dtype: its compile-time facts."""

    def gate_tables(self, rate, bias):
        """What `decay_sums` and `log_decays` find as RATE and BIAS, from exp(A_log) and dt_bias."""
        if self.gate == "bounded":
            rate = rate * Float32(-LOG2E)
            return rate, [b * rate for b in bias]
        return rate * Float32(-WIDE_ONE), [b * Float32(LOG2E) for b in bias]

    def gate_pairs(self, tile, band, half, lane):
        """The warp's g: a function from (kk, n, j) to a pair of tokens of channel 16 kk + 8 n + group."""
        group, quad = lane >> 2, lane & 3
        if self.gate_dtype == "bf16":
            at = tile + self.block_at(band, half, lane)
            words = {}

            def pair(kk, n, j):
                if kk not in words:
                    words[kk] = ptx.ldmatrix_x4_trans(at ^ (kk << 5))
                return ptx.unpack_bf16x2(words[kk][2 * n + j])

            return pair
        rows = tile + half * TILE_BYTES + band * 2048 + (group & 3) * 4
        at = [rows + (2 * quad + e) * 128 + (((group >> 2) ^ (2 * quad + e)) << 4) for e in range(2)]

        def pair(kk, n, j):
            part, place = kk >> 1, (2 * kk + n) & 3
            return [ptx.lds_f32((a ^ (place << 5)) + part * 8192 + j * 1024) for a in at]

        return pair

    def valid(self, rows_band, lane):
        """Masks of the words of tokens 2 * quad, + 1 and of those 8 further down: bits of tokens that exist."""
        column = 2 * (lane & 3)
        return [
            ptx.less_b32(column + 8 * j, rows_band, 0xFFFF, 0) | ptx.less_b32(column + 8 * j + 1, rows_band, -0x10000, 0)
            for j in range(2)
        ]

    def bias_of_channels(self, smem, half, lane):
        return [ptx.lds_f32(smem + BIAS + half * 256 + (8 * n + (lane >> 2)) * 4) for n in range(8)]

    # ---- bounded gate ----------------------------------------------------------------------------------------------
    def decay_sums(self, smem, tile, gate_scale, rows_band, band, half, lane):
        """l of the warp's rows as accumulators [8 tiles of 8 channels][4]. Rows past the end weigh 0 in the sum."""
        group, column = lane >> 2, 2 * (lane & 3)

        def ones(limit):  # a pair of columns of the triangle
            low = ptx.less_b32(column, limit, GATE_UNIT, 0)
            return low | ptx.less_b32(column + 1, limit, GATE_UNIT << 16, 0)

        def least(x, y):
            return ptx.less_b32(x, y, x, y)

        triangle = [ones(least(group + 1, rows_band)), ones(rows_band), Int32(0), ones(least(group + 1, rows_band - 8))]
        rate = ptx.lds_f32(smem + RATE)
        bias = self.bias_of_channels(smem, half, lane)
        over_scale = ptx.rcp(gate_scale * Float32(GATE_ONE))
        g = self.gate_pairs(tile, band, half, lane)
        valid = None if self.gate_dtype == "bf16" else self.valid(rows_band, lane)
        sums = []
        for kk in range(4):
            for n in range(2):
                words = []
                for j in range(2):
                    y = []
                    for x in g(kk, n, j):
                        e = ptx.ex2(ptx.fma(x, rate, bias[2 * kk + n]))
                        y.append(ptx.rcp(ptx.fma(e, over_scale, over_scale)))
                    word = ptx.pack_f16x2(*y)
                    words.append(word if valid is None else word & valid[j])
                sums.append(ptx.mma_f16(triangle, words, _zero()))
        return sums

    @cute.jit
    def store_band_sum(self, smem, sums, band, half, lane):
        """Row 15 of l is t[band]."""
        if lane >= 28:
            for n in cutlass.range_constexpr(8):
                where = smem + BAND_SUM + band * 512 + half * 256 + n * 32 + (lane & 3) * 8
                ptx.sts_v2_f32(where, sums[n][2], sums[n][3])

    # ---- unbounded gates, or keys that are not normalised ----------------------------------------------------------
    def log_decays(self, smem, tile, gate_scale, rows_band, band, half, lane):
        """y of the warp's rows in fp16, times 2^8: [8 tiles of 8 channels][8 tokens] (leading part, rest)."""
        g = self.gate_pairs(tile, band, half, lane)
        valid = self.valid(rows_band, lane)
        if self.gate != "given":
            rate = ptx.lds_f32(smem + RATE)
            bias = self.bias_of_channels(smem, half, lane)
        if self.gate == "bounded":
            over_scale = ptx.rcp(gate_scale * Float32(WIDE_ONE))
        words = []
        for n in range(8):
            tile_words = []
            for j in range(2):
                x = g(n >> 1, n & 1, j)
                if self.gate == "softplus":
                    y = [self.softplus(ptx.fma(v, LOG2E, bias[n])) * rate for v in x]
                elif self.gate == "bounded":
                    e = [ptx.ex2(ptx.fma(v, rate, bias[n])) for v in x]
                    y = [ptx.rcp(ptx.fma(v, over_scale, over_scale)) for v in e]
                else:
                    y = [v * Float32(LOG2E * WIDE_ONE) for v in x]
                tile_words.append([part & valid[j] for part in ptx.split_f16x2_saturated(*y)])
            words.append(tile_words)
        return words

    def softplus(self, x):
        """log2(1 + 2^x), relative error 2e-6: max(x, 0) + log2(1 + t), t = 2^-|x|."""
        t = ptx.ex2_negative(x)
        ratio = Float32(LOG2_1P[-1])
        for c in LOG2_1P[-2::-1]:
            ratio = ptx.fma(ratio, t, c)
        return ptx.fma(t, ratio, ptx.maximum(x, 0.0))

    @cute.jit
    def store_band_sum_of(self, smem, y, band, half, lane):
        """t[band]: every row of a product with ones."""
        ones = [Int32(WIDE_UNIT * 0x10001)] * 4
        for n in cutlass.range_constexpr(8):
            t = ptx.mma_f16(ones, y[n][1], ptx.mma_f16(ones, y[n][0], _zero()))
            if lane < 4:
                ptx.sts_v2_f32(smem + BAND_SUM + band * 512 + half * 256 + n * 32 + lane * 8, t[0], t[1])

    def level_matrices(self, lane):
        """Words of 8x8 matrices that sum y over tokens (columns) of the same half of 16 tokens: for row i those up to and
        with i; those behind i; and for blocks of 4, 2 and 1 tokens those of i's own block up to i where the block is the
        upper one of its pair, behind i where it is the lower."""
        group, column = lane >> 2, 2 * (lane & 3)
        unit = WIDE_UNIT
        upto = ptx.less_b32(column, group + 1, unit, 0) | ptx.less_b32(column + 1, group + 1, unit << 16, 0)
        behind = upto ^ Int32(unit * 0x10001)
        out = [upto, behind]
        for size in (4, 2):
            own = ptx.less_b32(group ^ column, size, -1, 0)
            out.append(own & ptx.less_b32(0, group & size, upto, behind))
        odd = ptx.less_b32(group ^ column, 2, unit << 16, 0)
        out.append(ptx.less_b32(0, group & 1, odd, 0))
        return out
