"""Registers and descriptors of a chain thread of the reverse chain, and the small steps within a link.

Accumulators and A operands from registers have the order that ../../chain/fragments.py describes.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu.warpgroup import Field, SmemLayoutAtomKind, make_smem_layout_atom

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.wy64.backward.reverse.shared import A_IMAGE, D_OUT_BYTES, IMAGE_BYTES, WQ_BYTES
from fla_kda_backend.kernels.wy64.chain.fragments import Fragments
from fla_kda_backend.kernels.wy64.record import K_END_BYTES, W_BYTES

K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN


def _mma(b_major):
    """64 x 64 x 16, A from registers."""
    op = warpgroup.MmaF16BF16Op(BFloat16, Float32, (64, 64, 16), warpgroup.OperandSource.RMEM, K_MAJOR, b_major)
    return cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))


class ReverseFragments(Fragments):
    """What a chain thread holds of dS, dV' and the decay, and where the operands of its products lie in shared memory.

    acc_v, acc_s: fp32 accumulators of dV'^T and dS^T, the latter in two halves of 64 keys; s_bf16, v_bf16, d_out_bf16: dS^T,
    dV'^T and dO^T as operands; decay: of the chunk to come. The names are those of the forward's chain, whose small steps serve
    here, too.

    Args:
        tid, warp: of the chain thread.
        shared: the CTA's Shared.
    """

    def __init__(self, tid, warp, shared):
        k_major, mn_major = _mma(K_MAJOR).get_slice(tid), _mma(MN_MAJOR).get_slice(tid)

        def image(pointer, kind, shape, order, stages, stride):
            """An image in all stages of its ring, `stride` bytes apart."""
            one = cute.tile_to_shape(make_smem_layout_atom(kind, BFloat16), shape, order=order)
            ring = cute.append(one.outer, cute.make_layout(stages, stride=stride // 2))
            return cute.make_tensor(cute.recast_ptr(pointer, one.inner, BFloat16), ring)

        # Descriptors: (MMA, rows, k-blocks, stages)
        KSW, MNSW = SmemLayoutAtomKind.K_SW128, SmemLayoutAtomKind.MN_SW128
        first, second = shared.first.stages, shared.second.stages
        b_operand = lambda mma, tensor: mma.make_fragment_B(mma.partition_B(tensor))  # noqa: E731
        k_end = image(shared.k_end, KSW, (64, 128), (0, 1), first, K_END_BYTES)
        self.k_end = b_operand(k_major, k_end)
        self.w = b_operand(mn_major, image(shared.wq, MNSW, (128, 64), (1, 0), second, WQ_BYTES))
        self.q = b_operand(mn_major, image(shared.wq + W_BYTES // 2, MNSW, (128, 64), (1, 0), second, WQ_BYTES))
        # Columns of 16 tokens j, in each the rows i one after the other: contiguous along j, which is the product's N.
        a = image(shared.a, SmemLayoutAtomKind.MN_SW32, (64, 64), (1, 0), first, A_IMAGE)
        self.a = b_operand(mn_major, a)

        accumulator = lambda: cute.make_rmem_tensor(k_major.partition_shape_C((64, 64)), Float32)  # noqa: E731
        flat = lambda x: cute.make_tensor(x.iterator, cute.make_layout((8, 4)))  # noqa: E731
        self.acc_v, self.acc_s = accumulator(), [accumulator(), accumulator()]
        self.flat_v, self.flat_s = flat(self.acc_v), [flat(x) for x in self.acc_s]
        a_layout = lambda k: cute.make_layout(((2, 2, 2), 1, k), stride=((1, 2, 4), 0, 8))  # noqa: E731
        self.s_bf16, self.v_bf16 = cute.make_rmem_tensor(a_layout(8), BFloat16), cute.make_rmem_tensor(a_layout(4), BFloat16)
        self.flat_s_bf16 = cute.make_tensor(self.s_bf16.iterator, cute.make_layout((8, 8)))
        self.s_words = cute.recast_tensor(self.flat_s_bf16, Int32)
        self.flat_v_bf16 = cute.make_tensor(self.v_bf16.iterator, cute.make_layout((8, 4)))
        self.v_words = cute.recast_tensor(self.flat_v_bf16, Int32)
        self.d_out_bf16 = cute.make_rmem_tensor(a_layout(4), BFloat16)
        flat_d_out = cute.make_tensor(self.d_out_bf16.iterator, cute.make_layout((8, 4)))
        self.d_out_words = cute.recast_tensor(flat_d_out, Int32)
        self.decay = cute.make_rmem_tensor((4, 8), Float32)
        self.decay_words = cute.recast_tensor(self.decay, Int32)

        lane = tid % 32
        tile, row = lane // 8, lane % 8
        in_image = (8 * (tile // 2) + row) * 128 + (((2 * warp + tile % 2) ^ row) * 16)
        self.decay_at = shared.decay.toint() + (tid % 4) * 16
        self.image_at, self.d_out_at = shared.images.toint() + in_image, shared.d_out.toint() + in_image

    # ---- products

    @cute.jit
    def product(self, b_major: cutlass.Constexpr, acc, a, b, ks: cutlass.Constexpr, zero: cutlass.Constexpr = False):
        """acc += a[k-block] b[k-block] for the k-blocks `ks`, from zero where `zero`; a, b: (MMA, k-blocks) of one stage."""
        mma = _mma(b_major)
        for k in cutlass.range_constexpr(len(ks)):
            mma.set(Field.ACCUMULATE, not (zero and k == 0))
            cute.gemm(mma, acc, self.block(a, ks[k]), self.block(b, ks[k]), acc)

    def block(self, operand, k):
        """One k-block as (MMA, 1)."""
        block = operand[None, k]
        return cute.make_tensor(block.iterator, cute.append(block.layout, cute.make_layout(1)))

    def a_d_out(self, stage, ks, zero):
        """acc_v += (A^T dO)^T over the blocks `ks` of 16 tokens."""
        self.product(MN_MAJOR, self.acc_v, self.d_out_bf16[None, 0, None], self.a[None, 0, None, stage], ks, zero)

    def k_end_ds(self, stage, ks):
        """acc_v += (K_end dS)^T over the blocks `ks` of 16 keys."""
        self.product(K_MAJOR, self.acc_v, self.s_bf16[None, 0, None], self.k_end[None, 0, None, stage], ks)

    def q_d_out(self, h, stage, ks):
        """acc_s[h] += (Q^T dO)^T over the blocks `ks` of 16 tokens."""
        self.product(MN_MAJOR, self.acc_s[h], self.d_out_bf16[None, 0, None], self.q[None, h, None, stage], ks)

    def minus_w_dv(self, h, stage, ks):
        """acc_s[h] -= (W^T dV')^T over the blocks `ks` of 16 tokens."""
        self.product(MN_MAJOR, self.acc_s[h], self.v_bf16[None, 0, None], self.w[None, h, None, stage], ks)

    # ---- shared memory: 16 rows of an image each, transposed on the way: rows of 128 bytes, piece index XOR row % 8

    @cute.jit
    def load_d_out(self, stage, k: cutlass.Constexpr):
        """16 tokens of dO."""
        words = ptx.ldmatrix_x4_trans(self.d_out_at + stage * D_OUT_BYTES + k * 2048)
        for j in cutlass.range_constexpr(4):
            self.d_out_words[j, k] = words[j]

    @cute.jit
    def store_ds(self, stage, k: cutlass.Constexpr):
        """16 keys of dS as rounded, into the image of their 64 keys."""
        ptx.stmatrix_x4_trans(self.image_at + stage * IMAGE_BYTES + k % 4 * 2048, [self.s_words[j, k] for j in range(4)])

    @cute.jit
    def store_dv(self, stage, k: cutlass.Constexpr):
        """16 tokens of dV' as rounded."""
        ptx.stmatrix_x4_trans(self.image_at + stage * IMAGE_BYTES + k * 2048, [self.v_words[j, k] for j in range(4)])
