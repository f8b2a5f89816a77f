"""Device code of `quantize_fp8_with_scale`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.quantization._encode_device import divide_any, encode_fp8, prepare_divisor


@triton.jit
def quantize_with_scale_kernel(
    x_ptr,
    scale_ptr,
    q_ptr,
    rows,
    columns,
    x_stride,
    q_stride,
    scale_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    STEPS: tl.constexpr,
    SCALES: tl.constexpr,
):
    # Divides one tile [ROWS, COLUMNS] of x by given scales, and encodes the quotients as fp8.
    #
    # SCALES: ``"tensor"`` (one scale), ``"token"`` (a scale per row), otherwise a scale per column. ``scale_stride``: elements from
    # one scale to the next.
    across = tl.cdiv(columns, COLUMNS)
    row = ((tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = ((tl.program_id(0) % across).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if SCALES == "tensor":
        scale = tl.load(scale_ptr)
    elif SCALES == "token":
        scale = tl.load(scale_ptr + row * scale_stride, mask=row < rows, other=1.0)
    else:
        scale = tl.load(scale_ptr + column * scale_stride, mask=column < columns, other=1.0)
    factor, divisor, reciprocal = prepare_divisor(scale, INTERPRETED)
    quotient = divide_any(x, factor, divisor, reciprocal, INTERPRETED, STEPS)
    tl.store(q_ptr + row * q_stride + column, encode_fp8(quotient, FORMAT, NATIVE), mask=inside)
