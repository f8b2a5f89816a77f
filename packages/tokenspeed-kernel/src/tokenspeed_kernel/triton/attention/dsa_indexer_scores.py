"""Indexer scores of tokens against contiguous index keys."""

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
    "dsa_indexer_scores",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures(("q", "k"), "dense", (*FLOATS, torch.float8_e4m3fn)),
    traits=INDEXER,
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def dsa_indexer_scores(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_kv: Tensor | None,
    k_scale: Tensor | None,
    out: Tensor | None,
    lengths_out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Implements the operator `tokenspeed_kernel.dsa_indexer_scores`, which documents the arguments."""
    scores, lengths = empty_outputs(q, k.shape[0], out, lengths_out)
    write_scores(q, k, weights, None, cu_seqlens if cu_seqlens_kv is None else cu_seqlens_kv, cu_seqlens, k_scale, scores, lengths)
    return scores, lengths
