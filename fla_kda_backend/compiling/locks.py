"""A lock between processes, so that only one of many compiles a kernel. One that cannot lock goes ahead: it only loses time."""

import contextlib
import errno
import fcntl
import os
from pathlib import Path

_held: set[int] = set()  # descriptors of this process


class FileLock:
    """An advisory lock on a file. The system releases it when its holder dies, also by kill -9.

    Over NFS, Linux turns it into a lock that other hosts see. On a file system without locks it is never busy.
    """

    def __init__(self, path: Path | None) -> None:
        """Opens or creates the file. With None, or a path that cannot be written, the lock is never busy."""
        self.descriptor: int | None = None
        if path is not None:
            with contextlib.suppress(OSError):
                self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
                _held.add(self.descriptor)

    def busy(self) -> bool:
        """Whether another process, or another thread of this one, holds the lock; if not, we hold it now."""
        if self.descriptor is None:
            return False
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in (errno.EWOULDBLOCK, errno.EACCES)
        return False

    def __enter__(self) -> "FileLock":
        return self

    def __exit__(self, *_: object) -> None:
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None and descriptor in _held:
            _held.discard(descriptor)
            # Unlocked, not only closed: a child that was forked meanwhile may have a copy of the descriptor.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _after_fork() -> None:
    """The child owns no lock of its parent, and must not keep one alive after the parent dies."""
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_after_fork)
