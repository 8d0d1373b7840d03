"""Typed wrappers of the PTX instructions that the kernels use and the DSL does not offer.

Every wrapper is made by `instruction`: the PTX text, one letter per result and per operand (`r` 32-bit integer, `f` fp32,
`l` 64-bit integer), and whether the instruction may be moved or dropped. Warp-wide (`.aligned`) instructions and all memory
accesses are marked `volatile`, so that they are not sunk into divergent code or reordered past a barrier.
"""

from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

_DSL_TYPE = {"r": Int32, "f": Float32, "l": Int64}


def _mlir_type(letter):
    return {"r": T.i32, "f": T.f32, "l": T.i64}[letter]()


def instruction(text, results, operands, *, volatile, doc):
    """Make a function that emits `text`; see the module's docstring for the letters."""
    constraints = ",".join(["=" + letter for letter in results] + list(operands))

    @dsl_user_op
    def emit(*values, loc=None, ip=None):
        if len(values) != len(operands):
            raise TypeError(f"{text!r} takes {len(operands)} operands, got {len(values)}")
        arguments = [_DSL_TYPE[k](v).ir_value(loc=loc, ip=ip) for k, v in zip(operands, values)]
        types = [_mlir_type(letter) for letter in results]
        result_type = None if not types else types[0] if len(types) == 1 else llvm.StructType.get_literal(types)
        raw = llvm.inline_asm(
            result_type,
            arguments,
            text,
            constraints,
            has_side_effects=volatile,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
        if not types:
            return None
        if len(types) == 1:
            return _DSL_TYPE[results](raw)
        return tuple(
            _DSL_TYPE[letter](llvm.extractvalue(kind, raw, [i], loc=loc, ip=ip))
            for i, (letter, kind) in enumerate(zip(results, types))
        )

    emit.__doc__ = doc
    return emit


# ---- approximations and scalar arithmetic ------------------------------------------------------------------------
ex2 = instruction(
    "ex2.approx.ftz.f32 $0, $1;", "f", "f", volatile=False, doc="2**x, ex2.approx.ftz; any x, denormals to 0."
)
ex2_negative = instruction(
    "{ .reg .f32 a; abs.f32 a, $1; neg.f32 a, a; ex2.approx.ftz.f32 $0, a; }",
    "f",
    "f",
    volatile=False,
    doc="2**-|x|, ex2.approx.ftz.",
)
maximum = instruction("max.ftz.f32 $0, $1, $2;", "f", "ff", volatile=False, doc="The larger of x and y, max.ftz.")
tanh = instruction("tanh.approx.f32 $0, $1;", "f", "f", volatile=False, doc="tanh(x), tanh.approx; any x.")
rsqrt = instruction("rsqrt.approx.ftz.f32 $0, $1;", "f", "f", volatile=False, doc="x**-0.5, rsqrt.approx.ftz; x > 0.")
rcp = instruction("rcp.approx.ftz.f32 $0, $1;", "f", "f", volatile=False, doc="1/x, rcp.approx.ftz; x != 0.")
fma = instruction(
    "fma.rn.ftz.f32 $0, $1, $2, $3;", "f", "fff", volatile=False, doc="a*b + c with one rounding, fma.rn.ftz."
)
mul = instruction(
    "mul.rn.ftz.f32 $0, $1, $2;",
    "f",
    "ff",
    volatile=False,
    doc="a*b, rounded by itself (never contracted), mul.rn.ftz.",
)
add = instruction(
    "add.rn.ftz.f32 $0, $1, $2;",
    "f",
    "ff",
    volatile=False,
    doc="a+b, rounded by itself (never contracted), add.rn.ftz.",
)
sub = instruction(
    "sub.rn.ftz.f32 $0, $1, $2;",
    "f",
    "ff",
    volatile=False,
    doc="a-b, rounded by itself (never contracted), sub.rn.ftz.",
)
max_nan = instruction("max.NaN.ftz.f32 $0, $1, $2;", "f", "ff", volatile=False, doc="The larger; NaN if either is NaN.")
absolute = instruction("abs.ftz.f32 $0, $1;", "f", "f", volatile=False, doc="|x|.")
as_f32 = instruction("mov.b32 $0, $1;", "f", "r", volatile=False, doc="The fp32 with these bits.")
less_f32 = instruction(
    "{ .reg .pred p; setp.lt.s32 p, $1, $2; selp.f32 $0, $3, $4, p; }",
    "f",
    "rrff",
    volatile=False,
    doc="x if i < j else y for integers i, j and fp32 x, y; a select, so the value not taken may be NaN.",
)
less_b32 = instruction(
    "{ .reg .pred p; setp.lt.s32 p, $1, $2; selp.b32 $0, $3, $4, p; }",
    "r",
    "rrrr",
    volatile=False,
    doc="x if i < j else y, all 32-bit integers.",
)

# ---- packed pairs: the low half is the first element --------------------------------------------------------------
_cvt_bf16x2 = instruction("cvt.rn.bf16x2.f32 $0, $1, $2;", "r", "ff", volatile=False, doc="")
_cvt_f16x2 = instruction("cvt.rn.f16x2.f32 $0, $1, $2;", "r", "ff", volatile=False, doc="")
_cvt_f16x2_saturated = instruction("cvt.rn.satfinite.f16x2.f32 $0, $1, $2;", "r", "ff", volatile=False, doc="")
unpack_bf16x2 = instruction(
    "{ .reg .b32 a, b; shl.b32 a, $2, 16; and.b32 b, $2, 0xffff0000; mov.b32 $0, a; mov.b32 $1, b; }",
    "ff",
    "r",
    volatile=False,
    doc="(low, high) of a bf16 pair as fp32; exact.",
)
unpack_f16x2 = instruction(
    "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }",
    "ff",
    "r",
    volatile=False,
    doc="(low, high) of an fp16 pair as fp32; exact.",
)
mul_bf16x2 = instruction(
    "mul.rn.bf16x2 $0, $1, $2;", "r", "rr", volatile=False, doc="a*b on bf16 pairs, mul.rn.bf16x2."
)
sub_bf16x2 = instruction(
    "sub.rn.bf16x2 $0, $1, $2;", "r", "rr", volatile=False, doc="a-b on bf16 pairs, sub.rn.bf16x2."
)
add_bf16x2 = instruction(
    "add.rn.bf16x2 $0, $1, $2;", "r", "rr", volatile=False, doc="a+b on bf16 pairs, add.rn.bf16x2."
)
larger_bf16x2 = instruction(
    "{ .reg .b32 a, b; abs.bf16x2 a, $1; abs.bf16x2 b, $2; max.bf16x2 $0, a, b; }",
    "r",
    "rr",
    volatile=False,
    doc="The larger of |a| and |b| of bf16 pairs; of a NaN and a number the number.",
)
mul_f16x2 = instruction("mul.rn.f16x2 $0, $1, $2;", "r", "rr", volatile=False, doc="a*b on fp16 pairs, mul.rn.f16x2.")
add_f16x2 = instruction("add.rn.f16x2 $0, $1, $2;", "r", "rr", volatile=False, doc="a+b on fp16 pairs, add.rn.f16x2.")
sub_f16x2 = instruction("sub.rn.f16x2 $0, $1, $2;", "r", "rr", volatile=False, doc="a-b on fp16 pairs, sub.rn.f16x2.")


def pack_bf16x2(low, high):
    """Round two fp32 to a bf16 pair, nearest even (cvt.rn.bf16x2.f32)."""
    return _cvt_bf16x2(high, low)


def pack_f16x2(low, high):
    """Round two fp32 to an fp16 pair, nearest even (cvt.rn.f16x2.f32)."""
    return _cvt_f16x2(high, low)


def split_f16x2(low, high):
    """Two fp32 as two fp16 pairs, leading and remaining part: x = lead + rest within 2**-22 |x|, fp16 range."""
    lead = pack_f16x2(low, high)
    lead_low, lead_high = unpack_f16x2(lead)
    return lead, pack_f16x2(low - lead_low, high - lead_high)


def split_f16x2_saturated(low, high):
    """split_f16x2 of any fp32: each part ends at the largest fp16, infinities included; NaN stays NaN."""
    lead = _cvt_f16x2_saturated(high, low)
    lead_low, lead_high = unpack_f16x2(lead)
    return lead, _cvt_f16x2_saturated(high - lead_high, low - lead_low)


def rest_bf16x2(low, high, lead):
    """What the bf16 pair `lead` lacks of two fp32, rounded to a bf16 pair."""
    lead_low, lead_high = unpack_bf16x2(lead)
    return pack_bf16x2(low - lead_low, high - lead_high)


def _through_fp32(operation):
    def pairwise(a, b):
        (a0, a1), (b0, b1) = unpack_bf16x2(a), unpack_bf16x2(b)
        return pack_bf16x2(operation(a0, b0), operation(a1, b1))

    return pairwise


# bf16 pairs by way of fp32 with .ftz, each result rounded to bf16. They differ from the packed instructions above in
# denormals alone, which these flush, in operands and results.
mul_bf16x2_ftz, sub_bf16x2_ftz, add_bf16x2_ftz = map(_through_fp32, (mul, sub, add))


# ---- matrix fragments --------------------------------------------------------------------------------------------
_LDMATRIX = "ldmatrix.sync.aligned.m8n8.x4{}.shared.b16 {{$0, $1, $2, $3}}, [$4];"
_STMATRIX = "stmatrix.sync.aligned.m8n8.x4{}.shared.b16 [$0], {{$1, $2, $3, $4}};"
ldmatrix_x4 = instruction(
    _LDMATRIX.format(""),
    "rrrr",
    "r",
    volatile=True,
    doc="Four 8x8 b16 tiles; lane l gives the address of row l%8 of tile l//8.",
)
ldmatrix_x4_trans = instruction(
    _LDMATRIX.format(".trans"), "rrrr", "r", volatile=True, doc="ldmatrix_x4 with each tile transposed."
)
_stmatrix_x4 = instruction(_STMATRIX.format(""), "", "rrrrr", volatile=True, doc="")
_stmatrix_x4_trans = instruction(_STMATRIX.format(".trans"), "", "rrrrr", volatile=True, doc="")
movmatrix = instruction(
    "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;",
    "r",
    "r",
    volatile=True,
    doc="Transpose an 8x8 b16 tile held by a warp.",
)


def stmatrix_x4(address, tiles):
    """Store four 8x8 b16 tiles; lane l gives the address of row l%8 of tile l//8."""
    _stmatrix_x4(address, *tiles)


def stmatrix_x4_trans(address, tiles):
    """stmatrix_x4 with each tile transposed."""
    _stmatrix_x4_trans(address, *tiles)


def _mma_f32(kind):
    return instruction(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        "ffff",
        "rrrrrrffff",
        volatile=True,
        doc="",
    )


_mma_bf16, _mma_f16 = _mma_f32("bf16"), _mma_f32("f16")


def _mma_k8(kind):
    return instruction(
        f"mma.sync.aligned.m16n8k8.row.col.f32.{kind}.{kind}.f32 {{$0, $1, $2, $3}}, {{$4, $5}}, {{$6}}, {{$7, $8, $9, $10}};",
        "ffff",
        "rrrffff",
        volatile=True,
        doc="",
    )


_mma_bf16_k8, _mma_f16_k8 = _mma_k8("bf16"), _mma_k8("f16")
_mma_f16_f16 = instruction(
    "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {$0, $1}, {$2, $3, $4, $5}, {$6, $7}, {$8, $9};",
    "rr",
    "rrrrrrrr",
    volatile=True,
    doc="",
)


def mma_bf16(a, b, c):
    """c + a.b, m16n8k16, bf16 operands, fp32 accumulator: a 4 registers, b 2, c 4 fp32; returns 4 fp32."""
    return _mma_bf16(*a, *b, *c)


def mma_f16(a, b, c):
    """c + a.b, m16n8k16, fp16 operands, fp32 accumulator: a 4 registers, b 2, c 4 fp32; returns 4 fp32."""
    return _mma_f16(*a, *b, *c)


def mma_bf16_k8(a, b, c):
    """c + a.b, m16n8k8, bf16 operands, fp32 accumulator: a 2 registers, b 1, c 4 fp32; returns 4 fp32."""
    return _mma_bf16_k8(*a, b, *c)


def mma_f16_k8(a, b, c):
    """c + a.b, m16n8k8, fp16 operands, fp32 accumulator: a 2 registers, b 1, c 4 fp32; returns 4 fp32."""
    return _mma_f16_k8(*a, b, *c)


def mma_f16_f16(a, b, c):
    """c + a.b, m16n8k16, fp16 operands and accumulator: a 4 registers, b 2, c 2; returns 2 registers."""
    return _mma_f16_f16(*a, *b, *c)


shuffle_xor = instruction(
    "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;", "r", "rr", volatile=True, doc="The word of lane XOR mask."
)


def transpose_quad(words, place):
    """Transpose a 4 x 4 matrix of words over the lanes 4q to 4q + 3; `place` is lane % 4. Lane 4q + i gives the words [i]
    of four columns and gets the four words of column i."""
    first = [less_b32(place, 2, words[n], words[n + 2]) for n in range(2)]
    other = [shuffle_xor(less_b32(place, 2, words[n + 2], words[n]), 2) for n in range(2)]
    result = []
    odd = place & 1
    for row in range(2):  # rows 2 * row and 2 * row + 1 of the two columns that this pair of lanes keeps
        pairs = [(less_b32(place, 2, first[n], other[n]), less_b32(place, 2, other[n], first[n])) for n in range(2)]
        kept = less_b32(odd, 1, pairs[0][row], pairs[1][row])
        swapped = shuffle_xor(less_b32(odd, 1, pairs[1][row], pairs[0][row]), 1)
        result += [less_b32(odd, 1, kept, swapped), less_b32(odd, 1, swapped, kept)]
    return result


# ---- shared and global memory by address -------------------------------------------------------------------------
lds_b32 = instruction("ld.shared.b32 $0, [$1];", "r", "r", volatile=True, doc="4 bytes of shared memory.")
lds_f32 = instruction("ld.shared.f32 $0, [$1];", "f", "r", volatile=True, doc="One fp32 of shared memory.")
lds_v2_b32 = instruction("ld.shared.v2.b32 {$0, $1}, [$2];", "rr", "r", volatile=True, doc="8 aligned bytes.")
lds_v4_b32 = instruction(
    "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "rrrr", "r", volatile=True, doc="16 aligned bytes."
)
lds_v2_f32 = instruction("ld.shared.v2.f32 {$0, $1}, [$2];", "ff", "r", volatile=True, doc="Two fp32, 8-byte aligned.")
lds_v4_f32 = instruction(
    "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", "ffff", "r", volatile=True, doc="Four fp32, 16-byte aligned."
)
_lds_u16 = "{ .reg .b16 h; ld.shared.b16 h, [$1]; cvt.u32.u16 $0, h; }"
lds_b16 = instruction(_lds_u16, "r", "r", volatile=True, doc="2 bytes of shared memory, zero-extended.")
sts_b32 = instruction("st.shared.b32 [$0], $1;", "", "rr", volatile=True, doc="Store 4 bytes.")
sts_b16 = instruction(
    "{ .reg .b16 h; cvt.u16.u32 h, $1; st.shared.b16 [$0], h; }", "", "rr", volatile=True, doc="Store the low 2 bytes."
)
sts_f32 = instruction("st.shared.f32 [$0], $1;", "", "rf", volatile=True, doc="Store one fp32.")
sts_v2_f32 = instruction("st.shared.v2.f32 [$0], {$1, $2};", "", "rff", volatile=True, doc="Store two fp32.")
_sts_v4 = instruction("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", "", "rrrrr", volatile=True, doc="")


def sts_v4_b32(address, words):
    """Store 16 aligned bytes."""
    _sts_v4(address, *words)


_sts_v4_f32 = instruction("st.shared.v4.f32 [$0], {$1, $2, $3, $4};", "", "rffff", volatile=True, doc="")


def sts_v4_f32(address, values):
    """Store four fp32, 16-byte aligned."""
    _sts_v4_f32(address, *values)


ldg_nc_b32 = instruction(
    "ld.global.nc.b32 $0, [$1];", "r", "l", volatile=True, doc="4 bytes of read-only global memory."
)
ldg_nc_f32 = instruction(
    "ld.global.nc.f32 $0, [$1];", "f", "l", volatile=True, doc="One fp32 of read-only global memory."
)
ldg_nc_v2_b32 = instruction(
    "ld.global.nc.v2.b32 {$0, $1}, [$2];", "rr", "l", volatile=True, doc="8 aligned bytes of read-only global memory."
)
ldg_nc_v4_b32 = instruction(
    "ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];",
    "rrrr",
    "l",
    volatile=True,
    doc="16 bytes of read-only global memory.",
)
ldg_nc_bf16 = instruction(
    "{ .reg .b16 h; .reg .b32 w; ld.global.nc.b16 h, [$1]; cvt.u32.u16 w, h; shl.b32 w, w, 16; mov.b32 $0, w; }",
    "f",
    "l",
    volatile=True,
    doc="One bf16 of read-only global memory, widened to fp32.",
)
ldg_b32 = instruction("ld.global.b32 $0, [$1];", "r", "l", volatile=True, doc="4 bytes of global memory.")
ldg_f32 = instruction("ld.global.f32 $0, [$1];", "f", "l", volatile=True, doc="One fp32 of global memory.")
ldg_bf16 = instruction(
    "{ .reg .b16 h; .reg .b32 w; ld.global.b16 h, [$1]; cvt.u32.u16 w, h; shl.b32 w, w, 16; mov.b32 $0, w; }",
    "f",
    "l",
    volatile=True,
    doc="One bf16 of global memory, widened to fp32.",
)
ldg_b64 = instruction("ld.global.b64 $0, [$1];", "l", "l", volatile=True, doc="8 bytes of global memory.")
stg_b32 = instruction("st.global.b32 [$0], $1;", "", "lr", volatile=True, doc="Store 4 bytes.")
stg_f32 = instruction("st.global.f32 [$0], $1;", "", "lf", volatile=True, doc="Store one fp32.")
stg_b16 = instruction(
    "{ .reg .b16 h; cvt.u16.u32 h, $1; st.global.b16 [$0], h; }", "", "lr", volatile=True, doc="Store the low 2 bytes."
)
_stg_v2 = instruction("st.global.v2.b32 [$0], {$1, $2};", "", "lrr", volatile=True, doc="")
_stg_v4 = instruction("st.global.v4.b32 [$0], {$1, $2, $3, $4};", "", "lrrrr", volatile=True, doc="")
_stg_once_v4 = instruction("st.global.cs.v4.b32 [$0], {$1, $2, $3, $4};", "", "lrrrr", volatile=True, doc="")

lds_volatile_v4_b32 = instruction(
    "ld.volatile.shared.v4.b32 {$0, $1, $2, $3}, [$4];",
    "rrrr",
    "r",
    volatile=True,
    doc="16 aligned bytes; ptxas keeps the load where it stands among WGMMAs.",
)
ldg_v2_b32 = instruction(
    "ld.global.v2.b32 {$0, $1}, [$2];", "rr", "l", volatile=True, doc="8 aligned bytes of global memory."
)
ldg_v4_f32 = instruction(
    "ld.global.v4.f32 {$0, $1, $2, $3}, [$4];", "ffff", "l", volatile=True, doc="Four fp32, 16-byte aligned."
)
stg_v2_f32 = instruction(
    "st.global.v2.f32 [$0], {$1, $2};", "", "lff", volatile=True, doc="Store two fp32, 8-byte aligned."
)
stg_v4_f32 = instruction(
    "st.global.v4.f32 [$0], {$1, $2, $3, $4};", "", "lffff", volatile=True, doc="Store four fp32, 16-byte aligned."
)

ldg_acquire_b32 = instruction(
    "ld.acquire.gpu.global.b32 $0, [$1];",
    "r",
    "l",
    volatile=True,
    doc="4 bytes of global memory; what their writer released before them is visible to this thread afterwards.",
)
stg_release_b32 = instruction(
    "st.release.gpu.global.b32 [$0], $1;",
    "",
    "lr",
    volatile=True,
    doc="Store 4 bytes after everything that this thread has written, or has synchronised with.",
)


def stg_words(address, words):
    """Store 1, 2 or 4 words with one instruction; the address is aligned to their size."""
    if len(words) == 1:
        stg_b32(address, words[0])
    elif len(words) == 2:
        _stg_v2(address, *words)
    else:
        _stg_v4(address, *words)


def stg_once_words(address, words):
    """stg_words of 4 words that are read no more: the first to leave the L2."""
    _stg_once_v4(address, *words)


def lds_words(address, count):
    """Load 1, 2 or 4 words of shared memory with one instruction; the address is aligned to their size."""
    if count == 1:
        return (lds_b32(address),)
    return lds_v2_b32(address) if count == 2 else lds_v4_b32(address)


# ---- asynchronous copies -----------------------------------------------------------------------------------------
cp_async_16_or_zero = instruction(
    "cp.async.cg.shared.global [$0], [$1], 16, $2;",
    "",
    "rlr",
    volatile=True,
    doc="Copy the first n of 16 bytes and zero the rest; with n = 0 the source is not read.",
)
cp_async_wait_all = instruction(
    "cp.async.wait_all;", "", "", volatile=True, doc="Wait for all cp.async of this thread, committed or not."
)
cp_async_mbarrier_arrive = instruction(
    "cp.async.mbarrier.arrive.noinc.shared.b64 [$0];",
    "",
    "r",
    volatile=True,
    doc="Arrive on the mbarrier once all earlier cp.async of this thread are done; counts as one expected arrival.",
)
bulk_load = instruction(
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
    "",
    "rlrr",
    volatile=True,
    doc="Bulk copy of n bytes (a multiple of 16) global -> shared that completes on an mbarrier; one thread issues it.",
)
bulk_load_multicast = instruction(
    "{ .reg .b16 mask;\ncvt.u16.u32 mask, $4;\n"
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [$0], [$1], $2, [$3], mask; }",
    "",
    "rlrrr",
    volatile=True,
    doc="bulk_load into all CTAs of the cluster whose bits are set in a mask: the same places, each on its own mbarrier.",
)
bulk_store = instruction(
    "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;",
    "",
    "lrr",
    volatile=True,
    doc="Bulk copy of n bytes (a multiple of 16) shared -> global; one thread issues it, after a proxy fence and a barrier.",
)
ONCE = 0x12F0000000000000  # the cache policy that createpolicy.fractional makes for all of what is the first to leave the L2
_bulk_load_hinted = instruction(
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [$0], [$1], $2, [$3], $4;",
    "",
    "rlrrl",
    volatile=True,
    doc="",
)
_bulk_load_multicast_hinted = instruction(
    "{ .reg .b16 mask;\ncvt.u16.u32 mask, $4;\n"
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
    "[$0], [$1], $2, [$3], mask, $5; }",
    "",
    "rlrrrl",
    volatile=True,
    doc="",
)


def bulk_load_once(*operands):
    """bulk_load of what is not read again."""
    _bulk_load_hinted(*operands, ONCE)


def bulk_load_multicast_once(*operands):
    """bulk_load_multicast of what is not read again."""
    _bulk_load_multicast_hinted(*operands, ONCE)


bulk_commit = instruction("cp.async.bulk.commit_group;", "", "", volatile=True, doc="Close a group of bulk stores.")
bulk_wait = instruction(
    "cp.async.bulk.wait_group 0;",
    "",
    "",
    volatile=True,
    doc="Wait until what this thread's closed groups of bulk stores wrote is there.",
)
bulk_wait_read = instruction(
    "cp.async.bulk.wait_group.read 0;",
    "",
    "",
    volatile=True,
    doc="Wait until this thread's bulk stores have read their source.",
)
fence_proxy_async = instruction(
    "fence.proxy.async.shared::cta;",
    "",
    "",
    volatile=True,
    doc="Make this thread's ordinary shared-memory accesses visible to the copy engine and the tensor cores.",
)

# ---- clusters ----------------------------------------------------------------------------------------------------
cluster_rank = instruction("mov.u32 $0, %cluster_ctarank;", "r", "", volatile=False, doc="Number of this CTA in its cluster.")
cluster_arrive = instruction(
    "barrier.cluster.arrive.release.aligned;",
    "",
    "",
    volatile=True,
    doc="Arrive at the barrier of all threads of the cluster, after everything this thread has done.",
)
cluster_arrive_relaxed = instruction(
    "barrier.cluster.arrive.relaxed.aligned;",
    "",
    "",
    volatile=True,
    doc="cluster_arrive that orders nothing but mbarriers initialised before a fence of their own.",
)
cluster_wait = instruction(
    "barrier.cluster.wait.acquire.aligned;", "", "", volatile=True, doc="Wait for the others' cluster_arrive."
)
mbarrier_arrive_remote = instruction(
    "{ .reg .b32 there;\nmapa.shared::cluster.u32 there, $0, $1;\nmbarrier.arrive.shared::cluster.b64 _, [there]; }",
    "",
    "rr",
    volatile=True,
    doc="Arrive on the mbarrier at the same place in another CTA of the cluster. Releases nothing to threads there: at cluster "
    "scope the instruction waits for all memory accesses of its thread.",
)

# ---- programmatic dependent launch --------------------------------------------------------------------------------
fence_proxy_async_global = instruction(
    "fence.proxy.async.global;",
    "",
    "",
    volatile=True,
    doc="Order global memory that this thread has seen or written before the copy engine's later reads of it.",
)
dependency_wait = instruction(
    "griddepcontrol.wait;",
    "",
    "",
    volatile=True,
    doc="Wait until the preceding grid has finished and flushed its writes.",
)
dependency_launch = instruction(
    "griddepcontrol.launch_dependents;",
    "",
    "",
    volatile=True,
    doc="Let the dependent grid start as soon as SMs are free.",
)


# ---- scheduling --------------------------------------------------------------------------------------------------
@dsl_user_op
def pin(values, *, loc=None, ip=None):
    """Return register values (all of one type) unchanged, through an empty instruction that LLVM does not move: what
    computes them stays before it."""
    letter = next(letter for letter, kind in _DSL_TYPE.items() if isinstance(values[0], kind))
    kind, count = _mlir_type(letter), len(values)
    raw = llvm.inline_asm(
        llvm.StructType.get_literal([kind] * count),
        [v.ir_value(loc=loc, ip=ip) for v in values],
        "// pin",
        ",".join([f"={letter}"] * count + [str(i) for i in range(count)]),
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return tuple(_DSL_TYPE[letter](llvm.extractvalue(kind, raw, [i], loc=loc, ip=ip)) for i in range(count))


fence_gpu = instruction(
    "fence.acq_rel.gpu;",
    "",
    "",
    volatile=True,
    doc="Order this thread's accesses before and after for all threads of the GPU.",
)
_force_compute = instruction(
    "{ .reg .pred p; setp.lt.s32 p, $0, 0; @p st.shared.v4.f32 [$0], {$1, $2, $3, $4}; }", "", "rffff", volatile=True, doc=""
)


def force_compute(address, words):
    """Have four words computed here: a store, which an address of shared memory prevents. ptxas would rather keep what
    they are made of in registers until they are used."""
    _force_compute(address, *words)


nanosleep = instruction("nanosleep.u32 $0;", "", "r", volatile=True, doc="Pause for 0 to 2n nanoseconds, n below 10^6.")
lane_index = instruction("mov.u32 $0, %laneid;", "r", "", volatile=True, doc="The lane, read anew: as thread_index.")
thread_index = instruction(
    "mov.u32 $0, %tid.x;",
    "r",
    "",
    volatile=True,
    doc="threadIdx.x, read anew: what depends on it is not kept in registers.",
)
