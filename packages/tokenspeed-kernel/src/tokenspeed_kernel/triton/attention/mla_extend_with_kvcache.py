"""MLA of new tokens over a paged cache of latents, for any number of new tokens per sequence (extend)."""

from __future__ import annotations

from torch import Tensor

from tokenspeed_kernel.triton.attention._formats import LATENT, MLA
from tokenspeed_kernel.triton.attention._mla_latent import attend_latent
from tokenspeed_kernel.triton.common import TRITON
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.spec import Priority


@register_kernel(
    "attention",
    "mla_extend_with_kvcache",
    solution="triton",
    capability=TRITON,
    signatures=LATENT,
    traits={**MLA, "is_causal": any},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def mla_extend_with_kvcache(
    q: Tensor,
    cu_seqlens_q: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    kv_lora_rank: int,
    softmax_scale: float,
    is_causal: bool,
    window_left: int,
    logit_cap: float,
    return_lse: bool,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
    out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Implements the operator `tokenspeed_kernel.mla_extend_with_kvcache`, which documents the arguments."""
    return attend_latent(
        q,
        kv_cache,
        page_table,
        cache_seqlens,
        cu_seqlens_q,
        max_seqlen_q,
        max_seqlen_k,
        kv_lora_rank,
        softmax_scale,
        is_causal,
        window_left,
        logit_cap,
        return_lse,
        q_scale,
        kv_scale,
        out,
    )
