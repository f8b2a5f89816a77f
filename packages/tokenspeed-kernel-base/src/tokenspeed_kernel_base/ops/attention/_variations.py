"""The ``vary`` hooks that attention operators share: these hooks draw other legal arguments for a call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import poisoned
from tokenspeed_kernel_base.ops.attention._inputs import draw_cache, draw_paging, draw_trees
from tokenspeed_kernel_base.ops.attention._softmax import hidden_pages
from tokenspeed_kernel_base.variation import Variation, Want

_CACHES = ("k_cache", "v_cache", "kv_cache", "kv_scale_cache", "rope_cache")


def lengths_read(cu_seqlens_q: Tensor | None, cache_seqlens: Tensor) -> dict[str, list[int]]:
    """For ``work`` hooks: returns the sequence lengths, which determine the work of paged attention."""
    kv_lens: list[int] = cache_seqlens.tolist()
    return {"kv_lens": kv_lens} if cu_seqlens_q is None else {"kv_lens": kv_lens, "q_lens": cu_seqlens_q.diff().tolist()}


def vary_ragged(variation: Variation, **arguments: Any) -> dict[str, Any]:
    """The ``vary`` hook of operators for whole sequences. The ``work`` hook of these operators returns ``lengths``, and
    ``kv_lengths`` if keys and queries differ in length."""
    if variation.want is not Want.CAPTURED:
        return {}
    lengths = variation.parts("lengths", len(arguments["cu_seqlens"]) - 1, len(arguments["q"]), padded=True)
    cu_seqlens = variation.draw.cumulative(lengths)
    hint = None if arguments["cu_seqlens_cpu"] is None else cu_seqlens.tolist()
    made = {"cu_seqlens": cu_seqlens, "cu_seqlens_cpu": hint}
    if arguments.get("cu_seqlens_kv") is not None:
        kv_lengths = variation.parts("kv_lengths", len(arguments["cu_seqlens_kv"]) - 1, len(arguments["k"]), padded=True)
        made["cu_seqlens_kv"] = variation.draw.cumulative(kv_lengths)
    return made


def vary_paged(variation: Variation, **arguments: Any) -> dict[str, Any]:
    """The ``vary`` hook of operators that attend to a paged cache. The ``work`` hook of these operators is `lengths_read`."""
    caches = {name: arguments[name] for name in _CACHES if arguments.get(name) is not None}
    if variation.want is Want.CAPTURED:
        return _captured(variation, caches, arguments)
    if variation.want is Want.UNUSED:
        return _without_unused(arguments, caches)
    return {**_shortened(arguments), **_moved(arguments["page_table"], caches)}


def _captured(variation: Variation, caches: dict[str, Tensor], arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Draws arguments with the captured sequence lengths, and as many pages as these lengths need. Captured sequences may have
    shared pages; the drawn sequences do not.
    """
    draw, table, offsets = variation.draw, arguments["page_table"], arguments.get("cu_seqlens_q")
    batch, width = table.shape
    room = arguments["max_seqlen_k"]
    kv_lens = variation.values("kv_lens", batch, room)
    made = {}
    if offsets is not None:
        q_lens = variation.parts("q_lens", batch, len(arguments["q"]), padded=True)
        made["cu_seqlens_q"] = draw.cumulative(q_lens)
        if arguments.get("is_causal", True):  # a sequence includes its new tokens
            kv_lens = [max(kv_len, min(q_len, room)) for kv_len, q_len in zip(kv_lens, q_lens, strict=True)]
    if arguments.get("cu_seqlens_kv") is not None:
        made["cu_seqlens_kv"] = draw.cumulative(kv_lens)
    if arguments.get("tree_mask") is not None:
        q_lens = q_lens if offsets is not None else [arguments["max_seqlen_q"]] * batch
        made["tree_mask"] = draw_trees(draw, q_lens, len(arguments["q"]) - sum(q_lens))
    page_size = next(iter(caches.values())).shape[1]
    made["page_table"], made["cache_seqlens"], held = draw_paging(draw, kv_lens, page_size, width)
    for name, cache in caches.items():
        drawn = draw_cache(draw, held, *cache.shape[2:], dtype=cache.dtype)
        made[name] = drawn.abs() if name == "kv_scale_cache" else drawn
    return made


def _shortened(arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Shortens cached sequences by a third, but not below their new tokens. Sequences with freed pages keep their length, because
    a shorter sequence would see the freed pages."""
    lengths, new = arguments["cache_seqlens"], _new_tokens(arguments)
    shorter = torch.minimum(lengths, torch.maximum(new, lengths * 2 // 3))
    table = arguments["page_table"]
    freed = hidden_pages(lengths, 0, 0, table.shape[1], _page_size(arguments)) & (table == -1)
    shorter = torch.where(freed.any(1), lengths, shorter)
    made = {"cache_seqlens": shorter}
    sums = arguments.get("cu_seqlens_kv")
    if sums is not None:
        made["cu_seqlens_kv"] = torch.cat((sums[:1], shorter.cumsum(0).to(sums.dtype)))
    return made


def _new_tokens(arguments: dict[str, Any]) -> Tensor:
    """Returns the number of new tokens of each sequence, as a tensor."""
    lengths, offsets = arguments["cache_seqlens"], arguments.get("cu_seqlens_q")
    return torch.full_like(lengths, arguments["max_seqlen_q"]) if offsets is None else offsets.diff().to(lengths.dtype)


def _page_size(arguments: dict[str, Any]) -> int:
    return int(next(arguments[name] for name in _CACHES if name in arguments).shape[1])


def _moved(page_table: Tensor, caches: dict[str, Tensor]) -> dict[str, Tensor]:
    """Moves every page to the next index, and changes the page table accordingly."""
    pages = len(next(iter(caches.values())))
    made = {"page_table": torch.where(page_table >= 0, (page_table + 1) % max(pages, 1), page_table)}
    for name, cache in caches.items():
        narrow = cache.element_size() == 1  # on some devices PyTorch rolls 1-byte dtypes only as uint8
        made[name] = cache.contiguous().view(torch.uint8).roll(1, 0).view(cache.dtype) if narrow else cache.roll(1, 0)
    return made


def _without_unused(arguments: dict[str, Any], caches: dict[str, Tensor]) -> dict[str, Tensor]:
    """Fills unused memory with values that show a wrong read. Slots that hold no token hold NaN. Page table entries are -1 where
    the window hides a whole page. On the host, page table entries past a sequence's length are out of range, so that an index error
    shows a read of such an entry. On a device such a read would be an illegal access. So there these entries hold the index of an
    unused page. They stay unchanged if page 0 is the only unused page.
    """
    page_table, cache_seqlens = arguments["page_table"], arguments["cache_seqlens"]
    pages, page_size = next(iter(caches.values())).shape[:2]
    positions = torch.arange(page_table.shape[1] * page_size, device=page_table.device).view(-1, page_size)
    hidden = hidden_pages(cache_seqlens, _new_tokens(arguments), arguments.get("window_left", -1), page_table.shape[1], page_size)
    page_table = page_table.masked_fill(hidden, -1)
    reached = (positions < cache_seqlens.view(-1, 1, 1)) & ~hidden.unsqueeze(2)  # [batch, max_pages, page_size]
    named = page_table.long().clamp(min=0).unsqueeze(2).expand_as(reached) * page_size + positions % page_size
    held = torch.zeros(pages * page_size, dtype=torch.bool, device=page_table.device)
    held[named[reached]] = True
    held = held.view(pages, page_size)
    free = (~held.any(1)).nonzero().flatten()
    elsewhere = torch.iinfo(page_table.dtype).max if not page_table.is_cuda else int(free[0]) if len(free) else 0
    changed = {"page_table": page_table if elsewhere == 0 else torch.where(reached.any(2) | hidden, page_table, elsewhere)}
    return {**changed, **{name: poisoned(cache, ~held) for name, cache in caches.items()}}
