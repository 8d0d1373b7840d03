"""Hand the backend to every chunk_kda that FLA has defined. The only module that knows FLA's registration API.

A registration that fails leaves FLA as it was; the cause is kept in `failure`, logged once, and shown by `fla-kda doctor`.
"""

import contextlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

logger = logging.getLogger("fla_kda_backend")

failure: str | None = None  # why the last attempt failed
_registered: list[Callable[..., Any]] = []  # the undecorated chunk_kda functions that have the backend
_warned: set[str] = set()


class RegistrationError(Exception):
    """This package does not know how to register with the installed FLA."""


def register(entry_points: Iterable[Callable[..., Any]]) -> bool:
    """Register with each of FLA's chunk_kda functions. Idempotent; never raises; returns whether FLA will ask us."""
    global failure
    try:
        if not entry_points:
            raise RegistrationError("fla.ops.kda defines no chunk_kda; requires flash-linear-attention >= 0.6")
        for entry_point in entry_points:
            function = inspect.unwrap(entry_point)
            if not any(function is known for known in _registered):
                register_with(entry_point)
                _registered.append(function)
        failure = None
        asked = not dispatch_disabled()
    except Exception as error:
        failure = str(error) if isinstance(error, RegistrationError) else f"{type(error).__name__}: {error}"
        if failure not in _warned:
            _warned.add(failure)
            logger.warning("kda_cute is not registered with FLA, whose own kernels run instead: %s", failure)
        return False
    if asked:
        preload()
    return asked


def preload() -> None:
    """Import what the first call needs: these imports would take most of its time. FLA's own import takes far longer.

    Only where calls can run here. CUDA is not initialised from here: FLA has done that, unless this process is not meant to
    use CUDA. tvm_ffi is left for later where torch has no exchange of tensors: it would compile one at its import.
    What fails now fails again in the first call, which reports it.
    """
    with contextlib.suppress(Exception):
        import torch

        from . import config, eligibility, facts

        if not config.ENABLED.get() or not torch.cuda.is_initialized():
            return
        capability, _ = facts.device_facts(torch.device("cuda"))
        if capability in eligibility.RUN + eligibility.COMPILED_ONLY:
            from . import op  # noqa: F401

            if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
                import tvm_ffi  # noqa: F401


def register_with(entry_point: Callable[..., Any]) -> None:
    """Register with one of them; raises RegistrationError, or what FLA raises."""
    try:
        from fla.backends import register as fla_register
    except ImportError as error:
        raise RegistrationError(f"FLA has no fla.backends.register; requires flash-linear-attention >= 0.6: {error}") from error
    from .backend import KdaCuteBackend
    from .call import POSITIONAL

    # A call's positional arguments are known by their positions, so these must be the ones that the rules know.
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(inspect.unwrap(entry_point)).parameters.values()
    names = tuple(parameter.name for parameter in parameters if parameter.kind in kinds)
    if names[: len(POSITIONAL)] != POSITIONAL:
        raise RegistrationError(f"chunk_kda of this FLA takes {', '.join(names)}; known is {', '.join(POSITIONAL)}")
    fla_register(entry_point)(KdaCuteBackend)


def dispatch_disabled() -> bool:
    """Whether FLA was imported with FLA_DISABLE_BACKEND_DISPATCH=1, so that its register() does nothing."""
    backends = sys.modules.get("fla.backends")
    default = os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1"
    return bool(getattr(backends, "_DISPATCH_DISABLED", default))


def status() -> tuple[str, str] | None:
    """(state, detail) after an attempt: registered, failed or dispatch_disabled; None where there was no attempt."""
    if failure is not None:
        return "failed", failure
    if not _registered:
        return None
    if dispatch_disabled():
        return "dispatch_disabled", "FLA was imported with FLA_DISABLE_BACKEND_DISPATCH=1: it asks no backend"
    return "registered", f"FLA asks {', '.join(order()) or 'in an order that this FLA does not show'}"


def order() -> list[str]:
    """The backends that FLA asks for a call of chunk_kda, in this order; empty where this FLA does not show them."""
    registries = getattr(sys.modules.get("fla.backends"), "_function_registries", {})
    registry = registries.get(_registered[-1]) if _registered else None
    return [backend.backend_type for backend in registry._get_sorted_backends()] if registry is not None else []
