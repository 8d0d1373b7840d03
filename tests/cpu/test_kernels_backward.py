"""What the compiler makes of the 64-token kernels' backward pass; needs the DSL, no GPU."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import compiling
import outstanding
import pytest

from fla_kda_backend.compiling import KernelSpec
from fla_kda_backend.kernels.variant import BETAS, GATES

pytest.importorskip("cutlass", reason="needs the CuTe DSL, nvidia-cutlass-dsl")

SMEM_LIMIT = 227 * 1024  # bytes that a CTA may use
SMEM_OF_SM = 228 * 1024  # bytes of an SM; every CTA on it takes 1 KB more than it uses
# Bytes that may be spilled; to be none. Prepare takes them for a bounded fp32 gate with beta as given.
STACK = {"LocalGradients": 104, "PrepareWY64": 8}
REGISTERS = {"PrepareWY64": 128, "ChainStates": 255, "ReverseChain": 255, "LocalGradients": 128}
NAMES = {"all": set(REGISTERS), "states": {"PrepareWY64", "ChainStates"}}


def covering():
    """What the four kernels depend on. Every two values that occur together do so here."""
    names = ("gate", "gate_dtype", "l2norm", "beta", "cu_seqlens", "initial_state", "grouped", "segmented", "stage")
    both = (False, True)
    rows = [
        row
        for row in itertools.product(
            GATES, ("bf16", "fp32"), (True, False), BETAS, (None, "int32", "int64"), (None, "fp32", "bf16"), both, both, NAMES
        )
        if row[7] or row[8] == "all"
    ]
    chosen = []
    for n, row in enumerate(compiling.pairwise(rows)):
        options = dict(zip(names, row))
        parameters = (
            {"a_log": None, "dt_bias": None} if options["gate"] == "given" else {"dt_bias": (None, "bf16", "fp32")[n % 3]}
        )
        states = {"d_final_state": n % 2 == 0, "d_initial_state": options["initial_state"] is not None and n % 3 != 0}
        chosen.append(options | parameters | states | {"state_v_first": n % 4 < 2, "beta_dtype": ("bf16", "fp32")[n % 2]})
    return chosen


DEFAULTS = {"gate": "bounded", "l2norm": True, "initial_state": None, "segmented": False, "stage": "all", "final_state": None}
VARIANTS = [{}, *covering()]
FAST = {0}

# HGMMA, ARRIVE, DEPBAR: as in test_kernels_wy64.py, one more ARRIVE or DEPBAR than written means products one after the other.
# Of the chain of states: W S before its loop; the update and W S in it; the last update behind it, which is dead code but for
# an empty group where nobody takes the last state.
STATES = {True: ((8 + (8 + 8) + 8, 5, 5),), False: ((8 + (8 + 8) + 1, 5, 5), (8 + (8 + 8) + 1, 5, 6))}  # by segmented
# Of the reverse chain: A^T dO and half of K_end dS' before its loop; in it the other half, Q^T dO, W^T dV' and the next link's.
REVERSE = ((4 + 4) + (4 + 8 + 8 + 4 + 4), 6, 6)
LOCAL = 4 + 4 * 8  # X; dA or dM, dQ_, X S^T and dK_end
PRODUCTS = {(False, True): 252, (True, True): 376, (True, False): 360}  # of prepare, as in test_kernels_wy64.py
BULK_STORES = {"all": 4 + 5, "states": 4}  # of prepare: the record; T and N
BULK_STORE = "cp.async.bulk.global.shared::cta.bulk_group"
WAIT, LAUNCH = "griddepcontrol.wait", "griddepcontrol.launch_dependents"


@pytest.fixture(scope="module")
def reports(request, tmp_path_factory):
    """Number of a variant -> report, of those whose tests are run."""
    numbers = compiling.selected(request, "compiled")
    halves = [half for half in (numbers[::2], numbers[1::2]) if half]

    def reports_of(half):
        options = [DEFAULTS | VARIANTS[n] for n in half]
        return compiling.reports("wy64_backward", "sm_90a", options, tmp_path_factory.mktemp("compile"))

    with ThreadPoolExecutor(2) as two_at_a_time:
        return dict(zip(itertools.chain(*halves), itertools.chain(*two_at_a_time.map(reports_of, halves))))


def label(n):
    return "-".join(str(value).lower() for value in VARIANTS[n].values()) or "default"


@pytest.fixture(params=compiling.parameters(range(len(VARIANTS)), FAST, label))
def compiled(request, reports):
    return DEFAULTS | VARIANTS[request.param], reports[request.param]


def test_compiled_variant(compiled):
    options, report = compiled
    kernels, smem = report["kernels"], report["smem_bytes"]
    assert report["target"] == "sm_90a"
    assert set(kernels) == set(smem) == NAMES[options["stage"]]
    assert max(smem.values()) <= SMEM_LIMIT
    for name, kernel in kernels.items():
        assert kernel["registers"] <= REGISTERS[name], name
        limit = STACK.get(name, 0)
        assert kernel["stack"] <= limit, name
        assert limit or not {"LDL", "STL"} & set(kernel["sass"]), name
    check_prepare(kernels["PrepareWY64"], smem["PrepareWY64"], options)
    check_states(kernels["ChainStates"], options)
    if options["stage"] == "all":
        check_reverse(kernels["ReverseChain"])
        check_local(kernels["LocalGradients"])


def warpgroup_products(kernel):
    return tuple(kernel["sass"].get(name, 0) for name in ("HGMMA", "WARPGROUP.ARRIVE", "WARPGROUP.DEPBAR"))


def check_prepare(kernel, smem, options):
    assert 2 * (smem + 1024) <= SMEM_OF_SM  # two teams on an SM
    assert kernel["sass"]["HMMA"] == PRODUCTS[options["gate"] != "bounded" or not options["l2norm"], options["l2norm"]]
    assert kernel["fenced"] and kernel["ptx"][BULK_STORE] == BULK_STORES[options["stage"]]
    assert kernel["ptx"][LAUNCH] == 1
    assert not outstanding.violations(kernel["handovers"], outstanding.prepare())


def check_states(kernel, options):
    assert warpgroup_products(kernel) in STATES[options["segmented"]]
    assert kernel["ptx"].get(BULK_STORE, 0) == (2 if options["stage"] == "all" else 0)  # S and V'
    assert kernel["ptx"][WAIT] >= 1 and kernel["ptx"][LAUNCH] == 1
    assert not outstanding.violations(kernel["handovers"], outstanding.chain_of_states())


def check_reverse(kernel):
    assert warpgroup_products(kernel) == REVERSE
    assert kernel["fenced"] and kernel["ptx"][BULK_STORE] == 4
    assert kernel["ptx"][WAIT] >= 1  # so that the local gradients find the chain of states ended
    assert not outstanding.violations(kernel["handovers"], outstanding.reverse_chain())


def check_local(kernel):
    ptx, (products, arrivals, _) = kernel["ptx"], warpgroup_products(kernel)
    assert products == LOCAL and arrivals == ptx["wgmma.fence.sync.aligned"]
    assert ptx["cp.async.bulk.tensor.4d.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"] >= 2 * 5
    assert not outstanding.violations(kernel["handovers"], outstanding.prepare())  # the rules are the same


def refused(match, **options):
    with pytest.raises(ValueError, match=match):
        KernelSpec.of("wy64_backward", "sm_90a", **{"final_state": None} | options)


def test_states_alone_need_segments():
    refused("stage='states' needs segmented=True", stage="states")


def test_no_gradient_of_an_initial_state_that_is_not_there():
    refused("d_initial_state=True needs an initial state", d_initial_state=True)


@pytest.mark.parametrize("option", [{"final_state": "fp32"}, {"intermediate_states": 64}], ids=str)
def test_the_backward_writes_no_states(option):
    refused("needs a variant without final and intermediate states", **option)
