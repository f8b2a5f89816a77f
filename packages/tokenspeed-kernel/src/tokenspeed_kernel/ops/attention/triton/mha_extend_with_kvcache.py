"""Attention of new tokens to a paged cache: the tiles of `_mha_tiles`, over keys that lie in pages."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.ops.attention._softmax import output_dtype, softmax_scale_of
from tokenspeed_kernel.ops.attention.triton._mha_tiles import Paging, Tiles, attend


def tiles_for(dtype: torch.dtype, head_dim: int, v_head_dim: int, windowed: bool, rows: int) -> Tiles:
    """The tile for a call, of which a sequence has at most ``rows`` rows (positions times query heads of a key head)."""
    widest = max(head_dim, v_head_dim)
    if dtype == torch.float32:
        return Tiles(32 if rows > 16 else 16, 32, 4, 2)
    if rows <= 32:
        return Tiles(16 if rows <= 16 else 32, 64 if widest <= 128 else 32, 4, 3)
    if rows <= 64:
        return Tiles(64, 64 if widest <= 128 else 32, 4, 3)
    if widest <= 64:
        return Tiles(128, 64, 4, 3)
    if widest <= 128:
        return Tiles(128, 64, 8, 3)
    return Tiles(64, 32, 4, 2)


def mha_extend_with_kvcache(
    q: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool = False,
    window_left: int = -1,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    softmax_scale: float | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """See `tokenspeed_kernel.mha_extend_with_kvcache`. Lengths are read on the device only."""
    tokens, heads, head_dim = q.shape
    v_head_dim = v_cache.shape[3]
    if out is None:
        out = q.new_empty(tokens, heads, v_head_dim, dtype=output_dtype(q))
    lse = q.new_empty(tokens, heads, dtype=torch.float32) if return_lse else None
    rows = min(max_seqlen_q, tokens) * (heads // k_cache.shape[2])
    attend(
        tiles_for(q.dtype, head_dim, v_head_dim, window_left >= 0, rows),
        q,
        k_cache,
        v_cache,
        out,
        lse,
        cu_seqlens_q,
        softmax_scale_of(softmax_scale, head_dim),
        is_causal,
        window_left,
        logit_cap,
        sinks,
        longest=max_seqlen_k,
        paging=Paging(page_table, cache_seqlens),
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    return out if lse is None else (out, lse)
