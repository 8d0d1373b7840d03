"""Run an accepted call: normalise its tensors, allocate, launch. The first module that reaches the kernels."""

import contextlib
import math

import torch

from .call import DEVICE_INPUTS, Call

try:  # as torch's own compiler's code does these: the public functions take several times as long
    from torch._C import _cuda_getCurrentRawStream as _stream_handle
    from torch._C import _cuda_getDevice as _current_device
except ImportError:  # a build without CUDA
    _current_device = torch.cuda.current_device

    def _stream_handle(index):
        return torch.cuda.current_stream(index).cuda_stream


try:  # no parsing of arguments
    from torch._C import _get_deterministic_algorithms as _deterministic
    from torch._C._dynamo.guards import _empty_strided_cuda
except ImportError:
    _deterministic, _empty_strided_cuda = torch.are_deterministic_algorithms_enabled, None

from .compiling.library import launcher
from .compiling.spec import ARCHS, KernelSpec
from .kernels.shared import record16, record64
from .planning import DTYPE_NAMES, WORKSPACE_LIMIT, column_split

DIM = 128
LOG2E = 1.4426950408889634
ALIGNMENT = 16  # bytes; the kernels' vector accesses need it
RECORDS = {"column_split": record16, "wy64": record64}  # layout of each family's workspace
STRIDED = {"column_split": False, "wy64": True}  # whether its kernels take the strides of q, k, v, g and beta
CU_NAMES = {torch.int32: "int32", torch.int64: "int64"}


def workspace_bytes(tokens, num_sequences, heads, seq_len=None, kernel="column_split", replay=False):
    """Bytes of workspace that a call allocates.

    tokens in all over the sequences; seq_len where all have that length (no cu_seqlens). "column_split": a record of
    13,888 bytes for each 16-token chunk and head; "wy64": 71,184 bytes for each 64-token chunk and head, with replay (as
    the call's plan says) 65,536 more for every 16th. At most WORKSPACE_LIMIT, or one chunk of every head where that is more.
    """
    record = RECORDS[kernel]
    slots = record.slots(tokens, num_sequences, seq_len)
    segment = _slots_a_segment(record, slots, heads)
    return record.workspace_bytes(segment, heads, replay and segment == slots)  # segments exclude replay


def run(call, plan):
    """Run an eligibility.Call under its Plan.

    Returns (out [B, T, HV, V] bf16, final_state [N, HV, V, K], or [N, HV, K, V] without state_v_first, fp32 or None), and
    with return_intermediate_states, third, the state before each chunk of chunk_size tokens, [B, NT, HV, V, K] bf16 or
    [B, NT, HV, K, V], sequence after sequence.

    NT is the number of chunks of all sequences of a row. With cu_seqlens it is counted in cu_seqlens_cpu, which must hold the
    same values; under use_graph it is the bound that any cu_seqlens of that length keeps, and rows of no chunk are left
    undefined; with neither, cu_seqlens is read, which waits for the GPU. Nothing else here does.
    """
    return prepare(call, plan)(*(getattr(call, name) for name in DEVICE_INPUTS), call.cu_seqlens_cpu)


def prepare(call, plan, **how):
    """The Launch that runs an eligibility.Call under its Plan, and every other call with the same metadata."""
    return Launch(call, plan, torch.float32 if call.output_final_state else None, **how)


def spec_of(call, plan, arch=None):
    """The KernelSpec that an eligibility.Call launches under its Plan, or None where it launches nothing.

    Metadata alone: with an arch (the device's otherwise) tensors on the meta device will do.
    """
    asked_for = []
    prepare(call, plan, arch=arch, find=asked_for.append)
    return asked_for[0] if asked_for else None


def fwd(q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state=None, final_state=None, cu_seqlens=None):
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
    call = Call(q, k, v, g, beta, scale, initial_state, use_gate_in_kernel=True, lower_bound=lower_bound,
                cu_seqlens=cu_seqlens, A_log=A_log, dt_bias=dt_bias)  # fmt: skip
    sm_count = torch.cuda.get_device_properties(q.device).multi_processor_count
    into(call, column_split("exact", call.num_sequences, call.heads, sm_count), out, final_state)


# ---- checks of fwd -------------------------------------------------------------------------------------------------
def _check_fwd(q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state, final_state, cu_seqlens):
    def require(condition, text):
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
        require(cu_seqlens.dtype in CU_NAMES, f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")
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
            require(x.dtype in DTYPE_NAMES, f"{name} must be float32 or bfloat16, got {x.dtype}")
    for name in ("out", "final_state"):
        x = tensors.get(name)
        require(x is None or x.is_contiguous(), f"{name} must be contiguous, got strides {x is not None and x.stride()}")
    require(
        out.data_ptr() % ALIGNMENT == 0,
        f"out must be {ALIGNMENT}-byte aligned, got an address {out.data_ptr() % ALIGNMENT} bytes past that",
    )


# ---- launch --------------------------------------------------------------------------------------------------------
def _slots_a_segment(record, slots, heads):
    return max(1, min(slots, WORKSPACE_LIMIT // record.workspace_bytes(1, heads)))


def into(call, plan, out, final_state, states=None):
    """Run a call under a plan, with results in given tensors; final_state fp32, bf16 or None."""
    launch = Launch(call, plan, None if final_state is None else final_state.dtype)
    launch.into(out, final_state, states, *(getattr(call, name) for name in DEVICE_INPUTS))


class Launch:
    """What the launches of a call owe to its metadata, strides included. Called with its tensors, it keeps none of them."""

    def __init__(self, call, plan, final, arch=None, find=None):
        """`find` gives the function that launches a spec, `launcher` if None; arch is the device's if None."""
        batch, length, qk_heads, _ = call.q.shape
        heads, num_sequences = call.heads, call.num_sequences
        packed = call.cu_seqlens is not None
        device = self.device = call.q.device
        self.index = device.index
        chosen = dict(plan.options)
        self.shape = batch, length, heads, DIM
        self.out = _contiguous(self.shape, torch.bfloat16)
        self.final_state = None if final is None else _contiguous((num_sequences, heads, DIM, DIM), torch.float32)
        self.states, self.chunk_size, self.rows = chosen.get("states", False), int(call.chunk_size), None
        if not packed or call.use_graph:
            self.rows = -(-length // self.chunk_size) + (num_sequences - 1 if packed else 0)
        self.fast_empty = _empty_strided_cuda if device.type == "cuda" else None
        record = RECORDS[plan.kernel]
        slots = record.slots(batch * length, num_sequences, None if packed else length)
        self.kernels = None  # launches them; None: no token and no packed sequence, nothing to launch
        if slots == 0 or heads == 0:
            return
        segment = _slots_a_segment(record, slots, heads)
        segmented = segment < slots
        self.carries = (2, heads, DIM, DIM) if segmented else None
        options = (
            *plan.options,
            ("cu_dtype", CU_NAMES[call.cu_seqlens.dtype] if packed else None),
            ("final", None if final is None else DTYPE_NAMES[final]),
            ("initial", None if call.initial_state is None else DTYPE_NAMES[call.initial_state.dtype]),
            ("segmented", segmented),
        )
        spec = _specs.get((plan.kernel, device.index, options, arch)) or _spec(plan.kernel, device, options, arch)
        self.kernels = (find or launcher)(spec)
        size = record.workspace_bytes(segment, heads, ("replay", True) in spec.options)
        self.workspace = _contiguous((size,), torch.uint8)
        gate = chosen.get("gate", "bounded")
        gate_scale = float(call.lower_bound) * LOG2E if gate == "bounded" else 0.0
        self.settings = float(call.scale), gate_scale, length, num_sequences, qk_heads, heads
        self.segments = [(begin, min(begin + segment, slots)) for begin in range(0, slots, segment)]
        self.no_parameters = gate == "given"  # what is given as A_log and dt_bias is then not looked at
        strided = [reading(x, STRIDED[plan.kernel]) for x in (call.q, call.k, call.v, call.g, call.beta)]
        parameters = (None, None) if self.no_parameters else (call.A_log, call.dt_bias)
        others = (call.initial_state, call.cu_seqlens, *parameters)
        self.readings = strided + [reading_whole(x) for x in others]  # as of DEVICE_INPUTS
        as_they_are = [as_it_is for as_it_is, _, _ in self.readings]
        self.told = None if None in as_they_are else sum(as_they_are, ())
        self.unaligned_beta = strided[-1][2]

    def __call__(self, *inputs):
        """(out, final_state or None), and states where they are asked for, of DEVICE_INPUTS and cu_seqlens_cpu."""
        if _current_device() != self.index:
            with torch.cuda.device(self.device):
                return self(*inputs)
        empty = self._allocator()
        out = empty(*self.out)
        final_state = None if self.final_state is None else empty(*self.final_state)
        if not self.states:
            self._launch(empty, out, final_state, None, inputs[:-1])
            return out, final_state
        rows = self.rows
        if rows is None:
            on_the_host = inputs[-1]
            rows = self._count_chunks(inputs[DEVICE_INPUTS.index("cu_seqlens")] if on_the_host is None else on_the_host)
        batch, _, heads, _ = self.shape
        states = torch.empty(batch, rows, heads, DIM, DIM, dtype=torch.bfloat16, device=self.device)
        self._launch(empty, out, final_state, states, inputs[:-1])
        return out, final_state, states

    def into(self, out, final_state, states, *inputs):
        """The same of DEVICE_INPUTS into given tensors, final_state of the dtype that was announced."""
        with _on(self.device):
            self._launch(self._allocator(), out, final_state, states, inputs)

    def _launch(self, empty, out, final_state, states, inputs):
        if self.kernels is None:
            if final_state is not None:
                initial_state = inputs[DEVICE_INPUTS.index("initial_state")]
                final_state.zero_() if initial_state is None else final_state.copy_(initial_state)
            return
        if self.no_parameters:
            inputs = *inputs[:-2], None, None
        # One by one: in a loop they take twice the time.
        q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias = inputs
        q, k, v, g, beta = q.data_ptr(), k.data_ptr(), v.data_ptr(), g.data_ptr(), beta.data_ptr()
        initial_state = 0 if initial_state is None else initial_state.data_ptr()
        cu_seqlens = 0 if cu_seqlens is None else cu_seqlens.data_ptr()
        A_log = 0 if A_log is None else A_log.data_ptr()
        dt_bias = 0 if dt_bias is None else dt_bias.data_ptr()
        told, copies = self.told, ()
        unaligned = (q | k | v | g | initial_state | cu_seqlens | A_log | dt_bias) % ALIGNMENT
        if unaligned or told is None or beta & self.unaligned_beta:
            copies, told, (q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias) = self._copy(inputs)
        final_address = 0 if final_state is None else final_state.data_ptr()
        states_address = 0 if states is None else states.data_ptr()
        workspace = empty(*self.workspace)
        carry_in = carry_out = 0
        if self.carries is not None:
            carries = torch.empty(*self.carries, dtype=torch.float32, device=self.device)
            carry_in, carry_out = carries[0].data_ptr(), carries[1].data_ptr()
        stream = _stream_handle(self.index)
        for begin, end in self.segments:
            self.kernels(q, k, v, g, beta, A_log, dt_bias, initial_state, final_address, out.data_ptr(), cu_seqlens,
                         workspace.data_ptr(), carry_in, carry_out, states_address, *told, *self.settings, begin, end,
                         stream)  # fmt: skip
            carry_in, carry_out = carry_out, carry_in

    def _copy(self, inputs):
        """(copies, what is told of strides, addresses), where what cannot be read where it lies is copied."""
        copies, told, addresses = [], (), []
        for x, (as_it_is, as_a_copy, unaligned) in zip(inputs, self.readings):
            address = 0 if x is None else x.data_ptr()
            if as_it_is is None or address & unaligned:
                copies.append(x.clone(memory_format=torch.contiguous_format))
                address, as_it_is = copies[-1].data_ptr(), as_a_copy
            told += as_it_is
            addresses.append(address)
        return copies, told, addresses

    def _allocator(self):
        """Gives tensors of undefined content, from (shape, strides, dtype), on the current device, which must be ours."""
        if self.fast_empty is not None and not _deterministic():
            return self.fast_empty
        # Where torch is to be deterministic, this fills them.
        return lambda shape, strides, dtype: torch.empty(*shape, dtype=dtype, device=self.device)

    def _count_chunks(self, offsets):
        """Chunks of all packed sequences, as the kernels count them; waits for the GPU where the offsets lie there."""
        if offsets.is_cuda:
            with _on(self.device):
                if torch.cuda.is_current_stream_capturing():  # which a wait would end
                    raise RuntimeError("cannot count chunks of cu_seqlens in a graph: give cu_seqlens_cpu, or use_graph=True")
        tokens = self.shape[1]
        inside = [max(min(offset, tokens), 0) for offset in offsets.tolist()]
        return sum(-(-max(end - first, 0) // self.chunk_size) for first, end in zip(inside, inside[1:]))


def reading(x, strided):
    """How a kernel that takes strides, or one that does not, can read x [B, T, heads] or [B, T, heads, 128].

    Returns (what it is told of x, what it is told of a contiguous copy, bits of the address that must be 0): (token stride,
    head stride) in elements of x as [B * T, heads, ..], or nothing; None in the first place: it can only read a copy.
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
    if not strided:
        contiguous = one_stride and (token, head) == whole and inner in ([], [1])
        return () if contiguous else None, (), ALIGNMENT - 1
    if not width:
        return (token, head) if one_stride else None, whole, 0
    steps = [stride * x.element_size() for stride in (token, head)]  # 0 where x is expanded: the copy engine takes none
    rows = one_stride and inner == [1] and all(step > 0 and step % ALIGNMENT == 0 for step in steps)
    return (token, head) if rows else None, whole, ALIGNMENT - 1


def reading_whole(x):
    """The same of an input of which no kernel takes strides; x may be None."""
    return () if x is None or x.is_contiguous() else None, (), ALIGNMENT - 1


def _contiguous(shape, dtype):
    """What an allocator is told: (shape, strides, dtype)."""
    return shape, tuple(math.prod(shape[i + 1 :]) for i in range(len(shape))), dtype


_specs: dict[tuple, KernelSpec] = {}


def _spec(kernel, device, options, arch):
    """The spec of a variant on a device; segments exclude replay, overlap and direct, which need all chunks in one launch."""
    chosen = dict(options)
    if chosen["segmented"]:
        chosen |= {name: False for name in ("replay", "overlap") if name in chosen}
        chosen.pop("direct", None)  # a default, as in the plan of a call that is not direct
    spec = KernelSpec.of(kernel, arch or ARCHS[torch.cuda.get_device_capability(device)], **chosen)
    _specs[kernel, device.index, options, arch] = spec
    return spec


def _on(device):
    """Make `device` the current one."""
    return contextlib.nullcontext() if _current_device() == device.index else torch.cuda.device(device)
