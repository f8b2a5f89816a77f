"""Device code of `quantize_fp8`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.quantization._encode_device import divide, encode_fp8, larger, largest, prepare_divisor
from tokenspeed_kernel_base.ops.quantization.encodings import SMALLEST_NORMAL

_SMALLEST_NORMAL = tl.constexpr(SMALLEST_NORMAL)


@triton.jit
def scale_of(amax, LIMIT: tl.constexpr):
    """The scale of a group from its largest magnitude. LIMIT: the largest finite value of the 8-bit format."""
    scale = tl.div_rn(amax, LIMIT)
    return tl.maximum(scale, _SMALLEST_NORMAL, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def fp8_of_groups(
    x, FORMAT: tl.constexpr, LIMIT: tl.constexpr, NATIVE: tl.constexpr, INTERPRETED: tl.constexpr, STEPS: tl.constexpr
):
    """Groups, float32 ``[GROUPS, LENGTH]``, in 8 bits, and their scales ``[GROUPS]``."""
    scale = scale_of(largest(x, 1), LIMIT)
    factor, divisor, reciprocal = prepare_divisor(scale, INTERPRETED)
    quotient = divide(x, factor[:, None], divisor[:, None], reciprocal[:, None], INTERPRETED, STEPS)
    return encode_fp8(quotient, FORMAT, NATIVE), scale


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
):
    """``GROUPS`` groups of one outer row; q and the scales are contiguous."""
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
    code, scale = fp8_of_groups(x, FORMAT, LIMIT, NATIVE, INTERPRETED, STEPS)
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
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ONCE: tl.constexpr,
    EVEN_ROWS: tl.constexpr,
):
    """One region of ``rows`` by ``columns`` of a matrix ``[m, k]``, held (``ONCE``) or read twice in chunks; q is contiguous."""
    region = tl.program_id(0)
    batch = (region // (regions_m * regions_k)).to(tl.int64)
    top = (region // regions_k) % regions_m * rows
    left = region % regions_k * columns
    bottom, right = tl.minimum(top + rows, m), tl.minimum(left + columns, k)
    x_ptr += batch * x_batch_stride
    q_ptr += batch * m * k
    if ONCE:
        row, column = top + tl.arange(0, ROWS)[:, None], left + tl.arange(0, COLUMNS)[None, :]
        # Without a mask that is different for every element, registers suffice for all of them.
        inside = (column < right) if EVEN_ROWS else (row < bottom) & (column < right)
        x = tl.load(x_ptr + row.to(tl.int64) * x_row_stride + column, mask=inside, other=0.0).to(tl.float32)
        scale = scale_of(largest(largest(x, 1), 0), LIMIT)
        tl.store(scale_ptr + region, scale)
        factor, divisor, reciprocal = prepare_divisor(scale, INTERPRETED)
        code = encode_fp8(divide(x, factor, divisor, reciprocal, INTERPRETED, STEPS), FORMAT, NATIVE)
        tl.store(q_ptr + row.to(tl.int64) * k + column, code, mask=inside)
    else:
        amax = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first_row in range(top, bottom, ROWS):
            for first_column in range(left, right, COLUMNS):
                row, column = first_row + tl.arange(0, ROWS)[:, None], first_column + tl.arange(0, COLUMNS)[None, :]
                inside = (row < bottom) & (column < right)
                x = tl.load(x_ptr + row.to(tl.int64) * x_row_stride + column, mask=inside, other=0.0).to(tl.float32)
                amax = larger(amax, tl.abs(x))
        scale = scale_of(largest(largest(amax, 1), 0), LIMIT)
        tl.store(scale_ptr + region, scale)
        factor, divisor, reciprocal = prepare_divisor(scale, INTERPRETED)
        for first_row in range(top, bottom, ROWS):
            for first_column in range(left, right, COLUMNS):
                row, column = first_row + tl.arange(0, ROWS)[:, None], first_column + tl.arange(0, COLUMNS)[None, :]
                inside = (row < bottom) & (column < right)
                x = tl.load(x_ptr + row.to(tl.int64) * x_row_stride + column, mask=inside, other=0.0).to(tl.float32)
                code = encode_fp8(divide(x, factor, divisor, reciprocal, INTERPRETED, STEPS), FORMAT, NATIVE)
                tl.store(q_ptr + row.to(tl.int64) * k + column, code, mask=inside)


@triton.jit
def partial_maxima_kernel(x_ptr, partial_ptr, elements, TILE: tl.constexpr):
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
    at = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + at, mask=at < elements, other=0.0).to(tl.float32)
    index = tl.arange(0, PARTIALS)
    scale = scale_of(largest(tl.load(partial_ptr + index, mask=index < partials, other=0.0), 0), LIMIT)
    if tl.program_id(0) == 0:
        tl.store(scale_ptr, scale)
    factor, divisor, reciprocal = prepare_divisor(scale, INTERPRETED)
    code = encode_fp8(divide(x, factor, divisor, reciprocal, INTERPRETED, STEPS), FORMAT, NATIVE)
    tl.store(q_ptr + at, code, mask=at < elements)
