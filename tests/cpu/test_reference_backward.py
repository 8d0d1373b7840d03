"""The reference of the backward pass: its formulas against autograd in fp64, its roundings by the size of their errors."""

from dataclasses import replace

import call_table
import covering
import pytest
import torch
from call_table import BY_GATE, KIMI, Case
from golden import relative_error
from kda_calls import call_of

from fla_kda_backend.reference import backward
from fla_kda_backend.testing import REGIMES, TOKEN_AXIS

KINDS = [
    call_table.Kind(**row)
    for row in covering.rows(call_table.ARITHMETIC | {"initial_state": ("fp32", "bf16", None)}, 2, call_table.allowed)
]
PACKED = replace(KIMI, gate="bounded", a_log="fp32", dt_bias="fp32", beta="sigmoid", cu_seqlens="int32")
EXACT = 1e-9  # of gradients that do not cancel; both are fp64
# Of one rounding to bf16 an error is 1.7e-3, and about five come together. Where one key repeats and decay is slow, dv and
# dbeta cancel.
ROUNDED = {"repeated": 3e-2, "correlated": 3e-2}


def gradients_of_results(call, seed=0):
    """d_out as FLA has it, and d_final_state."""
    generator = torch.Generator().manual_seed(seed)
    sequences = len(call["q"]) if call["cu_seqlens"] is None else len(call["cu_seqlens"]) - 1
    d_out = torch.randn(call["v"].shape, generator=generator).bfloat16()
    return d_out, torch.randn(sequences, call["v"].shape[2], 128, 128, generator=generator)


def errors(found, wanted):
    """{name: relative error}; both must have the same gradients."""
    assert {name for name in found if found[name] is not None} == {name for name in wanted if wanted[name] is not None}
    return {name: relative_error(grad, wanted[name]) for name, grad in found.items() if grad is not None}


def compare(call, d_out, d_final, limit=5e-3):
    wanted = backward.precise(d_out, d_final, **call)
    exact = backward.gradients(d_out, d_final, rounded=False, **call)
    assert max(errors(exact, wanted).values()) < EXACT
    rounded = backward.gradients(d_out, d_final, **call)
    for name, grad in rounded.items():
        assert grad is None or (grad.dtype, grad.shape) == (call[name].dtype, call[name].shape), name
    found = errors(rounded, wanted)
    few = found.get("A_log", 0.0)  # a handful of sums over thousands of terms of both signs
    assert max(value for name, value in found.items() if name != "A_log") < limit and few < 5 * limit, found
    return found


@pytest.mark.parametrize("kind", KINDS, ids=call_table.label)
def test_every_flag_and_dtype(kind):
    case = Case(kind, "normal", 17, 64, heads=4, scale=0.3)
    call = call_of(case)
    compare(call, *gradients_of_results(call), limit=6e-3)


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("gate", BY_GATE)
def test_every_regime(gate, regime):
    call = call_of(Case(BY_GATE[gate], regime, 1, 128))
    d_out, d_final = gradients_of_results(call)
    limit = ROUNDED.get(regime, 6e-3)
    if (gate, regime) == ("softplus", "alternating"):  # the gradient of A_log is nothing but what is left of larger terms
        call["A_log"] = call["A_log"].double()
        wanted, exact = backward.precise(d_out, d_final, **call), backward.gradients(d_out, d_final, rounded=False, **call)
        assert max(errors(exact, wanted).values()) < 1e-8
        return
    found = compare(call, d_out, d_final, limit)
    if regime in ROUNDED:
        assert max(found[name] for name in ("q", "k", "g")) < 1e-2


@pytest.mark.parametrize("cu_seqlens", [[0, 17, 17, 145], [3, 3, 20, 140], [0, 0, 0, 0], [10, 75, 139, 141]])
def test_packed_sequences(cu_seqlens):
    """Empty ones, tails, and rows of no sequence, which may hold anything and have no gradient."""
    call = call_of(Case(PACKED, "normal", 17, 64, heads=4))
    tokens, offsets = 145, torch.tensor(cu_seqlens, dtype=torch.int32)
    call |= {name: torch.cat([call[name], call[name]], 1)[:, :tokens].contiguous() for name in TOKEN_AXIS}
    call["cu_seqlens"] = offsets
    d_out, d_final = gradients_of_results(call)
    if cu_seqlens[-1] == 0:
        found = backward.gradients(d_out, d_final, **call)
        assert torch.equal(found.pop("initial_state"), d_final)
        assert all((grad == 0).all() for grad in found.values())
        return
    compare(call, d_out, d_final, limit=6e-3)
    clean = backward.gradients(d_out, d_final, **call)
    outside = torch.ones(tokens, dtype=torch.bool)
    outside[cu_seqlens[0] : cu_seqlens[-1]] = False
    for name in TOKEN_AXIS:
        assert (clean[name][:, outside] == 0).all()
        call[name][:, outside] = float("nan")
    d_out[:, outside] = float("nan")
    padded = backward.gradients(d_out, d_final, **call)
    assert all(torch.equal(padded[name], clean[name]) for name in clean)


def test_packed_sequences_are_a_batch():
    call = call_of(Case(replace(PACKED, cu_seqlens=None), "normal", 17, 64))
    d_out, d_final = gradients_of_results(call)
    batch, tokens = call["q"].shape[:2]
    flat = {name: call[name].flatten(0, 1)[None] for name in TOKEN_AXIS}
    packed = call | flat | {"cu_seqlens": torch.arange(batch + 1) * tokens}
    wanted = backward.gradients(d_out, d_final, **call)
    found = backward.gradients(d_out.flatten(0, 1)[None], d_final, **packed)
    for name, grad in found.items():
        rtol = 1e-5 if grad.dtype == torch.float32 else 8e-3
        torch.testing.assert_close(grad, wanted[name].reshape(grad.shape), atol=0, rtol=rtol)


@pytest.mark.parametrize("absent", ["d_out", "d_final_state"])
def test_an_absent_gradient_is_zero(absent):
    call = call_of(Case(BY_GATE["softplus"], "normal", 17, 64))
    given = dict(zip(("d_out", "d_final_state"), gradients_of_results(call)))
    zeros = given | {absent: torch.zeros_like(given[absent])}
    del given[absent]
    wanted, found = backward.gradients(**zeros, **call), backward.gradients(**given, **call)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    precise = backward.precise(**given, **call)
    exact = backward.gradients(**given, rounded=False, **call)
    nothing = [name for name in precise if precise[name] is None or not precise[name].any()]
    assert nothing == (["q"] if absent == "d_out" else [])
    assert all(relative_error(exact[name], precise[name]) < EXACT for name in exact if name not in nothing)
    assert all(not exact[name].any() for name in nothing)


@pytest.mark.parametrize("layout", call_table.AT_RUN_TIME["layout"])
def test_strides_change_nothing(layout):
    calls = [call_of(Case(KIMI, "normal", 17, 64, layout=each)) for each in ("whole", layout)]
    calls[1] |= {name: calls[0][name].clone() for name in ("cu_seqlens",)}
    for name in TOKEN_AXIS:  # a case's values depend on all of it
        calls[1][name].copy_(calls[0][name])
    calls[1]["initial_state"].copy_(calls[0]["initial_state"])
    d_out, d_final = gradients_of_results(calls[0])
    one, other = (backward.gradients(d_out, d_final, **call) for call in calls)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_what_the_call_ignores_has_no_gradient():
    call = call_of(Case(BY_GATE["given"], "normal", 17, 64))
    call |= {"A_log": torch.zeros(2), "dt_bias": torch.zeros(2 * 128)}
    found = backward.gradients(*gradients_of_results(call), **call)
    assert found["A_log"] is found["dt_bias"] is None and found["g"] is not None


def test_the_inverse_has_one_rounding_per_block():
    call = call_of(Case(BY_GATE["bounded"], "correlated", 0, 64))
    exact, rounded = (backward.prepare(backward.Inputs(backward.Arithmetic(r), **call)) for r in (False, True))
    assert relative_error(rounded.T, exact.T) < 4e-3
    assert torch.equal(rounded.T, rounded.T.bfloat16().float())
