"""Streams, CUDA graphs, and the host: nothing waits for the GPU."""

import statistics
import time

import pytest
import torch
from gpu import specs
from gpu.launching import expected, fwd_of, outputs, parsed, plan_of, run, same
from kda_inputs import TOKEN_AXIS, random_inputs

from fla_kda_backend import op
from fla_kda_backend.compiling import library
from fla_kda_backend.kernels.variant import Variant

pytestmark = pytest.mark.gpu
SECOND = 2_000_000_000  # cycles that torch.cuda._sleep takes for about a second


def run_call(inputs, setting="robust"):
    """As the backend does; one plan whatever the GPU."""
    call = parsed(inputs)
    return op.run(call, plan_of(setting, variant=Variant.of(call)))


@pytest.mark.parametrize("setting", specs.SETTINGS)
def test_two_streams(setting, device):
    cases = [random_inputs(tokens, 2, seed=seed, device=device) for seed, tokens in enumerate((1500, 2300))]
    references = [run_call(inputs, setting) for inputs in cases]
    streams = [torch.cuda.Stream(device) for _ in cases]
    torch.cuda.synchronize(device)
    results = []
    for _ in range(20):
        for inputs, stream in zip(cases, streams):
            with torch.cuda.stream(stream):
                results.append(run_call(inputs, setting))
    torch.cuda.synchronize(device)
    assert all(same(result, references[n % 2]) for n, result in enumerate(results))


@pytest.mark.parametrize("setting", specs.SETTINGS)
def test_two_graphs_at_once(setting, device):
    """Of so many CTAs that neither finds all SMs free."""
    cases = [random_inputs(2300, 32, seed=seed, device=device) for seed in range(2)]
    references = [run_call(inputs, setting) for inputs in cases]
    graphs, results, streams = [], [], [torch.cuda.Stream(device) for _ in cases]
    for inputs in cases:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            results.append(run_call(inputs, setting))
    for result in results:
        for x in result:
            x.fill_(float("nan"))
    torch.cuda.synchronize(device)
    for _ in range(20):
        for graph, stream in zip(graphs, streams):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize(device)
    assert all(same(result, reference) for result, reference in zip(results, references))


@pytest.mark.parametrize("setting", specs.SETTINGS)
def test_work_is_on_the_current_stream(setting, device):
    """Inputs that another kernel of the same stream is still to write are waited for."""
    inputs = random_inputs(1300, 2, device=device)
    reference = run_call(inputs, setting)
    late = {name: torch.zeros_like(inputs[name]) for name in TOKEN_AXIS}
    stream = torch.cuda.Stream(device)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SECOND // 20)
        for name, x in late.items():
            x.copy_(inputs[name])
        result = run_call(inputs | late, setting)
        for x in late.values():
            x.zero_()  # and what follows waits for the call
    torch.cuda.synchronize(device)
    assert same(result, reference)


@pytest.mark.parametrize("setting", specs.SETTINGS)
@pytest.mark.parametrize("cu_seqlens", [None, [0, 40, 40, 1200, 2331]])
def test_graph_with_changed_inputs(setting, cu_seqlens, device):
    inputs = random_inputs(2331, 2, cu_seqlens=cu_seqlens, cu_dtype=torch.int32, device=device)
    other_offsets = None if cu_seqlens is None else [0, 0, 17, 2300, 2331]
    other = random_inputs(2331, 2, cu_seqlens=other_offsets, cu_dtype=torch.int32, seed=1, device=device)
    references = [run_call(case, setting) for case in (inputs, other)]
    # scale and lower_bound are launch arguments, recorded with the graph; what tensors hold is read at each replay
    static = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run_call(static, setting)
    for case, reference in zip((inputs, other, inputs), (*references, references[0])):
        for name, x in static.items():
            if isinstance(x, torch.Tensor):
                x.copy_(case[name])
        for x in result:
            x.fill_(float("nan"))
        graph.replay()
        assert same(result, reference)


@pytest.mark.parametrize("cu_dtype", [torch.int32, torch.int64])
def test_no_call_waits_for_the_gpu(cu_dtype, device):
    inputs = random_inputs(1331, 2, cu_seqlens=[0, 40, 1331], cu_dtype=cu_dtype, device=device)
    fwd_of(inputs)
    for setting in specs.SETTINGS:
        run_call(inputs, setting)
    out, state = outputs(inputs)
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(SECOND)
        begin = time.perf_counter()
        for setting in specs.SETTINGS:
            run_call(inputs, setting)
        op.fwd(**inputs, out=out, final_state=state)
        took = time.perf_counter() - begin
        busy = not torch.cuda.current_stream(device).query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize(device)
    assert busy and took < 0.2
    assert same((out, state), expected(inputs))


@pytest.mark.parametrize("setting", ["robust", "wy64"])
def test_host_time(setting, device, monkeypatch, record_property):
    monkeypatch.setattr(op, "launcher", library.launcher)  # without this suite's own check
    inputs = random_inputs(64, 2, device=device)
    call = parsed(inputs)
    plan = plan_of(setting, variant=Variant.of(call))
    times = []
    for _ in range(10):
        torch.cuda.synchronize(device)
        for _ in range(50):
            begin = time.perf_counter()
            op.run(call, plan)
            times.append(time.perf_counter() - begin)
    host_us = statistics.median(times) * 1e6
    record_property("host_us", host_us)
    print(f"\nop.run, {setting}: {host_us:.1f} us of host time")
    assert host_us < 120  # the aim is 60 with FLA's dispatch; this bound only catches a trace or a sync


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_device_is_that_of_the_tensors(device):
    inputs = random_inputs(100, 2, device=device)
    reference = run(inputs)
    other = next(i for i in range(torch.cuda.device_count()) if i != device.index)
    moved = {name: x.to(other) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    with torch.cuda.device(device):
        found = run(moved)
        assert torch.cuda.current_device() == device.index
    assert found[0].device.index == other and same([x.to(device) for x in found], reference)
