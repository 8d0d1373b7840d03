"""Registers, descriptors and the small steps of a chain thread (see chain_wy64.py for what they are for).

A warpgroup's 64 x N accumulator and the bf16 A operand of a product over those N columns have the same order in
registers, 8 values per 16 columns: [row lane/4: 2 values][row + 8: 2 values] of columns 2*(lane % 4), and the same 8
columns further. `flat` views are (8, column blocks of 16).
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu.warpgroup import Field, SmemLayoutAtomKind, make_smem_layout_atom

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.wy64.record import (
    A_BLOCK,
    A_BYTES,
    BANDS,
    DECAY_BYTES,
    K_END_BYTES,
    Q_BYTES,
    U_BYTES,
    W_BYTES,
    a_block,
)

K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN
A_COLUMN = BANDS * A_BLOCK  # in shared memory a column of blocks is complete, with zeros above the diagonal
A_PIECES = [  # of each column: place in the record's A and in shared memory, bytes
    (a_block(j, j), j * (A_COLUMN + A_BLOCK), A_COLUMN - j * A_BLOCK) for j in range(BANDS)
]
QK_BYTES = Q_BYTES + K_END_BYTES
QKA_BYTES = QK_BYTES + BANDS * A_COLUMN  # a stage
assert sum(size for _, _, size in A_PIECES) == A_BYTES


@dataclass(frozen=True)
class Ring:
    """A ring of shared-memory stages: `full` and `empty` mbarriers and the number of stages."""

    full: Any
    empty: Any
    stages: int


@dataclass(frozen=True)
class Shared:
    """Shared-memory pointers."""

    chain: Ring  # W, U, decay
    output: Ring  # Q, K_end, A
    store: Ring  # O
    checkpoint: Ring  # states that the writer has still to announce
    w: Any
    u: Any
    decay: Any
    qka: Any
    o: Any


class Operands:
    """Register tensors, descriptors and addresses of a chain thread; filled by ChainFragments.operands."""


class ChainFragments:
    """What a chain thread does within a link; a kernel inherits it."""

    def mma(self, b_major):
        """64 x 64 x 16, A from registers."""
        op = warpgroup.MmaF16BF16Op(BFloat16, Float32, (64, 64, 16), warpgroup.OperandSource.RMEM, K_MAJOR, b_major)
        return cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))

    def operands(self, tid, warp, sm):
        """Register tensors and shared-memory descriptors of one chain thread."""

        def b_operand(tiled, pointer, kind, shape, order, stages, stride):
            image = cute.tile_to_shape(make_smem_layout_atom(kind, BFloat16), shape, order=order)
            ring = cute.append(image.outer, cute.make_layout(stages, stride=stride // 2))
            tensor = cute.make_tensor(cute.recast_ptr(pointer, image.inner, BFloat16), ring)
            return tiled.make_fragment_B(tiled.get_slice(tid).partition_B(tensor))

        t = Operands()
        k_major, mn_major = self.mma(K_MAJOR), self.mma(MN_MAJOR)
        KSW, MNSW = SmemLayoutAtomKind.K_SW128, SmemLayoutAtomKind.MN_SW128
        t.w = b_operand(k_major, sm.w, KSW, (64, 128), (0, 1), sm.chain.stages, W_BYTES)
        qka = lambda at: sm.qka + at // 2  # noqa: E731
        stages = sm.output.stages
        t.q = b_operand(k_major, qka(0), KSW, (64, 128), (0, 1), stages, QKA_BYTES)
        t.k_end = b_operand(mn_major, qka(Q_BYTES), MNSW, (128, 64), (1, 0), stages, QKA_BYTES)
        t.a = b_operand(k_major, qka(QK_BYTES), SmemLayoutAtomKind.K_SW32, (64, 64), (0, 1), stages, QKA_BYTES)

        accumulator = lambda: cute.make_rmem_tensor(k_major.get_slice(tid).partition_shape_C((64, 64)), Float32)  # noqa: E731
        flat = lambda x: cute.make_tensor(x.iterator, cute.make_layout((8, 4)))  # noqa: E731
        t.acc_v, t.acc_o, t.acc_s = accumulator(), accumulator(), [accumulator(), accumulator()]
        t.flat_v, t.flat_o, t.flat_s = flat(t.acc_v), flat(t.acc_o), [flat(x) for x in t.acc_s]
        t.bits_v = cute.make_tensor(cute.recast_ptr(t.acc_v.iterator, dtype=Int32), cute.make_layout((8, 4)))
        a_layout = lambda k: cute.make_layout(((2, 2, 2), 1, k), stride=((1, 2, 4), 0, 8))  # noqa: E731
        t.s_bf16, t.v_bf16 = cute.make_rmem_tensor(a_layout(8), BFloat16), cute.make_rmem_tensor(a_layout(4), BFloat16)
        t.flat_s_bf16 = cute.make_tensor(t.s_bf16.iterator, cute.make_layout((8, 8)))
        t.s_words = cute.recast_tensor(t.flat_s_bf16, Int32)
        t.flat_v_bf16 = cute.make_tensor(t.v_bf16.iterator, cute.make_layout((8, 4)))
        t.v_words = cute.recast_tensor(t.flat_v_bf16, Int32)
        t.o_bf16 = cute.make_rmem_tensor((8, 4), BFloat16)
        t.o_words = cute.recast_tensor(t.o_bf16, Int32)
        t.decay = cute.make_rmem_tensor((4, 8), Float32)
        t.decay_words = cute.recast_tensor(t.decay, Int32)
        t.u_words = cute.make_rmem_tensor((4, 4), Int32)

        lane = tid % 32
        tile, row = lane // 8, lane % 8
        t.u_at = sm.u.toint() + tid * 16
        t.decay_at = sm.decay.toint() + (tid % 4) * 16
        t.o_at = sm.o.toint() + (8 * (tile // 2) + row) * 128 + (((2 * warp + tile % 2) ^ row) * 16)
        return t

    @cute.jit
    def product(self, b_major: cutlass.Constexpr, acc, a, b, ks: cutlass.Constexpr, zero: cutlass.Constexpr = False):
        """acc (+)= a[k-block] b[k-block] for the k-blocks `ks`; b: (MMA, k-blocks) of one stage."""
        mma = self.mma(b_major)
        for k in cutlass.range_constexpr(len(ks)):
            mma.set(Field.ACCUMULATE, not (zero and k == 0))
            block = b[None, ks[k]]
            block = cute.make_tensor(block.iterator, cute.append(block.layout, cute.make_layout(1)))
            cute.gemm(mma, acc, a[None, None, ks[k]], block, acc)

    @cute.jit
    def round(self, target, source, ks: cutlass.Constexpr):
        for k in cutlass.range_constexpr(len(ks)):
            target[None, ks[k]].store(source[None, ks[k]].load().to(BFloat16))

    @cute.jit
    def round_output(self, t):
        for k in cutlass.range_constexpr(4):
            o = t.flat_o[None, k].load()
            t.o_bf16[None, k].store((o * t.scale if self.scaled else o).to(BFloat16))

    @cute.jit
    def round_state(self, t, begin: cutlass.Constexpr, end: cutlass.Constexpr):
        """S to bf16, blocks of 16 keys `begin` to `end`."""
        for k in cutlass.range_constexpr(begin, end):
            t.flat_s_bf16[None, k].store(t.flat_s[k // 4][None, k % 4].load().to(BFloat16))
            words = ptx.pin(tuple(t.s_words[j, k] for j in range(4)))
            for j in cutlass.range_constexpr(4):
                t.s_words[j, k] = words[j]

    @cute.jit
    def decay_state(self, t):
        """S *= decay, column by column. Pinned: the scaled state must be complete before the next group is issued."""
        for k in cutlass.range_constexpr(8):
            s = t.flat_s[k // 4]
            for e in cutlass.range_constexpr(8):
                s[e, k % 4] = s[e, k % 4] * t.decay[(e & 1) + 2 * (e >> 2), k]
        for k in cutlass.range_constexpr(8):
            s = t.flat_s[k // 4]
            pinned = ptx.pin(tuple(s[e, k % 4] for e in range(8)))
            for e in cutlass.range_constexpr(8):
                s[e, k % 4] = pinned[e]

    @cute.jit
    def load_u(self, t, stage, k: cutlass.Constexpr):
        words = ptx.lds_volatile_v4_b32(t.u_at + stage * U_BYTES + k * 2048)
        for j in cutlass.range_constexpr(4):
            t.u_words[j, k] = words[j]

    @cute.jit
    def load_decay(self, t, stage, k: cutlass.Constexpr):
        words = ptx.lds_volatile_v4_b32(t.decay_at + stage * DECAY_BYTES + k * 64)
        for j in cutlass.range_constexpr(4):
            t.decay_words[j, k] = words[j]

    @cute.jit
    def start_v(self, t):
        """acc_v = U, widened by integer operations: one each, where a conversion takes two for the high half."""
        for k in cutlass.range_constexpr(4):
            for j in cutlass.range_constexpr(4):
                word = t.u_words[j, k]
                t.bits_v[2 * j, k] = word << 16
                t.bits_v[2 * j + 1, k] = word & Int32(-65536)

    @cute.jit
    def store_o(self, t, k: cutlass.Constexpr):
        """16 tokens of O^T, transposed on the way: token-major rows of 128 bytes, piece index XOR row % 8."""
        ptx.stmatrix_x4_trans(t.o_at + k * 2048, [t.o_words[j, k] for j in range(4)])
