"""Index maps and constants of the 16-token prepare kernel; needs the DSL for its imports, no GPU."""

import math

import pytest
import torch

pytest.importorskip("cutlass", reason="needs the CuTe DSL, nvidia-cutlass-dsl")

from fla_kda_backend.kernels.column_split.inputs import LOG2_1P, InputOptions  # noqa: E402
from fla_kda_backend.kernels.column_split.levels import LEVELS, rank, token_of  # noqa: E402
from fla_kda_backend.kernels.column_split.record import CHUNK  # noqa: E402


def test_every_pair_of_tokens_is_an_entry_of_one_level():
    """As multiply_level takes them: rows and columns of the same block, `rank >> level`."""
    entries = [
        (token_of(row, level, 1), token_of(column, level, 0))
        for level in range(LEVELS)
        for row in range(CHUNK // 2)
        for column in range(CHUNK // 2)
        if row >> level == column >> level
    ]
    assert sorted(entries) == [(i, j) for i in range(CHUNK) for j in range(i)]


@pytest.mark.parametrize("level", range(LEVELS))
def test_tokens_have_places_of_their_own(level):
    for upper in (0, 1):
        tokens = [token for token in range(CHUNK) if token >> level & 1 == upper]
        assert [rank(token, level) for token in tokens] == list(range(CHUNK // 2))
        assert [token_of(place, level, upper) for place in range(CHUNK // 2)] == tokens


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
        InputOptions(**options)
