"""Sparse attention of each token to selected latents of a paged cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, absent_ids, nbytes, poisoned, recipe
from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.attention import _checks, _cost
from tokenspeed_kernel_base.ops.attention._inputs import draw_cache, draw_groups, draw_paging
from tokenspeed_kernel_base.ops.attention._softmax import attend_chosen, latent_outputs, output_dtype
from tokenspeed_kernel_base.ops.attention._traits import LATENT_KINDS, SOFTMAX_KINDS, latent_traits, softmax_traits
from tokenspeed_kernel_base.variation import Variation, Want


@operator(
    "attention",
    "mla_sparse_with_kvcache",
    formats=("q", "kv_cache", "rope_cache"),
    traits={**SOFTMAX_KINDS, **LATENT_KINDS, "top_k": int},
    varying=("tokens",),
    capacity=("pages",),
    scales=("q_scale", "kv_scale"),
)
def mla_sparse_with_kvcache(
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    kv_lora_rank: int,
    softmax_scale: float,
    topk_length: Tensor | None = None,
    return_lse: bool = False,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    kv_scale_cache: Tensor | None = None,
    rope_cache: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """MLA sparse attention: absorbed latent attention of every token to the cache slots selected for it.

    This is the second half of DeepSeek sparse attention (DeepSeek-AI, "DeepSeek-V3.2", 2025, arXiv:2512.02556): an indexer selects
    the slots. q is absorbed as for `mla_extend_with_kvcache`. All heads of a token attend to the same slots. Prefill and decode are
    the same call, because the operator needs the slots of each token, but no sequence lengths. No causal mask is applied: the
    selection must already be causal. Accumulators are float32 (float64 for a float64 q), and the output is rounded once.

    The cache has one of two layouts. In the first, kv_cache holds a token's latent followed by its rotary part in the same dtype.
    The second is the layout of DeepSeek-V3.2, with 656 bytes for each token (vLLM's ``fp8_ds_mla``, which FlashMLA's sparse
    decoding reads). In the second layout, kv_cache holds e4m3 latents, kv_scale_cache one scale for each 128 elements of a latent,
    and rope_cache the unquantised rotary parts. A dequantised latent is ``e4m3 value * scale``; kernels may round it to q's dtype.
    `mla_cache_views` returns these three tensors as views of pages of bytes.

    Args:
        q: float16, bfloat16, float32, float64 or fp8 ``[tokens, heads, kv_lora_rank + rope_dim]``, absorbed part first. With
            kv_scale_cache, q must be float16 or bfloat16.
        kv_cache: q's dtype or fp8 (only fp8 if q is fp8) ``[pages, page_size, kv_lora_rank + rope_dim]``, latent first. With
            kv_scale_cache, kv_cache is float8_e4m3fn ``[pages, page_size, kv_lora_rank]`` and holds the latents alone. May be
            strided.
        indices: int32 ``[tokens, top_k]``, slots ``page * page_size + offset`` of the cache in any order. Negative indices are
            ignored. A slot that occurs twice counts as two keys.
        kv_lora_rank: width of the latent. The latent is the value. The key is the latent followed by the rotary part. With
            kv_scale_cache it must be a multiple of 128.
        softmax_scale: multiplies the dot products of q and the cached keys. Usually ``1 / sqrt(head_dim)``, with the head_dim
            before absorption, times the factor of RoPE scaling. There is no default, because this head_dim does not follow from the
            shapes.
        topk_length: int32 ``[tokens]``, 0 to top_k: the number of leading indices of each token that are used. Further indices may
            hold anything. None means top_k for every token. With topk_length, tokens with few keys run faster.
        return_lse: whether to also return the log-sum-exp.
        q_scale: float32 ``[]`` or ``[1]``, multiplies q, for fp8 q only.
        kv_scale: float32 ``[]`` or ``[1]``, multiplies the cache, latent and rotary part alike, for an fp8 cache only. Not
            allowed with kv_scale_cache.
        kv_scale_cache: float32 ``[pages, page_size, kv_lora_rank / 128]``, the scales of the cached latents, one for each 128
            elements. Requires rope_cache. May be strided.
        rope_cache: q's dtype ``[pages, page_size, rope_dim]``, the rotary parts. Requires kv_scale_cache. May be strided.
        out: receives the output; must not overlap q or the cache.

    Returns:
        The output ``[tokens, heads, kv_lora_rank]`` in q's dtype, bfloat16 if q is fp8. With return_lse also the natural
        log-sum-exp, float32 ``[tokens, heads]``. A token without keys has output 0 and log-sum-exp -inf.

    Slots that no index names never affect a result, even if they hold NaN.

    Raises:
        TypeError, ValueError: a dtype, shape or value is not as stated here. Raised before anything is launched. Values of
            indices and topk_length are checked only if they lie in host memory.

    Example:
        Two pages of two slots; latents of width 1 and a rotary part of width 1.

        >>> import torch
        >>> from tokenspeed_kernel import mla_sparse_with_kvcache
        >>> kv_cache = torch.tensor([[1.0, 0.0], [3.0, 0.0], [5.0, 0.0], [-1.0, 0.0]]).view(2, 2, 2)
        >>> indices = torch.tensor([[0, 2, -1], [3, -1, -1]], dtype=torch.int32)
        >>> mla_sparse_with_kvcache(torch.zeros(2, 1, 2), kv_cache, indices, kv_lora_rank=1, softmax_scale=1.0).flatten()
        tensor([ 3., -1.])

    Safe in CUDA graphs.
    """
    caches = kv_scale_cache, rope_cache
    result, lse = attend_chosen(q, kv_cache, kv_lora_rank, indices, topk_length, softmax_scale, q_scale, kv_scale, *caches)
    return (result, lse) if return_lse else result


@mla_sparse_with_kvcache.traits
def _(
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    kv_lora_rank: int,
    return_lse: bool,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
    kv_scale_cache: Tensor | None,
) -> dict[str, object]:
    return {
        **softmax_traits(q, 1, kv_lora_rank, 0.0, return_lse),
        **latent_traits(kv_cache, kv_scale_cache, q_scale, kv_scale),
        "top_k": indices.shape[1],
    }


@mla_sparse_with_kvcache.check
def _(
    check: Checker,
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    kv_lora_rank: int,
    softmax_scale: float,
    topk_length: Tensor | None,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
    kv_scale_cache: Tensor | None,
    rope_cache: Tensor | None,
) -> None:
    _checks.check_latents(check, q, kv_cache, kv_lora_rank, q_scale, kv_scale, kv_scale_cache, rope_cache)
    check.require(check["page_size"] > 0, "page_size of the cache", "positive", 0)
    check.tensor("indices", indices, "tokens top_k", torch.int32)
    check.tensor("topk_length", topk_length, "tokens", torch.int32)
    _checks.check_options(check, softmax_scale)


@mla_sparse_with_kvcache.check_values(host=("indices", "topk_length"))
def _(check: Checker, kv_cache: Tensor, indices: Tensor | None, topk_length: Tensor | None) -> None:
    if indices is None:
        return
    _checks.check_values_counts(check, "topk_length", topk_length, indices.shape[1], "the top_k of indices")
    if not indices.numel():
        return
    slots = kv_cache.shape[0] * kv_cache.shape[1]
    used = torch.where(_counted(indices, topk_length), indices, -1)
    if int(used.max()) >= slots:
        token, at = (int(index) for index in (used >= slots).nonzero()[0])
        check.fail(f"indices[{token}, {at}]", f"below pages * page_size = {slots} (negative: no key)", int(used[token, at]))


def _counted(indices: Tensor, topk_length: Tensor | None) -> Tensor:
    """Returns the mask of used indices: those within topk_length that are not negative."""
    counted = indices >= 0
    if topk_length is None:
        return counted
    return counted & (torch.arange(indices.shape[1], device=indices.device) < topk_length.unsqueeze(1))


mla_sparse_with_kvcache.fake(latent_outputs)


def draw_chosen(draw: Draw, visible: Sequence[int], top_k: int) -> Tensor:
    """Draws random visible positions for each token, int32 ``[len(visible), top_k]``.

    A token that sees n positions gets ``min(n, top_k)`` of them in ascending order, padded with -1."""
    rows = []
    at_once = max(1, (1 << 26) // max(1, *visible, 1))
    for begin in range(0, len(visible), at_once):
        some = list(visible[begin : begin + at_once])
        lens = draw.tensor(some, torch.int64).unsqueeze(1)
        width = max(*some, top_k)
        noise = draw.uniform(len(lens), width).masked_fill(torch.arange(width, device=draw.device) >= lens, -1.0)
        found = noise.topk(top_k, dim=1).indices
        found = found.masked_fill(found >= lens, width).sort(dim=1).values
        rows.append(found.masked_fill(found == width, -1).to(torch.int32))
    return torch.cat(rows) if rows else torch.zeros(0, top_k, dtype=torch.int32, device=draw.device)


@recipe
def _inputs(
    kv_lens: Sequence[int],
    q_lens: Sequence[int] | None = None,
    top_k: int = 32,
    heads: int = 4,
    kv_lora_rank: int = 16,
    rope_dim: int = 8,
    page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    scales: Sequence[str] = (),
    lengths: bool = False,
    holes: bool = False,
    stale: bool = False,
    grouped: bool = False,
    **options: Any,
) -> Callable[[Draw], dict[str, Any]]:
    """Draws queries that are the last tokens of sequences in a paged cache. Each query attends to random positions among those that
    it sees.

    Args:
        q_lens: number of queries of each sequence; by default one.
        lengths: whether to also pass ``topk_length``, and put invalid slots past the used indices.
        holes: whether every third index is -1.
        stale: whether to fill the cache slots that hold no token with NaN.
        grouped: whether each 128 elements of a latent share a scale, and the rotary parts lie in a separate cache.
    """

    def make(draw: Draw) -> dict[str, Any]:
        page_table, _, held = draw_paging(draw, kv_lens, page_size, None)
        counts = list(q_lens or [1] * len(kv_lens))
        sequence = draw.tensor([index for index, n in enumerate(counts) for _ in range(n)], torch.int64)
        visible = [kv_len - n + i + 1 for kv_len, n in zip(kv_lens, counts, strict=True) for i in range(n)]
        positions = draw_chosen(draw, visible, top_k)
        pages = page_table[sequence.unsqueeze(1), positions.clamp(min=0) // page_size]
        indices = torch.where(positions >= 0, pages * page_size + positions % page_size, -1)
        tokens = len(visible)
        if holes:
            indices[:, ::3] = -1
        arguments: dict[str, Any] = {
            "q": draw.normal(tokens, heads, kv_lora_rank + rope_dim, dtype=dtype),
            "indices": indices,
            "kv_lora_rank": kv_lora_rank,
        }
        if grouped:
            arguments.update(draw_groups(draw, held, kv_lora_rank, rope_dim, dtype, stale))
        else:
            width = kv_lora_rank + rope_dim
            arguments["kv_cache"] = draw_cache(draw, held, width, dtype=cache_dtype or dtype, stale=stale)
        if lengths:
            arguments["topk_length"] = (positions >= 0).sum(1, dtype=torch.int32)
            arguments["indices"] = torch.where(_counted(indices, arguments["topk_length"]) | holes, indices, 1 << 30)
        for scale in scales:
            arguments[scale] = draw.uniform(low=0.5, high=1.5)
        return {**arguments, **options}

    return make


@mla_sparse_with_kvcache.cases
def _() -> list[Case]:
    tiny: dict[str, Any] = {"heads": 3, "softmax_scale": 0.25}
    deepseek_v3: dict[str, Any] = {
        "heads": 128,
        "kv_lora_rank": 512,
        "rope_dim": 64,
        "page_size": 64,
        "top_k": 2048,
        "softmax_scale": 0.1352,
    }
    sharded: dict[str, Any] = {**deepseek_v3, "heads": 16}
    one_group: dict[str, Any] = {**tiny, "grouped": True, "kv_lora_rank": 128, "rope_dim": 16}
    three_groups: dict[str, Any] = {**tiny, "grouped": True, "kv_lora_rank": 384, "rope_dim": 10, "dtype": torch.float16}
    grouped: dict[str, Any] = {**deepseek_v3, "grouped": True}
    fp8: dict[str, Any] = {"cache_dtype": torch.float8_e4m3fn, "scales": ("kv_scale",)}
    both_fp8: dict[str, Any] = {"dtype": torch.float8_e4m3fn, "scales": ("q_scale", "kv_scale")}
    return [
        Case("fewer keys than top_k, float32, lse", _inputs([1, 20, 33, 90], **tiny, dtype=torch.float32, return_lse=True)),
        Case("float64, pages of 1", _inputs([3, 50], **tiny, page_size=1, dtype=torch.float64)),
        Case(
            "NaN in other slots, lengths given",
            _inputs([7, 70, 40], [2, 3, 1], **tiny, lengths=True, stale=True, return_lse=True),
        ),
        Case("-1 among the indices, float16", _inputs([50, 1, 9], **tiny, top_k=20, holes=True, dtype=torch.float16)),
        Case("no rotary part", _inputs([90, 4], **tiny, rope_dim=0)),
        Case("prefill of 20, fp8 cache, pages of 24", _inputs([30, 9], [15, 5], **tiny, **fp8, page_size=24)),
        Case("fp8 q and cache, a scale each", _inputs([33, 80], **tiny, **both_fp8, lengths=True)),
        Case("deepseek-v3, 16 of its heads, top 192 of 300", _inputs([300, 64], **{**sharded, "top_k": 192}, lengths=True)),
        Case("deepseek-v3, top 96 of 200, fp8 cache", _inputs([200], **{**deepseek_v3, "top_k": 96}, **fp8)),
        Case("no tokens", _inputs([], **tiny, return_lse=True)),
        Case(
            "a scale for each 128, NaN in other slots, lse",
            _inputs([7, 70, 40], [2, 3, 1], **one_group, lengths=True, stale=True, return_lse=True),
        ),
        Case("a scale for each 128, float16, pages of 24, -1", _inputs([30, 9], **three_groups, page_size=24, holes=True)),
        Case("a scale for each 128, no rotary part", _inputs([20, 4], **{**one_group, "rope_dim": 0})),
        Case("deepseek-v3.2, top 96 of 200, a scale for each 128", _inputs([200], **{**grouped, "top_k": 96})),
        Case(
            "deepseek-v3.2, 16 of its heads, top 192 of 300, a scale for each 128",
            _inputs([300, 64], **{**sharded, "top_k": 192}, grouped=True, lengths=True, stale=True),
        ),
        Case("deepseek-v3.2 decode 64 x 8192", _inputs([8192] * 64, **deepseek_v3), large=True),
        Case("deepseek-v3.2 decode 64 x 65536", _inputs([65536] * 64, **deepseek_v3), large=True),
        Case("deepseek-v3.2 decode 1 x 65536", _inputs([65536], **deepseek_v3), large=True),
        Case("deepseek-v3.2, 16 of its heads, decode 64 x 8192", _inputs([8192] * 64, **sharded), large=True),
        Case("deepseek-v3.2, 16 of its heads, decode 128 x 32768", _inputs([32768] * 128, **sharded), large=True),
        Case("deepseek-v3.2, 16 of its heads, decode 128 x 32768, fp8", _inputs([32768] * 128, **sharded, **fp8), large=True),
        Case("deepseek-v3.2 prefill 1024 of 4096", _inputs([4096], [1024], **deepseek_v3, lengths=True), large=True),
        Case("deepseek-v3.2, 16 of its heads, prefill 4096 of 16384", _inputs([16384], [4096], **sharded), large=True),
        Case("deepseek-v3.2 decode 64 x 8192, a scale for each 128", _inputs([8192] * 64, **grouped), large=True),
        Case("deepseek-v3.2 decode 1 x 65536, a scale for each 128", _inputs([65536], **grouped), large=True),
        Case(
            "deepseek-v3.2, 16 of its heads, decode 128 x 32768, a scale for each 128",
            _inputs([32768] * 128, **sharded, grouped=True),
            large=True,
        ),
        Case(
            "deepseek-v3.2 prefill 1024 of 4096, a scale for each 128",
            _inputs([4096], [1024], **grouped, lengths=True),
            large=True,
        ),
    ]


@mla_sparse_with_kvcache.work
def _(indices: Tensor, topk_length: Tensor | None) -> dict[str, list[int]]:
    return {"chosen": _counted(indices, topk_length).sum(1).tolist()}


@mla_sparse_with_kvcache.vary
def _(
    variation: Variation,
    kv_cache: Tensor,
    indices: Tensor,
    topk_length: Tensor | None,
    kv_scale_cache: Tensor | None,
    rope_cache: Tensor | None,
) -> dict[str, Tensor]:
    if variation.want is Want.UNUSED:
        caches = {"kv_cache": kv_cache, "kv_scale_cache": kv_scale_cache, "rope_cache": rope_cache}
        return _without_unused(caches, indices, topk_length)
    pages, page_size = kv_cache.shape[:2]
    if variation.want is Want.OTHER:  # each index names the next slot; without topk_length, each row also moves to the next token
        slots = max(pages * page_size, 1)
        moved = torch.where(_counted(indices, topk_length), (indices + 1) % slots, indices)
        return {"indices": moved.roll(1, 0) if topk_length is None else moved}
    draw, (tokens, top_k) = variation.draw, indices.shape
    chosen = [min(count, top_k, pages * page_size) for count in variation.values("chosen", tokens, top_k)]
    made = {"indices": draw_chosen(draw, [pages * page_size] * tokens, top_k)}
    lengths = draw.tensor(chosen, torch.int32)
    made["indices"] = torch.where(torch.arange(top_k, device=draw.device) < lengths.unsqueeze(1), made["indices"], -1)
    if kv_scale_cache is not None:
        made["kv_scale_cache"] = draw.uniform(*kv_scale_cache.shape, low=0.5, high=1.5)
    return made if topk_length is None else {**made, "topk_length": lengths}


def _without_unused(caches: dict[str, Tensor | None], indices: Tensor, topk_length: Tensor | None) -> dict[str, Tensor]:
    """Fills unused memory with values that show a wrong read. Slots that no index names hold NaN. On the host, indices past
    topk_length are out of range. On a device a read of such a slot would be an illegal access, so there these indices name the last
    slot.
    """
    counted = _counted(indices, topk_length)
    given = {name: cache for name, cache in caches.items() if cache is not None}
    pages, page_size = given["kv_cache"].shape[:2]
    held = torch.zeros(pages * page_size, dtype=torch.bool, device=indices.device)
    held[indices[counted].long()] = True
    changed = {name: poisoned(cache, ~held.view(pages, page_size)) for name, cache in given.items()}
    changed["indices"] = absent_ids(indices, indices < 0)
    if topk_length is not None:
        beyond = torch.arange(indices.shape[1], device=indices.device) >= topk_length.unsqueeze(1)
        elsewhere = torch.iinfo(torch.int32).max if not indices.is_cuda else pages * page_size - 1
        changed["indices"] = torch.where(beyond, elsewhere, changed["indices"])
    return changed


@mla_sparse_with_kvcache.cost
def _(
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    kv_lora_rank: int,
    topk_length: Tensor | None,
    return_lse: bool,
    kv_scale_cache: Tensor | None,
    rope_cache: Tensor | None,
) -> Cost:
    tokens, heads, width = q.shape
    counted = _counted(indices, topk_length)
    read = len(torch.unique(indices[counted])) * _cost.token_bytes(kv_cache, kv_scale_cache, rope_cache)
    written = tokens * heads * (kv_lora_rank * output_dtype(q).itemsize + 4 * return_lse)
    flops = 2.0 * int(counted.sum()) * heads * (width + kv_lora_rank)
    return Cost(flops=flops, bytes=float(nbytes(q, indices, topk_length) + read + written))
