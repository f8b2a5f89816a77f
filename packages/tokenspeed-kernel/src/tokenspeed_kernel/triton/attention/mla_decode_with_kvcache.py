"""MLA decode over a paged cache of latents, for a fixed number of new tokens per sequence."""

from __future__ import annotations

from torch import Tensor

from tokenspeed_kernel.triton.attention._formats import LATENT, LATENT_GROUPS, MLA
from tokenspeed_kernel.triton.attention._mla_latent import attend_latent
from tokenspeed_kernel.triton.common import TRITON
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.spec import Priority


@register_kernel(
    "attention",
    "mla_decode_with_kvcache",
    solution="triton",
    capability=TRITON,
    signatures=LATENT | LATENT_GROUPS,
    traits={**MLA, "multi_query": any, "tree_mask": any, "grouped_scales": any},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def mla_decode_with_kvcache(
    q: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_k: int,
    kv_lora_rank: int,
    softmax_scale: float,
    max_seqlen_q: int,
    window_left: int,
    logit_cap: float,
    return_lse: bool,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
    tree_mask: Tensor | None,
    kv_scale_cache: Tensor | None,
    rope_cache: Tensor | None,
    out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Implements the operator `tokenspeed_kernel.mla_decode_with_kvcache`, which documents the arguments."""
    return attend_latent(
        q,
        kv_cache,
        page_table,
        cache_seqlens,
        None,
        max_seqlen_q,
        max_seqlen_k,
        kv_lora_rank,
        softmax_scale,
        True,
        window_left,
        logit_cap,
        return_lse,
        q_scale,
        kv_scale,
        out,
        tree_mask=tree_mask,
        kv_scale_cache=kv_scale_cache,
        rope_cache=rope_cache,
    )
