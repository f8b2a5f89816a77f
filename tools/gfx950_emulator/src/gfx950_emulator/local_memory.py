"""Local data share (LDS): one block per workgroup slot, addressed in bytes.

Access sizes, alignment and out-of-range behaviour follow the chapter on the data share of AMD's CDNA3 ISA document: reads beyond
the allocation return zero, writes beyond it are dropped. The sanitizer reports both kinds of accesses, except for direct loads that
a wave disables by an address beyond the allocation.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gfx950_emulator.architecture import GFX950, Architecture
from gfx950_emulator.group import Group
from gfx950_emulator.memory import Fault
from gfx950_emulator.outstanding import Deferred


class LocalMemory:
    """The LDS of all workgroups of a batch.

    Attributes:
        size: number of bytes that a workgroup has allocated.
        stride: number of bytes from one workgroup slot to the next.
        bytes, dwords: the memory of all slots, as uint8 and uint32.
        shadow: the sanitizer's record of readers and writers, or None.
    """

    def __init__(self, slots: int, size: int, architecture: Architecture = GFX950) -> None:
        limit = architecture.device.lds_bytes
        if size > limit:
            raise ValueError(f"a workgroup asks for {size} bytes of LDS; {architecture.name} has {limit}")
        self.size = size
        self.stride = (size + 31) & ~15  # includes padding past the end, which no kernel reads
        self.bytes = np.zeros(slots * self.stride, np.uint8)
        self.dwords = self.bytes.view(np.uint32)
        self.shadow: Any = None

    def bases(self, group: Group) -> np.ndarray:
        """Returns the start of each lane's LDS block, int64 [L]."""
        if group.lds is None:
            group.lds = np.repeat(group.slot * self.stride, 64)
        return group.lds

    def place(
        self, group: Group, offsets: np.ndarray, lanes: np.ndarray | None, size: int, what: str
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Checks the int64 offsets of LDS accesses of ``size`` bytes.

        Returns:
            Addresses as indices of `bytes`, and bool [N]: whether each access is inside the allocation (None if all are).
        """
        base = self.bases(group) if lanes is None else self.bases(group)[lanes]
        if len(offsets) and (int(offsets.max()) + size > self.size or int(offsets.min()) < 0):
            inside = (offsets >= 0) & (offsets + size <= self.size)
            if self.shadow is not None:
                bad = int(offsets[~inside][0])
                raise Fault("out-of-bounds", f"LDS {what} of {size} bytes at {bad:#x}; the workgroup has {self.size} bytes")
            return np.where(inside, offsets, 0) + base, inside
        return offsets + base, None

    def load(self, addresses: np.ndarray, count: int) -> np.ndarray:
        """Loads ``count`` dwords from each address: uint32 [count, N]."""
        if (addresses & 3).any():
            columns = addresses[:, None] + np.arange(4 * count)
            return np.ascontiguousarray(self.bytes[columns].view(np.uint32).T)
        at = addresses >> 2
        if count == 1:
            return self.dwords.take(at)[None]
        return self.dwords.take(at + np.arange(count)[:, None])

    def load_small(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Loads one or two bytes from each address, zero-extended: uint32 [N]."""
        value = self.bytes.take(addresses).astype(np.uint32)
        if size == 2:
            value |= self.bytes.take(addresses + 1).astype(np.uint32) << 8
        return value

    def store(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """Stores dwords, uint32 [count, N]. If several lanes have the same address, the last lane wins."""
        count = len(values)
        if (addresses & 3).any():
            columns = addresses[:, None] + np.arange(4 * count)
            self.bytes[columns] = np.ascontiguousarray(values.T).view(np.uint8)
            return
        self.dwords[(addresses >> 2) + np.arange(count)[:, None]] = values

    def store_small(self, addresses: np.ndarray, values: np.ndarray, size: int) -> None:
        self.bytes[addresses] = values.astype(np.uint8)
        if size == 2:
            self.bytes[addresses + 1] = (values >> 8).astype(np.uint8)

    def arrive(self, group: Group, entry: Deferred) -> None:
        """Writes the data of a direct load to LDS, when the load completes."""
        if len(entry.addresses):
            self.store(entry.addresses, entry.values)
            if self.shadow is not None:
                self.shadow.arrive(group, entry)
