"""On random inputs every number of columns gives the bits of the exact reference; a dropped state is noticed."""

import pytest
import torch
from golden import relative_error
from gpu import specs
from gpu.launching import errors, expected, run, same
from kda_inputs import ROBUST, TOKEN_AXIS, of_heads, random_inputs

from fla_kda_backend import op
from fla_kda_backend.reference import exact

pytestmark = pytest.mark.gpu

SHAPES = [(6, 512), (6, 32768), (12, 16384), (24, 4096), (48, 2048), (96, 1024), (96, 8192)]  # heads, tokens


@pytest.mark.parametrize("heads, tokens", SHAPES)
def test_exact_has_the_bits_of_the_reference(heads, tokens, device):
    inputs = random_inputs(tokens, heads, device=device)
    reference = expected(inputs)
    for bv in specs.BVS:
        assert same(run(inputs, "exact", bv), reference), bv


@pytest.mark.parametrize("heads, tokens", [(6, 32768), (96, 1024)])
def test_robust_has_the_same_bits_for_every_number_of_columns(heads, tokens, device):
    inputs = random_inputs(tokens, heads, device=device)
    results = [run(inputs, "robust", bv) for bv in specs.BVS]
    assert same(results[1], results[0]) and same(results[2], results[0])
    assert max(errors(results[0], exact.forward(**inputs, **ROBUST))) < 5e-3  # sums in another order
    assert not same(results[0], run(inputs, "exact"))


@pytest.mark.parametrize("arithmetic", specs.SETTINGS)
def test_a_state_dropped_between_chunks_is_noticed(arithmetic, device):
    """The kernels run chunk by chunk, each as a sequence of its own: what the comparison above must reject."""
    tokens, heads = 512, 6
    inputs = random_inputs(tokens, heads, state=None, device=device)
    offsets = torch.arange(0, tokens + 1, 16, device=device)
    dropped, states = run(inputs | {"cu_seqlens": offsets}, arithmetic)
    out, state = run(inputs, arithmetic)
    assert not torch.equal(dropped, out) and not torch.equal(states[-1:], state)
    assert relative_error(dropped, out) > 0.1 and relative_error(states[-1:], state) > 0.1
    assert torch.equal(dropped[:, :16], out[:, :16])  # nothing else differs
    if arithmetic == "exact":
        assert same((out, state), expected(inputs)) and not same((dropped, states[-1:]), expected(inputs))


@pytest.mark.parametrize("lower_bound", [-5.0, -2.5, -1.0, -0.05])
@pytest.mark.parametrize("scale", [128**-0.5, 1.0, 1e-3, -0.3])
def test_bounds_and_scales(lower_bound, scale, device):
    inputs = random_inputs(320, 2, lower_bound=lower_bound, scale=scale, device=device)
    assert same(run(inputs), expected(inputs))
    assert max(errors(run(inputs, "robust"), exact.forward(**inputs, **ROBUST))) < 5e-3


def extreme(name, device):
    inputs = random_inputs(320, 2, device=device)
    if name == "saturated":
        inputs["g"] = torch.where(inputs["g"] > 0, 60.0, -60.0).to(torch.bfloat16)
    elif name == "saturated strong":
        inputs["g"] = torch.full_like(inputs["g"], 60.0)
    elif name == "saturated weak":
        inputs["g"] = torch.full_like(inputs["g"], -60.0)
    elif name == "steep":
        inputs["A_log"] = inputs["A_log"] + 5
    elif name == "zero rows":
        for key in ("q", "k", "v"):
            inputs[key][:, 3::7] = 0
    elif name == "large values":
        inputs["v"] = inputs["v"] * 1e4
        inputs["q"], inputs["k"] = inputs["q"] * 1e4, inputs["k"] * 1e4
    elif name == "large state":
        inputs["initial_state"] = inputs["initial_state"] * 1e6
    elif name == "beta on":
        inputs["beta"] = torch.full_like(inputs["beta"], 60.0)
    elif name == "beta off":
        inputs["beta"] = torch.full_like(inputs["beta"], -60.0)
    return inputs


EXTREMES = ["saturated", "saturated strong", "saturated weak", "steep", "zero rows", "large values", "large state",
            "beta on", "beta off"]  # fmt: skip


@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_inputs(name, device):
    inputs = extreme(name, device)
    reference = expected(inputs)
    assert all(x.isfinite().all() for x in reference)
    assert same(run(inputs), reference)
    assert max(errors(run(inputs, "robust"), exact.forward(**inputs, **ROBUST))) < 5e-3


def test_past_two_to_the_31_elements(device, monkeypatch):
    """H * T * 128 wraps an int32. No head depends on another, so the first and last ones alone must give the same."""
    heads, tokens = 96, 174_763
    assert heads * tokens * 128 > 2**31
    generator = torch.Generator(device).manual_seed(0)
    inputs = random_inputs(16, heads, state=None, device=device)
    for name in TOKEN_AXIS:
        shape = (1, tokens, heads, 128)[: inputs[name].ndim]
        inputs[name] = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)
    inputs["g"].sub_(4)  # slow enough that states matter
    few = [0, 47, heads - 1]
    alone = run(of_heads(inputs, few), bv=32)
    for limit in (op.WORKSPACE_LIMIT, 1 << 36):  # in segments, and in one launch
        monkeypatch.setattr(op, "WORKSPACE_LIMIT", limit)
        out, state = run(inputs, bv=128)
        assert torch.equal(out[:, :, few], alone[0]) and torch.equal(state[:, few], alone[1])
