"""`python -m benchmarks.schedules`: the schedules of the 64-token kernels beside each other, on this GPU.

Medians of CUDA-graph replays of one sequence, in turns. A star marks what planning chooses: the limits in planning.py come
from such a table. Exit status 1 where a schedule's bits are not those of the plain one.
"""

import argparse
import contextlib
import statistics

from fla_kda_backend import op, planning
from fla_kda_backend.call import parse
from fla_kda_backend.cli._table import table
from fla_kda_backend.kernels.variant import Variant
from fla_kda_backend.kernels.wy64 import contract

from . import cases, specs, timing

HEADS, TOKENS = (6, 12, 13, 16, 20, 24, 28, 32, 40, 48, 64, 96), (8192, 2048)
SCHEDULES = {"plain": (False, False), "replay": (False, True), "overlap": (True, False), "both": (True, True)}
REPLAY_HEADS = 33  # a replay needs as many CTAs again as there are tasks, two per head


class Schedule:
    """overlap, replay: of the plan."""

    def __init__(self, name, sm_count=specs.H200.sm_count):
        overlap, replay = SCHEDULES[name]
        schedule = contract.Schedule(max_ctas=sm_count, overlap=overlap, replay=replay)
        self.name, self.plan = name, planning.Plan("wy64", Variant(), schedule, sm_count)
        self.selected = contextlib.nullcontext

    def __call__(self, call):
        return op.run(parse((), call), self.plan)


def case_of(heads, tokens):
    return cases.Case(f"fixed-T{tokens}-H{heads}", (tokens,), heads, False, None)


def schedules_of(heads):
    return [name for name, (_, replay) in SCHEDULES.items() if not replay or heads <= REPLAY_HEADS]


def planned(heads, tokens, sm_count):
    """The name of the schedule that planning chooses."""
    params = planning.wy64(tokens, 1, heads, sm_count, Variant()).params
    return next(name for name, chosen in SCHEDULES.items() if chosen == (params["overlap"], params["replay"]))


def needed_specs():
    """Compiled kernels of all schedules, on an H200."""
    call = cases.inputs(case_of(HEADS[0], TOKENS[0]), device="meta")
    return [spec for name in SCHEDULES for spec in specs.of_plan(call, Schedule(name).plan)]


def numbers(text):
    return [int(word) for word in text.split(",")]


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.schedules", description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=numbers, default=HEADS, help="with commas between")
    parser.add_argument("--tokens", type=numbers, default=TOKENS, help="with commas between")
    chosen = parser.parse_args(arguments)
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU")
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    rows, differ = [], 0
    with torch.inference_mode():
        for tokens in chosen.tokens:
            for heads in chosen.heads:
                times, same = measure(case_of(heads, tokens), [Schedule(name, sm_count) for name in schedules_of(heads)])
                differ += not same
                star = planned(heads, tokens, sm_count)
                cells = [f"{times[name]:.1f}{'*' * (name == star)}" if name in times else "" for name in SCHEDULES]
                rows.append([tokens, heads, *cells, "same" if same else "DIFFER"])
    print("\n".join(table(("tokens", "heads", *SCHEDULES, "bits"), rows)))
    return 1 if differ else 0


def measure(case, schedules):
    """({name: median us per call}, whether all bits agree)."""
    import torch

    sets = cases.input_sets(case, "mixed")
    graphs, results = {}, []
    for schedule in schedules:
        graphs[schedule.name], found = timing.capture(schedule, sets)
        results.append(found)
    times = timing.replay_times(graphs)
    for found in results:
        for x in found[0]:
            x.fill_(float("nan"))
    for graph in graphs.values():
        graph.replay()
    torch.cuda.synchronize()
    plain = results[0][0]
    same = all(torch.equal(a, b) for found in results for a, b in zip(found[0], plain))
    return {name: statistics.median(values) / len(sets) for name, values in times.items()}, same


if __name__ == "__main__":
    raise SystemExit(main())
