"""What an output may depend on, and what a call leaves alone."""

import pytest
import torch
from gpu import specs
from gpu.launching import errors, precise, run, same
from kda_inputs import TOKEN_AXIS, chunk_kda_arguments, random_inputs

from fla_kda_backend.reference import gold

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("setting", specs.SETTINGS)]


@pytest.mark.parametrize("last", [0, 7, 15, 16, 40, 63, 64, 100])
def test_later_tokens_change_no_bit_of_a_prefix(setting, last, device):
    inputs, other = random_inputs(150, 2, device=device), random_inputs(150, 2, seed=1, device=device)
    changed = dict(inputs)
    for name in TOKEN_AXIS:
        changed[name] = torch.cat([inputs[name][:, : last + 1], other[name][:, last + 1 :]], 1)
    before, after = run(inputs, setting)[0], run(changed, setting)[0]
    assert torch.equal(after[:, : last + 1], before[:, : last + 1])
    assert not torch.equal(after[:, last + 1 :], before[:, last + 1 :])


@pytest.mark.parametrize("tokens", [1, 16, 50, 64, 1100])
def test_appended_tokens_change_no_bit(setting, tokens, device):
    inputs, more = random_inputs(tokens, 2, device=device), random_inputs(35, 2, seed=1, device=device)
    longer = inputs | {name: torch.cat([inputs[name], more[name]], 1) for name in TOKEN_AXIS}
    assert torch.equal(run(longer, setting)[0][:, :tokens], run(inputs, setting)[0])


@pytest.mark.parametrize("last", [15, 63])
def test_only_the_last_token_has_a_value(setting, last, device):
    inputs = random_inputs(last + 1, 2, state=None, device=device)
    inputs["v"][:, :last] = 0
    out, _ = run(inputs, setting)
    assert (out[:, :last] == 0).all() and (out[:, last] != 0).any()


def test_heads_do_not_mix(setting, device):
    inputs = random_inputs(80, 3, device=device)
    out, state = run(inputs, setting)
    changed = {name: x.clone() for name, x in inputs.items() if isinstance(x, torch.Tensor)}
    for name in TOKEN_AXIS:
        changed[name][:, :, 1] = float("nan")
    for name in ("A_log", "dt_bias"):
        changed[name][1] = float("nan")
    changed["initial_state"][:, 1] = float("nan")
    out_changed, state_changed = run(inputs | changed, setting)
    for head in (0, 2):
        assert torch.equal(out_changed[:, :, head], out[:, :, head])
        assert torch.equal(state_changed[:, head], state[:, head])


def test_state_is_v_first(setting, device):
    inputs = random_inputs(48, 2, device=device)
    found = run(inputs, setting)
    arguments = chunk_kda_arguments(inputs)
    assert all(error < 1e-2 for error in errors(found, precise(inputs)))
    k_first = gold.forward(**arguments | {"state_v_first": False})
    assert min(errors(found, k_first)) > 0.1


def test_nothing_of_the_callers_is_written(setting, device):
    inputs = random_inputs(75, 2, cu_seqlens=[0, 20, 75], device=device)
    before = {name: x.clone() for name, x in inputs.items() if isinstance(x, torch.Tensor)}
    first = run(inputs, setting)
    assert all(torch.equal(inputs[name], x) for name, x in before.items())
    assert same(run(inputs, setting), first)


def test_slices_of_a_fused_tensor(setting, device):
    inputs = random_inputs(75, 2, device=device)
    reference = run(inputs, setting)
    fused = torch.cat([inputs[name] for name in "qkvg"] + [inputs["beta"][..., None]], -1)
    moved = inputs | dict(zip("qkvg", fused[..., :512].split(128, -1))) | {"beta": fused[..., 512]}
    assert not any(moved[name].is_contiguous() for name in TOKEN_AXIS)
    assert same(run(moved, setting), reference)
    transposed = {name: inputs[name].transpose(1, 2).contiguous().transpose(1, 2) for name in TOKEN_AXIS}
    transposed["initial_state"] = inputs["initial_state"].mT.contiguous().mT
    assert same(run(inputs | transposed, setting), reference)


def test_unaligned_tensors(setting, device):
    inputs = random_inputs(75, 2, device=device)
    reference = run(inputs, setting)
    moved = dict(inputs)
    for name in TOKEN_AXIS:
        storage = torch.empty(inputs[name].numel() + 1, dtype=torch.bfloat16, device=device)
        moved[name] = storage[1:].view(inputs[name].shape).copy_(inputs[name])
    assert same(run(moved, setting), reference)
