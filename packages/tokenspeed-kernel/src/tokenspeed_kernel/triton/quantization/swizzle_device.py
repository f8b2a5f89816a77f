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
    """Copies ``BYTES`` bytes of scales between one matrix's row-major scales and its 128x4 tiles, which have ``size`` bytes in
    total.

    ``TO_TILES``: the direction.
    """
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


@triton.jit
def swizzle_words_kernel(
    linear_ptr,
    tiles_ptr,
    rows,
    columns,
    stride_batch,
    stride_row,
    ACROSS: tl.constexpr,
    TO_TILES: tl.constexpr,
):
    """Copies ``ACROSS`` neighbouring 128x4 tiles of scales from or to row-major scales; ``TO_TILES`` is the direction.

    The kernel copies int32 words of four scales. A row has ``columns`` words. Within a tile, word ``4 * r + q`` belongs to row
    ``r + 32 * q``.
    """
    down, across = tl.cdiv(rows, 128), tl.cdiv(columns, ACROSS)
    batch, index = (tl.program_id(0) // (down * across)).to(tl.int64), tl.program_id(0) % (down * across)
    first = index // across
    place = tl.arange(0, 128)
    column = index % across * ACROSS + tl.arange(0, ACROSS)
    # Rows are in memory order, so that accesses on both sides are coalesced.
    row = first * 128 + place
    linear = linear_ptr + batch * stride_batch + row.to(tl.int64)[:, None] * stride_row + column[None, :]
    held = (row < rows)[:, None] & (column < columns)[None, :]
    tiles = tiles_ptr + (batch * down + first) * columns * 128 + column.to(tl.int64)[:, None] * 128 + place[None, :]
    whole = (column < columns)[:, None] & (place >= 0)[None, :]
    if TO_TILES:
        words = tl.load(linear, mask=held, other=0)
        words = words.reshape(4, 32, ACROSS).permute(2, 1, 0).reshape(ACROSS, 128)
        tl.store(tiles, words, mask=whole)
    else:
        words = tl.load(tiles, mask=whole, other=0)
        words = words.reshape(ACROSS, 32, 4).permute(2, 1, 0).reshape(128, ACROSS)
        tl.store(linear, words, mask=held)
