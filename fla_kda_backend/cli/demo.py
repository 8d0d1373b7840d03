"""`fla-kda demo`: chunk_kda through FLA on these kernels and without them, both checked against double precision.

With --model: the prefill of a whole model of FLA on these kernels and without them, with the logits compared.
With --train: forward and backward of a call, with the gradients checked.
Without a GPU that the kernels run on: compile them all the same, check the reference, show what the rules decide.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import _models
from ._table import decisions, table

if TYPE_CHECKING:
    import torch

    from ..facts import Facts

TOKENS, HEADS = 8192, 32  # a Kimi Linear layer's heads, one sequence
CHECKED_HEADS = (0, HEADS - 1)  # double precision takes seconds per head
CHECKED_TOKENS = 1024  # of which gradients are checked: double precision keeps every state
ROUNDS = 20
MODEL_ROUNDS = 10
# The relative error of such inputs is about 6e-3 with a bf16 state; an error in the arithmetic shows as 0.1 and more.
LIMIT = 1.5e-2
GRADIENT_LIMIT = 3e-2
# The logits of a bf16 model on two right implementations differ by about 2.5e-2; a kernel with an error of 0.05 gives 0.13.
MODEL_LIMIT = 8e-2
IN_KERNEL = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("demo", help="run, check and time a call, or a model, with and without this backend")
    models = "; ".join(f"{name}: {what}" for name, what in _models.MODELS.items())
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", choices=_models.MODELS, help=f"prefill a whole model of random weights. {models}")
    what.add_argument("--train", action="store_true", help="forward and backward of a call")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import torch

    from .. import eligibility, facts

    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    known = eligibility.RUN + eligibility.COMPILED_ONLY
    usable = [device for device in devices if facts.device_facts(device)[0] in known]
    checks = Checks()
    check_registration(checks)
    if not usable:
        instead = "showing what the rules decide" if args.model else "compiling and checking without one"
        print(f"No GPU here that the kernels run on (compute capability 9.0): {instead}.\n")
    with torch.no_grad():
        if args.model:
            with _models.attention():
                if usable:
                    model_on_gpu(usable[0], args.model, checks)
                else:
                    show_layers(args.model, checks)
        elif usable and args.train:
            steps_on_gpu(usable[0], checks)
        elif usable:
            on_gpu(usable[0], checks)
        else:
            compile_kernels(checks, args.train)
            check_reference(checks)
            show_rules(checks)
    print("All checks hold." if checks.failed == 0 else f"{checks.failed} checks FAILED.")
    return 0 if checks.failed == 0 else 1


def check_registration(checks: "Checks") -> None:
    import torch  # noqa: F401

    from .. import _autoload, register

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FLA's, about a machine without a GPU
        import fla.ops.kda  # noqa: F401
    register()  # does nothing, unless torch's autoload is switched off
    state, detail = _autoload.status()
    checks(state == "registered", f"FLA's chunk_kda: {state}; {detail}")
    print()


class Checks:
    """Prints checks as they are made, and counts those that do not hold."""

    def __init__(self) -> None:
        self.failed = 0

    def __call__(self, holds: bool, text: str) -> None:
        self.failed += not holds
        print(f"  {'ok  ' if holds else 'FAIL'}  {text}")

    def close(self, name: str, found: "torch.Tensor", exact: "torch.Tensor", limit: float = LIMIT) -> None:
        error = relative_error(found, exact)
        self(error <= limit, f"{name}: relative error {error:.1e} against double precision, limit {limit:.1e}")


def relative_error(found: "torch.Tensor", exact: "torch.Tensor") -> float:
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


def on_gpu(device: "torch.device", checks: Checks) -> None:
    import torch
    from fla.ops.kda import chunk_kda

    from .. import config, dispatch_log, selfcheck
    from ..reference import gold

    print(f"{torch.cuda.get_device_name(device)}: {TOKENS} tokens, {HEADS} heads, K = V = 128, mode {config.MODE.get()}\n")
    call = selfcheck.case(device, lengths=(TOKENS,), heads=HEADS)
    del call["cu_seqlens"]

    def chunk(on: bool) -> Any:
        with _models.switched(on):
            return chunk_kda(**call)

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
        print_times("eager call", *interleaved_times(chunk, device, ROUNDS))
    print_log(dispatch_log)


def few_heads(call: dict[str, Any]) -> dict[str, Any]:
    """The call with CHECKED_HEADS only; no head depends on another."""
    heads = list(CHECKED_HEADS)
    few = {name: call[name][:, :, heads] for name in ("q", "k", "v", "g", "beta")}
    few["initial_state"] = call["initial_state"][:, heads]
    few["A_log"] = call["A_log"][heads]
    few["dt_bias"] = call["dt_bias"].view(HEADS, -1)[heads]
    return {**call, **few}


def steps_on_gpu(device: "torch.device", checks: Checks) -> None:
    """Forward and backward of a call without states, on these kernels and without them."""
    import torch

    from .. import config, dispatch_log

    print(f"{torch.cuda.get_device_name(device)}: forward and backward, {TOKENS} tokens, {HEADS} heads, K = V = 128\n")
    call, few = (training_call(device, *size) for size in ((TOKENS, HEADS), (CHECKED_TOKENS, len(CHECKED_HEADS))))
    with dispatch_log.capture() as seen:
        ours = gradients(few, True)
    ran = [record.code for record in seen] == ["accepted", "backward"]
    checks(ran, "with the backend on, forward and backward ran on its kernels")
    with dispatch_log.capture() as seen:
        theirs = gradients(few, False)
    checks(not seen, f"with {config.ENABLED.name}=0, FLA did not ask it")
    exact = exact_gradients(few)
    for which, found in (("kda_cute", ours), ("without", theirs)):
        for name, x in found.items():
            checks.close(f"{which}, gradient of {name}", x, exact[name], GRADIENT_LIMIT)
    if ran and checks.failed == 0:
        print_times("forward and backward", *interleaved_times(lambda on: gradients(call, on), device, ROUNDS))
    print_log(dispatch_log)


def training_call(device: "torch.device", tokens: int, heads: int) -> dict[str, Any]:
    """Keyword arguments of a chunk_kda call without states, all tensors with gradients."""
    from .. import selfcheck

    call = selfcheck.case(device, lengths=(tokens,), heads=heads)
    call |= {"cu_seqlens": None, "initial_state": None, "output_final_state": False}
    return {name: x.requires_grad_() if hasattr(x, "requires_grad_") else x for name, x in call.items()}


def gradients(call: dict[str, Any], on: bool) -> dict[str, Any]:
    """Those of the sum of the outputs, weighted by v, with the backend switched on or off."""
    import torch
    from fla.ops.kda import chunk_kda

    names = [name for name, x in call.items() if isinstance(x, torch.Tensor)]
    with torch.enable_grad(), _models.switched(on):
        out, _ = chunk_kda(**call)
        return dict(zip(names, torch.autograd.grad(out, [call[name] for name in names], call["v"].detach())))


def exact_gradients(call: dict[str, Any]) -> dict[str, Any]:
    """The same in double precision."""
    import torch

    from ..reference import gold

    leaves = {name: x.detach().double().requires_grad_() for name, x in call.items() if isinstance(x, torch.Tensor)}
    with torch.enable_grad():
        out, _ = gold.forward(**{**call, **leaves})
        return dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), call["v"].detach().double())))


def model_on_gpu(device: "torch.device", name: str, checks: Checks) -> None:
    """Prefill of a whole model, on these kernels and without them."""
    import torch

    from .. import config, dispatch_log

    model = _models.build(_models.config(name), device)
    shape = model.config
    heads = f"{shape.num_heads} heads" + (f", {shape.num_v_heads} of v" if shape.num_v_heads else "")
    print(f"{torch.cuda.get_device_name(device)}: prefill of {TOKENS} tokens, mode {config.MODE.get()}")
    print(f"{name}: {_models.MODELS[name]}; {shape.num_hidden_layers} layers, {heads}, hidden size {shape.hidden_size}\n")
    ids = _models.random_tokens(shape, device, tokens=TOKENS)

    def prefill(on: bool, logits_to_keep: int = 1) -> Any:  # one, as before generating
        with _models.switched(on):
            return model(ids, use_cache=True, logits_to_keep=logits_to_keep).logits

    with dispatch_log.capture() as seen:
        ours = prefill(True, logits_to_keep=0)
    layers = len(_models.kda_layers(model))
    ran = [record.outcome for record in seen] == [dispatch_log.ACCEPTED] * layers
    checks(ran, f"with the backend on, each of the {layers} KDA layers ran on its kernels")
    with dispatch_log.capture() as seen:
        theirs = prefill(False, logits_to_keep=0)
    checks(not seen, f"with {config.ENABLED.name}=0, FLA did not ask it")
    error = relative_error(ours, theirs)
    checks(error <= MODEL_LIMIT, f"logits: relative difference {error:.1e} between the two, limit {MODEL_LIMIT:.1e}")
    del ours, theirs
    if ran and checks.failed == 0:
        print_times("prefill of the model", *interleaved_times(prefill, device, MODEL_ROUNDS))
    print_log(dispatch_log)


def interleaved_times(run: Callable[[bool], Any], device: "torch.device", rounds: int) -> tuple[float, float]:
    """Median microseconds of run(True) and of run(False), eager and in turns, after three of each."""
    import torch

    times: dict[bool, list[float]] = {True: [], False: []}
    with torch.cuda.device(device):
        for round_number in range(-3, rounds):
            for on, measured in times.items():
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda.synchronize()
                start.record()
                run(on)
                end.record()
                torch.cuda.synchronize()
                if round_number >= 0:
                    measured.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times[True]), statistics.median(times[False])


def print_times(what: str, ours: float, theirs: float) -> None:
    rows = [("kda_cute", f"{ours:.0f}", ""), ("without", f"{theirs:.0f}", f"{theirs / ours:.2f}x as long")]
    print("\n" + "\n".join(table((what, "median us", ""), rows)))


def print_log(dispatch_log: Any) -> None:
    print("\ndispatch log:")
    print("\n".join(decisions(dispatch_log.summary())), end="\n\n")


def compile_kernels(checks: Checks, training: bool = False) -> None:
    from .. import compiling

    for spec in compiling.specs_for_demo(training=training):
        start = time.perf_counter()
        artifact = compiling.build(spec)
        took = time.perf_counter() - start
        cubin, ptx = artifact.cubin or b"", artifact.ptx or ""
        whole = cubin[:4] == b"\x7fELF" and f".target {spec.arch}" in ptx
        checks(whole, f"compiled {spec}: {len(cubin)} bytes in {took:.1f} s")
    print()


def check_reference(checks: Checks) -> None:
    from .. import selfcheck
    from ..reference import exact, gold

    call = selfcheck.case("cpu")
    truth = gold.forward(**call)
    flags = (*IN_KERNEL, "safe_gate", "state_v_first", "output_final_state")
    arguments = {name: value for name, value in call.items() if name not in flags}
    for arithmetic in ("exact", "robust"):
        out, final_state = exact.forward(**arguments, scale=128**-0.5, arithmetic=arithmetic)
        checks.close(f"the {arithmetic} arithmetic in torch, output", out, truth[0])
        checks.close(f"the {arithmetic} arithmetic in torch, final state", final_state, truth[1])
    print()


def show_rules(checks: Checks) -> None:
    import torch

    from .. import eligibility

    known = h200()
    a100 = known._replace(capability=(8, 0), sm_count=108)
    queries = (1, TOKENS, HEADS, 128)
    cases: tuple[tuple[str, Facts, dict[str, Any], str], ...] = (
        ("prefill", known, {}, "accepted"),
        ("8 packed sequences", known, {"cu_seqlens": meta(9, dtype=torch.int32)}, "accepted"),
        ("unbounded gate", known, {"safe_gate": False, "lower_bound": None}, "accepted"),
        ("fp32 gate", known, {"g": meta(*queries, dtype=torch.float32)}, "accepted"),
        ("K-first state", known, {"state_v_first": False}, "accepted"),
        ("training", known._replace(grad_enabled=True), {"q": meta(*queries).requires_grad_()}, "accepted"),
        ("fp32 queries", known, {"q": meta(*queries, dtype=torch.float32)}, "input_dtype"),
        ("bound FLA refuses", known, {"lower_bound": -6.0}, eligibility.FLA_REFUSES),
        ("on an A100", a100, {}, "capability"),
    )
    prefill = _models.layer_calls(_models.config("kda-safe", layers=1, heads=HEADS), TOKENS)[0]
    print("What the rules decide, on an H200 where nothing else is said:")
    rows: list[tuple[Any, ...]] = []
    for name, facts, changes, expected in cases:
        rows.append((name, *decided({**prefill, **changes}, facts)))
        if rows[-1][2] != expected:
            checks(False, f"{name}: expected {expected}, got {rows[-1][2]}")
    print("\n".join(table(("call", "decision", "code", "kernel, or why not"), rows)), end="\n\n")


def show_layers(name: str, checks: Checks) -> None:
    """What the rules decide about each layer's own call, in a prefill on an H200."""
    calls = _models.layer_calls(_models.config(name), TOKENS)
    print(f"{name}: {_models.MODELS[name]}; its layers' calls in a prefill of {TOKENS} tokens, on an H200:")
    rows = [(layer, *decided(call, h200())) for layer, call in calls.items()]
    print("\n".join(table(("layer", "decision", "code", "kernel, or why not"), rows)), end="\n\n")
    checks(all(row[1] == "accepted" for row in rows), f"each of the {len(rows)} KDA layers' calls is accepted")


def decided(arguments: dict[str, Any], facts: "Facts") -> tuple[str, str, str]:
    """(decision, code, kernel or why not) on a call of chunk_kda."""
    from .. import eligibility, planning
    from ..call import parse

    call = parse((), arguments)
    accepted, code, message = eligibility.check(call, facts)
    if not accepted:
        return "declined", code, message
    plan = planning.plan(call, facts)
    return "accepted", code, " ".join([plan.kernel, *(f"{key}={value}" for key, value in plan.params.items())])


def h200() -> "Facts":
    from ..facts import Facts

    return Facts(capability=(9, 0), sm_count=132, grad_enabled=False, inference_mode=False, mode="auto", untested=True)


def meta(*shape: int, dtype: "torch.dtype | None" = None) -> "torch.Tensor":
    import torch

    return torch.empty(*shape, dtype=dtype or torch.bfloat16, device="meta")
