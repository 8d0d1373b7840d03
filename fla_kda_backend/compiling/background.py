"""Compile kernels in a thread of their own, while calls run elsewhere.

`library` remembers a kernel that fails to compile there, so the calls that need it fail at once.
"""

import atexit
import logging
import os
import threading

from ..failures import text_of
from . import library
from .spec import KernelSpec

logger = logging.getLogger("fla_kda_backend")

PATIENCE = 10  # seconds that a process waits at its end: the interpreter must not be torn down under the compiler

_lock = threading.Lock()
_waiting: dict[KernelSpec, None] = {}  # in the order in which they were asked for; the first one is being compiled
_worker: threading.Thread | None = None


def ready(spec: KernelSpec) -> bool:
    """Whether library.launcher(spec) returns or raises without compiling; if not, the compilation is begun here."""
    return spec in library._functions or (spec not in _waiting and library.at_hand(spec)) or _start(spec)


def _start(spec: KernelSpec) -> bool:
    global _worker
    with _lock:
        _waiting.setdefault(spec)
        if _worker is None:
            _worker = threading.Thread(target=_work, name="fla_kda_backend compiler", daemon=True)
            _worker.start()
    return False


def _work() -> None:
    global _worker
    while True:
        with _lock:
            spec = next(iter(_waiting), None)
            if spec is None:
                _worker = None
                return
        try:
            library.launcher(spec)
            logger.info("compiled in the background: %s", spec)
        except Exception as error:  # library remembers it, and the calls that need the kernel report it
            logger.debug("background compilation failed: %s", text_of(error))  # a text: a log may keep what it is given
        with _lock:
            _waiting.pop(spec, None)


def _finish() -> None:
    """Let the running compilation end, and begin no other."""
    with _lock:
        worker = _worker
        first = next(iter(_waiting), None)
        for spec in list(_waiting):
            if spec != first:
                del _waiting[spec]
    if worker is not None:
        worker.join(PATIENCE)


def _after_fork() -> None:
    """The child has no such thread; its calls ask again for what was waiting."""
    global _lock, _worker
    _lock, _worker = threading.Lock(), None
    _waiting.clear()


atexit.register(_finish)
os.register_at_fork(after_in_child=_after_fork)
