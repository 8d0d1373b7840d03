"""FLA's registration API, and nothing else knows it: hand the backend to every chunk_kda that FLA has defined.

A registration that fails leaves FLA as it was; the cause is kept in `failure`, logged once, and shown by
`fla-kda doctor`.
"""

import contextlib
import inspect
import logging
import os
import sys

logger = logging.getLogger("fla_kda_backend")

failure = None  # str: why the last attempt failed
_registered = []  # the undecorated chunk_kda functions that have the backend
_warned = set()


class RegistrationError(Exception):
    """FLA is not the one that this package knows how to register with."""


def register(entry_points):
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


def preload():
    """Import what the first call needs, of whose time it would be most. FLA is being imported, which takes far longer.

    Only where calls can run here, and only what is no more than an import: CUDA is not initialised, which FLA has done
    unless this process is not to use it; and to a torch without an exchange of tensors of its own tvm_ffi would add one
    that is compiled first. What fails now fails again in the first call, which says so.
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


def register_with(entry_point):
    try:
        from fla.backends import register as fla_register
    except ImportError as error:
        raise RegistrationError(
            f"FLA has no fla.backends.register; requires flash-linear-attention >= 0.6: {error}"
        ) from error
    from .backend import KdaCuteBackend
    from .call import POSITIONAL

    # A call's positional arguments are read by their place, so the places must be the ones that the rules know.
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(inspect.unwrap(entry_point)).parameters.values()
    names = tuple(parameter.name for parameter in parameters if parameter.kind in kinds)
    if names[: len(POSITIONAL)] != POSITIONAL:
        raise RegistrationError(f"chunk_kda of this FLA takes {', '.join(names)}; known is {', '.join(POSITIONAL)}")
    fla_register(entry_point)(KdaCuteBackend)


def dispatch_disabled():
    """Whether FLA was imported with FLA_DISABLE_BACKEND_DISPATCH=1, so that its register() does nothing."""
    backends = sys.modules.get("fla.backends")
    default = os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1"
    return bool(getattr(backends, "_DISPATCH_DISABLED", default))


def status():
    """(state, detail) after an attempt: registered, failed or dispatch_disabled; None where there was none."""
    if failure is not None:
        return "failed", failure
    if not _registered:
        return None
    if dispatch_disabled():
        return "dispatch_disabled", "FLA was imported with FLA_DISABLE_BACKEND_DISPATCH=1: it asks no backend"
    return "registered", f"FLA asks {', '.join(order()) or 'in an order that this FLA does not show'}"


def order():
    """The backends that FLA asks for a call of chunk_kda, in this order, as far as this FLA lets one see them."""
    registries = getattr(sys.modules.get("fla.backends"), "_function_registries", {})
    registry = registries.get(_registered[-1]) if _registered else None
    return [backend.backend_type for backend in registry._get_sorted_backends()] if registry is not None else []
