"""On GPUs that the kernels were never run on: the first call of a process first runs a small case here and on FLA.

The two must agree to TOLERANCE, or the process declines every call on that device. Nothing of the caller is touched:
the inputs come from a generator of their own, and nothing is checked while a CUDA graph is being captured.
"""

import logging
import threading

import torch

from . import planning
from .call import parse
from .eligibility import ACCEPTED, Decision

logger = logging.getLogger("fla_kda_backend")

# Each is within 7e-3 of the exact result on such inputs; a wrong layout gives an error near 1.
TOLERANCE = 2e-2

LENGTHS = (33, 0, 64, 15)  # tails, a sequence without tokens, whole chunks
HEADS = 2

_lock = threading.Lock()
_decisions: dict[torch.device, Decision] = {}


def decision(device, facts, run, reference):
    """The Decision on a call that the rules accept on such a device; the first one waits for the GPU.

    run(call, plan) is this package's implementation, reference FLA's own chunk_kda.
    """
    if device in _decisions:
        return _decisions[device]
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            return Decision(
                False,
                "untested_capture",
                "cannot check an untested GPU while a CUDA graph is captured: call once before",
            )
        with _lock:
            if device not in _decisions:
                _decisions[device] = _decide(device, facts, run, reference)
    return _decisions[device]


def _decide(device, facts, run, reference):
    name = f"compute capability {facts.capability[0]}.{facts.capability[1]}"
    try:
        errors = compare(device, facts, run, reference)
    except Exception as error:
        message = f"the check on {name}, never run on before, failed: {type(error).__name__}: {error}"
        logger.warning("%s; %s is left to FLA", message, device)
        return Decision(False, "untested_failed", message)
    found = f"output {errors[0]:.1e}, final state {errors[1]:.1e}"
    if not max(errors) <= TOLERANCE:  # NaN fails too
        message = f"on {name} requires agreement with FLA to {TOLERANCE:.0e}, got {found}"
        logger.warning("%s; %s is left to FLA", message, device)
        return Decision(False, "untested_disagrees", message)
    logger.info("%s, never run on before, agrees with FLA on a small case: %s", name, found)
    return ACCEPTED


def compare(device, facts, run, reference):
    """Relative differences (output, final state) between these kernels and FLA's on the fixed case."""
    with torch.inference_mode():
        arguments = case(device)
        call = parse((), arguments)
        ours = run(call, planning.plan(call, facts))
        theirs = reference(**arguments)
        return [difference(a, b) for a, b in zip(ours, theirs)]


def case(device, lengths=LENGTHS, heads=HEADS):
    """Keyword arguments of a chunk_kda call: ragged sequences, states, decay log-uniform over what real gates do."""
    generator = torch.Generator("cpu").manual_seed(0)
    tokens, dim = sum(lengths), 128

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")

    decay = -torch.exp(
        torch.rand(1, tokens, heads, dim, generator=generator, dtype=torch.float32, device="cpu") * 8 - 7
    )
    offsets = torch.tensor([0, *lengths], dtype=torch.int64, device="cpu").cumsum(0)
    inputs = {
        "q": normal(1, tokens, heads, dim).bfloat16(),
        "k": normal(1, tokens, heads, dim).bfloat16(),
        "v": normal(1, tokens, heads, dim).bfloat16(),
        "g": torch.logit(decay / -5).bfloat16(),
        "beta": normal(1, tokens, heads).bfloat16(),
        "initial_state": normal(len(lengths), heads, dim, dim),
        "cu_seqlens": offsets,
        "A_log": torch.zeros(heads, dtype=torch.float32, device="cpu"),
        "dt_bias": torch.zeros(heads * dim, dtype=torch.float32, device="cpu"),
    }
    flags = (
        "use_qk_l2norm_in_kernel",
        "use_gate_in_kernel",
        "use_beta_sigmoid_in_kernel",
        "safe_gate",
        "state_v_first",
    )
    return {
        **{name: value.to(device) for name, value in inputs.items()},
        **dict.fromkeys((*flags, "output_final_state"), True),
        "lower_bound": -5.0,
    }


def difference(ours, theirs):
    ours, theirs = ours.double(), theirs.double()
    return ((ours - theirs).norm() / theirs.norm()).item()
