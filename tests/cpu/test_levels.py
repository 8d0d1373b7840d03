"""Index maps, constants and shared-memory layout of the 16-token prepare kernel; needs the DSL for its imports, no GPU."""

import math

import pytest
import torch

pytest.importorskip("cutlass", reason="needs the CuTe DSL, nvidia-cutlass-dsl")

from fla_kda_backend.kernels.column_split.inputs import LOG2_1P  # noqa: E402
from fla_kda_backend.kernels.column_split.layout import Layout, word_at  # noqa: E402
from fla_kda_backend.kernels.column_split.levels import LEVELS, rank, token_of  # noqa: E402
from fla_kda_backend.kernels.column_split.record import (  # noqa: E402
    BETA,
    CHUNK,
    DECAY,
    DECAY_PAIR,
    RECORD_BYTES,
    ROW_BYTES,
    decay_at,
    fragment_at,
)
from fla_kda_backend.kernels.variant import Variant  # noqa: E402


def test_every_pair_of_tokens_is_an_entry_of_one_level():
    """As Levels.multiply takes them: rows and columns of the same block, `rank >> level`."""
    entries = [
        (token_of(row, level, 1), token_of(column, level, 0))
        for level in range(LEVELS)
        for row in range(CHUNK // 2)
        for column in range(CHUNK // 2)
        if row >> level == column >> level
    ]
    assert sorted(entries) == [(i, j) for i in range(CHUNK) for j in range(i)]


@pytest.mark.parametrize("level", range(LEVELS))
def test_ranks_number_the_tokens_of_each_half(level):
    for upper in (0, 1):
        tokens = [token for token in range(CHUNK) if token >> level & 1 == upper]
        assert [rank(token, level) for token in tokens] == list(range(CHUNK // 2))
        assert [token_of(row, level, upper) for row in range(CHUNK // 2)] == tokens


@pytest.mark.parametrize("robust, needs_levels", [(False, False), (True, False), (True, True)])
def test_regions_of_shared_memory_follow_each_other(robust, needs_levels):
    *regions, size = Layout.of(robust, needs_levels)
    there = [offset for offset in regions if offset is not None]
    assert there == sorted(set(there)) and there[0] >= RECORD_BYTES and there[-1] < size
    assert len(there) == (6 if needs_levels else 4 if robust else 2)


def test_every_word_of_a_record_belongs_to_one_element():
    words = [word_at(pair, half, i) for pair in range(64) for half in range(2) for i in range(8)]
    assert sorted(words) == list(range(0, CHUNK * ROW_BYTES, 4))
    decays = [decay_at(pair) + e * DECAY_PAIR for pair in range(64) for e in range(2)]
    assert sorted(decays) == list(range(DECAY, BETA, 4))
    elements = [fragment_at(i, j) for i in range(CHUNK) for j in range(CHUNK)]
    assert sorted(elements) == list(range(0, 512, 2))
    assert all(fragment_at(i, j) == fragment_at(i, 0) + fragment_at(0, j) for i in range(CHUNK) for j in range(CHUNK))


def test_series_of_the_softplus():
    z = torch.cat((torch.linspace(0, 1, 100_001), torch.logspace(-30, 0, 1000)))
    series = torch.full_like(z, LOG2_1P[-1])
    for coefficient in LOG2_1P[-2::-1]:
        series = series * z + coefficient
    exact = torch.log1p(z.double()) / (z.double() * math.log(2))
    exact[z == 0] = 1 / math.log(2)
    assert (series.double() / exact - 1).abs().max() < 3e-7


@pytest.mark.parametrize(
    "options",
    [
        {"gate": "sigmoid"},
        {"gate": "softplus", "a_log": None},
        {"gate": "given"},
        {"gate": "given", "a_log": None},
        {"gate_dtype": "fp16"},
        {"beta": "tanh"},
        {"beta_dtype": None},
        {"dt_bias": "fp64"},
    ],
)
def test_inputs_that_no_kernel_takes(options):
    with pytest.raises(ValueError, match="unsupported"):
        Variant(**options)
