"""Device code of `store_kv_cache`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.kvcache._write_device import encoded, slot_of
from tokenspeed_kernel.triton.views_device import Cache, Heads, row_of


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
    """Stores a tile of (token, head) rows of k and v in the cache."""
    HEADS: tl.constexpr = TILE.heads
    keys_to = Cache(k_cache, k_page_stride, k_slot_stride, k_cache_head_stride, k_cache_dim_stride)
    values_to = Cache(v_cache, v_page_stride, v_slot_stride, v_cache_head_stride, v_cache_dim_stride)
    row = tl.program_id(0) * HEADS + tl.arange(0, HEADS)[:, None]
    k_column = tl.arange(0, TILE.block)[None, :]
    v_column = tl.arange(0, TILE.v_block)[None, :]
    token, head = (row // SHAPE.heads).to(tl.int64), (row % SHAPE.heads).to(tl.int64)
    slot = tl.load(slot_mapping + token * slot_mapping_stride, mask=token < tokens, other=-1)
    k_written = (slot >= 0) & (k_column < SHAPE.head_dim)
    v_written = (slot >= 0) & (v_column < SHAPE.v_head_dim)
    keys = tl.load(row_of(Heads(k, k_token_stride, k_head_stride), token, head) + k_column, mask=k_written)
    values = tl.load(row_of(Heads(v, v_token_stride, v_head_stride), token, head) + v_column, mask=v_written)
    keys = encoded(keys, k_scale, head, ENCODING.k_scales, ENCODING)
    values = encoded(values, v_scale, head, ENCODING.v_scales, ENCODING)
    k_at = slot_of(keys_to, slot, head, SHAPE.page_size)
    v_at = slot_of(values_to, slot, head, SHAPE.page_size)
    tl.store(k_at + k_column * keys_to.dim_stride, keys, mask=k_written)
    tl.store(v_at + v_column * values_to.dim_stride, values, mask=v_written)
