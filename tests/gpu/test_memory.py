"""A GPU whose memory is short: shorter segments, then Triton, then these kernels again; in a graph capture too."""

import contextlib

import pytest
import torch
from gpu.launching import finish, same
from kda_inputs import chunk_kda_arguments, random_inputs

from fla_kda_backend import dispatch_log, geometry, planning, register
from fla_kda_backend.call import parse

pytestmark = pytest.mark.gpu
TOKENS, HEADS = 8192, 32  # 292 MB of workspace


@contextlib.contextmanager
def free(device, size):
    """So many bytes can be allocated, from now on."""
    finish()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + size) / total, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


@pytest.fixture
def call(device):
    from fla.ops.kda import chunk_kda

    assert register()
    arguments = chunk_kda_arguments(random_inputs(TOKENS, HEADS, state=None, device=device))

    def call():
        with torch.inference_mode(), dispatch_log.capture() as seen:
            result = chunk_kda(**arguments)
        (record,) = seen
        return result, record

    call.arguments = arguments
    return call


def test_segments_while_memory_is_short(call, device):
    whole, first = call()
    assert "segments" not in dict(first.params)
    with free(device, 200 << 20):
        short, record = call()
    assert record.outcome == dispatch_log.ACCEPTED and dict(record.params)["segments"] > 1
    assert record.message.startswith("out of memory, therefore in ") and same(short, whole)
    again, record = call()
    assert record == first._replace(time=record.time) and same(again, whole)


def test_segments_in_a_capture(call, device):
    whole, _ = call()
    parsed = parse((), call.arguments)
    with free(device, 200 << 20):
        call()  # the kernel of segments is compiled now
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured, record = call()
    assert parsed.heads == HEADS and dict(record.params)["segments"] > 1
    graph.replay()
    finish()
    assert same(captured, whole)


def test_a_capture_without_memory_leaves_the_process_usable(call, device):
    whole, _ = call()
    finish()
    with free(device, 8 << 20), pytest.raises(torch.OutOfMemoryError):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            call()
    assert same(call()[0], whole)


@pytest.mark.parametrize("kernel", ["wy64", "column_split"])
def test_peak_is_the_documented_one(kernel, call, device, monkeypatch):
    monkeypatch.setenv("FLA_KDA_CUTE_MODE", "exact" if kernel == "column_split" else "auto")
    call()
    parsed = parse((), call.arguments)
    properties = torch.cuda.get_device_properties(device)
    if kernel == "wy64":
        plan = planning.wy64(TOKENS, 1, HEADS, properties.multi_processor_count, planning.Variant.of(parsed))
    else:
        plan = planning.column_split("exact", 1, HEADS, properties.multi_processor_count, planning.Variant.of(parsed))
    expected = geometry.peak_bytes(parsed, geometry.geometry(parsed, plan, "sm_90a"))
    torch.cuda.reset_peak_memory_stats(device)
    base = torch.cuda.memory_allocated(device)
    call()
    used = torch.cuda.max_memory_allocated(device) - base
    assert expected <= used <= expected + (4 << 20)  # the allocator rounds up
