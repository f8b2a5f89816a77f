"""Outstanding memory operations: operations that were issued, and for which the code has not waited yet.

Ordinary loads write their registers at once. The sanitizer checks that the code waits before it reads these registers. Direct loads
to LDS are different, because other waves see their data. So each direct load is deferred until the ``s_waitcnt`` that covers it. A
kernel whose wait covers one load too few reads stale data, as it may on hardware.

The order of completion follows AMD's ISA document. Vector memory operations complete in order (vmcnt). LDS operations complete in
order among themselves; scalar loads complete in any order (both count in lgkmcnt). Flat operations complete in any order, and count
in both counters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from gfx950_emulator.access import Access
from gfx950_emulator.constants import WAVE
from gfx950_emulator.hardware import LGKMCNT_LIMIT, VMCNT_LIMIT


class Issued(Protocol):
    """An instruction that counts as outstanding: a `Bound`."""

    @property
    def memory(self) -> Access | None: ...


class Waiting(Protocol):
    """The attributes of a `Group` that the wait functions use.

    Attributes:
        machine: has the LDS, to which deferred data is written.
        shadow: the sanitizer's state of the registers, or None.
    """

    machine: Any
    shadow: Any


@dataclass
class Deferred:
    """A direct load to LDS in flight, with the data of its active lanes.

    Attributes:
        bound: the load instruction.
        columns: int64 [N], the lanes' indices in the group.
        addresses: int64 [N], byte addresses in the LDS of all slots.
        values: uint32 [count, N], the loaded dwords.
    """

    bound: Issued
    columns: np.ndarray
    addresses: np.ndarray
    values: np.ndarray

    def of(self, columns: np.ndarray, kept: np.ndarray | slice) -> Deferred:
        """Returns the data of the lanes ``kept``; ``columns`` are the indices of these lanes in the new group."""
        return Deferred(self.bound, columns, self.addresses[kept], self.values[:, kept])


@dataclass
class Stored:
    """The addresses of an LDS write, which the sanitizer needs until the code has waited for the write. Fields as in `Deferred`.

    Attributes:
        size: bytes per lane.
    """

    columns: np.ndarray
    addresses: np.ndarray
    size: int

    def of(self, columns: np.ndarray, kept: np.ndarray | slice) -> Stored:
        """Returns the addresses of the lanes ``kept``; ``columns`` are the indices of these lanes in the new group."""
        return Stored(columns, self.addresses[kept], self.size)


# An operation is one entry, or a tuple of entries. A tuple holds the different instructions of several waves that reconverged, or
# an instruction together with its data.
Entry: TypeAlias = "Issued | Deferred | Stored"
Operation: TypeAlias = "Entry | tuple[Entry, ...]"


class Outstanding:
    """A group's outstanding operations, oldest first: vector memory operations (vmcnt), and LDS and scalar ones (lgkmcnt).

    Without the sanitizer, LDS operations and scalar loads are not needed, and `local` stays empty.
    """

    __slots__ = ("local", "vector")

    def __init__(self) -> None:
        self.vector: list[Operation] = []
        self.local: list[Operation] = []

    def issue_vector(self, group: Waiting, operation: Entry) -> None:
        """Adds a vector memory operation. If the counter is full, the oldest operation completes first."""
        self.vector.append(operation)
        if len(self.vector) > VMCNT_LIMIT:
            self.wait_vector(group, VMCNT_LIMIT)

    def issue_local(self, group: Waiting, operation: Entry) -> None:
        """Adds an LDS operation or a scalar load. If the counter is full, the oldest operation completes first."""
        self.local.append(operation)
        if len(self.local) > LGKMCNT_LIMIT:
            self.wait_local(group, LGKMCNT_LIMIT)

    def wait_vector(self, group: Waiting, limit: int) -> None:
        """Waits until at most ``limit`` vector memory operations are outstanding. While a flat operation is outstanding, a limit
        above 0 proves nothing, see `wait_local`.
        """
        if limit and limit < len(self.vector) <= VMCNT_LIMIT and _any_of(self.vector, "flat"):
            return
        finished = self._finish(self.vector, limit)
        for entry in finished:
            if type(entry) is Deferred:
                group.machine.local.arrive(group, entry)
        if finished and group.shadow is not None:
            group.shadow.arrived(finished)

    def wait_local(self, group: Waiting, limit: int) -> None:
        """Waits until at most ``limit`` LDS operations and scalar loads are outstanding. A scalar load or a flat operation may
        overtake other operations. So while one is outstanding, a wait with a limit above 0 does not prove that any operation has
        finished.
        """
        if limit and _any_of(self.local, "scalar", "flat"):
            return
        finished = self._finish(self.local, limit)
        if finished and group.shadow is not None:
            group.shadow.arrived(finished)

    @staticmethod
    def _finish(operations: list[Operation], limit: int) -> list[Entry]:
        """Removes the oldest operations, except the newest ``limit``, and returns them."""
        done = max(0, len(operations) - limit)
        finished = list(entries(operations[:done]))
        del operations[:done]
        return finished

    def note(self, entry: Stored) -> None:
        """Adds the addresses of an LDS write to the newest LDS operation."""
        self.local[-1] = (*entries(self.local[-1:]), entry)

    def stored(self) -> Iterator[Stored]:
        """Yields the outstanding LDS writes."""
        return (entry for entry in entries(self.local) if type(entry) is Stored)

    def select(self, columns: np.ndarray, lanes: int) -> Outstanding:
        """Returns the operations of some lanes, given by their indices in the group of ``lanes`` lanes."""
        place = np.full(lanes, -1)
        place[columns] = np.arange(len(columns))

        def chosen(entry: Entry) -> Entry:
            if not isinstance(entry, Deferred | Stored):
                return entry
            to = place[entry.columns]
            return entry.of(to[to >= 0], to >= 0)

        part = Outstanding()
        part.vector = [_operation(map(chosen, entries([operation]))) for operation in self.vector]
        part.local = [_operation(map(chosen, entries([operation]))) for operation in self.local]
        return part

    @staticmethod
    def join(parts: list[Outstanding], waves: list[int]) -> Outstanding:
        """Joins the queues of groups that reconverge, aligned at the newest operations. If only some groups have an older
        operation, it completes no earlier than it would without the join.
        """
        starts = np.concatenate([[0], np.cumsum(waves)]) * WAVE
        whole = Outstanding()
        whole.vector = _aligned([part.vector for part in parts], starts)
        whole.local = _aligned([part.local for part in parts], starts)
        return whole


def entries(operations: Iterable[Operation]) -> Iterator[Entry]:
    """Yields the entries that the operations consist of, in order."""
    for operation in operations:
        if isinstance(operation, tuple):
            yield from operation
        else:
            yield operation


def _any_of(operations: Iterable[Operation], *spaces: str) -> bool:
    """Returns whether an operation accesses one of the spaces."""
    for entry in entries(operations):
        memory = entry.bound.memory if isinstance(entry, Deferred) else None if isinstance(entry, Stored) else entry.memory
        if memory is not None and memory.space in spaces:
            return True
    return False


def _operation(parts: Iterable[Entry]) -> Operation:
    """Makes one operation of several instructions or data; a `Bound` that occurs several times counts once."""
    distinct = tuple({id(entry): entry for entry in parts}.values())
    return distinct[0] if len(distinct) == 1 else distinct


def _aligned(queues: list[list[Operation]], starts: np.ndarray) -> list[Operation]:
    """Joins the queues of groups whose lanes begin at ``starts``, aligned at their newest operations."""
    whole = []
    for age in range(max(len(queue) for queue in queues), 0, -1):
        same_age = []
        for queue, start in zip(queues, starts[:-1], strict=True):
            for entry in entries([queue[-age]] if len(queue) >= age else []):
                bare = not isinstance(entry, Deferred | Stored)
                same_age.append(entry if bare else entry.of(entry.columns + start, slice(None)))
        whole.append(_operation(same_age))
    return whole
