"""Data formats of typed buffer accesses: conversion between memory and 32-bit or 16-bit registers.

Sources: CDNA4 ISA document, tables "Microcode Formats" (codes) and sections "VGPR Usage" and "Buffer Data" (what loads return:
floats of normalised, scaled and float formats, integers of integer formats, the bits of 32-bit elements). A name lists the widths
from the highest bit on, so the first element is in the lowest bits. 10-bit and 11-bit floats have no sign, 5 bits of exponent with
bias 15, and 5 or 6 bits of mantissa (the packed formats of graphics APIs).

The document does not say how stores round. Normalised elements are clamped and rounded to nearest even here, as graphics APIs
demand. Stores to scaled formats and to 10-bit and 11-bit floats are not implemented.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gfx950_emulator.memory import Fault

# Code -> widths of the elements, from the lowest bit on.
_WIDTHS: dict[int, tuple[int, ...]] = {
    1: (8,), 2: (16,), 3: (8, 8), 4: (32,), 5: (16, 16), 6: (11, 11, 10), 7: (10, 11, 11), 8: (2, 10, 10, 10), 9: (10, 10, 10, 2),
    10: (8,) * 4, 11: (32,) * 2, 12: (16,) * 4, 13: (32,) * 3, 14: (32,) * 4,
}  # fmt: skip
_DATA_NAMES = {
    name: code
    for code, name in enumerate(
        ("8", "16", "8_8", "32", "16_16", "10_11_11", "11_11_10", "10_10_10_2", "2_10_10_10", "8_8_8_8", "32_32", "16_16_16_16",
         "32_32_32", "32_32_32_32"), 1,
    )
}  # fmt: skip
_NUMBERS = {0: "unorm", 1: "snorm", 2: "uscaled", 3: "sscaled", 4: "uint", 5: "sint", 7: "float"}


@dataclass(frozen=True)
class BufferFormat:
    """A data format and a numeric format.

    Attributes:
        widths: bits of each element, from the lowest bit on.
        number: ``"unorm"``, ``"snorm"``, ``"uscaled"``, ``"sscaled"``, ``"uint"``, ``"sint"`` or ``"float"``.
    """

    widths: tuple[int, ...]
    number: str

    @property
    def size(self) -> int:
        """Bytes of all elements."""
        return sum(self.widths) // 8

    @property
    def integer(self) -> bool:
        """Whether registers hold integers."""
        return self.number in ("uint", "sint")

    def decode(self, data: np.ndarray) -> list[np.ndarray]:
        """Converts memory, uint8 [N, size], to a 32-bit register per element, uint32 [N]."""
        return [self._loaded(bits, width) for bits, width in zip(self._elements(data), self.widths, strict=True)]

    def encode(self, registers: list[np.ndarray]) -> np.ndarray:
        """Converts 32-bit registers, one uint32 [N] per element, to memory, uint8 [N, size]."""
        total = np.zeros((len(registers[0]), self.size), np.uint8)
        shift = 0
        for register, width in zip(registers, self.widths, strict=True):
            bits = self._stored(register, width).astype(np.uint64)
            octets = (bits << np.uint64(shift % 8)).astype("<u8")[:, None].view(np.uint8)
            count = -(-(shift % 8 + width) // 8)
            total[:, shift // 8 : shift // 8 + count] |= octets[:, :count]
            shift += width
        return total

    def _elements(self, data: np.ndarray) -> list[np.ndarray]:
        """Returns the elements' bits, uint32 [N]."""
        found, shift = [], 0
        for width in self.widths:
            octets = np.zeros((len(data), 8), np.uint8)
            part = data[:, shift // 8 : -(-(shift + width) // 8)]
            octets[:, : part.shape[1]] = part
            word = octets.view("<u8")[:, 0] >> np.uint64(shift % 8)
            found.append((word & np.uint64((1 << width) - 1)).astype(np.uint32))
            shift += width
        return found

    def _loaded(self, bits: np.ndarray, width: int) -> np.ndarray:
        if width == 32 or self.number == "uint":
            return bits
        sign = np.uint32(1 << (width - 1))
        signed = ((bits ^ sign) - sign).view(np.int32)
        if self.number == "sint":
            return signed.view(np.uint32)
        with np.errstate(all="ignore"):
            convert: dict[str, Callable[[], np.ndarray]] = {
                "unorm": lambda: bits / float((1 << width) - 1),
                "snorm": lambda: np.maximum(signed / float(max(1, (1 << (width - 1)) - 1)), -1.0),
                "uscaled": lambda: bits.astype(np.float64),
                "sscaled": lambda: signed.astype(np.float64),
                "float": lambda: self._float(bits, width),
            }
            return convert[self.number]().astype(np.float32).view(np.uint32)

    @staticmethod
    def _float(bits: np.ndarray, width: int) -> np.ndarray:
        if width == 16:
            return bits.astype(np.uint16).view(np.float16)
        if width not in (10, 11):
            raise Fault("resource", f"a float of {width} bits is no buffer format")
        # An unsigned float is an f16 without its sign, whose lowest bits of the mantissa are missing.
        return (bits << np.uint32(15 - width)).astype(np.uint16).view(np.float16)

    def _stored(self, register: np.ndarray, width: int) -> np.ndarray:
        if width == 32:
            return register
        if self.integer:
            return register & np.uint32((1 << width) - 1)
        value = register.view(np.float32)
        if self.number == "float" and width == 16:
            with np.errstate(all="ignore"):
                return value.astype(np.float16).view(np.uint16)
        if self.number not in ("unorm", "snorm"):
            raise Fault("resource", f"a store of {width}-bit elements as {self.number} is not implemented")
        low, most = (0.0, (1 << width) - 1) if self.number == "unorm" else (-1.0, (1 << (width - 1)) - 1)
        known = np.where(np.isnan(value), np.float32(0), np.clip(value, low, 1.0)).astype(np.float64)
        return np.rint(known * most).astype(np.int64).astype(np.uint32) & np.uint32((1 << width) - 1)


def by_code(data: int, number: int) -> BufferFormat:
    """Returns the format of a resource or an instruction.

    Raises:
        Fault: the codes stand for no format.
    """
    if data not in _WIDTHS or number not in _NUMBERS:
        raise Fault("resource", f"data format {data} with numeric format {number} is no buffer format")
    return BufferFormat(_WIDTHS[data], _NUMBERS[number])


def by_name(modifier: object) -> BufferFormat:
    """Returns the format that the modifier ``format`` of an instruction names, as LLVM writes it: names in brackets, or a number
    with the data format in the lowest four bits. Without the modifier, it is 8-bit unorm.

    Raises:
        ValueError: the modifier names no format.
    """
    data, number = 1, 0
    if isinstance(modifier, int):
        data, number = modifier & 15, modifier >> 4
    else:
        for word in modifier if isinstance(modifier, tuple) else ():
            name = str(word)
            if name.startswith("BUF_DATA_FORMAT_"):
                data = _DATA_NAMES.get(name.removeprefix("BUF_DATA_FORMAT_"), 0)
            elif name.startswith("BUF_NUM_FORMAT_"):
                wanted = name.removeprefix("BUF_NUM_FORMAT_").lower()
                number = next((code for code, known in _NUMBERS.items() if known == wanted), 6)
    try:
        return by_code(data, number)
    except Fault as fault:
        raise ValueError(f"{modifier}: {fault}") from None
