"""One call of chunk_kda: its arguments under FLA's names, as FLA would bind them."""

from dataclasses import dataclass, field, fields
from typing import Any

import torch

ABSENT = object()  # FLA tells an alias that was not passed from one that was passed as None
FLAG_TYPES = frozenset((bool, int, type(None)))


@dataclass(slots=True)
class Call:
    """The arguments of one chunk_kda call under FLA's names and defaults, scale and the layout's old alias resolved."""

    q: Any = None  # torch.Tensor [B, T, H, K]
    k: Any = None  # torch.Tensor [B, T, H, K]
    v: Any = None  # torch.Tensor [B, T, HV, V]
    g: Any = None  # torch.Tensor [B, T, HV, K]
    beta: Any = None  # torch.Tensor [B, T, HV]
    scale: Any = None  # float, or None for K ** -0.5
    initial_state: torch.Tensor | None = None  # [N, HV, V, K] with state_v_first, else [N, HV, K, V]
    output_final_state: bool = False
    use_qk_l2norm_in_kernel: bool = False
    use_gate_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    safe_gate: bool = False
    lower_bound: Any = None  # float, or None
    disable_recompute: bool = False
    return_intermediate_states: bool = False
    state_v_first: bool = False
    cu_seqlens: torch.Tensor | None = None  # [N + 1]
    cu_seqlens_cpu: torch.Tensor | None = None
    cp_context: Any = None
    use_graph: bool = False
    max_num_seqs: int | None = None
    A_log: torch.Tensor | None = field(default=None, kw_only=True)  # HV values of any shape
    dt_bias: torch.Tensor | None = field(default=None, kw_only=True)  # [HV * K] or [HV, K]
    chunk_size: int = field(default=64, kw_only=True)
    transpose_state_layout: Any = field(default=ABSENT, kw_only=True)
    unknown: tuple[str, ...] = field(default=(), kw_only=True)  # keywords that nobody here knows
    malformed: str | None = field(default=None, kw_only=True)  # why the arguments fit no call of chunk_kda
    given: list | None = field(default=None, kw_only=True, repr=False)  # what `inputs` returns, once it was asked for

    @property
    def tokens(self) -> int:
        """B * T."""
        return self.q.shape[0] * self.q.shape[1]

    @property
    def qk_heads(self) -> int:
        """H, of q and k."""
        return self.q.shape[2]

    @property
    def heads(self) -> int:
        """HV, of v, g, beta and the states; value head h uses head h // (HV / H) of q and k."""
        return self.v.shape[2]

    @property
    def num_sequences(self) -> int:
        """N: B, or one less than the length of cu_seqlens."""
        return self.q.shape[0] if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    @property
    def inputs(self) -> list[tuple[str, Any]]:
        """(name, value) of everything that was given and that the kernels would read on the device.

        Without the gate in the kernel FLA drops A_log and dt_bias unseen: they may be anything, and one that requires grad
        gets no gradient from FLA either.
        """
        if self.given is None:
            names = DEVICE_INPUTS if self.use_gate_in_kernel else DEVICE_INPUTS[:-2]
            self.given = [(name, value) for name in names if (value := getattr(self, name)) is not None]
        return self.given


OWN = ("unknown", "malformed", "given")
KEYWORD_ONLY = ("A_log", "dt_bias", "chunk_size", "transpose_state_layout")  # in FLA's **kwargs
PARAMETERS = tuple(f.name for f in fields(Call) if f.name not in OWN)
POSITIONAL = tuple(name for name in PARAMETERS if name not in KEYWORD_ONLY)
REQUIRED = ("q", "k", "v", "g", "beta")
DEVICE_INPUTS = (*REQUIRED, "initial_state", "cu_seqlens", "A_log", "dt_bias")  # the gate's last

_KNOWN = frozenset(PARAMETERS)


def parse(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The Call that chunk_kda(*args, **kwargs) is; never raises for what a caller can pass."""
    unknown: tuple[str, ...] = ()
    if not _KNOWN.issuperset(kwargs):
        unknown = tuple(name for name in kwargs if name not in _KNOWN)
        kwargs = {name: value for name, value in kwargs.items() if name in _KNOWN}
    if len(args) > len(POSITIONAL):
        return Call(malformed=f"takes {len(POSITIONAL)} positional arguments, got {len(args)}", unknown=unknown)
    try:
        call = Call(*args, **kwargs, unknown=unknown)
    except TypeError as error:
        return Call(malformed=str(error).replace("Call.__init__()", "chunk_kda()"), unknown=unknown)
    # Whether a tensor is true would be waited for, on a GPU; a rule declines it.
    if call.transpose_state_layout is not ABSENT and type(call.state_v_first) in FLAG_TYPES:
        if call.state_v_first:
            call.malformed = "takes either state_v_first or its old alias transpose_state_layout, got both"
        else:
            call.state_v_first = call.transpose_state_layout
    if call.scale is None and isinstance(call.q, torch.Tensor) and call.q.ndim == 4:
        call.scale = call.q.shape[-1] ** -0.5
    return call
