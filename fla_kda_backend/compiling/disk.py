"""A directory of compiled kernels: one file each, checked before anything in it is run, safe to share and to lose.

A file is a linked library and, behind it, where the loader does not look: a description in JSON, the sha256 of both, and
their sizes. A file is written under another name, renamed, and never changed afterwards: a reader finds a whole one or none.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .spec import KernelSpec, dsl_version

MAGIC = b"flakda1\n"
TRAILER = struct.Struct("<32sQQ8s")  # sha256 of everything before, bytes of library, bytes of description, MAGIC
SUFFIX = ".so"
DAY = 86400
STALE = "stale: of another version of this package"
FILE_MODE, FOLDER_MODE = 0o644, 0o755


class Unusable(Exception):
    """Why a directory, or a file in it, is not used."""


class StoredKernel(NamedTuple):
    """A file of the directory."""

    path: Path
    size: int  # bytes
    used: float  # seconds since the epoch
    description: dict[str, Any] | None  # None: the file is none of ours, or not whole
    problem: str | None  # why it is not used

    @property
    def spec(self) -> KernelSpec | None:
        """None where there is no description, or this version has no such kernel."""
        if self.description is None:
            return None
        try:
            return KernelSpec.from_dict(self.description)
        except ValueError:
            return None


def pack(library: bytes, spec: KernelSpec, **more: Any) -> bytes:
    """The bytes of spec's file around a linked library; `more` goes into the description."""
    content = library + (description := json.dumps({**spec.to_dict(), "key": spec.key, **more}).encode())
    return content + TRAILER.pack(hashlib.sha256(content).digest(), len(library), len(description), MAGIC)


def unpack(content: bytes) -> tuple[memoryview, dict[str, Any]]:
    """(library, description) of a file's bytes; raises Unusable."""
    if len(content) < TRAILER.size:
        raise Unusable("it is no kernel, or only part of one")
    view = memoryview(content)
    digest, library, description, magic = TRAILER.unpack(view[-TRAILER.size :])
    if magic != MAGIC or library + description + TRAILER.size != len(content):
        raise Unusable("it is no kernel, or only part of one")
    if hashlib.sha256(view[: -TRAILER.size]).digest() != digest:
        raise Unusable("its checksum does not agree")
    try:
        about = json.loads(bytes(view[library : library + description]))
    except ValueError:
        about = None
    if not isinstance(about, dict):
        raise Unusable("its description cannot be read")
    return view[:library], about


class Directory:
    """The kernels under a path. Nothing is read or written there if others can write to it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def find(self, spec: KernelSpec) -> tuple[memoryview, Path] | None:
        """(library, Path) of the variant, or None; raises Unusable where a file is there and must not be used.

        A machine with the DSL takes only kernels that its own version of the DSL made. A machine without it cannot compile:
        a directory that was filled elsewhere is all it has. It takes kernels of any version of the DSL, the newest first.
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

    def add(self, spec: KernelSpec, library: bytes, **more: Any) -> Path:
        """Write a linked library to the variant's file; its Path. Raises OSError, or Unusable."""
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

    def lock_path(self, spec: KernelSpec) -> Path | None:
        """The file that processes lock before they compile the variant; None where the directory must not be used."""
        try:
            os.makedirs(self.path, FOLDER_MODE, exist_ok=True)
            with self._opened():
                return self.path / f".{spec.file_name}.lock"
        except (OSError, Unusable):
            return None

    def trim(self, limit: int, keep: Path | None = None) -> None:
        """Remove the files not used for the longest time until `limit` bytes are left, and what killed processes left.

        A process that has loaded a file keeps its kernel: see `load`.
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

    def stored(self) -> list[StoredKernel]:
        """Every kernel's file, the last used first; raises Unusable."""
        try:
            names = sorted(name for name in os.listdir(self.path) if name.endswith(SUFFIX))
        except FileNotFoundError:
            return []
        with self._opened() as folder:
            return sorted((self._stored(folder, name) for name in names), key=lambda kernel: -kernel.used)

    def clear(self) -> int:
        """Remove every kernel, and everything else that this package writes there; the number of kernels."""
        count = 0
        with contextlib.suppress(FileNotFoundError), os.scandir(self.path) as found:
            for entry in found:
                ours = entry.name.endswith(SUFFIX) and not entry.is_dir(follow_symlinks=False)
                if ours or (entry.name.startswith(".") and entry.name.endswith((".tmp", ".lock"))):
                    os.unlink(entry.path)
                    count += ours
        return count

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """A descriptor of the directory, which stays the same directory if its path is renamed meanwhile."""
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _require_private(os.fstat(folder), "the directory")
            yield folder
        finally:
            os.close(folder)

    def _content(self, folder: int, name: str) -> bytes:
        """The bytes of a file. They are read from the file that was checked, also if another takes its name meanwhile."""
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
            if time.time() - status.st_mtime > DAY:  # notes its use, not at each load: that would strain the file system
                with contextlib.suppress(OSError):
                    os.utime(descriptor)
            with open(descriptor, "rb", closefd=False) as file:
                return file.read()
        finally:
            os.close(descriptor)

    def _read(self, folder: int, name: str, spec: KernelSpec) -> memoryview:
        library, description = unpack(self._content(folder, name))
        if description.get("key") != spec.key:
            raise Unusable("it is another kernel's")
        return library

    def _stored(self, folder: int, name: str) -> StoredKernel:
        found = StoredKernel(self.path / name, size=0, used=0.0, description=None, problem=None)
        try:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            found = found._replace(size=status.st_size, used=status.st_mtime)
            _, description = unpack(self._content(folder, name))
        except (Unusable, OSError) as error:
            return found._replace(problem=str(error))
        found = found._replace(description=description)
        spec = found.spec
        return found if spec is not None and spec.key == description.get("key") else found._replace(problem=STALE)


def _require_private(status: os.stat_result, what: str) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise Unusable(f"{what} belongs to another user ({status.st_uid})")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Unusable(f"{what} can be written by others (mode {stat.S_IMODE(status.st_mode):o})")


def _numbers(name: str) -> tuple[list[int], str]:
    """A sort key: file names by the version of the DSL in them."""
    return [int(number) for number in re.findall(r"\d+", name.rpartition("-dsl")[2])], name


def load(library: bytes | memoryview, path: Path) -> Any:
    """The function `launch` of a library's bytes, which were read from `path` and checked.

    They are loaded from memory, so it does not matter what has become of the file: mapped from a network file system, a page
    that is first touched after the file was removed would be a bus error.
    """
    import tvm_ffi

    try:
        descriptor = os.memfd_create(path.name, os.MFD_CLOEXEC)
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(library)
            # The loader knows a library by its path, so each needs its own, and knows its kind by the suffix.
            with tempfile.TemporaryDirectory() as folder:
                link = f"{folder}/kernel{SUFFIX}"
                os.symlink(f"/proc/self/fd/{descriptor}", link)
                return tvm_ffi.load_module(link)["launch"]
        finally:
            os.close(descriptor)
    except (OSError, AttributeError, RuntimeError):  # no /proc, nowhere to put the link, or memory may not be executed
        return tvm_ffi.load_module(str(path))["launch"]
