"""Computes the indexer scores of DeepSeek sparse attention for index keys in a paged cache."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, nbytes, poisoned, recipe
from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.attention import _checks, _cost
from tokenspeed_kernel_base.ops.attention._indexer import (
    INDEXER_KINDS,
    check_key_scale,
    check_queries,
    draw_queries,
    empty_scores,
    index_pages,
    indexer_cost,
    indexer_traits,
    new_offsets,
    scores_without_keys,
    write_scores,
)
from tokenspeed_kernel_base.ops.attention._inputs import draw_paging
from tokenspeed_kernel_base.variation import Variation, Want


@operator(
    "attention",
    "dsa_indexer_scores_with_kvcache",
    formats=("q", "k_cache"),
    traits={**INDEXER_KINDS, "page_size": int},
    outs=("out", "lengths_out"),
    varying=("tokens", "batch", "max_pages"),
    capacity=("pages",),
)
def dsa_indexer_scores_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    weights: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor | None = None,
    k_scale_cache: Tensor | None = None,
    out: Tensor | None = None,
    lengths_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the lightning-indexer scores of DeepSeek sparse attention for new tokens and the index keys of a paged cache.

    ``score[t, s] = k_scale[s] * sum_h weights[t, h] * relu(q[t, h] . k[s])``, accumulated in float32 (float64 for a float64 q); all
    heads of a token share one key (DeepSeek-AI, "DeepSeek-V3.2", 2025, arXiv:2512.02556). From these scores `top_k_indices` selects
    the positions that `mla_sparse_with_kvcache` attends to. The cache holds positions 0 to ``cache_seqlens[b] - 1`` of sequence b.
    Position j is in slot ``j % page_size`` of page ``page_table[b, j // page_size]``. The new tokens of a sequence are at its last
    positions. Each new token sees itself and earlier tokens. Prefill and decode are the same call.

    Args:
        q: float16, bfloat16, float32, float64 or float8_e4m3fn ``[tokens, heads, head_dim]``, finite, sequence by sequence.
        k_cache: q's dtype ``[pages, page_size, head_dim]``. May be strided, for example a view of pages in which the scales
            follow the keys.
        weights: float32 (float64 for a float64 q) ``[tokens, heads]``. Include all factors of a head's scores here, also the scale
            of an fp8 q.
        page_table: int32 ``[batch, max_pages]``. Entries for positions below cache_seqlens are page indices; others may hold
            anything. With a slice ``page_table[:, :n]``, the scores have fewer columns.
        cache_seqlens: int32 ``[batch]``, number of tokens of each sequence in the cache, including the new tokens; at most
            ``max_pages * page_size``. The length may be less than the number of new tokens, for example 0 for a sequence that only
            pads the batch. Queries before position 0 then see no key.
        cu_seqlens_q: int32 ``[batch + 1]``, where the new tokens of each sequence begin in q. None means that every sequence has
            ``tokens / batch`` new tokens.
        k_scale_cache: float32 ``[pages, page_size]``, multiplies the keys, for fp8 only. May be strided.
        out: receives the scores; must not overlap an input.
        lengths_out: receives the lengths, see Returns.

    Returns:
        Scores, float32 (float64 for a float64 q) ``[tokens, max_pages * page_size]``, -inf at positions that the token does not
        see. Also the lengths, int32 ``[tokens]``: a token with length n sees positions 0 to n - 1.

    Cache slots that hold no token of a sequence never affect a result, even if they hold NaN.

    Raises:
        TypeError, ValueError: a dtype, shape or value is not as stated here. Raised before anything is launched. Values of
            page_table, cache_seqlens and cu_seqlens_q are checked only if they lie in host memory.

    Example:
        A sequence of 3 tokens in pages of 2. The last token is new. Two heads of width 1.

        >>> import torch
        >>> from tokenspeed_kernel import dsa_indexer_scores_with_kvcache
        >>> k_cache = torch.tensor([1.0, -2.0, 3.0, 9.0]).view(2, 2, 1)
        >>> page_table, cache_seqlens = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
        >>> q, weights = torch.tensor([[[2.0], [-1.0]]]), torch.tensor([[1.0, 0.5]])
        >>> dsa_indexer_scores_with_kvcache(q, k_cache, weights, page_table, cache_seqlens)
        (tensor([[2., 1., 6., -inf]]), tensor([3], dtype=torch.int32))

    Safe in CUDA graphs, except with backends tagged ``waits`` and with the reference, which reads the lengths on the host.
    """
    scores, lengths = scores_without_keys(q, page_table.shape[1] * k_cache.shape[1])
    new = itertools.pairwise(new_offsets(q.shape[0], cu_seqlens_q, len(cache_seqlens)))
    for pages, (begin, end), kv_len in zip(page_table, new, cache_seqlens.tolist(), strict=True):
        used = pages[: -(-kv_len // k_cache.shape[1])]
        k = k_cache.index_select(0, used).flatten(0, 1)[:kv_len]
        scale = None if k_scale_cache is None else k_scale_cache.index_select(0, used).flatten()[:kv_len]
        write_scores(q, weights, k, scale, begin, end, scores, lengths)
    return scores, lengths


@dsa_indexer_scores_with_kvcache.traits
def _(q: Tensor, k_cache: Tensor, k_scale_cache: Tensor | None) -> dict[str, object]:
    return {**indexer_traits(q, k_scale_cache), "page_size": k_cache.shape[1]}


@dsa_indexer_scores_with_kvcache.check
def _(
    check: Checker,
    q: Tensor,
    k_cache: Tensor,
    weights: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor | None,
    k_scale_cache: Tensor | None,
) -> None:
    check_queries(check, q, weights)
    check.tensor("k_cache", k_cache, "pages page_size head_dim", q.dtype)
    _checks.check_pages(check, page_table, cache_seqlens)
    _checks.check_new_tokens_of(check, "q", cu_seqlens_q)
    check_key_scale(check, "k_scale_cache", k_scale_cache, "k_cache", k_cache, "pages page_size")


@dsa_indexer_scores_with_kvcache.check_values(host=("page_table", "cache_seqlens", "cu_seqlens_q"))
def _(
    check: Checker,
    q: Tensor,
    k_cache: Tensor,
    page_table: Tensor | None,
    cache_seqlens: Tensor | None,
    cu_seqlens_q: Tensor | None,
) -> None:
    _checks.check_values_offsets(check, "cu_seqlens_q", cu_seqlens_q, q.shape[0], "q")
    if cache_seqlens is None or not cache_seqlens.numel() or page_table is None:
        return
    room, longest = page_table.shape[1] * k_cache.shape[1], int(cache_seqlens.max())
    check.require(longest <= room, "cache_seqlens", f"at most max_pages * page_size = {room}", longest)
    _checks.check_values_paging(check, page_table, cache_seqlens, room, k_cache, "k_cache")


@dsa_indexer_scores_with_kvcache.fake
def _(q: Tensor, k_cache: Tensor, page_table: Tensor) -> tuple[Tensor, Tensor]:
    return empty_scores(q, page_table.shape[1] * k_cache.shape[1])


@recipe
def index_inputs(
    kv_lens: Sequence[int],
    q_lens: Sequence[int] | None = None,
    new: int = 1,
    heads: int = 4,
    head_dim: int = 32,
    page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    stale: bool = False,
    width: int | None = None,
) -> Callable[[Draw], dict[str, Any]]:
    """Draws new tokens and a paged cache that holds them.

    ``q_lens``: number of new tokens of each sequence; by default ``new`` tokens of every sequence. ``width``: number of page table
    entries per sequence."""

    def make(draw: Draw) -> dict[str, Any]:
        page_table, cache_seqlens, held = draw_paging(draw, kv_lens, page_size, width)
        tokens = sum(q_lens) if q_lens is not None else new * len(kv_lens)
        k_cache, scales = index_pages(draw, held, head_dim, dtype, stale)
        return {
            **draw_queries(draw, tokens, heads, head_dim, dtype),
            "k_cache": k_cache,
            "page_table": page_table,
            "cache_seqlens": cache_seqlens,
            "cu_seqlens_q": None if q_lens is None else draw.cumulative(q_lens),
            "k_scale_cache": scales,
        }

    return make


@dsa_indexer_scores_with_kvcache.cases
def _() -> list[Case]:
    deepseek: dict[str, Any] = {"heads": 64, "head_dim": 128, "page_size": 64}
    e4m3 = torch.float8_e4m3fn
    fp8: dict[str, Any] = {**deepseek, "dtype": e4m3}
    return [
        Case("one token in the cache, float32", index_inputs([1], dtype=torch.float32)),
        Case("lengths about a page's end, float16", index_inputs([15, 16, 17, 0, 33], dtype=torch.float16, stale=True)),
        Case("prefill beside decode, float32", index_inputs([40, 9, 70, 3], [40, 1, 5, 0], dtype=torch.float32, stale=True)),
        Case("float64, pages of 1, three new tokens", index_inputs([5, 1, 6], new=3, page_size=1, dtype=torch.float64)),
        Case("odd heads and widths, pages of 24", index_inputs([50, 30], [4, 2], heads=3, head_dim=20, page_size=24)),
        Case(
            "fp8, 12 columns, page table wider than the sequences",
            index_inputs([70, 3], dtype=e4m3, stale=True, width=9, head_dim=12),
        ),
        Case("deepseek-v3.2 decode, two new tokens of each", index_inputs([200, 64], new=2, **deepseek)),
        Case("deepseek-v3.2 prefill of 6 of 150, fp8", index_inputs([150], [6], **fp8)),
        Case("no sequences", index_inputs([], width=2)),
        Case("deepseek-v3.2 decode 64 x 65536, fp8", index_inputs([65536] * 64, **fp8), large=True),
        Case("deepseek-v3.2 decode 64 x 8192, fp8", index_inputs([8192] * 64, **fp8), large=True),
        Case("deepseek-v3.2 decode 1 x 65536, fp8", index_inputs([65536], **fp8), large=True),
        Case("deepseek-v3.2 decode 64 x 8192", index_inputs([8192] * 64, **deepseek), large=True),
        Case("deepseek-v3.2 decode 32 x 16384, two new tokens, fp8", index_inputs([16384] * 32, new=2, **fp8), large=True),
        Case("deepseek-v3.2 prefill 4096 of 4096, fp8", index_inputs([4096], [4096], **fp8), large=True),
        Case("deepseek-v3.2 prefill 2048 of 65536, fp8", index_inputs([65536], [2048], **fp8), large=True),
    ]


@dsa_indexer_scores_with_kvcache.work
def _(q: Tensor, cu_seqlens_q: Tensor | None, cache_seqlens: Tensor) -> dict[str, list[int]]:
    ends = itertools.pairwise(new_offsets(q.shape[0], cu_seqlens_q, len(cache_seqlens)))
    return {"kv_lens": cache_seqlens.tolist(), "q_lens": [end - begin for begin, end in ends]}


@dsa_indexer_scores_with_kvcache.vary
def _(
    variation: Variation,
    q: Tensor,
    k_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor | None,
    k_scale_cache: Tensor | None,
) -> dict[str, Tensor]:
    (pages, page_size), (batch, width) = k_cache.shape[:2], page_table.shape
    if variation.want is Want.OTHER:  # no sequence becomes shorter than its new tokens
        offsets = torch.tensor(new_offsets(len(q), cu_seqlens_q, len(cache_seqlens)), device=q.device, dtype=torch.int32)
        shorter = torch.maximum(cache_seqlens * 2 // 3, torch.minimum(offsets.diff(), cache_seqlens))
        return {"cache_seqlens": shorter, "q": q.flip(0)}
    if variation.want is Want.UNUSED:
        position = torch.arange(width * page_size, device=q.device).view(-1, page_size)
        reached = position < cache_seqlens.view(-1, 1, 1)
        held = torch.zeros(pages, page_size, dtype=torch.bool, device=q.device)
        named = page_table.long().clamp(min=0).unsqueeze(2).expand_as(reached) * page_size + position % page_size
        held.view(-1)[named[reached]] = True
        made = {"k_cache": poisoned(k_cache, ~held)}
        return made if k_scale_cache is None else {**made, "k_scale_cache": poisoned(k_scale_cache, ~held)}
    draw = variation.draw
    lengths = variation.values("kv_lens", batch, width * page_size)
    made = {}
    if cu_seqlens_q is not None:
        made["cu_seqlens_q"] = draw.cumulative(variation.parts("q_lens", batch, len(q)))
    made["page_table"], made["cache_seqlens"], held = draw_paging(draw, lengths, page_size, width)
    keys, scales = index_pages(draw, held, k_cache.shape[2], k_cache.dtype, False)
    made["k_cache"] = keys
    return made if scales is None or k_scale_cache is None else {**made, "k_scale_cache": scales}


@dsa_indexer_scores_with_kvcache.cost
def _(
    q: Tensor, k_cache: Tensor, weights: Tensor, cache_seqlens: Tensor, cu_seqlens_q: Tensor | None, k_scale_cache: Tensor | None
) -> Cost:
    offsets = new_offsets(len(q), cu_seqlens_q, len(cache_seqlens))
    token_bytes = _cost.token_bytes(k_cache) + (0 if k_scale_cache is None else 4)
    return indexer_cost(q, weights, offsets, cache_seqlens.tolist(), token_bytes, nbytes(cache_seqlens, cu_seqlens_q))
