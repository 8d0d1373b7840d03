"""On random inputs every number of columns gives the bits of the exact reference; a dropped state is noticed."""

import pytest
import torch
from golden import relative_error
from gpu import specs
from gpu.launching import expected, limit_workspace, plan_of, right, run, same
from kda_inputs import EXTREMES, TOKEN_AXIS, extreme, of_heads, random_inputs

from fla_kda_backend import op, planning
from fla_kda_backend.call import parse
from fla_kda_backend.testing import Form, Normal, make, regime

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
    assert right(results[0], inputs, "robust")
    assert not same(results[0], run(inputs, "exact"))


@pytest.mark.parametrize("setting, kind, runs", specs.REPEATED, ids=[setting for setting, _, _ in specs.REPEATED])
def test_every_run_has_the_same_bits(setting, kind, runs, device):
    """Warps free places in shared memory for the next chunk's loads. Where they do so before their own loads are done, which is
    when these wait behind stores, some runs have other bits (docs/lab/once_other_bits.md)."""
    form = Form.of(kind, (2500, 7), heads=3)
    drawn = make(form, lambda form: regime("normal", kind, form, Normal(device, "repeated", 0)), device, spelled_out=True)
    call = parse((), drawn | {"cu_seqlens_cpu": drawn["cu_seqlens"].cpu()})  # so that no run waits for the GPU
    plan = plan_of(setting, 32, kind, call.num_sequences, call.heads)
    results = [x.view(torch.uint8) for x in op.run(call, plan)]
    other = torch.zeros(len(results), dtype=torch.int64, device=device)
    for _ in range(runs):
        again = [x.view(torch.uint8) for x in op.run(call, plan)]
        other += torch.stack([(a != b).any() for a, b in zip(again, results)])
    assert other.tolist() == [0] * len(results), f"of {runs} runs, per result"


@pytest.mark.parametrize("setting, chunk", [("exact", 16), ("robust", 16), ("wy64", 64)])
def test_a_state_dropped_between_chunks_is_noticed(setting, chunk, device):
    """The kernels run chunk by chunk, each as a sequence of its own: what the comparisons must reject."""
    tokens, heads = 512, 6
    inputs = random_inputs(tokens, heads, state=None, device=device)
    offsets = torch.arange(0, tokens + 1, chunk, device=device)
    dropped, states = run(inputs | {"cu_seqlens": offsets}, setting)
    out, state = run(inputs, setting)
    assert not torch.equal(dropped, out) and not torch.equal(states[-1:], state)
    assert relative_error(dropped, out) > 0.1 and relative_error(states[-1:], state) > 0.1
    assert torch.equal(dropped[:, :chunk], out[:, :chunk])  # nothing else differs
    assert right((out, state), inputs, setting) and not right((dropped, states[-1:]), inputs, setting)


@pytest.mark.parametrize("lower_bound", [-5.0, -2.5, -1.0, -0.05])
@pytest.mark.parametrize("scale", [128**-0.5, 1.0, 1e-3, -0.3])
def test_bounds_and_scales(lower_bound, scale, device):
    inputs = random_inputs(320, 2, lower_bound=lower_bound, scale=scale, device=device)
    for setting in specs.WITHOUT_REPLAY:
        assert right(run(inputs, setting), inputs, setting), setting


@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_inputs(name, device):
    inputs = extreme(name, random_inputs(320, 2, device=device))
    for setting in specs.WITHOUT_REPLAY:
        found = run(inputs, setting)
        assert all(x.isfinite().all() for x in found) and right(found, inputs, setting), setting


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
    default = planning.workspace_limit()
    for setting in ("exact", "wy64"):
        alone = run(of_heads(inputs, few), setting, bv=32)
        for limit in (default, 1 << 36):  # in segments, and in one launch
            limit_workspace(monkeypatch, limit)
            out, state = run(inputs, setting, bv=128)
            assert torch.equal(out[:, :, few], alone[0]) and torch.equal(state[:, few], alone[1]), (setting, limit)
