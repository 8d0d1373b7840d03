"""What the compiler makes of the column split's variants on every architecture; needs the DSL, no GPU."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import compiling
import outstanding
import pytest
from call_table import gate_takes

from fla_kda_backend import planning
from fla_kda_backend.compiling import ARCHS, KernelSpec
from fla_kda_backend.kernels.variant import BETAS, GATES

pytest.importorskip("cutlass", reason="needs the CuTe DSL, nvidia-cutlass-dsl")

SMEM_LIMIT = {"sm_90a": 227, "sm_100a": 227, "sm_103a": 227, "sm_120a": 99}  # KB that a CTA may use, CUDA programming guide
# Bytes up to which ptxas spills registers of the full-width state. It does so only for GPUs that the code was never run on.
SPILLED = dict.fromkeys(
    [("sm_100a", "robust", 128), ("sm_103a", "robust", 128), ("sm_120a", "robust", 128), ("sm_120a", "exact", 128)], 64
)

STATES = (None, "fp32", "bf16")
DTYPES = ("fp32", "bf16")
CU_DTYPES = (None, "int32", "int64")
BOTH = (False, True)


def exact_variants():
    names = ("bv", "initial_state", "final_state", "cu_seqlens", "segmented")
    rows = itertools.product(planning.BV_CHOICES, STATES, STATES, CU_DTYPES, BOTH)
    return [dict(zip(names, row), arithmetic="exact") for row in compiling.pairwise(list(rows))]


def inputs():
    """What the prepare kernel alone depends on."""
    names = ("gate", "gate_dtype", "a_log", "dt_bias", "beta", "beta_dtype", "l2norm")
    optional = (None, *DTYPES)
    rows = [
        row
        for row in itertools.product(GATES, DTYPES, optional, optional, BETAS, DTYPES, BOTH)
        if gate_takes(row[0], row[2], row[3])
    ]
    return [dict(zip(names, row)) for row in compiling.pairwise(rows)]


def robust_variants():
    """Every value of an option meets every value of every other that the same kernel depends on."""
    names = ("bv", "initial_state", "final_state", "cu_seqlens", "segmented", "state_v_first", "intermediate_states")
    rows = itertools.product(planning.BV_CHOICES, STATES, STATES, CU_DTYPES, BOTH, BOTH, (None, 64, 32))
    recurrences = [dict(zip(names, row)) for row in compiling.pairwise(list(rows))]
    prepares = [{}, *inputs()]  # the first: FlashKDA's call
    chosen = []
    for k in range(max(len(recurrences), len(prepares))):
        chosen.append(recurrences[k % len(recurrences)] | prepares[k % len(prepares)] | {"arithmetic": "robust"})
    return chosen


def variants():
    chosen = exact_variants() + robust_variants()
    return [options | {"warps": planning.warps(options["arithmetic"], options["bv"])} for options in chosen]


VARIANTS = variants()


def label(options):
    return "-".join(str(value).lower() for value in options.values())


MATRIX = [(arch, n) for arch in SMEM_LIMIT for n in range(len(VARIANTS))]
EXACT, ROBUST = 0, len(exact_variants())  # the first of each
FAST = {("sm_90a", EXACT), ("sm_90a", ROBUST), ("sm_100a", ROBUST)}


@pytest.fixture(scope="module")
def reports(request, tmp_path_factory):
    """(arch, number of a variant) -> report, of those whose tests are run."""
    folder, wanted = tmp_path_factory.mktemp("compile"), {}
    for arch, n in compiling.selected(request, "compiled"):
        wanted.setdefault(arch, []).append(n)

    def reports_of(arch):
        return compiling.reports("column_split", arch, [VARIANTS[n] for n in wanted[arch]], folder)

    with ThreadPoolExecutor(2) as two_at_a_time:
        made = two_at_a_time.map(reports_of, wanted)
        return {(arch, n): report for arch, found in zip(wanted, made) for n, report in zip(wanted[arch], found)}


def test_every_architecture_is_compiled_for():
    assert set(SMEM_LIMIT) == set(ARCHS.values())


@pytest.fixture(params=compiling.parameters(MATRIX, FAST, lambda each: f"{each[0]}-{label(VARIANTS[each[1]])}"))
def compiled(request, reports):
    arch, n = request.param
    return arch, VARIANTS[n], reports[arch, n]


def test_compiled_variant(compiled):
    arch, options, report = compiled
    assert report["target"] == arch
    kernels, smem = report["kernels"], report["smem_bytes"]
    assert set(kernels) == set(smem) == {"PrepareChunk16", "RecurrenceSplit"}
    assert max(smem.values()) <= SMEM_LIMIT[arch] * 1024
    check_prepare(kernels["PrepareChunk16"], smem["PrepareChunk16"], options, arch)
    spilled = SPILLED.get((arch, options["arithmetic"], options["bv"]), 0)
    check_recurrence(kernels["RecurrenceSplit"], options, spilled)


def check_prepare(kernel, smem, options, arch):
    ptx, sass = kernel["ptx"], kernel["sass"]
    needs_levels = options.get("gate", "bounded") != "bounded" or not options.get("l2norm", True)
    # CTAs of 128 threads that an SM holds, by their registers and by their shared memory in its 228 KB
    ctas = 4 if needs_levels else 8 if options.get("gate_dtype", "bf16") == "bf16" else 6
    assert kernel["registers"] <= 65536 // (128 * ctas)
    assert no_local_memory(kernel)
    if SMEM_LIMIT[arch] == 227:
        assert ctas * (smem + 1024) <= 228 * 1024
    # 8 k-blocks: L and scores, each of 2 column tiles, or one level for each warp
    assert ptx[BF16_MMA] == (8 if needs_levels else 2 * 8 * 2)
    neumann = options["arithmetic"] == "exact"
    assert ptx.get(F16_MMA, 0) == (3 * 2 * 2 if neumann else 0)
    assert ptx.get(MOVMATRIX, 0) == (3 * 2 * 4 if neumann else 0)
    assert sass["HMMA"] == ptx[BF16_MMA] + ptx.get(F16_MMA, 0)  # no other shape: the bits depend on it
    assert ptx[BULK_STORE] == 1 and kernel["fenced"]
    assert ptx["griddepcontrol.launch_dependents"] == 1
    assert not outstanding.violations(kernel["handovers"], {})


def check_recurrence(kernel, options, spilled):
    ptx, sass = kernel["ptx"], kernel["sass"]
    tiles = options["bv"] // (8 * options["warps"])
    if spilled:
        assert kernel["stack"] <= spilled
    else:
        assert no_local_memory(kernel)
    terms = 2 if options["arithmetic"] == "robust" else 1  # of the inverse
    assert ptx[BF16_MMA] == sass["HMMA"] == tiles * (8 + 8 + terms + 8 + 1)  # P, O, U, dS, scores U
    # the state before the loop and in it, u, U; the inverse's second term
    assert ptx[MOVMATRIX] == tiles * (16 + 16 + 2 + 2) + 3 * (terms - 1)
    rows_of_out = 2 if tiles == 1 else 0  # wider ones are vectors
    states = tiles * 16 if options.get("intermediate_states") else 0
    assert ptx.get("st.global.b32", 0) == rows_of_out + states
    assert ptx[BULK_LOAD] == 1
    assert ptx["griddepcontrol.wait"] == 1
    assert any("A1T0" in one["instruction"] for one in kernel["handovers"])
    assert not outstanding.violations(kernel["handovers"], outstanding.recurrence_split())


@pytest.mark.parametrize(
    "options",
    [{"gate": "softplus"}, {"l2norm": False}, {"state_v_first": False}, {"intermediate_states": 64}],
    ids=lambda options: next(iter(options)),
)
def test_the_exact_arithmetic_takes_no_other_call(options):
    with pytest.raises(ValueError, match="the exact arithmetic takes FlashKDA's call only"):
        KernelSpec.of("column_split", "sm_90a", **options)


BF16_MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
F16_MMA = "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16"
MOVMATRIX = "movmatrix.sync.aligned.m8n8.trans.b16"
BULK_STORE = "cp.async.bulk.global.shared::cta.bulk_group"
BULK_LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"


def no_local_memory(kernel):
    return kernel["stack"] == 0 and not {"LDL", "STL"} & set(kernel["sass"])
