"""The images and the diagonal blocks of A and M by levels; the formulas stand in prepare_wy64.

A block of 16 tokens is halved down to single ones. Rows of the upper and columns of the lower half of a pair of blocks of
L tokens meet at the boundary between the two: level L, L = 8, 4, 2, 1. Levels 4 to 1 lie inside the two blocks of 8
tokens on the diagonal. Their products are formed for all rows and columns of such a block, with 8 rows of q above 8 of k,
and what belongs to another level is thrown away at the end.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.wy64.prepare.steps import (
    DIAGONAL,
    FROM_START,
    K_NEXT,
    SQUARES,
    TILE_BYTES,
    TO_END,
)


def _zero():
    return [Float32(0.0)] * 4


def _times(x, factors):
    """Pairs of values times pairs of factors."""
    return [[v * f for v, f in zip(*both)] for both in zip(x, factors)]


def _rows(low, high):
    """Words of rows 0 to 7 and of rows 8 to 15 in the order of an A fragment."""
    return [low[0], high[0], low[1], high[1]]


def _two_to(c):
    return [ptx.ex2(x) for x in c]


class Levels:
    """A kernel inherits it. l2norm: its compile-time fact."""

    def near_levels(self, smem, q_tile, k_tile, y, band, half, lane):
        """Leave sums of squares of the warp's rows (or their powers of two, see operands.py), and half sums of the diagonal
        blocks of A and of M inside 8 tokens, from q and k as they are (times powers of two). Above the diagonal, and on
        that of M, they are anything."""
        group, column = lane >> 2, 2 * (lane & 3)
        _, _, fours, twos, single = self.level_matrices(lane)
        row8 = lane & 7
        # 8 rows of q, of k, and both 8 channels further on
        at = ptx.less_b32(0, lane & 8, k_tile, q_tile) + half * (TILE_BYTES // 2)
        at += (16 * band + row8) * 128 + (((lane >> 4) ^ row8) << 4)
        for r in range(2):
            if not self.l2norm:
                inverses = self.find_powers(smem, at + r * 1024, 16 * band + 8 * r + group, half)
            squares, diagonal, ones, pairs, quads = (_zero() for _ in range(5))
            for kk in range(4):
                words = ptx.ldmatrix_x4((at ^ (kk << 5)) + r * 1024)
                if not self.l2norm:
                    words = self.scaled(words, inverses)
                q, k = words[::2], words[1::2]
                if self.l2norm:
                    squares = self.meet(q, k, q, squares, ptx.mma_bf16_k8)
                diagonal = self.meet(q, k, k, diagonal, ptx.mma_bf16_k8)
                q, k = ([ptx.unpack_bf16x2(w) for w in words] for words in (q, k))
                words = [y[2 * kk + n][r] for n in range(2)]
                near = [_two_to(ptx.mma_f16([single] * 4, w, _zero())[:2]) for w in words]
                both = [_two_to(ptx.mma_f16((fours, twos) * 2, w, _zero())) for w in words]
                ones, pairs, quads = (
                    self.meet(*(self.pack(_times(x, f)) for x in (q, k)), None, c, self.product_k8)
                    for f, c in ((near, ones), ([c[2:] for c in both], pairs), ([c[:2] for c in both], quads))
                )
                ptx.force_compute(q_tile, ones)
            self.store_squares(smem, squares, diagonal, r, band, half, lane)
            c = [ptx.less_f32(group ^ (column + e), 1, diagonal[e], ones[e]) for e in range(2)]
            c = [ptx.less_f32(group ^ column, 2, *x) for x in zip((*c, *ones[2:]), pairs)]
            c = [ptx.less_f32(group ^ column, 4, *x) for x in zip(c, quads)]
            ptx.sts_v4_f32(self.near_sums(smem, band, half, lane) + 512 * r, c)  # two columns of A, of M

    def meet(self, q, k, columns, c, product):
        """c + 8 rows of q above 8 rows of k times 8 columns (None: of k), all as words of 8 channels."""
        for *rows, column in zip(q, k, k if columns is None else columns):
            c = product(rows, column, c)
        return c

    @cute.jit
    def store_squares(self, smem, squares, products, r: cutlass.Constexpr, band, half, lane):
        """The diagonals of q q^T and of k k^T."""
        if cutlass.const_expr(self.l2norm):
            group, odd = lane >> 2, (lane >> 2) & 1
            if (lane & 3) == group >> 1:
                where = smem + SQUARES + (16 * band + 8 * r + group) * 8 + half * 4
                ptx.sts_f32(where, ptx.less_f32(0, odd, squares[1], squares[0]))
                ptx.sts_f32(where + 512, ptx.less_f32(0, odd, products[3], products[2]))

    def near_sums(self, smem, band, half, lane):
        """Where `near_levels` leaves its sums: until the images are done nobody else uses the place."""
        return smem + DIAGONAL + half * (SQUARES + 1024 - DIAGONAL) + band * (1024 * (2 - half)) + lane * 16

    def level_images(self, p, n, at, y, norms, scale, band, half, lane):
        """As PrepareSteps.images, from the words of `Gates.log_decays` and the sums of `near_levels`. norms: None where q and
        k are not normalised; powers of two are then in the operands, and the chain multiplies by `scale`."""
        smem, powers = p.smem, None
        upto, behind, *_ = self.level_matrices(lane)
        level8 = _zero()
        q_band, k_band = [], []
        table_at = smem + band * 512 + half * 256 + (lane & 3) * 8
        next_at = smem + K_NEXT + band * 4096 + half * 2048 + lane * 16
        for kk in range(4):  # kept where the warp's images of the same channels will stand
            words = [w for tile in y[2 * kk : 2 * kk + 2] for pair in tile for w in pair]
            ptx.sts_v4_b32(at[0] ^ (kk << 5), words[:4])
            ptx.sts_v4_b32(next_at + kk * 512, words[4:])
        for kk in range(4):
            g_at, q_at, k_at = (x ^ (kk << 5) for x in at)
            y = [[words[:2], words[2:]] for words in (ptx.lds_v4_b32(g_at), ptx.lds_v4_b32(next_at + kk * 512))]
            q_words, k_words = ptx.ldmatrix_x4(q_at), ptx.ldmatrix_x4(k_at)
            if self.l2norm:
                q, k = (
                    [[v * norm[w & 1] for v in ptx.unpack_bf16x2(words[w])] for w in range(4)]
                    for words, norm in zip((q_words, k_words), norms)
                )
            else:
                powers = self.powers_of_rows(smem, band, half, lane)  # read anew: fewer registers
                inverses = zip(*(self.twice(self.inverse(w)) for w in powers))
                q, k = ([ptx.unpack_bf16x2(w) for w in self.scaled(*x)] for x in zip((q_words, k_words), inverses))
            # factors of two channels: of rows 0 to 7 up to and behind the row, of rows 8 to 15 the same; then of all 8 rows
            (a, b, upper), (c, d, lower) = (
                zip(*((x[:2], x[2:], [x[e] * x[2 + e] for e in range(2)]) for x in factors))
                for factors in zip(*([_two_to(self.sums(upto, behind, words)) for words in tile] for tile in y))
            )
            q_low, q_high, k_low, k_high = (_times(x[r::2], f) for x, r, f in ((q, 0, a), (q, 1, c), (k, 0, b), (k, 1, c)))
            q8, k8 = self.pack(q_high), self.pack(k_high)
            level8 = self.product((q8[0], k8[0], q8[1], k8[1]), self.pack(k_low), level8)
            if self.l2norm:
                low, high = ([self.rounded(pair) for pair in k[r::2]] for r in range(2))
                k_next = _rows(_times(_times(low, b), lower), _times(high, d))
            else:
                k_next = _rows(_times(k_low, lower), _times(k[1::2], d))
            k = _rows(_times(k[::2], a), _times(k_high, upper))
            q = _rows(q_low, _times(q_high, upper))
            columns = [table_at + kk * 64 + t * 32 for t in range(2)]
            start, end = ([f for c in columns for f in [ptx.lds_v2_f32(c + t)] * 2] for t in (FROM_START, TO_END))
            ptx.sts_v4_b32(next_at + kk * 512, self.pack(k_next))
            ptx.stmatrix_x4(k_at, self.image(_times(k_next, end), powers, 1))
            k_band.append(self.pack(k))
            ptx.stmatrix_x4(g_at, self.image([[-x for x in pair] for pair in _times(k, start)], powers, 1))
            q_band.append(self.pack(q))
            if not self.l2norm:
                ptx.force_compute(next_at, [ptx.as_f32(w) for w in q_band[kk]])
            ptx.stmatrix_x4(q_at, self.image(_times(q, start), powers, 0))
            ptx.force_compute(next_at, level8)
        near, level8 = self.finished(p, level8, n, scale)
        a, m = ([[*near[0][x], *level8[2 * x : 2 * x + 2]], [Float32(0.0)] * 2 + near[1][x]] for x in range(2))
        return q_band, k_band, a, m

    def sums(self, above, below, words):
        """Two 8x8 matrices, one above the other, times lead and rest of 8 tokens. As two products: fewer registers."""
        return ptx.mma_f16_k8((above, below), words[1], ptx.mma_f16_k8((above, below), words[0], _zero()))

    def image(self, pairs, powers, which):
        """bf16 words of rows of q (0) or k (1), free of the powers of two."""
        words = [ptx.pack_bf16x2(*pair) for pair in pairs]
        if self.l2norm:
            return words
        return self.scaled(words, [self.twice(w)[which] for w in powers])

    def finished(self, p, level8, n, scale):
        """Sums of `near_levels` times the factors of their rows and columns: [8 tokens][A, M][two columns]; and those of
        level 8, where these factors are not in the operands."""
        smem = p.smem
        _, _, band, half, lane = self.place(p, n)
        near = [ptx.lds_v4_f32(self.near_sums(smem, band, half, lane) + 512 * r) for r in range(2)]
        near = [[c[:2], c[2:]] for c in near]
        if self.l2norm:
            columns = [self.norms(smem, band, 2 * (lane & 3) + e, 512) for e in range(2)]
            rows = [self.norms(smem, band, lane >> 2, table) for table in (0, 512)]
            rows[0] = [scale * x for x in rows[0]]
        else:
            columns = list(zip(*self.powers_of_columns(smem, band, half, lane)))
            rows = list(zip(*map(ptx.unpack_bf16x2, self.powers_of_rows(smem, band, half, lane))))
        near = [[[x * rows[t][r] * columns[e][r] for e, x in enumerate(near[r][t])] for t in range(2)] for r in range(2)]
        if not self.l2norm:
            level8 = [x * rows[i >> 1][1] * columns[i & 1][0] for i, x in enumerate(level8)]
        return near, level8
