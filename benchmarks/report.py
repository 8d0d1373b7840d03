"""`python -m benchmarks.report [CSV]`: the newest run as the README's table, in Markdown."""

import argparse

from . import results
from .bench import ratio
from .cases import CASES

NAMES = {"triton": "FLA Triton", "exact": "exact", "auto": "auto", "flashkda": "FlashKDA", "cudnn": "cuDNN"}
OURS = ("exact", "auto")


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("csv", nargs="?", default=results.H200)
    print("\n".join(report(results.newest(results.read(parser.parse_args(arguments).csv)))))


def report(rows):
    """Markdown lines for the rows of one run."""
    if not rows:
        return ["No results."]
    run = rows[0]
    present = [name for name in NAMES if any(row["impl"] == name for row in rows)]
    ours = [name for name in OURS if name in present]
    header = ["case", "gate", *(f"{NAMES[name]}: graph / eager / host" for name in present)]
    header += [f"{NAMES[name]}: Triton's graph / eager time over ours" for name in ours if "triton" in present]
    header += ["FlashKDA's graph time over exact"] if "exact" in present else []
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
        lines.append("| " + " | ".join(cells) + " |")
    return lines


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
