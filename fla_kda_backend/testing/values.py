"""Seeded values for calls of chunk_kda: random ones over all decay rates, and the regimes in which roundings show."""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING, Any

from ..kernels.variant import Variant
from .calls import DIM, Form
from .gates import before_gate

if TYPE_CHECKING:
    import torch

REGIMES = ("normal", "saturated", "slow", "correlated", "repeated", "steep", "alternating")
STEEP = (200.0, 50.0)  # exp(A_log) of heads in turns; trained checkpoints come near the first
WEAK, STRONG = 3e-5, {True: 4.99, False: 60.0}  # -log decay per token; the strong one by whether the gate is bounded


class Normal:
    """Numbers from a generator of their own, seeded by what describes them."""

    def __init__(self, device: Any, *description: Any, seed: int | None = None):
        import torch

        self.device = torch.device(device)
        seed = zlib.crc32(repr(description).encode()) if seed is None else seed
        self.generator = torch.Generator(self.device).manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Normal ones, fp32 by default."""
        import torch

        return torch.randn(*shape, generator=self.generator, device=self.device, dtype=dtype or torch.float32)

    def uniform(self, *shape: int) -> torch.Tensor:
        """Between 0 and 1, fp32."""
        import torch

        return torch.rand(*shape, generator=self.generator, device=self.device, dtype=torch.float32)


def standard_normal(form: Form, normal: Normal, gate: Any, spread: float) -> dict[str, torch.Tensor]:
    """Standard normal values, those of q, k, v and beta drawn in bf16; A_log and dt_bias `spread` times that.

    gate(A_log, dt_bias) gives g, and may draw from `normal`: it is called after the parameters are drawn, before q.
    """
    import torch

    A_log = spread * normal(form.heads)
    dt_bias = spread * normal(form.heads * form.dim).view(form.heads, form.dim)
    values = {"A_log": A_log, "dt_bias": dt_bias, "g": gate(A_log, dt_bias)}
    values |= {name: normal(*form.shape(name), dtype=torch.bfloat16) for name in ("q", "k", "v", "beta")}
    if "initial_state" in form.dtypes:
        values["initial_state"] = normal(*form.shape("initial_state"))
    return values


def regime(name: str, variant: Variant, form: Form, normal: Normal) -> dict[str, torch.Tensor]:
    """Values for a form of a variant, in one of REGIMES.

    normal: log decay per token between -0.001 and -3, log-uniform over channels. saturated: the strongest. slow: near -0.001.
    correlated, repeated: keys that share a direction, or are all one key, and hardly any decay. steep: exp(A_log) up to 200.
    alternating: even and odd channels decay strongly in turns, 8 tokens each, and two channels stand out.
    """
    import torch
    import torch.nn.functional as F

    q, k, v, beta = (normal(*form.shape(each)) for each in ("q", "k", "v", "beta"))
    if name == "alternating":
        q[..., :2], k[..., :2] = 6 * q[..., :2], 6 * k[..., :2]
    elif name in ("correlated", "repeated"):
        k = k[:, :1] + (0.05 * k if name == "correlated" else torch.zeros_like(k))
        q = q if name == "correlated" else k
        beta = torch.full_like(beta, 2.0 if name == "correlated" else 8.0)
    if not variant.l2norm:
        q, k = (F.normalize(x, dim=-1) for x in (q, k))
    if variant.beta == "given":
        beta = torch.sigmoid(beta)
    values = {"q": q, "k": k, "v": v, "beta": beta, **_gate(name, variant, form, normal)}
    if "initial_state" in form.dtypes:
        values["initial_state"] = normal(*form.shape("initial_state"))
    return values


def _gate(name: str, variant: Variant, form: Form, normal: Normal) -> dict[str, torch.Tensor]:
    """g [B, T, HV, K] fp32; A_log [HV] and dt_bias [HV, K] of the form's dtypes, where it has them."""
    import torch
    import torch.nn.functional as F

    heads, found = form.heads, {}
    rate, bias = torch.ones(1, 1, device=normal.device), torch.zeros(1, device=normal.device)
    if "A_log" in form.dtypes:
        steep = torch.tensor(STEEP).log().repeat(heads)[:heads].to(normal.device)
        A_log = steep if name == "steep" else 0.3 * normal(heads)
        found["A_log"] = A_log.to(getattr(torch, form.dtypes["A_log"]))
        rate = found["A_log"].float().exp()[:, None]
    if "dt_bias" in form.dtypes:
        found["dt_bias"] = (0.3 * normal(heads, form.dim)).to(getattr(torch, form.dtypes["dt_bias"]))
        bias = found["dt_bias"].float()
    if name == "steep":
        raw = 8 * normal(*form.shape("g"))
        raw = -STEEP[0] * F.softplus(raw) if variant.gate == "given" else raw
    else:
        raw = before_gate(_log_decay(name, variant, form, normal), variant.gate, rate, bias)
    return found | {"g": raw}


def _log_decay(name: str, variant: Variant, form: Form, normal: Normal) -> torch.Tensor:
    """Log decay per token [B, T, HV, K] fp32."""
    import torch

    shape, strong = form.shape("g"), STRONG[variant.gate == "bounded"]
    if name == "normal":
        rates = torch.exp(math.log(1e-3) + normal.uniform(*shape[2:]) * math.log(3e3))
        return -rates * (1 + 0.1 * normal.uniform(*shape))
    if name == "slow":
        return -1e-3 * torch.exp(0.5 * normal(*shape))
    if name == "saturated":
        return -strong * (1 - 1e-3 * normal.uniform(*shape))
    if name == "alternating":
        device = normal.device
        turn = torch.arange(shape[1], device=device)[:, None, None] // 8 % 2 == torch.arange(DIM, device=device) % 2
        return torch.where(turn, -WEAK, -strong).expand(shape)
    return torch.full(shape, -WEAK, device=normal.device)
