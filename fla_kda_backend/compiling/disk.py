"""A directory of compiled kernels: one file each, checked before anything in it is run, safe to share and to lose.

A file is a linked library and, behind it, where the loader does not look: a description in JSON, the sha256 of both, and
their sizes. A file is written under another name, renamed, and never changed afterwards: a reader finds a whole one or none.

Where others can write, a file's own checksum proves nothing. Such a directory is used only through a manifest: the sha256 of
each file, in a file whose own sha256 the user has set. Nothing is written there.
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

from .. import config
from .spec import FILE_NAME, KernelSpec, dsl_version

MAGIC = b"flakda1\n"
TRAILER = struct.Struct("<32sQQ8s")  # sha256 of everything before, bytes of library, bytes of description, MAGIC
MANIFEST = "fla_kda_kernels.sha256"  # in the form that `sha256sum --check` reads
KERNEL = re.compile(FILE_NAME)
SIGNED = re.compile(rf"([0-9a-f]{{64}})  ({FILE_NAME})")  # a line of the manifest
LEFTOVER = re.compile(rf"\.({FILE_NAME}|{re.escape(MANIFEST)})\.(lock|\d+-[0-9a-f]{{12}}\.tmp)")  # what a killed process leaves
LARGEST = 64 << 20  # bytes of a file that is read at all
SUFFIX = ".so"
DAY = 86400
STALE = "stale: of another version of this package"
FILE_MODE, FOLDER_MODE = 0o644, 0o755


class Unusable(Exception):
    """Why a directory, or a file in it, is not used."""


class Kernel(NamedTuple):
    """A variant's library, read and checked; what load() takes."""

    library: memoryview
    path: Path
    private: bool  # nobody else can write to the file or its directory, so that it may be loaded by its path


class StoredKernel(NamedTuple):
    """A file of the directory."""

    path: Path
    size: int  # bytes
    used: float  # seconds since the epoch
    description: dict[str, Any] | None  # None: the file is not whole
    problem: str | None  # why it is not used
    digest: str | None = None  # sha256 of the whole file, where it was read

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
    """The kernels under a path. Only files with a kernel's name are looked at, and only those with its trailer are removed."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def find(self, spec: KernelSpec) -> Kernel | None:
        """The first of candidates(spec) that is whole; raises Unusable where there are files, but none is."""
        problem = None
        for each in self.candidates(spec):
            if isinstance(each, Kernel):
                return each
            problem = each
        if problem is not None:
            raise problem
        return None

    def candidates(self, spec: KernelSpec) -> Iterator[Kernel | Unusable]:
        """The variant's files, the best first: each as a Kernel, or as the reason why it is not used.

        A machine with the DSL takes only kernels that its own version of the DSL made. A machine without it cannot compile:
        a directory that was filled elsewhere is all it has. It takes kernels of any version of the DSL, the newest first.
        """
        try:
            with self._opened() as folder:
                if dsl_version() is not None:
                    names = [spec.file_name]
                else:
                    stem = spec.stem
                    names = [name for name in folder.kernels() if name.startswith(stem)]
                    names.sort(key=_numbers, reverse=True)
                for name in names:
                    try:
                        content, private = folder.read(name)
                        library, description = unpack(content)
                        if description.get("key") != spec.key:
                            raise Unusable("it is another kernel's")
                        found: Kernel | Unusable = Kernel(library, self.path / name, private)
                    except FileNotFoundError:
                        continue
                    except Unusable as error:
                        found = Unusable(f"{self.path / name} is not used: {error}")
                    yield found
        except (FileNotFoundError, NotADirectoryError):
            return
        except Unusable as error:
            yield Unusable(f"{self.path} is not used: {error}")
        except OSError as error:
            yield Unusable(f"{self.path} cannot be read: {error}")

    def add(self, spec: KernelSpec, library: bytes, **more: Any) -> Path:
        """Write a linked library to the variant's file; its Path. Raises OSError, or Unusable."""
        content = pack(library, spec, dsl=dsl_version(), **more)
        with self._writable() as folder:
            folder.write(spec.file_name, content)
        return self.path / spec.file_name

    def require_writable(self) -> None:
        """Make the directory if need be, and a file in it. Raises OSError, or Unusable."""
        with self._writable() as folder:
            os.unlink(folder.scratch(MANIFEST, b""), dir_fd=folder.descriptor)

    def lock_path(self, spec: KernelSpec) -> Path | None:
        """The file that processes lock before they compile the variant; None where the directory must not be used."""
        try:
            with self._writable():
                return self.path / f".{spec.file_name}.lock"
        except (OSError, Unusable):
            return None

    def trim(self, limit: int, keep: Path | None = None) -> None:
        """Remove the kernels not used for the longest time until `limit` bytes are left, and what killed processes left.

        A process that has loaded a file keeps its kernel: see `load`. Raises OSError, or Unusable.
        """
        kernels, now = [], time.time()
        with self._opened(private=True) as folder:
            for name in os.listdir(folder.descriptor):
                with contextlib.suppress(OSError):
                    status = os.stat(name, dir_fd=folder.descriptor, follow_symlinks=False)
                    if folder.is_kernel(name):
                        kernels.append((status.st_mtime, status.st_size, name))
                    elif folder.is_leftover(name) and now - status.st_mtime > DAY:
                        os.unlink(name, dir_fd=folder.descriptor)
            total = sum(size for _, size, _ in kernels)
            for _, size, name in sorted(kernels):
                if total <= limit:
                    break
                if keep is None or name != keep.name:
                    with contextlib.suppress(OSError):
                        os.unlink(name, dir_fd=folder.descriptor)
                        total -= size

    def stored(self) -> list[StoredKernel]:
        """Every file with a kernel's name, the last used first; raises Unusable."""
        try:
            with self._opened() as folder:
                found = [self._stored(folder, name) for name in folder.kernels()]
        except FileNotFoundError:
            return []
        return sorted(found, key=lambda kernel: -kernel.used)

    def sign(self) -> str:
        """Write the manifest of the kernels that this version can use; its sha256. Raises OSError, or Unusable."""
        usable = sorted((each.path.name, each.digest) for each in self.stored() if each.problem is None)
        content = "".join(f"{digest}  {name}\n" for name, digest in usable).encode()
        with self._writable() as folder:
            folder.write(MANIFEST, content)
        return hashlib.sha256(content).hexdigest()

    def clear(self) -> tuple[int, list[str]]:
        """Remove what this package wrote there. (number of kernels, names of files that are kernels by their name alone).

        These stay. Raises OSError, or Unusable.
        """
        count, left = 0, []
        with contextlib.suppress(FileNotFoundError), self._opened(private=True) as folder:
            for name in sorted(os.listdir(folder.descriptor)):
                kernel = folder.is_kernel(name)
                if kernel or folder.is_leftover(name) or folder.is_manifest(name):
                    os.unlink(name, dir_fd=folder.descriptor)
                    count += kernel
                elif KERNEL.fullmatch(name):
                    left.append(name)
        return count, left

    @contextlib.contextmanager
    def _opened(self, private: bool = False) -> Iterator["_Folder"]:
        """The directory, which stays the same if its path is renamed meanwhile; with `private`, one that only we can write."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield _Folder(self.path, descriptor, private)
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _writable(self) -> Iterator["_Folder"]:
        os.makedirs(self.path, FOLDER_MODE, exist_ok=True)
        with self._opened(private=True) as folder:
            yield folder

    def _stored(self, folder: "_Folder", name: str) -> StoredKernel:
        found = StoredKernel(self.path / name, size=0, used=0.0, description=None, problem=None)
        try:
            status = os.stat(name, dir_fd=folder.descriptor, follow_symlinks=False)
            found = found._replace(size=status.st_size, used=status.st_mtime)
            content, _ = folder.read(name)
            _, description = unpack(content)
        except (Unusable, OSError) as error:
            return found._replace(problem=str(error))
        found = found._replace(description=description, digest=hashlib.sha256(content).hexdigest())
        spec = found.spec
        return found if spec is not None and spec.key == description.get("key") else found._replace(problem=STALE)


class _Folder:
    """An open directory; raises Unusable where others can write to it and no manifest is set, or it is to be `private`."""

    def __init__(self, path: Path, descriptor: int, private: bool) -> None:
        self.path, self.descriptor = path, descriptor
        self.problem = _others_can_write(os.fstat(descriptor), "the directory", path)
        self.expected = (config.CACHE_MANIFEST.get() or "").strip().lower()  # the manifest's sha256
        if self.problem is not None and (private or not self.expected):
            advice = ""
            if self.expected:
                advice = f"; {config.CACHE_MANIFEST.name} is set, so it is only read"
            elif not private:
                advice = f"; {config.CACHE_MANIFEST.name} set to what fla-kda compile --out printed lets it be read"
            raise Unusable(self.problem + advice)
        self.signed = self._manifest() if self.problem is not None else None  # {file name: sha256}, once it was read

    def kernels(self) -> list[str]:
        """The names of files that may be kernels."""
        return sorted(name for name in os.listdir(self.descriptor) if KERNEL.fullmatch(name))

    def read(self, name: str) -> tuple[bytes, bool]:
        """(content, whether nobody else can write to it) of a file that may be used."""
        with self._regular(name) as (descriptor, status):
            problem = self.problem or _others_can_write(status, "it", self.path / name)
            if problem is not None and not self.expected:
                raise Unusable(problem)
            if problem is None and time.time() - status.st_mtime > DAY:
                # Notes its use, but not at each load: that would strain the file system.
                with contextlib.suppress(OSError):
                    os.utime(descriptor)
            content = _content(descriptor)
        if problem is not None:
            self.signed = self._manifest() if self.signed is None else self.signed
            if self.signed.get(name) != hashlib.sha256(content).hexdigest():
                raise Unusable(f"the manifest names {'other bytes' if name in self.signed else 'no such file'}, and {problem}")
        return content, problem is None

    def scratch(self, name: str, content: bytes) -> str:
        """Write a new file that is to be renamed to `name`; its own name."""
        scratch = f".{name}.{os.getpid()}-{os.urandom(6).hex()}.tmp"
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE, dir_fd=self.descriptor)
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
        except BaseException:
            self._discard(scratch)
            raise
        return scratch

    def write(self, name: str, content: bytes) -> None:
        """Write a file, or replace it; readers see the old one or the new one."""
        scratch = self.scratch(name, content)
        try:
            os.replace(scratch, name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        except BaseException:
            self._discard(scratch)
            raise

    def is_kernel(self, name: str) -> bool:
        """Whether a file has a kernel's name and its trailer."""
        if not KERNEL.fullmatch(name):
            return False
        with contextlib.suppress(OSError, Unusable), self._regular(name) as (descriptor, status):
            trailer = os.pread(descriptor, TRAILER.size, max(0, status.st_size - TRAILER.size))
            if len(trailer) == TRAILER.size:
                _, library, description, magic = TRAILER.unpack(trailer)
                return magic == MAGIC and library + description + TRAILER.size == status.st_size
        return False

    def is_leftover(self, name: str) -> bool:
        """Whether a file is a lock or a scratch file of this package."""
        if not LEFTOVER.fullmatch(name):
            return False
        status = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        return stat.S_ISREG(status.st_mode) and (status.st_size == 0 or name.endswith(".tmp"))

    def is_manifest(self, name: str) -> bool:
        if name == MANIFEST:
            with contextlib.suppress(OSError, Unusable), self._regular(name) as (descriptor, _):
                return _parsed(_content(descriptor)) is not None
        return False

    def _manifest(self) -> dict[str, str]:
        """{file name: sha256} of the manifest that the user has set; raises Unusable."""
        variable = config.CACHE_MANIFEST.name
        try:
            with self._regular(MANIFEST) as (descriptor, _):
                content = _content(descriptor)
        except (OSError, Unusable) as error:
            raise Unusable(f"{self.problem}; {variable} is set, but {MANIFEST} cannot be read there: {error}") from error
        signed = _parsed(content)
        if signed is None or hashlib.sha256(content).hexdigest() != self.expected:
            raise Unusable(f"{self.problem}; {variable} is set, but the sha256 of {MANIFEST} there is another")
        return signed

    @contextlib.contextmanager
    def _regular(self, name: str) -> Iterator[tuple[int, os.stat_result]]:
        """(descriptor, status) of a file; a link may lead to where others can write, and a pipe would be waited for."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(name, flags, dir_fd=self.descriptor)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise Unusable(f"it cannot be opened: {error}") from error
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise Unusable("it is no regular file")
            yield descriptor, status
        finally:
            os.close(descriptor)

    def _discard(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self.descriptor)


def _content(descriptor: int) -> bytes:
    with open(descriptor, "rb", closefd=False) as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise Unusable(f"it is larger than {LARGEST >> 20} MiB")
    return content


def _parsed(manifest: bytes) -> dict[str, str] | None:
    """{file name: sha256} of a manifest; None where it is none."""
    lines = manifest.decode(errors="replace").splitlines()
    found = [SIGNED.fullmatch(line) for line in lines]
    return {match[2]: match[1] for match in found if match} if lines and all(found) else None


def _others_can_write(status: os.stat_result, what: str, path: Path) -> str | None:
    """What is wrong, and what helps; None where only this user and root can write."""
    if status.st_uid not in (0, os.geteuid()):
        return f"{what} belongs to another user ({status.st_uid}): make it root's or your own (chown {os.geteuid()} {path})"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{what} can be written by others (mode {stat.S_IMODE(status.st_mode):o}): chmod go-w {path}"
    return None


def _numbers(name: str) -> tuple[list[int], str]:
    """A sort key: file names by the version of the DSL in them."""
    return [int(number) for number in re.findall(r"\d+", name.rpartition("-dsl")[2])], name


def load(library: bytes | memoryview, path: Path, private: bool = True) -> Any:
    """The function `launch` of a library's bytes, which were read from `path` and checked: the fields of a Kernel.

    They are loaded from memory, so it does not matter what has become of the file: mapped from a network file system, a page
    that is first touched after the file was removed would be a bus error. And where the file is not `private`, other bytes
    may be under its path by now.
    """
    import tvm_ffi

    # The loader knows a library by its path, so each needs its own, and knows its kind by the suffix.
    try:
        descriptor = os.memfd_create(path.name, os.MFD_CLOEXEC)
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(library)
            with tempfile.TemporaryDirectory(dir=_scratch_folder()) as folder:
                link = f"{folder}/kernel{SUFFIX}"
                os.symlink(f"/proc/self/fd/{descriptor}", link)
                return tvm_ffi.load_module(link)["launch"]
        finally:
            os.close(descriptor)
    except (OSError, AttributeError, RuntimeError):  # no /proc, nowhere to put the link, or memory may not be executed
        if private:
            return tvm_ffi.load_module(str(path))["launch"]
    with tempfile.TemporaryDirectory(dir=_scratch_folder()) as folder:  # which only this user can enter
        copy = Path(folder) / f"kernel{SUFFIX}"
        copy.write_bytes(library)
        return tvm_ffi.load_module(str(copy))["launch"]


def _scratch_folder() -> str:
    """Where temporary directories are made; also in a container whose root is read-only and has no /tmp."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        return "/dev/shm"
