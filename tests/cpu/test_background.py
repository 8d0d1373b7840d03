"""FLA_KDA_CUTE_COMPILE=background: calls run elsewhere, and say so, until a thread has compiled their kernel.

Through FLA's own dispatch, on CPU tensors that pass for an H200's, with a compiler that waits to be let go.
"""

import json
import logging
import os
import threading
import time
import types
import warnings
from pathlib import Path

import interpreters
import pytest
import torch
from calls import H200, prefill
from fake_compiler import LIBRARY

import fla_kda_backend
from fla_kda_backend import config, dispatch_log, facts, memo, op, selfcheck
from fla_kda_backend.compiling import background, builder, disk, library

ROOT = Path(fla_kda_backend.__file__).parent.parent


@pytest.fixture
def world(monkeypatch, empty_library, built, loaded):
    """.call() is chunk_kda of an eligible prefill; the compiler waits for .go; .launched are the kernels' launches."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FLA's, about a machine without a GPU
        import fla.ops.kda.chunk as chunk
    from fla_kda_backend import backend

    world = types.SimpleNamespace(go=threading.Event(), launched=[], built=built, folder=empty_library, failure=None)
    world.capability = H200.capability

    def build(spec, keep=True):
        assert world.go.wait(60)
        built.append(spec)
        if world.failure is not None:
            raise world.failure
        return builder.Artifact(lambda *arguments: world.launched.append(spec), None, None, {})

    monkeypatch.setattr(builder, "build", build)
    monkeypatch.setattr(library, "_store", lambda *arguments: False)
    monkeypatch.setattr(chunk.ChunkKDAFunction, "apply", lambda *args: ("FLA's Triton", None))
    monkeypatch.setattr(backend, "_warned", set())
    monkeypatch.setattr(facts, "device_facts", lambda device: (world.capability, H200.sm_count))
    monkeypatch.setattr(op, "_current_device", lambda: None)  # as the index of a CPU
    monkeypatch.setattr(op, "_stream_handle", lambda index: 7)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: world.capability)
    monkeypatch.setenv(config.COMPILE.name, "background")
    assert fla_kda_backend.register()
    world.chunk_kda = chunk.chunk_kda
    world.call = lambda **changes: chunk.chunk_kda(**prefill(device="cpu", **changes))
    with dispatch_log.capture() as world.seen, torch.no_grad():
        yield world
    world.go.set()
    settle()


def settle():
    limit = time.monotonic() + 60
    while background._waiting and time.monotonic() < limit:
        time.sleep(0.01)
    assert not background._waiting


def codes(world):
    return [(record.outcome, record.code) for record in world.seen]


def test_calls_go_elsewhere_until_the_kernel_is_ready(world):
    for _ in range(3):
        assert world.call() == ("FLA's Triton", None)
    assert codes(world) == [("declined", "compiling")] * 3 and not memo._verdicts
    assert world.seen[0].message.startswith("compiling wy64 (") and "in the background" in world.seen[0].message
    world.go.set()
    settle()
    assert isinstance(world.call()[0], torch.Tensor) and codes(world)[3:] == [("accepted", "accepted")]
    assert len(world.built) == len(world.launched) == 1 and len(memo._verdicts) == 1
    assert background._worker is None  # nothing runs on for nothing


def test_kernels_are_compiled_one_after_the_other(world):
    for changes in ({}, {"initial_state": None}, {}, {"output_final_state": False}):
        world.call(**changes)
    assert len(background._waiting) == 3 and len([t for t in threading.enumerate() if "fla_kda" in t.name]) == 1
    world.go.set()
    settle()
    assert len(world.built) == len(set(world.built)) == 3


def test_a_stored_kernel_runs_at_once(world):
    world.call()
    (spec,) = background._waiting
    world.go.set()
    settle()
    disk.Directory(world.folder).add(spec, LIBRARY)
    library._functions.clear(), library._sources.clear()
    world.built.clear()
    world.go.clear()
    assert isinstance(world.call()[0], torch.Tensor) and world.built == []


def test_in_place_is_the_default(world, monkeypatch):
    monkeypatch.delenv(config.COMPILE.name)
    world.go.set()
    assert isinstance(world.call()[0], torch.Tensor) and codes(world) == [("accepted", "accepted")]


def test_strict_mode_waits(world, monkeypatch):
    monkeypatch.setenv(config.STRICT.name, "1")
    threading.Timer(0.1, world.go.set).start()
    assert isinstance(world.call()[0], torch.Tensor) and codes(world) == [("accepted", "accepted")]


def test_a_failure_is_told_once(world, caplog):
    world.failure = OSError("no compiler here")
    with caplog.at_level(logging.WARNING, "fla_kda_backend"):
        world.call()
        world.go.set()
        settle()
        for _ in range(3):
            assert world.call() == ("FLA's Triton", None)
    assert codes(world) == [("declined", "compiling")] + [("failed", "exception")] * 3
    (warning,) = [record for record in caplog.records if "no compiler here" in record.getMessage()]
    assert len(world.built) == 1


def test_a_call_without_tokens_needs_no_kernel(world):
    world.call(tokens=0)
    assert codes(world) == [("accepted", "accepted")] and not background._waiting


def test_a_gpu_that_is_checked_first_waits_for_both_kernels(world, monkeypatch):
    """The check runs a call of its own; it is not to compile in place either."""
    world.capability = (10, 0)
    checked = []
    monkeypatch.setattr(selfcheck, "decision", lambda *args: checked.append(args) or selfcheck.ACCEPTED)
    world.call(initial_state=None)
    assert codes(world) == [("declined", "compiling")] and len(background._waiting) == 2 and not checked
    assert {spec.arch for spec in background._waiting} == {"sm_100a"}
    world.go.set()
    settle()
    world.call(initial_state=None)
    assert codes(world)[1:] == [("accepted", "accepted")] and len(checked) == 1


def test_a_forked_child_starts_a_thread_of_its_own(world, monkeypatch):
    monkeypatch.setattr(library, "WAIT", 0.2)  # for the parent, which goes on compiling and holds the kernel's lock
    arguments = prefill(device="cpu")  # torch's own threads do not survive a fork either: here nothing is computed after it
    world.chunk_kda(**arguments)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            world.chunk_kda(**arguments)
            world.go.set()
            settle()
            world.chunk_kda(**arguments)
            status = codes(world) != [("declined", "compiling")] * 2 + [("accepted", "accepted")]
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


END = """
import atexit, json, sys, threading, time, types
atexit.register(lambda: print(json.dumps(done), flush=True))  # the last to be called
from fla_kda_backend.compiling import KernelSpec, background, builder, library
done = []

def build(spec, keep=True):
    started.set()
    time.sleep(0.5)
    done.append(spec.schedule.bv)
    return builder.Artifact(print, None, None, {})

builder.build, started = build, threading.Event()
for bv in (32, 64, 128):
    assert not background.ready(KernelSpec.of("column_split", "sm_90a", bv=bv))
started.wait()
"""


def test_a_process_that_ends_lets_the_compiler_finish_and_begins_nothing(tmp_path):
    done = interpreters.run(END, PYTHONPATH=ROOT, FLA_KDA_CUTE_CACHE_DIR="off", TORCH_DEVICE_BACKEND_AUTOLOAD=0)
    assert done.returncode == 0 and json.loads(done.stdout) == [32], done.stderr
