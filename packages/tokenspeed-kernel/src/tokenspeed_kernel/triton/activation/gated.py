"""Gated activations. Each row of x contains gate and up columns. One program computes one tile of the result.

`silu_and_mul` is `swiglu` with slope 1, without clamp and bias, so one kernel computes both.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from torch import Tensor

from tokenspeed_kernel.triton.common import FLOATS, TRITON, as_rows, has_rows, next_power_of_2
from tokenspeed_kernel.triton.quantization._encode import abilities
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority

device_code = DeviceModule(__name__ + "_device")


class Tile(NamedTuple):
    """A program's tile of the result, in rows and columns (powers of two), and the program's number of warps."""

    rows: int
    columns: int
    warps: int


# Elements and warps per program. On H200, bf16 results of 96 to 2880 columns and 2^26 elements reach 97 to 102% of a copy's
# bandwidth, interleaved or not. With half as many elements and the same number of warps: 82 to 95%. With half as many warps: 95% if
# interleaved, but 64 rows of 2880 columns take 2.4 us instead of 1.8 us.
_ELEMENTS, _WARPS = 1024, 4
# At most this many interleaved rows are merged into one row. Merged rows reach 99% of a copy's bandwidth. Tiles that end with each
# row reach 83 to 96%.
_JOINED = 64


@functools.cache
def tile_for(intermediate: int) -> Tile:
    """Returns the tile for results of ``intermediate`` columns."""
    columns = min(next_power_of_2(intermediate), _ELEMENTS)
    return Tile(_ELEMENTS // columns, columns, _WARPS)


def is_silu(alpha: float, limit: float | None, beta: float, interleaved: bool) -> bool:
    """Whether `swiglu` with these arguments equals `silu_and_mul`, which needs fewer operations."""
    return alpha == 1.0 and beta == 0.0 and limit is None and not interleaved


def _launch(
    x: Tensor, out: Tensor | None, alpha: float, limit: float | None, beta: float, interleaved: bool, plain: bool
) -> Tensor:
    # Launches `gated_kernel`, and returns the activation of x. ``plain``: whether the activation is SwiGLU with slope 1, without
    # clamp and bias.
    intermediate = x.shape[-1] // 2
    result = out if out is not None and has_rows(out) else x.new_empty((*x.shape[:-1], intermediate))
    if result.numel():
        source, target = as_rows(x), as_rows(result)
        rows, x_stride, out_stride = source.shape[0], source.stride(0), target.stride(0)
        if interleaved and x_stride == 2 * intermediate == 2 * out_stride:
            # Dense rows of interleaved pairs are equivalent to one long row. Merged rows fill tiles better.
            joined = math.gcd(rows, _JOINED)
            rows, intermediate = rows // joined, intermediate * joined
            x_stride, out_stride = x_stride * joined, out_stride * joined
        tile = tile_for(intermediate)
        column_tiles = -(-intermediate // tile.columns)
        device_code.gated_kernel[(-(-rows // tile.rows) * column_tiles,)](
            source,
            target,
            rows,
            intermediate,
            column_tiles,
            float(alpha),
            0.0 if limit is None else float(limit),
            float(beta),
            x_stride,
            out_stride,
            PLAIN=plain,
            CLAMPED=limit is not None,
            INTERLEAVED=interleaved,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            INTERPRETED=abilities(x.device).interpreted,
            num_warps=tile.warps,
        )
    return result if out is None or out is result else out.copy_(result)


@register_kernel(
    "activation",
    "silu_and_mul",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures("x", "dense", FLOATS),
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def silu_and_mul(x: Tensor, out: Tensor | None) -> Tensor:
    """Implements the operator `tokenspeed_kernel.silu_and_mul`, which documents the arguments."""
    return _launch(x, out, 1.0, None, 0.0, interleaved=False, plain=True)


@register_kernel(
    "activation",
    "swiglu",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures("x", "dense", FLOATS),
    traits={"interleaved": any, "limit": any},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def swiglu(x: Tensor, alpha: float, limit: float | None, beta: float, interleaved: bool, out: Tensor | None) -> Tensor:
    """Implements the operator `tokenspeed_kernel.swiglu`, which documents the arguments."""
    return _launch(x, out, alpha, limit, beta, interleaved, plain=is_silu(alpha, limit, beta, interleaved))
