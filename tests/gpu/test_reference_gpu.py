"""On a GPU the exact reference has FlashKDA's bits."""

import pytest
import torch
from golden import CASES, WITH_WORKSPACE, load, relative_error

from fla_kda_backend.reference import exact, gold


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_output_and_state_have_the_devices_bits(name, cuda_device):
    case = load(name, cuda_device)
    out, state = exact.forward(**case.inputs)
    assert torch.equal(out, case.out)
    if case.final_state is not None:
        assert torch.equal(state, case.final_state)


@pytest.mark.gpu
@pytest.mark.parametrize("name", WITH_WORKSPACE)
def test_workspace_has_the_devices_bits(name, cuda_device):
    case = load(name, cuda_device)
    *_, workspace = exact.forward(**case.inputs, return_workspace=True)
    for key in exact.WORKSPACE:
        assert torch.equal(case.comparable(key, workspace[key]), case.comparable(key, case.workspace[key])), key


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["varlen", "slow_long"])
def test_gold_is_the_same_on_both_devices(name, cuda_device):
    flags = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "state_v_first")
    here, there = (gold.forward(**load(name, d).inputs, **dict.fromkeys(flags, True)) for d in ("cpu", cuda_device))
    assert relative_error(there[0].cpu(), here[0]) < 1e-12 and relative_error(there[1].cpu(), here[1]) < 1e-12
