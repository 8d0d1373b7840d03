"""The exact setting has FlashKDA's bits: outputs, states, workspaces."""

import pytest
import torch
from golden import CASES, WITH_WORKSPACE, load
from gpu import records, specs
from gpu.launching import fwd_of, plan_of, same

from fla_kda_backend import op
from fla_kda_backend.reference import exact

pytestmark = pytest.mark.gpu


def run(case, bv, monkeypatch):
    monkeypatch.setattr(op, "column_split", lambda arithmetic, n, heads, _, variant: plan_of(arithmetic, bv, variant, n, heads))
    return fwd_of(case.inputs, None if case.final_state is None else case.final_state.dtype)


@pytest.mark.parametrize("bv", specs.BVS)
@pytest.mark.parametrize("name", CASES)
def test_output_and_state(name, bv, device, monkeypatch):
    case = load(name, device)
    assert same(run(case, bv, monkeypatch), (case.out, case.final_state))


@pytest.mark.sanitize
@pytest.mark.parametrize("name", WITH_WORKSPACE)
def test_workspace(name, device, monkeypatch):
    case = load(name, device)
    kept = records.workspaces(monkeypatch)
    run(case, 32, monkeypatch)
    (workspace,) = kept
    slots = records.slots_of(case.batch, case.tokens, case.inputs["cu_seqlens"])
    found = records.unpack(workspace, case.heads, slots)
    assert set(found) == set(exact.WORKSPACE)
    for key, table in found.items():
        assert torch.equal(case.comparable(key, table), case.comparable(key, case.workspace[key])), key
