"""Which kernel a call runs on, with which parameters, and whether it should. Pure metadata."""

from typing import NamedTuple

from .kernels.shared import record64

BV_CHOICES = (32, 64, 128)
V_DIM = 128
WGMMA_CAPABILITY = (9, 0)  # the only one whose tensor cores have the instructions of the 64-token kernels
REPLAY_TASKS = 40  # of 132 SMs; measured on an H200 at 8,192 tokens: 40 tasks 83 against 93 us, 48 tasks 91 against 95
WORKSPACE_LIMIT = 1 << 31  # bytes; a call that would need more runs in segments of the time axis
REPLAY_TOKENS = 2048  # a sequence, on average; measured: 2,048 tokens 22 against 26 us, 1,024 tokens no difference


class Plan(NamedTuple):
    """`kernel` and `options` name the compiled variant, `grid` its recurrence's CTAs; `reason`: why should_run is False."""

    kernel: str  # "column_split" or "wy64"
    options: tuple[tuple[str, object], ...]  # compile-time options that depend on shapes and mode
    grid: int
    should_run: bool = True
    reason: str = ""

    @property
    def params(self):
        """What the dispatch log shows."""
        return {**dict(self.options), "grid": self.grid}


def plan(call, facts):
    """The Plan of an eligible call.

    The family follows from the mode and the GPU alone: on an H200 the 64-token kernels were the fastest in every measured
    shape, from one to 128 sequences and 6 to 96 heads (benchmarks/results/h200.csv), Triton's included. What depends on
    the shape below, replay, columns and warps, changes no bit. So nothing is left to another implementation, and
    FLA_KDA_CUTE_DETERMINISTIC has nothing to switch.
    """
    if facts.mode == "exact":
        return column_split("exact", call.num_sequences, call.heads, facts.sm_count)
    if facts.capability == WGMMA_CAPABILITY:
        return wy64(call.tokens, call.num_sequences, call.heads, facts.sm_count)
    return column_split("robust", call.num_sequences, call.heads, facts.sm_count)


def wy64(tokens, num_sequences, heads, sm_count):
    """The 64-token kernels: half of the value columns a task; replay where many SMs would idle beside long chains."""
    tasks = 2 * num_sequences * heads
    slots = (tokens >> record64.LOG2_CHUNK) + num_sequences
    replay = (
        0 < tasks <= REPLAY_TASKS * sm_count // 132
        and tokens // num_sequences >= REPLAY_TOKENS
        and record64.workspace_bytes(slots, heads, replay=True) <= WORKSPACE_LIMIT  # all checkpoints in one launch
    )
    grid = max(sm_count, 2 * tasks) if replay else min(tasks, sm_count)
    return Plan("wy64", (("max_ctas", sm_count), ("replay", replay)), grid)


def column_split(arithmetic, num_sequences, heads, sm_count):
    """The 16-token kernels: fewest value columns a CTA that still fit one CTA on each SM."""
    tasks = num_sequences * heads
    bv = next((bv for bv in BV_CHOICES if tasks * (V_DIM // bv) <= sm_count), BV_CHOICES[-1])
    return Plan(
        "column_split",
        (("arithmetic", arithmetic), ("bv", bv), ("warps", warps(arithmetic, bv))),
        tasks * (V_DIM // bv),
    )


def warps(arithmetic, bv):
    """Compute warps of a CTA: a full-width fp32 state does not fit the registers of four."""
    return 8 if arithmetic == "robust" and bv == 128 else 4
