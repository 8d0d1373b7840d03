"""What a call asks of the kernels: everything about it, apart from sizes and strides, that changes the generated code.

Free of torch and of the DSL: the host plans and caches by it, the kernels are compiled from it.
"""

from dataclasses import dataclass, fields
from typing import Any

DTYPE_BYTES = {"bf16": 2, "fp32": 4}
DTYPES = tuple(DTYPE_BYTES)
OFFSETS = ("int32", "int64")
OPTIONAL = (None, *DTYPES)
# Forms of the gate: the dtypes that A_log and dt_bias may have (None: no such tensor) and, beside them, the log decay.
GATES: dict[str, tuple[tuple[str | None, ...], tuple[str | None, ...]]] = {
    "bounded": (OPTIONAL, OPTIONAL),  # lower_bound * sigmoid(exp(A_log) * (g + dt_bias))
    "softplus": (DTYPES, OPTIONAL),  # -exp(A_log) * softplus(g + dt_bias)
    "given": ((None,), (None,)),  # g
}
BETAS = ("sigmoid", "twice", "given")
DTYPE_NAMES = {"torch.bfloat16": "bf16", "torch.float32": "fp32", "torch.int32": "int32", "torch.int64": "int64"}


@dataclass(frozen=True)
class Variant:
    """One kind of call. The defaults are FlashKDA's call; it also takes other values of the last three fields.

    Fields with a tensor's name hold its dtype, "bf16", "fp32", "int32" or "int64"; None: the call has no such tensor.

    Raises:
        ValueError: the values are not allowed, or not together.
    """

    gate: str = "bounded"  # one of GATES
    gate_dtype: str = "bf16"  # of g
    a_log: str | None = "fp32"  # None: exp(A_log) = 1
    dt_bias: str | None = "fp32"  # None: 0
    beta: str = "sigmoid"  # sigmoid(beta); "twice": 2 * sigmoid(beta); "given": beta
    beta_dtype: str = "bf16"
    l2norm: bool = True  # normalise the rows of q and k
    state_v_first: bool = True  # states are [V, K], otherwise [K, V]
    intermediate_states: int | None = None  # write the state before every 64 or 32 tokens
    initial_state: str | None = None  # None: every sequence begins with a zero state
    final_state: str | None = "fp32"
    cu_seqlens: str | None = None  # None: sequences of equal length

    def __post_init__(self) -> None:
        a_log, dt_bias = GATES.get(self.gate, ((), ()))
        allowed = {
            "gate": tuple(GATES),
            "gate_dtype": DTYPES,
            "a_log": a_log,
            "dt_bias": dt_bias,
            "beta": BETAS,
            "beta_dtype": DTYPES,
            "l2norm": (True, False),
            "state_v_first": (True, False),
            "intermediate_states": (None, 64, 32),
            "initial_state": OPTIONAL,
            "final_state": OPTIONAL,
            "cu_seqlens": (None, *OFFSETS),
        }
        wrong = {name: getattr(self, name) for name, values in allowed.items() if getattr(self, name) not in values}
        if wrong:
            raise ValueError(f"unsupported with gate={self.gate!r}: {wrong}")

    @classmethod
    def of(cls, call: Any) -> "Variant":
        """The variant of a call.Call that every eligibility rule accepts; reads metadata alone."""
        in_kernel = call.use_gate_in_kernel
        gate = "softplus" if call.lower_bound is None else "bounded"  # by the bound alone, as FLA chooses
        beta = "twice" if call.allow_neg_eigval else "sigmoid"
        return cls(
            gate=gate if in_kernel else "given",
            gate_dtype=DTYPE_NAMES[str(call.g.dtype)],
            a_log=_dtype(call.A_log) if in_kernel else None,  # FLA ignores the gate's parameters without the gate
            dt_bias=_dtype(call.dt_bias) if in_kernel else None,
            beta=beta if call.use_beta_sigmoid_in_kernel else "given",
            beta_dtype=DTYPE_NAMES[str(call.beta.dtype)],
            l2norm=bool(call.use_qk_l2norm_in_kernel),
            state_v_first=bool(call.state_v_first),
            intermediate_states=int(call.chunk_size) if call.return_intermediate_states else None,
            initial_state=_dtype(call.initial_state),
            final_state="fp32" if call.output_final_state else None,
            cu_seqlens=_dtype(call.cu_seqlens),
        )

    @property
    def changes(self) -> dict[str, Any]:
        """The fields that differ from FlashKDA's call, by name; the last three fields are not compared."""
        return {name: value for name in ASKED if (value := getattr(self, name)) != _DEFAULTS[name]}

    @property
    def needs_levels(self) -> bool:
        """Whether 2^-(sum of log2 decays over a chunk), times an element of k, may leave the range of bf16.

        It cannot where the gate is bounded and k has norm 1. For all other calls products over a chunk are formed level by
        level, with factors of at most 1.
        """
        return self.gate != "bounded" or not self.l2norm


_DEFAULTS = {field.name: field.default for field in fields(Variant)}
STORAGE = ("initial_state", "final_state", "cu_seqlens")
ASKED = tuple(name for name in _DEFAULTS if name not in STORAGE)


def _dtype(tensor: Any) -> Any:
    return None if tensor is None else DTYPE_NAMES[str(tensor.dtype)]
