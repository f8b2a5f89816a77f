"""Host code shared by kernels that copy or clear whole pages, which they view as arrays of integers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import FLOATS, FP8
from tokenspeed_kernel_base.signature import format_signatures

PAGES = format_signatures("cache", "dense", (*FLOATS, torch.float64, *FP8, torch.uint8))
"""Formats of caches whose pages can be copied or cleared."""

BLOCK, WARPS = 4096, 8
"""The number of integers that a program copies or clears, and its number of warps."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Page(NamedTuple):
    """Numbers of elements of a page: in its last axis, in its last two axes, and in all three axes."""

    inner: int
    middle: int
    size: int


def as_integers(*caches: Tensor) -> list[Tensor]:
    """Returns views of caches, which have the same page shape, as integers ``[pages, a, b, c]``.

    The integers are int64 if every page of every cache is contiguous and aligned to 8 bytes. Otherwise the integers are as wide as
    the elements.
    """
    narrow = [cache.view(_INTEGERS[cache.element_size()]) for cache in caches]
    page = caches[0].shape[1:].numel()
    size = caches[0].element_size()
    if page * size % 8 == 0 and all(_lie_in_words(cache) for cache in narrow):
        return [cache.as_strided((len(cache), page), (cache.stride(0), 1)).view(torch.int64)[:, None, None] for cache in narrow]
    return [cache.unsqueeze(2) if cache.dim() == 3 else cache for cache in narrow]


def _lie_in_words(cache: Tensor) -> bool:
    """Whether each page of a cache is contiguous and begins at a multiple of 8 bytes."""
    size = cache.element_size()
    dense = cache[0].is_contiguous() if len(cache) else False
    return dense and cache.stride(0) * size % 8 == 0 and cache.data_ptr() % 8 == 0 and cache.storage_offset() * size % 8 == 0


def page_of(cache: Tensor) -> Page:
    """Returns the `Page` of a cache ``[pages, a, b, c]``."""
    _, a, b, c = cache.shape
    return Page(c, b * c, a * b * c)
