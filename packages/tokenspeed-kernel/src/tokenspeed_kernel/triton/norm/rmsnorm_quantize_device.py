"""Device code of `rmsnorm_quantize`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.common_device import start
from tokenspeed_kernel.triton.norm.rmsnorm_device import normalise_rows
from tokenspeed_kernel.triton.quantization._encode_device import round_to
from tokenspeed_kernel.triton.quantization._quantised_rows_device import of_matrix, rows_of_program, store_quantised


@triton.jit(do_not_specialize=["rows", "programs"])
def rmsnorm_quantize_kernel(
    x,
    residual,
    weight,
    residual_out,
    codes,
    scales,
    given,
    rows,
    programs,
    hidden,
    eps,
    x_stride,
    residual_stride,
    weight_stride,
    residual_out_stride,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    FORM: tl.constexpr,
    EARLY: tl.constexpr,
):
    # Normalises ROWS whole rows, rounds them to x's dtype, and stores them quantised: ``codes`` and ``scales``, in the form FORM.
    # With a residual, also stores x + residual to ``residual_out``. ``given``: the static scale, if FORM has one.
    start(EARLY)
    first, before = rows_of_program(tl.program_id(0), programs, rows, ROWS, FORM)
    if FORM.scales == "tiles":
        codes, scales = of_matrix(codes, scales, before, rows, hidden, FORM)
        x += before * x_stride
        residual += before * residual_stride
        residual_out += before * residual_out_stride
    row = (first + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    INTERPRETED: tl.constexpr = FORM.interpreted
    normed = normalise_rows(
        x, residual, weight, residual_out, row, column, rows, hidden, eps, x_stride, residual_stride, weight_stride,
        residual_out_stride, HAS_RESIDUAL, INTERPRETED,
    )  # fmt: skip
    rounded = round_to(normed, x.dtype.element_ty, INTERPRETED).to(tl.float32)
    store_quantised(rounded, first, 0, rows, hidden, codes, scales, given, FORM)
