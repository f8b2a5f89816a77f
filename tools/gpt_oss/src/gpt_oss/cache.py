"""The paged key-value cache: its tensors, and the allocator of its pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from gpt_oss.config import Config
from gpt_oss.fields import COUNT, FLOAT_DTYPE, instance, integer
from gpt_oss.transfer import sent


class OutOfPages(RuntimeError):
    """Too few pages of the cache are free for an allocation."""


class PageAllocator:
    """Allocates and frees pages of the cache.

    Args:
        pages: number of pages.
        page_size: number of tokens per page.

    Attributes:
        free_pages: the free pages; the last one is allocated first. This attribute is replaced as a whole and never changed in
            place, so that one assignment changes it atomically.

    Raises:
        TypeError, ValueError: an argument is not an int of at least 1.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        COUNT.check("pages", pages)
        COUNT.check("page_size", page_size)
        self.total, self.page_size = pages, page_size
        self.free_pages = tuple(range(pages - 1, -1, -1))

    @property
    def available(self) -> int:
        """The number of free pages."""
        return len(self.free_pages)

    def pages_for(self, tokens: int) -> int:
        """Returns the number of pages that this many tokens of a sequence need."""
        return -(-tokens // self.page_size)

    def choose(self, count: int, free_pages: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the pages that an allocation would take from these free pages, and the remaining free pages. Allocates nothing.

        Raises:
            OutOfPages: fewer than ``count`` pages are free.
        """
        if count > len(free_pages):
            raise OutOfPages(
                f"{count} pages of {self.page_size} tokens are needed, {len(free_pages)} of {self.total} are free: "
                "free some sequences, or make the cache bigger"
            )
        remaining = len(free_pages) - count
        return free_pages[remaining:][::-1], free_pages[:remaining]

    def allocate(self, count: int) -> list[int]:
        """Allocates pages. Raises OutOfPages if too few pages are free, and ValueError if the count is negative. An error leaves
        all pages unallocated.
        """
        integer(0).check("count", count)
        taken, self.free_pages = self.choose(count, self.free_pages)
        return list(taken)

    def free(self, pages: Iterable[int]) -> None:
        """Frees pages. If a page is not allocated or is named twice, raises ValueError and frees no page."""
        given = list(pages)
        stray = sorted(set(given) - (set(range(self.total)) - set(self.free_pages)))
        if stray:
            raise ValueError(f"pages must be held to be freed, got {stray}, which are not")
        if len(set(given)) != len(given):
            raise ValueError(f"pages must each be freed once, got {given}")
        self.free_pages = (*self.free_pages, *reversed(given))


class PagedKVCache:
    """The keys and values of all layers, in pages. A page index means the same page in every layer.

    Args:
        config: the model's configuration.
        pages: number of pages.
        page_size: number of tokens per page.
        dtype: floating-point dtype of the stored keys and values.
        device: the cache's device.

    Attributes:
        k, v: for each layer a tensor ``[pages, page_size, kv_heads, head_dim]``.
        all_k, all_v: the tensors of all layers as one, ``[layers, pages, page_size, kv_heads, head_dim]``.
        allocator: the page allocator.

    Raises:
        TypeError, ValueError: an argument is not as stated; the message names it.
    """

    def __init__(
        self,
        config: Config,
        pages: int,
        page_size: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> None:
        instance(Config).check("config", config)
        FLOAT_DTYPE.check("dtype", dtype)
        self.allocator = PageAllocator(pages, page_size)
        self.page_size = page_size
        self.device = torch.device(device)
        shape = (2, config.num_hidden_layers, pages, page_size, config.num_key_value_heads, config.head_dim)
        storage = torch.zeros(shape, dtype=dtype, device=self.device)
        self.all_k, self.all_v = storage.unbind(0)
        self.k: Sequence[Tensor] = self.all_k.unbind(0)
        self.v: Sequence[Tensor] = self.all_v.unbind(0)

    def page_table(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Returns the page table, int32 ``[batch, pages of the longest sequence]``: each row has a sequence's pages in order,
        padded with page 0."""
        width = max((len(pages) for pages in sequences), default=0)
        rows = [[*pages, *([0] * (width - len(pages)))] for pages in sequences]
        return sent(torch.tensor(rows, dtype=torch.int32).reshape(len(rows), width), self.device)
