"""Positions in a ring of stages, run on plain integers."""

import types

import pytest

pytest.importorskip("cutlass", reason="needs the CuTe DSL, nvidia-cutlass-dsl")

from fla_kda_backend.kernels import ring  # noqa: E402


@pytest.fixture
def position(monkeypatch):
    """RingPosition with its methods as they stand in the source, before the DSL compiles them."""
    monkeypatch.setattr(ring, "Int32", int)
    monkeypatch.setattr(ring, "const_expr", lambda value: value)
    for name in ("advance", "stage_before"):
        monkeypatch.setattr(ring.RingPosition, name, vars(ring.RingPosition)[name].__wrapped__)
    return ring.RingPosition


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("first", ["of_reader", "of_writer"])
def test_use_n_takes_stage_n_and_the_parity_of_its_phase(position, first, stages):
    at = getattr(position, first)(stages)
    opposite = first == "of_writer"
    for n in range(3 * stages + 1):
        assert (at.stage, at.phase) == (n % stages, (n // stages % 2) ^ opposite)
        assert n == 0 or at.stage_before() == (n - 1) % stages
        later = at.next()
        at.advance()
        assert (later.stage, later.phase) == (at.stage, at.phase)


def test_next_leaves_the_position(position):
    at = position.of_reader(2)
    at.next()
    assert (at.stage, at.phase) == (0, 0)


@pytest.mark.parametrize("stages, values", [(1, [1]), (3, [2, 1])])
def test_the_compiler_carries_what_changes(monkeypatch, position, stages, values):
    monkeypatch.setattr(ring, "Int32", lambda value: types.SimpleNamespace(ir_value=lambda: value, value=value))
    at = position(2 if stages > 1 else 0, 1, stages)
    assert at.__extract_mlir_values__() == values
    rebuilt = at.__new_from_mlir_values__(values)
    assert (rebuilt.stage.value, rebuilt.phase.value, rebuilt.stages) == (at.stage, at.phase, stages)
