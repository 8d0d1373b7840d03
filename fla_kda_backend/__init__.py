"""Kimi Delta Attention prefill kernels for flash-linear-attention, found by FLA without a change of the caller's code.

Torch imports this package whenever it is imported itself (entry point group torch.backends). So this file imports nothing;
the public names load what they need when they are first used.

    fwd            FlashKDA's call, on these kernels (fla_kda_backend.op.fwd)
    register       what torch's autoload does, by hand (fla_kda_backend._autoload.register)
    dispatch_log   which calls ran here, and why others did not (fla_kda_backend.dispatch_log)
"""

TYPE_CHECKING = False  # typing's, which type checkers know by its name
if TYPE_CHECKING:
    from . import dispatch_log
    from ._autoload import register
    from .op import fwd

__version__ = "0.1.0"
__all__ = ["__version__", "dispatch_log", "fwd", "register"]


def __getattr__(name: str) -> object:
    value: object
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


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
