"""What the rules need to know besides the call itself, gathered without touching the GPU's work."""

from typing import Any, NamedTuple

import torch

from . import config
from .call import Call


class Facts(NamedTuple):
    """capability and sm_count are of the device of q; None and 0 where that is no NVIDIA GPU."""

    capability: Any  # (major, minor), or None
    sm_count: int
    grad_enabled: bool
    inference_mode: bool
    mode: str  # "auto" or "exact"
    untested: bool  # whether GPUs that the kernels never ran on may be tried
    forward_ad: bool = False  # whether tensors may carry tangents


_devices: dict[int, tuple[tuple[int, int], int]] = {}  # device index -> capability, sm_count


def gather(call: Call) -> Facts:
    """Facts for a parsed call: of q's own device, which need not be the current one."""
    capability, sm_count = device_facts(getattr(call.q, "device", None))
    return Facts(
        capability,
        sm_count,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        config.MODE.get(),
        config.UNTESTED.get(),
        forward_ad_level() >= 0,
    )


def forward_ad_level() -> int:
    """Of torch.autograd.forward_ad; -1 outside of its blocks."""
    return getattr(torch.autograd.forward_ad, "_current_level", -1)


def device_facts(device: Any) -> tuple[tuple[int, int] | None, int]:
    # A ROCm build also calls its devices cuda, and gives some of them capability 9.0.
    if not isinstance(device, torch.device) or device.type != "cuda" or torch.version.hip is not None:
        return None, 0
    index = device.index if device.index is not None else torch.cuda.current_device()
    if index not in _devices:
        properties = torch.cuda.get_device_properties(index)
        _devices[index] = (properties.major, properties.minor), properties.multi_processor_count
    return _devices[index]
