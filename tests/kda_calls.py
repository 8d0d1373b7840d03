"""Calls of chunk_kda for the cases of call_table: seeded inputs in every layout, and what calls are changed to."""

import math

import torch
import torch.nn.functional as F
from call_table import QK_HEADS
from kda_inputs import TOKEN_AXIS, Normal

DTYPES = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16, "int32": torch.int32, "int64": torch.int64}
DIM = 128
LOWER_BOUND = -5.0
STEEP = (200.0, 50.0)  # exp(A_log) of heads; that of trained checkpoints comes near the first


def call_of(case, device="cpu", seed=0, **changes):
    """Keyword arguments of chunk_kda."""
    kind, lengths, packed = case.kind, case.lengths, case.kind.cu_dtype is not None
    batch, tokens = (1, sum(lengths)) if packed else (len(lengths), lengths[0])
    normal = Normal(device, case, seed)
    q, k = (normal(batch, tokens, QK_HEADS, DIM) for _ in "qk")
    v, beta = normal(batch, tokens, case.heads, DIM), normal(batch, tokens, case.heads)
    if case.regime == "alternating":  # two channels stand out
        q[..., :2], k[..., :2] = 6 * q[..., :2], 6 * k[..., :2]
    elif case.regime in ("correlated", "repeated"):
        k = k[:, :1] + (0.05 * k if case.regime == "correlated" else torch.zeros_like(k))
        q = q if case.regime == "correlated" else k
        beta = torch.full_like(beta, 2.0 if case.regime == "correlated" else 8.0)
    if not kind.l2norm:
        q, k = (F.normalize(x, dim=-1) for x in (q, k))
    if kind.beta == "given":
        beta = torch.sigmoid(beta)
    raw, A_log, dt_bias = gate(case, v.shape, normal)
    laid = dict(zip(TOKEN_AXIS, (q.bfloat16(), k.bfloat16(), v.bfloat16(), raw, beta.to(DTYPES[kind.beta_dtype]))))
    initial = None if kind.initial is None else normal(len(lengths), case.heads, DIM, DIM).to(DTYPES[kind.initial])
    if case.layout == "transposed" and initial is not None:
        initial = initial.mT.contiguous().mT
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return {
        **laid_out(laid, case.layout),
        "scale": case.scale,
        "initial_state": initial,
        "output_final_state": kind.final is not None,
        "use_qk_l2norm_in_kernel": kind.l2norm,
        "use_gate_in_kernel": kind.gate != "given",
        "use_beta_sigmoid_in_kernel": kind.beta != "given",
        "allow_neg_eigval": kind.beta == "twice",
        "safe_gate": kind.gate == "bounded",
        "lower_bound": LOWER_BOUND if kind.gate == "bounded" else None,
        "return_intermediate_states": kind.states,
        "state_v_first": kind.state_v_first,
        "cu_seqlens": ends.to(device, DTYPES[kind.cu_dtype]) if packed else None,
        "A_log": A_log if A_log is None or case.flat else A_log.reshape(1, 1, -1, 1),
        "dt_bias": dt_bias if dt_bias is None or not case.flat else dt_bias.flatten(),
        **changes,
    }


# ---- gates -----------------------------------------------------------------------------------------------------------
def gate(case, shape, normal):
    """g of a shape [B, T, HV, K], A_log [HV] and dt_bias [HV, K] of the case's dtypes, or None."""
    kind, heads = case.kind, shape[2]
    A_log = dt_bias = None
    if kind.a_log is not None:
        steep = torch.tensor(STEEP).log().repeat(heads)[:heads].to(normal.device)
        A_log = (steep if case.regime == "steep" else 0.3 * normal(heads)).to(DTYPES[kind.a_log])
    if kind.dt_bias is not None:
        dt_bias = (0.3 * normal(heads, DIM)).to(DTYPES[kind.dt_bias])
    rate = 1.0 if A_log is None else A_log.float().exp()[:, None]
    bias = 0.0 if dt_bias is None else dt_bias.float()
    if case.regime == "steep":
        raw = 8 * normal(*shape)
        raw = -STEEP[0] * F.softplus(raw) if kind.gate == "given" else raw
    else:
        decay = log_decay(case.regime, kind.gate == "bounded", shape, normal)
        if kind.gate == "given":
            raw = decay
        elif kind.gate == "bounded":
            raw = torch.logit(decay / LOWER_BOUND) / rate - bias
        else:
            x = -decay / rate
            raw = torch.where(x > 15, x, x.clamp(max=15).expm1().log()) - bias  # the inverse of softplus
    return raw.to(DTYPES[kind.gate_dtype]), A_log, dt_bias


def log_decay(regime, bounded, shape, normal):
    """Log decay a token, fp32."""
    tokens, weak, strong = shape[1], 3e-5, 4.99 if bounded else 60.0
    if regime == "normal":
        rates = torch.exp(math.log(1e-3) + normal.uniform(*shape[2:]) * math.log(3e3))
        return -rates * (1 + 0.1 * normal.uniform(*shape))
    if regime == "slow":
        return -1e-3 * torch.exp(0.5 * normal(*shape))
    if regime == "saturated":
        return -strong * (1 - 1e-3 * normal.uniform(*shape))
    if regime == "alternating":  # even and odd channels take turns, 8 tokens each
        device = normal.device
        turn = torch.arange(tokens, device=device)[:, None, None] // 8 % 2 == torch.arange(DIM, device=device) % 2
        return torch.where(turn, -weak, -strong).expand(shape)
    return torch.full(shape, -weak, device=normal.device)


# ---- layouts -----------------------------------------------------------------------------------------------------------
def laid_out(tensors, layout):
    """The tensors q, k, v, g and beta with the same values, elsewhere in memory."""
    if layout == "whole":
        return {name: x.contiguous() for name, x in tensors.items()}
    if layout == "fused":  # slices of projections: of all heads of q, k and v, and of g and beta with something behind them
        counts = [tensors[name].shape[2] for name in "qkv"]
        parts = dict(zip("qkv", torch.cat([tensors[name] for name in "qkv"], 2).split(counts, 2)))
        for name in ("g", "beta"):
            x = tensors[name]
            parts[name] = torch.cat([x, x[:, :, :1]], 2)[:, :, : x.shape[2]]
        return parts
    if layout == "transposed":
        return {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in tensors.items()}
    assert layout == "unaligned"  # one element off
    return {name: torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape).copy_(x)
            for name, x in tensors.items()}  # fmt: skip


# ---- changed calls -----------------------------------------------------------------------------------------------------
def with_later_tokens_changed(call, other, last):
    """The call with the tokens after `last` those of another call."""
    return call | {name: torch.cat([call[name][:, : last + 1], other[name][:, last + 1 :]], 1) for name in TOKEN_AXIS}


def plain(call):
    """A call of the same result, for FLA's Triton kernels, which are compiled and tuned anew for each dtype and layout.

    Widened values, zeros in place of nothing and a transposed state change nothing that those kernels compute. beta keeps its
    dtype: they round its products to it.
    """
    batch, _, heads, _ = call["v"].shape
    device, cu_seqlens, initial = call["v"].device, call["cu_seqlens"], call["initial_state"]
    sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    if initial is None:
        initial = torch.zeros(sequences, heads, DIM, DIM, device=device)
    elif call["state_v_first"]:
        initial = initial.mT
    wide = {**call, "g": call["g"].float()}
    changes = {
        **{name: wide[name].clone(memory_format=torch.contiguous_format) for name in TOKEN_AXIS},
        "initial_state": initial.contiguous(),
        "output_final_state": True,
        "state_v_first": False,
        "cu_seqlens": None if cu_seqlens is None else cu_seqlens.long(),
    }
    if call["use_gate_in_kernel"]:
        for name, count in (("A_log", heads), ("dt_bias", heads * DIM)):
            given = call[name]
            changes[name] = torch.zeros(count, device=device) if given is None else given.float().reshape(count).contiguous()
    return call | changes
