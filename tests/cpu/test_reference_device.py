"""What the exact reference's GPU functions compile to; no GPU needed."""

import re

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fla_kda_backend.reference import device_math


def ptx_of(kernel, types, constants, **options):
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


@pytest.mark.parametrize(
    "instruction, arity",
    [
        ("ex2.approx.ftz.f32", 1),
        ("tanh.approx.f32", 1),
        ("rsqrt.approx.ftz.f32", 1),
        ("rcp.approx.ftz.f32", 1),
        ("mul.rn.ftz.f32", 2),
        ("add.rn.ftz.f32", 2),
        ("fma.rn.ftz.f32", 3),
    ],
)
def test_elementwise_is_one_instruction(instruction, arity):
    asm = device_math.assembly(instruction, arity)
    types = dict.fromkeys(("x", "y", "z", "out"), "*fp32") | {"count": "i64"}
    ptx = ptx_of(device_math.elementwise_kernel, types, {"ARITY": arity, "ASM": asm, "BLOCK": 128}, num_warps=4)
    assert re.findall(r"\S+\.f32 ", ptx) == [instruction + " "]  # 128 elements, 128 threads: once each


@pytest.mark.parametrize(
    "dtype, rows, columns, depth, tile",
    [
        ("bf16", 16, 16, 128, 16),
        ("bf16", 16, 128, 128, 64),
        ("bf16", 16, 128, 16, 64),
        ("bf16", 128, 128, 16, 64),
        ("fp16", 16, 16, 16, 16),
    ],
)
def test_products_are_mma_m16n8k16(dtype, rows, columns, depth, tile):
    half = dtype == "fp16"
    types = {"a": f"*{dtype}", "b": f"*{dtype}", "out": "*fp16" if half else "*fp32"}
    types |= {f"{operand}_{axis}": "i32" for operand in "ab" for axis in ("batch", "row", "column")}
    accumulator = tl.float16 if half else tl.float32
    constants = {"M": rows, "N": columns, "K": depth, "TILE_N": tile, "ACCUMULATOR": accumulator}
    ptx = ptx_of(device_math.product_kernel, types, constants, num_warps=1, num_stages=1)
    expected = "mma.sync.aligned.m16n8k16.row.col." + ("f16.f16.f16.f16" if half else "f32.bf16.bf16.f32")
    found = re.findall(r"\w*mma\.\S+", ptx)
    assert set(found) == {expected} and len(found) % (tile // 8) == 0
    assert not re.search(r"\b(add|fma)\S*\.(f16|f16x2|f32) ", ptx)  # no sum outside the tensor core
