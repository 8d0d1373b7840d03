"""The halves of a head as a cluster: the bits of the halves for themselves, however the call is run."""

import pytest
import torch
from gpu import specs
from gpu.launching import finish, run, same
from kda_inputs import random_inputs

from fla_kda_backend import op
from fla_kda_backend.kernels.shared import record64

pytestmark = pytest.mark.gpu
HEADS = 2
STRETCH = record64.EVERY * record64.CHUNK  # tokens between two checkpoints of the replay
LENGTHS = ([2048, 0, 2300, 1, 1024, 64, 1089], [0, 0, 63], [1088] * 9, [3100, *[20] * 140, 2100])  # the last: not sorted


def check(inputs, setting, times=3):
    """Several times in a row, so that launches find what others left in shared memory and the L2."""
    alone = run(inputs, "wy64")
    found = [run(inputs, setting) for _ in range(times)]
    finish()
    assert alone[0].isfinite().all() and alone[1].isfinite().all()
    assert all(same(one, alone) for one in found)


@pytest.mark.parametrize("setting", specs.CLUSTER)
@pytest.mark.parametrize("state", [torch.float32, None])
@pytest.mark.parametrize("batch, heads, tokens", [
    (1, 1, 1), (1, 1, 64), (1, 3, 700), (2, 2, STRETCH + 65), (1, 6, 8192), (3, 5, 4097), (1, 20, 3000), (1, 32, 9000),
    (1, 2, 32_768),
])  # fmt: skip
def test_of_equal_length(setting, state, batch, heads, tokens, device):
    check(random_inputs(tokens, heads, batch=batch, state=state, device=device), setting)


@pytest.mark.parametrize("setting", specs.CLUSTER[:2])
@pytest.mark.parametrize("state", [torch.float32, None])
@pytest.mark.parametrize("heads", [1, HEADS, 96])
def test_more_tasks_than_sms(setting, state, heads, device):
    """Dealt forwards and backwards, several to a cluster."""
    check(random_inputs(700, heads, batch=5, state=state, device=device), setting)


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: str(len(lengths)))
@pytest.mark.parametrize("state", [torch.float32, None])
def test_of_packed_sequences(lengths, state, device):
    offsets = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    inputs = random_inputs(offsets[-1], HEADS, cu_seqlens=offsets, state=state, device=device)
    check(inputs, "wy64 cluster")
    if state is not None:
        check(inputs, "wy64 cluster replay")


@pytest.mark.parametrize("chunks", [1, 4, 37])
def test_in_segments(chunks, device, monkeypatch):
    lengths = LENGTHS[0]
    offsets = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    inputs = random_inputs(offsets[-1], HEADS, cu_seqlens=offsets, device=device)
    monkeypatch.setattr(op, "WORKSPACE_LIMIT", record64.workspace_bytes(chunks, HEADS))
    check(inputs, "wy64 cluster", times=1)


def test_overlapped_clusters_on_two_streams_come_to_an_end(device):
    inputs = random_inputs(4096, 20, device=device)
    whole = run(inputs, "wy64")
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    found = []
    torch.cuda.synchronize(device)
    for n in range(20):
        with torch.cuda.stream(streams[n % 2]):
            found.append(run(inputs, specs.CLUSTER[2 + n // 2 % 2]))
    for stream in streams:
        torch.cuda.current_stream(device).wait_stream(stream)
    finish()
    assert all(same(one, whole) for one in found)
