"""Memory of a call: how much it takes at most, what the user's limit does to it, and what happens where there is none.

Launches are emulated on the CPU, see emulated_launch.py.
"""

import gc
import math
import types
import weakref
from contextlib import contextmanager

import emulated_launch
import kda_inputs
import pytest
import torch
from call_table import KIMI, Case
from calls import H200, INFERENCE, prefill, tensor
from kda_calls import call_of
from kda_inputs import random_inputs

import fla_kda_backend
from fla_kda_backend import backend, config, dispatch_log, geometry, memo, op, planning
from fla_kda_backend.call import DEVICE_INPUTS, parse
from fla_kda_backend.compiling import background
from fla_kda_backend.kernels.families import FAMILIES
from fla_kda_backend.kernels.variant import Variant
from fla_kda_backend.kernels.wy64 import contract as wy64
from fla_kda_backend.reference import exact

MIB = 1 << 20
CARRIES = 2 * 128 * 128 * 4  # bytes per value head


@pytest.fixture
def launched(monkeypatch):
    return emulated_launch.without_gpu(monkeypatch)


def sizes_of(facts=H200, **changes):
    call = parse((), prefill(**changes))
    return call, geometry.geometry(call, planning.plan(call, facts), "sm_90a")


# ---- what a call takes -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["auto", "exact"])
@pytest.mark.parametrize("limit", ["64", "2048", "100000"])
@pytest.mark.parametrize("heads", [1, 6, 96])
@pytest.mark.parametrize("tokens", [1, 64, 8192, 174_763, 1 << 20])
def test_peak_up_to_a_million_tokens(monkeypatch, tokens, heads, limit, mode):
    monkeypatch.setenv(config.WORKSPACE_MIB.name, limit)
    call, sizes = sizes_of(H200._replace(mode=mode), batch=1, tokens=tokens, heads=heads)
    results = tokens * heads * 256 + heads * 128 * 128 * 4
    record = FAMILIES[sizes.kernel].record
    workspace = math.prod(sizes.workspace.shape)
    replay = sizes.params.get("replay", False)
    assert workspace == op.workspace_bytes(tokens, 1, heads, tokens, sizes.kernel, replay)
    assert workspace <= max(int(limit) * MIB + replay * heads * 131072, record.workspace_bytes(1, heads))
    carries = CARRIES * heads if len(sizes.segments) > 1 else 0
    assert geometry.peak_bytes(call, sizes) == results + workspace + carries


@contextmanager
def counted(monkeypatch):
    """Bytes of what op allocates."""
    made, empty, clone = [], torch.empty, torch.Tensor.clone
    with monkeypatch.context() as patched:
        patched.setattr(op.torch, "empty", lambda *a, **k: made.append(x := empty(*a, **k)) or x)
        patched.setattr(torch.Tensor, "clone", lambda *a, **k: made.append(x := clone(*a, **k)) or x)
        yield lambda: sum(x.nbytes for x in made)


@pytest.mark.parametrize("layout", ["whole", "fused", "transposed"])
@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
@pytest.mark.parametrize("limit", [None, 0])
def test_peak_is_what_is_allocated(launched, monkeypatch, layout, capability, limit):
    if limit is not None:
        monkeypatch.setenv(config.WORKSPACE_MIB.name, str(limit))
    call = parse((), call_of(Case(KIMI, layout=layout, tail=17, before=64, regime="normal")))
    plan = planning.plan(call, INFERENCE._replace(capability=capability))
    sizes = geometry.geometry(call, plan, "sm_90a")
    monkeypatch.setattr(emulated_launch, "launch", lambda spec, *arguments: None)
    inputs = (*(getattr(call, name) for name in DEVICE_INPUTS), call.cu_seqlens_cpu)
    with counted(monkeypatch) as allocated:
        op.Launch(sizes)(*inputs)
        assert allocated() == geometry.peak_bytes(call, sizes)


# ---- the limit -------------------------------------------------------------------------------------------------------
def test_the_limit_of_the_user(monkeypatch):
    for mib, segments in ((None, 1), ("2048", 1), ("512", 2), ("0", 128)):
        if mib is not None:
            monkeypatch.setenv(config.WORKSPACE_MIB.name, mib)
        _, sizes = sizes_of(batch=1, tokens=8192, heads=96)
        assert len(sizes.segments) == segments
        assert sizes.params.get("segments", 1) == segments and sizes.params["overlap"] == (segments == 1)
        assert sizes.spec.schedule == sizes.plan.schedule and sizes.spec.schedule.segmented == (segments > 1)


def test_the_schedule_depends_on_no_free_memory(monkeypatch):
    def absent(*arguments, **keywords):
        raise AssertionError("not to be asked")

    for name in ("mem_get_info", "memory_allocated", "memory_reserved", "memory_stats"):
        monkeypatch.setattr(torch.cuda, name, absent)
    sizes_of(batch=1, tokens=1 << 20, heads=96)


def test_verdicts_of_another_limit_are_not_given(monkeypatch, launched):
    arguments = prefill(device="cpu", batch=1, tokens=130, heads=2)
    monkeypatch.setattr(backend.facts, "gather", lambda call: H200)
    found = []
    for mib in ("2048", "0", "2048", "0", "0", "0"):
        monkeypatch.setenv(config.WORKSPACE_MIB.name, mib)
        found.append(len(backend.decide((), arguments, *backend.identity((), arguments)).geometry.segments))
    assert found == [1, 3, 1, 3, 3, 3] and len(memo._verdicts) == 2


@pytest.mark.parametrize("packed", [False, True])
def test_the_log_shows_what_is_launched(packed):
    """1,024 sequences of one chunk, 32 heads: more than the workspace may have, so prepare may not compute them whole."""
    changes = {"batch": 1024, "tokens": 64}
    if packed:
        changes = {"batch": 1, "tokens": 65536, "cu_seqlens": tensor(1025, dtype=torch.int32)}
    call, sizes = sizes_of(heads=32, initial_state=None, **changes)
    params = dict(dispatch_log.entry("accepted", "accepted", "", call, sizes).content[4])
    assert len(sizes.segments) == params["segments"] == (3 if packed else 2)
    assert "direct" not in params and not sizes.spec.schedule.direct and sizes.spec.schedule.segmented
    _, fewer = sizes_of(heads=4, initial_state=None, **changes)
    assert fewer.params["direct"] and "segments" not in fewer.params and fewer.spec.schedule.direct


# ---- out of memory ---------------------------------------------------------------------------------------------------
@pytest.fixture
def memory(monkeypatch, launched):
    """.free bytes are there for one workspace, None: any number; .asked are the sizes that were asked for."""
    memory, outputs = types.SimpleNamespace(free=None, asked=[], launched=launched), []  # outputs: of attempts that failed

    def allocate(shape, strides, dtype):
        if dtype == torch.uint8:
            memory.asked.append(shape[0])
            if memory.free is not None and shape[0] > memory.free:
                outputs.append(memory.output)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate much.")
        x = torch.empty(shape, dtype=dtype)
        if dtype == torch.bfloat16:
            assert not any(output() is not None for output in outputs), "the attempt before still holds memory"
            memory.output = weakref.ref(x)
        return x

    memory.output = None
    monkeypatch.setattr(op.Launch, "_allocator", lambda self: allocate)
    return memory


@pytest.fixture
def world(memory, monkeypatch):
    import fla.ops.kda.chunk as chunk

    monkeypatch.setattr(backend.facts, "gather", lambda call: H200)
    monkeypatch.setattr(backend, "_warned", set())
    monkeypatch.setattr(chunk.ChunkKDAFunction, "apply", lambda *args: ("FLA's Triton", None))
    assert fla_kda_backend.register()
    inputs = random_inputs(64 * 9 + 5, 2, state=None)
    memory.inputs = inputs
    memory.call = lambda: chunk.chunk_kda(**kda_inputs.chunk_kda_arguments(inputs))
    memory.per_chunk = FAMILIES["wy64"].record.workspace_bytes(1, 2)
    with dispatch_log.capture() as memory.seen, torch.no_grad():
        yield memory


@pytest.mark.parametrize("chunks, segments", [(10, 1), (9, 2), (5, 2), (4, 4), (3, 4), (2, 5), (1, 10)])
def test_segments_are_halved_until_they_fit(world, chunks, segments):
    world.free = chunks * world.per_chunk
    results = [world.call() for _ in range(3)]
    reference = exact.forward(**world.inputs, arithmetic="robust")
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, reference))
    assert len(world.launched) == 3 * segments
    for record in world.seen:
        params = dict(record.params)
        assert record.outcome == "accepted" and params.get("segments", 1) == segments
        assert segments == 1 or record.message == f"out of memory, therefore in {segments} segments"
    world.free = None
    world.launched.clear()
    world.call()
    assert (
        len(world.launched) == 1
        and "segments" not in dict(world.seen[-1].params)
        and world.seen[-1].message == "all rules hold"
    )


def test_without_memory_for_a_chunk_it_is_flas_and_then_ours_again(world):
    world.free = world.per_chunk - 1
    assert world.call() == ("FLA's Triton", None)
    assert [size // world.per_chunk for size in world.asked] == [10, 5, 3, 2, 1] and world.launched == []
    assert (world.seen[0].outcome, world.seen[0].message) == (
        "failed", "OutOfMemoryError: CUDA out of memory. Tried to allocate much."
    )  # fmt: skip
    world.free = None
    assert isinstance(world.call()[0], torch.Tensor)


def test_strict_mode_runs_shorter_segments_and_raises_without_memory(world, monkeypatch):
    monkeypatch.setenv(config.STRICT.name, "1")
    world.free = 3 * world.per_chunk
    assert isinstance(world.call()[0], torch.Tensor)
    world.free = 0
    with pytest.raises(torch.OutOfMemoryError):
        world.call()


def test_in_the_background_no_call_waits_for_the_kernels_of_segments(world, monkeypatch):
    asked = []
    monkeypatch.setenv(config.COMPILE.name, "background")
    monkeypatch.setattr(background, "ready", lambda spec: asked.append(spec) or not spec.schedule.segmented)
    world.free = 3 * world.per_chunk
    assert world.call() == ("FLA's Triton", None) and asked[-1].schedule.segmented
    monkeypatch.setattr(background, "ready", lambda spec: True)
    assert isinstance(world.call()[0], torch.Tensor)


def test_nothing_outlives_a_call_in_shorter_segments(world):
    world.free = 3 * world.per_chunk
    world.call()
    held = [weakref.ref(x) for x in world.inputs.values() if isinstance(x, torch.Tensor)]
    world.inputs.clear()
    world.call = None
    gc.collect()
    assert not any(each() is not None for each in held)


@pytest.mark.parametrize("setting", ["exact", "robust", "wy64 replay"])
def test_ops_own_functions_do_the_same(memory, monkeypatch, setting):
    inputs = random_inputs(400, 2)
    call = parse((), kda_inputs.chunk_kda_arguments(inputs))
    if setting == "wy64 replay":
        plan = planning.Plan("wy64", Variant.of(call), wy64.Schedule(replay=True), 132)
    else:
        plan = planning.column_split(setting, 1, 2, 132, Variant.of(call))
    memory.free = 3 * FAMILIES[plan.kernel].record.workspace_bytes(1, 2)
    out, state = op.run(call, plan)
    reference = exact.forward(**inputs, arithmetic="exact" if setting == "exact" else "robust")
    assert torch.equal(out, reference[0]) and torch.equal(state, reference[1]) and len(memory.launched) > 1
    if setting == "exact":
        monkeypatch.setattr(op, "_check_fwd", lambda *arguments: None)
        for given in (out, state):
            given.fill_(float("nan"))
        op.fwd(**inputs, out=out, final_state=state)
        assert torch.equal(out, reference[0]) and torch.equal(state, reference[1])


def test_halves_end_at_one_chunk():
    _, sizes = sizes_of(batch=1, tokens=64 * 100, heads=2)
    seen = []
    while sizes is not None:
        first, *rest = sizes.segments
        assert [first.slot_begin, sizes.segments[-1].slot_end] == [0, 100]
        assert all(a.slot_end == b.slot_begin for a, b in zip(sizes.segments, rest))
        seen.append(first.slot_end)
        sizes = geometry.halved(sizes)
    assert seen == [100, 50, 25, 13, 7, 4, 2, 1]
    _, empty = sizes_of(batch=1, tokens=0, heads=2)
    assert geometry.halved(empty) is None
