"""Calls that need gradients: the autograd function that joins a call's results to its inputs, and the launches of its backward.

Between the two nothing is kept but the caller's own tensors: the backward computes again what it needs of the forward.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from . import op
from .backward_geometry import SLICE, BackwardGeometry, halved, metadata
from .call import DEVICE_INPUTS
from .failures import NotPlainMemory
from .geometry import STRIDED, reading, reading_whole, strides_of
from .kernels.families import FAMILIES
from .reference.gold import L2_NORM_EPS

Gradients = Callable[[tuple[Any, ...], Any, Any], tuple[Any, ...]]  # of (saved inputs, d_out, d_final_state), in their order
CU_SEQLENS, A_LOG, DT_BIAS = (DEVICE_INPUTS.index(name) for name in ("cu_seqlens", "A_log", "dt_bias"))


class ChunkKDA(torch.autograd.Function):
    """Differentiates results that are there already, made without grad.

    Autocast changes nothing on either way: the kernels take tensors as they are, and torch's own operations here are on fp32.
    """

    @staticmethod
    def forward(ctx: Any, gradients: Gradients, results: list[Any], *inputs: Any) -> Any:
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        return results.pop()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Any, d_final_state: Any) -> Any:
        return None, None, *ctx.gradients(ctx.saved_tensors, d_out, d_final_state)


def differentiable(result: tuple[Any, ...], gradients: Gradients, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """(out, final_state or None) of a call with DEVICE_INPUTS, as functions of those that require grad.

    gradients is called once for each backward, on the stream of the forward, with either gradient None where there is none.
    What inputs hold is kept until then, no more.
    """
    joined: tuple[Any, ...] = ChunkKDA.apply(gradients, [result], *inputs)  # in a list, for they are no inputs of it
    return joined


class Backward(op.OnDevice):
    """Runs the backwards of one BackwardGeometry. Called with a call's tensors, it keeps none of them."""

    def __init__(self, of: BackwardGeometry) -> None:
        """Loads or compiles the kernels; raises whatever that raises."""
        super().__init__(of.device, of.d_out.shape[1])
        self.geometry = of
        self.pack = op.packer(FAMILIES[of.kernel].addresses)
        self.kernels: Any = None if of.spec is None else op.launcher(of.spec)
        self.states_kernels: Any = None if of.states_spec is None else op.launcher(of.states_spec)

    def shorter(self) -> BackwardGeometry | None:
        """The geometry of the same backwards in segments of half the length, or None."""
        return halved(self.geometry)

    def __call__(self, inputs: tuple[Any, ...], d_out: Any, d_final_state: Any) -> tuple[Any, ...]:
        """Gradients of DEVICE_INPUTS, None for those that are not wanted.

        Each has its tensor's shape and dtype. d_out [B, T, HV, V] bf16 of any strides and d_final_state [N, HV, V, K] fp32,
        in the call's layout, may be None for zeros.
        """
        with op._on(self.device), torch.no_grad():
            empty, of = self._allocator(), self.geometry
            results = {name: empty(*allocation) for name, allocation in of.results.items()}
            if self.kernels is None:
                for name, x in results.items():
                    through = name == "initial_state" and d_final_state is not None
                    x.copy_(d_final_state) if through else x.zero_()
            else:
                self._launch(empty, results, inputs, d_out, d_final_state)
            return tuple([self._finished(name, results.get(name), x) for name, x in zip(DEVICE_INPUTS, inputs)])

    def _launch(self, empty: Any, results: dict[str, Any], inputs: tuple[Any, ...], d_out: Any, d_final_state: Any) -> None:
        of: Any = self.geometry
        d_out = empty(*of.d_out).zero_() if d_out is None else d_out.resolve_neg()
        if of.d_final_state is not None:
            d_final_state = empty(*of.d_final_state).zero_() if d_final_state is None else d_final_state.contiguous()
        tensors, names = (*inputs, d_out), (*DEVICE_INPUTS, "d_out")
        readings, strides = self._readings(inputs, d_out)
        copies, of_copies, addresses = op.copied(names, tensors, readings)  # copies are alive until the launch
        if any(address < self.lowest for address, x in zip(addresses, tensors) if x is not None):
            raise NotPlainMemory(op.NO_MEMORY)
        strides |= of_copies
        q, k, v, g, beta, initial_state, cu_seqlens, a_log, dt_bias, d_out_address = addresses
        if d_final_state is not None and d_final_state.data_ptr() % op.ALIGNMENT:
            d_final_state = d_final_state.clone()
        of_results = {name: x.data_ptr() for name, x in results.items()}
        workspace = empty(*of.workspace)
        carries, d_carries = (x and empty(*x) for x in (of.carries, of.d_carries))
        given = {
            "q": q,
            "k": k,
            "v": v,
            "g": g,
            "beta": beta,
            "a_log": a_log,
            "dt_bias": dt_bias,
            "initial_state": initial_state,
            "cu_seqlens": cu_seqlens,
            "workspace": workspace.data_ptr(),
        }
        gradients = {
            "d_out": d_out_address,
            "d_final_state": 0 if d_final_state is None else d_final_state.data_ptr(),
            "dq": of_results.get("q", 0),
            "dk": of_results.get("k", 0),
            "dv": of_results.get("v", 0),
            "dg": of_results.get("g", 0),
            "dbeta": of_results.get("beta", 0),
            "d_initial_state": of_results.get("initial_state", 0),
            "d_bias_sums": of_results.get("dt_bias", 0),
            "d_a_log_sums": of_results.get("A_log", 0),
        }
        segments = [numbers._replace(**strides) for numbers in of.segments]
        stream = op._stream_handle(self.index)

        def carried(number: int) -> dict[str, int]:
            """Where the states before and after a segment lie. After the last one no sequence goes on."""
            ends = number, (number + 1) % len(segments)
            before, after = (0, 0) if carries is None else (carries[end].data_ptr() for end in ends)
            return {"carry_in": before, "carry_out": after}

        def d_carried(number: int) -> dict[str, int]:
            """Where their gradients lie, in turn: what a segment leaves the one before it takes."""
            ends = (number + 1) % 2, number % 2
            after, before = (0, 0) if d_carries is None else (d_carries[end].data_ptr() for end in ends)
            return {"d_carry_in": after, "d_carry_out": before}

        if self.states_kernels is not None:
            nothing = dict.fromkeys((*gradients, "d_carry_in", "d_carry_out"), 0)
            for number, numbers in enumerate(segments[:-1]):
                self.states_kernels(*self.pack(**given, **nothing, **carried(number)), *numbers, stream)
        for number in reversed(range(len(segments))):
            addresses = self.pack(**given, **gradients, **carried(number), **d_carried(number))
            self.kernels(*addresses, *segments[number], stream)

    def _readings(self, inputs: tuple[Any, ...], d_out: Any) -> tuple[list[Any], dict[str, int]]:
        """(readings of the inputs and d_out, what of Numbers they change): hooks on saved tensors may give other strides."""
        strides: dict[str, int] = {}
        readings = []
        for name, x, expected, how in zip(DEVICE_INPUTS, inputs, self.geometry.inputs, self.geometry.readings):
            found = metadata(x)
            if found != expected:
                if x is None or expected is None or found[:-1] != expected[:-1]:
                    raise NotPlainMemory(f"{name} was saved as {expected} and given back as {found}")
                how = reading(x, True) if name in STRIDED else reading_whole(x)
                strides |= strides_of(name, how.as_it_is or how.as_a_copy)
            readings.append(how)
        how = reading(d_out, True)
        return [*readings, how], strides | strides_of("d_out", how.as_it_is or how.as_a_copy)

    def _finished(self, name: str, found: Any, x: Any) -> Any:
        """The gradient of an input x, from what the kernels have written."""
        if found is None:
            return None
        if name in ("q", "k") and self.geometry.grouped:
            return ungrouped(found, x, self.geometry.plan.variant.l2norm)
        if name == "A_log":
            return found.sum((0, 2)).view(x.shape).to(x.dtype)
        return found.sum(0).view(x.shape).to(x.dtype) if name == "dt_bias" else found


def ungrouped(found: torch.Tensor, x: torch.Tensor, l2norm: bool) -> torch.Tensor:
    """The gradient of q or k, x [B, T, H, 128] bf16, from those of x, or with l2norm of the normalised x, by value heads.

    found: [B, T, HV, 128] fp32. Sums over a group are in fp32 and in order; only the result is rounded.
    """
    heads = x.shape[2]
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, of_heads, into = x.flatten(0, 1), found.flatten(0, 1).unflatten(1, (heads, -1)), result.flatten(0, 1)
    for here in (slice(first, first + SLICE) for first in range(0, len(rows), SLICE)):
        d = of_heads[here, :, 0].clone()
        for member in range(1, of_heads.shape[2]):
            d += of_heads[here, :, member]
        if l2norm:
            unit = rows[here].float()
            scale = unit.square().sum(-1, keepdim=True).add_(L2_NORM_EPS).rsqrt_()
            unit *= scale
            d.addcmul_(unit, (d * unit).sum(-1, keepdim=True), value=-1).mul_(scale)
        into[here] = d
    return result
