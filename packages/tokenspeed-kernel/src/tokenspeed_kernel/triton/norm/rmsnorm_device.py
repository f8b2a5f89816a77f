"""Device code of `rmsnorm`, and the float32 norm of a tile that fused kernels call (`normalise_rows`, `inverse_rms`)."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.common_device import start
from tokenspeed_kernel.triton.quantization._encode_device import round_to


@triton.jit
def inverse_root(squares, hidden, eps):
    """Returns 1 / sqrt(squares / hidden + eps). ``squares``: each row's sum of squares."""
    return tl.rsqrt(squares / hidden + eps)


@triton.jit
def inverse_rms(x, hidden, eps):
    """Returns 1 / sqrt(mean(x^2) + eps) per row, ``[ROWS, 1]``, of a float32 tile ``[ROWS, BLOCK]`` that is 0 beyond ``hidden``."""
    return inverse_root(tl.sum(x * x, axis=1, keep_dims=True), hidden, eps)


@triton.jit
def load_sum(x, residual, offsets, residual_offsets, inside, HAS_RESIDUAL: tl.constexpr, INTERPRETED: tl.constexpr):
    """Loads x; with a residual, returns x + residual, rounded to the residual's dtype. Elements outside ``inside`` are 0."""
    loaded = tl.load(x + offsets, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        added = tl.load(residual + residual_offsets, mask=inside, other=0.0)
        loaded = round_to(loaded.to(tl.float32) + added.to(tl.float32), added.dtype, INTERPRETED)
    return loaded


@triton.jit
def normalise_rows(
    x,
    residual,
    weight,
    residual_out,
    row,
    column,
    rows,
    hidden,
    eps,
    x_stride,
    residual_stride,
    weight_stride,
    residual_out_stride,
    HAS_RESIDUAL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Normalises rows that fit in one tile. With a residual, also stores x + residual to ``residual_out``.

    ``row`` and ``column`` are indices, int64 ``[ROWS, 1]`` and ``[1, BLOCK]``. Returns float32 ``[ROWS, BLOCK]``, 0 outside x.
    """
    inside = (row < rows) & (column < hidden)
    at, residual_at = row * x_stride + column, row * residual_stride + column
    total = load_sum(x, residual, at, residual_at, inside, HAS_RESIDUAL, INTERPRETED)
    scale = tl.load(weight + column * weight_stride, mask=column < hidden, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        tl.store(residual_out + row * residual_out_stride + column, total, mask=inside)
    wide = total.to(tl.float32)
    return wide * inverse_rms(wide, hidden, eps) * scale


@triton.jit(do_not_specialize=["rows"])
def rmsnorm_kernel(
    x,
    residual,
    weight,
    out,
    residual_out,
    rows,
    hidden,
    eps,
    x_stride,
    residual_stride,
    weight_stride,
    out_stride,
    residual_out_stride,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_PASS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    EARLY: tl.constexpr,
):
    # Normalises ROWS rows. With a residual, also stores x + residual, rounded to the residual's dtype, to ``residual_out``, and
    # normalises the rounded sum.
    #
    # With ONE_PASS, a row fits in one tile of BLOCK columns and is read once. Otherwise it is read twice, in blocks: for the sum of
    # squares, and for the result.
    start(EARLY)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    row_inside = row < rows
    row = row.to(tl.int64)
    if ONE_PASS:
        normed = normalise_rows(
            x, residual, weight, residual_out, row, column, rows, hidden, eps, x_stride, residual_stride, weight_stride,
            residual_out_stride, HAS_RESIDUAL, INTERPRETED,
        )  # fmt: skip
        rounded = round_to(normed, out.dtype.element_ty, INTERPRETED)
        tl.store(out + row * out_stride + column, rounded, mask=row_inside & (column < hidden))
    else:
        squares = tl.zeros((ROWS, BLOCK), tl.float32)
        for first in range(0, hidden, BLOCK):
            at = first + column
            inside = row_inside & (at < hidden)
            total = load_sum(x, residual, row * x_stride + at, row * residual_stride + at, inside, HAS_RESIDUAL, INTERPRETED)
            if HAS_RESIDUAL:
                tl.store(residual_out + row * residual_out_stride + at, total, mask=inside)
            wide = total.to(tl.float32)
            squares += wide * wide
        inverse = inverse_root(tl.sum(squares, axis=1, keep_dims=True), hidden, eps)
        # The second pass reads the sum from residual_out, because the first pass may have overwritten x and the residual.
        tl.debug_barrier()
        source = residual_out if HAS_RESIDUAL else x
        source_stride = residual_out_stride if HAS_RESIDUAL else x_stride
        for first in range(0, hidden, BLOCK):
            at = first + column
            inside = row_inside & (at < hidden)
            wide = tl.load(source + row * source_stride + at, mask=inside, other=0.0).to(tl.float32)
            scale = tl.load(weight + at * weight_stride, mask=at < hidden, other=0.0).to(tl.float32)
            rounded = round_to(wide * inverse * scale, out.dtype.element_ty, INTERPRETED)
            tl.store(out + row * out_stride + at, rounded, mask=inside)
