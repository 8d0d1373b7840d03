"""The gate's formulas of both families on plain floats, against double precision; needs the DSL for its imports, no GPU.

The formulas are ordinary Python on the functions of ptx.py, so here these are replaced by Python's own. What the instructions
round is left to the GPU tests.
"""

import math
import types

import pytest
import torch

pytest.importorskip("cutlass", reason="needs the CuTe DSL, nvidia-cutlass-dsl")

from fla_kda_backend.kernels.column_split import inputs  # noqa: E402
from fla_kda_backend.kernels.variant import BETAS, GATES, Variant  # noqa: E402
from fla_kda_backend.kernels.wy64.prepare import gates  # noqa: E402
from fla_kda_backend.reference import gold  # noqa: E402
from fla_kda_backend.testing.gates import GATE_FORMS  # noqa: E402

LOG2E = 1 / math.log(2)
LOWER_BOUND = -4.0
MATH = types.SimpleNamespace(
    ex2=lambda x: 2.0**x,
    ex2_negative=lambda x: 2.0 ** -abs(x),
    rcp=lambda x: 1 / x,
    fma=lambda a, b, c: a * b + c,
    mul=lambda a, b: a * b,
    add=lambda a, b: a + b,
    tanh=math.tanh,
    maximum=lambda a, b: b if math.isnan(a) else a if math.isnan(b) else max(a, b),
    max_nan=lambda a, b: math.nan if math.isnan(a) or math.isnan(b) else max(a, b),
    absolute=abs,
)
G = (-6.0, -1.3, -0.2, 0.0, 0.4, 2.5, 9.0)
PARAMETERS = [(a_log, bias) for a_log in (-1.2, 0.0, 0.9) for bias in (-0.7, 0.0, 0.6)]


@pytest.fixture(autouse=True)
def plain_floats(monkeypatch):
    for module in (gates, inputs):
        monkeypatch.setattr(module, "ptx", MATH)
        monkeypatch.setattr(module, "Float32", float)


def variant_of(gate):
    a_logs, dt_biases = GATES[gate]
    return Variant(gate=gate, a_log=a_logs[-1], dt_bias=dt_biases[-1])


def wanted(gate, g, a_log, bias):
    """log2 of the decay."""
    flags = GATE_FORMS[gate].flags(LOWER_BOUND)
    if not flags.pop("use_gate_in_kernel"):
        return g * LOG2E
    flags.pop("safe_gate")
    one = torch.tensor([[g]], dtype=torch.float64)
    return gold.log_decay(one, torch.tensor([a_log]), torch.tensor([[bias]]), **flags).item() * LOG2E


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("a_log, bias", PARAMETERS)
@pytest.mark.parametrize("unit", [2.0**8, 2.0**13])
def test_the_64_token_familys_log2_decay(gate, a_log, bias, unit):
    form = gates.GATES[gate](unit)
    rate, biases = form.tables(a_log, [bias] * 4) if form.has_tables else (None, [None] * 4)
    constant = form.constant(LOWER_BOUND * LOG2E)
    for pair in zip(G, reversed(G)):
        g = [-abs(x) for x in pair] if gate == "given" else pair
        found = form.log2_decay(g, rate, biases[0], constant)
        assert found == pytest.approx([wanted(gate, x, a_log, bias) * unit for x in g], rel=1e-5, abs=1e-6 * unit)


# The exact arithmetic takes FlashKDA's call alone.
@pytest.mark.parametrize("gate, robust", [*((gate, True) for gate in GATES), ("bounded", False)])
@pytest.mark.parametrize("a_log, bias", PARAMETERS)
def test_the_16_token_familys_log2_decay(gate, robust, a_log, bias):
    part = inputs.Inputs(variant_of(gate), robust)
    rate = part.gate_rate(math.exp(a_log))
    for x in G:
        g = -abs(x) if gate == "given" else x
        found = part.log2_decay(g, bias, rate, LOWER_BOUND * LOG2E)
        assert found == pytest.approx(wanted(gate, g, a_log, bias), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("gate", GATES)
def test_nan_stays_nan(gate):
    """A NaN in g must not become a decay of nothing."""
    form = gates.GATES[gate](256.0)
    rate, biases = form.tables(0.3, [0.1] * 4) if form.has_tables else (None, [None] * 4)
    found = form.log2_decay([math.nan, -1.0], rate, biases[0], form.constant(-4.0 * LOG2E))
    assert math.isnan(found[0]) and not math.isnan(found[1])
    part = inputs.Inputs(variant_of(gate), robust=True)
    assert math.isnan(part.log2_decay(math.nan, 0.1, part.gate_rate(1.3), -4.0 * LOG2E))


@pytest.mark.parametrize("beta", BETAS)
def test_beta(beta):
    for x in G:
        sigmoid = 1 / (1 + math.exp(-x))
        assert gates.BETAS[beta](x) == pytest.approx({"sigmoid": sigmoid, "twice": 2 * sigmoid, "given": x}[beta])
