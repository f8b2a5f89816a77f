"""Device code of `_quantised_rows`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.quantization._encode_device import divide, divide_any, encode_fp8, prepare_divisor
from tokenspeed_kernel.triton.quantization.quantize_fp8_device import fp8_of_groups
from tokenspeed_kernel.triton.quantization.quantize_mx_device import mxfp8_of_blocks
from tokenspeed_kernel.triton.quantization.quantize_nvfp4_device import nvfp4_of_blocks


@triton.jit
def store_quantised(values, row, first, rows, columns, codes, scales, given, FORM: tl.constexpr):
    """Quantises a tile and writes codes and scales.

    ``values``: float32 ``[ROWS, COLUMNS]``, rounded to the dtype that is quantised, 0 outside. ``row``, ``first``: the tile's first
    row and column, the latter a multiple of a group, of ``rows`` and ``columns``. ``given``: the scale of all elements where it is
    known, and the global scale of nvfp4. Where a row has one scale, the tile holds whole rows.
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
            code, scale = fp8_of_groups(groups, FORMAT, LIMIT, NATIVE, INTERPRETED, STEPS)
        elif FORM.name == "mxfp8":
            UP: tl.constexpr = FORM.up
            code, scale = mxfp8_of_blocks(groups, UP, NATIVE)
        else:
            code, scale = nvfp4_of_blocks(groups, tl.load(given), NATIVE, INTERPRETED, STEPS)
        across = tl.cdiv(columns, GROUP)
        tl.store(scales + at_row * across + at_first // GROUP, scale, mask=there)
        ITEMS: tl.constexpr = 2 if FORM.name == "nvfp4" else 1
        within = tl.arange(0, GROUP // ITEMS)[None, :]
        inside = there[:, None] & (at_first[:, None] + within * ITEMS < columns)
        tl.store(codes + (at_row[:, None] * columns + at_first[:, None]) // ITEMS + within, code, mask=inside)


@triton.jit
def store_fp8_with(values, scale, row, first, rows, columns, codes, FORM: tl.constexpr):
    """Writes the 8-bit codes of a tile as `store_quantised` has it, for the scale of its only row."""
    at_row = (row + tl.arange(0, values.shape[0])[:, None]).to(tl.int64)
    column = first + tl.arange(0, values.shape[1])[None, :]
    FORMAT: tl.constexpr = FORM.format
    NATIVE: tl.constexpr = FORM.native
    INTERPRETED: tl.constexpr = FORM.interpreted
    STEPS: tl.constexpr = FORM.steps
    factor, divisor, reciprocal = prepare_divisor(scale, INTERPRETED)
    code = encode_fp8(divide(values, factor, divisor, reciprocal, INTERPRETED, STEPS), FORMAT, NATIVE)
    tl.store(codes + at_row * columns + column, code, mask=(at_row < rows) & (column < columns))
