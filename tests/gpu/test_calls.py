"""Every kind of call that chunk_kda takes: accuracy beside FLA's Triton kernels, and what a call may depend on.

The variants and the inputs that they meet are those of call_table.
"""

from dataclasses import replace

import call_table
import pytest
import torch
from call_table import BY_GATE, CASES, KIMI, Case
from calls import H200
from fla.ops.kda import chunk_kda
from gpu import specs
from gpu.launching import errors, here, on_triton, plan_of, same, scratch_is_nan, untuned
from kda_calls import call_of, laid_out, plain, with_later_tokens_changed
from kda_inputs import TOKEN_AXIS

from fla_kda_backend import op, planning, register
from fla_kda_backend.call import parse
from fla_kda_backend.reference import gold

pytestmark = pytest.mark.gpu

# What is exact but for one rounding to bf16 of each of two factors is off by 2.3e-3, and by a little more or less where few
# numbers are rounded: below this an error says nothing of the arithmetic.
NOISE = 2.5e-3
GATES = pytest.mark.parametrize("gate", BY_GATE)


@pytest.fixture(autouse=True)
def _strict(monkeypatch):
    monkeypatch.setenv("FLA_KDA_CUTE_STRICT", "1")
    monkeypatch.setenv("FLA_FLASH_KDA", "0")
    assert register()
    untuned(monkeypatch)


def v_first(result, call):
    """What FLA gives for plain(call), as the call asks for it."""
    out, state, *states = result
    return (out, state.mT, *(x.mT for x in states)) if call["state_v_first"] else result


def compare(found, call, monkeypatch, record_property, factor=1.05):
    """Hold errors of output, final and intermediate states to those of FLA's Triton kernels."""
    ours, theirs = both_errors(found, call, monkeypatch)
    record_property("errors", {"ours": ours, "triton": theirs})
    assert within(ours, theirs, factor), (ours, theirs)


def within(ours, theirs, factor):
    return all(mine <= max(factor * other, NOISE) for mine, other in zip(ours, theirs))


def both_errors(found, call, monkeypatch):
    """Errors of a result, and of FLA's Triton kernels', against double precision."""
    assert all(x.isfinite().all() for x in found if x is not None)
    reference = gold.forward(**call)
    theirs = v_first(on_triton(plain(call), monkeypatch), call)
    if found[1] is None:
        found, reference, theirs = ((result[0], *result[2:]) for result in (found, reference, theirs))
    ours, theirs = errors(found, reference), errors(theirs, reference)
    print("\nours", *(f"{error:.1e}" for error in ours), "Triton", *(f"{error:.1e}" for error in theirs))
    return ours, theirs


# ---- accuracy ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_errors_are_at_most_those_of_triton(case, device, monkeypatch, record_property):
    """Of one draw of the inputs, or, where few tokens make that a matter of luck, of several together (root mean square)."""
    drawn = []
    for seeds in ([0], [1, 2, 3, 4, 5]):
        for seed in seeds:
            call = call_of(case, device, seed)
            found = here(call)
            assert found[0].dtype == torch.bfloat16 and (found[1] is None) == (case.kind.final_state is None)
            drawn.append(both_errors(found, call, monkeypatch))
        ours, theirs = ([(sum(x * x for x in each) / len(each)) ** 0.5 for each in zip(*errors)] for errors in zip(*drawn))
        if within(ours, theirs, 1.05):
            break
    record_property("errors", {"ours": ours, "triton": theirs, "draws": len(drawn)})
    assert within(ours, theirs, 1.05), (ours, theirs)


@pytest.mark.parametrize("regime", ["normal", "steep", "alternating", "repeated"])
@pytest.mark.parametrize("kind", [*specs.ROBUST_KINDS, *specs.STATES], ids=call_table.label)
def test_the_column_splits_errors_are_near_those_of_triton(kind, regime, device, monkeypatch, record_property):
    """What other GPUs run; its sums are bf16 in more places."""
    call = call_of(Case(kind, regime, 17, 150, heads=4), device)
    with torch.inference_mode(), scratch_is_nan():
        found = op.run(parse((), call), plan_of("robust", 32, kind))
    compare(found, call, monkeypatch, record_property, factor=1.5)


def test_kimi_linears_own_call(device, monkeypatch, record_property):
    """As its modelling code makes it: pre-activated fp32 g, fp32 sigmoided beta, K-first states, 32 heads."""
    given = call_of(Case(KIMI, "normal", 65, 150, heads=32), device)
    q, k = (torch.randn_like(given["v"]) for _ in "qk")
    v, g, beta, state, cu_seqlens = (given[name] for name in ("v", "g", "beta", "initial_state", "cu_seqlens"))
    assert g.dtype == beta.dtype == state.dtype == torch.float32 and v.shape[2] == 32
    with torch.no_grad():
        found = chunk_kda(q=q, k=k, v=v, g=g, beta=beta, initial_state=state, output_final_state=True,
                          use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens)  # fmt: skip
    call = given | {"q": q, "k": k, "scale": None}
    assert all(torch.equal(a, b) for a, b in zip(found, here(call)))
    compare(found, call, monkeypatch, record_property)


# ---- what a call depends on ----------------------------------------------------------------------------------------------
@GATES
@pytest.mark.parametrize("regime", ["normal", "steep", "alternating"])
@pytest.mark.parametrize("last", [0, 7, 8, 15, 16, 40, 63, 64, 100])
def test_later_tokens_change_no_bit_of_a_prefix(gate, regime, last, device):
    calls = [call_of(Case(BY_GATE[gate], regime, 0, 150), device, seed) for seed in range(2)]
    changed = with_later_tokens_changed(*calls, last)
    before, after = here(calls[0])[0], here(changed)[0]
    assert torch.equal(after[:, : last + 1], before[:, : last + 1])
    assert not torch.equal(after[:, last + 1 :], before[:, last + 1 :])


@GATES
def test_later_tokens_that_decay_at_once_change_no_bit(gate, device):
    """No token of a chunk may choose how those before it are scaled."""
    call = call_of(Case(BY_GATE[gate], "slow", 0, 64), device)
    before = here(call)[0]
    for last in range(0, 63, 5):
        g = call["g"].clone()
        g[:, last + 1 :] = -3e4 if gate == "given" else 3e4
        assert torch.equal(here(call | {"g": g})[0][:, : last + 1], before[:, : last + 1])


@pytest.mark.parametrize("kind", [*BY_GATE.values(), KIMI], ids=[*BY_GATE, "kimi"])
def test_every_layout_has_the_same_bits(kind, device):
    """Strides that are honoured, and strides that are copied: of a batch, and of packed sequences."""
    call = call_of(Case(kind, "normal", 17, 64, heads=4), device)
    whole = here(call)
    for layout in call_table.AT_RUN_TIME["layout"]:
        moved = laid_out({name: call[name] for name in TOKEN_AXIS}, layout)
        assert same(here(call | moved), whole), layout


@pytest.mark.parametrize("kind", [*BY_GATE.values(), KIMI], ids=[*BY_GATE, "kimi"])
def test_grouped_values_equal_repeated_keys(kind, device):
    call = call_of(Case(kind, "normal", 17, 64, heads=4), device)
    repeated = {name: call[name].repeat_interleave(2, 2) for name in "qk"}
    assert same(here(call | repeated), here(call))


@pytest.mark.parametrize("kind", specs.REPLAYED, ids=["softplus", "kimi"])
def test_replay_changes_no_bit(kind, device):
    call = parse((), call_of(Case(kind, "normal", 65, 2048), device))
    plan = planning.plan(call, H200)
    assert plan.params["replay"] == (kind.cu_seqlens is None)  # packed ones are short on average
    with torch.inference_mode(), scratch_is_nan():
        schedules = [replace(plan.schedule, replay=on) for on in (False, True)]
        found = [op.run(call, plan._replace(schedule=each)) for each in schedules]
    assert same(*found) and found[0][0].isfinite().all()


# ---- intermediate states -------------------------------------------------------------------------------------------------
STATES = pytest.mark.parametrize("kind", specs.STATES, ids=call_table.label)


@STATES
@pytest.mark.parametrize("chunk_size", [64, 32])
@pytest.mark.parametrize("case", [("normal", 17, 150), ("slow", 64, 64)])
def test_intermediate_states(case, chunk_size, kind, device, monkeypatch, record_property):
    call = call_of(Case(kind, *case, heads=4), device, chunk_size=chunk_size)
    family = "wy64" if chunk_size == 64 else "column_split"
    out, state, states = found = here(call, family)
    chunks = [-(-length // chunk_size) for length in Case(kind, *case).lengths]
    packed = kind.cu_seqlens is not None
    assert states.shape == ((1, sum(chunks)) if packed else (len(chunks), chunks[0])) + (4, 128, 128)
    assert states.dtype == torch.bfloat16 and states.is_contiguous()
    firsts = states[0, [0, chunks[0]]] if packed else states[:, 0]  # the second packed sequence is empty
    starts = call["initial_state"][[0, 2]] if packed else call["initial_state"]
    assert torch.equal(firsts, starts.bfloat16())
    compare(found, call, monkeypatch, record_property, factor=1.05 if chunk_size == 64 else 1.5)
    if chunk_size == 64:  # asking for states changes nothing else
        without = here(call | {"return_intermediate_states": False})
        assert same((out, state), without)


@pytest.mark.parametrize("kind", [kind for kind in specs.STATES if kind.cu_seqlens], ids=call_table.label)
def test_the_number_of_intermediate_states_is_counted_on_the_host_where_it_can_be(kind, device):
    call = call_of(Case(kind, "normal", 17, 150), device)
    counted = here(call)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with_copy = here(call | {"cu_seqlens_cpu": torch.tensor([0, 17, 17, 184])})
        padded = here(call | {"use_graph": True})
        with pytest.raises(RuntimeError, match="synchroniz"):
            here(call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert same(with_copy, counted)
    rows = -(-184 // 64) + 2
    assert padded[2].shape[1] == rows and same((*padded[:2], padded[2][:, :4]), counted)


# ---- graphs ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [KIMI, replace(KIMI, intermediate_states=64)], ids=["kimi", "states"])
def test_a_graph_replayed_with_other_cu_seqlens(kind, device):
    """use_graph as FLA defines it: max_num_seqs sequences, the last ones empty where there are fewer."""
    call = call_of(Case(kind, "normal", 17, 150), device)
    tokens, offsets = call["q"].shape[1], call["cu_seqlens"]
    lists = [[0, 17, 17, tokens], [0, 100, tokens, tokens], [0, tokens, tokens, tokens], [0, 1, 65, tokens]]
    call |= {"use_graph": True, "max_num_seqs": 3}
    expected = [here(call | {"cu_seqlens": torch.tensor(each, device=device)}) for each in lists]
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        with torch.cuda.graph(graph):
            captured = chunk_kda(**call)
        for each, reference in zip(lists, expected):
            for x in captured:
                x.fill_(float("nan"))
            offsets.copy_(torch.tensor(each))
            graph.replay()
            chunks = sum(-(-(end - first) // 64) for first, end in zip(each, each[1:]))
            assert same(captured[:2], reference[:2])
            if kind.intermediate_states:
                assert torch.equal(captured[2][:, :chunks], reference[2][:, :chunks])
                assert captured[2][:, chunks:].isnan().all()  # of no chunk: left alone


@pytest.mark.parametrize("kind", [KIMI, *BY_GATE.values()], ids=["kimi", *BY_GATE])
def test_no_call_waits_for_the_gpu(kind, device):
    call = call_of(Case(kind, "normal", 17, 64), device)
    first = here(call)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert chunk_kda(**call)[0].shape == first[0].shape
    finally:
        torch.cuda.set_sync_debug_mode("default")
