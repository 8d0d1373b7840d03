"""The table of calls that the GPU tests cover: what meets in it, what its calls are, and its compiled variants."""

from dataclasses import asdict, replace

import emulated_launch
import pytest
import torch
from call_table import ARITHMETIC, AT_RUN_TIME, BY_GATE, CASES, KIMI, KINDS, STORAGE, Case, allowed
from calls import INFERENCE
from covering import completed, met, rows, tuples_of
from golden import relative_error
from gpu import specs
from hypothesis import given, settings
from hypothesis import strategies as st
from kda_calls import call_of, laid_out, plain
from kda_inputs import TOKEN_AXIS

from fla_kda_backend import eligibility, op, planning
from fla_kda_backend.call import parse
from fla_kda_backend.reference import gold


# ---- coverage ----------------------------------------------------------------------------------------------------------
@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(2, 4), min_size=3, max_size=5), st.sampled_from([1, 2, 3]))
def test_covering_rows_cover(sizes, strength):
    dimensions = {str(number): tuple(range(size)) for number, size in enumerate(sizes)}
    few = rows(dimensions, strength, lambda row: not (row.get("0") == 0 and row.get("1") == 1))
    assert all(tuple(row) == tuple(dimensions) and not (row["0"] == 0 and row["1"] == 1) for row in few)
    every = tuples_of(dimensions, strength, lambda row: not (row.get("0") == 0 and row.get("1") == 1))
    assert set().union(*(met(row, strength) for row in few)) >= every


def test_completed_rows_keep_what_they_had():
    starts = [{"a": n % 2} for n in range(6)]
    found = completed(starts, {"a": (0, 1), "b": (0, 1), "c": (0, 1, 2)})
    assert [row["a"] for row in found] == [row["a"] for row in starts]
    assert set().union(*(met(row, 2) for row in found)) == tuples_of({"a": (0, 1), "b": (0, 1), "c": (0, 1, 2)}, 2, bool)


def uncovered(of, dimensions, strength):
    found = (met({name: row[name] for name in dimensions}, strength) for row in of)
    return tuples_of(dimensions, strength, allowed) - set().union(*found)


def test_every_three_choices_of_the_arithmetic_meet():
    assert not uncovered([asdict(kind) for kind in KINDS], ARITHMETIC, 3)
    assert len(set(KINDS)) == len(KINDS) <= 60


def test_every_two_choices_meet():
    dimensions = ARITHMETIC | STORAGE | AT_RUN_TIME
    assert not uncovered([case._asdict() | asdict(case.kind) for case in CASES], dimensions, 2)
    assert len(set(CASES)) == len(CASES) >= 200
    assert not uncovered([asdict(kind) for kind in specs.ROBUST_KINDS], ARITHMETIC | STORAGE, 2)


def test_cases_are_small():
    assert max(sum(case.lengths) for case in CASES) <= 450 and {case.heads for case in CASES} == {2, 4}


# ---- the calls -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: case.name)
def test_a_call_is_of_its_kind(case):
    """Every value finite, accepted by the rules, and planned as the variant that specs.py lists."""
    call = parse((), call_of(case))
    assert all(x.isfinite().all() for _, x in call.inputs)
    assert eligibility.check(call, INFERENCE).accepted
    plan = planning.plan(call, INFERENCE)
    assert plan.kernel == "wy64" and not plan.params["replay"]
    assert plan.variant == case.kind
    assert call.heads == case.heads and call.qk_heads == 2


@pytest.mark.parametrize("name", [*BY_GATE, "kimi"])
@pytest.mark.parametrize("setting", ["wy64", "robust"])
def test_the_listed_variant_is_what_is_launched(name, setting, monkeypatch):
    kind = {**BY_GATE, "kimi": KIMI}[name]
    launched = emulated_launch.without_gpu(monkeypatch)
    facts = INFERENCE if setting == "wy64" else INFERENCE._replace(capability=(10, 0))
    for states in (None, 64, 32):
        each = replace(kind, intermediate_states=states)
        call = parse((), call_of(Case(each, "normal", 17, 0)))
        op.run(call, planning.plan(call, facts))
        assert launched.pop()[0] == specs.spec_of(each, "robust" if states == 32 else setting)
        assert launched == []


def test_steep_gates_decay_by_thousands_and_by_nothing():
    for gate in ("softplus", "given"):
        call = call_of(Case(BY_GATE[gate], "steep", 0, 150))
        decay = call["g"].double()
        if gate == "softplus":
            decay = gold.log_decay(decay, call["A_log"], call["dt_bias"], None)
        assert decay.max() < 0 and decay.min() < -3000 and (decay > -1e-2).any()
    assert call_of(Case(BY_GATE["softplus"], "steep", 0, 150))["A_log"].exp().max() == pytest.approx(200)


@pytest.mark.parametrize("case", [case for case in CASES if sum(case.lengths) < 60][::4], ids=lambda case: case.name)
def test_the_plain_call_has_the_same_result(case):
    call = call_of(case)
    out, state = gold.forward(**call)
    out_plain, state_plain = gold.forward(**plain(call))
    assert relative_error(out_plain, out) < 1e-12
    assert relative_error(state_plain.mT if case.kind.state_v_first else state_plain, state) < 1e-12


@pytest.mark.parametrize("layout", AT_RUN_TIME["layout"])
def test_a_layout_moves_values_and_changes_none(layout):
    call = call_of(Case(KIMI, "normal", 17, 64, heads=4))
    before = {name: call[name] for name in TOKEN_AXIS}
    moved = laid_out(before, layout)
    assert all(torch.equal(moved[name], x) for name, x in before.items())
    assert [moved["v"].is_contiguous(), moved["v"].data_ptr() % 16 == 0] == {
        "whole": [True, True], "fused": [False, True], "transposed": [False, True], "unaligned": [True, False],
    }[layout]  # fmt: skip
