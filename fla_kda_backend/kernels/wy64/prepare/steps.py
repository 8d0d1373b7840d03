"""What the warps of prepare_wy64 compute from the tiles of a chunk, step by step; the formulas stand in that module.

`smem` is the address of the CTA's tiles and tables, `band` and `half` say which 16 tokens and 64 channels a warp works
on. Fragments are those of m16n8k16: `group` = lane / 4 is the row, `quad` = lane % 4 the pair of columns. An
accumulator of a 16 x 16 block is [column half n][row half r, column e], as A fragment words it is the same order
(n, r), and the words of a block taken as (r, n) are the B fragment of its transpose.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.wy64.record import A_BYTES, BANDS, DECAY_AT, a_block

LOG2E = 1.4426950408889634

# Shared memory, bytes. First four tiles of 64 rows x 128 channels as in the record.
TILE_BYTES = 16384
TABLES = 4 * TILE_BYTES  # per band and channel, fp32 [4][128]
BAND_SUM = TABLES  # t[b]
FROM_START = TABLES + 2048  # 2^G at the band's start
TO_END = TABLES + 4096  # 2^(G_63 - G at the band's end)
BAND = TABLES + 6144  # 2^t[b]
MIDDLE = TABLES + 8192  # 2^(t[1] + t[2]), [128]
BELOW = TABLES  # after the images: of the blocks below the diagonal, half 1's sums of M^T, then -N; 1 KB each
K_NEXT = TABLES + 8704  # k_next as A fragments, [4 bands][8 steps][32 lanes][16 B]
A_TILE = K_NEXT + 16384
DIAGONAL = A_TILE + A_BYTES  # per band: half 0's sums of M and of A, 1 KB each; then M^T, then T in fp16 | T diag(beta)
A_SUMS = DIAGONAL + 8192  # of the blocks below the diagonal, half 0's sums of A, 1 KB each
SQUARES = A_SUMS  # until the images are done: sums of squares of q, k, [2][64 rows][2 halves]; then sums of levels.py
BIAS = A_SUMS + 6144  # gates.py: dt_bias times a factor, fp32 [128]
RATE = BIAS + 512  # exp(A_log) times a factor
POWERS = RATE + 128  # operands.py: [2 halves][64 rows] words
TILES_BYTES = POWERS + 512


def _zeros():
    return [[Float32(0.0)] * 4, [Float32(0.0)] * 4]


def _pairs(c):
    """Accumulators of a block as pairs, in the order of its transpose's B fragment."""
    return [(c[n][2 * r], c[n][2 * r + 1]) for r in range(2) for n in range(2)]


def _pack_block(c):
    """Accumulators of a block as four 8x8 bf16 tiles: A fragment words, or the operand of stmatrix."""
    return [ptx.pack_bf16x2(c[n][2 * r], c[n][2 * r + 1]) for n in range(2) for r in range(2)]


def _split(pairs):
    """fp32 pairs as bf16 words, lead and rest."""
    lead = [ptx.pack_bf16x2(*p) for p in pairs]
    return lead, [ptx.rest_bf16x2(*p, word) for p, word in zip(pairs, lead)]


def _product_split(a, b):
    """a.b for 16x16 fp16 operands given as (lead, rest); rest.rest is left out."""
    out = []
    for n in range(2):
        r = ptx.mma_f16(a[0], b[0][2 * n : 2 * n + 2], [Float32(0.0)] * 4)
        r = ptx.mma_f16(a[1], b[0][2 * n : 2 * n + 2], r)
        out.append(ptx.mma_f16(a[0], b[1][2 * n : 2 * n + 2], r))
    return out


class PrepareSteps:
    """A kernel inherits it. l2norm: its compile-time fact."""

    # ---- norms and factors -----------------------------------------------------------------------------------------
    @cute.jit
    def squares(self, smem, at, band, half, lane, table: cutlass.Constexpr):
        """Sums of squares of the warp's rows over its 64 channels: the diagonal of x x^T."""
        group, quad = lane >> 2, lane & 3
        c0 = c1 = [Float32(0.0)] * 4
        for kk in cutlass.range_constexpr(4):
            x = ptx.ldmatrix_x4(at ^ (kk << 5))
            c0 = ptx.mma_bf16(x, (x[0], x[2]), c0)
            c1 = ptx.mma_bf16(x, (x[1], x[3]), c1)
        odd = group & 1
        if quad == group >> 1:
            where = smem + SQUARES + table + (16 * band + group) * 8 + half * 4
            ptx.sts_f32(where, ptx.less_f32(0, odd, c0[1], c0[0]))
            ptx.sts_f32(where + 64, ptx.less_f32(0, odd, c1[3], c1[2]))

    def norms(self, smem, band, group, table):
        """Factors of two rows: 1 / norm."""
        sums = [ptx.lds_v2_f32(smem + SQUARES + table + (16 * band + group + 8 * r) * 8) for r in range(2)]
        return [ptx.rsqrt(low + high + Float32(1e-6)) for low, high in sums]

    @cute.jit
    def factors(self, smem, record, band, half, lane):
        """The decays that join the warp's band to the others, two channels a lane, and the chunk's decay d."""
        where = smem + half * 256 + lane * 8
        t = [ptx.lds_v2_f32(where + BAND_SUM + 512 * b) for b in range(BANDS)]
        own, before, after = [], [], []
        for e in cutlass.range_constexpr(2):
            x = [t[b][e] for b in range(BANDS)]
            before.append(sum((ptx.less_f32(b, band, x[b], 0.0) for b in (1, 2)), ptx.less_f32(0, band, x[0], 0.0)))
            after.append(sum((ptx.less_f32(band, b, x[b], 0.0) for b in (2, 3)), ptx.less_f32(band, 1, x[1], 0.0)))
            own.append(ptx.less_f32(band, 2, ptx.less_f32(band, 1, x[0], x[1]), ptx.less_f32(band, 3, x[2], x[3])))
        mine = where + band * 512
        for table, sums in zip((FROM_START, BAND, TO_END), (before, own, after)):
            ptx.sts_v2_f32(mine + table, ptx.ex2(sums[0]), ptx.ex2(sums[1]))
        if band == 1:
            channel = 64 * half + 2 * lane
            position = (channel & ~15) + ((channel & 7) >> 1) * 4 + ((channel >> 3) & 1) * 2
            d = [ptx.ex2(before[e] + own[e] + after[e]) for e in range(2)]
            ptx.stg_v2_f32(record + Int64(DECAY_AT + position * 4), *d)
        if band == 2:
            ptx.sts_v2_f32(where + MIDDLE, *[ptx.ex2(t[1][e] + t[2][e]) for e in range(2)])

    def rounded(self, pair):
        """To bf16."""
        return ptx.unpack_bf16x2(ptx.pack_bf16x2(*pair))

    # ---- images and operands ---------------------------------------------------------------------------------------
    def images(self, smem, at, sums, norms, band, half, lane):
        """Write Q, K_end, K_start and k_next over q, k, g; return q_band, k_band and half sums of the diagonal blocks.

        at: address of the warp's first block in the tiles of g, q and k. norms: factors of the rows of q, `scale`
        included, and of k.
        """
        a, m = _zeros(), _zeros()
        q_band, k_band = [], []
        table_at = smem + band * 512 + half * 256 + (lane & 3) * 8
        next_at = smem + K_NEXT + band * 4096 + half * 2048 + lane * 16
        for kk in range(4):
            g_at, q_at, k_at = (x ^ (kk << 5) for x in at)
            q_words, k_words = ptx.ldmatrix_x4(q_at), ptx.ldmatrix_x4(k_at)
            columns = [table_at + kk * 64 + n * 32 for n in range(2)]
            start, own, end = ([ptx.lds_v2_f32(c + table) for c in columns] for table in (FROM_START, BAND, TO_END))
            q, k = [], []
            for w in range(4):  # word of an A fragment: rows group + 8 * (w & 1), channels 8 * (w >> 1) + 2 * quad
                n, r = w >> 1, w & 1
                decay = [sums[2 * kk + n][2 * r + e] for e in range(2)]
                shrink = [ptx.ex2(d) for d in decay]
                x = [y * norms[0][r] * f for y, f in zip(ptx.unpack_bf16x2(q_words[w]), shrink)]
                q.append([x, [y * f for y, f in zip(x, start[n])]])
                z = [y * norms[1][r] for y in ptx.unpack_bf16x2(k_words[w])]
                grow = [ptx.ex2(-d) for d in decay]
                z_inv = [y * f for y, f in zip(z, grow)]
                z_next = [y * f * g for y, f, g in zip(self.rounded(z), grow, own[n])]
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

    @cute.jit
    def share_diagonal(self, smem, a, m, band, half, lane):
        if half == 0:
            for n in cutlass.range_constexpr(2):
                at = smem + DIAGONAL + band * 2048 + 512 * n + lane * 16
                ptx.sts_v4_f32(at, m[n])
                ptx.sts_v4_f32(at + 1024, a[n])

    # ---- blocks of A, T and N --------------------------------------------------------------------------------------
    @cute.jit
    def diagonal_blocks(self, smem, a, m, beta, band, lane):
        """The diagonal block of A, of T in fp16 lead and rest, and of T diag(beta) in bf16 lead and rest; half 1."""
        group, quad, column = lane >> 2, lane & 3, lane & 15
        at = smem + DIAGONAL + band * 2048
        beta += band * 64
        m_other = [ptx.lds_v4_f32(at + lane * 16 + 512 * n) for n in range(2)]
        a_other = [ptx.lds_v4_f32(at + 1024 + lane * 16 + 512 * n) for n in range(2)]
        beta_rows = [ptx.lds_f32(beta + (group + 8 * r) * 4) for r in range(2)]
        beta_column = ptx.lds_f32(beta + column * 4)
        cute.arch.sync_warp()
        block = _zeros()
        for n in cutlass.range_constexpr(2):
            for e in cutlass.range_constexpr(4):
                i, j = group + 8 * (e >> 1), 8 * n + 2 * quad + (e & 1)
                ptx.sts_f32(at + j * 64 + i * 4, (m[n][e] + m_other[n][e]) * beta_rows[e >> 1])
                block[n][e] = ptx.less_f32(j, i + 1, a[n][e] + a_other[n][e], 0.0)
        ptx.stmatrix_x4(self.a_block(smem, band, band, lane), _pack_block(block))
        cute.arch.sync_warp()
        x = self.substitute(at, column)
        cute.arch.sync_warp()
        pairs = [(x[2 * i], x[2 * i + 1]) for i in range(8)]
        parts = [ptx.split_f16x2(*p) for p in pairs]
        images = ([p[0] for p in parts], [p[1] for p in parts], *_split([(u * beta_column, v * beta_column) for u, v in pairs]))
        for i in cutlass.range_constexpr(2):
            where = at + column * 32 + ((i ^ ((column >> 2) & 1)) << 4)
            for part in cutlass.range_constexpr(4):
                ptx.sts_v4_b32(where + 512 * part, images[part][4 * i : 4 * i + 4])

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

    def diagonal_fragment(self, smem, band, part, lane):
        """A block that `diagonal_blocks` left, as B fragment of its transpose."""
        row8 = lane & 7
        at = (row8 + 8 * ((lane >> 3) & 1)) * 32 + (((lane >> 4) ^ (row8 >> 2)) << 4)
        return ptx.ldmatrix_x4_trans(smem + DIAGONAL + band * 2048 + part * 512 + at)

    @cute.jit
    def blocks_below(self, smem, b: cutlass.Constexpr, barrier, beta, half, lane, q_band, k_band):
        """The blocks of A and of N left of the diagonal in band b's rows. The two warps of the band swap sums over
        their channels, with the given barrier between; half 0 finishes N, half 1 A."""
        first = b * (b - 1) // 2 * 1024 + lane * 16
        sums = [self.half_sums(smem, b, other, half, lane, q_band, k_band) for other in range(b)]
        if half == 0:
            self.store_sums(smem + A_SUMS + first, [a for a, _ in sums])
        else:
            self.store_sums(smem + BELOW + first, [m for _, m in sums])
        cute.arch.barrier(barrier_id=barrier, number_of_threads=64)
        if half == 0:
            self.eliminators(smem, b, beta, lane, first, [m for _, m in sums])
        else:
            for other, block in enumerate(self.whole_sums(smem + A_SUMS + first, [a for a, _ in sums])):
                ptx.stmatrix_x4(self.a_block(smem, b, other, lane), _pack_block(block))

    def half_sums(self, smem, b, other, half, lane, q_band, k_band):
        """Sums over the warp's channels of A_b,other and of M_b,other^T, the latter without beta."""
        a, m = _zeros(), _zeros()
        next_at = smem + K_NEXT + other * 4096 + half * 2048 + lane * 16
        between = {1: None, 2: BAND + (other + 1) * 512, 3: MIDDLE}[b - other]
        for kk in range(4):
            words = ptx.lds_v4_b32(next_at + kk * 512)
            if between is not None:
                decay_at = smem + between + half * 256 + (lane & 3) * 8 + kk * 64
                decay = [ptx.lds_v2_f32(decay_at + n * 32) for n in range(2)]
                pairs = self.unpack(words)
                words = self.pack((x * f for x, f in zip(pairs[w], decay[w >> 1])) for w in range(4))
            a = [self.product(q_band[kk], (words[n], words[n + 2]), a[n]) for n in range(2)]
            m = [self.product(words, (k_band[kk][n], k_band[kk][n + 2]), m[n]) for n in range(2)]
        if self.l2norm:
            return a, m
        (q_rows, _), (_, k_rows) = (zip(*map(ptx.unpack_bf16x2, self.powers_of_rows(smem, x, half, lane))) for x in (b, other))
        columns, others = (self.powers_of_columns(smem, x, half, lane) for x in (b, other))
        return self.multiplied(a, q_rows, others), self.multiplied(m, k_rows, columns)

    def store_sums(self, at, blocks):
        for i, block in enumerate(blocks):
            for n in range(2):
                ptx.sts_v4_f32(at + i * 1024 + n * 512, block[n])

    def whole_sums(self, at, blocks):
        """Sums over both halves."""
        other = [[ptx.lds_v4_f32(at + i * 1024 + n * 512) for n in range(2)] for i in range(len(blocks))]
        return [[[x + y for x, y in zip(b[n], o[n])] for n in range(2)] for b, o in zip(blocks, other)]

    def eliminators(self, smem, b, beta, lane, first, m):
        """-N_bj as B fragments of the transpose; half 0."""
        beta += b * 64 + (lane & 3) * 8
        beta_columns = [ptx.lds_v2_f32(beta + 32 * n) for n in range(2)]
        t = [[w[0], w[2], w[1], w[3]] for w in (self.diagonal_fragment(smem, b, part, lane) for part in range(2))]
        for i, block in enumerate(self.whole_sums(smem + BELOW + first, m)):
            scaled = [[x * beta_columns[n][e & 1] for e, x in enumerate(block[n])] for n in range(2)]
            parts = [ptx.split_f16x2(*p) for p in _pairs(scaled)]
            product = _product_split(t, ([p[0] for p in parts], [p[1] for p in parts]))
            for part, words in enumerate(_split(_pairs([[-x for x in c] for c in product]))):
                ptx.sts_v4_b32(smem + BELOW + first + i * 1024 + part * 512, words)

    def a_block(self, smem, band, other, lane):
        """stmatrix address of a block of A."""
        row, column = lane & 15, lane >> 4
        return smem + A_TILE + a_block(band, other) + row * 32 + ((column ^ (row >> 2 & 1)) << 4)

    # ---- U and W ---------------------------------------------------------------------------------------------------
    def eliminate(self, smem, x, u_at, w_at, lane):
        """U to global memory and -W over K_start, 16 channels of each, transposed. x: blocks of V^T and K_start^T, or of V^T
        alone, and then no W; u_at None: no U. Returns the words of both."""
        done, sides = [], range(len(x[0]))
        for i in range(BANDS):
            acc = [_zeros() for _ in sides]
            for part in range(2):
                d = self.diagonal_fragment(smem, i, 2 + part, lane)
                acc = [[ptx.mma_bf16(x[i][t], d[2 * n : 2 * n + 2], acc[t][n]) for n in range(2)] for t in sides]
            for j in range(i):
                for part in range(2):
                    m = ptx.lds_v4_b32(smem + BELOW + (i * (i - 1) // 2 + j) * 1024 + part * 512 + lane * 16)
                    acc = [[ptx.mma_bf16(done[j][t], m[2 * n : 2 * n + 2], acc[t][n]) for n in range(2)] for t in sides]
            done.append([_pack_block(c) for c in acc])
            if u_at is not None:
                ptx.stg_words(u_at + Int64(i * 2048), done[i][0])
            if len(sides) > 1:
                ptx.stmatrix_x4_trans(w_at + i * 2048, done[i][1])
        return done
