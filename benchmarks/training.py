"""Times and memory of forward and backward of chunk_kda: ours, and FLA's Triton kernels.

    python -m benchmarks.training [--shapes T8192-H6,..] [--gates bounded,softplus,given] [--decays strong,weak,mixed]
                          [--impl ours,triton] [--no-eager] [--no-graph] [--profile] [--untuned] [--json FILE] [--sets N]
    python -m benchmarks.training --list                      names of the shapes
    python -m benchmarks.training --specs FOLDER [..]         compiles what `ours` launches for the chosen cases (no GPU)

Gradient of the output alone, no states in or out; gate, l2norm and beta in the kernel ("given": the log decay is given, bf16).
Per case and implementation: whether every gradient is right (three heads against double precision; all of them finite, and
written into memory that held NaN), microseconds of a step by replay of a CUDA graph (median; of the forward alone too), eager
microseconds of a step, MiB of peak memory beside the inputs. Implementations take turns; input sets change from step to step,
so that no step finds its inputs in the L2. --untuned: Triton in its first configurations, for a check alone, not for times.
"""

import argparse
import gc
import json
import math
import os
import statistics
import sys
import time
from dataclasses import replace

import torch

from fla_kda_backend.kernels.variant import Variant
from fla_kda_backend.testing import DIM, LOWER_BOUND, Form, Normal, make, standard_normal

RAGGED = (1300, 547, 2048, 963, 271, 3063)
SHAPES = {
    **{f"T8192-H{heads}": ((8192,), heads, False) for heads in (6, 12, 32, 48, 96)},
    "8x1024-H12": ((1024,) * 8, 12, True),
    "ragged-H12": (RAGGED, 12, True),
    "T65536-H6": ((65536,), 6, False),
    "T2048-H6": ((2048,), 6, False),
}
GATES = {
    "bounded": Variant(final_state=None),
    "softplus": Variant("softplus", final_state=None),
    "given": Variant("given", a_log=None, dt_bias=None, final_state=None),
}
DECAYS = ("strong", "weak", "mixed")
ENVIRONMENT = {
    "ours": {"FLA_KDA_CUTE": "1", "FLA_KDA_CUTE_STRICT": "1", "FLA_FLASH_KDA": "0"},
    "triton": {"FLA_KDA_CUTE": "0", "FLA_FLASH_KDA": "0"},
}
NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
LIMIT = {"A_log": 5e-2, "dt_bias": 2e-2}  # relative errors; others 1.5e-2


# ---- calls -------------------------------------------------------------------------------------------------------------
def variant_of(gate, packed):
    return replace(GATES[gate], cu_seqlens="int64" if packed else None)


def log_decay(decay, shape, normal):
    """Log decay a token: strong 2.5, weak 0.001, mixed between 0.001 and 3 by channel; jitter of a tenth."""
    if decay == "mixed":
        low, high = math.log(1e-3 / 0.9), math.log(3.0 / 1.1)
        channels = -torch.exp(low + normal.uniform(*shape[-2:]) * (high - low))
    else:
        channels = torch.full(shape[-2:], {"strong": -2.5, "weak": -0.001}[decay], device=normal.device)
    return channels * (1 + 0.1 * (2 * normal.uniform(*shape) - 1))


def inputs(shape, gate, decay, seed, device):
    lengths, heads, packed = SHAPES[shape]
    variant = variant_of(gate, packed)
    normal = Normal(device, shape, gate, decay, seed)

    def draw(form):
        def g(A_log, dt_bias):
            wanted = log_decay(decay, form.shape("g"), normal)
            if variant.gate == "given":
                return wanted
            rate = A_log.exp()[:, None]
            raw = torch.logit(wanted / LOWER_BOUND) / rate if variant.gate == "bounded" else (-wanted / rate).expm1().log()
            return raw - dt_bias

        return standard_normal(form, normal, g, spread=0.2)

    call = make(Form.of(variant, lengths, heads), draw, device)
    d_out = normal(*call["v"].shape).bfloat16() if device != "meta" else torch.empty_like(call["v"])
    return call, d_out


class Step:
    """A training step of one input set."""

    def __init__(self, call, d_out):
        self.leaves = {name: call[name].detach().requires_grad_() for name in NAMES if call.get(name) is not None}
        self.call, self.d_out = call | self.leaves, d_out
        self.plain = call

    def __call__(self):
        from fla.ops.kda import chunk_kda

        out = chunk_kda(**self.call)[0]
        return out, torch.autograd.grad(out, list(self.leaves.values()), self.d_out)

    def forward(self):
        from fla.ops.kda import chunk_kda

        with torch.no_grad():
            return chunk_kda(**self.plain)[0]


class selected:
    def __init__(self, name):
        self.changes = ENVIRONMENT[name]

    def __enter__(self):
        self.before = {name: os.environ.get(name) for name in self.changes}
        os.environ.update(self.changes)

    def __exit__(self, *_):
        for name, value in self.before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


# ---- check -------------------------------------------------------------------------------------------------------------
def check(name, step, gate):
    """({gradient: relative error}, what is wrong)."""
    from fla_kda_backend import dispatch_log
    from fla_kda_backend.reference import backward, gold  # noqa: F401

    wrong = []
    torch.use_deterministic_algorithms(True, warn_only=True)  # fresh memory holds NaN
    try:
        with selected(name), dispatch_log.capture() as seen:
            out, grads = step()
    finally:
        torch.use_deterministic_algorithms(False)
    kernels = [(record.outcome, record.kernel) for record in seen]
    if name == "ours" and kernels != [("accepted", "wy64"), ("accepted", "wy64_backward")]:
        wrong.append(f"ran {[(r.outcome, r.code, r.message, r.kernel) for r in seen]}")
    if name == "triton" and seen:
        wrong.append(f"ran {kernels}")
    params = " ".join(
        f"{k}={v}" for record in seen for k, v in record.params if k in ("segments", "overlap", "replay", "beside") and v
    )
    found = dict(zip(step.leaves, grads))
    heads = step.plain["v"].shape[2]
    few = sorted({0, heads // 2, heads - 1})
    some = dict(step.plain)
    for each in NAMES:
        x = some.get(each)
        if x is not None:
            some[each] = x.reshape(heads, -1)[few] if each in ("A_log", "dt_bias") else x[:, :, few]
    wanted = backward.gradients(step.d_out[:, :, few], None, rounded=False, **some)
    errors = {}
    for each, x in found.items():
        if not x.isfinite().all():
            wrong.append(f"d{each}: {int((~x.isfinite()).sum())} not finite")
            continue
        x = x.reshape(heads, -1)[few].reshape(wanted[each].shape) if each in ("A_log", "dt_bias") else x[:, :, few]
        errors[each] = ((x.double() - wanted[each]).norm() / wanted[each].norm()).item()
        if not errors[each] <= LIMIT.get(each, 1.5e-2):
            wrong.append(f"d{each}: error {errors[each]:.1e}")
    if not out.isfinite().all():
        wrong.append("out not finite")
    return errors, wrong, params


# ---- times -------------------------------------------------------------------------------------------------------------
def capture(name, functions):
    with selected(name):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for function in functions:
                function()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = [function() for function in functions]
    return graph, kept


def replays(graphs, count, seconds=0.4):
    """{name: median microseconds of a step}."""

    def queue(rounds):
        events = {name: [] for name in graphs}
        for _ in range(rounds):
            for name, (graph, _) in graphs.items():
                a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                a.record()
                graph.replay()
                b.record()
                events[name].append((a, b))
        torch.cuda.synchronize()
        return {name: [a.elapsed_time(b) * 1e3 / count for a, b in pairs] for name, pairs in events.items()}

    warm = queue(3)
    a_round = sum(min(values) for values in warm.values()) * count
    rounds = int(min(max(seconds * 1e6 / a_round, 11), 101))
    return {name: statistics.median(values) for name, values in queue(rounds).items()}


def eager(names, steps, blocks=7, calls=12):
    times = {name: [] for name in names}
    for block in range(-1, blocks):
        for name in names:
            with selected(name):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for n in range(calls):
                    steps[n % len(steps)]()
                torch.cuda.synchronize()
                if block >= 0:
                    times[name].append((time.perf_counter() - start) / calls * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def peak(name, step):
    """MiB beside the inputs."""
    with selected(name):
        step()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20


def profiled(step):
    """{kernel: microseconds a step}."""
    from torch.profiler import ProfilerActivity, profile

    with selected("ours"):
        step()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(5):
                step()
            torch.cuda.synchronize()
    found = {}
    for e in seen.events():
        if e.device_type == torch.autograd.DeviceType.CUDA:
            time_us = getattr(e, "device_time", None) or getattr(e, "cuda_time", 0)
            found[e.name] = found.get(e.name, 0.0) + time_us / 5
    return found


def short(name):
    for mark in ("PrepareWY64", "ChainReplayWY64", "ChainWY64", "ChainStates", "ReverseChain", "LocalGradients"):
        if mark in name:
            return mark
    return name[:60]


def measure(shape, gate, decay, chosen):
    lengths, heads, _ = SHAPES[shape]
    tokens = sum(lengths)
    one = tokens * heads * DIM * 2 * 10  # bytes of a step, about
    count = chosen.sets or max(1, min(4, math.ceil(4 * (50 << 20) / one)))
    steps = [Step(*inputs(shape, gate, decay, seed, "cuda")) for seed in range(count)]
    if "cu_seqlens" in steps[0].call:  # the layers of a model share one, and FLA keeps what it derives from it
        for step in steps[1:]:
            step.call["cu_seqlens"] = step.plain["cu_seqlens"] = steps[0].call["cu_seqlens"]
    rows, good = {}, []
    for name in chosen.impl:
        row = rows[name] = {"shape": shape, "gate": gate, "decay": decay, "impl": name}
        started = time.time()
        try:
            errors, wrong, params = check(name, steps[0], gate)
        except Exception as error:
            errors, wrong, params = {}, [f"{type(error).__name__}: {str(error)[:300]}"], ""
            if "CUDA error" in str(error):
                raise
        row |= {"errors": errors, "wrong": wrong, "params": params, "first_s": time.time() - started}
        if not wrong:
            good.append(name)
    graphs, forwards = {}, {}
    for name in good:
        rows[name]["peak_mib"] = peak(name, steps[0])
        if not chosen.no_graph:
            try:
                graphs[name] = capture(name, steps)
                forwards[name] = capture(name, [step.forward for step in steps])
                if name == "ours":
                    replayed(rows[name], graphs[name], steps)
            except Exception as error:
                torch.cuda.synchronize()
                graphs.pop(name, None)
                rows[name]["uncaptured"] = f"{type(error).__name__}: {str(error)[:200]}"
    for name, value in (replays(graphs, count) if graphs else {}).items():
        rows[name]["graph_us"] = value
    for name, value in (replays(forwards, count) if forwards else {}).items():
        rows[name]["forward_us"] = value
    if good and not chosen.no_eager:
        for name, value in eager(good, steps).items():
            rows[name]["eager_us"] = value
    if chosen.profile and "ours" in good:
        rows["ours"]["kernels"] = {}
        for name, value in profiled(steps[0]).items():
            rows["ours"]["kernels"][short(name)] = rows["ours"]["kernels"].get(short(name), 0.0) + value
    del graphs, forwards, steps
    gc.collect()
    torch.cuda.empty_cache()
    return rows


def replayed(row, captured, steps):
    """Whether a replay gives the bits of an eager step."""
    graph, kept = captured
    graph.replay()
    torch.cuda.synchronize()
    with selected("ours"):
        out, grads = steps[0]()
    if not (torch.equal(out, kept[0][0]) and all(map(torch.equal, grads, kept[0][1]))):
        row["wrong"].append("a replay has other bits")


def show(rows):
    for name, row in rows.items():
        number = lambda key: f"{row[key]:8.0f}" if row.get(key) is not None else "       -"  # noqa: E731, B023
        errors = " ".join(f"{n}={e:.1e}" for n, e in row["errors"].items())
        times = "  ".join(f"{key.split('_')[0]} {number(key)}" for key in ("graph_us", "forward_us", "eager_us", "peak_mib"))
        line = f"{row['shape']:12s} {row['gate']:9s}{row['decay']:7s}{name:7s} {times}  | {errors} {row['params']}"
        line += f"  WRONG: {'; '.join(row['wrong'])}" if row["wrong"] else ""
        print(line + (f"  not captured: {row['uncaptured']}" if "uncaptured" in row else ""), flush=True)
        for kernel, value in row.get("kernels", {}).items():
            print(f"      {value:8.1f} us  {kernel}")
    if {"ours", "triton"} <= set(rows):
        a, b = rows["ours"], rows["triton"]
        parts = [f"{key} {b[key] / a[key]:.2f}x" for key in ("graph_us", "eager_us") if a.get(key) and b.get(key)]
        if a.get("peak_mib") and b.get("peak_mib"):
            parts.append(f"memory {a['peak_mib'] / b['peak_mib']:.2f}")
        print(f"      ours against Triton: {', '.join(parts)}", flush=True)


def specs_of(shape, gate):
    """The kernels of forward and backward; in segments, too, where the workspace is large."""
    from fla_kda_backend import planning
    from fla_kda_backend.compiling.spec import KernelSpec
    from fla_kda_backend.kernels.families import FAMILIES

    lengths, heads, packed = SHAPES[shape]
    variant = variant_of(gate, packed)
    plan = planning.wy64(sum(lengths), len(lengths), heads, 132, variant)
    found = [KernelSpec("wy64", "sm_90a", variant, plan.schedule)]
    family = FAMILIES["wy64_backward"]
    schedule = family.schedule(max_ctas=132)
    if planning.beside_chains(sum(lengths), len(lengths), heads, 132, variant):
        schedule = replace(schedule, beside=True)
    found.append(KernelSpec("wy64_backward", "sm_90a", variant, schedule))
    if family.record.workspace_bytes(sum(lengths) // 64 + len(lengths), heads) > planning.workspace_limit():
        found.append(KernelSpec("wy64_backward", "sm_90a", variant, schedule.in_segments()))
        found.append(KernelSpec("wy64_backward", "sm_90a", variant, replace(schedule.in_segments(), stage="states")))
    return found


def untune():
    import fla.ops.kda  # noqa: F401
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import KernelInterface

    for name, module in list(sys.modules.items()):
        for kernel in list(vars(module).values()) if name.startswith("fla.") else ():
            while isinstance(kernel, KernelInterface) and not isinstance(kernel, Autotuner):
                kernel = getattr(kernel, "fn", None)
            if isinstance(kernel, Autotuner):
                kernel.configs = kernel.configs[:1]


def main():
    parser = argparse.ArgumentParser()
    listed = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--shapes", type=listed, default=["T8192-H6", "T8192-H32", "T8192-H96"])
    parser.add_argument("--gates", type=listed, default=["bounded"])
    parser.add_argument("--decays", type=listed, default=list(DECAYS))
    parser.add_argument("--impl", type=listed, default=["ours", "triton"])
    parser.add_argument("--json")
    parser.add_argument("--sets", type=int)
    parser.add_argument("--specs")
    for flag in ("list", "no-eager", "no-graph", "profile", "untuned"):
        parser.add_argument(f"--{flag}", action="store_true")
    chosen = parser.parse_args()
    if chosen.list:
        return print(*SHAPES)
    cases = [(shape, gate) for shape in chosen.shapes for gate in chosen.gates]
    if chosen.specs:
        from fla_kda_backend.compiling import builder

        for spec in dict.fromkeys(spec for case in cases for spec in specs_of(*case)):
            print(builder.export(spec, chosen.specs), flush=True)
        return None
    import fla.ops.kda  # noqa: F401  (what register looks for)

    from fla_kda_backend import register

    assert register(), "the backend could not be registered"
    if chosen.untuned:
        untune()
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    everything = []
    for shape, gate in cases:
        for decay in chosen.decays:
            rows = measure(shape, gate, decay, chosen)
            show(rows)
            everything += rows.values()
            if chosen.json:
                with open(chosen.json, "w") as file:
                    json.dump(everything, file, indent=1)
    return sum(bool(row["wrong"]) for row in everything)


if __name__ == "__main__":
    sys.exit(main())
