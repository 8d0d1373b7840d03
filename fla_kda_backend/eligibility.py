"""Which calls of chunk_kda the kernels can run: ordered rules over metadata, without a sync, a copy or a kernel import.

A rule returns None, or a message with the limit and the value; the first message decides. What FLA refuses with an
error goes ahead, in FLA's order, under the code `fla_refuses`: such a call goes back to FLA, and its error is seen.
"""

from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

import torch

from .call import FLAG_TYPES, PARAMETERS, REQUIRED, Call, parse
from .facts import Facts, differentiated, oddity

__all__ = ["DECLINED", "HANDLED", "RULES", "Call", "Decision", "check", "parse"]

HEAD_DIM = 128
LOWEST_BOUND = -5.0
EITHER = (torch.bfloat16, torch.float32)
OFFSETS = (torch.int32, torch.int64)
NUMBER: Any = (float, int, Real)  # the common ones first: asking the abstract class alone is slow
TRAINED = ((9, 0),)  # capabilities that the backward kernels run on
SMALLEST_SCALE = 2.0**-126  # of which the inverse is a finite fp32 number
RUN = ((9, 0),)  # capabilities that the kernels run on
COMPILED_ONLY = ((10, 0), (10, 3), (12, 0))  # compiled for, never run on: checked against FLA at the first call

# Every parameter is in one of the two: DECLINED ones must have FLA's default, whatever the rest of the call is.
DECLINED = frozenset({"cp_context"})
HANDLED = frozenset(PARAMETERS) - DECLINED

FLA_REFUSES = "fla_refuses"


class Decision(NamedTuple):
    accepted: bool
    code: str
    message: str


class Rule(NamedTuple):
    code: str
    violated: Callable  # (call, facts) -> message, or None where the rule holds


def check(call: Call, facts: Facts) -> Decision:
    """The Decision on a parsed call, given Facts: whether it can run here, by the first rule that it violates."""
    for code, violated in RULES:
        message = violated(call, facts)
        if message is not None:
            return Decision(False, code, message)
    return ACCEPTED


ACCEPTED = Decision(True, "accepted", "all rules hold")


def flag_type(call: Call, facts: Facts) -> str | None:
    flags = (
        call.output_final_state,
        call.use_qk_l2norm_in_kernel,
        call.use_gate_in_kernel,
        call.use_beta_sigmoid_in_kernel,
        call.allow_neg_eigval,
        call.safe_gate,
        call.disable_recompute,
        call.return_intermediate_states,
        call.state_v_first,
        call.use_graph,
    )
    if FLAG_TYPES.issuperset(map(type, flags)):
        return None
    # The truth of a tensor on a GPU would be waited for.
    wrong = next(value for value in flags if type(value) not in FLAG_TYPES)
    return f"requires Python bools as flags, got {typename(wrong)}"


def refused_arguments(call: Call, facts: Facts) -> str | None:
    if call.malformed is not None:
        return call.malformed
    for name, value in zip(REQUIRED, (call.q, call.k, call.v, call.g, call.beta)):
        if not isinstance(value, torch.Tensor):
            return f"requires a tensor {name}, got {typename(value)}"
    cu_seqlens, initial_state = call.cu_seqlens, call.initial_state
    if call.cp_context is not None:
        cu_seqlens = getattr(call.cp_context, "cu_seqlens", None)
        if initial_state is not None or call.output_final_state is not False or cu_seqlens is None:
            return "with cp_context requires its cu_seqlens, no initial_state and output_final_state=False"
    if initial_state is not None and not indexable(initial_state):
        return f"requires initial_state as a tensor of at least one dimension, got {typename(initial_state)}"
    if cu_seqlens is not None:
        if not indexable(cu_seqlens):
            return f"requires cu_seqlens as a tensor of at least one dimension, got {typename(cu_seqlens)}"
        if call.q.shape[:1] != (1,):
            return f"with cu_seqlens requires batch size 1, got q {shape(call.q)}"
        if initial_state is not None and len(initial_state) != len(cu_seqlens) - 1:
            return f"requires an initial state for each of {len(cu_seqlens) - 1} sequences, got {len(initial_state)}"
    if initial_state is not None and initial_state.dtype != torch.float32:
        return f"requires a float32 initial_state, got {dtype_name(initial_state)}"
    if call.use_gate_in_kernel and call.A_log is None and call.lower_bound is None:
        return "with use_gate_in_kernel requires A_log or lower_bound, got neither"
    if not isinstance(call.chunk_size, NUMBER) or call.chunk_size not in (32, 64):
        return f"requires chunk_size 32 or 64, got {call.chunk_size}"
    if call.safe_gate and call.use_gate_in_kernel:
        if call.lower_bound is None:
            return "with safe_gate and use_gate_in_kernel requires lower_bound, got None"
        if isinstance(call.lower_bound, NUMBER) and not LOWEST_BOUND <= call.lower_bound < 0:
            return f"with safe_gate requires -5 <= lower_bound < 0, got {call.lower_bound}"
    if call.allow_neg_eigval and not call.use_beta_sigmoid_in_kernel:
        return "with allow_neg_eigval requires use_beta_sigmoid_in_kernel=True, got False"
    if call.use_graph and cu_seqlens is not None and isinstance(call.max_num_seqs, NUMBER):
        if call.max_num_seqs != len(cu_seqlens) - 1:
            return f"with use_graph requires max_num_seqs={len(cu_seqlens) - 1}, got {call.max_num_seqs}"
    if call.return_intermediate_states and (call.disable_recompute is not False or not facts.inference_mode):
        return "with return_intermediate_states requires inference mode and disable_recompute=False"
    return None


def refused_shapes(call: Call, facts: Facts) -> str | None:
    if call.q.ndim != 4:
        return f"requires q [B, T, H, K], got {shape(call.q)}"
    if call.v.ndim < 3:
        return f"requires v [B, T, HV, V], got {shape(call.v)}"
    batch, tokens, heads, dim = call.q.shape
    value_heads = call.v.shape[2]
    if call.k.shape != call.q.shape:
        return f"requires k of q's shape {shape(call.q)}, got {shape(call.k)}"
    if dim > 256:
        return f"requires K <= 256, got {dim}"
    if heads == 0 or value_heads % heads != 0:
        return f"requires HV a multiple of H, got HV={value_heads}, H={heads}"
    if call.g.shape != (batch, tokens, value_heads, dim):
        return f"requires g [B, T, HV, K] = {[batch, tokens, value_heads, dim]}, got {shape(call.g)}"
    if call.beta.shape != (batch, tokens, value_heads):
        return f"requires beta [B, T, HV] = {[batch, tokens, value_heads]}, got {shape(call.beta)}"
    return None


def unknown_argument(call: Call, facts: Facts) -> str | None:
    return f"knows no argument {', '.join(call.unknown)}" if call.unknown else None


def tensor_type(call: Call, facts: Facts) -> str | None:
    for name, value in call.inputs:
        if type(value) is not torch.Tensor and type(value) is not torch.nn.Parameter:
            return f"requires a plain torch tensor {name}, got {typename(value)}"
        if value.layout is not torch.strided:
            return f"requires a strided {name}, got {value.layout}"
    return None


def device(call: Call, facts: Facts) -> str | None:
    return f"requires an NVIDIA GPU, got q on {call.q.device}" if facts.capability is None else None


def capability(call: Call, facts: Facts) -> str | None:
    if facts.capability in RUN or facts.capability in COMPILED_ONLY:
        return None
    tried = ", ".join(f"{major}.{minor}" for major, minor in RUN + COMPILED_ONLY)
    return f"requires compute capability {tried}, got {facts.capability[0]}.{facts.capability[1]}"


def untested(call: Call, facts: Facts) -> str | None:
    if facts.untested or facts.capability in RUN:
        return None
    return (
        f"never ran on compute capability {facts.capability[0]}.{facts.capability[1]}, and FLA_KDA_CUTE_UNTESTED=0 "
        "leaves such GPUs to others"
    )


def one_device(call: Call, facts: Facts) -> str | None:
    where = call.q.device
    for name, value in call.inputs:
        if value.device != where:
            return f"requires all tensors on {where}, got {name} on {value.device}"
    return None


def intercepted(call: Call, facts: Facts) -> str | None:
    return f"requires plain torch operations, got a call inside {facts.intercepted}" if facts.intercepted else None


def memory(call: Call, facts: Facts) -> str | None:
    """Only addresses reach the kernels."""
    for name, value in call.inputs:
        odd = oddity(value)
        if odd is not None:
            return f"requires elements of {name} in memory as they are, got {odd}"
    return None


def forward_ad(call: Call, facts: Facts) -> str | None:
    if facts.forward_ad:
        return "computes no tangents, got a call inside torch.autograd.forward_ad.dual_level()"
    return None


def training(call: Call, facts: Facts) -> str | None:
    """The switch, and where the kernels of the backward run."""
    names = () if facts.training and facts.capability in TRAINED else differentiated(call, facts)
    if not names:
        return None
    if not facts.training:
        return f"computes no gradients where FLA_KDA_CUTE_TRAINING=0, got grad mode and {names[0]} that requires grad"
    tried = ", ".join(f"{major}.{minor}" for major, minor in TRAINED)
    got = f"{facts.capability[0]}.{facts.capability[1]} and {names[0]} that requires grad"
    return f"computes gradients on compute capability {tried}, got {got}"


def training_inference(call: Call, facts: Facts) -> str | None:
    if facts.inference_mode and (names := differentiated(call, facts)):
        return f"computes no gradients in inference mode, got grad mode and {names[0]} that requires grad"
    return None


def cp_context(call: Call, facts: Facts) -> str | None:
    return "knows no context parallelism, got cp_context" if call.cp_context is not None else None


def lower_bound(call: Call, facts: Facts) -> str | None:
    """FLA chooses the bounded gate by a bound alone, whatever safe_gate says, and reads none without a gate to compute."""
    bound = call.lower_bound
    if bound is None or not call.use_gate_in_kernel:
        return None
    if isinstance(bound, NUMBER):
        return None if LOWEST_BOUND <= bound < 0 else f"requires -5 <= lower_bound < 0, got {bound}"
    # A tensor is not compared: on a GPU that would wait for it.
    return f"requires a number as lower_bound, got {typename(bound)}"


def scale(call: Call, facts: Facts) -> str | None:
    return None if isinstance(call.scale, NUMBER) else f"requires a number as scale, got {typename(call.scale)}"


def training_scale(call: Call, facts: Facts) -> str | None:
    """Where q is not normalised, gradients are divided by the scale on their way."""
    if call.use_qk_l2norm_in_kernel or abs(call.scale) >= SMALLEST_SCALE or not differentiated(call, facts):
        return None
    return f"with gradients and use_qk_l2norm_in_kernel=False requires a scale of at least 2^-126, got {call.scale}"


def input_dtype(call: Call, facts: Facts) -> str | None:
    """As they are: FLA casts nothing under torch.autocast either."""
    for name, value in (("q", call.q), ("k", call.k), ("v", call.v)):
        if value.dtype != torch.bfloat16:
            return f"requires a bfloat16 {name}, got {dtype_name(value)}"
    for name, value in (("g", call.g), ("beta", call.beta)):
        if value.dtype not in EITHER:
            return f"requires a bfloat16 or float32 {name}, got {dtype_name(value)}"
    return None


def head_dim(call: Call, facts: Facts) -> str | None:
    dim_k, dim_v = call.q.shape[-1], call.v.shape[-1]
    if dim_k != HEAD_DIM or dim_v != HEAD_DIM:
        return f"requires K = V = {HEAD_DIM}, got K={dim_k}, V={dim_v}"
    return None


def value_shape(call: Call, facts: Facts) -> str | None:
    expected = call.g.shape  # which is right, and V = K
    return f"requires v [B, T, HV, V] = {list(expected)}, got {shape(call.v)}" if call.v.shape != expected else None


def cu_seqlens(call: Call, facts: Facts) -> str | None:
    offsets = call.cu_seqlens
    if offsets is None:
        return None
    if offsets.dtype not in OFFSETS:
        return f"requires int32 or int64 cu_seqlens, got {dtype_name(offsets)}"
    return f"requires cu_seqlens [N + 1], got {shape(offsets)}" if offsets.ndim != 1 else None


def cu_seqlens_cpu(call: Call, facts: Facts) -> str | None:
    """Its values are read where chunks are counted, and nowhere else: for intermediate states of no static number."""
    offsets = call.cu_seqlens_cpu
    if offsets is None or not call.return_intermediate_states or call.cu_seqlens is None or call.use_graph:
        return None
    if type(offsets) is not torch.Tensor or offsets.device.type != "cpu":
        got = offsets.device if isinstance(offsets, torch.Tensor) else typename(offsets)
        return f"with return_intermediate_states requires cu_seqlens_cpu as a plain tensor on the CPU, got {got}"
    odd = oddity(offsets)
    if odd is not None:
        return f"requires elements of cu_seqlens_cpu in memory as they are, got {odd}"
    if offsets.dtype not in OFFSETS or offsets.shape != call.cu_seqlens.shape:
        return f"requires cu_seqlens_cpu like cu_seqlens {shape(call.cu_seqlens)}, got {dtype_name(offsets)} {shape(offsets)}"
    return None


def max_num_seqs(call: Call, facts: Facts) -> str | None:
    # Whether a number is the right one FLA's own refusal has told; a tensor on a GPU would be waited for.
    if not call.use_graph or call.cu_seqlens is None or call.max_num_seqs is None or isinstance(call.max_num_seqs, NUMBER):
        return None
    return f"with use_graph requires a number as max_num_seqs, got {typename(call.max_num_seqs)}"


def num_sequences(call: Call, facts: Facts) -> str | None:
    return f"requires at least 1 sequence, got {call.num_sequences}" if call.num_sequences < 1 else None


def initial_state(call: Call, facts: Facts) -> str | None:
    expected = (call.num_sequences, call.heads, HEAD_DIM, HEAD_DIM)
    if call.initial_state is None or call.initial_state.shape == expected:
        return None
    layout = "[N, HV, V, K]" if call.state_v_first else "[N, HV, K, V]"
    return f"requires initial_state {layout} = {list(expected)}, got {shape(call.initial_state)}"


def gate_parameters(call: Call, facts: Facts) -> str | None:
    if not call.use_gate_in_kernel:
        return None
    for name, value in (("A_log", call.A_log), ("dt_bias", call.dt_bias)):
        if value is not None and value.dtype not in EITHER:
            return f"requires a float32 or bfloat16 {name}, got {dtype_name(value)}"
    if call.A_log is not None and call.A_log.numel() != call.heads:
        return f"requires A_log with HV = {call.heads} elements, got {shape(call.A_log)}"
    if call.dt_bias is not None and call.dt_bias.shape not in ((call.heads * HEAD_DIM,), (call.heads, HEAD_DIM)):
        return f"requires dt_bias [HV * K] = [{call.heads * HEAD_DIM}] or [HV, K], got {shape(call.dt_bias)}"
    return None


RULES = (
    Rule("flag_type", flag_type),
    Rule(FLA_REFUSES, refused_arguments),
    Rule(FLA_REFUSES, refused_shapes),
    *(
        Rule(violated.__name__, violated)
        for violated in (
            unknown_argument,
            tensor_type,
            device,
            capability,
            untested,
            one_device,
            intercepted,
            memory,
            forward_ad,
            training,
            training_inference,
            cp_context,
            lower_bound,
            scale,
            training_scale,
            input_dtype,
            head_dim,
            value_shape,
            cu_seqlens,
            cu_seqlens_cpu,
            max_num_seqs,
            num_sequences,
            initial_state,
            gate_parameters,
        )
    ),
)


def indexable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0


def shape(tensor: torch.Tensor) -> list[int]:
    return list(tensor.shape)


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def typename(value: Any) -> str:
    return type(value).__name__
