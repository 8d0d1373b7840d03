"""Which variant a call runs on: value columns a CTA, warps, grid."""

import pytest
from calls import H200, prefill, tensor

from fla_kda_backend import planning
from fla_kda_backend.call import parse


@pytest.mark.parametrize("arithmetic", ["exact", "robust"])
@pytest.mark.parametrize("sm_count", [1, 78, 114, 132, 148, 170])
def test_fewest_columns_that_fit_one_cta_on_each_sm(arithmetic, sm_count):
    for tasks in range(1, 400):
        plan = planning.column_split(arithmetic, tasks, 1, sm_count)
        bv = plan.params["bv"]
        assert plan.kernel == "column_split" and plan.should_run
        assert plan.grid == tasks * (128 // bv)
        fits = [choice for choice in (32, 64, 128) if tasks * (128 // choice) <= sm_count]
        assert bv == (fits[0] if fits else 128)


@pytest.mark.parametrize(
    "sequences, heads, bv",
    [(1, 6, 32), (1, 12, 32), (1, 24, 32), (1, 33, 32), (1, 34, 64), (1, 48, 64), (1, 66, 64), (1, 67, 128),
     (1, 96, 128), (11, 3, 32), (2, 48, 128), (1024, 64, 128)],
)  # fmt: skip
def test_on_an_h200(sequences, heads, bv):
    plan = planning.column_split("exact", sequences, heads, 132)
    assert plan.params == {"arithmetic": "exact", "bv": bv, "warps": 4, "grid": sequences * heads * 128 // bv}


@pytest.mark.parametrize(
    "arithmetic, bv, warps",
    [("exact", 32, 4), ("exact", 64, 4), ("exact", 128, 4), ("robust", 32, 4), ("robust", 64, 4), ("robust", 128, 8)],
)
def test_only_a_full_width_fp32_state_takes_eight_warps(arithmetic, bv, warps):
    assert planning.warps(arithmetic, bv) == warps


@pytest.mark.parametrize("mode, arithmetic", [("exact", "exact"), ("auto", "robust")])
def test_mode_chooses_the_arithmetic(mode, arithmetic):
    plan = planning.plan(parse((), prefill(batch=3, heads=5)), H200._replace(mode=mode))
    assert plan == planning.column_split(arithmetic, 3, 5, H200.sm_count)


def test_packed_sequences_count_as_tasks():
    call = parse((), prefill(batch=1, heads=8, initial_state=None, cu_seqlens=tensor(8 + 1)))
    assert planning.plan(call, H200).grid == 8 * 8 * 2  # 64 tasks: 64 columns a CTA
