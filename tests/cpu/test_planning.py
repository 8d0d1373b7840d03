"""Which kernels a call runs on, and in which variant: family, value columns per CTA, warps, schedule, grid."""

from dataclasses import replace

import pytest
import torch
from calls import GROUPED, H200, HALVES, INFERENCE, KIMI, SOFTPLUS, UNGATED, prefill, tensor

from fla_kda_backend import planning
from fla_kda_backend.call import parse
from fla_kda_backend.compiling import ARCHS
from fla_kda_backend.kernels.variant import Variant

PACKED = Variant(cu_seqlens="int32", initial_state="fp32")
BATCH = Variant(initial_state="fp32")


@pytest.mark.parametrize("arithmetic", ["exact", "robust"])
@pytest.mark.parametrize("sm_count", [1, 78, 114, 132, 148, 170])
def test_fewest_columns_that_fit_one_cta_on_each_sm(arithmetic, sm_count):
    for tasks in range(1, 400):
        plan = planning.column_split(arithmetic, tasks, 1, sm_count, BATCH)
        bv = plan.params["bv"]
        assert plan.kernel == "column_split"
        assert plan.grid == tasks * (128 // bv)
        fits = [choice for choice in (32, 64, 128) if tasks * (128 // choice) <= sm_count]
        assert bv == (fits[0] if fits else 128)


@pytest.mark.parametrize(
    "sequences, heads, bv",
    [(1, 6, 32), (1, 12, 32), (1, 24, 32), (1, 33, 32), (1, 34, 64), (1, 48, 64), (1, 66, 64), (1, 67, 128),
     (1, 96, 128), (11, 3, 32), (2, 48, 128), (1024, 64, 128)],
)  # fmt: skip
def test_on_an_h200(sequences, heads, bv):
    plan = planning.column_split("exact", sequences, heads, 132, BATCH)
    assert plan.params == {"arithmetic": "exact", "bv": bv, "warps": 4, "grid": sequences * heads * 128 // bv}


@pytest.mark.parametrize(
    "arithmetic, bv, warps",
    [("exact", 32, 4), ("exact", 64, 4), ("exact", 128, 4), ("robust", 32, 4), ("robust", 64, 4), ("robust", 128, 8)],
)
def test_only_a_full_width_fp32_state_takes_eight_warps(arithmetic, bv, warps):
    assert planning.warps(arithmetic, bv) == warps


CAPABILITIES = sorted(ARCHS)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_exact_mode_is_the_column_split_everywhere(capability):
    facts = H200._replace(mode="exact", capability=capability, sm_count=148)
    plan = planning.plan(parse((), prefill(batch=3, tokens=4096, heads=5)), facts)
    assert plan == planning.column_split("exact", 3, 5, 148, BATCH)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_auto_mode_is_the_64_token_kernels_where_wgmma_is(capability):
    facts = H200._replace(capability=capability, sm_count=148)
    plan = planning.plan(parse((), prefill(batch=3, tokens=4096, heads=5)), facts)
    if capability == (9, 0):
        assert plan == planning.wy64(3 * 4096, 3, 5, 148, BATCH)
    else:
        assert plan == planning.column_split("robust", 3, 5, 148, BATCH)


@pytest.mark.parametrize("mode", ["exact", "auto"])  # 64 columns a CTA in either
def test_packed_sequences_count_as_tasks(mode):
    call = parse((), prefill(batch=1, heads=8, initial_state=None, cu_seqlens=tensor(8 + 1, dtype=torch.int32)))
    assert planning.plan(call, H200._replace(mode=mode)).grid == 8 * 8 * 2


def test_packed_tokens_are_counted_once():
    """Four sequences of 2,048 tokens on average replay, of 2,047 not."""
    for tokens, replay in ((4 * 2048, True), (4 * 2048 - 1, False)):
        offsets = tensor(4 + 1, dtype=torch.int32)
        call = parse((), prefill(batch=1, tokens=tokens, heads=2, initial_state=None, cu_seqlens=offsets))
        assert planning.plan(call, H200).params["replay"] == replay


NEITHER, OVERLAP, REPLAY, BOTH = (False, False), (True, False), (False, True), (True, True)


@pytest.mark.parametrize("sequences, heads, tokens, packed, schedule, grid", [
    (1, 6, 8192, False, BOTH, 132), (1, 12, 8192, True, BOTH, 132), (1, 13, 8192, False, OVERLAP, 26),
    (1, 20, 8192, True, OVERLAP, 40), (1, 32, 8192, False, OVERLAP, 32), (1, 33, 8192, False, OVERLAP, 34),
    (1, 48, 8192, True, OVERLAP, 32), (1, 96, 8192, False, OVERLAP, 32), (1, 128, 8192, False, OVERLAP, 32),
    (1, 129, 8192, False, NEITHER, 132), (2, 24, 4096, False, OVERLAP, 32), (1, 6, 65536, False, BOTH, 132),
    (1, 6, 2048, False, BOTH, 132), (1, 6, 2047, False, NEITHER, 12), (6, 12, 8192, True, NEITHER, 132),
    (2, 4, 4096, False, BOTH, 132), (2, 4, 4096, True, REPLAY, 132), (2, 10, 4096, True, REPLAY, 132),
    (2, 11, 4096, True, NEITHER, 44), (4, 4, 4096, False, NEITHER, 32), (128, 12, 8192, True, NEITHER, 132),
])  # fmt: skip
def test_schedule_on_an_h200(sequences, heads, tokens, packed, schedule, grid):
    plan = planning.wy64(tokens, sequences, heads, 132, PACKED if packed else BATCH)
    assert plan.kernel == "wy64"
    assert plan.params == {"max_ctas": 132, "overlap": schedule[0], "replay": schedule[1], "grid": grid}


@pytest.mark.parametrize("sm_count", [1, 3, 4, 66, 78, 114, 132, 264])
def test_replay_needs_idle_sms(sm_count):
    """The bound on tasks keeps its share of the SMs, and every spine leaves a CTA that replays."""
    for heads in range(1, 200):
        plan = planning.wy64(2 * 8192, 2, heads, sm_count, PACKED)
        assert plan.params["max_ctas"] == sm_count and not plan.params["overlap"]
        assert plan.params["replay"] == (4 * heads <= 40 * sm_count // 132)
        if plan.params["replay"]:
            assert plan.grid == max(sm_count, 8 * heads)  # what ChainReplayWY64.grid launches
        else:
            assert plan.grid == min(4 * heads, sm_count)  # ChainWY64.grid


@pytest.mark.parametrize("sm_count", [1, 3, 4, 16, 66, 78, 114, 132, 264])
def test_overlap_leaves_sms_to_prepare(sm_count):
    """It ends its CTAs on as many SMs as the chain has CTAs, and needs others to go on."""
    for heads in range(1, 200):
        plan = planning.wy64(8192, 1, heads, sm_count, BATCH)
        assert plan.params["overlap"] == (2 * heads <= planning.OVERLAP_TASKS * sm_count // 132)
        assert not plan.params["overlap"] or plan.params["replay"] or plan.grid < sm_count


@pytest.mark.parametrize("sequences, heads", [(0, 4), (4, 0), (0, 0)])
def test_nothing_to_do_is_planned_too(sequences, heads):
    assert planning.wy64(0, sequences, heads, 132, BATCH).params == {
        "max_ctas": 132, "overlap": False, "replay": False, "grid": 0,
    }  # fmt: skip


@pytest.mark.parametrize("mode", ["auto", "exact"])
@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (12, 0)])
def test_family_depends_on_no_shape(capability, mode):
    """What FLA_KDA_CUTE_DETERMINISTIC promises."""
    facts = H200._replace(mode=mode, capability=capability)
    calls = [prefill(batch=batch, tokens=tokens, heads=heads)
             for batch in (1, 8, 100) for tokens in (1, 64, 5000, 100_000) for heads in (1, 6, 96)]  # fmt: skip
    plans = [planning.plan(parse((), call), facts) for call in calls]
    assert len({(plan.kernel, plan.params.get("arithmetic")) for plan in plans}) == 1


def test_neither_overlap_nor_replay_in_segments():
    assert planning.wy64(150_000, 1, 12, 132, BATCH).params == {"max_ctas": 132, "overlap": True, "replay": True, "grid": 132}
    params = planning.wy64(170_000, 1, 12, 132, BATCH).params  # more than the workspace may have
    assert not params["overlap"] and not params["replay"]


# ---- what the call asks for ------------------------------------------------------------------------------------------
f32 = torch.float32
VARIANTS = [
    ({}, {}),
    ({"safe_gate": False}, {}),
    ({"chunk_size": 32, "use_graph": True, "disable_recompute": True}, {}),  # which change nothing
    (SOFTPLUS, {"gate": "softplus"}),
    ({**SOFTPLUS, "A_log": tensor(4), "dt_bias": None}, {"gate": "softplus", "a_log": "bf16", "dt_bias": None}),
    ({"A_log": None}, {"a_log": None}),
    ({"dt_bias": tensor(512), "A_log": tensor(1, 1, 4, 1, dtype=f32)}, {"dt_bias": "bf16"}),
    (UNGATED, {"gate": "given", "a_log": None, "dt_bias": None}),  # lower_bound, A_log and dt_bias are ignored
    ({"g": tensor(2, 80, 4, 128, dtype=f32)}, {"gate_dtype": "fp32"}),
    ({"beta": tensor(2, 80, 4, dtype=f32)}, {"beta_dtype": "fp32"}),
    ({"allow_neg_eigval": True}, {"beta": "twice"}),
    ({"use_beta_sigmoid_in_kernel": False}, {"beta": "given"}),
    ({"use_qk_l2norm_in_kernel": False}, {"l2norm": False}),
    ({"state_v_first": 0}, {"state_v_first": False}),
    ({"return_intermediate_states": True}, {"intermediate_states": 64}),
    (KIMI, {"gate": "given", "gate_dtype": "fp32", "a_log": None, "dt_bias": None, "beta": "given", "beta_dtype": "fp32",
            "state_v_first": False}),
]  # fmt: skip


@pytest.mark.parametrize("changes, variant", VARIANTS)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_variant_of_a_call(capability, changes, variant):
    call = parse((), prefill(**changes))
    plan = planning.plan(call, INFERENCE._replace(capability=capability))
    assert plan.kernel == ("wy64" if capability == (9, 0) else "column_split") and plan.reason == ""
    assert plan.variant.changes == variant and plan.params.items() >= variant.items()
    assert plan.variant == replace(Variant(**variant), initial_state="fp32", final_state="fp32")
    assert plan.params.get("arithmetic", "robust") == "robust"


@pytest.mark.parametrize("changes, storage", [
    ({}, ("fp32", "fp32", None)),
    ({"initial_state": None, "output_final_state": False}, (None, None, None)),
    ({"batch": 1, "initial_state": None, "cu_seqlens": tensor(3, dtype=torch.int32)}, (None, "fp32", "int32")),
    ({"batch": 1, "initial_state": None, "cu_seqlens": tensor(3, dtype=torch.int64)}, (None, "fp32", "int64")),
])  # fmt: skip
def test_dtypes_of_states_and_offsets(changes, storage):
    plan = planning.plan(parse((), prefill(**changes)), H200)
    assert (plan.variant.initial_state, plan.variant.final_state, plan.variant.cu_seqlens) == storage
    assert not {"initial_state", "final_state", "cu_seqlens"} & plan.params.keys()


@pytest.mark.parametrize("wrong", [
    {"gate": "linear"}, {"gate": "given"}, {"gate": "given", "a_log": None}, {"gate": "softplus", "a_log": None},
    {"gate_dtype": "fp16"}, {"beta": None}, {"beta_dtype": "fp16"}, {"intermediate_states": 16}, {"initial_state": "fp16"},
    {"final_state": "int32"}, {"cu_seqlens": "fp32"}, {"l2norm": None},
], ids=str)  # fmt: skip
def test_what_is_no_variant(wrong):
    with pytest.raises(ValueError, match="unsupported with gate"):
        Variant(**wrong)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_states_of_32_tokens_are_the_column_splits(capability):
    """The 64-token kernels pass every other of them by."""
    facts = INFERENCE._replace(capability=capability)
    call = parse((), prefill(**HALVES, chunk_size=32))
    plan = planning.plan(call, facts)
    assert plan == planning.column_split("robust", 2, 4, 132, Variant.of(call))
    assert plan.params["intermediate_states"] == 32 and plan.params["arithmetic"] == "robust"
    assert planning.plan(parse((), prefill(**HALVES)), facts).params["intermediate_states"] == 64


def test_states_leave_nothing_to_replay():
    for states in (False, True):
        call = parse((), prefill(batch=1, tokens=8192, heads=2, return_intermediate_states=states))
        assert planning.plan(call, INFERENCE).params["replay"] == (not states)


def test_grouped_values_count_by_value_heads():
    call = parse((), prefill(heads=1, **GROUPED))
    assert planning.plan(call, H200) == planning.wy64(160, 2, 4, 132, BATCH)
    assert planning.plan(call, H200._replace(capability=(10, 0))) == planning.column_split("robust", 2, 4, 132, BATCH)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("changes, reason", [
    (SOFTPLUS, "gate=softplus"),
    ({"A_log": None}, "a_log=None"),
    (KIMI, "gate=given"),
    ({"state_v_first": False}, "state_v_first=False"),
    ({"heads": 2, **GROUPED}, "HV=4, H=2"),
    ({"return_intermediate_states": True, "chunk_size": 32}, "intermediate_states=32"),
])  # fmt: skip
def test_exact_mode_says_what_it_leaves_to_the_auto_kernels(capability, changes, reason):
    call, facts = parse((), prefill(**changes)), INFERENCE._replace(capability=capability)
    plan = planning.plan(call, facts._replace(mode="exact"))
    assert plan.reason == f"exact mode runs FlashKDA's own call alone; this one runs on the auto kernels: {reason}"
    assert plan._replace(reason="") == planning.plan(call, facts)


@pytest.mark.parametrize("changes", [
    {}, {"safe_gate": False}, {"use_graph": True}, {"chunk_size": 32}, {"A_log": tensor(1, 1, 4, 1, dtype=f32)},
    {"initial_state": None, "output_final_state": False},
])  # fmt: skip
def test_flashkdas_own_call_in_exact_mode(changes):
    call = parse((), prefill(**changes))
    assert planning.plan(call, H200._replace(mode="exact")) == planning.column_split("exact", 2, 4, 132, Variant.of(call))
