"""Images, and diagonal blocks of A and M, where 2^-l is harmless: a bounded gate and keys of norm 1.

The images Q, K_end and K_start of a chunk, which the record and the chain need, take the places of q, k and g. What the
products of A and M need of them stays in registers (q_band, k_band) or goes to the table K_NEXT (k_next). `Levels` in levels.py
does the same for all other gates and keys; the formulas stand in kernel.py.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.wy64.prepare.fragments import round_to_bf16, zeros, zeros4
from fla_kda_backend.kernels.wy64.prepare.memory import BAND_BYTES, SQUARES_BYTES, Table, Tensor


def squares_table(base, tensor):
    """Address of the sums of squares of q or k: fp32 [64 rows][2 channel halves]."""
    return base + Table.SQUARES + (SQUARES_BYTES if tensor == Tensor.K else 0)


def norm_factors(base, band, row, tensor):
    """1 / norm of rows `row` and row + 8 of a band of q or k, from the sums of squares of both channel halves."""
    at = squares_table(base, tensor) + (16 * band + row) * 8
    return [ptx.rsqrt(low + high + Float32(1e-6)) for low, high in (ptx.lds_v2_f32(at + 64 * r) for r in range(2))]


class Images:
    """The three steps of a warp from g, q and k to images. `Levels` has the same three."""

    def __init__(self, decays):
        self.decays = decays

    def sum_decays(self, base, g_tile, gate_scale, rows_band, coord):
        """Step 1: l of the warp's tokens, in registers; t of its band, in a table."""
        sums = self.decays.running_sums(base, g_tile, gate_scale, rows_band, coord)
        self.decays.store_band_sum(base, sums, coord)
        return sums

    def sum_squares(self, base, q_tile, k_tile, at, _, coord):
        """Step 2: half sums of squares of the warp's rows, in tables. at: offset of the warp's first block in a tile."""
        self.store_squares(base, q_tile + at, coord, Tensor.Q)
        self.store_squares(base, k_tile + at, coord, Tensor.K)

    @cute.jit
    def store_squares(self, base, at, coord, tensor: cutlass.Constexpr):
        """Sums of squares of the warp's rows over its 64 channels: the diagonal of x x^T."""
        group = coord.group
        c0 = c1 = zeros4()
        for kk in cutlass.range_constexpr(4):
            x = ptx.ldmatrix_x4(at ^ (kk << 5))
            c0 = ptx.mma_bf16(x, (x[0], x[2]), c0)
            c1 = ptx.mma_bf16(x, (x[1], x[3]), c1)
        odd = group & 1
        if coord.quad == group >> 1:
            where = squares_table(base, tensor) + (16 * coord.band + group) * 8 + coord.half * 4
            ptx.sts_f32(where, ptx.less_f32(0, odd, c0[1], c0[0]))
            ptx.sts_f32(where + 64, ptx.less_f32(0, odd, c1[3], c1[2]))

    def write(self, memory, at, sums, scale, coord):
        """Step 3: write Q, K_end, K_start and k_next over q, k, g; return q_band, k_band and half sums of the diagonal blocks
        of A and M. at: addresses of the warp's first block in the tiles of g, q and k."""
        base, band = memory.base, coord.band
        q_norms = [x * scale for x in norm_factors(base, band, coord.group, Tensor.Q)]
        k_norms = norm_factors(base, band, coord.group, Tensor.K)
        a, m = zeros(), zeros()
        q_band, k_band = [], []
        table_at = base + band * BAND_BYTES + coord.half * 256 + coord.quad * 8
        next_at = base + Table.K_NEXT + band * 4096 + coord.half * 2048 + coord.lane * 16
        for kk in range(4):
            g_at, q_at, k_at = (x ^ (kk << 5) for x in at)
            q_words, k_words = ptx.ldmatrix_x4(q_at), ptx.ldmatrix_x4(k_at)
            columns = [table_at + kk * 64 + n * 32 for n in range(2)]
            start, own, end = (
                [ptx.lds_v2_f32(c + table) for c in columns] for table in (Table.FROM_START, Table.BAND, Table.TO_END)
            )
            q, k = [], []
            for w in range(4):  # word of an A fragment: rows group + 8 * (w & 1), channels 8 * (w >> 1) + 2 * quad
                n, r = w >> 1, w & 1
                decay = [sums[2 * kk + n][2 * r + e] for e in range(2)]
                shrink = [ptx.ex2(d) for d in decay]
                x = [y * q_norms[r] * f for y, f in zip(ptx.unpack_bf16x2(q_words[w]), shrink)]
                q.append([x, [y * f for y, f in zip(x, start[n])]])
                z = [y * k_norms[r] for y in ptx.unpack_bf16x2(k_words[w])]
                grow = [ptx.ex2(-d) for d in decay]
                z_inv = [y * f for y, f in zip(z, grow)]
                z_next = [y * f * g for y, f, g in zip(round_to_bf16(z), grow, own[n])]
                z = [y * f for y, f in zip(z, shrink)]
                z_start = [-(y * f) for y, f in zip(z, start[n])]
                k.append([z, z_start, z_inv, z_next, [y * f for y, f in zip(z_next, end[n])]])
            pack = lambda words: [[ptx.pack_bf16x2(*pair) for pair in image] for image in zip(*words)]  # noqa: E731
            (q_words, q_image), (k_words, k_start, k_inv, k_next, k_end) = pack(q), pack(k)
            ptx.stmatrix_x4(q_at, q_image)
            ptx.stmatrix_x4(g_at, k_start)
            ptx.stmatrix_x4(k_at, k_end)
            ptx.sts_v4_b32(next_at + kk * 512, k_next)
            q_band.append(q_words)
            k_band.append(k_words)
            columns = [(k_inv[n], k_inv[n + 2]) for n in range(2)]
            a = [ptx.mma_bf16(q_words, columns[n], a[n]) for n in range(2)]
            m = [ptx.mma_bf16(k_words, columns[n], m[n]) for n in range(2)]
        return q_band, k_band, a, m
