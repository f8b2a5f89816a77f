"""Memory that launches leave partial results in, kept from call to call.

Each stream of a device has its own, as kernels of different streams may run at once. Counters are zero before a launch and after
it. What has been handed out is never freed: a captured graph may still use it. Nothing is allocated while a graph is being captured
if there has been a call before: each device keeps one more set than it has streams, for a stream that is first seen then.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
from torch import Tensor


class Scratch(NamedTuple):
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

    def has(self, floats: int, numbers: int) -> bool:
        return self.floats >= floats and self.numbers >= numbers


_of_stream: dict[tuple[int, int], Scratch] = {}
_spare: dict[int, Scratch] = {}
_outgrown: list[Scratch] = []
_making = threading.Lock()


def scratch_of(device: int, stream: int, floats: int, numbers: int) -> Scratch:
    """Scratch memory of a stream.

    Args:
        device: PyTorch's number for it.
        stream: its handle, which is the current stream.
        floats, numbers: how many there must be at least.
    """
    found = _of_stream.get((device, stream))
    if found is not None and found.floats >= floats and found.numbers >= numbers:
        return found
    with _making:
        return _make(device, stream, floats, numbers, found)


def _make(
    device: int,
    stream: int,
    floats: int,
    numbers: int,
    outgrown: Scratch | None,
) -> Scratch:
    spare = _spare.get(device)
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        if spare is None or not spare.has(floats, numbers):
            return _empty(device, floats, numbers)  # zeroed by each replay, and the graph's alone
        found = _spare.pop(device)
    else:
        if outgrown is not None:
            floats, numbers = (
                max(floats, outgrown.floats),
                max(numbers, outgrown.numbers),
            )
        found = _empty(device, floats, numbers)
        if spare is None or not spare.has(floats, numbers):
            _spare[device] = _empty(device, floats, numbers)
            # It is another stream that will use it, perhaps before this one gets here.
            if torch.cuda.is_available():
                torch.cuda.current_stream(device).synchronize()
    if outgrown is not None:
        _outgrown.append(outgrown)
    _of_stream[device, stream] = found
    return found


def _empty(device: int, floats: int, numbers: int) -> Scratch:
    where = torch.device("cuda", device) if torch.cuda.is_available() else torch.device("cpu")  # the latter for tests
    numbers = max(numbers, 4096)  # a few more cost nothing, and larger batches then find enough
    partial = torch.empty(floats, dtype=torch.float32, device=where)
    counters = torch.zeros(numbers, dtype=torch.int32, device=where)
    return Scratch(partial, counters, floats, numbers, partial.data_ptr(), counters.data_ptr())
