"""Which kernel a call runs on, in which variant, and whether it should. Pure metadata."""

from typing import NamedTuple

import torch

from .kernels.shared import groups, record64

BV_CHOICES = (32, 64, 128)
V_DIM = 128
WGMMA_CAPABILITY = (9, 0)  # the only one whose tensor cores have the instructions of the 64-token kernels
# Tasks of 132 SMs up to which a schedule is the fastest, measured on an H200 at 8,192 tokens, in us:
REPLAY_TASKS = 40  # without overlap: 40 tasks 191 against 204, 48 tasks 220 against 224, 64 tasks 305 against 271
OVERLAP_TASKS = 256  # overlap: 48 tasks 190 against 225, 64 tasks 236 to 270, 96 tasks 351 to 384, 192 tasks 758 to 783
OVERLAP_REPLAY_TASKS = 24  # both: 24 tasks 119 against 132 with overlap alone, 28 tasks 136 against 121
WORKSPACE_LIMIT = 1 << 31  # bytes; a call that would need more runs in segments of the time axis
LONG = 2048  # tokens of a sequence, on average, from which on they pay: 2,048 tokens 35 against 40 us, 1,024 tokens 28 to 29

DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
# What a call chooses of the kernels' computation, as it is in the one call that FlashKDA takes: the kernels' own defaults.
FLASHKDA = {
    "gate": "bounded",  # lower_bound sigmoid(exp(A_log) (g + dt_bias)); "softplus": -exp(A_log) softplus(..); "given": g
    "gate_dtype": "bf16",  # of g
    "a_log": "fp32",  # None: exp(A_log) = 1
    "dt_bias": "fp32",  # None: 0
    "beta": "sigmoid",  # "twice": 2 sigmoid(beta); "given": beta
    "beta_dtype": "bf16",
    "l2norm": True,
    "state_v_first": True,
    "states": False,  # whether the state before each chunk is written
}


class Plan(NamedTuple):
    """`kernel` and `options` name the compiled variant, `grid` its recurrence's CTAs."""

    kernel: str  # "column_split" or "wy64"
    options: tuple[tuple[str, object], ...]  # compile-time options that the call and the mode decide, without defaults
    grid: int
    should_run: bool = True
    reason: str = ""  # why should_run is False, or why the mode's own kernels are not the ones

    @property
    def params(self):
        """What the dispatch log shows."""
        return {**dict(self.options), "grid": self.grid}


def plan(call, facts):
    """The Plan of an eligible call.

    The family follows from the mode, the GPU and what the call asks for: on an H200 the 64-token kernels were the fastest
    in every measured shape, from one to 128 sequences and 6 to 96 heads (benchmarks/results/h200.csv), Triton's included;
    but they cannot give the state before each 32 tokens. What depends on the shape below, overlap, replay, columns and
    warps, changes no bit. So nothing is left to another implementation, and FLA_KDA_CUTE_DETERMINISTIC has nothing to switch.
    """
    variant, reason = kinds(call), ""
    if facts.mode == "exact":
        other = beyond_flashkda(call, variant)
        if other is None:
            return column_split("exact", call.num_sequences, call.heads, facts.sm_count)
        reason = f"exact mode runs FlashKDA's own call alone; this one runs on the auto kernels: {other}"
    if call.return_intermediate_states and call.chunk_size == 32:
        variant["state_chunk"] = 32
    if facts.capability == WGMMA_CAPABILITY and "state_chunk" not in variant:
        packed = call.cu_seqlens is not None
        fresh = call.initial_state is None
        chosen = wy64(call.tokens, call.num_sequences, call.heads, facts.sm_count, packed, variant, fresh)
    else:
        chosen = column_split("robust", call.num_sequences, call.heads, facts.sm_count, variant)
    return chosen._replace(reason=reason) if reason else chosen


def kinds(call):
    """Those options of FLASHKDA that the call has otherwise, by name; none for FlashKDA's call."""
    in_kernel = call.use_gate_in_kernel
    a_log, dt_bias = (call.A_log, call.dt_bias) if in_kernel else (None, None)  # ignored without it
    bounded = "softplus" if call.lower_bound is None else "bounded"  # by the bound alone, as FLA does
    sigmoid = "twice" if call.allow_neg_eigval else "sigmoid"
    found = {
        "gate": bounded if in_kernel else "given",
        "gate_dtype": DTYPE_NAMES[call.g.dtype],
        "a_log": None if a_log is None else DTYPE_NAMES[a_log.dtype],
        "dt_bias": None if dt_bias is None else DTYPE_NAMES[dt_bias.dtype],
        "beta": sigmoid if call.use_beta_sigmoid_in_kernel else "given",
        "beta_dtype": DTYPE_NAMES[call.beta.dtype],
        "l2norm": bool(call.use_qk_l2norm_in_kernel),
        "state_v_first": bool(call.state_v_first),
        "states": bool(call.return_intermediate_states),
    }
    return {name: value for name, value in found.items() if value != FLASHKDA[name]}


def beyond_flashkda(call, variant):
    """The first thing in which a call is not FlashKDA's, or None."""
    if call.heads != call.qk_heads:
        return f"HV={call.heads}, H={call.qk_heads}"
    return next((f"{name}={value}" for name, value in variant.items()), None)


def wy64(tokens, num_sequences, heads, sm_count, packed, variant=None, fresh=False):
    """The 64-token kernels: half of the value columns a task. Overlap, for long chains: they run beside prepare, which must
    then know every sequence's place in time; and replay, where they are few: idle SMs compute outputs. Direct, for sequences
    of one chunk: prepare computes all of it, of those that have no more.

    heads: HV. variant: options of FLASHKDA that are otherwise; a chain that writes all states leaves none to replay. fresh:
    all sequences begin from a state zero.
    """
    variant = variant or {}
    tasks = 2 * num_sequences * heads
    slots = (tokens >> record64.LOG2_CHUNK) + num_sequences
    long = (
        tasks > 0
        and tokens // num_sequences >= LONG
        and record64.workspace_bytes(slots, heads, replay=True) <= WORKSPACE_LIMIT  # all of it in one launch
    )
    upto = lambda limit: tasks <= limit * sm_count // 132  # noqa: E731
    overlap = long and upto(OVERLAP_TASKS) and (num_sequences == 1 or not packed)
    replay = long and upto(OVERLAP_REPLAY_TASKS if overlap else REPLAY_TASKS) and not variant.get("states")
    grid = max(sm_count, 2 * tasks) if replay else min(tasks, sm_count)
    if overlap and not replay:
        grid = 2 * groups.chains_at_once(tasks // 2, sm_count)
    short = 0 < tokens <= record64.CHUNK * num_sequences
    direct = short and fresh and not {"gate", "gate_dtype", "l2norm", "states"} & set(variant)
    schedule = (("max_ctas", sm_count), ("overlap", overlap), ("replay", replay), *((("direct", True),) if direct else ()))
    return Plan("wy64", (*schedule, *variant.items()), grid)


def column_split(arithmetic, num_sequences, heads, sm_count, variant=None):
    """The 16-token kernels: fewest value columns a CTA that still fit one CTA on each SM. heads, variant: as in wy64."""
    tasks = num_sequences * heads
    bv = next((bv for bv in BV_CHOICES if tasks * (V_DIM // bv) <= sm_count), BV_CHOICES[-1])
    own = (("arithmetic", arithmetic), ("bv", bv), ("warps", warps(arithmetic, bv)))
    return Plan("column_split", (*own, *(variant or {}).items()), tasks * (V_DIM // bv))


def warps(arithmetic, bv):
    """Compute warps of a CTA: a full-width fp32 state does not fit the registers of four."""
    return 8 if arithmetic == "robust" and bv == 128 else 4
