"""Device code of `dequantize`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.quantization._encode_device import (
    decode_e2m1,
    decode_e8m0,
    decode_fp8,
    round_to,
    swizzled_in_tile,
    unpack_e2m1,
)


@triton.jit
def dequantize_fp8_kernel(
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
    E8M0: tl.constexpr,
    LAYOUT: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
):
    """Dequantises one fp8 tile. A matrix has ``matrix_rows`` rows, and ``block_rows`` by ``block_columns`` elements share a
    scale.
    """
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
        if ONE_BLOCK:  # all columns of the tile lie in one block
            first = tl.program_id(0) % across * COLUMNS // block_columns
            scale = tl.load(scale_ptr + at + first * scale_column_stride, mask=row < rows)
        else:
            scale = tl.load(scale_ptr + at + column.to(tl.int32) // block_columns * scale_column_stride, mask=inside)
    if E8M0:
        scale = decode_e8m0(scale)
    value = round_to(value * scale, out_ptr.dtype.element_ty, INTERPRETED)
    tl.store(out_ptr + row * columns + column, value, mask=inside)


@triton.jit
def dequantize_blocks_kernel(
    q_ptr,
    scale_ptr,
    global_scale_ptr,
    out_ptr,
    count,
    q_stride,
    q_outer_stride,
    columns,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    SWIZZLED: tl.constexpr,
    NATIVE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Dequantises ``BLOCKS`` blocks of one outer row of q. Scales and output are contiguous. FORMAT: e2m1 or an 8-bit float's name.

    ``SWIZZLED``: the scales belong to one matrix with ``columns`` scales per row, in tiles of 128x4.
    """
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
    if SWIZZLED:
        row, column = block // columns, block % columns
        tile = row // 128 * tl.cdiv(columns, 4) + column // 4
        byte = tl.load(scale_ptr + tile * 512 + swizzled_in_tile(row, column), mask=index < count, other=0)
    else:
        byte = tl.load(scale_ptr + block, mask=index < count, other=0)
    if BLOCK == 32:
        scale = decode_e8m0(byte)
    else:
        scale = decode_fp8(byte, "e4m3fn", NATIVE)
    if global_scale_ptr is not None:
        scale *= tl.load(global_scale_ptr)
    tl.store(
        out_ptr + block[:, None] * BLOCK + at, round_to(value * scale[:, None], out_ptr.dtype.element_ty, INTERPRETED), mask=inside
    )
