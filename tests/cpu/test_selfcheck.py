"""GPUs that the kernels never ran on: what is compared with FLA before a call is accepted, and how often."""

import contextlib
import logging
import threading

import pytest
import torch
from calls import FLAS, H200, OURS, SOFTPLUS, UNGATED, outcomes

from fla_kda_backend.call import PARAMETERS


@pytest.fixture
def untested(world, monkeypatch):
    """A GPU that the kernels never ran on; .errors are what the comparison with FLA finds, or raises."""
    world.facts = H200._replace(capability=(10, 0))
    world.errors = [1e-3, 2e-3]
    world.compared = []

    def compare(device, gate, facts, run, reference):
        world.compared.append((gate, facts.mode))
        if isinstance(world.errors, Exception):
            raise world.errors
        return world.errors

    monkeypatch.setattr(world.selfcheck, "compare", compare)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return world


def test_untested_gpu_is_checked_once(untested):
    assert [untested.call(), untested.call(state_v_first=False)] == [(OURS, None)] * 2
    assert untested.compared == [("bounded", "auto")]


def test_untested_gpu_is_checked_for_each_kind_of_gate_and_arithmetic(untested):
    calls = {"softplus": SOFTPLUS, "given": UNGATED, "bounded": {}}
    for changes in (*calls.values(), *calls.values()):
        assert untested.call(**changes) == (OURS, None)
    assert untested.compared == [(gate, "auto") for gate in calls]
    untested.facts = untested.facts._replace(mode="exact")
    for changes in calls.values():  # two of them on the kernels of the auto mode
        assert untested.call(**changes) == (OURS, None)
    assert untested.compared[3:] == [("bounded", "exact")]


def test_a_gate_that_disagrees_declines_no_other(untested):
    untested.errors = [0.5, 0.5]
    assert untested.call(**SOFTPLUS) == (FLAS, None)
    untested.errors = [1e-3, 1e-3]
    assert untested.call() == (OURS, None) and untested.call(**SOFTPLUS) == (FLAS, None)


@pytest.mark.parametrize(
    ("errors", "code", "message"),
    [
        (
            [1e-3, 0.7],
            "untested_disagrees",
            "on compute capability 10.0 requires agreement with FLA to 2e-02, got output ",
        ),
        ([float("nan"), 0.0], "untested_disagrees", "on compute capability 10.0 requires agreement"),
        (
            RuntimeError("launch failed"),
            "untested_failed",
            "the check on compute capability 10.0, never run on before, ",
        ),
    ],
)
def test_untested_gpu_that_disagrees_is_declined_for_the_process(untested, errors, code, message, caplog):
    untested.errors = errors
    assert [untested.call(), untested.call()] == [(FLAS, None)] * 2
    assert outcomes(untested) == [("declined", code)] * 2
    assert untested.seen[0].message.startswith(message) and untested.seen[0].kernel is None
    assert len(untested.compared) == 1
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1


def test_untested_gpu_is_not_checked_during_graph_capture(untested, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert untested.call() == (FLAS, None)
    assert outcomes(untested) == [("declined", "untested_capture")]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert untested.call() == (OURS, None)


def test_untested_gpu_is_checked_by_one_thread(untested):
    threads = [threading.Thread(target=untested.call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(untested.compared) == 1
    assert outcomes(untested) == [("accepted", "accepted")] * 4


@pytest.mark.parametrize("gate", ["bounded", "softplus", "given"])
def test_comparison_tells_right_from_wrong(world, kda, gate):
    """The fixed case of each gate in double precision: a state dropped between chunks is noticed."""
    from fla_kda_backend.reference import gold

    def reference(**arguments):
        return gold.forward(**arguments)

    def run(call, plan):
        assert plan.variant.gate == gate
        names = (name for name in PARAMETERS if name not in ("cp_context", "transpose_state_layout"))
        return gold.forward(**{name: getattr(call, name) for name in names})

    def run_without_state(call, plan):
        call.cu_seqlens = torch.tensor([0, 16, 32, 33, 33, 49, 65, 81, 97, 112])
        call.initial_state = None
        out, state = run(call, plan)
        return out, state[[2, 3, 7, 8]]

    cpu, compare = torch.device("cpu"), world.selfcheck.compare
    assert max(compare(cpu, gate, H200, run, reference)) == 0
    assert min(compare(cpu, gate, H200, run_without_state, reference)) > 10 * world.selfcheck.TOLERANCE


def test_comparison_passes_the_exact_reference(world):
    from fla_kda_backend.reference import exact, gold

    def run(call, plan):
        arguments = (call.q, call.k, call.v, call.g, call.beta, call.scale, call.A_log, call.dt_bias, call.lower_bound)
        return exact.forward(*arguments, call.initial_state, call.cu_seqlens)

    errors = world.selfcheck.compare(torch.device("cpu"), "bounded", H200, run, lambda **call: gold.forward(**call))
    assert 0 < max(errors) < 1e-2


def test_exact_mode_on_an_untested_gpu_says_so_too(untested):
    untested.facts = untested.facts._replace(mode="exact")
    assert untested.call(**UNGATED) == (OURS, None)
    assert untested.seen[0].message.endswith("on the auto kernels: gate=given")
