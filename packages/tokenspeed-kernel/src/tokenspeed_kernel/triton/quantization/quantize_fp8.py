"""quantize_fp8: 8-bit floats with scales made from the largest magnitudes of tensors, rows, blocks or tiles.

Rows and blocks are groups of consecutive elements: a program holds a tile of whole groups in registers, so that x is read once.
Groups and tiles too large for that are read twice, in chunks, by one program. The scale of a whole tensor takes two launches:
partial maxima, then the conversion, whose programs each reduce the partial maxima first; they go backwards, to find what the
first launch left in the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernel.triton.common import multiprocessors
from tokenspeed_kernel.triton.quantization._encode import (
    FP8_NAMES,
    abilities,
    divide,
    division_steps,
    encode_fp8,
    larger,
    largest,
    prepare_divisor,
)
from tokenspeed_kernel.triton.quantization._rows import Config, config_for, finish, grid, groups_of, made_or, rows_of
from tokenspeed_kernel_base.ops.quantization.encodings import FP8_MAX, SMALLEST_NORMAL

_SMALLEST_NORMAL = tl.constexpr(SMALLEST_NORMAL)

# One H200, 8192 x 8192 bfloat16, where a copy reaches 4.07 TB/s. Elements of a group that a program holds in registers at most,
# and of a region (where the device converts to 8 bits): what is larger is read twice. Tiles of 128 x 128: 3.44 TB/s held, 2.95 read
# twice.
_HELD, _REGION_HELD = 16384, 16384
_REGION_WARPS = 16
# Elements of a chunk of what is read twice, and warps.
_CHUNK, _CHUNK_WARPS = 4096, 8
# Elements a thread of a group that takes a program's whole tile: rows 3.93 TB/s, with 16 elements 3.38.
_EACH = 32
# A whole tensor: every program reduces the partial maxima, so the tiles of large ones are larger (2.39 TB/s; else 2.21).
_WHOLE_LARGE, _WHOLE_SMALL = Config(8192, 8), Config(2048, 4)
# Programs a multiprocessor that find partial maxima, and the most partial maxima there are: a program reduces them all.
_PARTIAL_PROGRAMS, _MOST_PARTIALS = 4, 1024


@triton.jit
def _scale_of(amax, LIMIT: tl.constexpr):
    scale = tl.div_rn(amax, LIMIT)
    return tl.maximum(scale, _SMALLEST_NORMAL, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _quantize_groups(
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
    scale = _scale_of(largest(x, 1), LIMIT)
    tl.store(scale_ptr + outer * count + group, scale, mask=group < count)
    factor, divisor, reciprocal = prepare_divisor(scale, INTERPRETED)
    quotient = divide(x, factor[:, None], divisor[:, None], reciprocal[:, None], INTERPRETED, STEPS)
    code = encode_fp8(quotient, FORMAT, NATIVE)
    tl.store(q_ptr + outer * limit + wide_group * length + within, code, mask=inside)


@triton.jit
def _quantize_regions(
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
        scale = _scale_of(largest(largest(x, 1), 0), LIMIT)
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
        scale = _scale_of(largest(largest(amax, 1), 0), LIMIT)
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
def _partial_maxima(x_ptr, partial_ptr, elements, TILE: tl.constexpr):
    amax = tl.zeros([TILE], tl.float32)
    first = tl.program_id(0).to(tl.int64) * TILE
    step = tl.num_programs(0).to(tl.int64) * TILE
    for start in range(first, elements, step):
        at = start + tl.arange(0, TILE)
        x = tl.load(x_ptr + at, mask=at < elements, other=0.0).to(tl.float32)
        amax = larger(amax, tl.abs(x))
    tl.store(partial_ptr + tl.program_id(0), largest(amax, 0))


@triton.jit
def _quantize_tensor(
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
    scale = _scale_of(largest(tl.load(partial_ptr + index, mask=index < partials, other=0.0), 0), LIMIT)
    if tl.program_id(0) == 0:
        tl.store(scale_ptr, scale)
    factor, divisor, reciprocal = prepare_divisor(scale, INTERPRETED)
    code = encode_fp8(divide(x, factor, divisor, reciprocal, INTERPRETED, STEPS), FORMAT, NATIVE)
    tl.store(q_ptr + at, code, mask=at < elements)


def quantize_fp8(
    x: Tensor, granularity: str, block_size: int, dtype: torch.dtype, out: Tensor | None, scale_out: Tensor | None
) -> tuple[Tensor, Tensor]:
    k = x.shape[-1]
    if granularity == "tensor":
        scale_shape: tuple[int, ...] = (1,)
    elif granularity == "token":
        scale_shape = (*x.shape[:-1], 1)
    elif granularity == "block":
        scale_shape = (*x.shape[:-1], triton.cdiv(k, block_size))
    else:
        scale_shape = (*x.shape[:-2], triton.cdiv(x.shape[-2], block_size), triton.cdiv(k, block_size))
    q = made_or(out, tuple(x.shape), dtype, x)
    scale = made_or(scale_out, scale_shape, torch.float32, x)
    if not x.numel():
        scale.fill_(SMALLEST_NORMAL)
    elif granularity == "tensor":
        _whole(x, q, scale)
    elif granularity == "block2d":
        _tiles(x, q, scale, block_size)
    else:
        _groups(x, q, scale, k if granularity == "token" else block_size)
    return finish(q, out), finish(scale, scale_out)


def _format(x: Tensor, dtype: torch.dtype) -> dict[str, object]:
    able = abilities(x.device)
    return {
        "FORMAT": FP8_NAMES[dtype],
        "LIMIT": FP8_MAX[dtype],
        "NATIVE": able.native,
        "INTERPRETED": able.interpreted,
        "STEPS": division_steps(x.dtype),
    }


def _groups(x: Tensor, q: Tensor, scale: Tensor, length: int) -> None:
    rows = rows_of(x)
    if min(length, x.shape[-1]) > _HELD:
        return _regions(rows[None], q, scale, 1, length)
    groups = groups_of(rows, length)
    padded = triton.next_power_of_2(groups.length)
    config = config_for(x.numel())
    per_program = max(config.tile // padded, 1)
    _quantize_groups[grid(groups, per_program)](
        rows,
        q.view(torch.uint8),
        scale,
        groups.count,
        groups.length,
        groups.limit,
        groups.stride,
        groups.outer_stride,
        SHORT_LAST=groups.short_last,
        GROUPS=per_program,
        LENGTH=padded,
        FULL=padded == groups.length,
        num_warps=max(config.warps, min(padded // (32 * _EACH), 16)),
        **_format(x, q.dtype),
    )
    return None


def _tiles(x: Tensor, q: Tensor, scale: Tensor, block_size: int) -> None:
    matrices = x if x.ndim == 3 else x.reshape(-1, *x.shape[-2:])
    _regions(matrices if matrices.stride(2) == 1 else matrices.contiguous(), q, scale, block_size, block_size)


def _regions(x: Tensor, q: Tensor, scale: Tensor, rows: int, columns: int) -> None:
    """Regions of x ``[batch, m, k]``, the last axis of unit stride."""
    batch, m, k = x.shape
    rows, columns = min(rows, m), min(columns, k)
    regions_m, regions_k = triton.cdiv(m, rows), triton.cdiv(k, columns)
    padded_rows, padded_columns = triton.next_power_of_2(rows), triton.next_power_of_2(columns)
    once = padded_rows * padded_columns <= (_REGION_HELD if abilities(x.device).native else _CHUNK)
    if not once:
        padded_columns = min(padded_columns, _CHUNK)
        padded_rows = min(padded_rows, max(_CHUNK // padded_columns, 1))
    _quantize_regions[(batch * regions_m * regions_k,)](
        x,
        q.view(torch.uint8),
        scale,
        m,
        k,
        rows,
        columns,
        regions_m,
        regions_k,
        x.stride(0),
        x.stride(1),
        ROWS=padded_rows,
        COLUMNS=padded_columns,
        ONCE=once,
        EVEN_ROWS=m % padded_rows == 0 and rows == padded_rows,
        num_warps=_REGION_WARPS if once and padded_rows * padded_columns > _CHUNK else _CHUNK_WARPS,
        **_format(x, q.dtype),
    )


def _whole(x: Tensor, q: Tensor, scale: Tensor) -> None:
    x = x.contiguous()
    elements = x.numel()
    config = _WHOLE_LARGE if config_for(elements).tile > _WHOLE_SMALL.tile else _WHOLE_SMALL
    programs = triton.cdiv(elements, config.tile)
    partials = min(programs, _PARTIAL_PROGRAMS * multiprocessors(x.device), _MOST_PARTIALS)
    partial = x.new_empty(partials, dtype=torch.float32)
    _partial_maxima[(partials,)](x, partial, elements, TILE=config.tile, num_warps=config.warps)
    _quantize_tensor[(programs,)](
        x,
        q.view(torch.uint8),
        scale,
        partial,
        partials,
        elements,
        TILE=config.tile,
        PARTIALS=triton.next_power_of_2(partials),
        num_warps=config.warps,
        **_format(x, q.dtype),
    )
