"""Small launches of everything, compared with the reference on a CPU: what to run under compute-sanitizer.

compute-sanitizer --tool memcheck|racecheck|synccheck python -m pytest -m sanitize tests/gpu
"""

import call_table
import pytest
import torch
from calls import INFERENCE
from gpu import specs
from gpu.launching import errors, in_segments_of, precise, run
from kda_calls import call_of
from kda_inputs import random_inputs

from fla_kda_backend import op, planning
from fla_kda_backend.call import parse
from fla_kda_backend.reference import exact, gold

pytestmark = [pytest.mark.gpu, pytest.mark.sanitize]

HEADS = 2
CASES = {
    "packed": {"tokens": 226, "cu_seqlens": [0, 0, 1, 16, 32, 49, 49, 112, 177, 177, 210]},  # and rows of no sequence
    "empty": {"tokens": 0, "cu_seqlens": [0, 0, 0]},
    "batch": {"tokens": 41, "batch": 3},
}
LONG = {  # enough chunks for the replay to have stretches of its own
    "packed": {"tokens": 2240, "cu_seqlens": [0, 0, 1090, 1154, 2240]},
    "one": {"tokens": 2113},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("setting, bv", specs.VARIANTS)
def test_whole(name, setting, bv, device):
    compare(CASES[name], setting, bv, device)


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("setting, bv", [row for row in specs.VARIANTS if row[0] != "wy64 replay"])
def test_in_segments(setting, bv, chunks, device, monkeypatch):
    in_segments_of(monkeypatch, setting, chunks, HEADS)
    compare(CASES["packed"], setting, bv, device)


@pytest.mark.parametrize("name", LONG)
def test_replay(name, device):
    compare(LONG[name], "wy64 replay", None, device)


@pytest.mark.parametrize("name", ["batch", "one"])
@pytest.mark.parametrize("setting", specs.OVERLAP)
def test_overlap(name, setting, device):
    compare((CASES | LONG)[name], setting, None, device)


def test_direct(device):
    """Sequences of one chunk, an empty one, and one for the chain."""
    compare({"tokens": 150, "cu_seqlens": [0, 17, 17, 80, 150], "state": None}, specs.DIRECT, None, device)


def test_overlap_in_groups(device):
    compare({"tokens": 139, "heads": 29}, "wy64 overlap", None, device)


@pytest.mark.parametrize(
    "kind", [call_table.FLASHKDA, call_table.SOFTPLUS, call_table.KIMI], ids=["flashkda", "softplus", "kimi"]
)
@pytest.mark.parametrize("layout", ["fused", "transposed"])
def test_kinds(layout, kind, device):
    """Strides, grouped values, gates without a bound, K-first states."""
    compare_call(call_table.Case(kind, "steep", 17, 64, layout, heads=4), device)


@pytest.mark.parametrize("chunk_size", [64, 32])
@pytest.mark.parametrize("kind", specs.STATES, ids=call_table.label)
def test_intermediate_states(kind, chunk_size, device):
    compare_call(call_table.Case(kind, "normal", 17, 64), device, chunk_size=chunk_size)


def compare_call(case, device, **changes):
    """A call under the plan of the auto mode."""
    call = call_of(case, device, **changes)
    parsed = parse((), call)
    found = [x.cpu() for x in op.run(parsed, planning.plan(parsed, INFERENCE))]
    reference = gold.forward(**{name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in call.items()})
    assert all(x.isfinite().all() for x in found) and all(error < 1e-2 for error in errors(found, reference))


def compare(case, setting, bv, device):
    inputs = random_inputs(**{"heads": HEADS} | case)
    if setting in specs.COLUMN_SPLIT:
        reference = exact.forward(**inputs, arithmetic=setting)
    else:
        reference = precise(inputs)
    moved = {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in inputs.items()}
    out, state = (x.cpu() for x in run(moved, setting, bv))
    assert out.isfinite().all() and state.isfinite().all()
    if case["tokens"] == 0:
        assert torch.equal(state.double(), reference[1].double())
    else:  # a CPU only comes close to the approximate instructions
        assert all(error < 7e-3 for error in errors((out, state), reference))
