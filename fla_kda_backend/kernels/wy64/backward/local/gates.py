"""The gradients of the gate's forms and of beta. d: the gradient of the natural log decay, or of what the form of beta made."""

from cutlass import Float32

from fla_kda_backend.kernels import ptx
from fla_kda_backend.kernels.wy64.prepare.gates import GATES, LOG2E

LN2 = 0.6931471805599453


class BoundedGradient:
    """dg = d lb a s (1 - s), s = sigmoid(a z), z = g + dt_bias; dA_log = dg z = dg g + dg dt_bias."""

    def __init__(self, bias, a_log, gate_scale):
        self.bias = bias
        a = ptx.ex2(a_log * Float32(LOG2E))
        self.minus_rate, self.factor = a * Float32(-LOG2E), gate_scale * Float32(LN2) * a
        self.start = bias * self.minus_rate

    def __call__(self, g, d):
        """dg, and two factors whose products are to be added up for `a_log_sum`."""
        s = ptx.rcp(Float32(1.0) + ptx.ex2(ptx.fma(g, self.minus_rate, self.start)))
        dg = d * self.factor * ptx.fma(-s, s, s)
        return dg, (dg, g)

    def a_log_sum(self, products, dg):
        """The sum of dA_log from the sums of the products and of dg."""
        return ptx.fma(dg, self.bias, products)


class SoftplusGradient:
    """dg = -a sigmoid(z) d; dA_log = d log decay."""

    def __init__(self, bias, a_log, gate_scale):
        self.start = bias * Float32(-LOG2E)
        self.minus_a = Float32(0.0) - ptx.ex2(a_log * Float32(LOG2E))
        self.gate = GATES["softplus"](1.0)
        self.tables = self.gate.tables(a_log, [bias])

    def __call__(self, g, d):
        rate, (bias,) = self.tables
        (y,) = self.gate.log2_decay([g], rate, bias, None)
        dg = self.minus_a * d * ptx.rcp(Float32(1.0) + ptx.ex2(ptx.fma(g, -LOG2E, self.start)))
        return dg, (d, y)

    def a_log_sum(self, products, dg):
        return products * Float32(LN2)


class GivenGradient:
    """dg = d."""

    def __init__(self, bias, a_log, gate_scale):
        pass

    def __call__(self, g, d):
        return d, (d, d)

    def a_log_sum(self, products, dg):
        return products


GRADIENTS = {"bounded": BoundedGradient, "softplus": SoftplusGradient, "given": GivenGradient}
BETA_GRADIENTS = {
    "sigmoid": lambda d, b: d * b * (Float32(1.0) - b),
    "twice": lambda d, b: d * b * (Float32(1.0) - Float32(0.5) * b),
    "given": lambda d, b: d,
}
