"""The exact reference on a CPU, where the device's approximate instructions are only approximated."""

import math
import re

import pytest
import torch
from golden import CASES, SLOW, STRONG, WITH_WORKSPACE, load, relative_error

from fla_kda_backend.reference import exact, gold, host_math

STATE_BOUND = dict.fromkeys(STRONG, 1e-3) | {"correlated_keys": 5e-3} | dict.fromkeys(SLOW, 7e-3)
OUT_BOUND = dict.fromkeys(STRONG, 2e-3) | {"correlated_keys": 5e-3} | dict.fromkeys(SLOW, 7e-3)
ROBUST = {"arithmetic": "robust"}


def random_inputs(tokens, heads=2, batch=1, sequences=None, seed=0):
    """Inputs whose log decay per token is log-uniform from -0.001 to -3, channel by channel."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    decay = torch.exp(torch.empty(heads, 128).uniform_(math.log(1e-3), math.log(3.0), generator=generator))
    g = torch.logit(decay / 5) + 0.1 * normal(batch, tokens, heads, 128)
    q, k, v = (normal(batch, tokens, heads, 128).bfloat16() for _ in range(3))
    return {
        "q": q,
        "k": k,
        "v": v,
        "g": g.bfloat16(),
        "beta": normal(batch, tokens, heads).bfloat16(),
        "scale": 128**-0.5,
        "A_log": torch.zeros(heads),
        "dt_bias": torch.zeros(heads, 128),
        "lower_bound": -5.0,
        "initial_state": normal(sequences or batch, heads, 128, 128),
    }


def gold_of(inputs):
    return gold.forward(
        **inputs,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        state_v_first=True,
    )


def no_decay(inputs, logit):
    """Almost no decay and all betas equal: what a chunk writes is still there at the end."""
    inputs.update(g=torch.full_like(inputs["g"], -12.0), beta=torch.full_like(inputs["beta"], logit))
    return inputs


def repeated_key(tokens):
    inputs = no_decay(random_inputs(tokens), 8.0)
    key = inputs["k"][:, :1].expand_as(inputs["k"])
    return inputs | {"q": key, "k": key}


def correlated_keys(tokens):
    inputs = no_decay(random_inputs(tokens), 2.0)
    return inputs | {"k": inputs["k"][:, :1] + 0.05 * inputs["k"]}


@pytest.mark.parametrize("name", CASES)
def test_output_and_state_come_close_to_the_device(name):
    case = load(name)
    out, state = exact.forward(**case.inputs)
    assert out.dtype == torch.bfloat16 and out.shape == case.out.shape
    assert relative_error(out, case.out) < OUT_BOUND[name]
    if case.final_state is not None:
        assert state.dtype == case.final_state.dtype and state.shape == case.final_state.shape
        assert relative_error(state, case.final_state) < STATE_BOUND[name]


@pytest.mark.parametrize("name", WITH_WORKSPACE)
def test_workspace_has_nearly_all_bits(name):
    case = load(name)
    *_, workspace = exact.forward(**case.inputs, return_workspace=True)
    for key in exact.WORKSPACE:
        mine, theirs = case.comparable(key, workspace[key]), case.comparable(key, case.workspace[key])
        if key == "decay_total":
            assert relative_error(mine, theirs) < 2e-4
        else:
            assert (mine == theirs).double().mean() >= 0.97, key


@pytest.mark.parametrize("name", [name for name in WITH_WORKSPACE if name != "saturated"])
def test_recurrence_from_the_devices_workspace(name):
    """Given the device's workspace no approximate instruction matters (in `saturated` one rounded beta does differ)."""
    case = load(name)
    bounds = exact.sequence_bounds(case.batch, case.tokens, case.inputs["cu_seqlens"])
    rows, inside, first_chunk = exact.chunk_rows(bounds)

    def chunks_of(x):
        return x.flatten(0, 1)[rows].movedim(2, 0)

    v = torch.where(inside[..., None], chunks_of(case.inputs["v"]), torch.zeros((), dtype=torch.bfloat16))
    beta = exact.sigmoid(host_math, chunks_of(case.inputs["beta"]).float()).bfloat16()
    initial = case.inputs["initial_state"]
    state = torch.zeros(len(bounds), case.heads, 128, 128) if initial is None else initial
    out, state = exact.recur(host_math, case.workspace, v, beta, state.bfloat16(), first_chunk)
    assert (out == chunks_of(case.out))[:, inside].double().mean() > 0.9998
    if case.final_state is not None:
        assert (state.to(case.final_state.dtype) == case.final_state).double().mean() > 0.9998


@pytest.mark.parametrize("name", SLOW)
def test_dropped_state_is_noticed(name):
    """Each chunk as a sequence of its own, without the state of the chunk before."""
    case = load(name)
    bounds = exact.sequence_bounds(case.batch, case.tokens, case.inputs["cu_seqlens"])
    cuts = sorted({row for first, end in bounds for row in (*range(first, end, exact.CHUNK), end)})
    inputs = dict(case.inputs, cu_seqlens=torch.tensor(cuts), initial_state=None)
    for key in ("q", "k", "v", "g", "beta"):
        inputs[key] = inputs[key].flatten(0, 1)[None]
    out, state = exact.forward(**inputs)
    last_chunks = torch.tensor([cuts.index(end) - 1 for _, end in bounds])
    assert relative_error(out.reshape(case.out.shape), case.out) > 10 * OUT_BOUND[name]
    assert relative_error(state[last_chunks], case.final_state) > 10 * STATE_BOUND[name]


@pytest.mark.parametrize("setting", [{}, ROBUST], ids=["exact", "robust"])
def test_near_gold_over_all_decay_rates(setting):
    inputs = random_inputs(203, heads=3, sequences=3) | {"cu_seqlens": torch.tensor([0, 100, 101, 203])}
    (out, state), (out_gold, state_gold) = exact.forward(**inputs, **setting), gold_of(inputs)
    assert relative_error(out, out_gold) < 8e-3
    assert relative_error(state, state_gold) < 7e-3


def test_repeated_key_needs_substitution():
    inputs = repeated_key(16384)
    out, state = exact.forward(**inputs, **ROBUST)
    out_gold, state_gold = gold_of(inputs | {key: inputs[key][:, :1024] for key in ("q", "k", "v", "g", "beta")})
    assert out.isfinite().all() and state.isfinite().all()
    assert relative_error(out[:, :1024], out_gold) < 2e-2
    _, state = exact.forward(**inputs | {key: inputs[key][:, :1024] for key in ("q", "k", "v", "g", "beta")}, **ROBUST)
    assert relative_error(state, state_gold) < 7.8e-3
    out, _ = exact.forward(**repeated_key(1024))
    assert not relative_error(out, out_gold) < 1.0  # powers of L in fp16: garbage


def test_correlated_keys():
    inputs = correlated_keys(2048)
    out_gold, state_gold = gold_of(inputs)
    out, state = exact.forward(**inputs, **ROBUST)
    assert relative_error(out, out_gold) < 1.1e-2
    assert relative_error(state, state_gold) < 1.46e-2
    out, state = exact.forward(**inputs)
    assert relative_error(out, out_gold) > 3e-2 and relative_error(state, state_gold) > 3e-2


@pytest.mark.parametrize("setting", [{}, ROBUST], ids=["exact", "robust"])
def test_saturated_gates(setting):
    inputs = random_inputs(256)
    inputs["g"] = torch.full_like(inputs["g"], 60.0)
    inputs["g"][:, ::3] = -60.0
    (out, state), (out_gold, state_gold) = exact.forward(**inputs, **setting), gold_of(inputs)
    assert relative_error(out, out_gold) < 8e-3 and relative_error(state, state_gold) < 7e-3


@pytest.mark.parametrize("setting", [{}, ROBUST], ids=["exact", "robust"])
@pytest.mark.parametrize("last", [0, 7, 15, 16, 40])
def test_later_tokens_change_no_bit_of_a_prefix(setting, last):
    inputs, other = random_inputs(64), random_inputs(64, seed=1)
    longer = random_inputs(99, seed=2)
    changed, appended = dict(inputs), dict(inputs)
    for key in ("k", "v", "g", "beta", "q"):
        changed[key] = torch.cat([inputs[key][:, : last + 1], other[key][:, last + 1 :]], 1)
        appended[key] = torch.cat([inputs[key], longer[key]], 1)
    out = exact.forward(**inputs, **setting)[0]
    assert torch.equal(exact.forward(**changed, **setting)[0][:, : last + 1], out[:, : last + 1])
    assert torch.equal(exact.forward(**appended, **setting)[0][:, :64], out)


@pytest.mark.parametrize("setting", [{}, ROBUST], ids=["exact", "robust"])
def test_first_output_sees_only_the_first_value(setting):
    inputs = random_inputs(16) | {"initial_state": None}
    inputs["v"][:, :15] = 0
    out, _ = exact.forward(**inputs, **setting)
    assert (out[:, :15] == 0).all() and (out[:, 15] != 0).any()


@pytest.mark.parametrize("setting", [{}, ROBUST], ids=["exact", "robust"])
def test_two_calls_equal_one(setting):
    inputs = random_inputs(2048, heads=1)
    first, second = dict(inputs), dict(inputs)
    for key in ("q", "k", "v", "g", "beta"):
        first[key], second[key] = inputs[key][:, :1024], inputs[key][:, 1024:]
    out, state = exact.forward(**inputs, **setting)
    out_first, second["initial_state"] = exact.forward(**first, **setting)
    out_second, state_second = exact.forward(**second, **setting)
    assert torch.equal(torch.cat([out_first, out_second], 1), out)
    assert torch.equal(state_second, state)


@pytest.mark.parametrize("lengths", [[0, 0, 5, 5, 21], [0, 0, 0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, None])
def test_zero_length_sequences(lengths, dtype):
    count = len(lengths) - 1
    inputs = random_inputs(lengths[-1], sequences=count) | {"cu_seqlens": torch.tensor(lengths)}
    initial = inputs["initial_state"] = None if dtype is None else inputs["initial_state"].to(dtype)
    out, state = exact.forward(**inputs)
    assert out.shape == inputs["v"].shape and state.shape == (count, 2, 128, 128)
    assert state.dtype == (dtype or torch.float32)
    for n in range(count):
        if lengths[n] == lengths[n + 1]:
            expected = torch.zeros_like(state[n]) if dtype is None else initial[n].bfloat16().to(dtype)
            assert torch.equal(state[n], expected)
        else:
            assert not torch.equal(state[n], state[0])


def test_batch_equals_separate_sequences():
    inputs = random_inputs(41, batch=3)
    out, state = exact.forward(**inputs)
    packed = dict(inputs, cu_seqlens=torch.tensor([0, 41, 82, 123], dtype=torch.int32))
    for key in ("q", "k", "v", "g", "beta"):
        packed[key] = inputs[key].flatten(0, 1)[None]
    out_packed, state_packed = exact.forward(**packed)
    assert torch.equal(out.flatten(0, 1)[None], out_packed) and torch.equal(state, state_packed)


@pytest.mark.parametrize("setting", [{}, ROBUST], ids=["exact", "robust"])
def test_rows_past_the_end_are_never_read(setting):
    inputs = random_inputs(128) | {"cu_seqlens": torch.tensor([0, 100])}
    whole = dict(inputs, cu_seqlens=None)
    for key in ("q", "k", "v", "g", "beta"):
        whole[key] = inputs[key][:, :100].clone()
        inputs[key][:, 100:] = float("nan")
    (out, state), (out_whole, state_whole) = exact.forward(**inputs, **setting), exact.forward(**whole, **setting)
    assert torch.equal(out[:, :100], out_whole) and torch.equal(state, state_whole)


def test_substitution_solves_where_neumann_does_not():
    generator = torch.Generator().manual_seed(0)
    lower = (1 + 0.05 * torch.randn(64, 16, 16, generator=generator)).tril(-1)
    beta = torch.full((64, 16), 0.9)
    expected = torch.linalg.inv(torch.eye(16).double() + 0.9 * lower.double())
    assert relative_error(exact.invert_by_substitution(host_math, lower, beta), expected) < 1e-6
    assert relative_error(exact.invert_neumann(host_math, lower.half(), beta.half()), expected) > 1e-2


def test_an_inverse_in_two_terms():
    generator = torch.Generator().manual_seed(0)
    lower = (1 + 0.05 * torch.randn(64, 16, 16, generator=generator)).tril(-1)
    inverse = exact.invert_by_substitution(host_math, lower, torch.full((64, 16), 1.9993))
    terms = exact.two_terms(inverse)
    lead, rest = terms.tril(-1).double(), terms.triu(1).mT.double()
    assert torch.equal(terms.double(), lead + rest.mT)  # nothing on the diagonal
    assert relative_error(lead, inverse.tril(-1)) > 1e-3
    assert relative_error(lead + rest, inverse.tril(-1)) < 2**-17


def test_bad_arguments_name_limit_and_value():
    inputs = random_inputs(16)
    with pytest.raises(ValueError, match=re.escape("-5 <= lower_bound < 0, got -6")):
        exact.forward(**inputs | {"lower_bound": -6.0})
    with pytest.raises(ValueError, match="K=64"):
        exact.forward(**inputs | {"q": inputs["q"][..., :64]})
    with pytest.raises(ValueError, match="'fp8'"):
        exact.forward(**inputs, arithmetic="fp8")
