"""The 64-token kernels: accuracy beside FLA's Triton kernels, and bits that no choice of how to run a call changes.

What they share with the column split (tails, states, packed sequences, causality, streams) is tested there, setting by
setting.
"""

import pytest
import torch
from gpu import specs
from gpu.launching import auto_plan, beside_triton, errors, finish, in_segments_of, precise, right, run, run_auto, same
from kda_inputs import REGIMES, TOKEN_AXIS, of_heads, random_inputs, regime, sequence

from fla_kda_backend import planning
from fla_kda_backend.kernels.wy64 import record as record64

pytestmark = pytest.mark.gpu
HEADS = 2  # FLA tunes its kernels anew for every number of heads
STRETCH = record64.CHUNKS_PER_CHECKPOINT * record64.CHUNK  # tokens between two checkpoints of the replay
ALL = pytest.mark.parametrize("setting", ["wy64", "wy64 replay", *specs.OVERLAP])


# ---- accuracy ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", REGIMES)
def test_errors_are_at_most_those_of_triton(name, seed, device, monkeypatch, record_property):
    inputs = regime(name, 2048, HEADS, device, seed)
    _, ours, theirs = beside_triton("wy64", inputs, monkeypatch, record_property)
    assert ours[0] <= 1.05 * theirs[0] and ours[1] <= 1.05 * theirs[1]


def test_one_key_repeated_for_long(device):
    inputs = regime("repeated", 16_384, HEADS, device)
    found = run(inputs, "wy64")
    assert all(x.isfinite().all() for x in found)
    ours = errors(found, precise(inputs))
    assert ours[0] < 3e-2 and ours[1] < 1e-2
    assert same(run(inputs, "wy64 replay"), found)


@ALL
def test_a_state_dropped_at_a_checkpoint_is_noticed(setting, device):
    tokens = 4 * STRETCH + 100
    inputs = random_inputs(tokens, HEADS, state=None, device=device)
    assert right(run(inputs, setting), inputs, setting)
    stretches = torch.tensor([*range(0, tokens, STRETCH), tokens], device=device)
    dropped, states = run(inputs | {"cu_seqlens": stretches}, "wy64")
    assert not right((dropped, states[-1:]), inputs, setting)


# ---- the same bits -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("heads, tokens", [
    *((HEADS, STRETCH * n + more) for n in (1, 2) for more in (-63, 0, 1, 64, 65)),
    (1, 32_768), (6, 8192), (20, 3000), (96, 2100),  # the last with more spines than an H200 has SMs
])  # fmt: skip
def test_replay_changes_no_bit(heads, tokens, device):
    inputs = random_inputs(tokens, heads, device=device)
    whole = run(inputs, "wy64")
    replayed = [run(inputs, "wy64 replay") for _ in range(3)]
    finish()
    assert whole[0].isfinite().all() and whole[1].isfinite().all()
    assert all(same(found, whole) for found in (*replayed, run(inputs, "wy64")))


@pytest.mark.parametrize("lengths", [
    [2048, 0, 2300, 1, 1024, 64, 1089], [1088] * 9, [63, 5000, 17], [3100, *[20] * 140, 2100],  # more than are sorted
])  # fmt: skip
def test_replay_of_packed_sequences_changes_no_bit(lengths, device):
    offsets = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    inputs = random_inputs(offsets[-1], HEADS, cu_seqlens=offsets, device=device)
    out, state = whole = run(inputs, "wy64")
    found = run(inputs, "wy64 replay")
    finish()
    assert whole[0].isfinite().all() and same(found, whole)
    longest = lengths.index(max(lengths))
    rows = slice(*offsets[longest : longest + 2])
    assert same(run(sequence(inputs, longest), "wy64 replay"), (out[:, rows], state[longest : longest + 1]))


@pytest.mark.parametrize("setting", specs.OVERLAP)
@pytest.mark.parametrize("batch, heads, tokens", [
    (1, 1, 1), (1, 3, 700), (2, 2, 2500), (1, 6, 8192), (3, 5, 4097), (1, 20, 3000), (1, 32, 9000), (1, 2, 32_768),
])  # fmt: skip
def test_overlap_changes_no_bit(setting, batch, heads, tokens, device):
    inputs = random_inputs(tokens, heads, batch=batch, device=device)
    whole = run(inputs, "wy64")
    overlapped = [run(inputs, setting) for _ in range(3)]
    finish()
    assert whole[0].isfinite().all() and whole[1].isfinite().all()
    assert all(same(found, whole) for found in overlapped)


@pytest.mark.parametrize("setting", specs.OVERLAP)
@pytest.mark.parametrize("begin, end", [(0, 3000), (70, 2950), (300, 300), (0, 1), (63, 64), (900, 3000)])
def test_overlap_of_one_packed_sequence_changes_no_bit(setting, begin, end, device):
    inputs = random_inputs(3000, HEADS, cu_seqlens=[begin, end], device=device)
    found = run(inputs, setting)
    finish()
    assert found[0].isfinite().all() and same(found, run(inputs, "wy64"))


@pytest.mark.parametrize("state", [None, torch.float32])
@pytest.mark.parametrize("batch, heads, tokens", [
    (1, 29, 2100), (1, 40, 2048), (1, 48, 2048), (1, 96, 2048), (2, 24, 2048), (5, 19, 640), (1, 128, 64), (1, 48, 8192),
])  # fmt: skip
def test_overlap_in_groups_changes_no_bit(batch, heads, tokens, state, device):
    """The chain's CTAs work through several tasks; the last group may be smaller, as of 29 heads."""
    inputs = random_inputs(tokens, heads, batch=batch, state=state, device=device)
    whole = run(inputs, "wy64")
    overlapped = [run(inputs, "wy64 overlap") for _ in range(3)]
    finish()
    assert whole[0].isfinite().all() and whole[1].isfinite().all()
    assert all(same(found, whole) for found in overlapped)


@pytest.mark.parametrize("begin, end", [(0, 3000), (70, 2950), (1500, 3000), (300, 300), (0, 100)])
def test_overlap_in_groups_of_one_packed_sequence_changes_no_bit(begin, end, device):
    """Slots that it does not fill lie between one group's chunks and the next one's."""
    inputs = random_inputs(3000, 48, cu_seqlens=[begin, end], device=device)
    found = run(inputs, "wy64 overlap")
    finish()
    assert found[0].isfinite().all() and same(found, run(inputs, "wy64"))


@pytest.mark.parametrize("heads", [20, 48])
def test_overlapped_calls_on_two_streams_come_to_an_end(heads, device):
    """Each chain waits beside the other stream's kernels for what its own prepare writes."""
    inputs = random_inputs(4096, heads, device=device)
    whole = run(inputs, "wy64")
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    found = []
    torch.cuda.synchronize(device)
    for n in range(20):
        with torch.cuda.stream(streams[n % 2]):
            found.append(run(inputs, specs.OVERLAP[n // 2 % 2]))
    for stream in streams:
        torch.cuda.current_stream(device).wait_stream(stream)
    finish()
    assert all(same(one, whole) for one in found)


@ALL
@pytest.mark.parametrize("last", [62, 63, STRETCH - 1, STRETCH, STRETCH + 500, 2 * STRETCH + 190])
def test_later_tokens_change_no_bit_of_a_long_prefix(setting, last, device):
    inputs, other = (random_inputs(2 * STRETCH + 252, HEADS, seed=seed, device=device) for seed in range(2))
    changed = {name: torch.cat([inputs[name][:, : last + 1], other[name][:, last + 1 :]], 1) for name in TOKEN_AXIS}
    before, after = run(inputs, setting)[0], run(inputs | changed, setting)[0]
    assert torch.equal(after[:, : last + 1], before[:, : last + 1])
    assert not torch.equal(after[:, last + 1 :], before[:, last + 1 :])


def test_bits_depend_neither_on_the_batch_nor_on_the_number_of_heads(device):
    """Under the plans that the auto mode chooses for each, with replay and without."""
    lengths = [planning.LONG + 77, 300]
    offsets = [0, lengths[0], sum(lengths)]
    inputs = random_inputs(offsets[-1], 24, cu_seqlens=offsets, device=device)
    out, state = run_auto(inputs)
    alone = sequence(of_heads(inputs, [5]), 0)
    assert not options(inputs)["replay"] and options(alone)["replay"] and options(alone)["overlap"]
    assert same(run_auto(alone), (out[:, : lengths[0], [5]], state[:1, [5]]))
    few = of_heads(inputs, [0, 23])
    assert same(run_auto(few), (out[:, :, [0, 23]], state[:, [0, 23]]))


def options(inputs):
    return auto_plan(inputs).params


@pytest.mark.parametrize("chunks", [5, 16, 35])
def test_a_plan_with_replay_has_the_same_bits_in_segments(chunks, device, monkeypatch):
    inputs = random_inputs(2300, HEADS, device=device)
    assert options(inputs)["overlap"] and options(inputs)["replay"]
    whole = run_auto(inputs)
    in_segments_of(monkeypatch, "wy64", chunks, HEADS)
    assert same(run_auto(inputs), whole)
