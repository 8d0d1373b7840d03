"""What the compiler makes of every kind of variant on every architecture; needs the DSL, no GPU."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import compiling
import pytest

from fla_kda_backend import planning
from fla_kda_backend.compiling import ARCHS

pytest.importorskip("cutlass", reason="needs the CuTe DSL, nvidia-cutlass-dsl")

SMEM_LIMIT = {"sm_90a": 227, "sm_100a": 227, "sm_103a": 227, "sm_120a": 99}  # KB a CTA may use, CUDA programming guide
# Where ptxas spills some registers of the full-width state, up to so many bytes: only where the code was never run.
SPILLED = dict.fromkeys(
    [("sm_100a", "robust", 128), ("sm_103a", "robust", 128), ("sm_120a", "robust", 128), ("sm_120a", "exact", 128)], 64
)

PLANS = [(arithmetic, bv) for arithmetic in ("exact", "robust") for bv in planning.BV_CHOICES]
STATES = (None, "fp32", "bf16")


def variants():
    """Every value of an option meets every value of every other; robust takes no bf16 states."""
    names = ("plan", "initial", "final", "cu_dtype", "segmented")
    candidates = [
        row
        for row in itertools.product(PLANS, STATES, STATES, (None, "int32", "int64"), (False, True))
        if row[0][0] == "exact" or "bf16" not in row
    ]
    chosen = [dict(zip(names, row)) for row in compiling.pairwise(candidates)]
    for options in chosen:
        arithmetic, bv = options.pop("plan")
        options.update(arithmetic=arithmetic, bv=bv, warps=planning.warps(arithmetic, bv))
    return chosen


VARIANTS = variants()


def label(options):
    values = (options[name] for name in ("arithmetic", "bv", "initial", "final", "cu_dtype", "segmented"))
    return "-".join(str(value).lower() for value in values)


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """arch -> one report for each of VARIANTS."""
    folder = tmp_path_factory.mktemp("compile")
    with ThreadPoolExecutor(2) as two_at_a_time:
        made = two_at_a_time.map(lambda arch: compiling.reports("column_split", arch, VARIANTS, folder), SMEM_LIMIT)
        return dict(zip(SMEM_LIMIT, made))


def test_every_architecture_is_compiled_for():
    assert set(SMEM_LIMIT) == set(ARCHS.values())


@pytest.fixture(params=[(arch, i) for arch in SMEM_LIMIT for i in range(len(VARIANTS))],
                ids=lambda param: f"{param[0]}-{label(VARIANTS[param[1]])}")  # fmt: skip
def compiled(request, reports):
    arch, i = request.param
    return arch, VARIANTS[i], reports[arch][i]


def test_compiled_variant(compiled):
    arch, options, report = compiled
    assert report["target"] == arch
    kernels, smem = report["kernels"], report["smem_bytes"]
    assert set(kernels) == set(smem) == {"PrepareChunk16", "RecurrenceSplit"}
    assert max(smem.values()) <= SMEM_LIMIT[arch] * 1024
    check_prepare(kernels["PrepareChunk16"], smem["PrepareChunk16"], options["arithmetic"], arch)
    spilled = SPILLED.get((arch, options["arithmetic"], options["bv"]), 0)
    check_recurrence(kernels["RecurrenceSplit"], options, spilled)


def check_prepare(kernel, smem, arithmetic, arch):
    ptx, sass = kernel["ptx"], kernel["sass"]
    # eight CTAs of 128 threads on an SM: 64 registers a thread, and their shared memory in the SM's 228 KB
    assert kernel["registers"] <= 64
    assert no_local_memory(kernel)
    if SMEM_LIMIT[arch] == 227:
        assert 8 * (smem + 1024) <= 228 * 1024
    assert ptx[BF16_MMA] == 2 * 8 * 2  # L and scores, each of 8 k-blocks and 2 column tiles
    neumann = arithmetic == "exact"
    assert ptx.get(F16_MMA, 0) == (3 * 2 * 2 if neumann else 0)
    assert ptx.get(MOVMATRIX, 0) == (3 * 2 * 4 if neumann else 0)
    assert sass["HMMA"] == ptx[BF16_MMA] + ptx.get(F16_MMA, 0)  # no other shape: the bits depend on it
    assert ptx[BULK_STORE] == 1 and kernel["fenced"]
    assert ptx["griddepcontrol.launch_dependents"] == 1


def check_recurrence(kernel, options, spilled):
    ptx, sass = kernel["ptx"], kernel["sass"]
    tiles = options["bv"] // (8 * options["warps"])
    if spilled:
        assert kernel["stack"] <= spilled
    else:
        assert no_local_memory(kernel)
    assert ptx[BF16_MMA] == sass["HMMA"] == tiles * (8 + 8 + 1 + 8 + 1)  # P, O, U, dS, scores U
    assert ptx[MOVMATRIX] == tiles * (16 + 16 + 2 + 2)  # the state before the loop and in it, u, U
    assert ptx[BULK_LOAD] == 1
    assert ptx["griddepcontrol.wait"] == 1


BF16_MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
F16_MMA = "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16"
MOVMATRIX = "movmatrix.sync.aligned.m8n8.trans.b16"
BULK_STORE = "cp.async.bulk.global.shared::cta.bulk_group"
BULK_LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"


def no_local_memory(kernel):
    return kernel["stack"] == 0 and not {"LDL", "STL"} & set(kernel["sass"])
