"""Device code of `store_mla_kv_cache`: writes latents and rotary parts to the slots of a paged cache, in the cache's dtype."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.kvcache._write_device import encoded, slot_of
from tokenspeed_kernel.triton.quantization.quantize_fp8_device import fp8_of_groups
from tokenspeed_kernel.triton.views_device import Cache

_LARGEST_E4M3 = tl.constexpr(448.0)


@triton.jit
def _store_groups(
    latent,
    latent_stride,
    cache,
    scales,
    slot_mapping,
    slot_mapping_stride,
    tokens,
    GROUPS: tl.constexpr,
    SHAPE: tl.constexpr,
    ENCODING: tl.constexpr,
    TILE: tl.constexpr,
):
    """Quantises the latents of TILE.tokens tokens to fp8, with a scale per group, and stores them and the scales in the cache.

    A group is GROUPS.group consecutive columns of one token's latent. The tile has one row for each group of each token:
    [TILE.tokens * TILE.rank / GROUPS.group, GROUPS.group].
    """
    LENGTH: tl.constexpr = GROUPS.group
    FORMAT: tl.constexpr = ENCODING.format
    NATIVE: tl.constexpr = ENCODING.native
    INTERPRETED: tl.constexpr = ENCODING.interpreted
    STEPS: tl.constexpr = ENCODING.steps
    EACH: tl.constexpr = TILE.rank // LENGTH
    row = tl.arange(0, TILE.tokens * EACH)
    token = (tl.program_id(0) * TILE.tokens + row // EACH).to(tl.int64)
    group = row % EACH
    slot = tl.load(slot_mapping + token * slot_mapping_stride, mask=token < tokens, other=-1)
    there = (slot >= 0) & (group < SHAPE.rank // LENGTH)
    column = group[:, None] * LENGTH + tl.arange(0, LENGTH)[None, :]
    x = tl.load(latent + (token * latent_stride)[:, None] + column, mask=there[:, None], other=0.0).to(tl.float32)
    code, scale = fp8_of_groups(x, FORMAT, _LARGEST_E4M3, NATIVE, INTERPRETED, STEPS, False)
    to = slot_of(cache, slot, 0, SHAPE.page_size)[:, None] + column * cache.dim_stride
    tl.store(to, code, mask=there[:, None])
    tl.store(slot_of(scales, slot, group, SHAPE.page_size), scale, mask=there)


@triton.jit(do_not_specialize=["tokens"])
def store_mla_kv_cache_kernel(
    latent,
    k_rope,
    kv_cache,
    slot_mapping,
    kv_scale,
    kv_scale_cache,
    rope_cache,
    tokens,
    latent_stride,
    k_rope_stride,
    page_stride,
    slot_stride,
    dim_stride,
    slot_mapping_stride,
    SHAPE: tl.constexpr,
    GROUPS: tl.constexpr,
    ENCODING: tl.constexpr,
    TILE: tl.constexpr,
):
    """Stores the latents and rotary parts of TILE.tokens tokens in the cache."""
    cache = Cache(kv_cache, page_stride, slot_stride, 0, dim_stride)
    token = (tl.program_id(0) * TILE.tokens + tl.arange(0, TILE.tokens)[:, None]).to(tl.int64)
    column = tl.arange(0, TILE.rank)[None, :]
    slot = tl.load(slot_mapping + token * slot_mapping_stride, mask=token < tokens, other=-1)
    there = (slot >= 0) & (column < SHAPE.rank)
    at = slot_of(cache, slot, 0, SHAPE.page_size)
    none = tl.zeros_like(token)  # at most one scale, so the head index is 0
    if GROUPS is None:
        values = tl.load(latent + token * latent_stride + column, mask=there)
    if SHAPE.rope > 0:
        rope_column = tl.arange(0, TILE.rope)[None, :]
        rope_there = (slot >= 0) & (rope_column < SHAPE.rope)
        rotary = tl.load(k_rope + token * k_rope_stride + rope_column, mask=rope_there)
        if GROUPS is None:
            rotary = encoded(rotary, kv_scale, none, ENCODING.k_scales, ENCODING)
            tl.store(at + (SHAPE.rank + rope_column) * dim_stride, rotary, mask=rope_there)
        else:
            ropes = Cache(rope_cache, GROUPS.rope_page, GROUPS.rope_slot, 0, GROUPS.rope_dim)
            tl.store(slot_of(ropes, slot, 0, SHAPE.page_size) + rope_column * GROUPS.rope_dim, rotary, mask=rope_there)
    if GROUPS is None:
        tl.store(at + column * dim_stride, encoded(values, kv_scale, none, ENCODING.k_scales, ENCODING), mask=there)
    else:
        scales = Cache(kv_scale_cache, GROUPS.scale_page, GROUPS.scale_slot, GROUPS.scale_group, 0)
        _store_groups(
            latent, latent_stride, cache, scales, slot_mapping, slot_mapping_stride, tokens, GROUPS, SHAPE, ENCODING, TILE
        )
