"""Registration with the installed FLA in fresh interpreters: import routes, by hand, switched off, child processes."""

import json
import os
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from interpreters import result, run

import fla_kda_backend

STATE = """
import fla_kda_backend._autoload as autoload
def state():
    from fla_kda_backend import registration
    return [autoload.status()[0], registration.order()]
"""
PRINT = "import json; print(json.dumps(state()))"
OFF = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
IN_CHILD = "__import__('fla.ops.kda') and __import__('fla_kda_backend.registration').registration.order()"

ROUTES = ("fla", "fla.ops", "fla.ops.kda", "fla.ops.kda.chunk", "fla.layers")

# name -> script, environment
SCRIPTS = {
    **{route: (f"import {route}\n{STATE}{PRINT}", {}) for route in ROUTES},
    "torch first": (f"import torch\n{STATE}assert state()[0] == 'waiting'\nimport fla.ops.kda\n{PRINT}", {}),
    "opt-out": (f"import torch, fla.ops.kda\n{STATE}{PRINT}", OFF),
    "by hand, after": (
        f"import fla.ops.kda, fla_kda_backend\n{STATE}assert fla_kda_backend.register()\n{PRINT}",
        OFF,
    ),
    "by hand, before": (
        f"import fla_kda_backend, torch\n{STATE}assert not fla_kda_backend.register()\nimport fla.layers\n{PRINT}",
        OFF,
    ),
    "dispatch disabled": (
        f"import fla.ops.kda, fla_kda_backend\n{STATE}assert not fla_kda_backend.register()\n{PRINT}",
        {"FLA_DISABLE_BACKEND_DISPATCH": "1"},
    ),
    "fork": (
        f"""
import json, os, torch
{STATE}
def in_fork(action):
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, json.dumps(action()).encode())
        os._exit(0)
    return json.loads(os.read(read, 10_000))
def late():
    import fla.ops.kda
    return state()
waiting = in_fork(late)
import fla.ops.kda
print(json.dumps([waiting, in_fork(state), state()]))
""",
        {},
    ),
    "spawn": (
        f"""
import json, multiprocessing, torch
from concurrent.futures import ProcessPoolExecutor
with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
    print(json.dumps(pool.submit(eval, {IN_CHILD!r}).result()))
""",
        {},
    ),
    "torch.compile worker": (
        f"""
import json
from torch._inductor.compile_worker.subproc_pool import SubprocPool
pool = SubprocPool(1)
print(json.dumps(pool.submit(eval, {IN_CHILD!r}).result()))
pool.shutdown()
""",
        {},
    ),
}


@pytest.fixture
def outcome():
    """outcome(name) runs a script, which takes the seconds that FLA's import takes, and returns what it printed."""
    return lambda name: result(SCRIPTS[name][0], **SCRIPTS[name][1])


def slow_apart_from(fast, names):
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


def test_entry_point_is_installed():
    (ours,) = [point for point in entry_points(group="torch.backends") if point.name == "fla_kda_backend"]
    assert ours.value == "fla_kda_backend._autoload:register"


ALL_ROUTES = (*ROUTES, "torch first", "by hand, after", "by hand, before")


@pytest.mark.parametrize("route", slow_apart_from(("fla.ops.kda",), ALL_ROUTES))
def test_registered_ahead_of_flashkda(outcome, route):
    assert outcome(route) == ["registered", ["kda_cute", "flash_kda"]]


def test_opt_out(outcome):
    state, order = outcome("opt-out")
    assert state == "off"
    assert order == []


@pytest.mark.slow
def test_fla_without_dispatch_is_told_from_a_registration(outcome):
    assert outcome("dispatch disabled") == ["dispatch_disabled", []]


@pytest.mark.slow
def test_forked_children_have_it_before_and_after_fla(outcome):
    assert outcome("fork") == [["registered", ["kda_cute", "flash_kda"]]] * 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["spawn", "torch.compile worker"])
def test_new_child_processes_have_it(outcome, kind):
    assert outcome(kind) == ["kda_cute", "flash_kda"]


# What an FLA that we do not know looks like: modules of a small package of that name.
BACKENDS = "class BaseBackend:\n    pass\ndef register(entry_point):\n    return lambda backend: backend\n"
UNKNOWN = {
    "no register": ({"backends": "", "chunk": "def chunk_kda(q): pass"}, "FLA has no fla.backends.register"),
    "no chunk_kda": ({"backends": BACKENDS, "chunk": "chunk = None"}, "fla.ops.kda defines no chunk_kda"),
    "other signature": (
        {"backends": BACKENDS, "chunk": "def chunk_kda(q, k, v, beta, g): pass"},
        "chunk_kda of this FLA takes q, k, v, beta, g; known is q, k, v, g, beta, scale",
    ),
    "register raises": (
        {
            "backends": BACKENDS + "def register(entry_point):\n    raise ValueError('full')",
            "chunk": "from fla_kda_backend import call\nexec(f'def chunk_kda({\", \".join(call.POSITIONAL)}, **kwargs): pass')",
        },
        "ValueError: full",
    ),
}


@pytest.mark.parametrize("name", slow_apart_from(("other signature",), UNKNOWN))
def test_failure_is_kept_and_warned_of_once(tmp_path, name):
    modules, cause = UNKNOWN[name]
    kda = tmp_path / "fla" / "ops" / "kda"
    kda.mkdir(parents=True)
    for package in (tmp_path / "fla", tmp_path / "fla" / "ops"):
        (package / "__init__.py").write_text("")
    (tmp_path / "fla" / "backends.py").write_text(modules["backends"])
    (kda / "chunk.py").write_text(modules["chunk"])
    (kda / "__init__.py").write_text("from . import chunk\n")
    script = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import json, torch, fla.ops.kda, fla_kda_backend._autoload as autoload
autoload.register()
print(json.dumps(autoload.status()))
"""
    done = run(script)
    assert done.returncode == 0, done.stderr
    state, detail = json.loads(done.stdout)
    assert state == "failed"
    assert cause in detail
    assert done.stderr.count("kda_cute is not registered with FLA") == 1
    assert cause in done.stderr


# ---- what is imported with FLA ---------------------------------------------------------------------------------------
PRELOAD = """
import json, os, sys, torch
from fla_kda_backend import facts, registration
assert "tvm_ffi" not in sys.modules
facts.device_facts = lambda device: ({capability}, 132)
torch.cuda.is_initialized = lambda: {initialized}
torch.cuda.is_available = torch.cuda._lazy_init = torch.cuda.device_count = lambda: 1 / 0  # nothing asks the driver
{change}
registration.preload()
print(json.dumps([name in sys.modules for name in ("tvm_ffi", "fla_kda_backend.op", "cutlass")]))
"""
EXCHANGE = "torch.Tensor.__dlpack_c_exchange_api__ = None"
NO_EXCHANGE = f"{EXCHANGE}; del torch.Tensor.__dlpack_c_exchange_api__"
PRELOADS = {  # whether CUDA is in use, capability, a change, what tvm_ffi does; whether it and op are there then
    "calls can run": (True, (9, 0), EXCHANGE, "", [True, True]),
    "compiled only": (True, (12, 0), EXCHANGE, "", [True, True]),
    "CUDA is not in use": (False, (9, 0), EXCHANGE, "", [False, False]),
    "no such GPU": (True, (8, 0), EXCHANGE, "", [False, False]),
    "ROCm": (True, None, EXCHANGE, "", [False, False]),
    "switched off": (True, (9, 0), f"{EXCHANGE}; os.environ['FLA_KDA_CUTE'] = '0'", "", [False, False]),
    "tvm_ffi would compile": (True, (9, 0), NO_EXCHANGE, "", [False, True]),
    "tvm_ffi is broken": (True, (9, 0), EXCHANGE, "raise OSError('libtvm_ffi.so')", [False, True]),
}


@pytest.mark.parametrize("name", slow_apart_from(("calls can run", "no such GPU", "tvm_ffi is broken"), PRELOADS))
def test_what_the_first_call_needs_is_imported_where_that_is_all_it_takes(name, tmp_path):
    initialized, capability, change, tvm_ffi, expected = PRELOADS[name]
    (tmp_path / "tvm_ffi.py").write_text(tvm_ffi)
    script = PRELOAD.format(initialized=initialized, capability=capability, change=change)
    paths = (tmp_path, Path(fla_kda_backend.__file__).parent.parent)
    assert result(script, PYTHONPATH=os.pathsep.join(map(str, paths))) == [*expected, False]
