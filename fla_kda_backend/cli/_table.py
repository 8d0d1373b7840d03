"""Plain text tables."""

from collections.abc import Iterable, Sequence
from typing import Any


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Lines of a table, with columns of numbers aligned to the right. Without rows there are no lines."""
    if not rows:
        return []
    columns = list(zip(header, *rows))
    widths = [max(len(str(cell)) for cell in column) for column in columns]
    numeric = [all(isinstance(cell, (int, float)) for cell in column[1:]) for column in columns]

    def line(cells: Sequence[Any]) -> str:
        padded = [str(c).rjust(w) if n else str(c).ljust(w) for c, w, n in zip(cells, widths, numeric)]
        return "  ".join(padded).rstrip()

    return [line(header), line(["-" * width for width in widths]), *map(line, rows)]


def decisions(counts: Iterable[Sequence[Any]]) -> list[str]:
    """Lines that tell how many calls ran where, and why the others did not run here.

    counts: the fields of dispatch_log.Count, (count, outcome, code, message, kernel, params), each with params as pairs.
    """
    where = {"accepted": "kda_cute", "declined": "FLA's next", "failed": "FLA's own"}
    rows = []
    for count, outcome, code, message, kernel, params in sorted(counts, key=lambda row: (row[1], -row[0])):
        chosen = " ".join([kernel or "", *(f"{name}={value}" for name, value in params)]).strip()
        why = chosen if outcome == "accepted" else f"{code}: {message}"
        rows.append((count, where.get(outcome, outcome), outcome, why))
    total = sum(row[0] for row in rows)
    here = sum(row[0] for row in rows if row[2] == "accepted")
    return [
        *table(("calls", "ran on", "outcome", "kernel, or why not"), rows),
        f"{here} of {total} calls ran on kda_cute",
    ]
