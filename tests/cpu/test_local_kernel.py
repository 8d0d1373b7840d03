"""The local gradients' kernel, run on the CPU by local_emulator.py, against double precision; needs no GPU and no DSL."""

import itertools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import compiling
import pytest

GIVEN = {"gate": "given", "a_log": None, "dt_bias": None}
# Arguments of local_emulator.run. Sequences are `before` + `tail` tokens long; an emulated pair of a slot and a head takes 2 s.
CASES = {
    "one_slot": {"segment": [1, 2]},
    "bounded": {"tail": 1, "before": 64},
    "softplus": {"options": {"gate": "softplus", "dt_bias": "bf16"}, "tail": 33, "ctas": 2},
    "given": {"options": GIVEN | {"l2norm": False}, "tail": 17},
    "fp32_g": {"options": {"gate_dtype": "fp32", "beta": "twice", "a_log": None}, "tail": 63},
    "fp32_g_softplus_without_l2norm": {"options": {"gate": "softplus", "gate_dtype": "fp32", "l2norm": False}, "tail": 16},
    "grouped": {"options": {"beta": "given", "beta_dtype": "fp32", "a_log": "bf16"}, "heads": 4, "tail": 15},
    "grouped_given": {"options": GIVEN | {"gate_dtype": "fp32", "l2norm": False}, "heads": 4, "tail": 65, "segment": [2, 4]},
    "packed": {"options": {"cu_seqlens": "int32", "dt_bias": None}, "tail": 15, "before": 64, "spare": 70},
    "packed_segment": {"options": {"cu_seqlens": "int64"}, "tail": 9, "before": 120, "segment": [1, 3], "regime": "steep"},
}
FAST = {"one_slot"}
LIMIT = 6e-3  # of a relative error; that of rounding once to bf16 is 1.7e-3


def emulate(cases, folder):
    """Reports of cases, from a process of its own."""
    table, report = folder / "cases.json", folder / "report.json"
    table.write_text(json.dumps(cases))
    script = Path(__file__).parent / "local_emulator.py"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script, table, report], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(report.read_text())


@pytest.fixture(scope="module")
def reports(request, tmp_path_factory):
    """Name of a case -> report, of those whose tests are run."""
    names = compiling.selected(request, "emulated")
    halves = [half for half in (names[::2], names[1::2]) if half]
    with ThreadPoolExecutor(2) as two_at_a_time:
        made = two_at_a_time.map(lambda half: emulate([CASES[n] for n in half], tmp_path_factory.mktemp("emulate")), halves)
        return dict(zip(itertools.chain(*halves), itertools.chain(*made)))


@pytest.fixture(params=compiling.parameters(CASES, FAST, str))
def emulated(request, reports):
    return reports[request.param]


def test_emulated_case(emulated):
    assert not emulated["failures"]
    assert max(emulated["errors"].values()) < LIMIT, emulated["errors"]
