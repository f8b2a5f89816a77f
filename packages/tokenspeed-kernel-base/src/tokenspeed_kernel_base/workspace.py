"""Memory that kernels work in and that outlives their launches: partial results, and counters of what has been begun or finished.

Counters are zero before a launch, and it leaves them so. Launches that may run at once must not share memory, so each stream of a
device has a workspace of its own, kept from call to call. A launch that is captured has counters that are never handed out again,
because its graph may be replayed on any stream. They come from an arena that calls outside of captures provide, so that nothing is
zeroed within a graph; its partial results lie in the graph's own memory.

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

from tokenspeed_kernel_base.resources import Resource

# PyTorch's C function itself: a Python one around it would take longer than the question does. Builds without CUDA lack it.
_CAPTURING: Callable[[], Any] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", bool)

# Counters of an arena: of about 1000 captured launches of a decode on a device of 132 multiprocessors.
ARENA = 1 << 18


class Workspace(Resource):
    """Memory for launches. Keep it until the launch was made.

    Attributes:
        memory: uint8, with any values; aligned as PyTorch's allocator aligns, to 512 bytes on a GPU.
        counters: int32, zero except while a kernel runs.
        nbytes, count: how many of each there are.
        memory_at, counters_at: addresses, because asking a tensor for its address takes time at each launch.
    """

    __slots__ = ("count", "counters", "counters_at", "memory", "memory_at", "nbytes")

    def __init__(self, memory: Tensor, counters: Tensor) -> None:
        self.memory, self.counters = memory, counters
        self.nbytes, self.count = memory.shape[0], counters.shape[0]
        self.memory_at, self.counters_at = memory.data_ptr(), counters.data_ptr()


def _wait(device: int) -> None:
    if device >= 0:
        torch.cuda.current_stream(device).synchronize()


def _place(device: int) -> torch.device:
    return torch.device("cuda", device) if device >= 0 else torch.device("cpu")


class Keeper:
    """Keeps workspaces. `keeper` serves the whole process; kernels that may leave counters behind that are not zero need their own.

    Safe in several threads.

    Args:
        arena: counters to provide for captured launches at a time.
        capturing: whether the current stream is being captured into a graph.
        place: PyTorch's device for a number.
        wait: waits for what was queued on a device's current stream.
    """

    __slots__ = ("_arena", "_arenas", "_capturing", "_lock", "_low", "_of_stream", "_outgrown", "_place", "_standing", "_wait")

    def __init__(
        self,
        arena: int = ARENA,
        *,
        capturing: Callable[[], Any] = _CAPTURING,
        place: Callable[[int], torch.device] = _place,
        wait: Callable[[int], None] = _wait,
    ) -> None:
        self._arena, self._capturing, self._place, self._wait = arena, capturing, place, wait
        self._lock = threading.Lock()
        self._of_stream: dict[tuple[int, int], Workspace] = {}
        self._standing: dict[int, dict[int, list[Tensor]]] = {}
        self._arenas: dict[int, list[Tensor]] = {}  # what is left of each
        self._low: set[int] = set()  # devices whose arena is nearly used up
        self._outgrown: list[Workspace] = []  # memory that a graph might name, or a kernel be using

    def get(self, device: int, stream: int, nbytes: int, count: int) -> Workspace:
        """A workspace for one launch on the current stream.

        Args:
            device: PyTorch's number for it; -1 for the CPU.
            stream: the handle of its current stream; 0 for the default one.
            nbytes: how much memory there must be at least.
            count: how many counters there must be at least.
        """
        if stream and self._capturing():  # nothing can be captured on the default stream, and most calls are on that
            return self._captured(device, nbytes, count)
        found = self._of_stream.get((device, stream))
        if found is None or found.nbytes < nbytes or found.count < count or device in self._low:
            with self._lock:
                found = self._provide(device, stream, nbytes, count)
        return found

    def standing(self, device: int, stream: int, nbytes: int) -> Tensor:
        """uint8, at least ``nbytes``: memory that was zero when it was made, for kernels that want all in one piece, and leave
        those parts zero that must be.

        Calls on a stream have the stream's own. Captured launches have that of the device's first call, because zeroing another
        would be part of every replay. So no two graphs with such launches may run at once on a device, nor one beside calls on
        the first call's stream.

        Raises:
            RuntimeError: a graph is captured, and there was no call on this device before, or none that wanted as much.
        """
        kept = self._standing.get(device, {})
        if stream and self._capturing():
            of_first = next(iter(kept.values()), [])
            if not of_first or of_first[-1].shape[0] < nbytes:
                raise RuntimeError(
                    f"call the kernel on {self._place(device)} once before a graph is captured: it needs {nbytes} bytes of memory"
                )
            return of_first[-1]
        found = kept.get(stream, [])
        if found and found[-1].shape[0] >= nbytes:
            return found[-1]
        with self._lock:
            made = torch.zeros(nbytes, dtype=torch.uint8, device=self._place(device))
            self._standing.setdefault(device, {}).setdefault(stream, []).append(made)  # a graph may name the ones before
        return made

    def _captured(self, device: int, nbytes: int, count: int) -> Workspace:
        # Allocated in the graph's own memory, as all that is allocated while it is captured.
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self._place(device))
        with self._lock:
            counters = None
            arenas = self._arenas.get(device, [])
            for index, left in enumerate(arenas):
                if left.shape[0] >= count:
                    counters, arenas[index] = left[:count], left[count:]
                    break
            if counters is None or arenas[-1].shape[0] < self._arena // 2:
                self._low.add(device)
        if counters is None:  # no call was made before, or too few for all that is captured: each replay zeroes its own
            counters = torch.zeros(count, dtype=torch.int32, device=self._place(device))
            self._outgrown.append(Workspace(memory[:0], counters))
        return Workspace(memory, counters)

    def _provide(self, device: int, stream: int, nbytes: int, count: int) -> Workspace:
        place = self._place(device)
        if device in self._low or device not in self._arenas:
            made = torch.zeros(max(self._arena, count), dtype=torch.int32, device=place)
            self._arenas.setdefault(device, []).append(made)
            self._low.discard(device)
            self._wait(device)  # other streams will use it
        found = self._of_stream.get((device, stream))
        if found is not None and found.nbytes >= nbytes and found.count >= count:
            return found
        if found is not None:
            self._outgrown.append(found)
            # At least twice what was too little, so that all that was outgrown is less than what is in use.
            nbytes = found.nbytes if found.nbytes >= nbytes else max(nbytes, 2 * found.nbytes)
            count = found.count if found.count >= count else max(count, 2 * found.count)
        memory = torch.empty(nbytes, dtype=torch.uint8, device=place)
        found = self._of_stream[device, stream] = Workspace(memory, torch.zeros(count, dtype=torch.int32, device=place))
        return found


keeper = Keeper()
