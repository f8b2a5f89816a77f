"""Device code of `moe_apply_mxfp4`: grouped GEMMs with mxfp4 weights that are dequantised in registers.

Weight rows are in pairs: gate and up of a feature in w13, rows ``r`` and ``r + rows / 2`` in w2. A *chunk* is 64 elements of k,
that is, two scale blocks. `_mxfp4_layout` describes the words and exponents.

Grid: [(block of (token, slot) pairs, tile of weight rows), splits of k], the tile varying fastest on axis 0. The MMAs are swap-AB:
weights [ROWS, 32] are the left operand and stay in registers after they are dequantised; activations [32, COLUMNS] are the right
operand. A tile of words [ROWS, 32] gives four tiles of weights, two rows of each pair by two scale blocks, so a tile has two
accumulators, one per row of the pair. With ``TILE.separate``, each scale block has accumulators of its own, which are added after
the loop: the chain of dependent MMAs is half as long. Otherwise both blocks are joined to one MMA operand of 64 elements.

Numerics: weights are dequantised relative to the largest scale of their row. This is exact in bfloat16, and in float16 except for
results that are subnormal or less. The row's largest scale, and the scale of the activation row, multiply the float32 accumulators
in the epilogue.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tokenspeed_kernel.triton.activation.gated_device import clamp_gated
from tokenspeed_kernel.triton.moe._mxfp4_decode_device import decode


@triton.jit
def _own_pairs(ids_ptr, stride_token, stride_slot, me, pairs, top_k, PAIRS: tl.constexpr, COLUMNS: tl.constexpr):
    """Finds the expert of pair ``me``, and the block of that expert's pairs that begins with ``me``.

    Returns ``(expert, pair, valid)``; ``valid`` masks the block's columns that have a pair. The expert is -1 if no block begins
    with ``me``.
    """
    other = tl.arange(0, PAIRS)
    token = other // top_k
    ids = tl.load(ids_ptr + token * stride_token + (other - token * top_k) * stride_slot, mask=other < pairs, other=-1)
    expert = tl.sum(tl.where(other == me, ids, 0), 0)
    same = (ids == expert).to(tl.int32)
    before = tl.sum(tl.where(other < me, same, 0), 0)
    column = tl.arange(0, COLUMNS)
    location = tl.where(same != 0, tl.cumsum(same, 0) - 1 - before, -1)
    pair = tl.sum(tl.where(location[:, None] == column[None, :], other[:, None], 0), 0)
    valid = column < tl.sum(same, 0) - before
    return tl.where(before % COLUMNS == 0, expert, -1), pair, valid


class Inputs(NamedTuple):
    """The input rows ``[rows, k]`` of activations. If OPTIONS.scaled, also their float32 scales, one per row."""

    first: Any  # a pointer to the first element
    row_stride: Any
    k_stride: Any
    scale: Any


class Weight(NamedTuple):
    """Pointers to one expert's weight in the layout of `_mxfp4_layout`: its words, exponents, and row factors with biases."""

    words: Any
    exponents: Any
    epilogue: Any


class Output(NamedTuple):
    """The output ``[pairs, features]``, with unit stride along features."""

    first: Any
    pair_stride: Any


class Part(NamedTuple):
    """A program's part of the GEMM: a tile of weight rows, and a range of chunks of k (split-K).

    ``index`` is the number of the split; split 0 adds the bias.
    """

    row_tile: Any
    index: Any
    first_chunk: Any
    last_chunk: Any


class Sizes(NamedTuple):
    """Sizes of a GEMM. ``rows``: number of pairs of weight rows; ``k``: elements along k; ``top_k``: experts per token."""

    rows: Any
    k: Any
    top_k: Any


class Swiglu(NamedTuple):
    """The parameters of the gated activation ``(up + beta) * gate * sigmoid(alpha * gate)``; ``limit`` clamps gate and up."""

    alpha: Any
    limit: Any
    beta: Any


@triton.jit
def _activated(gate, up, swiglu, LIMITED: tl.constexpr):
    # Returns the gated activation of float32 ``gate`` and ``up``, see `Swiglu`.
    if LIMITED:
        gate, up = clamp_gated(gate, up, swiglu.limit)
    return (up + swiglu.beta) * gate / (1.0 + tl.exp(-swiglu.alpha * gate))


@triton.jit
def _multiply_tile(
    pair,
    valid,
    inputs,
    weight,
    out,
    part,
    sizes,
    swiglu,
    OPTIONS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Computes a tile of one expert's GEMM, and stores it. ``pair``, ``valid``: each column's (token, slot) pair, and which columns
    have one.

    With OPTIONS.activated, stores the activation of both rows of each pair, [pairs, rows]. Otherwise stores both rows, [pairs, 2 *
    rows]: the down projection's result, or a split-K partial sum.
    """
    ROWS: tl.constexpr = TILE.rows
    SEPARATE: tl.constexpr = TILE.separate
    UNROLL: tl.constexpr = TILE.unroll
    WHOLE_K: tl.constexpr = TILE.whole_k
    DTYPE: tl.constexpr = OPTIONS.dtype
    rows = sizes.rows
    k = sizes.k
    first_chunk = part.first_chunk
    row = part.row_tile * ROWS + tl.arange(0, ROWS)
    # Rows beyond the last row recompute the last row, and are not stored.
    own = tl.minimum(row, rows - 1)
    lane = tl.arange(0, 32)
    wide = tl.arange(0, 64)
    words = weight.words + (first_chunk.to(tl.int64) * rows * 32) + own[:, None] * 32 + lane[None, :]
    exponents = weight.exponents + first_chunk.to(tl.int64) * rows + own
    source_row = pair // sizes.top_k if OPTIONS.gated else pair
    source = source_row.to(tl.int64) * inputs.row_stride
    values = inputs.first + source[None, :] + (first_chunk * 64 + lane[:, None]).to(tl.int64) * inputs.k_stride
    wide_values = inputs.first + source[None, :] + (first_chunk * 64 + wide[:, None]).to(tl.int64) * inputs.k_stride
    acc0 = tl.zeros([ROWS, COLUMNS], tl.float32)
    acc1 = tl.zeros([ROWS, COLUMNS], tl.float32)
    if SEPARATE:
        acc2 = tl.zeros([ROWS, COLUMNS], tl.float32)
        acc3 = tl.zeros([ROWS, COLUMNS], tl.float32)
    for chunk in tl.range(first_chunk, part.last_chunk, UNROLL, num_stages=TILE.stages):
        for ahead in tl.static_range(UNROLL):
            word = tl.load(words + ahead * rows * 32)
            a0, a1, b0, b1 = decode(word, tl.load(exponents + ahead * rows)[:, None], DTYPE, OPTIONS.ptx, OPTIONS.drain)
            if SEPARATE:
                x0 = tl.load(values + ahead * 64 * inputs.k_stride, mask=valid[None, :], other=0.0).to(DTYPE)
                present = valid[None, :] if WHOLE_K else valid[None, :] & ((chunk + ahead) * 64 + 32 + lane[:, None] < k)
                x1 = tl.load(values + (ahead * 64 + 32) * inputs.k_stride, mask=present, other=0.0).to(DTYPE)
                acc0 = tl.dot(a0, x0, acc0)
                acc1 = tl.dot(b0, x0, acc1)
                acc2 = tl.dot(a1, x1, acc2)
                acc3 = tl.dot(b1, x1, acc3)
            else:
                present = valid[None, :] if WHOLE_K else valid[None, :] & ((chunk + ahead) * 64 + wide[:, None] < k)
                x = tl.load(wide_values + ahead * 64 * inputs.k_stride, mask=present, other=0.0).to(DTYPE)
                acc0 = tl.dot(tl.reshape(tl.permute(tl.join(a0, a1), 0, 2, 1), (ROWS, 64)), x, acc0)
                acc1 = tl.dot(tl.reshape(tl.permute(tl.join(b0, b1), 0, 2, 1), (ROWS, 64)), x, acc1)
        words += UNROLL * rows * 32
        exponents += UNROLL * rows
        values += UNROLL * 64 * inputs.k_stride
        wide_values += UNROLL * 64 * inputs.k_stride
    if SEPARATE:
        acc0 += acc2
        acc1 += acc3
    factors = weight.epilogue + own
    acc0 *= tl.load(factors)[:, None]
    acc1 *= tl.load(factors + rows)[:, None]
    if OPTIONS.scaled:
        step = tl.load(inputs.scale + source_row)[None, :]
        acc0 *= step
        acc1 *= step
    if part.index == 0:
        acc0 += tl.load(factors + 2 * rows)[:, None]
        acc1 += tl.load(factors + 3 * rows)[:, None]
    mask = (row < rows)[:, None] & valid[None, :]
    target = out.first + pair.to(tl.int64)[None, :] * out.pair_stride + row[:, None]
    if OPTIONS.activated:
        result = _activated(acc0, acc1, swiglu, OPTIONS.limited)
        tl.store(target, result.to(out.first.dtype.element_ty), mask=mask)
    else:
        tl.store(target, acc0.to(out.first.dtype.element_ty), mask=mask)
        tl.store(target + rows, acc1.to(out.first.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["pairs", "row_tiles", "chunks"])
def mxfp4_gemm_kernel(
    x_ptr,
    x_stride_row,
    x_stride_k,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    epilogue_ptr,
    out_ptr,
    out_stride_part,
    out_stride_pair,
    ids_ptr,
    ids_stride_token,
    ids_stride_slot,
    order_ptr,
    expert_start_ptr,
    block_expert_ptr,
    block_row_ptr,
    pairs,
    top_k,
    num_experts,
    rows,
    k,
    chunks,
    row_tiles,
    alpha,
    limit,
    beta,
    OPTIONS: tl.constexpr,
    TILE: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Computes a tile of one grouped GEMM.

    With PAIRS = 0, a schedule (``block_expert``, ``block_row``, ``order``) gives each block's expert and pairs. A block with few
    pairs uses a narrower tile. With PAIRS > 0, an upper bound of the number of pairs, there is no schedule: the programs of pair
    ``block`` search all ids, and return unless a block of the pair's expert begins with this pair.
    """
    COLUMNS: tl.constexpr = TILE.columns
    TAIL: tl.constexpr = TILE.tail
    UNROLL: tl.constexpr = TILE.unroll
    SPLIT_K: tl.constexpr = TILE.split_k
    block = tl.program_id(0) // row_tiles
    row_tile = tl.program_id(0) % row_tiles
    part = tl.program_id(1)
    steps = chunks // UNROLL
    first_chunk = steps * part // SPLIT_K * UNROLL
    last_chunk = steps * (part + 1) // SPLIT_K * UNROLL
    out_ptr += part.to(tl.int64) * out_stride_part
    if PAIRS > 0:
        expert, pair, valid = _own_pairs(ids_ptr, ids_stride_token, ids_stride_slot, block, pairs, top_k, PAIRS, COLUMNS)
        if expert >= num_experts:
            return
    else:
        expert = tl.load(block_expert_ptr + block)
    if expert < 0:
        return
    weight = Weight(
        weight_ptr + expert.to(tl.int64) * chunks * rows * 32,
        scale_ptr + expert.to(tl.int64) * chunks * rows,
        epilogue_ptr + expert.to(tl.int64) * 4 * rows,
    )
    inputs = Inputs(x_ptr, x_stride_row, x_stride_k, x_scale_ptr)
    out = Output(out_ptr, out_stride_pair)
    work = Part(row_tile, part, first_chunk, last_chunk)
    what = (inputs, weight, out, work, Sizes(rows, k, top_k), Swiglu(alpha, limit, beta))
    if PAIRS > 0:
        _multiply_tile(pair, valid, *what, OPTIONS, TILE, COLUMNS)
    else:
        first_row = tl.load(block_row_ptr + block)
        count = tl.load(expert_start_ptr + expert + 1) - first_row
        order_ptr += first_row
        if TAIL >= 32 and TAIL < COLUMNS and count <= TAIL // 2:
            fewest = tl.arange(0, TAIL // 2) < count
            fewest_pairs = tl.load(order_ptr + tl.arange(0, TAIL // 2), mask=fewest, other=0)
            _multiply_tile(fewest_pairs, fewest, *what, OPTIONS, TILE, TAIL // 2)
        elif TAIL < COLUMNS and count <= TAIL:
            few = tl.arange(0, TAIL) < count
            few_pairs = tl.load(order_ptr + tl.arange(0, TAIL), mask=few, other=0)
            _multiply_tile(few_pairs, few, *what, OPTIONS, TILE, TAIL)
        else:
            all_valid = tl.arange(0, COLUMNS) < count
            all_pairs = tl.load(order_ptr + tl.arange(0, COLUMNS), mask=all_valid, other=0)
            _multiply_tile(all_pairs, all_valid, *what, OPTIONS, TILE, COLUMNS)


@triton.jit(do_not_specialize=["pairs"])
def activate_kernel(
    gate_up_ptr, out_ptr, pairs, features, alpha, limit, beta, LIMITED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Reduces the split-K partial sums ``[parts, pairs, 2, features]`` of the first GEMM, and applies the activation."""
    pair = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = feature < features
    gate = tl.zeros([BLOCK], tl.float32)
    up = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        source = gate_up_ptr + (part * pairs.to(tl.int64) + pair) * 2 * features + feature
        gate += tl.load(source, mask=mask, other=0.0)
        up += tl.load(source + features, mask=mask, other=0.0)
    result = _activated(gate, up, Swiglu(alpha, limit, beta), LIMITED)
    tl.store(out_ptr + pair * features + feature, result.to(out_ptr.dtype.element_ty), mask=mask)
