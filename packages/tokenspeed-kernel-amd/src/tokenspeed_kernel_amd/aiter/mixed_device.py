"""mha_with_kvcache by ``unified_attention`` of AITER. Not run on hardware."""

from __future__ import annotations

from torch import Tensor

from tokenspeed_kernel_amd.aiter.paged_device import attend


def mha_with_kvcache(
    q: Tensor,
    cu_seqlens_q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    window_left: int = -1,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    softmax_scale: float | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    tree_mask: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Implements the operator `tokenspeed_kernel_amd.mha_with_kvcache`. Supports no LSE, no scales and no logit cap."""
    return attend(
        q, cu_seqlens_q, k_cache, v_cache, page_table, cache_seqlens, max_seqlen_q, max_seqlen_k, window_left, sinks,
        softmax_scale, out,
    )  # fmt: skip
