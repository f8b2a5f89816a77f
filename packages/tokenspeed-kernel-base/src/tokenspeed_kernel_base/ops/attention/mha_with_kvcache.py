"""Attention of a mixed batch (decode, extend and prefill together) to a paged cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, recipe
from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.attention import _checks, _cost
from tokenspeed_kernel_base.ops.attention._inputs import Make, paged
from tokenspeed_kernel_base.ops.attention._softmax import Softmax, attend_paged, paged_outputs, softmax_scale_of
from tokenspeed_kernel_base.ops.attention._traits import (
    CACHE_KINDS,
    SOFTMAX_KINDS,
    WINDOW_AND_SINK_KINDS,
    cache_traits,
    softmax_traits,
    window_and_sink_traits,
)
from tokenspeed_kernel_base.ops.attention._variations import lengths_read, vary_paged


@operator(
    "attention",
    "mha_with_kvcache",
    formats=("q", "k_cache", "v_cache"),
    traits={**SOFTMAX_KINDS, **WINDOW_AND_SINK_KINDS, **CACHE_KINDS, "tree_mask": bool},
    varying=("batch", "tokens"),
    capacity=("pages", "max_pages"),
    bounds=("max_seqlen_q", "max_seqlen_k"),
    padded="cu_seqlens_q",
    unlimited=("window_left",),
    scales=("q_scale", "k_scale", "v_scale"),
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
    window_left: int = -1,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    softmax_scale: float | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    tree_mask: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes causal attention to a paged cache for a mixed batch: sequences that decode, extend and prefill in one call.

    The caches hold positions 0 to ``cache_seqlens[b] - 1`` of sequence b, the new tokens included, as for
    `mha_extend_with_kvcache`. The result is that of `mha_extend_with_kvcache` with ``is_causal=True``. A sequence that decodes
    has one new token. A sequence that prefills has only new tokens. Other sequences may have any number of new tokens.
    Sequences may be in any order. The lengths are known on the device only. Kernels of this operator balance the load: a decoding
    sequence does not take the time of a prefill tile, and a long cache is split (split-KV).

    Args:
        q: float16, bfloat16, float32, float64 or fp8 ``[tokens, heads, head_dim]``, sequence by sequence.
        cu_seqlens_q: int32 ``[batch + 1]``, where each sequence's queries begin in q, and where the last sequence ends. Rows of q
            past the last offset are padding: they belong to no sequence, and the same rows of the outputs are not written.
        k_cache: q's dtype or fp8 (only fp8 if q is fp8) ``[pages, page_size, kv_heads, head_dim]``; kv_heads divides heads. May be
            strided: a cache ``[pages, kv_heads, page_size, head_dim]`` (HND) is passed as ``k_cache.transpose(1, 2)``.
        v_cache: k_cache's dtype ``[pages, page_size, kv_heads, v_head_dim]``.
        page_table: int32 ``[batch, max_pages]``. An entry for positions below cache_seqlens is a page index. The entry may be -1 if
            the window hides the whole page from every new token of the sequence. Kernels never read such a page, so it may have
            been freed. All other entries may hold anything. Sequences may share pages.
        cache_seqlens: int32 ``[batch]``, number of tokens of each sequence in the cache, including the new tokens.
        max_seqlen_q: an upper bound of the number of queries of a sequence.
        max_seqlen_k: an upper bound of cache_seqlens; at most ``max_pages * page_size``, which is always a valid bound.
        window_left: how many tokens to the left a query sees besides itself; -1, or 2^30 and more, means all. A model's "sliding
            window 128" is ``window_left=127``.
        logit_cap: if positive, scores become ``logit_cap * tanh(score / logit_cap)``; 0 is off.
        sinks: any float dtype ``[heads]``, one extra logit for each query head, which enters the softmax's denominator only.
        return_lse: whether to also return the log-sum-exp.
        softmax_scale: multiplies the dot products q·k; None is ``1 / sqrt(head_dim)``.
        q_scale: float32 ``[]``, ``[1]`` or ``[kv_heads]``, multiplies q, for fp8 q only; the scale of a KV head applies to all
            its query heads.
        k_scale: the scale of k, like q_scale, for an fp8 k_cache only.
        v_scale: the scale of v, like q_scale, for an fp8 v_cache only.
        tree_mask: int64 ``[tokens]``, the masks of draft trees, for sequences of at most 64 new tokens. Bit i of a node's mask is
            set if the node sees new token i of its sequence. The set bits are the node itself and its ancestors, never later
            tokens, as `build_draft_tree` returns them. A node also sees all tokens before the new ones. With a window, a node sees
            only positions that are at most window_left before its own position. The position of a node is the position of the first
            new token, plus the number of bits set in its mask, minus one. A token with mask 0 is no node: it sees itself and
            earlier tokens. Masks of sequences with more than 64 new tokens are ignored. None means that no token is a node. With
            masks, window_left must be -1 or at least 63.
        out: receives the output; must not overlap q or the caches.

    Returns:
        The output ``[tokens, heads, v_head_dim]`` in q's dtype, bfloat16 if q is fp8. With return_lse also the natural
        log-sum-exp, float32 ``[tokens, heads]``, with the sink included if there is one (see `mha_prefill` on merging).

    Cache slots that hold no token of a sequence never affect a result, even if they hold NaN.

    Raises:
        TypeError, ValueError: a dtype, shape or value is not as stated here. Raised before anything is launched. Values of
            offsets, lengths and page_table are checked only if they lie in host memory.

    Example:
        One sequence decodes its second token, another prefills two tokens; pages hold 2 tokens.

        >>> import torch
        >>> from tokenspeed_kernel import mha_with_kvcache
        >>> ints = lambda *values: torch.tensor(values, dtype=torch.int32)
        >>> k_cache = torch.zeros(2, 2, 1, 8)
        >>> v_cache = torch.tensor([1.0, 3.0, 5.0, 9.0]).view(2, 2, 1, 1)
        >>> mha_with_kvcache(
        ...     torch.zeros(3, 1, 8), ints(0, 1, 3), k_cache, v_cache, page_table=ints(0, 1).view(2, 1),
        ...     cache_seqlens=ints(2, 2), max_seqlen_q=2, max_seqlen_k=2
        ... ).flatten()
        tensor([2., 5., 7.])

    Safe in CUDA graphs, except with backends tagged ``waits`` and with the reference, which reads the lengths on the host.
    """
    softmax = Softmax(softmax_scale_of(softmax_scale, q.shape[-1]), True, window_left, logit_cap, sinks)
    offsets, lens = cu_seqlens_q.tolist(), cache_seqlens.tolist()
    result, lse = attend_paged(q, k_cache, v_cache, page_table, offsets, lens, softmax, q_scale, k_scale, v_scale, tree_mask)
    return (result, lse) if return_lse else result


@mha_with_kvcache.traits
def _(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    window_left: int,
    logit_cap: float,
    sinks: Tensor | None,
    return_lse: bool,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    tree_mask: Tensor | None,
) -> dict[str, object]:
    return {
        **softmax_traits(q, k_cache.shape[2], v_cache.shape[3], logit_cap, return_lse),
        **window_and_sink_traits(window_left, sinks),
        **cache_traits(k_cache, q_scale, k_scale, v_scale),
        "tree_mask": tree_mask is not None,
    }


@mha_with_kvcache.check
def _(
    check: Checker,
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
    softmax_scale: float | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    tree_mask: Tensor | None,
) -> None:
    _checks.check_caches(check, q, k_cache, v_cache, page_table, cache_seqlens, max_seqlen_k, q_scale, k_scale, v_scale)
    _checks.check_extension(check, cu_seqlens_q, None, cache_seqlens, max_seqlen_q)
    _checks.check_options(check, softmax_scale, logit_cap, window_left, sinks)
    _checks.check_tree(check, tree_mask, window_left)


@mha_with_kvcache.check_values(host=("cu_seqlens_q", "page_table", "cache_seqlens"))
def _(
    check: Checker,
    q: Tensor,
    cu_seqlens_q: Tensor | None,
    k_cache: Tensor,
    page_table: Tensor | None,
    cache_seqlens: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    window_left: int,
) -> None:
    new_tokens = 0 if cu_seqlens_q is None else cu_seqlens_q.diff()
    _checks.check_values_paging(check, page_table, cache_seqlens, max_seqlen_k, k_cache, "k_cache", window_left, new_tokens)
    _checks.check_values_extension(check, q, cu_seqlens_q, None, cache_seqlens, max_seqlen_q, True)


mha_with_kvcache.fake(paged_outputs)


@recipe
def _mixed(
    kv_lens: list[int],
    q_lens: list[int],
    heads: int = 4,
    kv_heads: int = 4,
    head_dim: int = 64,
    page_size: int = 16,
    **options: Any,
) -> Make:
    return paged(kv_lens, q_lens, heads, kv_heads, head_dim, page_size=page_size, running_sums=False, **options)


@mha_with_kvcache.cases
def _() -> list[Case]:
    gpt_oss: dict[str, Any] = {"heads": 64, "kv_heads": 8, "head_dim": 64, "sinks": True}
    llama_70b: dict[str, Any] = {"heads": 64, "kv_heads": 8, "head_dim": 128}
    gqa: dict[str, Any] = {"heads": 8, "kv_heads": 2}
    everything: dict[str, Any] = {"sinks": True, "window_left": 7, "logit_cap": 5.0, "return_lse": True}
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    both = ("k_scale", "v_scale")
    busy, chunk = [8192] * 30 + [2048, 4096], [1] * 30 + [2048, 1024]
    return [
        Case("one sequence decodes, float32", _mixed([9], [1], dtype=torch.float32)),
        Case("one sequence prefills, float64, pages of 1", _mixed([5], [5], heads=2, kv_heads=1, page_size=1, dtype=torch.float64)),
        Case(
            "decodes, extends, prefills, and one with nothing new, float32",
            _mixed([33, 40, 17, 20, 1], [1, 19, 17, 0, 1], **gqa, dtype=torch.float32),
        ),
        Case("NaN in slots that hold no token", _mixed([21, 50, 5, 0, 70], [1, 30, 5, 0, 1], **gqa, stale=True, return_lse=True)),
        Case("window, cap, sinks and lse together", _mixed([60, 9, 70, 33], [33, 9, 1, 2], **gqa, **everything)),
        Case("window of the token alone, float16", _mixed([20, 9, 12], [7, 1, 12], **gqa, dtype=torch.float16, window_left=0)),
        Case("freed pages before a window", _mixed([100, 9, 300, 70, 65], [33, 9, 1, 0, 2], **gqa, window_left=20, freed=True)),
        Case(
            "freed pages of 64 before a long window",
            _mixed([461, 9, 451, 452, 900], [4, 9, 1, 2, 1], **gqa, page_size=64, window_left=386, freed=True),
        ),
        Case("rows behind the last sequence, lse", _mixed([33, 90, 20], [1, 70, 1], **gqa, padding=9, sinks=True, return_lse=True)),
        Case("trees and rows behind the last sequence", _mixed([60, 9], [9, 1], **gqa, trees=True, padding=6)),
        Case("all decode, and rows behind the last", _mixed([90, 17], [1, 1], **gqa, padding=6, window_left=30)),
        Case("two drafts to verify beside a prefill", _mixed([90, 17, 40], [2, 17, 2], **gqa, page_size=32)),
        Case("all decode", _mixed([90, 17, 0, 40], [1, 1, 0, 1], **gqa, sinks=True, return_lse=True)),
        Case(
            "five query heads a key head, head_dim 80, pages of 5",
            _mixed([64, 9, 13], [64, 1, 7], heads=10, kv_heads=2, head_dim=80, page_size=5),
        ),
        Case("v_head_dim 96 under head_dim 160", _mixed([40, 7], [1, 7], heads=4, kv_heads=2, head_dim=160, v_head_dim=96)),
        Case("fp8 cache without scales", _mixed([33, 18], [1, 18], **gqa, cache_dtype=e4m3)),
        Case("fp8 q and cache, a scale each", _mixed([33, 18], [1, 18], **gqa, dtype=e4m3, scales=("q_scale", *both))),
        Case(
            "fp8 e5m2 cache, a scale a kv head",
            _mixed([33, 70], [10, 1], **gqa, cache_dtype=e5m2, scales=both, scale_per_head=True),
        ),
        Case("gpt-oss-120b sliding layer, 1 to 140 new", _mixed([200, 129, 140, 300], [1, 60, 140, 1], **gpt_oss, window_left=127)),
        Case("gpt-oss-120b full layer, pages of 64", _mixed([600, 64, 65, 130], [1, 64, 1, 70], **gpt_oss, page_size=64)),
        Case("trees among others", _mixed([60, 9, 70, 33, 90], [9, 9, 1, 2, 16], **gqa, trees=True, return_lse=True)),
        Case("trees and a prefill, float32", _mixed([90, 100, 64, 70], [12, 100, 64, 3], **gqa, dtype=torch.float32, trees=True)),
        Case(
            "trees in a window, sinks, freed pages",
            _mixed([300, 129, 200, 30], [30, 1, 64, 9], **gqa, sinks=True, window_left=100, freed=True, trees=True),
        ),
        Case(
            "trees, fp8 cache, a scale each, cap",
            _mixed([40, 90], [7, 31], **gqa, cache_dtype=e4m3, scales=both, logit_cap=5.0, trees=True),
        ),
        Case("gpt-oss-120b sliding layer, trees of 16", _mixed([200, 150], [16, 16], **gpt_oss, window_left=127, trees=True)),
        Case("no new tokens", _mixed([20, 0], [0, 0], **gqa)),
        Case("no sequences", _mixed([], [], **gqa, return_lse=True)),
        Case("no sequences, but rows behind", _mixed([], [], **gqa, padding=5)),
        Case("gpt-oss-120b full layer, 30 decode at 8192, 2 chunks", _mixed(busy, chunk, **gpt_oss, page_size=64), large=True),
        Case(
            "gpt-oss-120b sliding layer, 30 decode at 8192, 2 chunks",
            _mixed(busy, chunk, **gpt_oss, page_size=64, window_left=127),
            large=True,
        ),
        Case("llama-70b, 30 decode at 8192, 2 chunks", _mixed(busy, chunk, **llama_70b), large=True),
        Case(
            "llama-70b, trees of 16, 16 x 8192", _mixed([8192] * 16, [16] * 16, **llama_70b, page_size=64, trees=True), large=True
        ),
        Case("llama-70b, trees of 64, 4 x 32768", _mixed([32768] * 4, [64] * 4, **llama_70b, page_size=64, trees=True), large=True),
        Case("llama-70b, fp8 cache", _mixed(busy, chunk, **llama_70b, cache_dtype=e4m3, scales=both), large=True),
    ]


mha_with_kvcache.work(lengths_read)


mha_with_kvcache.vary(vary_paged)


@mha_with_kvcache.cost
def _(
    q: Tensor,
    cu_seqlens_q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    window_left: int,
    return_lse: bool,
    tree_mask: Tensor | None,
) -> Cost:
    q_lens = _cost.lengths(cu_seqlens_q)
    stored = _cost.token_bytes(k_cache) + _cost.token_bytes(v_cache)
    cost = _cost.paged_cost(q, v_cache.shape[3], stored, q_lens, cache_seqlens, True, window_left, return_lse)
    return _cost.without_hidden(cost, tree_mask, q_lens, q, v_cache.shape[3])
