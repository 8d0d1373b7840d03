"""Where a process finds a compiled kernel, threads, forks and many processes at once included."""

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import interpreters
import pytest
from fake_compiler import LIBRARY

import fla_kda_backend
from fla_kda_backend.compiling import KernelSpec, builder, disk, library, linking, locks
from fla_kda_backend.compiling import spec as spec_module
from fla_kda_backend.compiling.spec import dsl_version

ROOT = Path(fla_kda_backend.__file__).parent.parent


def variant(**changes):
    return KernelSpec.of("column_split", "sm_90a", **changes)


# ---- one process -----------------------------------------------------------------------------------------------------
def test_compiles_once_and_keeps_it(empty_library, built, loaded, monkeypatch):
    function = library.launcher(variant())
    assert library.launcher(variant()) is function and built == [variant()] and function() == "from the file"
    path = empty_library / variant().file_name
    assert library.loaded() == {variant(): str(path)} and path.exists()
    assert library.launcher(variant(bv=64)) is not function and built == [variant(), variant(bv=64)]
    for name in ("_functions", "_sources"):
        monkeypatch.setattr(library, name, {})  # the next process
    assert library.launcher(variant())() == "from the file" and len(built) == 2


def test_off_keeps_nothing(empty_library, built, loaded, monkeypatch):
    monkeypatch.setenv("FLA_KDA_CUTE_CACHE_DIR", "off")
    assert library.launcher(variant())() == "from memory" and library.loaded() == {variant(): "compiled"}
    assert loaded == [] and not Path("off").exists() and not empty_library.exists()


def spoiled(folder, how):
    """A file of the variant that is not to be used."""
    path = disk.Directory(folder).add(variant(), b"foreign" if how == "foreign" else LIBRARY)
    if how == "corrupt":
        path.write_bytes(path.read_bytes()[:-100])
    elif how == "writable":
        path.chmod(0o666)
    return path


@pytest.mark.parametrize("how", ["corrupt", "writable", "foreign"])
def test_a_file_that_is_not_to_be_used_is_replaced(how, empty_library, built, loaded, caplog):
    path = spoiled(empty_library, how)
    with caplog.at_level(logging.WARNING, "fla_kda_backend"):
        assert library.launcher(variant())() == "from the file"
    assert built == [variant()] and disk.unpack(path.read_bytes())[0] == LIBRARY and path.stat().st_mode & 0o777 == 0o644
    (record,) = caplog.records
    cause = {"corrupt": "checksum|part of", "writable": "by others", "foreign": "undefined symbol"}[how]
    assert str(path) in record.getMessage() and re.search(cause, record.getMessage())


def test_a_directory_that_others_can_write_is_neither_read_nor_written(empty_library, built, loaded, caplog):
    path = disk.Directory(empty_library).add(variant(), LIBRARY)
    empty_library.chmod(0o777)
    with caplog.at_level(logging.WARNING, "fla_kda_backend"):
        for spec in (variant(), variant(bv=64)):
            assert library.launcher(spec)() == "from memory"
    assert os.listdir(empty_library) == [path.name] and loaded == []
    (message,) = [record.getMessage() for record in caplog.records if "is not used" in record.getMessage()]
    assert "can be written by others" in message and f"chmod go-w {empty_library};" in message
    assert "FLA_KDA_CUTE_CACHE_MANIFEST" in message


@pytest.fixture
def without_dsl(monkeypatch):
    """A directory that holds kernels of two versions of the DSL, on a machine that has none; their paths, newest first."""

    def of(version):
        for module in (spec_module, disk):
            monkeypatch.setattr(module, "dsl_version", lambda: version)

    def fill(folder, newest=LIBRARY):
        paths = []
        for version, content in (("4.9.0", newest), ("4.8.1", LIBRARY)):
            of(version)
            paths.append(disk.Directory(folder).add(variant(), content))
        of(None)
        return paths

    return fill


@pytest.mark.parametrize("how", ["truncated", "foreign"])
def test_a_file_that_is_not_to_be_used_hides_no_other(how, empty_library, built, loaded, caplog, without_dsl):
    """The newest file is damaged, or whole but made for another machine."""
    damaged, whole = without_dsl(empty_library, LIBRARY if how == "truncated" else b"foreign")
    if how == "truncated":
        damaged.write_bytes(damaged.read_bytes()[:-10])
    with caplog.at_level(logging.WARNING, "fla_kda_backend"):
        assert library.launcher(variant())() == "from the file"
    assert library.loaded() == {variant(): str(whole)} and built == []
    (record,) = caplog.records
    assert str(damaged) in record.getMessage() and whole.name not in record.getMessage()


def test_a_directory_that_others_can_write_is_used_by_its_manifest(empty_library, built, loaded, caplog, monkeypatch):
    """And nothing is written there: no lock, no kernel, no time of use."""
    path = disk.Directory(empty_library).add(variant(), LIBRARY)
    monkeypatch.setenv("FLA_KDA_CUTE_CACHE_MANIFEST", disk.Directory(empty_library).sign())
    os.utime(path, (1e9, 1e9))
    empty_library.chmod(0o2777)
    path.chmod(0o666)
    before = sorted(os.listdir(empty_library))
    with caplog.at_level(logging.WARNING, "fla_kda_backend"):
        assert library.launcher(variant())() == "from the file" and built == [] and not caplog.records
        assert library.launcher(variant(bv=64))() == "from memory"
    assert sorted(os.listdir(empty_library)) == before and path.stat().st_mtime == 1e9
    assert "so it is only read" in caplog.text


@pytest.mark.parametrize("problem", [OSError(28, "No space left on device"), OSError(30, "Read-only file system")])
def test_what_cannot_be_kept_runs_all_the_same(problem, empty_library, built, loaded, caplog, monkeypatch):
    def add(self, spec, library, **more):
        raise problem

    monkeypatch.setattr(disk.Directory, "add", add)
    with caplog.at_level(logging.INFO, "fla_kda_backend"):
        for spec in (variant(), variant(bv=64)):
            assert library.launcher(spec)() == "from memory"
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert problem.strerror in warning.getMessage()


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write everywhere")
def test_a_directory_that_cannot_be_written(empty_library, built, loaded):
    empty_library.mkdir(mode=0o555)
    assert library.launcher(variant())() == "from memory" and os.listdir(empty_library) == []


def test_a_directory_that_cannot_be_made(empty_library, built, loaded, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLA_KDA_CUTE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert library.launcher(variant())() == "from memory"


def test_where_nothing_can_be_linked_it_is_said_once(empty_library, built, loaded, caplog, monkeypatch):
    def link(function):
        raise linking.Unlinkable("no compiler here")

    monkeypatch.setattr(builder, "link", link)
    with caplog.at_level(logging.INFO, "fla_kda_backend"):
        for spec in (variant(), variant(bv=64)):
            assert library.launcher(spec)() == "from memory"
    (record,) = [record for record in caplog.records if "no compiler here" in record.getMessage()]
    assert record.levelno == logging.INFO


def test_the_directory_stays_within_its_size(empty_library, built, loaded, monkeypatch):
    monkeypatch.setattr(builder, "link", lambda function: (LIBRARY + bytes(300_000), "nobody"))
    monkeypatch.setenv("FLA_KDA_CUTE_CACHE_MIB", "1")
    for stages in range(2, 8):
        assert library.launcher(variant(stages=stages))() == "from the file"
        os.utime(empty_library / variant(stages=stages).file_name, (time.time() - 100 + stages,) * 2)
    left = [kernel.spec for kernel in disk.Directory(empty_library).stored()]
    assert left == [variant(stages=stages) for stages in (7, 6, 5)]


def test_a_failed_compilation_is_not_tried_again(empty_library, built, loaded, monkeypatch):
    """A compilation takes seconds, and every call that falls back would pay for it."""
    tried = []

    def fail(spec, keep=True):
        tried.append(spec)
        raise OSError("no compiler here")

    working = builder.build
    monkeypatch.setattr(builder, "build", fail)
    with pytest.raises(OSError):
        library.launcher(variant())
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"{re.escape(str(variant()))} could not be compiled: OSError: no compiler here"):
            library.launcher(variant())
    assert tried == [variant()] and library.loaded() == {}
    monkeypatch.setattr(builder, "build", working)
    library.launcher(variant(bv=64))  # nothing is wrong with the others
    assert built == [variant(bv=64)]


# ---- threads and forks -----------------------------------------------------------------------------------------------
def test_threads_compile_a_kernel_once(empty_library, built, loaded):
    functions = []
    threads = [threading.Thread(target=lambda: functions.append(library.launcher(variant()))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == [variant()] and len(functions) == 8 and len(set(functions)) == 1


@pytest.fixture
def compiling(empty_library, built, loaded, monkeypatch):
    """A thread that compiles variant(bv=64), until .go is set."""
    begun, go, build = threading.Event(), threading.Event(), builder.build

    def slow(spec, keep=True):
        if spec == variant(bv=64):
            begun.set()
            assert go.wait(60)
        return build(spec, keep)

    monkeypatch.setattr(builder, "build", slow)
    thread = threading.Thread(target=library.launcher, args=(variant(bv=64),))
    thread.start()
    assert begun.wait(60)
    yield types.SimpleNamespace(go=go, thread=thread)
    go.set()
    thread.join()


def test_a_stored_kernel_does_not_wait_for_another_ones_compilation(compiling, empty_library):
    disk.Directory(empty_library).add(variant(), LIBRARY)
    assert library.launcher(variant())() == "from the file" and compiling.thread.is_alive()


def test_a_child_forked_during_a_compilation(compiling, empty_library):
    """It inherits locks that no thread of it will ever give back, and must not keep the parent's alive."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            library.WAIT = 0.2  # the parent holds the file's lock, rightly
            compiling.go.set()
            status = library.launcher(variant(bv=64))() != "from the file" or bool(locks._held)
        finally:
            os._exit(status)
    begin = time.monotonic()
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0:
        assert time.monotonic() < begin + 60, os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(done[1]) == 0


# ---- many processes --------------------------------------------------------------------------------------------------
PROCESS = """
import json, os, sys, threading, time, types
from pathlib import Path
from fla_kda_backend.compiling import KernelSpec, builder, library
spec = KernelSpec.of("column_split", "sm_90a")
folder, seconds = Path(sys.argv[1]), float(sys.argv[2])

def build(spec, keep=True):
    with open(folder / "compiled", "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(seconds)
    return builder.Artifact(lambda *arguments: "from memory", None, None, {})

builder.build = build
builder.link = lambda function: (b"a library" * 1000, "nobody")
sys.modules["tvm_ffi"] = types.SimpleNamespace(load_module=lambda path: {"launch": lambda: "from the file"})
print("ready", flush=True)
sys.stdin.readline()
print(json.dumps(library.launcher(spec)()), flush=True)
"""


class Processes(list):
    """Interpreters that run PROCESS, and wait for .start()."""

    def __init__(self, number, folder, seconds):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "FLA_KDA_CUTE_CACHE_DIR": str(folder / "cache")}
        command = [sys.executable, "-c", PROCESS, folder, str(seconds)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        super().__init__(subprocess.Popen(command, env=environment, **pipes) for _ in range(number))
        for process in self:
            assert process.stdout.readline() == "ready\n"

    def start(self):
        for process in self:
            process.stdin.write("go\n")
            process.stdin.flush()

    def answers(self):
        return [process.communicate(timeout=60)[0].strip() for process in self]


def compilers(folder):
    return (folder / "compiled").read_text().split()


@pytest.mark.parametrize("number", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_of_many_processes_one_compiles(number, tmp_path):
    processes = Processes(number, tmp_path, 0.5)
    processes.start()
    assert processes.answers() == ['"from the file"'] * number and len(compilers(tmp_path)) == 1


def test_a_process_killed_while_it_compiles_leaves_nothing_in_the_way(tmp_path):
    first = Processes(1, tmp_path, 60)
    first.start()
    (killed,) = first
    limit = time.monotonic() + 30
    while not (tmp_path / "compiled").exists() and time.monotonic() < limit:
        time.sleep(0.01)
    waiting = Processes(2, tmp_path, 0.1)
    waiting.start()
    time.sleep(0.3)
    assert compilers(tmp_path) == [str(killed.pid)]  # the others wait for it
    killed.kill()
    assert killed.wait(30) == -signal.SIGKILL
    assert waiting.answers() == ['"from the file"'] * 2 and len(compilers(tmp_path)) == 2
    (kernel,) = disk.Directory(tmp_path / "cache").stored()
    assert kernel.problem is None
    killed.stdin.close(), killed.stdout.close()


def test_another_process_is_not_waited_for_for_ever(empty_library, built, loaded, monkeypatch, caplog):
    monkeypatch.setattr(library, "WAIT", 0.1)
    with locks.FileLock(disk.Directory(empty_library).lock_path(variant())) as lock:
        assert not lock.busy()
        assert library.launcher(variant())() == "from the file" and built == [variant()]
    assert "not waiting any longer" in caplog.text


def test_a_file_system_without_locks(empty_library, built, loaded, monkeypatch):
    def flock(descriptor, operation):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(locks.fcntl, "flock", flock)
    assert library.launcher(variant())() == "from the file" and built == [variant()]


REAL = """
import json, sys, time
import torch
from fla_kda_backend.compiling import KernelSpec, library
begin = time.perf_counter()
spec = KernelSpec.of("column_split", "sm_90a")
launch = library.launcher(spec)
print(json.dumps([time.perf_counter() - begin, "cutlass" in sys.modules, library.loaded()[spec]]))
"""


@pytest.mark.slow
@pytest.mark.skipif(dsl_version() is None or linking.missing() is not None, reason="needs the CuTe DSL and a linker")
def test_processes_with_the_real_compiler(tmp_path):
    environment = {"PYTHONPATH": ROOT, "FLA_KDA_CUTE_CACHE_DIR": tmp_path / "cache", "TORCH_DEVICE_BACKEND_AUTOLOAD": 0}
    results = []
    threads = [threading.Thread(target=lambda: results.append(interpreters.result(REAL, **environment))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    path = tmp_path / "cache" / variant().file_name
    assert sorted(imported for _, imported, _ in results) == [False, False, True]  # one compiled, the others loaded
    assert {source for _, _, source in results} == {str(path)}
    seconds, imported, _ = min(interpreters.result(REAL, **environment) for _ in range(2))
    assert not imported
    assert seconds < 0.2  # a tenth of that where this was written; the machine may be slower, and busy
