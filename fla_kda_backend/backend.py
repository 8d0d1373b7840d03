"""The backend that FLA asks for each call of chunk_kda: decide in the verifier, run in the implementation.

FLA turns an exception of a verifier into a rejection. So in strict mode the verifier accepts every call, and what is
declined raises from the implementation.
"""

import inspect
import logging
import threading
import traceback
import warnings
from operator import is_, itemgetter
from typing import Any

import torch
from fla.backends import BaseBackend

from . import config, dispatch_log, eligibility, facts, geometry, memo, planning, selfcheck
from .backward_geometry import BackwardGeometry, backward_geometry
from .call import ABSENT, DEVICE_INPUTS, POSITIONAL, Call, parse
from .compiling.spec import ARCHS
from .eligibility import Decision
from .failures import RETRY, Failures, NotPlainMemory, is_driver_mismatch, is_passing, is_sticky, text_of
from .geometry import Geometry
from .planning import Plan

logger = logging.getLogger("fla_kda_backend")

_warned: set[Any] = set()
_failures = Failures()  # of accepted calls, by `failed_keys`


class StrictModeError(RuntimeError):
    """A call was declined while FLA_KDA_CUTE_STRICT=1."""


class Verdict:
    """What is decided about a call, and about every other call that memo cannot tell from it. Holds no tensor."""

    __slots__ = ("decision", "accepted", "geometry", "log", "old_alias", "tensors", "launch", "backward")

    def __init__(
        self,
        decision: Decision,
        geometry: Geometry | None,
        backward: BackwardGeometry | None,
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """geometry is that of an accepted call, backward of one that needs gradients."""
        self.accepted, code, message = self.decision = decision
        self.geometry = geometry
        outcome = dispatch_log.ACCEPTED if self.accepted else dispatch_log.DECLINED
        self.log = dispatch_log.entry(outcome, code, message, call, geometry if self.accepted else None)
        self.old_alias = call.transpose_state_layout is not ABSENT
        index = {name: number for number, name in enumerate((*POSITIONAL[: len(args)], *kwargs))}
        self.tensors = itemgetter(*(index.get(name, -1) for name in TENSORS))  # of the call's values and a last None
        self.launch: Any = self.launch_first  # from the first success on op's Launch, of an accepted call
        self.backward = None if backward is None else Backward(self, backward, call)

    @property
    def failed_keys(self) -> tuple[Any, ...]:
        """failed_keys of an accepted call."""
        return failed_keys(self.geometry, None) if self.backward is None else self.backward.failed_keys

    def launch_first(self, *inputs: Any) -> Any:
        """What `launch` is until the kernels are there, and have run."""
        launch = bind(self.geometry)
        if self.backward is not None:
            self.backward.bind()
        result = launch(*inputs)
        self.launch = launch
        if self.backward is None:  # otherwise its success counts
            forget_failures(self.failed_keys)
        return result


class Backward:
    """The backward of a Verdict's calls: here, and where it fails on FLA. Holds no tensor."""

    __slots__ = ("geometry", "log", "failed_keys", "differentiable", "launch", "proven", "flags")

    def __init__(self, of: Verdict, geometry: BackwardGeometry, call: Call) -> None:
        self.geometry = geometry
        self.log = of.log.instead(dispatch_log.ACCEPTED, BACKWARD, "the gradients of a call", geometry)
        self.failed_keys = failed_keys(of.geometry, geometry)
        self.differentiable: Any = None  # training's, once it is imported
        self.launch: Any = None  # training's Backward, once its kernels are there
        self.proven = False  # whether it has run
        self.flags = {name: getattr(call, name) for name in FLAGS}
        if not call.use_gate_in_kernel:
            self.flags["lower_bound"] = None  # which may be anything

    def bind(self) -> None:
        """Have the kernels; raises whatever that raises."""
        if self.launch is None:
            from . import training

            self.differentiable = training.differentiable
            self.launch = training.Backward(self.geometry)

    def joined(self, results: Any, inputs: tuple[Any, ...]) -> Any:
        """The results of the call as functions of its inputs, of TENSORS."""
        self.bind()
        given = inputs[: len(DEVICE_INPUTS)]
        if not self.flags["use_gate_in_kernel"]:
            given = *given[:-2], None, None  # which may be anything
        return self.differentiable(results, self, given)

    def __call__(self, inputs: tuple[Any, ...], d_out: Any, d_final_state: Any) -> tuple[Any, ...]:
        """training.Gradients of the call."""
        if d_out is None and d_final_state is None:
            return (None,) * len(inputs)
        try:
            self.bind()
            log, gradients = self.log, None
            try:
                gradients = self.launch(inputs, d_out, d_final_state)
            except torch.OutOfMemoryError as error:
                cause = str(error)
            if gradients is None:
                gradients, log = self.in_shorter_segments((inputs, d_out, d_final_state), cause)
            log.record()
            if not self.proven:
                self.proven = True
                forget_failures(self.failed_keys)
            return gradients
        except Exception as error:
            in_a_graph = not is_sticky(error) and capturing()
            if not leave_to_fla(self.log, self.failed_keys, error, f"{BACKWARD}_exception"):
                raise
            if in_a_graph:  # FLA's kernels would be tuned here for the first time
                raise RuntimeError(f"kda_cute's backward failed while a CUDA graph is captured: {text_of(error)}") from error
        return fla_gradients(self.flags, self.geometry.wanted, inputs, d_out, d_final_state)

    def in_shorter_segments(self, arguments: tuple[Any, ...], cause: str) -> tuple[Any, dispatch_log.Entry]:
        """(gradients, Entry) of a backward that ran out of memory, with a smaller workspace. Later ones are not affected."""
        from .op import within_memory

        sizes = self.launch.shorter()
        if sizes is None:
            raise torch.OutOfMemoryError(cause)
        kind = type(self.launch)
        gradients, launched = within_memory(kind(sizes), kind.__call__, *arguments)
        message = f"out of memory, therefore in {len(launched.segments)} segments"
        return gradients, self.log.instead(dispatch_log.ACCEPTED, BACKWARD, message, launched)


TENSORS = (*DEVICE_INPUTS, "cu_seqlens_cpu")  # as op takes them
FLAGS = (  # of a call, plain values that FLA needs to run it again
    "scale",
    "output_final_state",
    "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval",
    "safe_gate",
    "lower_bound",
    "disable_recompute",
    "state_v_first",
    "use_graph",
    "chunk_size",
)
BACKWARD = "backward"  # code of the records of backwards
COMPILING = "compiling"
FAILING = "failing"
PASSING = ("internal_error", "memory", COMPILING, FAILING, *selfcheck.PASSING)  # the next such call may fare better
EVERYWHERE = "driver"  # what fails for any call


class KdaCuteBackend(BaseBackend):
    backend_type = "kda_cute"
    env_var = config.ENABLED.name
    priority = 1  # lower is asked first; FlashKDA has 3

    def is_enabled(self) -> bool:
        """FLA's own rule takes every value but 0 for on, "off" too, and looks the one variable up twice, slowly."""
        return config.ENABLED.get()

    def verify(self, function_name: str, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
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
            if is_sticky(error):
                raise
            return False, str(error)

    def chunk_kda_verifier(self, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
        return self.verify("chunk_kda", *args, **kwargs)

    def chunk_kda(self, *args: Any, **kwargs: Any) -> Any:
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
        values.append(None)
        result: Any = None
        try:
            try:
                result = verdict.launch(*verdict.tensors(values))
            except torch.OutOfMemoryError as error:
                cause = str(error)
            else:
                verdict.log.record()
            if result is None:
                result, log = in_shorter_segments(verdict, verdict.tensors(values), cause)
                log.record()
        except Exception as error:
            if not leave_to_fla(verdict.log, verdict.failed_keys, error):
                raise
            result = None
        # Outside the except clause: what the failed attempt allocated is free by now, and FLA's errors are FLA's alone, as are
        # those of hooks on saved tensors their owners'.
        if result is None:
            return fla_implementation()(*args, **kwargs)
        return result if verdict.backward is None else verdict.backward.joined(result, verdict.tensors(values))


def in_shorter_segments(verdict: Verdict, inputs: tuple[Any, ...], cause: str) -> tuple[Any, dispatch_log.Entry]:
    """(result, Entry) of an accepted call that ran out of memory, with a smaller workspace. Later calls are not affected."""
    from .op import Launch, within_memory

    whole: Any = verdict.geometry
    sizes: Any = geometry.halved(whole)
    if sizes is None:
        raise torch.OutOfMemoryError(cause)
    if config.COMPILE.get() == "background" and not config.STRICT.get():
        from .compiling import background

        if not background.ready(sizes.spec):
            raise torch.OutOfMemoryError(f"{cause} The kernels for shorter segments are compiled in the background.")
    result, launched = within_memory(Launch(sizes), Launch.__call__, *inputs)
    message = f"out of memory, therefore in {len(launched.segments)} segments"
    return result, verdict.log.instead(dispatch_log.ACCEPTED, verdict.decision.code, message, launched)


def leave_to_fla(log: dispatch_log.Entry, keys: tuple[Any, ...], error: Exception, code: str = "exception") -> bool:
    """Whether FLA is to run what failed of an accepted call. It is not in strict mode, nor on a context that is dead.

    log: its Entry.  keys: its failed_keys.

    Of the error, a text is kept and said: a log may keep what it is given, and an exception would keep the call's tensors.
    """
    cause = text_of(error)
    log.instead(dispatch_log.FAILED, code, cause).record()
    if is_sticky(error) or config.STRICT.get():
        return False
    lasting, passing = keys[:2]
    if is_driver_mismatch(error):
        lasting = EVERYWHERE
    if not isinstance(error, NotPlainMemory):
        _failures.note(passing if is_passing(error) else lasting, error)
    memo.clear()  # calls like this one are decided anew
    warn_once((lasting, is_passing(error)), cause, error)
    return True


def forget_failures(keys: tuple[Any, ...]) -> None:
    """Everything that such calls need has succeeded."""
    for key in keys:
        _failures.forget(key)


def failed_keys(sizes: Any, backward: BackwardGeometry | None) -> tuple[Any, ...]:
    """What failures of such calls are remembered by: kernels on a device for lasting causes; for passing ones, the same
    with all sizes, since a smaller call may fit; and what holds for all calls. Calls with gradients are kinds of their own."""
    if backward is None:
        return (sizes.device, sizes.spec), sizes, EVERYWHERE
    return (sizes.device, sizes.spec, backward.specs), (sizes, backward), EVERYWHERE


def identity(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """(names, values) of a call's arguments; names begins with the number of those that have none."""
    return [len(args), *kwargs], [*args, *kwargs.values()]


def decide(args: Any, kwargs: Any, names: list[Any], values: list[Any]) -> Verdict:
    """The Verdict on chunk_kda(*args, **kwargs). What goes wrong here declines the call; only a sticky CUDA error is raised."""
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


def decide_anew(args: Any, kwargs: Any) -> Verdict:
    call, sizes, backward = Call(), None, None
    try:
        call = parse(args, kwargs)
        known = facts.gather(call)
        decision = eligibility.check(call, known)
        if decision.accepted:
            plan = planning.plan(call, known)
            sizes = geometry.geometry(call, plan, ARCHS[known.capability])
            wanted = facts.differentiated(call, known)
            backward = backward_geometry(call, sizes, wanted) if wanted else None
            decision = consider(call, plan, sizes, backward, known)
    except Exception as error:
        if is_sticky(error):
            raise
        message = f"the rules failed: {text_of(error)}"
        warn_once(message, message, error)
        decision = Decision(False, "internal_error", message)
    return Verdict(decision, sizes, backward if decision.accepted else None, call, args, kwargs)


def consider(call: Call, plan: Plan, sizes: Geometry, backward: BackwardGeometry | None, known: facts.Facts) -> Decision:
    """The Decision on a call that every rule accepts: whether its kernels are ready, and right on this GPU."""
    if not config.STRICT.get():
        for failure in filter(None, map(_failures.standing, failed_keys(sizes, backward))):
            when = "is not tried again" if failure.lasting else f"is tried again within {RETRY} s"
            return Decision(False, FAILING, f"such a call failed before and {when}: {failure.text}")
        if config.COMPILE.get() == "background":
            message = unready(plan, sizes, backward, known)
            if message is not None:
                return Decision(False, COMPILING, message)
    decision = eligibility.ACCEPTED
    if known.capability in eligibility.COMPILED_ONLY:
        decision = selfcheck.decision(call.q.device, plan, known, run, fla_implementation())
    if decision.accepted and backward is not None:
        decision = decision._replace(message=f"{decision.message}; gradients are computed here, too")
    if decision.accepted and plan.reason:
        decision = decision._replace(message=plan.reason)
    return decision


def unready(plan: Plan, sizes: Geometry, backward: BackwardGeometry | None, known: facts.Facts) -> str | None:
    """Which kernel is still to be compiled before a call can run, in a sentence, or None. Whatever is, is begun."""
    from .compiling import background

    needed = [sizes.spec, *(backward.specs if backward is not None else ())]
    if known.capability in eligibility.COMPILED_ONLY:
        gate, mode = selfcheck.kind(plan)
        checked = parse((), selfcheck.case("meta", gate=gate))
        its_plan = planning.plan(checked, known._replace(mode=mode))
        needed.append(geometry.geometry(checked, its_plan, ARCHS[known.capability]).spec)
    waiting = [spec for spec in needed if spec is not None and not background.ready(spec)]
    return f"compiling {waiting[0]} in the background" if waiting else None


def run(call: Call, plan: Plan) -> Any:
    from .op import run

    return run(call, plan)


def bind(sizes: Any) -> Any:
    # Here for the first time something reaches the kernels and their compiler.
    from .op import Launch

    return Launch(sizes)


def fla_implementation() -> Any:
    """FLA's own chunk_kda, without its dispatch."""
    from fla.ops.kda import chunk_kda

    return inspect.unwrap(chunk_kda)


def capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def fla_gradients(
    flags: dict[str, Any], wanted: tuple[str, ...], inputs: tuple[Any, ...], d_out: Any, d_final_state: Any
) -> tuple[Any, ...]:
    """FLA's gradients of a call with `inputs` for DEVICE_INPUTS: its forward runs again."""
    with torch.enable_grad():
        fresh = {name: x if x is None else x.detach().requires_grad_(name in wanted) for name, x in zip(DEVICE_INPUTS, inputs)}
        results = fla_implementation()(**fresh, **flags)
        pairs = [(y, d) for y, d in zip(results, (d_out, d_final_state)) if d is not None]
        of, along = zip(*pairs)
        leaves: Any = [fresh[name] for name in wanted]
        found = torch.autograd.grad(of, leaves, along, allow_unused=True)
    gradients = dict(zip(wanted, found))
    return tuple([gradients.get(name) for name in DEVICE_INPUTS])


def warn_once(kind: Any, cause: str, error: Exception) -> None:
    if kind not in _warned and len(_warned) < dispatch_log.MAX_DISTINCT:
        _warned.add(kind)
        trace = "".join(traceback.format_exception(error)).rstrip()
        logger.warning("kda_cute leaves a call to FLA: %s\n%s", cause, trace)


class Handoff(threading.local):
    """Carries a verdict from the verifier to the implementation, which FLA calls next with the same arguments."""

    waiting: Any = None

    def put(self, names: list[Any], values: list[Any], verdict: Verdict) -> None:
        self.waiting = names, values, verdict

    def take(self, names: list[Any], values: list[Any]) -> Verdict | None:
        """The verdict on exactly these arguments, or None; it is given once, so no tensor outlives its call."""
        waiting = self.waiting
        if waiting is None:
            return None
        self.waiting = None
        those_names, those_values, verdict = waiting
        return verdict if names == those_names and all(map(is_, values, those_values)) else None


handoff = Handoff()
