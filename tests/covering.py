"""Few rows in which every pair, or triple, of choices meets: greedy, and the same in every run."""

import random
from itertools import combinations

CANDIDATES = 8  # rows tried for each one that is taken


def tuples_of(dimensions, strength, allowed):
    """Every allowed choice of values for `strength` of the dimensions, as sets of (dimension, value)."""
    found = set()
    for names in combinations(dimensions, strength):
        rows = [{}]
        for name in names:
            rows = [{**row, name: value} for row in rows for value in dimensions[name]]
        found |= {frozenset(row.items()) for row in rows if allowed(row)}
    return found


def met(row, strength):
    """The tuples that a row has."""
    return {frozenset(part) for part in combinations(row.items(), strength)}


def rows(dimensions, strength=2, allowed=lambda row: True):
    """Dicts with a value for each of `dimensions` ({name: values}), in which each allowed tuple occurs.

    allowed(row): whether the choices in an incomplete row may stand together. Whatever it allows it must allow to be
    completed.
    """
    order, missing, found = random.Random(0), tuples_of(dimensions, strength, allowed), []
    while missing:
        first = min(missing, key=lambda part: sorted(map(repr, part)))
        found.append(_best(dict(first), dimensions, strength, allowed, missing, order))
    return found


def completed(starts, dimensions, allowed=lambda row: True):
    """The rows `starts`, each with a value for every other one of `dimensions`, so that as many pairs as can be meet."""
    order, missing = random.Random(0), tuples_of(dimensions, 2, allowed)
    return [_best(start, dimensions, 2, allowed, missing, order) for start in starts]


def _best(start, dimensions, strength, allowed, missing, order):
    """The best of several rows that continue `start`; what it meets is no longer missing."""
    tried = [_filled(dict(start), dimensions, strength, allowed, missing, order) for _ in range(CANDIDATES)]
    best = max(tried, key=lambda row: len(met(row, strength) & missing))
    missing -= met(best, strength)
    return {name: best[name] for name in dimensions}


def _filled(row, dimensions, strength, allowed, missing, order):
    """The row completed, dimension by dimension in a random order, with the value that meets the most missing tuples."""
    names = [name for name in dimensions if name not in row]
    order.shuffle(names)
    for name in names:
        others = [frozenset(part) for part in combinations(row.items(), strength - 1)]
        choices = [value for value in dimensions[name] if allowed({**row, name: value})]
        order.shuffle(choices)
        row[name] = max(choices, key=lambda value: sum(part | {(name, value)} in missing for part in others))
    return row
