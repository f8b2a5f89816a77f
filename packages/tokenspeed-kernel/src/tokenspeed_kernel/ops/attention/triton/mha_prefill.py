"""Causal attention of whole sequences: the tiles of `_mha_tiles`, over keys that lie in a row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenspeed_kernel.ops.attention._softmax import softmax_scale_of
from tokenspeed_kernel.ops.attention.triton._mha_tiles import Tiles, attend


def tiles_for(dtype: torch.dtype, head_dim: int, v_head_dim: int, windowed: bool) -> Tiles:
    """The tile for a call."""
    widest = max(head_dim, v_head_dim)
    if dtype == torch.float32:
        return Tiles(32, 32, 4, 2)
    if widest <= 64:
        return Tiles(128, 64, 4, 3)
    if widest <= 128:
        return Tiles(128, 64, 8, 3)
    return Tiles(64, 32, 4, 2)


def mha_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Sequence[int] | Tensor | None = None,
    max_seqlen: int | None = None,
    window_left: int = -1,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    softmax_scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """See `tokenspeed_kernel.mha_prefill`. Never waits for the device: the hint on the host is not looked at."""
    tokens, heads, head_dim = q.shape
    if out is None:
        out = q.new_empty(tokens, heads, v.shape[2])
    lse = q.new_empty(tokens, heads, dtype=torch.float32) if return_lse else None
    attend(
        tiles_for(q.dtype, head_dim, v.shape[2], window_left >= 0),
        q,
        k,
        v,
        out,
        lse,
        cu_seqlens,
        softmax_scale_of(softmax_scale, head_dim),
        True,
        window_left,
        logit_cap,
        sinks,
        longest=tokens if max_seqlen is None else max_seqlen,
    )
    return out if lse is None else (out, lse)
