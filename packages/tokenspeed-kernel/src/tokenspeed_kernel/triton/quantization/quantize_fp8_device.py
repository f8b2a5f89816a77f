"""Device code of `quantize_fp8`, by granularity of the scale.

* `quantize_groups_kernel`: groups of consecutive elements (rows, blocks) that fit in registers; x is read once.
* `quantize_regions_kernel`: 2D tiles, and groups that do not fit in registers; one program per scale.
* `partial_maxima_kernel` and `quantize_tensor_kernel`: one scale for the whole tensor, in two launches.

The scale is ``amax / LIMIT``, at least the smallest normal float32, so that no division is by 0. `divide` corrects the quotient
that a multiplication by the reciprocal gives, so that codes are those of a true division. A NaN makes the scale NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.quantization._encode_device import divide, encode_fp8, larger, largest, prepare_divisor
from tokenspeed_kernel.triton.quantization.quantize_mx_device import scale_of_blocks
from tokenspeed_kernel_base.ops.quantization.encodings import SMALLEST_NORMAL

_SMALLEST_NORMAL = tl.constexpr(SMALLEST_NORMAL)


@triton.jit
def scale_of(amax, LIMIT: tl.constexpr):
    """Returns the float32 scale of a group of elements, given their amax. LIMIT: the largest finite value of the 8-bit format."""
    scale = tl.div_rn(amax, LIMIT)
    return tl.maximum(scale, _SMALLEST_NORMAL, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _stored_and_prepared(amax, FORMAT: tl.constexpr, LIMIT: tl.constexpr, INTERPRETED: tl.constexpr, E8M0: tl.constexpr):
    """Returns ``(scale, factor, divisor, reciprocal)`` for groups, given their amax: the scales as stored, and arguments of
    `_encoded`.
    """
    if E8M0:
        exponent, bits, divisor = scale_of_blocks(amax, FORMAT, True)
        scale, factor, reciprocal = exponent.to(tl.uint8), bits.to(tl.float32, bitcast=True), divisor
    else:
        scale = scale_of(amax, LIMIT)
        factor, divisor, reciprocal = prepare_divisor(scale, INTERPRETED)
    return scale, factor, divisor, reciprocal


@triton.jit
def _encoded(
    x,
    factor,
    divisor,
    reciprocal,
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    STEPS: tl.constexpr,
    E8M0: tl.constexpr,
):
    """Divides float32 by the scales prepared by `_stored_and_prepared`, and encodes the quotients as fp8."""
    if E8M0:  # factor is the scale's reciprocal, a power of two, and divisor is a mask for the encoded values
        code = (encode_fp8(x * factor, FORMAT, NATIVE) & divisor).to(tl.uint8)
    else:
        code = encode_fp8(divide(x, factor, divisor, reciprocal, INTERPRETED, STEPS), FORMAT, NATIVE)
    return code


@triton.jit
def fp8_of_groups(
    x,
    FORMAT: tl.constexpr,
    LIMIT: tl.constexpr,
    NATIVE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    STEPS: tl.constexpr,
    E8M0: tl.constexpr,
):
    """Quantises groups, float32 ``[GROUPS, LENGTH]``, to fp8. Also returns their scales ``[GROUPS]``: float32, or uint8 with
    ``E8M0``.
    """
    scale, factor, divisor, reciprocal = _stored_and_prepared(largest(x, 1), FORMAT, LIMIT, INTERPRETED, E8M0)
    code = _encoded(x, factor[:, None], divisor[:, None], reciprocal[:, None], FORMAT, NATIVE, INTERPRETED, STEPS, E8M0)
    return code, scale


@triton.jit
def _store_scale_of_region(scale_ptr, scale, region, regions_k, PACKED: tl.constexpr):
    """Stores the scale of a region of the matrix.

    ``PACKED``: whether four one-byte scales share an int32. If so, the last region of a row of regions also stores the zeros that
    pad the row's scales to whole int32.
    """
    if PACKED:
        pitch = tl.cdiv(regions_k, 4) * 4
        column = region % regions_k
        reach = tl.where(column == regions_k - 1, pitch - column, 1)
        at = tl.arange(0, 4)
        byte = tl.where(at == 0, scale, 0).to(tl.uint8)
        tl.store(scale_ptr + (region // regions_k).to(tl.int64) * pitch + column + at, byte, mask=at < reach)
    else:
        tl.store(scale_ptr + region, scale)


@triton.jit
def quantize_groups_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    count,
    length,
    limit,
    x_stride,
    x_outer_stride,
    SHORT_LAST: tl.constexpr,
    GROUPS: tl.constexpr,
    LENGTH: tl.constexpr,
    FULL: tl.constexpr,
    FORMAT: tl.constexpr,
    LIMIT: tl.constexpr,
    NATIVE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    STEPS: tl.constexpr,
    E8M0: tl.constexpr,
):
    """Quantises ``GROUPS`` groups of one outer row of x (see `_rows.Groups`). q and the scales are contiguous. Packed scales are
    padded with groups of scale 0.
    """
    programs = tl.cdiv(count, GROUPS)
    outer = (tl.program_id(0) // programs).to(tl.int64)
    group = (tl.program_id(0) % programs) * GROUPS + tl.arange(0, GROUPS)
    within = tl.arange(0, LENGTH)[None, :]
    inside = (group < count)[:, None]
    if not FULL:
        inside = inside & (within < length)
    if SHORT_LAST:
        inside = inside & (group[:, None] * length + within < limit)
    wide_group = group.to(tl.int64)[:, None]
    x = tl.load(x_ptr + outer * x_outer_stride + wide_group * x_stride + within, mask=inside, other=0.0).to(tl.float32)
    code, scale = fp8_of_groups(x, FORMAT, LIMIT, NATIVE, INTERPRETED, STEPS, E8M0)
    tl.store(scale_ptr + outer * count + group, scale, mask=group < count)
    tl.store(q_ptr + outer * limit + wide_group * length + within, code, mask=inside)


@triton.jit
def quantize_regions_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    m,
    k,
    rows,
    columns,
    regions_m,
    regions_k,
    x_batch_stride,
    x_row_stride,
    FORMAT: tl.constexpr,
    LIMIT: tl.constexpr,
    NATIVE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    STEPS: tl.constexpr,
    E8M0: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ONCE: tl.constexpr,
    EVEN_ROWS: tl.constexpr,
):
    """Quantises one region of ``rows`` by ``columns`` of a matrix ``[m, k]``. q is contiguous.

    With ``ONCE``, the region is held in registers. Without ``ONCE``, the region is read twice, in chunks.
    """
    region = tl.program_id(0)
    batch = (region // (regions_m * regions_k)).to(tl.int64)
    top = (region // regions_k) % regions_m * rows
    left = region % regions_k * columns
    bottom, right = tl.minimum(top + rows, m), tl.minimum(left + columns, k)
    x_ptr += batch * x_batch_stride
    q_ptr += batch * m * k
    if ONCE:
        row, column = top + tl.arange(0, ROWS)[:, None], left + tl.arange(0, COLUMNS)[None, :]
        # If every element had its own mask, the region would not fit in registers.
        inside = (column < right) if EVEN_ROWS else (row < bottom) & (column < right)
        x = tl.load(x_ptr + row.to(tl.int64) * x_row_stride + column, mask=inside, other=0.0).to(tl.float32)
        amax = largest(largest(x, 1), 0)
        scale, factor, divisor, reciprocal = _stored_and_prepared(amax, FORMAT, LIMIT, INTERPRETED, E8M0)
        _store_scale_of_region(scale_ptr, scale, region, regions_k, PACKED)
        code = _encoded(x, factor, divisor, reciprocal, FORMAT, NATIVE, INTERPRETED, STEPS, E8M0)
        tl.store(q_ptr + row.to(tl.int64) * k + column, code, mask=inside)
    else:
        amax = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first_row in range(top, bottom, ROWS):
            for first_column in range(left, right, COLUMNS):
                row, column = first_row + tl.arange(0, ROWS)[:, None], first_column + tl.arange(0, COLUMNS)[None, :]
                inside = (row < bottom) & (column < right)
                x = tl.load(x_ptr + row.to(tl.int64) * x_row_stride + column, mask=inside, other=0.0).to(tl.float32)
                amax = larger(amax, tl.abs(x))
        largest_of_all = largest(largest(amax, 1), 0)
        scale, factor, divisor, reciprocal = _stored_and_prepared(largest_of_all, FORMAT, LIMIT, INTERPRETED, E8M0)
        _store_scale_of_region(scale_ptr, scale, region, regions_k, PACKED)
        for first_row in range(top, bottom, ROWS):
            for first_column in range(left, right, COLUMNS):
                row, column = first_row + tl.arange(0, ROWS)[:, None], first_column + tl.arange(0, COLUMNS)[None, :]
                inside = (row < bottom) & (column < right)
                x = tl.load(x_ptr + row.to(tl.int64) * x_row_stride + column, mask=inside, other=0.0).to(tl.float32)
                code = _encoded(x, factor, divisor, reciprocal, FORMAT, NATIVE, INTERPRETED, STEPS, E8M0)
                tl.store(q_ptr + row.to(tl.int64) * k + column, code, mask=inside)


@triton.jit
def partial_maxima_kernel(x_ptr, partial_ptr, elements, TILE: tl.constexpr):
    # First launch for a scale per tensor: each program stores the amax of its share of x, a grid-stride loop over tiles, to
    # ``partial_ptr``, float32 [programs]. A NaN in x makes its program's result NaN.
    amax = tl.zeros([TILE], tl.float32)
    first = tl.program_id(0).to(tl.int64) * TILE
    step = tl.num_programs(0).to(tl.int64) * TILE
    for start in range(first, elements, step):
        at = start + tl.arange(0, TILE)
        x = tl.load(x_ptr + at, mask=at < elements, other=0.0).to(tl.float32)
        amax = larger(amax, tl.abs(x))
    tl.store(partial_ptr + tl.program_id(0), largest(amax, 0))


@triton.jit
def quantize_tensor_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    partial_ptr,
    partials,
    elements,
    TILE: tl.constexpr,
    PARTIALS: tl.constexpr,
    FORMAT: tl.constexpr,
    LIMIT: tl.constexpr,
    NATIVE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    STEPS: tl.constexpr,
):
    # Second launch for a scale per tensor: each program reduces all partial maxima to the scale, and quantises one tile of x.
    #
    # Program 0 processes the end of x, which the first launch has read last and the cache may still hold.
    at = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + at, mask=at < elements, other=0.0).to(tl.float32)
    index = tl.arange(0, PARTIALS)
    scale = scale_of(largest(tl.load(partial_ptr + index, mask=index < partials, other=0.0), 0), LIMIT)
    if tl.program_id(0) == 0:
        tl.store(scale_ptr, scale)
    factor, divisor, reciprocal = prepare_divisor(scale, INTERPRETED)
    code = encode_fp8(divide(x, factor, divisor, reciprocal, INTERPRETED, STEPS), FORMAT, NATIVE)
    tl.store(q_ptr + at, code, mask=at < elements)
