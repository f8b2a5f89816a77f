"""Triton matmul kernels, plain and block-scaled, with pointers and with tensor descriptors."""

import triton
import triton.language as tl


@triton.jit
def matmul(
    a_ptr, b_ptr, c_ptr, m, n, k, b_stride_k, b_stride_n,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, stages: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    """c [m, n] = a [m, k] @ b [k, n], accumulated in float32 (float64 for float64 operands). `masked` allows any m, n, k."""
    rows = tl.program_id(0) * block_m + tl.arange(0, block_m)
    columns = tl.program_id(1) * block_n + tl.arange(0, block_n)
    out_dtype: tl.constexpr = tl.float64 if a_ptr.dtype.element_ty == tl.float64 else tl.float32
    acc = tl.zeros((block_m, block_n), out_dtype)
    for first in tl.range(0, k, block_k, num_stages=stages):
        inner = first + tl.arange(0, block_k)
        a_at = a_ptr + rows[:, None] * k + inner[None, :]
        b_at = b_ptr + inner[:, None] * b_stride_k + columns[None, :] * b_stride_n
        if masked:
            a = tl.load(a_at, mask=(rows[:, None] < m) & (inner[None, :] < k), other=0.0)
            b = tl.load(b_at, mask=(inner[:, None] < k) & (columns[None, :] < n), other=0.0)
        else:
            a = tl.load(a_at)
            b = tl.load(b_at)
        acc = tl.dot(a, b, acc, out_dtype=out_dtype)
    c = acc.to(c_ptr.dtype.element_ty)
    c_at = c_ptr + rows[:, None] * n + columns[None, :]
    tl.store(c_at, c, mask=(rows[:, None] < m) & (columns[None, :] < n))


@triton.jit
def matmul_of_integers(a_ptr, b_ptr, c_ptr, m: tl.constexpr, n: tl.constexpr, k: tl.constexpr):
    """c [m, n] int32 = a [m, k] int8 @ b [k, n] int8."""
    rows, columns, inner = tl.arange(0, m), tl.arange(0, n), tl.arange(0, k)
    a = tl.load(a_ptr + rows[:, None] * k + inner[None, :])
    b = tl.load(b_ptr + inner[:, None] * n + columns[None, :])
    tl.store(c_ptr + rows[:, None] * n + columns[None, :], tl.dot(a, b, out_dtype=tl.int32))


@triton.jit
def scaled_matmul(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, c_ptr, m, n, k,
    a_format: tl.constexpr, b_format: tl.constexpr, a_pack: tl.constexpr, b_pack: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """c [m, n] float32 = (a [m, k] scaled) @ (b [n, k] scaled)^T.

    Each block of 32 elements along k has an e8m0 scale in a_scale [m, k / 32] and b_scale [n, k / 32]; fp4 operands hold two
    elements per byte (a_pack, b_pack = 2). A bf16 or f16 operand has no scale. The sizes are multiples of the blocks.
    """
    rows = tl.program_id(0) * block_m + tl.arange(0, block_m)
    columns = tl.program_id(1) * block_n + tl.arange(0, block_n)
    acc = tl.zeros((block_m, block_n), tl.float32)
    for first in tl.range(0, k, block_k, num_stages=stages):
        a_inner = first // a_pack + tl.arange(0, block_k // a_pack)
        b_inner = first // b_pack + tl.arange(0, block_k // b_pack)
        scales = first // 32 + tl.arange(0, block_k // 32)
        a = tl.load(a_ptr + rows[:, None] * (k // a_pack) + a_inner[None, :])
        b = tl.load(b_ptr + columns[None, :] * (k // b_pack) + b_inner[:, None])
        if a_format == "bf16" or a_format == "fp16":
            a_scale = None
        else:
            a_scale = tl.load(a_scale_ptr + rows[:, None] * (k // 32) + scales[None, :])
        if b_format == "bf16" or b_format == "fp16":
            b_scale = None
        else:
            b_scale = tl.load(b_scale_ptr + columns[:, None] * (k // 32) + scales[None, :])
        acc = tl.dot_scaled(a, a_scale, a_format, b, b_scale, b_format, acc)
    tl.store(c_ptr + rows[:, None] * n + columns[None, :], acc)


@triton.jit
def scaled_matmul_packed_across(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, c_ptr, k, a_format: tl.constexpr, a_along_k: tl.constexpr, b_along_k: tl.constexpr,
    m: tl.constexpr, n: tl.constexpr, block_k: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """c [m, n] float32 = (a [m, k] scaled) @ (b [n, k] scaled)^T, by one program. b is fp4.

    An fp4 operand with `along_k` holds two elements of k per byte: [m, k / 2]; otherwise a byte holds two rows: [k, m / 2].
    """
    a_pack: tl.constexpr = 2 if a_format == "e2m1" else 1
    acc = tl.zeros((m, n), tl.float32)
    for first in tl.range(0, k, block_k, num_stages=stages):
        inner, packed = first + tl.arange(0, block_k), first // 2 + tl.arange(0, block_k // 2)
        scales = first // 32 + tl.arange(0, block_k // 32)
        if a_along_k:
            of_a = first // a_pack + tl.arange(0, block_k // a_pack)
            a = tl.load(a_ptr + tl.arange(0, m)[:, None] * (k // a_pack) + of_a[None, :])
        else:
            a = tl.load(a_ptr + tl.arange(0, m // 2)[:, None] + inner[None, :] * (m // 2))
        if b_along_k:
            b = tl.load(b_ptr + tl.arange(0, n)[None, :] * (k // 2) + packed[:, None])
        else:
            b = tl.load(b_ptr + tl.arange(0, n // 2)[None, :] + inner[:, None] * (n // 2))
        a_scale = tl.load(a_scale_ptr + tl.arange(0, m)[:, None] * (k // 32) + scales[None, :])
        b_scale = tl.load(b_scale_ptr + tl.arange(0, n)[:, None] * (k // 32) + scales[None, :])
        acc = tl.dot_scaled(a, a_scale, a_format, b, b_scale, "e2m1", acc, lhs_k_pack=a_along_k, rhs_k_pack=b_along_k)
    tl.store(c_ptr + tl.arange(0, m)[:, None] * n + tl.arange(0, n)[None, :], acc)


@triton.jit
def matmul_by_descriptors(
    a_ptr, b_ptr, c_ptr, m, n, k, block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr
):  # fmt: skip
    """c [m, n] = a [m, k] @ b [n, k]^T for any m, n, k, by tensor descriptors that the kernel makes."""
    a = tl.make_tensor_descriptor(a_ptr, shape=[m, k], strides=[k, 1], block_shape=[block_m, block_k])
    b = tl.make_tensor_descriptor(b_ptr, shape=[n, k], strides=[k, 1], block_shape=[block_n, block_k])
    c = tl.make_tensor_descriptor(c_ptr, shape=[m, n], strides=[n, 1], block_shape=[block_m, block_n])
    row, column = tl.program_id(0) * block_m, tl.program_id(1) * block_n
    acc = tl.zeros((block_m, block_n), tl.float32)
    for first in range(0, k, block_k):
        acc = tl.dot(a.load([row, first]), b.load([column, first]).T, acc)
    c.store([row, column], acc.to(c_ptr.dtype.element_ty))


@triton.jit
def chained_products(a_ptr, b_ptr, c_ptr, out_ptr, size: tl.constexpr, depth: tl.constexpr):
    """out = (a [size, depth] @ b [size, depth]^T) @ c [size, depth]: attention without softmax. The intermediate matrix has a's
    dtype."""
    rows, inner = tl.arange(0, size), tl.arange(0, depth)
    at = rows[:, None] * depth + inner[None, :]
    a = tl.load(a_ptr + at)
    middle = tl.dot(a, tl.trans(tl.load(b_ptr + at)))
    tl.store(out_ptr + at, tl.dot(middle.to(a.dtype), tl.load(c_ptr + at)))


@triton.jit
def persistent_matmul(a_ptr, b_ptr, c_ptr, m, n, k, block: tl.constexpr, block_k: tl.constexpr):
    """c [m, n] = a [m, k] @ b [k, n] by a persistent kernel: programs stride over the tiles. The sizes are multiples of the
    blocks."""
    across = n // block
    for tile in range(tl.program_id(0), (m // block) * across, tl.num_programs(0)):
        rows = tile // across * block + tl.arange(0, block)
        columns = tile % across * block + tl.arange(0, block)
        acc = tl.zeros((block, block), tl.float32)
        for first in range(0, k, block_k):
            inner = first + tl.arange(0, block_k)
            a = tl.load(a_ptr + rows[:, None] * k + inner[None, :])
            b = tl.load(b_ptr + inner[:, None] * n + columns[None, :])
            acc = tl.dot(a, b, acc)
        tl.store(c_ptr + rows[:, None] * n + columns[None, :], acc)
