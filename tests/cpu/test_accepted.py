"""What the rules accept: each kind of call that models make, and nothing that FLA itself refuses."""

import inspect
from unittest import mock

import pytest
import torch
from calls import GROUPED, H200, HALVES, INFERENCE, KIMI, SOFTPLUS, TRAINING, UNGATED, decide, grown, prefill, tensor
from hypothesis import given, settings
from hypothesis import strategies as st

from fla_kda_backend.eligibility import FLA_REFUSES

i32, f32, f16 = torch.int32, torch.float32, torch.float16


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tokens": 0},
        {"tokens": 1},
        {"initial_state": None},
        {"output_final_state": False},
        {"batch": 1, "cu_seqlens": tensor(2, dtype=torch.int32)},
        {"batch": 1, "cu_seqlens": tensor(6, dtype=torch.int64), "initial_state": None},
        {"batch": 1, "tokens": 0, "cu_seqlens": tensor(3, dtype=torch.int32), "initial_state": None},
        {"safe_gate": False},
        {"lower_bound": -5},
        {"lower_bound": -1e-3},
        {"scale": 2},
        {"scale": float("inf")},
        {"disable_recompute": True},
        {"cu_seqlens_cpu": torch.tensor([0, 80])},
        {"max_num_seqs": 7},
        {"chunk_size": 32},
        {"A_log": tensor(1, 1, 4, 1, dtype=torch.float32)},
        {"dt_bias": tensor(4, 128, dtype=torch.float32)},
        {"A_log": torch.nn.Parameter(tensor(4, dtype=torch.float32))},
        {"q": tensor(2, 80, 4, 512)[..., 128:256]},
        {"heads": 2, **GROUPED},
        {"heads": 1, **GROUPED},
        KIMI,
        SOFTPLUS,
        {**SOFTPLUS, "A_log": tensor(4)},
        {**SOFTPLUS, "dt_bias": None},
        {**SOFTPLUS, "g": tensor(2, 80, 4, 128, dtype=f32), "beta": tensor(2, 80, 4, dtype=f32)},
        {"A_log": None},
        {"A_log": None, "dt_bias": None},
        {"dt_bias": tensor(512)},
        {"use_gate_in_kernel": False},
        {**UNGATED, "lower_bound": -6.0},
        {**UNGATED, "lower_bound": tensor(1)},
        {**UNGATED, "lower_bound": "x", "A_log": [0.0], "dt_bias": torch.zeros(3).to_sparse()},
        {**UNGATED, "A_log": tensor(7, dtype=f16, device="cpu"), "dt_bias": tensor(3, dtype=i32)},
        {"use_qk_l2norm_in_kernel": False},
        {"use_beta_sigmoid_in_kernel": False},
        {"allow_neg_eigval": True},
        {"state_v_first": False},
        {"use_graph": True},
        {"use_graph": True, "max_num_seqs": tensor(1)},
        {"batch": 1, "cu_seqlens": tensor(2, dtype=i32), "use_graph": True},
        {"batch": 1, "cu_seqlens": tensor(2, dtype=i32), "use_graph": True, "max_num_seqs": 1},
        {"max_num_seqs": tensor(1)},
    ],
    ids=lambda changes: " ".join(changes) or "prefill",
)
def test_accepted(changes):
    assert decide(**changes) == (True, "accepted", "all rules hold")


@pytest.mark.parametrize(
    "changes",
    [
        {"return_intermediate_states": True},
        {"return_intermediate_states": True, "chunk_size": 32},
        HALVES,
        {**HALVES, "cu_seqlens_cpu": torch.tensor([0, 40, 80])},
        {**HALVES, "cu_seqlens_cpu": torch.tensor([0, 40, 80], dtype=i32)},
        {**HALVES, "use_graph": True, "cu_seqlens_cpu": tensor(5)},  # the bound is static
        {"return_intermediate_states": True, "cu_seqlens_cpu": tensor(5)},
        {"return_intermediate_states": True, **KIMI},
    ],
)
def test_intermediate_states_are_accepted_in_inference_mode(changes):
    assert decide(INFERENCE, **changes) == (True, "accepted", "all rules hold")
    assert decide(H200, **changes).code == FLA_REFUSES


@pytest.mark.parametrize("capability", [(10, 0), (10, 3), (12, 0)])
@pytest.mark.parametrize("changes", [SOFTPLUS, KIMI, {"heads": 2, **GROUPED}, HALVES, {"use_graph": True}])
def test_other_gpus_accept_the_same(capability, changes):
    assert decide(INFERENCE._replace(capability=capability), **changes).accepted


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3), (12, 0)])
def test_accepted_capabilities(capability):
    assert decide(H200._replace(capability=capability)).accepted


def test_grad_mode_alone_does_not_decline():
    assert decide(TRAINING).accepted
    assert decide(H200, q=grown(2, 80, 4, 128)).accepted


def test_a_gate_that_is_not_computed_needs_no_gradients():
    """FLA drops its parameters before autograd sees them; what its kernels read is another matter."""
    parameters = {"A_log": grown(4, dtype=f32), "dt_bias": grown(512, dtype=f32)}
    off = TRAINING._replace(training=False)
    assert decide(off, **UNGATED, **parameters).accepted
    for name, value in parameters.items():
        assert decide(off, **SOFTPLUS, **{name: value}).code == "training"
    assert decide(off, **UNGATED, g=grown(2, 80, 4, 128)).code == "training"


def test_gradients_are_computed():
    assert decide(TRAINING, **SOFTPLUS, q=grown(2, 80, 4, 128), A_log=grown(4, dtype=f32)).accepted
    assert decide(TRAINING, q=grown(2, 80, 4, 128), scale=0.0).accepted  # q is normalised, so nothing is divided by the scale
    assert decide(H200._replace(training=False)).accepted


def test_autocast_casts_nothing():
    """FLA's function is told of autocast without a dtype to cast to: what it gets is what its kernels read."""
    from fla.ops.kda.chunk import ChunkKDAFunction
    from fla.utils import autocast_custom_fwd

    assert "@autocast_custom_fwd" in inspect.getsource(ChunkKDAFunction) and set(autocast_custom_fwd.keywords) == {
        "device_type"
    }
    with torch.autocast("cpu", torch.bfloat16):
        assert decide(**KIMI).accepted and decide(q=tensor(2, 80, 4, 128, dtype=f32)).code == "input_dtype"


# ---- beside FLA's own checks -----------------------------------------------------------------------------------------
FLAGS = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "safe_gate",
         "state_v_first", "output_final_state", "disable_recompute")  # fmt: skip
KINDS = {
    **{flag: st.booleans() for flag in FLAGS},
    "lower_bound": st.sampled_from([None, -5.0, -1, -6.0, 0.0, 1.5]),
    "A_log": st.sampled_from([None, (4,), (1, 1, 4, 1)]),
    "dt_bias": st.sampled_from([None, (512,), (4, 128)]),
    "parameters": st.sampled_from([torch.bfloat16, f32]),
    "g": st.sampled_from([torch.bfloat16, f32]),
    "beta": st.sampled_from([torch.bfloat16, f32]),
    "qk_heads": st.sampled_from([1, 2, 3, 4]),
    "state": st.sampled_from([None, f32, torch.bfloat16]),
    "packed": st.booleans(),
    "batch": st.sampled_from([1, 1, 2]),
    "chunk_size": st.sampled_from([16, 32, 64, 64]),
}


@settings(max_examples=500, deadline=None)
@given(st.fixed_dictionaries(KINDS))
def test_accepted_is_all_that_fla_takes_within_the_limits(kinds):
    from fla.ops.kda.chunk import ChunkKDAFunction, chunk_kda

    pick = dict(kinds)
    batch, qk_heads, sequences = pick.pop("batch"), pick.pop("qk_heads"), 3 if pick["packed"] else kinds["batch"]
    parameters, state = pick.pop("parameters"), pick.pop("state")
    pick |= {
        **{name: tensor(batch, 5, qk_heads, 128) for name in "qk"},
        **{name: None if kinds[name] is None else tensor(*kinds[name], dtype=parameters) for name in ("A_log", "dt_bias")},
        "v": tensor(batch, 5, 4, 128),
        "g": tensor(batch, 5, 4, 128, dtype=kinds["g"]),
        "beta": tensor(batch, 5, 4, dtype=kinds["beta"]),
        "initial_state": None if state is None else tensor(sequences, 4, 128, 128, dtype=state),
        "cu_seqlens": tensor(4, dtype=i32) if pick.pop("packed") else None,
    }
    decision = decide(INFERENCE, **pick)
    with mock.patch.object(ChunkKDAFunction, "apply", lambda *arguments: "taken"):
        try:
            taken = inspect.unwrap(chunk_kda)(**prefill(**pick)) == "taken"
        except (AssertionError, ValueError):
            taken = False
    bound = kinds["lower_bound"]
    within = not kinds["use_gate_in_kernel"] or bound is None or -5 <= bound < 0
    assert decision.accepted == (taken and within), decision
    assert (decision.code == FLA_REFUSES) == (not taken)
