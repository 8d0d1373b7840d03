"""The forms of the gate as calls of chunk_kda ask for them: their flags, and the g that gives a wanted decay."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

LOWER_BOUND = -5.0


class GateForm(NamedTuple):
    flags: Callable[[float], dict[str, Any]]  # lower_bound -> arguments of chunk_kda
    # (log decay per token, exp(A_log), dt_bias, lower_bound) -> g; exp(A_log) is [HV, 1], dt_bias [HV, K], both broadcast
    inverse: Callable[[torch.Tensor, Any, Any, float], torch.Tensor]


def _inverse_of_bounded(decay: torch.Tensor, rate: Any, bias: Any, lower_bound: float) -> torch.Tensor:
    import torch

    return torch.logit(decay / lower_bound) / rate - bias


def _inverse_of_softplus(decay: torch.Tensor, rate: Any, bias: Any, lower_bound: float) -> torch.Tensor:
    import torch

    x = -decay / rate
    return torch.where(x > 15, x, x.clamp(max=15).expm1().log()) - bias


GATE_FORMS = {
    "bounded": GateForm(
        lambda lower_bound: {"use_gate_in_kernel": True, "safe_gate": True, "lower_bound": lower_bound}, _inverse_of_bounded
    ),
    "softplus": GateForm(
        lambda lower_bound: {"use_gate_in_kernel": True, "safe_gate": False, "lower_bound": None}, _inverse_of_softplus
    ),
    "given": GateForm(
        lambda lower_bound: {"use_gate_in_kernel": False, "safe_gate": False, "lower_bound": None},
        lambda decay, rate, bias, lower_bound: decay,
    ),
}


def before_gate(
    decay: torch.Tensor, gate: str, rate: Any = 1.0, bias: Any = 0.0, lower_bound: float = LOWER_BOUND
) -> torch.Tensor:
    """g for a log decay per token; rate: exp(A_log) [HV, 1], bias: dt_bias [HV, K]."""
    return GATE_FORMS[gate].inverse(decay, rate, bias, lower_bound)
