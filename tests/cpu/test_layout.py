"""Imports go one way, and importing the package costs nothing."""

import ast
from pathlib import Path

import pytest
from interpreters import result

import fla_kda_backend

PACKAGE = Path(fla_kda_backend.__file__).parent

# A module imports only modules of a later rank; inside a folder it may import its neighbours.
RANKS = (
    ("cli",),
    ("_autoload",),
    ("registration",),
    ("backend",),
    ("selfcheck",),
    ("dispatch_log", "eligibility", "memo"),
    ("facts",),
    ("op",),
    ("planning", "compiling"),
    ("kernels",),
    ("reference",),
    ("call", "config"),
)
RANK = {name: rank for rank, names in enumerate(RANKS) for name in names}
LAZY = {"__init__", "__main__"}  # the public names, and the command: they may import everything
COMPILER = {"compiling", "kernels"}


def modules():
    return sorted(PACKAGE.rglob("*.py"))


def part(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path):
    """Parts of this package that a file imports, at its top or in a function."""
    package = ("fla_kda_backend", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            names = [".".join((*base, *filter(None, [node.module]), alias.name)) for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            pieces = name.split(".")
            if pieces[0] == "fla_kda_backend" and len(pieces) > 1 and pieces[1] in RANK:
                yield pieces[1]


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


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_compiler_imports_the_dsl(path):
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module.split(".")[0])
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
    assert "cutlass" not in names or part(path) in COMPILER


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
