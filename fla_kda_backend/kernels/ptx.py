"""Typed wrappers of the PTX instructions that the kernels use and the DSL does not offer.

Each wrapper is one line of a table: the PTX text, its operands and results as letters, and what it computes. `r` is a
32-bit integer, `f` an fp32, `l` a 64-bit integer: "rrf -> f" takes two integers and an fp32 and returns an fp32. A caller
may group operands into lists, as the braces of the text do, for instance the registers of a fragment.

`pure` instructions may be moved, merged or dropped. `ordered` ones may not: warp-wide (`.aligned`) instructions must not
sink into divergent code, memory accesses must not pass a barrier.
"""

from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

_DSL_TYPE = {"r": Int32, "f": Float32, "l": Int64}


def _mlir_type(letter):
    return {"r": T.i32, "f": T.f32, "l": T.i64}[letter]()


def pure(text, signature, doc):
    return instruction(text, signature, doc, volatile=False)


def ordered(text, signature, doc):
    return instruction(text, signature, doc, volatile=True)


def instruction(text, signature, doc, *, volatile):
    """Make the function that emits `text`; see the module's docstring for the signature."""
    operands, results = (letters.strip() for letters in signature.split("->"))
    constraints = ",".join(["=" + letter for letter in results] + list(operands))

    @dsl_user_op
    def emit(*values, loc=None, ip=None):
        values = [x for v in values for x in (v if isinstance(v, list | tuple) else [v])]
        if len(values) != len(operands):
            raise TypeError(f"{text!r} takes {len(operands)} operands, got {len(values)}")
        types = [_mlir_type(letter) for letter in results]
        raw = llvm.inline_asm(
            None if not types else types[0] if len(types) == 1 else llvm.StructType.get_literal(types),
            [_DSL_TYPE[letter](v).ir_value(loc=loc, ip=ip) for letter, v in zip(operands, values)],
            text,
            constraints,
            has_side_effects=volatile,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
        if len(types) < 2:
            return _DSL_TYPE[results](raw) if types else None
        return tuple(
            _DSL_TYPE[letter](llvm.extractvalue(kind, raw, [i], loc=loc, ip=ip))
            for i, (letter, kind) in enumerate(zip(results, types))
        )

    emit.__doc__ = doc
    return emit


# ---- fp32 ----------------------------------------------------------------------------------------------------------
ex2 = pure("ex2.approx.ftz.f32 $0, $1;", "f -> f", "2**x; any x, denormals to 0.")
ex2_negative = pure("{ .reg .f32 a; abs.f32 a, $1; neg.f32 a, a; ex2.approx.ftz.f32 $0, a; }", "f -> f", "2**-|x|.")
tanh = pure("tanh.approx.f32 $0, $1;", "f -> f", "tanh(x); any x.")
rsqrt = pure("rsqrt.approx.ftz.f32 $0, $1;", "f -> f", "x**-0.5; x > 0.")
rcp = pure("rcp.approx.ftz.f32 $0, $1;", "f -> f", "1/x; x != 0.")
fma = pure("fma.rn.ftz.f32 $0, $1, $2, $3;", "fff -> f", "a*b + c with one rounding.")
mul = pure("mul.rn.ftz.f32 $0, $1, $2;", "ff -> f", "a*b, rounded by itself: never contracted with an addition.")
add = pure("add.rn.ftz.f32 $0, $1, $2;", "ff -> f", "a+b, rounded by itself: never contracted with a product.")
sub = pure("sub.rn.ftz.f32 $0, $1, $2;", "ff -> f", "a-b, rounded by itself: never contracted with a product.")
maximum = pure("max.ftz.f32 $0, $1, $2;", "ff -> f", "The larger of x and y; of a NaN and a number the number.")
max_nan = pure("max.NaN.ftz.f32 $0, $1, $2;", "ff -> f", "The larger of x and y; NaN if either is NaN.")
absolute = pure("abs.ftz.f32 $0, $1;", "f -> f", "|x|.")
as_f32 = pure("mov.b32 $0, $1;", "r -> f", "The fp32 with these bits.")
less_f32 = pure(
    "{ .reg .pred p; setp.lt.s32 p, $1, $2; selp.f32 $0, $3, $4, p; }",
    "rrff -> f",
    "x if i < j else y for integers i, j and fp32 x, y. It is a select: the value not taken may be NaN.",
)
less_b32 = pure(
    "{ .reg .pred p; setp.lt.s32 p, $1, $2; selp.b32 $0, $3, $4, p; }", "rrrr -> r", "x if i < j else y, all 32-bit integers."
)

# ---- packed pairs: the low half is the first element ---------------------------------------------------------------
# The first operand becomes the high half. ptxas schedules by the order of operands, so the order stays.
_cvt_bf16x2 = pure("cvt.rn.bf16x2.f32 $0, $1, $2;", "ff -> r", "Round (high, low) to a bf16 pair, nearest even.")
_cvt_f16x2 = pure("cvt.rn.f16x2.f32 $0, $1, $2;", "ff -> r", "Round (high, low) to an fp16 pair, nearest even.")
_cvt_f16x2_saturated = pure("cvt.rn.satfinite.f16x2.f32 $0, $1, $2;", "ff -> r", "_cvt_f16x2, at most the largest fp16.")
unpack_bf16x2 = pure(
    "{ .reg .b32 a, b; shl.b32 a, $2, 16; and.b32 b, $2, 0xffff0000; mov.b32 $0, a; mov.b32 $1, b; }",
    "r -> ff",
    "(low, high) of a bf16 pair as fp32; exact.",
)
unpack_f16x2 = pure(
    "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }",
    "r -> ff",
    "(low, high) of an fp16 pair as fp32; exact.",
)
mul_bf16x2 = pure("mul.rn.bf16x2 $0, $1, $2;", "rr -> r", "a*b on bf16 pairs.")
mul_f16x2 = pure("mul.rn.f16x2 $0, $1, $2;", "rr -> r", "a*b on fp16 pairs.")
add_f16x2 = pure("add.rn.f16x2 $0, $1, $2;", "rr -> r", "a+b on fp16 pairs.")
sub_f16x2 = pure("sub.rn.f16x2 $0, $1, $2;", "rr -> r", "a-b on fp16 pairs.")
larger_bf16x2 = pure(
    "{ .reg .b32 a, b; abs.bf16x2 a, $1; abs.bf16x2 b, $2; max.bf16x2 $0, a, b; }",
    "rr -> r",
    "The larger of |a| and |b| of bf16 pairs; of a NaN and a number the number.",
)


def pack_bf16x2(low, high):
    """Round two fp32 to a bf16 pair, nearest even."""
    return _cvt_bf16x2(high, low)


def pack_f16x2(low, high):
    """Round two fp32 to an fp16 pair, nearest even."""
    return _cvt_f16x2(high, low)


def split_f16x2(low, high):
    """Two fp32 as two fp16 pairs, leading part and rest: x = lead + rest within 2**-22 |x|, in the range of fp16."""
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


# bf16 pairs by way of fp32 with .ftz, each result rounded to bf16. They differ from packed bf16 instructions in denormals
# alone: these flush them, in operands and results.
mul_bf16x2_ftz, sub_bf16x2_ftz, add_bf16x2_ftz = map(_through_fp32, (mul, sub, add))

# ---- matrix fragments ----------------------------------------------------------------------------------------------
ldmatrix_x4 = ordered(
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];",
    "r -> rrrr",
    "Load four 8x8 b16 tiles; lane l gives the address of row l%8 of tile l//8.",
)
ldmatrix_x4_trans = ordered(
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];",
    "r -> rrrr",
    "ldmatrix_x4 with each tile transposed.",
)
stmatrix_x4 = ordered(
    "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};",
    "rrrrr ->",
    "Store four 8x8 b16 tiles; lane l gives the address of row l%8 of tile l//8.",
)
stmatrix_x4_trans = ordered(
    "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0], {$1, $2, $3, $4};",
    "rrrrr ->",
    "stmatrix_x4 with each tile transposed.",
)
movmatrix = ordered("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "r -> r", "Transpose an 8x8 b16 tile held by a warp.")


def _mma_f32(kind):
    return ordered(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        "rrrrrrffff -> ffff",
        f"(a, b, c) -> c + a.b, m16n8k16, {kind} operands, fp32 accumulator: a 4 registers, b 2, c 4 fp32.",
    )


def _mma_f32_k8(kind):
    return ordered(
        f"mma.sync.aligned.m16n8k8.row.col.f32.{kind}.{kind}.f32 {{$0, $1, $2, $3}}, {{$4, $5}}, {{$6}}, {{$7, $8, $9, $10}};",
        "rrrffff -> ffff",
        f"(a, b, c) -> c + a.b, m16n8k8, {kind} operands, fp32 accumulator: a 2 registers, b 1, c 4 fp32.",
    )


mma_bf16, mma_f16 = _mma_f32("bf16"), _mma_f32("f16")
mma_bf16_k8, mma_f16_k8 = _mma_f32_k8("bf16"), _mma_f32_k8("f16")
mma_f16_f16 = ordered(
    "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {$0, $1}, {$2, $3, $4, $5}, {$6, $7}, {$8, $9};",
    "rrrrrrrr -> rr",
    "(a, b, c) -> c + a.b, m16n8k16, fp16 operands and accumulator: a 4 registers, b 2, c 2.",
)

shuffle_xor = ordered("shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;", "rr -> r", "The word of lane XOR mask.")


def transpose_quad(words, quad_lane):
    """Transpose a 4 x 4 matrix of words over the lanes 4q to 4q + 3; `quad_lane` is lane % 4.

    Lane 4q + i gives word i of each of the four columns and gets the four words of column i.
    """
    first = [less_b32(quad_lane, 2, words[n], words[n + 2]) for n in range(2)]
    other = [shuffle_xor(less_b32(quad_lane, 2, words[n + 2], words[n]), 2) for n in range(2)]
    result = []
    odd = quad_lane & 1
    for row in range(2):  # rows 2 * row and 2 * row + 1 of the two columns that this pair of lanes keeps
        pairs = [(less_b32(quad_lane, 2, first[n], other[n]), less_b32(quad_lane, 2, other[n], first[n])) for n in range(2)]
        kept = less_b32(odd, 1, pairs[0][row], pairs[1][row])
        swapped = shuffle_xor(less_b32(odd, 1, pairs[1][row], pairs[0][row]), 1)
        result += [less_b32(odd, 1, kept, swapped), less_b32(odd, 1, swapped, kept)]
    return result


# ---- shared memory by address --------------------------------------------------------------------------------------
lds_b16 = ordered("{ .reg .b16 h; ld.shared.b16 h, [$1]; cvt.u32.u16 $0, h; }", "r -> r", "Load 2 bytes, zero-extended.")
lds_b32 = ordered("ld.shared.b32 $0, [$1];", "r -> r", "Load 4 bytes.")
lds_v2_b32 = ordered("ld.shared.v2.b32 {$0, $1}, [$2];", "r -> rr", "Load 8 aligned bytes.")
lds_v4_b32 = ordered("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "r -> rrrr", "Load 16 aligned bytes.")
lds_volatile_v4_b32 = ordered(
    "ld.volatile.shared.v4.b32 {$0, $1, $2, $3}, [$4];",
    "r -> rrrr",
    "Load 16 aligned bytes; ptxas keeps the load where it stands among WGMMAs.",
)
lds_f32 = ordered("ld.shared.f32 $0, [$1];", "r -> f", "Load one fp32.")
lds_v2_f32 = ordered("ld.shared.v2.f32 {$0, $1}, [$2];", "r -> ff", "Load two fp32, 8-byte aligned.")
lds_v4_f32 = ordered("ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", "r -> ffff", "Load four fp32, 16-byte aligned.")
sts_b16 = ordered("{ .reg .b16 h; cvt.u16.u32 h, $1; st.shared.b16 [$0], h; }", "rr ->", "Store the low 2 bytes.")
sts_b32 = ordered("st.shared.b32 [$0], $1;", "rr ->", "Store 4 bytes.")
sts_v4_b32 = ordered("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", "rrrrr ->", "Store 16 aligned bytes.")
sts_f32 = ordered("st.shared.f32 [$0], $1;", "rf ->", "Store one fp32.")
sts_v2_f32 = ordered("st.shared.v2.f32 [$0], {$1, $2};", "rff ->", "Store two fp32, 8-byte aligned.")
sts_v4_f32 = ordered("st.shared.v4.f32 [$0], {$1, $2, $3, $4};", "rffff ->", "Store four fp32, 16-byte aligned.")


def lds_words(address, count):
    """Load 1, 2 or 4 words with one instruction; the address is aligned to their size."""
    if count == 1:
        return (lds_b32(address),)
    return lds_v2_b32(address) if count == 2 else lds_v4_b32(address)


# ---- global memory by address --------------------------------------------------------------------------------------
_LOAD_BF16 = "{{ .reg .b16 h; .reg .b32 w; ld.global{}.b16 h, [$1]; cvt.u32.u16 w, h; shl.b32 w, w, 16; mov.b32 $0, w; }}"
# .nc: memory that nothing writes during the launch
ldg_nc_b32 = ordered("ld.global.nc.b32 $0, [$1];", "l -> r", "Load 4 bytes that nothing writes.")
ldg_nc_v2_b32 = ordered("ld.global.nc.v2.b32 {$0, $1}, [$2];", "l -> rr", "Load 8 aligned bytes that nothing writes.")
ldg_nc_v4_b32 = ordered(
    "ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];", "l -> rrrr", "Load 16 aligned bytes that nothing writes."
)
ldg_nc_f32 = ordered("ld.global.nc.f32 $0, [$1];", "l -> f", "Load one fp32 that nothing writes.")
ldg_nc_bf16 = ordered(_LOAD_BF16.format(".nc"), "l -> f", "Load one bf16 that nothing writes, widened to fp32.")
ldg_b32 = ordered("ld.global.b32 $0, [$1];", "l -> r", "Load 4 bytes.")
ldg_v2_b32 = ordered("ld.global.v2.b32 {$0, $1}, [$2];", "l -> rr", "Load 8 aligned bytes.")
ldg_b64 = ordered("ld.global.b64 $0, [$1];", "l -> l", "Load 8 aligned bytes as one integer.")
ldg_f32 = ordered("ld.global.f32 $0, [$1];", "l -> f", "Load one fp32.")
ldg_v2_f32 = ordered("ld.global.v2.f32 {$0, $1}, [$2];", "l -> ff", "Load two fp32, 8-byte aligned.")
ldg_v4_f32 = ordered("ld.global.v4.f32 {$0, $1, $2, $3}, [$4];", "l -> ffff", "Load four fp32, 16-byte aligned.")
ldg_bf16 = ordered(_LOAD_BF16.format(""), "l -> f", "Load one bf16, widened to fp32.")
ldg_acquire_b32 = ordered(
    "ld.acquire.gpu.global.b32 $0, [$1];",
    "l -> r",
    "Load 4 bytes; what their writer released before them is visible to this thread afterwards.",
)
stg_b16 = ordered("{ .reg .b16 h; cvt.u16.u32 h, $1; st.global.b16 [$0], h; }", "lr ->", "Store the low 2 bytes.")
stg_b32 = ordered("st.global.b32 [$0], $1;", "lr ->", "Store 4 bytes.")
stg_v2_b32 = ordered("st.global.v2.b32 [$0], {$1, $2};", "lrr ->", "Store 8 aligned bytes.")
stg_v4_b32 = ordered("st.global.v4.b32 [$0], {$1, $2, $3, $4};", "lrrrr ->", "Store 16 aligned bytes.")
stg_once_words = ordered(
    "st.global.cs.v4.b32 [$0], {$1, $2, $3, $4};",
    "lrrrr ->",
    "Store 16 aligned bytes that are not read again: they are the first to leave the L2.",
)
stg_f32 = ordered("st.global.f32 [$0], $1;", "lf ->", "Store one fp32.")
stg_v2_f32 = ordered("st.global.v2.f32 [$0], {$1, $2};", "lff ->", "Store two fp32, 8-byte aligned.")
stg_v4_f32 = ordered("st.global.v4.f32 [$0], {$1, $2, $3, $4};", "lffff ->", "Store four fp32, 16-byte aligned.")
stg_release_b32 = ordered(
    "st.release.gpu.global.b32 [$0], $1;",
    "lr ->",
    "Store 4 bytes after everything that this thread has written or has synchronised with.",
)

red_add_b32 = ordered("red.relaxed.gpu.global.add.u32 [$0], $1;", "lr ->", "Add to 4 bytes.")
atom_add_b32 = ordered("atom.relaxed.gpu.global.add.u32 $0, [$1], $2;", "lr -> r", "Add to 4 bytes; returns what they were.")


def stg_words(address, words):
    """Store 1, 2 or 4 words with one instruction; the address is aligned to their size."""
    {1: stg_b32, 2: stg_v2_b32, 4: stg_v4_b32}[len(words)](address, words)


# ---- asynchronous copies -------------------------------------------------------------------------------------------
cp_async_16_or_zero = ordered(
    "cp.async.cg.shared.global [$0], [$1], 16, $2;",
    "rlr ->",
    "Copy the first n of 16 bytes and zero the rest; with n = 0 the source is not read.",
)
cp_async_wait_all = ordered("cp.async.wait_all;", "->", "Wait for all cp.async of this thread, committed or not.")
cp_async_mbarrier_arrive = ordered(
    "cp.async.mbarrier.arrive.noinc.shared.b64 [$0];",
    "r ->",
    "Arrive on the mbarrier once all earlier cp.async of this thread are done; counts as one expected arrival.",
)
# Operands: shared-memory address, global address, bytes (a multiple of 16), mbarrier; then the mask of CTAs; then the policy.
_BULK_LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
_WITH_MASK = "{{ .reg .b16 mask;\ncvt.u16.u32 mask, $4;\n{} }}"
_MULTICAST = _BULK_LOAD + ".multicast::cluster"
bulk_load = ordered(
    f"{_BULK_LOAD} [$0], [$1], $2, [$3];",
    "rlrr ->",
    "Bulk copy of n bytes global -> shared that completes on an mbarrier; one thread issues it.",
)
bulk_load_multicast = ordered(
    _WITH_MASK.format(f"{_MULTICAST} [$0], [$1], $2, [$3], mask;"),
    "rlrrr ->",
    "bulk_load into all CTAs of the cluster whose bits are set in a mask: to the same offsets, each on its own mbarrier.",
)
_bulk_load_hinted = ordered(
    f"{_BULK_LOAD}.L2::cache_hint [$0], [$1], $2, [$3], $4;", "rlrrl ->", "bulk_load with an L2 cache policy."
)
_bulk_load_multicast_hinted = ordered(
    _WITH_MASK.format(f"{_MULTICAST}.L2::cache_hint [$0], [$1], $2, [$3], mask, $5;"),
    "rlrrrl ->",
    "bulk_load_multicast with an L2 cache policy.",
)
ONCE = 0x12F0000000000000  # the policy that createpolicy.fractional makes: all bytes are the first to leave the L2


def bulk_load_once(*operands):
    """bulk_load of what is not read again."""
    _bulk_load_hinted(*operands, ONCE)


def bulk_load_multicast_once(*operands):
    """bulk_load_multicast of what is not read again."""
    _bulk_load_multicast_hinted(*operands, ONCE)


bulk_store = ordered(
    "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;",
    "lrr ->",
    "Bulk copy of n bytes (a multiple of 16) shared -> global; one thread issues it, after a proxy fence and a barrier.",
)
bulk_commit = ordered("cp.async.bulk.commit_group;", "->", "Close a group of bulk stores.")
bulk_wait = ordered("cp.async.bulk.wait_group 0;", "->", "Wait until this thread's closed groups of bulk stores have written.")
bulk_wait_but_two = ordered("cp.async.bulk.wait_group 2;", "->", "bulk_wait of all groups but the last two.")
bulk_wait_but_five = ordered("cp.async.bulk.wait_group 5;", "->", "bulk_wait of all groups but the last five.")
bulk_wait_read = ordered("cp.async.bulk.wait_group.read 0;", "->", "Wait until they have read their source.")
bulk_wait_read_but_one = ordered("cp.async.bulk.wait_group.read 1;", "->", "bulk_wait_read of all groups but the last one.")
fence_proxy_async = ordered(
    "fence.proxy.async.shared::cta;",
    "->",
    "Make this thread's ordinary shared-memory accesses visible to the copy engine and the tensor cores.",
)
fence_proxy_async_global = ordered(
    "fence.proxy.async.global;",
    "->",
    "Order global memory that this thread has seen or written before the copy engine's later reads of it.",
)

# ---- other CTAs, other grids ---------------------------------------------------------------------------------------
cluster_rank = pure("mov.u32 $0, %cluster_ctarank;", "-> r", "Number of this CTA in its cluster.")
cluster_arrive = ordered(
    "barrier.cluster.arrive.release.aligned;",
    "->",
    "Arrive at the barrier of all threads of the cluster, after everything that this thread has done.",
)
cluster_arrive_relaxed = ordered(
    "barrier.cluster.arrive.relaxed.aligned;",
    "->",
    "cluster_arrive that orders nothing but mbarriers initialised before a fence of their own.",
)
cluster_wait = ordered("barrier.cluster.wait.acquire.aligned;", "->", "Wait for all threads' cluster_arrive.")
mbarrier_arrive_remote = ordered(
    "{ .reg .b32 there;\nmapa.shared::cluster.u32 there, $0, $1;\nmbarrier.arrive.shared::cluster.b64 _, [there]; }",
    "rr ->",
    "Arrive on the mbarrier at the same offset in another CTA of the cluster. Releases nothing to threads there: at cluster "
    "scope the instruction waits for all memory accesses of its thread.",
)
fence_gpu = ordered("fence.acq_rel.gpu;", "->", "Order this thread's accesses before and after for all threads of the GPU.")
dependency_wait = ordered("griddepcontrol.wait;", "->", "Wait until the preceding grid has finished and flushed its writes.")
dependency_launch = ordered("griddepcontrol.launch_dependents;", "->", "Let the dependent grid start as soon as SMs are free.")
nanosleep = ordered("nanosleep.u32 $0;", "r ->", "Pause for 0 to 2n nanoseconds, n below 10^6.")

# ---- what keeps ptxas and LLVM from reordering ---------------------------------------------------------------------
lane_index = ordered("mov.u32 $0, %laneid;", "-> r", "The lane, read from the special register each time; see thread_index.")
thread_index = ordered(
    "mov.u32 $0, %tid.x;",
    "-> r",
    "threadIdx.x, read from the special register each time: what depends on it is not kept in registers.",
)
force_compute = ordered(
    "{ .reg .pred p; setp.lt.s32 p, $0, 0; @p st.shared.v4.f32 [$0], {$1, $2, $3, $4}; }",
    "rffff ->",
    "Have four fp32 computed here. It is a store that an address of shared memory, never negative, prevents. Without it ptxas "
    "keeps in registers what they are computed from, until they are used.",
)

_use = ordered(
    "{ .reg .pred p; setp.lt.s32 p, $0, 0; @p st.shared.b32 [$0], $1; }",
    "rr ->",
    "A store that an address of shared memory, never negative, prevents.",
)


def wait_for_loads(address, words):
    """Have the thread wait until loads of shared memory are done: one word of each, and any address of shared memory.

    ptxas puts an mbarrier's arrival behind earlier loads, but does not have it wait for them; and it passes by those that still
    wait for the memory pipe. So words that nothing else uses before the arrival are used here.
    """
    folded = words[0]
    for word in words[1:]:
        folded = folded ^ word
    _use(address, folded)


@dsl_user_op
def pin(values, *, loc=None, ip=None):
    """Return register values, all of one type, unchanged, through an empty instruction that LLVM does not move: what
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
