"""Batches, packed sequences, tails, sequences without tokens, states of every kind, segments of the time axis."""

import time

import pytest
import torch
from golden import relative_error
from gpu import specs
from gpu.launching import expected, fwd_of, run, same
from gpu.specs import Kinds
from kda_inputs import ROBUST, cut, of_heads, packed, random_inputs, sequence

from fla_kda_backend import op
from fla_kda_backend.kernels.shared import record16
from fla_kda_backend.reference import exact

pytestmark = pytest.mark.gpu

DTYPES = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16, "int32": torch.int32, "int64": torch.int64}
LENGTHS = [1, 15, 16, 17, 63, 64, 65]


def offsets_of(lengths):
    return [sum(lengths[:n]) for n in range(len(lengths) + 1)]


def inputs_of(kinds, offsets, device, heads=2, **more):
    return random_inputs(offsets[-1], heads, cu_seqlens=offsets, cu_dtype=DTYPES[kinds.cu_dtype],
                         state=DTYPES[kinds.initial], device=device, **more)  # fmt: skip


def close_to_reference(found, inputs, limit=5e-3):
    """The robust setting, whose sums are taken in another order than the reference's."""
    reference = exact.forward(**inputs, **ROBUST)
    return all(b is None or relative_error(a, b) < limit for a, b in zip(reference, found))


# ---- lengths ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("arithmetic", specs.SETTINGS)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_tail(tokens, arithmetic, device):
    inputs = random_inputs(tokens, 3, device=device)
    found = run(inputs, arithmetic)
    assert same(found, expected(inputs)) if arithmetic == "exact" else close_to_reference(found, inputs)


@pytest.mark.parametrize("arithmetic", specs.SETTINGS)
@pytest.mark.parametrize("bv", specs.BVS)
def test_packed_sequences_equal_each_by_itself(arithmetic, bv, device):
    inputs = inputs_of(specs.PACKED, offsets_of([*LENGTHS, 500, 0, 31]), device)
    out, state = run(inputs, arithmetic, bv)
    if arithmetic == "exact":
        assert same((out, state), expected(inputs))
    for n in range(len(LENGTHS) + 3):
        first, end = inputs["cu_seqlens"][n : n + 2].tolist()
        alone = sequence(inputs, n)
        if end == first:
            initial = alone["initial_state"]
            assert torch.equal(state[n : n + 1], initial if arithmetic == "robust" else initial.bfloat16().float())
        else:
            assert same(run(alone, arithmetic), (out[:, first:end], state[n : n + 1])), n


@pytest.mark.parametrize("arithmetic", specs.SETTINGS)
@pytest.mark.parametrize("batch, tokens", [(3, 41), (2, 64), (5, 1), (4, 200)])
def test_batch_equals_packed_sequences(arithmetic, batch, tokens, device):
    inputs = random_inputs(tokens, 2, batch=batch, device=device)
    out, state = run(inputs, arithmetic)
    assert same((out.flatten(0, 1)[None], state), run(packed(inputs), arithmetic))
    if arithmetic == "exact":
        assert same((out, state), expected(inputs))


# ---- kinds -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kinds", specs.EXACT_PACKED)
def test_exact_with_every_kind_of_state(kinds, device):
    inputs = inputs_of(kinds, offsets_of([33, 0, *LENGTHS]), device)
    final = DTYPES[kinds.final]
    assert same(run(inputs, final=final), expected(inputs, final))


@pytest.mark.parametrize("kinds", specs.ROBUST_PACKED)
def test_robust_with_every_kind_of_state(kinds, device):
    inputs = inputs_of(kinds, offsets_of([33, 0, *LENGTHS]), device)
    found = run(inputs, "robust", final=DTYPES[kinds.final])
    assert found[0].isfinite().all() and close_to_reference(found, inputs)


@pytest.mark.parametrize("offsets", [[0, 0, 5, 5, 21], [0, 0, 0], [0, 0, 0, 16, 16]])
@pytest.mark.parametrize("kinds", [*specs.EXACT_PACKED, *(("robust", kinds) for kinds in specs.ROBUST_PACKED)])
def test_sequences_without_tokens(kinds, offsets, device):
    arithmetic, kinds = ("exact", kinds) if isinstance(kinds, Kinds) else kinds
    inputs, final = inputs_of(kinds, offsets, device), DTYPES[kinds.final]
    out, state = run(inputs, arithmetic, final=final)
    assert out.shape == inputs["v"].shape and out.isfinite().all()
    if arithmetic == "exact":
        assert same((out, state), expected(inputs, final))
    if final is not None:
        initial = inputs["initial_state"]
        initial = torch.zeros_like(state) if initial is None else initial
        initial = initial.bfloat16() if arithmetic == "exact" else initial
        for n in range(len(offsets) - 1):
            assert torch.equal(state[n], initial[n].to(final)) == (offsets[n] == offsets[n + 1])


@pytest.mark.parametrize("arithmetic", specs.SETTINGS)
@pytest.mark.parametrize("kinds", [specs.STANDARD, specs.NO_INITIAL])
def test_no_tokens_in_a_batch(kinds, arithmetic, device):
    inputs = random_inputs(0, 2, batch=3, state=DTYPES[kinds.initial], device=device)
    out, state = run(inputs, arithmetic)
    initial = inputs["initial_state"]
    assert out.numel() == 0 and torch.equal(state, torch.zeros_like(state) if initial is None else initial)


# ---- what lies past the end ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("arithmetic", specs.SETTINGS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_past_the_end_are_never_read(arithmetic, bad, device):
    inputs = inputs_of(specs.PACKED, [0, 100], device)
    reference = run(inputs, arithmetic)
    for name in ("q", "k", "v", "g", "beta"):
        rest = torch.full_like(inputs[name][:, :28], bad)
        inputs[name] = torch.cat([inputs[name], rest], 1)
    out, state = run(inputs, arithmetic)
    assert same((out[:, :100], state), reference)
    assert (out[:, 100:] == 0).all()  # rows of no sequence


@pytest.mark.parametrize("arithmetic", specs.SETTINGS)
@pytest.mark.parametrize("offsets", [[7, 20, 50], [0, 0, 0], [64, 64, 64], [33, 90, 90]])
def test_rows_of_no_sequence_become_zero(offsets, arithmetic, device):
    inputs = random_inputs(128, 2, cu_seqlens=offsets, device=device)
    out, state = run(inputs, arithmetic)
    assert (out[:, : offsets[0]] == 0).all() and (out[:, offsets[-1] :] == 0).all()
    if arithmetic == "exact":
        assert same((out, state), expected(inputs))


@pytest.mark.parametrize("arithmetic", specs.SETTINGS)
def test_a_neighbour_full_of_nan_is_never_read(arithmetic, device):
    inputs = inputs_of(specs.PACKED, [0, 37, 60, 99], device)
    out, state = run(inputs, arithmetic)
    for name in ("q", "k", "v", "g", "beta"):
        inputs[name][:, 37:60] = float("nan")
    inputs["initial_state"][1] = float("nan")
    poisoned, poisoned_state = run(inputs, arithmetic)
    for rows, n in ((slice(0, 37), 0), (slice(60, 99), 2)):
        assert torch.equal(poisoned[:, rows], out[:, rows]) and torch.equal(poisoned_state[n], state[n])


# ---- shapes that broke others ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("arithmetic", specs.SETTINGS)
def test_a_one_token_tail_after_many_tokens(arithmetic, device):
    inputs = inputs_of(specs.PACKED, [0, 8191, 8192], device, heads=64)
    found = run(inputs, arithmetic, bv=128)
    assert same(found, expected(inputs)) if arithmetic == "exact" else close_to_reference(found, inputs)


@pytest.mark.parametrize("arithmetic", specs.SETTINGS)
def test_a_thousand_sequences_of_sixty_four_heads(arithmetic, device):
    """65,536 tasks: more than the second dimension of a grid may have."""
    lengths = [(7 * n) % 40 for n in range(1024)]
    inputs = inputs_of(specs.PACKED, offsets_of(lengths), device, heads=64)
    few = [0, 63]
    out, state = run(inputs, arithmetic, bv=128)
    alone = run(of_heads(inputs, few), arithmetic, bv=32)
    assert torch.equal(out[:, :, few], alone[0]) and torch.equal(state[:, few], alone[1])
    if arithmetic == "exact":
        assert same((out, state), expected(inputs))


@pytest.mark.parametrize("arithmetic", specs.SETTINGS)
def test_ragged_tails_with_states_a_hundred_times(arithmetic, device):
    inputs = inputs_of(specs.PACKED, offsets_of([1238, 1199, 1240, 1216, 1187, 1203, 519]), device, heads=8)
    first = run(inputs, arithmetic, bv=64)
    if arithmetic == "exact":
        assert same(first, expected(inputs))
    results = [run(inputs, arithmetic, bv=64) for _ in range(100)]
    done = torch.cuda.Event()
    done.record()
    limit = time.monotonic() + 20
    while not done.query():
        if time.monotonic() > limit:
            pytest.exit("a kernel hangs: nothing more can run on this GPU", returncode=3)
        time.sleep(0.01)
    assert all(same(result, first) for result in results)


@pytest.mark.parametrize("arithmetic", specs.SETTINGS)
def test_changing_lengths(arithmetic, device):
    """Nothing of one call is left over for the next."""
    long, short = random_inputs(256, 2, device=device), random_inputs(128, 2, device=device)
    results = [run(inputs, arithmetic) for inputs in (long, short, long, short)]
    assert same(results[0], results[2]) and same(results[1], results[3])
    if arithmetic == "exact":
        assert same(results[2], expected(long)) and same(results[3], expected(short))


# ---- segments of the time axis -------------------------------------------------------------------------------------------
def segments(monkeypatch, chunks, heads):
    monkeypatch.setattr(op, "WORKSPACE_LIMIT", chunks * heads * record16.RECORD_BYTES)


@pytest.mark.parametrize("chunks", [1, 3, 10])
@pytest.mark.parametrize("arithmetic, bv, kinds", [row for row in specs.SEGMENTED if row[2] != specs.NO_INITIAL])
def test_segments_change_no_bit(arithmetic, bv, kinds, chunks, device, monkeypatch):
    if kinds.cu_dtype is None:
        inputs = random_inputs(331, 2, batch=2, device=device)
    else:
        inputs = inputs_of(kinds, offsets_of([100, 0, *LENGTHS, 16, 16, 0, 130, 0]), device)
    final = DTYPES[kinds.final]
    # kinds that are listed only in segments are compared with the reference alone
    whole = expected(inputs, final) if arithmetic == "exact" else run(inputs, arithmetic, bv, final)
    segments(monkeypatch, chunks, heads=2)
    assert same(run(inputs, arithmetic, bv, final), whole)


def test_a_long_call_runs_in_segments_by_itself(device):
    heads, tokens = 96, 32_768
    inputs = random_inputs(tokens, heads, state=None, device=device)
    assert op.workspace_bytes(tokens, 1, heads, tokens) < record16.slots(tokens, 1, tokens) * heads * record16.RECORD_BYTES
    torch.cuda.reset_peak_memory_stats(device)
    base = torch.cuda.memory_allocated(device)
    out, state = fwd_of(inputs) if specs.SM_COUNT == sm_count(device) else run(inputs, bv=128)
    used = torch.cuda.max_memory_allocated(device) - base
    assert used < op.WORKSPACE_LIMIT + out.nbytes + 4 * state.nbytes
    few = [0, 95]
    alone = run(of_heads(inputs, few), bv=32)
    assert torch.equal(out[:, :, few], alone[0]) and torch.equal(state[:, few], alone[1])


def sm_count(device):
    return torch.cuda.get_device_properties(device).multi_processor_count


@pytest.mark.parametrize("arithmetic", specs.SETTINGS)
def test_two_calls_equal_one(arithmetic, device):
    inputs = random_inputs(2048, 2, device=device)
    assert not torch.equal(inputs["initial_state"], inputs["initial_state"].mT)
    whole = run(inputs, arithmetic)
    first = run(cut(inputs, 0, 1008), arithmetic)
    second = run(cut(inputs, 1008, 2048, initial_state=first[1]), arithmetic)
    assert torch.equal(torch.cat([first[0], second[0]], 1), whole[0]) and torch.equal(second[1], whole[1])
    swapped = run(cut(inputs, 1008, 2048, initial_state=first[1].mT.contiguous()), arithmetic)
    assert relative_error(swapped[0][:, :64], second[0][:, :64]) > 0.1  # the layout matters
