"""On GPUs that the kernels were never run on: the first call of a process with each kind of gate first runs a small case
of that kind here and on FLA.

The two must agree to TOLERANCE, or the process declines every such call on that device. Nothing of the caller is touched:
the inputs come from a generator of their own, and nothing is checked while a CUDA graph is being captured.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

from . import planning
from .call import Call, parse
from .eligibility import ACCEPTED, Decision
from .facts import Facts
from .failures import RETRY, Failures, is_passing, is_sticky, text_of
from .kernels.variant import Variant
from .planning import Plan
from .testing import Form, Normal, make
from .testing.gates import before_gate

logger = logging.getLogger("fla_kda_backend")

Runner = Callable[[Call, Plan], Any]

# Each is within 7e-3 of the exact result on such inputs; a wrong layout gives an error near 1.
TOLERANCE = 2e-2

LENGTHS = (33, 0, 64, 15)  # tails, a sequence without tokens, whole chunks
HEADS = 2

_lock = threading.Lock()
_decisions: dict[tuple, Decision] = {}  # by device, kind of gate and mode
_failures = Failures()  # by the same, of checks that failed for a cause that may pass

PASSING = ("untested_capture", "untested_later")  # codes of what is decided anew at the next call


def decision(device: torch.device, plan: Plan, facts: Facts, run: Runner, reference: Callable[..., Any]) -> Decision:
    """The Decision on a call that the rules accept on such a device; the first one of its kind waits for the GPU.

    run(call, plan) is this package's implementation, reference FLA's own chunk_kda.
    """
    gate, mode = kind(plan)
    facts, key = facts._replace(mode=mode), (device, gate, mode)
    if key in _decisions:
        return _decisions[key]
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            return Decision(
                False,
                "untested_capture",
                "cannot check an untested GPU while a CUDA graph is captured: call once before",
            )
        with _lock:
            if key in _decisions:
                return _decisions[key]
            failure = _failures.standing(key)
            if failure is not None:
                return _later(facts, failure.text)
            found = _decide(device, gate, facts, run, reference, key)
            if found.code not in PASSING:
                _decisions[key] = found
            return found


def kind(plan: Plan) -> tuple[str, str]:
    """(kind of gate, mode) of the case that stands for a plan's calls: it runs on the plan's own kernels."""
    return plan.variant.gate, "exact" if getattr(plan.schedule, "arithmetic", None) == "exact" else "auto"


def _decide(device: torch.device, gate: str, facts: Facts, run: Runner, reference: Callable[..., Any], key: tuple) -> Decision:
    name = _name(facts)
    try:
        errors = compare(device, gate, facts, run, reference)
    except Exception as error:
        if is_sticky(error):
            raise
        if is_passing(error):
            return _later(facts, _failures.note(key, error).text)
        message = f"the check on {name}, never run on before, failed: {text_of(error)}"
        logger.warning("%s; %s is left to FLA", message, device)
        return Decision(False, "untested_failed", message)
    found = f"output {errors[0]:.1e}, final state {errors[1]:.1e}"
    if not max(errors) <= TOLERANCE:  # NaN fails too
        message = f"on {name} requires agreement with FLA to {TOLERANCE:.0e}, got {found}"
        logger.warning("%s; %s is left to FLA", message, device)
        return Decision(False, "untested_disagrees", message)
    logger.info("%s, never run on before, agrees with FLA on a small case: %s", name, found)
    return ACCEPTED


def _name(facts: Facts) -> str:
    return f"compute capability {facts.capability[0]}.{facts.capability[1]}"


def _later(facts: Facts, text: str) -> Decision:
    message = f"the check on {_name(facts)} could not be made yet, and is tried again within {RETRY} s: {text}"
    return Decision(False, "untested_later", message)


def compare(device: Any, gate: str, facts: Facts, run: Runner, reference: Callable[..., Any]) -> list[float]:
    """Relative differences (output, final state) between these kernels and FLA's on the fixed case of a gate."""
    with torch.inference_mode():
        arguments = case(device, gate=gate)
        call = parse((), arguments)
        ours = run(call, planning.plan(call, facts))
        theirs = reference(**arguments)
        return [difference(a, b) for a, b in zip(ours, theirs)]


def case(device: Any, lengths: tuple[int, ...] = LENGTHS, heads: int = HEADS, gate: str = "bounded") -> dict[str, Any]:
    """Keyword arguments of a chunk_kda call: ragged sequences, states, decay log-uniform over what real gates do.

    gate: "bounded", FlashKDA's call; "softplus", the same without a bound; "given", fp32 log decay that is computed already.
    """
    given = gate == "given"
    parameters = None if given else "fp32"
    variant = Variant(
        gate=gate,
        gate_dtype="fp32" if given else "bf16",
        a_log=parameters,
        dt_bias=parameters,
        initial_state="fp32",
        cu_seqlens="int64",
    )

    def draw(form: Form) -> dict[str, torch.Tensor]:
        normal = Normal("cpu", seed=0)
        decay = -torch.exp(normal.uniform(*form.shape("g")) * 8 - 7)
        values = {"g": before_gate(decay, gate)}
        values |= {name: normal(*form.shape(name)) for name in ("q", "k", "v", "beta", "initial_state")}
        return values | {name: torch.zeros(form.shape(name), device="cpu") for name in ("A_log", "dt_bias")}

    return make(Form.of(variant, lengths, heads), draw, device)


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    ours, theirs = ours.double(), theirs.double()
    return float((ours - theirs).norm() / theirs.norm())
