"""Compile many variants of a kernel family in a process of its own; choose few of them that cover all pairs of options."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

_NONE = SimpleNamespace(params={})


def pairwise(candidates):
    """Few of the candidates (tuples of option values) in which every two values that occur together do so again."""

    def pairs(row):
        return set(itertools.combinations(enumerate(row), 2))

    missing = set().union(*map(pairs, candidates))
    chosen = []
    while missing:
        best = max(candidates, key=lambda row: len(pairs(row) & missing))
        missing -= pairs(best)
        chosen.append(best)
    return chosen


def parameters(numbers, fast, label):
    """Test parameters of numbers of variants, those that are not in `fast` marked slow."""
    return [pytest.param(n, id=label(n), marks=() if n in fast else pytest.mark.slow) for n in numbers]


def selected(request, name):
    """The values of a parameter in those tests of the requesting module that this session runs."""
    items = (item for item in request.session.items if item.module is request.module)
    return list(dict.fromkeys(item.callspec.params[name] for item in items if name in getattr(item, "callspec", _NONE).params))


def reports(family, arch, options, folder):
    """What cpu/compile_matrix.py says of each of `options` (fields of Variant and Schedule); needs the DSL, no GPU."""
    table, target = Path(folder) / f"{family}-{arch}-options.json", Path(folder) / f"{family}-{arch}.json"
    table.write_text(json.dumps(options))
    script = Path(__file__).parent / "cpu" / "compile_matrix.py"
    command = [sys.executable, script, family, arch, table, target]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(target.read_text())
