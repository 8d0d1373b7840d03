"""Images, and diagonal blocks of A and M, for gates without a bound and for keys of any norm: level by level.

A block of 16 tokens is halved down to single ones. Rows of the upper and columns of the lower half of a pair of blocks of
L tokens meet at the boundary between the two: level L, L = 8, 4, 2, 1. Levels 4 to 1 lie inside the two blocks of 8
tokens on the diagonal ("near" below). Their products are formed for all rows and columns of such a block, with 8 rows of q
above 8 rows of k, and what belongs to another level is thrown away at the end.

Where q and k are not normalised, operands carry powers of two (operands.py) and the chain multiplies by `scale`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.wy64.prepare.fragments import round_to_bf16, zeros4
from fla_kda_backend.kernels.wy64.prepare.images import norm_factors, squares_table
from fla_kda_backend.kernels.wy64.prepare.memory import BAND_BYTES, SQUARES_BYTES, TILE_BYTES, Table, Tensor


def _times(x, factors):
    """Pairs of values times pairs of factors."""
    return [[v * f for v, f in zip(*both)] for both in zip(x, factors)]


def _rows(low, high):
    """Words of rows 0 to 7 and of rows 8 to 15 in the order of an A fragment."""
    return [low[0], high[0], low[1], high[1]]


def _exp2(c):
    return [ptx.ex2(x) for x in c]


def _product_of_rows(q, k, columns, c, product):
    """c + 8 rows of q above 8 rows of k times 8 columns, all as words of 8 channels."""
    for *rows, column in zip(q, k, columns):
        c = product(rows, column, c)
    return c


def _sums(above, below, words):
    """Two 8x8 matrices, one above the other, times lead and rest of 8 tokens. As two products: fewer registers."""
    return ptx.mma_f16_k8((above, below), words[1], ptx.mma_f16_k8((above, below), words[0], zeros4()))


class Levels:
    """The three steps of `Images`, level by level."""

    def __init__(self, decays, operands, teams):
        self.decays, self.operands, self.teams = decays, operands, teams

    def sum_decays(self, base, g_tile, gate_scale, rows_band, coord):
        """Step 1: y of the warp's tokens, in registers; t of its band, in a table."""
        y = self.decays.terms(base, g_tile, gate_scale, rows_band, coord)
        self.decays.store_band_sum_of_terms(base, y, coord)
        return y

    # ---- step 2
    def sum_squares(self, base, q_tile, k_tile, _, y, coord):
        """Step 2: half sums of squares of the warp's rows (or their powers of two), and half sums of the diagonal blocks of A
        and of M inside 8 tokens, from q and k as they are (times powers of two). Above the diagonal, and on M's, these sums
        are anything."""
        operands, half = self.operands, coord.half
        group, column = coord.group, 2 * coord.quad
        _, _, fours, twos, single = self.decays.level_matrices(coord)
        row8 = coord.lane & 7
        # 8 rows of q, of k, and both 8 channels further on
        at = ptx.less_b32(0, coord.lane & 8, k_tile, q_tile) + half * (TILE_BYTES // 2)
        at += (16 * coord.band + row8) * 128 + (((coord.lane >> 4) ^ row8) << 4)
        for r in range(2):
            if operands.has_powers:
                inverses = operands.find_powers(base, at + r * 1024, 16 * coord.band + 8 * r + group, half)
            squares, diagonal, ones, pairs, quads = (zeros4() for _ in range(5))
            for kk in range(4):
                words = ptx.ldmatrix_x4((at ^ (kk << 5)) + r * 1024)
                if operands.has_powers:
                    words = operands.times_powers(words, inverses)
                q, k = words[::2], words[1::2]
                if not operands.has_powers:
                    squares = _product_of_rows(q, k, q, squares, ptx.mma_bf16_k8)
                diagonal = _product_of_rows(q, k, k, diagonal, ptx.mma_bf16_k8)
                q, k = ([ptx.unpack_bf16x2(w) for w in words] for words in (q, k))
                words = [y[2 * kk + n][r] for n in range(2)]
                near = [_exp2(ptx.mma_f16([single] * 4, w, zeros4())[:2]) for w in words]
                both = [_exp2(ptx.mma_f16((fours, twos) * 2, w, zeros4())) for w in words]
                ones, pairs, quads = (
                    self._near_products(q, k, factors, c)
                    for factors, c in ((near, ones), ([c[2:] for c in both], pairs), ([c[:2] for c in both], quads))
                )
                ptx.force_compute(q_tile, ones)
            self._store_squares(base, squares, diagonal, r, coord)
            c = [ptx.less_f32(group ^ (column + e), 1, diagonal[e], ones[e]) for e in range(2)]
            c = [ptx.less_f32(group ^ column, 2, *x) for x in zip((*c, *ones[2:]), pairs)]
            c = [ptx.less_f32(group ^ column, 4, *x) for x in zip(c, quads)]
            ptx.sts_v4_f32(self._near_sums(base, coord) + 512 * r, c)  # two columns of A, of M

    def _near_products(self, q, k, factors, c):
        """c + rows of q and of k times columns of k, all with the factors of one level."""
        q, k = (self.operands.pack(_times(x, factors)) for x in (q, k))
        return _product_of_rows(q, k, k, c, self.operands.product_k8)

    @cute.jit
    def _store_squares(self, base, squares, products, r: cutlass.Constexpr, coord):
        """The diagonals of q q^T and of k k^T."""
        if cutlass.const_expr(not self.operands.has_powers):
            group, odd = coord.group, coord.group & 1
            if coord.quad == group >> 1:
                where = squares_table(base, Tensor.Q) + (16 * coord.band + 8 * r + group) * 8 + coord.half * 4
                ptx.sts_f32(where, ptx.less_f32(0, odd, squares[1], squares[0]))
                ptx.sts_f32(where + SQUARES_BYTES, ptx.less_f32(0, odd, products[3], products[2]))

    def _near_sums(self, base, coord):
        """Where step 2 leaves its sums: in DIAGONAL and behind SQUARES, which nobody else uses until the images are done."""
        half_1 = Table.SQUARES + 2 * SQUARES_BYTES - Table.DIAGONAL
        return base + Table.DIAGONAL + coord.half * half_1 + coord.band * (1024 * (2 - coord.half)) + coord.lane * 16

    # ---- step 3
    def write(self, memory, at, y, scale, coord):
        """Step 3: as `Images.write`."""
        base, operands = memory.base, self.operands
        if not operands.has_powers:
            norms = [[x * scale for x in norm_factors(base, coord.band, coord.group, Tensor.Q)],
                     norm_factors(base, coord.band, coord.group, Tensor.K)]  # fmt: skip
        powers = None
        upto, behind, *_ = self.decays.level_matrices(coord)
        level8 = zeros4()
        q_band, k_band = [], []
        table_at = base + coord.band * BAND_BYTES + coord.half * 256 + coord.quad * 8
        next_at = base + Table.K_NEXT + coord.band * 4096 + coord.half * 2048 + coord.lane * 16
        for kk in range(4):  # kept where the warp's images of the same channels will stand
            words = [w for tile in y[2 * kk : 2 * kk + 2] for pair in tile for w in pair]
            ptx.sts_v4_b32(at[0] ^ (kk << 5), words[:4])
            ptx.sts_v4_b32(next_at + kk * 512, words[4:])
        for kk in range(4):
            g_at, q_at, k_at = (x ^ (kk << 5) for x in at)
            y = [[words[:2], words[2:]] for words in (ptx.lds_v4_b32(g_at), ptx.lds_v4_b32(next_at + kk * 512))]
            q_words, k_words = ptx.ldmatrix_x4(q_at), ptx.ldmatrix_x4(k_at)
            if operands.has_powers:
                powers = operands.powers_of_rows(base, coord.band, coord.half, coord.lane)  # read again: fewer registers
                inverses = zip(*(operands.twice(operands.inverse(w)) for w in powers))
                q, k = ([ptx.unpack_bf16x2(w) for w in operands.times_powers(*x)] for x in zip((q_words, k_words), inverses))
            else:
                q, k = (
                    [[v * norm[w & 1] for v in ptx.unpack_bf16x2(words[w])] for w in range(4)]
                    for words, norm in zip((q_words, k_words), norms)
                )
            # factors of two channels: of rows 0 to 7 up to and behind the row, of rows 8 to 15 the same; then of all 8 rows
            (a, b, upper), (c, d, lower) = (
                zip(*((x[:2], x[2:], [x[e] * x[2 + e] for e in range(2)]) for x in factors))
                for factors in zip(*([_exp2(_sums(upto, behind, words)) for words in tile] for tile in y))
            )
            q_low, q_high, k_low, k_high = (_times(x[r::2], f) for x, r, f in ((q, 0, a), (q, 1, c), (k, 0, b), (k, 1, c)))
            q8, k8 = operands.pack(q_high), operands.pack(k_high)
            level8 = operands.product((q8[0], k8[0], q8[1], k8[1]), operands.pack(k_low), level8)
            if operands.has_powers:
                k_next = _rows(_times(k_low, lower), _times(k[1::2], d))
            else:
                low, high = ([round_to_bf16(pair) for pair in k[r::2]] for r in range(2))
                k_next = _rows(_times(_times(low, b), lower), _times(high, d))
            k = _rows(_times(k[::2], a), _times(k_high, upper))
            q = _rows(q_low, _times(q_high, upper))
            columns = [table_at + kk * 64 + t * 32 for t in range(2)]
            start, end = ([f for c in columns for f in [ptx.lds_v2_f32(c + t)] * 2] for t in (Table.FROM_START, Table.TO_END))
            ptx.sts_v4_b32(next_at + kk * 512, operands.pack(k_next))
            ptx.stmatrix_x4(k_at, self._image(Tensor.K, _times(k_next, end), powers))
            k_band.append(operands.pack(k))
            ptx.stmatrix_x4(g_at, self._image(Tensor.K, [[-x for x in pair] for pair in _times(k, start)], powers))
            q_band.append(operands.pack(q))
            if operands.has_powers:
                ptx.force_compute(next_at, [ptx.as_f32(w) for w in q_band[kk]])
            ptx.stmatrix_x4(q_at, self._image(Tensor.Q, _times(q, start), powers))
            ptx.force_compute(next_at, level8)
        near, level8 = self._finish_sums(memory, level8, scale, coord)
        a, m = ([[*near[0][x], *level8[2 * x : 2 * x + 2]], [Float32(0.0)] * 2 + near[1][x]] for x in range(2))
        return q_band, k_band, a, m

    def _image(self, tensor, pairs, powers):
        """bf16 words of rows of q or k, free of the powers of two."""
        words = [ptx.pack_bf16x2(*pair) for pair in pairs]
        if self.operands.has_powers:
            return self.operands.times_powers(words, [self.operands.twice(w)[0 if tensor == Tensor.Q else 1] for w in powers])
        return words

    def _finish_sums(self, memory, level8, scale, coord):
        """Sums of step 2 times the factors of their rows and columns, [8 tokens][A, M][two columns], and the sums of level 8,
        likewise where these factors are not in the operands."""
        base, operands = memory.base, self.operands
        coord = self.teams.coord(memory, coord.n)
        band, half, lane = coord.band, coord.half, coord.lane
        near = [ptx.lds_v4_f32(self._near_sums(base, coord) + 512 * r) for r in range(2)]
        near = [[c[:2], c[2:]] for c in near]
        if operands.has_powers:
            columns = list(zip(*operands.powers_of_columns(base, band, half, lane)))
            rows = list(operands.powers_of_q_and_k(base, band, half, lane))
        else:
            columns = [norm_factors(base, band, 2 * coord.quad + e, Tensor.K) for e in range(2)]
            rows = [norm_factors(base, band, coord.group, tensor) for tensor in (Tensor.Q, Tensor.K)]
            rows[0] = [scale * x for x in rows[0]]
        near = [[[x * rows[t][r] * columns[e][r] for e, x in enumerate(near[r][t])] for t in range(2)] for r in range(2)]
        if operands.has_powers:
            level8 = [x * rows[i >> 1][1] * columns[i & 1][0] for i, x in enumerate(level8)]
        return near, level8
