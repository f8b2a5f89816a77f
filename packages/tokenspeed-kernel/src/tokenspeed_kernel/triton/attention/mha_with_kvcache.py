"""Attention of a mixed batch over a paged cache.

Sequences with few new tokens use the decode kernel with split-KV. Sequences with more new tokens use the extend kernel, which has
tiles of queries. Both kernels are launched, and each skips the sequences that the other one handles, because only the device knows
the numbers of new tokens. If a window leaves few keys, the extend kernel handles all sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.attention._formats import CACHED, MHA
from tokenspeed_kernel.triton.attention.mha_decode_with_kvcache import attend_newest
from tokenspeed_kernel.triton.attention.mha_extend_with_kvcache import attend_stretches
from tokenspeed_kernel.triton.common import TRITON
from tokenspeed_kernel_base.ops.attention._softmax import MAX_TREE, output_dtype
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.spec import Priority

_DECODED_ROWS = 16  # query rows per KV head in the smallest tile of the decode kernel
_FEW_KEYS = 256  # the largest window, in keys, for which the extend kernel handles all sequences


@register_kernel(
    "attention",
    "mha_with_kvcache",
    solution="triton",
    capability=TRITON,
    signatures=CACHED,
    traits={**MHA, "scaled": any, "tree_mask": any},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def mha_with_kvcache(
    q: Tensor,
    cu_seqlens_q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    window_left: int,
    logit_cap: float,
    sinks: Tensor | None,
    return_lse: bool,
    softmax_scale: float | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    tree_mask: Tensor | None,
    out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Implements the operator `tokenspeed_kernel.mha_with_kvcache`. Lengths are read on the device only."""
    tokens, heads, _ = q.shape
    if out is None:
        out = q.new_empty(tokens, heads, v_cache.shape[3], dtype=output_dtype(q))
    lse = q.new_empty(tokens, heads, dtype=torch.float32) if return_lse else None
    longest_q = min(max_seqlen_q, tokens)
    decoded = max(1, _DECODED_ROWS * k_cache.shape[2] // heads)
    if tree_mask is not None:  # only the decode kernel supports trees
        decoded = MAX_TREE
    elif window_left >= 0 and window_left + decoded <= _FEW_KEYS:
        decoded = 0
    if longest_q > decoded:
        attend_stretches(
            q,
            cu_seqlens_q,
            k_cache,
            v_cache,
            page_table,
            cache_seqlens,
            longest_q,
            max_seqlen_k,
            True,
            window_left,
            logit_cap,
            sinks,
            softmax_scale,
            q_scale,
            k_scale,
            v_scale,
            out,
            lse,
            shortest=decoded + 1,
        )
    if decoded:
        attend_newest(
            q,
            cu_seqlens_q,
            k_cache,
            v_cache,
            page_table,
            cache_seqlens,
            max_seqlen_k,
            min(longest_q, decoded),
            window_left,
            logit_cap,
            sinks,
            softmax_scale,
            q_scale,
            k_scale,
            v_scale,
            out,
            lse,
            tree_mask=tree_mask,
        )
    return out if lse is None else (out, lse)
