"""Selects the cache slots that each token attends to in DeepSeek sparse attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, recipe
from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.explanation import bucket
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.attention.dsa_indexer_scores_with_kvcache import dsa_indexer_scores_with_kvcache, index_inputs
from tokenspeed_kernel_base.ops.attention.top_k_indices import check_top_k, top_k_indices
from tokenspeed_kernel_base.ops.kvcache.positions_to_slots import positions_to_slots
from tokenspeed_kernel_base.variation import Variation

_SCORES = dsa_indexer_scores_with_kvcache.operator


@operator(
    "attention",
    "dsa_select_with_kvcache",
    formats=("q", "k_cache"),
    traits={**_SCORES.traits, "tokens": int, "top_k": int},
    outs=("out", "topk_length_out"),
    varying=("tokens", "batch", "max_pages"),
    capacity=("pages",),
    parts=(dsa_indexer_scores_with_kvcache, top_k_indices, positions_to_slots),
)
def dsa_select_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    weights: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    top_k: int,
    cu_seqlens_q: Tensor | None = None,
    k_scale_cache: Tensor | None = None,
    out: Tensor | None = None,
    topk_length_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Selects the cache slots of the ``top_k`` positions with the highest lightning-indexer scores for each new token.

    This is the selection step of DeepSeek sparse attention (DeepSeek-AI, "DeepSeek-V3.2", 2025, arXiv:2512.02556). The operator is
    a composition of `dsa_indexer_scores_with_kvcache`, `top_k_indices` and `positions_to_slots`. If both caches use the same pages,
    pass the results to `mla_sparse_with_kvcache` as ``indices`` and ``topk_length``. A fused kernel need not write the scores.

    Args:
        q: float16, bfloat16, float32, float64 or float8_e4m3fn ``[tokens, heads, head_dim]``, finite, sequence by sequence.
        k_cache: q's dtype ``[pages, page_size, head_dim]``. May be strided.
        weights: float32 (float64 for a float64 q) ``[tokens, heads]``. If q is fp8, its scale is a factor of the weights.
        page_table: int32 ``[batch, max_pages]``. Entries for positions below cache_seqlens are page indices; others may hold
            anything.
        cache_seqlens: int32 ``[batch]``, number of tokens of each sequence in the cache, including the new tokens.
        top_k: positions to select, from 1 to the larger of ``max_pages * page_size`` and 2^20. A token that sees at most top_k
            positions gets all of them.
        cu_seqlens_q: int32 ``[batch + 1]``, where the new tokens of each sequence begin in q. None means that every sequence has
            ``tokens / batch`` new tokens.
        k_scale_cache: float32 ``[pages, page_size]``, multiplies the keys, for fp8 only. May be strided.
        out: receives the slots.
        topk_length_out: receives the number of slots of each token.

    Returns:
        Slots, int32 ``[tokens, top_k]``, in ascending order of their positions, padded with -1; and the number of slots of each
        token, int32 ``[tokens]``.

    Raises:
        TypeError, ValueError: a dtype, shape or value is not as stated here. Raised before anything is launched. Values of
            page_table, cache_seqlens and cu_seqlens_q are checked only if they lie in host memory.

    Example:
        A sequence of 3 tokens in pages of 2. The last token is new.

        >>> import torch
        >>> from tokenspeed_kernel import dsa_select_with_kvcache
        >>> k_cache = torch.tensor([9.0, 9.0, 1.0, -2.0, 3.0, 9.0]).view(3, 2, 1)
        >>> page_table, cache_seqlens = torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
        >>> dsa_select_with_kvcache(torch.ones(1, 1, 1), k_cache, torch.ones(1, 1), page_table, cache_seqlens, top_k=2)
        (tensor([[2, 4]], dtype=torch.int32), tensor([2], dtype=torch.int32))

    Safe in CUDA graphs, except with backends tagged ``waits`` and with the reference, which reads the lengths on the host.
    """
    scores, lengths = dsa_indexer_scores_with_kvcache(
        q, k_cache, weights, page_table, cache_seqlens, cu_seqlens_q=cu_seqlens_q, k_scale_cache=k_scale_cache
    )
    positions = top_k_indices(scores, top_k, lengths=lengths)
    slots = positions_to_slots(positions, page_table, k_cache.shape[1], cu_seqlens_q=cu_seqlens_q, out=out)
    return slots, torch.clamp(lengths, max=top_k, out=topk_length_out)


@dsa_select_with_kvcache.traits
def _(q: Tensor, top_k: int, **arguments: Any) -> dict[str, object]:
    return {**_SCORES.run_hook("traits", {**arguments, "q": q}), "tokens": bucket(q.shape[0]), "top_k": top_k}


@dsa_select_with_kvcache.check
def _(check: Checker, top_k: int, **arguments: Any) -> None:
    _SCORES.run_hook("check", arguments, check)
    check_top_k(check, top_k, check["max_pages"] * check["page_size"])


@dsa_select_with_kvcache.check_values(host=("page_table", "cache_seqlens", "cu_seqlens_q"))
def _(check: Checker, **arguments: Any) -> None:
    _SCORES.run_hook("check_values", arguments, check)


@dsa_select_with_kvcache.fake
def _(q: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape[0], top_k, dtype=torch.int32), q.new_empty(q.shape[0], dtype=torch.int32)


@recipe
def _inputs(
    kv_lens: Sequence[int],
    top_k: int,
    q_lens: Sequence[int] | None = None,
    heads: int = 4,
    head_dim: int = 32,
    page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
) -> Callable[[Draw], dict[str, Any]]:
    """Draws small integers, and powers of two as scales. Their sums are exact in any order, so all backends select the same slots.
    Many scores are equal."""

    def make(draw: Draw) -> dict[str, Any]:
        arguments = index_inputs(kv_lens, q_lens, heads=heads, head_dim=head_dim, page_size=page_size, dtype=dtype)(draw)
        for name in ("q", "k_cache"):
            values = draw.integers(-2, 3, *arguments[name].shape, dtype=torch.int32).to(dtype)
            narrow = dtype.itemsize == 1  # on some devices PyTorch writes 1-byte dtypes only as uint8; k_cache is a view of pages
            (arguments[name].view(torch.uint8) if narrow else arguments[name]).copy_(values.view(torch.uint8) if narrow else values)
        if arguments["k_scale_cache"] is not None:
            powers = draw.integers(-1, 2, *arguments["k_scale_cache"].shape, dtype=torch.int32)
            arguments["k_scale_cache"].copy_(torch.exp2(powers.float()))
        arguments["weights"] = draw.integers(-4, 9, *arguments["weights"].shape, dtype=torch.int32).to(arguments["weights"].dtype)
        return {**arguments, "top_k": top_k}

    return make


@dsa_select_with_kvcache.cases
def _() -> list[Case]:
    deepseek: dict[str, Any] = {"heads": 64, "head_dim": 128, "page_size": 64, "dtype": torch.float8_e4m3fn}
    return [
        Case("decode, more and less than top_k, float32", _inputs([9, 70, 0, 33], 16, dtype=torch.float32)),
        Case("prefill beside decode", _inputs([40, 60], 24, [40, 1])),
        Case("float64", _inputs([9, 40], 12, dtype=torch.float64)),
        Case("deepseek-v3.2 decode, top 64 of 300, fp8", _inputs([300, 64], 64, **deepseek)),
        Case("no sequences", _inputs([], 4)),
        Case("deepseek-v3.2 decode 64 x 8192, fp8", _inputs([8192] * 64, 2048, **deepseek), large=True),
        Case("deepseek-v3.2 decode 64 x 65536, fp8", _inputs([65536] * 64, 2048, **deepseek), large=True),
        Case("deepseek-v3.2 decode 1 x 65536, fp8", _inputs([65536], 2048, **deepseek), large=True),
        Case("deepseek-v3.2 prefill 2048 of 16384, fp8", _inputs([16384], 2048, [2048], **deepseek), large=True),
    ]


@dsa_select_with_kvcache.work
def _(**arguments: Any) -> Any:
    return _SCORES.run_hook("work", arguments)


@dsa_select_with_kvcache.vary
def _(variation: Variation, **arguments: Any) -> Any:
    return _SCORES.run_hook("vary", arguments, variation)


@dsa_select_with_kvcache.cost
def _(q: Tensor, weights: Tensor, top_k: int, **arguments: Any) -> Cost:
    """Returns the cost of computing the scores, without the cost of writing the scores."""
    scored: Cost = _SCORES.run_hook("cost", {**arguments, "q": q, "weights": weights})
    pairs = scored.flops / (2.0 * q.shape[1] * (q.shape[2] + 1))
    written = len(q) * (4.0 * top_k + 4)
    return Cost(flops=scored.flops, bytes=scored.bytes - pairs * weights.element_size() + written)
