"""The device's arithmetic emulated on the CPU, with the function set of device_math.

It comes near the device's arithmetic, but is not the same: accurate functions stand for the approximate instructions, from
which they differ in the last bits, and a matrix product sums each block of 16 products in double precision. All tensors are
fp32 unless a line says otherwise.
"""

import torch

SMALLEST_NORMAL = 2.0**-126


def flush(x):
    """x with subnormals replaced by zero of the same sign, as the `.ftz` instructions do with operands and results."""
    if not isinstance(x, torch.Tensor):
        return x
    return torch.where(x.abs() < SMALLEST_NORMAL, x * 0, x)


def ex2(x):
    """2^x, for `ex2.approx.ftz.f32`."""
    return flush(torch.exp2(flush(x)))


def tanh(x):
    """tanh(x), for `tanh.approx.f32`."""
    return torch.tanh(x)


def rsqrt(x):
    """1/sqrt(x), for `rsqrt.approx.ftz.f32`."""
    return torch.rsqrt(flush(x))


def rcp(x):
    """1/x, for `rcp.approx.ftz.f32`."""
    return flush(torch.reciprocal(flush(x)))


def mul(x, y):
    """x * y, for `mul.rn.ftz.f32`."""
    return flush(flush(x) * flush(y))


def add(x, y):
    """x + y, for `add.rn.ftz.f32`."""
    return flush(flush(x) + flush(y))


def fma(x, y, z):
    """x * y + z rounded once, for `fma.rn.ftz.f32` (double precision holds the product exactly)."""
    x, y, z = (flush(torch.as_tensor(operand, dtype=torch.float32)).double() for operand in (x, y, z))
    return flush((x * y + z).float())


def product(a, b, dtype=torch.float32):
    """a . b by k16 steps in ascending order from a zero accumulator, for `mma.sync.m16n8k16`.

    a [..., M, K], b [..., K, N], both bf16 or both fp16, K a multiple of 16; dtype: of the accumulator and the
    result. The tensor core truncates where this rounds to nearest: about one bf16 result in 10,000 differs.
    """
    total = None
    for k in range(0, a.shape[-1], 16):
        step = a[..., k : k + 16].double() @ b[..., k : k + 16, :].double()
        total = (step if total is None else total.double() + step).to(dtype)
    return total
