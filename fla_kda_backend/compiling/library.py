"""The compiled kernels of this process: each spec is loaded or compiled once, then only launched."""

import logging
import os
import stat
import threading

from .. import config
from .spec import KernelSpec

logger = logging.getLogger("fla_kda_backend")

_functions: dict[KernelSpec, object] = {}
_sources: dict[KernelSpec, str] = {}  # where each came from, for doctor
_failures: dict[KernelSpec, Exception] = {}  # what could not be had once is not tried again: a compile takes seconds
_lock = threading.Lock()


def launcher(spec):
    """The function that launches `spec`; the first call of a process loads it from the cache directory or compiles it.

    Raises whatever the compiler raises; a spec that failed once fails at once from then on.
    """
    function = _functions.get(spec)
    if function is None:
        with _lock:
            function = _functions.get(spec)
            if function is None:
                if spec in _failures:
                    raise RuntimeError(f"{spec} could not be compiled: {_failures[spec]}") from _failures[spec]
                try:
                    function, _sources[spec] = _load(spec) or _compile(spec)
                except Exception as error:
                    _failures[spec] = error
                    raise
                _functions[spec] = function
    return function


def loaded():
    """Spec -> where it came from, of everything that this process has launched."""
    return dict(_sources)


def _load(spec):
    folder = config.cache_dir()
    path = folder / spec.file_name
    if not path.is_file():
        return None
    if not _private(folder) or not _private(path):
        logger.warning("%s is ignored: it, or its directory, can be written by others", path)
        return None
    import tvm_ffi

    return tvm_ffi.load_module(str(path))["launch"], str(path)


def _private(path):
    status = os.stat(path)
    return status.st_uid in (0, os.getuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _compile(spec):
    from .builder import build

    logger.info("compiling %s", spec)
    return build(spec, keep=False).function, "compiled"
