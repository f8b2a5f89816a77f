"""Device code of `gated`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.quantization._encode_device import round_to


@triton.jit
def clamp_gated(gate, up, limit):
    """Returns ``min(gate, limit)`` and ``min(max(up, -limit), limit)``; NaN stays NaN."""
    return tl.where(gate > limit, limit, gate), tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))


@triton.jit
def gated(gate, up, alpha, beta):
    """Returns ``(up + beta) * gate * sigmoid(alpha * gate)``, all float32."""
    return (up + beta) * (gate / (1.0 + tl.exp(-alpha * gate)))


@triton.jit
def load_gate_up(x, row, first, rows, intermediate, x_stride, INTERLEAVED: tl.constexpr, COLUMNS: tl.constexpr):
    """Loads a tile of gate and of up, float32 ``[ROWS, COLUMNS]``, 0 outside: rows ``[ROWS, 1]``, and columns from ``first`` on."""
    column = first + tl.arange(0, COLUMNS)[None, :]
    row_inside = row < rows
    row = row.to(tl.int64)
    if INTERLEAVED:
        pairs = 2 * first + tl.arange(0, 2 * COLUMNS)[None, :]
        loaded = tl.load(x + row * x_stride + pairs, mask=row_inside & (pairs < 2 * intermediate), other=0.0)
        gate, up = tl.split(tl.reshape(loaded, (row.shape[0], COLUMNS, 2)))
    else:
        inside = row_inside & (column < intermediate)
        gate = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
        up = tl.load(x + row * x_stride + intermediate + column, mask=inside, other=0.0)
    return gate.to(tl.float32), up.to(tl.float32)


@triton.jit
def gate_tile(
    x,
    row,
    first,
    rows,
    intermediate,
    alpha,
    limit,
    beta,
    x_stride,
    PLAIN: tl.constexpr,
    CLAMPED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Computes a tile of the result, float32 ``[ROWS, COLUMNS]``, 0 outside: rows ``[ROWS, 1]``, and columns from ``first`` on."""
    gate, up = load_gate_up(x, row, first, rows, intermediate, x_stride, INTERLEAVED, COLUMNS)
    if PLAIN:
        result = gate / (1.0 + tl.exp(-gate)) * up
    else:
        if CLAMPED:
            gate, up = clamp_gated(gate, up, limit)
        result = gated(gate, up, alpha, beta)
    return result


@triton.jit
def store_tile(out, result, row, first, rows, intermediate, out_stride, INTERPRETED: tl.constexpr):
    """Rounds a tile of the result to out's dtype, and stores the elements inside: rows ``[ROWS, 1]``, columns from ``first`` on."""
    column = first + tl.arange(0, result.shape[1])[None, :]
    at = out + row.to(tl.int64) * out_stride + column
    tl.store(at, round_to(result, out.dtype.element_ty, INTERPRETED), mask=(row < rows) & (column < intermediate))


@triton.jit(do_not_specialize=["rows", "column_tiles"])
def gated_kernel(
    x,
    out,
    rows,
    intermediate,
    column_tiles,
    alpha,
    limit,
    beta,
    x_stride,
    out_stride,
    PLAIN: tl.constexpr,
    CLAMPED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    program = tl.program_id(0)
    row = (program // column_tiles) * ROWS + tl.arange(0, ROWS)[:, None]
    first = (program % column_tiles) * COLUMNS
    result = gate_tile(x, row, first, rows, intermediate, alpha, limit, beta, x_stride, PLAIN, CLAMPED, INTERLEAVED, COLUMNS)
    store_tile(out, result, row, first, rows, intermediate, out_stride, INTERPRETED)
