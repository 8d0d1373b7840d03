"""What the compiler makes of the 64-token kernels; needs the DSL, no GPU."""

import itertools
from collections import Counter

import compiling
import outstanding
import pytest
from call_table import gate_takes

from fla_kda_backend.compiling import KernelSpec
from fla_kda_backend.kernels.variant import BETAS, GATES

pytest.importorskip("cutlass", reason="needs the CuTe DSL, nvidia-cutlass-dsl")

SMEM_LIMIT = 227 * 1024  # bytes that a CTA may use
SMEM_OF_SM = 228 * 1024  # bytes of an SM; every CTA on it takes 1 KB more than it uses
STATES = (None, "fp32", "bf16")
CU_DTYPES = (None, "int32", "int64")
DTYPES = ("fp32", "bf16")
BOTH = (False, True)


def chains():
    """What the chain depends on."""
    names = ("overlap", "replay", "segmented", "initial_state", "final_state", "cu_seqlens", "state_v_first",
             "intermediate_states")  # fmt: skip
    rows = [
        row
        for row in itertools.product(BOTH, BOTH, BOTH, STATES, STATES, CU_DTYPES, BOTH, (None, 64))
        if not (row[1] and (row[2] or row[7])) and not (row[0] and row[2])
    ]  # fmt: skip
    return [dict(zip(names, row)) for row in compiling.pairwise(rows)]


def directs():
    """What prepare depends on where it computes sequences of one chunk itself."""
    names = ("final_state", "cu_seqlens", "state_v_first", "beta_dtype", "a_log", "dt_bias")
    rows = list(itertools.product(STATES, CU_DTYPES, BOTH, DTYPES, (None, *DTYPES), (None, *DTYPES)))
    return [dict(zip(names, row), direct=True) for row in compiling.pairwise(rows)]


def prepares():
    """What the prepare kernel depends on, but for an initial state or segments."""
    names = ("overlap", "gate", "gate_dtype", "l2norm", "cu_seqlens", "beta", "beta_dtype", "a_log", "dt_bias")
    parameters = (None, *DTYPES)
    rows = [
        row
        for row in itertools.product(BOTH, GATES, DTYPES, BOTH, CU_DTYPES, BETAS, DTYPES, parameters, parameters)
        if gate_takes(row[1], *row[7:])
    ]
    return [dict(zip(names, row)) for row in compiling.pairwise(rows)]


VARIANTS = [{}, *chains(), *prepares(), *directs()]


def first(**options):
    """Number of the first variant with these options."""
    return next(n for n, one in enumerate(VARIANTS) if options.items() <= (DEFAULTS | one).items())


DEFAULTS = {"overlap": False, "replay": False, "segmented": False, "direct": False, "initial_state": None,
            "final_state": "fp32", "state_v_first": True, "gate": "bounded", "l2norm": True}  # fmt: skip
FAST = {0, first(replay=True), first(overlap=True), first(gate="softplus"), first(direct=True)}

# HGMMA, ARRIVE, DEPBAR. Of a link with outputs: V', Q S, the update, A V'; of a first link from state zero: the update,
# A V'; of the spine: before its loop, in it, after it. ARRIVE and DEPBAR are the groups and waits as written: one more of
# either means that ptxas has put products one after the other.
LINK = (8 + 8 + 8 + 4, 3, 4)
FIRST_LINK = (8 + 4, 1, 1)
SPINE = (8 + (8 + 8) + 8, 1 + 3 + 1, 1 + 3 + 2)
STATE_COPIES = {True: 64 // 32, False: 128 // 32}  # bulk copies per lane, by state_v_first: rows of half a state
# of prepare, by whether it needs levels and whether it normalises q and k
PRODUCTS = {(False, True): 252, (True, True): 376, (True, False): 360}
# More products where it computes sequences of one chunk: U without W; O; the final state, two blocks of keys per turn
ELIMINATION = 2 * (4 * 2 + 6 * 2)
DIRECT = ELIMINATION + 2 * (1 + 2 + 3 + 4)
DIRECT_FINAL = 2 * (4 * 2)
TENSOR_LOAD = "cp.async.bulk.tensor.4d.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
BULK_LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
REMOTE_ARRIVE = "mbarrier.arrive.shared::cluster.b64"
MULTICAST, HINT = ".multicast::cluster", ".L2::cache_hint"


@pytest.fixture(scope="module")
def reports(request, tmp_path_factory):
    """Number of a variant -> report, of those whose tests are run."""
    numbers = compiling.selected(request, "compiled")
    found = compiling.reports("wy64", "sm_90a", [VARIANTS[n] for n in numbers], tmp_path_factory.mktemp("compile"))
    return dict(zip(numbers, found))


def label(n):
    return "-".join(str(value).lower() for value in VARIANTS[n].values()) or "default"


@pytest.fixture(params=compiling.parameters(range(len(VARIANTS)), FAST, label))
def compiled(request, reports):
    return VARIANTS[request.param], reports[request.param]


def test_compiled_variant(compiled):
    options, report = compiled
    options = DEFAULTS | options
    chain = "ChainReplayWY64" if options["replay"] else "ChainWY64"
    assert report["target"] == "sm_90a"
    kernels, smem = report["kernels"], report["smem_bytes"]
    assert set(kernels) == set(smem) == {"PrepareWY64", chain}
    assert max(smem.values()) <= SMEM_LIMIT
    for kernel in kernels.values():
        assert kernel["registers"] <= 255
        assert kernel["stack"] == 0 and not {"LDL", "STL"} & set(kernel["sass"])
    check_prepare(kernels["PrepareWY64"], smem["PrepareWY64"], options)
    check_chain(kernels[chain], options)


def check_prepare(kernel, smem, options):
    sass, ptx = kernel["sass"], kernel["ptx"]
    assert kernel["fenced"]
    assert ptx["griddepcontrol.launch_dependents"] == 1
    # two teams of 256 threads on an SM
    assert kernel["registers"] <= 128
    assert (1 if options["overlap"] else 2) * (smem + 1024) <= SMEM_OF_SM
    assert ptx.get("st.release.gpu.global.b32", 0) == (2 if options["overlap"] else 0)  # in the loop and behind it
    # g, q, k before the loop; v, then the next chunk's in it, q in two places where one of them follows the final state
    assert ptx[TENSOR_LOAD] == 3 + 4 + options["direct"]
    products = sum(count for name, count in ptx.items() if name.startswith("mma.sync"))
    expected = PRODUCTS[options["gate"] != "bounded" or not options["l2norm"], options["l2norm"]]
    final = DIRECT_FINAL if options["direct"] and options["final_state"] else 0
    expected += DIRECT * options["direct"] + final
    assert products == expected and sass["HMMA"] == products + final  # ptxas doubles the body of this loop
    assert not outstanding.violations(kernel["handovers"], outstanding.prepare())


def check_chain(kernel, options):
    sass, ptx = kernel["sass"], kernel["ptx"]
    parts, frees = [LINK], 2 + 1  # W's and Q's stage in a link, the last Q's after it
    if options["replay"]:
        parts.append(SPINE)
        frees += 1 + 2 + 1
    elif options["initial_state"] is None and not options["segmented"]:
        parts.append(FIRST_LINK)
        frees += 1
    found = tuple(sass[name] for name in ("HGMMA", "WARPGROUP.ARRIVE", "WARPGROUP.DEPBAR"))
    assert found == tuple(map(sum, zip(*parts)))
    copies = 0 if options["initial_state"] is None else STATE_COPIES[options["state_v_first"]]
    hint = "" if options["replay"] else HINT  # which reads records twice
    loads = Counter({BULK_LOAD: copies})  # of initial states
    loads[BULK_LOAD + hint] += 1  # U
    loads[BULK_LOAD + MULTICAST + hint] += 2 + 4  # W, decay; Q to the first column of A, the other three
    assert {name: count for name, count in ptx.items() if name.startswith(BULK_LOAD)} == +loads
    if options["initial_state"] is not None:
        frees += 2  # the image of the state, of an item with links or of an empty sequence
    assert ptx[REMOTE_ARRIVE] == frees
    flags, loaders = 1 if options["replay"] else 0, 2 if options["overlap"] else 0
    assert ptx.get("st.release.gpu.global.b32", 0) == flags
    assert ptx.get("ld.acquire.gpu.global.b32", 0) == 2 * flags + loaders  # before the loop and in it; in it
    assert ptx.get("nanosleep.u32", 0) == flags + loaders
    from fla_kda_backend.kernels.wy64.chain.shared import CHAIN_STAGES, OUTPUT_STAGES

    allowed = outstanding.chain(CHAIN_STAGES, OUTPUT_STAGES)
    assert {one["barrier"] for one in kernel["handovers"] if "A1T0" in one["instruction"]} <= set(allowed)
    assert not outstanding.violations(kernel["handovers"], allowed)


def refused(match, **options):
    with pytest.raises(ValueError, match=match):
        KernelSpec.of("wy64", "sm_90a", **options)


@pytest.mark.parametrize("option", ["replay", "overlap"])
def test_not_in_segments(option):
    refused(f"{option}=True needs segmented=False", segmented=True, **{option: True})


@pytest.mark.parametrize("other", [
    {"initial_state": "fp32"}, {"segmented": True}, {"replay": True}, {"intermediate_states": 64}, {"gate": "softplus"},
    {"gate_dtype": "fp32"}, {"l2norm": False},
], ids=str)  # fmt: skip
def test_direct_is_for_few_kinds_of_calls(other):
    refused("direct=True is for a bounded bf16 gate", direct=True, **other)


def test_no_cluster_on_one_sm():
    refused("needs at least 2 CTAs at once", max_ctas=1)


@pytest.mark.parametrize("wrong", [{"gate": "given"}, {"gate": "softplus", "a_log": None}, {"beta_dtype": "fp16"}], ids=str)
def test_a_variant_says_what_it_does_not_take(wrong):
    refused("unsupported with gate", **wrong)
