"""Names and keys of compiled kernels, where a process finds them, and a library that is linked and loaded back."""

import importlib.util
import inspect
import json
import logging
import re
import shutil
import sys
import threading
import types
from pathlib import Path

import interpreters
import pytest

import fla_kda_backend
from fla_kda_backend.compiling import ARCHS, KernelSpec, builder, library, specs_for_demo
from fla_kda_backend.compiling import spec as spec_module

BASE = {"arithmetic": "exact", "bv": 32, "warps": 4, "initial": None, "final": "fp32", "cu_dtype": None,
        "segmented": False}  # fmt: skip
CHANGES = [{}, {"arithmetic": "robust"}, {"bv": 64}, {"warps": 8}, {"initial": "fp32"}, {"initial": "bf16"},
           {"final": None}, {"final": "bf16"}, {"cu_dtype": "int32"}, {"cu_dtype": "int64"}, {"segmented": True},
           {"stages": 5}]  # fmt: skip
needs_dsl = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs the CuTe DSL")


def variant(arch="sm_90a", **changes):
    return KernelSpec.of("column_split", arch, **{**BASE, **changes})


# ---- what a key holds ------------------------------------------------------------------------------------------------
def test_every_option_and_architecture_has_its_own_key_and_file():
    specs = [variant(arch, **changes) for arch in ARCHS.values() for changes in CHANGES]
    for attribute in ("key", "name", "file_name"):
        assert len({getattr(spec, attribute) for spec in specs}) == len(specs), attribute
    for spec in specs:
        assert re.fullmatch(r"[\w.-]+\.so", spec.file_name) and len(spec.file_name) < 255


def test_order_of_options_does_not_matter():
    assert KernelSpec.of("column_split", "sm_90a", **dict(reversed(BASE.items()))) == variant()


@needs_dsl
def test_options_are_those_of_the_kernel():
    """Whatever the class can be told is in the key, so nothing that changes code is left out of it."""
    interpreters.result(
        "import inspect, json, sys\n"
        "from fla_kda_backend.kernels.column_split import ColumnSplit\n"
        "options = set(inspect.signature(ColumnSplit.__init__).parameters) - {'self', 'stages'}\n"
        "assert options == set(sys.argv[1:]), options\n"
        "ColumnSplit(**dict.fromkeys(['final']))\n"
        "print(json.dumps(None))",
        *BASE,
        PYTHONPATH=Path(fla_kda_backend.__file__).parent.parent,
    )


def test_version_is_in_the_key(monkeypatch):
    before = variant().key
    monkeypatch.setattr(spec_module, "__version__", "another")
    assert variant().key != before


HASH = "import json; from fla_kda_backend.compiling import spec; print(json.dumps(spec.source_hash('column_split')))"


def test_sources_of_the_kernel_are_in_the_key(tmp_path):
    package = tmp_path / "fla_kda_backend"
    source = Path(fla_kda_backend.__file__).parent
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))

    def changed(file):
        (package / file).write_text((package / file).read_text() + "\n# changed\n")
        return interpreters.result(HASH, PYTHONPATH=tmp_path)

    seen = {interpreters.result(HASH, PYTHONPATH=tmp_path)}
    assert seen == {spec_module.source_hash("column_split")}
    for file in ("kernels/column_split.py", "kernels/prepare_chunk16.py", "kernels/recurrence_split.py",
                 "kernels/shared/ptx.py", "kernels/shared/record16.py", "kernels/shared/sequences.py",
                 "compiling/builder.py"):  # fmt: skip
        now = changed(file)
        assert now not in seen, file
        seen.add(now)
    assert changed("op.py") in seen  # no part of the compiled code


def test_specs_for_demo_are_those_of_every_setting():
    for spec in specs_for_demo():
        assert set(dict(spec.options)) <= set(BASE) and spec.arch == "sm_90a"
    column_split = [spec for spec in specs_for_demo() if spec.family == "column_split"]
    assert {dict(spec.options)["arithmetic"] for spec in column_split} == {"exact", "robust"}
    assert [spec.family for spec in specs_for_demo()].count("wy64") == 1


# ---- where a process finds a kernel ----------------------------------------------------------------------------------
@pytest.fixture
def empty_library(monkeypatch, tmp_path):
    """A process that has loaded nothing, with a cache directory of its own."""
    monkeypatch.setattr(library, "_functions", {})
    monkeypatch.setattr(library, "_sources", {})
    monkeypatch.setattr(library, "_failures", {})
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o755)
    monkeypatch.setenv("FLA_KDA_CUTE_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def built(monkeypatch):
    """Specs that were compiled, by a compiler that only says so."""
    specs = []

    def build(spec, keep=True):
        specs.append(spec)
        return builder.Artifact(lambda *arguments: spec, None, None, {})

    monkeypatch.setattr(builder, "build", build)
    return specs


@pytest.fixture
def loaded(monkeypatch):
    """Paths that were loaded, by a loader that only says so."""
    paths = []

    def load_module(path):
        paths.append(path)
        return {"launch": lambda *arguments: path}

    monkeypatch.setitem(sys.modules, "tvm_ffi", types.SimpleNamespace(load_module=load_module))
    return paths


def put(folder, spec, mode=0o644):
    path = folder / spec.file_name
    path.write_bytes(b"")
    path.chmod(mode)
    return path


def test_compiles_once_where_nothing_is_stored(empty_library, built, loaded):
    function = library.launcher(variant())
    assert library.launcher(variant()) is function and built == [variant()] and loaded == []
    assert library.launcher(variant(bv=64)) is not function and built == [variant(), variant(bv=64)]
    assert library.loaded() == {variant(): "compiled", variant(bv=64): "compiled"}


def test_loads_what_is_stored(empty_library, built, loaded):
    path = put(empty_library, variant())
    assert library.launcher(variant())() == str(path) and library.launcher(variant())() == str(path)
    assert loaded == [str(path)] and built == [] and library.loaded() == {variant(): str(path)}


def test_a_directory_that_does_not_exist_is_no_error(empty_library, built, loaded, monkeypatch):
    monkeypatch.setenv("FLA_KDA_CUTE_CACHE_DIR", str(empty_library / "none"))
    library.launcher(variant())
    assert built == [variant()]


@pytest.mark.parametrize("folder_mode, mode", [(0o777, 0o644), (0o775, 0o644), (0o755, 0o666), (0o755, 0o664)])
def test_what_others_can_write_is_not_loaded(empty_library, built, loaded, caplog, folder_mode, mode):
    path = put(empty_library, variant(), mode)
    empty_library.chmod(folder_mode)
    with caplog.at_level(logging.WARNING, "fla_kda_backend"):
        library.launcher(variant())
    assert loaded == [] and built == [variant()]
    assert str(path) in caplog.text and "written by others" in caplog.text


def test_threads_compile_a_kernel_once(empty_library, built):
    threads = [threading.Thread(target=library.launcher, args=(variant(),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == [variant()]


def test_a_failed_compilation_is_not_tried_again(empty_library, built, monkeypatch):
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
        with pytest.raises(RuntimeError, match=f"{re.escape(str(variant()))} could not be compiled: no compiler here"):
            library.launcher(variant())
    assert tried == [variant()] and library.loaded() == {}
    monkeypatch.setattr(builder, "build", working)
    library.launcher(variant(bv=64))  # nothing is wrong with the others
    assert built == [variant(bv=64)]


def test_a_process_compiles_for_one_architecture(monkeypatch):
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")
    with pytest.raises(RuntimeError, match=r"compiles for sm_100a \(CUTE_DSL_ARCH\), not for sm_90a"):
        builder.build(variant())


# ---- the real compiler -----------------------------------------------------------------------------------------------
EXPORT = """
import json, sys
from fla_kda_backend.compiling import KernelSpec, builder, library
spec = KernelSpec.of("column_split", "sm_90a", **json.loads(sys.argv[1]))
path = builder.export(spec, sys.argv[2])
assert path.name == spec.file_name
print(json.dumps([entry.name for entry in path.parent.iterdir()]))
"""
LOAD = """
import json, sys
from fla_kda_backend.compiling import KernelSpec, library
spec = KernelSpec.of("column_split", "sm_90a", **json.loads(sys.argv[1]))
launch = library.launcher(spec)
assert "cutlass" not in sys.modules
try:
    launch(*[0] * 14, 0.1, -7.0, 16, 1, 1, 0, 1, 0)
except RuntimeError as error:
    text = str(error)
print(json.dumps([library.loaded()[spec], text]))
"""


def can_link():
    if shutil.which("gcc") is None or importlib.util.find_spec("tvm_ffi") is None:
        return False
    try:
        return builder._cuda_runtime().exists()
    except RuntimeError:
        return False


@needs_dsl
@pytest.mark.skipif(not can_link(), reason="needs gcc, libtvm_ffi and libcudart_static.a")
def test_exported_library_loads_without_the_dsl(tmp_path):
    folder, options = tmp_path / "kernels", json.dumps(BASE)
    root = Path(fla_kda_backend.__file__).parent.parent
    files = interpreters.result(EXPORT, options, folder, PYTHONPATH=root, TORCH_DEVICE_BACKEND_AUTOLOAD=0)
    assert files == [variant().file_name]  # and nothing else is left behind
    where = {"FLA_KDA_CUTE_CACHE_DIR": folder, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": root}
    source, error = interpreters.result(LOAD, options, **where)
    assert source == str(folder / variant().file_name)
    assert "cuda" in error.lower()  # the launch found no GPU, and says so instead of returning


def test_builder_names_what_it_cannot_find(tmp_path):
    with pytest.raises(RuntimeError, match=f"nothing.a not found in {tmp_path}"):
        builder._first("nothing.a", [tmp_path])


def test_importing_compiling_imports_no_compiler():
    root = Path(fla_kda_backend.__file__).parent.parent
    modules = interpreters.result(
        "import json, sys, fla_kda_backend.compiling; print(json.dumps(sorted(sys.modules)))", PYTHONPATH=root
    )
    assert not {"torch", "cutlass", "tvm_ffi", "triton"} & set(modules)
    assert inspect.getmodule(KernelSpec).__name__ in modules
