"""Device code of `gelu_and_mul`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.activation.gated_device import load_gate_up, store_tile

_ROOT_HALF = tl.constexpr(0.7071067811865476)
_MINUS_TWICE_ROOT_2_OVER_PI = tl.constexpr(-1.5957691216057308)


@triton.jit
def _gelu(gate, TANH: tl.constexpr):
    """Returns the GELU of ``gate``, float32. The tanh form uses ``(1 + tanh(z)) / 2 == sigmoid(2 * z)``."""
    if TANH:
        return gate / (1.0 + tl.exp((gate + 0.044715 * gate * gate * gate) * _MINUS_TWICE_ROOT_2_OVER_PI))
    return 0.5 * gate * (1.0 + tl.erf(gate * _ROOT_HALF))


@triton.jit(do_not_specialize=["rows", "column_tiles"])
def gelu_kernel(
    x,
    out,
    rows,
    intermediate,
    column_tiles,
    x_stride,
    out_stride,
    TANH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    # Computes one tile [ROWS, COLUMNS] of ``gelu(gate) * up``, in float32, and rounds it once. The column tile varies fastest.
    tile = tl.program_id(0)
    row = (tile // column_tiles) * ROWS + tl.arange(0, ROWS)[:, None]
    first = (tile % column_tiles) * COLUMNS
    gate, up = load_gate_up(x, row, first, rows, intermediate, x_stride, False, COLUMNS)
    store_tile(out, _gelu(gate, TANH) * up, row, first, rows, intermediate, out_stride, INTERPRETED)
