"""Two channels make up the keys and hardly decay in turns: no rounding of theirs averages out over channels."""

import pytest
import torch
from gpu.launching import beside_triton
from kda_inputs import regime

pytestmark = pytest.mark.gpu
HEADS = 2  # FLA tunes its kernels anew for every number of heads


def two_in_turn(tokens, heads, device, seed):
    """Channel 0 hardly decays in tokens 0 to 7 of each 16, channel 1 in the others; all other channels decay at once."""
    inputs = regime("normal", tokens, heads, device, seed)
    first = (torch.arange(tokens, device=device) % 16 < 8).to(torch.bfloat16)[None, :, None]
    g, k = torch.full_like(inputs["g"], 4.0), 0.02 * inputs["k"]
    g[..., 0], g[..., 1] = 4 - 16 * first, 16 * first - 12
    k[..., :2] += 1
    still = {name: torch.zeros_like(inputs[name]) for name in ("A_log", "dt_bias")}
    return inputs | still | {"g": g, "k": k}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("setting", ["robust", "wy64"])
def test_errors_are_near_those_of_triton(setting, seed, device, monkeypatch, record_property):
    inputs = two_in_turn(2048, HEADS, device, seed)
    _, ours, theirs = beside_triton(setting, inputs, monkeypatch, record_property)
    assert ours[0] <= 1.5 * theirs[0] and ours[1] <= 1.5 * theirs[1]
