"""Removes the gaps that rejected draft tokens leave in the paged cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, absent_ids, nbytes, recipe
from tokenspeed_kernel_base.checks import FLOATS, FP8, Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.attention._checks import check_values_paging
from tokenspeed_kernel_base.ops.attention._inputs import draw_cache, draw_paging
from tokenspeed_kernel_base.ops.attention._softmax import hidden_pages
from tokenspeed_kernel_base.variation import Variation, Want

_DTYPES = FLOATS | FP8 | {torch.uint8}


@operator(
    "kvcache",
    "compact_kv_cache",
    formats=("k_cache",),
    traits={"token_size": int, "page_size": int, "nodes": int, "values": bool, "v_token_size": int},
    mutates=("k_cache", "v_cache"),
    exact=True,
    varying=("batch",),
    capacity=("pages", "max_pages"),
)
def compact_kv_cache(
    k_cache: Tensor, v_cache: Tensor | None, page_table: Tensor, cache_seqlens: Tensor, path: Tensor, counts: Tensor
) -> None:
    """Compacts the cached tokens of accepted draft-tree nodes in place, directly after the earlier tokens.

    During tree verification, the cache holds all nodes of the draft tree as the last tokens of their sequence. Node i is at
    position ``cache_seqlens - nodes + i``. The path lists the accepted nodes. For all i below counts, the token of node ``path[i]``
    moves to the position of node i. The result is as if all tokens were read before any is written. The sequence then has
    ``cache_seqlens - nodes + counts`` tokens; the content of later positions is unspecified. Everything else in the cache is
    unchanged. If the draft is a chain, nothing moves.

    Call the operator once for each layer. Keys stay valid without a new rotation, because RoPE used the depth of the node, which is
    its position after the move.

    Args:
        k_cache: ``[pages, page_size, kv_heads, head_dim]``, or ``[pages, page_size, width]`` of latents. Any float dtype, 8-bit
            floats and uint8; bits are copied. Written to. May be strided.
        v_cache: the value cache, k_cache's dtype ``[pages, page_size, kv_heads, v_head_dim]``; otherwise as k_cache. None if there
            are no values.
        page_table: int32 ``[batch, max_pages]``: position j of sequence b is in slot ``j % page_size`` of page ``page_table[b, j //
            page_size]``. Entries that cover none of the last ``nodes`` positions are not read. Sequences must not share pages that
            hold their last ``nodes`` positions.
        cache_seqlens: int32 ``[batch]``, tokens of each sequence in the cache, all nodes included, at most
            ``max_pages * page_size``. Nothing moves in a sequence with fewer tokens than nodes, for example one that pads the
            batch.
        path: int32 ``[batch, nodes]``, as returned by `verify_draft_tokens`, in ascending order. Entries outside 0 to
            ``nodes - 1`` are ignored.
        counts: int32 ``[batch]``: the number of valid entries of each path.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is written. Values of page_table and
            cache_seqlens are checked only if they lie in host memory.

    Example:
        Three tokens, then four nodes, in one page of eight; nodes 0, 2 and 3 were accepted.

        >>> import torch
        >>> from tokenspeed_kernel import compact_kv_cache
        >>> ints = lambda *values: torch.tensor(values, dtype=torch.int32)
        >>> kv_cache = torch.tensor([1, 2, 3, 10, 11, 12, 13, 0.0]).view(1, 8, 1)
        >>> compact_kv_cache(kv_cache, None, ints(0).view(1, 1), ints(7), path=ints(0, 2, 3, -1).view(1, 4), counts=ints(3))
        >>> kv_cache.flatten()
        tensor([ 1.,  2.,  3., 10., 12., 13., 13.,  0.])

    Safe in CUDA graphs, except with backends tagged ``waits`` and with the reference, which reads the lengths on the host.
    """
    nodes, page_size = path.shape[1], k_cache.shape[1]
    at = torch.arange(nodes, device=path.device)
    first = cache_seqlens.long().unsqueeze(1) - nodes
    source = torch.where((at < counts.unsqueeze(1)) & (path >= 0) & (path < nodes), path.long(), at)
    used = (first >= 0).flatten()
    if not page_table.numel() or not used.any():
        return
    pages = page_table[used].long()
    old, new = ((first + places)[used] for places in (source, at))  # tokens that do not move are rewritten in place
    from_page, to_page = pages.gather(1, old // page_size), pages.gather(1, new // page_size)
    for cache in (k_cache, v_cache):
        if cache is not None:
            stored = cache.view(torch.uint8) if cache.dtype in FP8 else cache  # on some devices PyTorch indexes fp8 only as uint8
            stored[to_page, new % page_size] = stored[from_page, old % page_size]


@compact_kv_cache.traits
def _(k_cache: Tensor, v_cache: Tensor | None, path: Tensor) -> dict[str, object]:
    traits: dict[str, object] = {
        "token_size": k_cache.shape[2:].numel(),
        "page_size": k_cache.shape[1],
        "nodes": path.shape[1],
        "values": v_cache is not None,
    }
    return traits if v_cache is None else {**traits, "v_token_size": v_cache.shape[2:].numel()}


@compact_kv_cache.check
def _(
    check: Checker,
    k_cache: Tensor,
    v_cache: Tensor | None,
    page_table: Tensor,
    cache_seqlens: Tensor,
    path: Tensor,
    counts: Tensor,
) -> None:
    latents = k_cache.dim() == 3
    check.tensor("k_cache", k_cache, "pages page_size width" if latents else "pages page_size kv_heads head_dim", _DTYPES)
    check.require(check["page_size"] > 0, "k_cache", "of a page_size > 0", str(list(k_cache.shape)))
    if v_cache is not None:
        heads = "v_width" if latents else "kv_heads v_head_dim"
        check.tensor("v_cache", v_cache, f"pages page_size {heads}", k_cache.dtype)
    check.tensor("page_table", page_table, "batch max_pages", torch.int32)
    check.tensor("cache_seqlens", cache_seqlens, "batch", torch.int32)
    check.tensor("path", path, "batch nodes", torch.int32)
    check.require(check["nodes"] > 0, "path", "of shape [batch, nodes] with nodes > 0", str(list(path.shape)))
    check.tensor("counts", counts, "batch", torch.int32)


def _unread(k_cache: Tensor, page_table: Tensor, cache_seqlens: Tensor, path: Tensor) -> Tensor:
    """Returns the mask of page table entries that cover only positions before the last ``nodes`` positions."""
    return hidden_pages(cache_seqlens, path.shape[1], 0, page_table.shape[1], k_cache.shape[1])


@compact_kv_cache.check_values(host=("page_table", "cache_seqlens"))
def _(check: Checker, k_cache: Tensor, page_table: Tensor | None, cache_seqlens: Tensor | None, path: Tensor) -> None:
    room = k_cache.shape[1] * (page_table.shape[1] if page_table is not None else 1 << 31)
    if cache_seqlens is not None and cache_seqlens.numel() and int(cache_seqlens.max()) > room:
        check.fail("cache_seqlens", f"at most {room}, the tokens that the pages of a sequence hold", int(cache_seqlens.max()))
    if page_table is not None and cache_seqlens is not None:
        page_table = page_table.masked_fill(_unread(k_cache, page_table, cache_seqlens, path), -1)
    check_values_paging(check, page_table, cache_seqlens, room, k_cache, "k_cache", 0, path.shape[1])


@compact_kv_cache.fake
def _() -> None:
    return None


def _draw_paths(draw: Draw, batch: int, nodes: int) -> dict[str, Tensor]:
    """Draws ascending paths of random lengths that start at node 0."""
    kept = draw.uniform(batch, nodes) < draw.uniform(batch, 1)
    kept[:, 0] = True
    at = torch.arange(nodes, device=draw.device)
    path = torch.where(kept, at, nodes).sort(dim=1).values
    counts = kept.sum(1).int()
    return {"path": torch.where(path < nodes, path, -1).int(), "counts": counts}


@recipe
def _inputs(
    kv_lens: Sequence[int],
    nodes: int,
    token: tuple[int, ...],
    v_token: tuple[int, ...] | None = None,
    page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    freed: bool = False,
) -> Callable[[Draw], dict[str, Any]]:
    """Draws the arguments. ``token``: the shape of a token's keys. With ``freed``, page table entries for positions before the
    nodes are -1."""

    def make(draw: Draw) -> dict[str, Any]:
        page_table, cache_seqlens, held = draw_paging(draw, kv_lens, page_size, None)
        if freed:
            starts = torch.arange(1, page_table.shape[1] + 1, device=draw.device) * page_size
            page_table = page_table.masked_fill(starts <= (cache_seqlens - nodes).unsqueeze(1), -1)
        return {
            "k_cache": draw_cache(draw, held, *token, dtype=dtype),
            "v_cache": None if v_token is None else draw_cache(draw, held, *v_token, dtype=dtype),
            "page_table": page_table,
            "cache_seqlens": cache_seqlens,
            **_draw_paths(draw, len(kv_lens), nodes),
        }

    return make


@compact_kv_cache.cases
def _() -> list[Case]:
    fp8 = torch.float8_e4m3fn
    gpt_oss: tuple[tuple[int, int], tuple[int, int]] = ((8, 64), (8, 64))
    llama: tuple[tuple[int, int], tuple[int, int]] = ((8, 128), (8, 128))
    return [
        Case("one node, float32", _inputs([3], 1, (1, 4), (1, 4), 4, torch.float32)),
        Case("gpt-oss-120b, trees of 8", _inputs([40, 8, 100], 8, *gpt_oss)),
        Case("fewer tokens than nodes, pages of 1", _inputs([9, 3, 0, 6], 6, (2, 24), (2, 16), 1, torch.float32)),
        Case("odd widths, pages of 5, float64", _inputs([19, 33], 11, (3, 5), (3, 7), 5, torch.float64)),
        Case("deepseek-v3 latents, trees of 16, pages of 64", _inputs([70, 16, 129], 16, (576,), None, 64)),
        Case("fp8, freed pages before the nodes", _inputs([90, 40], 20, (4, 32), (4, 32), 16, fp8, freed=True)),
        Case("no sequences", _inputs([], 4, (2, 8), (2, 8))),
        Case("llama-3, trees of 64, 64 sequences", _inputs([2048] * 64, 64, *llama, 64), large=True),
        Case("gpt-oss-120b, trees of 16, 64 sequences", _inputs([4096] * 64, 16, *gpt_oss, 64), large=True),
        Case("deepseek-v3 latents, trees of 16, 128 sequences", _inputs([2048] * 128, 16, (576,), None, 64), large=True),
    ]


@compact_kv_cache.vary
def _(
    variation: Variation,
    k_cache: Tensor,
    v_cache: Tensor | None,
    page_table: Tensor,
    cache_seqlens: Tensor,
    path: Tensor,
    counts: Tensor,
) -> dict[str, Any]:
    (batch, nodes), draw, page_size = path.shape, variation.draw, k_cache.shape[1]
    if variation.want is Want.OTHER:
        return _draw_paths(draw, batch, nodes)
    if variation.want is Want.UNUSED:  # path entries that are not counted, and page table entries that are not read
        unnamed = torch.arange(nodes, device=path.device) >= counts.unsqueeze(1)
        unread = _unread(k_cache, page_table, cache_seqlens, path)
        return {
            "path": absent_ids(path, unnamed | (path < 0) | (path >= nodes), nodes),
            "page_table": page_table.masked_fill(unread, 1 << 30),
        }
    room = page_table.shape[1] * page_size
    lengths = [min(room, length) for length in variation.values("kv_lens", batch, nodes)]
    table, seqlens, held = draw_paging(draw, lengths, page_size, page_table.shape[1])
    made: dict[str, Any] = {"page_table": table, "cache_seqlens": seqlens, **_draw_paths(draw, batch, nodes)}
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache is not None:
            made[name] = draw_cache(draw, held, *cache.shape[2:], dtype=cache.dtype)
    return made


@compact_kv_cache.work
def _(cache_seqlens: Tensor) -> dict[str, list[int]]:
    return {"kv_lens": cache_seqlens.tolist()}


@compact_kv_cache.cost
def _(k_cache: Tensor, v_cache: Tensor | None, cache_seqlens: Tensor, path: Tensor, counts: Tensor) -> Cost:
    at = torch.arange(path.shape[1], device=path.device)
    moved = int(((at < counts.unsqueeze(1)) & (path != at) & (cache_seqlens >= path.shape[1]).unsqueeze(1)).sum())
    token = sum(cache.shape[2:].numel() * cache.element_size() for cache in (k_cache, v_cache) if cache is not None)
    return Cost(flops=0.0, bytes=nbytes(path, counts, cache_seqlens) + 2.0 * moved * token)
