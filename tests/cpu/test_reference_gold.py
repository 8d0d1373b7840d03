"""The fp64 recurrence against FLA's naive functions and closed forms."""

import pytest
import torch
import torch.nn.functional as F
from fla.ops.kda import gate, naive
from golden import load, relative_error

from fla_kda_backend.reference import gold


def inputs_of(tokens=48, heads=2, value_heads=2, batch=2, dim_k=32, dim_v=24, sequences=None, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "q": normal(batch, tokens, heads, dim_k),
        "k": F.normalize(normal(batch, tokens, heads, dim_k), dim=-1),
        "v": normal(batch, tokens, value_heads, dim_v),
        "g": F.logsigmoid(normal(batch, tokens, value_heads, dim_k) + 1),
        "beta": torch.sigmoid(normal(batch, tokens, value_heads)),
        "initial_state": normal(sequences or batch, value_heads, dim_k, dim_v),
    }


def cut(inputs, first, end, **changes):
    """The tokens first to end of every tensor that has a token axis."""
    part = {key: value[:, first:end] for key, value in inputs.items() if key in ("q", "k", "v", "g", "beta")}
    return inputs | part | changes


@pytest.mark.parametrize("value_heads", [2, 6])
@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("with_state", [True, False])
def test_agrees_with_naive_recurrence(value_heads, scale, with_state):
    inputs = inputs_of(value_heads=value_heads)
    if not with_state:
        inputs["initial_state"] = None
    out, state = gold.forward(**inputs, scale=scale)
    out_naive, state_naive = naive.naive_recurrent_kda(**inputs, scale=scale, output_final_state=True)
    assert out.dtype == state.dtype == torch.float64
    assert relative_error(out_naive, out) < 1e-6 and relative_error(state_naive, state) < 1e-6


def test_agrees_with_naive_chunks():
    inputs = inputs_of(tokens=128, value_heads=4)
    out, state = gold.forward(**inputs)
    out_naive, state_naive = naive.naive_chunk_kda(**inputs, output_final_state=True)
    assert relative_error(out_naive, out) < 1e-5 and relative_error(state_naive, state) < 1e-5


@pytest.mark.parametrize("lower_bound", [None, -5.0, -1.0])
@pytest.mark.parametrize("with_bias", [True, False])
def test_gates(lower_bound, with_bias):
    inputs = inputs_of(value_heads=4)
    raw = 3 * inputs["g"] + 2
    A_log, dt_bias = torch.tensor([0.5, -1.0, 0.0, 1.5]), torch.linspace(-1, 1, 4 * 32) if with_bias else None
    if lower_bound is None:
        decay = gate.naive_kda_gate(raw, A_log, dt_bias)
    else:
        decay = gate.naive_kda_lowerbound_gate(raw, A_log, dt_bias, lower_bound)
    expected = gold.forward(**inputs | {"g": decay})
    arguments = inputs | {"g": raw, "use_gate_in_kernel": True, "lower_bound": lower_bound, "dt_bias": dt_bias}
    for shape in ((4,), (1, 1, 4, 1)):
        got = gold.forward(**arguments, A_log=A_log.reshape(shape))
        assert relative_error(got[0], expected[0]) < 1e-5 and relative_error(got[1], expected[1]) < 1e-5


def test_bounded_gate_without_a_log():
    inputs = inputs_of()
    expected = gold.forward(**inputs | {"g": -2 * torch.sigmoid(inputs["g"])})
    got = gold.forward(**inputs, use_gate_in_kernel=True, lower_bound=-2.0)
    assert relative_error(got[0], expected[0]) < 1e-12


def test_steep_softplus_gate_is_finite():
    inputs = inputs_of()
    A_log = torch.full((2,), 200.0).log()
    out, state = gold.forward(**inputs | {"g": torch.zeros_like(inputs["g"])}, use_gate_in_kernel=True, A_log=A_log)
    assert out.isfinite().all()
    # exp(-200 log 2) per token: nothing survives but the last write
    written = inputs["beta"][:, -1, :, None, None] * inputs["k"][:, -1, :, :, None] * inputs["v"][:, -1, :, None, :]
    assert relative_error(state, written) < 1e-12


def test_norm_and_beta_flags():
    inputs = inputs_of()
    inputs["k"] = 3 * inputs["k"]
    logits = torch.logit(inputs["beta"])
    expected = gold.forward(**inputs | {key: F.normalize(inputs[key], dim=-1) for key in ("q", "k")})
    flags = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    got = gold.forward(**inputs | {"beta": logits}, **flags)
    assert relative_error(got[0], expected[0]) < 1e-6
    doubled = gold.forward(**inputs | {"beta": 2 * inputs["beta"]}, use_qk_l2norm_in_kernel=True)
    got = gold.forward(**inputs | {"beta": logits}, **flags, allow_neg_eigval=True)
    assert relative_error(got[0], doubled[0]) < 1e-12 and relative_error(got[0], expected[0]) > 0.1


@pytest.mark.parametrize("name", ["state_v_first", "transpose_state_layout"])
def test_state_layouts_and_two_calls(name):
    inputs = inputs_of(dim_v=32)  # K = V: a wrong layout does not show in the shape
    out, state = gold.forward(**inputs)
    v_first = cut(inputs, 0, 30, initial_state=inputs["initial_state"].mT)
    out_first, middle = gold.forward(**v_first, **{name: True})
    out_second, last = gold.forward(**cut(inputs, 30, 48, initial_state=middle), **{name: True})
    assert torch.allclose(torch.cat([out_first, out_second], 1), out, rtol=0, atol=1e-12)
    assert torch.allclose(last.mT, state, rtol=0, atol=1e-12)
    assert not torch.allclose(last, state, atol=1e-3)


def test_packed_sequences_equal_separate_calls():
    ends = [0, 0, 5, 5, 21, 48]
    inputs = inputs_of(batch=1, sequences=5)
    before = inputs["initial_state"].clone()
    out, state = gold.forward(**inputs, cu_seqlens=torch.tensor(ends, dtype=torch.int32))
    assert torch.equal(inputs["initial_state"], before)
    for n, (first, end) in enumerate(zip(ends[:-1], ends[1:])):
        alone = gold.forward(**cut(inputs, first, end, initial_state=before[n : n + 1]))
        assert torch.allclose(out[:, first:end], alone[0], rtol=0, atol=1e-12)
        assert torch.allclose(state[n], alone[1][0], rtol=0, atol=1e-12)
    assert torch.equal(state[0], before[0]) and torch.equal(state[2], before[2])


@pytest.mark.parametrize("chunk_size", [32, 64])
@pytest.mark.parametrize("v_first", [False, True])
def test_intermediate_states_are_those_before_each_chunk(v_first, chunk_size):
    inputs = inputs_of(tokens=100, dim_v=32, value_heads=4)
    if v_first:
        inputs["initial_state"] = inputs["initial_state"].mT
    flags = {"state_v_first": v_first, "return_intermediate_states": True, "chunk_size": chunk_size}
    out, state, states = gold.forward(**inputs, **flags)
    plain = gold.forward(**inputs, state_v_first=v_first)
    assert torch.equal(out, plain[0]) and torch.equal(state, plain[1])
    assert states.shape == (2, -(-100 // chunk_size), 4, 32, 32)
    for chunk in range(states.shape[1]):
        before = gold.forward(**cut(inputs, 0, chunk * chunk_size), state_v_first=v_first)[1]
        assert torch.equal(states[:, chunk], before)


def test_intermediate_states_of_packed_sequences_follow_each_other():
    ends = [0, 0, 5, 70, 70, 150]
    inputs = inputs_of(batch=1, tokens=150, sequences=5)
    _, _, states = gold.forward(**inputs, cu_seqlens=torch.tensor(ends), return_intermediate_states=True)
    each = []
    for n, (first, end) in enumerate(zip(ends[:-1], ends[1:])):
        part = cut(inputs, first, end, initial_state=inputs["initial_state"][n : n + 1])
        each.append(gold.forward(**part, return_intermediate_states=True)[2])
    assert states.shape == (1, 5, 2, 32, 24) and torch.allclose(states, torch.cat(each, 1), rtol=0, atol=1e-12)


def test_what_only_the_gate_reads_is_ignored_without_it():
    inputs = inputs_of()
    ignored = {"lower_bound": -5.0, "A_log": torch.ones(7), "dt_bias": torch.ones(3), "safe_gate": True}
    assert torch.equal(gold.forward(**inputs, **ignored)[0], gold.forward(**inputs)[0])


def test_the_flags_of_a_graph_change_nothing():
    inputs = inputs_of(batch=1, sequences=2)
    offsets = torch.tensor([0, 48, 48])
    plain = gold.forward(**inputs, cu_seqlens=offsets)
    padded = gold.forward(**inputs, cu_seqlens=offsets, cu_seqlens_cpu=offsets, use_graph=True, max_num_seqs=2)
    assert all(torch.equal(a, b) for a, b in zip(padded, plain))


def test_no_tokens_at_all():
    inputs = inputs_of(tokens=0, batch=1, sequences=2) | {"initial_state": None}
    out, state = gold.forward(**inputs, cu_seqlens=torch.tensor([0, 0, 0]))
    assert out.shape == (1, 0, 2, 24) and torch.equal(state, torch.zeros(2, 2, 32, 24, dtype=torch.float64))


@pytest.mark.parametrize("name", ["fp32_state", "lower_bound_1", "varlen", "slow_varlen_state", "slow_long"])
def test_near_what_the_device_computed(name):
    case = load(name)
    flags = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "state_v_first")
    out, state = gold.forward(**case.inputs, **dict.fromkeys(flags, True))
    assert relative_error(case.out, out) < 1e-2 and relative_error(case.final_state, state) < 1e-2
