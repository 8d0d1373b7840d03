"""Small launches of everything, compared with the reference on a CPU: what to run under compute-sanitizer.

compute-sanitizer --tool memcheck|racecheck|synccheck python -m pytest -m sanitize tests/gpu
"""

import pytest
import torch
from gpu import specs
from gpu.launching import errors, run
from kda_inputs import ROBUST, random_inputs

from fla_kda_backend import op
from fla_kda_backend.kernels.shared import record16
from fla_kda_backend.reference import exact

pytestmark = [pytest.mark.gpu, pytest.mark.sanitize]

HEADS = 2
CASES = {
    "packed": {"tokens": 226, "cu_seqlens": [0, 0, 1, 16, 32, 49, 49, 112, 177, 177, 210]},  # and rows of no sequence
    "empty": {"tokens": 0, "cu_seqlens": [0, 0, 0]},
    "batch": {"tokens": 41, "batch": 3},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("bv", specs.BVS)
@pytest.mark.parametrize("arithmetic", specs.SETTINGS)
def test_whole(name, arithmetic, bv, device):
    compare(name, arithmetic, bv, device)


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("bv", specs.BVS)
@pytest.mark.parametrize("arithmetic", specs.SETTINGS)
def test_in_segments(arithmetic, bv, chunks, device, monkeypatch):
    monkeypatch.setattr(op, "WORKSPACE_LIMIT", chunks * HEADS * record16.RECORD_BYTES)
    compare("packed", arithmetic, bv, device)


def compare(name, arithmetic, bv, device):
    inputs = random_inputs(heads=HEADS, **CASES[name])
    reference = exact.forward(**inputs, **(ROBUST if arithmetic == "robust" else {}))
    moved = {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in inputs.items()}
    out, state = (x.cpu() for x in run(moved, arithmetic, bv))
    assert out.isfinite().all() and state.isfinite().all()
    if name == "empty":
        assert torch.equal(state, reference[1])
    else:  # a CPU only comes close to the approximate instructions
        assert max(errors((out, state), reference)) < 7e-3
