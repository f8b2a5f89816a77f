"""Code shared by operators on whole pages of a cache."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Draw
from tokenspeed_kernel_base.checks import FLOATS, FP8, INTS, Checker

PAGE_DTYPES = FLOATS | FP8 | {torch.uint8}
"""Dtypes of caches whose pages can be moved; bits are copied unchanged."""


def draw_table(draw: Draw, batch: int, max_pages: int) -> Tensor:
    """Draws a page table int32 ``[batch, max_pages]``, in which about one of five entries is -1."""
    return draw.integers(-250, 1000, batch, max_pages, dtype=torch.int32).clamp(min=-1)


def as_bits(cache: Tensor) -> Tensor:
    """Views 8-bit floats as bytes, which every backend can index; other dtypes are unchanged."""
    return cache.view(torch.uint8) if cache.dtype in FP8 else cache


def check_cache(check: Checker, name: str, cache: Tensor, count: str) -> None:
    """Checks a cache ``[pages, page_size, width]`` or ``[pages, page_size, kv_heads, head_dim]``.

    ``count`` names the number of pages."""
    check.tensor(name, cache, f"{count} page_size {'width' if cache.dim() == 3 else 'kv_heads head_dim'}", PAGE_DTYPES)


def check_page_numbers(check: Checker, name: str, numbers: Tensor) -> None:
    """Checks the dtype and shape of page indices: int32 or int64 ``[count]``."""
    check.tensor(name, numbers, "count", INTS)


def check_numbers(check: Checker, name: str, numbers: Tensor | None, cache: Tensor, distinct: bool) -> None:
    """Checks page indices in host memory.

    Each index must be negative or less than the cache's number of pages. With ``distinct``, no index may occur twice."""
    if numbers is None or not numbers.numel():
        return
    largest = int(numbers.max())
    if largest >= len(cache):
        check.fail(name, f"below {len(cache)}, the number of pages (negative: skipped)", largest)
    ordered = numbers.sort().values
    twice = (ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)
    if distinct and twice.any():
        check.fail(name, "of distinct pages (negative: skipped)", f"page {int(ordered[1:][twice][0])} twice")
