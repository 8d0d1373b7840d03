"""Sequences of one chunk that prepare computes by itself: the bits of the chain."""

from dataclasses import replace

import pytest
import torch
from call_table import Case
from calls import H200
from gpu import specs
from gpu.launching import finish, run, same, scratch_is_nan
from kda_calls import call_of
from kda_inputs import random_inputs

from fla_kda_backend import op, planning
from fla_kda_backend.call import parse

pytestmark = pytest.mark.gpu
LENGTHS = (
    [64] * 40, [1, 15, 16, 17, 31, 63, 64, 0, 65, 127, 128, 130, 64, 64, 33, 300, 2], [0, 0, 0], [1], [5, 640, 64, 0],
    [20] * 200,
)  # fmt: skip


def offsets_of(lengths):
    return [sum(lengths[:n]) for n in range(len(lengths) + 1)]


def check(inputs, final):
    chain, direct = (run(inputs, setting, final=final) for setting in ("wy64", specs.DIRECT))
    finish()
    assert all(x is None or x.isfinite().all() for x in direct)
    assert same(direct, chain)


@pytest.mark.parametrize("kinds", [kinds for kinds in specs.WY64_DIRECT if kinds.cu_seqlens], ids=str)
@pytest.mark.parametrize("heads", [1, 5, 12])
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)} sequences")
def test_packed(lengths, heads, kinds, device):
    """Longer and empty ones among them, which the chain computes."""
    dtypes = {"int32": torch.int32, "int64": torch.int64, "fp32": torch.float32, "bf16": torch.bfloat16, None: None}
    inputs = random_inputs(sum(lengths), heads, cu_seqlens=offsets_of(lengths), cu_dtype=dtypes[kinds.cu_seqlens], state=None,
                           device=device)  # fmt: skip
    check(inputs, dtypes[kinds.final_state])


@pytest.mark.parametrize("tokens", [1, 16, 17, 63, 64])
@pytest.mark.parametrize("batch, heads", [(1, 1), (7, 3), (40, 12)])
@pytest.mark.parametrize("final", [torch.float32, None])
def test_of_equal_length(tokens, batch, heads, final, device):
    check(random_inputs(tokens, heads, batch=batch, state=None, device=device), final)


def test_rows_outside_every_sequence_are_cleared(device):
    inputs = random_inputs(200, 3, cu_seqlens=[30, 94, 110, 150], state=None, device=device)
    out, _ = run(inputs, specs.DIRECT)
    assert out.isfinite().all() and not out[:, :30].any() and not out[:, 150:].any() and out[:, 30:150].any()
    check(inputs, torch.float32)


@pytest.mark.parametrize("tail", [1, 17, 64])
def test_states_with_keys_first(tail, device):
    """As chunk_kda plans it: the average sequence has at most one chunk."""
    call = parse((), call_of(Case(specs.KEYS_FIRST, "normal", tail, 0, heads=4), device))
    plan = planning.plan(call, H200)
    assert plan.params["direct"]
    with torch.inference_mode(), scratch_is_nan():
        direct, chain = (op.run(call, plan._replace(schedule=replace(plan.schedule, direct=on))) for on in (True, False))
    assert same(direct, chain) and direct[0].isfinite().all() and direct[1].isfinite().all()
