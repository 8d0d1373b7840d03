"""The import hook alone, on a small package with FLA's module names, in fresh interpreters without torch."""

import statistics
import textwrap

import pytest
from interpreters import result

# registration.py is replaced: it needs torch, and has tests of its own.
PRELUDE = """
import json, sys, types
sys.path.insert(0, sys.argv[1])
import fla_kda_backend._autoload as autoload
calls = []
registration = types.ModuleType("fla_kda_backend.registration")
registration.status = lambda: None
registration.register = lambda entry_points: calls.append([f.mark for f in entry_points]) or True
sys.modules["fla_kda_backend.registration"] = registration
"""
CHUNK = """
loader_in_body = __loader__
def chunk_kda():
    "kept"
chunk_kda.mark = "chunk"
"""


@pytest.fixture
def fla(tmp_path):
    """A directory with a package fla in it; the text of its modules can be changed by the test."""
    kda = tmp_path / "fla" / "ops" / "kda"
    kda.mkdir(parents=True)
    (tmp_path / "fla" / "__init__.py").write_text("")
    (tmp_path / "fla" / "ops" / "__init__.py").write_text("")
    (kda / "__init__.py").write_text("from .chunk import chunk_kda\nfrom . import other\n")
    (kda / "chunk.py").write_text(CHUNK)
    (kda / "other.py").write_text("")
    return tmp_path


def hooked(fla, script, **environment):
    return result(PRELUDE + textwrap.dedent(script), fla, **environment)


@pytest.mark.parametrize("route", ["fla.ops.kda", "fla.ops.kda.chunk", "fla.ops.kda.other"])
def test_registers_once_chunk_kda_is_there(fla, route):
    seen = hooked(
        fla,
        f"""
        assert autoload.register() is False and calls == []
        import fla, fla.ops
        assert calls == []
        import {route}
        print(json.dumps(calls))
        """,
    )
    assert seen[0] == ["chunk"]


def test_registers_at_once_where_fla_is_imported_already(fla):
    seen = hooked(fla, "import fla.ops.kda; assert calls == []; autoload.register(); print(json.dumps(calls))")
    assert seen == [["chunk"]]


def test_install_is_idempotent(fla):
    finders = hooked(
        fla,
        """
        import importlib
        for _ in range(3):
            autoload.register()
        importlib.reload(autoload).register()
        print(json.dumps([type(finder).__name__ for finder in sys.meta_path if hasattr(finder, "is_fla_kda_backend")]))
        """,
    )
    assert finders == ["Finder"]


def test_modules_keep_their_own_loader(fla):
    names = hooked(
        fla,
        """
        autoload.register()
        import importlib.util, inspect
        spec = importlib.util.find_spec("fla.ops.kda")  # wrapped, never executed
        assert spec.loader.is_package("fla.ops.kda")
        from fla.ops.kda import chunk
        import fla.ops.kda as package
        assert chunk.__spec__.loader is chunk.__loader__ is chunk.loader_in_body
        assert package.__spec__.loader is package.__loader__
        assert "kept" in inspect.getsource(chunk)
        print(json.dumps([type(module.__loader__).__name__ for module in (chunk, package)]))
        """,
    )
    assert names == ["SourceFileLoader"] * 2


def test_a_wrapped_loader_can_be_copied_and_pickled(fla):
    """By whoever keeps specs: a copy loads the module, and registers, as the loader would have."""
    seen = hooked(
        fla,
        """
        autoload.register()
        import copy, importlib.util, pickle
        loader = importlib.util.find_spec("fla.ops.kda.chunk").loader  # imports its package
        del sys.modules["fla.ops.kda.chunk"], calls[:]
        spec = importlib.util.find_spec("fla.ops.kda.chunk")
        loader = spec.loader
        copies = [copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader)), copy.deepcopy(spec).loader]
        for each in copies:
            assert type(each) is type(loader) and each is not loader and each.path == loader.path
            assert not hasattr(each, "nonsense")
            spec.loader = each
            each.exec_module(importlib.util.module_from_spec(spec))
        bare = type(loader).__new__(type(loader))
        assert not hasattr(bare, "path")
        print(json.dumps(len(calls)))
        """,
    )
    assert seen == 4


def test_reload_and_second_import_register_again(fla):
    counts = hooked(
        fla,
        """
        autoload.register()
        import importlib
        import fla.ops.kda.chunk as chunk
        counts = [len(calls)]
        importlib.reload(chunk)
        counts.append(len(calls))
        for name in [name for name in sys.modules if name.startswith("fla.ops.kda")]:
            del sys.modules[name]
        import fla.ops.kda
        counts.append(len(calls))
        print(json.dumps([counts, calls[counts[0]]]))
        """,
    )
    (first, reloaded, again), entry_points = counts
    assert first < reloaded < again
    assert len(entry_points) == 2  # the package still has the function from before the reload


def test_hook_that_comes_while_chunk_is_half_loaded(fla):
    (fla / "fla" / "ops" / "kda" / "chunk.py").write_text("import half_way\n" + CHUNK)
    (fla / "half_way.py").write_text("import fla_kda_backend._autoload as a\nassert a.register() is False\n")
    assert hooked(fla, "import fla.ops.kda; print(json.dumps(calls))") == [["chunk"]]


def test_failed_import_can_be_repeated(fla):
    (fla / "fla" / "ops" / "kda" / "chunk.py").write_text(
        "import sys\nif not hasattr(sys, 'tried'):\n    sys.tried = True\n    raise ImportError('first time')\n" + CHUNK
    )
    seen = hooked(
        fla,
        """
        autoload.register()
        try:
            import fla.ops.kda
        except ImportError as error:
            assert str(error) == "first time" and calls == []
        import fla.ops.kda
        print(json.dumps(calls))
        """,
    )
    assert seen[0] == ["chunk"]


def test_package_without_chunk_kda_is_reported(fla):
    (fla / "fla" / "ops" / "kda" / "__init__.py").write_text("")
    assert hooked(fla, "autoload.register(); import fla.ops.kda; print(json.dumps(calls))") == [[]]


def test_a_finder_that_asks_all_finders_does_not_recurse(fla):
    seen = hooked(
        fla,
        """
        class Asking:
            def find_spec(self, name, path=None, target=None):
                for finder in sys.meta_path:
                    if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
                        return spec
        autoload.register()
        sys.meta_path.insert(0, Asking())
        import fla.ops.kda
        print(json.dumps(calls))
        """,
    )
    assert seen[0] == ["chunk"]


def test_error_of_another_finder_is_its_own(fla):
    message = hooked(
        fla,
        """
        class Blocking:
            def find_spec(self, name, path=None, target=None):
                if name == "fla.ops.kda.chunk":
                    raise ImportError("blocked")
        autoload.register()
        sys.meta_path.insert(1, Blocking())
        try:
            import fla.ops.kda
        except ImportError as error:
            print(json.dumps(str(error)))
        """,
    )
    assert message == "blocked"


def test_failing_registration_does_not_reach_the_import(fla):
    state = hooked(
        fla,
        """
        def fail(entry_points):
            raise RuntimeError("no")
        registration.register = fail
        autoload.register()
        from fla.ops.kda import chunk_kda
        assert autoload.register() is False
        print(json.dumps(autoload.status()))
        """,
    )
    assert state == ["failed", "RuntimeError: no"]


def test_broken_package_does_not_reach_the_import(fla):
    state = hooked(
        fla,
        """
        sys.modules["fla_kda_backend.registration"] = None  # importing it raises
        autoload.register()
        import fla.ops.kda
        print(json.dumps(autoload.status()[0]))
        """,
    )
    assert state == "failed"


def test_threads_that_import_at_once(fla):
    (fla / "fla" / "ops" / "kda" / "chunk.py").write_text("import time\ntime.sleep(0.05)\n" + CHUNK)
    seen = hooked(
        fla,
        """
        import importlib, threading
        failures = []
        def guarded(function, *arguments):
            try:
                function(*arguments)
            except BaseException as error:
                failures.append(repr(error))
        work = [(importlib.import_module, "fla.ops.kda"), (autoload.register,)] * 4
        threads = [threading.Thread(target=guarded, args=item, daemon=True) for item in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        print(json.dumps([failures, any(thread.is_alive() for thread in threads), bool(calls)]))
        """,
    )
    assert seen == [[], False, True]


def test_imports_next_to_nothing_in_under_a_millisecond(tmp_path):
    script = """
import json, sys, time
before = set(sys.modules)
start = time.perf_counter()
from fla_kda_backend._autoload import register
register()
took = time.perf_counter() - start
print(json.dumps([took * 1e3, sorted(set(sys.modules) - before)]))
"""
    with_pyc = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": tmp_path}
    result(script, **with_pyc)
    runs = [result(script, **with_pyc) for _ in range(15)]
    assert {name for _, names in runs for name in names} == {"fla_kda_backend", "fla_kda_backend._autoload"}
    assert statistics.median(milliseconds for milliseconds, _ in runs) < 1.0
