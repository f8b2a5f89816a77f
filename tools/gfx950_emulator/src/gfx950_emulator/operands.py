"""Operands as the assembler writes them: ``v3``, ``s[4:5]``, ``-|v2|``, ``sext(v1)``, ``0x3f800000``, ``1.0``, ``vcc``."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from gfx950_emulator.constants import EXEC, M0, MASK32, PRIVATE_APERTURE, SHARED_APERTURE, VCC

# The sanitizer numbers all registers: vector registers by their row, scalar registers from this number on.
SCALAR_BASE = 1024
SCC_ID = SCALAR_BASE + 200

_SPECIAL = {
    "vcc": (VCC, 2), "vcc_lo": (VCC, 1), "vcc_hi": (VCC + 1, 1),
    "exec": (EXEC, 2), "exec_lo": (EXEC, 1), "exec_hi": (EXEC + 1, 1),
    "m0": (M0, 1), "flat_scratch": (102, 2), "flat_scratch_lo": (102, 1), "flat_scratch_hi": (103, 1),
    "xnack_mask": (104, 2), "xnack_mask_lo": (104, 1), "xnack_mask_hi": (105, 1),
}  # fmt: skip
# Apertures of flat addresses, 64 bits. A 32-bit operand reads the lower half, which is zero for a base.
_APERTURES = {
    "src_shared_base": SHARED_APERTURE, "src_shared_limit": SHARED_APERTURE | MASK32,
    "src_private_base": PRIVATE_APERTURE, "src_private_limit": PRIVATE_APERTURE | MASK32,
}  # fmt: skip
_REGISTER = re.compile(r"^([vas])(\d+)$|^([vas])\[(\d+)(?::(\d+))?\]$")


@dataclass(frozen=True)
class Operand:
    """One operand of an instruction.

    Attributes:
        file: the register file: ``"v"`` (rows of `Group.registers`, accumulation registers included) or ``"s"`` (scalar registers).
            Or ``"literal"``, or ``"off"``.
        index, count: the operand's first register, and its number of registers; a literal's count is 0.
        literal: the value as written: an int for integers and hex, a float for floating point.
        raw: whether the literal was written in hex, which gives bits rather than a value.
        negate, absolute, sign_extend: input modifiers.
    """

    file: str
    index: int = 0
    count: int = 0
    literal: int | float = 0
    raw: bool = False
    negate: bool = False
    absolute: bool = False
    sign_extend: bool = False
    text: str = ""

    @property
    def ids(self) -> range:
        """The sanitizer's numbers of the operand's registers."""
        base = SCALAR_BASE if self.file == "s" else 0
        return range(base + self.index, base + self.index + self.count)

    def bits(self, dtype: np.dtype) -> np.generic:
        """Returns a literal as a value of ``dtype``.

        Inline floats and integers have the operand's type. A hex literal is 32 bits, unchanged: for a float64 it is the upper half.
        For wider integers it is extended by its sign or by zeros.
        """
        dtype = np.dtype(dtype)
        if isinstance(self.literal, float):
            if dtype.kind == "f":
                return dtype.type(self.literal)
            pattern = {2: "<e", 4: "<f", 8: "<d"}[dtype.itemsize]
            packed = struct.pack(pattern, self.literal)
            return np.frombuffer(packed, dtype)[0]
        value = self.literal
        if dtype.kind == "f":
            width = dtype.itemsize * 8
            if width == 64 and self.raw:
                value <<= 32
            return np.array([value & ((1 << width) - 1)], f"<u{dtype.itemsize}").view(dtype)[0]
        width = dtype.itemsize * 8
        if self.raw and width == 64 and dtype.kind == "i" and value & 0x80000000:
            value -= 1 << 32
        return np.array([value & ((1 << width) - 1)], f"<u{dtype.itemsize}").view(dtype)[0]


def parse_operand(text: str, vgprs: int) -> Operand:
    """Parses one operand. Accumulation registers are numbered as rows, starting with row ``vgprs``.

    Raises:
        ValueError: the text is not a known operand.
    """
    whole, negate, absolute, sign_extend = text, False, False, False
    if text.startswith("neg(") and text.endswith(")"):
        negate, text = True, text[4:-1]
    if text.startswith("sext(") and text.endswith(")"):
        sign_extend, text = True, text[5:-1]
    if text.startswith("-") and len(text) > 1 and not text[1].isdigit():
        negate, text = True, text[1:]
    if text.startswith("|") and text.endswith("|"):
        absolute, text = True, text[1:-1]
    elif text.startswith("abs(") and text.endswith(")"):
        absolute, text = True, text[4:-1]
    modifiers: dict[str, Any] = {"negate": negate, "absolute": absolute, "sign_extend": sign_extend, "text": whole}
    if match := _REGISTER.match(text):
        if match[1]:
            file, first, last = match[1], int(match[2]), int(match[2])
        else:
            file, first = match[3], int(match[4])
            last = int(match[5] or first)
        base = vgprs if file == "a" else 0
        return Operand("s" if file == "s" else "v", base + first, last - first + 1, **modifiers)
    if text in _SPECIAL:
        index, count = _SPECIAL[text]
        return Operand("s", index, count, **modifiers)
    if text in _APERTURES:
        return Operand("literal", literal=_APERTURES[text], raw=True, **modifiers)
    if text == "off":
        return Operand("off", text=whole)
    try:
        if re.fullmatch(r"-?0x[0-9a-fA-F]+", text):
            return Operand("literal", literal=int(text, 16), raw=True, **modifiers)
        if re.fullmatch(r"-?\d+", text):
            return Operand("literal", literal=int(text), **modifiers)
        return Operand("literal", literal=float(text), **modifiers)
    except ValueError:
        raise ValueError(f"operand {whole!r} is not known") from None
