"""What must hold before anything is timed: which kernels ran, every element written, the bits, the error."""

from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from fla_kda_backend import dispatch_log
from fla_kda_backend.reference import exact, gold

from .cases import few_heads

# Relative error against double precision; a wrong result is off by 0.1 and more. FlashKDA's bf16 state costs the most.
LIMIT = {"exact": 3e-2, "flashkda": 3e-2}
LIMIT_OTHERS = 1.5e-2
AGREEMENT = 5e-2  # between two implementations, in any head

KERNEL_MARK = "fla_kda_backendkernels"  # in the name of every kernel of this package
FAMILY_KERNELS = {  # by the kernel family in the log, and whether it replays
    ("column_split", False): ("PrepareChunk16", "RecurrenceSplit"),
    ("wy64", False): ("PrepareWY64", "ChainWY64"),
    ("wy64", True): ("PrepareWY64", "ChainReplayWY64"),
}


@dataclass
class Checked:
    """An implementation's result on one call, and what is wrong with it."""

    out: torch.Tensor = None  # [B, T, H, V]
    final_state: torch.Tensor = None  # [N, H, V, K]
    kernel: str = ""
    err_out: float = float("nan")
    err_state: float = float("nan")
    failures: list[str] = field(default_factory=list)


def checked_heads(heads):
    return sorted({0, heads // 2, heads - 1})


def check_all(implementations, call):
    """{name: Checked} on one call. Double precision is computed in a few heads. In the others each
    implementation must agree with the first one."""
    heads = checked_heads(call["q"].shape[2])
    few = few_heads(call, heads)
    truth = gold.forward(**few)
    results = {}
    for implementation in implementations:
        checked = results[implementation.name] = Checked()
        try:
            check_one(implementation, call, checked)
        except Exception as error:
            checked.failures.append(f"{type(error).__name__}: {error}")
            continue
        picked = checked.out[:, :, heads], checked.final_state[:, heads]
        checked.err_out, checked.err_state = (relative_error(*pair) for pair in zip(picked, truth))
        limit = LIMIT.get(implementation.name, LIMIT_OTHERS)
        if not max(checked.err_out, checked.err_state) <= limit:
            checked.failures.append(f"error {checked.err_out:.1e}, state {checked.err_state:.1e}; limit {limit:.1e}")
        if implementation.name == "exact":
            bits = reference_bits(few)
            if not all(torch.equal(*pair) for pair in zip(picked, bits)):
                checked.failures.append("not the bits of the exact reference")
    compare_heads(results)
    return results


def check_one(implementation, call, checked):
    with implementation.selected():
        with poisoned(), dispatch_log.capture() as seen:
            checked.out, checked.final_state = implementation(call)
        kernels = list(launched(lambda: implementation(call)))
    record = seen[0] if seen else None
    checked.kernel = describe(record, kernels)
    checked.failures += wrong_kernels(implementation, record, kernels)
    for name, x in (("out", checked.out), ("final_state", checked.final_state)):
        if not torch.isfinite(x).all():
            checked.failures.append(f"{name} has elements that are not finite, or that nothing wrote")


def reference_bits(call):
    """(out, final_state) of the exact reference."""
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "lower_bound", "initial_state", "cu_seqlens")
    arguments = {name: call[name] for name in names if name in call}
    return exact.forward(**arguments, scale=call["q"].shape[-1] ** -0.5)


def compare_heads(results):
    """Add a failure where a head differs from the first implementation's."""
    done = [checked for checked in results.values() if checked.out is not None]
    for other in done[1:]:
        for name, heads_at in (("out", 2), ("final_state", 1)):
            worst = max(
                relative_error(a, b)
                for a, b in zip(getattr(other, name).unbind(heads_at), getattr(done[0], name).unbind(heads_at))
            )
            if not worst <= AGREEMENT:
                other.failures.append(f"a head's {name} is {worst:.1e} from the first implementation's")


def relative_error(found, wanted):
    found, wanted = found.double(), wanted.double()
    return ((found - wanted).norm() / wanted.norm()).item()


@contextmanager
def poisoned():
    """Every fresh torch.empty is filled with NaN (integers with their largest value)."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def launched(run, repeats=1):
    """{kernel's name: microseconds per call of run()}, in the order of their first launch."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    kernels = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    times = {}
    for event in sorted(kernels, key=lambda event: event.time_range.start):
        times[event.name] = times.get(event.name, 0.0) + event.time_range.elapsed_us() / repeats
    return times


def describe(record, kernels):
    """The column `kernel`: the kernel and its parameters, or who ran instead of ours."""
    if record is not None and record.outcome == dispatch_log.ACCEPTED:
        return " ".join([record.kernel, *(f"{name}={value}" for name, value in record.params)])
    reason = "" if record is None else f", ours: {record.outcome} {record.code}"
    return f"{len(kernels)} kernels{reason}"


def wrong_kernels(implementation, record, kernels):
    """What contradicts that `implementation` ran, given the dispatch log's record and the names of all kernels."""
    ours = [name for name in kernels if KERNEL_MARK in name]
    if not kernels:
        return ["the profiler saw no kernel"]
    if not implementation.ours:
        failures = [f"{len(ours)} kernels of ours ran"] if ours else []
        if implementation.name == "triton" and not any("chunk_kda_fwd_kernel" in name for name in kernels):
            failures.append("FLA's Triton kernels did not run")
        return failures
    if record is None or record.outcome != dispatch_log.ACCEPTED:
        why = "FLA did not ask" if record is None else f"{record.outcome}: {record.code}: {record.message}"
        return [f"our kernels did not run: {why}"]
    expected = FAMILY_KERNELS[record.kernel, dict(record.params).get("replay", False)]
    failures = [f"{part} did not run" for part in expected if not any(part in name for name in ours)]
    if len(ours) < len(kernels):
        failures.append(f"others ran too: {', '.join(name for name in kernels if name not in ours)}")
    return failures
