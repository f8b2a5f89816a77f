"""Inputs for the cases of attention operators. Each function returns what a `Case` wants: a function of a `Draw`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel.workbench.recording import CapturedCall
from tokenspeed_kernel_base.cases import Draw, poisoned, recipe
from tokenspeed_kernel_base.checks import FP8

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
    **options: Any,
) -> Make:
    """Whole sequences, one after another. ``hint``: the lengths are repeated on the host."""

    def make(draw: Draw) -> dict[str, Any]:
        tokens = sum(lengths)
        cu_seqlens = draw.cumulative(lengths)
        arguments = {
            "q": draw.normal(tokens, heads, head_dim, dtype=dtype),
            "k": draw.normal(tokens, kv_heads, head_dim, dtype=dtype),
            "v": draw.normal(tokens, kv_heads, v_head_dim or head_dim, dtype=dtype),
            "cu_seqlens": cu_seqlens,
            **options,
        }
        if sinks:
            arguments["sinks"] = draw.normal(heads, dtype=dtype)
        if hint:
            arguments["cu_seqlens_cpu"] = cu_seqlens.tolist()
            arguments["max_seqlen"] = max(lengths, default=0)
        return arguments

    return make


def ragged_like(call: CapturedCall) -> Make:
    """Whole sequences like those of a captured call."""
    (tokens, heads, head_dim), (_, kv_heads, v_head_dim) = call.shape("q"), call.shape("v")
    lengths = call.parts("lengths", call.shape("cu_seqlens")[0] - 1, tokens)
    given = {"sinks": call.given("sinks"), "hint": call.given("cu_seqlens_cpu")}
    return ragged(lengths, heads, kv_heads, head_dim, v_head_dim, call.dtype("q"), **given)


def _paging(draw: Draw, kv_lens: Sequence[int], page_size: int, width: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Pages for sequences: page table, lengths, and which slots ``[pages, page_size]`` hold a token.

    Pages are shuffled, some belong to no one, and entries of the page table that no sequence reaches name no page.
    """
    counts = [-(-length // page_size) for length in kv_lens]
    pages = sum(counts) + 2
    free = iter(draw.permutation(pages).tolist())
    width = max(counts, default=0) + 1 if width is None else width
    rows = [[next(free) for _ in range(count)] + [-1] * (width - count) for count in counts]
    page_table = draw.tensor(rows, torch.int32).reshape(len(kv_lens), width)
    held = torch.zeros(pages, page_size, dtype=torch.bool, device=draw.device)
    for row, count, length in zip(page_table, counts, kv_lens, strict=True):
        slots = torch.arange(count * page_size, device=draw.device).view(count, page_size)
        held[row[:count].long()] = slots < length
    return page_table, draw.tensor(list(kv_lens), torch.int32), held


def _cache(draw: Draw, held: Tensor, *token: int, dtype: torch.dtype, stale: bool) -> Tensor:
    """A cache with ``token``-shaped tokens in the slots that hold one. ``stale``: NaN lies in all others."""
    values = draw.normal(*held.shape, *token, dtype=torch.float32 if dtype in FP8 else dtype)
    if stale:
        values[~held] = torch.nan
    return values.to(dtype)


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
    running_sums: bool = True,
    width: int | None = None,
    **options: Any,
) -> Make:
    """New tokens and a paged cache that holds them.

    Args:
        q_lens: new tokens of each sequence, for extending; None for decoding ``max_seqlen_q`` (or 1) tokens of each.
        kv_lora_rank: the cache is one of latents, and ``head_dim`` the width of one.
        scales: which of ``"q_scale"``, ``"k_scale"``... to give; ``scale_per_head``: one a kv head.
        stale: slots that hold no token hold NaN.
        running_sums: where there are q_lens, give ``cu_seqlens_kv`` too.
        width: entries of the page table for each sequence; one more than any has pages if not given.
    """

    def make(draw: Draw) -> dict[str, Any]:
        page_table, cache_seqlens, held = _paging(draw, kv_lens, page_size, width)
        stored = cache_dtype or dtype
        tokens = sum(q_lens) if q_lens is not None else len(kv_lens) * options.get("max_seqlen_q", 1)
        arguments: dict[str, Any] = {
            "q": draw.normal(tokens, heads, head_dim, dtype=dtype),
            "page_table": page_table,
            "cache_seqlens": cache_seqlens,
            "max_seqlen_k": max(kv_lens, default=0),
        }
        if kv_lora_rank is None:
            arguments["k_cache"] = _cache(draw, held, kv_heads, head_dim, dtype=stored, stale=stale)
            arguments["v_cache"] = _cache(draw, held, kv_heads, v_head_dim or head_dim, dtype=stored, stale=stale)
        else:
            arguments["kv_cache"] = _cache(draw, held, head_dim, dtype=stored, stale=stale)
            arguments["kv_lora_rank"] = kv_lora_rank
        if q_lens is not None:
            arguments["cu_seqlens_q"] = draw.cumulative(q_lens)
            if running_sums:
                arguments["cu_seqlens_kv"] = draw.cumulative(kv_lens)
            arguments["max_seqlen_q"] = max(q_lens, default=0)
        if sinks:
            arguments["sinks"] = draw.normal(heads, dtype=dtype if dtype not in FP8 else torch.bfloat16)
        for scale in scales:
            sizes = (kv_heads,) if scale_per_head else ()
            arguments[scale] = draw.uniform(*sizes, low=0.5, high=1.5)
        return {**arguments, **options}

    return make


def paged_like(call: CapturedCall) -> Make:
    """New tokens and a paged cache like those of a captured call, whose pages may have been shared. These are not."""
    cache = "kv_cache" if call.given("kv_cache") else "k_cache"
    tokens, heads, head_dim = call.shape("q")
    batch, width = call.shape("page_table")
    room = call.arguments["max_seqlen_k"]
    kv_lens = call.values("kv_lens", batch, room)
    options: dict[str, Any] = {}
    q_lens = None
    if call.given("cu_seqlens_q"):
        q_lens = call.parts("q_lens", batch, tokens)
        if call.arguments.get("is_causal", True):
            kv_lens = [max(kv_len, min(q_len, room)) for kv_len, q_len in zip(kv_lens, q_lens, strict=True)]
        options["running_sums"] = call.given("cu_seqlens_kv")
    else:
        options["max_seqlen_q"] = call.arguments["max_seqlen_q"]
    if cache == "kv_cache":
        options["kv_lora_rank"] = call.arguments["kv_lora_rank"]
    else:
        options["kv_heads"], options["v_head_dim"] = call.shape("v_cache")[2:]
    scales = [name for name in ("q_scale", "k_scale", "v_scale", "kv_scale") if call.given(name)]
    return paged(
        kv_lens, q_lens, heads, head_dim=head_dim, page_size=call.shape(cache)[1], dtype=call.dtype("q"),
        cache_dtype=call.dtype(cache), sinks=call.given("sinks"), scales=scales,
        scale_per_head=any(math.prod(call.shape(name)) > 1 for name in scales), width=width, **options,
    )  # fmt: skip


def lengths_read(cu_seqlens_q: Tensor | None, cache_seqlens: Tensor) -> dict[str, list[int]]:
    """The values that decide the work of paged attention."""
    kv_lens: list[int] = cache_seqlens.tolist()
    return {"kv_lens": kv_lens} if cu_seqlens_q is None else {"kv_lens": kv_lens, "q_lens": cu_seqlens_q.diff().tolist()}


def disturbed_pages(k_cache: Tensor, v_cache: Tensor, page_table: Tensor, cache_seqlens: Tensor) -> dict[str, Tensor]:
    """What `_disturbed` makes of a call with keys and values."""
    return _disturbed(page_table, cache_seqlens, k_cache=k_cache, v_cache=v_cache)


def disturbed_latent_pages(kv_cache: Tensor, page_table: Tensor, cache_seqlens: Tensor) -> dict[str, Tensor]:
    """What `_disturbed` makes of a call with latents."""
    return _disturbed(page_table, cache_seqlens, kv_cache=kv_cache)


def _disturbed(page_table: Tensor, cache_seqlens: Tensor, **caches: Tensor) -> dict[str, Tensor]:
    """A paged call with other values where none may matter: entries of the page table that no length reaches, and slots that hold
    no token. Entries name no page on a host, where looking one up fails; on a device, where it would be an illegal access, they
    name a page that is no sequence's, if there is one."""
    cache = next(iter(caches.values()))
    pages, page_size = cache.shape[:2]
    positions = torch.arange(page_table.shape[1] * page_size, device=cache.device).view(-1, page_size)
    reached = positions < cache_seqlens.view(-1, 1, 1)  # [batch, max_pages, page_size]
    named = page_table.long().clamp(min=0).unsqueeze(2).expand_as(reached) * page_size + positions % page_size
    held = torch.zeros(pages * page_size, dtype=torch.bool, device=cache.device)
    held[named[reached]] = True
    held = held.view(pages, page_size)
    free = (~held.any(1)).nonzero().flatten()
    elsewhere = torch.iinfo(page_table.dtype).max if not page_table.is_cuda else int(free[0]) if len(free) else 0
    entries = reached.any(2)
    changed = {"page_table": page_table if elsewhere == 0 else torch.where(entries, page_table, elsewhere)}
    for name, values in caches.items():
        changed[name] = poisoned(values, ~held)
    return changed
