"""Batches, packed sequences, tails, sequences without tokens, states of every kind, segments of the time axis."""

import pytest
import torch
from golden import relative_error
from gpu import specs
from gpu.launching import expected, finish, fwd_of, in_segments_of, right, run, same
from kda_inputs import cut, of_heads, packed, random_inputs, sequence

from fla_kda_backend import geometry, planning
from fla_kda_backend.kernels.families import FAMILIES

pytestmark = pytest.mark.gpu

DTYPES = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16, "int32": torch.int32, "int64": torch.int64}
LENGTHS = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129]


def offsets_of(lengths):
    return [sum(lengths[:n]) for n in range(len(lengths) + 1)]


def inputs_of(kinds, offsets, device, heads=2, **more):
    return random_inputs(offsets[-1], heads, cu_seqlens=offsets, cu_dtype=DTYPES[kinds.cu_seqlens],
                         state=DTYPES[kinds.initial_state], device=device, **more)  # fmt: skip


# ---- lengths ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("setting", specs.SETTINGS)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_tail(tokens, setting, device):
    inputs = random_inputs(tokens, 3, device=device)
    assert right(run(inputs, setting), inputs, setting)


@pytest.mark.parametrize("setting, bv", specs.VARIANTS)
def test_packed_sequences_equal_each_by_itself(setting, bv, device):
    inputs = inputs_of(specs.PACKED, offsets_of([*LENGTHS, 500, 0, 31, 1200]), device)
    out, state = run(inputs, setting, bv)
    assert right((out, state), inputs, setting)
    for n in range(len(LENGTHS) + 4):
        first, end = inputs["cu_seqlens"][n : n + 2].tolist()
        alone = sequence(inputs, n)
        if end == first:
            initial = alone["initial_state"]
            assert torch.equal(state[n : n + 1], initial.bfloat16().float() if setting == "exact" else initial)
        else:
            assert same(run(alone, setting), (out[:, first:end], state[n : n + 1])), n


@pytest.mark.parametrize("setting", specs.SETTINGS)
@pytest.mark.parametrize("batch, tokens", [(3, 41), (2, 64), (5, 1), (4, 200)])
def test_batch_equals_packed_sequences(setting, batch, tokens, device):
    inputs = random_inputs(tokens, 2, batch=batch, device=device)
    out, state = run(inputs, setting)
    assert same((out.flatten(0, 1)[None], state), run(packed(inputs), setting))
    assert right((out, state), inputs, setting)


# ---- kinds -------------------------------------------------------------------------------------------------------------
PACKED_KINDS = [
    *(("exact", kinds) for kinds in specs.EXACT_PACKED),
    *(("robust", kinds) for kinds in specs.ROBUST_PACKED),
    *(("wy64", kinds) for kinds in specs.WY64_PACKED),
    *(("wy64 replay", kinds) for kinds in specs.WY64_REPLAY if kinds.cu_seqlens),
]


@pytest.mark.parametrize("setting, kinds", PACKED_KINDS)
def test_every_kind_of_state(setting, kinds, device):
    inputs = inputs_of(kinds, offsets_of([33, 0, *LENGTHS, 1100]), device)
    found = run(inputs, setting, final=DTYPES[kinds.final_state])
    assert found[0].isfinite().all() and right(found, inputs, setting)


@pytest.mark.parametrize("kinds", [kinds for kinds in specs.WY64 if kinds.cu_seqlens is None])
def test_every_kind_of_state_of_a_batch(kinds, device):
    inputs = random_inputs(150, 2, batch=2, state=DTYPES[kinds.initial_state], device=device)
    assert right(run(inputs, "wy64", final=DTYPES[kinds.final_state]), inputs, "wy64")


@pytest.mark.parametrize("offsets", [[0, 0, 5, 5, 21], [0, 0, 0], [0, 0, 0, 16, 16]])
@pytest.mark.parametrize("setting, kinds", PACKED_KINDS)
def test_sequences_without_tokens(setting, kinds, offsets, device):
    inputs, final = inputs_of(kinds, offsets, device), DTYPES[kinds.final_state]
    out, state = run(inputs, setting, final=final)
    assert out.shape == inputs["v"].shape and out.isfinite().all()
    if setting == "exact":
        assert same((out, state), expected(inputs, final))
    if final is not None:
        initial = inputs["initial_state"]
        initial = torch.zeros_like(state) if initial is None else initial
        initial = initial.bfloat16() if setting == "exact" else initial
        for n in range(len(offsets) - 1):
            assert torch.equal(state[n], initial[n].to(final)) == (offsets[n] == offsets[n + 1])


@pytest.mark.parametrize("setting", specs.SETTINGS)
@pytest.mark.parametrize("kinds", [specs.STANDARD, specs.NO_INITIAL])
def test_no_tokens_in_a_batch(kinds, setting, device):
    inputs = random_inputs(0, 2, batch=3, state=DTYPES[kinds.initial_state], device=device)
    out, state = run(inputs, setting)
    initial = inputs["initial_state"]
    assert out.numel() == 0 and torch.equal(state, torch.zeros_like(state) if initial is None else initial)


# ---- what lies past the end ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("setting", specs.SETTINGS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_past_the_end_are_never_read(setting, bad, device):
    inputs = inputs_of(specs.PACKED, [0, 100], device)
    reference = run(inputs, setting)
    for name in ("q", "k", "v", "g", "beta"):
        rest = torch.full_like(inputs[name][:, :28], bad)
        inputs[name] = torch.cat([inputs[name], rest], 1)
    out, state = run(inputs, setting)
    assert same((out[:, :100], state), reference)
    assert (out[:, 100:] == 0).all()  # rows of no sequence


@pytest.mark.parametrize("setting", specs.SETTINGS)
@pytest.mark.parametrize("offsets", [[7, 20, 50], [0, 0, 0], [64, 64, 64], [33, 90, 90]])
def test_rows_of_no_sequence_become_zero(offsets, setting, device):
    inputs = random_inputs(128, 2, cu_seqlens=offsets, device=device)
    out, state = run(inputs, setting)
    assert (out[:, : offsets[0]] == 0).all() and (out[:, offsets[-1] :] == 0).all()
    assert offsets[0] == offsets[-1] or right((out, state), inputs, setting)


@pytest.mark.parametrize("setting", specs.SETTINGS)
def test_a_neighbour_full_of_nan_is_never_read(setting, device):
    inputs = inputs_of(specs.PACKED, [0, 37, 60, 99], device)
    out, state = run(inputs, setting)
    for name in ("q", "k", "v", "g", "beta"):
        inputs[name][:, 37:60] = float("nan")
    inputs["initial_state"][1] = float("nan")
    poisoned, poisoned_state = run(inputs, setting)
    for rows, n in ((slice(0, 37), 0), (slice(60, 99), 2)):
        assert torch.equal(poisoned[:, rows], out[:, rows]) and torch.equal(poisoned_state[n], state[n])


# ---- shapes that broke others ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("setting", specs.SETTINGS)
def test_a_one_token_tail_after_many_tokens(setting, device):
    inputs = inputs_of(specs.PACKED, [0, 8191, 8192], device, heads=64)
    assert right(run(inputs, setting, bv=128), inputs, setting)


@pytest.mark.parametrize("setting", specs.WITHOUT_REPLAY)
def test_a_thousand_sequences_of_sixty_four_heads(setting, device):
    """65,536 tasks: more than the second dimension of a grid may have."""
    lengths = [(7 * n) % 40 for n in range(1024)]
    inputs = inputs_of(specs.PACKED, offsets_of(lengths), device, heads=64)
    few = [0, 63]
    out, state = run(inputs, setting, bv=128)
    alone = run(of_heads(inputs, few), setting, bv=32)
    assert torch.equal(out[:, :, few], alone[0]) and torch.equal(state[:, few], alone[1])
    assert right(alone, of_heads(inputs, few), setting)


@pytest.mark.parametrize("setting", specs.SETTINGS)
def test_ragged_tails_with_states_a_hundred_times(setting, device):
    inputs = inputs_of(specs.PACKED, offsets_of([1238, 1199, 1240, 1216, 1187, 1203, 519]), device, heads=8)
    first = run(inputs, setting, bv=64)
    assert right(first, inputs, setting)
    results = [run(inputs, setting, bv=64) for _ in range(100)]
    finish()
    assert all(same(result, first) for result in results)


@pytest.mark.parametrize("setting", specs.SETTINGS)
def test_changing_lengths(setting, device):
    """Nothing of one call is left over for the next."""
    for lengths in ((256, 128), (2300, 1100)):
        long, short = (random_inputs(tokens, 2, device=device) for tokens in lengths)
        results = [run(inputs, setting) for inputs in (long, short, long, short)]
        assert same(results[0], results[2]) and same(results[1], results[3])
        assert right(results[2], long, setting) and right(results[3], short, setting)


# ---- segments of the time axis -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("chunks", [1, 3, 10])
@pytest.mark.parametrize("setting, bv, kinds", [
    *(row for row in specs.SEGMENTED if row[2] != specs.NO_INITIAL),
    *(("wy64", None, kinds) for kinds in specs.WY64_SEGMENTED),
])  # fmt: skip
def test_segments_change_no_bit(setting, bv, kinds, chunks, device, monkeypatch):
    if kinds.cu_seqlens is None:
        inputs = random_inputs(331, 2, batch=2, state=DTYPES[kinds.initial_state], device=device)
    else:
        inputs = inputs_of(kinds, offsets_of([100, 0, *LENGTHS, 16, 16, 0, 130, 0]), device)
    final = DTYPES[kinds.final_state]
    # kinds that are listed only in segments are compared with the reference alone
    whole = expected(inputs, final) if setting == "exact" else run(inputs, setting, bv, final)
    in_segments_of(monkeypatch, setting, chunks, heads=2)
    assert same(run(inputs, setting, bv, final), whole)


@pytest.mark.parametrize("setting", ["exact", "wy64"])
def test_a_long_call_runs_in_segments_by_itself(setting, device):
    heads, tokens = 96, 32_768
    inputs = random_inputs(tokens, heads, state=None, device=device)
    kernel = specs.family_of(setting)
    record = FAMILIES[kernel].record
    in_one = record.workspace_bytes(record.slots(tokens, 1, tokens), heads)
    assert geometry.workspace_bytes(tokens, 1, heads, tokens, kernel) <= planning.workspace_limit() < in_one
    torch.cuda.reset_peak_memory_stats(device)
    base = torch.cuda.memory_allocated(device)
    out, state = fwd_of(inputs) if setting == "exact" and sm_count(device) == specs.SM_COUNT else run(inputs, setting, bv=128)
    used = torch.cuda.max_memory_allocated(device) - base
    assert used < planning.workspace_limit() + out.nbytes + 4 * state.nbytes
    few = [0, 95]
    alone = run(of_heads(inputs, few), setting, bv=32)
    assert torch.equal(out[:, :, few], alone[0]) and torch.equal(state[:, few], alone[1])


def sm_count(device):
    return torch.cuda.get_device_properties(device).multi_processor_count


@pytest.mark.parametrize("setting", specs.SETTINGS)
def test_two_calls_equal_one(setting, device):
    inputs = random_inputs(2048, 2, device=device)
    assert not torch.equal(inputs["initial_state"], inputs["initial_state"].mT)
    whole = run(inputs, setting)
    first = run(cut(inputs, 0, 1024), setting)
    second = run(cut(inputs, 1024, 2048, initial_state=first[1]), setting)
    assert torch.equal(torch.cat([first[0], second[0]], 1), whole[0]) and torch.equal(second[1], whole[1])
    swapped = run(cut(inputs, 1024, 2048, initial_state=first[1].mT.contiguous()), setting)
    assert relative_error(swapped[0][:, :64], second[0][:, :64]) > 0.1  # the layout matters
