"""The robust setting in the regimes where roundings show: at most 1.5 times the error of FLA's Triton kernels."""

import pytest
import torch
from golden import relative_error
from gpu import records
from gpu.launching import beside_triton, errors, precise, right, run
from kda_inputs import REGIMES, random_inputs, regime

from fla_kda_backend.reference import exact

pytestmark = pytest.mark.gpu
HEADS = 2  # FLA tunes its kernels anew for every number of heads


@pytest.mark.parametrize("name", REGIMES)
def test_errors_are_near_those_of_triton(name, device, monkeypatch, record_property):
    inputs = regime(name, 2048, HEADS, device)
    found, ours, theirs = beside_triton("robust", inputs, monkeypatch, record_property)
    assert ours[0] <= 1.5 * theirs[0] and ours[1] <= 1.5 * theirs[1]
    if name != "repeated":  # where sums in another order matter more
        assert right(found, inputs, "robust")


@pytest.mark.sanitize
def test_workspace(device, monkeypatch):
    """What needs no sum over the state has the bits of the reference."""
    inputs = random_inputs(130, HEADS, cu_seqlens=[0, 1, 1, 65, 130], device=device)
    kept = records.workspaces(monkeypatch)
    run(inputs, "robust")
    (workspace,) = kept
    offsets = inputs["cu_seqlens"]
    found = records.unpack(workspace, HEADS, records.slots_of(1, 130, offsets))
    *_, expected = exact.forward(**inputs, arithmetic="robust", return_workspace=True)
    for name, table in found.items():
        rows = exact.comparable_rows(name, 1, 130, offsets).to(device)
        assert torch.equal(table[:, rows], expected[name].unflatten(0, (HEADS, -1))[:, rows]), name


def test_one_key_repeated_for_long(device):
    inputs = regime("repeated", 16_384, HEADS, device)
    out, state = run(inputs, "robust")
    reference = precise(inputs)
    assert out.isfinite().all() and state.isfinite().all()
    assert relative_error(out, reference[0]) < 3e-2 and relative_error(state, reference[1]) < 1e-2


def test_the_exact_setting_does_need_robust_beside_it(device):
    inputs = regime("repeated", 2048, HEADS, device)
    reference = precise(inputs)
    assert not max(errors(run(inputs, "exact"), reference)) < 1.0
