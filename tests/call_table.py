"""The calls that the GPU tests cover: which variants are compiled (KINDS), and which inputs they meet (CASES).

A variant costs seconds to compile, so there are few. Every three choices of the arithmetic meet in one of them, and every
two choices of all. Lengths, strides, heads and values are known at run time alone; every two of them meet in a case.
"""

from dataclasses import asdict
from functools import partial
from typing import NamedTuple

import covering

from fla_kda_backend.kernels.variant import BETAS, GATES, Variant
from fla_kda_backend.testing import REGIMES
from fla_kda_backend.testing.calls import LAYOUTS

ARITHMETIC = {  # by the names of Variant's fields
    "gate": tuple(GATES),
    "gate_dtype": ("bf16", "fp32"),
    "a_log": ("fp32", "bf16", None),
    "dt_bias": ("fp32", "bf16", None),
    "beta": BETAS,
    "beta_dtype": ("bf16", "fp32"),
    "l2norm": (True, False),
    "state_v_first": (True, False),
}
STORAGE = {"initial_state": ("fp32", None), "final_state": ("fp32", None), "cu_seqlens": (None, "int64", "int32")}
AT_RUN_TIME = {
    "regime": REGIMES,
    "tail": (1, 15, 16, 17, 63, 64, 65),  # tokens
    "before": (0, 64, 150),  # tokens ahead of the tail, of a sequence of their own
    "layout": LAYOUTS,  # how q, k, v, g and beta lie in memory
    "heads": (2, 4),  # of v, for two of q and k; FLA tunes its kernels anew for every number of heads
    "flat": (True, False),  # A_log [HV] and dt_bias [HV * K], or [1, 1, HV, 1] and [HV, K]
    "scale": (None, 0.3),
}
QK_HEADS = 2
CASES_A_KIND = 6


# A call with states in and out; FlashKDA's own without arguments. A kind of call is a Variant.
Kind = partial(Variant, initial_state="fp32")
FLASHKDA = Kind()


def label(kind):
    """In what a kind differs from FLASHKDA."""
    default = asdict(FLASHKDA)
    return "-".join(f"{name}_{value}" for name, value in asdict(kind).items() if value != default[name]) or "flashkda"


class Case(NamedTuple):
    """A call of a kind; the fields are those of AT_RUN_TIME."""

    kind: Variant
    regime: str = "normal"
    tail: int = 65
    before: int = 64
    layout: str = "whole"
    heads: int = QK_HEADS
    flat: bool = True
    scale: float | None = None

    @property
    def lengths(self):
        """Tokens of each sequence; of one length where they are not packed."""
        longest = self.before + self.tail
        return (longest, longest) if self.kind.cu_seqlens is None else (self.tail, 0, longest)

    @property
    def name(self):
        run_time = (f"{field}_{getattr(self, field)}" for field in AT_RUN_TIME)
        return "-".join([label(self.kind), *run_time])


def gate_takes(gate, a_log, dt_bias):
    """Whether a form of the gate goes with these dtypes of its parameters."""
    a_logs, dt_biases = GATES[gate]
    return a_log in a_logs and dt_bias in dt_biases


def allowed(row):
    """Whether the choices in an incomplete row may stand together."""
    if "gate" not in row:
        return True
    a_logs, dt_biases = GATES[row["gate"]]
    return row.get("a_log", a_logs[0]) in a_logs and row.get("dt_bias", dt_biases[0]) in dt_biases


def kinds():
    return [Kind(**row) for row in covering.completed(covering.rows(ARITHMETIC, 3, allowed), ARITHMETIC | STORAGE, allowed)]


def cases(of):
    dimensions = {"kind": tuple(of), **AT_RUN_TIME}
    return [Case(**row) for row in covering.completed([{"kind": kind} for kind in of] * CASES_A_KIND, dimensions)]


KINDS = kinds()
CASES = cases(KINDS)

# ---- by name -------------------------------------------------------------------------------------------------------
SOFTPLUS = Kind(gate="softplus")  # FLA's own layer by default
GIVEN = Kind(gate="given", a_log=None, dt_bias=None)
# Kimi-Linear's modelling code: pre-activated fp32 g, fp32 sigmoided beta, K-first states
KIMI = Kind("given", "fp32", None, None, "given", "fp32", state_v_first=False, cu_seqlens="int64")
BY_GATE = {"bounded": FLASHKDA, "softplus": SOFTPLUS, "given": GIVEN}
