"""What a call's metadata decides about its launches: sizes, segments, strides, the compiled variant. No tensor is kept."""

import math
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

import torch

from . import planning
from .call import DEVICE_INPUTS, Call
from .compiling.spec import KernelSpec
from .kernels.families import FAMILIES
from .planning import Plan

DIM = 128
LOG2E = 1.4426950408889634
ALIGNMENT = 16  # bytes; the kernels' vector accesses need it
STRIDED = ("q", "k", "v", "g", "beta")  # whose strides some kernels take


class Allocation(NamedTuple):
    """A contiguous tensor to be made; strides in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class Reading(NamedTuple):
    """How a kernel reads a tensor [B, T, heads] or [B, T, heads, 128] as [B * T, heads, ..]."""

    as_it_is: tuple[int, ...] | None  # (token stride, head stride) in elements, (): none are taken; None: only a copy is read
    as_a_copy: tuple[int, ...]  # the same of a contiguous copy
    alignment: int  # bits of the address that must be 0


@dataclass(frozen=True)
class Geometry:
    """Everything that all calls of the same metadata share."""

    device: torch.device
    plan: Plan  # as it is launched, which is without some schedules where there are segments
    spec: KernelSpec | None  # None: no token and no packed sequence, nothing to launch
    out: Allocation  # [B, T, HV, V]
    final_state: Allocation | None  # [N, HV, V, K] or [N, HV, K, V], fp32
    state_rows: int | None  # of intermediate states in a row of the batch; None: to be counted in cu_seqlens
    state_chunk: int | None  # tokens between two of them; None: they are not asked for
    workspace: Allocation | None
    carries: Allocation | None  # [2, HV, V, K], states between segments; None: one launch covers all
    segments: tuple[Any, ...]  # the Numbers of each launch, in order
    readings: tuple[Reading, ...]  # of DEVICE_INPUTS
    ignores_gate_parameters: bool  # what is given as A_log and dt_bias is not looked at

    @property
    def kernel(self) -> str:
        return self.plan.kernel

    @property
    def params(self) -> dict[str, Any]:
        """What the dispatch log shows: of what is launched."""
        segments = {"segments": len(self.segments)} if len(self.segments) > 1 else {}
        return self.plan.params | segments


def workspace_bytes(
    tokens: int, num_sequences: int, heads: int, seq_len: int | None = None, kernel: str = "column_split", replay: bool = False
) -> int:
    """Bytes of workspace that a call allocates.

    tokens in all over the sequences; seq_len where all have that length (no cu_seqlens). "column_split": a record of
    13,888 bytes for each 16-token chunk and head; "wy64": 71,184 bytes for each 64-token chunk and head, with replay (as
    the call's plan says) 65,536 more for every 16th. At most
    FLA_KDA_CUTE_WORKSPACE_MIB, or one chunk of every head where that is more.
    """
    record = FAMILIES[kernel].record
    slots = record.slots(tokens, num_sequences, seq_len)
    segment = slots_per_segment(record, slots, heads)
    return record.workspace_bytes(segment, heads, replay and segment == slots)  # segments exclude replay


def geometry(call: Call, plan: Plan, arch: str) -> Geometry:
    """The Geometry of an eligible call under its Plan, for an architecture of spec.ARCHS. Meta tensors will do."""
    batch, length, qk_heads, _ = call.q.shape
    heads, num_sequences = call.heads, call.num_sequences
    packed = call.cu_seqlens is not None
    family, variant = FAMILIES[plan.kernel], plan.variant
    slots = family.record.slots(batch * length, num_sequences, None if packed else length)
    rows = None
    if not packed or call.use_graph:
        rows = -(-length // int(call.chunk_size)) + (num_sequences - 1 if packed else 0)
    final_shape = (num_sequences, heads, DIM, DIM)
    given = not call.use_gate_in_kernel
    known: dict[str, Any] = {
        "device": call.q.device,
        "plan": plan,
        "out": contiguous((batch, length, heads, DIM), torch.bfloat16),
        "final_state": None if variant.final_state is None else contiguous(final_shape, torch.float32),
        "state_rows": rows,
        "state_chunk": variant.intermediate_states,
        "ignores_gate_parameters": given,
    }
    if slots == 0 or heads == 0:
        return Geometry(**known, spec=None, workspace=None, carries=None, segments=(), readings=())
    size = family.record.workspace_bytes(slots, heads, getattr(plan.schedule, "replay", False))
    parameters = (None, None) if given else (call.A_log, call.dt_bias)
    strided = [reading(x, family.takes_strides) for x in (call.q, call.k, call.v, call.g, call.beta)]
    whole = [reading_whole(x) for x in (call.initial_state, call.cu_seqlens, *parameters)]
    numbers: dict[str, Any] = {
        "scale": float(call.scale),
        "gate_scale": 0.0 if given or call.lower_bound is None else float(call.lower_bound) * LOG2E,
        "seq_len": length,
        "num_seqs": num_sequences,
        "qk_heads": qk_heads,
        "heads": heads,
    }
    if family.takes_strides:
        for name, (as_it_is, as_a_copy, _) in zip(STRIDED, strided):
            numbers |= strides_of(name, as_a_copy if as_it_is is None else as_it_is)
    in_one = Geometry(
        **known,
        spec=KernelSpec(plan.kernel, arch, variant, plan.schedule),
        workspace=contiguous((size,), torch.uint8),
        carries=None,
        segments=(family.numbers(**numbers, slot_begin=0, slot_end=slots),),
        readings=(*strided, *whole),
    )
    return in_segments(in_one, slots_per_segment(family.record, slots, heads))


def in_segments(of: Geometry, per_segment: int) -> Geometry:
    """The same call in launches over so many slots each; unchanged where its launches cover no more."""
    first, slots = of.segments[0], of.segments[-1].slot_end
    if of.spec is None or first.slot_end <= per_segment:
        return of
    heads = first.heads
    plan = planning.in_segments(of.plan, first.num_seqs, heads)
    size = FAMILIES[plan.kernel].record.workspace_bytes(per_segment, heads)
    return replace(
        of,
        plan=plan,
        spec=replace(of.spec, schedule=plan.schedule),
        workspace=contiguous((size,), torch.uint8),
        carries=contiguous((2, heads, DIM, DIM), torch.float32),
        segments=tuple(
            first._replace(slot_begin=begin, slot_end=min(begin + per_segment, slots)) for begin in range(0, slots, per_segment)
        ),
    )


def halved(of: Geometry) -> Geometry | None:
    """The same call in launches over half as many slots each; None where they cover one already, or nothing is launched."""
    slots = of.segments[0].slot_end if of.segments else 0
    return in_segments(of, (slots + 1) // 2) if slots > 1 else None


def peak_bytes(call: Call, sizes: Geometry) -> int:
    """Bytes that a call allocates at most at one time: its results, the workspace, states carried between segments, copies.

    The workspace is within the limit (see workspace_bytes), and the carried states take 128 KiB per value head. Inputs whose
    strides the kernels do not take are copied, as is an input whose address is not a multiple of 16 bytes, which is not
    counted here. Nor are intermediate states whose number only cu_seqlens tells.
    """
    total = bytes_of(sizes.out, sizes.final_state, sizes.workspace, sizes.carries)
    if sizes.state_chunk is not None and sizes.state_rows is not None:
        batch, _, heads, _ = sizes.out.shape
        total += batch * sizes.state_rows * heads * DIM * DIM * torch.bfloat16.itemsize
    return total + copied_bytes(call, sizes.readings)


def copied_bytes(call: Call, readings: tuple[Reading, ...]) -> int:
    """Bytes of the inputs that are copied because of their strides."""
    inputs = (getattr(call, name) for name in DEVICE_INPUTS)
    return sum(x.nbytes for x, how in zip(inputs, readings) if x is not None and how.as_it_is is None)


def slots_per_segment(record: ModuleType, slots: int, heads: int) -> int:
    """Workspace slots that one launch may cover."""
    return max(1, min(slots, planning.workspace_limit() // record.workspace_bytes(1, heads)))


def bytes_of(*allocations: Allocation | None) -> int:
    """Of all that are made."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in allocations if x is not None)


def strides_of(name: str, strides: tuple[int, ...]) -> dict[str, int]:
    """What of a Reading goes into a family's Numbers."""
    return dict(zip((f"{name}_token", f"{name}_head"), strides))


def reading(x: torch.Tensor, takes_strides: bool) -> Reading:
    """How a kernel that takes strides, or one that does not, can read x [B, T, heads] or [B, T, heads, 128].

    Rows of 128 are read 16 bytes at a time; single numbers, of beta, one by one where strides are taken.
    """
    batch, length, heads, *width = x.shape
    of_batch, token, head, *inner = x.stride()
    size = width[0] if width else 1
    whole = heads * size, size
    # The stride of a dimension of one element means nothing.
    if heads == 1:
        head = size
    if batch * length == 1:
        token = whole[0]
    elif length == 1:
        token = of_batch
    one_stride = batch == 1 or length == 1 or of_batch == length * token
    if not takes_strides:
        is_contiguous = one_stride and (token, head) == whole and inner in ([], [1])
        return Reading(() if is_contiguous else None, (), ALIGNMENT - 1)
    if not width:
        return Reading((token, head) if one_stride else None, whole, 0)
    steps = [stride * x.element_size() for stride in (token, head)]  # 0 where x is expanded: the copy engine takes none
    rows = one_stride and inner == [1] and all(step > 0 and step % ALIGNMENT == 0 for step in steps)
    return Reading((token, head) if rows else None, whole, ALIGNMENT - 1)


def reading_whole(x: torch.Tensor | None) -> Reading:
    """How every kernel reads an input whose strides none takes."""
    return Reading(() if x is None or x.is_contiguous() else None, (), ALIGNMENT - 1)


def contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> Allocation:
    shape = tuple(shape)  # not a torch.Size, which the allocator does not take
    return Allocation(shape, tuple(math.prod(shape[i + 1 :]) for i in range(len(shape))), dtype)
