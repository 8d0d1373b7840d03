"""The column phase where log2 decays are at least -7.2 per token: every pair of tokens on the tensor cores.

The anchor of a band is the boundary between its halves. e_i is the decay from there to token i: a product of decays in the
second half, 1 / such a product in the first one, at most 2^57.7 as 1 / e_i is.

    q_row = bf16(q^ e)     k_row = bf16(beta k^ e)     k_next = bf16(k^ / e)
    m[b] = decay from the anchor of band b - 1, or from the chunk's start, to that of band b

and by Horner's scheme, in accumulators whose columns are channels (dA, dM strictly below the diagonal; blocks on it: dA in two
bf16 terms):

    U_q = s dQ_; for c up to b: U_q = m[c] U_q, and behind it + dA[b,c] k_next[c]          U_k the same of -s_x X S^T and dM
    Y_c = 0; for b from the last band to c: Y_c = m[b+1] Y_c + dA[b,c]^T q_row[b] + dM[b,c]^T k_row[b]
    Y_e = (decay from the anchor to the chunk's end) s_x dKe

    dq = e U_q + dA_ii k      kr = e U_k      kc = (Y_c + Y_e) / e
    dG = q_row U_q + k_row U_k - k_next Y_c      e_j = k_next Y_e
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.wy64.backward.local.columns import COUNT, K_RSTD, TOKENS, Columns, RowSums
from fla_kda_backend.kernels.wy64.backward.local.memory import BLOCK, Part, Place, Table
from fla_kda_backend.kernels.wy64.backward.local.tensors import block_address, transposed_block_address
from fla_kda_backend.kernels.wy64.record import BANDS


class AnchoredColumns(Columns):
    """Table.BAND holds decays of half bands: [4 bands][2 halves][128]."""

    def half_decay(self, half):
        """Decay of a half band, of the lane's channels."""
        return ptx.lds_v2_f32(self.channel_table + Table.BAND + half * 512)

    def band_decay(self, band):
        return tuple(ptx.mul(x, y) for x, y in zip(self.half_decay(2 * band), self.half_decay(2 * band + 1)))

    # ---- decays and images
    def find_decays(self):
        """The half's decay to its table."""
        whole = [self.a[0], self.a[1]]
        for i in range(2, COUNT):
            whole[i % 2] = ptx.mul(whole[i % 2], self.a[i])
        ptx.sts_v2_f32(self.channel_table + Table.BAND + (2 * self.coord.band + self.h) * 512, *whole)
        self.inverse = [ptx.rcp(x) for x in whole]

    def starts(self):
        """1 / e before the first token's own decay, and e behind that of the last one, inverted."""
        first = [ptx.less_f32(self.h, 1, x, 1.0) for x in self.inverse]
        return first, [ptx.less_f32(self.h, 1, 1.0, x) for x in self.inverse]

    def write_row_images(self):
        """q_row and k_row over q and k. Each lane over its own."""
        e, _ = self.starts()
        for i in range(TOKENS):
            if i % 4 == 0:
                q_scale, k_scale, beta = self.four(Table.RSTD, i), self.four(K_RSTD, i), self.four(Table.BETA, i)
            e = [ptx.mul(e[c], self.a[2 * i + c]) for c in range(2)]
            at = self.image_at(i)
            q, k = self.hat(self.q[i], q_scale[i % 4]), self.hat(self.k[i], k_scale[i % 4])
            ptx.sts_b32(at + int(Place.Q), ptx.pack_bf16x2(*(ptx.mul(q[c], e[c]) for c in range(2))))
            ptx.sts_b32(at + int(Place.K), ptx.pack_bf16x2(*(ptx.mul(ptx.mul(k[c], beta[i % 4]), e[c]) for c in range(2))))

    def write_next_image(self):
        """k_next over g."""
        _, e = self.starts()
        for i in range(TOKENS - 1, -1, -1):
            if i % 4 == 3:
                k_scale = self.four(K_RSTD, i - 3)
            k = self.hat(self.k[i], k_scale[i % 4])
            ptx.sts_b32(self.image_at(i) + int(Place.K_NEXT), ptx.pack_bf16x2(*(ptx.mul(k[c], e[c]) for c in range(2))))
            e = [ptx.mul(e[c], self.a[2 * i + c]) for c in range(2)]

    # ---- after the products
    def _between_anchors(self, band):
        """m[band] of the accumulators' columns, band > 0."""
        coord = self.coord
        at = self.base + Place.TABLES + Table.BAND + band * 1024 + coord.quarter * 128 + coord.quad * 8
        for n in range(4):
            t, u = ptx.lds_v2_f32(at + (n * 32 - 512)), ptx.lds_v2_f32(at + n * 32)
            yield n, [ptx.mul(x, y) for x, y in zip(t, u)]

    def _decay(self, band, *accumulators):
        for n, m in self._between_anchors(band):
            for y in accumulators:
                for e in range(4):
                    y[4 * n + e] = ptx.mul(y[4 * n + e], m[e & 1])

    def _blocks(self, at):
        return ptx.ldmatrix_x4(block_address(at, self.coord.lane))

    def _transposed_blocks(self, at):
        return ptx.ldmatrix_x4_trans(transposed_block_address(at, self.coord.lane))

    def _add(self, place, band, *products):
        """y += p image[band], for products (y, p)."""
        at = self.tile_address(place, band)
        for kk in range(2):
            words = ptx.ldmatrix_x4_trans(at ^ (kk << 5))
            for n in range(2):
                for y, p in products:
                    self._multiply_add(y, 8 * kk + 4 * n, p, words[2 * n : 2 * n + 2])

    @cute.jit
    def find_rows(self, d_q, x_s, scale, minus):
        """Accumulators of dQ_ and X S^T become U_q and U_k. minus: -s_x."""
        coord = self.coord
        at = self.base + Place.TABLES + Table.BAND + coord.quarter * 128 + coord.quad * 8
        for n in cutlass.range_constexpr(4):
            t = ptx.lds_v2_f32(at + n * 32)
            for c in cutlass.range_constexpr(2):
                q, x = t[c] * scale, t[c] * minus
                for r in cutlass.range_constexpr(2):
                    o = 4 * n + 2 * r + c
                    d_q[o], x_s[o] = ptx.mul(d_q[o], q), ptx.mul(x_s[o], x)
        blocks = self.base + Place.V + (coord.band * (coord.band - 1) >> 1) * BLOCK
        for c in cutlass.range(coord.band, unroll=1):
            d_a, d_m = self._blocks(blocks + c * BLOCK + int(Part.D_A)), self._blocks(blocks + c * BLOCK + int(Part.D_M))
            self._add(Place.K_NEXT, c, (d_q, d_a), (x_s, d_m))
            self._decay(c + 1, d_q, x_s)
        diagonal = self.base + Place.V + Part.DIAGONAL + coord.band * (3 * BLOCK)
        lead, rest, d_m = (self._blocks(diagonal + i * BLOCK) for i in range(3))
        self._add(Place.K_NEXT, coord.band, (d_q, lead), (x_s, d_m), (d_q, rest))

    @cute.jit
    def find_columns(self):
        """Y_c, for `pair`."""
        coord = self.coord
        y = cute.make_rmem_tensor(COUNT, Float32)
        for i in cutlass.range_constexpr(COUNT):
            y[i] = Float32(0.0)
        for step in cutlass.range(BANDS - 1 - coord.band, unroll=1):
            b = BANDS - 1 - step
            blocks = self.base + Place.V + ((b * (b - 1) >> 1) + coord.band) * BLOCK
            self._add(Place.Q, b, (y, self._transposed_blocks(blocks + int(Part.D_A))))
            self._add(Place.K, b, (y, self._transposed_blocks(blocks + int(Part.D_M))))
            self._decay(b, y)
        diagonal = self.base + Place.V + Part.DIAGONAL + coord.band * (3 * BLOCK)
        lead, rest, d_m = (self._transposed_blocks(diagonal + i * BLOCK) for i in range(3))
        self._add(Place.Q, coord.band, (y, lead), (y, rest))
        self._add(Place.K, coord.band, (y, d_m))
        self.put(y)

    def read_inverse(self):
        """1 / the half's decay, made again."""
        self.inverse = [ptx.rcp(x) for x in self.half_decay(2 * self.coord.band + self.h)]

    def add_rows(self):
        """dq and kr, the latter in kc; dG; sums for dbeta and of dq q."""
        self.read_inverse()
        e, _ = self.starts()
        k_sums, q_sums = RowSums(self.coord.lane), RowSums(self.coord.lane)
        diagonal = self.base + Place.V + Part.DIAGONAL_VALUES + (2 * self.coord.band + self.h) * 32
        for i in range(TOKENS):
            if i % 4 == 0:
                q_scale, k_scale, beta = self.four(Table.RSTD, i), self.four(K_RSTD, i), self.four(Table.BETA, i)
                q_words, k_words = self.four_words(i)
                d = ptx.lds_v4_f32(diagonal + 4 * i)
            q, k = self.hat(q_words[i % 4], q_scale[i % 4]), self.hat(k_words[i % 4], k_scale[i % 4])
            u_q, u_k = self.pair(i, Place.S), self.pair(i, Place.X)
            at = self.image_at(i)
            q_row, k_row = (ptx.unpack_bf16x2(ptx.lds_b32(at + int(place))) for place in (Place.Q, Place.K))
            k_sum = q_sum = None
            for c in range(2):
                o = 2 * i + c
                e[c] = ptx.mul(e[c], self.a[o])
                dq, kr = ptx.fma(e[c], u_q[c], ptx.mul(d[i % 4], k[c])), ptx.mul(e[c], u_k[c])
                self.dq[o] = dq
                self.kc[o] = ptx.fma(beta[i % 4], kr, ptx.mul(d[i % 4], q[c]))
                self.dg[o] = ptx.fma(q_row[c], u_q[c], ptx.mul(k_row[c], u_k[c]))
                k_sum = k[c] * kr if c == 0 else ptx.fma(k[c], kr, k_sum)
                q_sum = q[c] * dq if c == 0 else ptx.fma(q[c], dq, q_sum)
            k_sums.add(k_sum)
            if self.normalises:
                q_sums.add(q_sum)
        self.store_row_sum(Table.DOT_BETA, k_sums)
        if self.normalises:
            self.store_row_sum(Table.DOT_Q, q_sums)

    def add_columns(self):
        """kc, dG, e; sums of dk k."""
        self.read_inverse()
        _, inverse = self.starts()
        self.find_band_decays()
        half = self.half_decay(2 * self.coord.band + 1)
        factor = [ptx.mul(self.behind[c] * self.s_x, half[c]) for c in range(2)]
        dots = RowSums(self.coord.lane)
        self.e = [None] * COUNT
        for i in range(TOKENS - 1, -1, -1):
            if i % 4 == 3:
                k_scale = self.four(K_RSTD, i - 3)
                _, k_words = self.four_words(i - 3)
            k, dot = self.hat(k_words[i % 4], k_scale[i % 4]), None
            y, d_k_end = self.pair(i), self.pair(i, Place.DS)
            k_next = ptx.unpack_bf16x2(ptx.lds_b32(self.image_at(i) + int(Place.K_NEXT)))
            for c in range(2):
                o = 2 * i + c
                x = ptx.mul(factor[c], d_k_end[c])
                self.e[o] = ptx.mul(k_next[c], x)
                self.dg[o] = ptx.fma(-k_next[c], y[c], self.dg[o])
                self.kc[o] = ptx.fma(inverse[c], y[c] + x, self.kc[o])
                inverse[c] = ptx.mul(inverse[c], self.a[o])
                dot = k[c] * self.kc[o] if c == 0 else ptx.fma(k[c], self.kc[o], dot)
            if self.normalises:
                dots.add(dot)
        if self.normalises:
            self.store_row_sum(Table.DOT_K, dots, TOKENS - 1)

    def fetch_sums(self):
        """They are there already."""
