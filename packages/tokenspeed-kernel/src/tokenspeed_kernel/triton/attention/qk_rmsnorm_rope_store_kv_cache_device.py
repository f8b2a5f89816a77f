"""Device code of `qk_rmsnorm_rope_store_kv_cache`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.common_device import start
from tokenspeed_kernel.triton.embedding.apply_rope_device import Angles, Norm, Slots, rotate_keys, rotate_queries
from tokenspeed_kernel.triton.views_device import Cache, Heads


@triton.jit(do_not_specialize=["tokens", "k_programs"])
def qk_rmsnorm_rope_store_kv_cache_kernel(
    q,
    k,
    v,
    q_weight,
    k_weight,
    positions,
    table,
    q_out,
    k_cache,
    v_cache,
    slot_mapping,
    k_scale,
    v_scale,
    tokens,
    k_programs,
    eps,
    token_stride,
    q_out_token_stride,
    q_out_head_stride,
    positions_stride,
    stream_stride,
    table_stride,
    slot_mapping_stride,
    k_page_stride,
    k_slot_stride,
    k_cache_head_stride,
    k_cache_dim_stride,
    v_page_stride,
    v_slot_stride,
    v_cache_head_stride,
    v_cache_dim_stride,
    SHAPE: tl.constexpr,
    WRITE: tl.constexpr,
    TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The first ``k_programs`` programs normalise and rotate k and write k and v to the cache; the others process q."""
    start(EARLY)
    angles = Angles(positions, positions_stride, table, table_stride, stream_stride)
    program = tl.program_id(0)
    if program < k_programs:
        rotate_keys(
            Heads(k, token_stride, SHAPE.head_dim),
            Heads(v, token_stride, WRITE.v_head_dim),
            None,
            Cache(k_cache, k_page_stride, k_slot_stride, k_cache_head_stride, k_cache_dim_stride),
            Cache(v_cache, v_page_stride, v_slot_stride, v_cache_head_stride, v_cache_dim_stride),
            Slots(slot_mapping, slot_mapping_stride),
            k_scale,
            v_scale,
            Norm(k_weight, eps),
            angles,
            program,
            tokens,
            SHAPE,
            WRITE,
            TILE,
            INTERPRETED,
        )
    else:
        q_heads = Heads(q, token_stride, SHAPE.head_dim)
        q_out_heads = Heads(q_out, q_out_token_stride, q_out_head_stride)
        rotate_queries(q_heads, q_out_heads, Norm(q_weight, eps), angles, program - k_programs, tokens, SHAPE, TILE, INTERPRETED)
