"""Inputs for the cases of attention operators. A recipe returns a function that draws the arguments of a `Case` from a `Draw`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Draw, recipe
from tokenspeed_kernel_base.checks import FP8
from tokenspeed_kernel_base.ops.attention._softmax import MAX_TREE, hidden_pages
from tokenspeed_kernel_base.ops.kvcache.latent_groups import mla_cache_views
from tokenspeed_kernel_base.ops.speculation.trees import draw_parents, tree_masks

Make = Callable[[Draw], dict[str, Any]]


@recipe
def ragged(
    lengths: Sequence[int],
    heads: int = 4,
    kv_heads: int = 4,
    head_dim: int = 64,
    v_head_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    sinks: bool = False,
    hint: bool = False,
    kv_lengths: Sequence[int] | None = None,
    scales: Sequence[str] = (),
    scale_per_head: bool = False,
    padding: int = 0,
    **options: Any,
) -> Make:
    """Draws packed whole sequences.

    Args:
        padding: number of rows of q past the last sequence, which belong to no sequence.
        hint: whether to also pass the lengths on the host, ``cu_seqlens_cpu``.
        kv_lengths: the lengths of keys and values, if they differ from those of the queries.
        scales: names of the scales to draw, such as ``"q_scale"``. With ``scale_per_head`` there is one scale for each KV head.
    """

    def make(draw: Draw) -> dict[str, Any]:
        tokens = sum(lengths) + padding
        keys = tokens if kv_lengths is None else sum(kv_lengths) + padding
        cu_seqlens = draw.cumulative(lengths)
        arguments = {
            "q": draw.normal(tokens, heads, head_dim, dtype=dtype),
            "k": draw.normal(keys, kv_heads, head_dim, dtype=dtype),
            "v": draw.normal(keys, kv_heads, v_head_dim or head_dim, dtype=dtype),
            "cu_seqlens": cu_seqlens,
            **options,
        }
        if kv_lengths is not None:
            arguments["cu_seqlens_kv"] = draw.cumulative(kv_lengths)
        for scale in scales:
            arguments[scale] = draw.uniform(*((kv_heads,) if scale_per_head else ()), low=0.5, high=1.5)
        if sinks:
            arguments["sinks"] = draw.normal(heads, dtype=dtype if dtype not in FP8 else torch.bfloat16)
        if hint:
            arguments["cu_seqlens_cpu"] = [0, *itertools.accumulate(lengths)]
            arguments["max_seqlen"] = max(lengths, default=0)
        return arguments

    return make


def draw_paging(draw: Draw, kv_lens: Sequence[int], page_size: int, width: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Draws the page table of sequences. Returns the page table, the lengths, and a mask ``[pages, page_size]`` of slots that hold
    a token.

    Pages are shuffled, two pages are unused, and page table entries past the end of a sequence are -1.
    """
    counts = [-(-length // page_size) for length in kv_lens]
    pages = sum(counts) + 2
    free = iter(draw.order(pages))
    width = max(counts, default=0) + 1 if width is None else width
    rows = [[next(free) for _ in range(count)] + [-1] * (width - count) for count in counts]
    page_table = draw.tensor(rows, torch.int32).reshape(len(kv_lens), width)
    held = torch.zeros(pages, page_size, dtype=torch.bool, device=draw.device)
    for row, count, length in zip(page_table, counts, kv_lens, strict=True):
        slots = torch.arange(count * page_size, device=draw.device).view(count, page_size)
        held[row[:count].long()] = slots < length
    return page_table, draw.tensor(list(kv_lens), torch.int32), held


def draw_cache(draw: Draw, held: Tensor, *token: int, dtype: torch.dtype, stale: bool = False, guarded: bool = False) -> Tensor:
    """Draws a paged cache whose tokens have the shape ``token``. ``held`` marks the slots that hold a token.

    With ``stale``, slots that hold no token hold NaN. With ``guarded``, so does the page before the cache in memory. So a kernel
    that reads page -1 reads NaN instead of foreign memory."""
    if guarded:
        return draw_cache(draw, torch.cat((torch.zeros_like(held[:1]), held)), *token, dtype=dtype, stale=True)[1:]
    values = draw.normal(*held.shape, *token, dtype=torch.float32 if dtype in FP8 else dtype)
    if stale:
        values[~held] = torch.nan
    return values.to(dtype)


def draw_groups(
    draw: Draw, held: Tensor, kv_lora_rank: int, rope_dim: int, dtype: torch.dtype, stale: bool = False
) -> dict[str, Tensor]:
    """Draws a cache whose latents have a scale for each 128 elements, as views of pages of bytes.

    The e4m3 values are large and the scales small, as after a quantisation that maps amax to 448. With ``stale``, slots that hold
    no token hold NaN."""
    packed = torch.zeros(*held.shape, kv_lora_rank // 32 * 33 + 2 * rope_dim, dtype=torch.uint8, device=draw.device)
    views = mla_cache_views(packed, kv_lora_rank, rope_dim, dtype)
    codes = draw.normal(*views.kv_cache.shape, scale=64.0).to(views.kv_cache.dtype)  # 448, the largest e4m3 value, is 7 sigma
    views.kv_cache.view(torch.uint8).copy_(codes.view(torch.uint8))
    views.kv_scale_cache.copy_(draw.uniform(*views.kv_scale_cache.shape, low=0.004, high=0.025))
    views.rope_cache.copy_(draw.normal(*views.rope_cache.shape, dtype=dtype))
    if stale:
        packed[~held] = 0xFF  # NaN in all three formats
    return views._asdict()


def draw_trees(draw: Draw, q_lens: Sequence[int], padding: int = 0) -> Tensor:
    """Draws masks of random draft trees: int64 ``[sum(q_lens) + padding]``.

    Masks are 0 for every other sequence, for sequences of more than 64 tokens and for padding."""
    masks = [torch.zeros(0, dtype=torch.int64, device=draw.device)]
    for at, q_len in enumerate(q_lens):
        tree = at % 2 == 0 and 0 < q_len <= MAX_TREE
        masks.append(tree_masks(draw_parents(draw, 2, q_len))[1] if tree else masks[0].new_zeros(q_len))
    return torch.cat([*masks, masks[0].new_zeros(padding)])


@recipe
def paged(
    kv_lens: Sequence[int],
    q_lens: Sequence[int] | None = None,
    heads: int = 4,
    kv_heads: int = 4,
    head_dim: int = 64,
    v_head_dim: int | None = None,
    kv_lora_rank: int | None = None,
    page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    sinks: bool = False,
    scales: Sequence[str] = (),
    scale_per_head: bool = False,
    stale: bool = False,
    freed: bool = False,
    running_sums: bool = True,
    width: int | None = None,
    trees: bool = False,
    grouped: bool = False,
    padding: int = 0,
    **options: Any,
) -> Make:
    """Draws new tokens and a paged cache that holds them.

    Args:
        q_lens: number of new tokens of each sequence, for extend. None for decode: each sequence has ``max_seqlen_q`` new tokens,
            by default 1.
        kv_lora_rank: if given, the cache holds latents of this width, each followed by its rotary part; ``head_dim`` is the total
            width of both.
        scales: names of the scales to draw, such as ``"q_scale"``. With ``scale_per_head`` there is one scale for each KV head.
        stale: whether to fill the cache slots that hold no token with NaN.
        freed: whether page table entries are -1 where the window hides a whole page. If so, these pages, and the page before the
            cache in memory, hold NaN.
        running_sums: whether to also pass ``cu_seqlens_kv`` if q_lens is given.
        trees: whether the new tokens of every other sequence form a draft tree, if the sequence has at most 64 of them.
        grouped: whether each 128 elements of a latent share a scale, and the rotary parts lie in a separate cache.
        padding: number of rows of q past the last sequence, which belong to no sequence.
        width: page table entries per sequence; by default one more than the longest sequence needs.
    """

    def make(draw: Draw) -> dict[str, Any]:
        page_table, cache_seqlens, held = draw_paging(draw, kv_lens, page_size, width)
        stored = cache_dtype or dtype
        tokens = padding + (sum(q_lens) if q_lens is not None else len(kv_lens) * options.get("max_seqlen_q", 1))
        if freed:
            new = options.get("max_seqlen_q", 1) if q_lens is None else draw.tensor(list(q_lens), torch.int32)
            hidden = hidden_pages(cache_seqlens, new, options["window_left"], page_table.shape[1], page_size)
            held[page_table[hidden].long()] = False
            page_table = page_table.masked_fill(hidden, -1)
        arguments: dict[str, Any] = {
            "q": draw.normal(tokens, heads, head_dim, dtype=dtype),
            "page_table": page_table,
            "cache_seqlens": cache_seqlens,
            "max_seqlen_k": max(kv_lens, default=0),
        }
        if kv_lora_rank is None:
            arguments["k_cache"] = draw_cache(draw, held, kv_heads, head_dim, dtype=stored, stale=stale, guarded=freed)
            arguments["v_cache"] = draw_cache(
                draw, held, kv_heads, v_head_dim or head_dim, dtype=stored, stale=stale, guarded=freed
            )
        elif grouped:
            arguments.update(draw_groups(draw, held, kv_lora_rank, head_dim - kv_lora_rank, dtype, stale))
        else:
            arguments["kv_cache"] = draw_cache(draw, held, head_dim, dtype=stored, stale=stale, guarded=freed)
        if kv_lora_rank is not None:
            arguments["kv_lora_rank"] = kv_lora_rank
        if q_lens is not None:
            arguments["cu_seqlens_q"] = draw.cumulative(q_lens)
            if running_sums:
                arguments["cu_seqlens_kv"] = draw.cumulative(kv_lens)
            arguments["max_seqlen_q"] = max(q_lens, default=0)
        if trees:
            each = q_lens if q_lens is not None else [options.get("max_seqlen_q", 1)] * len(kv_lens)
            arguments["tree_mask"] = draw_trees(draw, each, padding)
        if sinks:
            arguments["sinks"] = draw.normal(heads, dtype=dtype if dtype not in FP8 else torch.bfloat16)
        for scale in scales:
            sizes = (kv_heads,) if scale_per_head else ()
            arguments[scale] = draw.uniform(*sizes, low=0.5, high=1.5)
        return {**arguments, **options}

    return make
