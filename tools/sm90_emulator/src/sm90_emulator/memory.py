"""Global memory for launches of PTX text, with bounds for each array in it."""

from __future__ import annotations

from typing import Any

import numpy as np

_ALIGNMENT = 256


class Memory:
    """Memory that kernels may access. All bits are initially one, which is NaN in all float types.

    Args:
        size: number of bytes for all arrays and for the gaps between them.
    """

    def __init__(self, size: int) -> None:
        self._room = np.full(size + _ALIGNMENT, 0xFF, np.uint8)
        self._base = int(self._room.ctypes.data)
        self._top = -(-self._base // _ALIGNMENT) * _ALIGNMENT
        self.ranges: list[tuple[int, int]] = []

    def put(self, array: Any) -> int:
        """Copies an array into the memory, with an inaccessible gap around it.

        Returns:
            The array's address.

        Raises:
            MemoryError: the memory has too little room.
        """
        content = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        address = self._top
        end = address + len(content)
        if end > self._base + len(self._room):
            raise MemoryError(f"{len(content)} bytes in a memory of {len(self._room)}")
        self._room[address - self._base : end - self._base] = content
        self.ranges.append((address, end))
        self._top = (end // _ALIGNMENT + 2) * _ALIGNMENT
        return address

    def get(self, address: int, dtype: Any, *shape: int) -> Any:
        """Returns a copy of the memory at an address, as an array."""
        at = address - self._base
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self._room[at : at + size].copy().view(dtype).reshape(shape)
