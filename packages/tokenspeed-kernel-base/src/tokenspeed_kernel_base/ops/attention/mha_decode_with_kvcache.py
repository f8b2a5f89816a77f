"""Decode attention to a paged cache: the same number of new tokens for each sequence."""

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
    "mha_decode_with_kvcache",
    formats=("q", "k_cache", "v_cache"),
    traits={**SOFTMAX_KINDS, **WINDOW_AND_SINK_KINDS, **CACHE_KINDS, "multi_query": bool, "new_tokens": int},
    varying=("batch", "tokens"),
    capacity=("pages", "max_pages"),
    bounds=("max_seqlen_k",),
    unlimited=("window_left",),
    scales=("q_scale", "k_scale", "v_scale"),
)
def mha_decode_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_k: int,
    max_seqlen_q: int = 1,
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
    """Decode attention: the last ``max_seqlen_q`` tokens of every sequence attend to a paged cache that holds them already.

    Computes the same as `mha_extend_with_kvcache` with ``is_causal=True`` and ``max_seqlen_q`` new tokens of each sequence. The
    softmax is that of `mha_prefill`. The caches hold positions 0 to ``cache_seqlens[b] - 1`` of sequence b. Position j is in slot
    ``j % page_size`` of page ``page_table[b, j // page_size]``. The queries are at the last positions. Each query sees itself and
    earlier tokens. Accumulators are float32 (float64 for a float64 q), and the output is rounded once. If q and the caches are fp8,
    a kernel may round the softmax probabilities to fp8 too, see `mha_prefill`.

    Args:
        q: float16, bfloat16, float32, float64 or fp8 ``[batch * max_seqlen_q, heads, head_dim]``, sequence by sequence.
        k_cache: q's dtype or fp8 (only fp8 if q is fp8) ``[pages, page_size, kv_heads, head_dim]``; kv_heads divides heads. May be
            strided: a cache ``[pages, kv_heads, page_size, head_dim]`` (HND) is passed as ``k_cache.transpose(1, 2)``.
        v_cache: k_cache's dtype ``[pages, page_size, kv_heads, v_head_dim]``.
        page_table: int32 ``[batch, max_pages]``. An entry for positions below cache_seqlens is a page index. The entry may be -1 if
            the window hides the whole page from every new token of the sequence. Kernels never read such a page, so it may have
            been freed. All other entries may hold anything. Sequences may share pages.
        cache_seqlens: int32 ``[batch]``, number of tokens of each sequence in the cache, including the new tokens. The length may
            be less than max_seqlen_q, for example 0 for a sequence that only pads the batch. Queries before position 0 then see no
            key.
        max_seqlen_k: an upper bound of cache_seqlens; at most ``max_pages * page_size``, which is always a valid bound.
        max_seqlen_q: the exact number of new tokens of each sequence; above 1 for speculative decoding.
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
        The output ``[batch * max_seqlen_q, heads, v_head_dim]`` in q's dtype, bfloat16 if q is fp8. With return_lse also the
        natural log-sum-exp, float32 ``[batch * max_seqlen_q, heads]``, with the sink included if there is one (see `mha_prefill` on
        merging). A query that sees no key has output 0 and log-sum-exp -inf, or the sink's logit if there are sinks.

    Cache slots that hold no token of a sequence never affect a result, even if they hold NaN.

    Raises:
        TypeError, ValueError: a dtype, shape or value is not as stated here. Raised before anything is launched. Values of
            page_table and cache_seqlens are checked only if they lie in host memory.

    Example:
        A sequence of 3 tokens in pages of 2. Its first tokens lie in page 1, its last token in page 0. The last token sees all 3.

        >>> import torch
        >>> from tokenspeed_kernel import mha_decode_with_kvcache
        >>> k_cache = torch.zeros(2, 2, 1, 8)
        >>> v_cache = torch.tensor([6.0, -1.0, 1.0, 2.0]).view(2, 2, 1, 1)
        >>> page_table = torch.tensor([[1, 0]], dtype=torch.int32)
        >>> cache_seqlens = torch.tensor([3], dtype=torch.int32)
        >>> mha_decode_with_kvcache(torch.zeros(1, 1, 8), k_cache, v_cache, page_table, cache_seqlens, max_seqlen_k=4).flatten()
        tensor([3.])

    Safe in CUDA graphs, except with backends tagged ``waits`` and with the reference, which reads the lengths on the host.
    """
    softmax = Softmax(softmax_scale_of(softmax_scale, q.shape[-1]), True, window_left, logit_cap, sinks)
    offsets, lens = range(0, q.shape[0] + 1, max_seqlen_q), cache_seqlens.tolist()
    result, lse = attend_paged(q, k_cache, v_cache, page_table, offsets, lens, softmax, q_scale, k_scale, v_scale)
    return (result, lse) if return_lse else result


@mha_decode_with_kvcache.traits
def _(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    max_seqlen_q: int,
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
        **({"multi_query": True, "new_tokens": max_seqlen_q} if max_seqlen_q > 1 else {"multi_query": False}),
    }


@mha_decode_with_kvcache.check
def _(
    check: Checker,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_k: int,
    max_seqlen_q: int,
    window_left: int,
    logit_cap: float,
    sinks: Tensor | None,
    softmax_scale: float | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    _checks.check_caches(check, q, k_cache, v_cache, page_table, cache_seqlens, max_seqlen_k, q_scale, k_scale, v_scale)
    _checks.check_new_tokens(check, q, cache_seqlens, max_seqlen_q)
    _checks.check_options(check, softmax_scale, logit_cap, window_left, sinks)


@mha_decode_with_kvcache.check_values(host=("page_table", "cache_seqlens"))
def _(
    check: Checker,
    k_cache: Tensor,
    page_table: Tensor | None,
    cache_seqlens: Tensor | None,
    max_seqlen_k: int,
    max_seqlen_q: int,
    window_left: int,
) -> None:
    _checks.check_values_paging(check, page_table, cache_seqlens, max_seqlen_k, k_cache, "k_cache", window_left, max_seqlen_q)


mha_decode_with_kvcache.fake(paged_outputs)


@mha_decode_with_kvcache.cases
def _() -> list[Case]:
    gpt_oss: dict[str, Any] = {"heads": 64, "kv_heads": 8, "head_dim": 64, "sinks": True}
    fp8_cache: dict[str, Any] = {**gpt_oss, "page_size": 64, "cache_dtype": torch.float8_e4m3fn, "scales": ("k_scale", "v_scale")}
    llama_70b: dict[str, Any] = {"heads": 64, "kv_heads": 8, "head_dim": 128}
    gqa: dict[str, Any] = {"heads": 8, "kv_heads": 2}
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    both = ("k_scale", "v_scale")
    each: dict[str, Any] = {"scales": ("q_scale", *both), "scale_per_head": True}
    return [
        Case("one token in the cache, float32", paged([1], dtype=torch.float32)),
        Case("lengths about a page's end, float32, lse", paged([15, 16, 17, 0, 33], dtype=torch.float32, return_lse=True)),
        Case("float64, pages of 1", paged([3, 1, 6], None, 2, 1, 8, page_size=1, dtype=torch.float64)),
        Case("five query heads a key head, head_dim 80, pages of 5", paged([11, 64, 5], None, 10, 2, 80, page_size=5)),
        Case("v_head_dim 96 under head_dim 160", paged([40, 7], None, 4, 2, 160, 96)),
        Case("NaN in slots that hold no token", paged([1, 20, 0, 48], **gqa, stale=True, return_lse=True)),
        Case("logit cap 30, float16, scale 0.3", paged([50, 20], dtype=torch.float16, logit_cap=30.0, softmax_scale=0.3)),
        Case("window of the token alone", paged([9, 40, 16], **gqa, window_left=0)),
        Case("four new tokens, sinks and lse", paged([2, 20, 4], **gqa, max_seqlen_q=4, sinks=True, return_lse=True)),
        Case("four new tokens in a window of three", paged([2, 20, 4], **gqa, max_seqlen_q=4, window_left=2)),
        Case("freed pages before a window", paged([5, 70, 16, 0, 100], **gqa, window_left=20, freed=True, return_lse=True)),
        Case(
            "freed pages of 64, three new tokens",
            paged([5, 400, 131], **gqa, page_size=64, window_left=2, max_seqlen_q=3, freed=True),
        ),
        Case("freed pages of 5, head_dim 80", paged([64, 11], None, 10, 2, 80, page_size=5, window_left=17, freed=True)),
        Case("fp8 cache without scales", paged([33, 18], **gqa, cache_dtype=e4m3)),
        Case("fp8 q and cache, a scale each", paged([33, 18], **gqa, dtype=e4m3, scales=("q_scale", *both))),
        Case("fp8 e5m2 cache, a scale a kv head", paged([33, 18], **gqa, cache_dtype=e5m2, scales=both, scale_per_head=True)),
        Case("gpt-oss-120b sliding layer, 1 to 400 tokens", paged([1, 127, 128, 129, 400], **gpt_oss, window_left=127)),
        Case("gpt-oss-120b full layer, 1 to 300 tokens, pages of 64", paged([1, 64, 65, 300], **gpt_oss, page_size=64)),
        Case("a key head a query head, lse", paged([30, 5, 70], None, 8, 8, 64, page_size=8, return_lse=True)),
        Case("one key head of 24 query heads, pages of 256", paged([300, 1], None, 24, 1, 32, page_size=256, sinks=True)),
        Case("sixteen query heads a key head", paged([70, 3], None, 16, 1, 64, sinks=True)),
        Case("sixteen query heads a key head, head_dim 128", paged([40, 129], None, 32, 2, 128, page_size=32, return_lse=True)),
        Case("four new tokens, head_dim 128, pages of 64", paged([30, 200], None, 16, 2, 128, page_size=64, max_seqlen_q=4)),
        Case("head_dim 192 over v_head_dim 128, float16", paged([40, 9], None, 4, 1, 192, 128, dtype=torch.float16)),
        Case("fp8 q, a scale a kv head, float32 lse", paged([70, 3], **gqa, dtype=e5m2, **each, return_lse=True)),
        Case("pages of one token, three new ones", paged([70, 9, 0], **gqa, page_size=1, max_seqlen_q=3, return_lse=True)),
        Case(
            "head_dim 256, fp8 cache, a window of 30, lse",
            paged([40, 3], None, 16, 2, 256, cache_dtype=e4m3, scales=both, window_left=29, return_lse=True),
        ),
        Case("pages of one token, fp8 cache, head_dim 128", paged([40, 3], None, 8, 2, 128, page_size=1, cache_dtype=e4m3)),
        Case("gemma-2 in a window, logit cap 50", paged([50, 7], None, 4, 2, 256, window_left=30, logit_cap=50.0, sinks=True)),
        Case("head_dim 96, lse", paged([33, 1], None, 3, 3, 96, return_lse=True)),
        Case("head_dim 80, fp8 cache, logit cap 5", paged([20, 49], None, 12, 1, 80, cache_dtype=e4m3, logit_cap=5.0)),
        Case("head_dim 80, fp8 cache", paged([33, 20], None, 4, 2, 80, cache_dtype=e4m3, scales=both)),
        Case("head_dim 96, fp8 cache, lse", paged([33, 1], None, 3, 3, 96, cache_dtype=e4m3, return_lse=True)),
        Case("head_dim 192 over v_head_dim 128, fp8 cache", paged([40, 9], None, 4, 1, 192, 128, cache_dtype=e4m3)),
        Case("no sequences", paged([], return_lse=True)),
        Case("gpt-oss-120b sliding layer 64 x 8192", paged([8192] * 64, **gpt_oss, page_size=64, window_left=127), large=True),
        Case("gpt-oss-120b full layer 64 x 8192", paged([8192] * 64, **gpt_oss, page_size=64), large=True),
        Case("gpt-oss-120b full layer 1 x 65536", paged([65536], **gpt_oss, page_size=64), large=True),
        Case("gpt-oss-120b full layer 16 x 8192", paged([8192] * 16, **gpt_oss, page_size=64), large=True),
        Case("gpt-oss-120b full layer 256 x 1024", paged([1024] * 256, **gpt_oss, page_size=64), large=True),
        Case("gpt-oss-120b full layer 1 x 1024", paged([1024], **gpt_oss, page_size=64), large=True),
        Case("gpt-oss-120b full layer 1 x 32768", paged([32768], **gpt_oss, page_size=64), large=True),
        Case("gpt-oss-120b full layer 64 x 8192, fp8 cache", paged([8192] * 64, **fp8_cache), large=True),
        Case("llama-70b 128 x 2048", paged([2048] * 128, **llama_70b), large=True),
        Case("llama-70b 32 x 4096, fp8 cache", paged([4096] * 32, **llama_70b, cache_dtype=e4m3, scales=both), large=True),
    ]


@mha_decode_with_kvcache.work
def _(cache_seqlens: Tensor) -> dict[str, list[int]]:
    return lengths_read(None, cache_seqlens)


mha_decode_with_kvcache.vary(vary_paged)


@mha_decode_with_kvcache.cost
def _(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, max_seqlen_q: int, window_left: int, return_lse: bool
) -> Cost:
    q_lens = [max_seqlen_q] * len(cache_seqlens)
    stored = _cost.token_bytes(k_cache) + _cost.token_bytes(v_cache)
    return _cost.paged_cost(q, v_cache.shape[3], stored, q_lens, cache_seqlens, True, window_left, return_lse)
