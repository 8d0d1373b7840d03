"""The forms of the gate and of beta. Nothing else in this folder knows their names.

A gate form makes y, the log2 decay of a token and channel, from g, A_log and dt_bias, in two steps. Once per chunk one warp
makes a rate and 128 biases from the head's A_log and dt_bias (`tables`; a form without parameters has none). Then all warps
make y of their g from these (`log2_decay`). They make y times `unit`, a power of two: y is summed on the tensor cores as fp16,
and the factor makes it fill the range of fp16 (decays.py).

To add a form: a class here and its name in GATES, its name in variant.py and its formula in kernel.py's docstring. Where y may
be less than -7.2 per token, `Variant.needs_levels` must be true.
"""

from cutlass import Float32

from fla_kda_backend.kernels import ptx

LOG2E = 1.4426950408889634
# log2(1 + t) / t on [0, 1] within 1.4e-6 of itself in fp32; minimax
LOG2_1P = (1.44269321, -0.721159469, 0.477668338, -0.339088892, 0.215284317, -0.0957973665, 0.0204011293)


class BoundedGate:
    """y = gate_scale * sigmoid(exp(A_log) * (g + dt_bias)), gate_scale = lower_bound * log2(e)."""

    has_tables = True

    def __init__(self, unit):
        self.unit = unit  # a power of two

    def tables(self, a_log, bias):
        """(rate, biases); a_log: 0 where there is none; bias: dt_bias of four channels."""
        rate = ptx.ex2(a_log * Float32(LOG2E)) * Float32(-LOG2E)
        return rate, [b * rate for b in bias]

    def constant(self, gate_scale):
        """What all calls of `log2_decay` share."""
        return ptx.rcp(gate_scale * Float32(self.unit))

    def log2_decay(self, g, rate, bias, over_scale):
        """y * unit = 1 / (over_scale * (1 + 2^(rate * g + bias))), of two tokens of a channel."""
        e = [ptx.ex2(ptx.fma(x, rate, bias)) for x in g]
        return [ptx.rcp(ptx.fma(x, over_scale, over_scale)) for x in e]


class SoftplusGate:
    """y = -log2(e) * exp(A_log) * softplus(g + dt_bias)."""

    has_tables = True

    def __init__(self, unit):
        self.unit = unit

    def tables(self, a_log, bias):
        rate = ptx.ex2(a_log * Float32(LOG2E))
        return rate * Float32(-self.unit), [b * Float32(LOG2E) for b in bias]

    def constant(self, gate_scale):
        return None

    def log2_decay(self, g, rate, bias, _):
        return [_log2_of_1_plus_exp2(ptx.fma(x, LOG2E, bias)) * rate for x in g]


class GivenGate:
    """y = log2(e) * g."""

    has_tables = False

    def __init__(self, unit):
        self.unit = unit

    def constant(self, gate_scale):
        return None

    def log2_decay(self, g, rate, bias, _):
        return [x * Float32(LOG2E * self.unit) for x in g]


GATES = {"bounded": BoundedGate, "softplus": SoftplusGate, "given": GivenGate}


def _log2_of_1_plus_exp2(x):
    """log2(1 + 2^x), relative error 2e-6: max(x, 0) + log2(1 + t), t = 2^-|x|."""
    t = ptx.ex2_negative(x)
    ratio = Float32(LOG2_1P[-1])
    for c in LOG2_1P[-2::-1]:
        ratio = ptx.fma(ratio, t, c)
    return ptx.fma(t, ratio, ptx.maximum(x, 0.0))


def _sigmoid(x):
    return ptx.rcp(Float32(1.0) + ptx.ex2(x * Float32(-LOG2E)))


def _twice_sigmoid(x):
    y = _sigmoid(x)
    return y + y


BETAS = {"sigmoid": _sigmoid, "twice": _twice_sigmoid, "given": lambda x: x}
