"""The backend that FLA asks for each call of chunk_kda: decide in the verifier, run in the implementation.

FLA turns an exception of a verifier into a rejection. So in strict mode the verifier accepts every call, and what is
declined raises from the implementation.
"""

import inspect
import logging
import threading
import warnings
from typing import NamedTuple

from fla.backends import BaseBackend

from . import config, dispatch_log, eligibility, facts, planning, selfcheck
from .call import ABSENT, Call, parse

logger = logging.getLogger("fla_kda_backend")

_warned = set()


class StrictModeError(RuntimeError):
    """A call was declined while FLA_KDA_CUTE_STRICT=1."""


class Verdict(NamedTuple):
    call: Call
    decision: eligibility.Decision
    plan: object | None  # planning.Plan of an accepted call


class KdaCuteBackend(BaseBackend):
    backend_type = "kda_cute"
    env_var = config.ENABLED.name
    priority = 1  # lower is asked first; FlashKDA has 3

    def chunk_kda_verifier(self, *args, **kwargs):
        verdict = decide(args, kwargs)
        call, (accepted, code, message), _ = verdict
        if accepted or config.STRICT.get():
            handoff.put(args, kwargs, verdict)
            return True, None
        dispatch_log.record(dispatch_log.DECLINED, code, message, call)
        return False, f"{code}: {message}"

    def chunk_kda(self, *args, **kwargs):
        call, (accepted, code, message), plan = handoff.take(args, kwargs) or decide(args, kwargs)
        if not accepted:
            dispatch_log.record(dispatch_log.DECLINED, code, message, call)
            if code == eligibility.FLA_REFUSES:
                fla_implementation()(*args, **kwargs)  # raises FLA's own error
            raise StrictModeError(f"{config.STRICT.name}=1, and kda_cute declines: {code}: {message}")

        if call.transpose_state_layout is not ABSENT:
            warnings.warn("transpose_state_layout is FLA's old name of state_v_first", DeprecationWarning, stacklevel=2)
        try:
            result = run(call, plan)
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            dispatch_log.record(dispatch_log.FAILED, "exception", cause, call, plan)
            if config.STRICT.get():
                raise
            warn_once(cause, error)
        else:
            dispatch_log.record(dispatch_log.ACCEPTED, code, message, call, plan)
            return result
        # Outside the except clause: what the failed attempt allocated is free by now, and FLA's errors are FLA's alone.
        return fla_implementation()(*args, **kwargs)


def decide(args, kwargs):
    """The Verdict on chunk_kda(*args, **kwargs). Never raises: what goes wrong here declines the call."""
    call = Call()
    try:
        call = parse(args, kwargs)
        known = facts.gather(call)
        decision = eligibility.check(call, known)
        if not decision.accepted:
            return Verdict(call, decision, None)
        plan = planning.plan(call, known)
        if not plan.should_run and config.COST.get():
            return Verdict(call, eligibility.Decision(False, "cost", plan.reason), None)
        if known.capability in eligibility.COMPILED_ONLY:
            decision = selfcheck.decision(call.q.device, known, run, fla_implementation())
        return Verdict(call, decision, plan)
    except Exception as error:
        message = f"the rules failed: {type(error).__name__}: {error}"
        warn_once(message, error)
        return Verdict(call, eligibility.Decision(False, "internal_error", message), None)


def run(call, plan):
    # Here for the first time something reaches the kernels and their compiler.
    from .op import run

    return run(call, plan)


def fla_implementation():
    """FLA's own chunk_kda, without its dispatch."""
    from fla.ops.kda import chunk_kda

    return inspect.unwrap(chunk_kda)


def warn_once(cause, error):
    if cause not in _warned and len(_warned) < dispatch_log.MAX_DISTINCT:
        _warned.add(cause)
        logger.warning("kda_cute leaves a call to FLA: %s", cause, exc_info=error)


class Handoff(threading.local):
    """Carries a verdict from the verifier to the implementation, which FLA calls next with the same arguments."""

    waiting = None

    def put(self, args, kwargs, verdict):
        self.waiting = (identity(args, kwargs), verdict)

    def take(self, args, kwargs):
        """The verdict on exactly these arguments, or None; it is given once, so no tensor outlives its call."""
        waiting, self.waiting = self.waiting, None
        # The verdict holds every argument, so none of the ids can have been used again.
        return waiting[1] if waiting is not None and waiting[0] == identity(args, kwargs) else None


def identity(args, kwargs):
    return [*map(id, args)], [*kwargs], [*map(id, kwargs.values())]


handoff = Handoff()
