"""Extend attention: new tokens, several per sequence, attend to a paged cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost
from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.attention import _checks, _cost
from tokenspeed_kernel_base.ops.attention._inputs import paged
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
    "mha_extend_with_kvcache",
    formats=("q", "k_cache", "v_cache"),
    traits={**SOFTMAX_KINDS, **WINDOW_AND_SINK_KINDS, **CACHE_KINDS, "is_causal": bool},
    varying=("batch", "tokens"),
    capacity=("pages", "max_pages"),
    bounds=("max_seqlen_q", "max_seqlen_k"),
    padded="cu_seqlens_q",
    unlimited=("window_left",),
    scales=("q_scale", "k_scale", "v_scale"),
)
def mha_extend_with_kvcache(
    q: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool = False,
    window_left: int = -1,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    softmax_scale: float | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Extend attention: new tokens attend to a paged cache that holds them already, after the earlier tokens of their sequences.

    The caches hold positions 0 to ``cache_seqlens[b] - 1`` of sequence b. Position j is in slot ``j % page_size`` of page
    ``page_table[b, j // page_size]``. Query i of a sequence's q_len queries is at position ``p = cache_seqlens[b] - q_len + i``.
    The query sees key j if ``j <= p`` (with is_causal) and ``j >= p - window_left`` (if window_left is not negative). Without
    is_causal the query also sees later tokens, and window_left limits earlier tokens only. The softmax is that of `mha_prefill`: it
    accumulates in float32 (float64 for a float64 q) and rounds the output once. Where q and the caches are fp8, a kernel may round
    the softmax probabilities to fp8 too.

    Args:
        q: float16, bfloat16, float32, float64 or fp8 ``[tokens, heads, head_dim]``, sequence by sequence.
        cu_seqlens_q: int32 ``[batch + 1]``, where each sequence's queries begin in q, and where the last sequence ends. Rows of q
            past the last offset are padding: they belong to no sequence, and the same rows of the outputs are not written.
        cu_seqlens_kv: int32 ``[batch + 1]``, the cumulative sums of cache_seqlens, starting with 0. None: a kernel that needs these
            sums computes them.
        k_cache: q's dtype or fp8 (only fp8 if q is fp8) ``[pages, page_size, kv_heads, head_dim]``; kv_heads divides heads. May be
            strided: a cache ``[pages, kv_heads, page_size, head_dim]`` (HND) is passed as ``k_cache.transpose(1, 2)``.
        v_cache: k_cache's dtype ``[pages, page_size, kv_heads, v_head_dim]``.
        page_table: int32 ``[batch, max_pages]``. An entry for positions below cache_seqlens is a page index. The entry may be -1 if
            the window hides the whole page from every new token of the sequence. Kernels never read such a page, so it may have
            been freed. All other entries may hold anything. Sequences may share pages.
        cache_seqlens: int32 ``[batch]``, number of tokens of each sequence in the cache, including the new tokens.
        max_seqlen_q: an upper bound of the number of queries of a sequence.
        max_seqlen_k: an upper bound of cache_seqlens; at most ``max_pages * page_size``, which is always a valid bound.
        is_causal: whether to hide keys later than the query. No sequence may then have more queries than cached tokens.
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
        out: receives the output; must not overlap q or the caches.

    Returns:
        The output ``[tokens, heads, v_head_dim]`` in q's dtype, bfloat16 if q is fp8. With return_lse also the natural log-sum-exp,
        float32 ``[tokens, heads]``, with the sink included if there is one (see `mha_prefill` on merging). A query that sees no key
        has output 0 and log-sum-exp -inf, or the sink's logit if there are sinks.

    Cache slots that hold no token of a sequence never affect a result, even if they hold NaN.

    Raises:
        TypeError, ValueError: a dtype, shape or value is not as stated here. Raised before anything is launched. Values of
            offsets, lengths and page_table are checked only if they lie in host memory.

    Example:
        Two new tokens after an earlier one, in pages of 2.

        >>> import torch
        >>> from tokenspeed_kernel import mha_extend_with_kvcache
        >>> ints = lambda *values: torch.tensor(values, dtype=torch.int32)
        >>> k_cache = torch.zeros(2, 2, 1, 8)
        >>> v_cache = torch.tensor([1.0, 3.0, 5.0, -1.0]).view(2, 2, 1, 1)
        >>> mha_extend_with_kvcache(
        ...     torch.zeros(2, 1, 8), ints(0, 2), None, k_cache, v_cache, page_table=ints(0, 1).view(1, 2),
        ...     cache_seqlens=ints(3), max_seqlen_q=2, max_seqlen_k=4, is_causal=True
        ... ).flatten()
        tensor([2., 3.])

    Safe in CUDA graphs, except with backends tagged ``waits`` and with the reference, which reads the lengths on the host.
    """
    softmax = Softmax(softmax_scale_of(softmax_scale, q.shape[-1]), is_causal, window_left, logit_cap, sinks)
    offsets, lens = cu_seqlens_q.tolist(), cache_seqlens.tolist()
    result, lse = attend_paged(q, k_cache, v_cache, page_table, offsets, lens, softmax, q_scale, k_scale, v_scale)
    return (result, lse) if return_lse else result


@mha_extend_with_kvcache.traits
def _(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    is_causal: bool,
    window_left: int,
    logit_cap: float,
    sinks: Tensor | None,
    return_lse: bool,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> dict[str, object]:
    return {
        **softmax_traits(q, k_cache.shape[2], v_cache.shape[3], logit_cap, return_lse),
        **window_and_sink_traits(window_left, sinks),
        **cache_traits(k_cache, q_scale, k_scale, v_scale),
        "is_causal": is_causal,
    }


@mha_extend_with_kvcache.check
def _(
    check: Checker,
    q: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor | None,
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
) -> None:
    _checks.check_caches(check, q, k_cache, v_cache, page_table, cache_seqlens, max_seqlen_k, q_scale, k_scale, v_scale)
    _checks.check_extension(check, cu_seqlens_q, cu_seqlens_kv, cache_seqlens, max_seqlen_q)
    _checks.check_options(check, softmax_scale, logit_cap, window_left, sinks)


@mha_extend_with_kvcache.check_values(host=("cu_seqlens_q", "cu_seqlens_kv", "page_table", "cache_seqlens"))
def _(
    check: Checker,
    q: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    k_cache: Tensor,
    page_table: Tensor | None,
    cache_seqlens: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool,
    window_left: int,
) -> None:
    new_tokens = 0 if cu_seqlens_q is None else cu_seqlens_q.diff()
    _checks.check_values_paging(check, page_table, cache_seqlens, max_seqlen_k, k_cache, "k_cache", window_left, new_tokens)
    _checks.check_values_extension(check, q, cu_seqlens_q, cu_seqlens_kv, cache_seqlens, max_seqlen_q, is_causal)


mha_extend_with_kvcache.fake(paged_outputs)


@mha_extend_with_kvcache.cases
def _() -> list[Case]:
    gpt_oss: dict[str, Any] = {"heads": 64, "kv_heads": 8, "head_dim": 64, "sinks": True, "is_causal": True}
    llama_70b: dict[str, Any] = {"heads": 64, "kv_heads": 8, "head_dim": 128, "is_causal": True}
    gqa: dict[str, Any] = {"heads": 8, "kv_heads": 2}
    causal: dict[str, Any] = {**gqa, "is_causal": True}
    everything: dict[str, Any] = {"sinks": True, "window_left": 7, "logit_cap": 5.0, "return_lse": True}
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    both = ("k_scale", "v_scale")
    long, stretch = [8192] * 8, [1024] * 8
    return [
        Case("one token of one, float32", paged([1], [1], dtype=torch.float32, is_causal=True)),
        Case("lengths about a page's end, float32", paged([15, 16, 17, 0, 33], [3, 16, 1, 0, 20], **causal, dtype=torch.float32)),
        Case("float64, pages of 1", paged([3, 1, 6], [2, 0, 6], 2, 1, 8, page_size=1, dtype=torch.float64, is_causal=True)),
        Case("not causal, lse", paged([30, 5], [4, 5], **gqa, return_lse=True)),
        Case("not causal, more queries than keys", paged([3, 0], [5, 2], **gqa, return_lse=True)),
        Case("not causal, in a window", paged([30, 5], [9, 5], **gqa, window_left=3)),
        Case(
            "five query heads a key head, head_dim 80, pages of 5", paged([64, 9], [64, 7], 10, 2, 80, page_size=5, is_causal=True)
        ),
        Case("v_head_dim 96 under head_dim 160", paged([40, 7], [20, 7], 4, 2, 160, 96, is_causal=True)),
        Case("head_dim 80, a key head for each head", paged([40, 17], [9, 17], 2, 2, 80, is_causal=True)),
        Case("head_dim 96", paged([40, 17], [9, 17], **causal, head_dim=96)),
        Case("head_dim 128, logit cap 50", paged([40, 17], [9, 17], **causal, head_dim=128, logit_cap=50.0)),
        Case("head_dim 192, v_head_dim 128, pages of 32", paged([40, 17], [9, 17], 2, 2, 192, 128, page_size=32, is_causal=True)),
        Case("head_dim 256 in a window of 30", paged([40, 17], [9, 17], 4, 2, 256, window_left=29, is_causal=True)),
        Case("head_dim 80, not causal", paged([40, 17], [9, 17], 2, 2, 80)),
        Case("head_dim 96, fp8 q and cache, not causal", paged([70, 17], [9, 17], **gqa, head_dim=96, dtype=e4m3)),
        Case("head_dim 192, v_head_dim 128, not causal, lse", paged([40, 17], [9, 17], 4, 2, 192, 128, return_lse=True)),
        Case("head_dim 256, not causal", paged([40, 17], [9, 17], 4, 2, 256)),
        Case(
            "head_dim 96, fp8 q and cache", paged([40, 17], [9, 17], **causal, head_dim=96, dtype=e4m3, scales=("q_scale", *both))
        ),
        Case("head_dim 192, v_head_dim 128, fp8 q and cache", paged([90, 17], [9, 17], 4, 2, 192, 128, dtype=e4m3, is_causal=True)),
        Case(
            "head_dim 256, fp8 q and cache, a scale a kv head, in a window of 30",
            paged([90], [33], **causal, head_dim=256, dtype=e4m3, scales=("q_scale", *both), scale_per_head=True, window_left=29),
        ),
        Case("NaN in slots that hold no token", paged([5, 20, 0, 50], [5, 3, 0, 30], **causal, stale=True)),
        Case("window, cap, sinks and lse together", paged([60, 9], [33, 9], **causal, **everything)),
        Case("window of the token alone, float16", paged([20, 9], [7, 9], **causal, dtype=torch.float16, window_left=0)),
        Case("rows behind the last sequence, lse", paged([33, 90, 0], [9, 70, 0], **causal, padding=9, return_lse=True)),
        Case("rows behind the last sequence, not causal", paged([33, 90], [9, 70], **gqa, head_dim=128, padding=70)),
        Case("rows behind the last sequence, in a window", paged([33, 90], [9, 70], **causal, window_left=19, padding=1)),
        Case("running sums left out", paged([20, 9], [7, 9], **causal, cu_seqlens_kv=None)),
        Case("freed pages before a window", paged([100, 9, 300, 70], [33, 9, 1, 0], **causal, window_left=20, freed=True)),
        Case("freed pages of 64", paged([400, 9, 131], [70, 9, 3], **causal, page_size=64, window_left=49, freed=True)),
        Case("freed pages, not causal", paged([100, 50], [33, 3], **gqa, window_left=20, freed=True)),
        Case("fp8 cache without scales", paged([33, 18], [10, 18], **causal, cache_dtype=e4m3)),
        Case("fp8 q and cache, a scale each", paged([33, 18], [10, 18], **causal, dtype=e4m3, scales=("q_scale", *both))),
        Case(
            "fp8 cache in a window of 40, head_dim 128", paged([90], [33], **causal, head_dim=128, cache_dtype=e4m3, window_left=39)
        ),
        Case(
            "fp8 cache in a window of 30, head_dim 256",
            paged([40, 17], [9, 17], 4, 2, 256, cache_dtype=e4m3, scales=both, window_left=29, is_causal=True),
        ),
        Case("fp8 e5m2 cache, a scale a kv head", paged([33], [10], **causal, cache_dtype=e5m2, scales=both, scale_per_head=True)),
        Case("gpt-oss-120b sliding layer, 1 to 140 new", paged([200, 129, 140], [1, 60, 140], **gpt_oss, window_left=127)),
        Case("gpt-oss-120b full layer, pages of 64", paged([200, 64, 65], [80, 64, 1], **gpt_oss, page_size=64)),
        Case(
            "llama-70b, 16 of its heads, pages of 32", paged([150, 64, 65], [80, 64, 1], 16, 2, 128, page_size=32, is_causal=True)
        ),
        Case("window of 150", paged([300, 33], [60, 33], **causal, window_left=149)),
        Case("head_dim 128 in a window of 50", paged([150, 33], [90, 33], **causal, head_dim=128, sinks=True, window_left=49)),
        Case("sixteen new tokens, pages of 1", paged([70, 16], [16, 16], **causal, page_size=1)),
        Case(
            "head_dim 192, v_head_dim 128, pages of 256, fp8 cache",
            paged([70], [33], 4, 2, 192, 128, page_size=256, cache_dtype=e4m3),
        ),
        Case("no new tokens", paged([20, 0], [0, 0], **causal)),
        Case("no sequences", paged([], [], **causal, return_lse=True)),
        Case("no sequences, but rows behind", paged([], [], **causal, padding=5)),
        Case(
            "gpt-oss-120b sliding layer 8 x 1024 of 8192",
            paged(long, stretch, **gpt_oss, page_size=64, window_left=127),
            large=True,
        ),
        Case("gpt-oss-120b full layer 8 x 1024 of 8192", paged(long, stretch, **gpt_oss, page_size=64), large=True),
        Case("llama-70b 2 x 4096 of 8192", paged([8192] * 2, [4096] * 2, **llama_70b), large=True),
        Case(
            "gemma-2-9b full layer 8 x 1024 of 8192",
            paged(long, stretch, 16, 8, 256, page_size=64, softmax_scale=0.0625, logit_cap=50.0, is_causal=True),
            large=True,
        ),
        Case("llama-70b 8 x 1024 of 8192, fp8 cache", paged(long, stretch, **llama_70b, cache_dtype=e4m3, scales=both), large=True),
        Case(
            "qwen3-next 8 x 1024 of 8192, fp8 cache",
            paged(long, stretch, 16, 2, 256, page_size=64, cache_dtype=e4m3, scales=both, is_causal=True),
            large=True,
        ),
    ]


mha_extend_with_kvcache.work(lengths_read)


mha_extend_with_kvcache.vary(vary_paged)


@mha_extend_with_kvcache.cost
def _(
    q: Tensor,
    cu_seqlens_q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    is_causal: bool,
    window_left: int,
    return_lse: bool,
) -> Cost:
    q_lens = _cost.lengths(cu_seqlens_q)
    stored = _cost.token_bytes(k_cache) + _cost.token_bytes(v_cache)
    return _cost.paged_cost(q, v_cache.shape[3], stored, q_lens, cache_seqlens, is_causal, window_left, return_lse)
