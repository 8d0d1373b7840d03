"""Calls of chunk_kda for the cases of call_table, and what such calls are changed to."""

import torch
from call_table import QK_HEADS

from fla_kda_backend.testing import DIM, TOKEN_AXIS, Form, Normal, laid_out, make, regime

__all__ = ["call_of", "laid_out", "plain", "with_later_tokens_changed"]


def call_of(case, device="cpu", seed=0, **changes):
    """Keyword arguments of chunk_kda, all that the case decides; they depend on the case, the seed and the kind of device."""
    form = Form.of(case.kind, case.lengths, case.heads, case.heads // QK_HEADS, case.scale, flat=case.flat)
    normal = Normal(device, case, seed)
    call = make(form, lambda form: regime(case.regime, case.kind, form, normal), device, case.layout, spelled_out=True)
    if case.layout == "transposed" and call["initial_state"] is not None:
        call["initial_state"] = call["initial_state"].mT.contiguous().mT
    return call | changes


def with_later_tokens_changed(call, other, last):
    """The call with the tokens after `last` those of another call."""
    return call | {name: torch.cat([call[name][:, : last + 1], other[name][:, last + 1 :]], 1) for name in TOKEN_AXIS}


def plain(call):
    """A call of the same result, for FLA's Triton kernels, which are compiled and tuned again for each dtype and layout.

    Values of a wider dtype, zeros in place of a missing tensor and a transposed state change no result of those kernels. beta
    keeps its dtype, because they round its products to it.
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
