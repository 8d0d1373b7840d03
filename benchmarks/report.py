"""`python -m benchmarks.report [CSV]`: the newest run as the README's table, in Markdown."""

import argparse

from . import results
from .bench import ratio
from .cases import CASES, GATE_SPREAD, TARGETS

NAMES = {"triton": "FLA Triton", "exact": "exact", "auto": "auto", "flashkda": "FlashKDA", "cudnn": "cuDNN"}
OURS = ("exact", "auto")


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("csv", nargs="?", default=results.H200)
    parser.add_argument("--targets", action="store_true", help="add the times that auto is to keep, and whether it does")
    chosen = parser.parse_args(arguments)
    rows = results.newest(results.read(chosen.csv))
    print("\n".join([*report(rows, chosen.targets), *gate_spreads(rows)]))


def report(rows, targets=False):
    """Markdown lines for the rows of one run."""
    if not rows:
        return ["No results."]
    run = rows[0]
    present = [name for name in NAMES if any(row["impl"] == name for row in rows)]
    ours = [name for name in OURS if name in present]
    header = ["case", "gate", *(f"{NAMES[name]}: graph / eager / host" for name in present)]
    header += [f"{NAMES[name]}: Triton's graph / eager time over ours" for name in ours if "triton" in present]
    header += ["FlashKDA's graph time over exact"] if "exact" in present else []
    header += ["auto's graph: must / aim", "kept"] if targets else []
    lines = [
        f"{run['gpu']}, driver {run['driver']}, torch {run['torch']}, Triton {run['triton']}, FLA {run['fla']},"
        f" CuTe DSL {run['dsl']}, version {run['version']}, {run['date']}. Microseconds, medians.",
        "",
        f"    {run['command']}",
        "",
        "| " + " | ".join(header) + " |",
        "|" + "---|" * len(header),
    ]
    for case, gate in dict.fromkeys((row["case"], row["gate"]) for row in rows):
        found = {row["impl"]: row for row in rows if (row["case"], row["gate"]) == (case, gate)}
        cells = [case, gate, *(times(found.get(name)) for name in present)]
        if "triton" in present:
            cells += [ratios(found.get("triton"), found.get(name)) for name in ours]
        if "exact" in present:
            cells.append(ratio(CASES[case].flashkda_us, found.get("exact", {}).get("graph_us")) or "-")
        if targets:
            cells += target_cells(case, found.get("auto"))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def target_cells(case, row):
    """The case's targets, and which of them the row keeps."""
    must, aim = TARGETS.get(case, (None, None))
    shown = f"{must or '-'} / {aim or '-'}"
    if row is None or not row["graph_us"] or must is None:
        return shown, "-"
    took = float(row["graph_us"])
    return shown, "aim" if aim is not None and took <= aim else "must" if took <= must else "NO"


def gate_spreads(rows):
    """Lines about how much a kind of gate matters to each of our implementations; none where only one was measured."""
    lines = []
    for case, name in dict.fromkeys((row["case"], row["impl"]) for row in rows if row["impl"] in OURS):
        found = {row["gate"]: float(row["graph_us"]) for row in rows
                 if (row["case"], row["impl"]) == (case, name) and row["graph_us"]}  # fmt: skip
        if len(found) > 1:
            slow, fast = max(found, key=found.get), min(found, key=found.get)
            spread = found[slow] / found[fast]
            verdict = "" if spread <= GATE_SPREAD else f", over {GATE_SPREAD}"
            lines.append(f"- {case}, {NAMES[name]}: {slow} gates take {spread:.3f} times as long as {fast} ones{verdict}")
    return ["", *lines] if lines else []


def times(row):
    if row is None:
        return "-"
    return " / ".join(f"{float(row[name]):.0f}" if row[name] else "-" for name in ("graph_us", "eager_us", "host_us"))


def ratios(other, ours):
    if other is None or ours is None:
        return "-"
    return " / ".join(ratio(other[name], ours[name]) or "-" for name in ("graph_us", "eager_us"))


if __name__ == "__main__":
    main()
