"""chunk_kda through FLA: which kernels ran, by their names, and what the log says."""

import json
import logging

import pytest
import torch
from fla.ops.kda import chunk_kda
from gpu.launching import errors, expected, fwd_of, precise, right, run, same
from kda_inputs import chunk_kda_arguments, random_inputs
from torch.profiler import ProfilerActivity, profile

from fla_kda_backend import dispatch_log, op
from fla_kda_backend import register as register_backend
from fla_kda_backend.backend import StrictModeError
from fla_kda_backend.reference import gold

pytestmark = pytest.mark.gpu
HEADS = 2  # FLA tunes its kernels anew for every number of heads
EXACT = ("PrepareChunk16", "RecurrenceSplit")
AUTO = ("PrepareWY64", "ChainWY64")
REPLAY = ("PrepareWY64", "ChainReplayWY64")
OURS = {*EXACT, *AUTO, *REPLAY}


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setenv("FLA_FLASH_KDA", "0")
    assert register_backend()
    with torch.no_grad():
        yield


def call(inputs, **changes):
    """(result, names of the CUDA kernels that ran, records of the log)."""
    arguments = chunk_kda_arguments(inputs, **changes)
    with dispatch_log.capture() as seen:
        result = chunk_kda(**arguments)  # compiles and tunes
        seen.clear()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            result = chunk_kda(**arguments)
            torch.cuda.synchronize()
    device_events = (e for e in profiled.events() if e.device_type == torch.autograd.DeviceType.CUDA)
    return result, [e.name for e in device_events], list(seen)


def ran_here(names, kernels):
    """Whether these kernels of ours ran, once each, and nothing else."""
    return sorted(kernel for name in names for kernel in OURS if kernel in name) == sorted(kernels) and len(names) == 2


def ran_on_triton(names):
    return any("chunk_kda" in name for name in names) and not any(kernel in name for name in names for kernel in OURS)


def close(result, reference, limit=1e-2):
    return all(error < limit for error in errors(result, reference))


@pytest.mark.parametrize("tokens, kernels", [(500, AUTO), (2048, REPLAY)])
def test_auto_runs_our_kernels_and_no_other(tokens, kernels, device):
    inputs = random_inputs(tokens, HEADS, device=device)
    result, names, (record,) = call(inputs)
    assert ran_here(names, kernels), names
    assert right(result, inputs, "wy64") and same(result, run(inputs, "wy64"))
    assert result[0].dtype == torch.bfloat16 and result[1].dtype == torch.float32
    assert (record.outcome, record.code, record.kernel) == (dispatch_log.ACCEPTED, "accepted", "wy64")
    replay, sm_count = kernels == REPLAY, torch.cuda.get_device_properties(device).multi_processor_count
    grid = max(4 * HEADS, sm_count) if replay else min(2 * HEADS, sm_count)
    assert dict(record.params) == {"max_ctas": sm_count, "overlap": replay, "replay": replay, "grid": grid}
    assert record.num_sequences == 1 and record.device == device
    entry = record.to_dict()
    assert entry["shapes"]["q"] == [1, tokens, HEADS, 128] and entry["dtypes"]["initial_state"] == "float32"
    assert entry["arguments"]["lower_bound"] == -5.0 and entry["arguments"]["state_v_first"] is True


def test_exact_mode_has_the_exact_bits(device, monkeypatch):
    monkeypatch.setenv("FLA_KDA_CUTE_MODE", "exact")
    inputs = random_inputs(500, HEADS, device=device)
    result, names, (record,) = call(inputs)
    assert ran_here(names, EXACT), names
    assert same(result, expected(inputs)) and same(result, fwd_of(inputs))
    assert dict(record.params)["arithmetic"] == "exact"


def test_off_runs_triton_and_logs_nothing(device, monkeypatch):
    monkeypatch.setenv("FLA_KDA_CUTE", "0")
    inputs = random_inputs(500, HEADS, device=device)
    result, names, seen = call(inputs)
    assert ran_on_triton(names), names
    assert seen == []
    assert close(result, precise(inputs))


def test_exact_mode_leaves_other_calls_to_the_auto_kernels(device, monkeypatch):
    monkeypatch.setenv("FLA_KDA_CUTE_MODE", "exact")
    inputs = random_inputs(500, HEADS, device=device)
    result, names, (record,) = call(inputs, safe_gate=False, lower_bound=None)
    assert ran_here(names, AUTO), names
    assert record.message.endswith("this one runs on the auto kernels: gate=softplus")
    arguments = chunk_kda_arguments(inputs, safe_gate=False, lower_bound=None)
    assert close(result, gold.forward(**arguments))


DECLINED = [
    ({"a_keyword_of_the_future": 1}, "unknown_argument"),
    ({"safe_gate": False, "lower_bound": -6.0}, "lower_bound"),  # which FLA takes where nobody calls the gate safe
]


@pytest.mark.parametrize("changes, code", DECLINED)
def test_a_declined_call_runs_on_triton(changes, code, device):
    inputs = random_inputs(500, HEADS, device=device)
    result, names, (record,) = call(inputs, **changes)
    assert ran_on_triton(names), names
    assert (record.outcome, record.code, record.kernel) == (dispatch_log.DECLINED, code, None)
    known = {name: value for name, value in changes.items() if name == "lower_bound"}
    assert close(result, gold.forward(**chunk_kda_arguments(inputs, **known)), 2e-2)


def test_training_runs_on_triton_where_it_is_switched_off(device, monkeypatch):
    monkeypatch.setenv("FLA_KDA_CUTE_TRAINING", "0")
    inputs = random_inputs(500, HEADS, device=device)
    inputs["q"].requires_grad_()
    with torch.enable_grad(), dispatch_log.capture() as seen:
        out, _ = chunk_kda(**chunk_kda_arguments(inputs))
    assert out.requires_grad and [record.code for record in seen] == ["training"]


@pytest.mark.parametrize("changes, code", DECLINED)
def test_strict_raises_for_a_declined_call(changes, code, device, monkeypatch):
    monkeypatch.setenv("FLA_KDA_CUTE_STRICT", "1")
    inputs = random_inputs(64, HEADS, device=device)
    with dispatch_log.capture() as seen, pytest.raises(StrictModeError, match=f"kda_cute declines: {code}"):
        chunk_kda(**chunk_kda_arguments(inputs, **changes))
    assert [record.outcome for record in seen] == [dispatch_log.DECLINED]
    assert ran_here(call(inputs)[1], AUTO)


def fail(spec):
    raise RuntimeError("a planted failure")


def test_a_failed_launch_falls_back_and_warns_once(device, monkeypatch, caplog):
    monkeypatch.setattr(op, "launcher", fail)
    monkeypatch.setattr("fla_kda_backend.backend._warned", set())
    inputs = random_inputs(500, HEADS, device=device)
    with caplog.at_level(logging.WARNING, "fla_kda_backend"):
        result, names, (record,) = call(inputs)
    assert ran_on_triton(names), names
    assert (record.outcome, record.kernel) == (dispatch_log.FAILED, "wy64")
    assert record.message == "RuntimeError: a planted failure"
    assert caplog.text.count("kda_cute leaves a call to FLA: RuntimeError: a planted failure") == 1  # of two calls
    assert close(result, precise(inputs))


def test_strict_raises_for_a_failed_launch(device, monkeypatch):
    monkeypatch.setattr(op, "launcher", fail)
    monkeypatch.setenv("FLA_KDA_CUTE_STRICT", "1")
    inputs = random_inputs(64, HEADS, device=device)
    with dispatch_log.capture() as seen, pytest.raises(RuntimeError, match="a planted failure"):
        chunk_kda(**chunk_kda_arguments(inputs))
    assert [record.outcome for record in seen] == [dispatch_log.FAILED]


def test_old_alias_of_the_layout(device):
    inputs = random_inputs(200, HEADS, device=device)
    arguments = chunk_kda_arguments(inputs)
    reference = chunk_kda(**arguments)
    del arguments["state_v_first"]
    with dispatch_log.capture() as seen, pytest.warns(DeprecationWarning):
        result = chunk_kda(**arguments, transpose_state_layout=True)
    assert same(result, reference) and [record.outcome for record in seen] == [dispatch_log.ACCEPTED]


@pytest.mark.parametrize("cu_dtype", [torch.int32, torch.int64])
def test_packed_sequences_without_a_sync(cu_dtype, device):
    inputs = random_inputs(331, HEADS, cu_seqlens=[0, 40, 40, 331], cu_dtype=cu_dtype, device=device)
    arguments = chunk_kda_arguments(inputs, cu_seqlens_cpu=torch.tensor([0, 40, 40, 331]))
    reference = chunk_kda(**arguments)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with dispatch_log.capture() as seen:
            result = chunk_kda(**arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [(record.outcome, record.num_sequences) for record in seen] == [(dispatch_log.ACCEPTED, 3)]
    assert same(result, reference) and right(result, inputs, "wy64")


@pytest.mark.parametrize("safe_gate", [True, False])
@pytest.mark.parametrize("wanted", [True, False])
def test_flags_without_effect(safe_gate, wanted, device):
    inputs = random_inputs(100, HEADS, device=device)
    reference = chunk_kda(**chunk_kda_arguments(inputs))
    with torch.inference_mode(), dispatch_log.capture() as seen:
        changes = {"safe_gate": safe_gate, "output_final_state": wanted, "disable_recompute": True, "chunk_size": 32}
        out, state = chunk_kda(**chunk_kda_arguments(inputs, **changes))
    assert [record.outcome for record in seen] == [dispatch_log.ACCEPTED]
    assert torch.equal(out, reference[0])
    assert torch.equal(state, reference[1]) if wanted else state is None


def test_log_file(device, monkeypatch, tmp_path):
    path = tmp_path / "decisions.jsonl"
    monkeypatch.setenv("FLA_KDA_CUTE_LOG", str(path))
    inputs = random_inputs(100, HEADS, device=device)
    for changes in ({}, {}, {"a_keyword_of_the_future": 1}):
        chunk_kda(**chunk_kda_arguments(inputs, **changes))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["outcome"] for line in lines] == ["accepted", "accepted", "declined"]
    assert lines[0]["kernel"] == "wy64" and lines[0]["device"] == str(device)
