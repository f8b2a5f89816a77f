"""Device code of `rmsnorm_qkv_rope`: a GEMV-like kernel with an RMSNorm prologue and a rotary epilogue.

The host module explains why each program normalises all tokens itself. With PDL, a program prefetches its weights to L2 before it
waits for the preceding kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tokenspeed_kernel.triton.common_device import prefetch_rows, start
from tokenspeed_kernel.triton.kvcache._write_device import slot_of
from tokenspeed_kernel.triton.norm.rmsnorm_device import inverse_rms
from tokenspeed_kernel.triton.quantization._encode_device import round_to
from tokenspeed_kernel.triton.views_device import Cache


class Inputs(NamedTuple):
    """The tokens x ``[tokens, hidden]``, the residual to add, the output for ``x + residual``, and the norm's weight.

    ``residual_out`` is written while other programs read the inputs, so it must not alias any input.
    """

    x: Any
    x_stride: Any
    residual: Any
    residual_stride: Any
    residual_out: Any
    residual_out_stride: Any
    norm_weight: Any
    norm_stride: Any
    tokens: Any
    hidden: Any
    eps: Any


@triton.jit
def _sum_of(inputs, row, column, mask, HAS_RESIDUAL: tl.constexpr, INTERPRETED: tl.constexpr):
    """Loads elements of x; with a residual, returns ``x + residual``, rounded to the residual's dtype. Elements outside ``mask``
    are 0.
    """
    total = tl.load(inputs.x + row * inputs.x_stride + column, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        added = tl.load(inputs.residual + row * inputs.residual_stride + column, mask=mask, other=0.0)
        total = round_to(total.to(tl.float32) + added.to(tl.float32), added.dtype, INTERPRETED)
    return total


@triton.jit
def _multiply(inputs, weight_rows, dtype: tl.constexpr, program, TILE: tl.constexpr):
    """Returns the dot products of the normalised tokens and the given rows of the QKV weight: ``[TOKENS, outputs]``.

    Whole rows of the weight are held in registers, so that all their loads are in flight at once.
    """
    TOKENS: tl.constexpr = TILE.tokens
    column = tl.arange(0, TILE.hidden)[None, :]
    inside = column < inputs.hidden
    weight = tl.load(weight_rows[:, None] + column, mask=inside, other=0.0)
    scale = tl.load(inputs.norm_weight + column * inputs.norm_stride, mask=inside, other=0.0).to(tl.float32)
    product = tl.zeros((TOKENS, weight_rows.shape[0]), tl.float32)
    for token in tl.static_range(TOKENS):
        there = inside & (column * 0 + token < inputs.tokens)
        total = _sum_of(inputs, token, column, there, TILE.has_residual, TILE.interpreted)
        if TILE.has_residual and program == token % tl.num_programs(0):
            tl.store(inputs.residual_out + token * inputs.residual_out_stride + column, total, mask=there)
        wide = total.to(tl.float32)
        normed = round_to(wide * inverse_rms(wide, inputs.hidden, inputs.eps) * scale, dtype, TILE.interpreted)
        one = tl.sum(weight.to(tl.float32) * normed.to(tl.float32), axis=1)
        product = tl.where(tl.arange(0, TOKENS)[:, None] == token, one[None, :], product)
    return product


@triton.jit
def rmsnorm_qkv_rope_kernel(
    x,
    residual,
    norm_weight,
    qkv_weight,
    bias,
    positions,
    cos_sin_cache,
    out,
    residual_out,
    k_cache,
    v_cache,
    slot_mapping,
    tokens, hidden, heads, kv_heads, page_size, eps,
    x_stride,
    residual_stride,
    norm_stride,
    weight_row,
    bias_stride,
    positions_stride,
    table_stride,
    out_stride,
    residual_out_stride,
    k_page, k_slot, k_head, k_dim,
    v_page, v_slot, v_head, v_dim,
    slots_stride,
    BIAS: tl.constexpr, WRITE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Computes, rotates and stores TILE.pairs rotary pairs of one head of q, k or v, for all tokens. v is not rotated."""
    HEAD_DIM: tl.constexpr = TILE.head_dim
    PAIRS: tl.constexpr = TILE.pairs
    TOKENS: tl.constexpr = TILE.tokens
    half: tl.constexpr = HEAD_DIM // 2
    dtype: tl.constexpr = out.dtype.element_ty
    inputs = Inputs(
        x, x_stride, residual, residual_stride, residual_out, residual_out_stride, norm_weight, norm_stride, tokens, hidden, eps
    )
    program = tl.program_id(0)
    head = program // (half // PAIRS)
    first = program % (half // PAIRS) * PAIRS
    # The two elements of a pair are adjacent outputs, so that `tl.split` can separate them below.
    column = tl.arange(0, 2 * PAIRS)
    output = head * HEAD_DIM + first + column // 2 + column % 2 * half
    weight_rows = qkv_weight + output.to(tl.int64) * weight_row
    if TILE.early:  # prefetch only: the preceding kernel may still run, and may write the weights
        rows = weight_rows[:, None]
        prefetch_rows(rows, tl.full(rows.shape, True, tl.int1), hidden, 1, qkv_weight, TILE.hidden)
    start(TILE.early)
    product = _multiply(inputs, weight_rows, dtype, program, TILE)
    if BIAS:
        product += tl.load(bias + output * bias_stride).to(tl.float32)[None, :]
    product = round_to(product, dtype, TILE.interpreted).to(tl.float32)

    token = tl.arange(0, TOKENS)
    real = token < tokens
    a, b = tl.split(tl.reshape(product, (TOKENS, PAIRS, 2)))
    pair = first + tl.arange(0, PAIRS)
    if head < heads + kv_heads:
        position = tl.load(positions + token * positions_stride, mask=real, other=0).to(tl.int64)
        angles = cos_sin_cache + position[:, None] * table_stride + pair[None, :]
        cos, sin = tl.load(angles), tl.load(angles + half)
        a, b = a * cos - b * sin, b * cos + a * sin
    a, b = round_to(a, dtype, TILE.interpreted), round_to(b, dtype, TILE.interpreted)
    location = out + token.to(tl.int64)[:, None] * out_stride + head * HEAD_DIM + pair[None, :]
    tl.store(location, a, mask=real[:, None])
    tl.store(location + half, b, mask=real[:, None])
    if WRITE and head >= heads:
        slot = tl.load(slot_mapping + token * slots_stride, mask=real, other=-1)[:, None]
        kv_head = (head - heads) % kv_heads
        if head < heads + kv_heads:
            keys = Cache(k_cache, k_page, k_slot, k_head, k_dim)
            at = slot_of(keys, slot, kv_head, page_size) + pair[None, :] * k_dim
            tl.store(at, a, mask=slot >= 0)
            tl.store(at + half * k_dim, b, mask=slot >= 0)
        else:
            values = Cache(v_cache, v_page, v_slot, v_head, v_dim)
            at = slot_of(values, slot, kv_head, page_size) + pair[None, :] * v_dim
            tl.store(at, a, mask=slot >= 0)
            tl.store(at + half * v_dim, b, mask=slot >= 0)
