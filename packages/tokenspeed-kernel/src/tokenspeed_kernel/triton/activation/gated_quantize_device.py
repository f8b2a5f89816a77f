"""Device code of `gated_quantize`: the gated activation on float32 tiles, rounded to x's dtype, then quantised in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.activation.gated_device import gate_tile
from tokenspeed_kernel.triton.quantization._encode_device import larger, largest, round_to
from tokenspeed_kernel.triton.quantization._quantised_rows_device import (
    of_matrix,
    rows_of_program,
    store_fp8_with,
    store_quantised,
)
from tokenspeed_kernel.triton.quantization.quantize_fp8_device import scale_of


@triton.jit
def _rounded_tile(
    x,
    row,
    first,
    rows,
    intermediate,
    alpha,
    limit,
    beta,
    x_stride,
    PLAIN: tl.constexpr,
    CLAMPED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Returns the result of `gate_tile`, rounded to the dtype of x, as float32."""
    made = gate_tile(x, row, first, rows, intermediate, alpha, limit, beta, x_stride, PLAIN, CLAMPED, INTERLEAVED, COLUMNS)
    return round_to(made, x.dtype.element_ty, INTERPRETED).to(tl.float32)


@triton.jit(do_not_specialize=["rows", "programs", "column_tiles"])
def gated_quantize_kernel(
    x,
    codes,
    scales,
    given,
    rows,
    programs,
    intermediate,
    column_tiles,
    alpha,
    limit,
    beta,
    x_stride,
    PLAIN: tl.constexpr,
    CLAMPED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TWICE: tl.constexpr,
    FORM: tl.constexpr,
):
    """Computes the gated activation of a tile and quantises it.

    With ``TWICE``, a program computes all tiles of one row twice: first to find the row's amax, then to quantise.
    """
    INTERPRETED: tl.constexpr = FORM.interpreted
    first_row, before = rows_of_program(tl.program_id(0) // column_tiles, programs, rows, ROWS, FORM)
    if FORM.scales == "tiles":
        codes, scales = of_matrix(codes, scales, before, rows, intermediate, FORM)
        x += before * x_stride
    row = first_row + tl.arange(0, ROWS)[:, None]
    if TWICE:
        amax = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(0, intermediate, COLUMNS):
            made = _rounded_tile(
                x, row, first, rows, intermediate, alpha, limit, beta, x_stride, PLAIN, CLAMPED, INTERLEAVED, COLUMNS, INTERPRETED
            )
            amax = larger(amax, tl.abs(made))
        LIMIT: tl.constexpr = FORM.limit
        scale = scale_of(largest(largest(amax, 1), 0), LIMIT)
        tl.store(scales + first_row, scale)
        for first in range(0, intermediate, COLUMNS):
            made = _rounded_tile(
                x, row, first, rows, intermediate, alpha, limit, beta, x_stride, PLAIN, CLAMPED, INTERLEAVED, COLUMNS, INTERPRETED
            )
            store_fp8_with(made, scale, first_row, first, rows, intermediate, codes, FORM)
    else:
        first = (tl.program_id(0) % column_tiles) * COLUMNS
        made = _rounded_tile(
            x, row, first, rows, intermediate, alpha, limit, beta, x_stride, PLAIN, CLAMPED, INTERLEAVED, COLUMNS, INTERPRETED
        )
        store_quantised(made, first_row, first, rows, intermediate, codes, scales, given, FORM)
