"""Sparse MLA: each token attends to its chosen latents of a paged cache. For the kernel, every token is a sequence with these
keys.
"""

from __future__ import annotations

from torch import Tensor

from tokenspeed_kernel.triton.attention._formats import LATENT, LATENT_GROUPS, MLA
from tokenspeed_kernel.triton.attention._mla_latent import attend_latent
from tokenspeed_kernel.triton.common import TRITON
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.spec import Priority


@register_kernel(
    "attention",
    "mla_sparse_with_kvcache",
    solution="triton",
    capability=TRITON,
    signatures=LATENT | LATENT_GROUPS,
    traits={**{name: MLA[name] for name in ("head_dim", "v_head_dim", "return_lse", "scaled")}, "grouped_scales": any},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def mla_sparse_with_kvcache(
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    kv_lora_rank: int,
    softmax_scale: float,
    topk_length: Tensor | None,
    return_lse: bool,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
    kv_scale_cache: Tensor | None,
    rope_cache: Tensor | None,
    out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Implements the operator `tokenspeed_kernel.mla_sparse_with_kvcache`, which documents the arguments."""
    tokens, top_k = indices.shape
    if topk_length is None:
        topk_length = indices.new_full((tokens,), top_k)
    return attend_latent(
        q,
        kv_cache,
        indices,
        topk_length,
        None,
        1,
        top_k,
        kv_lora_rank,
        softmax_scale,
        False,
        -1,
        0.0,
        return_lse,
        q_scale,
        kv_scale,
        out,
        sparse=True,
        kv_scale_cache=kv_scale_cache,
        rope_cache=rope_cache,
    )
