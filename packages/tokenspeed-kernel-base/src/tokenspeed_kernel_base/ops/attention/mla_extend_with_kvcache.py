"""Extend with multi-head latent attention: new tokens attend to a paged cache of latents."""

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
    CACHE_KINDS,
    SOFTMAX_KINDS,
    WINDOW_KINDS,
    cache_traits,
    softmax_traits,
    window_traits,
)
from tokenspeed_kernel_base.ops.attention._variations import lengths_read, vary_paged


@operator(
    "attention",
    "mla_extend_with_kvcache",
    formats=("q", "kv_cache"),
    traits={**SOFTMAX_KINDS, **WINDOW_KINDS, **CACHE_KINDS, "is_causal": bool},
    varying=("batch", "tokens"),
    capacity=("pages", "max_pages"),
    bounds=("max_seqlen_q", "max_seqlen_k"),
    padded="cu_seqlens_q",
    unlimited=("window_left",),
    scales=("q_scale", "kv_scale"),
)
def mla_extend_with_kvcache(
    q: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor | None,
    kv_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    kv_lora_rank: int,
    softmax_scale: float,
    is_causal: bool = True,
    window_left: int = -1,
    logit_cap: float = 0.0,
    return_lse: bool = False,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """MLA extend: absorbed latent attention of new tokens to a paged cache that holds them already, after earlier tokens.

    Multi-head latent attention (DeepSeek-AI, 2024, arXiv:2405.04434) in its absorbed form. Keys and values are linear in the cached
    latent c. So a head's key expansion is applied to its query before the attention, and its value expansion to the output after
    the attention. The attention itself works on latents, which all heads share. A score is ``q . [c, rotary part] *
    softmax_scale``, the value is c. Positions, visibility and the softmax are as in `mha_extend_with_kvcache`: query i of a
    sequence's q_len queries is at position ``p = cache_seqlens[b] - q_len + i``. The query sees key j if ``j <= p`` (with
    is_causal) and ``j >= p - window_left`` (if there is a window). Accumulators are float32 (float64 for a float64 q), and the
    output is rounded once. With an fp8 cache, a kernel may round the softmax probabilities to fp8 too, whatever q's dtype is, see
    `mha_prefill`.

    Args:
        q: float16, bfloat16, float32, float64 or fp8 ``[tokens, heads, kv_lora_rank + rope_dim]``, sequence by sequence, absorbed
            part first.
        cu_seqlens_q: int32 ``[batch + 1]``, where each sequence's queries begin in q, and where the last sequence ends. Rows of q
            past the last offset are padding: they belong to no sequence, and the same rows of the outputs are not written.
        cu_seqlens_kv: int32 ``[batch + 1]``, the cumulative sums of cache_seqlens, starting with 0. None: a kernel that needs these
            sums computes them.
        kv_cache: q's dtype or fp8 (only fp8 if q is fp8) ``[pages, page_size, kv_lora_rank + rope_dim]``, latent first.
        page_table: int32 ``[batch, max_pages]``: position j of sequence b is in slot ``j % page_size`` of page ``page_table[b, j //
            page_size]``. An entry for positions below cache_seqlens is a page index. The entry may be -1 if the window hides the
            whole page from every new token of the sequence. Kernels never read such a page, so it may have been freed. All other
            entries may hold anything. Sequences may share pages.
        cache_seqlens: int32 ``[batch]``, number of tokens of each sequence in the cache, including the new tokens.
        max_seqlen_q: an upper bound of the number of queries of a sequence.
        max_seqlen_k: an upper bound of cache_seqlens; at most ``max_pages * page_size``, which is always a valid bound.
        kv_lora_rank: width of the latent. The latent is the value. The key is the latent followed by the rotary part.
        softmax_scale: multiplies the dot products of q and the cached keys. Usually ``1 / sqrt(head_dim)``, with the head_dim
            before absorption, times the factor of RoPE scaling. There is no default, because this head_dim does not follow from the
            shapes.
        is_causal: whether to hide keys later than the query; no sequence may then have more queries than tokens in the cache.
            False: every query sees all keys, for example those of a prefix that does not contain the queries.
        window_left: how many tokens to the left a query sees besides itself; -1, or 2^30 and more, means all.
        logit_cap: if positive, scores become ``logit_cap * tanh(score / logit_cap)``; 0 is off.
        return_lse: whether to also return the log-sum-exp.
        q_scale: float32 ``[]`` or ``[1]``, multiplies q, for fp8 q only.
        kv_scale: float32 ``[]`` or ``[1]``, multiplies the cache, latent and rotary part alike, for an fp8 cache only.
        out: receives the output; must not overlap q or the cache.

    Returns:
        The output ``[tokens, heads, kv_lora_rank]`` in q's dtype, bfloat16 if q is fp8. With return_lse also the natural
        log-sum-exp, float32 ``[tokens, heads]``. A query that sees no key has output 0 and log-sum-exp -inf.

    Cache slots that hold no token of a sequence never affect a result, even if they hold NaN.

    Raises:
        TypeError, ValueError: a dtype, shape or value is not as stated here. Raised before anything is launched. Values of
            offsets, lengths and page_table are checked only if they lie in host memory.

    Example:
        Two new tokens after an earlier one, in one page of 4; latents of width 1 and a rotary part of width 1.

        >>> import torch
        >>> from tokenspeed_kernel import mla_extend_with_kvcache
        >>> ints = lambda *values: torch.tensor(values, dtype=torch.int32)
        >>> kv_cache = torch.tensor([[1.0, 0.0], [3.0, 0.0], [5.0, 0.0], [-1.0, 0.0]]).view(1, 4, 2)
        >>> mla_extend_with_kvcache(
        ...     torch.zeros(2, 1, 2), ints(0, 2), None, kv_cache, page_table=ints(0).view(1, 1), cache_seqlens=ints(3),
        ...     max_seqlen_q=2, max_seqlen_k=4, kv_lora_rank=1, softmax_scale=1.0
        ... ).flatten()
        tensor([2., 3.])

    Safe in CUDA graphs, except with backends tagged ``waits`` and with the reference, which reads the lengths on the host.
    """
    offsets, lens = cu_seqlens_q.tolist(), cache_seqlens.tolist()
    softmax = Softmax(softmax_scale, is_causal, window_left, logit_cap)
    result, lse = attend_latent(q, kv_cache, kv_lora_rank, page_table, offsets, lens, softmax, q_scale, kv_scale)
    return (result, lse) if return_lse else result


@mla_extend_with_kvcache.traits
def _(
    q: Tensor,
    kv_cache: Tensor,
    kv_lora_rank: int,
    is_causal: bool,
    window_left: int,
    logit_cap: float,
    return_lse: bool,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
) -> dict[str, object]:
    return {
        **softmax_traits(q, 1, kv_lora_rank, logit_cap, return_lse),
        **window_traits(window_left),
        **cache_traits(kv_cache, q_scale, kv_scale),
        "is_causal": is_causal,
    }


@mla_extend_with_kvcache.check
def _(
    check: Checker,
    q: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor | None,
    kv_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    kv_lora_rank: int,
    softmax_scale: float,
    window_left: int,
    logit_cap: float,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
) -> None:
    _checks.check_latent_cache(check, q, kv_cache, page_table, cache_seqlens, max_seqlen_k, kv_lora_rank, q_scale, kv_scale)
    _checks.check_extension(check, cu_seqlens_q, cu_seqlens_kv, cache_seqlens, max_seqlen_q)
    _checks.check_options(check, softmax_scale, logit_cap, window_left)


@mla_extend_with_kvcache.check_values(host=("cu_seqlens_q", "cu_seqlens_kv", "page_table", "cache_seqlens"))
def _(
    check: Checker,
    q: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    kv_cache: Tensor,
    page_table: Tensor | None,
    cache_seqlens: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool,
    window_left: int,
) -> None:
    new_tokens = 0 if cu_seqlens_q is None else cu_seqlens_q.diff()
    _checks.check_values_paging(check, page_table, cache_seqlens, max_seqlen_k, kv_cache, "kv_cache", window_left, new_tokens)
    _checks.check_values_extension(check, q, cu_seqlens_q, cu_seqlens_kv, cache_seqlens, max_seqlen_q, is_causal)


mla_extend_with_kvcache.fake(latent_outputs)


@mla_extend_with_kvcache.cases
def _() -> list[Case]:
    deepseek_v3: dict[str, Any] = {
        "heads": 128,
        "head_dim": 576,
        "kv_lora_rank": 512,
        "page_size": 64,
        "softmax_scale": 0.1352,
        "is_causal": True,
    }
    sharded: dict[str, Any] = {**deepseek_v3, "heads": 16}
    tiny: dict[str, Any] = {"heads": 3, "head_dim": 24, "kv_lora_rank": 16, "softmax_scale": 0.25}
    causal: dict[str, Any] = {**tiny, "is_causal": True}
    e4m3 = torch.float8_e4m3fn
    return [
        Case("one token of one, float32", paged([1], [1], **causal, dtype=torch.float32)),
        Case("lengths about a page's end, float32", paged([15, 16, 17, 0, 33], [3, 16, 1, 0, 20], **causal, dtype=torch.float32)),
        Case("float64, pages of 1", paged([3, 1, 6], [2, 0, 6], **causal, page_size=1, dtype=torch.float64)),
        Case("not causal, more queries than keys, lse", paged([30, 3, 0], [4, 5, 2], **tiny, is_causal=False, return_lse=True)),
        Case("NaN in slots that hold no token", paged([5, 20, 0, 50], [5, 3, 0, 30], **causal, stale=True)),
        Case(
            "logit cap 5, float16, running sums left out",
            paged([20], [7], **causal, dtype=torch.float16, logit_cap=5.0, cu_seqlens_kv=None),
        ),
        Case("fp8 cache without scale", paged([33, 18], [10, 18], **causal, cache_dtype=e4m3)),
        Case("fp8 q and cache, a scale each", paged([33, 18], [10, 18], **causal, dtype=e4m3, scales=("q_scale", "kv_scale"))),
        Case("rows behind the last sequence", paged([33, 18], [10, 18], **causal, padding=9)),
        Case(
            "deepseek-v3, 16 of its heads, rows behind the last sequence, lse",
            paged([70, 64], [9, 64], **sharded, padding=70, return_lse=True),
        ),
        Case("deepseek-v3, 16 of its heads, 1 to 100 new", paged([200, 64, 65], [100, 64, 1], **sharded)),
        Case(
            "deepseek-v3, 16 of its heads, fp8 q and cache, lse",
            paged([150, 64, 3], [20, 1, 3], **sharded, dtype=e4m3, scales=("q_scale", "kv_scale"), return_lse=True),
        ),
        Case(
            "deepseek-v3, all seen, fp8 cache",
            paged([130, 3], [2, 3], **{**deepseek_v3, "is_causal": False}, cache_dtype=e4m3, scales=("kv_scale",)),
        ),
        Case("few new tokens of a long sequence, lse", paged([900, 3, 0, 64], [2, 3, 0, 7], **causal, return_lse=True)),
        Case("window of 20, lse", paged([100, 9, 40, 0], [30, 9, 1, 0], **causal, window_left=20, return_lse=True)),
        Case("window without causality", paged([60, 9], [30, 9], **tiny, is_causal=False, window_left=10)),
        Case("freed pages before a window", paged([100, 9, 300, 70], [33, 9, 1, 0], **causal, window_left=20, freed=True)),
        Case(
            "deepseek-v3, 16 of its heads, freed pages before a window",
            paged([400, 64, 65], [20, 64, 1], **sharded, window_left=150, freed=True),
        ),
        Case("no new tokens", paged([20, 0], [0, 0], **causal)),
        Case("no sequences", paged([], [], **causal, return_lse=True)),
        Case("deepseek-v3, 16 of its heads, no sequences, but rows behind", paged([], [], **sharded, padding=70)),
        Case("deepseek-v3 4 x 512 of 4096", paged([4096] * 4, [512] * 4, **deepseek_v3), large=True),
        Case("deepseek-v3, 16 of its heads, 8 x 1024 of 8192", paged([8192] * 8, [1024] * 8, **sharded), large=True),
        Case(
            "deepseek-v3, 16 of its heads, 8 x 1024 of 8192, fp8 q and cache",
            paged([8192] * 8, [1024] * 8, **sharded, dtype=e4m3, scales=("q_scale", "kv_scale")),
            large=True,
        ),
    ]


mla_extend_with_kvcache.work(lengths_read)


mla_extend_with_kvcache.vary(vary_paged)


@mla_extend_with_kvcache.cost
def _(
    q: Tensor,
    cu_seqlens_q: Tensor,
    kv_cache: Tensor,
    cache_seqlens: Tensor,
    kv_lora_rank: int,
    is_causal: bool,
    window_left: int,
    return_lse: bool,
) -> Cost:
    q_lens, stored = _cost.lengths(cu_seqlens_q), _cost.token_bytes(kv_cache)
    return _cost.paged_cost(q, kv_lora_rank, stored, q_lens, cache_seqlens, is_causal, window_left, return_lse)
