"""Causal attention of whole sequences whose keys are wider than their values: the tiles of `_mha_tiles`, as many key heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenspeed_kernel.ops.attention._softmax import softmax_scale_of
from tokenspeed_kernel.ops.attention.triton._mha_call import Call
from tokenspeed_kernel.ops.attention.triton._mha_tiles import Tiles, attend
from tokenspeed_kernel.ops.triton_common import for_architecture

_HOPPER = Tiles(128, 64, 8, 3, "apart")


def tiles_for(dtype: torch.dtype, head_dim: int, v_head_dim: int, device: torch.device) -> Tiles:
    """The tile for a call."""
    if dtype == torch.float32:
        return Tiles(32, 32, 4, 2)
    portable = Tiles(64, 32, 4, 2)
    return for_architecture({"sm_90": _HOPPER, "any": portable}, device) if head_dim <= 192 and v_head_dim <= 128 else portable


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
    longest = tokens if max_seqlen is None else min(max_seqlen, tokens)
    scale = softmax_scale_of(softmax_scale, head_dim)
    call = Call(q, k, v, out, lse, cu_seqlens, scale, True, -1, logit_cap, None, longest)
    attend(tiles_for(q.dtype, head_dim, v.shape[2], q.device), call)
    return out if lse is None else (out, lse)
