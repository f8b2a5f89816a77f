"""Decode with multi-head latent attention: the last tokens of each sequence attend to a paged cache of latents."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost
from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.attention import _checks, _cost
from tokenspeed_kernel_base.ops.attention._inputs import paged
from tokenspeed_kernel_base.ops.attention._softmax import Softmax, attend_latent, latent_outputs
from tokenspeed_kernel_base.ops.attention._traits import (
    LATENT_KINDS,
    SOFTMAX_KINDS,
    WINDOW_KINDS,
    latent_traits,
    softmax_traits,
    window_traits,
)
from tokenspeed_kernel_base.ops.attention._variations import lengths_read, vary_paged


@operator(
    "attention",
    "mla_decode_with_kvcache",
    formats=("q", "kv_cache", "rope_cache"),
    traits={**SOFTMAX_KINDS, **WINDOW_KINDS, **LATENT_KINDS, "tree_mask": bool, "multi_query": bool},
    varying=("batch", "tokens"),
    capacity=("pages", "max_pages"),
    bounds=("max_seqlen_k",),
    unlimited=("window_left",),
    scales=("q_scale", "kv_scale"),
)
def mla_decode_with_kvcache(
    q: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_k: int,
    kv_lora_rank: int,
    softmax_scale: float,
    max_seqlen_q: int = 1,
    window_left: int = -1,
    logit_cap: float = 0.0,
    return_lse: bool = False,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    tree_mask: Tensor | None = None,
    kv_scale_cache: Tensor | None = None,
    rope_cache: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """MLA decode: absorbed latent attention of the last ``max_seqlen_q`` tokens of every sequence to a paged cache.

    Computes the same as `mla_extend_with_kvcache` with ``is_causal=True`` and ``max_seqlen_q`` new tokens of each sequence. The
    docstring of `mla_extend_with_kvcache` explains "absorbed". The cache already holds the new tokens. The cache holds positions 0
    to ``cache_seqlens[b] - 1`` of sequence b. Position j is in slot ``j % page_size`` of page ``page_table[b, j // page_size]``.
    The queries are at the last positions of their sequence. Each query sees itself and earlier tokens; with a window, only the
    nearest of these. Accumulators are float32 (float64 for a float64 q), and the output is rounded once. With an fp8 cache, a
    kernel may round the softmax probabilities to fp8 too, whatever q's dtype is, see `mha_prefill`.

    Args:
        q: float16, bfloat16, float32, float64 or fp8 ``[batch * max_seqlen_q, heads, kv_lora_rank + rope_dim]``, sequence by
            sequence, absorbed part first. With kv_scale_cache, q must be float16 or bfloat16.
        kv_cache: q's dtype or fp8 (only fp8 if q is fp8) ``[pages, page_size, kv_lora_rank + rope_dim]``, latent first. With
            kv_scale_cache, kv_cache is float8_e4m3fn ``[pages, page_size, kv_lora_rank]`` and holds the latents alone, see
            `mla_sparse_with_kvcache`.
        page_table: int32 ``[batch, max_pages]``. An entry for positions below cache_seqlens is a page index. The entry may be -1 if
            the window hides the whole page from every new token of the sequence. Kernels never read such a page, so it may have
            been freed. All other entries may hold anything. Sequences may share pages.
        cache_seqlens: int32 ``[batch]``, number of tokens of each sequence in the cache, including the new tokens. The length may
            be less than max_seqlen_q, for example 0 for a sequence that only pads the batch. Queries before position 0 then see no
            key.
        max_seqlen_k: an upper bound of cache_seqlens; at most ``max_pages * page_size``, which is always a valid bound.
        kv_lora_rank: width of the latent. The latent is the value. The key is the latent followed by the rotary part. With
            kv_scale_cache it must be a multiple of 128.
        softmax_scale: multiplies the dot products of q and the cached keys. Usually ``1 / sqrt(head_dim)``, with the head_dim
            before absorption, times the factor of RoPE scaling. There is no default, because this head_dim does not follow from the
            shapes.
        max_seqlen_q: the exact number of new tokens of each sequence; above 1 for speculative decoding.
        window_left: how many tokens to the left a query sees besides itself; -1, or 2^30 and more, means all.
        logit_cap: if positive, scores become ``logit_cap * tanh(score / logit_cap)``; 0 is off.
        return_lse: whether to also return the log-sum-exp.
        q_scale: float32 ``[]`` or ``[1]``, multiplies q, for fp8 q only.
        kv_scale: float32 ``[]`` or ``[1]``, multiplies the cache, latent and rotary part alike, for an fp8 cache only. Not
            allowed with kv_scale_cache.
        tree_mask: int64 ``[tokens]``, the masks of draft trees, for sequences of at most 64 new tokens. Bit i of a node's mask is
            set if the node sees new token i of its sequence. The set bits are the node itself and its ancestors, never later
            tokens, as `build_draft_tree` returns them. A node also sees all tokens before the new ones. With a window, a node sees
            only positions that are at most window_left before its own position. The position of a node is the position of the first
            new token, plus the number of bits set in its mask, minus one. A token with mask 0 is no node: it sees itself and
            earlier tokens. Masks of sequences with more than 64 new tokens are ignored. None means that no token is a node. With
            masks, window_left must be -1 or at least 63.
        kv_scale_cache: float32 ``[pages, page_size, kv_lora_rank / 128]``, the scales of the cached latents, one for each 128
            elements. Requires rope_cache. May be strided.
        rope_cache: q's dtype ``[pages, page_size, rope_dim]``, the rotary parts. Requires kv_scale_cache. May be strided.
        out: receives the output; must not overlap q or the cache.

    Returns:
        The output ``[batch * max_seqlen_q, heads, kv_lora_rank]`` in q's dtype, bfloat16 if q is fp8. With return_lse also the
        natural log-sum-exp, float32 ``[batch * max_seqlen_q, heads]``. A query that sees no key has output 0 and log-sum-exp
        -inf.

    Cache slots that hold no token of a sequence never affect a result, even if they hold NaN.

    Raises:
        TypeError, ValueError: a dtype, shape or value is not as stated here. Raised before anything is launched. Values of
            page_table and cache_seqlens are checked only if they lie in host memory.

    Example:
        A sequence of 3 tokens in pages of 2; latents of width 1 and a rotary part of width 1.

        >>> import torch
        >>> from tokenspeed_kernel import mla_decode_with_kvcache
        >>> kv_cache = torch.tensor([[1.0, 0.0], [3.0, 0.0], [5.0, 0.0], [-1.0, 0.0]]).view(2, 2, 2)
        >>> page_table = torch.tensor([[0, 1]], dtype=torch.int32)
        >>> cache_seqlens = torch.tensor([3], dtype=torch.int32)
        >>> q = torch.zeros(1, 1, 2)
        >>> mla_decode_with_kvcache(q, kv_cache, page_table, cache_seqlens, 4, kv_lora_rank=1, softmax_scale=1.0).flatten()
        tensor([3.])

    Safe in CUDA graphs, except with backends tagged ``waits`` and with the reference, which reads the lengths on the host.
    """
    offsets, lens = range(0, q.shape[0] + 1, max_seqlen_q), cache_seqlens.tolist()
    softmax, scales = Softmax(softmax_scale, True, window_left, logit_cap), (q_scale, kv_scale)
    others = tree_mask, kv_scale_cache, rope_cache
    result, lse = attend_latent(q, kv_cache, kv_lora_rank, page_table, offsets, lens, softmax, *scales, *others)
    return (result, lse) if return_lse else result


@mla_decode_with_kvcache.traits
def _(
    q: Tensor,
    kv_cache: Tensor,
    kv_lora_rank: int,
    max_seqlen_q: int,
    window_left: int,
    logit_cap: float,
    return_lse: bool,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
    tree_mask: Tensor | None,
    kv_scale_cache: Tensor | None,
) -> dict[str, object]:
    return {
        **softmax_traits(q, 1, kv_lora_rank, logit_cap, return_lse),
        **window_traits(window_left),
        **latent_traits(kv_cache, kv_scale_cache, q_scale, kv_scale),
        "tree_mask": tree_mask is not None,
        "multi_query": max_seqlen_q > 1,
    }


@mla_decode_with_kvcache.check
def _(
    check: Checker,
    q: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_k: int,
    kv_lora_rank: int,
    softmax_scale: float,
    max_seqlen_q: int,
    window_left: int,
    logit_cap: float,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
    tree_mask: Tensor | None,
    kv_scale_cache: Tensor | None,
    rope_cache: Tensor | None,
) -> None:
    scales = q_scale, kv_scale, kv_scale_cache
    _checks.check_latent_cache(check, q, kv_cache, page_table, cache_seqlens, max_seqlen_k, kv_lora_rank, *scales, rope_cache)
    _checks.check_new_tokens(check, q, cache_seqlens, max_seqlen_q)
    _checks.check_options(check, softmax_scale, logit_cap, window_left)
    _checks.check_tree(check, tree_mask, window_left)


@mla_decode_with_kvcache.check_values(host=("page_table", "cache_seqlens"))
def _(
    check: Checker,
    kv_cache: Tensor,
    page_table: Tensor | None,
    cache_seqlens: Tensor | None,
    max_seqlen_k: int,
    max_seqlen_q: int,
    window_left: int,
) -> None:
    _checks.check_values_paging(check, page_table, cache_seqlens, max_seqlen_k, kv_cache, "kv_cache", window_left, max_seqlen_q)


mla_decode_with_kvcache.fake(latent_outputs)


@mla_decode_with_kvcache.cases
def _() -> list[Case]:
    deepseek_v3: dict[str, Any] = {"heads": 128, "head_dim": 576, "kv_lora_rank": 512, "page_size": 64, "softmax_scale": 0.1352}
    sharded: dict[str, Any] = {**deepseek_v3, "heads": 16}
    tiny: dict[str, Any] = {"heads": 3, "head_dim": 24, "kv_lora_rank": 16, "softmax_scale": 0.25}
    grouped: dict[str, Any] = {**tiny, "head_dim": 136, "kv_lora_rank": 128, "grouped": True}
    e4m3 = torch.float8_e4m3fn
    return [
        Case("one token in the cache, float32", paged([1], **tiny, dtype=torch.float32)),
        Case("lengths about a page's end, float32, lse", paged([15, 16, 17, 0, 33], **tiny, dtype=torch.float32, return_lse=True)),
        Case("float64, pages of 1", paged([3, 1, 6], **tiny, page_size=1, dtype=torch.float64)),
        Case("NaN in slots that hold no token", paged([1, 20, 0, 48], **tiny, stale=True, return_lse=True)),
        Case("logit cap 5, float16", paged([50, 20], **tiny, dtype=torch.float16, logit_cap=5.0)),
        Case("no rotary part", paged([9, 4], None, 3, head_dim=16, kv_lora_rank=16, softmax_scale=0.25)),
        Case("three new tokens", paged([2, 20, 3], **tiny, max_seqlen_q=3, return_lse=True)),
        Case("fp8 cache without scale", paged([33, 18], **tiny, cache_dtype=e4m3)),
        Case("fp8 q and cache, a scale each", paged([33, 18], **tiny, dtype=e4m3, scales=("q_scale", "kv_scale"))),
        Case("deepseek-v3, 16 of its heads, 1 to 300 tokens", paged([1, 63, 64, 65, 300], **sharded)),
        Case(
            "deepseek-v3, 16 of its heads, fp8 q and cache",
            paged([1, 64, 130], **sharded, dtype=e4m3, scales=("q_scale", "kv_scale"), return_lse=True),
        ),
        Case("deepseek-v3, 16 of its heads, fp8 cache", paged([1, 64, 130], **sharded, cache_dtype=e4m3)),
        Case("one long sequence among short ones, lse", paged([900, 3, 0, 64], **tiny, return_lse=True)),
        Case("window of 20, lse", paged([33, 64, 9, 0, 130], **tiny, window_left=20, return_lse=True)),
        Case(
            "window of the token alone, three new tokens, float32",
            paged([20, 3], **tiny, dtype=torch.float32, max_seqlen_q=3, window_left=0),
        ),
        Case("freed pages before a window", paged([100, 9, 300, 65], **tiny, max_seqlen_q=2, window_left=20, freed=True)),
        Case(
            "deepseek-v3, 16 of its heads, freed pages before a window of 100, fp8 cache",
            paged([900, 64, 129], **sharded, window_left=99, freed=True, cache_dtype=e4m3),
        ),
        Case("trees of nine", paged([33, 64, 9, 130], **tiny, max_seqlen_q=9, trees=True, return_lse=True)),
        Case(
            "trees of 33 in a window, float32",
            paged([90, 33], **tiny, dtype=torch.float32, max_seqlen_q=33, window_left=63, trees=True),
        ),
        Case("deepseek-v3, 16 of its heads, trees of 8", paged([300, 64, 65], **sharded, max_seqlen_q=8, trees=True)),
        Case("no sequences", paged([], **tiny, return_lse=True)),
        Case(
            "a scale for each 128, NaN in slots that hold no token, two new tokens, lse",
            paged([1, 20, 0, 48], **grouped, max_seqlen_q=2, stale=True, return_lse=True),
        ),
        Case("a scale for each 128, window of 20, logit cap 5", paged([130, 64, 9], **grouped, window_left=20, logit_cap=5.0)),
        Case("deepseek-v3.2, 16 of its heads, a scale for each 128", paged([1, 63, 64, 65, 300], **sharded, grouped=True)),
        Case(
            "deepseek-v3.2, 16 of its heads, 64 x 8192, a scale for each 128",
            paged([8192] * 64, **sharded, grouped=True),
            large=True,
        ),
        Case("deepseek-v3.2 128 x 4096, a scale for each 128", paged([4096] * 128, **deepseek_v3, grouped=True), large=True),
        Case(
            "deepseek-v3, 16 of its heads, 32 x 8192, trees of 8",
            paged([8192] * 32, **sharded, max_seqlen_q=8, trees=True),
            large=True,
        ),
        Case("deepseek-v3 64 x 8192", paged([8192] * 64, **deepseek_v3), large=True),
        Case("deepseek-v3 128 x 4096", paged([4096] * 128, **deepseek_v3), large=True),
        Case("deepseek-v3, 16 of its heads, 64 x 8192", paged([8192] * 64, **sharded), large=True),
        Case("deepseek-v3, 16 of its heads, 128 x 4096", paged([4096] * 128, **sharded), large=True),
        Case("deepseek-v3, 16 of its heads, 64 x 8192, two new tokens", paged([8192] * 64, **sharded, max_seqlen_q=2), large=True),
        Case(
            "deepseek-v3 128 x 4096, fp8 cache",
            paged([4096] * 128, **deepseek_v3, cache_dtype=e4m3, scales=("kv_scale",)),
            large=True,
        ),
        Case("deepseek-v3 64 x 8192, fp8 q and cache", paged([8192] * 64, **deepseek_v3, dtype=e4m3), large=True),
        Case(
            "deepseek-v3, 16 of its heads, 64 x 8192, fp8 q and cache",
            paged([8192] * 64, **sharded, dtype=e4m3),
            large=True,
        ),
    ]


@mla_decode_with_kvcache.work
def _(cache_seqlens: Tensor) -> dict[str, list[int]]:
    return lengths_read(None, cache_seqlens)


mla_decode_with_kvcache.vary(vary_paged)


@mla_decode_with_kvcache.cost
def _(
    q: Tensor,
    kv_cache: Tensor,
    cache_seqlens: Tensor,
    kv_lora_rank: int,
    max_seqlen_q: int,
    window_left: int,
    return_lse: bool,
    tree_mask: Tensor | None,
    kv_scale_cache: Tensor | None,
    rope_cache: Tensor | None,
) -> Cost:
    q_lens = [max_seqlen_q] * len(cache_seqlens)
    stored = _cost.token_bytes(kv_cache, kv_scale_cache, rope_cache)
    cost = _cost.paged_cost(q, kv_lora_rank, stored, q_lens, cache_seqlens, True, window_left, return_lse)
    return _cost.without_hidden(cost, tree_mask, q_lens, q, kv_lora_rank)
