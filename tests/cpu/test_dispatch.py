"""FLA's own dispatch with the backend behind it, on CPU tensors: who runs a call, by whose result comes back.

The facts say that the tensors are on an H200, op is replaced, and so is, behind FLA's own checks of the arguments, what
FLA would launch.
"""

import gc
import logging
import sys
import threading
import types
import weakref

import pytest
import torch
from calls import FLAS, FLASHKDAS, H200, OURS, SOFTPLUS, outcomes, tensor

from fla_kda_backend import config, facts, planning
from fla_kda_backend.call import parse
from fla_kda_backend.geometry import geometry


def test_accepted_call_runs_here(world):
    arguments = world.arguments()
    assert world.call() == (OURS, None)
    call = parse((), arguments)
    plan = planning.plan(call, H200)
    assert world.op.calls == [geometry(call, plan, "sm_90a")]
    assert outcomes(world) == [("accepted", "accepted")]
    (record,) = world.seen
    assert (record.kernel, record.num_sequences) == (plan.kernel, 2)


def test_declined_call_runs_on_fla(world):
    assert world.call(scale=tensor(1)) == (FLAS, None)
    assert outcomes(world) == [("declined", "scale")]
    assert not world.op.calls


def test_switched_off_it_is_not_asked(world, monkeypatch):
    monkeypatch.setenv("FLA_KDA_CUTE", "0")
    assert world.call() == (FLAS, None)
    assert world.seen == []
    monkeypatch.setenv("FLA_KDA_CUTE", "yes")
    assert world.call() == (OURS, None)


@pytest.mark.parametrize("value", [None, "", "0", "1", "00", "yes"])
def test_it_is_switched_as_fla_switches(world, monkeypatch, value):
    if value is not None:
        monkeypatch.setenv("FLA_KDA_CUTE", value)
    backend = world.backend.KdaCuteBackend()
    assert backend.is_enabled() == super(type(backend), backend).is_enabled() == (value != "0")


@pytest.mark.parametrize("value", ["off", "false", "no", "False", "OFF"])
def test_it_is_also_switched_off_by_words(world, monkeypatch, value):
    monkeypatch.setenv("FLA_KDA_CUTE", value)
    assert world.call() == (FLAS, None) and world.seen == []


def test_a_value_that_switches_nothing_is_warned_of_in_the_first_call(world, monkeypatch, caplog):
    monkeypatch.setattr(config, "_warned", set())
    monkeypatch.setenv("FLA_KDA_CUTE", "disable")
    with caplog.at_level(logging.WARNING, "fla_kda_backend"):
        assert [world.call(), world.call()] == [(OURS, None)] * 2
    (record,) = caplog.records
    assert "FLA_KDA_CUTE='disable' is not one of 1, 0, true, on, yes, false, off, no" in record.getMessage()


def test_flashkda_comes_after_us(world, monkeypatch, kda):
    monkeypatch.setattr(kda.flash_kda.FlashKDABackend, "is_available", classmethod(lambda cls: True))
    monkeypatch.setattr(kda.flash_kda.FlashKDABackend, "chunk_kda", lambda self, *args, **kwargs: (FLASHKDAS, None))
    assert world.call() == (OURS, None)
    world.facts = H200._replace(capability=(8, 0))
    assert world.call() == (FLASHKDAS, None)
    assert outcomes(world) == [("accepted", "accepted"), ("declined", "capability")]


def test_positional_arguments(world, kda):
    arguments = world.arguments()
    required = [arguments.pop(name) for name in ("q", "k", "v", "g", "beta")]
    assert kda.chunk.chunk_kda(*required, 0.25, **arguments) == (OURS, None)
    assert world.op.calls[0].segments[0].scale == 0.25


@pytest.mark.parametrize("grad", [True, False])
def test_training_that_is_switched_off_is_left_to_fla(world, grad):
    world.facts = H200._replace(grad_enabled=grad, training=False)
    with torch.set_grad_enabled(grad):
        result = world.call(v=tensor(2, 80, 4, 128, device="cpu").requires_grad_())
    assert result[0] == (FLAS if grad else OURS)


def test_old_alias_runs_here_and_warns_like_fla(world):
    arguments = world.arguments(transpose_state_layout=True)
    del arguments["state_v_first"]
    with pytest.warns(DeprecationWarning, match="transpose_state_layout"):
        assert world.backend.KdaCuteBackend().chunk_kda(**arguments) == (OURS, None)


def test_failure_falls_back_and_warns_once(world, caplog):
    def fail(sizes):
        raise RuntimeError("no more shared memory")

    world.op.run = fail
    with caplog.at_level(logging.WARNING, "fla_kda_backend"):
        assert [world.call(), world.call()] == [(FLAS, None)] * 2
    assert outcomes(world) == [("failed", "exception")] * 2
    assert world.seen[0].message == "RuntimeError: no more shared memory"
    (warning,) = caplog.records
    assert "no more shared memory" in warning.getMessage()


def test_kernels_that_cannot_be_imported_fall_back(world, monkeypatch):
    monkeypatch.setitem(sys.modules, "fla_kda_backend.op", None)
    assert world.call() == (FLAS, None)
    assert outcomes(world) == [("failed", "exception")]


def test_fallback_frees_what_the_failed_attempt_held(world, monkeypatch, kda):
    alive = []

    class Workspace:
        pass

    def fail(sizes):
        workspace = Workspace()
        alive.append(weakref.ref(workspace))
        raise RuntimeError("out of memory")

    world.op.run = fail
    monkeypatch.setattr(kda.chunk.ChunkKDAFunction, "apply", lambda *args: (alive[0]() is None, None))
    logging.getLogger("fla_kda_backend").disabled = True  # a handler of the test runner would keep the traceback
    try:
        assert world.call() == (True, None)
    finally:
        logging.getLogger("fla_kda_backend").disabled = False


def test_strict_raises_what_failed(world, monkeypatch):
    def fail(sizes):
        raise RuntimeError("no more shared memory")

    world.op.run = fail
    monkeypatch.setenv("FLA_KDA_CUTE_STRICT", "1")
    with pytest.raises(RuntimeError, match="no more shared memory"):
        world.call()
    assert outcomes(world) == [("failed", "exception")]


def test_strict_raises_where_a_call_is_declined(world, monkeypatch):
    monkeypatch.setenv("FLA_KDA_CUTE_STRICT", "1")
    assert world.call() == (OURS, None)
    with pytest.raises(world.backend.StrictModeError, match="head_dim: requires K = V = 128, got K=64, V=64"):
        world.call(dim=64)
    assert outcomes(world) == [("accepted", "accepted"), ("declined", "head_dim")]


REFUSED = {
    "both layouts": {"transpose_state_layout": True},
    "states": {"batch": 1, "cu_seqlens": tensor(4, dtype=torch.int64, device="cpu")},
    "batch": {"cu_seqlens": tensor(3, dtype=torch.int64, device="cpu")},
    "state dtype": {"initial_state": tensor(2, 4, 128, 128, device="cpu")},
    "no A_log": {"A_log": None, "lower_bound": None, "safe_gate": False},
    "chunk size": {"chunk_size": 16},
    "no bound": {"lower_bound": None},
    "bound": {"lower_bound": -6.0},
    "bound of zero": {"lower_bound": 0.0},
    "neg_eigval": {"allow_neg_eigval": True, "use_beta_sigmoid_in_kernel": False},
    "q and k": {"k": tensor(2, 64, 4, 128, device="cpu")},
    "K": {"dim": 512},
    "HV": {"v": tensor(2, 80, 6, 128, device="cpu")},
    "g": {"g": tensor(2, 80, 4, 1, device="cpu")},
    "beta": {"beta": tensor(2, 80, 1, device="cpu")},
    "no tensor": {"q": None},
    "q of three dimensions": {"q": tensor(80, 4, 128, device="cpu")},
    "cp": {"cp_context": types.SimpleNamespace(cu_seqlens=None)},
}


@pytest.mark.parametrize("strict", ["0", "1"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_fla_refuses_raises_flas_error(world, monkeypatch, name, strict):
    monkeypatch.setenv("FLA_KDA_CUTE", "0")
    with pytest.raises(Exception) as without:
        world.call(**REFUSED[name])
    monkeypatch.setenv("FLA_KDA_CUTE", "1")
    monkeypatch.setenv("FLA_KDA_CUTE_STRICT", strict)
    with pytest.raises(type(without.value)) as with_us:
        world.call(**REFUSED[name])
    assert str(with_us.value) == str(without.value)
    assert outcomes(world) == [("declined", "fla_refuses")]


def test_unknown_argument_goes_where_fla_takes_it(world):
    assert world.call(window=4) == (FLAS, None)
    assert outcomes(world) == [("declined", "unknown_argument")]


def test_rules_that_fail_decline(world, monkeypatch, caplog):
    def fail(call):
        raise RuntimeError("driver is gone")

    monkeypatch.setattr(facts, "gather", fail)
    assert [world.call(), world.call()] == [(FLAS, None)] * 2
    assert outcomes(world) == [("declined", "internal_error")] * 2
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1


def test_a_verifier_that_fails_declines(world, monkeypatch):
    """FLA's rule, which FLA's own verify() keeps."""
    monkeypatch.setattr(world.backend, "decide", lambda *arguments: 1 / 0)
    assert world.call() == (FLAS, None)
    assert world.backend.KdaCuteBackend().verify("chunk_kda") == (False, "division by zero")


def test_call_inside_torch_compile(world, kda):
    def model(**arguments):
        arguments["q"] = arguments["q"] + 1
        return kda.chunk.chunk_kda(**arguments)

    assert torch.compile(model, backend="eager")(**world.arguments())[0] == OURS
    assert outcomes(world) == [("accepted", "accepted")]


def test_no_tensor_outlives_its_call(world):
    arguments = world.arguments()
    world.op.Launch = lambda sizes: lambda *tensors: (OURS, None)
    world.backend.KdaCuteBackend().chunk_kda_verifier(**arguments)
    world.backend.KdaCuteBackend().chunk_kda(**arguments)
    held = weakref.ref(arguments["q"])
    del arguments
    gc.collect()
    assert held() is None


def test_implementation_decides_again_for_other_arguments(world):
    backend = world.backend.KdaCuteBackend()
    assert backend.chunk_kda_verifier(**world.arguments())[0]
    with pytest.raises(world.backend.StrictModeError, match="head_dim"):
        backend.chunk_kda(**world.arguments(dim=64))


def test_verdict_is_handed_over_once_and_for_the_very_same_arguments(world):
    handoff, identity = world.backend.Handoff(), world.backend.identity
    q, k, verdict = tensor(2), tensor(2), object()
    given = (q,), {"k": k, "v": q}
    handoff.put(*identity(*given), verdict)
    assert handoff.take(*identity(*given)) is verdict
    assert handoff.take(*identity(*given)) is None
    for args, kwargs in (
        ((q,), {"k": k}),
        ((q,), {"k": k, "v": k}),
        ((q,), {"k": k, "v": tensor(2)}),
        ((q,), {"k": k, "g": q}),
        ((q, k), {"v": q}),
        ((), {"q": q, "k": k, "v": q}),
    ):
        handoff.put(*identity(*given), verdict)
        assert handoff.take(*identity(args, kwargs)) is None
        assert handoff.take(*identity(*given)) is None
    handoff.put(*identity(*given), verdict)
    elsewhere = []
    thread = threading.Thread(target=lambda: elsewhere.append(handoff.take(*identity(*given))))
    thread.start()
    thread.join()
    assert elsewhere == [None] and handoff.take(*identity(*given)) is verdict


def test_threads_get_their_own_results(world, kda):
    world.op.run = lambda sizes: (sizes.segments[0].scale, None)
    wrong = []

    def work(scale):
        arguments = world.arguments(scale=scale, tokens=1)
        wrong.extend(scale for _ in range(50) if kda.chunk.chunk_kda(**arguments)[0] != scale)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert outcomes(world) == [("accepted", "accepted")] * 400


# ---- the exact mode --------------------------------------------------------------------------------------------------
def test_exact_mode_runs_other_calls_on_the_auto_kernels_and_says_so(world):
    world.facts = H200._replace(mode="exact")
    for changes in ({}, SOFTPLUS):
        assert world.call(**changes) == (OURS, None)
    own, other = (sizes.spec for sizes in world.op.calls)
    assert own.schedule.arithmetic == "exact" and other.family == "wy64"
    assert outcomes(world) == [("accepted", "accepted")] * 2
    assert [record.message for record in world.seen] == [
        "all rules hold",
        "exact mode runs FlashKDA's own call alone; this one runs on the auto kernels: gate=softplus",
    ]
    assert dict(world.seen[1].params)["gate"] == "softplus"
