"""Offloads pages of a KV cache to host memory and back, asynchronously."""

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
    """A pool of KV-cache pages in host memory, which is pinned if the cache is on a GPU.

    A page index refers to the page with this index in every given cache, for example in the key and value caches of all layers.
    `tokenspeed_kernel.copy_kv_pages` gathers pages on the device into a small staging buffer. The object's own stream copies
    between this buffer and the host, with one copy for each run of neighbouring host pages.

    `store` and `load` only launch work. This work runs after the earlier work of the current stream, and before its later work. A
    store blocks the current stream until the device has gathered the pages, a load until the pages have arrived. Call ``load`` on a
    separate stream to overlap it with other work. Neither `store` nor `load` may be captured in a CUDA graph.

    Attributes:
        caches: the device's caches, in the order given.
        tensors: for each cache a tensor ``[pages, ...]`` of its dtype and page shape, in host memory. Call `synchronize` before
            reading them.
        pages: the number of pages in host memory.

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
            caches: each ``[pages, page_size, kv_heads, head_dim]`` or ``[pages, page_size, width]``, any float dtype, 8-bit
                floats or uint8; all with the same number of pages, on one device. May be strided.
            pages: number of pages in host memory, at least 1.
            staging_pages: how many pages are copied at a time, at least 1.

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
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        pinned = self._stream is not None
        self.tensors = tuple(torch.empty(pages, *cache.shape[1:], dtype=cache.dtype, pin_memory=pinned) for cache in caches)
        page_bytes = max(cache.shape[1:].numel() * cache.element_size() for cache in caches)
        # Double buffering: while one buffer is copied to or from the host, the device fills or empties the other.
        self._buffers = [_Buffer(staging_pages * page_bytes, device, self._stream) for _ in range(2)]

    def store(self, pages: Sequence[int], host_pages: Sequence[int]) -> None:
        """Copies page ``pages[i]`` of every cache to page ``host_pages[i]`` of host memory.

        Work that is launched afterwards on the current stream may overwrite the caches' pages.

        Args:
            pages: page indices of the caches; an index may occur several times.
            host_pages: distinct page indices in host memory, each less than ``pages`` of this object.

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
                with self._on_own_stream():
                    for run in chunk.runs:
                        host[run.host].copy_(staging[run.staged], non_blocking=True)
                buffer.used_by(self._stream)

    def load(self, host_pages: Sequence[int], pages: Sequence[int]) -> None:
        """Copies page ``host_pages[i]`` of host memory to page ``pages[i]`` of every cache.

        Args:
            host_pages: page indices in host memory that were stored before, each less than ``pages`` of this object; an index may
                occur several times.
            pages: distinct page indices of the caches.

        Raises:
            ValueError: an argument is not as stated above. Raised before anything is launched.
        """
        self._check_pages(pages, host_pages, distinct="pages")
        for chunk in self._chunks(pages, host_pages):
            for cache, host in zip(self.caches, self.tensors, strict=True):
                buffer = self._next_buffer()
                staging = buffer.pages(chunk.size, cache)
                buffer.wait(self._stream)
                with self._on_own_stream():
                    for run in chunk.runs:
                        staging[run.staged].copy_(host[run.host], non_blocking=True)
                if self._stream is not None:
                    self._current_stream().wait_stream(self._stream)
                copy_kv_pages(cache, chunk.staged, chunk.pages, staging)
                buffer.used_by(self._current_stream())

    def synchronize(self) -> None:
        """Waits until all stored pages are in host memory."""
        if self._stream is not None:
            self._stream.synchronize()

    # -- implementation ----------------------------------------------------------------------------------------------------------

    def _check_pages(self, pages: Sequence[int], host_pages: Sequence[int], distinct: str) -> None:
        check = Checker(type(self).__name__)
        check.require(len(pages) == len(host_pages), "host_pages", f"{len(pages)} indices, as many as pages", len(host_pages))
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
        """Returns the caller's current stream; None without a GPU."""
        return None if self._stream is None else torch.cuda.current_stream(self._stream.device)

    def _on_own_stream(self) -> AbstractContextManager[object]:
        """Context manager: makes this object's own stream the current stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


class _Run(NamedTuple):
    """A run of consecutive pages in host memory, and the slice of the staging buffer for these pages."""

    host: slice
    staged: slice


class _Chunk(NamedTuple):
    """Pages that are copied together through one staging buffer.

    Attributes:
        size: the number of pages.
        pages: int32 ``[count]``, the pages' indices in the caches.
        staged: int32 ``[count]``, the pages' indices in the staging buffer: 0, 1...
        runs: the runs of host pages to which the staged pages belong.
    """

    size: int
    pages: Tensor
    staged: Tensor
    runs: list[_Run]


def _runs(host_pages: Sequence[int]) -> Iterator[_Run]:
    """Splits page indices into maximal runs of consecutive indices."""
    first = 0
    for index in range(1, len(host_pages) + 1):
        if index == len(host_pages) or host_pages[index] != host_pages[index - 1] + 1:
            yield _Run(slice(host_pages[first], host_pages[index - 1] + 1), slice(first, index))
            first = index


class _Buffer:
    """Staging memory on the device for pages of any cache, and the event after which the memory may be reused."""

    def __init__(self, size: int, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        self._free: torch.cuda.Event | None = None
        if stream is not None:  # the allocator must not reuse the memory while the stream still copies
            self._memory.record_stream(stream)

    def pages(self, count: int, cache: Tensor) -> Tensor:
        """Returns the first bytes of the buffer, viewed as pages of the cache's shape and dtype."""
        size = count * cache.shape[1:].numel() * cache.element_size()
        return self._memory[:size].view(cache.dtype).view(count, *cache.shape[1:])

    def wait(self, stream: torch.cuda.Stream | None) -> None:
        """Makes a stream wait until the buffer is free."""
        if stream is not None and self._free is not None:
            stream.wait_event(self._free)

    def used_by(self, stream: torch.cuda.Stream | None) -> None:
        """Marks the buffer as free once the work launched on the stream so far is done."""
        if stream is not None:
            self._free = stream.record_event()
