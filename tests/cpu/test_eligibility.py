"""Each rule by its code and message, on metadata alone; and the parameters against those of the installed FLA."""

import inspect
import types

import pytest
import torch
from calls import GROUPED, H200, HALVES, INFERENCE, TRAINING, decide, grown, prefill, tensor
from hypothesis import given, settings
from hypothesis import strategies as st

from fla_kda_backend import call, eligibility
from fla_kda_backend.call import parse
from fla_kda_backend.eligibility import FLA_REFUSES, check

i32, i64, f64, f32, f16 = torch.int32, torch.int64, torch.float64, torch.float32, torch.float16


class Subclass(torch.Tensor):
    pass


# changes to an accepted prefill (B=2, T=80, H=4), facts, code, message
CASES = [
    ({"safe_gate": tensor(1)}, H200, "flag_type", "requires Python bools as flags, got Tensor"),
    ({"q": None}, H200, FLA_REFUSES, "requires a tensor q, got NoneType"),
    ({"beta": 0.5}, H200, FLA_REFUSES, "requires a tensor beta, got float"),
    (
        {"transpose_state_layout": True},
        H200,
        FLA_REFUSES,
        "takes either state_v_first or its old alias transpose_state_layout, got both",
    ),
    (
        {"cp_context": types.SimpleNamespace(cu_seqlens=tensor(3, dtype=i32))},
        H200,
        FLA_REFUSES,
        "with cp_context requires its cu_seqlens, no initial_state and output_final_state=False",
    ),
    (
        {"initial_state": [1]},
        H200,
        FLA_REFUSES,
        "requires initial_state as a tensor of at least one dimension, got list",
    ),
    ({"cu_seqlens": [0, 80]}, H200, FLA_REFUSES, "requires cu_seqlens as a tensor of at least one dimension, got list"),
    (
        {"cu_seqlens": tensor(3, dtype=i32)},
        H200,
        FLA_REFUSES,
        "with cu_seqlens requires batch size 1, got q [2, 80, 4, 128]",
    ),
    (
        {"batch": 1, "cu_seqlens": tensor(4, dtype=i32)},
        H200,
        FLA_REFUSES,
        "requires an initial state for each of 3 sequences, got 1",
    ),
    (
        {"initial_state": tensor(2, 4, 128, 128)},
        H200,
        FLA_REFUSES,
        "requires a float32 initial_state, got bfloat16",
    ),
    (
        {"A_log": None, "lower_bound": None, "safe_gate": False},
        H200,
        FLA_REFUSES,
        "with use_gate_in_kernel requires A_log or lower_bound, got neither",
    ),
    ({"chunk_size": 16}, H200, FLA_REFUSES, "requires chunk_size 32 or 64, got 16"),
    ({"lower_bound": None}, H200, FLA_REFUSES, "with safe_gate and use_gate_in_kernel requires lower_bound, got None"),
    ({"lower_bound": -6.0}, H200, FLA_REFUSES, "with safe_gate requires -5 <= lower_bound < 0, got -6.0"),
    ({"lower_bound": 0}, H200, FLA_REFUSES, "with safe_gate requires -5 <= lower_bound < 0, got 0"),
    ({"lower_bound": float("nan")}, H200, FLA_REFUSES, "with safe_gate requires -5 <= lower_bound < 0, got nan"),
    (
        {"allow_neg_eigval": True, "use_beta_sigmoid_in_kernel": False},
        H200,
        FLA_REFUSES,
        "with allow_neg_eigval requires use_beta_sigmoid_in_kernel=True, got False",
    ),
    (
        {"batch": 1, "cu_seqlens": tensor(2, dtype=i32), "use_graph": True, "max_num_seqs": 5},
        H200,
        FLA_REFUSES,
        "with use_graph requires max_num_seqs=1, got 5",
    ),
    (
        {"return_intermediate_states": True},
        H200,
        FLA_REFUSES,
        "with return_intermediate_states requires inference mode and disable_recompute=False",
    ),
    ({"q": tensor(80, 4, 128)}, H200, FLA_REFUSES, "requires q [B, T, H, K], got [80, 4, 128]"),
    ({"v": tensor(80, 128)}, H200, FLA_REFUSES, "requires v [B, T, HV, V], got [80, 128]"),
    ({"k": tensor(2, 64, 4, 128)}, H200, FLA_REFUSES, "requires k of q's shape [2, 80, 4, 128], got [2, 64, 4, 128]"),
    ({"dim": 512}, H200, FLA_REFUSES, "requires K <= 256, got 512"),
    ({"v": tensor(2, 80, 6, 128)}, H200, FLA_REFUSES, "requires HV a multiple of H, got HV=6, H=4"),
    ({"heads": 0}, H200, FLA_REFUSES, "requires HV a multiple of H, got HV=0, H=0"),
    ({"g": tensor(2, 80, 4, 1)}, H200, FLA_REFUSES, "requires g [B, T, HV, K] = [2, 80, 4, 128], got [2, 80, 4, 1]"),
    ({"beta": tensor(2, 80, 1)}, H200, FLA_REFUSES, "requires beta [B, T, HV] = [2, 80, 4], got [2, 80, 1]"),
    ({"window": 4, "softcap": 1.0}, H200, "unknown_argument", "knows no argument window, softcap"),
    (
        {"g": tensor(2, 80, 4, 128).as_subclass(Subclass)},
        H200,
        "tensor_type",
        "requires a plain torch tensor g, got Subclass",
    ),
    ({"A_log": [0.0] * 4}, H200, "tensor_type", "requires a plain torch tensor A_log, got list"),
    ({"A_log": torch.zeros(4).to_sparse()}, H200, "tensor_type", "requires a strided A_log, got torch.sparse_coo"),
    ({}, H200._replace(capability=None, sm_count=0), "device", "requires an NVIDIA GPU, got q on meta"),
    ({}, H200._replace(capability=(8, 0)), "capability", "requires compute capability 9.0, 10.0, 10.3, 12.0, got 8.0"),
    (
        {},
        H200._replace(capability=(12, 1)),
        "capability",
        "requires compute capability 9.0, 10.0, 10.3, 12.0, got 12.1",
    ),
    (
        {},
        H200._replace(capability=(10, 0), untested=False),
        "untested",
        "never ran on compute capability 10.0, and FLA_KDA_CUTE_UNTESTED=0 leaves such GPUs to others",
    ),
    (
        {"dt_bias": tensor(512, dtype=f32, device="cpu")},
        H200,
        "one_device",
        "requires all tensors on meta, got dt_bias on cpu",
    ),
    (
        {"batch": 1, "cu_seqlens": tensor(2, dtype=i32, device="cpu")},
        H200,
        "one_device",
        "requires all tensors on meta, got cu_seqlens on cpu",
    ),
    (
        {},
        H200._replace(intercepted="torch.func's vmap"),
        "intercepted",
        "requires plain torch operations, got a call inside torch.func's vmap",
    ),
    (
        {"k": torch._neg_view(tensor(2, 80, 4, 128))},
        H200,
        "memory",
        "requires elements of k in memory as they are, got dispatch keys "
        "DispatchKeySet(Meta, Negative, ADInplaceOrView, AutogradMeta)",
    ),
    (
        {**HALVES, "cu_seqlens_cpu": torch._neg_view(torch.tensor([0, -40, -80]))},
        INFERENCE,
        "cu_seqlens_cpu",
        "requires elements of cu_seqlens_cpu in memory as they are, got dispatch keys "
        "DispatchKeySet(CPU, Negative, ADInplaceOrView, AutogradCPU, AutocastCPU)",
    ),
    (
        {"k": grown(2, 80, 4, 128)},
        TRAINING._replace(training=False),
        "training",
        "computes no gradients where FLA_KDA_CUTE_TRAINING=0, got grad mode and k that requires grad",
    ),
    (
        {"k": grown(2, 80, 4, 128)},
        TRAINING._replace(capability=(10, 0)),
        "training",
        "computes gradients on compute capability 9.0, got 10.0 and k that requires grad",
    ),
    (
        {"k": grown(2, 80, 4, 128)},
        TRAINING._replace(inference_mode=True),
        "training_inference",
        "computes no gradients in inference mode, got grad mode and k that requires grad",
    ),
    (
        {"k": grown(2, 80, 4, 128), "use_qk_l2norm_in_kernel": False, "scale": 0.0},
        TRAINING,
        "training_scale",
        "with gradients and use_qk_l2norm_in_kernel=False requires a scale of at least 2^-126, got 0.0",
    ),
    (
        {},
        H200._replace(forward_ad=True),
        "forward_ad",
        "computes no tangents, got a call inside torch.autograd.forward_ad.dual_level()",
    ),
    (
        {"return_intermediate_states": True, "disable_recompute": None},
        INFERENCE,
        FLA_REFUSES,
        "with return_intermediate_states requires inference mode and disable_recompute=False",
    ),
    (
        {"A_log": grown(4, dtype=f32)},
        TRAINING._replace(training=False),
        "training",
        "computes no gradients where FLA_KDA_CUTE_TRAINING=0, got grad mode and A_log that requires grad",
    ),
    (
        {
            "batch": 1,
            "cp_context": types.SimpleNamespace(cu_seqlens=tensor(2, dtype=i32)),
            "initial_state": None,
            "output_final_state": False,
        },
        H200,
        "cp_context",
        "knows no context parallelism, got cp_context",
    ),
    ({"safe_gate": False, "lower_bound": -6}, H200, "lower_bound", "requires -5 <= lower_bound < 0, got -6"),
    ({"safe_gate": False, "lower_bound": 0.0, "A_log": None}, H200, "lower_bound", "requires -5 <= lower_bound < 0, got 0.0"),
    ({"lower_bound": tensor(1, dtype=f32)}, H200, "lower_bound", "requires a number as lower_bound, got Tensor"),
    ({"scale": tensor(1, dtype=f32)}, H200, "scale", "requires a number as scale, got Tensor"),
    ({"q": tensor(2, 80, 4, 128, dtype=f16)}, H200, "input_dtype", "requires a bfloat16 q, got float16"),
    ({"k": tensor(2, 80, 4, 128, dtype=f32)}, H200, "input_dtype", "requires a bfloat16 k, got float32"),
    ({"v": tensor(2, 80, 4, 128, dtype=f32)}, H200, "input_dtype", "requires a bfloat16 v, got float32"),
    ({"g": tensor(2, 80, 4, 128, dtype=f16)}, H200, "input_dtype", "requires a bfloat16 or float32 g, got float16"),
    ({"beta": tensor(2, 80, 4, dtype=f64)}, H200, "input_dtype", "requires a bfloat16 or float32 beta, got float64"),
    ({"dim": 64}, H200, "head_dim", "requires K = V = 128, got K=64, V=64"),
    ({"v": tensor(2, 80, 4, 256)}, H200, "head_dim", "requires K = V = 128, got K=128, V=256"),
    (
        {"v": tensor(2, 64, 4, 128)},
        H200,
        "value_shape",
        "requires v [B, T, HV, V] = [2, 80, 4, 128], got [2, 64, 4, 128]",
    ),
    (
        {"batch": 1, "cu_seqlens": tensor(2, dtype=torch.int16)},
        H200,
        "cu_seqlens",
        "requires int32 or int64 cu_seqlens, got int16",
    ),
    (
        {"batch": 1, "cu_seqlens": tensor(2, 1, dtype=i32)},
        H200,
        "cu_seqlens",
        "requires cu_seqlens [N + 1], got [2, 1]",
    ),
    (
        {**HALVES, "cu_seqlens_cpu": tensor(3, dtype=i64)},
        INFERENCE,
        "cu_seqlens_cpu",
        "with return_intermediate_states requires cu_seqlens_cpu as a plain tensor on the CPU, got meta",
    ),
    (
        {**HALVES, "cu_seqlens_cpu": [0, 40, 80]},
        INFERENCE,
        "cu_seqlens_cpu",
        "with return_intermediate_states requires cu_seqlens_cpu as a plain tensor on the CPU, got list",
    ),
    (
        {**HALVES, "cu_seqlens_cpu": torch.tensor([0, 80])},
        INFERENCE,
        "cu_seqlens_cpu",
        "requires cu_seqlens_cpu like cu_seqlens [3], got int64 [2]",
    ),
    (
        {**HALVES, "cu_seqlens_cpu": torch.tensor([0.0, 40, 80])},
        INFERENCE,
        "cu_seqlens_cpu",
        "requires cu_seqlens_cpu like cu_seqlens [3], got float32 [3]",
    ),
    (
        {"batch": 1, "cu_seqlens": tensor(2, dtype=i32), "use_graph": True, "max_num_seqs": tensor(1)},
        H200,
        "max_num_seqs",
        "with use_graph requires a number as max_num_seqs, got Tensor",
    ),
    ({"batch": 0}, H200, "num_sequences", "requires at least 1 sequence, got 0"),
    (
        {"batch": 1, "cu_seqlens": tensor(1, dtype=i32), "initial_state": None},
        H200,
        "num_sequences",
        "requires at least 1 sequence, got 0",
    ),
    (
        {"initial_state": tensor(1, 4, 128, 128, dtype=f32)},
        H200,
        "initial_state",
        "requires initial_state [N, HV, V, K] = [2, 4, 128, 128], got [1, 4, 128, 128]",
    ),
    (
        {"heads": 2, **GROUPED, "state_v_first": False, "initial_state": tensor(2, 2, 128, 128, dtype=f32)},
        H200,
        "initial_state",
        "requires initial_state [N, HV, K, V] = [2, 4, 128, 128], got [2, 2, 128, 128]",
    ),
    ({"A_log": tensor(4, dtype=f16)}, H200, "gate_parameters", "requires a float32 or bfloat16 A_log, got float16"),
    (
        {"dt_bias": tensor(512, dtype=f64)},
        H200,
        "gate_parameters",
        "requires a float32 or bfloat16 dt_bias, got float64",
    ),
    ({"A_log": tensor(1, dtype=f32)}, H200, "gate_parameters", "requires A_log with HV = 4 elements, got [1]"),
    (
        {"dt_bias": tensor(128, 4, dtype=f32)},
        H200,
        "gate_parameters",
        "requires dt_bias [HV * K] = [512] or [HV, K], got [128, 4]",
    ),
    (
        {"heads": 2, **GROUPED, "dt_bias": tensor(256, dtype=f32)},
        H200,
        "gate_parameters",
        "requires dt_bias [HV * K] = [512] or [HV, K], got [256]",
    ),
]


@pytest.mark.parametrize(("changes", "facts", "code", "message"), CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_declined_with_code_and_message(changes, facts, code, message):
    assert decide(facts, **changes) == (False, code, message)


def test_every_rule_has_a_case():
    assert {code for *_, code, _ in CASES} == {rule.code for rule in eligibility.RULES}


def test_parameters_are_those_of_the_installed_fla():
    from fla.ops.kda import chunk_kda

    signature = inspect.signature(inspect.unwrap(chunk_kda)).parameters
    hidden = {"A_log", "dt_bias", "chunk_size", "transpose_state_layout"}
    assert eligibility.HANDLED | eligibility.DECLINED == (set(signature) - {"kwargs"}) | hidden
    assert not eligibility.HANDLED & eligibility.DECLINED
    assert call.POSITIONAL == tuple(name for name in signature if name != "kwargs")
    defaults = call.Call()
    for name in set(signature) - {"kwargs", *call.REQUIRED}:
        assert getattr(defaults, name) == signature[name].default, name


def test_every_declined_parameter_is_declined_whatever_else_is_passed():
    assert eligibility.DECLINED == {"cp_context"}
    for value in (True, types.SimpleNamespace(cu_seqlens=tensor(2, dtype=i32))):
        assert not decide(INFERENCE, batch=1, cp_context=value, initial_state=None, output_final_state=False).accepted


@pytest.mark.parametrize("name", ["A_log", "dt_bias", "chunk_size", "transpose_state_layout"])
def test_hidden_parameters_are_found_in_fla(name):
    """FLA reads them out of its **kwargs by these names."""
    from fla.ops.kda import chunk_kda

    assert f'"{name}"' in inspect.getsource(inspect.unwrap(chunk_kda)).replace("'", '"')


def test_parse_binds_positional_arguments_like_fla():
    arguments = prefill()
    required = [arguments.pop(name) for name in call.REQUIRED]
    parsed = parse((*required, 0.5), arguments)
    assert [getattr(parsed, name) for name in call.REQUIRED] == required
    assert parsed.scale == 0.5
    assert check(parsed, H200).accepted


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (range(23), {}, "takes 22 positional arguments, got 23"),
        (range(2), {"q": 1}, "chunk_kda() got multiple values for argument 'q'"),
    ],
)
def test_arguments_that_fit_no_call_are_left_to_fla(args, kwargs, message):
    assert check(parse(tuple(args), kwargs), H200) == (False, FLA_REFUSES, message)


def test_the_old_alias_is_state_v_first():
    arguments = prefill(transpose_state_layout=True)
    del arguments["state_v_first"]
    parsed = parse((), arguments)
    assert parsed.state_v_first is True
    assert check(parsed, H200).accepted


def test_no_scale_is_one_over_the_root_of_k():
    assert parse((), prefill()).scale == 128**-0.5


def test_counts_of_a_call():
    batch = parse((), prefill(batch=3, tokens=5, heads=7))
    assert (batch.num_sequences, batch.tokens, batch.heads, batch.qk_heads) == (3, 15, 7, 7)
    grouped = parse((), prefill(heads=2, **GROUPED))
    assert (grouped.heads, grouped.qk_heads) == (4, 2)
    packed = parse((), prefill(batch=1, tokens=50, cu_seqlens=tensor(9, dtype=torch.int32)))
    assert (packed.num_sequences, packed.tokens) == (8, 50)


JUNK = st.sampled_from(
    [
        None,
        True,
        False,
        0,
        -3,
        64,
        0.5,
        "x",
        [],
        tensor(),
        tensor(0),
        tensor(3),
        tensor(2, 80, 4, 128, dtype=f32),
        object(),
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from((*call.PARAMETERS, "other")), JUNK, max_size=4))
def test_nothing_that_a_caller_passes_raises(changes):
    decision = decide(**changes)
    assert decision.code == "accepted" or decision.message
