"""Zeroes whole pages of a cache."""

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
    "zero_kv_pages",
    formats=("cache",),
    traits={"page_bytes": int},
    mutates=("cache",),
    exact=True,
    varying=("count",),
    capacity=("pages",),
)
def zero_kv_pages(cache: Tensor, pages: Tensor) -> None:
    """Writes zeros to whole pages of a cache in place; everything else in the cache is unchanged.

    Pages need not be cleared before use, because slots that hold no token never affect attention. Use this operator if data of
    another request must not stay in a page.

    Args:
        cache: ``[pages, page_size, kv_heads, head_dim]``, or ``[pages, page_size, width]`` of latents. Any float dtype, 8-bit
            floats and uint8. Written to. May be strided.
        pages: int32 or int64 ``[count]``, each less than the number of pages; negative indices are skipped.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is written. Values of pages are checked
            only if they lie in host memory.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import zero_kv_pages
        >>> cache = torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1)
        >>> zero_kv_pages(cache, torch.tensor([1, -1]))
        >>> cache.flatten()
        tensor([1., 0., 3.])

    Safe in CUDA graphs.
    """
    if not pages.numel() or not cache.numel():
        return
    # Selecting the valid indices by a mask would synchronise with the device. Instead each negative index repeats the first valid
    # index. If no index is valid, page 0 is written back.
    named = pages >= 0
    target = pages.long()[torch.where(named, torch.arange(len(pages), device=pages.device), named.int().argmax())].clamp(min=0)
    stored = as_bits(cache)
    stored[target] = torch.where(named.any(), torch.zeros_like(stored[target]), stored[target])


@zero_kv_pages.traits
def _(cache: Tensor) -> dict[str, object]:
    return {"page_bytes": cache.shape[1:].numel() * cache.element_size()}


@zero_kv_pages.check
def _(check: Checker, cache: Tensor, pages: Tensor) -> None:
    check_cache(check, "cache", cache, "pages")
    check_page_numbers(check, "pages", pages)


@zero_kv_pages.check_values(host=("pages",))
def _(check: Checker, cache: Tensor, pages: Tensor | None) -> None:
    check_numbers(check, "pages", pages, cache, distinct=False)


@zero_kv_pages.fake
def _() -> None:
    return None


@recipe
def _inputs(
    count: int, pages: int, page: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, page_dtype: torch.dtype = torch.int64
) -> Callable[[Draw], dict[str, Any]]:
    def make(draw: Draw) -> dict[str, Any]:
        numbers = draw.integers(0, pages, count, dtype=page_dtype)
        numbers[3::4] = -1
        return {"cache": draw.normal(pages, *page, dtype=dtype), "pages": numbers}

    return make


@zero_kv_pages.cases
def _() -> list[Case]:
    fp8 = torch.float8_e4m3fn
    return [
        Case("one page, float32", _inputs(1, 2, (4, 2, 4), torch.float32)),
        Case("gpt-oss-120b", _inputs(7, 20, (16, 8, 64))),
        Case("deepseek-v3 latents, int32 pages", _inputs(5, 6, (64, 576), page_dtype=torch.int32)),
        Case("odd sizes, fp8", _inputs(9, 12, (5, 3, 7), fp8)),
        Case("odd sizes, float16", _inputs(9, 12, (5, 3, 7), torch.float16)),
        Case("float64", _inputs(3, 9, (4, 2, 6), torch.float64)),
        Case("no pages", _inputs(0, 4, (4, 2, 8))),
        Case("llama-3, 256 pages", _inputs(256, 4096, (64, 8, 128)), large=True),
        Case("deepseek-v3 latents, 2048 pages", _inputs(2048, 8192, (64, 576)), large=True),
    ]


@zero_kv_pages.vary
def _(variation: Variation, cache: Tensor, pages: Tensor) -> dict[str, Tensor]:
    if variation.want is Want.UNUSED:
        return {"pages": absent_ids(pages, pages < 0)}
    return {"pages": variation.draw.integers(-1, len(cache), len(pages), dtype=pages.dtype)}


@zero_kv_pages.cost
def _(cache: Tensor, pages: Tensor) -> Cost:
    written = len({page for page in pages.tolist() if page >= 0}) * cache.shape[1:].numel() * cache.element_size()
    return Cost(flops=0.0, bytes=float(written + nbytes(pages)))
