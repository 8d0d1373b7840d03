"""A directory of compiled kernels: one file each, checked before anything in it is run, safe to share and to lose.

A file is a linked library, which ignores what follows it: a description in JSON, the sha256 of both, and their sizes.
Files are written beside and renamed, so a reader finds a whole one or none, and never changed afterwards.
"""

import contextlib
import hashlib
import json
import os
import re
import stat
import struct
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from .spec import KernelSpec, dsl_version

MAGIC = b"flakda1\n"
TRAILER = struct.Struct("<32sQQ8s")  # sha256 of what is before, bytes of library, bytes of description, MAGIC
SUFFIX = ".so"
DAY = 86400
STALE = "stale: of another version of this package"
FILE_MODE, FOLDER_MODE = 0o644, 0o755


class Unusable(Exception):
    """Why a directory or a file of it is not used."""


class Entry(NamedTuple):
    """A file of the directory. `description` is None where it is none of ours or is not whole; `problem` says what is wrong."""

    path: Path
    size: int
    used: float  # seconds since the epoch
    description: dict | None
    problem: str | None

    @property
    def spec(self):
        family, arch, options = (self.description[name] for name in ("family", "arch", "options"))
        return KernelSpec.of(family, arch, **dict(options))


def pack(library, spec, **more):
    """The bytes of spec's file around a linked library."""
    about = {"family": spec.family, "arch": spec.arch, "options": spec.options, "key": spec.key, **more}
    content = library + (description := json.dumps(about).encode())
    return content + TRAILER.pack(hashlib.sha256(content).digest(), len(library), len(description), MAGIC)


def unpack(content):
    """(library, description) of a file's bytes; raises Unusable."""
    if len(content) < TRAILER.size:
        raise Unusable("it is no kernel, or only part of one")
    view = memoryview(content)
    digest, library, description, magic = TRAILER.unpack(view[-TRAILER.size :])
    if magic != MAGIC or library + description + TRAILER.size != len(content):
        raise Unusable("it is no kernel, or only part of one")
    if hashlib.sha256(view[: -TRAILER.size]).digest() != digest:
        raise Unusable("its checksum does not agree")
    return view[:library], json.loads(bytes(view[library : library + description]))


class Directory:
    """The kernels under a path. Nothing is read or written there if it can be written by others."""

    def __init__(self, path):
        self.path = Path(path)

    def find(self, spec):
        """(library, Path) of the variant, or None; raises Unusable where a file is there and is not to be used.

        A machine with the DSL takes only what its own version would give. One without cannot compile anyway, and takes
        that of any version, the newest first: a directory that was filled elsewhere is all it has.
        """
        try:
            with self._opened() as folder:
                if dsl_version() is not None:
                    names = [spec.file_name]
                else:
                    stem = spec.stem
                    names = [name for name in os.listdir(folder) if name.startswith(stem) and name.endswith(SUFFIX)]
                    names.sort(key=_numbers, reverse=True)
                for name in names:
                    with contextlib.suppress(FileNotFoundError):
                        return self._read(folder, name, spec), self.path / name
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            raise Unusable(f"{self.path} cannot be read: {error}") from error
        return None

    def add(self, spec, library, **more):
        """Keep a linked library (bytes) as the variant's; its Path. Raises OSError, or Unusable."""
        os.makedirs(self.path, FOLDER_MODE, exist_ok=True)
        content = pack(library, spec, dsl=dsl_version(), **more)
        with self._opened() as folder:
            scratch = f".{os.getpid()}-{os.urandom(6).hex()}.tmp"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            try:
                with open(os.open(scratch, flags, FILE_MODE, dir_fd=folder), "wb") as file:
                    file.write(content)
                os.replace(scratch, spec.file_name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(scratch, dir_fd=folder)
                raise
        return self.path / spec.file_name

    def lock_path(self, spec):
        """Where the processes that may compile the variant meet; None where the directory is not to be used."""
        try:
            os.makedirs(self.path, FOLDER_MODE, exist_ok=True)
            with self._opened():
                return self.path / f".{spec.file_name}.lock"
        except (OSError, Unusable):
            return None

    def trim(self, limit, keep=None):
        """Remove the files not used for the longest time until `limit` bytes are left, and what killed processes left.

        Whoever has a file loaded keeps it (see library.load).
        """
        files, now = [], time.time()
        with os.scandir(self.path) as found:
            for entry in found:
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if entry.name.endswith(SUFFIX):
                        files.append((status.st_mtime, status.st_size, entry.path))
                    elif entry.name.startswith(".") and entry.name.endswith((".tmp", ".lock")) and now - status.st_mtime > DAY:
                        os.unlink(entry.path)
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= limit:
                break
            if keep is None or path != str(keep):
                with contextlib.suppress(OSError):
                    os.unlink(path)
                    total -= size

    def entries(self):
        """An Entry for each kernel's file, the last used first; raises Unusable."""
        try:
            names = sorted(name for name in os.listdir(self.path) if name.endswith(SUFFIX))
        except FileNotFoundError:
            return []
        with self._opened() as folder:
            return sorted((self._entry(folder, name) for name in names), key=lambda entry: -entry.used)

    def clear(self):
        """Remove every kernel, and all else that this package writes there; how many kernels that were."""
        count = 0
        with contextlib.suppress(FileNotFoundError), os.scandir(self.path) as found:
            for entry in found:
                ours = entry.name.endswith(SUFFIX) and not entry.is_dir(follow_symlinks=False)
                if ours or (entry.name.startswith(".") and entry.name.endswith((".tmp", ".lock"))):
                    os.unlink(entry.path)
                    count += ours
        return count

    @contextlib.contextmanager
    def _opened(self):
        """A descriptor of the directory, which stays the same whatever is renamed meanwhile."""
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _require_private(os.fstat(folder), "the directory")
            yield folder
        finally:
            os.close(folder)

    def _content(self, folder, name):
        """The bytes of a file. What is checked and what is read is one and the same, also if the name changes hands."""
        try:
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise Unusable(f"it cannot be opened: {error.strerror}") from error
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise Unusable("it is no regular file")
            _require_private(status, "it")
            if time.time() - status.st_mtime > DAY:  # when it was last used; not at each load, for the file system's sake
                with contextlib.suppress(OSError):
                    os.utime(descriptor)
            with open(descriptor, "rb", closefd=False) as file:
                return file.read()
        finally:
            os.close(descriptor)

    def _read(self, folder, name, spec):
        library, description = unpack(self._content(folder, name))
        if description.get("key") != spec.key:
            raise Unusable("it is another kernel's")
        return library

    def _entry(self, folder, name):
        path, size, used, description, problem = self.path / name, 0, 0.0, None, None
        try:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            size, used = status.st_size, status.st_mtime
            _, description = unpack(self._content(folder, name))
            if Entry(path, size, used, description, None).spec.key != description["key"]:
                problem = STALE
        except (Unusable, OSError) as error:
            problem = str(error)
        except (KeyError, TypeError, ValueError):  # options that no kernel of this version has
            problem = STALE
        return Entry(path, size, used, description, problem)


def _require_private(status, what):
    if status.st_uid not in (0, os.geteuid()):
        raise Unusable(f"{what} belongs to another user ({status.st_uid})")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Unusable(f"{what} can be written by others (mode {stat.S_IMODE(status.st_mode):o})")


def _numbers(name):
    """Sorts file names by the DSL's version in them."""
    return [int(number) for number in re.findall(r"\d+", name.rpartition("-dsl")[2])], name


def load(library, path):
    """Load a library's bytes as read and checked, whatever has become of the file at `path`; its function `launch`.

    From memory: on a network file system a page that is read late, after the file was removed, would be a bus error.
    """
    import tvm_ffi

    try:
        descriptor = os.memfd_create(path.name, os.MFD_CLOEXEC)
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(library)
            # The loader knows a library by its path, so each needs one of its own, and tells its kind by the suffix.
            with tempfile.TemporaryDirectory() as folder:
                link = f"{folder}/kernel{SUFFIX}"
                os.symlink(f"/proc/self/fd/{descriptor}", link)
                return tvm_ffi.load_module(link)["launch"]
        finally:
            os.close(descriptor)
    except (OSError, AttributeError, RuntimeError):  # no /proc, nowhere to put the link, or memory may not be executed
        return tvm_ffi.load_module(str(path))["launch"]
