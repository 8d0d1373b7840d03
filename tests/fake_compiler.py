"""Fixtures for a process without compiled kernels: a cache directory of its own, a compiler and a loader that do nothing."""

import sys
import types
from pathlib import Path

import pytest

from fla_kda_backend.compiling import builder, library
from fla_kda_backend.failures import Failures

LIBRARY = b"\x7fELF and so on"  # what the loader loads


@pytest.fixture
def empty_library(monkeypatch, tmp_path):
    """A process that has loaded nothing, with its own cache directory; its path."""
    for name in ("_functions", "_sources", "_locks"):
        monkeypatch.setattr(library, name, {})
    monkeypatch.setattr(library, "_failures", Failures(lasting_after=1))
    monkeypatch.setattr(library, "_said", set())
    folder = tmp_path / "cache"
    monkeypatch.setenv("FLA_KDA_CUTE_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def built(monkeypatch):
    """The specs that were compiled, by a stand-in; only the loader below loads what its linker makes."""
    specs = []

    def build(spec, keep=True):
        specs.append(spec)
        return builder.Artifact(lambda *arguments: "from memory", None, None, {})

    monkeypatch.setattr(builder, "build", build)
    monkeypatch.setattr(builder, "link", lambda function: (LIBRARY, "nobody"))
    return specs


@pytest.fixture
def loaded(monkeypatch):
    """The bytes that were loaded, by a stand-in."""
    contents = []

    def load_module(path):
        contents.append(Path(path).read_bytes())
        if not contents[-1].startswith(LIBRARY):
            raise RuntimeError("undefined symbol")
        return {"launch": lambda *arguments: "from the file"}

    monkeypatch.setitem(sys.modules, "tvm_ffi", types.SimpleNamespace(load_module=load_module))
    return contents
