"""Kimi Delta Attention prefill kernels for flash-linear-attention, found by FLA without a change of the caller's code.

Torch imports this package at every start (entry point group torch.backends), so this file imports nothing; the public
names load what they need when first used.

    fwd            FlashKDA's call, on these kernels (fla_kda_backend.op.fwd)
    register       what torch's autoload does, by hand (fla_kda_backend._autoload.register)
    dispatch_log   which calls ran here, and why others did not (fla_kda_backend.dispatch_log)
"""

__version__ = "0.1.0"
__all__ = ["__version__", "dispatch_log", "fwd", "register"]


def __getattr__(name):
    if name == "register":
        from ._autoload import register as value
    elif name == "fwd":
        from .op import fwd as value
    elif name == "dispatch_log":
        from importlib import import_module

        value = import_module(f"{__name__}.dispatch_log")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__():
    return sorted(set(globals()) | set(__all__))
