"""Device code that copies and clears whole pages."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _pointers(cache, page, stride_p, stride_a, stride_b, stride_c, at, PAGE: tl.constexpr):
    """Returns pointers to elements of page number ``page`` of a cache. ``at``: the elements' row-major indices in the page's
    three dimensions.
    """
    a, b, c = at // PAGE.middle, at % PAGE.middle // PAGE.inner, at % PAGE.inner
    return cache + page.to(tl.int64) * stride_p + (a.to(tl.int64) * stride_a + b * stride_b + c * stride_c)


@triton.jit
def copy_pages_kernel(
    source,
    cache,
    source_pages,
    target_pages,
    source_stride_p,
    source_stride_a,
    source_stride_b,
    source_stride_c,
    cache_stride_p,
    cache_stride_a,
    cache_stride_b,
    cache_stride_c,
    source_pages_stride,
    target_pages_stride,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies one block of one page; skips the pair of pages if either number is negative."""
    BLOCKS: tl.constexpr = (PAGE.size + BLOCK - 1) // BLOCK
    pair = (tl.program_id(0) // BLOCKS).to(tl.int64)
    old = tl.load(source_pages + pair * source_pages_stride)
    new = tl.load(target_pages + pair * target_pages_stride)
    if (old < 0) | (new < 0):
        return
    at = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = at < PAGE.size
    values = tl.load(
        _pointers(source, old, source_stride_p, source_stride_a, source_stride_b, source_stride_c, at, PAGE), mask=inside
    )
    tl.store(_pointers(cache, new, cache_stride_p, cache_stride_a, cache_stride_b, cache_stride_c, at, PAGE), values, mask=inside)


@triton.jit
def zero_pages_kernel(cache, pages, stride_p, stride_a, stride_b, stride_c, pages_stride, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Clears one block of one page; skips the page if its number is negative."""
    BLOCKS: tl.constexpr = (PAGE.size + BLOCK - 1) // BLOCK
    page = tl.load(pages + (tl.program_id(0) // BLOCKS).to(tl.int64) * pages_stride)
    if page < 0:
        return
    at = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    to = _pointers(cache, page, stride_p, stride_a, stride_b, stride_c, at, PAGE)
    tl.store(to, tl.zeros([BLOCK], cache.dtype.element_ty), mask=at < PAGE.size)
