"""How a warp holds 16x16 blocks in registers, for the m16n8k16 products of the tensor cores.

Lane l has group = l / 4, the row among 8, and quad = l % 4, the pair of columns. An accumulator of a 16x16 block is
[column half n][2 * row half r + column e] in fp32. Rounded to pairs in the order (n, r) it is an A fragment. In the order
(r, n) it is the B fragment of the block's transpose.
"""

from cutlass import Float32

from fla_kda_backend.kernels import ptx


def zeros4():
    """Accumulator of a 16x8 block."""
    return [Float32(0.0)] * 4


def zeros():
    """Accumulator of a 16x16 block."""
    return [zeros4(), zeros4()]


def transposed_pairs(c):
    """Accumulators of a block as pairs, in the order of its transpose's B fragment."""
    return [(c[n][2 * r], c[n][2 * r + 1]) for r in range(2) for n in range(2)]


def pack_block(c):
    """Accumulators of a block as four 8x8 bf16 tiles: the words of an A fragment, or the operand of stmatrix."""
    return [ptx.pack_bf16x2(c[n][2 * r], c[n][2 * r + 1]) for n in range(2) for r in range(2)]


def round_to_bf16(pair):
    return ptx.unpack_bf16x2(ptx.pack_bf16x2(*pair))


def split_bf16(pairs):
    """fp32 pairs as bf16 words: (leading parts, rests)."""
    lead = [ptx.pack_bf16x2(*p) for p in pairs]
    return lead, [ptx.rest_bf16x2(*p, word) for p, word in zip(pairs, lead)]


def split_f16(pairs):
    """fp32 pairs as fp16 words: (leading parts, rests)."""
    parts = [ptx.split_f16x2(*p) for p in pairs]
    return [p[0] for p in parts], [p[1] for p in parts]


def product_split(a, b):
    """a.b for 16x16 fp16 operands given as (lead, rest); the product of the two rests is left out."""
    out = []
    for n in range(2):
        r = ptx.mma_f16(a[0], b[0][2 * n : 2 * n + 2], zeros4())
        r = ptx.mma_f16(a[1], b[0][2 * n : 2 * n + 2], r)
        out.append(ptx.mma_f16(a[0], b[1][2 * n : 2 * n + 2], r))
    return out
