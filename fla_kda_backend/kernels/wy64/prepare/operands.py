"""The operands of A and M in prepare_wy64: bf16, or fp16 with powers of two where q and k are not normalised.

The range of fp16 does not hold q and k of any size: every row of q and of k is multiplied, in the warp's half of the
channels, by the power of two that brings its largest element to [2^14, 2^15). Decays are at most 1, so nothing exceeds
that, and what is 2^-28 of it is a normal number still. Sums over the half are multiplied by the inverses of their row and
column, which is exact, before the halves meet. A row's factor depends on nothing but the row.
"""

from cutlass import Int32

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.wy64.prepare.steps import POWERS

# Pairs of bf16: the bits of the exponents; their sum for x and 1 / x; what a factor of 2^14 adds; and 2^-112, the least that
# a row's largest element is taken for, for its factor to be finite and the inverse no denormal
EXPONENTS, INVERSE, TARGET, LEAST = 0x7F807F80, 0x7F007F00, 0x07000700, 0x07800780


class Operands:
    """A kernel inherits it. l2norm: its compile-time fact."""

    def pack(self, pairs):
        pack = ptx.pack_bf16x2 if self.l2norm else ptx.pack_f16x2
        return [pack(*pair) for pair in pairs]

    def unpack(self, words):
        unpack = ptx.unpack_bf16x2 if self.l2norm else ptx.unpack_f16x2
        return [unpack(w) for w in words]

    def product(self, a, b, c):
        return (ptx.mma_bf16 if self.l2norm else ptx.mma_f16)(a, b, c)

    def product_k8(self, a, b, c):
        return (ptx.mma_bf16_k8 if self.l2norm else ptx.mma_f16_k8)(a, b, c)

    # ---- powers of two: those that the sums are multiplied by. A row's word holds that of q below that of k, as bf16
    def find_powers(self, smem, at, row, half):
        """Leave the powers of 8 rows of q and of k and return the inverses, each twice in a word. `at` as ldmatrix takes
        8 rows of q, of k, and both 8 channels further on; row: number of the lane's row."""
        most = [Int32(LEAST)] * 2
        for kk in range(4):
            for i, word in enumerate(ptx.ldmatrix_x4(at ^ (kk << 5))):
                most[i & 1] = ptx.larger_bf16x2(most[i & 1], word)
        q, k = most
        both = ptx.larger_bf16x2((q & 0xFFFF) | (k << 16), ((q >> 16) & 0xFFFF) | (k & -0x10000))
        for lanes in (1, 2):
            both = ptx.larger_bf16x2(both, ptx.shuffle_xor(both, lanes))
        powers = (both & EXPONENTS) - TARGET
        ptx.sts_b32(smem + POWERS + half * 256 + row * 4, powers)
        return self.twice(self.inverse(powers))

    def inverse(self, powers):
        return Int32(INVERSE) - powers

    def twice(self, powers):
        """Those of q and of k, each twice in a word."""
        return [ptx.pack_bf16x2(x, x) for x in ptx.unpack_bf16x2(powers)]

    def scaled(self, words, powers):
        """Words, of two rows or of q and k in turn, times powers of two, each twice in a word."""
        return [ptx.mul_bf16x2(w, powers[i & 1]) for i, w in enumerate(words)]

    def powers_of_rows(self, smem, band, half, lane):
        """Of rows `group` and group + 8."""
        at = smem + POWERS + half * 256 + band * 64 + lane // 4 * 4
        return [ptx.lds_b32(at + 32 * r) for r in range(2)]

    def powers_of_columns(self, smem, band, half, lane):
        """Of k alone, [column half n][column e], in fp32."""
        at = smem + POWERS + half * 256 + band * 64 + (lane & 3) * 8
        return [[ptx.unpack_bf16x2(w)[1] for w in ptx.lds_v2_b32(at + 32 * n)] for n in range(2)]

    def multiplied(self, block, rows, columns):
        """Accumulators of a block times factors of its rows and columns."""
        return [[x * rows[e >> 1] * columns[n][e & 1] for e, x in enumerate(block[n])] for n in range(2)]
