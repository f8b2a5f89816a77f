"""Attention of new tokens over a paged cache (extend)."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.attention._formats import CACHED, MHA
from tokenspeed_kernel.triton.attention._mha_call import Call
from tokenspeed_kernel.triton.attention._mha_choice import attend, choose
from tokenspeed_kernel.triton.common import TRITON
from tokenspeed_kernel_base.ops.attention._softmax import output_dtype, softmax_scale_of
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.spec import Priority


@register_kernel(
    "attention",
    "mha_extend_with_kvcache",
    solution="triton",
    capability=TRITON,
    signatures=CACHED,
    traits={**MHA, "scaled": any, "is_causal": any},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def mha_extend_with_kvcache(
    q: Tensor,
    cu_seqlens_q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool,
    window_left: int,
    logit_cap: float,
    sinks: Tensor | None,
    return_lse: bool,
    softmax_scale: float | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Implements the operator `tokenspeed_kernel.mha_extend_with_kvcache`. Lengths are read on the device only."""
    tokens, heads, _ = q.shape
    if out is None:
        out = q.new_empty(tokens, heads, v_cache.shape[3], dtype=output_dtype(q))
    lse = q.new_empty(tokens, heads, dtype=torch.float32) if return_lse else None
    attend_stretches(
        q,
        cu_seqlens_q,
        k_cache,
        v_cache,
        page_table,
        cache_seqlens,
        max_seqlen_q,
        max_seqlen_k,
        is_causal,
        window_left,
        logit_cap,
        sinks,
        softmax_scale,
        q_scale,
        k_scale,
        v_scale,
        out,
        lse,
    )
    return out if lse is None else (out, lse)


def attend_stretches(
    q: Tensor,
    cu_seqlens_q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool,
    window_left: int,
    logit_cap: float,
    sinks: Tensor | None,
    softmax_scale: float | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    shortest: int = 1,
) -> None:
    """Computes the attention of sequences with at least ``shortest`` new tokens, and writes ``out`` and ``lse``.

    Nothing is written for other sequences.
    """
    tokens, _, head_dim = q.shape
    call = Call(
        q=q,
        k=k_cache,
        v=v_cache,
        out=out,
        lse=lse,
        cu_seqlens=cu_seqlens_q,
        softmax_scale=softmax_scale_of(softmax_scale, head_dim),
        causal=is_causal,
        window_left=window_left,
        logit_cap=logit_cap,
        sinks=sinks,
        longest=max_seqlen_k,
        page_table=page_table,
        cache_seqlens=cache_seqlens,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        shortest=shortest,
    )
    attend(choose(call, min(max_seqlen_q, tokens)), call)
