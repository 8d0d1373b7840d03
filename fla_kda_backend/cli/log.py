"""`fla-kda log FILE`: what a file written under FLA_KDA_CUTE_LOG says, as a table."""

import json
import sys
from collections import Counter

from ._table import decisions


def add_parser(subparsers):
    parser = subparsers.add_parser("log", help="table of the decisions in a file written under FLA_KDA_CUTE_LOG")
    parser.add_argument("file")
    parser.set_defaults(run=run)


def run(args):
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


def count(lines):
    """(Counter of (outcome, code, message, kernel, params), number of lines that are no decision)."""
    counts, unreadable = Counter(), 0
    for line in lines:
        try:
            entry = json.loads(line)
            params = tuple((name, str(value)) for name, value in entry["params"].items())
            counts[entry["outcome"], entry["code"], entry["message"], entry["kernel"], params] += 1
        except (ValueError, KeyError, TypeError, AttributeError):
            unreadable += 1
    return counts, unreadable
