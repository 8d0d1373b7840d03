"""Names and keys of compiled kernels, and libraries that are linked and loaded back."""

import ast
import importlib.metadata
import importlib.util
import inspect
import json
import platform
import re
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path

import interpreters
import pytest

import fla_kda_backend
from fla_kda_backend.compiling import ARCHS, KernelSpec, builder, disk, linking, specs_for_demo
from fla_kda_backend.compiling import spec as spec_module
from fla_kda_backend.kernels.families import FAMILIES
from fla_kda_backend.kernels.variant import Variant

PACKAGE = Path(fla_kda_backend.__file__).parent
ROOT = PACKAGE.parent
# Another value of each option, the variant's and both schedules'.
CHANGES = {
    "variant": [{"gate": "softplus"}, {"gate": "given", "a_log": None, "dt_bias": None}, {"gate_dtype": "fp32"},
                {"a_log": "bf16"}, {"a_log": None}, {"dt_bias": "bf16"}, {"dt_bias": None}, {"beta": "twice"},
                {"beta": "given"}, {"beta_dtype": "fp32"}, {"l2norm": False}, {"state_v_first": False},
                {"intermediate_states": 64}, {"initial_state": "fp32"}, {"initial_state": "bf16"}, {"final_state": None},
                {"final_state": "bf16"}, {"cu_seqlens": "int32"}, {"cu_seqlens": "int64"}],
    "column_split": [{"arithmetic": "exact"}, {"bv": 64}, {"warps": 2}, {"stages": 5}, {"segmented": True},
                     {"intermediate_states": 32}],
    "wy64": [{"max_ctas": 114}, {"overlap": True}, {"replay": True}, {"direct": True}, {"segmented": True}],
    "wy64_backward": [{"max_ctas": 114}, {"segmented": True}, {"segmented": True, "stage": "states"}, {"d_final_state": True},
                      {"d_initial_state": True, "initial_state": "fp32", "cu_seqlens": "int32"}, {"grouped": True},
                      {"beside": True}],
}  # fmt: skip
NO_STATES = {"intermediate_states", "final_state"}  # which a backward does not write
needs_dsl = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs the CuTe DSL")


def variant(arch="sm_90a", family="column_split", **changes):
    base = {"column_split": {"arithmetic": "robust"}, "wy64_backward": {"final_state": None}}.get(family, {})
    return KernelSpec.of(family, arch, **{**base, **changes})


def changes_of(family):
    changes = CHANGES["variant"] + CHANGES[family]
    return [each for each in changes if family != "wy64_backward" or not NO_STATES & set(each)]


# ---- what a key holds ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", FAMILIES)
def test_every_option_and_architecture_has_its_own_key_and_file(family):
    changes = [{}, *changes_of(family)]
    specs = [variant(arch, family, **each) for arch in ARCHS.values() for each in changes]
    for attribute in ("key", "name", "file_name"):
        assert len({getattr(spec, attribute) for spec in specs}) == len(set(specs)) == len(specs), attribute
    for spec in specs:
        assert re.fullmatch(r"[\w.-]+\.so", spec.file_name) and len(spec.file_name) < 128


@pytest.mark.parametrize("family", FAMILIES)
def test_every_option_is_changed_above(family):
    """So nothing that changes code is left out of the key: the kernels are built from variant and schedule alone."""
    options = {field.name for part in (Variant, FAMILIES[family].schedule) for field in fields(part)}
    options -= NO_STATES if family == "wy64_backward" else set()
    assert options == {name for each in changes_of(family) for name in each}


def test_specs_of_two_families_differ():
    assert len({variant(family=family).key for family in FAMILIES}) == len(FAMILIES)


def test_a_default_may_be_named_and_order_does_not_matter():
    given = {"bv": 32, "arithmetic": "robust", "initial_state": "fp32", "final_state": "fp32"}
    same = [variant(**given), variant(**dict(reversed(given.items()))), variant(initial_state="fp32")]
    assert len(set(same)) == len({spec.key for spec in same}) == 1
    assert same[0].options == (("arithmetic", "robust"), ("initial_state", "fp32"))
    assert str(same[0]) == "column_split (arithmetic=robust, initial_state=fp32) for sm_90a"
    assert str(KernelSpec.of("wy64", "sm_100a")) == "wy64 (all defaults) for sm_100a"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_spec_survives_json(family):
    for each in changes_of(family):
        spec = variant(family=family, **each)
        assert KernelSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_what_no_kernel_has_is_refused():
    for options, error in (({"states": True}, TypeError), ({"max_ctas": 132}, TypeError), ({"gate": "none"}, ValueError),
                           ({"bv": 33}, ValueError), ({"gate": "given"}, ValueError)):  # fmt: skip
        with pytest.raises(error):
            variant(**options)
        with pytest.raises(ValueError, match="this version has no such kernel"):
            KernelSpec.from_dict({"family": "column_split", "arch": "sm_90a", "options": options})


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


MODULES = sorted((PACKAGE / "kernels").rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE / "kernels")))
def test_kernels_import_only_what_is_in_their_key(path):
    """A family: its own folder and the modules beside the folders; these modules, families.py apart: no family."""
    family, *inside = path.relative_to(PACKAGE / "kernels").parts
    if family == "families.py":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not node.level
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            if name.startswith("fla_kda_backend."):
                _, kernels, first, *_ = *name.split("."), ""
                assert kernels == "kernels" and (first not in FAMILIES or (inside and first == family)), name


def test_sources_of_the_kernel_are_in_the_key(tmp_path, monkeypatch):
    package = tmp_path / "fla_kda_backend"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))

    def hashes():
        return [spec_module.source_hash.__wrapped__(family) for family in ("column_split", "wy64")]

    column_split, wy64 = hashes()
    monkeypatch.setattr(spec_module, "__file__", str(package / "compiling" / "spec.py"))
    assert hashes() == [column_split, wy64]
    for file, in_column_split, in_wy64 in (
        ("kernels/column_split/prepare.py", True, False), ("kernels/wy64/launch.py", False, True),
        ("kernels/wy64/chain/kernel.py", False, True), ("kernels/ptx.py", True, True),
        ("compiling/builder.py", True, True), ("op.py", False, False),
    ):  # fmt: skip
        (package / file).write_text((package / file).read_text() + "\n# changed\n")
        now = hashes()
        assert [now[0] != column_split, now[1] != wy64] == [in_column_split, in_wy64], file
        column_split, wy64 = now


def test_specs_for_demo_are_those_of_every_setting():
    for arch in ARCHS.values():
        specs = specs_for_demo(arch)
        assert {spec.arch for spec in specs} == {arch} and all(spec.variant.initial_state == "fp32" for spec in specs)
        assert {spec.schedule.arithmetic for spec in specs if spec.family == "column_split"} == {"exact", "robust"}
        assert [spec.family for spec in specs].count("wy64") == (arch == "sm_90a")


def test_a_process_compiles_for_one_architecture(monkeypatch):
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")
    with pytest.raises(RuntimeError, match=r"compiles for sm_100a \(CUTE_DSL_ARCH\), not for sm_90a"):
        builder.build(variant())


# ---- the real compiler -----------------------------------------------------------------------------------------------
SPEC = json.dumps(variant().to_dict())
EXPORT = """
import json, sys
from fla_kda_backend.compiling import KernelSpec, builder
spec = KernelSpec.from_dict(json.loads(sys.argv[1]))
path = builder.export(spec, sys.argv[2])
assert path.name == spec.file_name
print(json.dumps([entry.name for entry in path.parent.iterdir()]))
"""
LOAD = """
import json, sys
import torch
from fla_kda_backend.compiling import KernelSpec, library
spec = KernelSpec.from_dict(json.loads(sys.argv[1]))
launch = library.launcher(spec)
assert "cutlass" not in sys.modules
try:
    launch(*[0] * 15, 0.1, -7.0, 16, 1, 1, 1, 0, 1, 0)
except RuntimeError as error:
    text = str(error)
print(json.dumps([library.loaded()[spec], text]))
"""


@pytest.mark.slow
@needs_dsl
@pytest.mark.skipif(linking.missing() is not None, reason="needs a C compiler and the libraries to link with")
def test_exported_library_loads_without_the_dsl(tmp_path):
    folder = tmp_path / "kernels"
    files = interpreters.result(EXPORT, SPEC, folder, PYTHONPATH=ROOT, TORCH_DEVICE_BACKEND_AUTOLOAD=0)
    assert files == [variant().file_name]  # and nothing else is left behind
    (kernel,) = disk.Directory(folder).stored()
    assert (kernel.spec, kernel.problem) == (variant(), None)
    assert kernel.description["linked_by"] == linking.name_of(linking.linker())
    where = {"FLA_KDA_CUTE_CACHE_DIR": folder, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ROOT}
    source, error = interpreters.result(LOAD, SPEC, **where)
    assert source == str(folder / variant().file_name)
    assert "cuda" in error.lower()  # the launch found no GPU, and raised instead of returning


# ---- linking ---------------------------------------------------------------------------------------------------------
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
    with pytest.raises(linking.Unlinkable, match="neither CC, nor gcc, nor clang"):
        linking.linker()
    assert "no C compiler" in linking.missing()


@pytest.fixture
def libraries(monkeypatch, tmp_path):
    """Paths of libraries to link with, which are not there."""
    for name in ("dsl_runtime", "cuda_runtime", "tvm_ffi_library"):
        monkeypatch.setattr(linking, name, lambda: tmp_path / "none.a")


def compiler(folder, script):
    path = folder / "cc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return [str(path)]


def test_a_compiler_that_fails_says_why(libraries, monkeypatch, tmp_path):
    command = compiler(tmp_path, "echo no such library >&2; exit 1")
    with pytest.raises(linking.Unlinkable, match="no such library"):
        linking.link(tmp_path / "kernel.o", tmp_path, command)
    monkeypatch.setenv("CC", command[0])
    assert "no such library" in linking.missing()


def test_a_compiler_that_cannot_be_started_is_no_compiler(libraries, monkeypatch, tmp_path):
    def run(*args, **kwargs):
        raise OSError(8, "Exec format error")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(linking.Unlinkable, match="cc failed: .*Exec format error"):
        linking.link(tmp_path / "kernel.o", tmp_path, compiler(tmp_path, ""))


def test_linking_is_tried_without_a_kernel(libraries, monkeypatch, tmp_path):
    monkeypatch.setenv("CC", compiler(tmp_path, f'echo "$@" > {tmp_path}/arguments')[0])
    assert linking.missing() is None
    arguments = (tmp_path / "arguments").read_text()
    assert "raise.c" in arguments and "none.a" in arguments and "kernel.o" not in arguments


def test_linking_names_what_it_cannot_find(tmp_path):
    with pytest.raises(linking.Unlinkable, match=f"nothing.a not found in {tmp_path}"):
        linking._first("nothing.a", [tmp_path])


def test_importing_compiling_imports_no_compiler():
    modules = interpreters.result(
        "import json, sys, fla_kda_backend.compiling.library; print(json.dumps(sorted(sys.modules)))", PYTHONPATH=ROOT
    )
    assert not {"torch", "cutlass", "tvm_ffi", "triton"} & set(modules)
    assert inspect.getmodule(KernelSpec).__name__ in modules
