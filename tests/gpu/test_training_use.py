"""Training calls as they are used: graphs, streams, checkpoints, hooks, failures, memory."""

import gc
import logging

import pytest
import torch
from call_table import FLASHKDA
from fla.ops.kda import chunk_kda
from gpu import specs
from gpu.launching import finish
from gpu.training import (
    PACKED,
    differentiate,
    equal,
    errors,
    gradients_of_results,
    here,
    leaves_of,
    on_triton,
    small,
    strict,  # noqa: F401  # of each test
    training_call,
)
from torch.utils.checkpoint import checkpoint

from fla_kda_backend import dispatch_log, memo, op
from fla_kda_backend.backend import StrictModeError
from fla_kda_backend.reference.backward import DIFFERENTIABLE

pytestmark = pytest.mark.gpu


# ---- graphs and streams ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "kind, lengths",
    [(FLASHKDA, (150, 150)), (PACKED, (64, 0, 300)), (FLASHKDA, (2100,))],
    ids=["fixed", "packed", "long"],
)
def test_a_graph_of_a_whole_step(kind, lengths, device):
    call = training_call(kind, lengths, 2, device)
    grads = gradients_of_results(call)
    expected = here(call, *grads)
    given, leaves = leaves_of(call)

    def step():
        results = chunk_kda(**given)[:2]
        return results, torch.autograd.grad(results, list(leaves.values()), grads)

    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results, found = step()
    for _ in range(3):
        for x in found:
            x.fill_(float("nan"))
        graph.replay()
        finish()
        captured = tuple(x.detach() for x in results), dict(zip(leaves, found))
        assert equal(captured, expected)
    other = training_call(kind, lengths, 2, device, seed=1)
    wanted = here(other, *grads)
    with torch.no_grad():
        for name in DIFFERENTIABLE:
            call[name].copy_(other[name])  # the leaves share their memory
    graph.replay()
    finish()
    assert equal((tuple(x.detach() for x in results), dict(zip(leaves, found))), wanted)


def test_two_streams(device):
    calls = [training_call(FLASHKDA, (700, 700), 6, device, seed=seed) for seed in range(2)]
    pairs = [gradients_of_results(call, seed) for seed, call in enumerate(calls)]
    expected = [here(call, *grads) for call, grads in zip(calls, pairs)]
    streams, found = [torch.cuda.Stream(device) for _ in calls], []
    torch.cuda.synchronize()
    for _ in range(10):
        for call, grads, stream in zip(calls, pairs, streams):
            with torch.cuda.stream(stream):
                found.append(differentiate(chunk_kda, call, *grads))
    torch.cuda.synchronize()
    assert all(equal(each, expected[n % 2]) for n, each in enumerate(found))


def test_nothing_waits_for_the_gpu(device):
    call = training_call(PACKED, (64, 0, 300), 2, device)
    grads = gradients_of_results(call)
    differentiate(chunk_kda, call, *grads)
    torch.cuda.set_sync_debug_mode("error")
    try:
        differentiate(chunk_kda, call, *grads)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- what torch does around a call -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant, device):
    call = training_call(FLASHKDA, (200,), 2, device)
    grads = gradients_of_results(call)
    expected = here(call, *grads)
    given, leaves = leaves_of(call)

    def layer(*tensors):
        return chunk_kda(**given | dict(zip(leaves, tensors)))[:2]

    results = checkpoint(layer, *leaves.values(), use_reentrant=use_reentrant)
    torch.autograd.backward(results, grads)
    found = tuple(x.detach() for x in results), {name: x.grad for name, x in leaves.items()}
    assert equal(found, expected)


def test_hooks_on_saved_tensors(device):
    call = training_call(FLASHKDA, (200,), 2, device)
    grads = gradients_of_results(call)
    expected = here(call, *grads)
    with torch.autograd.graph.save_on_cpu():
        assert equal(here(call, *grads), expected)


def test_a_tensor_that_is_changed_in_place_raises(device):
    call = training_call(FLASHKDA, (200,), 2, device)
    given, leaves = leaves_of(call)
    given["v"] = leaves["v"] * 1
    results = chunk_kda(**given)[:2]
    with torch.no_grad():
        given["v"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(results, gradients_of_results(call))


def test_a_second_derivative_raises(device):
    call = training_call(specs.TRAINED, (200,), 2, device)
    given, leaves = leaves_of(call)
    out = chunk_kda(**given)[0]
    (first,) = torch.autograd.grad(out, [leaves["v"]], gradients_of_results(call)[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable|does not require grad"):
        first.sum().backward()


def test_a_backward_twice(device):
    call = training_call(FLASHKDA, (200,), 2, device)
    grads = gradients_of_results(call)
    _, expected = here(call, *grads)
    given, leaves = leaves_of(call)
    results = chunk_kda(**given)[:2]
    for _ in range(2):
        found = torch.autograd.grad(results, list(leaves.values()), grads, retain_graph=True)
        assert all(map(torch.equal, found, expected.values()))


def test_autocast_changes_nothing(device):
    call = training_call(FLASHKDA, (200,), 2, device)
    grads = gradients_of_results(call)
    expected = here(call, *grads)
    with torch.autocast("cuda", torch.bfloat16):
        assert equal(here(call, *grads), expected)


def test_nothing_but_the_inputs_is_kept(device):
    call = training_call(FLASHKDA, (1500,), 32, device)
    given, leaves = leaves_of(call)
    chunk_kda(**given)
    gc.collect()
    before = torch.cuda.memory_allocated(device)
    results = chunk_kda(**given)[:2]
    own = sum(-(-x.nbytes // 512) * 512 for x in results)
    assert torch.cuda.memory_allocated(device) - before <= own
    assert all(x.requires_grad for x in results) and leaves


# ---- failures ------------------------------------------------------------------------------------------------------------
def planted(monkeypatch):
    """From now on no backward can be launched."""
    launcher = op.launcher

    def fail(*arguments):
        raise RuntimeError("a planted failure")

    monkeypatch.setattr(op, "launcher", lambda spec: fail if spec.family == "wy64_backward" else launcher(spec))
    monkeypatch.setattr("fla_kda_backend.backend._warned", set())
    memo.clear()


def test_a_failing_backward_falls_back(device, monkeypatch, caplog):
    call = training_call(FLASHKDA, (200,), 2, device)
    grads = gradients_of_results(call)
    expected = on_triton(call, *grads, monkeypatch)
    with torch.no_grad():
        out, _ = chunk_kda(**call)
    planted(monkeypatch)
    monkeypatch.setenv("FLA_KDA_CUTE_STRICT", "0")
    with caplog.at_level(logging.WARNING, "fla_kda_backend"), dispatch_log.capture() as seen:
        results, found = differentiate(chunk_kda, call, *grads)
    assert torch.equal(results[0], out)
    assert [record.outcome for record in seen] == [dispatch_log.ACCEPTED, dispatch_log.FAILED]
    assert sum("a planted failure" in record.getMessage() for record in caplog.records) == 1
    small(found, call, grads, 2e-2)
    assert max(errors(found, {name: x.double() for name, x in expected.items()}).values()) < 2e-2


def test_a_failing_backward_raises_in_strict_mode(device, monkeypatch):
    call = training_call(FLASHKDA, (200,), 2, device)
    planted(monkeypatch)
    with pytest.raises(RuntimeError, match="a planted failure"):
        differentiate(chunk_kda, call, *gradients_of_results(call))


def test_the_switch(device, monkeypatch):
    call = training_call(FLASHKDA, (200,), 2, device)
    monkeypatch.setenv("FLA_KDA_CUTE_TRAINING", "0")
    with pytest.raises(StrictModeError):
        differentiate(chunk_kda, call, *gradients_of_results(call))
    with torch.no_grad():
        assert chunk_kda(**call)[0].isfinite().all()
    monkeypatch.setenv("FLA_KDA_CUTE_STRICT", "0")
    with dispatch_log.capture() as seen:
        _, found = differentiate(chunk_kda, call, *gradients_of_results(call))
    assert [record.outcome for record in seen] == [dispatch_log.DECLINED]
    small(found, call, gradients_of_results(call), 2e-2)


# ---- memory ----------------------------------------------------------------------------------------------------------------
def test_peak_beside_inputs_is_well_below_that_of_triton(device, monkeypatch, record_property):
    call = training_call(specs.TRAINED, (8192,), 32, device)
    d_out, _ = gradients_of_results(call)

    def peak(run):
        run()
        gc.collect()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20

    def theirs():
        with monkeypatch.context() as patched:
            patched.setenv("FLA_KDA_CUTE", "0")
            differentiate(chunk_kda, call, d_out, None)

    found = peak(lambda: differentiate(chunk_kda, call, d_out, None)), peak(theirs)
    record_property("peak", found)
    print("\npeak MiB: ours {:.0f}, Triton {:.0f}".format(*found))
    assert found[0] <= 0.7 * found[1]
