"""The log2 decays y of a chunk's tokens and their sums over tokens, on the tensor cores; the formulas stand in kernel.py.

A warp reads its 16 tokens x 64 channels of g as B operands: the words of 8 channels are tokens 2 * quad and 2 * quad + 1, and
those 8 tokens further down, of channel `group`. The products with constant 0/1 matrices, which sum over tokens, come out in
the order of an accumulator.

y goes into these products as fp16 times a power of two, in one of two arithmetics:

    one term    where |y| < 8: times 2^13. This fills the range of fp16, and 2^-30 is still normal.
    two terms   otherwise: times 2^8, a leading part and a rest. Each saturates at -2^16, so y >= -511; what is less is a decay
                of zero all the same.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.wy64.prepare.fragments import zeros4
from fla_kda_backend.kernels.wy64.prepare.gates import GATES
from fla_kda_backend.kernels.wy64.prepare.memory import BAND_BYTES, TILE_BYTES, Table
from fla_kda_backend.kernels.wy64.prepare.tiles import block_offset, zero_past_end
from fla_kda_backend.kernels.wy64.record import BANDS, DECAY_AT

ONE_TERM, ONE_TERM_INVERSE = 8192.0, 0x0800  # 2^13, and 2^-13 in fp16
TWO_TERMS, TWO_TERMS_INVERSE = 256.0, 0x1C00  # 2^8, and 2^-8 in fp16


class Decays:
    """y of a warp's tokens, their sums, and the decays that join bands."""

    def __init__(self, variant):
        self.two_terms, self.wide_gate = variant.needs_levels, variant.gate_dtype == "fp32"
        self.gate = GATES[variant.gate](TWO_TERMS if self.two_terms else ONE_TERM)

    # ---- y
    def g_pairs(self, tile, coord):
        """The warp's g: a function from (kk, n, j) to a pair of tokens of channel 16 kk + 8 n + group."""
        if not self.wide_gate:
            at = tile + block_offset(coord.band, coord.half, coord.lane)
            words = {}

            def pair(kk, n, j):
                if kk not in words:
                    words[kk] = ptx.ldmatrix_x4_trans(at ^ (kk << 5))
                return ptx.unpack_bf16x2(words[kk][2 * n + j])

            return pair
        group, quad = coord.group, coord.quad
        rows = tile + coord.half * TILE_BYTES + coord.band * 2048 + (group & 3) * 4
        at = [rows + (2 * quad + e) * 128 + (((group >> 2) ^ (2 * quad + e)) << 4) for e in range(2)]

        def pair(kk, n, j):
            part, piece = kk >> 1, (2 * kk + n) & 3
            return [ptx.lds_f32((a ^ (piece << 5)) + part * 8192 + j * 1024) for a in at]

        return pair

    def masks(self, rows_band, coord):
        """Bits of the tokens that exist, in the words of tokens 2 * quad, + 1 and in those of the tokens 8 further down."""
        column = 2 * coord.quad
        return [
            ptx.less_b32(column + 8 * j, rows_band, 0xFFFF, 0) | ptx.less_b32(column + 8 * j + 1, rows_band, -0x10000, 0)
            for j in range(2)
        ]

    def parameters(self, base, coord):
        """rate, and bias of the lane's channels, as `Loads.load_tables` left them."""
        if not self.gate.has_tables:
            return None, [None] * 8
        bias_at = base + Table.BIAS + coord.half * 256
        return ptx.lds_f32(base + Table.RATE), [ptx.lds_f32(bias_at + (8 * n + coord.group) * 4) for n in range(8)]

    # ---- one term
    def running_sums(self, base, tile, gate_scale, rows_band, coord):
        """l of the warp's rows as accumulators [8 tiles of 8 channels][4]. Rows past the end weigh 0 in the sum."""
        if not self.wide_gate:
            zero_past_end(tile, rows_band, coord)
        (gate_scale,) = ptx.pin([gate_scale])
        group, column = coord.group, 2 * coord.quad

        def ones(limit):  # a pair of columns of the triangle
            low = ptx.less_b32(column, limit, ONE_TERM_INVERSE, 0)
            return low | ptx.less_b32(column + 1, limit, ONE_TERM_INVERSE << 16, 0)

        def least(x, y):
            return ptx.less_b32(x, y, x, y)

        triangle = [ones(least(group + 1, rows_band)), ones(rows_band), Int32(0), ones(least(group + 1, rows_band - 8))]
        rate, bias = self.parameters(base, coord)
        constant = self.gate.constant(gate_scale)
        g = self.g_pairs(tile, coord)
        masks = self.masks(rows_band, coord) if self.wide_gate else None
        sums = []
        for kk in range(4):
            for n in range(2):
                words = []
                for j in range(2):
                    y = self.gate.log2_decay(g(kk, n, j), rate, bias[2 * kk + n], constant)
                    word = ptx.pack_f16x2(*y)
                    words.append(word & masks[j] if self.wide_gate else word)
                sums.append(ptx.mma_f16(triangle, words, zeros4()))
        return sums

    @cute.jit
    def store_band_sum(self, base, sums, coord):
        """t[b] of the warp's band b: row 15 of l."""
        if coord.lane >= 28:
            for n in cutlass.range_constexpr(8):
                where = base + Table.BAND_SUM + coord.band * BAND_BYTES + coord.half * 256 + n * 32 + coord.quad * 8
                ptx.sts_v2_f32(where, sums[n][2], sums[n][3])

    # ---- two terms
    def terms(self, base, tile, gate_scale, rows_band, coord):
        """y of the warp's rows in fp16, times 2^8: [8 tiles of 8 channels][8 tokens] (leading part, rest)."""
        g = self.g_pairs(tile, coord)
        masks = self.masks(rows_band, coord)
        rate, bias = self.parameters(base, coord)
        constant = self.gate.constant(gate_scale)
        words = []
        for n in range(8):
            tile_words = []
            for j in range(2):
                y = self.gate.log2_decay(g(n >> 1, n & 1, j), rate, bias[n], constant)
                tile_words.append([part & masks[j] for part in ptx.split_f16x2_saturated(*y)])
            words.append(tile_words)
        return words

    @cute.jit
    def store_band_sum_of_terms(self, base, y, coord):
        """t[b] of the warp's band b: every row of a product with ones."""
        ones = [Int32(TWO_TERMS_INVERSE * 0x10001)] * 4
        for n in cutlass.range_constexpr(8):
            t = ptx.mma_f16(ones, y[n][1], ptx.mma_f16(ones, y[n][0], zeros4()))
            if coord.lane < 4:
                where = base + Table.BAND_SUM + coord.band * BAND_BYTES + coord.half * 256 + n * 32 + coord.lane * 8
                ptx.sts_v2_f32(where, t[0], t[1])

    def level_matrices(self, coord):
        """Words of five 8x8 matrices that sum terms of y over tokens (columns) of the same 8 tokens. Row i has the tokens up to
        and with i; those behind i; and, for blocks of 4, 2 and 1 tokens, those of i's own block: up to i where the block is
        the upper one of its pair, behind i where it is the lower one."""
        group, column = coord.group, 2 * coord.quad
        unit = TWO_TERMS_INVERSE
        upto = ptx.less_b32(column, group + 1, unit, 0) | ptx.less_b32(column + 1, group + 1, unit << 16, 0)
        behind = upto ^ Int32(unit * 0x10001)
        out = [upto, behind]
        for size in (4, 2):
            own = ptx.less_b32(group ^ column, size, -1, 0)
            out.append(own & ptx.less_b32(0, group & size, upto, behind))
        odd = ptx.less_b32(group ^ column, 2, unit << 16, 0)
        out.append(ptx.less_b32(0, group & 1, odd, 0))
        return out

    # ---- from band to band
    @cute.jit
    def write_band_tables(self, base, record, coord):
        """The decays that join the warp's band to the others, two channels per lane, and the chunk's decay d, in the record."""
        band, half, lane = coord.band, coord.half, coord.lane
        where = base + half * 256 + lane * 8
        t = [ptx.lds_v2_f32(where + Table.BAND_SUM + BAND_BYTES * b) for b in range(BANDS)]
        own, before, after = [], [], []
        for e in cutlass.range_constexpr(2):
            x = [t[b][e] for b in range(BANDS)]
            before.append(sum((ptx.less_f32(b, band, x[b], 0.0) for b in (1, 2)), ptx.less_f32(0, band, x[0], 0.0)))
            after.append(sum((ptx.less_f32(band, b, x[b], 0.0) for b in (2, 3)), ptx.less_f32(band, 1, x[1], 0.0)))
            own.append(ptx.less_f32(band, 2, ptx.less_f32(band, 1, x[0], x[1]), ptx.less_f32(band, 3, x[2], x[3])))
        mine = where + band * BAND_BYTES
        for table, sums in zip((Table.FROM_START, Table.BAND, Table.TO_END), (before, own, after)):
            ptx.sts_v2_f32(mine + table, ptx.ex2(sums[0]), ptx.ex2(sums[1]))
        if band == 1:
            channel = 64 * half + 2 * lane
            position = (channel & ~15) + ((channel & 7) >> 1) * 4 + ((channel >> 3) & 1) * 2
            d = [ptx.ex2(before[e] + own[e] + after[e]) for e in range(2)]
            ptx.stg_v2_f32(record + Int64(DECAY_AT + position * 4), *d)
        if band == 2:
            ptx.sts_v2_f32(where + Table.MIDDLE, *[ptx.ex2(t[1][e] + t[2][e]) for e in range(2)])
