"""The directory of compiled kernels: what is taken from it and what is not, what others may do to it, and its size."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import types
from dataclasses import replace

import pytest

from fla_kda_backend.compiling import ARCHS, KernelSpec, disk
from fla_kda_backend.compiling import spec as spec_module
from fla_kda_backend.compiling.disk import Directory, Unusable, pack
from fla_kda_backend.kernels.families import FAMILIES

LIBRARY = b"\x7fELF" + bytes(range(256)) * 8
SPEC = KernelSpec.of("column_split", "sm_90a", bv=64)
OTHER = replace(SPEC, arch="sm_100a")


@pytest.fixture(autouse=True)
def dsl(monkeypatch):
    """Its .version is the DSL's; None: a machine without the DSL."""
    installed = types.SimpleNamespace(version="4.8.1")
    for module in (spec_module, disk):
        monkeypatch.setattr(module, "dsl_version", lambda: installed.version)
    return installed


@pytest.fixture
def directory(tmp_path):
    return Directory(tmp_path / "kernels")


def found(directory, spec=SPEC):
    result = directory.find(spec)
    return None if result is None else bytes(result[0])


# ---- what is taken -------------------------------------------------------------------------------------------------
def test_what_was_added_is_found(directory):
    assert directory.find(SPEC) is None and directory.stored() == [] and not directory.path.exists()
    path = directory.add(SPEC, LIBRARY, linked_by="gcc")
    assert path == directory.path / SPEC.file_name and os.listdir(directory.path) == [SPEC.file_name]
    assert path.read_bytes().startswith(LIBRARY)
    library, where, private = directory.find(SPEC)
    assert bytes(library) == LIBRARY and where == path and private and directory.find(OTHER) is None
    (kernel,) = directory.stored()
    assert kernel.spec == SPEC and kernel.problem is None and kernel.size == path.stat().st_size
    assert kernel.description["dsl"] == "4.8.1" and kernel.description["linked_by"] == "gcc"


def test_every_kind_of_option_survives(directory):
    spec = KernelSpec.of("wy64", "sm_90a", a_log=None, overlap=True, max_ctas=114, gate_dtype="fp32")
    directory.add(spec, LIBRARY)
    (kernel,) = directory.stored()
    assert kernel.spec == spec and hash(kernel.spec) == hash(spec)


def test_a_machine_with_the_dsl_takes_its_own_version_alone(directory, dsl):
    directory.add(SPEC, b"4.8.1")
    dsl.version = "4.9.0"
    assert found(directory) is None
    directory.add(SPEC, b"4.9.0")
    assert found(directory) == b"4.9.0" and len(directory.stored()) == 2
    dsl.version = "4.8.1"
    assert found(directory) == b"4.8.1"


def test_a_machine_without_the_dsl_takes_any_version_the_newest_first(directory, dsl):
    for dsl.version in ("4.9.0", "4.10.0", "4.8.1"):
        directory.add(SPEC, dsl.version.encode())
    directory.add(OTHER, b"other")
    dsl.version = None
    assert found(directory) == b"4.10.0"


# ---- what is not ---------------------------------------------------------------------------------------------------
def spoil(kind, whole):
    inside = len(LIBRARY) + 20
    return {
        "empty": b"",
        "short": whole[:20],
        "truncated": whole[: len(whole) // 2],
        "without its end": whole[:-1],
        "longer": whole + b"\0",
        "a bit in the library": bytes([whole[0], whole[1] ^ 1]) + whole[2:],
        "a bit in the description": whole[:inside] + bytes([whole[inside] ^ 1]) + whole[inside + 1 :],
        "a library of no one": LIBRARY,
        "text": b"hello " * 100,
    }[kind]


KINDS = ["empty", "short", "truncated", "without its end", "longer", "a bit in the library", "a bit in the description",
         "a library of no one", "text"]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_whole_is_not_taken_and_can_be_replaced(kind, directory):
    path = directory.add(SPEC, LIBRARY)
    path.write_bytes(spoil(kind, path.read_bytes()))
    with pytest.raises(Unusable, match="no kernel, or only part|checksum"):
        directory.find(SPEC)
    (kernel,) = directory.stored()
    assert re.match("it is no kernel|its checksum", kernel.problem) and kernel.description is None
    directory.add(SPEC, LIBRARY)
    assert found(directory) == LIBRARY


def test_another_kernel_under_this_name_is_not_taken(directory):
    directory.add(OTHER, LIBRARY).rename(directory.path / SPEC.file_name)
    with pytest.raises(Unusable, match="another kernel's"):
        directory.find(SPEC)


def test_a_file_of_another_package_version_is_stale(directory, monkeypatch):
    directory.add(SPEC, LIBRARY)
    monkeypatch.setattr(spec_module, "__version__", "9.9")
    assert directory.find(SPEC) is None
    (kernel,) = directory.stored()
    assert kernel.problem == disk.STALE and kernel.spec == SPEC


@pytest.mark.parametrize("change", [
    {"options": [["states", True]]}, {"options": [["gate", "linear"]]}, {"options": [["bv", "64"]]}, {"options": [["bv", 5]]},
    {"options": {"initial_state": ["fp32"]}}, {"options": [["gate"]]}, {"options": None}, {"family": "wy32"}, {"family": []},
], ids=str)  # fmt: skip
def test_a_description_of_another_version_is_stale(change, directory, dsl, monkeypatch):
    """Whatever another version calls its families and options, the file is listed, and nothing raises."""
    path = directory.add(SPEC, LIBRARY)
    path.write_bytes(pack_description({**SPEC.to_dict(), "key": SPEC.key, **change}))
    (kernel,) = directory.stored()
    assert (kernel.problem, kernel.spec) == (disk.STALE, None)
    assert kernel.description["arch"] == "sm_90a"


def pack_description(description):
    content = LIBRARY + (about := json.dumps(description).encode())
    return content + disk.TRAILER.pack(hashlib.sha256(content).digest(), len(LIBRARY), len(about), disk.MAGIC)


def test_a_description_that_is_none(directory):
    path = directory.add(SPEC, LIBRARY)
    path.write_bytes(pack_description([1, 2]))
    with pytest.raises(Unusable, match="its description cannot be read"):
        directory.find(SPEC)
    assert directory.stored()[0].problem == "its description cannot be read"


@pytest.mark.parametrize("what, mode", [("folder", 0o777), ("folder", 0o775), ("folder", 0o757), ("file", 0o666),
                                        ("file", 0o664), ("file", 0o646)])  # fmt: skip
def test_what_others_can_write_is_not_taken(what, mode, directory):
    path = directory.add(SPEC, LIBRARY)
    (path if what == "file" else directory.path).chmod(mode)
    with pytest.raises(Unusable, match=rf"can be written by others \(mode {mode:o}\)"):
        directory.find(SPEC)
    if what == "folder":
        for use in (lambda: directory.add(OTHER, LIBRARY), directory.stored):
            with pytest.raises(Unusable, match="the directory can be written by others"):
                use()
        assert directory.lock_path(SPEC) is None and os.listdir(directory.path) == [SPEC.file_name]


@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_belongs_to_others_is_not_taken(what, directory, monkeypatch):
    """By making this process another user; what is root's would be taken, so it must not be."""
    path = directory.add(SPEC, LIBRARY)
    owner = os.stat(path).st_uid
    real, other = os.fstat, 4711

    def fstat(descriptor):
        status = list(real(descriptor)[:10])
        if (os.readlink(f"/proc/self/fd/{descriptor}") == str(path)) == (what == "file"):
            status[4] = other
        return os.stat_result(status)

    monkeypatch.setattr(os, "fstat", fstat)
    with pytest.raises(Unusable, match=f"belongs to another user \\({other}\\)"):
        directory.find(SPEC)
    monkeypatch.setattr(os, "geteuid", lambda: other)
    if owner == 0:
        assert found(directory) == LIBRARY  # root's and our own


@pytest.mark.parametrize("target", ["the kernel", "elsewhere", "nowhere", "fifo", "folder"])
def test_only_regular_files_are_opened(target, directory, tmp_path):
    """A link may lead to where others can write; a pipe would be waited for."""
    path = directory.add(SPEC, LIBRARY)
    moved = path.rename({"the kernel": directory.path / "real"}.get(target, tmp_path / "real"))
    if target == "fifo":
        os.mkfifo(path)
    elif target == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "none" if target == "nowhere" else moved)
    with pytest.raises(Unusable, match="cannot be opened|no regular file"):
        directory.find(SPEC)


def test_umask_of_a_group_does_no_harm(directory):
    before = os.umask(0o002)
    try:
        directory.add(SPEC, LIBRARY)
        assert found(directory) == LIBRARY
    finally:
        os.umask(before)


def test_a_path_that_is_no_directory(tmp_path):
    (tmp_path / "file").write_text("")
    directory = Directory(tmp_path / "file")
    assert directory.find(SPEC) is None and directory.lock_path(SPEC) is None
    with pytest.raises(OSError):
        directory.add(SPEC, LIBRARY)


def test_a_disk_that_is_full_leaves_nothing(directory, monkeypatch):
    directory.add(OTHER, LIBRARY)

    def replace(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="No space"):
        directory.add(SPEC, LIBRARY)
    assert os.listdir(directory.path) == [OTHER.file_name]


# ---- size and age --------------------------------------------------------------------------------------------------
def numbered(number):
    return KernelSpec.of("column_split", "sm_90a", stages=5 + number)


def fill(directory, ages):
    """Files used `ages` days ago; their names, and the size of one."""
    paths = []
    for number, age in enumerate(ages):
        path = directory.add(numbered(number), LIBRARY)
        os.utime(path, (time.time() - age * disk.DAY,) * 2)
        paths.append(path)
    return paths, paths[0].stat().st_size


def test_the_least_recently_used_go_first(directory):
    paths, size = fill(directory, [3, 1, 4, 2])
    directory.trim(limit=2 * size + 1)
    assert [path.exists() for path in paths] == [False, True, False, True]
    directory.trim(limit=2 * size)
    assert len(os.listdir(directory.path)) == 2
    directory.trim(limit=0, keep=paths[3])
    assert os.listdir(directory.path) == [paths[3].name]


def test_use_is_noted_once_a_day(directory):
    (path,), _ = fill(directory, [10])
    spec = numbered(0)
    assert found(directory, spec) == LIBRARY
    assert time.time() - path.stat().st_mtime < 60
    recently = time.time() - disk.DAY / 2
    os.utime(path, (recently,) * 2)
    found(directory, spec)
    assert path.stat().st_mtime == pytest.approx(recently)


LEFT = (f".{SPEC.file_name}.1-0123456789ab.tmp", f".{SPEC.file_name}.lock", f".{disk.MANIFEST}.1-0123456789ab.tmp")
FOREIGN = ("README", ".other", ".x.lock", ".x.tmp", ".1-ab.tmp", "extension.so", "extension.cpython-311-x86_64-linux-gnu.so",
           "wy64-sm_90a.so", f".{OTHER.file_name}.lock")  # fmt: skip


def others(directory):
    """Files of other people: names unlike ours, a kernel's name without its trailer, a lock that holds something."""
    for name in (*FOREIGN, OTHER.file_name):
        (directory.path / name).write_bytes(b"something")
    (directory.path / f".{OTHER.file_name}.1-0123456789ab.tmp").mkdir()
    (directory.path / numbered(9).file_name).symlink_to(directory.path / SPEC.file_name)
    return {*FOREIGN, OTHER.file_name, f".{OTHER.file_name}.1-0123456789ab.tmp", numbered(9).file_name}


def test_what_killed_processes_left_is_removed(directory):
    path = directory.add(SPEC, LIBRARY)
    for name in LEFT:
        (directory.path / name).touch()
    foreign = others(directory)
    for name in os.listdir(directory.path):
        os.utime(directory.path / name, (time.time() - 2 * disk.DAY,) * 2, follow_symlinks=False)
    young = directory.path / f".{SPEC.file_name}.2-0123456789ab.tmp"
    young.touch()
    directory.trim(limit=1 << 30)
    assert {*os.listdir(directory.path)} == {path.name, young.name, *foreign}


def test_trimming_counts_and_removes_only_kernels(directory):
    paths, size = fill(directory, [3, 2, 1])
    foreign = others(directory)
    for name in foreign:
        os.utime(directory.path / name, (time.time() - 9 * disk.DAY,) * 2, follow_symlinks=False)
    directory.trim(limit=2 * size)
    assert {*os.listdir(directory.path)} == {*foreign, paths[1].name, paths[2].name}
    directory.trim(limit=0)
    assert {*os.listdir(directory.path)} == foreign


def test_clear_leaves_what_is_not_ours(directory):
    fill(directory, [1, 2, 3])
    directory.sign()
    foreign = others(directory)
    for name in LEFT:
        (directory.path / name).touch()
    assert directory.clear() == (3, sorted([OTHER.file_name, numbered(9).file_name]))
    assert {*os.listdir(directory.path)} == foreign
    assert Directory(directory.path / "none").clear() == (0, [])


def test_clear_leaves_a_list_of_somebody_else(directory):
    directory.add(SPEC, LIBRARY)
    (directory.path / disk.MANIFEST).write_text("0" * 64 + "  something.so\n")
    directory.clear()
    assert os.listdir(directory.path) == [disk.MANIFEST]


def test_other_files_are_not_listed_as_kernels(directory):
    directory.add(SPEC, LIBRARY)
    others(directory)
    assert {kernel.path.name for kernel in directory.stored()} == {SPEC.file_name, OTHER.file_name, numbered(9).file_name}


def test_all_names_of_kernels_have_their_form(monkeypatch):
    for version in ("4.8.1", "4.9.0.dev1_x_y", "none"):
        monkeypatch.setattr(spec_module, "dsl_version", lambda version=version: version)
        for family in FAMILIES:
            for arch in ARCHS.values():
                options = {"final_state": None} if family == "wy64_backward" else {}
                assert disk.KERNEL.fullmatch(KernelSpec.of(family, arch, **options).file_name)


# ---- a directory that others can write ----------------------------------------------------------------------------------
@pytest.fixture
def signed(directory, monkeypatch):
    """The path of a kernel in such a directory, whose manifest is set."""
    path = directory.add(SPEC, LIBRARY)
    digest = directory.sign()
    assert digest == hashlib.sha256((directory.path / disk.MANIFEST).read_bytes()).hexdigest()
    monkeypatch.setenv("FLA_KDA_CUTE_CACHE_MANIFEST", digest)
    directory.path.chmod(0o2777)
    path.chmod(0o666)
    yield path
    directory.path.chmod(0o755)


def test_the_remedy_is_named(directory):
    path = directory.add(SPEC, LIBRARY)
    path.chmod(0o664)
    with pytest.raises(Unusable, match=f"chmod go-w {re.escape(str(path))}$"):
        directory.find(SPEC)
    directory.path.chmod(0o2775)
    with pytest.raises(Unusable, match=f"chmod go-w {re.escape(str(directory.path))}; FLA_KDA_CUTE_CACHE_MANIFEST"):
        directory.find(SPEC)


def test_what_the_manifest_names_is_taken(directory, signed, loader):
    library, path, private = directory.find(SPEC)
    assert bytes(library) == LIBRARY and path == signed and not private
    (kernel,) = directory.stored()
    assert kernel.problem is None and kernel.digest == hashlib.sha256(signed.read_bytes()).hexdigest()


def test_sha256sum_reads_the_manifest(signed):
    subprocess.run(["sha256sum", "--check", "--strict", disk.MANIFEST], cwd=signed.parent, check=True, capture_output=True)


def test_a_file_that_others_can_write_is_taken_by_its_manifest(directory, signed):
    """The directory itself may be writable by its owner alone."""
    directory.path.chmod(0o755)
    assert found(directory) == LIBRARY and not directory.find(SPEC).private
    signed.chmod(0o644)
    assert directory.find(SPEC).private


@pytest.mark.parametrize("what", ["other bytes", "another kernel", "a new file", "no manifest", "another manifest", "garbage",
                                  "another digest", "no digest"])  # fmt: skip
def test_what_the_manifest_does_not_name_is_not_taken(what, directory, signed, monkeypatch):
    manifest = directory.path / disk.MANIFEST
    spec, problem = SPEC, "the sha256 of"
    if what == "other bytes":
        signed.write_bytes(pack(b"evil", SPEC, dsl="4.8.1"))
        problem = "names other bytes"
    elif what == "another kernel":
        shutil.copy(signed, directory.path / OTHER.file_name)
        spec, problem = OTHER, "names no such file"
    elif what == "a new file":
        (directory.path / OTHER.file_name).write_bytes(pack(b"evil", OTHER, dsl="4.8.1"))
        spec, problem = OTHER, "names no such file"
    elif what == "no manifest":
        manifest.unlink()
        problem = "cannot be read there"
    elif what == "another manifest":
        signed.write_bytes(pack(b"evil", SPEC, dsl="4.8.1"))
        manifest.write_text(f"{hashlib.sha256(signed.read_bytes()).hexdigest()}  {signed.name}\n")
    elif what == "garbage":
        manifest.write_bytes(bytes(range(256)))
    else:
        monkeypatch.setenv("FLA_KDA_CUTE_CACHE_MANIFEST", {"another digest": "0" * 64, "no digest": "yes"}[what])
    with pytest.raises(Unusable, match=problem):
        directory.find(spec)


def test_nothing_is_written_where_others_can_write(directory, signed):
    os.utime(signed, (1e9, 1e9))
    before = {name: os.stat(directory.path / name).st_mtime_ns for name in os.listdir(directory.path)}
    assert found(directory) == LIBRARY and directory.lock_path(SPEC) is None
    for use in (lambda: directory.add(SPEC, LIBRARY), directory.sign, directory.clear, directory.require_writable,
                lambda: directory.trim(0)):  # fmt: skip
        with pytest.raises(Unusable, match="can be written by others.*so it is only read"):
            use()
    assert {name: os.stat(directory.path / name).st_mtime_ns for name in os.listdir(directory.path)} == before


def test_a_file_without_an_end_is_not_read(directory, signed):
    os.truncate(signed, disk.LARGEST + 1)
    with pytest.raises(Unusable, match="larger than"):
        directory.find(SPEC)


def test_damaged_files_hide_no_whole_one(directory, dsl):
    """Each is named, and the whole ones come in order."""
    versions = ("4.10.0", "4.9.0", "4.8.1", "4.8.0")
    paths = {}
    for dsl.version in versions:
        paths[dsl.version] = directory.add(SPEC, dsl.version.encode())
    for version in ("4.10.0", "4.8.1"):
        paths[version].write_bytes(paths[version].read_bytes()[:-1])
    dsl.version = None
    seen = list(directory.candidates(SPEC))
    assert [type(each) for each in seen] == [Unusable, disk.Kernel, Unusable, disk.Kernel]
    assert [bytes(each.library) for each in seen[1::2]] == [b"4.9.0", b"4.8.0"] and found(directory) == b"4.9.0"
    assert [str(paths[version]) in str(each) for version, each in (("4.10.0", seen[0]), ("4.8.1", seen[2]))] == [True, True]


# ---- from bytes to a function ---------------------------------------------------------------------------------------
@pytest.fixture
def loader(monkeypatch):
    """A loader that reads what it is told to load: .seen are (path, content); it fails for paths that .refuse accepts."""

    def load_module(path):
        seen.append((path, open(path, "rb").read()))
        if loader.refuse(path):
            raise RuntimeError("operation not permitted")
        return {"launch": path}

    seen = []
    loader = types.SimpleNamespace(seen=seen, refuse=lambda path: False)
    monkeypatch.setitem(sys.modules, "tvm_ffi", types.SimpleNamespace(load_module=load_module))
    return loader


def test_what_was_checked_is_what_is_loaded(directory, loader):
    """Whoever replaces the file after the check changes nothing, and each library has a path of its own."""
    descriptors = len(os.listdir("/proc/self/fd"))
    path = directory.add(SPEC, LIBRARY)
    library, where, _ = directory.find(SPEC)
    path.unlink()
    path.write_bytes(b"evil")
    assert len({disk.load(library, where) for _ in range(3)}) == 3
    assert {content for _, content in loader.seen} == {LIBRARY} and str(path) not in {name for name, _ in loader.seen}
    assert all(name.endswith(".so") and not os.path.exists(name) for name, _ in loader.seen)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_where_memory_may_not_be_executed_the_file_is_loaded(directory, loader):
    path = directory.add(SPEC, LIBRARY)
    loader.refuse = lambda name: name != str(path)
    assert disk.load(*directory.find(SPEC)) == str(path) and len(loader.seen) == 2


@pytest.mark.parametrize("way", ["from memory", "from a copy"])
def test_what_was_signed_is_what_is_loaded(way, directory, signed, loader):
    """Whoever swaps the file between its check and its load changes nothing: its path is not used again."""
    kernel = directory.find(SPEC)
    evil = directory.path / "evil"
    evil.write_bytes(b"evil")
    evil.replace(signed)
    if way == "from a copy":
        loader.refuse = lambda name: os.path.islink(name)
    path = disk.load(*kernel)
    assert path != str(signed) and [content for _, content in loader.seen] == [LIBRARY] * (2 if way == "from a copy" else 1)
    assert not os.path.exists(os.path.dirname(path))
    loader.refuse = lambda name: True
    with pytest.raises(RuntimeError, match="not permitted"):
        disk.load(*kernel)
    assert {content for _, content in loader.seen} == {LIBRARY}


def test_libraries_are_loaded_without_a_temporary_directory(directory, loader, monkeypatch):
    def gettempdir():
        raise FileNotFoundError(2, "No usable temporary directory found")

    directory.add(SPEC, LIBRARY)
    monkeypatch.setattr(disk.tempfile, "gettempdir", gettempdir)
    assert disk.load(*directory.find(SPEC)).startswith("/dev/shm/") and len(loader.seen) == 1


def test_packed_bytes_are_those_of_the_format():
    content = pack(LIBRARY, SPEC, dsl="1")
    library, description = disk.unpack(content)
    assert bytes(library) == LIBRARY and description["key"] == SPEC.key and content.endswith(disk.MAGIC)
    assert json.loads(json.dumps(description)) == description
