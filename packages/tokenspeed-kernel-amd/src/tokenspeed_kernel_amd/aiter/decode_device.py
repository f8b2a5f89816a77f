"""mha_decode_with_kvcache by ``unified_attention`` of AITER. Not run on hardware."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel_amd.aiter.paged_device import attend


def mha_decode_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_k: int,
    max_seqlen_q: int = 1,
    window_left: int = -1,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    softmax_scale: float | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Implements the operator `tokenspeed_kernel_amd.mha_decode_with_kvcache`. Supports one new token per sequence, no LSE, no
    scales and no logit cap.
    """
    offsets = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
    out = attend(
        q, offsets, k_cache, v_cache, page_table, cache_seqlens, 1, max_seqlen_k, window_left, sinks, softmax_scale, out
    )  # fmt: skip
    # With split-KV, AITER divides by a sequence's number of pages. This number is 0 for an empty sequence (batch padding), whose
    # output is set to 0.
    return out.masked_fill_((cache_seqlens <= 0).view(-1, 1, 1), 0)
