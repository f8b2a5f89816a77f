"""Device code of `gated`, and the gated activation that other kernels call on float32 tiles (`gate_tile`, `gated`)."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.quantization._encode_device import round_to


@triton.jit
def clamp_gated(gate, up, limit):
    """Clamps gate and up: returns ``min(gate, limit)`` and ``min(max(up, -limit), limit)``. NaN stays NaN."""
    return tl.where(gate > limit, limit, gate), tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))


@triton.jit
def gated(gate, up, alpha, beta):
    """Computes the gated activation in float32: ``(up + beta) * gate * sigmoid(alpha * gate)``."""
    return (up + beta) * (gate / (1.0 + tl.exp(-alpha * gate)))


@triton.jit
def load_gate_up(x, row, first, rows, intermediate, x_stride, INTERLEAVED: tl.constexpr, COLUMNS: tl.constexpr):
    """Loads the gate and up tiles as float32 ``[ROWS, COLUMNS]``; elements outside x are 0.

    ``row`` holds the rows' indices ``[ROWS, 1]``; the columns begin at ``first``.
    """
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
    """Computes a tile of the gated activation, float32 ``[ROWS, COLUMNS]``; elements outside the output are 0.

    ``row`` holds the rows' indices ``[ROWS, 1]``; the columns begin at ``first``.
    """
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
    """Rounds a tile to the dtype of ``out`` and stores the elements that lie inside ``out``.

    ``row`` holds the rows' indices ``[ROWS, 1]``; the columns begin at ``first``.
    """
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
    # Computes one tile [ROWS, COLUMNS] of the gated activation, in float32, and rounds it once. The column tile varies fastest.
    program = tl.program_id(0)
    row = (program // column_tiles) * ROWS + tl.arange(0, ROWS)[:, None]
    first = (program % column_tiles) * COLUMNS
    result = gate_tile(x, row, first, rows, intermediate, alpha, limit, beta, x_stride, PLAIN, CLAMPED, INTERLEAVED, COLUMNS)
    store_tile(out, result, row, first, rows, intermediate, out_stride, INTERPRETED)
