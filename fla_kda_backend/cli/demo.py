"""`fla-kda demo`: chunk_kda through FLA on these kernels and without them, both checked against double precision.

Without a GPU that the kernels run on: compile them all the same, check the reference, show what the rules decide.
"""

import os
import statistics
import time
import warnings

from ._table import decisions, table

TOKENS, HEADS = 8192, 32  # a Kimi Linear layer's heads, one sequence
CHECKED_HEADS = (0, HEADS - 1)  # double precision takes seconds a head
ROUNDS = 20
# Relative error on such inputs is about 6e-3 with a bf16 state; an error in the arithmetic shows as 0.1 and more.
LIMIT = 1.5e-2
IN_KERNEL = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")


def add_parser(subparsers):
    parser = subparsers.add_parser("demo", help="run, check and time one call with and without this backend")
    parser.set_defaults(run=run)


def run(args):
    import torch

    from .. import eligibility, facts

    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    known = eligibility.RUN + eligibility.COMPILED_ONLY
    usable = [device for device in devices if facts.device_facts(device)[0] in known]
    checks = Checks()
    check_registration(checks)
    with torch.no_grad():
        if usable:
            on_gpu(usable[0], checks)
        else:
            print("No GPU here that the kernels run on (compute capability 9.0): compiling and checking without one.\n")
            compile_kernels(checks)
            check_reference(checks)
            show_rules(checks)
    print("All checks hold." if checks.failed == 0 else f"{checks.failed} checks FAILED.")
    return 0 if checks.failed == 0 else 1


def check_registration(checks):
    import torch  # noqa: F401

    from .. import _autoload, register

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FLA's, about a machine without a GPU
        import fla.ops.kda  # noqa: F401
    register()  # nothing new, unless torch's autoload is switched off
    state, detail = _autoload.status()
    checks(state == "registered", f"FLA's chunk_kda: {state}; {detail}")
    print()


class Checks:
    """Prints checks as they are made, and counts those that do not hold."""

    def __init__(self):
        self.failed = 0

    def __call__(self, holds, text):
        self.failed += not holds
        print(f"  {'ok  ' if holds else 'FAIL'}  {text}")

    def close(self, name, found, exact):
        error = relative_error(found, exact)
        self(error <= LIMIT, f"{name}: relative error {error:.1e} against double precision, limit {LIMIT:.1e}")


def relative_error(found, exact):
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


def on_gpu(device, checks):
    import torch
    from fla.ops.kda import chunk_kda

    from .. import config, dispatch_log, selfcheck
    from ..reference import gold

    print(
        f"{torch.cuda.get_device_name(device)}: {TOKENS} tokens, {HEADS} heads, K = V = 128, mode {config.MODE.get()}\n"
    )
    call = selfcheck.case(device, lengths=(TOKENS,), heads=HEADS)
    del call["cu_seqlens"]

    def chunk(on):
        os.environ[config.ENABLED.name] = "1" if on else "0"
        return chunk_kda(**call)

    before = os.environ.get(config.ENABLED.name)
    try:
        with dispatch_log.capture() as seen:
            ours = chunk(True)
        ran = [record.outcome for record in seen] == [dispatch_log.ACCEPTED]
        checks(ran, "with the backend on, the call ran on its kernels")
        with dispatch_log.capture() as seen:
            theirs = chunk(False)
        checks(not seen, f"with {config.ENABLED.name}=0, FLA did not ask it")
        exact = gold.forward(**few_heads(call))
        heads = list(CHECKED_HEADS)
        for name, (out, final_state) in (("kda_cute", ours), ("without", theirs)):
            checks.close(f"{name}, output", out[:, :, heads], exact[0])
            checks.close(f"{name}, final state", final_state[:, heads], exact[1])
        if ran and checks.failed == 0:
            print_times(*interleaved_times(chunk, device))
    finally:
        if before is None:
            del os.environ[config.ENABLED.name]
        else:
            os.environ[config.ENABLED.name] = before
    print("\ndispatch log:")
    print("\n".join(decisions(dispatch_log.summary())), end="\n\n")


def few_heads(call):
    """The call with CHECKED_HEADS only; no head depends on another."""
    heads = list(CHECKED_HEADS)
    few = {name: call[name][:, :, heads] for name in ("q", "k", "v", "g", "beta")}
    few["initial_state"] = call["initial_state"][:, heads]
    few["A_log"] = call["A_log"][heads]
    few["dt_bias"] = call["dt_bias"].view(HEADS, -1)[heads]
    return {**call, **few}


def interleaved_times(chunk, device):
    """Median microseconds of eager calls (with, without), alternating, after three of each."""
    import torch

    times = {True: [], False: []}
    with torch.cuda.device(device):
        for round_number in range(-3, ROUNDS):
            for on, measured in times.items():
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda.synchronize()
                start.record()
                chunk(on)
                end.record()
                torch.cuda.synchronize()
                if round_number >= 0:
                    measured.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times[True]), statistics.median(times[False])


def print_times(ours, theirs):
    rows = [("kda_cute", f"{ours:.0f}", ""), ("without", f"{theirs:.0f}", f"{theirs / ours:.2f}x as long")]
    print("\n" + "\n".join(table(("eager call", "median us", ""), rows)))


def compile_kernels(checks):
    from .. import compiling

    for spec in compiling.specs_for_demo():
        start = time.perf_counter()
        artifact = compiling.build(spec)
        took = time.perf_counter() - start
        whole = artifact.cubin[:4] == b"\x7fELF" and f".target {spec.arch}" in artifact.ptx
        checks(whole, f"compiled {spec}: {len(artifact.cubin)} bytes in {took:.1f} s")
    print()


def check_reference(checks):
    from .. import selfcheck
    from ..reference import exact, gold

    call = selfcheck.case("cpu")
    truth = gold.forward(**call)
    flags = (*IN_KERNEL, "safe_gate", "state_v_first", "output_final_state")
    arguments = {name: value for name, value in call.items() if name not in flags}
    for inverse in ("neumann", "substitution"):
        out, final_state = exact.forward(**arguments, scale=128**-0.5, inverse=inverse)
        checks.close(f"the kernels' arithmetic in torch, {inverse} inverse, output", out, truth[0])
        checks.close(f"the kernels' arithmetic in torch, {inverse} inverse, final state", final_state, truth[1])
    print()


def show_rules(checks):
    import torch

    from .. import eligibility, planning
    from ..facts import Facts

    h200 = Facts(capability=(9, 0), sm_count=132, grad_enabled=False, inference_mode=False, mode="auto", untested=True)
    a100 = h200._replace(capability=(8, 0), sm_count=108)
    cases = (
        ("prefill", h200, {}, "accepted"),
        ("8 packed sequences", h200, {"cu_seqlens": meta(9, dtype=torch.int32)}, "accepted"),
        ("training", h200._replace(grad_enabled=True), {"q": meta(1, TOKENS, HEADS, 128).requires_grad_()}, "no_grad"),
        ("unbounded gate", h200, {"safe_gate": False, "lower_bound": None}, "lower_bound"),
        ("fp32 gate", h200, {"g": meta(1, TOKENS, HEADS, 128, dtype=torch.float32)}, "input_dtype"),
        ("K-first state", h200, {"state_v_first": False}, "state_v_first"),
        ("bound FLA refuses", h200, {"lower_bound": -6.0}, eligibility.FLA_REFUSES),
        ("on an A100", a100, {}, "capability"),
    )
    print("What the rules decide, on an H200 where nothing else is said:")
    rows = []
    for name, known, changes, expected in cases:
        call = eligibility.parse((), {**kimi_call(), **changes})
        accepted, code, message = eligibility.check(call, known)
        if accepted:
            plan = planning.plan(call, known)
            message = " ".join([plan.kernel, *(f"{key}={value}" for key, value in plan.params.items())])
        rows.append((name, "accepted" if accepted else "declined", code, message))
        if code != expected:
            checks(False, f"{name}: expected {expected}, got {code}")
    print("\n".join(table(("call", "decision", "code", "kernel, or why not"), rows)), end="\n\n")


def kimi_call():
    """Keyword arguments of a prefill as FLA's KDA layer passes them, without memory behind them."""
    import torch

    wide = {name: meta(1, TOKENS, HEADS, 128) for name in "qkvg"}
    flags = dict.fromkeys((*IN_KERNEL, "safe_gate", "state_v_first", "output_final_state"), True)
    return {
        **wide,
        **flags,
        "beta": meta(1, TOKENS, HEADS),
        "A_log": meta(HEADS, dtype=torch.float32),
        "dt_bias": meta(HEADS * 128, dtype=torch.float32),
        "lower_bound": -5.0,
    }


def meta(*shape, dtype=None):
    import torch

    return torch.empty(*shape, dtype=dtype or torch.bfloat16, device="meta")
