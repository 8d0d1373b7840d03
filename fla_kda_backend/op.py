"""Run an accepted call: normalise its tensors, allocate, launch. The first module that reaches compiled kernels."""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from . import facts, memo
from .call import DEVICE_INPUTS, Call

try:  # as torch's own compiler's code does these: the public functions take several times as long
    from torch._C import _cuda_getCurrentRawStream as _stream_handle
    from torch._C import _cuda_getDevice as _current_device
except ImportError:  # a build without CUDA
    _current_device = torch.cuda.current_device

    def _stream_handle(device: int) -> int:
        return torch.cuda.current_stream(device).cuda_stream


try:  # no parsing of arguments
    from torch._C import _get_deterministic_algorithms as _deterministic
    from torch._C._dynamo.guards import _empty_strided_cuda  # type: ignore[attr-defined]
except ImportError:
    _deterministic, _empty_strided_cuda = torch.are_deterministic_algorithms_enabled, None

from .compiling.library import launcher
from .compiling.spec import ARCHS
from .failures import NotPlainMemory
from .geometry import ALIGNMENT, DIM, STRIDED, Geometry, geometry, halved, strides_of, workspace_bytes
from .kernels.families import FAMILIES
from .kernels.variant import DTYPE_NAMES, Variant
from .planning import Plan, column_split

# Below lies no GPU's memory, but what data_ptr says of a view into a freed storage: its offset. Each launch asks all tensors,
# because neither fingerprints nor torch's guards see that a storage was freed.
LOWEST_ADDRESS = 1 << 32
NO_MEMORY = "a tensor's memory was freed, or it never had any"
NOWHERE = 1  # address of a tensor that was given and has none; 0 is that of one that was not given

FWD = ["fwd"]  # what the memo tells these calls by from those of chunk_kda

__all__ = ["Launch", "bind", "fwd", "into", "run", "within_memory", "workspace_bytes"]


def run(call: Call, plan: Plan) -> tuple[Any, ...]:
    """Run a Call under its Plan.

    Returns (out [B, T, HV, V] bf16, final_state [N, HV, V, K], or [N, HV, K, V] without state_v_first, fp32 or None), and
    with return_intermediate_states, third, the state before each chunk of chunk_size tokens, [B, NT, HV, V, K] bf16 or
    [B, NT, HV, K, V], sequence after sequence.

    NT is the number of chunks of all sequences of a row. With cu_seqlens it is counted in cu_seqlens_cpu, which must hold the
    same values; under use_graph it is the bound that any cu_seqlens of that length keeps, and rows of no chunk are left
    undefined; with neither, cu_seqlens is read, which waits for the GPU. Nothing else here does.
    """
    inputs = (*(getattr(call, name) for name in DEVICE_INPUTS), call.cu_seqlens_cpu)
    result, _ = within_memory(bind(call, plan), Launch.__call__, *inputs)
    return result


def bind(call: Call, plan: Plan) -> "Launch":
    """The Launch that runs a Call under its Plan, and every other call with the same metadata."""
    return Launch(geometry(call, plan, ARCHS[torch.cuda.get_device_capability(call.q.device)]))


def fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float,
    initial_state: torch.Tensor | None = None,
    final_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> None:
    """FlashKDA's call, bit for bit: KDA with l2norm, gate and beta sigmoid in the kernel, written to `out`.

    Args:
        q, k, v, g: [B, T, H, 128] bf16 on one CUDA device; g before the gate.
        beta: [B, T, H] bf16, before the sigmoid.
        scale: factor of the scores, a float.
        out: [B, T, H, 128] bf16, contiguous, 16-byte aligned; overwritten, with zeros where no packed sequence lies.
        A_log: [H] fp32.  dt_bias: [H, 128] or [H * 128] fp32.
        lower_bound: in [-5, 0); the log decay a token is lower_bound * sigmoid(exp(A_log) * (g + dt_bias)).
        initial_state: [N, H, V, K] fp32 or bf16, or None for zeros; never written.
        final_state: [N, H, V, K] fp32 or bf16, contiguous, overwritten; or None.
        cu_seqlens: [N + 1] int32 or int64 on the same device, with B = 1; None: N = B sequences of T tokens.

    Raises:
        ValueError: an argument is outside these limits; nothing has been launched or written.
    """
    _check_fwd(q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state, final_state, cu_seqlens)
    key = memo.fingerprint(FWD, [q, k, v, g, beta, scale, A_log, dt_bias, lower_bound, initial_state, final_state, cu_seqlens])
    launch = memo.find(key)
    if launch is None:
        _check_memory(q, k, v, g, beta, A_log, dt_bias, initial_state, final_state, cu_seqlens, out)
        call = Call(
            q, k, v, g, beta, scale, initial_state,
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            lower_bound=lower_bound, state_v_first=True, cu_seqlens=cu_seqlens, A_log=A_log, dt_bias=dt_bias,
        )  # fmt: skip
        sm_count = torch.cuda.get_device_properties(q.device).multi_processor_count
        plan = column_split("exact", call.num_sequences, call.heads, sm_count, Variant.of(call))
        launch = bind(call, _with_final_state(plan, final_state))
        if key is not None:
            memo.keep(key, launch)
    try:
        return launch.into(out, final_state, None, q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias)
    except torch.OutOfMemoryError:
        shorter = halved(launch.geometry)
        if shorter is None:
            raise
    inputs = (q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias)
    within_memory(Launch(shorter), Launch.into, out, final_state, None, *inputs)


# ---- checks of fwd -------------------------------------------------------------------------------------------------
def _check_fwd(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    scale: Any,
    out: Any,
    A_log: Any,
    dt_bias: Any,
    lower_bound: Any,
    initial_state: Any,
    final_state: Any,
    cu_seqlens: Any,
) -> None:
    def require(condition: bool, text: str) -> None:
        if not condition:
            raise ValueError(text)

    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "out": out, "A_log": A_log, "dt_bias": dt_bias}
    optional = {"initial_state": initial_state, "final_state": final_state, "cu_seqlens": cu_seqlens}
    tensors |= {name: x for name, x in optional.items() if x is not None}
    for name, x in tensors.items():
        require(isinstance(x, torch.Tensor), f"{name} must be a tensor, got {type(x).__name__}")
    require(q.ndim == 4 and q.shape[-1] == DIM, f"q must be [B, T, H, {DIM}], got {list(q.shape)}")
    batch, length, heads, _ = q.shape
    for name in ("k", "v", "g", "out"):
        shape = list(tensors[name].shape)
        require(shape == list(q.shape), f"{name} must have q's shape {list(q.shape)}, got {shape}")
    require(list(beta.shape) == [batch, length, heads], f"beta must be {[batch, length, heads]}, got {list(beta.shape)}")
    for name in ("q", "k", "v", "g", "beta", "out"):
        require(tensors[name].dtype == torch.bfloat16, f"{name} must be bfloat16, got {tensors[name].dtype}")
    for name, count in (("A_log", heads), ("dt_bias", heads * DIM)):
        x = tensors[name]
        require(x.dtype == torch.float32, f"{name} must be float32, got {x.dtype}")
        require(x.numel() == count, f"{name} must have {count} elements, got {x.numel()}")
    require(q.device.type == "cuda", f"q must be on a CUDA device, got {q.device}")
    for name, x in tensors.items():
        require(x.device == q.device, f"{name} must be on {q.device} like q, got {x.device}")
    capability = torch.cuda.get_device_capability(q.device)
    require(capability in ARCHS, f"the GPU's compute capability must be one of {sorted(ARCHS)}, got {capability}")
    require(isinstance(scale, (int, float)), f"scale must be a float, got {type(scale).__name__}")
    require(
        isinstance(lower_bound, (int, float)) and -5 <= lower_bound < 0,
        f"lower_bound must be in [-5, 0), got {lower_bound}",
    )
    sequences = batch
    if cu_seqlens is not None:
        require(batch == 1, f"with cu_seqlens the batch must be 1, got {batch}")
        require(cu_seqlens.dtype in (torch.int32, torch.int64), f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")
        require(
            cu_seqlens.ndim == 1 and cu_seqlens.numel() >= 2,
            f"cu_seqlens must be [N + 1], got {list(cu_seqlens.shape)}",
        )
        sequences = cu_seqlens.numel() - 1
    for name in ("initial_state", "final_state"):
        x = optional[name]
        if x is not None:
            shape = [sequences, heads, DIM, DIM]
            require(list(x.shape) == shape, f"{name} must be [N, H, V, K] = {shape}, got {list(x.shape)}")
            require(x.dtype in (torch.float32, torch.bfloat16), f"{name} must be float32 or bfloat16, got {x.dtype}")
    for name in ("out", "final_state"):
        x = tensors.get(name)
        require(x is None or x.is_contiguous(), f"{name} must be contiguous, got strides {x is not None and x.stride()}")
    require(
        out.data_ptr() % ALIGNMENT == 0,
        f"out must be {ALIGNMENT}-byte aligned, got an address {out.data_ptr() % ALIGNMENT} bytes past that",
    )
    require(not out.is_neg(), "out must not be a negative view")


def _check_memory(*tensors: Any) -> None:
    """What is the same in every call of one fingerprint, so it is looked at once."""
    found = facts.interception() or next(filter(None, (facts.oddity(x) for x in tensors if x is not None)), None)
    if found is not None:
        raise ValueError(f"requires plain torch operations, and elements in memory as they are, got {found}")


# ---- launch --------------------------------------------------------------------------------------------------------
def into(call: Call, plan: Plan, out: Any, final_state: Any, states: Any = None) -> None:
    """Run a call under a plan, with results in given tensors; final_state fp32, bf16 or None."""
    launch = bind(call, _with_final_state(plan, final_state))
    within_memory(launch, Launch.into, out, final_state, states, *(getattr(call, name) for name in DEVICE_INPUTS))


def _with_final_state(plan: Plan, final_state: torch.Tensor | None) -> Plan:
    """The plan for a final state of that tensor's dtype, or for none."""
    dtype = None if final_state is None else DTYPE_NAMES[str(final_state.dtype)]
    return plan._replace(variant=replace(plan.variant, final_state=dtype))


class OnDevice:
    """What a Launch has in common with a backward's: a device, and how tensors are made there."""

    def __init__(self, device: torch.device, tokens: int) -> None:
        """tokens: of each row of the batch."""
        self.device, self.index = device, device.index
        self.fast_empty = _empty_strided_cuda if device.type == "cuda" else None
        self.lowest = LOWEST_ADDRESS if device.type == "cuda" else NOWHERE + 1
        if tokens == 0:  # no token has an address
            self.lowest = 0

    def _allocator(self) -> Any:
        """Gives tensors of undefined content, from an Allocation, on the current device, which must be ours."""
        if self.fast_empty is not None and not _deterministic():
            return self.fast_empty
        # Where torch is to be deterministic, this fills them.
        return lambda shape, strides, dtype: torch.empty(*shape, dtype=dtype, device=self.device)


class Launch(OnDevice):
    """Runs the calls of one Geometry. Called with a call's tensors, it keeps none of them."""

    def __init__(self, of: Geometry) -> None:
        """Loads or compiles the kernels; raises whatever that raises."""
        super().__init__(of.device, of.out.shape[1])
        self.geometry = of
        # Plain tuples: where they are unpacked into a call, others are copied first.
        sizes: Any = (of.out, of.final_state, of.workspace, of.carries)
        self.out: Any
        self.out, self.final_state, self.workspace, self.carries = (x and tuple(x) for x in sizes)
        self.segments, self.ignores_gate_parameters = tuple(map(tuple, of.segments)), of.ignores_gate_parameters
        self.wants_states = of.state_chunk is not None
        self.kernels = None if of.spec is None else launcher(of.spec)
        if of.spec is not None:
            self.addresses = packer(FAMILIES[of.spec.family].addresses)
            self.needs_copy = any(reading.as_it_is is None for reading in of.readings)
            self.beta_alignment = of.readings[STRIDED.index("beta")].alignment

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """(out, final_state or None), and states where they are asked for, of DEVICE_INPUTS and cu_seqlens_cpu."""
        if _current_device() != self.index:
            with torch.cuda.device(self.device):
                return self(*inputs)
        empty = self._allocator()
        out = empty(*self.out)
        final_state = None if self.final_state is None else empty(*self.final_state)
        if not self.wants_states:
            self._launch(empty, out, final_state, None, inputs[:-1])
            return out, final_state
        rows = self.geometry.state_rows
        if rows is None:
            on_the_host = inputs[-1]
            rows = self._count_chunks(inputs[DEVICE_INPUTS.index("cu_seqlens")] if on_the_host is None else on_the_host)
        batch, _, heads, _ = self.geometry.out.shape
        states = torch.empty(batch, rows, heads, DIM, DIM, dtype=torch.bfloat16, device=self.device)
        self._launch(empty, out, final_state, states, inputs[:-1])
        return out, final_state, states

    def shorter(self) -> Geometry | None:
        """The geometry of the same calls in segments of half the length, or None."""
        return halved(self.geometry)

    def into(self, out: Any, final_state: Any, states: Any, *inputs: Any) -> None:
        """The same of DEVICE_INPUTS into given tensors, final_state of the variant's dtype."""
        with _on(self.device):
            self._launch(self._allocator(), out, final_state, states, inputs)

    def _launch(self, empty: Any, out: Any, final_state: Any, states: Any, inputs: tuple[Any, ...]) -> None:
        if self.kernels is None:
            if final_state is not None:
                initial_state = inputs[DEVICE_INPUTS.index("initial_state")]
                final_state.zero_() if initial_state is None else final_state.copy_(initial_state.detach())
            return
        if self.ignores_gate_parameters:
            inputs = *inputs[:-2], None, None
        # One by one: in a loop they take twice the time.
        q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias = inputs
        q, k, v, g, beta = q.data_ptr(), k.data_ptr(), v.data_ptr(), g.data_ptr(), beta.data_ptr()
        initial_state = 0 if initial_state is None else initial_state.data_ptr() or NOWHERE
        cu_seqlens = 0 if cu_seqlens is None else cu_seqlens.data_ptr() or NOWHERE
        A_log = 0 if A_log is None else A_log.data_ptr() or NOWHERE
        dt_bias = 0 if dt_bias is None else dt_bias.data_ptr() or NOWHERE
        output, lowest = out.data_ptr(), self.lowest
        if q < lowest or k < lowest or v < lowest or g < lowest or beta < lowest or output < lowest:
            raise NotPlainMemory(NO_MEMORY)
        if 0 < initial_state < lowest or 0 < cu_seqlens < lowest or 0 < A_log < lowest or 0 < dt_bias < lowest:
            raise NotPlainMemory(NO_MEMORY)
        segments = self.segments
        copies: Any = ()  # alive until the launch
        unaligned = (q | k | v | g | initial_state | cu_seqlens | A_log | dt_bias) % ALIGNMENT
        if unaligned or self.needs_copy or beta & self.beta_alignment:
            copies, strides, addresses = copied(DEVICE_INPUTS, inputs, self.geometry.readings)
            q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias = addresses
            segments = tuple(numbers._replace(**strides) for numbers in self.geometry.segments)
        workspace = empty(*self.workspace)
        carry_in = carry_out = 0
        if self.carries is not None:
            carries = empty(*self.carries)
            carry_in, carry_out = carries[0].data_ptr(), carries[1].data_ptr()
        stream = _stream_handle(self.index)
        for numbers in segments:
            addresses = self.addresses(
                q=q,
                k=k,
                v=v,
                g=g,
                beta=beta,
                a_log=A_log,
                dt_bias=dt_bias,
                initial_state=initial_state,
                final_state=0 if final_state is None else final_state.data_ptr(),
                out=output,
                cu_seqlens=cu_seqlens,
                workspace=workspace.data_ptr(),
                carry_in=carry_in,
                carry_out=carry_out,
                intermediate_states=0 if states is None else states.data_ptr(),
            )
            self.kernels(*addresses, *numbers, stream)
            carry_in, carry_out = carry_out, carry_in

    def _count_chunks(self, offsets: torch.Tensor) -> int:
        """Chunks of all packed sequences, as the kernels count them; waits for the GPU where the offsets lie there."""
        if offsets.is_cuda:
            with _on(self.device):
                if torch.cuda.is_current_stream_capturing():  # which a wait would end
                    raise RuntimeError("cannot count chunks of cu_seqlens in a graph: give cu_seqlens_cpu, or use_graph=True")
        tokens, chunk = self.geometry.out.shape[1], self.geometry.state_chunk
        inside = [max(min(offset, tokens), 0) for offset in offsets.tolist()]
        return sum(-(-max(end - first, 0) // chunk) for first, end in zip(inside, inside[1:]))


def copied(names: Any, inputs: Any, readings: Any) -> tuple[list[Any], dict[str, int], list[int]]:
    """(copies, what of Numbers changes by them, addresses of all inputs), where what cannot be read where it lies is copied."""
    copies: list[Any] = []
    strides: dict[str, int] = {}
    addresses: list[int] = []
    for name, x, (as_it_is, as_a_copy, alignment) in zip(names, inputs, readings):
        address = 0 if x is None else x.data_ptr()
        if as_it_is is None or address & alignment:
            copies.append(x.detach().clone(memory_format=torch.contiguous_format))  # no graph keeps it
            address = copies[-1].data_ptr()
            strides |= strides_of(name, as_a_copy)
        addresses.append(address)
    return copies, strides, addresses


def within_memory(launch: Any, run: Callable[..., Any], *arguments: Any) -> tuple[Any, Any]:
    """(run(launch, *arguments), the geometry of what was launched), of a Launch or training's Backward.

    Where memory runs out, it is tried again in segments of half the length, down to one chunk of every head.
    """
    while True:
        try:
            return run(launch, *arguments), launch.geometry
        except torch.OutOfMemoryError:
            shorter = launch.shorter()
            if shorter is None:
                raise
        launch = type(launch)(shorter)  # outside of the except clause: what the attempt has allocated is free by now


@functools.cache
def packer(table: Any) -> Any:
    """A function of a table's fields, by keyword, that gives their values in order: in a quarter of the time of the table."""
    names = ", ".join(table._fields)
    return eval(f"lambda *, {names}: ({names},)")


def _on(device: torch.device) -> Any:
    """Make `device` the current one."""
    return contextlib.nullcontext() if _current_device() == device.index else torch.cuda.device(device)
