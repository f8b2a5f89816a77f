"""Global memory of the emulated device: the tensors of a launch, at their host addresses.

Device addresses equal host addresses, so a pointer is valid on both sides. Every access is checked against the launch's allocations
before it touches memory: a faulty kernel must not crash the emulator.
"""

from __future__ import annotations

import bisect
import ctypes
from typing import Any

import numpy as np

from kernel_emulation.emulator import Allocation


def signed64(value: int | np.ndarray) -> int | np.ndarray:
    """Interprets a 64-bit value as signed, for address computation: an int, or int64 for a uint64 array."""
    if isinstance(value, np.ndarray):
        return value.astype(np.int64)
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


class Fault(Exception):
    """An invalid access. The code that executes instructions adds the instruction, and raises a `SanitizerError`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def _without_overlap(allocations: list[Allocation]) -> list[Allocation]:
    """Sorts allocations by address, and merges overlapping allocations (views of one tensor). Adjacent allocations stay
    separate.
    """
    merged: list[Allocation] = []
    for allocation in sorted((a for a in allocations if a.end > a.start), key=lambda a: a.start):
        if merged and allocation.start < merged[-1].end:
            last = merged.pop()
            name = last.name if allocation.name in last.name.split(", ") else f"{last.name}, {allocation.name}"
            allocation = Allocation(last.start, max(last.end, allocation.end), name, last.block)
        merged.append(allocation)
    return merged


class GlobalMemory:
    """Loads and stores at arbitrary addresses inside known allocations. Addresses are int64 arrays."""

    def __init__(self, allocations: list[Allocation]) -> None:
        self.allocations = _without_overlap(allocations)
        self._starts = [a.start for a in self.allocations]
        if self.allocations:
            self.base = self.allocations[0].start & ~15
            size = (max(a.end for a in self.allocations) - self.base + 31) & ~15
        else:
            self.base, size = 16, 16
        memory: Any = (ctypes.c_uint8 * size).from_address(self.base)
        self.bytes = np.frombuffer(memory, np.uint8)
        self.dwords = self.bytes.view(np.uint32)
        self._start_array = np.array(self._starts, np.int64)
        self._end_array = np.array([a.end for a in self.allocations], np.int64)

    def check(self, addresses: np.ndarray, size: int, what: str) -> None:
        """Raises `Fault` unless every access of ``size`` bytes lies inside one allocation."""
        low, high = int(addresses.min()), int(addresses.max())
        at = bisect.bisect_right(self._starts, low) - 1
        if at >= 0 and high + size <= self.allocations[at].end:
            return
        bad = ~self.contains(addresses, size)
        if not bad.any():
            return
        address = int(addresses[bad][0])
        raise Fault("out-of-bounds", f"{what} of {size} bytes at {address:#x} {self._nearest(address, size)}")

    def contains(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Returns, for each access of ``size`` bytes, whether it lies inside one allocation, bool [N]."""
        if not self.allocations:
            return np.zeros(len(addresses), bool)
        at = np.searchsorted(self._start_array, addresses, "right") - 1
        return (at >= 0) & (addresses <= self._end_array[at] - size)  # adding the size to an address could overflow

    def _nearest(self, address: int, size: int) -> str:
        if not self.allocations:
            return "(no tensor was passed)"
        at = bisect.bisect_right(self._starts, address) - 1
        candidates = [self.allocations[i] for i in (at, at + 1) if 0 <= i < len(self.allocations)]
        nearest = min(candidates, key=lambda a: min(abs(address - a.end), abs(a.start - address)))
        if address >= nearest.end:
            return f"is {address - nearest.end} bytes past the end of {nearest}"
        if address < nearest.start:
            return f"is {nearest.start - address} bytes before {nearest}"
        return f"reaches {address + size - nearest.end} bytes past the end of {nearest}"

    def load(self, addresses: np.ndarray, count: int) -> np.ndarray:
        """Loads ``count`` dwords from each address: uint32 [count, N]. Addresses need no alignment."""
        self.check(addresses, 4 * count, "load")
        offset = addresses - self.base
        if (offset & 3).any():
            columns = offset[:, None] + np.arange(4 * count)
            return np.ascontiguousarray(self.bytes[columns].view(np.uint32).T)
        offset >>= 2
        if count == 1:
            return self.dwords.take(offset)[None]
        return self.dwords.take(offset + np.arange(count)[:, None])

    def load_small(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Loads one or two bytes from each address, zero-extended: uint32 [N]."""
        self.check(addresses, size, "load")
        offset = addresses - self.base
        value = self.bytes.take(offset).astype(np.uint32)
        if size == 2:
            value |= self.bytes.take(offset + 1).astype(np.uint32) << 8
        return value

    def store(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """Stores dwords, uint32 [count, N]. If several lanes have the same address, the last lane wins."""
        count = len(values)
        self.check(addresses, 4 * count, "store")
        offset = addresses - self.base
        if (offset & 3).any():
            columns = offset[:, None] + np.arange(4 * count)
            self.bytes[columns] = np.ascontiguousarray(values.T).view(np.uint8)
            return
        offset >>= 2
        self.dwords[offset + np.arange(count)[:, None]] = values

    def store_small(self, addresses: np.ndarray, values: np.ndarray, size: int) -> None:
        """Stores the lowest byte, or the lowest two bytes, of each value: uint32 [N]."""
        self.check(addresses, size, "store")
        offset = addresses - self.base
        self.bytes[offset] = values.astype(np.uint8)
        if size == 2:
            self.bytes[offset + 1] = (values >> 8).astype(np.uint8)

    def read_scalars(self, address: int, count: int) -> list[int]:
        """Loads ``count`` dwords for scalar registers, as ints."""
        self.check(np.array([address], np.int64), 4 * count, "scalar load")
        offset = (address - self.base) >> 2
        return self.dwords[offset : offset + count].tolist()
