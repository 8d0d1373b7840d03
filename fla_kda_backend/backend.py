"""The backend that FLA asks for each call of chunk_kda: decide in the verifier, run in the implementation.

FLA turns an exception of a verifier into a rejection. So in strict mode the verifier accepts every call, and what is
declined raises from the implementation.
"""

import inspect
import logging
import threading
import warnings
from operator import is_, itemgetter

from fla.backends import BaseBackend

from . import config, dispatch_log, eligibility, facts, memo, planning, selfcheck
from .call import ABSENT, DEVICE_INPUTS, POSITIONAL, Call, parse

logger = logging.getLogger("fla_kda_backend")

_warned = set()


class StrictModeError(RuntimeError):
    """A call was declined while FLA_KDA_CUTE_STRICT=1."""


class Verdict:
    """What is decided about a call, and about every other call that memo cannot tell from it. Holds no tensor."""

    __slots__ = ("decision", "accepted", "plan", "log", "old_alias", "tensors", "launch")

    def __init__(self, decision, plan, call, args, kwargs):
        self.accepted, code, message = self.decision = decision
        self.plan = plan if self.accepted else None
        outcome = dispatch_log.ACCEPTED if self.accepted else dispatch_log.DECLINED
        self.log = dispatch_log.entry(outcome, code, message, call, self.plan)
        self.old_alias = call.transpose_state_layout is not ABSENT
        place = {name: number for number, name in enumerate((*POSITIONAL[: len(args)], *kwargs))}
        self.tensors = itemgetter(*(place.get(name, -1) for name in TENSORS))  # of the call's values and a last None
        self.launch = None  # op's, once a call was accepted and is to run


TENSORS = (*DEVICE_INPUTS, "cu_seqlens_cpu")  # as op takes them
COMPILING = "compiling"
PASSING = ("internal_error", "untested_capture", COMPILING)  # the next such call may fare better


class KdaCuteBackend(BaseBackend):
    backend_type = "kda_cute"
    env_var = config.ENABLED.name
    priority = 1  # lower is asked first; FlashKDA has 3

    def is_enabled(self):
        """By FLA's rule, which would look the one variable up twice, slowly."""
        return config.ENABLED.get()

    def verify(self, function_name, *args, **kwargs):
        """By FLA's rule, which would look the verifier up by name and hand it the arguments once more."""
        try:
            names, values = identity(args, kwargs)
            verdict = decide(args, kwargs, names, values)
            if verdict.accepted or config.STRICT.get():
                handoff.put(names, values, verdict)
                return True, None
            verdict.log.record()
            _, code, message = verdict.decision
            return False, f"{code}: {message}"
        except Exception as error:
            return False, str(error)

    def chunk_kda_verifier(self, *args, **kwargs):
        return self.verify("chunk_kda", *args, **kwargs)

    def chunk_kda(self, *args, **kwargs):
        names, values = identity(args, kwargs)
        verdict = handoff.take(names, values) or decide(args, kwargs, names, values)
        if not verdict.accepted:
            verdict.log.record()
            _, code, message = verdict.decision
            if code == eligibility.FLA_REFUSES:
                fla_implementation()(*args, **kwargs)  # raises FLA's own error
            raise StrictModeError(f"{config.STRICT.name}=1, and kda_cute declines: {code}: {message}")

        if verdict.old_alias:
            warnings.warn("transpose_state_layout is FLA's old name of state_v_first", DeprecationWarning, stacklevel=2)
        try:
            launch = verdict.launch
            if launch is None:
                launch = verdict.launch = prepare(parse(args, kwargs), verdict.plan)
            values.append(None)
            result = launch(*verdict.tensors(values))
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            dispatch_log.record(dispatch_log.FAILED, "exception", cause, parse(args, kwargs), verdict.plan)
            if config.STRICT.get():
                raise
            warn_once(cause, error)
        else:
            verdict.log.record()
            return result
        # Outside the except clause: what the failed attempt allocated is free by now, and FLA's errors are FLA's alone.
        return fla_implementation()(*args, **kwargs)


def identity(args, kwargs):
    """(names, values) of a call's arguments; names begins with the number of those that have none."""
    return [len(args), *kwargs], [*args, *kwargs.values()]


def decide(args, kwargs, names, values):
    """The Verdict on chunk_kda(*args, **kwargs). Never raises: what goes wrong here declines the call."""
    verdict = memo.recent(names, values)
    if verdict is not None:
        return verdict
    key = memo.fingerprint(names, values)
    verdict = memo.find(key)
    if verdict is None:
        verdict = decide_anew(args, kwargs)
        if key is not None and verdict.decision.code not in PASSING:
            memo.keep(key, verdict)
    if key is not None and memo.find(key) is verdict:
        memo.looked_up(names, values, key, verdict)
    return verdict


def decide_anew(args, kwargs):
    call, plan = Call(), None
    try:
        call = parse(args, kwargs)
        known = facts.gather(call)
        decision = eligibility.check(call, known)
        if decision.accepted:
            decision, plan = consider(call, known)
    except Exception as error:
        message = f"the rules failed: {type(error).__name__}: {error}"
        warn_once(message, error)
        decision = eligibility.Decision(False, "internal_error", message)
    return Verdict(decision, plan, call, args, kwargs)


def consider(call, known):
    """(Decision, Plan or None) on a call that every rule accepts: whether its kernels are ready, and right on this GPU."""
    plan = planning.plan(call, known)
    if config.COMPILE.get() == "background" and not config.STRICT.get():
        message = unready(call, plan, known)
        if message is not None:
            return eligibility.Decision(False, COMPILING, message), None
    decision = eligibility.ACCEPTED
    if known.capability in eligibility.COMPILED_ONLY:
        decision = selfcheck.decision(call.q.device, plan, known, run, fla_implementation())
    if decision.accepted and plan.reason:
        decision = decision._replace(message=plan.reason)
    return decision, plan


def unready(call, plan, known):
    """Which kernel is still to be compiled before this call can run, in a sentence, or None. Whatever is, is begun."""
    from .compiling import ARCHS, background
    from .geometry import geometry

    arch = ARCHS[known.capability]
    needed = [geometry(call, plan, arch).spec]
    if known.capability in eligibility.COMPILED_ONLY:
        gate, mode = selfcheck.kind(plan)
        checked = parse((), selfcheck.case("meta", gate=gate))
        needed.append(geometry(checked, planning.plan(checked, known._replace(mode=mode)), arch).spec)
    waiting = [spec for spec in needed if spec is not None and not background.ready(spec)]
    return f"compiling {waiting[0]} in the background" if waiting else None


def run(call, plan):
    from .op import run

    return run(call, plan)


def prepare(call, plan):
    # Here for the first time something reaches the kernels and their compiler.
    from .op import prepare

    return prepare(call, plan)


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

    def put(self, names, values, verdict):
        self.waiting = names, values, verdict

    def take(self, names, values):
        """The verdict on exactly these arguments, or None; it is given once, so no tensor outlives its call."""
        waiting = self.waiting
        if waiting is None:
            return None
        self.waiting = None
        those_names, those_values, verdict = waiting
        return verdict if names == those_names and all(map(is_, values, those_values)) else None


handoff = Handoff()
