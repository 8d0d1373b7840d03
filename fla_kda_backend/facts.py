"""What the rules need to know besides the call itself, gathered without touching the GPU's work."""

from typing import Any, NamedTuple

import torch

from . import config
from .call import Call

try:
    from torch._C import _len_torch_dispatch_stack as dispatch_modes
    from torch._C._functorch import peek_interpreter_stack as transform
except ImportError:  # another torch
    from torch.utils._python_dispatch import _get_current_dispatch_mode as dispatch_modes  # type: ignore[assignment]

    def transform() -> None:  # type: ignore[misc]
        return None


class Facts(NamedTuple):
    """capability and sm_count are of the device of q; None and 0 where that is no NVIDIA GPU."""

    capability: Any  # (major, minor), or None
    sm_count: int
    grad_enabled: bool
    inference_mode: bool
    mode: str  # "auto" or "exact"
    untested: bool  # whether GPUs that the kernels never ran on may be tried
    forward_ad: bool = False  # whether tensors may carry tangents
    intercepted: str | None = None  # what interception() says
    training: bool = True  # whether calls that need gradients are wanted here


_devices: dict[int, tuple[tuple[int, int], int]] = {}  # device index -> capability, sm_count


def gather(call: Call) -> Facts:
    """Facts for a parsed call: of q's own device, which need not be the current one."""
    config.warn_of_unknown()
    capability, sm_count = device_facts(getattr(call.q, "device", None))
    return Facts(
        capability,
        sm_count,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        config.MODE.get(),
        config.UNTESTED.get(),
        forward_ad_level() >= 0,
        interception(),
        config.TRAINING.get(),
    )


def differentiated(call: Call, facts: Facts) -> tuple[str, ...]:
    """Names of the tensors whose gradients a call will be asked for, of those that the kernels read."""
    return tuple([name for name, value in call.inputs if value.requires_grad]) if facts.grad_enabled else ()


def forward_ad_level() -> int:
    """Of torch.autograd.forward_ad; -1 outside of its blocks."""
    return getattr(torch.autograd.forward_ad, "_current_level", -1)


def interception() -> str | None:
    """What torch's operations go through here, or None: the tensors that they make need not have memory."""
    innermost = transform()
    if innermost is not None:
        return f"torch.func's {innermost.key().name.lower()}"
    return "a torch dispatch mode" if dispatch_modes() else None


def _bits(*names: str) -> int:
    bits = 0
    for name in names:
        bits |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr()
    return bits


# Dispatch keys of a tensor whose elements are what lies in its memory. A meta tensor has none to be misread.
_PLAIN = _bits(
    "CPU", "CUDA", "Meta", "AutogradCPU", "AutogradCUDA", "AutogradMeta", "ADInplaceOrView", "AutocastCPU", "AutocastCUDA"
)  # fmt: skip


def oddity(x: torch.Tensor) -> str | None:
    """Why a strided tensor's elements are not what lies in memory at its address, or None if they are.

    Wrappers of torch.func have no address, functional and zero tensors have the address 0, and a negative or conjugate view
    has the memory of another tensor. All of them show in the dispatch keys, and their Python type is torch.Tensor.
    """
    odd = torch._C._dispatch_keys(x).raw_repr() & ~_PLAIN
    if odd:
        return f"dispatch keys {torch._C._dispatch_keys(x)}"
    if x.numel() == 0:
        return None
    storage = x.untyped_storage()
    last = x.storage_offset() + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    if storage.nbytes() < (last + 1) * x.itemsize:  # 0 where its owner has freed it, as FSDP does
        return f"a storage of {storage.nbytes()} bytes for elements up to byte {(last + 1) * x.itemsize}"
    return "no address" if not x.is_meta and storage.data_ptr() == 0 else None


def device_facts(device: Any) -> tuple[tuple[int, int] | None, int]:
    # A ROCm build also calls its devices cuda, and gives some of them capability 9.0.
    if not isinstance(device, torch.device) or device.type != "cuda" or torch.version.hip is not None:
        return None, 0
    index = device.index if device.index is not None else torch.cuda.current_device()
    if index not in _devices:
        properties = torch.cuda.get_device_properties(index)
        _devices[index] = (properties.major, properties.minor), properties.multi_processor_count
    return _devices[index]
