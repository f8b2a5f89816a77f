"""Device code of `layernorm`, in float32. The variance is the mean of squared differences from the mean, which takes a second
reduction, but does not cancel if the mean is large.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.common_device import start
from tokenspeed_kernel.triton.norm.rmsnorm_device import inverse_root, load_sum
from tokenspeed_kernel.triton.quantization._encode_device import round_to


@triton.jit
def _scaled(
    centred, inverse, weight, bias, column, hidden, weight_stride, bias_stride, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Returns ``centred * inverse * weight + bias``, float32."""
    normed = centred * inverse
    if HAS_WEIGHT:
        normed *= tl.load(weight + column * weight_stride, mask=column < hidden, other=0.0).to(tl.float32)
    if HAS_BIAS:
        normed += tl.load(bias + column * bias_stride, mask=column < hidden, other=0.0).to(tl.float32)
    return normed


@triton.jit
def _mean_and_inverse(source, row_inside, row, column, hidden, eps, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the mean and 1 / sqrt(variance + eps) of rows that do not fit in registers. Reads the rows twice.

    The variance is the mean of squared differences from the mean, because sums of x^2 lose accuracy if the mean is far from 0.
    """
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(0, hidden, BLOCK):
        inside = row_inside & (first + column < hidden)
        total += tl.load(source + row * stride + first + column, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=1, keep_dims=True) / hidden
    squares = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(0, hidden, BLOCK):
        inside = row_inside & (first + column < hidden)
        wide = tl.load(source + row * stride + first + column, mask=inside, other=0.0).to(tl.float32)
        centred = tl.where(inside, wide - mean, 0.0)
        squares += centred * centred
    return mean, inverse_root(tl.sum(squares, axis=1, keep_dims=True), hidden, eps)


@triton.jit(do_not_specialize=["rows"])
def layernorm_kernel(
    x,
    residual,
    weight,
    out,
    residual_out,
    bias,
    rows,
    hidden,
    eps,
    x_stride,
    residual_stride,
    weight_stride,
    out_stride,
    residual_out_stride,
    bias_stride,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_PASS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    EARLY: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    # Normalises ROWS rows. With a residual, also stores x + residual, rounded to the residual's dtype, to ``residual_out``, and
    # normalises the rounded sum.
    #
    # With ONE_PASS, a row fits in one tile of BLOCK columns and is read once. Otherwise it is read in blocks: once for the residual
    # add if there is one, twice for mean and variance, once for the result.
    start(EARLY)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    row_inside = row < rows
    row = row.to(tl.int64)
    if ONE_PASS:
        inside = row_inside & (column < hidden)
        total = load_sum(x, residual, row * x_stride + column, row * residual_stride + column, inside, HAS_RESIDUAL, INTERPRETED)
        if HAS_RESIDUAL:
            tl.store(residual_out + row * residual_out_stride + column, total, mask=inside)
        wide = total.to(tl.float32)
        centred = tl.where(inside, wide - tl.sum(wide, axis=1, keep_dims=True) / hidden, 0.0)
        inverse = inverse_root(tl.sum(centred * centred, axis=1, keep_dims=True), hidden, eps)
        normed = _scaled(centred, inverse, weight, bias, column, hidden, weight_stride, bias_stride, HAS_WEIGHT, HAS_BIAS)
        tl.store(out + row * out_stride + column, round_to(normed, out.dtype.element_ty, INTERPRETED), mask=inside)
    else:
        source, source_stride = x, x_stride
        if HAS_RESIDUAL:
            for first in range(0, hidden, BLOCK):
                at = first + column
                inside = row_inside & (at < hidden)
                total = load_sum(x, residual, row * x_stride + at, row * residual_stride + at, inside, True, INTERPRETED)
                tl.store(residual_out + row * residual_out_stride + at, total, mask=inside)
            # The following passes read the sum from residual_out, because this pass may have overwritten x and the residual.
            tl.debug_barrier()
            source, source_stride = residual_out, residual_out_stride
        mean, inverse = _mean_and_inverse(source, row_inside, row, column, hidden, eps, source_stride, ROWS, BLOCK)
        for first in range(0, hidden, BLOCK):
            at = first + column
            inside = row_inside & (at < hidden)
            centred = tl.load(source + row * source_stride + at, mask=inside, other=0.0).to(tl.float32) - mean
            normed = _scaled(centred, inverse, weight, bias, at, hidden, weight_stride, bias_stride, HAS_WEIGHT, HAS_BIAS)
            tl.store(out + row * out_stride + at, round_to(normed, out.dtype.element_ty, INTERPRETED), mask=inside)
