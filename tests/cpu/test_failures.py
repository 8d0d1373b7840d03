"""What fails on the way of an accepted call: what is remembered of it, when it is tried again, and what outlives the call.

Through FLA's own dispatch, on CPU tensors that pass for an H200's, with a compiler that can fail in the test's way.
"""

import errno
import gc
import logging
import tempfile
import types
import warnings
import weakref

import pytest
import torch
from calls import H200, prefill
from fake_compiler import LIBRARY

import fla_kda_backend
from fla_kda_backend import config, dispatch_log, facts, failures, op, selfcheck
from fla_kda_backend.compiling import KernelSpec, background, builder, disk, library, linking

FULL = OSError(errno.ENOSPC, "No space left on device")
TRITON = ("FLA's Triton", None)


class Kept(logging.Handler):
    """As handlers that send records later: it keeps them."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.records = []

    def emit(self, record):
        self.records.append(record)

    def warnings(self):
        return [record.getMessage() for record in self.records if record.levelno == logging.WARNING]


@pytest.fixture
def kept():
    logger, handler = logging.getLogger("fla_kda_backend"), Kept()
    logger.addHandler(handler)
    level, logger.propagate = logger.level, False  # the test runner's own handler may keep what it likes
    logger.setLevel(logging.DEBUG)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)
    logger.propagate = True


@pytest.fixture
def clock(monkeypatch):
    """The monotonic clock; .time can be moved."""
    clock = types.SimpleNamespace(time=1000.0)
    monkeypatch.setattr(failures, "now", lambda: clock.time)
    return clock


@pytest.fixture
def world(monkeypatch, empty_library, built, loaded, kept, clock):
    """.call() is chunk_kda of an eligible prefill. An error in .compiling, .launching or .allocating is raised there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FLA's, about a machine without a GPU
        import fla.ops.kda.chunk as chunk
    from fla_kda_backend import backend

    world = types.SimpleNamespace(compiling=None, launching=None, allocating=None, built=built, launched=[], clock=clock)
    world.folder, world.kept, world.chunk_kda = empty_library, kept, chunk.chunk_kda
    world.fallback = lambda: TRITON
    world.capability = H200.capability

    def launch(*arguments):
        world.launched.append(arguments)
        if world.launching is not None:
            raise world.launching()

    def build(spec, keep=True):
        built.append(spec)
        if world.compiling is not None:
            raise world.compiling()
        return builder.Artifact(launch, None, None, {})

    def allocate(shape, strides, dtype):
        if world.allocating is not None and dtype == torch.uint8:
            raise world.allocating()
        return torch.empty(shape, dtype=dtype)

    monkeypatch.setattr(builder, "build", build)
    monkeypatch.setattr(library, "_store", lambda *arguments: False)
    monkeypatch.setattr(chunk.ChunkKDAFunction, "apply", lambda *args: world.fallback())
    monkeypatch.setattr(backend, "_warned", set())
    monkeypatch.setattr(facts, "device_facts", lambda device: (world.capability, H200.sm_count))
    monkeypatch.setattr(op, "_current_device", lambda: None)  # as the index of a CPU
    monkeypatch.setattr(op, "_stream_handle", lambda index: 7)
    monkeypatch.setattr(op.Launch, "_allocator", lambda self: allocate)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: world.capability)
    assert fla_kda_backend.register()
    world.call = lambda **changes: chunk.chunk_kda(**prefill(device="cpu", **changes))
    with dispatch_log.capture() as world.seen, torch.no_grad():
        yield world


def codes(world):
    return [(record.outcome, record.code) for record in world.seen]


def raising(kind, *arguments):
    return lambda: kind(*arguments)


# ---- what outlives a call --------------------------------------------------------------------------------------------
PATHS = {
    "compile": {"compiling": raising(ValueError, "cannot be compiled")},
    "passing": {"compiling": raising(OSError, *FULL.args)},
    "launch": {"launching": raising(RuntimeError, "CUDA error 1: invalid argument")},
    "driver": {"launching": raising(RuntimeError, "CUDA error 35: driver version is insufficient")},
    "sticky": {"launching": raising(RuntimeError, "CUDA error 700: an illegal memory access was encountered")},
    "allocation": {"allocating": raising(torch.OutOfMemoryError, "CUDA out of memory.")},
    "fallback": {"launching": raising(RuntimeError, "no"), "fallback": lambda: 1 / 0},
}


class Local:
    pass


@pytest.mark.parametrize("where", ["in place", "background", "strict"])
@pytest.mark.parametrize("path", PATHS)
def test_no_tensor_and_no_local_outlives_a_failure(world, monkeypatch, path, where):
    if where == "background":
        monkeypatch.setenv(config.COMPILE.name, "background")
    if where == "strict":
        monkeypatch.setenv(config.STRICT.name, "1")
    for name, value in PATHS[path].items():
        setattr(world, name, value)

    def caller():
        local, arguments = Local(), prefill(device="cpu")
        held = [weakref.ref(x) for x in (local, arguments["q"], arguments["initial_state"])]
        for _ in range(5):
            try:
                world.chunk_kda(**arguments)
            except (RuntimeError, OSError, ValueError, ZeroDivisionError):
                pass
            limit = failures.time.monotonic() + 60
            while background._waiting and failures.time.monotonic() < limit:
                failures.time.sleep(0.001)
        return held

    held = caller()
    gc.collect()
    assert [each() for each in held] == [None] * 3
    assert world.seen  # a handler that keeps log records keeps no frame


def test_library_keeps_a_text(empty_library, built, monkeypatch):
    monkeypatch.setattr(builder, "build", lambda spec, keep: 1 / 0)

    def caller():
        local = Local()
        with pytest.raises(ZeroDivisionError):
            library.launcher(KernelSpec.of("column_split", "sm_90a"))
        return weakref.ref(local)

    held = caller()
    gc.collect()
    assert held() is None


# ---- how often it is tried -------------------------------------------------------------------------------------------
def test_a_launch_that_fails_each_time_is_declined_after_three(world):
    world.launching = raising(RuntimeError, "no more shared memory")
    assert [world.call(tokens=80 + n) for n in range(100)] == [TRITON] * 100
    assert codes(world) == [("failed", "exception")] * 3 + [("declined", "failing")] * 97
    assert len(world.launched) == 3
    (warning,) = world.kept.warnings()
    assert "no more shared memory" in warning and "Traceback" in warning
    assert world.seen[-1].message == ("such a call failed before and is not tried again: RuntimeError: no more shared memory")
    world.clock.time += 1e6
    assert world.call() == TRITON and len(world.launched) == 3


def test_strict_mode_raises_each_time(world, monkeypatch):
    world.launching = raising(RuntimeError, "no more shared memory")
    for _ in range(5):
        world.call()
    monkeypatch.setenv(config.STRICT.name, "1")
    for _ in range(5):
        with pytest.raises(RuntimeError, match="no more shared memory"):
            world.call()
    assert codes(world)[5:] == [("failed", "exception")] * 5
    world.launching = None
    assert isinstance(world.call()[0], torch.Tensor)
    monkeypatch.delenv(config.STRICT.name)
    assert isinstance(world.call()[0], torch.Tensor)


def test_a_launch_that_succeeds_begins_the_count_anew(world):
    for _ in range(4):
        for _ in range(2):
            world.launching = raising(RuntimeError, "now and then")
            assert world.call() == TRITON
        world.launching = None
        assert isinstance(world.call()[0], torch.Tensor)
    assert len(world.kept.warnings()) == 1 and ("declined", "failing") not in codes(world)


def test_other_calls_are_not_declined_with_it(world):
    world.compiling = raising(ValueError, "cannot be compiled")
    for _ in range(4):
        world.call()
    world.compiling = None
    assert world.call() == TRITON and isinstance(world.call(initial_state=None)[0], torch.Tensor)
    assert len(world.built) == 2  # a compilation takes seconds, and gives the same again
    assert len(world.kept.warnings()) == 1


PASSING = [OSError(*FULL.args), MemoryError(), FileNotFoundError(2, "No usable temporary directory found in ['/tmp']"),
           RuntimeError("LLVM ERROR: IO failure on output stream: No space left on device")]  # fmt: skip


@pytest.mark.parametrize("cause", PASSING, ids=lambda cause: type(cause).__name__)
def test_a_passing_cause_is_gone_at_the_next_call(world, cause):
    world.compiling = lambda: cause.with_traceback(None)
    assert world.call() == TRITON
    world.compiling = None
    assert isinstance(world.call()[0], torch.Tensor)


@pytest.mark.parametrize("how", ["in_place", "background"])
def test_a_passing_cause_that_stays_is_tried_each_minute(world, monkeypatch, how):
    monkeypatch.setenv(config.COMPILE.name, how)
    world.compiling = raising(OSError, *FULL.args)

    def several():
        for _ in range(20):
            assert world.call() == TRITON
            while background._waiting:
                failures.time.sleep(0.001)

    several()
    assert len(world.built) == 3 and codes(world)[-1] == ("declined", "failing")
    assert "is tried again within 60 s" in world.seen[-1].message and "No space left" in world.seen[-1].message
    world.clock.time += failures.RETRY + 1
    several()
    assert len(world.built) == 4
    world.compiling = None
    several()
    world.clock.time += failures.RETRY + 1
    for _ in range(2):
        found = world.call()
        while background._waiting:
            failures.time.sleep(0.001)
    assert isinstance(found[0], torch.Tensor) and len(world.built) == 5
    assert len(world.kept.warnings()) == 1


# ---- the CUDA context, and the driver --------------------------------------------------------------------------------
STICKY = [
    "CUDA error 700: an illegal memory access was encountered",
    "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported",
    "CUDA error: device-side assert triggered",
    "CUDA error: unspecified launch failure",
    "CUDA error: misaligned address",
    "CUDA error 719: unspecified launch failure",
    "cudaErrorIllegalAddress",
    "DSLCudaRuntimeError: cudaErrorLaunchFailure (error code: 719)",
    "CUDA driver error: CUDA_ERROR_ILLEGAL_ADDRESS",
    "Triton Error [CUDA]: an illegal memory access was encountered",
]
NOT_STICKY = [
    "CUDA error 1: invalid argument", "CUDA error 2: out of memory", "CUDA out of memory. Tried to allocate 2.00 GiB.",
    "CUDA error: no kernel image is available for execution on the device", "CUDA error 9: invalid configuration argument",
    "CUDA error 35: CUDA driver version is insufficient for CUDA runtime version", "misaligned address in the archive",
    "CUDA error 720: too many blocks in cooperative launch", "a planted failure",
    "CUDA error: operation not permitted when stream is capturing",
]  # fmt: skip


@pytest.mark.parametrize("kind", [RuntimeError, torch.AcceleratorError])
def test_which_errors_are_sticky(kind):
    assert all(failures.is_sticky(kind(text)) for text in STICKY)
    assert not any(failures.is_sticky(kind(text)) for text in NOT_STICKY)
    assert not any(failures.is_passing(kind(text)) for text in STICKY)
    coded = kind("CUDA error")
    coded.error_code = 700
    assert failures.is_sticky(coded)
    coded.error_code = 1
    assert not failures.is_sticky(coded)


@pytest.mark.parametrize("text", STICKY)
def test_a_sticky_error_is_raised_as_it_is(world, text):
    error = RuntimeError(text)
    world.launching, world.fallback = lambda: error, lambda: pytest.fail("nothing can run on a dead context")
    for _ in range(5):
        with pytest.raises(RuntimeError) as raised:
            world.call()
        assert raised.value is error
    assert codes(world) == [("failed", "exception")] * 5


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_a_sticky_error_in_the_decision_is_raised_as_it_is(world, monkeypatch, capability):
    error = torch.AcceleratorError("CUDA error: device-side assert triggered")
    world.capability, world.fallback = capability, lambda: pytest.fail("nothing can run on a dead context")

    def fail(*arguments):
        raise error

    if capability == (9, 0):
        monkeypatch.setattr(facts, "gather", fail)
    else:
        monkeypatch.setattr(selfcheck, "compare", fail)
        monkeypatch.setattr(torch.cuda, "device", lambda device: warnings.catch_warnings())
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with pytest.raises(torch.AcceleratorError) as raised:
        world.call()
    assert raised.value is error


def test_a_driver_that_is_too_old_is_one_clear_reason(world):
    world.launching = raising(RuntimeError, "CUDA error 35: CUDA driver version is insufficient for CUDA runtime version")
    for changes in ({}, {"initial_state": None}, {"tokens": 3}, {}):
        assert world.call(**changes) == TRITON
    assert codes(world) == [("failed", "exception")] + [("declined", "failing")] * 3 and len(world.launched) == 1
    assert all("needs driver 580" in record.message for record in world.seen)
    assert len(world.kept.warnings()) == 1


def test_a_stored_kernel_that_the_driver_refuses_is_not_compiled(world, monkeypatch):
    def load(*arguments):
        raise RuntimeError("CUDA error 35: CUDA driver version is insufficient for CUDA runtime version")

    world.call()
    (spec,) = world.built
    disk.Directory(world.folder).add(spec, LIBRARY)
    library._functions.clear()
    fla_kda_backend.memo.clear()
    monkeypatch.setattr(library, "load", load)
    assert world.call() == world.call() == TRITON
    assert world.built == [spec] and "needs driver 580" in world.kept.warnings()[0]


# ---- places to write -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["no home", "~nobody"])
def test_without_a_cache_directory_it_is_compiled_in_memory(world, monkeypatch, how):
    if how == "no home":
        for name in ("HOME", "XDG_CACHE_HOME", config.CACHE_DIR.name):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])  # no such entry
    else:
        monkeypatch.setenv(config.CACHE_DIR.name, "~nobody-of-this-name/x")
    for changes in ({}, {"initial_state": None}):
        assert isinstance(world.call(**changes)[0], torch.Tensor)
    assert codes(world) == [("accepted", "accepted")] * 2 and set(library.loaded().values()) == {"compiled"}
    (warning,) = world.kept.warnings()
    assert warning.startswith("compiled kernels are not kept: ") and config.CACHE_DIR.name in warning


@pytest.fixture
def no_temporary_directory(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "missing")])


def test_without_a_temporary_directory_it_is_compiled_in_shared_memory(world, monkeypatch, no_temporary_directory, tmp_path):
    shared, places, build = tmp_path / "shm", [], builder.build
    shared.mkdir()
    monkeypatch.setattr(library, "SHARED_MEMORY", str(shared))
    monkeypatch.setattr(builder, "build", lambda spec, keep: places.append(tempfile.gettempdir()) or build(spec, keep))
    assert isinstance(world.call()[0], torch.Tensor)
    assert places == [str(shared)] and tempfile.tempdir is None


def test_where_nothing_can_be_written_a_stored_kernel_loads(world, no_temporary_directory, monkeypatch, loaded):
    world.call(initial_state=None)
    (spec,) = world.built
    disk.Directory(world.folder).add(spec, LIBRARY)
    library._functions.clear()
    fla_kda_backend.memo.clear()
    monkeypatch.setattr(library, "SHARED_MEMORY", "/nowhere")
    assert isinstance(world.call(initial_state=None)[0], torch.Tensor) and loaded == [LIBRARY]
    world.compiling = lambda: tempfile.mkdtemp() and None  # as the compiler would
    for _ in range(5):
        assert world.call() == TRITON
    assert "No usable temporary directory" in world.seen[-1].message and codes(world)[-1] == ("declined", "failing")


@pytest.mark.slow
@pytest.mark.skipif(linking.missing() is not None, reason="needs the CuTe DSL and a linker")
def test_the_real_compiler_without_a_temporary_directory(empty_library, no_temporary_directory):
    spec = KernelSpec.of("column_split", "sm_90a")
    assert library.launcher(spec) is not None


# ---- GPUs that are checked first -------------------------------------------------------------------------------------
def test_a_check_that_fails_for_a_passing_cause_is_made_again(world, monkeypatch):
    world.capability, made = (10, 0), []

    def compare(*arguments):
        made.append(arguments)
        if len(made) <= 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return [0.0, 0.0]

    monkeypatch.setattr(selfcheck, "_decisions", {})
    monkeypatch.setattr(selfcheck, "compare", compare)
    monkeypatch.setattr(torch.cuda, "device", lambda device: warnings.catch_warnings())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for _ in range(10):
        assert world.call() == TRITON
    assert codes(world) == [("declined", "untested_later")] * 10 and len(made) == 3
    world.clock.time += failures.RETRY + 1
    assert isinstance(world.call()[0], torch.Tensor) and len(made) == 4


# ---- what is remembered ----------------------------------------------------------------------------------------------
def test_memory_of_failures_is_bounded(clock):
    memory = failures.Failures()
    for number in range(failures.LIMIT + 20):
        for _ in range(3):
            memory.note(number, ValueError("x" * 2 * failures.LONGEST))
    assert memory.standing(number).lasting and len(memory._kept) <= failures.LIMIT
    assert all(len(kept.text) <= 2 * failures.LONGEST for kept in memory._kept.values())


def test_the_cause_of_an_error_counts():
    def wrapped(hidden):
        try:
            try:
                raise OSError(*FULL.args)
            except OSError as error:
                raise ValueError("cannot be compiled") from (None if hidden else error)
        except ValueError as error:
            return error

    assert failures.is_passing(wrapped(hidden=False)) and not failures.is_passing(wrapped(hidden=True))
    assert not failures.is_passing(OSError("no compiler here"))
