"""The operands of the products of A and M: bf16, or fp16 with powers of two where q and k are not normalised.

The range of fp16 does not hold q and k of any size. So every row of q and of k is multiplied, in the warp's channel half, by
the power of two that brings its largest element to [2^14, 2^15). Decays are at most 1, so nothing exceeds that, and what is
2^-28 times the largest is still a normal number. Sums over the channel half are multiplied by the inverses of their row and
column, which is exact, before the sums of both halves meet. A row's factor depends on nothing but the row.
"""

from cutlass import Int32

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.wy64.prepare.memory import Table

# Pairs of bf16: the bits of the exponents; their sum for x and 1 / x; what a factor of 2^14 adds; and 2^-112, the least that
# a row's largest element is taken for, so that its factor is finite and the inverse no denormal.
EXPONENTS, INVERSE, TARGET, LEAST = 0x7F807F80, 0x7F007F00, 0x07000700, 0x07800780


class Operands:
    """Conversions and products in the operands' type, and the powers of two. has_powers: there are any."""

    def __init__(self, variant):
        self.has_powers = not variant.l2norm

    def pack(self, pairs):
        pack = ptx.pack_f16x2 if self.has_powers else ptx.pack_bf16x2
        return [pack(*pair) for pair in pairs]

    def unpack(self, words):
        unpack = ptx.unpack_f16x2 if self.has_powers else ptx.unpack_bf16x2
        return [unpack(w) for w in words]

    def product(self, a, b, c):
        return (ptx.mma_f16 if self.has_powers else ptx.mma_bf16)(a, b, c)

    def product_k8(self, a, b, c):
        return (ptx.mma_f16_k8 if self.has_powers else ptx.mma_bf16_k8)(a, b, c)

    # ---- powers of two: the factors of the sums. A row's word holds, as bf16, the factor of q below the factor of k
    def find_powers(self, base, at, row, half):
        """Leave the powers of 8 rows of q and of k in their table. Return the inverses, each twice in a word. at: addresses as
        ldmatrix takes them, of 8 rows of q, of k, and both 8 channels further on; row: number of the lane's row."""
        most = [Int32(LEAST)] * 2
        for kk in range(4):
            for i, word in enumerate(ptx.ldmatrix_x4(at ^ (kk << 5))):
                most[i & 1] = ptx.larger_bf16x2(most[i & 1], word)
        q, k = most
        both = ptx.larger_bf16x2((q & 0xFFFF) | (k << 16), ((q >> 16) & 0xFFFF) | (k & -0x10000))
        for lanes in (1, 2):
            both = ptx.larger_bf16x2(both, ptx.shuffle_xor(both, lanes))
        powers = (both & EXPONENTS) - TARGET
        ptx.sts_b32(base + Table.POWERS + half * 256 + row * 4, powers)
        return self.twice(self.inverse(powers))

    def inverse(self, powers):
        return Int32(INVERSE) - powers

    def twice(self, powers):
        """The power of q and the power of k, each twice in a word."""
        return [ptx.pack_bf16x2(x, x) for x in ptx.unpack_bf16x2(powers)]

    def times_powers(self, words, powers):
        """Words, of two rows or of q and k in turn, times powers of two, each twice in a word."""
        return [ptx.mul_bf16x2(w, powers[i & 1]) for i, w in enumerate(words)]

    def powers_of_rows(self, base, band, half, lane):
        """Words of rows `group` and group + 8."""
        at = base + Table.POWERS + half * 256 + band * 64 + lane // 4 * 4
        return [ptx.lds_b32(at + 32 * r) for r in range(2)]

    def powers_of_columns(self, base, band, half, lane):
        """Powers of k alone, [column half n][column e], in fp32."""
        at = base + Table.POWERS + half * 256 + band * 64 + (lane & 3) * 8
        return [[ptx.unpack_bf16x2(w)[1] for w in ptx.lds_v2_b32(at + 32 * n)] for n in range(2)]

    def powers_of_q_and_k(self, base, band, half, lane):
        """Powers of q, and of k, of rows `group` and group + 8, in fp32."""
        return zip(*map(ptx.unpack_bf16x2, self.powers_of_rows(base, band, half, lane)))
