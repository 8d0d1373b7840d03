"""The device's own arithmetic on CUDA tensors: the functions of host_math, through small Triton kernels.

Each function runs exactly the instruction that its docstring names: its results have the bits of a hand-written kernel.
Tensors are fp32 unless a line says otherwise; every argument but the first may be a Python number instead.
"""

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def elementwise_kernel(x, y, z, out, count, ARITY: tl.constexpr, ASM: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < count
    a = tl.load(x + index, mask=mask)
    if ARITY == 1:
        result = tl.inline_asm_elementwise(ASM, "=f,f", [a], dtype=tl.float32, is_pure=True, pack=1)
    elif ARITY == 2:
        b = tl.load(y + index, mask=mask)
        result = tl.inline_asm_elementwise(ASM, "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1)
    else:
        b = tl.load(y + index, mask=mask)
        c = tl.load(z + index, mask=mask)
        result = tl.inline_asm_elementwise(ASM, "=f,f,f,f", [a, b, c], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(out + index, result, mask=mask)


@triton.jit
def product_kernel(
    a,  # [batch, M, K]
    b,  # [batch, K, N]
    out,  # [batch, M, N], contiguous
    a_batch,
    a_row,
    a_column,
    b_batch,
    b_row,
    b_column,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TILE_N: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):
    """One warp and one tile of 16 rows per program: `tl.dot` can then only become mma.sync.m16n8k16 (wgmma needs 4 warps
    and 64 rows), and a dot of depth 16 is one such instruction per 8 columns. The loop fixes the order of k."""
    batch = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * 16 + tl.arange(0, 16)
    columns = tl.program_id(2) * TILE_N + tl.arange(0, TILE_N)
    depth = tl.arange(0, 16)
    a_tile = a + batch * a_batch + rows[:, None] * a_row + depth[None, :] * a_column
    b_tile = b + batch * b_batch + depth[:, None] * b_row + columns[None, :] * b_column
    total = tl.zeros((16, TILE_N), dtype=ACCUMULATOR)
    for k in range(0, K, 16):
        total = tl.dot(tl.load(a_tile + k * a_column), tl.load(b_tile + k * b_row), total, out_dtype=ACCUMULATOR)
    tl.store(out + batch * M * N + rows[:, None] * N + columns[None, :], total)


def _elementwise(instruction, *operands):
    operands = [torch.as_tensor(x, dtype=torch.float32, device=operands[0].device) for x in operands]
    operands = [x.contiguous() for x in torch.broadcast_tensors(*operands)]
    out = torch.empty_like(operands[0])
    if out.numel():
        arity = len(operands)
        x, y, z = (operands * 3)[:3]  # the kernel reads only as many as the instruction has
        grid = (triton.cdiv(out.numel(), BLOCK),)
        with torch.cuda.device_of(out):
            elementwise_kernel[grid](x, y, z, out, out.numel(), ARITY=arity, ASM=assembly(instruction, arity), BLOCK=BLOCK)
    return out


def assembly(instruction, arity):
    """The inline form of an instruction with one result and `arity` operands."""
    return f"{instruction} {', '.join(f'${i}' for i in range(arity + 1))};"


def ex2(x):
    """`ex2.approx.ftz.f32`"""
    return _elementwise("ex2.approx.ftz.f32", x)


def tanh(x):
    """`tanh.approx.f32`"""
    return _elementwise("tanh.approx.f32", x)


def rsqrt(x):
    """`rsqrt.approx.ftz.f32`"""
    return _elementwise("rsqrt.approx.ftz.f32", x)


def rcp(x):
    """`rcp.approx.ftz.f32`"""
    return _elementwise("rcp.approx.ftz.f32", x)


def mul(x, y):
    """`mul.rn.ftz.f32`"""
    return _elementwise("mul.rn.ftz.f32", x, y)


def add(x, y):
    """`add.rn.ftz.f32`"""
    return _elementwise("add.rn.ftz.f32", x, y)


def fma(x, y, z):
    """`fma.rn.ftz.f32`: x * y + z"""
    return _elementwise("fma.rn.ftz.f32", x, y, z)


def product(a, b, dtype=torch.float32):
    """a . b by `mma.sync.aligned.m16n8k16`, k-blocks in ascending order from a zero accumulator.

    a [..., M, K], b [..., K, N] with equal leading dimensions, both bf16 or both fp16; dtype: of the accumulator and
    the result, fp32, or fp16 for fp16 operands. Raises ValueError unless M, N and K are multiples of 16.
    """
    *leading, rows, depth = a.shape
    columns = b.shape[-1]
    if rows % 16 or columns % 16 or depth % 16:
        raise ValueError(f"requires M, N and K to be multiples of 16, got {rows}, {columns} and {depth}")
    out = torch.empty(*leading, rows, columns, dtype=dtype, device=a.device)
    if out.numel():
        a, b = a.flatten(0, -3), b.flatten(0, -3)
        tile = 64 if columns % 64 == 0 else 16
        with torch.cuda.device_of(out):
            product_kernel[(a.shape[0], rows // 16, columns // tile)](
                a,
                b,
                out,
                *a.stride(),
                *b.stride(),
                M=rows,
                N=columns,
                K=depth,
                TILE_N=tile,
                ACCUMULATOR=tl.float16 if dtype == torch.float16 else tl.float32,
                num_warps=1,
                num_stages=1,
            )
    return out
