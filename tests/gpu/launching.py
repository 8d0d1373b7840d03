"""Run the kernels under a plan of the test's choice, and what their results are compared with."""

import contextlib

import torch
from golden import relative_error

from fla_kda_backend import op, planning
from fla_kda_backend.reference import exact

ARGUMENTS = ("q", "k", "v", "g", "beta", "scale", "out", "A_log", "dt_bias", "lower_bound", "initial_state", "final_state",
             "cu_seqlens")  # fmt: skip


def plan_of(arithmetic, bv, sequences, heads):
    options = (("arithmetic", arithmetic), ("bv", bv), ("warps", planning.warps(arithmetic, bv)))
    return planning.Plan("column_split", options, sequences * heads * (128 // bv))


@contextlib.contextmanager
def scratch_is_nan():
    """What torch.empty gives out is NaN, the kernels' workspace and carried states included."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def sequences_of(inputs):
    return len(inputs["q"]) if inputs["cu_seqlens"] is None else len(inputs["cu_seqlens"]) - 1


def outputs(inputs, final=torch.float32):
    """out and final_state, all NaN."""
    shape, device = inputs["q"].shape, inputs["q"].device
    out = torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device)
    if final is None:
        return out, None
    return out, torch.full((sequences_of(inputs), shape[2], 128, 128), float("nan"), dtype=final, device=device)


def run(inputs, arithmetic="exact", bv=32, final=torch.float32):
    """(out, final_state); final is the dtype of the final state, or None for none."""
    out, state = outputs(inputs, final)
    call = inputs | {"out": out, "final_state": state}
    with scratch_is_nan():
        op._launch(plan_of(arithmetic, bv, sequences_of(inputs), out.shape[2]), *(call[name] for name in ARGUMENTS))
    return out, state


def fwd_of(inputs, final=torch.float32):
    """The same by the public function, under the plan that it chooses."""
    out, state = outputs(inputs, final)
    with scratch_is_nan():
        op.fwd(**inputs, out=out, final_state=state)
    return out, state


def expected(inputs, final=torch.float32):
    """What the exact setting gives, bit for bit."""
    out, state = exact.forward(**inputs)
    return out, None if final is None else state.to(final)


def same(one, other):
    """Whether two (out, final_state) agree to the bit; NaN agrees with nothing."""
    return all(a is b is None or (a.dtype == b.dtype and torch.equal(a, b)) for a, b in zip(one, other))


def errors(found, reference):
    return [relative_error(a, b) for a, b in zip(found, reference)]
