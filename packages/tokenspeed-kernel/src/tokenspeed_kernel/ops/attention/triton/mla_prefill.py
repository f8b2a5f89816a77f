"""Causal attention of whole sequences whose keys are wider than their values: the tiles of `_mha_tiles`, a key head a query head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenspeed_kernel.ops.attention._softmax import softmax_scale_of
from tokenspeed_kernel.ops.attention.triton._mha_tiles import Tiles, attend


def tiles_for(dtype: torch.dtype, head_dim: int) -> Tiles:
    """The tile for a call."""
    if dtype == torch.float32:
        return Tiles(32, 32, 4, 2)
    if head_dim <= 192:
        return Tiles(128, 64, 8, 3)
    return Tiles(64, 32, 4, 2)


def mla_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Sequence[int] | Tensor | None = None,
    max_seqlen: int | None = None,
    logit_cap: float = 0.0,
    return_lse: bool = False,
    softmax_scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """See `tokenspeed_kernel.mla_prefill`. Never waits for the device: the hint on the host is not looked at."""
    tokens, heads, head_dim = q.shape
    if out is None:
        out = q.new_empty(tokens, heads, v.shape[2])
    lse = q.new_empty(tokens, heads, dtype=torch.float32) if return_lse else None
    attend(
        tiles_for(q.dtype, head_dim),
        q,
        k,
        v,
        out,
        lse,
        cu_seqlens,
        softmax_scale_of(softmax_scale, head_dim),
        True,
        -1,
        logit_cap,
        None,
        longest=tokens if max_seqlen is None else max_seqlen,
    )
    return out if lse is None else (out, lse)
