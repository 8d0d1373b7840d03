"""The 16x16 blocks of A, and of T and N, the block form of the inverse of I + M; the formulas stand in kernel.py.

The two warps of a band, one per channel half, swap sums over their channels. Then half 1 finishes A and the diagonal blocks,
half 0 the blocks of N.
"""

import cutlass
import cutlass.cute as cute

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.wy64.prepare.fragments import (
    pack_block,
    product_split,
    split_bf16,
    split_f16,
    transposed_pairs,
    zeros,
)
from fla_kda_backend.kernels.wy64.prepare.memory import BAND_BYTES, BLOCK_BYTES, DIAGONAL_BYTES, DiagonalPart, Table
from fla_kda_backend.kernels.wy64.record import a_block


def diagonal_fragment(base, band, part, lane):
    """A DiagonalPart of a band, as B fragment of its transpose."""
    row8 = lane & 7
    at = (row8 + 8 * ((lane >> 3) & 1)) * 32 + (((lane >> 4) ^ (row8 >> 2)) << 4)
    return ptx.ldmatrix_x4_trans(base + Table.DIAGONAL + band * DIAGONAL_BYTES + part * 512 + at)


def a_block_address(base, band, other, lane):
    """ldmatrix and stmatrix address of the block of A in row `band` and column `other` of blocks."""
    row, column = lane & 15, lane >> 4
    return base + Table.A_IMAGE + a_block(band, other) + row * 32 + ((column ^ (row >> 2 & 1)) << 4)


def below_offset(b, other):
    """Offset in BELOW or A_SUMS of the block below the diagonal in row b and column `other` of blocks."""
    return (b * (b - 1) // 2 + other) * BLOCK_BYTES


def _store_sums(at, blocks):
    for i, block in enumerate(blocks):
        for n in range(2):
            ptx.sts_v4_f32(at + i * BLOCK_BYTES + n * 512, block[n])


def _whole_sums(at, blocks):
    """Sums over both channel halves: of the blocks and those at `at`."""
    other = [[ptx.lds_v4_f32(at + i * BLOCK_BYTES + n * 512) for n in range(2)] for i in range(len(blocks))]
    return [[[x + y for x, y in zip(b[n], o[n])] for n in range(2)] for b, o in zip(blocks, other)]


def _times_rows_and_columns(block, rows, columns):
    """Accumulators of a block times factors of its rows and columns."""
    return [[x * rows[e >> 1] * columns[n][e & 1] for e, x in enumerate(block[n])] for n in range(2)]


class Blocks:
    def __init__(self, operands):
        self.operands = operands

    # ---- the diagonal
    @cute.jit
    def share_diagonal(self, base, a, m, coord):
        """Half 0 leaves its sums of a diagonal block of A and M for half 1. A block barrier follows."""
        if coord.half == 0:
            for n in cutlass.range_constexpr(2):
                at = base + Table.DIAGONAL + coord.band * DIAGONAL_BYTES + 512 * n + coord.lane * 16
                ptx.sts_v4_f32(at, m[n])
                ptx.sts_v4_f32(at + 1024, a[n])

    @cute.jit
    def finish_diagonal(self, base, a, m, beta, coord):
        """The diagonal block of A, and the DiagonalParts of T; by half 1. beta: address."""
        band, lane = coord.band, coord.lane
        group, quad, column = coord.group, coord.quad, lane & 15
        at = base + Table.DIAGONAL + band * DIAGONAL_BYTES
        beta += band * 64
        m_other = [ptx.lds_v4_f32(at + lane * 16 + 512 * n) for n in range(2)]
        a_other = [ptx.lds_v4_f32(at + 1024 + lane * 16 + 512 * n) for n in range(2)]
        beta_rows = [ptx.lds_f32(beta + (group + 8 * r) * 4) for r in range(2)]
        beta_column = ptx.lds_f32(beta + column * 4)
        cute.arch.sync_warp()
        block = zeros()
        for n in cutlass.range_constexpr(2):
            for e in cutlass.range_constexpr(4):
                i, j = group + 8 * (e >> 1), 8 * n + 2 * quad + (e & 1)
                ptx.sts_f32(at + j * 64 + i * 4, (m[n][e] + m_other[n][e]) * beta_rows[e >> 1])
                block[n][e] = ptx.less_f32(j, i + 1, a[n][e] + a_other[n][e], 0.0)
        ptx.stmatrix_x4(a_block_address(base, band, band, lane), pack_block(block))
        cute.arch.sync_warp()
        x = self.substitute(at, column)
        cute.arch.sync_warp()
        pairs = [(x[2 * i], x[2 * i + 1]) for i in range(8)]
        t_lead, t_rest = split_f16(pairs)
        t_beta_lead, t_beta_rest = split_bf16([(u * beta_column, v * beta_column) for u, v in pairs])
        parts = {
            DiagonalPart.T_LEAD: t_lead,
            DiagonalPart.T_REST: t_rest,
            DiagonalPart.T_BETA_LEAD: t_beta_lead,
            DiagonalPart.T_BETA_REST: t_beta_rest,
        }
        for i in cutlass.range_constexpr(2):
            where = at + column * 32 + ((i ^ ((column >> 2) & 1)) << 4)
            for part in DiagonalPart:
                ptx.sts_v4_b32(where + 512 * part, parts[part][4 * i : 4 * i + 4])

    def substitute(self, m_transposed, column):
        """A column of (I + M)^-1 for the strictly lower 16x16 M, given as M^T in fp32, by forward substitution."""
        x = [ptx.less_f32(column, i, 0.0, ptx.less_f32(i, column, 0.0, 1.0)) for i in range(16)]
        for j in range(15):
            m = {}
            for quarter in range((j + 1) // 4, 4):
                m.update(enumerate(ptx.lds_v4_f32(m_transposed + j * 64 + quarter * 16), 4 * quarter))
            for i in range(j + 1, 16):
                x[i] = x[i] - m[i] * x[j]
        return x

    # ---- below the diagonal
    @cute.jit
    def blocks_below(self, base, b: cutlass.Constexpr, barrier, beta, coord, q_band, k_band):
        """The blocks of A and of N left of the diagonal in the rows of the warp's band b. The two warps of the band swap sums
        over their channels, with the given barrier between; half 0 finishes N, half 1 A. beta: address."""
        half, lane = coord.half, coord.lane
        first = below_offset(b, 0) + lane * 16
        sums = [self._half_sums(base, b, other, half, lane, q_band, k_band) for other in range(b)]
        if half == 0:
            _store_sums(base + Table.A_SUMS + first, [a for a, _ in sums])
        else:
            _store_sums(base + Table.BELOW + first, [m for _, m in sums])
        cute.arch.barrier(barrier_id=barrier, number_of_threads=64)
        if half == 0:
            self._write_n(base, b, beta, lane, first, [m for _, m in sums])
        else:
            for other, block in enumerate(_whole_sums(base + Table.A_SUMS + first, [a for a, _ in sums])):
                ptx.stmatrix_x4(a_block_address(base, b, other, lane), pack_block(block))

    def _half_sums(self, base, b, other, half, lane, q_band, k_band):
        """Sums over the warp's channels of A_b,other and of M_b,other^T, the latter without beta."""
        operands = self.operands
        a, m = zeros(), zeros()
        next_at = base + Table.K_NEXT + other * 4096 + half * 2048 + lane * 16
        # decay of the bands between the two
        between = {1: None, 2: Table.BAND + (other + 1) * BAND_BYTES, 3: Table.MIDDLE}[b - other]
        for kk in range(4):
            words = ptx.lds_v4_b32(next_at + kk * 512)
            if between is not None:
                decay_at = base + between + half * 256 + (lane & 3) * 8 + kk * 64
                decay = [ptx.lds_v2_f32(decay_at + n * 32) for n in range(2)]
                pairs = operands.unpack(words)
                words = operands.pack((x * f for x, f in zip(pairs[w], decay[w >> 1])) for w in range(4))
            a = [operands.product(q_band[kk], (words[n], words[n + 2]), a[n]) for n in range(2)]
            m = [operands.product(words, (k_band[kk][n], k_band[kk][n + 2]), m[n]) for n in range(2)]
        if not operands.has_powers:
            return a, m
        (q_rows, _), (_, k_rows) = (operands.powers_of_q_and_k(base, x, half, lane) for x in (b, other))
        columns, others = (operands.powers_of_columns(base, x, half, lane) for x in (b, other))
        return _times_rows_and_columns(a, q_rows, others), _times_rows_and_columns(m, k_rows, columns)

    def _write_n(self, base, b, beta, lane, first, m):
        """-N_bj as B fragments of the transpose, in bf16 lead and rest; by half 0. m: half sums of the M_bj^T."""
        beta += b * 64 + (lane & 3) * 8
        beta_columns = [ptx.lds_v2_f32(beta + 32 * n) for n in range(2)]
        t_parts = (DiagonalPart.T_LEAD, DiagonalPart.T_REST)
        t = [[w[0], w[2], w[1], w[3]] for w in (diagonal_fragment(base, b, part, lane) for part in t_parts)]
        for i, block in enumerate(_whole_sums(base + Table.BELOW + first, m)):
            scaled = [[x * beta_columns[n][e & 1] for e, x in enumerate(block[n])] for n in range(2)]
            product = product_split(t, split_f16(transposed_pairs(scaled)))
            for part, words in enumerate(split_bf16(transposed_pairs([[-x for x in c] for c in product]))):
                ptx.sts_v4_b32(base + Table.BELOW + first + i * BLOCK_BYTES + part * 512, words)
