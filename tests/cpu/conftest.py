"""Fixtures that several files of this directory use.

One of them is FLA's own dispatch with the backend behind it, on CPU tensors: who runs a call, by whose result comes back.

The facts say that the tensors are on an H200, op is replaced, and so is, behind FLA's own checks of the arguments, what
FLA would launch.
"""

import sys
import types
import warnings

import pytest
import torch
from calls import FLAS, H200, OURS, prefill
from fake_compiler import built, empty_library, loaded

from fla_kda_backend import dispatch_log, facts, memo

__all__ = ["built", "empty_library", "loaded"]


@pytest.fixture(scope="module")
def kda():
    """FLA's KDA modules. (FLA warns at import that there is no GPU.)"""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import fla.ops.kda.backends.flash_kda as flash_kda
        import fla.ops.kda.chunk as chunk
    return types.SimpleNamespace(chunk=chunk, flash_kda=flash_kda)


@pytest.fixture
def op(monkeypatch):
    """A stand-in for op.py; `calls` are the geometries of those it ran, `run` can be replaced."""
    module = types.ModuleType("fla_kda_backend.op")
    module.calls = []
    module.run = lambda sizes: module.calls.append(sizes) or (OURS, None)
    module.Launch = lambda sizes: lambda *tensors: module.run(sizes)
    monkeypatch.setitem(sys.modules, "fla_kda_backend.op", module)
    return module


class World(types.SimpleNamespace):
    """Its facts are of hardware, which does not change under a call's verdict."""

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "facts":
            memo.clear()


@pytest.fixture
def world(monkeypatch, kda, op):
    """.call(**changes) is chunk_kda of an eligible prefill; .facts are what the rules are told."""
    from fla_kda_backend import backend, selfcheck

    world = World(facts=H200, op=op, backend=backend, selfcheck=selfcheck)
    monkeypatch.setattr(facts, "gather", lambda call: world.facts)
    monkeypatch.setattr(kda.chunk.ChunkKDAFunction, "apply", lambda *args: (FLAS, None))
    monkeypatch.setattr(backend, "_warned", set())
    monkeypatch.setattr(selfcheck, "_decisions", {})
    world.arguments = lambda **changes: prefill(device="cpu", **changes)
    world.call = lambda **changes: kda.chunk.chunk_kda(**world.arguments(**changes))
    with dispatch_log.capture() as world.seen, torch.no_grad():
        yield world
