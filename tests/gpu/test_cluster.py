"""The clusters of the chain in calls of many shapes: every schedule gives the plain one's bits, over and over."""

import pytest
import torch
from gpu import specs
from gpu.launching import finish, right, run, same
from kda_inputs import random_inputs

from fla_kda_backend.kernels.wy64 import record as record64

pytestmark = pytest.mark.gpu
STRETCH = record64.CHUNKS_PER_CHECKPOINT * record64.CHUNK  # tokens between two checkpoints of the replay
LENGTHS = ([2048, 0, 2300, 1, 1024, 64, 1089], [0, 0, 63], [1088] * 9, [3100, *[20] * 140, 2100])  # the last: not sorted


def check(inputs, settings, times=3):
    """Several times in a row, so that launches find what others left in shared memory and the L2."""
    whole = run(inputs, "wy64")
    found = [run(inputs, setting) for setting in ("wy64", *settings) for _ in range(times)]
    finish()
    if inputs["q"].numel() <= 1 << 22:
        assert right(whole, inputs, "wy64")
    assert whole[0].isfinite().all() and whole[1].isfinite().all()
    assert all(same(one, whole) for one in found)


@pytest.mark.parametrize("state", [torch.float32, None])
@pytest.mark.parametrize("batch, heads, tokens", [
    (1, 1, 1), (1, 1, 64), (1, 3, 700), (2, 2, STRETCH + 65), (1, 6, 8192), (3, 5, 4097), (1, 20, 3000), (1, 32, 9000),
    (1, 2, 32_768),
])  # fmt: skip
def test_of_equal_length(state, batch, heads, tokens, device):
    check(random_inputs(tokens, heads, batch=batch, state=state, device=device), ("wy64 replay", *specs.OVERLAP))


@pytest.mark.parametrize("state", [torch.float32, None])
@pytest.mark.parametrize("heads", [1, 2, 96])
def test_more_tasks_than_sms(state, heads, device):
    """Dealt forwards and backwards, several to a cluster."""
    check(random_inputs(700, heads, batch=5, state=state, device=device), ("wy64 replay",))


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: str(len(lengths)))
@pytest.mark.parametrize("state", [torch.float32, None])
def test_of_packed_sequences(lengths, state, device):
    offsets = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    inputs = random_inputs(offsets[-1], 2, cu_seqlens=offsets, state=state, device=device)
    check(inputs, () if state is None else ("wy64 replay",))
