"""Makes tensor maps. A tensor map tells sm_90's TMA hardware a tensor's layout in memory and the shape of the tiles to copy."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from kernel_emulation.errors import EmulationError

# Bytes per element; the index is the element type's number in CUDA's driver API.
_BYTES = (1, 2, 4, 4, 8, 8, 2, 4, 8, 4, 2, 4, 4)


def tensor_map(
    address: int, kind: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int = 0, nan: bool = False
) -> bytes:
    """Makes the 128-byte tensor map that CUDA's driver would make; `tensor_map` in native/copies.h has its layout.

    Args:
        address: address of the first element.
        kind: element type, a number of ``CUtensorMapDataType``.
        sizes: sizes of the axes, the contiguous axis last.
        strides: strides of the axes, in bytes.
        box: sizes of a tile, in elements.
        swizzle: 0: none, 1: 32 bytes, 2: 64 bytes, 3: 128 bytes.
        nan: whether elements outside of the tensor are NaN instead of 0.

    Raises:
        EmulationError: the driver would reject such a map.
    """
    rank, size = len(sizes), _BYTES[kind]
    row = box[-1] * size
    wrong = (
        f"an address of {address:#x}" if address % 16
        else f"{rank} axes" if not 1 <= rank <= 5 or len(strides) != rank or len(box) != rank
        else f"sizes {tuple(sizes)}" if not all(0 < length <= 1 << 32 for length in sizes)
        else f"strides of {tuple(strides)} bytes" if any(step % 16 or not 0 <= step < 1 << 40 for step in strides[:-1])
        else f"a tile of {tuple(box)}" if not all(0 < length <= 256 for length in box) or row % 16
        else f"rows of {row} bytes in tiles swizzled by {16 << swizzle}" if swizzle and row > 16 << swizzle
        else ""
    )  # fmt: skip
    if wrong or strides[-1] != size:
        raise EmulationError(f"CUDA makes no tensor map with {wrong or f'a last axis whose stride is {strides[-1]} bytes'}")
    words = [0] * 32
    words[0], words[1] = address & 0xFFFFFFFF, address >> 32
    words[2] = 2 | (rank - 1) << 4 | kind << 7 | swizzle << 13 | nan << 15
    for axis, (length, step) in enumerate(zip(reversed(sizes), reversed(strides), strict=True)):
        words[8 + axis] = length - 1
        if axis:
            words[2 + axis] = step >> 4 & 0xFFFFFFFF
            words[7] |= step >> 36 << 4 * (axis - 1)
    packed = bytearray(struct.pack("<32I", *words))
    packed[55 : 55 + rank] = bytes(length - 1 for length in reversed(box))
    return bytes(packed)
