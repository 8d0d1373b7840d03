"""What a call asks of the kernels: everything about it, apart from sizes and strides, that changes the generated code.

Free of torch and of the DSL: the host plans and caches by it, the kernels are compiled from it.
"""

from dataclasses import dataclass, fields
from typing import Any

DTYPES = ("bf16", "fp32")
OFFSETS = ("int32", "int64")
GATES = ("bounded", "softplus", "given")
BETAS = ("sigmoid", "twice", "given")
DTYPE_NAMES = {"torch.bfloat16": "bf16", "torch.float32": "fp32", "torch.int32": "int32", "torch.int64": "int64"}


@dataclass(frozen=True)
class Variant:
    """One kind of call. The defaults, apart from the last three fields, are the one call that FlashKDA takes.

    Fields that bear a tensor's name hold its dtype, "bf16", "fp32", "int32" or "int64"; None: the call has no such tensor.

    Raises:
        ValueError: the values are not allowed, or not together.
    """

    # lower_bound * sigmoid(exp(A_log) * (g + dt_bias)); "softplus": -exp(A_log) * softplus(g + dt_bias); "given": g
    gate: str = "bounded"
    gate_dtype: str = "bf16"  # of g
    a_log: str | None = "fp32"  # None: exp(A_log) = 1
    dt_bias: str | None = "fp32"  # None: 0
    beta: str = "sigmoid"  # sigmoid(beta); "twice": 2 * sigmoid(beta); "given": beta
    beta_dtype: str = "bf16"
    l2norm: bool = True  # normalise the rows of q and k
    state_v_first: bool = True  # states are [.., V, K], otherwise [.., K, V]
    intermediate_states: int | None = None  # 64 or 32: write the state before every so many tokens
    initial_state: str | None = None  # None: sequences begin from a state zero
    final_state: str | None = "fp32"
    cu_seqlens: str | None = None  # None: sequences of equal length

    def __post_init__(self) -> None:
        allowed = {
            "gate": GATES,
            "gate_dtype": DTYPES,
            "a_log": (None, *DTYPES) if self.gate == "bounded" else DTYPES if self.gate == "softplus" else (None,),
            "dt_bias": (None,) if self.gate == "given" else (None, *DTYPES),
            "beta": BETAS,
            "beta_dtype": DTYPES,
            "l2norm": (True, False),
            "state_v_first": (True, False),
            "intermediate_states": (None, 64, 32),
            "initial_state": (None, *DTYPES),
            "final_state": (None, *DTYPES),
            "cu_seqlens": (None, *OFFSETS),
        }
        wrong = {name: getattr(self, name) for name, values in allowed.items() if getattr(self, name) not in values}
        if wrong:
            raise ValueError(f"unsupported with gate={self.gate!r}: {wrong}")

    @classmethod
    def of(cls, call: Any) -> "Variant":
        """The variant of a call.Call that every eligibility rule accepts; metadata alone is read."""
        in_kernel = call.use_gate_in_kernel
        gate = "softplus" if call.lower_bound is None else "bounded"  # by the bound alone, as FLA chooses
        beta = "twice" if call.allow_neg_eigval else "sigmoid"
        return cls(
            gate=gate if in_kernel else "given",
            gate_dtype=_dtype(call.g),
            a_log=_dtype(call.A_log) if in_kernel else None,  # FLA ignores the gate's parameters without the gate
            dt_bias=_dtype(call.dt_bias) if in_kernel else None,
            beta=beta if call.use_beta_sigmoid_in_kernel else "given",
            beta_dtype=_dtype(call.beta),
            l2norm=bool(call.use_qk_l2norm_in_kernel),
            state_v_first=bool(call.state_v_first),
            intermediate_states=int(call.chunk_size) if call.return_intermediate_states else None,
            initial_state=_dtype(call.initial_state),
            final_state="fp32" if call.output_final_state else None,
            cu_seqlens=_dtype(call.cu_seqlens),
        )

    @property
    def changes(self) -> dict[str, Any]:
        """What is asked for otherwise than by FlashKDA's call, by name; the dtypes of states and offsets are not looked at."""
        return {name: value for name in ASKED if (value := getattr(self, name)) != _DEFAULTS[name]}

    @property
    def needs_levels(self) -> bool:
        """Whether 2^-(a sum of log2 decays), times an element of k, may leave the range of bf16.

        It cannot where the gate is bounded and k has norm 1. Elsewhere products over a chunk are formed level by level, with
        factors of at most 1.
        """
        return self.gate != "bounded" or not self.l2norm


_DEFAULTS = {field.name: field.default for field in fields(Variant)}
STORAGE = ("initial_state", "final_state", "cu_seqlens")
ASKED = tuple(name for name in _DEFAULTS if name not in STORAGE)


def _dtype(tensor: Any) -> Any:
    return None if tensor is None else DTYPE_NAMES[str(tensor.dtype)]
