"""Grouped GEMM: blocks of rows sorted by expert, multiplied by the expert's weight in the checkpoint's layout.

Both projections of a mixture-of-experts layer use this kernel. The first projection gathers its rows from the tokens and ends with
the gated activation. The second projection writes the row of each (token, slot) pair, which `_combine` reduces.

The dots are swap-AB: accumulators are ``[features, rows]``. An expert may have few rows, and the MMAs of all vendors have a smaller
N (8 or 16) than M (16 to 64). A tile is transposed once, when it is stored.

Grid: one axis of (group of blocks, tile of features, block within the group), the block varying fastest. Blocks without rows have
expert -1 and return at once. A program holds one accumulator per feature tile, or two (gate and up) in the first projection.

Numerics: tiles are converted to ``OPTIONS.compute`` and accumulated in float32. One-byte block scales multiply the weights before
the MMA. fp8 scales of 128 x 128 blocks multiply each step's partial sum, so ``block_k`` must not span two such blocks. All other
scales multiply the accumulator.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from tokenspeed_kernel.triton.activation.gated_device import clamp_gated, gated
from tokenspeed_kernel.triton.common_device import wait_for_products
from tokenspeed_kernel.triton.moe._rounding_device import round_mxfp4
from tokenspeed_kernel.triton.quantization._encode_device import decode_e2m1, decode_e8m0, decode_fp8, round_to, unpack_e2m1

_BLOCK_FP8 = tl.constexpr(128)


class Inputs(NamedTuple):
    """The input rows ``[rows, K]``, and their float32 scales, one per row, or None."""

    first: Any  # a pointer to the first element
    row_stride: Any
    column_stride: Any
    scale: Any


class Weight(NamedTuple):
    """One expert's weight of the projection that the kernel computes.

    Fields:
        gate, up: pointers to the first element, or tensor descriptors of the rows of all experts.
        gate_start, up_start: with descriptors, the index of the tile's first gate row and of its first up row.
        row_stride, column_stride: with pointers, the strides between rows and between elements along k.
        scale, scale_row_stride, scale_column_stride: the weight's scales; not read if the weight has no scales.
        global_scale: a pointer to the scale of the whole weight; not read without a global scale.
        bias, bias_stride: the bias; not read without a bias.
    """

    gate: Any
    up: Any
    gate_start: Any
    up_start: Any
    row_stride: Any
    column_stride: Any
    scale: Any
    scale_row_stride: Any
    scale_column_stride: Any
    global_scale: Any
    bias: Any
    bias_stride: Any


class Output(NamedTuple):
    """The output ``[rows, N]``, with unit stride along N."""

    first: Any
    row_stride: Any


class Block(NamedTuple):
    """A block of rows of one expert: rows ``first`` to ``end`` (exclusive) of the rows sorted by expert.

    ``order`` holds the index of each row's (token, slot) pair.
    """

    order: Any
    first: Any
    end: Any
    top_k: Any


class Sizes(NamedTuple):
    """The number of output features (n) and of input features (k)."""

    n: Any
    k: Any


class Swiglu(NamedTuple):
    """The parameters of the gated activation ``(up + beta) * gate * sigmoid(alpha * gate)``; ``limit`` clamps gate and up, see
    `clamp_gated`."""

    alpha: Any
    limit: Any
    beta: Any


@triton.jit
def _load(pointers, column, k_left, EVEN_K: tl.constexpr):
    """Loads a tile ``[rows, columns]``. Columns from ``k_left`` on are 0; with EVEN_K there are no such columns."""
    if EVEN_K:
        tile = tl.load(pointers)
    else:
        zero: tl.constexpr = 0.0 if pointers.dtype.element_ty.is_floating() else 0
        tile = tl.load(pointers, mask=(column < k_left)[None, :], other=zero)
    return tile


@triton.jit
def _weight_tile(w, row, scale_row, weight, k, k_left, OPTIONS: tl.constexpr, TILE: tl.constexpr):
    """Loads and dequantises columns ``k`` to ``k + block_k`` of the rows of ``w``, the weight's gate or up rows.

    Only one-byte block scales are applied here; all other scales multiply the accumulators. ``row``: the offset of each row, or
    the index of the first row if w is a descriptor.
    """
    FORMAT: tl.constexpr = OPTIONS.format
    BLOCK_K: tl.constexpr = TILE.block_k
    EVEN_K: tl.constexpr = TILE.even_k
    if FORMAT != "dense":
        wait_for_products()
    if OPTIONS.descriptor:
        tile = w.load([row, k])
    else:
        ITEMS: tl.constexpr = 2 if FORMAT == "e2m1" else 1  # elements per byte
        column = tl.arange(0, BLOCK_K // ITEMS)
        at = (k // ITEMS + column).to(tl.int64) * weight.column_stride
        tile = _load((w + row)[:, None] + at[None, :], column, k_left // ITEMS, EVEN_K)
        if FORMAT == "e2m1":
            tile = decode_e2m1(unpack_e2m1(tile))
        elif FORMAT == "fp8 in bits":
            tile = decode_fp8(tile, "e4m3fn", False)
        elif OPTIONS.block > 0:
            tile = tile.to(tl.float32)
        elif FORMAT == "fp8" and OPTIONS.compute == tl.bfloat16 and cuda_capability_geq(8, 9):
            # Convert through float32: Triton's direct conversion uses F2F, which converts only 16 values per cycle per SM on
            # Hopper.
            tile = tile.to(tl.float32)
    if OPTIONS.block > 0:
        BLOCK: tl.constexpr = OPTIONS.block
        block = tl.arange(0, BLOCK_K // BLOCK)
        scale_at = (k // BLOCK + block).to(tl.int64) * weight.scale_column_stride
        byte = _load(scale_row[:, None] + scale_at[None, :], block, k_left // BLOCK, EVEN_K)
        scale = decode_fp8(byte, "e4m3fn", False) if OPTIONS.scales == "e4m3" else decode_e8m0(byte)
        tile = tl.reshape(tl.reshape(tile, [row.shape[0], BLOCK_K // BLOCK, BLOCK]) * scale[:, :, None], [row.shape[0], BLOCK_K])
    return tile.to(OPTIONS.compute)


@triton.jit
def _accumulate(acc, w, x, scale, SCALED: tl.constexpr, PRECISION: tl.constexpr):
    """Returns ``acc + w x^T`` for w ``[features, k]`` and x ``[rows, k]``. With ``SCALED``, a scale per feature multiplies w
    x^T.
    """
    if SCALED:
        acc += tl.dot(w, tl.trans(x), input_precision=PRECISION) * scale[:, None]
    else:
        acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _input_rows(inputs, block, GATHER: tl.constexpr, ROWS: tl.constexpr):
    """Returns pointers to a block's first ROWS input rows. Rows beyond the block's end repeat its last row, and are not stored."""
    row = tl.minimum(block.first + tl.arange(0, ROWS), block.end - 1)
    if GATHER:
        row = tl.load(block.order + row) // block.top_k
    return inputs.first + row.to(tl.int64) * inputs.row_stride


@triton.jit
def _store_tile(gate, up, block, feature, inputs, weight, out, sizes, swiglu, OPTIONS: tl.constexpr, ROWS: tl.constexpr):
    """Epilogue: applies row scales, the bias and the activation to the accumulators, and stores the block's first ROWS rows."""
    rows = block.first + tl.arange(0, ROWS)
    exists = rows < block.end
    pair = tl.load(block.order + rows, mask=exists, other=0)
    inside = feature < sizes.n
    gate = tl.trans(gate)
    if OPTIONS.x_scale:
        by_row = tl.load(inputs.scale + (pair // block.top_k if OPTIONS.gated else rows), mask=exists, other=0.0)[:, None]
        gate *= by_row
    if OPTIONS.bias:
        gate_at = feature * 2 if OPTIONS.gated and OPTIONS.interleaved else feature
        gate += tl.load(weight.bias + gate_at * weight.bias_stride, mask=inside, other=0.0).to(tl.float32)[None, :]
    if OPTIONS.gated:
        up = tl.trans(up)
        if OPTIONS.x_scale:
            up *= by_row
        if OPTIONS.bias:
            up_at = feature * 2 + 1 if OPTIONS.interleaved else feature + sizes.n
            up += tl.load(weight.bias + up_at * weight.bias_stride, mask=inside, other=0.0).to(tl.float32)[None, :]
        if OPTIONS.limit:
            gate, up = clamp_gated(gate, up, swiglu.limit)
        value = gated(gate, up, swiglu.alpha, swiglu.beta)
        if OPTIONS.round_mxfp4:
            value = round_mxfp4(value)
        row = rows.to(tl.int64)
    else:
        value = gate
        row = pair.to(tl.int64)
    pointers = out.first + row[:, None] * out.row_stride + feature[None, :]
    value = round_to(value, out.first.dtype.element_ty, OPTIONS.interpreted)
    tl.store(pointers, value, mask=exists[:, None] & inside[None, :])


@triton.jit
def _weight_rows(feature, n, OPTIONS: tl.constexpr):
    """Returns the weight's gate row and up row of each output feature. Features beyond ``n`` repeat the last feature, and are not
    stored.
    """
    known = tl.minimum(feature, n - 1).to(tl.int64)
    gate_row = known * 2 if OPTIONS.gated and OPTIONS.interleaved else known
    up_row = known * 2 + 1 if OPTIONS.interleaved else known + n
    return gate_row, up_row


@triton.jit
def _load_scales(gate, up, offset, GATED: tl.constexpr):
    """Loads the weight scales of the gate and up rows at an offset. Unless ``GATED``, both results are the gate's scales."""
    by_gate = tl.load(gate + offset)
    by_up = tl.load(up + offset) if GATED else by_gate
    return by_gate, by_up


@triton.jit
def _block(
    inputs, weight, out, block, feature, sizes, swiglu,
    OPTIONS: tl.constexpr, TILE: tl.constexpr, BLOCK_T: tl.constexpr, EXTRA_T: tl.constexpr,
):  # fmt: skip
    """Computes one tile of output features for ``BLOCK_T`` rows of a block, and for ``EXTRA_T`` further rows.

    The further rows reuse the loaded weight tiles.
    """
    GATED: tl.constexpr = OPTIONS.gated
    FORMAT: tl.constexpr = OPTIONS.format
    COMPUTE: tl.constexpr = OPTIONS.compute
    PRECISION: tl.constexpr = OPTIONS.precision
    DESCRIPTOR: tl.constexpr = OPTIONS.descriptor
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_K: tl.constexpr = TILE.block_k
    EVEN_K: tl.constexpr = TILE.even_k
    N = sizes.n
    K = sizes.k
    gate_row, up_row = _weight_rows(feature, N, OPTIONS)
    extra = Block(block.order, block.first + BLOCK_T, block.end, block.top_k)
    x_row = _input_rows(inputs, block, GATED, BLOCK_T)
    gate = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    up = gate
    if EXTRA_T > 0:
        x_row_extra = _input_rows(inputs, extra, GATED, EXTRA_T)
        gate_extra = tl.zeros([BLOCK_N, EXTRA_T], tl.float32)
        up_extra = gate_extra
    at_gate = weight.gate_start if DESCRIPTOR else gate_row * weight.row_stride
    at_up = weight.up_start if DESCRIPTOR else up_row * weight.row_stride
    s_gate = weight.scale
    s_up = weight.scale
    if FORMAT != "dense":
        scaled_rows: tl.constexpr = _BLOCK_FP8 if OPTIONS.scales == "blocks" else 1
        s_gate = weight.scale + gate_row // scaled_rows * weight.scale_row_stride
        s_up = weight.scale + up_row // scaled_rows * weight.scale_row_stride
    # fp8 block scales multiply the partial sum of one step along k. Scales are loaded one step ahead to hide the latency.
    scaled: tl.constexpr = OPTIONS.scales == "blocks"
    if scaled:
        by_gate, by_up = _load_scales(s_gate, s_up, 0, GATED)
    else:
        by_gate = tl.zeros([BLOCK_N], tl.float32)
        by_up = by_gate
    column = tl.arange(0, BLOCK_K)

    for k in range(0, K, BLOCK_K):
        columns = (k + column).to(tl.int64) * inputs.column_stride
        x_tile = _load(x_row[:, None] + columns[None, :], column, K - k, EVEN_K).to(COMPUTE)
        if EXTRA_T > 0:
            x_tile_extra = _load(x_row_extra[:, None] + columns[None, :], column, K - k, EVEN_K).to(COMPUTE)
        if scaled:
            next_block = tl.minimum(k + BLOCK_K, K - 1) // _BLOCK_FP8 * weight.scale_column_stride
            by_gate_next, by_up_next = _load_scales(s_gate, s_up, next_block, GATED)
        tile = _weight_tile(weight.gate, at_gate, s_gate, weight, k, K - k, OPTIONS, TILE)
        gate = _accumulate(gate, tile, x_tile, by_gate, scaled, PRECISION)
        if EXTRA_T > 0:
            gate_extra = _accumulate(gate_extra, tile, x_tile_extra, by_gate, scaled, PRECISION)
        if GATED:
            tile = _weight_tile(weight.up, at_up, s_up, weight, k, K - k, OPTIONS, TILE)
            up = _accumulate(up, tile, x_tile, by_up, scaled, PRECISION)
            if EXTRA_T > 0:
                up_extra = _accumulate(up_extra, tile, x_tile_extra, by_up, scaled, PRECISION)
        if scaled:
            by_gate = by_gate_next
            by_up = by_up_next

    # Scales that apply to all of k multiply the accumulators.
    whole: tl.constexpr = OPTIONS.scales == "channels" or OPTIONS.scales == "e4m3"
    if whole:
        if OPTIONS.scales == "channels":
            by_gate, by_up = _load_scales(s_gate, s_up, 0, GATED)
        else:
            by_gate = tl.zeros([BLOCK_N], tl.float32) + tl.load(weight.global_scale)
            by_up = by_gate
        gate *= by_gate[:, None]
        up *= by_up[:, None]
        if EXTRA_T > 0:
            gate_extra *= by_gate[:, None]
            up_extra *= by_up[:, None]

    _store_tile(gate, up, block, feature, inputs, weight, out, sizes, swiglu, OPTIONS, BLOCK_T)
    if EXTRA_T > 0:
        _store_tile(gate_extra, up_extra, extra, feature, inputs, weight, out, sizes, swiglu, OPTIONS, EXTRA_T)


@triton.jit
def grouped_gemm_kernel(
    x,
    x_row_stride, x_column_stride,
    x_scale,
    w, w_up, w_expert_rows, w_up_rows,
    w_expert_stride, w_row_stride, w_column_stride,
    w_scale,
    scale_expert_stride, scale_row_stride, scale_column_stride,
    global_scale,
    global_scale_stride,
    bias,
    bias_expert_stride, bias_stride,
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
    alpha, limit, beta,
    OPTIONS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Computes the first projection with its activation if ``OPTIONS.gated``, else the second projection. N: output features; K:
    input features.

    w and w_up are the same pointer, or tensor descriptors of all experts' gate and up rows ``[rows, K]``. With descriptors, an
    expert has ``w_expert_rows`` rows, and its up rows begin ``w_up_rows`` rows after its gate rows.

    Blocks have up to ``block_t + extra_t`` rows. Blocks with at most ``block_t`` or ``tail_t`` rows use a loop with smaller tiles.
    Programs of ``group`` consecutive blocks compute the same features one after another, so that each weight is read from memory
    once.
    """
    FORMAT: tl.constexpr = OPTIONS.format
    BLOCK_T: tl.constexpr = TILE.block_t
    EXTRA_T: tl.constexpr = TILE.extra_t
    TAIL_T: tl.constexpr = TILE.tail_t
    BLOCK_N: tl.constexpr = TILE.block_n
    GROUP: tl.constexpr = TILE.group
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
    if not OPTIONS.descriptor:
        w += expert * w_expert_stride
        w_up += expert * w_expert_stride
    if FORMAT != "dense":
        w_scale += expert * scale_expert_stride
    if OPTIONS.scales == "e4m3":
        global_scale += expert * global_scale_stride
    if OPTIONS.bias:
        bias += expert * bias_expert_stride
    inputs = Inputs(x, x_row_stride, x_column_stride, x_scale)
    scales = (w_scale, scale_row_stride, scale_column_stride)
    weight = Weight(w, w_up, first_gate, first_up, w_row_stride, w_column_stride, *scales, global_scale, bias, bias_stride)
    rows = Block(order, first, end, top_k)
    what = (inputs, weight, Output(y, y_row_stride), rows, feature, Sizes(N, K), Swiglu(alpha, limit, beta))
    if TAIL_T > 0 and end - first <= TAIL_T:
        _block(*what, OPTIONS, TILE, TAIL_T, 0)
    elif EXTRA_T > 0 and end - first > BLOCK_T:
        _block(*what, OPTIONS, TILE, BLOCK_T, EXTRA_T)
    else:
        _block(*what, OPTIONS, TILE, BLOCK_T, 0)
