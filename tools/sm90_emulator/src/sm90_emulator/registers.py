"""Allocates memory for operands: the registers of a warp, constants, and special registers."""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING

import numpy as np

from kernel_emulation.errors import UnknownInstruction
from sm90_emulator.assembly import Kernel, Scope, bits_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

LANES = 32
NONE = -(2**31)
SINK = -1
_AXES = "xyz"
# Special registers, in the order of the enumeration in machine.h.
SPECIAL = (
    *(f"%tid.{axis}" for axis in _AXES), *(f"%ntid.{axis}" for axis in _AXES), *(f"%ctaid.{axis}" for axis in _AXES),
    *(f"%nctaid.{axis}" for axis in _AXES), "%laneid", "%warpid", "%nwarpid", "%smid", "%nsmid",
    *(f"%clusterid.{axis}" for axis in _AXES), *(f"%nclusterid.{axis}" for axis in _AXES),
    *(f"%cluster_ctaid.{axis}" for axis in _AXES), "%cluster_ctarank", "%cluster_nctarank", "<shared>", "<parameters>",
    "%dynamic_smem_size", "<local>", *(f"%cluster_nctaid.{axis}" for axis in _AXES),
)  # fmt: skip
_LANE_MASKS = {
    "%lanemask_lt": lambda lane: (1 << lane) - 1,
    "%lanemask_le": lambda lane: (2 << lane) - 1,
    "%lanemask_eq": lambda lane: 1 << lane,
    "%lanemask_ge": lambda lane: 0xFFFFFFFF & ~((1 << lane) - 1),
    "%lanemask_gt": lambda lane: 0xFFFFFFFF & ~((2 << lane) - 1),
}
_FLOATS = {"f16": "<e", "f32": "<f", "f64": "<d"}


def room_of(kind: str) -> int:
    """Returns the number of bytes that a register occupies for a whole warp."""
    bits = bits_of(kind)
    return 4 if bits == 1 else LANES * (8 if bits == 64 else 4)


class Registers:
    """Offsets of registers and constants, assigned at first use. Offsets of constants are negative; see `machine.h`."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.special = [-1] * 40
        self.kinds: dict[str, str] = {}
        self._places: dict[str, int] = {}
        self._top = 0
        self._predicates: list[int] = []
        self._constants: dict[bytes, int] = {}
        self._pool = bytearray()

    @property
    def size(self) -> int:
        """Returns the number of bytes of all registers of a warp."""
        return self._top

    @property
    def constants(self) -> NDArray[np.uint8]:
        """Returns the bytes of all constants, aligned to 64 bytes."""
        room = np.zeros(len(self._pool) + 64, np.uint8)
        start = -room.ctypes.data % 64
        aligned = room[start : start + len(self._pool)]
        aligned[:] = np.frombuffer(bytes(self._pool), np.uint8)
        return aligned

    def place(self, name: str, kind: str) -> int:
        """Returns the offset of a register, assigned at first use."""
        if name not in self._places:
            self.kinds[name] = kind
            if kind == "pred":
                if not self._predicates:
                    self._predicates = list(range(self._top + 60, self._top - 4, -4))
                    self._top += 64
                self._places[name] = self._predicates.pop()
            else:
                self._places[name] = self._top
                self._top += room_of(kind)
        return self._places[name]

    def temporary(self, kind: str) -> int:
        """Returns the offset of a new register."""
        return self.place(f"<{len(self._places)}>", kind)

    def constant(self, value: int, room: int) -> int:
        """Returns the offset of an integer constant that is equal in all lanes. ``room`` is its number of bytes per warp: 4 for a
        predicate (all its bits), 128 or 256.
        """
        if room == 4:
            return self._kept(struct.pack("<I", value & 0xFFFFFFFF) * 16)
        size = room // LANES
        return self._kept((value & ((1 << 8 * size) - 1)).to_bytes(size, "little") * LANES)

    def _kept(self, content: bytes) -> int:
        if content not in self._constants:
            self._constants[content] = -(len(self._pool) + 4)
            self._pool += content
        return self._constants[content]

    def kind_of(self, operand: str, scope: Scope) -> str | None:
        """Returns the declared type of a register; None if the operand is no register."""
        found = scope.register(operand)
        return None if found is None else found.kind

    def symbol(self, name: str) -> int:
        """Returns the offset of the register that holds a special register's value."""
        index = SPECIAL.index(name)
        if self.special[index] < 0:
            self.special[index] = self.place(name, "b64" if name == "<parameters>" else "b32")
        return self.special[index]

    def read(self, operand: str, kind: str, scope: Scope, text: str = "") -> int:
        """Returns the offset of a source operand: a register, a constant or a special register.

        Raises:
            UnknownInstruction: the operand is none of these.
        """
        found = scope.register(operand)
        if found is not None:
            return self.place(found.name, found.kind)
        if operand in SPECIAL:
            return self.symbol(operand)
        if operand in _LANE_MASKS:
            return self._kept(b"".join(struct.pack("<I", _LANE_MASKS[operand](lane)) for lane in range(LANES)))
        if operand == "WARP_SZ":
            return self.constant(LANES, room_of(kind))
        value = immediate(operand, kind)
        if value is None:
            raise UnknownInstruction(f"operand {operand} of {text or 'an instruction'}", self.kernel.name)
        return self.constant(value, room_of(kind))

    def write(self, operand: str, scope: Scope, text: str = "") -> int:
        """Returns the offset of a destination register; SINK for ``_``."""
        if operand == "_":
            return SINK
        found = scope.register(operand)
        if found is None:
            raise UnknownInstruction(f"{operand} of {text or 'an instruction'} is no register", self.kernel.name)
        return self.place(found.name, found.kind)


def immediate(operand: str, kind: str) -> int | None:
    """Returns the bits of a literal, as a value of a type; None if the operand is no literal."""
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", operand):
        bits = int(operand[2:], 16)
        if kind == "f64":
            return int.from_bytes(struct.pack("<d", struct.unpack("<f", struct.pack("<I", bits))[0]), "little")
        return bits
    if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", operand):
        bits = int(operand[2:], 16)
        if kind == "f32":
            return int.from_bytes(struct.pack("<f", struct.unpack("<d", struct.pack("<Q", bits))[0]), "little")
        return bits
    if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", operand):
        value = int(operand.rstrip("U"), 0) if not re.fullmatch(r"-?0\d+U?", operand) else int(operand.rstrip("U"), 8)
        if kind == "pred":
            return 0xFFFFFFFF if value else 0
        if kind in _FLOATS:
            return int.from_bytes(struct.pack(_FLOATS[kind], float(value)), "little")
        return value
    if kind in _FLOATS and re.fullmatch(r"-?\d*\.?\d+([eE][-+]?\d+)?\.?\d*", operand):
        return int.from_bytes(struct.pack(_FLOATS[kind], float(operand)), "little")
    return None
