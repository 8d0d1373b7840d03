"""`python -m benchmarks.trials export DIR` and `python -m benchmarks.trials [check | CASE ..]`: wy64.TRIALS, timed.

The first compiles what the second launches; there FLA_KDA_CUTE_CACHE_DIR=DIR finds it. The second compares every trial's
results with those of the plain schedule, bit by bit, and prints medians of graph replays taken in turns.
"""

import contextlib
import statistics
import sys

import torch

from fla_kda_backend import op, planning
from fla_kda_backend.call import parse

from . import cases, specs, timing

P, O, R = (False, False), (True, False), (True, True)  # overlap, replay
C = "cluster"
K = C + " reads"
HINTS = ("", " inputs", " writes", " inputs writes")
cases.CASES |= {f"fixed-T8192-H{h}": cases.Case(f"fixed-T8192-H{h}", (8192,), h, False, None) for h in (16, 20, 32, 64)}
TRIALS = {
    "fixed-T8192-H24": [(P, ""), (O, C), *((O, K + h) for h in HINTS), (O, K + " link=110"), (O, K + " link=130"),
                        (O, K + " inputs link=110"), (O, K + " tasks=24"), (R, C)],
    "fixed-T8192-H48": [(P, ""), *((O, K + h) for h in HINTS), (O, K + " tasks=40"), (O, K + " inputs tasks=40"),
                        (O, K + " inputs writes tasks=40"), (O, K + " inputs link=75"), (O, K + " inputs tasks=40 link=110")],
    "fixed-T8192-H96": [(P, ""), *((O, K + h) for h in HINTS), (O, K + " tasks=40"), (O, K + " inputs tasks=40"),
                        (O, K + " inputs writes tasks=40"), (O, K + " inputs link=75"), (O, K + " inputs tasks=48")],
    "fixed-T8192-H32": [(P, ""), (O, K), (O, K + " inputs"), (O, K + " tasks=40"), (O, K + " inputs tasks=48")],
    "fixed-T8192-H64": [(P, ""), (O, K), (O, K + " inputs"), (O, K + " inputs tasks=40")],
    "fixed-T8192-H12": [(R, ""), *((R, C + h) for h in HINTS), (R, C + " link=60"), (O, K), (O, K + " link=70")],
    "fixed-T8192-H16": [(R, C), (O, K), (O, K + " inputs"), (O, K + " link=110")],
    "fixed-T8192-H20": [(O, K), (O, K + " inputs"), (O, K + " link=110")],
    "fixed-T8192-H6": [(R, ""), *((R, C + h) for h in HINTS), (R, C + " link=40")],
    "128x64-H12": [(P, ""), (P, "direct"), (P, "direct inputs"), (P, "direct writes"), (P, "direct " + C), (P, "direct " + K)],
    "8x1024-H12": [(P, ""), *((P, K + h) for h in HINTS), (P, K + " direct")],
    "varlen6-H12": [(P, ""), *((P, K + h) for h in HINTS), (P, K + " direct")],
    "fixed-T65536-H6": [(R, ""), (R, C), (R, C + " inputs"), (R, C + " inputs writes")],
}


def plan_of(schedule, trial):
    overlap, replay = schedule
    options = [("max_ctas", 132), ("overlap", overlap), ("replay", replay)]
    words = [word for word in trial.split() if word != C]
    options += [("cluster", True)] if C in trial.split() else []
    return planning.Plan("wy64", (*options, *([("trial", " ".join(words))] if words else ())), 132)


class Trial:
    def __init__(self, schedule, trial):
        self.name = f"{ {P: 'plain', O: 'overlap', R: 'replay'}[schedule]} {trial}".strip()
        self.plan = plan_of(schedule, trial)
        self.selected = contextlib.nullcontext

    def __call__(self, inputs):
        return op.run(parse((), inputs), self.plan)


def needed_specs():
    found = []
    for name, trials in TRIALS.items():
        call = cases.inputs(cases.CASES[name], device="meta")
        found += [spec for trial in trials for spec in specs.of_plan(call, plan_of(*trial))]
    return list(dict.fromkeys(found))


def check():
    """Sequences of every length up to a few chunks: "direct" against the plain schedule."""
    for heads in (1, 5, 12):
        lengths = (1, 15, 16, 17, 31, 63, 64, 0, 65, 127, 128, 130, 64, 64, 33, 300, 2)
        inputs = cases.inputs(cases.Case("ragged", lengths, heads, True, None))
        with torch.inference_mode():
            expected = Trial(P, "")(inputs)
            for words in ("direct", "direct inputs writes", "skip", "cluster"):
                found = Trial(P, words)(inputs)
                errors = [((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(found, expected)]
                same = all(torch.equal(a, b) for a, b in zip(found, expected))
                print(f"{heads} heads, {words:24}", "same bits" if same else f"OTHER BITS, output and state off by {errors}")


def main(names):
    if names[:1] == ["check"]:
        check()
        return
    if names[:1] == ["export"]:
        from fla_kda_backend.compiling.builder import export

        for spec in needed_specs():
            print(export(spec, names[1]), flush=True)
        return
    for name in names or TRIALS:
        sets = cases.input_sets(cases.CASES[name], "mixed")
        trials = [Trial(*trial) for trial in TRIALS[name]]
        with torch.inference_mode():
            expected = trials[0](sets[0])
            same = {}
            for trial in trials:
                found = [trial(sets[0]) for _ in range(2)]
                same[trial.name] = all(torch.equal(a, b) for one in found for a, b in zip(one, expected))
            graphs = {trial.name: timing.capture(trial, sets)[0] for trial in trials}
            times = timing.replay_times(graphs)
        for trial in trials:
            took = statistics.median(times[trial.name]) / len(sets)
            print(f"{name:16} {trial.name:48} {took:7.1f} us  {'same bits' if same[trial.name] else 'OTHER BITS'}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
