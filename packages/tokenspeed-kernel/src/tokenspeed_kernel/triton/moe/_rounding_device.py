"""Rounds activations to narrow formats. Activations are stored in the narrow format if the tensor cores support it. Otherwise the
rounded values are stored in a wider dtype, for MMAs in that dtype. Rows that may exceed float16's range are stored as float16 with
a scale per row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.quantization._encode_device import decode_e2m1, decode_e8m0, decode_fp8, encode_e2m1, encode_fp8
from tokenspeed_kernel_base.ops.quantization.encodings import SMALLEST_NORMAL

_SMALLEST_NORMAL = tl.constexpr(SMALLEST_NORMAL)


@triton.jit
def round_mxfp4(value):
    """Rounds float32 ``[rows, k]`` to mxfp4 values with blocks of 32 along k. The result is float32."""
    blocks = tl.reshape(value, [value.shape[0], value.shape[1] // 32, 32])
    # The bits of finite floats sort as their magnitudes do. The bits of infinities and NaN are larger.
    bits = blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    field = tl.max(bits, axis=2) >> 23
    exponent = tl.maximum(field - 2, 0)
    reciprocal = ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, :, None]
    rounded = decode_e2m1(encode_e2m1(blocks * reciprocal, blocks).to(tl.int32)) * decode_e8m0(exponent)[:, :, None]
    rounded = tl.where((field == 255)[:, :, None], float("nan"), rounded)
    return tl.reshape(rounded, [value.shape[0], value.shape[1]])


@triton.jit
def round_rows_kernel(
    x,
    x_row_stride,
    x_column_stride,
    q,
    scale,
    given,
    row_count,
    K,
    FORMAT: tl.constexpr,
    GIVEN: tl.constexpr,
    COUNTED: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rounds rows of x to e4m3 or float16, with one scale per row.

    q is contiguous: e4m3 if ``NATIVE``, else the e4m3 values in q's dtype. ``GIVEN``: whether all rows
    have the scale at ``given``. ``COUNTED``: whether ``row_count`` holds the number of rows; otherwise each program has a row.

    float16 rows have scales that are powers of two. Scaling makes a row's amax less than 2^15, so that no sum of two elements
    overflows.
    """
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(row_count) if COUNTED else row + 1
    if row >= count:
        return
    x += row * x_row_stride
    q += row * K
    column = tl.arange(0, BLOCK)
    if GIVEN:
        step = tl.load(given)
    else:
        largest = tl.zeros([BLOCK], tl.float32)
        for k in range(0, K, BLOCK):
            at = (k + column).to(tl.int64)
            value = tl.load(x + at * x_column_stride, mask=at < K, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(value))  # a NaN stays NaN in q, and makes the row's results NaN
        largest = tl.max(largest, axis=0)
        if FORMAT == "float16":
            field = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) - 14, 1)
            step = (field << 23).to(tl.float32, bitcast=True)
            reciprocal = ((254 - field) << 23).to(tl.float32, bitcast=True)
        else:
            step = tl.maximum(tl.div_rn(largest, 448.0), _SMALLEST_NORMAL)
    tl.store(scale + row, step)
    for k in range(0, K, BLOCK):
        at = (k + column).to(tl.int64)
        value = tl.load(x + at * x_column_stride, mask=at < K, other=0.0).to(tl.float32)
        if FORMAT == "float16":
            rounded = (value * reciprocal).to(tl.float16)
        else:
            value = tl.div_rn(value, tl.full([BLOCK], 1.0, tl.float32) * step)
            if NATIVE:
                rounded = value.to(tl.float8e4nv)
            else:
                rounded = decode_fp8(encode_fp8(value, "e4m3fn", False), "e4m3fn", False).to(q.dtype.element_ty)
        tl.store(q + at, rounded, mask=at < K)


@triton.jit
def round_rows_mxfp4_kernel(x, x_row_stride, x_column_stride, q, num_rows, K, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Rounds x to values that mxfp4 represents, and stores them in q's dtype. q is contiguous."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[None, :]
    inside = (row < num_rows) & (column < K)
    value = tl.load(x + row * x_row_stride + column * x_column_stride, mask=inside, other=0.0).to(tl.float32)
    tl.store(q + row * K + column, round_mxfp4(value).to(q.dtype.element_ty), mask=inside)
