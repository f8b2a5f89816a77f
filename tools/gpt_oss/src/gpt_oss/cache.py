"""The paged key-value cache: the tensors, and who holds which page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from gpt_oss.config import Config


class OutOfPages(RuntimeError):
    """More pages are wanted than are free."""


class PageAllocator:
    """Hands out pages of the cache and takes them back.

    Args:
        pages: how many there are.
        page_size: tokens that one holds.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        if pages < 1 or page_size < 1:
            raise ValueError(f"a cache needs at least one page of at least one token, got {pages} pages of {page_size}")
        self.total, self.page_size = pages, page_size
        self._free = list(range(pages - 1, -1, -1))
        self._held: set[int] = set()

    @property
    def available(self) -> int:
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Takes pages. Raises OutOfPages, and takes none, if fewer are free."""
        if count > len(self._free):
            raise OutOfPages(
                f"{count} pages of {self.page_size} tokens are wanted, {len(self._free)} of {self.total} are free: "
                "free some sequences, or make the cache bigger"
            )
        taken = [self._free.pop() for _ in range(count)]
        self._held.update(taken)
        return taken

    def free(self, pages: Iterable[int]) -> None:
        """Gives pages back. Raises ValueError, and frees none, if one of them is not held."""
        given = list(pages)
        stray = sorted(set(given) - self._held)
        if stray or len(set(given)) != len(given):
            raise ValueError(f"pages {stray or given} are freed that are not held, or twice")
        self._held.difference_update(given)
        self._free.extend(reversed(given))


class PagedKVCache:
    """Keys and values of every layer, in pages that all layers share the numbering of.

    Args:
        config: the model.
        pages, page_size: how many pages, and tokens in each.
        dtype: of the stored keys and values.
        device: where they lie.

    Attributes:
        k, v: for each layer a tensor ``[pages, page_size, kv_heads, head_dim]``.
        allocator: who holds which page.
    """

    def __init__(
        self,
        config: Config,
        pages: int,
        page_size: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> None:
        self.allocator = PageAllocator(pages, page_size)
        self.page_size = page_size
        self.device = torch.device(device)
        shape = (2, config.num_hidden_layers, pages, page_size, config.num_key_value_heads, config.head_dim)
        storage = torch.zeros(shape, dtype=dtype, device=self.device)
        self.k: Sequence[Tensor] = storage[0].unbind(0)
        self.v: Sequence[Tensor] = storage[1].unbind(0)

    def slots(self, pages: Sequence[int], start: int, stop: int) -> list[int]:
        """Where the tokens at positions ``start`` to ``stop - 1`` of a sequence that holds these pages are kept."""
        size = self.page_size
        return [pages[position // size] * size + position % size for position in range(start, stop)]

    def page_table(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """int32 ``[batch, pages of the longest]``: the pages of each sequence in order, filled up with page 0."""
        width = max((len(pages) for pages in sequences), default=0)
        rows = [[*pages, *([0] * (width - len(pages)))] for pages in sequences]
        return torch.tensor(rows, dtype=torch.int32).reshape(len(rows), width).to(self.device)
