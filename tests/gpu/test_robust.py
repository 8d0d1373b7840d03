"""The robust setting in the regimes where roundings show: at most 1.5 times the error of FLA's Triton kernels."""

import pytest
from golden import relative_error
from gpu.launching import beside_triton, errors, precise, right, run
from kda_inputs import REGIMES, regime

pytestmark = pytest.mark.gpu
HEADS = 2  # FLA tunes its kernels anew for every number of heads


@pytest.mark.parametrize("name", REGIMES)
def test_errors_are_near_those_of_triton(name, device, monkeypatch, record_property):
    inputs = regime(name, 2048, HEADS, device)
    found, ours, theirs = beside_triton("robust", inputs, monkeypatch, record_property)
    assert ours[0] <= 1.5 * theirs[0] and ours[1] <= 1.5 * theirs[1]
    if name != "repeated":  # where sums in another order matter more
        assert right(found, inputs, "robust")


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
