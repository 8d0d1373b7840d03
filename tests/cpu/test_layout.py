"""Imports go one way, and importing the package costs nothing."""

import ast
import graphlib
import shutil
from pathlib import Path

import pytest
from interpreters import result

import fla_kda_backend
from fla_kda_backend.compiling import spec

PACKAGE = Path(fla_kda_backend.__file__).parent

# A module imports only modules of a later rank; inside a folder it may import its neighbours.
RANKS = (
    ("cli",),
    ("_autoload",),
    ("registration",),
    ("backend",),
    ("selfcheck",),
    ("dispatch_log", "eligibility"),
    ("training",),
    ("op",),
    ("backward_geometry",),
    ("geometry", "memo"),
    ("planning", "compiling"),
    ("facts", "testing"),
    ("kernels",),
    ("reference",),
    ("call", "config", "failures"),
)
RANK = {name: rank for rank, names in enumerate(RANKS) for name in names}
LAZY = {"__init__", "__main__"}  # the public names, and the command: they may import everything
DSL_FREE = (  # what the host imports of the kernels: no DSL, no torch
    "kernels.variant",
    "kernels.arguments",
    "kernels.families",
    "kernels.column_split.contract",
    "kernels.column_split.record",
    "kernels.wy64.contract",
    "kernels.wy64.record",
    "kernels.wy64.groups",
    "kernels.wy64.backward.contract",
    "kernels.wy64.backward.record",
    "compiling.spec",
    "testing",
)


def modules():
    return sorted(PACKAGE.rglob("*.py"))


def part(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path):
    """Names that a file imports, at its top or in a function, from the package on: "fla_kda_backend.kernels.ptx"."""
    package = ("fla_kda_backend", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            for alias in node.names:
                yield ".".join((*base, *filter(None, [node.module]), alias.name))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def imported(path):
    """Parts of this package that a file imports."""
    for name in imports(path):
        pieces = name.split(".")
        if pieces[0] == "fla_kda_backend" and len(pieces) > 1 and pieces[1] in RANK:
            yield pieces[1]


def kernels_imported(path):
    """Files of kernels/ that a file imports."""
    for name in imports(path):
        pieces = name.split(".")
        if pieces[:2] == ["fla_kda_backend", "kernels"]:
            found = (PACKAGE.joinpath(*pieces[1:end]).with_suffix(".py") for end in (len(pieces), len(pieces) - 1))
            yield from (each for each in found if each.exists())


def test_every_module_has_a_rank():
    assert {part(path) for path in modules()} == set(RANK) | LAZY


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path):
    here = part(path)
    if here in LAZY:
        return
    backwards = {name for name in imported(path) if name != here and RANK[name] <= RANK[here]}
    assert not backwards


def test_imports_are_seen():
    assert set(imported(PACKAGE / "backend.py")) >= {"eligibility", "op", "planning", "selfcheck"}
    assert "kernels" in set(imported(PACKAGE / "op.py"))
    assert ROOT / "wy64" / "contract.py" in set(kernels_imported(ROOT / "families.py"))


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_kernels_and_their_builder_import_the_dsl(path):
    named = {name.split(".")[0] for name in imports(path)}
    assert "cutlass" not in named or part(path) == "kernels" or path == PACKAGE / "compiling" / "builder.py"


# ---- the rooms of the kernels --------------------------------------------------------------------------------------------
KERNELS = sorted((PACKAGE / "kernels").rglob("*.py"))
ROOT = PACKAGE / "kernels"


def room(path):
    """The family whose folder a file of kernels/ lies in, or None."""
    parts = path.relative_to(ROOT).parts
    return parts[0] if len(parts) > 1 else None


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_family_imports_no_other(path):
    """The key of the cache hashes the family's folder and the files beside the folders: a kernel is made of nothing else."""
    assert set(imported(path)) <= {"kernels"}
    if path.name != "families.py":
        assert {room(other) for other in kernels_imported(path)} <= {None, room(path)}
        assert ROOT / "families.py" not in kernels_imported(path)


def test_kernels_import_in_one_direction():
    arrows = {path: set(kernels_imported(path)) - {path} for path in KERNELS}
    assert len(list(graphlib.TopologicalSorter(arrows).static_order())) == len(KERNELS)  # raises where there is a cycle


def test_prepare_and_chain_know_nothing_of_each_other():
    for one, other in (("prepare", "chain"), ("chain", "prepare")):
        for path in (ROOT / "wy64" / one).glob("*.py"):
            assert not [each for each in kernels_imported(path) if other in each.relative_to(ROOT).parts], path


def test_the_key_of_the_cache_is_by_folders(tmp_path, monkeypatch):
    """A change beside the families changes both keys, one in a family's folder its own, one elsewhere none."""
    copy = tmp_path / "fla_kda_backend"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(spec, "__file__", str(copy / "compiling" / "spec.py"))

    def hashes():
        return [spec.source_hash.__wrapped__(family) for family in ("column_split", "wy64")]

    before = hashes()
    assert before == [spec.source_hash(family) for family in ("column_split", "wy64")]
    for name, changed in (
        ("kernels/ptx.py", [True, True]),
        ("kernels/variant.py", [True, True]),
        ("compiling/builder.py", [True, True]),
        ("kernels/column_split/record.py", [True, False]),
        ("kernels/wy64/chain/kernel.py", [False, True]),
        ("kernels/wy64/new.py", [False, True]),
        ("op.py", [False, False]),
    ):
        with open(copy / name, "a") as file:
            file.write("# changed\n")
        after = hashes()
        assert [x != y for x, y in zip(before, after)] == changed, name
        before = after


def test_what_the_host_knows_of_kernels_imports_neither_dsl_nor_torch():
    script = f"""
import importlib, json, sys
heavy = {{}}
for name in {DSL_FREE}:
    importlib.import_module("fla_kda_backend." + name)
    heavy[name] = [each for each in ("cutlass", "torch", "triton") if each in sys.modules]
print(json.dumps(heavy))
"""
    assert result(script) == dict.fromkeys(DSL_FREE, [])


def test_importing_the_package_imports_nothing_heavy():
    script = """
import json, sys
import fla_kda_backend
light = [name for name in ("torch", "fla", "cutlass", "triton", "numpy") if name in sys.modules]
names = dir(fla_kda_backend)
print(json.dumps([light, names]))
"""
    heavy, names = result(script)
    assert heavy == []
    assert {"__version__", "dispatch_log", "fwd", "register"} <= set(names)


def test_deciding_and_registering_import_no_dsl():
    script = """
import json, sys, warnings
warnings.simplefilter("ignore")
import fla.ops.kda, torch
import fla_kda_backend
assert fla_kda_backend.register()
try:
    with torch.no_grad():
        fla.ops.kda.chunk_kda(*[torch.zeros(1, 1, 1, 64)] * 4, torch.zeros(1, 1, 1))
except Exception:
    pass  # no GPU, or the wrong device for FLA's own kernels
(record,) = fla_kda_backend.dispatch_log.records()
print(json.dumps([record.outcome, "cutlass" in sys.modules, "fla_kda_backend.op" in sys.modules]))
"""
    assert result(script) == ["declined", False, False]


def test_public_names():
    assert fla_kda_backend.dispatch_log.records
    assert fla_kda_backend.register.__module__ == "fla_kda_backend._autoload"
    assert fla_kda_backend.fwd.__module__ == "fla_kda_backend.op"
    with pytest.raises(AttributeError, match="no attribute 'forward'"):
        fla_kda_backend.forward  # noqa: B018
