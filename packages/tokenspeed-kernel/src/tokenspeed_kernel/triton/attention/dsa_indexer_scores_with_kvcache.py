"""Indexer scores of new tokens against the index keys of a paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.attention._indexer import INDEXER, empty_outputs, write_scores
from tokenspeed_kernel.triton.common import FLOATS, TRITON
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority


@register_kernel(
    "attention",
    "dsa_indexer_scores_with_kvcache",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures(("q", "k_cache"), "dense", (*FLOATS, torch.float8_e4m3fn)),
    traits=INDEXER,
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def dsa_indexer_scores_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    weights: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor | None,
    k_scale_cache: Tensor | None,
    out: Tensor | None,
    lengths_out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Implements the operator `tokenspeed_kernel.dsa_indexer_scores_with_kvcache`, which documents the arguments."""
    scores, lengths = empty_outputs(q, page_table.shape[1] * k_cache.shape[1], out, lengths_out)
    write_scores(q, k_cache, weights, page_table, cache_seqlens, cu_seqlens_q, k_scale_cache, scores, lengths)
    return scores, lengths
