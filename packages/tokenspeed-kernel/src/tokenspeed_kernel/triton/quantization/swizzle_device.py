"""Device code of `swizzle`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.quantization._encode_device import row_and_column_of


@triton.jit
def swizzle_kernel(
    linear_ptr,
    tiles_ptr,
    rows,
    columns,
    size,
    stride_batch,
    stride_row,
    stride_column,
    BYTES: tl.constexpr,
    TO_TILES: tl.constexpr,
):
    """``BYTES`` of one matrix's tiles, which take ``size`` bytes."""
    programs = tl.cdiv(size, BYTES)
    batch = (tl.program_id(0) // programs).to(tl.int64)
    at = tl.program_id(0) % programs * BYTES + tl.arange(0, BYTES)
    row, column = row_and_column_of(at, tl.cdiv(columns, 4))
    held = (row < rows) & (column < columns)
    linear = linear_ptr + batch * stride_batch + row.to(tl.int64) * stride_row + column * stride_column
    tiles = tiles_ptr + batch * size + at
    if TO_TILES:
        tl.store(tiles, tl.load(linear, mask=held, other=0), mask=at < size)
    else:
        tl.store(linear, tl.load(tiles, mask=held, other=0), mask=held)
