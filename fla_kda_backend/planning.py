"""Which kernels a call runs on, and under which schedule. Pure metadata."""

from dataclasses import replace
from typing import Any, NamedTuple

from . import config
from .call import Call
from .facts import Facts, differentiated
from .kernels.column_split import contract as column_split_contract
from .kernels.families import FAMILIES
from .kernels.variant import Variant
from .kernels.wy64 import contract as wy64_contract
from .kernels.wy64 import groups, record
from .kernels.wy64.backward import contract as backward_contract

BV_CHOICES = (32, 64, 128)
WGMMA_CAPABILITY = (9, 0)  # the only one whose tensor cores have the instructions of the 64-token kernels
# Tasks of 132 SMs up to which a schedule is the fastest, measured on an H200 at 8,192 tokens, in us:
REPLAY_TASKS = 40  # without overlap: 40 tasks 191 against 204, 48 tasks 220 against 224, 64 tasks 305 against 271
OVERLAP_TASKS = 256  # overlap: 48 tasks 190 against 225, 64 tasks 236 to 270, 96 tasks 351 to 384, 192 tasks 758 to 783
OVERLAP_REPLAY_TASKS = 24  # both: 24 tasks 119 against 132 with overlap alone, 28 tasks 136 against 121
# CTAs of both chains of a backward, of 132 SMs, up to which the local gradients run beside them. Both idle the less the more
# CTAs the chains have, and share the L2 and its bandwidth the longer.
BESIDE_CTAS = 40
LONG = 2048  # tokens per sequence, on average, from which on they pay: 2,048 tokens 35 against 40 us, 1,024 tokens 28 to 29


class Plan(NamedTuple):
    """`kernel`, `variant` and `schedule` name the compiled kernels, `grid` the CTAs of the recurrence."""

    kernel: str  # "column_split" or "wy64"
    variant: Variant
    schedule: Any  # the family's Schedule
    grid: int
    reason: str = ""  # why the kernels are not those of the mode

    @property
    def params(self) -> dict[str, Any]:
        """What the dispatch log shows."""
        return {**self.schedule.params, **self.variant.changes, "grid": self.grid}


def plan(call: Call, facts: Facts) -> Plan:
    """The Plan of an eligible call.

    The family follows from the mode, the GPU and what the call asks for: on an H200 the 64-token kernels were the fastest
    in every measured shape, from one to 128 sequences and 6 to 96 heads (benchmarks/results/h200.csv), Triton's included;
    but they cannot give the state before each 32 tokens. What depends on the shape below, the schedule, changes no bit. So
    no call is left to another implementation, and FLA_KDA_CUTE_DETERMINISTIC has nothing to switch.
    """
    variant, reason = Variant.of(call), ""
    if facts.mode == "exact":
        trained = differentiated(call, facts)
        other = f"{trained[0]} requires grad" if trained else beyond_flashkda(call, variant)
        if other is None:
            return column_split("exact", call.num_sequences, call.heads, facts.sm_count, variant)
        reason = f"exact mode runs FlashKDA's own call alone; this one runs on the auto kernels: {other}"
    if facts.capability == WGMMA_CAPABILITY and variant.intermediate_states != 32:
        chosen = wy64(call.tokens, call.num_sequences, call.heads, facts.sm_count, variant)
    else:
        chosen = column_split("robust", call.num_sequences, call.heads, facts.sm_count, variant)
    return chosen._replace(reason=reason) if reason else chosen


def backward(call: Call, forward: Plan, wanted: tuple[str, ...]) -> Plan:
    """The Plan of the backward of a call with that Plan, of which the `wanted` gradients are needed.

    It is the same whichever gradients come in: it can be compiled before they do.
    """
    variant = replace(forward.variant, final_state=None, intermediate_states=None)
    schedule = backward_contract.Schedule(
        max_ctas=forward.schedule.max_ctas,
        d_final_state=forward.variant.final_state is not None,
        d_initial_state="initial_state" in wanted,
        grouped=call.heads != call.qk_heads,
        beside=beside_chains(call.tokens, call.num_sequences, call.heads, forward.schedule.max_ctas, variant),
    )
    return Plan("wy64_backward", variant, schedule, min(2 * call.num_sequences * call.heads, schedule.max_ctas))


def beside_chains(tokens: int, num_sequences: int, heads: int, sm_count: int, variant: Variant) -> bool:
    """Whether the local gradients of a backward run beside its two chains, each of two CTAs per sequence and HV `heads`.

    That is for few and long chains, which leave SMs idle. The order in which the chunks of a sequence get ready must be known
    without cu_seqlens of several sequences, and one launch must cover all slots: `in_segments` takes it back.
    """
    chain_ctas = 4 * num_sequences * heads
    return (
        chain_ctas > 0
        and tokens // num_sequences >= LONG
        and chain_ctas <= BESIDE_CTAS * sm_count // 132
        and (num_sequences == 1 or variant.cu_seqlens is None)
    )


def states_only(schedule: Any) -> Any:
    """The schedule of the launches that only pass states on, before a backward in segments."""
    return replace(schedule, segmented=True, stage="states", d_final_state=False, d_initial_state=False, grouped=False)


def workspace_limit() -> int:
    """Bytes that the workspace of one launch may have. A call that needs more runs in segments of the time axis."""
    limit: int = config.WORKSPACE_MIB.get()
    return limit << 20


def in_segments(plan: Plan, num_sequences: int, heads: int) -> Plan:
    """The plan of a call that runs in segments of the time axis: without overlap, replay and direct."""
    schedule = plan.schedule.in_segments()
    tasks = 2 * num_sequences * heads
    return plan._replace(schedule=schedule, grid=min(tasks, schedule.max_ctas) if plan.kernel == "wy64" else plan.grid)


def beyond_flashkda(call: Call, variant: Variant) -> str | None:
    """The first thing in which a call is not FlashKDA's, or None."""
    if call.heads != call.qk_heads:
        return f"HV={call.heads}, H={call.qk_heads}"
    return next((f"{name}={value}" for name, value in variant.changes.items()), None)


def wy64(tokens: int, num_sequences: int, heads: int, sm_count: int, variant: Variant) -> Plan:
    """The plan on the 64-token kernels, two tasks for each of HV `heads` and sequence; tokens: in all.

    Overlap is for long chains: prepare, beside which they run, must know every sequence's place in time. Replay is for few
    of them: idle SMs compute outputs; a chain that writes all states leaves none to replay. Direct is for calls without a
    sequence of more than one chunk: prepare computes all of it. It takes a workspace all the same: packed sequences of
    at most one chunk on average may hold a longer one, which only the GPU knows, and of every chunk prepare writes the
    decay and clears the flags.
    """
    tasks = 2 * num_sequences * heads
    slots = (tokens >> record.LOG2_CHUNK) + num_sequences
    long = (
        tasks > 0
        and tokens // num_sequences >= LONG
        and record.workspace_bytes(slots, heads, replay=True) <= workspace_limit()  # all of it in one launch
    )

    def upto(limit: int) -> bool:
        return tasks <= limit * sm_count // 132

    overlap = long and upto(OVERLAP_TASKS) and (num_sequences == 1 or variant.cu_seqlens is None)
    few = upto(OVERLAP_REPLAY_TASKS if overlap else REPLAY_TASKS)
    replay = long and few and variant.intermediate_states is None
    grid = max(sm_count, 2 * tasks) if replay else min(tasks, sm_count)
    if overlap and not replay:
        grid = 2 * groups.chains_per_group(tasks // 2, sm_count)
    short = 0 < tokens <= record.CHUNK * num_sequences
    direct = short and wy64_contract.allows_direct(variant)
    schedule = wy64_contract.Schedule(max_ctas=sm_count, overlap=overlap, replay=replay, direct=direct)
    return Plan("wy64", variant, schedule, grid)


def column_split(arithmetic: str, num_sequences: int, heads: int, sm_count: int, variant: Variant) -> Plan:
    """The plan on the 16-token kernels: the fewest value columns per CTA that still leave one CTA for each SM."""
    tasks = num_sequences * heads
    dim = column_split_contract.VALUE_DIM
    bv = next((bv for bv in BV_CHOICES if tasks * (dim // bv) <= sm_count), BV_CHOICES[-1])
    schedule = FAMILIES["column_split"].schedule(arithmetic=arithmetic, bv=bv, warps=warps(arithmetic, bv))
    return Plan("column_split", variant, schedule, tasks * (dim // bv))


def warps(arithmetic: str, bv: int) -> int:
    """Compute warps per CTA: a full-width fp32 state does not fit the registers of four."""
    return 8 if arithmetic == "robust" and bv == 128 else 4
