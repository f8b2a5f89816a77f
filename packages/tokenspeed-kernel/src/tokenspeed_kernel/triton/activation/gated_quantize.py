"""Gated activations fused with quantisation: one program per tile of the result.

The result is rounded to x's dtype, and quantised in registers. With one scale per row, a program computes whole rows. Rows that do
not fit in registers are computed twice, the second time from the cache.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.activation.gated import tile_for
from tokenspeed_kernel.triton.common import as_rows, cdiv, for_architecture, multiprocessors, next_power_of_2
from tokenspeed_kernel.triton.quantization._quantised_rows import (
    DECLARED,
    FP8_TRAITS,
    ROW,
    Form,
    as_bytes,
    fp8_form,
    fp8_with_scale_form,
    least_columns,
    mxfp8_form,
    nothing_to,
    nvfp4_form,
    rows_for,
    stored_for,
)
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel

device_code = DeviceModule(__name__ + "_device")

_DECLARED = {**DECLARED, "tags": {"determinism"}}
_GIVEN: dict[str, Any] = {"granularity": "tensor"}
_SWIGLU: dict[str, Any] = {"interleaved": any, "limit": any}


class Activation(NamedTuple):
    """The activation. ``plain``: `silu_and_mul`; otherwise `swiglu` with the other fields."""

    plain: bool
    alpha: float = 1.0
    limit: float | None = None
    beta: float = 0.0
    interleaved: bool = False


class Tile(NamedTuple):
    """A program's tile of the result: rows and columns, both powers of two; and warps."""

    rows: int
    columns: int
    warps: int


# With one scale per row, a thread holds at most 32 elements of the result, and the gate and up elements until it has computed them.
# Longer rows are read twice, in steps of _STEP columns, 16 per thread.
_ELEMENTS_A_WARP, _WARPS, _LONGEST_ROW = 512, 16, 16384
_STEP, _STEP_WARPS = 4096, 8
# With at most one row per SM/CU, rows of up to twice that length are held, with the most threads that a program can have: no other
# program would hide the latency of a second read. AMD's programs cannot have more than 16 waves of 64 threads.
_MOST_WARPS = {"nvidia": 32, "any": 16}


@functools.cache
def tile_of(intermediate: int, least: int, most_warps: int = _WARPS) -> Tile:
    """Returns the tile for results of this many columns. ``least``: `least_columns` of the form."""
    if least != ROW:
        tile = tile_for(intermediate)
        columns = max(tile.columns, least)
        return Tile(max(1, tile.rows * tile.columns // columns), columns, tile.warps)
    if intermediate * _WARPS > _LONGEST_ROW * most_warps:
        return Tile(1, _STEP, _STEP_WARPS)
    block = next_power_of_2(intermediate)
    rows = max(1, _ELEMENTS_A_WARP // block)
    return Tile(rows, block, min(rows * block // _ELEMENTS_A_WARP, most_warps if block > _LONGEST_ROW else _WARPS))


def _launch(
    x: Tensor,
    activation: Activation,
    form: Form,
    dtype: torch.dtype,
    given: Tensor | None,
    out: Tensor | None,
    scale_out: Tensor | None,
) -> tuple[Tensor, ...]:
    """Returns the quantised values, and the scales if they are computed. ``dtype``: dtype of the quantised values."""
    intermediate = x.shape[-1] // 2
    stored = stored_for(x, (*x.shape[:-1], intermediate), form, dtype, out, scale_out)
    if stored.codes.numel():
        source = as_rows(x)
        few = source.shape[0] <= multiprocessors(x.device)
        tile = tile_of(intermediate, least_columns(form), for_architecture(_MOST_WARPS, x.device) if few else _WARPS)
        rows = rows_for(x, source.shape[0], form, tile.rows)
        column_tiles = 1 if form.group == ROW else cdiv(intermediate, tile.columns)
        device_code.gated_quantize_kernel[(rows.programs * rows.matrices * column_tiles,)](
            source,
            as_bytes(stored.codes),
            as_bytes(stored.scales),
            given,
            rows.per_matrix,
            rows.programs,
            intermediate,
            column_tiles,
            float(activation.alpha),
            0.0 if activation.limit is None else float(activation.limit),
            float(activation.beta),
            source.stride(0),
            PLAIN=activation.plain,
            CLAMPED=activation.limit is not None,
            INTERLEAVED=activation.interleaved,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            TWICE=form.group == ROW and tile.columns < intermediate,
            FORM=form,
            num_warps=tile.warps,
        )
    else:
        nothing_to(stored.scales)
    return stored.finish(out, scale_out)


@register_kernel("activation", "silu_and_mul_quantize_fp8", traits=FP8_TRAITS, **_DECLARED)
def silu_and_mul_quantize_fp8(
    x: Tensor,
    granularity: str,
    block_size: int,
    dtype: torch.dtype,
    scale_dtype: torch.dtype,
    out: Tensor | None,
    scale_out: Tensor | None,
) -> tuple[Tensor, ...]:
    """See `tokenspeed_kernel.silu_and_mul_quantize_fp8`."""
    return _launch(x, Activation(True), fp8_form(x, granularity, block_size, dtype, scale_dtype), dtype, None, out, scale_out)


@register_kernel("activation", "silu_and_mul_quantize_fp8_with_scale", traits=_GIVEN, **_DECLARED)
def silu_and_mul_quantize_fp8_with_scale(x: Tensor, scale: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """See `tokenspeed_kernel.silu_and_mul_quantize_fp8_with_scale`."""
    return _launch(x, Activation(True), fp8_with_scale_form(x, dtype), dtype, scale, out, None)[0]


@register_kernel(
    "activation", "silu_and_mul_quantize_mxfp8", traits={"scales_rounded_up": any, "scales_in_tiles": any}, **_DECLARED
)
def silu_and_mul_quantize_mxfp8(
    x: Tensor, scale_rounding: str, scale_layout: str, out: Tensor | None, scale_out: Tensor | None
) -> tuple[Tensor, ...]:
    """See `tokenspeed_kernel.silu_and_mul_quantize_mxfp8`."""
    return _launch(x, Activation(True), mxfp8_form(x, scale_rounding, scale_layout), torch.float8_e4m3fn, None, out, scale_out)


@register_kernel("activation", "silu_and_mul_quantize_nvfp4", traits={"scales_in_tiles": any}, **_DECLARED)
def silu_and_mul_quantize_nvfp4(
    x: Tensor, global_scale: Tensor, scale_layout: str, out: Tensor | None, scale_out: Tensor | None
) -> tuple[Tensor, ...]:
    """See `tokenspeed_kernel.silu_and_mul_quantize_nvfp4`."""
    return _launch(x, Activation(True), nvfp4_form(x, scale_layout), torch.uint8, global_scale, out, scale_out)


@register_kernel("activation", "swiglu_quantize_fp8", traits={**FP8_TRAITS, **_SWIGLU}, **_DECLARED)
def swiglu_quantize_fp8(
    x: Tensor,
    alpha: float,
    limit: float | None,
    beta: float,
    interleaved: bool,
    granularity: str,
    block_size: int,
    dtype: torch.dtype,
    scale_dtype: torch.dtype,
    out: Tensor | None,
    scale_out: Tensor | None,
) -> tuple[Tensor, ...]:
    """See `tokenspeed_kernel.swiglu_quantize_fp8`."""
    activation = Activation(False, alpha, limit, beta, interleaved)
    return _launch(x, activation, fp8_form(x, granularity, block_size, dtype, scale_dtype), dtype, None, out, scale_out)


@register_kernel("activation", "swiglu_quantize_fp8_with_scale", traits={**_GIVEN, **_SWIGLU}, **_DECLARED)
def swiglu_quantize_fp8_with_scale(
    x: Tensor,
    scale: Tensor,
    alpha: float,
    limit: float | None,
    beta: float,
    interleaved: bool,
    dtype: torch.dtype,
    out: Tensor | None,
) -> Tensor:
    """See `tokenspeed_kernel.swiglu_quantize_fp8_with_scale`."""
    activation = Activation(False, alpha, limit, beta, interleaved)
    return _launch(x, activation, fp8_with_scale_form(x, dtype), dtype, scale, out, None)[0]


@register_kernel(
    "activation", "swiglu_quantize_mxfp8", traits={"scales_rounded_up": any, "scales_in_tiles": any, **_SWIGLU}, **_DECLARED
)
def swiglu_quantize_mxfp8(
    x: Tensor,
    alpha: float,
    limit: float | None,
    beta: float,
    interleaved: bool,
    scale_rounding: str,
    scale_layout: str,
    out: Tensor | None,
    scale_out: Tensor | None,
) -> tuple[Tensor, ...]:
    """See `tokenspeed_kernel.swiglu_quantize_mxfp8`."""
    activation = Activation(False, alpha, limit, beta, interleaved)
    return _launch(x, activation, mxfp8_form(x, scale_rounding, scale_layout), torch.float8_e4m3fn, None, out, scale_out)


@register_kernel("activation", "swiglu_quantize_nvfp4", traits={"scales_in_tiles": any, **_SWIGLU}, **_DECLARED)
def swiglu_quantize_nvfp4(
    x: Tensor,
    global_scale: Tensor,
    alpha: float,
    limit: float | None,
    beta: float,
    interleaved: bool,
    scale_layout: str,
    out: Tensor | None,
    scale_out: Tensor | None,
) -> tuple[Tensor, ...]:
    """See `tokenspeed_kernel.swiglu_quantize_nvfp4`."""
    activation = Activation(False, alpha, limit, beta, interleaved)
    return _launch(x, activation, nvfp4_form(x, scale_layout), torch.uint8, global_scale, out, scale_out)
