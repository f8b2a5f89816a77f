"""Copies whole pages within a cache or between two caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, absent_ids, nbytes, recipe
from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.kvcache.pages import as_bits, check_cache, check_numbers, check_page_numbers
from tokenspeed_kernel_base.variation import Variation, Want


@operator(
    "kvcache",
    "copy_kv_pages",
    formats=("cache",),
    traits={"page_bytes": int, "other_source": bool},
    mutates=("cache",),
    exact=True,
    varying=("count",),
    capacity=("pages", "source_pages_in_all"),
)
def copy_kv_pages(cache: Tensor, source_pages: Tensor, target_pages: Tensor, source: Tensor | None = None) -> None:
    """Copies whole pages into a cache in place, from the same cache or from another one with pages of the same size.

    Page ``source_pages[i]`` of source is copied to page ``target_pages[i]`` of the cache. If either index is negative, nothing is
    copied for i. One use is copy on write, when sequences stop sharing a prefix. With a staging tensor as source or target, the
    operator scatters or gathers pages: `tokenspeed_kernel.HostPages` uses this to move pages to host memory and back.

    Args:
        cache: ``[pages, page_size, kv_heads, head_dim]``, or ``[pages, page_size, width]`` of latents. Any float dtype, 8-bit
            floats and uint8; bits are copied. Written to. May be strided.
        source_pages: int32 or int64 ``[count]``, page indices of source, each less than its number of pages.
        target_pages: int32 or int64 ``[count]``, page indices of cache, each less than its number of pages. Targets of pairs that
            are copied must be distinct. Without ``source`` no target may be a source page: the content of a page that one call
            reads and writes is undefined afterwards.
        source: cache's dtype and page shape, ``[source_pages_in_all, ...]``; must not overlap cache. None: the cache itself.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is written. Values of pages are checked
            only if they lie in host memory.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import copy_kv_pages
        >>> cache = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(4, 1, 1)
        >>> copy_kv_pages(cache, torch.tensor([0, -1]), torch.tensor([2, 3]))
        >>> cache.flatten()
        tensor([1., 2., 1., 4.])

    Safe in CUDA graphs.
    """
    origin = cache if source is None else source
    if not source_pages.numel() or not cache.numel() or not origin.numel():
        return
    copied = (source_pages >= 0) & (target_pages >= 0)
    # Selecting the copied pairs by a mask would synchronise with the device. Instead each skipped pair repeats the first copied
    # pair. If no pair is copied, page 0 is written back to itself.
    first = copied.int().argmax()
    pair = torch.where(copied, torch.arange(len(copied), device=copied.device), first)
    target = target_pages.long()[pair].clamp(min=0)
    values = as_bits(origin)[source_pages.long()[pair].clamp(min=0)]
    stored = as_bits(cache)
    stored[target] = torch.where(copied.any(), values, stored[target])


@copy_kv_pages.traits
def _(cache: Tensor, source: Tensor | None) -> dict[str, object]:
    return {"page_bytes": cache.shape[1:].numel() * cache.element_size(), "other_source": source is not None}


@copy_kv_pages.check
def _(check: Checker, cache: Tensor, source_pages: Tensor, target_pages: Tensor, source: Tensor | None) -> None:
    check_cache(check, "cache", cache, "pages")
    check_page_numbers(check, "source_pages", source_pages)
    check_page_numbers(check, "target_pages", target_pages)
    if source is not None:
        check_cache(check, "source", source, "source_pages_in_all")
        check.dtype("source", source, cache.dtype)
        alike = source.shape[1:] == cache.shape[1:]
        check.require(alike, "source", f"of pages {list(cache.shape[1:])} like cache", str(list(source.shape)))


@copy_kv_pages.check_values(host=("source_pages", "target_pages"))
def _(check: Checker, cache: Tensor, source_pages: Tensor | None, target_pages: Tensor | None, source: Tensor | None) -> None:
    check_numbers(check, "source_pages", source_pages, cache if source is None else source, distinct=False)
    if source_pages is None or target_pages is None:
        return
    check_numbers(check, "target_pages", torch.where(source_pages >= 0, target_pages, -1), cache, distinct=True)
    copied = (source_pages >= 0) & (target_pages >= 0)
    both = torch.isin(target_pages[copied], source_pages[copied])
    if source is None and both.any():
        check.fail(
            "target_pages",
            "distinct from source_pages, because source is None",
            f"page {int(target_pages[copied][both][0])} in both",
        )


@copy_kv_pages.fake
def _() -> None:
    return None


def _draw_pairs(draw: Draw, count: int, pages: int, source_pages: int | None) -> dict[str, Tensor]:
    """Draws distinct target pages; every fifth is -1. No source page is also a target, unless sources belong to another cache."""
    order = draw.permutation(pages)
    count_of_targets = min(count, pages if source_pages is not None else pages - 1)
    target = torch.full((count,), -1, dtype=torch.int64, device=draw.device)
    target[:count_of_targets] = order[:count_of_targets]
    target[4::5] = -1
    others = order[count_of_targets:]
    source = draw.integers(0, source_pages or len(others), count)
    return {"source_pages": source if source_pages else others[source], "target_pages": target}


@recipe
def _inputs(
    count: int, pages: int, page: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, source_pages: int | None = None
) -> Callable[[Draw], dict[str, Any]]:
    """Draws the arguments. ``page``: the shape of a page; ``source_pages``: the number of pages of a separate source cache."""

    def make(draw: Draw) -> dict[str, Any]:
        arguments = {"cache": draw.normal(pages, *page, dtype=dtype), **_draw_pairs(draw, count, pages, source_pages)}
        return arguments if source_pages is None else {**arguments, "source": draw.normal(source_pages, *page, dtype=dtype)}

    return make


@recipe
def _int32(make: Callable[[Draw], dict[str, Any]]) -> Callable[[Draw], dict[str, Any]]:
    return lambda draw: {name: x.int() if name.endswith("_pages") else x for name, x in make(draw).items()}


@copy_kv_pages.cases
def _() -> list[Case]:
    fp8 = torch.float8_e4m3fn
    return [
        Case("one page, float32", _inputs(1, 2, (4, 2, 4), torch.float32)),
        Case("gpt-oss-120b, pages part", _inputs(7, 20, (16, 8, 64))),
        Case("deepseek-v3 latents, gathered", _inputs(5, 6, (64, 576), source_pages=9)),
        Case("odd sizes, float16, int32 pages", _int32(_inputs(9, 30, (5, 3, 7), torch.float16))),
        Case("odd sizes, fp8, from another cache", _inputs(9, 12, (5, 3, 7), fp8, source_pages=4)),
        Case("float64", _inputs(3, 9, (4, 2, 6), torch.float64)),
        Case("no pages", _inputs(0, 4, (4, 2, 8))),
        Case("llama-3, 256 pages part", _inputs(256, 4096, (64, 8, 128)), large=True),
        Case("gpt-oss-120b, 2048 pages gathered", _inputs(2048, 2048, (64, 8, 64), source_pages=8192), large=True),
        Case("deepseek-v3 latents, 1024 pages spread, fp8", _inputs(1024, 8192, (64, 576), fp8, source_pages=1024), large=True),
    ]


@copy_kv_pages.vary
def _(variation: Variation, cache: Tensor, source_pages: Tensor, target_pages: Tensor, source: Tensor | None) -> dict[str, Tensor]:
    if variation.want is Want.UNUSED:
        given = {"source_pages": source_pages, "target_pages": target_pages}
        return {name: absent_ids(pages, pages < 0) for name, pages in given.items()}
    other = None if source is None else len(source)
    pairs = _draw_pairs(variation.draw, len(source_pages), len(cache), other)
    return {name: pages.to(source_pages.dtype) for name, pages in pairs.items()}


@copy_kv_pages.cost
def _(cache: Tensor, source_pages: Tensor, target_pages: Tensor) -> Cost:
    copied = int(((source_pages >= 0) & (target_pages >= 0)).sum())
    page = cache.shape[1:].numel() * cache.element_size()
    return Cost(flops=0.0, bytes=2.0 * copied * page + nbytes(source_pages, target_pages))
