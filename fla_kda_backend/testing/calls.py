"""The one place that knows what chunk_kda takes: names, shapes, dtypes and flags of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..kernels.variant import DTYPE_NAMES, Variant
from .gates import GATE_FORMS, LOWER_BOUND

if TYPE_CHECKING:
    import torch

DIM = 128  # of keys and values
TOKEN_AXIS = ("q", "k", "v", "g", "beta")  # the tensors that begin with [B, T]
LAYOUTS = ("whole", "fused", "transposed", "unaligned")  # see laid_out
TORCH_NAMES = {short: name.removeprefix("torch.") for name, short in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class Form:
    """A call without the values of its tensors: B rows of T tokens, or with `offsets` one row of packed sequences."""

    batch: int
    tokens: int  # of a row
    qk_heads: int  # H, of q and k
    heads: int  # HV, of v, g, beta and the states
    dtypes: Mapping[str, str]  # by argument, as torch names them; there is no tensor that is missing here
    flags: Mapping[str, Any]  # the arguments that are no tensors
    offsets: tuple[int, ...] | None = None  # values of cu_seqlens
    dim: int = DIM  # K
    value_dim: int = DIM  # V
    flat: bool = True  # A_log [HV] and dt_bias [HV * K]; otherwise [1, 1, HV, 1] and [HV, K]

    @classmethod
    def of(cls, variant: Variant, lengths: tuple[int, ...], heads: int, group: int = 1, scale: float | None = None,
           lower_bound: float = LOWER_BOUND, **others: Any) -> Form:  # fmt: skip
        """A call of a variant.

        Args:
            lengths: tokens of each sequence. They are packed where the variant has cu_seqlens, otherwise all are equal.
            heads: HV.
            group: value heads per head of q and k.
            others: further fields of Form; batch, tokens and offsets replace what follows from the lengths.
        """
        dtypes = {
            **dict.fromkeys(("q", "k", "v"), "bf16"),
            "g": variant.gate_dtype,
            "beta": variant.beta_dtype,
            "A_log": variant.a_log,
            "dt_bias": variant.dt_bias,
            "initial_state": variant.initial_state,
            "cu_seqlens": variant.cu_seqlens,
        }
        flags = {
            "scale": scale,
            "output_final_state": variant.final_state is not None,
            "use_qk_l2norm_in_kernel": variant.l2norm,
            "use_beta_sigmoid_in_kernel": variant.beta != "given",
            "allow_neg_eigval": variant.beta == "twice",
            **GATE_FORMS[variant.gate].flags(lower_bound),
            "return_intermediate_states": variant.intermediate_states is not None,
            "state_v_first": variant.state_v_first,
        }
        if variant.intermediate_states is not None:
            flags["chunk_size"] = variant.intermediate_states
        sizes = rows_of(lengths, variant.cu_seqlens is not None)
        return cls(
            **{**sizes, **others},
            qk_heads=heads // group,
            heads=heads,
            dtypes={name: TORCH_NAMES[dtype] for name, dtype in dtypes.items() if dtype is not None},
            flags=flags,
        )

    @property
    def sequences(self) -> int:
        return self.batch if self.offsets is None else len(self.offsets) - 1

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor argument."""
        lead = self.batch, self.tokens
        state = (self.value_dim, self.dim) if self.flags.get("state_v_first") else (self.dim, self.value_dim)
        return {
            "q": (*lead, self.qk_heads, self.dim),
            "k": (*lead, self.qk_heads, self.dim),
            "v": (*lead, self.heads, self.value_dim),
            "g": (*lead, self.heads, self.dim),
            "beta": (*lead, self.heads),
            "A_log": (self.heads,) if self.flat else (1, 1, self.heads, 1),
            "dt_bias": (self.heads * self.dim,) if self.flat else (self.heads, self.dim),
            "initial_state": (self.sequences, self.heads, *state),
            "cu_seqlens": (self.sequences + 1,),
        }[name]


Draw = Callable[[Form], "Mapping[str, torch.Tensor]"]  # values of all floating-point tensors of a form, of any dtype


def rows_of(lengths: tuple[int, ...], packed: bool) -> dict[str, Any]:
    """The fields batch, tokens and offsets of a Form for sequences of these lengths."""
    if packed:
        offsets = tuple(sum(lengths[:n]) for n in range(len(lengths) + 1))
        return {"batch": 1, "tokens": offsets[-1], "offsets": offsets}
    assert len(set(lengths)) <= 1, f"sequences of different lengths must be packed, got {lengths}"
    return {"batch": len(lengths), "tokens": max(lengths, default=0), "offsets": None}


def make(form: Form, draw: Draw | None = None, device: Any = "meta", layout: str = "whole", spelled_out: bool = False,
         **changes: Any) -> dict[str, Any]:  # fmt: skip
    """Keyword arguments of chunk_kda.

    Args:
        draw: gives the values; None: zeros, which on the meta device have no memory. The values are converted to the form's
            dtypes, moved to the device and reshaped.
        layout: how q, k, v, g and beta lie in memory, one of LAYOUTS; see laid_out.
        spelled_out: whether arguments that have FLA's default, None or False, are among them.
        changes: arguments that replace others.
    """
    import torch

    names = [name for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state") if name in form.dtypes]
    if draw is None or torch.device(device).type == "meta":
        tensors = {name: torch.zeros(form.shape(name), dtype=_dtype(form, name), device=device) for name in names}
    else:
        values = draw(form)
        tensors = {name: values[name].to(device, _dtype(form, name)).reshape(form.shape(name)) for name in names}
    tensors |= laid_out({name: tensors[name] for name in TOKEN_AXIS}, layout)
    if form.offsets is not None:
        tensors["cu_seqlens"] = torch.tensor(form.offsets, dtype=_dtype(form, "cu_seqlens"), device="cpu").to(device)
    missing = dict.fromkeys(("A_log", "dt_bias", "initial_state", "cu_seqlens"))
    call = missing | tensors | dict(form.flags)
    if not spelled_out:
        call = {name: value for name, value in call.items() if value is not None and value is not False}
    return call | changes


def _dtype(form: Form, name: str) -> torch.dtype:
    import torch

    return getattr(torch, form.dtypes[name])


def laid_out(tensors: Mapping[str, torch.Tensor], layout: str) -> dict[str, torch.Tensor]:
    """The tensors q, k, v, g and beta with the same values, elsewhere in memory."""
    import torch

    if layout == "whole":
        return {name: x.contiguous() for name, x in tensors.items()}
    if layout == "fused":  # slices of one projection to all heads of q, k and v, and of wider ones to g and beta
        counts = [tensors[name].shape[2] for name in "qkv"]
        parts = dict(zip("qkv", torch.cat([tensors[name] for name in "qkv"], 2).split(counts, 2)))
        for name in ("g", "beta"):
            x = tensors[name]
            parts[name] = torch.cat([x, x[:, :, :1]], 2)[:, :, : x.shape[2]]
        return parts
    if layout == "transposed":  # [B, heads, T] in memory
        return {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in tensors.items()}
    assert layout == "unaligned", f"layout must be in {LAYOUTS}, got {layout!r}"  # one element off
    return {
        name: torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape).copy_(x)
        for name, x in tensors.items()
    }
