"""dequantize_fp8, dequantize_mxfp8, dequantize_mxfp4, dequantize_nvfp4: decode, times a scale, rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernel.triton.quantization._encode import (
    FP8_NAMES,
    abilities,
    decode_e2m1,
    decode_e8m0,
    decode_fp8,
    round_to,
    unpack_e2m1,
)
from tokenspeed_kernel.triton.quantization._rows import (
    as_matrix,
    config_for,
    finish,
    grid,
    groups_of,
    made_or,
    matrix_tile,
    rows_of,
)
from tokenspeed_kernel_base.ops.quantization.encodings import BLOCK_MX, BLOCK_NVFP4
from tokenspeed_kernel_base.ops.quantization.formats import scale_layout, scale_layouts


@triton.jit
def _dequantize_fp8(
    q_ptr,
    scale_ptr,
    out_ptr,
    rows,
    columns,
    q_stride,
    matrix_rows,
    block_rows,
    block_columns,
    scale_matrix_stride,
    scale_row_stride,
    scale_column_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    LAYOUT: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
):
    """Rows of matrices of ``matrix_rows`` rows each; ``block_rows`` by ``block_columns`` elements share a scale."""
    across = tl.cdiv(columns, COLUMNS)
    index = (tl.program_id(0) // across * ROWS + tl.arange(0, ROWS))[:, None]
    row = index.to(tl.int64)
    column = ((tl.program_id(0) % across).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < rows) & (column < columns)
    value = decode_fp8(tl.load(q_ptr + row * q_stride + column, mask=inside, other=0), FORMAT, NATIVE)
    if LAYOUT == "tensor":
        scale = tl.load(scale_ptr)
    elif LAYOUT == "token":
        scale = tl.load(scale_ptr + row * scale_row_stride, mask=row < rows)
    elif LAYOUT == "channel":
        scale = tl.load(scale_ptr + column * scale_column_stride, mask=column < columns)
    else:
        matrix = index // matrix_rows
        block = (index - matrix * matrix_rows) // block_rows
        at = matrix.to(tl.int64) * scale_matrix_stride + block.to(tl.int64) * scale_row_stride
        if ONE_BLOCK:  # all columns of the tile
            first = tl.program_id(0) % across * COLUMNS // block_columns
            scale = tl.load(scale_ptr + at + first * scale_column_stride, mask=row < rows)
        else:
            scale = tl.load(scale_ptr + at + column.to(tl.int32) // block_columns * scale_column_stride, mask=inside)
    value = round_to(value * scale, out_ptr.dtype.element_ty, INTERPRETED)
    tl.store(out_ptr + row * columns + column, value, mask=inside)


@triton.jit
def _dequantize_blocks(
    q_ptr,
    scale_ptr,
    global_scale_ptr,
    out_ptr,
    count,
    q_stride,
    q_outer_stride,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """``BLOCKS`` blocks of one outer row; the scales and the result are contiguous. FORMAT: e2m1, or that of an 8-bit float."""
    programs = tl.cdiv(count, BLOCKS)
    outer = (tl.program_id(0) // programs).to(tl.int64)
    index = (tl.program_id(0) % programs) * BLOCKS + tl.arange(0, BLOCKS)
    block = index.to(tl.int64)
    inside = (index < count)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    q_ptr += outer * q_outer_stride
    if FORMAT == "e2m1":
        packed = tl.load(q_ptr + block[:, None] * q_stride + tl.arange(0, BLOCK // 2)[None, :], mask=inside, other=0)
        value = decode_e2m1(unpack_e2m1(packed))
    else:
        value = decode_fp8(tl.load(q_ptr + block[:, None] * q_stride + at, mask=inside, other=0), FORMAT, NATIVE)
    block += outer * count
    byte = tl.load(scale_ptr + block, mask=index < count, other=0)
    if global_scale_ptr is None:
        scale = decode_e8m0(byte)
    else:
        scale = decode_fp8(byte, "e4m3fn", NATIVE) * tl.load(global_scale_ptr)
    tl.store(
        out_ptr + block[:, None] * BLOCK + at, round_to(value * scale[:, None], out_ptr.dtype.element_ty, INTERPRETED), mask=inside
    )


def dequantize_fp8(q: Tensor, scale: Tensor, out_dtype: torch.dtype, block_size: int, out: Tensor | None) -> Tensor:
    made = made_or(out, tuple(q.shape), out_dtype, q)
    if q.numel():
        layout = scale_layout(scale_layouts(q.shape, block_size), scale.shape)
        matrix = as_matrix(q, whole=layout == "tensor")
        rows, columns = matrix.shape
        tile = matrix_tile(matrix, most_columns=block_size if layout in ("block", "block2d") else None)
        able = abilities(q.device)
        tiled = layout == "block2d"
        scale = scale.contiguous()
        scale_columns = scale.shape[-1] if scale.ndim else 1
        _dequantize_fp8[(triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns),)](
            matrix,
            scale,
            made,
            rows,
            columns,
            matrix.stride(0),
            q.shape[-2] if tiled else rows,
            block_size if tiled else 1,
            block_size,
            scale.shape[-2] * scale_columns if tiled else 0,
            scale_columns,
            1,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            FORMAT=FP8_NAMES[q.dtype],
            NATIVE=able.native,
            INTERPRETED=able.interpreted,
            LAYOUT=layout,
            ONE_BLOCK=block_size % tile.columns == 0,
            num_warps=tile.warps,
        )
    return finish(made, out)


def dequantize_mxfp8(q: Tensor, scale: Tensor, out_dtype: torch.dtype, out: Tensor | None) -> Tensor:
    return _blocks(q, scale, None, BLOCK_MX, FP8_NAMES[q.dtype], out_dtype, out)


def dequantize_mxfp4(q: Tensor, scale: Tensor, out_dtype: torch.dtype, out: Tensor | None) -> Tensor:
    return _blocks(q, scale, None, BLOCK_MX, "e2m1", out_dtype, out)


def dequantize_nvfp4(q: Tensor, scale: Tensor, global_scale: Tensor, out_dtype: torch.dtype, out: Tensor | None) -> Tensor:
    return _blocks(q, scale, global_scale, BLOCK_NVFP4, "e2m1", out_dtype, out)


def _blocks(
    q: Tensor, scale: Tensor, global_scale: Tensor | None, block: int, fmt: str, out_dtype: torch.dtype, out: Tensor | None
) -> Tensor:
    per_byte = 2 if fmt == "e2m1" else 1
    made = made_or(out, (*q.shape[:-1], per_byte * q.shape[-1]), out_dtype, q)
    if q.numel():
        rows = rows_of(q)
        groups = groups_of(rows, block // per_byte)
        config = config_for(made.numel())
        blocks = config.tile // block
        able = abilities(q.device)
        _dequantize_blocks[grid(groups, blocks)](
            rows,
            scale.contiguous().view(torch.uint8),
            global_scale,
            made,
            groups.count,
            groups.stride,
            groups.outer_stride,
            BLOCKS=blocks,
            BLOCK=block,
            FORMAT=fmt,
            NATIVE=able.native,
            INTERPRETED=able.interpreted,
            num_warps=config.warps,
        )
    return finish(made, out)
