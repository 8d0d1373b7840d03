"""`fla-kda log FILE`: what a file written under FLA_KDA_CUTE_LOG says, as a table."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

from ._table import decisions


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("log", help="table of the decisions in a file written under FLA_KDA_CUTE_LOG")
    parser.add_argument("file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    try:
        with open(args.file, encoding="utf-8", errors="replace") as lines:
            counts, unreadable = count(lines)
    except OSError as error:
        print(f"fla-kda log: {error}", file=sys.stderr)
        return 2
    print("\n".join(decisions([(number, *decision) for decision, number in counts.items()])))
    if unreadable:
        print(f"{unreadable} lines are no decisions", file=sys.stderr)
    return 0


def count(lines: Iterable[str]) -> tuple[Counter[tuple[Any, ...]], int]:
    """(Counter of (outcome, code, message, kernel, params), number of lines that are no decision)."""
    counts: Counter[tuple[Any, ...]] = Counter()
    unreadable = 0
    for line in lines:
        try:
            record = json.loads(line)
            params = tuple((name, str(value)) for name, value in record["params"].items())
            counts[record["outcome"], record["code"], record["message"], record["kernel"], params] += 1
        except (ValueError, KeyError, TypeError, AttributeError):
            unreadable += 1
    return counts, unreadable
