"""Three times of a call: on the GPU alone, with the host included, and on the host alone.

The implementations take turns, so that a change of clocks or temperature meets all of them, and each goes round the
same input sets, so that none finds its own inputs in the cache.
"""

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

GRAPH_SECONDS = 0.4  # of replays of all implementations together
ROUNDS = (21, 201)
EAGER_BLOCKS, EAGER_CALLS = 9, 20
HOST_BLOCKS, HOST_CALLS = 5, 50


@dataclass
class Times:
    """Microseconds a call; the graph's are None where the call cannot be captured."""

    graph_us: float | None = None
    graph_p20: float | None = None
    graph_p80: float | None = None
    eager_us: float | None = None
    host_us: float | None = None
    captured: Any = None  # (out, final_state) that the graph's last replay left for the first input set
    uncaptured: str | None = None  # the error of capturing


def measure(implementations, sets):
    """{name: Times}. Everything must have run once before, so that nothing is compiled or tuned here."""
    times = {implementation.name: Times() for implementation in implementations}
    graphs = {}
    for implementation in implementations:
        found = times[implementation.name]
        try:
            graphs[implementation.name], results = capture(implementation, sets)
            found.captured = results[0]
        except Exception as error:
            torch.cuda.synchronize()
            found.uncaptured = f"{type(error).__name__}: {error}"
    for name, measured in replay_times(graphs).items():
        a_call = [value / len(sets) for value in measured]
        found = times[name]
        found.graph_p20, _, _, found.graph_p80 = statistics.quantiles(a_call, n=5, method="inclusive")
        found.graph_us = statistics.median(a_call)
    for name, value in eager_times(implementations, sets).items():
        times[name].eager_us = value
    for name, value in host_times(implementations, sets).items():
        times[name].host_us = value
    return times


def capture(implementation, sets):
    """A graph of one call on each input set, and its results."""
    with implementation.selected():
        for inputs in sets:
            implementation(inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [implementation(inputs) for inputs in sets]
    return graph, results


def replay_times(graphs):
    """{name: microseconds of each replay}. All replays are queued at once: the GPU never waits for the host."""

    def queue(rounds):
        events = {name: [] for name in graphs}
        for _ in range(rounds):
            for name, graph in graphs.items():
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                graph.replay()
                end.record()
                events[name].append((start, end))
        torch.cuda.synchronize()
        return {name: [a.elapsed_time(b) * 1e3 for a, b in pairs] for name, pairs in events.items()}

    warm = queue(3)
    a_round = sum(min(values) for values in warm.values()) or 1.0
    return queue(int(min(max(GRAPH_SECONDS * 1e6 / a_round, ROUNDS[0]), ROUNDS[1])))


def eager_times(implementations, sets):
    """{name: median microseconds of back-to-back calls}, host and GPU: what a model's prefill sees."""
    times = {implementation.name: [] for implementation in implementations}
    for block in range(-1, EAGER_BLOCKS):
        for implementation in implementations:
            with implementation.selected():
                torch.cuda.synchronize()
                start = time.perf_counter()
                for number in range(EAGER_CALLS):
                    implementation(sets[number % len(sets)])
                torch.cuda.synchronize()
                took = time.perf_counter() - start
            if block >= 0:
                times[implementation.name].append(took / EAGER_CALLS * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def host_times(implementations, sets):
    """{name: median microseconds from entering the call until it returns}, which is after its last launch.

    Of back-to-back calls in blocks of HOST_CALLS, each begun with the GPU idle: the queue of a stream has room for 1,024
    launches, so no call of up to 20 launches waits for the GPU. The first block is not counted.
    """
    times = {implementation.name: [] for implementation in implementations}
    for block in range(-1, HOST_BLOCKS):
        for implementation in implementations:
            took = []
            with implementation.selected():
                torch.cuda.synchronize()
                for number in range(HOST_CALLS):
                    start = time.perf_counter()
                    implementation(sets[number % len(sets)])
                    took.append((time.perf_counter() - start) * 1e6)
            if block >= 0:
                times[implementation.name] += took
    torch.cuda.synchronize()
    return {name: statistics.median(values) for name, values in times.items()}
