"""Device code of `store_kv_cache`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.kvcache._write_device import as_stored, slot_of
from tokenspeed_kernel.triton.quantization._encode_device import divide, prepare_divisor
from tokenspeed_kernel.triton.views_device import Cache, Heads, row_of


@triton.jit
def _divided(values, scale, head, SCALES: tl.constexpr, ENCODING: tl.constexpr):
    """Values over their head's scale, float32. SCALES: how many there are, 0 for none."""
    if SCALES == 0:
        quotient = values
    else:
        loaded = tl.load(scale + (head if SCALES > 1 else tl.zeros_like(head)))
        factor, divisor, reciprocal = prepare_divisor(loaded, ENCODING.interpreted)
        values = values.to(tl.float32)
        quotient = divide(values, factor, divisor, reciprocal, ENCODING.interpreted, ENCODING.steps)
        # Quotients that overflow come out as NaN, as do infinite values; they are to saturate.
        quotient = tl.where(quotient != quotient, values * float("inf"), quotient)
    return quotient


@triton.jit(do_not_specialize=["tokens"])
def store_kv_cache_kernel(
    k,
    v,
    k_cache,
    v_cache,
    slot_mapping,
    k_scale,
    v_scale,
    tokens,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    k_page_stride,
    k_slot_stride,
    k_cache_head_stride,
    k_cache_dim_stride,
    v_page_stride,
    v_slot_stride,
    v_cache_head_stride,
    v_cache_dim_stride,
    slot_mapping_stride,
    SHAPE: tl.constexpr,
    ENCODING: tl.constexpr,
    TILE: tl.constexpr,
):
    """A tile of heads, of whatever tokens."""
    HEADS: tl.constexpr = TILE.heads
    FORMAT: tl.constexpr = ENCODING.format
    NATIVE: tl.constexpr = ENCODING.native
    keys_to = Cache(k_cache, k_page_stride, k_slot_stride, k_cache_head_stride, k_cache_dim_stride)
    values_to = Cache(v_cache, v_page_stride, v_slot_stride, v_cache_head_stride, v_cache_dim_stride)
    row = tl.program_id(0) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, TILE.block)[None, :]
    token, head = (row // SHAPE.heads).to(tl.int64), (row % SHAPE.heads).to(tl.int64)
    slot = tl.load(slot_mapping + token * slot_mapping_stride, mask=token < tokens, other=-1)
    written = (slot >= 0) & (column < SHAPE.head_dim)
    keys = tl.load(row_of(Heads(k, k_token_stride, k_head_stride), token, head) + column, mask=written)
    values = tl.load(row_of(Heads(v, v_token_stride, v_head_stride), token, head) + column, mask=written)
    keys = as_stored(_divided(keys, k_scale, head, ENCODING.k_scales, ENCODING), FORMAT, NATIVE)
    values = as_stored(_divided(values, v_scale, head, ENCODING.v_scales, ENCODING), FORMAT, NATIVE)
    k_at = slot_of(keys_to, slot, head, SHAPE.page_size)
    v_at = slot_of(values_to, slot, head, SHAPE.page_size)
    tl.store(k_at + column * keys_to.dim_stride, keys, mask=written)
    tl.store(v_at + column * values_to.dim_stride, values, mask=written)
