"""Sparse MLA: latent attention of each token to the slots of a paged cache that are chosen for it.

For the kernel of `mla_decode`, every token is a sequence with one new token, whose keys are the chosen slots. A workgroup lists the
addresses of up to 1024 slots in LDS (512 beside a tile of 32 rows), without negative indices, and copies the keys that are listed.
If the tiles of all tokens are fewer than the CUs, the slots of a token are divided into splits.
"""

from __future__ import annotations

from torch import Tensor

from tokenspeed_kernel_amd.capability import GLUON_CDNA4
from tokenspeed_kernel_amd.gfx950.attention.mla_decode import CACHE, SIGNATURES, TRAITS, attend_split_kv, called
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.spec import Priority


@register_kernel(
    "attention",
    "mla_sparse_with_kvcache",
    solution="gluon",
    capability=GLUON_CDNA4,
    signatures=SIGNATURES,
    traits={name: TRAITS[name] for name in ("head_dim", "v_head_dim", "return_lse", "scaled")},
    aligned_caches=(CACHE,),
    priority=Priority.SPECIALIZED,
    tags={"determinism", "fp8_weights"},
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
    out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Implements the operator `tokenspeed_kernel_amd.mla_sparse_with_kvcache`, which checks the arguments first."""
    tokens, top_k = indices.shape
    if topk_length is None:
        topk_length = indices.new_full((tokens,), top_k)
    keys = top_k if kv_cache.shape[0] else 0
    call = called(
        q, None, kv_cache, indices, topk_length, keys, kv_lora_rank, softmax_scale, True, -1, 0.0, return_lse, q_scale, kv_scale,
        out,
    )  # fmt: skip
    if tokens:
        attend_split_kv(call.operands, call.variant, 1, sparse=True)
    return call.result
