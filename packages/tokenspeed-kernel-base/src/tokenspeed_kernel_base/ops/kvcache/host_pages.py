"""Pages of a KV cache in host memory: on their way there and back, the device goes on with other work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.ops.kvcache.copy_kv_pages import copy_kv_pages
from tokenspeed_kernel_base.ops.kvcache.pages import check_cache


class HostPages:
    """Room for pages of a KV cache in host memory, pinned where the cache is on a GPU.

    One page number stands for a page of every cache that is given: those of keys and values of all layers, say. Pages are gathered
    on the device (`tokenspeed_kernel.copy_kv_pages`) into a small buffer, and copied between that and the host on a stream of this
    object, in as few copies as there are runs of neighbouring host pages.

    `store` and `load` only launch work, and order it by the stream that is current when they are called: what was launched there
    before is done before, and what is launched after sees their effect. A store keeps that stream until the device has gathered the
    pages, a load until the pages have come. Call ``load`` on a stream of its own to go on with other work meanwhile. Both belong
    outside of CUDA graphs.

    Attributes:
        caches: the device's caches, in the order given.
        tensors: for each cache ``[pages, ...]`` of its dtype and page shape, in host memory. Call `synchronize` before
            reading them.
        pages: how many pages there is room for.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import HostPages
        >>> cache = torch.arange(4.0).view(4, 1, 1)
        >>> host = HostPages([cache], pages=8)
        >>> host.store([3, 1], host_pages=[0, 5])
        >>> _ = cache.zero_()
        >>> host.load(host_pages=[5], pages=[2])
        >>> cache.flatten()
        tensor([0., 0., 1., 0.])
    """

    def __init__(self, caches: Sequence[Tensor], pages: int, staging_pages: int = 64) -> None:
        """Allocates host memory for ``pages`` pages, and twice ``staging_pages`` pages of the largest cache on the device.

        Args:
            caches: each ``[pages, page_size, kv_heads, head_dim]`` or ``[pages, page_size, width]``, any float dtype, 8-bit floats
                or uint8; all of as many pages, on one device. May be strided.
            pages: at least 1.
            staging_pages: how many pages are moved at a time, at least 1.

        Raises:
            TypeError, ValueError: an argument is not as stated above.
        """
        check = Checker(type(self).__name__)
        check.require(len(caches) > 0, "caches", "at least one cache", len(caches))
        for number, cache in enumerate(caches):
            check_cache(Checker(check.operator), f"caches[{number}]", cache, "pages")
            alike = len(cache) == len(caches[0]) and cache.device == caches[0].device
            wanted = f"of {len(caches[0])} pages on {caches[0].device}, like caches[0]"
            check.require(alike, f"caches[{number}]", wanted, f"{len(cache)} pages on {cache.device}")
        check.require(pages >= 1, "pages", "at least 1", pages)
        check.require(staging_pages >= 1, "staging_pages", "at least 1", staging_pages)
        self.caches, self.pages, self.staging_pages = tuple(caches), pages, staging_pages
        device = caches[0].device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        pinned = self._stream is not None
        self.tensors = tuple(torch.empty(pages, *cache.shape[1:], dtype=cache.dtype, pin_memory=pinned) for cache in caches)
        page_bytes = max(cache.shape[1:].numel() * cache.element_size() for cache in caches)
        # Two of them: while the pages in one are on their way, the other one is filled or emptied.
        self._buffers = [_Buffer(staging_pages * page_bytes, device, self._stream) for _ in range(2)]

    def store(self, pages: Sequence[int], host_pages: Sequence[int]) -> None:
        """Copies page ``pages[i]`` of every cache to page ``host_pages[i]`` of host memory.

        Work that is launched afterwards on the current stream may overwrite the caches' pages.

        Args:
            pages: of the caches; one may occur several times.
            host_pages: distinct, below the object's ``pages``.

        Raises:
            ValueError: an argument is not as stated above. Raised before anything is launched.
        """
        self._check_pages(pages, host_pages, distinct="host_pages")
        for chunk in self._chunks(pages, host_pages):
            for cache, host in zip(self.caches, self.tensors, strict=True):
                buffer = self._next_buffer()
                staging = buffer.pages(chunk.size, cache)
                buffer.wait(self._current_stream())
                copy_kv_pages(staging, chunk.pages, chunk.staged, cache)
                if self._stream is not None:
                    self._stream.wait_stream(self._current_stream())
                with self._beside():
                    for run in chunk.runs:
                        host[run.host].copy_(staging[run.staged], non_blocking=True)
                buffer.used_by(self._stream)

    def load(self, host_pages: Sequence[int], pages: Sequence[int]) -> None:
        """Copies page ``host_pages[i]`` of host memory to page ``pages[i]`` of every cache.

        Args:
            host_pages: below the object's ``pages``, stored before; one may occur several times.
            pages: of the caches, distinct.

        Raises:
            ValueError: an argument is not as stated above. Raised before anything is launched.
        """
        self._check_pages(pages, host_pages, distinct="pages")
        for chunk in self._chunks(pages, host_pages):
            for cache, host in zip(self.caches, self.tensors, strict=True):
                buffer = self._next_buffer()
                staging = buffer.pages(chunk.size, cache)
                buffer.wait(self._stream)
                with self._beside():
                    for run in chunk.runs:
                        staging[run.staged].copy_(host[run.host], non_blocking=True)
                if self._stream is not None:
                    self._current_stream().wait_stream(self._stream)
                copy_kv_pages(cache, chunk.staged, chunk.pages, staging)
                buffer.used_by(self._current_stream())

    def synchronize(self) -> None:
        """Waits until all pages that were stored are in host memory."""
        if self._stream is not None:
            self._stream.synchronize()

    # -- how it is done ----------------------------------------------------------------------------------------------------------

    def _check_pages(self, pages: Sequence[int], host_pages: Sequence[int], distinct: str) -> None:
        check = Checker(type(self).__name__)
        check.require(len(pages) == len(host_pages), "host_pages", f"as many as pages, {len(pages)}", len(host_pages))
        for name, numbers, count in (("pages", pages, len(self.caches[0])), ("host_pages", host_pages, self.pages)):
            for number in numbers:
                check.require(0 <= number < count, name, f"0 to {count - 1}", number)
            if name == distinct and len({*numbers}) < len(numbers):
                twice = next(number for index, number in enumerate(numbers) if number in numbers[:index])
                check.fail(name, "distinct", f"{twice} twice")

    def _chunks(self, pages: Sequence[int], host_pages: Sequence[int]) -> Iterator[_Chunk]:
        every = torch.tensor(pages, dtype=torch.int32).to(self.caches[0].device, non_blocking=True)
        staged = torch.arange(self.staging_pages, dtype=torch.int32, device=every.device)
        for first in range(0, len(pages), self.staging_pages):
            numbers = every[first : first + self.staging_pages]
            runs = list(_runs(host_pages[first : first + len(numbers)]))
            yield _Chunk(len(numbers), numbers, staged[: len(numbers)], runs)

    def _next_buffer(self) -> _Buffer:
        self._buffers.reverse()
        return self._buffers[0]

    def _current_stream(self) -> Any:
        """The stream that callers launch on; None without a GPU."""
        return None if self._stream is None else torch.cuda.current_stream(self._stream.device)

    def _beside(self) -> AbstractContextManager[object]:
        """Makes this object's stream the current one."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


class _Run(NamedTuple):
    """Neighbouring pages in host memory, and where they are staged."""

    host: slice
    staged: slice


class _Chunk(NamedTuple):
    """Pages that are moved together.

    Attributes:
        size: how many.
        pages: int32 ``[count]``, where they are in the caches.
        staged: int32 ``[count]``, where they are staged: 0, 1...
        runs: where they are in host memory.
    """

    size: int
    pages: Tensor
    staged: Tensor
    runs: list[_Run]


def _runs(host_pages: Sequence[int]) -> Iterator[_Run]:
    """The longest runs of page numbers that follow one another."""
    first = 0
    for index in range(1, len(host_pages) + 1):
        if index == len(host_pages) or host_pages[index] != host_pages[index - 1] + 1:
            yield _Run(slice(host_pages[first], host_pages[index - 1] + 1), slice(first, index))
            first = index


class _Buffer:
    """Device memory that pages of any cache pass through, and when it is free again."""

    def __init__(self, size: int, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        self._free: torch.cuda.Event | None = None
        if stream is not None:  # so that it is not given to others while the stream still copies, when this object is gone
            self._memory.record_stream(stream)

    def pages(self, count: int, cache: Tensor) -> Tensor:
        """Its first bytes as pages like the cache's."""
        size = count * cache.shape[1:].numel() * cache.element_size()
        return self._memory[:size].view(cache.dtype).view(count, *cache.shape[1:])

    def wait(self, stream: torch.cuda.Stream | None) -> None:
        """Lets a stream wait until the pages that are in it have arrived."""
        if stream is not None and self._free is not None:
            stream.wait_event(self._free)

    def used_by(self, stream: torch.cuda.Stream | None) -> None:
        """Says that it is free when what the stream has been given so far is done."""
        if stream is not None:
            self._free = stream.record_event()
