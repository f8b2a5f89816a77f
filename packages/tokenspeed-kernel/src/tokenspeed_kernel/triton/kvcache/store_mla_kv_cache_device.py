"""Device code of `store_mla_kv_cache`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.kvcache._write_device import encoded, slot_of
from tokenspeed_kernel.triton.views_device import Cache


@triton.jit(do_not_specialize=["tokens"])
def store_mla_kv_cache_kernel(
    latent,
    k_rope,
    kv_cache,
    slot_mapping,
    kv_scale,
    tokens,
    latent_stride,
    k_rope_stride,
    page_stride,
    slot_stride,
    dim_stride,
    slot_mapping_stride,
    SHAPE: tl.constexpr,
    ENCODING: tl.constexpr,
    TILE: tl.constexpr,
):
    """A few tokens."""
    cache = Cache(kv_cache, page_stride, slot_stride, 0, dim_stride)
    token = (tl.program_id(0) * TILE.tokens + tl.arange(0, TILE.tokens)[:, None]).to(tl.int64)
    column = tl.arange(0, TILE.rank)[None, :]
    slot = tl.load(slot_mapping + token * slot_mapping_stride, mask=token < tokens, other=-1)
    there = (slot >= 0) & (column < SHAPE.rank)
    at = slot_of(cache, slot, 0, SHAPE.page_size)
    none = tl.zeros_like(token)  # there is one scale at most
    values = tl.load(latent + token * latent_stride + column, mask=there)
    if SHAPE.rope > 0:
        rope_column = tl.arange(0, TILE.rope)[None, :]
        rope_there = (slot >= 0) & (rope_column < SHAPE.rope)
        rotary = tl.load(k_rope + token * k_rope_stride + rope_column, mask=rope_there)
        rotary = encoded(rotary, kv_scale, none, ENCODING.k_scales, ENCODING)
        tl.store(at + (SHAPE.rank + rope_column) * dim_stride, rotary, mask=rope_there)
    tl.store(at + column * dim_stride, encoded(values, kv_scale, none, ENCODING.k_scales, ENCODING), mask=there)
