"""A lock among processes, to let one of many compile a kernel. Whoever cannot have it goes ahead: that costs time only."""

import contextlib
import errno
import fcntl
import os

_held: set[int] = set()  # descriptors of this process


class FileLock:
    """An advisory lock on a file, which the system gives back when its holder dies, kill -9 included.

    Over NFS Linux turns it into a lock that other hosts see; where locks are not to be had, it is nobody's.
    """

    def __init__(self, path):
        """Opens the file, and makes it; a path of None, or one that cannot be written, is a lock that is never busy."""
        self.descriptor = None
        if path is not None:
            with contextlib.suppress(OSError):
                self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
                _held.add(self.descriptor)

    def busy(self):
        """Whether another process, or another thread of this one, has it; if not, it is ours now."""
        if self.descriptor is None:
            return False
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in (errno.EWOULDBLOCK, errno.EACCES)
        return False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        descriptor, self.descriptor = self.descriptor, None
        if descriptor in _held:
            _held.discard(descriptor)
            # Said, not only closed: a child forked meanwhile may have a copy of the descriptor.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _after_fork():
    """The child owns no lock of its parent's, and must not keep one alive that the parent dies with."""
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_after_fork)
