"""A grouped matrix product: rows sorted by expert, in blocks, each times its expert's weight as it lies in memory.

Both projections of a mixture-of-experts layer run it. The first gathers its rows from the tokens and ends in the gated activation;
the second writes each (token, slot) pair to a row of its own, which `_combine` sums.

Tiles lie as ``[features, rows]`` while they are summed: an expert may have few rows, and the matrix units of all vendors
take a shorter second side (8 or 16) than first (16 to 64). A tile is turned round once, when it is stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.common_device import wait_for_products
from tokenspeed_kernel.triton.moe._rounding_device import round_mxfp4
from tokenspeed_kernel.triton.quantization._encode_device import decode_e2m1, decode_e8m0, decode_fp8, round_to, unpack_e2m1

# FORMAT is what a weight is made of:
#   "dense"        numbers that the products take
#   "mxfp4"        packed e2m1 with an e8m0 scale for each 32 of a row
#   "fp8"          e4m3 with a float32 scale for each 128 x 128
#   "fp8 in bits"  the same, decoded by integer operations: the target has no e4m3
_BLOCK_FP8 = tl.constexpr(128)


@triton.jit
def _load(pointers, column, k_left, EVEN_K: tl.constexpr):
    """A tile ``[rows, columns]``; zeros beyond the last column."""
    if EVEN_K:
        tile = tl.load(pointers)
    else:
        zero: tl.constexpr = 0.0 if pointers.dtype.element_ty.is_floating() else 0
        tile = tl.load(pointers, mask=(column < k_left)[None, :], other=zero)
    return tile


@triton.jit
def _weight_tile(
    w,
    row,
    w_column_stride,
    scale_row,
    scale_column_stride,
    k,
    k_left,
    COMPUTE: tl.constexpr,
    FORMAT: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Columns ``k`` to ``k + BLOCK_K`` of a weight's rows, decoded. fp8 blocks' scales are left to the sums. ``row``: where each
    row begins, or the first row's number if w is a descriptor."""
    if FORMAT != "dense":
        wait_for_products()
    if DESCRIPTOR:
        tile = w.load([row, k])
    elif FORMAT == "mxfp4":
        column = tl.arange(0, BLOCK_K // 2)
        block = tl.arange(0, BLOCK_K // 32)
        packed_at = (k // 2 + column).to(tl.int64) * w_column_stride
        packed = _load((w + row)[:, None] + packed_at[None, :], column, k_left // 2, EVEN_K)
        scale_at = (k // 32 + block).to(tl.int64) * scale_column_stride
        scale = decode_e8m0(_load(scale_row[:, None] + scale_at[None, :], block, k_left // 32, EVEN_K))
        values = tl.reshape(decode_e2m1(unpack_e2m1(packed)), [row.shape[0], BLOCK_K // 32, 32]) * scale[:, :, None]
        tile = tl.reshape(values, [row.shape[0], BLOCK_K])
    else:
        column = tl.arange(0, BLOCK_K)
        at = (k + column).to(tl.int64) * w_column_stride
        tile = _load((w + row)[:, None] + at[None, :], column, k_left, EVEN_K)
        if FORMAT == "fp8 in bits":
            tile = decode_fp8(tile, "e4m3fn", False)
    return tile.to(COMPUTE)


@triton.jit
def _add_product(acc, w, x, scale, SCALED: tl.constexpr, PRECISION: tl.constexpr):
    """``acc + w x^T``, for w ``[features, k]`` and x ``[rows, k]``; times a feature's scale if ``SCALED``."""
    if SCALED:
        acc += tl.dot(w, tl.trans(x), input_precision=PRECISION) * scale[:, None]
    else:
        acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _x_rows(x, order, first, end, x_row_stride, top_k, GATHER: tl.constexpr, BLOCK_T: tl.constexpr):
    """Where the rows of a block begin in x. Rows beyond the end repeat the last: their sums are not stored."""
    row = tl.minimum(first + tl.arange(0, BLOCK_T), end - 1)
    if GATHER:
        row = tl.load(order + row) // top_k
    return x + row.to(tl.int64) * x_row_stride


@triton.jit
def _store_tile(
    gate,
    up,
    first,
    end,
    feature,
    expert_bias,
    bias_stride,
    x_scale,
    y,
    y_row_stride,
    order,
    N,
    top_k,
    alpha,
    limit,
    beta,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BIAS: tl.constexpr,
    LIMIT: tl.constexpr,
    X_SCALE: tl.constexpr,
    ROUND_MXFP4: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Scale, bias, activation, and the way to memory of one tile."""
    rows = first + tl.arange(0, BLOCK_T)
    exists = rows < end
    pair = tl.load(order + rows, mask=exists, other=0)
    inside = feature < N
    gate = tl.trans(gate)
    if X_SCALE:
        by_row = tl.load(x_scale + (pair // top_k if GATED else rows), mask=exists, other=0.0)[:, None]
        gate *= by_row
    if BIAS:
        gate_at = feature * 2 if GATED and INTERLEAVED else feature
        gate += tl.load(expert_bias + gate_at * bias_stride, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GATED:
        up = tl.trans(up)
        if X_SCALE:
            up *= by_row
        if BIAS:
            up_at = feature * 2 + 1 if INTERLEAVED else feature + N
            up += tl.load(expert_bias + up_at * bias_stride, mask=inside, other=0.0).to(tl.float32)[None, :]
        if LIMIT:
            gate = tl.where(gate > limit, limit, gate)  # NaN stays
            up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        value = (up + beta) * (gate / (1.0 + tl.exp(-alpha * gate)))
        if ROUND_MXFP4:
            value = round_mxfp4(value)
        row = rows.to(tl.int64)
    else:
        value = gate
        row = pair.to(tl.int64)
    pointers = y + row[:, None] * y_row_stride + feature[None, :]
    tl.store(pointers, round_to(value, y.dtype.element_ty, INTERPRETED), mask=exists[:, None] & inside[None, :])


@triton.jit
def _block(
    x,
    x_row_stride,
    x_column_stride,
    x_scale,
    w,
    w_up,
    first_gate,
    first_up,
    w_row_stride,
    w_column_stride,
    w_scale,
    scale_row_stride,
    scale_column_stride,
    expert_bias,
    bias_stride,
    y,
    y_row_stride,
    order,
    first,
    end,
    feature,
    N,
    K,
    top_k,
    alpha,
    limit,
    beta,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FORMAT: tl.constexpr,
    BIAS: tl.constexpr,
    LIMIT: tl.constexpr,
    X_SCALE: tl.constexpr,
    ROUND_MXFP4: tl.constexpr,
    INTERPRETED: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    BLOCK_T: tl.constexpr,
    EXTRA_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """One tile of features for the rows of a block: ``BLOCK_T`` of them, and ``EXTRA_T`` more by the same reading of the weight."""
    known = tl.minimum(feature, N - 1).to(tl.int64)  # features beyond the last repeat it and are not stored
    gate_row = known * 2 if GATED and INTERLEAVED else known
    up_row = known * 2 + 1 if INTERLEAVED else known + N
    x_row = _x_rows(x, order, first, end, x_row_stride, top_k, GATED, BLOCK_T)
    gate = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    up = gate
    if EXTRA_T > 0:
        x_row_extra = _x_rows(x, order, first + BLOCK_T, end, x_row_stride, top_k, GATED, EXTRA_T)
        gate_extra = tl.zeros([BLOCK_N, EXTRA_T], tl.float32)
        up_extra = gate_extra
    at_gate = first_gate if DESCRIPTOR else gate_row * w_row_stride
    at_up = first_up if DESCRIPTOR else up_row * w_row_stride
    s_gate = w_scale
    s_up = w_scale
    if FORMAT != "dense":
        scaled_rows: tl.constexpr = 1 if FORMAT == "mxfp4" else _BLOCK_FP8
        s_gate = w_scale + gate_row // scaled_rows * scale_row_stride
        s_up = w_scale + up_row // scaled_rows * scale_row_stride
    # The scales of fp8 blocks multiply the product of one step, and are fetched one step ahead: nothing else hides their way.
    scaled: tl.constexpr = FORMAT == "fp8" or FORMAT == "fp8 in bits"
    if scaled:
        by_gate = tl.load(s_gate)
        by_up = tl.load(s_up) if GATED else by_gate
    else:
        by_gate = tl.zeros([BLOCK_N], tl.float32)
        by_up = by_gate
    column = tl.arange(0, BLOCK_K)

    for k in range(0, K, BLOCK_K):
        columns = (k + column).to(tl.int64) * x_column_stride
        x_tile = _load(x_row[:, None] + columns[None, :], column, K - k, EVEN_K).to(COMPUTE)
        if EXTRA_T > 0:
            x_tile_extra = _load(x_row_extra[:, None] + columns[None, :], column, K - k, EVEN_K).to(COMPUTE)
        if scaled:
            next_block = tl.minimum(k + BLOCK_K, K - 1) // _BLOCK_FP8 * scale_column_stride
            by_gate_next = tl.load(s_gate + next_block)
            by_up_next = tl.load(s_up + next_block) if GATED else by_gate_next
        tile = _weight_tile(
            w, at_gate, w_column_stride, s_gate, scale_column_stride, k, K - k, COMPUTE, FORMAT, DESCRIPTOR, BLOCK_K, EVEN_K
        )
        gate = _add_product(gate, tile, x_tile, by_gate, scaled, PRECISION)
        if EXTRA_T > 0:
            gate_extra = _add_product(gate_extra, tile, x_tile_extra, by_gate, scaled, PRECISION)
        if GATED:
            tile = _weight_tile(
                w_up, at_up, w_column_stride, s_up, scale_column_stride, k, K - k, COMPUTE, FORMAT, DESCRIPTOR, BLOCK_K, EVEN_K
            )
            up = _add_product(up, tile, x_tile, by_up, scaled, PRECISION)
            if EXTRA_T > 0:
                up_extra = _add_product(up_extra, tile, x_tile_extra, by_up, scaled, PRECISION)
        if scaled:
            by_gate = by_gate_next
            by_up = by_up_next

    rest = (end, feature, expert_bias, bias_stride, x_scale, y, y_row_stride, order, N, top_k, alpha, limit, beta)
    _store_tile(gate, up, first, *rest, GATED, INTERLEAVED, BIAS, LIMIT, X_SCALE, ROUND_MXFP4, INTERPRETED, BLOCK_T)
    if EXTRA_T > 0:
        first += BLOCK_T
        _store_tile(gate_extra, up_extra, first, *rest, GATED, INTERLEAVED, BIAS, LIMIT, X_SCALE, ROUND_MXFP4, INTERPRETED, EXTRA_T)


@triton.jit
def grouped_gemm_kernel(
    x,
    x_row_stride,
    x_column_stride,
    x_scale,
    w,
    w_up,
    w_expert_rows,
    w_up_rows,
    w_expert_stride,
    w_row_stride,
    w_column_stride,
    w_scale,
    scale_expert_stride,
    scale_row_stride,
    scale_column_stride,
    bias,
    bias_expert_stride,
    bias_stride,
    y,
    y_row_stride,
    order,
    expert_start,
    block_expert,
    block_row,
    capacity,
    N,
    K,
    top_k,
    alpha,
    limit,
    beta,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FORMAT: tl.constexpr,
    BIAS: tl.constexpr,
    LIMIT: tl.constexpr,
    X_SCALE: tl.constexpr,
    ROUND_MXFP4: tl.constexpr,
    INTERPRETED: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    BLOCK_T: tl.constexpr,
    EXTRA_T: tl.constexpr,
    TAIL_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The first projection with its activation if ``GATED``, else the second; ``N`` features of the result, from ``K``.

    w and w_up are the same pointer, or with ``DESCRIPTOR`` tensor descriptors of all experts' rows ``[rows, K]``, for gates and for
    ups; an expert has ``w_expert_rows`` of them, and its ups begin ``w_up_rows`` after its gates.

    Blocks have up to ``BLOCK_T + EXTRA_T`` rows. Those with no more than ``BLOCK_T``, or ``TAIL_T``, take a loop without the
    rest. ``GROUP`` blocks take the same features in turn, so that a weight is read from memory once.
    """
    tiles = tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    group = program // (GROUP * tiles)
    in_group = tl.minimum(GROUP, capacity - group * GROUP)
    block = group * GROUP + (program % (GROUP * tiles)) % in_group
    tile = (program % (GROUP * tiles)) // in_group
    expert = tl.load(block_expert + block).to(tl.int64)
    if expert < 0:
        return
    first = tl.load(block_row + block)
    end = tl.minimum(first + BLOCK_T + EXTRA_T, tl.load(expert_start + expert + 1))
    feature = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    first_gate = (expert * w_expert_rows).to(tl.int32) + tile * BLOCK_N
    first_up = first_gate + w_up_rows
    if not DESCRIPTOR:
        w += expert * w_expert_stride
        w_up += expert * w_expert_stride
    if FORMAT != "dense":
        w_scale += expert * scale_expert_stride
    if BIAS:
        bias += expert * bias_expert_stride
    # fmt: off
    operands = (
        x, x_row_stride, x_column_stride, x_scale, w, w_up, first_gate, first_up, w_row_stride, w_column_stride, w_scale,
        scale_row_stride, scale_column_stride, bias, bias_stride, y, y_row_stride, order, first, end, feature, N, K, top_k,
        alpha, limit, beta,
    )
    if TAIL_T > 0 and end - first <= TAIL_T:
        _block(
            *operands, GATED, INTERLEAVED, FORMAT, BIAS, LIMIT, X_SCALE, ROUND_MXFP4, INTERPRETED, COMPUTE, PRECISION,
            DESCRIPTOR, TAIL_T, 0, BLOCK_N, BLOCK_K, EVEN_K,
        )
    elif EXTRA_T > 0 and end - first > BLOCK_T:
        _block(
            *operands, GATED, INTERLEAVED, FORMAT, BIAS, LIMIT, X_SCALE, ROUND_MXFP4, INTERPRETED, COMPUTE, PRECISION,
            DESCRIPTOR, BLOCK_T, EXTRA_T, BLOCK_N, BLOCK_K, EVEN_K,
        )
    else:
        _block(
            *operands, GATED, INTERLEAVED, FORMAT, BIAS, LIMIT, X_SCALE, ROUND_MXFP4, INTERPRETED, COMPUTE, PRECISION,
            DESCRIPTOR, BLOCK_T, 0, BLOCK_N, BLOCK_K, EVEN_K,
        )
