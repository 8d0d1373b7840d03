"""Compile kernels in a thread of their own, while calls run elsewhere. What fails there fails for the calls, in library."""

import atexit
import logging
import os
import threading

from . import library

logger = logging.getLogger("fla_kda_backend")

PATIENCE = 10  # seconds that a process waits at its end: the compiler is not to be torn down at work

_lock = threading.Lock()
_waiting: dict = {}  # specs, in the order in which they were asked for; the first one is at work
_worker = None


def ready(spec):
    """Whether launcher(spec) returns or raises without compiling; if not, it is compiled meanwhile."""
    return spec in library._functions or (spec not in _waiting and library.at_hand(spec)) or _start(spec)


def _start(spec):
    global _worker
    with _lock:
        _waiting.setdefault(spec)
        if _worker is None:
            _worker = threading.Thread(target=_work, name="fla_kda_backend compiler", daemon=True)
            _worker.start()
    return False


def _work():
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
        except Exception as error:  # kept, and told by the calls that need it
            logger.debug("background compilation failed: %r", error)
        with _lock:
            _waiting.pop(spec, None)


def _finish():
    """Let the compilation at work end, and begin no other."""
    with _lock:
        worker = _worker
        first = next(iter(_waiting), None)
        for spec in list(_waiting):
            if spec != first:
                del _waiting[spec]
    if worker is not None:
        worker.join(PATIENCE)


def _after_fork():
    """The child has no such thread; what was waiting is asked for again by its calls."""
    global _lock, _worker
    _lock, _worker = threading.Lock(), None
    _waiting.clear()


atexit.register(_finish)
os.register_at_fork(after_in_child=_after_fork)
