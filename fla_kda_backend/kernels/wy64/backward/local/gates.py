"""The gradients of the gate's forms and of beta. d: the gradient of the natural log decay, or of what the form of beta made."""

from cutlass import Float32

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.wy64.prepare.gates import GATES, LOG2E

LN2 = 0.6931471805599453


def _sigmoid_of_log2(x):
    """1 / (1 + 2^-x)."""
    return ptx.rcp(Float32(1.0) + ptx.ex2(Float32(0.0) - x))


class BoundedGradient:
    """dg = d lb a s (1 - s), s = sigmoid(a z), z = g + dt_bias; dA_log = dg z."""

    def __init__(self, bias, a_log, gate_scale):
        self.bias = bias
        a = ptx.ex2(a_log * Float32(LOG2E))
        self.rate, self.factor = a * Float32(LOG2E), gate_scale * Float32(LN2) * a

    def __call__(self, g, d):
        z = g + self.bias
        x = z * self.rate
        dg = d * self.factor * _sigmoid_of_log2(x) * _sigmoid_of_log2(Float32(0.0) - x)
        return dg, dg * z


class SoftplusGradient:
    """dg = -a sigmoid(z) d; dA_log = d log decay."""

    def __init__(self, bias, a_log, gate_scale):
        self.bias = bias
        self.minus_a = Float32(0.0) - ptx.ex2(a_log * Float32(LOG2E))
        self.gate = GATES["softplus"](1.0)
        self.tables = self.gate.tables(a_log, [bias])

    def __call__(self, g, d):
        rate, (bias,) = self.tables
        (y,) = self.gate.log2_decay([g], rate, bias, None)
        dg = self.minus_a * _sigmoid_of_log2((g + self.bias) * Float32(LOG2E)) * d
        return dg, d * (y * Float32(LN2))


class GivenGradient:
    """dg = d."""

    def __init__(self, bias, a_log, gate_scale):
        pass

    def __call__(self, g, d):
        return d, d


GRADIENTS = {"bounded": BoundedGradient, "softplus": SoftplusGradient, "given": GivenGradient}
BETA_GRADIENTS = {
    "sigmoid": lambda d, b: d * b * (Float32(1.0) - b),
    "twice": lambda d, b: d * b * (Float32(1.0) - Float32(0.5) * b),
    "given": lambda d, b: d,
}
