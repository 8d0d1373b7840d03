"""The calls that are measured: shapes by name, three kinds of gate, seeded inputs. Shared with the tests."""

import math
from dataclasses import dataclass, replace

import torch

from fla_kda_backend.kernels.variant import Variant
from fla_kda_backend.testing import DIM, LOWER_BOUND, Form, Normal, make, standard_normal

VARIANTS = {
    "flashkda": Variant(),
    # Kimi-Linear's modelling code: g and beta are activated before, states are K-first
    "kimi": Variant("given", "fp32", None, None, "given", "fp32", state_v_first=False),
    "softplus": Variant("softplus"),  # FLA's default layer
}
CALLS = tuple(VARIANTS)
GATES = ("strong", "weak", "mixed")
STRONG, WEAK = -2.5, -0.001  # log decay per token
MIXED = (-0.001, -3.0)  # log-uniform between them, one rate per channel
JITTER = 0.1  # a token's log decay lies this fraction around its channel's
L2_BYTES = 50 << 20  # of an H200


@dataclass(frozen=True)
class Case:
    """One or more sequences; `packed` ones stand behind each other in one row, with cu_seqlens."""

    name: str
    lengths: tuple[int, ...]
    heads: int  # of v, g, beta and the states
    packed: bool
    flashkda_us: float | None  # FlashKDA's CUDA-graph median on an H200, for comparison; None: it takes no such call
    call: str = "flashkda"  # one of CALLS
    group: int = 1  # value heads per head of q and k

    @property
    def tokens(self):
        return sum(self.lengths)

    @property
    def sequences(self):
        return len(self.lengths)

    @property
    def prepared_bytes(self):
        """q, k, g and beta."""
        of_gate = 4 if self.call == "kimi" else 2
        return self.tokens * (self.heads // self.group * 2 * 2 * DIM + self.heads * of_gate * (DIM + 1))

    @property
    def floor_bytes(self):
        """Each input read once, each output written once: q, k, v, g, out, beta and the fp32 final state."""
        return self.prepared_bytes + self.heads * (self.tokens * 2 * 2 * DIM + self.sequences * 4 * DIM * DIM)


# Microseconds of the auto mode's CUDA graph on an H200: at most, and what is aimed at (None: nothing further).
TARGETS = {
    "fixed-T8192-H6": (130, 95),
    "fixed-T8192-H12": (155, 115),
    "fixed-T8192-H24": (220, 165),
    "fixed-T8192-H48": (380, 280),
    "fixed-T8192-H96": (780, 500),
    "fixed-T65536-H6": (950, 800),
    "varlen6-H12": (150, None),
    "8x1024-H12": (120, None),
    "128x64-H12": (120, None),
}
GATE_SPREAD = 1.05  # the slowest kind of gate over the fastest, at most

RAGGED = (1300, 547, 2048, 963, 271, 3063)
CASES = {
    case.name: case
    for case in (
        Case("fixed-T8192-H6", (8192,), 6, False, 857),
        Case("fixed-T8192-H12", (8192,), 12, False, 902),
        Case("fixed-T8192-H24", (8192,), 24, False, 982),
        Case("fixed-T8192-H48", (8192,), 48, False, 1139),
        Case("fixed-T8192-H96", (8192,), 96, False, 1446),
        Case("fixed-T65536-H6", (65536,), 6, False, 6656),
        Case("varlen6-H12", RAGGED, 12, True, 399),
        Case("8x1024-H12", (1024,) * 8, 12, True, 206),
        Case("128x64-H12", (64,) * 128, 12, True, 237),
        Case("kimi-T8192-H32", (8192,), 32, True, None, "kimi"),
        Case("softplus-T8192-H32", (8192,), 32, False, None, "softplus"),
        Case("softplus-T8192-H16-HV32", (8192,), 32, False, None, "softplus", group=2),
    )
}


def inputs(case, gate="mixed", seed=0, device="cuda", initial_state=False):
    """Keyword arguments of chunk_kda, as the model passes them; B = 1 where the case is packed or one sequence.

    initial_state: give a normal [N, H, V, K] fp32 one. On the meta device everything has a shape and no values.
    """
    variant = VARIANTS[case.call]
    variant = replace(
        variant,
        initial_state="fp32" if initial_state else None,
        cu_seqlens="int64" if case.packed else None,
    )

    def draw(form):
        normal = Normal(device, seed=seed)
        given = variant.gate == "given"

        def decaying(A_log, dt_bias):
            wanted = log_decay(gate, form.shape("g"), device, normal.generator)
            if given:
                return wanted
            rate = A_log.exp()[:, None]
            if variant.gate == "bounded":
                raw = torch.logit(wanted.div_(LOWER_BOUND)).div_(rate)
            else:
                raw = wanted.div_(-rate).expm1_().log_()
            return raw.sub_(dt_bias)

        values = standard_normal(form, normal, decaying, spread=0.2)
        return values | ({"beta": values["beta"].float().sigmoid()} if given else {})

    return make(Form.of(variant, case.lengths, case.heads, case.group), draw, device)


def input_sets(case, gate, device="cuda"):
    """Calls with fresh inputs, at least 2, and so many that a round over them evicts its own start from L2."""
    sets = [inputs(case, gate, seed, device) for seed in range(max(2, math.ceil(4 * L2_BYTES / case.floor_bytes)))]
    for other in sets[1:]:
        if case.packed:  # the layers of a model share one cu_seqlens, and FLA keeps what it derives from it
            other["cu_seqlens"] = sets[0]["cu_seqlens"]
    return sets


def log_decay(gate, shape, device, generator=None):
    """Log decay per token [B, T, H, K] fp32."""
    if gate == "mixed":
        low, high = math.log(-MIXED[0] / (1 - JITTER)), math.log(-MIXED[1] / (1 + JITTER))
        rate = torch.rand(shape[-2:], device=device, generator=generator)
        channels = -torch.exp(low + rate * (high - low))
    else:
        channels = torch.full(shape[-2:], {"strong": STRONG, "weak": WEAK}[gate], device=device)
    spread = torch.rand(shape, device=device, generator=generator)
    return spread.mul_(2 * JITTER).add_(1 - JITTER).mul_(channels)


def few_heads(call, heads):
    """The call with some value heads only, and their heads of q and k; no head depends on another."""
    group = call["v"].shape[2] // call["q"].shape[2]
    few = {name: call[name][:, :, [head // group for head in heads]] for name in ("q", "k")}
    few |= {name: call[name][:, :, heads] for name in ("v", "g", "beta")}
    if "A_log" in call:
        few["A_log"] = call["A_log"][heads]
        few["dt_bias"] = call["dt_bias"].view(-1, DIM)[heads].flatten()
    if "initial_state" in call:
        few["initial_state"] = call["initial_state"][:, heads]
    return {**call, **few}
