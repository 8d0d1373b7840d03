"""The exact setting over a hundred million outputs: what happens once in so many must not escape the tests of few."""

import pytest
import torch
from gpu.launching import run
from kda_inputs import of_heads, random_inputs

from fla_kda_backend.reference import exact

pytestmark = pytest.mark.gpu


def test_exact_has_the_bits_of_the_reference_in_a_hundred_million_outputs(device):
    heads, tokens = 48, 16_384
    inputs = random_inputs(tokens, heads, device=device)
    out, state = run(inputs, "exact", 128)
    for head in range(0, heads, 8):  # the reference's workspace of all heads would be large
        some = slice(head, head + 8)
        expected, final = exact.forward(**of_heads(inputs, some))
        assert torch.equal(out[:, :, some], expected) and torch.equal(state[:, some], final), head
