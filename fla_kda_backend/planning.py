"""Which kernel a call runs on, with which parameters, and whether it should. Pure metadata."""

from typing import NamedTuple

from .kernels.shared import record64

BV_CHOICES = (32, 64, 128)
V_DIM = 128
WGMMA_CAPABILITY = (9, 0)  # the only one whose tensor cores have the instructions of the 64-token kernels
# Tasks of 132 SMs up to which a schedule is the fastest, measured on an H200 at 8,192 tokens, in us:
REPLAY_TASKS = 40  # without overlap: 40 tasks 191 against 204, 48 tasks 220 against 224, 64 tasks 305 against 271
OVERLAP_TASKS = 64  # overlap: 48 tasks 201 against 220, 64 tasks 269 against 271, 80 tasks 335 against 327
OVERLAP_REPLAY_TASKS = 24  # both: 24 tasks 123 against 137 with overlap alone, 32 tasks 162 against 148
WORKSPACE_LIMIT = 1 << 31  # bytes; a call that would need more runs in segments of the time axis
LONG = 2048  # tokens of a sequence, on average, from which on they pay: 2,048 tokens 35 against 40 us, 1,024 tokens 28 to 29


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
    the shape below, overlap, replay, columns and warps, changes no bit. So nothing is left to another implementation, and
    FLA_KDA_CUTE_DETERMINISTIC has nothing to switch.
    """
    if facts.mode == "exact":
        return column_split("exact", call.num_sequences, call.heads, facts.sm_count)
    if facts.capability == WGMMA_CAPABILITY:
        return wy64(call.tokens, call.num_sequences, call.heads, facts.sm_count, call.cu_seqlens is not None)
    return column_split("robust", call.num_sequences, call.heads, facts.sm_count)


def wy64(tokens, num_sequences, heads, sm_count, packed):
    """The 64-token kernels: half of the value columns a task. Where long chains would leave many SMs idle, overlap: the chain
    runs beside prepare, which must then know every sequence's place in time; and replay: idle SMs compute outputs."""
    tasks = 2 * num_sequences * heads
    slots = (tokens >> record64.LOG2_CHUNK) + num_sequences
    long = (
        tasks > 0
        and tokens // num_sequences >= LONG
        and record64.workspace_bytes(slots, heads, replay=True) <= WORKSPACE_LIMIT  # all of it in one launch
    )
    upto = lambda limit: tasks <= limit * sm_count // 132  # noqa: E731
    overlap = long and upto(OVERLAP_TASKS) and (num_sequences == 1 or not packed)
    replay = long and upto(OVERLAP_REPLAY_TASKS if overlap else REPLAY_TASKS)
    grid = max(sm_count, 2 * tasks) if replay else min(tasks, sm_count)
    return Plan("wy64", (("max_ctas", sm_count), ("overlap", overlap), ("replay", replay)), grid)


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
