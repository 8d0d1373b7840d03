"""What a call's metadata decides about the launches of its backward. No tensor is kept."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from . import planning
from .call import DEVICE_INPUTS, Call
from .compiling.spec import KernelSpec
from .geometry import (
    DIM,
    Allocation,
    Geometry,
    Reading,
    bytes_of,
    contiguous,
    copied_bytes,
    slots_per_segment,
    strides_of,
)
from .kernels.families import FAMILIES
from .kernels.variant import DTYPE_NAMES
from .planning import Plan

DTYPES = {name: getattr(torch, text.removeprefix("torch.")) for text, name in DTYPE_NAMES.items()}
SLICE = 1 << 13  # tokens whose gradients of q or k are summed over grouped heads at once


@dataclass(frozen=True)
class BackwardGeometry:
    """Everything that the backwards of all calls of the same metadata share."""

    device: torch.device
    plan: Plan
    spec: KernelSpec | None  # None: nothing to launch
    states_spec: KernelSpec | None  # of the launches that find the states between segments; None: one launch covers all
    wanted: tuple[str, ...]  # of DEVICE_INPUTS, those whose gradients are needed
    results: dict[str, Allocation]  # what the kernels write, by the names of the wanted inputs
    d_out: Allocation  # of the call, where there is none of the output
    d_final_state: Allocation | None  # likewise
    workspace: Allocation | None
    carries: Allocation | None  # [segments, HV, V, K], the state before each segment
    d_carries: Allocation | None  # [2, HV, V, K], gradients of states between segments
    segments: tuple[Any, ...]  # the Numbers of each launch, from the first slot on, for a contiguous d_out
    readings: tuple[Reading, ...]  # of DEVICE_INPUTS
    inputs: tuple[Any, ...]  # of DEVICE_INPUTS that are read, what `metadata` says, or None

    def __hash__(self) -> int:
        return hash((self.device, self.spec, self.wanted, self.segments))

    @property
    def kernel(self) -> str:
        return self.plan.kernel

    @property
    def params(self) -> dict[str, Any]:
        """What the dispatch log shows: of what is launched."""
        segments = {"segments": len(self.segments)} if len(self.segments) > 1 else {}
        return self.plan.params | segments

    @property
    def specs(self) -> tuple[KernelSpec, ...]:
        """All kernels of a backward."""
        return tuple(spec for spec in (self.spec, self.states_spec) if spec is not None)

    @property
    def grouped(self) -> bool:
        """Whether dq and dk come for each value head, of the normalised q and k."""
        schedule = self.plan.schedule
        return bool(schedule.grouped)


def backward_geometry(call: Call, forward: Geometry, wanted: tuple[str, ...]) -> BackwardGeometry:
    """That of a call with a forward Geometry on the 64-token kernels. Meta tensors will do."""
    plan = planning.backward(call, forward.plan, wanted)
    family, variant, heads = FAMILIES[plan.kernel], plan.variant, call.heads
    slots = forward.segments[-1].slot_end if forward.segments else 0
    rows = call.q.shape[:2]
    qk = contiguous((*rows, heads, DIM), torch.float32) if plan.schedule.grouped else contiguous(call.q.shape, torch.bfloat16)
    states = contiguous((call.num_sequences, heads, DIM, DIM), torch.float32)
    sums = contiguous((slots, heads, DIM), torch.float32)
    written = {
        "q": qk,
        "k": qk,
        "v": forward.out,
        "g": contiguous(call.g.shape, DTYPES[variant.gate_dtype]),
        "beta": contiguous(call.beta.shape, DTYPES[variant.beta_dtype]),
        "initial_state": states,
        "A_log": sums,
        "dt_bias": sums,
    }
    known: dict[str, Any] = {
        "device": forward.device,
        "plan": plan,
        "wanted": wanted,
        "results": {name: written[name] for name in wanted},
        "d_out": forward.out,
        "d_final_state": states if plan.schedule.d_final_state else None,
        "readings": forward.readings,
        "inputs": tuple(metadata(dict(call.inputs).get(name)) for name in DEVICE_INPUTS),
        "states_spec": None,
        "carries": None,
        "d_carries": None,
    }
    if forward.spec is None:
        return BackwardGeometry(**known, spec=None, workspace=None, segments=())
    numbers = forward.segments[0]._asdict() | strides_of("d_out", (heads * DIM, DIM))
    in_one = BackwardGeometry(
        **known,
        spec=KernelSpec(plan.kernel, forward.spec.arch, variant, plan.schedule),
        workspace=contiguous((family.record.workspace_bytes(slots, heads),), torch.uint8),
        segments=(family.numbers(**(numbers | {"slot_begin": 0, "slot_end": slots})),),
    )
    return in_segments(in_one, slots_per_segment(family.record, slots, heads))


def metadata(x: torch.Tensor | None) -> Any:
    """What of an input is read between its call and the backward as it was; last its strides, which hooks may change."""
    return None if x is None else (x.shape, x.dtype, x.device, x.stride())


def in_segments(of: BackwardGeometry, per_segment: int) -> BackwardGeometry:
    """The same backward in launches over so many slots each; unchanged where its launches cover no more."""
    first, slots = of.segments[0], of.segments[-1].slot_end
    if of.spec is None or first.slot_end <= per_segment:
        return of
    heads = first.heads
    plan = planning.in_segments(of.plan, first.num_seqs, heads)
    segments = tuple(
        first._replace(slot_begin=begin, slot_end=min(begin + per_segment, slots)) for begin in range(0, slots, per_segment)
    )
    return replace(
        of,
        plan=plan,
        spec=replace(of.spec, schedule=plan.schedule),
        states_spec=replace(of.spec, schedule=planning.states_only(plan.schedule)),
        workspace=contiguous((FAMILIES[plan.kernel].record.workspace_bytes(per_segment, heads),), torch.uint8),
        carries=contiguous((len(segments), heads, DIM, DIM), torch.float32),
        d_carries=contiguous((2, heads, DIM, DIM), torch.float32),
        segments=segments,
    )


def halved(of: BackwardGeometry) -> BackwardGeometry | None:
    """The same backward in launches over half as many slots each; None where they cover one already, or nothing is launched."""
    slots = of.segments[0].slot_end if of.segments else 0
    return in_segments(of, (slots + 1) // 2) if slots > 1 else None


def kept_bytes(call: Call) -> int:
    """Bytes that are kept between forward and backward beside the caller's own tensors: none."""
    return 0


def backward_peak_bytes(call: Call, sizes: BackwardGeometry, d_out: bool = True, d_final_state: bool = True) -> int:
    """Bytes that a backward allocates at most at one time: gradients, the workspace, states carried between segments, copies.

    d_out, d_final_state: whether these gradients come in; zeros are made in the place of one that does not. As in
    geometry.peak_bytes, inputs whose strides the kernels do not take are copied. Not counted: a copy of d_out because of its
    strides, of its own size, and copies of what is not aligned.
    """
    scratch = bytes_of(sizes.workspace, sizes.carries, sizes.d_carries) + copied_bytes(call, sizes.readings)
    scratch += 0 if d_out else bytes_of(sizes.d_out)
    scratch += 0 if d_final_state else bytes_of(sizes.d_final_state)
    results = bytes_of(*sizes.results.values())
    if not sizes.grouped:
        return results + scratch
    # Once the kernels have run, the scratch is free, and what they wrote of q and k is summed over the group.
    summed = sum(getattr(call, name).nbytes for name in ("q", "k") if name in sizes.wanted)
    at_once = 5 * min(call.tokens, SLICE) * call.qk_heads * DIM * torch.float32.itemsize
    return results + max(scratch, summed + at_once)
