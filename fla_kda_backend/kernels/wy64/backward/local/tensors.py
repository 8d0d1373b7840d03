"""The products on WGMMA: X = T^T dV', and the products with S, dS' and V'. See kernel.py.

A warpgroup's 64 x N accumulator: its warp w holds rows 16w to 16w + 15, and of these a lane holds, per 8 columns, [row group,
row group + 8][columns 2 quad, 2 quad + 1].
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu.warpgroup import Field, SmemLayoutAtomKind, make_smem_layout_atom

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.wy64.backward.local.memory import (
    BLOCK,
    DIAGONAL,
    DIAGONAL_PITCH,
    HALF_TILE,
    STATE_HALF,
    Part,
    Place,
    Table,
)
from fla_kda_backend.kernels.wy64.backward.local.stores import stg_v4_below
from fla_kda_backend.kernels.wy64.prepare.fragments import pack_block, split_bf16, zeros

K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN
RMEM, SMEM = warpgroup.OperandSource.RMEM, warpgroup.OperandSource.SMEM


def _mma(n, source, b_major):
    op = warpgroup.MmaF16BF16Op(BFloat16, Float32, (64, n, 16), source, K_MAJOR, b_major)
    return cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))


def block_below(b, c):
    """Number of the block in row b and column c < b of blocks."""
    return b * (b - 1) // 2 + c


def block_address(at, lane):
    """ldmatrix and stmatrix address in a 16x16 block in bf16 with 32-byte swizzle."""
    row = lane & 15
    return at + row * 32 + (((lane >> 4) ^ (row >> 2 & 1)) << 4)


def transposed_block_address(at, lane):
    """ldmatrix.trans address by which the block's transpose comes as an A fragment, its words in order."""
    row = (lane & 7) | (lane >> 1 & 8)
    return at + row * 32 + (((lane >> 3 & 1) ^ (row >> 2 & 1)) << 4)


class Tensors:
    """The descriptors of a thread's warpgroup."""

    def __init__(self, loads, memory, coord):
        self.loads, self.memory, self.coord = loads, memory, coord
        self.rs, self.ss = _mma(64, RMEM, MN_MAJOR), _mma(32, SMEM, K_MAJOR)
        KSW, MNSW = SmemLayoutAtomKind.K_SW128, SmemLayoutAtomKind.MN_SW128
        thread = coord.tid & 127

        def image(place, kind, shape, order, copies, stride):
            layout = cute.tile_to_shape(make_smem_layout_atom(kind, BFloat16), shape, order=order)
            outer = cute.append(layout.outer, cute.make_layout(copies, stride=stride // 2))
            return cute.make_tensor(cute.recast_ptr(memory.place(place), layout.inner, BFloat16), outer)

        rows = lambda place, copies: image(place, KSW, (64, 128), (0, 1), copies, 16384)  # noqa: E731
        a_operand = lambda x: self.ss.make_fragment_A(self.ss.get_slice(thread).partition_A(x))  # noqa: E731
        b_operand = lambda mma, x: mma.make_fragment_B(mma.get_slice(thread).partition_B(x))  # noqa: E731
        assert Place.D_OUT - Place.X == 16384
        self.x_and_d_out = a_operand(rows(Place.X, 2))  # (MMA, 1, 8, which)
        self.v_new_rows = a_operand(rows(Place.V_NEW, 1))
        self.v_new = b_operand(self.ss, rows(Place.V_NEW, 1))  # (MMA, 2 of 32 tokens, 8, 1)
        states = lambda place: b_operand(self.ss, image(place, KSW, (128, 128), (0, 1), 1, 32768))  # noqa: E731
        self.s, self.ds = states(Place.S), states(Place.DS)  # (MMA, 4 of 32 keys, 8, 1)
        self.dv_new = b_operand(self.rs, image(Place.X, MNSW, (64, 64), (1, 0), 2, HALF_TILE))  # (MMA, 1, 4, half)

    def accumulator(self):
        """Of a 64 x 32 product, and its 16 values of this thread."""
        acc = cute.make_rmem_tensor(self.ss.get_slice(self.coord.tid & 127).partition_shape_C((64, 32)), Float32)
        return acc, cute.make_tensor(acc.iterator, cute.make_layout(16))

    @cute.jit
    def start(self, acc, a, b):
        """acc = a b over 128 values; a, b: (MMA, k-blocks) descriptors. Not waited for."""
        mma = self.ss
        warpgroup.fence()
        for k in cutlass.range_constexpr(8):
            mma.set(Field.ACCUMULATE, k > 0)
            blocks = []
            for x in (a, b):
                block = x[None, k]
                blocks.append(cute.make_tensor(block.iterator, cute.append(block.layout, cute.make_layout(1))))
            cute.gemm(mma, acc, blocks[0], blocks[1], acc)
        warpgroup.commit_group()

    # ---- the products
    def start_d_a_or_d_m(self, acc):
        """dO V'^T or, by warpgroups 2 and 3, X V'^T, 32 columns of it."""
        quarter = self.coord.quarter
        self.start(acc, self.x_and_d_out[None, 0, None, 1 - (quarter >> 1)], self.v_new[None, quarter & 1, None, 0])

    def start_d_q(self, acc):
        """dO S^T, the warpgroup's 32 keys of it, as in the following."""
        self.start(acc, self.x_and_d_out[None, 0, None, 1], self.s[None, self.coord.quarter, None, 0])

    def start_x_s(self, acc):
        """X S^T."""
        self.start(acc, self.x_and_d_out[None, 0, None, 0], self.s[None, self.coord.quarter, None, 0])

    def start_d_k_end(self, acc):
        """V' dS'^T."""
        self.start(acc, self.v_new_rows[None, 0, None, 0], self.ds[None, self.coord.quarter, None, 0])

    # ---- X
    def _inverse_rows(self, c, words):
        """Row c of blocks of T^T as A fragments: words [4, column of blocks]."""
        base, lane = self.memory.base, self.coord.lane
        diagonal = ptx.ldmatrix_x4(block_address(base + Place.T + c * BLOCK, lane))
        done = {c: [ptx.pack_bf16x2(*ptx.unpack_f16x2(w)) for w in diagonal]}
        for i in range(c + 1, 4):
            acc = zeros()
            for j in range(c, i):
                for part in range(2):
                    m = ptx.lds_v4_b32(base + Place.N + block_below(i, j) * 2 * BLOCK + part * BLOCK + lane * 16)
                    acc = [ptx.mma_bf16(done[j], m[2 * n : 2 * n + 2], acc[n]) for n in range(2)]
            done[i] = pack_block(acc)
        for i in done:
            for w in range(4):
                words[w, i] = done[i][w]

    @cute.jit
    def find_x(self, args, token, rows, head, raw, s_x, full_v, parity):
        """X of the warpgroup's value half over dV', dv, sums of X v, the table of beta; by warpgroups 0 and 1. raw: beta as
        loaded, of rows `group` and group + 8 of the warp's band; s_x: factor of X; full_v: its mbarrier is v's."""
        if self.coord.quarter < 2:
            self._find_x(args, token, rows, head, raw, s_x, full_v, parity)

    @cute.jit
    def _find_x(self, args, token, rows, head, raw, s_x, full_v, parity):
        memory, coord = self.memory, self.coord
        half, band, lane = coord.quarter, coord.band, coord.lane
        t = cute.make_rmem_tensor(cute.make_layout(((2, 2, 2), 1, 4), stride=((1, 2, 4), 0, 8)), BFloat16)
        words = cute.recast_tensor(cute.make_tensor(t.iterator, cute.make_layout((8, 4))), Int32)
        for i in cutlass.range_constexpr(4):
            for w in cutlass.range_constexpr(4):
                words[w, i] = Int32(0)
        for c in cutlass.range_constexpr(4):
            if band == c:
                self._inverse_rows(c, words)
        acc = cute.make_rmem_tensor(self.rs.get_slice(coord.tid & 127).partition_shape_C((64, 64)), Float32)
        x = cute.make_tensor(acc.iterator, cute.make_layout(32))
        mma = self.rs
        warpgroup.fence()
        for k in cutlass.range_constexpr(4):
            mma.set(Field.ACCUMULATE, k > 0)
            block = self.dv_new[None, 0, k, half]
            block = cute.make_tensor(block.iterator, cute.append(block.layout, cute.make_layout(1)))
            cute.gemm(mma, acc, t[None, None, k], block, acc)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        # all four warps have read dV' of all rows
        cute.arch.barrier(barrier_id=1 + half, number_of_threads=128)
        beta = [self.loads.beta(raw[r], 16 * band + coord.group + 8 * r, rows) for r in range(2)]
        if half == 0 and coord.quad == 0:
            for r in cutlass.range_constexpr(2):
                ptx.sts_f32(memory.table(Table.BETA) + (16 * band + coord.group + 8 * r) * 4, beta[r])
        cute.arch.mbarrier_wait(full_v, parity)
        # ldmatrix and stmatrix address of the band's first 16 columns; those of the others with bits 5 and 6 flipped
        at = half * HALF_TILE + (16 * band + (lane & 15)) * 128 + (((lane >> 4) ^ (lane & 7)) << 4)
        sums = [Float32(0.0), Float32(0.0)]
        dv = [[], []]
        for k in cutlass.range_constexpr(4):
            c = [[x[8 * k + 4 * n + e] for e in range(4)] for n in range(2)]
            ptx.stmatrix_x4((memory.base + Place.X + at) ^ (k << 5), pack_block(c))
            v = ptx.ldmatrix_x4((memory.base + Place.V + at) ^ (k << 5))
            for n in cutlass.range_constexpr(2):
                for r in cutlass.range_constexpr(2):
                    pair = c[n][2 * r : 2 * r + 2]
                    v0, v1 = ptx.unpack_bf16x2(v[2 * n + r])
                    sums[r] = ptx.fma(pair[1], v1, ptx.fma(pair[0], v0, sums[r]))
                    f = beta[r] * s_x
                    dv[r].append(ptx.pack_bf16x2(pair[0] * f, pair[1] * f))
        for r in cutlass.range_constexpr(2):
            for mask in (1, 2):
                sums[r] = sums[r] + ptx.as_f32(_shuffle(sums[r], mask))
            ptx.sts_f32(memory.table(Table.X_V) + half * 256 + (16 * band + coord.group + 8 * r) * 4, sums[r] * s_x)
        if args.dv != 0:
            for r in cutlass.range_constexpr(2):
                row = 16 * band + coord.group + 8 * r
                to = args.dv + (Int64(token + row) * args.heads + head) * 256 + Int64(half * 128 + coord.quad * 16)
                for m in cutlass.range_constexpr(2):
                    piece = ptx.transpose_quad(dv[r][4 * m : 4 * m + 4], coord.quad)
                    stg_v4_below(to + m * 64, piece, row, rows)

    # ---- dA and dM to shared memory
    @cute.jit
    def store_blocks(self, acc, scale, s_x, anchored: cutlass.Constexpr):
        """What start_d_a_or_d_m found: blocks below the diagonal in bf16, those on it in fp32 pairs or as anchored.py does."""
        coord = self.coord
        base = self.memory.base + Place.V
        band, lane = coord.band, coord.lane
        values = cute.make_tensor(acc.iterator, cute.make_layout(16))
        is_m = coord.quarter >> 1
        factor = ptx.less_f32(is_m, 1, scale, Float32(0.0) - s_x)
        for i in cutlass.range_constexpr(2):
            c = 2 * (coord.quarter & 1) + i  # column of blocks
            block = [[values[8 * i + 4 * n + e] * factor for e in range(4)] for n in range(2)]
            if c < band:
                at = base + is_m * (Part.D_M - Part.D_A) + block_below(band, c) * BLOCK
                ptx.stmatrix_x4(block_address(at, lane), pack_block(block))
            if c == band:
                if const_expr(anchored):
                    self._store_diagonal_block(block, base, is_m)
                else:
                    self._store_diagonal_pairs(block, base, is_m)

    def _store_diagonal_pairs(self, block, base, is_m):
        coord = self.coord
        at = base + Part.DIAGONAL + coord.band * DIAGONAL + is_m * 4
        for n in range(2):
            for e in range(4):
                row, column = coord.group + 8 * (e >> 1), 8 * n + 2 * coord.quad + (e & 1)
                ptx.sts_f32(at + row * DIAGONAL_PITCH + column * 8, block[n][e])

    @cute.jit
    def _store_diagonal_block(self, block, base, is_m):
        """Strictly below its diagonal in bf16, dA in two terms; dA's diagonal in fp32."""
        band, lane, group, quad = self.coord.band, self.coord.lane, self.coord.group, self.coord.quad
        at = block_address(base + Part.DIAGONAL + band * (3 * BLOCK), lane)
        below = lambda e, x: ptx.less_f32(2 * quad + (e & 1), group, x, 0.0)  # noqa: E731
        zero = Float32(0.0)
        low = [[below(0, block[0][0]), below(1, block[0][1]), block[0][2], block[0][3]],
               [zero, zero, below(0, block[1][2]), below(1, block[1][3])]]  # fmt: skip
        lead, rest = split_bf16([low[n][2 * r : 2 * r + 2] for n in range(2) for r in range(2)])
        if is_m == 0:
            ptx.stmatrix_x4(at, lead)
            ptx.stmatrix_x4(at + BLOCK, rest)
            if quad == group >> 1:
                to = base + Part.DIAGONAL_VALUES + band * 64 + group * 4
                ptx.sts_f32(to, ptx.less_f32(group & 1, 1, block[0][0], block[0][1]))
                ptx.sts_f32(to + 32, ptx.less_f32(group & 1, 1, block[1][2], block[1][3]))
        else:
            ptx.stmatrix_x4(at + 2 * BLOCK, lead)

    # ---- sums of S dS'
    @cute.jit
    def sum_s_ds(self):
        """Sums of S dS' over a value half of 16 keys, by each warp: the diagonal of a product of 16x16 blocks."""
        memory, lane = self.memory, self.coord.lane
        group, quad = self.coord.group, self.coord.quad
        keys, half = (self.coord.tid >> 5) & 7, self.coord.tid >> 8
        at = memory.base + half * STATE_HALF + (16 * keys + (lane & 15)) * 128 + (((lane >> 4) ^ (lane & 7)) << 4)
        low, high = [Float32(0.0)] * 4, [Float32(0.0)] * 4
        for k in cutlass.range_constexpr(4):
            s = ptx.ldmatrix_x4((at ^ (k << 5)) + int(Place.S))
            ds = ptx.ldmatrix_x4((at ^ (k << 5)) + int(Place.DS))
            low, high = ptx.mma_bf16(s, [ds[0], ds[2]], low), ptx.mma_bf16(s, [ds[1], ds[3]], high)
        if quad == group >> 1:
            to = memory.table(Table.C0) + half * 512 + (16 * keys + group) * 4
            ptx.sts_f32(to, ptx.less_f32(group & 1, 1, low[0], low[1]))
            ptx.sts_f32(to + 32, ptx.less_f32(group & 1, 1, high[2], high[3]))


_shuffle = ptx.ordered("shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;", "fr -> r", "The bits of lane XOR mask's fp32.")
