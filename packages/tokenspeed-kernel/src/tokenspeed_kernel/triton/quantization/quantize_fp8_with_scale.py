"""quantize_fp8_with_scale: 8-bit floats with scales that are known beforehand, of the tensor, its rows or its columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernel.triton.quantization._encode import (
    FP8_NAMES,
    abilities,
    divide_any,
    division_steps,
    encode_fp8,
    prepare_divisor,
)
from tokenspeed_kernel.triton.quantization._rows import as_matrix, finish, made_or, matrix_tile

# Columns of a tile with a scale each.
_CHANNELS = 256


@triton.jit
def _quantize(
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


def quantize_fp8_with_scale(x: Tensor, scale: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    q = made_or(out, tuple(x.shape), dtype, x)
    if x.numel():
        one_scale = scale.ndim == 0 or tuple(scale.shape) == (1,)
        matrix = as_matrix(x, whole=one_scale)
        rows, columns = matrix.shape
        per_token = scale.ndim > 0 and tuple(scale.shape) == (*x.shape[:-1], 1)
        # A divisor is prepared once for all rows of a tile.
        tile = matrix_tile(matrix, most_columns=None if one_scale or per_token else _CHANNELS)
        scales = scale.reshape(-1)
        able = abilities(x.device)
        _quantize[(triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns),)](
            matrix,
            scales,
            q.view(torch.uint8),
            rows,
            columns,
            matrix.stride(0),
            columns,
            scales.stride(0),
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            FORMAT=FP8_NAMES[dtype],
            NATIVE=able.native,
            INTERPRETED=able.interpreted,
            STEPS=division_steps(x.dtype),
            SCALES="tensor" if one_scale else "token" if per_token else "channel",
            num_warps=tile.warps,
        )
    return finish(q, out)
