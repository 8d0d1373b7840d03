"""Products of keys and queries with decays between them, level by level, for any decay: no exponent is ever positive.

With y the log2 of a token's decay in a channel, the 16-token prepare kernel needs, for tokens i > j of a chunk,

    sum over channels of q^_i k^_j 2^(y_(j+1) + .. + y_i), and the same with k^_i.

Let l be the highest bit in which i and j differ. At level l, blocks of 2^(l+1) tokens are cut in the middle; i lies in the
upper and j in the lower half of the same block. So the exponent splits at the cut m, the first token of the upper half:

    2^(y_m + .. + y_i) * 2^(y_(j+1) + .. + y_(m-1))

One factor goes to the row of i, one to the row of j, and both are at most 1. Each level is one product of a matrix of 8 keys
and 8 queries of upper tokens with 8 keys of lower tokens; one warp computes one level. i = j has no decay. Each sum runs over
its own tokens: nothing cancels, and an entry depends on no token after i.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.column_split.layout import LEVEL_BYTES, LEVELS, LOWER, word_at
from fla_kda_backend.kernels.column_split.products import scaled, write_decay
from fla_kda_backend.kernels.column_split.record import BETA, CHUNK, K_END, K_START, Q_START, ROW_BYTES, SCORES

# A level's operands: at UPPER 16 rows, keys (0 to 7) and queries (8 to 15) of its upper tokens in their order, at LOWER 8
# rows, keys of its lower tokens.
UPPER = 0
QUERIES = CHUNK // 2 * ROW_BYTES  # from a row of keys to the same token's row of queries


def rank(token, level):
    """Number of a token among the upper or the lower ones of a level: the token without bit `level`."""
    return ((token >> (level + 1)) << level) | (token & ((1 << level) - 1))


def token_of(rank, level, upper):
    """The upper or lower token of that rank; level may be a run-time value."""
    return ((rank >> level) << (level + 1)) | (upper << level) | (rank & ((1 << level) - 1))


class Levels:
    """layout: a Layout of a variant that needs levels."""

    def __init__(self, layout):
        self.layout = layout

    def inner_sums(self, y, j):
        """(prefix, suffix, between) of channel j of a thread's 8 tokens.

        prefix and suffix: the sums up to and with each token, and behind it; between[level]: at levels 0 to 2 the sum between
        each token and the cut of its block, or None where no token lies between.
        """
        value = [y[i, j] for i in range(8)]
        prefix, suffix = list(value), [Float32(0.0)] * 8
        for i in range(1, 8):
            prefix[i] = ptx.add(prefix[i - 1], value[i])
            suffix[7 - i] = value[8 - i] if i == 1 else ptx.add(suffix[8 - i], value[8 - i])
        between = [[None] * 8 for _ in range(LEVELS - 1)]
        for level, sums in enumerate(between):
            size = 1 << level
            for begin in range(0, 8, 2 * size):
                cut, end = begin + size, begin + 2 * size
                for i in range(cut, end):
                    sums[i] = value[i] if i == cut else ptx.add(sums[i - 1], value[i])
                for i in range(cut - 2, begin - 1, -1):
                    sums[i] = value[i + 1] if sums[i + 1] is None else ptx.add(sums[i + 1], value[i + 1])
        return prefix, suffix, between

    @cute.jit
    def write_rows(self, y, smem, pair, token_half, scale):
        """k_start, q_start, k_end, decay and the operands of all levels, from q^, k^ in their tiles and a thread's y.

        To be called by the whole CTA.
        """
        prefix, suffix, between = [list(x) for x in zip(*[self.inner_sums(y, j) for j in range(2)])]
        sums = smem + self.layout.half_sums
        own, other = sums + token_half * 512 + pair * 8, sums + (1 - token_half) * 512 + pair * 8
        ptx.sts_v2_f32(own, prefix[0][7], prefix[1][7])
        cute.arch.sync_threads()
        other = ptx.lds_v2_f32(other)
        before = [ptx.less_f32(token_half, 1, Float32(0.0), x) for x in other]
        behind = [ptx.less_f32(token_half, 1, x, Float32(0.0)) for x in other]
        if token_half == 1:
            write_decay(smem, pair, [ptx.add(before[j], prefix[j][7]) for j in range(2)])
        top = smem + self.layout.levels + (LEVELS - 1) * LEVEL_BYTES + (1 - token_half) * LOWER
        piece = (pair // 4) ^ (4 * token_half)
        for i in cutlass.range_constexpr(8):
            at = word_at(pair, token_half, i)
            k = ptx.unpack_bf16x2(ptx.lds_b32(smem + self.layout.k_tile + at))
            q = ptx.unpack_bf16x2(ptx.lds_b32(smem + Q_START + at))
            start = [ptx.ex2(ptx.add(before[j], prefix[j][i])) for j in range(2)]
            rest = [ptx.ex2(ptx.add(suffix[j][i], behind[j])) for j in range(2)]
            ptx.sts_b32(smem + K_START + at, scaled(k, start))
            ptx.sts_b32(smem + Q_START + at, scaled(q, [ptx.mul(x, scale) for x in start]))
            ptx.sts_b32(smem + K_END + at, scaled(k, rest))
            # the highest level: all tokens of half 1 are upper, all of half 0 lower ones
            factor = [ptx.ex2(ptx.less_f32(token_half, 1, suffix[j][i], prefix[j][i])) for j in range(2)]
            at = top + i * ROW_BYTES + ((pair // 4) ^ i) * 16 + (pair % 4) * 4
            ptx.sts_b32(at, scaled(k, factor))
            if token_half == 1:
                ptx.sts_b32(at + QUERIES, scaled(q, factor))
            for level in cutlass.range_constexpr(LEVELS - 1):
                row = const_expr(rank(i, level))
                upper = const_expr((i >> level) & 1)
                at = smem + self.layout.levels + level * LEVEL_BYTES + (4 * token_half + row) * ROW_BYTES
                at += (piece ^ row) * 16 + (pair % 4) * 4
                factor = [Float32(1.0) if sums[level][i] is None else ptx.ex2(sums[level][i]) for sums in between]
                ptx.sts_b32(at + (UPPER if upper else LOWER), scaled(k, factor))
                if const_expr(upper):
                    ptx.sts_b32(at + QUERIES, scaled(q, factor))

    @cute.jit
    def multiply(self, smem, lane, level):
        """A level's entries of L^T and of the scores, before the scale, by one warp."""
        tile = smem + self.layout.levels + level * LEVEL_BYTES
        row_a, row_b = lane % 16, lane % 8
        c = [Float32(0.0)] * 4
        for block in cutlass.range_constexpr(0, 8, 2):
            b = ptx.ldmatrix_x4(tile + LOWER + row_b * ROW_BYTES + ((2 * block + lane // 8) ^ row_b) * 16)
            for n in cutlass.range_constexpr(2):
                piece = (2 * (block + n) + lane // 16) ^ (row_a % 8)
                a = ptx.ldmatrix_x4(tile + UPPER + row_a * ROW_BYTES + piece * 16)
                c = ptx.mma_bf16(a, (b[2 * n], b[2 * n + 1]), c)
        row = lane // 4
        i = token_of(row, level, 1)
        beta = ptx.lds_f32(smem + BETA + i * 4)
        for e in cutlass.range_constexpr(2):
            column = 2 * (lane % 4) + e
            if row >> level == column >> level:
                j = token_of(column, level, 0)
                ptx.sts_f32(smem + self.layout.l_transposed + j * 64 + i * 4, ptx.mul(c[e], beta))
                ptx.sts_f32(smem + self.layout.scores + i * 64 + j * 4, c[2 + e])

    @cute.jit
    def write_scores(self, smem, lane, scale):
        """The record's scores, by one warp, from the tables of all levels and of the diagonal."""
        fragment = []
        for tile in cutlass.range_constexpr(2):
            for r in cutlass.range_constexpr(2):
                i, j = lane // 4 + 8 * r, 8 * tile + 2 * (lane % 4)
                below = ptx.lds_v2_f32(smem + self.layout.scores + i * 64 + j * 4)
                diagonal = ptx.lds_f32(smem + self.layout.diagonal + i * 4)
                values = []
                for e in cutlass.range_constexpr(2):
                    value = ptx.less_f32(j + e, i, below[e], ptx.less_f32(i, j + e, Float32(0.0), diagonal))
                    values.append(ptx.mul(value, scale))
                fragment.append(ptx.pack_bf16x2(values[0], values[1]))
        ptx.sts_v4_b32(smem + SCORES + lane * 16, fragment)
