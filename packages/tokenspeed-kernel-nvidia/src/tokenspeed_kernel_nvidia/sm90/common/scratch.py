"""Memory that outlives launches: partial results, and counters of what has been begun or finished.

Counters are zero before a launch, and it leaves them so. Launches that may run at once must not share any: each stream of a device
has its own, kept from call to call and for all kernels. A launch that is captured has counters that are never handed out again, as
its graph may be replayed on any stream; they come from an arena that calls outside of captures provide, so that nothing is zeroed
within a graph.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

# Counters of an arena: of about 1000 captured launches of decode on a device of 132 multiprocessors.
ARENA = 1 << 18


@dataclass(frozen=True)
class Scratch:
    """Scratch memory.

    Attributes:
        partial: float32, with any values.
        counters: int32, zero except while a kernel runs.
        floats, numbers: how many there are.
        partial_at, counters_at: addresses, as asking for them takes time.
    """

    partial: Tensor
    counters: Tensor
    floats: int
    numbers: int
    partial_at: int
    counters_at: int


_of_stream: dict[tuple[int, int], Scratch] = {}
_arenas: dict[int, list[Tensor]] = {}  # what is left of each
_low: set[int] = set()  # devices whose arena is nearly used up
_outgrown: list[Scratch] = []  # memory that a graph might name, or a kernel be using
_making = threading.Lock()


def scratch_of(device: int, stream: int, floats: int, numbers: int) -> Scratch:
    """Scratch memory for a launch on the current stream, to be kept until it is launched.

    Args:
        device: PyTorch's number for it.
        stream: the handle of its current stream.
        floats, numbers: how many there must be at least.
    """
    if stream and _capturing():  # 0 is the stream that nothing can be captured on, and the one that most calls are on
        return _captured(device, floats, numbers)
    found = _of_stream.get((device, stream))
    if found is None or found.floats < floats or found.numbers < numbers or device in _low:
        with _making:
            found = _provide(device, stream, floats, numbers)
    return found


def _capturing() -> bool:
    return bool(torch._C._cuda_isCurrentStreamCapturing())


def _captured(device: int, floats: int, numbers: int) -> Scratch:
    # Partial results lie in the graph's own memory, as all that is allocated while it is captured.
    partial = torch.empty(floats, dtype=torch.float32, device=_where(device))
    with _making:
        counters = None
        for index, left in enumerate(_arenas.get(device, [])):
            if left.shape[0] >= numbers:
                counters, _arenas[device][index] = left[:numbers], left[numbers:]
                break
        if counters is None or _arenas[device][-1].shape[0] < ARENA // 2:
            _low.add(device)
    if counters is None:  # no call has been made before, or too few for all that was captured: each replay zeroes its own
        counters = torch.zeros(numbers, dtype=torch.int32, device=_where(device))
        _outgrown.append(_scratch(partial[:0], counters))
    return _scratch(partial, counters)


def _provide(device: int, stream: int, floats: int, numbers: int) -> Scratch:
    if device in _low or device not in _arenas:
        _arenas.setdefault(device, []).append(torch.zeros(max(ARENA, numbers), dtype=torch.int32, device=_where(device)))
        _low.discard(device)
        if torch.cuda.is_available():  # other streams will use it
            torch.cuda.current_stream(device).synchronize()
    found = _of_stream.get((device, stream))
    if found is None or found.floats < floats or found.numbers < numbers:
        if found is not None:
            _outgrown.append(found)
            floats, numbers = max(floats, found.floats), max(numbers, found.numbers)
        partial = torch.empty(floats, dtype=torch.float32, device=_where(device))
        found = _scratch(partial, torch.zeros(numbers, dtype=torch.int32, device=_where(device)))
        _of_stream[device, stream] = found
    return found


def _scratch(partial: Tensor, counters: Tensor) -> Scratch:
    return Scratch(partial, counters, partial.shape[0], counters.shape[0], partial.data_ptr(), counters.data_ptr())


def _where(device: int) -> torch.device:
    return torch.device("cuda", device) if torch.cuda.is_available() else torch.device("cpu")  # the latter for tests
