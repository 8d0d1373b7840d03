"""Run an accepted call: normalise its tensors, allocate, launch. The first module that reaches the kernels."""

import torch

from .compiling.library import launcher
from .compiling.spec import ARCHS, KernelSpec
from .kernels.shared import record16, record64
from .planning import Plan, column_split

DIM = 128
LOG2E = 1.4426950408889634
WORKSPACE_LIMIT = 1 << 31  # bytes; a call that would need more runs in segments of the time axis
RECORDS = {"column_split": record16, "wy64": record64}  # layout of each family's workspace
STATE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
CU_NAMES = {torch.int32: "int32", torch.int64: "int64"}


def workspace_bytes(tokens, num_sequences, heads, seq_len=None, kernel="column_split"):
    """Bytes of workspace that a call allocates.

    tokens in all over the sequences; seq_len where all have that length (no cu_seqlens). "column_split": a record of
    13,888 bytes for each 16-token chunk and head; "wy64": 74,256 bytes for each 64-token chunk and head, and with few
    heads 65,536 more for every 16th. At most WORKSPACE_LIMIT, or one chunk of every head where that is more.
    """
    record = RECORDS[kernel]
    slots = record.slots(tokens, num_sequences, seq_len)
    return record.workspace_bytes(_slots_a_segment(record, slots, heads), heads)


def run(call, plan):
    """Run an eligibility.Call under its Plan: (out [B, T, H, V] bf16, final_state [N, H, V, K] fp32 or None)."""
    v = call.v
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    final_state = None
    if call.output_final_state:
        final_state = torch.empty((call.num_sequences, v.shape[2], DIM, DIM), dtype=torch.float32, device=v.device)
    _launch(plan, call.q, call.k, v, call.g, call.beta, call.scale, out, call.A_log, call.dt_bias, call.lower_bound,
            call.initial_state, final_state, call.cu_seqlens)  # fmt: skip
    return out, final_state


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
        out.data_ptr() % 16 == 0, f"out must be 16-byte aligned, got an address {out.data_ptr() % 16} bytes past that"
    )


# ---- launch --------------------------------------------------------------------------------------------------------
def _aligned(x):
    """x contiguous and 16-byte aligned, as the kernels' vector accesses need it; a copy where it is not."""
    if x is None or (x.is_contiguous() and x.data_ptr() % 16 == 0):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _slots_a_segment(record, slots, heads):
    return max(1, min(slots, WORKSPACE_LIMIT // record.workspace_bytes(1, heads)))


def _launch(
    plan: Plan, q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state, final_state, cu_seqlens
):
    batch, length, heads, _ = q.shape
    device = q.device
    num_sequences = batch if cu_seqlens is None else cu_seqlens.numel() - 1
    record = RECORDS[plan.kernel]
    slots = record.slots(batch * length, num_sequences, length if cu_seqlens is None else None)
    if slots == 0 or heads == 0:  # no token and no packed sequence: nothing to launch
        if final_state is not None:
            final_state.zero_() if initial_state is None else final_state.copy_(initial_state)
        return
    segment = _slots_a_segment(record, slots, heads)
    segmented = segment < slots
    options = (
        *plan.options,
        ("cu_dtype", None if cu_seqlens is None else CU_NAMES[cu_seqlens.dtype]),
        ("final", None if final_state is None else STATE_NAMES[final_state.dtype]),
        ("initial", None if initial_state is None else STATE_NAMES[initial_state.dtype]),
        ("segmented", segmented),
    )
    spec = _specs.get((plan.kernel, device.index, options)) or _spec(plan.kernel, device, options)
    launch = launcher(spec)
    replay = ("replay", True) in spec.options

    with _on(device):
        tensors = [_aligned(x) for x in (q, k, v, g, beta, A_log, dt_bias, initial_state)]
        tensors += (final_state, out, _aligned(cu_seqlens))
        size = record.workspace_bytes(segment, heads, replay) if replay else record.workspace_bytes(segment, heads)
        tensors.append(torch.empty(size, dtype=torch.uint8, device=device))
        addresses = [0 if x is None else x.data_ptr() for x in tensors]
        carries = (0, 0)
        if segmented:
            carry = torch.empty((2, heads, DIM, DIM), dtype=torch.float32, device=device)
            carries = (carry[0].data_ptr(), carry[1].data_ptr())
        scales = float(scale), float(lower_bound) * LOG2E
        stream = _stream(device)
        for number, begin in enumerate(range(0, slots, segment)):
            carry_in, carry_out = carries[number % 2], carries[(number + 1) % 2]
            end = min(begin + segment, slots)
            launch(*addresses, carry_in, carry_out, *scales, length, num_sequences, heads, begin, end, stream)


_specs: dict[tuple, KernelSpec] = {}


def _spec(kernel, device, options):
    """The spec of a variant on a device; segments exclude replay, whose checkpoints lie in one launch."""
    chosen = dict(options)
    if chosen["segmented"] and chosen.get("replay"):
        chosen["replay"] = False
    spec = KernelSpec.of(kernel, ARCHS[torch.cuda.get_device_capability(device)], **chosen)
    _specs[kernel, device.index, options] = spec
    return spec


def _stream(device):
    """Handle of torch's current stream on `device`."""
    return torch.cuda.current_stream(device).cuda_stream


class _Here:
    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass


_HERE = _Here()


def _on(device):
    """Make `device` the current one; free where it is already."""
    return _HERE if torch.cuda.current_device() == device.index else torch.cuda.device(device)
