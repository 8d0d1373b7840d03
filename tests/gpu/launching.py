"""Run the kernels under a plan of the test's choice, and what their results are compared with."""

import contextlib
import sys
import time

import pytest
import torch
from golden import relative_error
from gpu import specs
from kda_inputs import chunk_kda_arguments

from fla_kda_backend import dispatch_log, op, planning
from fla_kda_backend.call import parse
from fla_kda_backend.kernels.families import FAMILIES
from fla_kda_backend.kernels.variant import Variant
from fla_kda_backend.reference import exact, gold

WY64_LIMITS = 7e-3, 6e-3  # errors of output and state on random inputs; a wrong result is off by 0.1 and more


def plan_of(setting, bv=32, variant=None, sequences=1, heads=1):
    """A setting of specs.py as a plan of a variant, FlashKDA's call by default; grid is what the log would show."""
    schedule = specs.schedule_of(setting, bv)
    return planning.Plan(specs.family_of(setting), variant or Variant(), schedule, sequences * heads * (128 // (bv or 64)))


def in_segments_of(monkeypatch, setting, chunks, heads):
    """From now on a launch covers so many chunks of the time axis."""
    record = FAMILIES[specs.family_of(setting)].record
    limit_workspace(monkeypatch, record.workspace_bytes(chunks, heads))


def limit_workspace(monkeypatch, limit):
    """Bytes that the workspace of one launch may have."""
    monkeypatch.setattr(planning, "workspace_limit", lambda: limit)


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


def run(inputs, setting="exact", bv=32, final=torch.float32):
    """(out, final_state); final is the dtype of the final state, or None for none."""
    call = parsed(inputs)
    plan = plan_of(setting, bv, Variant.of(call), call.num_sequences, call.heads)
    return under(plan, inputs, final)


def run_auto(inputs, final=torch.float32):
    """The same under the plan that the auto mode chooses on an H200 or H100."""
    return under(auto_plan(inputs), inputs, final)


def auto_plan(inputs):
    call = parsed(inputs)
    return planning.wy64(call.tokens, call.num_sequences, call.heads, specs.SM_COUNT, Variant.of(call))


def under(plan, inputs, final):
    out, state = outputs(inputs, final)
    with scratch_is_nan():
        op.into(parsed(inputs), plan, out, state)
    return out, state


def parsed(inputs):
    return parse((), chunk_kda_arguments(inputs))


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


def precise(inputs):
    """What double precision gives."""
    return gold.forward(**chunk_kda_arguments(inputs))


def triton(inputs, monkeypatch):
    """What FLA's Triton kernels give."""
    return on_triton(chunk_kda_arguments(inputs), monkeypatch)


# ---- chunk_kda -----------------------------------------------------------------------------------------------------------
def on_triton(call, monkeypatch):
    """chunk_kda(**call) on FLA's Triton kernels."""
    from fla.ops.kda import chunk_kda

    with monkeypatch.context() as patched:
        patched.setenv("FLA_KDA_CUTE", "0")
        patched.setenv("FLA_FLASH_KDA", "0")
        with torch.inference_mode(), dispatch_log.capture() as seen:
            result = chunk_kda(**call)
    assert not seen
    return result


def here(call, kernel="wy64"):
    """chunk_kda(**call) on the kernels of a family; anything else raises. To be called in strict mode."""
    from fla.ops.kda import chunk_kda

    with torch.inference_mode(), scratch_is_nan(), dispatch_log.capture() as seen:
        result = chunk_kda(**call)
    assert [(record.outcome, record.kernel) for record in seen] == [(dispatch_log.ACCEPTED, kernel)]
    return result


def untuned(monkeypatch):
    """FLA's Triton kernels, each in the first of its configurations.

    Tuning would take minutes, since every dtype and every missing tensor is tuned for by itself. No configuration is another
    arithmetic, and which one is the fastest changes with the day.
    """
    import fla.ops.kda  # noqa: F401
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import KernelInterface

    for name, module in list(sys.modules.items()):
        for kernel in list(vars(module).values()) if name.startswith("fla.") else ():
            while isinstance(kernel, KernelInterface) and not isinstance(kernel, Autotuner):
                kernel = getattr(kernel, "fn", None)
            if isinstance(kernel, Autotuner):
                monkeypatch.setattr(kernel, "configs", kernel.configs[:1])


def beside_triton(setting, inputs, monkeypatch, record_property):
    """(result, its errors, those of FLA's Triton kernels), errors of output and state against double precision."""
    reference = precise(inputs)
    found = run(inputs, setting)
    assert all(x.isfinite().all() for x in found)
    ours, theirs = errors(found, reference), errors(triton(inputs, monkeypatch), reference)
    record_property("errors", {setting: ours, "triton": theirs})
    print(f"\noutput, state: {setting} {ours[0]:.1e} {ours[1]:.1e}, Triton {theirs[0]:.1e} {theirs[1]:.1e}")
    return found, ours, theirs


def finish(seconds=20):
    """Wait for the current stream, but not for ever."""
    done = torch.cuda.Event()
    done.record()
    limit = time.monotonic() + seconds
    while not done.query():
        if time.monotonic() > limit:
            pytest.exit("a kernel hangs: nothing more can run on this GPU", returncode=3)
        time.sleep(0.01)


def same(one, other):
    """Whether two (out, final_state) agree to the bit; NaN agrees with nothing."""
    return all(a is b is None or (a.dtype == b.dtype and torch.equal(a, b)) for a, b in zip(one, other))


def errors(found, reference):
    return [relative_error(a, b) for a, b in zip(found, reference) if a is not None]


def right(found, inputs, setting):
    """Whether (out, final_state) is what the setting promises: the exact reference's bits, or small errors."""
    if setting == "exact":
        return same(found, expected(inputs, None if found[1] is None else found[1].dtype))
    if setting == "robust":
        # The kernel sums in another order than the reference, and where decay is slow more and more roundings then differ.
        # Evaluations of the reference that sum forwards and round, or backwards and truncate, lie 4e-4 apart on a few hundred
        # tokens, 2.3e-3 on 32,768.
        return all(error < 5e-3 for error in errors(found, exact.forward(**inputs, arithmetic="robust")))
    return all(error < limit for error, limit in zip(errors(found, precise(inputs)), WY64_LIMITS))
