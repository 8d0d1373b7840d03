"""`python -m benchmarks.bench`: chunk_kda on our kernels against FLA's Triton path, checked first, then timed in turns.

One line for each case, gate and implementation is appended to the CSV. An implementation that fails a check gets FAIL
and no line, and the exit status is 1.
"""

import argparse
import shlex
from datetime import datetime, timezone

from fla_kda_backend import register
from fla_kda_backend.cli._table import table

from . import cases, checks, results, specs, timing
from .implementations import IMPLEMENTATIONS

DEFAULT = "triton,exact,auto"


def needed_specs():
    """Compiled kernels of all cases in both modes, on an H200."""
    calls = [cases.inputs(case, device="meta") for case in cases.CASES.values()]
    found = [spec for call in calls for mode in ("exact", "auto") for spec in specs.of_mode(call, mode)]
    return list(dict.fromkeys(found))


def main(arguments=None):
    chosen = parse(arguments)
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU")
    register()  # for a checkout that is not installed
    implementations = [IMPLEMENTATIONS[name] for name in chosen.impls]
    missing = [f"{item.name}: {reason}" for item in implementations if (reason := item.missing())]
    if missing:
        raise SystemExit("\n".join(missing))
    run = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **results.machine(),
        "command": command(chosen),
    }
    rows, failed = [], 0
    with torch.no_grad():
        for name in chosen.cases:
            for gate in chosen.gates:
                measured, failures = measure(cases.CASES[name], gate, implementations)
                for line in failures:
                    print(f"FAIL  {name} {gate} {line}", flush=True)
                failed += bool(failures)
                measured = [{**run, **row} for row in measured]
                results.append(chosen.out, measured)
                rows += measured
                print(f"done  {name} {gate}", flush=True)
    print("\n".join(summary(rows)))
    if failed:
        print(f"{failed} of {len(chosen.cases) * len(chosen.gates)} cases FAILED a check")
    return 1 if failed else 0


def parse(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=names_of(cases.CASES), default="all", help="all, or names with commas between")
    parser.add_argument("--impls", type=names_of(IMPLEMENTATIONS), default=DEFAULT)
    parser.add_argument("--gates", type=names_of(cases.GATES), default="mixed", help="all, or of strong,weak,mixed")
    parser.add_argument("--out", default=results.H200, help="the CSV that lines are appended to")
    return parser.parse_args(arguments)


def names_of(known):
    def names(text):
        chosen = list(known) if text == "all" else text.split(",")
        unknown = [name for name in chosen if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)} must be all, or of {', '.join(known)}")
        return chosen

    return names


def command(chosen):
    """What repeats the run, without the place of its CSV."""
    every = chosen.cases == list(cases.CASES)
    words = ["python", "-m", "benchmarks.bench", "--cases", "all" if every else ",".join(chosen.cases)]
    return shlex.join([*words, "--impls", ",".join(chosen.impls), "--gates", ",".join(chosen.gates)])


def measure(case, gate, implementations):
    """(rows without the run's columns, lines about failures)."""
    implementations = [item for item in implementations if item.takes(case)]
    sets = cases.input_sets(case, gate)
    checked = checks.check_all(implementations, sets[0])
    good = [item for item in implementations if not checked[item.name].failures]
    times = timing.measure(good, sets) if good else {}
    for item in good:
        check_captured(item, checked[item.name], times[item.name])
    rows = [
        row(case, gate, item.name, checked[item.name], times[item.name]) for item in good if not checked[item.name].failures
    ]
    failures = [f"{name}: {text}" for name, found in checked.items() for text in found.failures]
    return rows, failures


def check_captured(implementation, checked, times):
    """What was timed is what was checked: the graph's last replay left the same result."""
    if times.captured is None:
        if implementation.ours:
            checked.failures.append(f"cannot be captured: {times.uncaptured}")
        else:
            print(f"note  {implementation.name} cannot be captured, no graph time: {times.uncaptured}")
        return
    for name, x in zip(("out", "final_state"), times.captured):
        difference = checks.relative_error(x, getattr(checked, name))
        # Ours promise the same bits in every run.
        if not difference <= (0 if implementation.ours else checks.LIMIT_OTHERS):
            checked.failures.append(f"{name} of the captured call is {difference:.1e} from the eager one's")


def row(case, gate, implementation, checked, times):
    def micro(value):
        return "" if value is None else f"{value:.2f}"

    return {
        "case": case.name,
        "tokens": case.tokens,
        "sequences": case.sequences,
        "heads": case.heads,
        "gate": gate,
        "impl": implementation,
        "kernel": checked.kernel,
        **{name: micro(getattr(times, name)) for name in ("graph_us", "graph_p20", "graph_p80", "eager_us", "host_us")},
        "err_out": f"{checked.err_out:.3e}",
        "err_state": f"{checked.err_state:.3e}",
    }


def summary(rows):
    """Lines of a table, with the ratios of Triton's times of the same run and FlashKDA's published one to each."""
    triton = {(row["case"], row["gate"]): row for row in rows if row["impl"] == "triton"}
    header = ("case", "gate", "impl", "graph", "p20", "p80", "eager", "host", "err out", "err state")
    header += ("triton/graph", "triton/eager", "flashkda/graph", "kernel")
    lines = []
    for line in rows:
        base = triton.get((line["case"], line["gate"]), {})
        times = [line[name] for name in ("graph_us", "graph_p20", "graph_p80", "eager_us", "host_us")]
        ratios = [ratio(base.get(name), line[name]) for name in ("graph_us", "eager_us")]
        ratios.append(ratio(cases.CASES[line["case"]].flashkda_us, line["graph_us"]))
        lines.append(
            [
                *(line[name] for name in ("case", "gate", "impl")),
                *(round(float(value), 1) if value else "" for value in times),
                *(line[name] for name in ("err_out", "err_state")),
                *ratios,
                line["kernel"],
            ]
        )
    return table(header, lines)


def ratio(other, ours):
    """`other` / `ours` as text; empty where one of them was not measured."""
    return f"{float(other) / float(ours):.2f}" if other and ours else ""


if __name__ == "__main__":
    raise SystemExit(main())
