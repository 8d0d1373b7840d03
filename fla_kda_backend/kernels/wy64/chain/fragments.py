"""Registers and descriptors of a chain thread, and the small steps within a link; see kernel.py for what they are for.

A warpgroup's 64 x N accumulator and the bf16 A operand of a product over those N columns have the same order in
registers, 8 values per 16 columns: [row lane/4: 2 values][row + 8: 2 values] of columns 2*(lane % 4), and the same 8
columns further. `flat` views are (8, column blocks of 16).
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu.warpgroup import Field, SmemLayoutAtomKind, make_smem_layout_atom

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.wy64.chain.shared import QK_BYTES, QKA_BYTES
from fla_kda_backend.kernels.wy64.record import DECAY_BYTES, Q_BYTES, U_BYTES, W_BYTES

K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN


def _mma(b_major):
    """64 x 64 x 16, A from registers."""
    op = warpgroup.MmaF16BF16Op(BFloat16, Float32, (64, 64, 16), warpgroup.OperandSource.RMEM, K_MAJOR, b_major)
    return cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))


class Fragments:
    """What a chain thread holds of S, V', O, U and the decay, and where the operands of its products lie in shared memory.

    acc_v, acc_o, acc_s: fp32 accumulators of V'^T, O^T and S^T, the last one in two halves of 64 keys; s_bf16, v_bf16:
    S^T and V'^T as operands; u_words, decay: of the chunk to come.

    Args:
        tid, warp: of the chain thread.
        shared: the CTA's Shared.
        scale: factor of O; None: 1.
    """

    def __init__(self, tid, warp, shared, scale):
        self.scale = scale
        k_major, mn_major = _mma(K_MAJOR), _mma(MN_MAJOR)

        def b_operand(tiled, pointer, kind, shape, order, stages, stride):
            """Descriptors of an operand in all stages of its ring, `stride` bytes apart: (MMA, rows, k-blocks, stages)."""
            image = cute.tile_to_shape(make_smem_layout_atom(kind, BFloat16), shape, order=order)
            ring = cute.append(image.outer, cute.make_layout(stages, stride=stride // 2))
            tensor = cute.make_tensor(cute.recast_ptr(pointer, image.inner, BFloat16), ring)
            return tiled.make_fragment_B(tiled.get_slice(tid).partition_B(tensor))

        KSW, MNSW = SmemLayoutAtomKind.K_SW128, SmemLayoutAtomKind.MN_SW128
        self.w = b_operand(k_major, shared.w, KSW, (64, 128), (0, 1), shared.chain.stages, W_BYTES)
        qka = lambda at: shared.qka + at // 2  # noqa: E731
        stages = shared.output.stages
        self.q = b_operand(k_major, qka(0), KSW, (64, 128), (0, 1), stages, QKA_BYTES)
        self.k_end = b_operand(mn_major, qka(Q_BYTES), MNSW, (128, 64), (1, 0), stages, QKA_BYTES)
        self.a = b_operand(k_major, qka(QK_BYTES), SmemLayoutAtomKind.K_SW32, (64, 64), (0, 1), stages, QKA_BYTES)

        accumulator = lambda: cute.make_rmem_tensor(k_major.get_slice(tid).partition_shape_C((64, 64)), Float32)  # noqa: E731
        flat = lambda x: cute.make_tensor(x.iterator, cute.make_layout((8, 4)))  # noqa: E731
        self.acc_v, self.acc_o, self.acc_s = accumulator(), accumulator(), [accumulator(), accumulator()]
        self.flat_v, self.flat_o, self.flat_s = flat(self.acc_v), flat(self.acc_o), [flat(x) for x in self.acc_s]
        self.bits_v = cute.make_tensor(cute.recast_ptr(self.acc_v.iterator, dtype=Int32), cute.make_layout((8, 4)))
        a_layout = lambda k: cute.make_layout(((2, 2, 2), 1, k), stride=((1, 2, 4), 0, 8))  # noqa: E731
        self.s_bf16, self.v_bf16 = cute.make_rmem_tensor(a_layout(8), BFloat16), cute.make_rmem_tensor(a_layout(4), BFloat16)
        self.flat_s_bf16 = cute.make_tensor(self.s_bf16.iterator, cute.make_layout((8, 8)))
        self.s_words = cute.recast_tensor(self.flat_s_bf16, Int32)
        self.flat_v_bf16 = cute.make_tensor(self.v_bf16.iterator, cute.make_layout((8, 4)))
        self.v_words = cute.recast_tensor(self.flat_v_bf16, Int32)
        self.o_bf16 = cute.make_rmem_tensor((8, 4), BFloat16)
        self.o_words = cute.recast_tensor(self.o_bf16, Int32)
        self.decay = cute.make_rmem_tensor((4, 8), Float32)
        self.decay_words = cute.recast_tensor(self.decay, Int32)
        self.u_words = cute.make_rmem_tensor((4, 4), Int32)

        lane = tid % 32
        tile, row = lane // 8, lane % 8
        self.u_at = shared.u.toint() + tid * 16
        self.decay_at = shared.decay.toint() + (tid % 4) * 16
        self.o_at = shared.o_image.toint() + (8 * (tile // 2) + row) * 128 + (((2 * warp + tile % 2) ^ row) * 16)

    # ---- products

    @cute.jit
    def product(self, b_major: cutlass.Constexpr, acc, a, b, ks: cutlass.Constexpr, zero: cutlass.Constexpr = False):
        """acc += a[k-block] b[k-block] for the k-blocks `ks`, from zero where `zero`; b: (MMA, k-blocks) of one stage."""
        mma = _mma(b_major)
        for k in cutlass.range_constexpr(len(ks)):
            mma.set(Field.ACCUMULATE, not (zero and k == 0))
            block = b[None, ks[k]]
            block = cute.make_tensor(block.iterator, cute.append(block.layout, cute.make_layout(1)))
            cute.gemm(mma, acc, a[None, None, ks[k]], block, acc)

    def minus_w_s(self, stage, ks):
        """acc_v -= (W S)^T over the blocks `ks` of 16 keys."""
        self.product(K_MAJOR, self.acc_v, self.s_bf16, self.w[None, 0, None, stage], ks)

    def q_s(self, stage, k):
        """acc_o += (Q S)^T over block k of 16 keys, the first one from zero."""
        self.product(K_MAJOR, self.acc_o, self.s_bf16, self.q[None, 0, None, stage], (k,), zero=(k == 0))

    def a_v(self, stage, ks, zero=False):
        """acc_o += (A V')^T over the blocks `ks` of 16 tokens."""
        self.product(K_MAJOR, self.acc_o, self.v_bf16, self.a[None, 0, None, stage], ks, zero=zero)

    def k_end_v(self, h, stage, ks, zero=False):
        """acc_s[h] += (K_end^T V')^T over the blocks `ks` of 16 tokens."""
        self.product(MN_MAJOR, self.acc_s[h], self.v_bf16, self.k_end[None, h, None, stage], ks, zero=zero)

    # ---- operands

    @cute.jit
    def round_v(self):
        """V' to bf16."""
        for k in cutlass.range_constexpr(4):
            self.flat_v_bf16[None, k].store(self.flat_v[None, k].load().to(BFloat16))

    @cute.jit
    def round_output(self):
        """O, times `scale`, to bf16."""
        for k in cutlass.range_constexpr(4):
            o = self.flat_o[None, k].load()
            self.o_bf16[None, k].store((o if self.scale is None else o * self.scale).to(BFloat16))

    @cute.jit
    def round_state(self, begin: cutlass.Constexpr, end: cutlass.Constexpr):
        """S to bf16, blocks of 16 keys `begin` to `end`."""
        for k in cutlass.range_constexpr(begin, end):
            self.flat_s_bf16[None, k].store(self.flat_s[k // 4][None, k % 4].load().to(BFloat16))
            words = ptx.pin(tuple(self.s_words[j, k] for j in range(4)))
            for j in cutlass.range_constexpr(4):
                self.s_words[j, k] = words[j]

    @cute.jit
    def decay_state(self):
        """S *= decay, column by column. Pinned: the scaled state must be complete before the next group is issued."""
        for k in cutlass.range_constexpr(8):
            s = self.flat_s[k // 4]
            for e in cutlass.range_constexpr(8):
                s[e, k % 4] = s[e, k % 4] * self.decay[(e & 1) + 2 * (e >> 2), k]
        for k in cutlass.range_constexpr(8):
            s = self.flat_s[k // 4]
            pinned = ptx.pin(tuple(s[e, k % 4] for e in range(8)))
            for e in cutlass.range_constexpr(8):
                s[e, k % 4] = pinned[e]

    @cute.jit
    def start_v(self):
        """acc_v = U, widened by integer operations: one each, where a conversion takes two for the high half."""
        for k in cutlass.range_constexpr(4):
            for j in cutlass.range_constexpr(4):
                word = self.u_words[j, k]
                self.bits_v[2 * j, k] = word << 16
                self.bits_v[2 * j + 1, k] = word & Int32(-65536)

    @cute.jit
    def v_from_u(self):
        """V' = U, as the bf16 operand."""
        for k in cutlass.range_constexpr(4):
            for j in cutlass.range_constexpr(4):
                self.v_words[j, k] = self.u_words[j, k]

    # ---- shared memory

    @cute.jit
    def load_u(self, stage, k: cutlass.Constexpr):
        """Block k of 16 tokens of U."""
        words = ptx.lds_volatile_v4_b32(self.u_at + stage * U_BYTES + k * 2048)
        for j in cutlass.range_constexpr(4):
            self.u_words[j, k] = words[j]

    @cute.jit
    def load_decay(self, stage, k: cutlass.Constexpr):
        """The decays of block k of 16 keys."""
        words = ptx.lds_volatile_v4_b32(self.decay_at + stage * DECAY_BYTES + k * 64)
        for j in cutlass.range_constexpr(4):
            self.decay_words[j, k] = words[j]

    @cute.jit
    def store_o(self, k: cutlass.Constexpr):
        """16 tokens of O^T, transposed on the way: token-major rows of 128 bytes, piece index XOR row % 8."""
        ptx.stmatrix_x4_trans(self.o_at + k * 2048, [self.o_words[j, k] for j in range(4)])
