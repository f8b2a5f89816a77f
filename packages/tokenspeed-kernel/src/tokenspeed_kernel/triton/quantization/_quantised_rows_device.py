"""Device code of `_quantised_rows`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.quantization._encode_device import (
    divide,
    divide_any,
    encode_fp8,
    prepare_divisor,
    row_and_column_of,
    swizzled_in_tile,
)
from tokenspeed_kernel.triton.quantization.quantize_fp8_device import fp8_of_groups
from tokenspeed_kernel.triton.quantization.quantize_mx_device import mxfp8_of_blocks
from tokenspeed_kernel.triton.quantization.quantize_nvfp4_device import nvfp4_of_blocks


@triton.jit
def rows_of_program(program, programs, rows, ROWS: tl.constexpr, FORM: tl.constexpr):
    """Returns a program's first row, relative to its matrix, and the index of that matrix's first row (int64); see `Rows`."""
    if FORM.scales == "tiles":
        return program % programs * ROWS, (program // programs).to(tl.int64) * rows
    return program * ROWS, tl.zeros((), tl.int64)


@triton.jit
def of_matrix(codes, scales, before, rows, columns, FORM: tl.constexpr):
    """Returns pointers to one matrix's quantised values and scales. ``before``: the number of rows in the matrices before it."""
    if FORM.scales == "tiles":
        across = tl.cdiv(tl.cdiv(columns, FORM.group), 4)
        scales += before // rows * tl.cdiv(rows, 128) * across * 512
    return codes + before * (columns // (2 if FORM.name == "nvfp4" else 1)), scales


@triton.jit
def _complete_tiles(scales, row, rows, first, across, ROWS: tl.constexpr, TILES: tl.constexpr):
    """Zero-fills the scale rows of 128x4 tiles that no program covers.

    The programs that cover a row of tiles divide the row's tiles among themselves.

    ``first``: the column of the first of the ``TILES`` tiles that contain this program's scales. ``across``: tiles per row of
    tiles.
    """
    top = row // 128
    programs = tl.cdiv(rows - top * 128, ROWS)
    if programs * ROWS < 128:
        byte = tl.arange(0, 512)
        behind, _ = row_and_column_of(byte, 1)
        start = scales + (tl.cast(top, tl.int64) * across + first) * 512
        for tile in range((row - top * 128) // ROWS, tl.minimum(TILES, across - first), programs):
            tl.store(start + tile * 512 + byte, tl.zeros((512,), tl.uint8), mask=behind >= programs * ROWS)


@triton.jit
def store_quantised(values, row, first, rows, columns, codes, scales, given, FORM: tl.constexpr):
    """Quantises a tile in registers, and stores the quantised values and their scales.

    With one scale per row, the tile must hold whole rows. If scales are packed or in tiles of 128x4, the tile's columns must be a
    multiple of four groups. Padding scales are zero-filled.
    ``values``: float32 ``[ROWS, COLUMNS]``. The caller has already rounded them to the dtype of its input x (for example bfloat16),
    and has set elements outside the matrix to 0. ``row``, ``first``: the tile's first row and column within ``rows`` and
    ``columns``; ``first`` is a multiple of a group. ``given``: the scale that the caller passes, or the global scale of nvfp4.
    """
    ROWS: tl.constexpr = values.shape[0]
    COLUMNS: tl.constexpr = values.shape[1]
    FORMAT: tl.constexpr = FORM.format
    NATIVE: tl.constexpr = FORM.native
    INTERPRETED: tl.constexpr = FORM.interpreted
    STEPS: tl.constexpr = FORM.steps
    if FORM.group < 0:
        at_row = (row + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        column = first + tl.arange(0, COLUMNS)[None, :]
        factor, divisor, reciprocal = prepare_divisor(tl.load(given), INTERPRETED)
        code = encode_fp8(divide_any(values, factor, divisor, reciprocal, INTERPRETED, STEPS), FORMAT, NATIVE)
        tl.store(codes + at_row * columns + column, code, mask=(at_row < rows) & (column < columns))
    else:
        GROUP: tl.constexpr = FORM.group if FORM.group > 0 else COLUMNS
        ACROSS: tl.constexpr = COLUMNS // GROUP
        groups = tl.reshape(values, (ROWS * ACROSS, GROUP))
        index = tl.arange(0, ROWS * ACROSS)
        at_row, at_first = (row + index // ACROSS).to(tl.int64), first + index % ACROSS * GROUP
        there = (at_row < rows) & (at_first < columns)
        if FORM.name == "fp8":
            LIMIT: tl.constexpr = FORM.limit
            E8M0: tl.constexpr = FORM.e8m0
            code, scale = fp8_of_groups(groups, FORMAT, LIMIT, NATIVE, INTERPRETED, STEPS, E8M0)
        elif FORM.name == "mxfp8":
            UP: tl.constexpr = FORM.up
            code, scale = mxfp8_of_blocks(groups, UP, NATIVE)
        else:
            code, scale = nvfp4_of_blocks(groups, tl.load(given), NATIVE, INTERPRETED, STEPS)
        across, number = tl.cdiv(columns, GROUP), at_first // GROUP
        if FORM.scales == "rows":
            tl.store(scales + at_row * across + number, scale, mask=there)
        else:
            padded = tl.cdiv(across, 4) * 4
            scale = tl.where(there, scale, 0).to(tl.uint8)
            if FORM.scales == "packed":
                tl.store(scales + at_row * padded + number, scale, mask=(at_row < rows) & (number < padded))
            else:
                tile = at_row // 128 * (padded // 4) + number // 4
                inside_tiles = (at_row < tl.cdiv(rows, 128) * 128) & (number < padded)
                tl.store(scales + tile * 512 + swizzled_in_tile(at_row, number), scale, mask=inside_tiles)
                _complete_tiles(scales, row, rows, first // (4 * GROUP), padded // 4, ROWS, ACROSS // 4)
        ITEMS: tl.constexpr = 2 if FORM.name == "nvfp4" else 1
        within = tl.arange(0, GROUP // ITEMS)[None, :]
        inside = there[:, None] & (at_first[:, None] + within * ITEMS < columns)
        tl.store(codes + (at_row[:, None] * columns + at_first[:, None]) // ITEMS + within, code, mask=inside)


@triton.jit
def store_fp8_with(values, scale, row, first, rows, columns, codes, FORM: tl.constexpr):
    """Quantises a tile of one row to fp8 with a known scale, and stores the values. For the arguments, see `store_quantised`."""
    at_row = (row + tl.arange(0, values.shape[0])[:, None]).to(tl.int64)
    column = first + tl.arange(0, values.shape[1])[None, :]
    FORMAT: tl.constexpr = FORM.format
    NATIVE: tl.constexpr = FORM.native
    INTERPRETED: tl.constexpr = FORM.interpreted
    STEPS: tl.constexpr = FORM.steps
    factor, divisor, reciprocal = prepare_divisor(scale, INTERPRETED)
    code = encode_fp8(divide(values, factor, divisor, reciprocal, INTERPRETED, STEPS), FORMAT, NATIVE)
    tl.store(codes + at_row * columns + column, code, mask=(at_row < rows) & (column < columns))
