"""The column phase: everything with decays. A lane owns two channels and half of the tokens of its warp's band.

Lane 16 h + p holds tokens 8 h to 8 h + 7 of the band and channels 2 p, 2 p + 1 of the quarter: 16 values, [token][channel].
Bf16 images are read and written in words of such pairs. Accumulators come to this layout through patches of shared memory
(`put`).

All decays are running products of a_i = 2^y_i over tokens on one side of what they join: P = a_0 .. a_i within the half, N =
a_(j+1) .. a_7. `lo` is the decay of the band's tokens before the half, `hi` of those behind it. Nothing is divided.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.wy64.backward.local.gates import GRADIENTS
from fla_kda_backend.kernels.wy64.backward.local.memory import (
    BLOCK,
    DIAGONAL,
    DIAGONAL_PITCH,
    PATCH,
    Coord,
    Part,
    Place,
    Sums,
    Table,
)
from fla_kda_backend.kernels.wy64.backward.local.stores import store_pairs
from fla_kda_backend.kernels.wy64.backward.local.tensors import block_address, transposed_block_address
from fla_kda_backend.kernels.wy64.prepare.gates import GATES
from fla_kda_backend.kernels.wy64.record import BANDS, CHUNK

TOKENS = 8  # of a lane
COUNT = 2 * TOKENS
K_RSTD = Table.RSTD + 256

_shuffle_f32 = ptx.ordered("shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;", "fr -> f", "The fp32 of lane XOR mask.")
_sts_b32_less = ptx.ordered(
    "{ .reg .pred p; setp.lt.s32 p, $2, $3; @p st.shared.b32 [$0], $1; }", "rrrr ->", "Store 4 bytes where i < j."
)
_lds_volatile_b32 = ptx.ordered("ld.volatile.shared.b32 $0, [$1];", "r -> r", "Load 4 bytes each time.")
_keep_less = ptx.ordered(
    "{ .reg .pred p; setp.lt.s32 p, $1, $2; selp.f32 $0, $3, $4, p; }", "rrff -> f", "less_f32 that stays in its branch."
)


class RowSums:
    """Sums over 16 lanes of values that come one by one, 8 of them: that of value `index` comes to a lane."""

    def __init__(self, lane):
        self.lane, self.waiting = lane, []

    def add(self, x):
        level = 0
        while self.waiting and self.waiting[-1][0] == level:
            y = self.waiting.pop()[1]
            mask = 8 >> level
            side = self.lane & mask
            kept, sent = ptx.less_f32(side, 1, y, x), ptx.less_f32(side, 1, x, y)
            x, level = kept + _shuffle_f32(sent, Int32(mask)), level + 1
        self.waiting.append((level, x))

    def total(self):
        ((level, x),) = self.waiting
        assert level == 3
        return x + _shuffle_f32(x, Int32(1))


class Columns:
    """What a thread holds of a chunk. s_x: factor of what comes from X and dS'; scale: factor of what comes from dO."""

    def __init__(self, variant, schedule, loads, args, memory, rows, s_x):
        self.variant, self.schedule, self.loads, self.args, self.memory = variant, schedule, loads, args, memory
        self.rows, self.s_x = rows, s_x
        column = lambda: cute.make_rmem_tensor(COUNT, Float32)  # noqa: E731
        self.a, self.z, self.dq, self.kr, self.kc, self.dg = column(), column(), column(), column(), column(), column()
        self.place()

    def place(self):
        """Coordinates and addresses, made again so that they take no registers for long."""
        self.zero = _lds_volatile_b32(self.memory.table(Table.ZERO))
        coord = self.coord = Coord.read()
        lane, quarter, band = coord.lane, coord.quarter, coord.band
        base = self.base = self.memory.base + self.zero
        h, p = lane >> 4, lane & 15
        self.h, self.p = h, p
        self.rows_half = self.rows - 16 * band - 8 * h
        patch = self.patch = base + Place.PATCHES + (quarter * BANDS + band) * PATCH
        group, quad = coord.group, coord.quad
        self.patch_acc = patch + group * 128 + (((quad >> 1) ^ ((group & 3) << 1)) << 4) + (quad & 1) * 8
        self.patch_pair = patch + h * 1024 + p * 8
        self.image = base + (quarter >> 1) * 8192 + (2 * band + h) * 1024 + (quarter & 1) * 64 + p * 4
        self.level = patch + h * 512 + p * 4
        self.rows_table = base + Place.TABLES + (2 * band + h) * 32
        self.channel_table = base + Place.TABLES + quarter * 128 + p * 8
        warp = quarter * BANDS + band
        self.words = base + Place.V_NEW + warp * 1024 + lane * 16
        self.words_of_q = base + Place.T + warp * 512 + lane * 16
        self.diagonal = base + Place.V + Part.DIAGONAL + band * DIAGONAL + h * (8 * DIAGONAL_PITCH + 64)

    def park_words(self):
        """q and k to the places of V' and T: registers are short. Four words of q stay."""
        ptx.sts_v4_b32(self.words, self.k[:4])
        ptx.sts_v4_b32(self.words + 512, self.k[4:])
        ptx.sts_v4_b32(self.words_of_q, self.q[:4])
        self.q_rest = self.q[4:]

    def four_words(self, i):
        """q and k of tokens i to i + 3."""
        if i == 0:
            q = ptx.lds_v4_b32(self.words_of_q)
        else:
            zero = _lds_volatile_b32(self.memory.table(Table.ZERO))
            q = [x ^ zero for x in self.q_rest]
        return q, ptx.lds_v4_b32(self.words + i * 128)

    def fetch_words(self):
        self.q, self.k = ([x for four in words for x in four] for words in zip(*(self.four_words(i) for i in (0, 4))))

    def first_decay(self, c, i):
        """a of token i, of which running products start anew."""
        return ptx.mul(self.a[2 * i + c], ptx.as_f32(self.zero + Int32(0x3F800000)))

    # ---- small things
    def image_at(self, i):
        """Address of the pair of token i in an image of 64 rows x 128 channels at place 0."""
        return (self.image ^ (i << 4)) + i * 128

    def pair(self, i, place=Place.PATCHES):
        """Token i of what `put` left."""
        return ptx.lds_v2_f32((self.patch_pair ^ ((i & 3) << 5)) + (i * 128 + int(place) - int(Place.PATCHES)))

    def keep(self, i, x, y, place):
        """Write what `pair` reads."""
        ptx.sts_v2_f32((self.patch_pair ^ ((i & 3) << 5)) + (i * 128 + int(place) - int(Place.PATCHES)), x, y)

    def put(self, values, place=Place.PATCHES):
        """16 accumulators of the warp's rows and channels, [8 columns][row half][2], for `pair`."""
        cute.arch.sync_warp()
        for i in range(4):
            for r in range(2):
                at = (self.patch_acc ^ (i << 5)) + (r * 1024 + int(place) - int(Place.PATCHES))
                ptx.sts_v2_f32(at, values[4 * i + 2 * r], values[4 * i + 2 * r + 1])
        cute.arch.sync_warp()

    def four(self, table, i):
        """The lane's tokens i to i + 3 in a table of the chunk's rows; None, for `hat`, where they are not normalised."""
        if int(table) != int(Table.BETA) and not self.variant.l2norm:
            return [None] * 4
        return ptx.lds_v4_f32(self.rows_table + (int(table) + 4 * i))

    def eight(self, table):
        """The lane's tokens in a table of the chunk's rows."""
        return [*ptx.lds_v4_f32(self.rows_table + int(table)), *ptx.lds_v4_f32(self.rows_table + int(table) + 16)]

    def hat(self, word, scale):
        """q^ or k^ of a token, a pair; scale: of this token."""
        pair = ptx.unpack_bf16x2(word)
        return pair if scale is None else tuple(ptx.mul(x, scale) for x in pair)

    def band_decay(self, band):
        """Decay of a whole band, of the lane's channels."""
        return ptx.lds_v2_f32(self.channel_table + Table.BAND + band * 512)

    def other(self, x):
        """x of the lane with the band's other tokens."""
        return _shuffle_f32(x, Int32(16))

    @cute.jit
    def mask(self, values, filler: cutlass.Constexpr):
        """Replace values of tokens past the sequence's end."""
        if self.rows < CHUNK:
            for i in cutlass.range_constexpr(COUNT):
                values[i] = _keep_less(Int32(i // 2), self.rows_half, values[i], Float32(filler))

    # ---- decays and images, from g, q and k
    def load(self, gate_scale, a_log, bias):
        """a, and q and k as words."""
        gate = GATES[self.variant.gate](1.0)
        rate, biases = None, [None, None]
        if gate.has_tables:
            rate, biases = gate.tables(a_log, bias)
        constant = gate.constant(gate_scale)
        g = self.load_g()
        for i in range(0, TOKENS, 2):
            for c in range(2):
                y = gate.log2_decay([g[i][c], g[i + 1][c]], rate, biases[c], constant)
                for e in range(2):
                    self.a[2 * (i + e) + c] = ptx.ex2(y[e])
        self.mask(self.a, 1.0)
        self.q, self.k = ([ptx.lds_b32(self.image_at(i) + int(at)) for i in range(TOKENS)] for at in (Place.Q, Place.K))

    def load_g(self):
        if self.loads.wide_gate:
            g = [ptx.lds_v2_f32((self.patch_pair ^ (i << 4)) + i * 128) for i in range(TOKENS)]
            cute.arch.sync_warp()  # read before the patch is written
            return g
        return [ptx.unpack_bf16x2(ptx.lds_b32(self.image_at(i) + int(Place.K_NEXT))) for i in range(TOKENS)]

    def find_decays(self):
        """`lo`, `hi`; the band's decay to its table."""
        whole = [self.a[0], self.a[1]]
        for i in range(2, COUNT):
            whole[i % 2] = ptx.mul(whole[i % 2], self.a[i])
        theirs = [self.other(x) for x in whole]
        self.lo = [ptx.less_f32(self.h, 1, 1.0, x) for x in theirs]
        self.hi = [ptx.less_f32(self.h, 1, x, 1.0) for x in theirs]
        at = self.channel_table + Table.BAND + self.coord.band * 512
        ptx.sts_v2_f32(at, *(ptx.mul(x, y) for x, y in zip(whole, theirs)))

    def write_row_images(self):
        """q_row and k_row over q and k, the same without `lo` to the level images. Each lane over its own."""
        p = [Float32(1.0)] * 2
        for i in range(TOKENS):
            if i % 4 == 0:
                q_scale, k_scale, beta = self.four(Table.RSTD, i), self.four(K_RSTD, i), self.four(Table.BETA, i)
            p = [self.first_decay(c, i) if i == 0 else ptx.mul(p[c], self.a[2 * i + c]) for c in range(2)]
            at = self.image_at(i)
            x = [ptx.mul(y, p[c]) for c, y in enumerate(self.hat(self.q[i], q_scale[i % 4]))]
            ptx.sts_b32(at + int(Place.Q), ptx.pack_bf16x2(*(ptx.mul(x[c], self.lo[c]) for c in range(2))))
            _sts_b32_less(self.level_at(i), ptx.pack_bf16x2(*x), Int32(0), self.h)
            x = [ptx.mul(ptx.mul(y, beta[i % 4]), p[c]) for c, y in enumerate(self.hat(self.k[i], k_scale[i % 4]))]
            ptx.sts_b32(at + int(Place.K), ptx.pack_bf16x2(*(ptx.mul(x[c], self.lo[c]) for c in range(2))))
            ptx.sts_b32(self.level_at(i) + 1024, ptx.pack_bf16x2(*x))

    def write_next_image(self):
        """k_next over g, without `hi` to the level images."""
        n = None
        for i in range(TOKENS - 1, -1, -1):
            if i % 4 == 3:
                k_scale = self.four(K_RSTD, i - 3)
            x = self.hat(self.k[i], k_scale[i % 4])
            if n is not None:
                x = [ptx.mul(x[c], n[c]) for c in range(2)]
            n = [self.first_decay(c, i) if n is None else ptx.mul(n[c], self.a[2 * i + c]) for c in range(2)]
            ptx.sts_b32(self.image_at(i) + int(Place.K_NEXT), ptx.pack_bf16x2(*(ptx.mul(x[c], self.hi[c]) for c in range(2))))
            _sts_b32_less(self.level_at(i), ptx.pack_bf16x2(*x), self.h, Int32(1))

    def level_at(self, i):
        """Address of the lane's pair of token i in the first level image: bf16, 16 rows of 64 bytes, in the patch. Its rows 0
        to 7 are k^ N, its rows 8 to 15 q^ P; those of the second one, 1024 bytes behind it, beta k^ P."""
        return (self.level ^ ((i >> 1) << 4)) + i * 64

    def find_band_decays(self):
        """Decays of all bands behind this one."""
        self.behind = [Float32(1.0)] * 2
        for b in range(1, BANDS):
            t = self.band_decay(b)
            self.behind = [ptx.mul(x, ptx.less_f32(self.coord.band, b, y, 1.0)) for x, y in zip(self.behind, t)]

    # ---- between the halves of the band
    def add_level(self):
        """Z = Y8_q in lanes of the second half, -Y8_c in those of the first; kr = Y8_k; dG."""
        coord = self.coord
        at = self.patch + (coord.lane & 7) * 64 + (((coord.lane >> 3) ^ ((coord.lane & 7) >> 1)) << 4)
        columns, q, k = (ptx.ldmatrix_x4_trans(at + offset) for offset in (0, 512, 1536))
        words = [[ptx.lds_b32(self.level_at(i) + which * 1024) for i in range(TOKENS)] for which in range(2)]
        pairs = self.base + Place.V + Part.DIAGONAL + coord.band * DIAGONAL
        a0, m0, a1, m1 = ptx.lds_v4_f32(pairs + (8 + coord.group) * DIAGONAL_PITCH + coord.quad * 16)
        lead, d_m = ptx.pack_bf16x2(a0, a1), ptx.pack_bf16x2(m0, m1)
        rest = ptx.rest_bf16x2(a0, a1, lead)
        minus = [ptx.movmatrix(x) ^ Int32(-0x7FFF8000) for x in (lead, rest, d_m)]
        none = Int32(0)
        first, second = [], []
        for n in range(4):
            rows = ptx.mma_bf16_k8([d_m, lead], columns[n], [Float32(0.0)] * 4)
            rows = ptx.mma_bf16_k8([none, rest], columns[n], rows)
            y = ptx.mma_bf16([minus[0], none, minus[2], none], [q[n], k[n]], [Float32(0.0)] * 4)
            y = ptx.mma_bf16_k8([minus[1], none], q[n], y)
            first += [y[0], y[1], rows[2], rows[3]]
            second += [Float32(0.0), Float32(0.0), rows[0], rows[1]]
        for values, target, operands in ((first, self.z, words[0]), (second, self.kr, words[1])):
            self.put(values)
            for i in range(TOKENS):
                pair, operand = self.pair(i), ptx.unpack_bf16x2(operands[i])
                for c in range(2):
                    target[2 * i + c] = pair[c]
                    x = ptx.mul(operand[c], pair[c])
                    self.dg[2 * i + c] = x if target is self.z else self.dg[2 * i + c] + x

    # ---- after the products
    def start_columns(self):
        """kc = Y8_c, to be multiplied by N; Z = Y8_q."""
        first = ptx.less_f32(self.h, 1, -1.0, 0.0)
        second = ptx.less_f32(self.h, 1, 0.0, 1.0)
        for i in range(COUNT):
            self.kc[i] = ptx.mul(first, self.z[i])
            self.z[i] = ptx.mul(second, self.z[i])

    def finish_columns(self):
        """kc with Y_c and dKe, but for what is inside the halves; e to the place of dS'; dG."""
        factor = [self.behind[c] * self.s_x for c in range(2)]
        n = None
        for i in range(TOKENS - 1, -1, -1):
            pair, operand = self.pair(i, Place.DS), ptx.unpack_bf16x2(ptx.lds_b32(self.image_at(i) + int(Place.K_NEXT)))
            x, u = [factor[c] * pair[c] for c in range(2)], self.pair(i)
            self.keep(i, *(operand[c] * x[c] for c in range(2)), Place.DS)
            for c in range(2):
                o = 2 * i + c
                self.dg[o] = ptx.fma(-operand[c], u[c], self.dg[o])
                y = ptx.fma(self.hi[c], u[c] + x[c], self.kc[o])
                self.kc[o] = y if n is None else ptx.mul(n[c], y)
            n = [self.first_decay(c, i) if n is None else ptx.mul(n[c], self.a[2 * i + c]) for c in range(2)]

    # ---- between bands
    def tile_address(self, place, band):
        """ldmatrix address of the first 16 of the warp's channels in a band; that of the others with bit 5 flipped."""
        lane, quarter = self.coord.lane, self.coord.quarter
        piece = 4 * (quarter & 1) + (lane >> 4)
        return self.base + place + (quarter >> 1) * 8192 + (16 * band + (lane & 15)) * 128 + ((piece ^ (lane & 7)) << 4)

    def _decay_columns(self, band, *accumulators):
        """Accumulators times the decay of a whole band."""
        coord = self.coord
        at = self.base + Place.TABLES + Table.BAND + band * 512 + coord.quarter * 128 + coord.quad * 8
        for n in range(4):
            t = ptx.lds_v2_f32(at + n * 32)
            for y in accumulators:
                for e in range(4):
                    y[4 * n + e] = ptx.mul(y[4 * n + e], t[e & 1])

    @cute.jit
    def add_bands_before(self, d_q, x_s, scale, minus):
        """Accumulators of dQ_ and X S^T become U_q and U_k. minus: -s_x. Horner's scheme over the bands before."""
        coord = self.coord
        for i in cutlass.range_constexpr(COUNT):
            d_q[i] = ptx.mul(d_q[i], scale)
            x_s[i] = ptx.mul(x_s[i], minus)
        blocks = self.base + Place.V + (coord.band * (coord.band - 1) >> 1) * BLOCK
        for c in cutlass.range(coord.band, unroll=1):
            self._decay_columns(c, d_q, x_s)
            d_a, d_m = (
                ptx.ldmatrix_x4(block_address(blocks + c * BLOCK + int(part), coord.lane)) for part in (Part.D_A, Part.D_M)
            )
            at = self.tile_address(Place.K_NEXT, c)
            for kk in cutlass.range_constexpr(2):
                words = ptx.ldmatrix_x4_trans(at ^ (kk << 5))
                for n in cutlass.range_constexpr(2):
                    for y, p in ((d_q, d_a), (x_s, d_m)):
                        self._multiply_add(y, 8 * kk + 4 * n, p, words[2 * n : 2 * n + 2])

    def _multiply_add(self, y, o, p, b):
        sums = ptx.mma_bf16(p, b, [y[o + e] for e in range(4)])
        for e in range(4):
            y[o + e] = sums[e]

    def add_rows_between(self, level, image, place):
        """dq or kr but for what is inside the halves: P (level + lo U), in the place of U; dG."""
        p = None
        for i in range(TOKENS):
            u, operand = self.pair(i, place), ptx.unpack_bf16x2(ptx.lds_b32(self.image_at(i) + int(image)))
            p = [self.first_decay(c, i) if i == 0 else ptx.mul(p[c], self.a[2 * i + c]) for c in range(2)]
            found = []
            for c in range(2):
                found.append(ptx.mul(p[c], ptx.fma(self.lo[c], u[c], level[2 * i + c])))
                self.dg[2 * i + c] = ptx.fma(operand[c], u[c], self.dg[2 * i + c])
            self.keep(i, *found, place)

    @cute.jit
    def put_bands_behind(self):
        """Y_c, the sum over the bands behind, for `pair`. Horner's scheme from the last band on."""
        coord = self.coord
        y = cute.make_rmem_tensor(COUNT, Float32)
        for i in cutlass.range_constexpr(COUNT):
            y[i] = Float32(0.0)
        for step in cutlass.range(BANDS - 1 - coord.band, unroll=1):
            b = BANDS - 1 - step
            self._decay_columns(b, y)  # 0 at first
            blocks = self.base + Place.V + ((b * (b - 1) >> 1) + coord.band) * BLOCK
            for part, place in ((Part.D_A, Place.Q), (Part.D_M, Place.K)):
                p = ptx.ldmatrix_x4_trans(transposed_block_address(blocks + int(part), coord.lane))
                at = self.tile_address(place, b)
                for kk in cutlass.range_constexpr(2):
                    words = ptx.ldmatrix_x4_trans(at ^ (kk << 5))
                    for n in cutlass.range_constexpr(2):
                        self._multiply_add(y, 8 * kk + 4 * n, p, words[2 * n : 2 * n + 2])
        self.put(y)

    # ---- inside the half
    def pairs(self, i, count):
        """(dA, dM) of token i and of tokens 0 to count - 1 of its half."""
        words = [ptx.lds_v4_f32(self.diagonal + (i * DIAGONAL_PITCH + 16 * j)) for j in range((count + 1) // 2)]
        return [words[j // 2][2 * (j % 2) : 2 * (j % 2) + 2] for j in range(count)]

    def add_rows_inside(self):
        """Pairs j < i of the half in dq and kr, the diagonal; sums for dbeta and of dq q. kr enters kc."""
        decayed = []
        k_sums, q_sums = RowSums(self.coord.lane), RowSums(self.coord.lane)
        for i in range(TOKENS):
            if i % 4 == 0:
                q_scale, k_scale, beta = self.four(Table.RSTD, i), self.four(K_RSTD, i), self.four(Table.BETA, i)
                q_words, k_words = self.four_words(i)
            m = self.pairs(i, i + 1)
            q, k = self.hat(q_words[i % 4], q_scale[i % 4]), self.hat(k_words[i % 4], k_scale[i % 4])
            dq, kr = self.pair(i, Place.S), self.pair(i, Place.X)
            k_sum = q_sum = None
            for c in range(2):
                o = 2 * i + c
                p, r = dq[c], kr[c]
                if i > 0:
                    x = y = None
                    for j in range(i):
                        z = decayed[2 * j + c] = ptx.mul(decayed[2 * j + c], self.a[o])
                        x = ptx.mul(m[j][0], z) if x is None else ptx.fma(m[j][0], z, x)
                        y = ptx.mul(m[j][1], z) if y is None else ptx.fma(m[j][1], z, y)
                    self.dg[o] = ptx.fma(q[c], x, ptx.fma(ptx.mul(beta[i % 4], k[c]), y, self.dg[o]))
                    p, r = p + x, r + y
                decayed.append(k[c])
                p = self.dq[o] = ptx.fma(m[i][0], k[c], p)
                self.kc[o] = ptx.fma(beta[i % 4], r, ptx.fma(m[i][0], q[c], self.kc[o]))
                k_sum = k[c] * r if c == 0 else ptx.fma(k[c], r, k_sum)
                q_sum = q[c] * p if c == 0 else ptx.fma(q[c], p, q_sum)
            self.keep(i, self.dq[2 * i], self.dq[2 * i + 1], Place.S)
            k_sums.add(k_sum)
            if self.normalises:
                q_sums.add(q_sum)
        self.store_row_sum(Table.DOT_BETA, k_sums)
        if self.normalises:
            self.store_row_sum(Table.DOT_Q, q_sums)

    def add_columns_inside(self):
        """Pairs j < i of the half in kc and dG; sums of dk k."""
        sums = [None] * COUNT
        dots = RowSums(self.coord.lane)
        for i in range(TOKENS - 1, -1, -1):
            if i % 4 == 3:
                q_scale, k_scale, beta = (self.four(t, i - 3) for t in (Table.RSTD, K_RSTD, Table.BETA))
                q_words, k_words = self.four_words(i - 3)
            k, dot = self.hat(k_words[i % 4], k_scale[i % 4]), None
            for c in range(2):
                o = 2 * i + c
                if i < TOKENS - 1:
                    self.kc[o] = self.kc[o] + sums[o]
                    self.dg[o] = self.dg[o] - k[c] * sums[o]
                dot = k[c] * self.kc[o] if c == 0 else ptx.fma(k[c], self.kc[o], dot)
            if self.normalises:
                dots.add(dot)
            if i > 0:
                q, m = self.hat(q_words[i % 4], q_scale[i % 4]), self.pairs(i, i)
                for c in range(2):
                    beta_k = ptx.mul(beta[i % 4], k[c])
                    for j in range(i):
                        o = 2 * j + c
                        x = ptx.mul(m[j][0], q[c]) if sums[o] is None else ptx.fma(m[j][0], q[c], sums[o])
                        sums[o] = ptx.mul(ptx.fma(m[j][1], beta_k, x), self.a[2 * i + c])
        if self.normalises:
            self.store_row_sum(Table.DOT_K, dots, TOKENS - 1)

    @property
    def normalises(self):
        """Whether the gradients go through the normalisation here."""
        return self.variant.l2norm and not self.schedule.grouped

    def store_row_sum(self, table, sums, flipped=0):
        """Sums over the quarter's channels of a value per token, to the quarter's part of a table. flipped: 7 where the tokens
        came from the last one on."""
        p = self.p
        token = (p >> 3) | (p >> 1 & 2) | (p << 1 & 4)
        token = token ^ flipped
        ptx.sts_f32(self.rows_table + int(table) + self.coord.quarter * 256 + token * 4, sums.total())

    # ---- sums that other warps need
    def share_sums(self):
        """q, k, dq and e into registers; sums of dG and e over the band, to the warp's patch."""
        self.fetch_words()
        self.fetch_sums()
        cute.arch.sync_warp()  # the patch has been read
        self.others = []
        for which, values in ((Sums.D_G, self.dg), (Sums.E, self.e)):
            totals = []
            for c in range(2):
                total = values[c]
                for i in range(1, TOKENS):
                    total = total + values[2 * i + c]
                totals.append(total)
            others = [self.other(x) for x in totals]
            ptx.sts_v2_f32(self.patch + self.p * 8 + int(which), *(x + y for x, y in zip(totals, others)))
            self.others.append(others)

    def fetch_sums(self):
        """dq and e."""
        self.e = [x for i in range(TOKENS) for x in self.pair(i, Place.DS)]
        dq = [x for i in range(TOKENS) for x in self.pair(i, Place.S)]
        for i in range(COUNT):
            self.dq[i] = dq[i]

    # ---- results
    @cute.jit
    def store_q_and_k(self, token, head):
        """dq and dk: through the normalisation, or as they are for the host to add up over heads."""
        for out, gradient, words, norms, dots in (
            (self.args.dq, self.dq, self.q, Table.RSTD, Table.DOT_Q),
            (self.args.dk, self.kc, self.k, K_RSTD, Table.DOT_K),
        ):
            if out != 0:
                self._store_q_or_k(out, gradient, words, norms, dots, token, head)

    def _store_q_or_k(self, out, gradient, words, norms, dots, token, head):
        dtype, values = "fp32" if self.schedule.grouped else "bf16", [gradient[i] for i in range(COUNT)]
        if self.normalises:
            parts = [self.eight(int(dots) + 256 * quarter) for quarter in range(4)]
            scales = self.eight(norms)
            for i in range(TOKENS):
                dot = (parts[0][i] + parts[1][i]) + (parts[2][i] + parts[3][i])
                minus = -(dot * scales[i])
                for c, x in enumerate(ptx.unpack_bf16x2(words[i])):
                    values[2 * i + c] = ptx.mul(ptx.fma(minus, x, values[2 * i + c]), scales[i])
        self.store_values(out, values, dtype, token, head)

    def store_values(self, out, values, dtype, token, head):
        """The lane's part of a gradient [tokens, heads, 128]."""
        size = 4 if dtype == "fp32" else 2
        row = Int64(token + 16 * self.coord.band + 8 * self.h) * self.args.heads + head
        at = out + row * (128 * size) + Int64((self.coord.quarter * 32 + 2 * self.p) * size)
        store_pairs(at, self.args.heads * (128 * size), values, dtype, self.rows_half)

    def store_gate(self, g, a_log, bias, token, head):
        """dg; the sums over the band's tokens of the gradients of dt_bias and of A_log, to the warp's patch. g: pairs."""
        coord = self.coord
        run, prefix = [], []
        decay = [self.band_decay(b) for b in range(BANDS)]
        c0 = [ptx.lds_v2_f32(self.channel_table + Table.C0 + part * 512) for part in range(2)]
        for c in range(2):
            whole = ptx.mul(ptx.mul(decay[0][c], decay[1][c]), ptx.mul(decay[2][c], decay[3][c]))
            run.append(whole * (c0[0][c] + c0[1][c]) * self.s_x)
            prefix.append(ptx.less_f32(self.h, 1, 0.0, self.others[1][c]))
            run[c] = run[c] + ptx.less_f32(self.h, 1, self.others[0][c], 0.0)
        at = self.base + Place.PATCHES + coord.quarter * (BANDS * PATCH) + self.p * 8
        for b in range(BANDS):
            if b > 0:
                x = ptx.lds_v2_f32(at + (b * PATCH + int(Sums.D_G)))
                run = [run[c] + ptx.less_f32(coord.band, b, x[c], 0.0) for c in range(2)]
            if b < BANDS - 1:
                x = ptx.lds_v2_f32(at + (b * PATCH + int(Sums.E)))
                prefix = [prefix[c] + ptx.less_f32(b, coord.band, x[c], 0.0) for c in range(2)]
        for i in range(COUNT - 1, -1, -1):
            run[i % 2] = run[i % 2] + self.dg[i]
            self.dg[i] = run[i % 2]
        for i in range(COUNT):
            self.dg[i] = self.dg[i] + prefix[i % 2]
            if i < COUNT - 2:
                prefix[i % 2] = prefix[i % 2] + self.e[i]
        self.mask(self.dg, 0.0)
        gradients = [GRADIENTS[self.variant.gate](bias[c], a_log, self.args.gate_scale) for c in range(2)]
        bias_sums, a_log_sums = [Float32(0.0)] * 2, [Float32(0.0)] * 2
        d = []
        for i in range(COUNT):
            c = i % 2
            x, factors = gradients[c](g[i // 2][c], self.dg[i])
            d.append(x)
            bias_sums[c] = bias_sums[c] + x
            a_log_sums[c] = ptx.fma(*factors, a_log_sums[c])
        self.store_if_wanted(self.args.dg, d, self.variant.gate_dtype, token, head)
        if self.variant.a_log is not None:
            sums = [gradients[c].a_log_sum(a_log_sums[c], bias_sums[c]) for c in range(2)]
            self.share_sum(Sums.A_LOG, sums)
        if self.variant.dt_bias is not None:
            self.share_sum(Sums.BIAS, bias_sums)

    def share_sum(self, place, sums):
        """Sums over the band, to the warp's patch."""
        ptx.sts_v2_f32(self.patch + self.p * 8 + int(place), *(x + self.other(x) for x in sums))

    @cute.jit
    def store_if_wanted(self, out, values, dtype: cutlass.Constexpr, token, head):
        if out != 0:
            self.store_values(out, values, dtype, token, head)
