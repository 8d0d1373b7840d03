"""Inputs of FlashKDA's call: a dict of the arguments that reference.exact.forward and fla_kda_backend.fwd share.

Random ones over all decay rates, the regimes in which roundings show, and changes to both.
"""

import torch

from fla_kda_backend.kernels.variant import DTYPE_NAMES, Variant
from fla_kda_backend.testing import TOKEN_AXIS, Form, Normal, make, standard_normal
from fla_kda_backend.testing.gates import before_gate

FLAGS = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "safe_gate", "state_v_first")
REGIMES = ("normal", "saturated", "slow", "correlated", "repeated", "alternating")
INPUTS = (*TOKEN_AXIS, "scale", "A_log", "dt_bias", "lower_bound", "initial_state", "cu_seqlens")


def random_inputs(tokens, heads, *, batch=1, cu_seqlens=None, cu_dtype=torch.int64, state=torch.float32, scale=128**-0.5,
                  lower_bound=-5.0, device="cpu", seed=0):  # fmt: skip
    """The log decay is log-uniform from -0.001 to -3 per token (or to 0.6 of a weaker bound), channel by channel.

    With strong decay alone the state is forgotten inside a chunk, and a recurrence that drops it would pass.
    cu_seqlens: a list of offsets, or None. state: dtype of the initial state, or None for none.
    """
    normal = Normal(device, tokens, heads, batch, cu_seqlens, lower_bound, seed)

    def gate(A_log, dt_bias):
        strongest = min(3.0, -0.6 * lower_bound)
        decay = -1e-3 * (strongest / 1e-3) ** normal.uniform(heads, 128)
        g = before_gate(decay, "bounded", A_log.exp()[:, None], dt_bias, lower_bound)
        return g.bfloat16() + 0.1 * normal(batch, tokens, heads, 128, dtype=torch.bfloat16)

    return inputs_of(
        lambda form: standard_normal(form, normal, gate, spread=0.3),
        device,
        tokens,
        heads,
        batch=batch,
        offsets=None if cu_seqlens is None else tuple(cu_seqlens),
        cu_seqlens=None if cu_seqlens is None else DTYPE_NAMES[str(cu_dtype)],
        state=None if state is None else DTYPE_NAMES[str(state)],
        scale=scale,
        lower_bound=lower_bound,
    )


def inputs_of(draw, device, tokens, heads, *, batch=1, offsets=None, cu_seqlens=None, state="fp32", scale=128**-0.5,
              lower_bound=-5.0):  # fmt: skip
    """Those of a form whose values `draw` gives."""
    variant = Variant(initial_state=state, cu_seqlens=cu_seqlens)
    sizes = {"batch": batch, "tokens": tokens, "offsets": offsets}
    form = Form.of(variant, (tokens,), heads, scale=scale, lower_bound=lower_bound, **sizes)
    call = make(form, draw, device, spelled_out=True)
    return {name: call[name] for name in INPUTS} | {"dt_bias": call["dt_bias"].view(heads, 128)}


def regime(name, tokens, heads=2, device="cpu", seed=0):
    """One of REGIMES, with a normal fp32 initial state."""
    normal = Normal(device, name, tokens, heads, seed)
    q, k, v, g = (normal(1, tokens, heads, 128) for _ in range(4))
    beta, A_log, dt_bias = normal(1, tokens, heads), 0.5 * normal(heads), 0.5 * normal(heads, 128)
    if name == "saturated":
        g = torch.full_like(g, 12.0)
    elif name == "slow":
        g = g - 6
    elif name == "alternating":  # even and odd channels hardly decay in turns, 8 tokens each; two channels stand out
        turn = torch.arange(tokens, device=device)[:, None, None] // 8 % 2 == torch.arange(128, device=device) % 2
        g = torch.where(turn, g - 12, g + 12)
        q[..., :2], k[..., :2] = 6 * q[..., :2], 6 * k[..., :2]
    elif name in ("correlated", "repeated"):  # hardly any decay, so that what keys have in common adds up
        g, A_log, dt_bias = torch.full_like(g, -12.0), torch.zeros_like(A_log), torch.zeros_like(dt_bias)
        k = k[:, :1] + (0.05 * k if name == "correlated" else torch.zeros_like(k))
        q = q if name == "correlated" else k
        beta = torch.full_like(beta, 2.0 if name == "correlated" else 8.0)
    values = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias}
    values["initial_state"] = normal(1, heads, 128, 128)
    return inputs_of(lambda form: values, device, tokens, heads)


EXTREMES = ("saturated", "saturated strong", "saturated weak", "steep", "zero rows", "large values", "large state",
            "beta on", "beta off")  # fmt: skip


def extreme(name, inputs):
    """The inputs pushed to one of EXTREMES."""
    inputs = dict(inputs)
    if name == "saturated":
        inputs["g"] = torch.where(inputs["g"] > 0, 60.0, -60.0).to(torch.bfloat16)
    elif name == "saturated strong":
        inputs["g"] = torch.full_like(inputs["g"], 60.0)
    elif name == "saturated weak":
        inputs["g"] = torch.full_like(inputs["g"], -60.0)
    elif name == "steep":
        inputs["A_log"] = inputs["A_log"] + 5
    elif name == "zero rows":
        for key in ("q", "k", "v"):
            inputs[key] = inputs[key].clone()
            inputs[key][:, 3::7] = 0
    elif name == "large values":
        inputs |= {key: inputs[key] * 1e4 for key in ("q", "k", "v")}
    elif name == "large state":
        inputs["initial_state"] = inputs["initial_state"] * 1e6
    elif name in ("beta on", "beta off"):
        inputs["beta"] = torch.full_like(inputs["beta"], 60.0 if name == "beta on" else -60.0)
    return inputs


def cut(inputs, first, end, **changes):
    """Tokens first to end."""
    return inputs | {name: inputs[name][:, first:end].contiguous() for name in TOKEN_AXIS} | changes


def of_heads(inputs, heads):
    """Some heads alone; no head depends on another."""
    few = {name: inputs[name][:, :, heads].contiguous() for name in TOKEN_AXIS}
    few |= {name: inputs[name][heads] for name in ("A_log", "dt_bias")}
    if inputs["initial_state"] is not None:
        few["initial_state"] = inputs["initial_state"][:, heads]
    return inputs | few


def packed(inputs):
    """A batch as one row of packed sequences of equal length."""
    batch, tokens = inputs["q"].shape[:2]
    offsets = torch.arange(batch + 1, device=inputs["q"].device) * tokens
    return inputs | {name: inputs[name].flatten(0, 1)[None] for name in TOKEN_AXIS} | {"cu_seqlens": offsets}


def sequence(inputs, n):
    """Sequence n of packed ones, by itself."""
    first, end = inputs["cu_seqlens"][n : n + 2].tolist()
    initial = inputs["initial_state"]
    return cut(inputs, first, end, cu_seqlens=None, initial_state=None if initial is None else initial[n : n + 1])


def chunk_kda_arguments(inputs, **changes):
    """Keyword arguments of FLA's chunk_kda."""
    flat = inputs["dt_bias"].reshape(-1)
    return {**inputs, "dt_bias": flat, **dict.fromkeys(FLAGS, True), "output_final_state": True, **changes}
