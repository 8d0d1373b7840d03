"""Run an accepted call: normalise its tensors, allocate, launch. The first module that reaches the kernels."""

import torch

try:  # where torch's own compiler gets them: the public functions take several times as long
    from torch._C import _cuda_getCurrentRawStream, _cuda_getDevice
except ImportError:  # a build without CUDA
    _cuda_getCurrentRawStream = _cuda_getDevice = None

from .compiling.library import launcher
from .compiling.spec import ARCHS, KernelSpec
from .kernels.shared import record16, record64
from .planning import WORKSPACE_LIMIT, Plan, column_split

DIM = 128
LOG2E = 1.4426950408889634
ALIGNMENT = 16  # bytes; the kernels' vector accesses need it
RECORDS = {"column_split": record16, "wy64": record64}  # layout of each family's workspace
STATE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
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
    """Run an eligibility.Call under its Plan: (out [B, T, H, V] bf16, final_state [N, H, V, K] fp32 or None)."""
    return prepare(call, plan)(
        call.q, call.k, call.v, call.g, call.beta, call.A_log, call.dt_bias, call.initial_state, call.cu_seqlens
    )


def prepare(call, plan, **how):
    """The Launch that runs an eligibility.Call under its Plan, and every other call with the same metadata."""
    final = torch.float32 if call.output_final_state else None
    return Launch(plan, call.q, call.scale, call.lower_bound, call.initial_state, final, call.cu_seqlens, **how)


def spec_of(call, plan, arch=None):
    """The KernelSpec that an eligibility.Call launches under its Plan, or None where it launches nothing.

    Metadata alone: with an arch (the device's otherwise) tensors on the meta device will do.
    """
    asked_for = []
    prepare(call, plan, arch=arch, find=asked_for.append)
    return asked_for[0] if asked_for else None


def fwd(
    q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state=None, final_state=None, cu_seqlens=None
):
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
    num_sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    sm_count = torch.cuda.get_device_properties(q.device).multi_processor_count
    plan = column_split("exact", num_sequences, q.shape[2], sm_count)
    _launch(plan, q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state, final_state, cu_seqlens)


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
    require(
        list(beta.shape) == [batch, length, heads], f"beta must be {[batch, length, heads]}, got {list(beta.shape)}"
    )
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
            require(x.dtype in STATE_NAMES, f"{name} must be float32 or bfloat16, got {x.dtype}")
    for name in ("out", "final_state"):
        x = tensors.get(name)
        require(
            x is None or x.is_contiguous(), f"{name} must be contiguous, got strides {x is not None and x.stride()}"
        )
    require(
        out.data_ptr() % ALIGNMENT == 0,
        f"out must be {ALIGNMENT}-byte aligned, got an address {out.data_ptr() % ALIGNMENT} bytes past that",
    )


# ---- launch --------------------------------------------------------------------------------------------------------
def _slots_a_segment(record, slots, heads):
    return max(1, min(slots, WORKSPACE_LIMIT // record.workspace_bytes(1, heads)))


def _launch(
    plan: Plan, q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state, final_state, cu_seqlens
):
    final = None if final_state is None else final_state.dtype
    launch = Launch(plan, q, scale, lower_bound, initial_state, final, cu_seqlens)
    launch.into(out, final_state, q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens)


class Launch:
    """What the launches of a call owe to its metadata. To be called with its tensors, of which it keeps none."""

    def __init__(self, plan: Plan, q, scale, lower_bound, initial_state, final, cu_seqlens, arch=None, find=None):
        """`find` gives the function that launches a spec, `launcher` if None; arch is the device's if None."""
        batch, length, heads, _ = self.shape = q.shape
        device = self.device = q.device
        num_sequences = batch if cu_seqlens is None else cu_seqlens.numel() - 1
        self.final_shape = None if final is None else (num_sequences, heads, DIM, DIM)
        record = RECORDS[plan.kernel]
        slots = record.slots(batch * length, num_sequences, length if cu_seqlens is None else None)
        self.kernels = None  # launches them; None: no token and no packed sequence, nothing to launch
        if slots == 0 or heads == 0:
            return
        segment = _slots_a_segment(record, slots, heads)
        segmented = segment < slots
        self.carries = (2, heads, DIM, DIM) if segmented else None
        options = (
            *plan.options,
            ("cu_dtype", None if cu_seqlens is None else CU_NAMES[cu_seqlens.dtype]),
            ("final", None if final is None else STATE_NAMES[final]),
            ("initial", None if initial_state is None else STATE_NAMES[initial_state.dtype]),
            ("segmented", segmented),
        )
        spec = _specs.get((plan.kernel, device.index, options, arch)) or _spec(plan.kernel, device, options, arch)
        self.kernels = (find or launcher)(spec)
        self.workspace = record.workspace_bytes(segment, heads, ("replay", True) in spec.options)
        self.settings = float(scale), float(lower_bound) * LOG2E, length, num_sequences, heads
        self.segments = [(begin, min(begin + segment, slots)) for begin in range(0, slots, segment)]

    def __call__(self, *inputs):
        """(out, final_state or None) of q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens."""
        # Sizes one by one: given as a torch.Size they cost torch more time than the rest of the allocation.
        out = torch.empty(*self.shape, dtype=torch.bfloat16, device=self.device)
        final_state = None
        if self.final_shape is not None:
            final_state = torch.empty(*self.final_shape, dtype=torch.float32, device=self.device)
        self.into(out, final_state, *inputs)
        return out, final_state

    def into(self, out, final_state, *inputs):
        """The same into given tensors, final_state of the dtype that was announced."""
        if self.kernels is None:
            if final_state is not None:
                initial_state = inputs[7]
                final_state.zero_() if initial_state is None else final_state.copy_(initial_state)
            return
        device = self.device
        with _on(device):
            addresses, copies = [], []
            for x in inputs:
                address = 0 if x is None else x.data_ptr()
                if address % ALIGNMENT or not (x is None or x.is_contiguous()):
                    copies.append(x.clone(memory_format=torch.contiguous_format))
                    address = copies[-1].data_ptr()
                addresses.append(address)
            # The kernels take the results ahead of cu_seqlens.
            addresses[-1:-1] = 0 if final_state is None else final_state.data_ptr(), out.data_ptr()
            workspace = torch.empty(self.workspace, dtype=torch.uint8, device=device)
            addresses.append(workspace.data_ptr())
            carry_in = carry_out = 0
            if self.carries is not None:
                carries = torch.empty(*self.carries, dtype=torch.float32, device=device)
                carry_in, carry_out = carries[0].data_ptr(), carries[1].data_ptr()
            stream = _stream(device)
            for begin, end in self.segments:
                self.kernels(*addresses, carry_in, carry_out, *self.settings, begin, end, stream)
                carry_in, carry_out = carry_out, carry_in


_specs: dict[tuple, KernelSpec] = {}


def _spec(kernel, device, options, arch):
    """The spec of a variant on a device; segments exclude replay, whose checkpoints lie in one launch."""
    chosen = dict(options)
    if chosen["segmented"] and chosen.get("replay"):
        chosen["replay"] = False
    spec = KernelSpec.of(kernel, arch or ARCHS[torch.cuda.get_device_capability(device)], **chosen)
    _specs[kernel, device.index, options, arch] = spec
    return spec


def _stream(device):
    """Handle of torch's current stream on `device`."""
    if device.index is None or _cuda_getCurrentRawStream is None:
        return torch.cuda.current_stream(device).cuda_stream
    return _cuda_getCurrentRawStream(device.index)


class _Here:
    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass


_HERE = _Here()


def _on(device):
    """Make `device` the current one; free where it is already."""
    index = device.index
    # A tensor on the device is there, so CUDA is initialised, which torch.cuda.current_device would ask each time.
    current = torch.cuda.current_device if index is None or _cuda_getDevice is None else _cuda_getDevice
    return _HERE if current() == index else torch.cuda.device(device)
