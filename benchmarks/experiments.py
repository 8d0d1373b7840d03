"""`python -m benchmarks.experiments`: the column split's published control experiments, on this GPU.

BV = 32, 64 and 128 value columns per CTA with 4, 8 and 16 warps on one SM, and 3 to 8 input stages: all must give the same
bits, and none may hang. A warp owns at least the 8 columns of an MMA, so a CTA has at most BV / 8 warps. More warps on an
SM are several CTAs, and these need more heads. With BV = 32, 33, 66 and 99 heads give each of the 132 SMs of an H200 one,
two and three CTAs (a fourth does not fit the registers). With BV = 64, 66 and 132 heads give each SM one and two.

Exit status 1 where bits differ or an experiment hangs.
"""

import itertools
import os
import statistics
import threading
from contextlib import contextmanager
from typing import NamedTuple

from fla_kda_backend.cli._table import table
from fla_kda_backend.kernels.column_split.contract import VALUE_DIM, Schedule
from fla_kda_backend.kernels.variant import Variant
from fla_kda_backend.planning import Plan

from . import cases, checks, specs

TOKENS = 8192
SM_COUNT = 132  # of an H200
TIME_LIMIT = 60.0  # seconds per experiment, compiling included; its calls take milliseconds
REPEATS = 9


class Experiment(NamedTuple):
    bv: int
    warps: int  # of a CTA
    stages: int = 4
    heads: int = 24  # at most one CTA per SM, at any BV

    @property
    def ctas(self):
        return self.heads * (VALUE_DIM // self.bv)

    @property
    def ctas_of_sm(self):
        """CTAs on the fullest SM; the experiments have no more than run side by side."""
        return -(-self.ctas // SM_COUNT)

    @property
    def shape(self):
        return (*self, self.ctas, self.ctas_of_sm, self.ctas_of_sm * self.warps)

    @property
    def plan(self):
        schedule = Schedule(arithmetic="exact", bv=self.bv, warps=self.warps, stages=self.stages)
        return Plan("column_split", Variant(), schedule, self.ctas)


EXPERIMENTS = (
    # every split of BV over the warps of one CTA per SM
    *(Experiment(bv, warps) for bv, warps in ((32, 4), (64, 4), (64, 8), (128, 4), (128, 8), (128, 16))),
    # stages of the input ring
    *(Experiment(bv, 4, stages) for bv in (32, 128) for stages in (3, 5, 6, 7, 8)),
    # more warps on one SM than one CTA has
    Experiment(32, 4, 3, heads=33),
    Experiment(32, 4, 3, heads=66),
    Experiment(64, 8, 3, heads=66),
    Experiment(32, 4, 3, heads=99),
    Experiment(64, 8, 3, heads=132),
)


def case_of(heads):
    return cases.Case(f"fixed-T{TOKENS}-H{heads}", (TOKENS,), heads, False, 0)


def needed_specs():
    """Compiled kernels of all experiments, on an H200."""
    found = []
    for experiment in EXPERIMENTS:
        found += specs.of_plan(cases.inputs(case_of(experiment.heads), device="meta"), experiment.plan)
    return list(dict.fromkeys(found))


def main():
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU")
    rows = []
    with torch.no_grad():
        for heads, group in itertools.groupby(EXPERIMENTS, key=lambda experiment: experiment.heads):
            call = cases.inputs(case_of(heads))
            reference = Reference(call)
            for experiment in group:
                with time_limit(experiment):
                    same, call_us, recurrence_us = run(experiment, call, reference)
                bits = "same" if same else "DIFFER"
                rows.append((*experiment.shape, round(call_us, 1), round(recurrence_us, 1), bits))
    header = ("BV", "warps", "stages", "heads", "CTAs", "CTAs/SM", "warps/SM", "call us", "recurrence us", "bits")
    print("\n".join(table(header, rows)))
    differ = sum(row[-1] != "same" for row in rows)
    print("None hung. " + (f"FAIL: {differ} differ in bits." if differ else "All bits are the same."))
    return 1 if differ else 0


class Reference:
    """The exact reference's bits in a few heads, and those of the first experiment in all."""

    def __init__(self, call):
        self.heads = checks.checked_heads(call["q"].shape[2])
        self.few = checks.reference_bits(cases.few_heads(call, self.heads))
        self.all = None

    def same(self, out, final_state):
        import torch

        if self.all is None:
            self.all = out, final_state
        pairs = zip((out[:, :, self.heads], final_state[:, self.heads], out, final_state), (*self.few, *self.all))
        return all(torch.equal(a, b) for a, b in pairs)


def run(experiment, call, reference):
    """(whether the bits are right, median microseconds of a call on the GPU, those of its recurrence kernel)."""
    import torch

    from fla_kda_backend import op
    from fla_kda_backend.call import parse

    parsed, plan = parse((), call), experiment.plan
    with checks.poisoned():
        same = reference.same(*op.run(parsed, plan))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op.run(parsed, plan)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    kernels = checks.launched(lambda: op.run(parsed, plan), 5)
    recurrence = sum(value for name, value in kernels.items() if "RecurrenceSplit" in name)
    return same, statistics.median(start.elapsed_time(end) * 1e3 for start, end in events), recurrence


@contextmanager
def time_limit(experiment):
    """Ends the process where the block takes longer: nothing else ends a kernel that hangs."""

    def leave():
        print(f"HANGS  {experiment}", flush=True)
        os._exit(1)

    timer = threading.Timer(TIME_LIMIT, leave)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


if __name__ == "__main__":
    raise SystemExit(main())
