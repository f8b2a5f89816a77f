"""Gated activations fused with quantisation. One program computes one tile of the result.

The activation's result is rounded to x's dtype, and quantised in registers. With one scale per row, each program computes whole
rows. Rows that do not fit in registers are computed twice. The second pass reads x from the cache.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch import Tensor

from tokenspeed_kernel.triton.activation.gated import is_silu, tile_for
from tokenspeed_kernel.triton.common import as_rows, cdiv, for_architecture, next_power_of_2, sm_count_of
from tokenspeed_kernel.triton.quantization._quantised_rows import (
    DECLARED,
    KINDS,
    ROW,
    as_bytes,
    form_of,
    least_columns,
    nothing_to,
    rows_for,
    stored_for,
)
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.lowering import from_list
from tokenspeed_kernel_base.ops.quantization.value import Quantization
from tokenspeed_kernel_base.registry import register_kernel

device_code = DeviceModule(__name__ + "_device")


class Tile(NamedTuple):
    """A program's tile of the result, in rows and columns (powers of two), and the program's number of warps."""

    rows: int
    columns: int
    warps: int


# With one scale per row, a thread holds at most 32 elements of the result. Until the result is computed, the thread also holds
# their gate and up elements. Rows longer than _LONGEST_ROW are read twice, in steps of _STEP columns, 16 per thread.
_ELEMENTS_A_WARP, _WARPS, _LONGEST_ROW = 512, 16, 16384
_STEP, _STEP_WARPS = 4096, 8
# With at most one row per SM/CU, no other program would hide the latency of a second read. A program with more warps then keeps a
# longer row in registers: up to twice _LONGEST_ROW with NVIDIA's 32 warps. AMD's programs cannot have more than 16 waves of 64
# threads.
_MOST_WARPS = {"nvidia": 32, "any": 16}


@functools.cache
def tile_of(intermediate: int, least: int, most_warps: int = _WARPS) -> Tile:
    """Returns the tile for results of ``intermediate`` columns. ``least``: the result of `least_columns` for the quantised
    format.
    """
    if least != ROW:
        tile = tile_for(intermediate)
        columns = max(tile.columns, least)
        return Tile(max(1, tile.rows * tile.columns // columns), columns, tile.warps)
    if intermediate * _WARPS > _LONGEST_ROW * most_warps:
        return Tile(1, _STEP, _STEP_WARPS)
    block = next_power_of_2(intermediate)
    rows = max(1, _ELEMENTS_A_WARP // block)
    return Tile(rows, block, min(rows * block // _ELEMENTS_A_WARP, most_warps if block > _LONGEST_ROW else _WARPS))


def swiglu_quantize(
    x: Tensor,
    quantization: Quantization,
    alpha: float,
    limit: float | None,
    beta: float,
    interleaved: bool,
    out: Tensor | None,
    scale_out: Tensor | None,
) -> Tensor | tuple[Tensor, ...]:
    """Implements the operator `tokenspeed_kernel.swiglu_quantize`. With ``alpha`` 1, ``beta`` 0, no ``limit`` and columns not
    interleaved, the kernel computes `silu_and_mul`."""
    intermediate, form = x.shape[-1] // 2, form_of(x, quantization)
    stored = stored_for(x, (*x.shape[:-1], intermediate), form, quantization.dtype, out, scale_out)
    if stored.codes.numel():
        source = as_rows(x)
        few = source.shape[0] <= sm_count_of(x.device)
        tile = tile_of(intermediate, least_columns(form), for_architecture(_MOST_WARPS, x.device) if few else _WARPS)
        rows = rows_for(x, source.shape[0], form, tile.rows)
        column_tiles = 1 if form.group == ROW else cdiv(intermediate, tile.columns)
        device_code.gated_quantize_kernel[(rows.programs * rows.matrices * column_tiles,)](
            source,
            as_bytes(stored.codes),
            as_bytes(stored.scales),
            quantization.scale,
            rows.per_matrix,
            rows.programs,
            intermediate,
            column_tiles,
            float(alpha),
            0.0 if limit is None else float(limit),
            float(beta),
            source.stride(0),
            PLAIN=is_silu(alpha, limit, beta, interleaved),
            CLAMPED=limit is not None,
            INTERLEAVED=interleaved,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            TWICE=form.group == ROW and tile.columns < intermediate,
            FORM=form,
            num_warps=tile.warps,
        )
    else:
        nothing_to(stored.scales)
    result: Tensor | tuple[Tensor, ...] = from_list(stored.finish(out, scale_out))
    return result


for _kind, _traits in KINDS.items():
    register_kernel(
        "activation",
        "swiglu_quantize",
        name=f"triton_swiglu_quantize_{_kind}",
        traits={"quantization": _kind, **_traits, "interleaved": any, "limit": any},
        tags={"determinism"},
        **DECLARED,
    )(swiglu_quantize)
