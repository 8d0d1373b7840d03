"""Names and keys of compiled kernels, and libraries that are linked and loaded back."""

import ast
import importlib.metadata
import importlib.util
import inspect
import json
import platform
import re
import shutil
import sys
from pathlib import Path

import interpreters
import pytest

import fla_kda_backend
from fla_kda_backend import planning
from fla_kda_backend.compiling import ARCHS, KernelSpec, builder, disk, linking, specs_for_demo
from fla_kda_backend.compiling import spec as spec_module

BASE = {"arithmetic": "exact", "bv": 32, "warps": 4, "initial": None, "final": "fp32", "cu_dtype": None,
        "segmented": False, "state_chunk": 64, **planning.FLASHKDA}  # fmt: skip
CHANGES = [{}, {"arithmetic": "robust"}, {"bv": 64}, {"warps": 8}, {"initial": "fp32"}, {"initial": "bf16"},
           {"final": None}, {"final": "bf16"}, {"cu_dtype": "int32"}, {"cu_dtype": "int64"}, {"segmented": True},
           {"stages": 5}, {"gate": "softplus"}, {"gate": "given"}, {"gate_dtype": "fp32"}, {"a_log": "bf16"}, {"a_log": None},
           {"dt_bias": "bf16"}, {"dt_bias": None}, {"beta": "twice"}, {"beta": "given"}, {"beta_dtype": "fp32"},
           {"l2norm": False}, {"state_v_first": False}, {"states": True}, {"state_chunk": 32}]  # fmt: skip
needs_dsl = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs the CuTe DSL")


def variant(arch="sm_90a", **changes):
    return KernelSpec.of("column_split", arch, **{**BASE, **changes})


# ---- what a key holds ------------------------------------------------------------------------------------------------
def test_every_option_and_architecture_has_its_own_key_and_file():
    specs = [variant(arch, **changes) for arch in ARCHS.values() for changes in CHANGES]
    for attribute in ("key", "name", "file_name"):
        assert len({getattr(spec, attribute) for spec in specs}) == len(specs), attribute
    for spec in specs:
        assert re.fullmatch(r"[\w.-]+\.so", spec.file_name) and len(spec.file_name) < 128


def test_order_of_options_does_not_matter():
    assert KernelSpec.of("column_split", "sm_90a", **dict(reversed(BASE.items()))) == variant()


@needs_dsl
def test_options_are_those_of_the_kernel():
    """Whatever the class can be told is in the key, so nothing that changes code is left out of it."""
    interpreters.result(
        "import inspect, json, sys\n"
        "from fla_kda_backend.kernels.column_split.launch import ColumnSplit\n"
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


def test_file_names_hold_machine_and_dsl(monkeypatch):
    before = variant().file_name
    monkeypatch.setattr(platform, "machine", lambda: "another")
    assert variant().file_name != before
    monkeypatch.setattr(spec_module, "dsl_version", lambda: "0.1")
    assert variant().file_name.endswith("-another-dsl0.1.so")
    monkeypatch.setattr(spec_module, "dsl_version", lambda: None)
    assert variant().file_name.endswith("-another-dslnone.so")


def test_dsl_version_is_found_without_importing_it(monkeypatch):
    def version(name):
        assert name == "nvidia-cutlass-dsl"
        return versions.pop()

    versions = ["4.9.0.dev1+x/y"]
    monkeypatch.setattr(importlib.metadata, "version", version)
    assert spec_module.dsl_version.__wrapped__() == "4.9.0.dev1_x_y"

    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert spec_module.dsl_version.__wrapped__() is None


KERNELS = sorted((Path(fla_kda_backend.__file__).parent / "kernels").rglob("*.py"))


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_imports_of_kernels_are_those_that_python_sees(path):
    root = Path(fla_kda_backend.__file__).parent.parent
    seen = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "kernels import each other by absolute names: the key follows those"
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            seen |= {file for name in names if (file := root / f"{name.replace('.', '/')}.py").is_file()}
        elif isinstance(node, ast.Import):
            assert not any(alias.name.startswith("fla_kda_backend") for alias in node.names)
    files = spec_module._kernels(root)
    ours = {file for file in seen if file.is_relative_to(root / "fla_kda_backend" / "kernels")}
    assert {root / files[name] for name in spec_module._imported(path.read_bytes()) if name in files} == ours


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
                 "compiling/builder.py", "compiling/linking.py"):  # fmt: skip
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


def test_a_process_compiles_for_one_architecture(monkeypatch):
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")
    with pytest.raises(RuntimeError, match=r"compiles for sm_100a \(CUTE_DSL_ARCH\), not for sm_90a"):
        builder.build(variant())


# ---- the real compiler -----------------------------------------------------------------------------------------------
ROOT = Path(fla_kda_backend.__file__).parent.parent
OPTIONS = json.dumps(BASE)
EXPORT = """
import json, sys
from fla_kda_backend.compiling import KernelSpec, builder
spec = KernelSpec.of("column_split", "sm_90a", **json.loads(sys.argv[1]))
path = builder.export(spec, sys.argv[2])
assert path.name == spec.file_name
print(json.dumps([entry.name for entry in path.parent.iterdir()]))
"""
LOAD = """
import json, sys
import torch
from fla_kda_backend.compiling import KernelSpec, library
spec = KernelSpec.of("column_split", "sm_90a", **json.loads(sys.argv[1]))
launch = library.launcher(spec)
assert "cutlass" not in sys.modules
try:
    launch(*[0] * 15, 0.1, -7.0, 16, 1, 1, 1, 0, 1, 0)
except RuntimeError as error:
    text = str(error)
print(json.dumps([library.loaded()[spec], text]))
"""
without_gcc = {"PATH": "/nonexistent", "CC": ""}


def can_link(compiler):
    try:
        linking.dsl_runtime(), linking.cuda_runtime(), linking.tvm_ffi_library()
    except Exception:
        return False
    return not compiler or shutil.which("gcc") is not None


def export(folder, **environment):
    return interpreters.result(EXPORT, OPTIONS, folder, PYTHONPATH=ROOT, TORCH_DEVICE_BACKEND_AUTOLOAD=0, **environment)


@needs_dsl
@pytest.mark.parametrize("compiler", [True, False], ids=["gcc", "no compiler"])
def test_exported_library_loads_without_the_dsl(compiler, tmp_path):
    if not can_link(compiler):
        pytest.skip("needs libtvm_ffi, libcudart_static.a and, for one of two, gcc")
    folder, environment = tmp_path / "kernels", {} if compiler else without_gcc
    assert export(folder, **environment) == [variant().file_name]  # and nothing else is left behind
    (entry,) = disk.Directory(folder).entries()
    assert (entry.spec, entry.problem) == (variant(), None)
    assert entry.description["linked_by"] == ("gcc" if compiler else linking.TRITON)
    where = {"FLA_KDA_CUTE_CACHE_DIR": folder, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ROOT, **environment}
    source, error = interpreters.result(LOAD, OPTIONS, **where)
    assert source == str(folder / variant().file_name)
    assert "cuda" in error.lower()  # the launch found no GPU, and says so instead of returning


def test_linkers(monkeypatch):
    which = {"gcc": "/bin/gcc", "clang": "/bin/clang", "cc-of-mine": "/bin/cc-of-mine"}
    monkeypatch.setattr(shutil, "which", which.get)
    monkeypatch.setenv("CC", "cc-of-mine -m64")
    assert linking.linker() == ["cc-of-mine", "-m64"] and linking.name_of(linking.linker()) == "cc-of-mine"
    monkeypatch.setenv("CC", "/not/there")
    assert linking.linker() == ["gcc"]
    del which["gcc"]
    assert linking.linker() == ["clang"]
    which.clear()
    assert linking.linker() == linking.name_of(linking.linker()) == linking.TRITON


def test_nothing_to_link_with(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setitem(sys.modules, "triton._C.libtriton", None)
    with pytest.raises(linking.Unlinkable, match="neither a C compiler"):
        linking.linker()
    assert "neither a C compiler" in linking.missing()


def test_a_compiler_that_fails_says_why(monkeypatch, tmp_path):
    for name in ("dsl_runtime", "cuda_runtime", "tvm_ffi_library"):
        monkeypatch.setattr(linking, name, lambda: tmp_path / "none.a")
    script = tmp_path / "cc"
    script.write_text("#!/bin/sh\necho no such library >&2\nexit 1\n")
    script.chmod(0o755)
    with pytest.raises(linking.Unlinkable, match="no such library"):
        linking.link(tmp_path / "kernel.o", tmp_path, [str(script)])


def test_linking_names_what_it_cannot_find(tmp_path):
    with pytest.raises(linking.Unlinkable, match=f"nothing.a not found in {tmp_path}"):
        linking._first("nothing.a", [tmp_path])


def test_importing_compiling_imports_no_compiler():
    modules = interpreters.result(
        "import json, sys, fla_kda_backend.compiling.library; print(json.dumps(sorted(sys.modules)))", PYTHONPATH=ROOT
    )
    assert not {"torch", "cutlass", "tvm_ffi", "triton"} & set(modules)
    assert inspect.getmodule(KernelSpec).__name__ in modules
