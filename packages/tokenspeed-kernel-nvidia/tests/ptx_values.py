"""Numbers in registers, and memory, for `ptx`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Lanes = Any  # an array of a number for each lane
_UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}


# -- numbers: registers are uint64 -------------------------------------------------------------------------------------------------


def width(kind: str) -> int:
    """Bits of a PTX type."""
    return 1 if kind == "pred" else int(re.sub(r"\D", "", kind))


def cut(x: Lanes, kind: str) -> Lanes:
    """The bits that a register of a type has."""
    return x & np.uint64((1 << width(kind)) - 1)


def number(x: Lanes, kind: str) -> Lanes:
    """The value of a register."""
    if kind == "f32":
        return cut(x, kind).astype(np.uint32).view(np.float32)
    narrow = cut(x, kind).astype(_UNSIGNED[width(kind)])
    return narrow.view(_SIGNED[width(kind)]).astype(np.int64) if kind[0] == "s" else narrow.astype(np.uint64)


def register(x: Lanes) -> Lanes:
    """What a register has of a value."""
    x = np.asarray(x)
    if x.dtype == np.float32:
        return x.view(np.uint32).astype(np.uint64)
    return x if x.dtype == np.uint64 else x.astype(np.int64).view(np.uint64)


def widen(x: Lanes, kind: str) -> Lanes:
    """Floats of 16 or 8 bits, as uint16, in float32."""
    if kind == "e5m2":
        return (x.astype(np.uint16) << np.uint16(8)).view(np.float16).astype(np.float32)
    if kind == "e4m3":
        sign, field, rest = 1 - 2 * (x >> 7 & 1).astype(np.float32), (x >> 3 & 15).astype(np.int32), (x & 7).astype(np.float32)
        value = np.where(field > 0, 8 + rest, rest) * np.exp2(np.maximum(field, 1) - 10.0)
        return np.where((x & 0x7F) == 0x7F, np.nan, sign * value).astype(np.float32)
    if "bf16" in kind:
        return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return x.astype(np.uint16).view(np.float16).astype(np.float32)


def narrowed(x: Lanes, kind: str) -> Lanes:
    """float32 rounded to 16 bits, as uint16."""
    if "bf16" not in kind:
        return x.astype(np.float16).view(np.uint16)
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + np.uint64(0x7FFF) + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def halves(x: Lanes) -> tuple[Lanes, Lanes]:
    return tuple(((x >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.uint16) for shift in (0, 16))  # type: ignore[return-value]


def rounded_to_e4m3(x: Lanes) -> Lanes:
    """The codes of float32, saturating."""
    codes = torch.from_numpy(x.copy()).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.numpy().astype(np.uint64)


def parts(x: Lanes, size: int) -> list[Lanes]:
    """Those of so many bytes of 32 bits, as uint16, the lowest first."""
    mask = np.uint64((1 << 8 * size) - 1)
    return [((x >> np.uint64(8 * at)) & mask).astype(np.uint16) for at in range(0, 4, size)]


def joined(low: Lanes, high: Lanes) -> Lanes:
    return low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(16)


# -- memory ------------------------------------------------------------------------------------------------------------------------


class Memory:
    """Bytes from an address on. They begin as ones, which are NaN in all types of floats."""

    def __init__(self, size: int, base: int) -> None:
        self.data = np.full(size, 0xFF, np.uint8)
        self.base, self.top = base, base

    def place(self, address: int, size: int) -> slice:
        first = int(address) - self.base
        assert 0 <= first <= len(self.data) - size, f"{size} bytes at {int(address):#x}"
        return slice(first, first + size)

    def _elements(self, addresses: Lanes, size: int) -> tuple[Any, Any]:
        offsets = addresses.astype(np.int64) - self.base
        assert ((offsets >= 0) & (offsets + size <= len(self.data))).all(), "an address out of range"
        assert (offsets % size == 0).all(), "an address that is not aligned"
        return self.data.view(_UNSIGNED[8 * size]), offsets // size

    def load(self, addresses: Lanes, size: int) -> Lanes:
        view, index = self._elements(addresses, size)
        return view[index].astype(np.uint64)

    def store(self, addresses: Lanes, values: Lanes, size: int) -> None:
        view, index = self._elements(addresses, size)
        view[index] = values.astype(view.dtype)

    def put(self, array: Any) -> int:
        """Lays an array somewhere, with room around it. Returns its address."""
        content = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        self.top = (self.top + 4096) // 256 * 256
        address, self.top = self.top, self.top + len(content)
        self.data[self.place(address, len(content))] = content
        return address

    def get(self, address: int, dtype: Any, *shape: int) -> Any:
        """An array that lies at an address."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.data[self.place(address, size)].copy().view(dtype).reshape(shape)


@dataclass
class Mbarrier:
    """A barrier in shared memory."""

    arrivals: int
    pending: int
    phase: int = 0
    bytes: int = 0

    def arrive(self, count: int = 1, expected: int = 0, arrived: int = 0) -> None:
        self.bytes += expected - arrived
        self.pending -= count
        assert self.pending >= 0, "more arrivals than a barrier has"
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.arrivals
