"""The compiled kernels of this process: each spec is loaded or compiled once, then only launched."""

import contextlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .. import config
from ..failures import Failures, StillFailing, is_driver_mismatch, text_of
from .disk import Directory, Unusable, load
from .locks import FileLock
from .spec import KernelSpec

logger = logging.getLogger("fla_kda_backend")

WAIT = 120  # seconds to wait for another process that compiles the same kernel: it may have been stopped
POLL = 0.05
SHARED_MEMORY = "/dev/shm"  # a directory that can mostly be written also where the root is read-only

_functions: dict[KernelSpec, Any] = {}
_sources: dict[KernelSpec, str] = {}  # where each came from
_failures = Failures(lasting_after=1)  # by spec; a compilation takes seconds and gives the same again
_locks: dict[KernelSpec, threading.Lock] = {}  # one per spec, so that a thread waits for no other kernel's compilation
_said: set[str] = set()


class Found(NamedTuple):
    """A kernel that can be launched."""

    function: Any
    source: str  # the path of its file, or "compiled"


def launcher(spec: KernelSpec) -> Any:
    """The function that launches `spec`. The first call of a process loads it from the cache directory, or compiles it.

    Raises whatever the compiler raises. A spec that failed fails at once from then on; where the cause may pass, such as a
    full disk, it is tried a few times, and then every failures.RETRY seconds.
    """
    function = _functions.get(spec)
    if function is None:
        with _locks.setdefault(spec, threading.Lock()):
            function = _functions.get(spec)
            if function is None:
                failure = _failures.standing(spec)
                if failure is not None:
                    raise StillFailing(f"{spec} could not be compiled: {failure.text}", failure.lasting)
                try:
                    function = _keep(spec, _load(spec) or _compile_once_of_many(spec))
                except Exception as error:
                    _failures.note(spec, error)
                    raise
    return function


def at_hand(spec: KernelSpec) -> bool:
    """Whether launcher(spec) returns or raises without compiling. Loads a stored kernel, which takes milliseconds."""
    if spec in _functions or _failures.standing(spec) is not None:
        return True
    lock = _locks.setdefault(spec, threading.Lock())
    if not lock.acquire(blocking=False):  # another thread is at it
        return False
    try:
        found = _load(spec) if spec not in _functions else None
        if found is not None:
            _keep(spec, found)
        return spec in _functions
    except Exception as error:
        _failures.note(spec, error)
        return True
    finally:
        lock.release()


def loaded() -> dict[KernelSpec, str]:
    """Where each kernel that this process can launch came from."""
    return dict(_sources)


def _keep(spec: KernelSpec, found: Found) -> Any:
    _sources[spec] = found.source
    _functions[spec] = found.function
    _failures.forget(spec)
    return found.function


def _folder() -> Path | None:
    """The directory of compiled kernels; None: nothing is kept, which is said once where it is not what was asked for."""
    folder, reason = config.find_cache_dir()
    if reason is not None:
        _say(logging.WARNING, f"compiled kernels are not kept: {reason}")
    return folder


def _load(spec: KernelSpec) -> Found | None:
    """What the cache directory holds, or None. A file that must not be used counts as none; the reason is logged once."""
    folder = _folder()
    if folder is None:
        return None
    for found in Directory(folder).candidates(spec):
        if isinstance(found, Unusable):
            _say(logging.WARNING, str(found))
            continue
        try:
            return Found(load(*found), str(found.path))
        except Exception as error:  # the file is whole, but was made for another machine
            if is_driver_mismatch(error):  # what is compiled here would meet the same driver
                raise
            _say(logging.WARNING, f"{found.path} cannot be loaded: {text_of(error)}")
    return None


def _compile_once_of_many(spec: KernelSpec) -> Found:
    """Compiled by this process, or by another one at the same time."""
    folder = _folder()
    if folder is None:
        return Found(_compile(spec), "compiled")
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
            stored = _store(spec, function, directory)
            found = (_load(spec) if stored else None) or Found(function, "compiled")
    return found


def _compile(spec: KernelSpec) -> Any:
    from .builder import build

    logger.info("compiling %s", spec)
    with _scratch():
        return build(spec, keep=False).function


def _store(spec: KernelSpec, function: Any, directory: Directory) -> bool:
    """Whether a compiled function was added to the directory; if not, this process can still launch it from memory."""
    from .builder import link
    from .linking import Unlinkable

    try:
        with _scratch():
            library, linked_by = link(function)
        path = directory.add(spec, library, linked_by=linked_by)
    except Unlinkable as error:
        _say(logging.INFO, f"each process compiles in memory, because nothing can be linked here: {error}")
        return False
    except Exception as error:
        _say(logging.WARNING, f"compiled kernels are not kept in {directory.path}: {error}")
        return False
    with contextlib.suppress(OSError, Unusable):
        directory.trim(config.CACHE_MIB.get() << 20, keep=path)
    return True


@contextlib.contextmanager
def _scratch() -> Iterator[None]:
    """A place for the compiler's files: shared memory where `tempfile` finds none that can be written."""
    borrowed = False
    try:
        tempfile.gettempdir()
    except OSError:
        borrowed = os.access(SHARED_MEMORY, os.W_OK | os.X_OK)
    if borrowed:
        tempfile.tempdir = SHARED_MEMORY
    try:
        yield
    finally:
        if borrowed:
            tempfile.tempdir = None  # to be looked for again


def _say(level: int, text: str) -> None:
    if text not in _said:
        _said.add(text)
        logger.log(level, "%s", text)


def _after_fork() -> None:
    # Threads of the parent may have held the locks.
    _locks.clear()


os.register_at_fork(after_in_child=_after_fork)
