"""The compiled kernels of this process: each spec is loaded or compiled once, then only launched."""

import contextlib
import logging
import os
import threading
import time

from .. import config
from .disk import Directory, Unusable, load
from .locks import FileLock
from .spec import KernelSpec

logger = logging.getLogger("fla_kda_backend")

WAIT = 120  # seconds for another process that compiles the same kernel: it may have been stopped
POLL = 0.05

_functions: dict[KernelSpec, object] = {}
_sources: dict[KernelSpec, str] = {}  # where each came from, for doctor
_failures: dict[KernelSpec, Exception] = {}  # what could not be had once is not tried again: a compile takes seconds
_locks: dict[KernelSpec, threading.Lock] = {}  # one each, so that none waits for another's compilation
_said: set[str] = set()


def launcher(spec):
    """The function that launches `spec`; the first call of a process loads it from the cache directory or compiles it.

    Raises whatever the compiler raises; a spec that failed once fails at once from then on.
    """
    function = _functions.get(spec)
    if function is None:
        with _locks.setdefault(spec, threading.Lock()):
            function = _functions.get(spec)
            if function is None:
                if spec in _failures:
                    raise RuntimeError(f"{spec} could not be compiled: {_failures[spec]}") from _failures[spec]
                try:
                    function = _keep(spec, *(_load(spec) or _compile_once_of_many(spec)))
                except Exception as error:
                    _failures[spec] = error
                    raise
    return function


def at_hand(spec):
    """Whether launcher(spec) returns or raises without compiling. Loads what is stored, which takes milliseconds."""
    if spec in _functions or spec in _failures:
        return True
    lock = _locks.setdefault(spec, threading.Lock())
    if not lock.acquire(blocking=False):  # another thread is at it
        return False
    try:
        found = _load(spec) if spec not in _functions else None
        if found is not None:
            _keep(spec, *found)
        return spec in _functions
    finally:
        lock.release()


def loaded():
    """Spec -> where it came from, of everything that this process has launched."""
    return dict(_sources)


def _keep(spec, function, source):
    _sources[spec] = source
    _functions[spec] = function
    return function


def _load(spec):
    """(function, path) of what the cache directory holds, or None. A file that is not to be used is none, and said once."""
    folder = config.cache_dir()
    if folder is None:
        return None
    try:
        found = Directory(folder).find(spec)
        return None if found is None else (load(*found), str(found[1]))
    except Unusable as error:
        _say(logging.WARNING, f"{folder / spec.file_name} is not used: {error}")
    except Exception as error:  # it is whole, but not for this machine
        _say(logging.WARNING, f"{folder / spec.file_name} cannot be loaded: {type(error).__name__}: {error}")
    return None


def _compile_once_of_many(spec):
    """(function, source): compiled by this process, or by another one at the same time."""
    folder = config.cache_dir()
    if folder is None:
        return _compile(spec), "compiled"
    directory = Directory(folder)
    with FileLock(directory.lock_path(spec)) as lock:
        limit = time.monotonic() + WAIT
        while lock.busy():
            if time.monotonic() > limit:
                _say(logging.WARNING, f"another process has been compiling {spec} for {WAIT} s: not waiting any longer")
                break
            time.sleep(POLL)
        found = _load(spec)
        if found is None:
            function = _compile(spec)
            found = (_store(spec, function, directory) and _load(spec)) or (function, "compiled")
    return found


def _compile(spec):
    from .builder import build

    logger.info("compiling %s", spec)
    return build(spec, keep=False).function


def _store(spec, function, directory):
    """Whether a compiled function was added to the directory; if not, this process has it all the same."""
    from .builder import link
    from .linking import Unlinkable

    try:
        library, linked_by = link(spec, function)
        path = directory.add(spec, library, linked_by=linked_by)
    except Unlinkable as error:
        _say(logging.INFO, f"every process compiles for itself, because nothing can be linked here: {error}")
        return False
    except Exception as error:
        _say(logging.WARNING, f"compiled kernels are not kept in {directory.path}: {error}")
        return False
    with contextlib.suppress(OSError):
        directory.trim(config.CACHE_MIB.get() << 20, keep=path)
    return True


def _say(level, text):
    if text not in _said:
        _said.add(text)
        logger.log(level, "%s", text)


def _after_fork():
    # Threads of the parent may have held them.
    _locks.clear()


os.register_at_fork(after_in_child=_after_fork)
