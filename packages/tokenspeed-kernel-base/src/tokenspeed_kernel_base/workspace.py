"""Scratch memory of kernels, kept between launches: partial results, and counters of work that has begun or finished.

Counters are zero before a launch, and the kernel restores the zeros. Launches that may run concurrently must not share memory. So
each stream of a device has its own workspace, kept from call to call.

A captured launch gets counters of its own, because its graph may be replayed on any stream. These counters come from an arena that
calls outside of captures allocate and zero. So the graph need not zero them. Partial results of a captured launch are in the
graph's own memory.

::

    workspace = keeper.get(device, torch._C._cuda_getCurrentRawStream(device), nbytes, counters)
    launch(..., workspace.memory_at, workspace.counters_at)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# PyTorch's C function, because a Python wrapper would take longer than the query. Builds without CUDA lack the function.
_CAPTURING: Callable[[], Any] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", bool)

# The counters of a captured launch begin at a multiple of this number of bytes. Allocations do so too, and Triton compiles a kernel
# again for addresses that are no multiple of 16 bytes.
_ALIGNMENT = 16
# Number of counters in an arena: enough for about 1000 captured decode launches on a device of 132 SMs.
ARENA = 1 << 18


class Workspace:
    """Scratch memory for launches. Keep a reference until the launch is queued.

    Attributes:
        memory: uint8, with any values; aligned like allocations of PyTorch, to 512 bytes on a GPU.
        counters: int32, zero except while a kernel runs; aligned to 16 bytes.
        nbytes, count: size of ``memory`` in bytes, and number of counters.
        memory_at, counters_at: addresses of ``memory`` and ``counters``, stored because ``data_ptr()`` would take time at each
            launch.
    """

    __slots__ = ("count", "counters", "counters_at", "memory", "memory_at", "nbytes")

    def __init__(self, memory: Tensor, counters: Tensor) -> None:
        self.memory, self.counters = memory, counters
        self.nbytes, self.count = memory.shape[0], counters.shape[0]
        self.memory_at, self.counters_at = memory.data_ptr(), counters.data_ptr()


def _wait(device: int) -> None:
    if device >= 0:
        torch.cuda.current_stream(device).synchronize()


def _device_of(device: int) -> torch.device:
    return torch.device("cuda", device) if device >= 0 else torch.device("cpu")


class Keeper:
    """Keeps the workspaces of all devices and streams. `keeper` is the process-wide instance. Kernels that may leave nonzero
    counters need their own instance.

    Thread-safe.

    Args:
        arena: number of counters in each arena for captured launches.
        capturing: returns whether the current stream is being captured into a graph.
        device_of: returns PyTorch's device for a device index.
        wait: waits for the work queued on a device's current stream.
    """

    __slots__ = ("_arena", "_arenas", "_capturing", "_device_of", "_lock", "_low", "_of_stream", "_outgrown", "_standing", "_wait")

    def __init__(
        self,
        arena: int = ARENA,
        *,
        capturing: Callable[[], Any] = _CAPTURING,
        device_of: Callable[[int], torch.device] = _device_of,
        wait: Callable[[int], None] = _wait,
    ) -> None:
        self._arena, self._capturing, self._device_of, self._wait = arena, capturing, device_of, wait
        self._lock = threading.Lock()
        self._of_stream: dict[tuple[int, int], Workspace] = {}
        self._standing: dict[int, dict[int, list[Tensor]]] = {}
        self._arenas: dict[int, list[Tensor]] = {}  # the unused part of each arena
        self._low: set[int] = set()  # devices whose next call outside a capture allocates another arena
        self._outgrown: list[Workspace] = []  # memory that a graph or a running kernel may still use

    def get(self, device: int, stream: int, nbytes: int, count: int) -> Workspace:
        """Returns a workspace for one launch on the current stream.

        Args:
            device: PyTorch's device index; -1 for the CPU.
            stream: the handle of the device's current stream; 0 for the default stream.
            nbytes: minimum size of the memory in bytes.
            count: minimum number of counters.
        """
        if stream and self._capturing():  # the default stream cannot be captured, and most calls use it
            return self._captured(device, nbytes, count)
        found = self._of_stream.get((device, stream))
        if found is None or found.nbytes < nbytes or found.count < count or device in self._low:
            with self._lock:
                found = self._provide(device, stream, nbytes, count)
        return found

    def standing(self, device: int, stream: int, nbytes: int) -> Tensor:
        """Returns a uint8 buffer of at least ``nbytes`` bytes that was zeroed at allocation. The buffer is for kernels that need
        one contiguous buffer, rely on zeros in it, and restore these zeros themselves.

        Each stream has its own buffer. Captured launches use the buffer of the stream that made the first call on the device,
        because every replay would zero a buffer that the graph allocates. So no two graphs with such launches may run concurrently
        on a device. Such a graph must also not run concurrently with calls on that first stream.

        Raises:
            RuntimeError: a graph is being captured, and the stream of the device's first call has no buffer of this size yet.
        """
        kept = self._standing.get(device, {})
        if stream and self._capturing():
            of_first = next(iter(kept.values()), [])
            if not of_first or of_first[-1].shape[0] < nbytes:
                raise RuntimeError(
                    f"call the kernel on {self._device_of(device)} once before a graph is captured: it needs {nbytes} bytes of "
                    "memory"
                )
            return of_first[-1]
        found = kept.get(stream, [])
        if found and found[-1].shape[0] >= nbytes:
            return found[-1]
        with self._lock:
            made = torch.zeros(nbytes, dtype=torch.uint8, device=self._device_of(device))
            self._standing.setdefault(device, {}).setdefault(stream, []).append(made)  # a graph may still use the earlier buffers
        return made

    def _captured(self, device: int, nbytes: int, count: int) -> Workspace:
        # PyTorch allocates this tensor in the graph's own memory, as it does all tensors during a capture.
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device_of(device))
        used = -(-count // (_ALIGNMENT // 4)) * (_ALIGNMENT // 4)  # counters up to the next launch's
        with self._lock:
            counters = None
            arenas = self._arenas.get(device, [])
            for index, left in enumerate(arenas):
                if left.shape[0] >= count:
                    counters, arenas[index] = left[:count], left[used:]
                    break
            if counters is None or arenas[-1].shape[0] < self._arena // 2:
                self._low.add(device)
        if counters is None:  # no arena has enough counters left: these counters are zeroed by each replay
            counters = torch.zeros(count, dtype=torch.int32, device=self._device_of(device))
            self._outgrown.append(Workspace(memory[:0], counters))
        return Workspace(memory, counters)

    def _provide(self, device: int, stream: int, nbytes: int, count: int) -> Workspace:
        target = self._device_of(device)
        if device in self._low or device not in self._arenas:
            made = torch.zeros(max(self._arena, count), dtype=torch.int32, device=target)
            self._arenas.setdefault(device, []).append(made)
            self._low.discard(device)
            self._wait(device)  # the arena was zeroed on this stream, and other streams will use it
        found = self._of_stream.get((device, stream))
        if found is not None and found.nbytes >= nbytes and found.count >= count:
            return found
        if found is not None:
            self._outgrown.append(found)
            # Sizes at least double, so that all outgrown memory together is less than the memory in use.
            nbytes = found.nbytes if found.nbytes >= nbytes else max(nbytes, 2 * found.nbytes)
            count = found.count if found.count >= count else max(count, 2 * found.count)
        memory = torch.empty(nbytes, dtype=torch.uint8, device=target)
        found = self._of_stream[device, stream] = Workspace(memory, torch.zeros(count, dtype=torch.int32, device=target))
        return found


keeper = Keeper()
