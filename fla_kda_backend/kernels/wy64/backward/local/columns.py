"""The column phase: everything with decays. A lane owns a channel and the 16 tokens of its warp's band.

Accumulators come to this layout through the warp's patch of shared memory (`to_columns`). All decays are running products of
a_i = 2^y_i over tokens on one side of what they join: r = a_0 .. a_i within the band, n = a_(j+1) .. a_15. Nothing is divided.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.wy64.backward.local.gates import GRADIENTS
from fla_kda_backend.kernels.wy64.backward.local.loads import column_offset
from fla_kda_backend.kernels.wy64.backward.local.memory import (
    BLOCK,
    DIAGONAL,
    DIAGONAL_PITCH,
    PATCH,
    WORDS,
    Coord,
    Part,
    Place,
    Sums,
    Table,
)
from fla_kda_backend.kernels.wy64.backward.local.stores import store_column
from fla_kda_backend.kernels.wy64.backward.local.tensors import block_address
from fla_kda_backend.kernels.wy64.prepare.gates import GATES
from fla_kda_backend.kernels.wy64.record import BANDS

TOKENS = 16

_shuffle_f32 = ptx.ordered("shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;", "fr -> f", "The fp32 of lane XOR mask.")


def row_sums(values, lane):
    """Sums over the warp's lanes of 16 values; that of value lane / 2 comes to a lane."""
    for mask in (16, 8, 4, 2):
        half, side = len(values) // 2, lane & mask
        kept = [ptx.less_f32(side, 1, values[i], values[i + half]) for i in range(half)]
        sent = [ptx.less_f32(side, 1, values[i + half], values[i]) for i in range(half)]
        values = [x + _shuffle_f32(y, Int32(mask)) for x, y in zip(kept, sent)]
    return values[0] + _shuffle_f32(values[0], Int32(1))


def round_pair(x, y):
    """Two fp32 rounded to bf16, as fp32."""
    return ptx.unpack_bf16x2(ptx.pack_bf16x2(x, y))


class Columns:
    """What a thread holds of a chunk. s_x: factor of what comes from X and dS'; scale: factor of what comes from dO."""

    def __init__(self, variant, schedule, loads, args, memory, coord, rows, s_x):
        self.variant, self.schedule, self.loads, self.args, self.memory = variant, schedule, loads, args, memory
        self.rows, self.s_x = rows, s_x
        column = lambda: cute.make_rmem_tensor(TOKENS, Float32)  # noqa: E731
        self.dq, self.kr, self.kc, self.dg = column(), column(), column(), column()
        self.place(coord)

    def place(self, coord):
        """Coordinates and addresses."""
        self.coord, base = coord, self.memory.base
        self.rows_band = self.rows - TOKENS * coord.band
        patch = base + Place.PATCHES + (coord.quarter * BANDS + coord.band) * PATCH
        group, quad = coord.group, coord.quad
        self.patch_acc = patch + group * 128 + (((quad >> 1) ^ ((group & 3) << 1)) << 4) + (quad & 1) * 8
        self.patch_column = patch + coord.lane * 4
        self.words = base + coord.warp * WORDS + coord.lane * 4
        self.column = column_offset(coord)

    # ---- small things
    def four(self, table, i):
        """Rows i to i + 3 of the band in a table of the chunk's rows."""
        return ptx.lds_v4_f32(self.memory.table(table) + self.coord.band * 64 + i * 4)

    def scales(self, table, i):
        """1 / norm of four rows."""
        return self.four(table, i) if self.variant.l2norm else [None] * 4

    def hat(self, words, i, scale):
        """q^ or k^ of token i from the packed words; scale: of this row."""
        x = ptx.unpack_bf16x2(words[i // 2])[i % 2]
        return x if scale is None else ptx.mul(x, scale)

    def band_decay(self, band):
        """Decay of a whole band, of the lane's channel."""
        return ptx.lds_f32(self.memory.table(Table.BAND) + band * 512 + self.coord.channel * 4)

    def fresh(self):
        """Pin a, q and k and read the coordinates again: what is computed from them is computed again rather than kept."""
        self.place(Coord.read())
        for name in ("a", "q", "k"):
            x = getattr(self, name)
            setattr(self, name, [y for i in range(0, len(x), 8) for y in ptx.pin(tuple(x[i : i + 8]))])

    def one(self):
        """1, so that running products are made anew each time: ptxas would keep them in registers."""
        return ptx.lds_f32(self.memory.table(Table.ONE))

    def upwards(self):
        """Yields four tokens at a time, and r of each: the decay from the band's start up to and with it."""
        r = self.one()
        for i in range(0, TOKENS, 4):
            four = []
            for t in range(i, i + 4):
                r = ptx.mul(r, self.a[t])
                four.append(r)
            yield i, four

    def downwards(self):
        """Yields four tokens at a time, the last ones first, and n of each: the decay from behind it to the band's end."""
        n = self.one()
        for i in range(TOKENS - 4, -1, -4):
            four = []
            for t in range(i + 3, i - 1, -1):
                four.append(n)
                n = ptx.mul(n, self.a[t])
            yield i, four[::-1]

    def four_hats(self, words, table, i):
        """q^ or k^ of tokens i to i + 3."""
        return [self.hat(words, i + e, s) for e, s in enumerate(self.scales(table, i))]

    def four_beta_k(self, i):
        """beta k^ of tokens i to i + 3."""
        return [ptx.mul(b, k) for b, k in zip(self.four(Table.BETA, i), self.four_hats(self.k, Table.RSTD + 256, i))]

    @cute.jit
    def to_columns(self, acc):
        """Bring 16 accumulators of the warp's rows and channels into its patch, for `from_patch`."""
        cute.arch.sync_warp()
        for kk in cutlass.range_constexpr(2):
            self.to_half_patch(kk, [acc[8 * kk + e] for e in range(8)])
        cute.arch.sync_warp()

    def to_half_patch(self, kk, acc):
        """The accumulators of 16 channels; warp barriers before and after."""
        for n in range(2):
            for r in range(2):
                ptx.sts_v2_f32((self.patch_acc ^ ((2 * kk + n) << 5)) + r * 1024, acc[4 * n + 2 * r], acc[4 * n + 2 * r + 1])

    def from_patch(self, i):
        """Token i of what `to_columns` left."""
        return ptx.lds_f32(self.patch_at(i))

    def patch_at(self, i):
        return (self.patch_column ^ ((i & 3) << 5)) + i * 128

    # ---- decays and images, from g, q and k
    def load(self, gate_scale, a_log, bias):
        """a, q and k of the lane's tokens; then the images of q and k, and the band's decay."""
        gate = GATES[self.variant.gate](1.0)
        rate = None
        gate_bias = None
        if gate.has_tables:
            rate, (gate_bias,) = gate.tables(a_log, [bias])
        constant = gate.constant(gate_scale)
        g = self.loads.g_column(self.args, self.memory, self.coord)
        self.a = []
        for i in range(0, TOKENS, 2):
            y = gate.log2_decay(g[i : i + 2], rate, gate_bias, constant)
            self.a += [ptx.less_f32(i + e, self.rows_band, ptx.ex2(y[e]), 1.0) for e in range(2)]
        self.q, self.k = (self.load_words(self.memory.base + place + self.column) for place in (Place.Q, Place.K))

    def load_words(self, at):
        """Pairs of tokens of the lane's channel; zeros past the end."""
        words = []
        for i in range(0, TOKENS, 2):
            x, y = (ptx.lds_b16((at ^ (((i + e) & 7) << 4)) + (i + e) * 128) for e in range(2))
            words.append(ptx.less_b32(i, self.rows_band, x, 0) | ptx.less_b32(i + 1, self.rows_band, y << 16, 0))
        return words

    def write_images(self):
        """q_row, k_row and k_next over q, k and g: all of the tile that this warp alone has read."""
        cute.arch.sync_warp()
        base = self.memory.base + self.column
        at = lambda place, t: (base ^ ((t & 7) << 4)) + t * 128 + place  # noqa: E731
        for i, r in self.upwards():
            q, bk = self.four_hats(self.q, Table.RSTD, i), self.four_beta_k(i)
            for e in range(4):
                word = ptx.pack_bf16x2(ptx.mul(q[e], r[e]), ptx.mul(bk[e], r[e]))
                ptx.sts_b16(at(Place.Q, i + e), word)
                ptx.sts_b16(at(Place.K, i + e), word >> 16)
        ptx.sts_f32(self.memory.table(Table.BAND) + self.coord.band * 512 + self.coord.channel * 4, r[3])
        for i, n in self.downwards():
            k = self.four_hats(self.k, Table.RSTD + 256, i)
            for e in range(0, 4, 2):
                word = ptx.pack_bf16x2(ptx.mul(k[e], n[e]), ptx.mul(k[e + 1], n[e + 1]))
                ptx.sts_b16(at(Place.K_NEXT, i + e), word)
                ptx.sts_b16(at(Place.K_NEXT, i + e + 1), word >> 16)

    def find_band_decays(self):
        """Decays of all bands before this one, of all bands behind it; dG begins with D C0 s_x."""
        before, behind, whole = Float32(1.0), Float32(1.0), Float32(1.0)
        for b in range(BANDS):
            t = self.band_decay(b)
            before = ptx.mul(before, ptx.less_f32(b, self.coord.band, t, 1.0))
            behind = ptx.mul(behind, ptx.less_f32(self.coord.band, b, t, 1.0))
            whole = ptx.mul(whole, t)
        c0 = Float32(0.0)
        for part in range(4):
            c0 = c0 + ptx.lds_f32(self.memory.table(Table.C0) + part * 512 + self.coord.channel * 4)
        self.before, self.behind = before, behind
        for i in range(TOKENS):
            self.kc[i] = self.dg[i] = Float32(0.0)
        # enters every token's d as a part of the last token's dG
        self.dg[TOKENS - 1] = ptx.less_f32(self.coord.band, BANDS - 1, 0.0, whole * c0 * self.s_x)

    # ---- products with the states, in the patch
    def add_d_q(self):
        """dQ_: dq += r before scale dQ_, and its part of dG."""
        factor = self.before * self.args.scale
        for i, r in self.upwards():
            q = self.four_hats(self.q, Table.RSTD, i)
            for e in range(4):
                x = r[e] * factor * self.from_patch(i + e)
                self.dq[i + e] = self.dq[i + e] + x
                self.dg[i + e] = self.dg[i + e] + q[e] * x

    def add_x_w(self):
        """X S^T: kr -= r before s_x (X S^T), and its part of dG."""
        factor = Float32(0.0) - self.before * self.s_x
        for i, r in self.upwards():
            bk = self.four_beta_k(i)
            for e in range(4):
                x = r[e] * factor * self.from_patch(i + e)
                self.kr[i + e] = self.kr[i + e] + x
                self.dg[i + e] = self.dg[i + e] + bk[e] * x

    def add_d_k_end(self):
        """dKe: kc += n behind s_x dKe; e, which stays in the patch, and its sum over the band."""
        factor, total = self.behind * self.s_x, Float32(0.0)
        for i, n in self.downwards():
            k = self.four_hats(self.k, Table.RSTD + 256, i)
            for t in range(3, -1, -1):
                x = n[t] * factor * self.from_patch(i + t)
                self.kc[i + t] = self.kc[i + t] + x
                e = k[t] * x
                total = total + e
                ptx.sts_f32(self.patch_at(i + t), e)  # over what this lane alone has read
        ptx.sts_f32(self.memory.table(Table.E) + self.coord.band * 512 + self.coord.channel * 4, total)

    # ---- between bands
    def tile_address(self, place, band):
        """ldmatrix address of the first 16 of the warp's channels in a band; that of the others with bit 5 flipped."""
        lane, quarter = self.coord.lane, self.coord.quarter
        piece = 4 * (quarter & 1) + (lane >> 4)
        return self.memory.base + place + (quarter >> 1) * 8192 + (16 * band + (lane & 15)) * 128 + ((piece ^ (lane & 7)) << 4)

    @cute.jit
    def sum_over_bands_before(self, kk: cutlass.Constexpr, part: cutlass.Constexpr):
        """Sums over bands c before of P[b, c] kcol(b)[c], P = dA or dM, of 16 channels, to the patch."""
        coord = self.coord
        f, y = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(8, Float32)
        f[0] = f[1] = Float32(1.0)
        for i in cutlass.range_constexpr(8):
            y[i] = Float32(0.0)
        for step in cutlass.range(coord.band, unroll=1):
            c = coord.band - 1 - step
            number = coord.band * (coord.band - 1) // 2 + c
            p = ptx.ldmatrix_x4(block_address(self.memory.base + Place.V + part + number * BLOCK, coord.lane))
            words = ptx.ldmatrix_x4_trans(self.tile_address(Place.K_NEXT, c) ^ (kk << 5))
            t_at = self.memory.table(Table.BAND) + c * 512 + coord.quarter * 128 + coord.group * 4 + kk * 64
            for n in cutlass.range_constexpr(2):
                b = []
                for word in words[2 * n : 2 * n + 2]:
                    x0, x1 = ptx.unpack_bf16x2(word)
                    b.append(ptx.pack_bf16x2(ptx.mul(x0, f[n]), ptx.mul(x1, f[n])))
                sums = ptx.mma_bf16(p, b, [y[4 * n + e] for e in range(4)])
                for e in cutlass.range_constexpr(4):
                    y[4 * n + e] = sums[e]
                f[n] = ptx.mul(f[n], ptx.lds_f32(t_at + n * 32))
        self.to_half_patch(kk, y)

    def add_y(self, target, operands):
        """Y_q or Y_k, in the patch: target += r Y, dG += row operand Y. operands: a function that makes q^ or beta k^ of four
        tokens."""
        for i, r in self.upwards():
            x = [ptx.mul(y, f) for y, f in zip(operands(i), r)]
            x = [*round_pair(*x[:2]), *round_pair(*x[2:])]
            for e in range(4):
                y = self.from_patch(i + e)
                target[i + e] = target[i + e] + r[e] * y
                self.dg[i + e] = self.dg[i + e] + x[e] * y

    def add_y_q(self):
        """dq = r Y_q, and its part of dG."""
        self.fresh()
        self._add_rows_between(int(Part.D_A), self.dq, lambda i: self.four_hats(self.q, Table.RSTD, i))

    def add_y_k(self):
        """kr = r Y_k, and its part of dG."""
        self.fresh()
        self._add_rows_between(int(Part.D_M), self.kr, self.four_beta_k)

    @cute.jit
    def _add_rows_between(self, part: cutlass.Constexpr, target, operands: cutlass.Constexpr):
        for i in cutlass.range_constexpr(TOKENS):
            target[i] = Float32(0.0)
        if self.coord.band > 0:
            cute.arch.sync_warp()
            for kk in cutlass.range_constexpr(2):
                self.sum_over_bands_before(kk, part)
            cute.arch.sync_warp()
            self.add_y(target, operands)

    @cute.jit
    def add_columns_between(self):
        """kc = sum over bands b behind of n between Y_c(b); its part of dG, less what `add_in_band` takes off for all of kc."""
        coord = self.coord
        f = cute.make_rmem_tensor(1, Float32)
        f[0] = Float32(1.0)
        for b in cutlass.range(coord.band + 1, BANDS, unroll=1):
            number = b * (b - 1) // 2 + coord.band
            cute.arch.sync_warp()
            for kk in cutlass.range_constexpr(2):
                y = [Float32(0.0)] * 8
                for part, place in ((Part.D_A, Place.Q), (Part.D_M, Place.K)):
                    w = ptx.ldmatrix_x4_trans(block_address(self.memory.base + Place.V + part + number * BLOCK, coord.lane))
                    words = ptx.ldmatrix_x4_trans(self.tile_address(place, b) ^ (kk << 5))
                    y = [
                        x
                        for n in range(2)
                        for x in ptx.mma_bf16([w[0], w[2], w[1], w[3]], words[2 * n : 2 * n + 2], y[4 * n : 4 * n + 4])
                    ]
                self.to_half_patch(kk, y)
            cute.arch.sync_warp()
            self._add_y_c(f[0])
            f[0] = ptx.mul(f[0], self.band_decay(b))

    def _add_y_c(self, f):
        for i, n in self.downwards():
            k = self.four_hats(self.k, Table.RSTD + 256, i)
            x = [ptx.mul(y, m) for y, m in zip(k, n)]
            x = [ptx.mul(y, f) for y in (*round_pair(*x[:2]), *round_pair(*x[2:]))]  # of k_next
            x = [*round_pair(*x[:2]), *round_pair(*x[2:])]
            for t in range(3, -1, -1):
                y, exact = self.from_patch(i + t), n[t] * f
                self.kc[i + t] = self.kc[i + t] + exact * y
                self.dg[i + t] = self.dg[i + t] + (k[t] * exact - x[t]) * y

    # ---- inside the band
    def words_at(self, place, i):
        """Address of the lane's word i of 8 in a tile whose image is no longer needed."""
        return self.words + (int(place) + i * 128)

    def kr_at(self, i):
        return self.words_at(Place.Q if i < 8 else Place.K, i % 8)

    def add_in_band(self):
        """All pairs j < i of the band, in fp32; then the diagonal, sums for dbeta and for dq, and dk but for dKe, in kc."""
        coord, a = self.coord, self.a
        at = self.memory.base + Place.V + Part.DIAGONAL + coord.band * DIAGONAL
        k = [x for i in range(0, TOKENS, 4) for x in self.four_hats(self.k, Table.RSTD + 256, i)]
        # registers are short here: k itself, dG and kr wait in shared memory, each lane's own
        for i, word in enumerate(self.k):
            ptx.sts_b32(self.words_at(Place.K_NEXT, i), word)
        for i in range(TOKENS):
            ptx.sts_f32(self.patch_column + i * 128, self.dg[i])
            ptx.sts_f32(self.kr_at(i), self.kr[i])
        for i in range(TOKENS):
            if i % 4 == 0:
                q_scale, beta = self.scales(Table.RSTD, i), self.four(Table.BETA, i)
            q, bk = self.hat(self.q, i, q_scale[i % 4]), ptx.mul(beta[i % 4], k[i])
            pairs, f = {}, a[i]
            dq = dk = Float32(0.0)
            for j in range(i - 1, -1, -1):
                if j // 2 not in pairs:
                    pairs = {j // 2: ptx.lds_v4_f32(at + i * DIAGONAL_PITCH + j // 2 * 16)}
                d_a, d_m = pairs[j // 2][2 * (j % 2) : 2 * (j % 2) + 2]
                fk = f * k[j]
                dq = ptx.fma(d_a, fk, dq)
                dk = ptx.fma(d_m, fk, dk)
                self.kc[j] = ptx.fma(f, ptx.fma(d_m, bk, d_a * q), self.kc[j])
                if j > 0:
                    f = ptx.mul(f, a[j])
            if i > 0:
                self.dq[i] = self.dq[i] + dq
                ptx.sts_f32(self.kr_at(i), ptx.lds_f32(self.kr_at(i)) + dk)
                dg = self.patch_column + i * 128
                ptx.sts_f32(dg, ptx.fma(q, dq, ptx.fma(bk, dk, ptx.lds_f32(dg))))
        for i in range(TOKENS):
            dg = self.patch_column + i * 128
            ptx.sts_f32(dg, ptx.lds_f32(dg) - k[i] * self.kc[i])
        self.fresh()
        for i in range(TOKENS):
            self.kr[i] = ptx.lds_f32(self.kr_at(i))
        total = row_sums([k[i] * self.kr[i] for i in range(TOKENS)], coord.lane)
        self.store_row_sum(Table.DOT_BETA, total)
        for i in range(TOKENS):
            if i % 4 == 0:
                q_scale, beta = self.scales(Table.RSTD, i), self.four(Table.BETA, i)
            diagonal = ptx.lds_f32(at + i * DIAGONAL_PITCH + i * 8)
            self.kc[i] = ptx.fma(beta[i % 4], self.kr[i], ptx.fma(diagonal, self.hat(self.q, i, q_scale[i % 4]), self.kc[i]))
            self.dq[i] = ptx.fma(diagonal, k[i], self.dq[i])
        self.fresh()
        self.share_dot(Table.DOT_Q, self.dq, self.q, Table.RSTD)
        self.k = [ptx.lds_b32(self.words_at(Place.K_NEXT, i)) for i in range(TOKENS // 2)]
        for i in range(TOKENS):
            self.dg[i] = ptx.lds_f32(self.patch_column + i * 128)

    def store_row_sum(self, table, total):
        """What row_sums returned, to the quarter's part of a table."""
        at = self.memory.table(table) + self.coord.quarter * 256 + self.coord.band * 64
        ptx.sts_f32(at + (self.coord.lane >> 1) * 4, total)

    # ---- sums that other warps need
    def share_sums(self):
        """The sum of dG over the band; dk . k^."""
        total = self.dg[0]
        for i in range(1, TOKENS):
            total = total + self.dg[i]
        ptx.sts_f32(self.memory.table(Table.D_G) + self.coord.band * 512 + self.coord.channel * 4, total)
        self.share_dot(Table.DOT_K, self.kc, self.k, Table.RSTD + 256)

    def share_dot(self, table, gradient, words, norms):
        """The quarter's part of dq . q^ or dk . k^ by rows."""
        if self.variant.l2norm and not self.schedule.grouped:
            products = []
            for i in range(0, TOKENS, 4):
                products += [gradient[i + e] * x for e, x in enumerate(self.four_hats(words, norms, i))]
            self.store_row_sum(table, row_sums(products, self.coord.lane))

    # ---- results
    # dq and dk: through the normalisation, or as they are for the host to add up over heads
    def store_q(self, token, head):
        self._store_q_or_k(self.args.dq, self.dq, self.q, Table.RSTD, Table.DOT_Q, token, head)

    def store_k(self, token, head):
        self._store_q_or_k(self.args.dk, self.kc, self.k, Table.RSTD + 256, Table.DOT_K, token, head)

    def _store_q_or_k(self, out, gradient, words, norms, dots, token, head):
        dtype, values = "fp32", [gradient[i] for i in range(TOKENS)]
        if not self.schedule.grouped:
            dtype = "bf16"
            if self.variant.l2norm:
                for i in range(0, TOKENS, 4):
                    parts = [self.four(dots + 256 * quarter, i) for quarter in range(4)]
                    for e, scale in enumerate(self.four(norms, i)):
                        dot = (parts[0][e] + parts[1][e]) + (parts[2][e] + parts[3][e])
                        x = self.hat(words, i + e, scale)
                        values[i + e] = (values[i + e] - dot * x) * scale
        self.store_if_wanted(out, values, dtype, token, head)

    def store_values(self, out, values, dtype, token, head):
        """16 tokens of the lane's channel of a gradient [tokens, heads, 128]."""
        size = 4 if dtype == "fp32" else 2
        pitch = Int64(self.args.heads) * (128 * size)
        row = Int64(token + TOKENS * self.coord.band) * self.args.heads + head
        at = out + row * (128 * size) + Int64(self.coord.channel * size)
        store_column(at, pitch, values, dtype, self.rows_band)

    def store_gate(self, g, a_log, bias, token, head):
        """dg; the sums over the band's tokens of the gradients of dt_bias and of A_log to the patch."""
        coord = self.coord
        run, prefix = Float32(0.0), Float32(0.0)
        at = self.memory.base + Place.TABLES + coord.channel * 4
        for b in range(BANDS):
            run = run + ptx.less_f32(coord.band, b, ptx.lds_f32(at + Table.D_G + b * 512), 0.0)
            prefix = prefix + ptx.less_f32(b, coord.band, ptx.lds_f32(at + Table.E + b * 512), 0.0)
        d = [None] * TOKENS
        for i in range(TOKENS - 1, -1, -1):
            run = run + self.dg[i]
            d[i] = run
        gradient = GRADIENTS[self.variant.gate](bias, a_log, self.args.gate_scale)
        bias_sum, a_log_sum = Float32(0.0), Float32(0.0)
        for i in range(TOKENS):
            d[i], d_a_log = gradient(g[i], d[i] + prefix)
            prefix = prefix + self.from_patch(i)
            bias_sum = bias_sum + ptx.less_f32(i, self.rows_band, d[i], 0.0)
            a_log_sum = a_log_sum + ptx.less_f32(i, self.rows_band, d_a_log, 0.0)
        self.store_if_wanted(self.args.dg, d, self.variant.gate_dtype, token, head)
        cute.arch.sync_warp()  # e is read
        at = self.patch_column
        if self.variant.dt_bias is not None:
            ptx.sts_f32(at + Sums.BIAS, bias_sum)
        if self.variant.a_log is not None:
            ptx.sts_f32(at + Sums.A_LOG, a_log_sum)

    @cute.jit
    def store_if_wanted(self, out, values, dtype: cutlass.Constexpr, token, head):
        if out != 0:
            self.store_values(out, values, dtype, token, head)
