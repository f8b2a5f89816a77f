"""Reads of another lane's register: data-parallel primitives (DPP), within rows of 16 lanes and across rows, and swizzles.

Lane maps follow "DPP_CTRL" of AMD's CDNA3 ISA document (section on DPP), which CDNA4 shares.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from gfx950_emulator.binding import Site
from gfx950_emulator.constants import WAVE
from gfx950_emulator.group import Group

_LANES = np.arange(WAVE)
_ROW, _AT = _LANES // 16 * 16, _LANES % 16


@dataclass(frozen=True)
class DppPlan:
    """The source lane of every lane of a wave.

    Attributes:
        index: int64 [64], the source lane; arbitrary for lanes without a source.
        valid: bool [64], whether there is a source lane.
        enabled: bool [64], lanes that may be written, from row_mask and bank_mask.
        zero: the bit bound_ctrl. If set, lanes without a source read zero; otherwise they are not written.
        total: whether every lane has a source and is written.
    """

    index: np.ndarray
    valid: np.ndarray
    enabled: np.ndarray
    zero: bool

    @property
    def overwrites(self) -> bool:
        """Whether every active lane is written, so that the destination's old value does not matter."""
        return bool(self.enabled.all() and (self.zero or self.valid.all()))

    @property
    def total(self) -> bool:
        return bool(self.valid.all() and self.enabled.all())


def dpp_lanes(control: str, argument: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the source lane of every lane, and whether the source lane exists, for ``quad_perm``, ``row_shl``, ``row_bcast`` and
    so on."""
    everywhere = np.ones(WAVE, bool)
    if control == "quad_perm":
        return _LANES // 4 * 4 + np.array(argument)[_LANES % 4], everywhere
    if control in ("row_shl", "row_shr"):
        at = _AT + (argument if control == "row_shl" else -argument)
        return _ROW + at % 16, (at >= 0) & (at < 16)
    if control == "row_ror":
        return _ROW + (_AT - argument) % 16, everywhere
    if control in ("wave_shl", "wave_shr"):
        at = _LANES + (1 if control == "wave_shl" else -1)
        return at % WAVE, (at >= 0) & (at < WAVE)
    if control in ("wave_rol", "wave_ror"):
        return (_LANES + (1 if control == "wave_rol" else -1)) % WAVE, everywhere
    if control == "row_mirror":
        return _ROW + 15 - _AT, everywhere
    if control == "row_half_mirror":
        return _LANES // 8 * 8 + 7 - _LANES % 8, everywhere
    if control == "row_bcast" and argument == 15:  # lane 15 of each row is broadcast to the next row
        return (_ROW - 1) % WAVE, _LANES >= 16
    if control == "row_bcast" and argument == 31:  # lane 31 is broadcast to rows 2 and 3
        return np.full(WAVE, 31), _LANES >= 32
    if control == "row_newbcast":
        return _ROW + argument, everywhere
    raise ValueError(f"DPP control {control}:{argument}")


_CONTROLS = (
    "quad_perm", "row_shl", "row_shr", "row_ror", "wave_shl", "wave_shr", "wave_rol", "wave_ror", "row_mirror",
    "row_half_mirror", "row_bcast", "row_newbcast",
)  # fmt: skip


def dpp_plan(site: Site) -> DppPlan:
    """Reads an instruction's DPP modifiers, and returns the source lanes."""
    controls = [name for name in _CONTROLS if name in site.modifiers]
    if len(controls) != 1:
        raise site.unknown(f"expected one DPP control, found {controls}")
    try:
        index, valid = dpp_lanes(controls[0], site.take(controls[0]))
    except ValueError as error:
        raise site.unknown(str(error)) from None
    rows, banks = int(site.take("row_mask", 15)), int(site.take("bank_mask", 15))
    enabled = ((rows >> (_LANES // 16)) & (banks >> (_LANES % 16 // 4)) & 1).astype(bool)
    # LLVM writes bound_ctrl:1 (older: bound_ctrl:0) for the bit that makes lanes without a source read zero.
    return DppPlan(index, valid, enabled, site.take("bound_ctrl") is not None)


def dpp_read(group: Group, row: np.ndarray, plan: DppPlan) -> tuple[np.ndarray, np.ndarray]:
    """Moves a register's values across lanes. Returns the moved values, uint32 [L], and the lanes to write, bool [L]."""
    waves = group.waves
    moved = row.reshape(waves, WAVE).take(plan.index, axis=1).reshape(-1)
    if group.full and plan.total:
        return moved, group.mask
    valid = np.tile(plan.valid, waves)
    if not group.full:  # an inactive lane provides no value
        valid &= group.mask.reshape(waves, WAVE).take(plan.index, axis=1).reshape(-1)
    written = np.tile(plan.enabled, waves) & group.mask
    if plan.zero:
        moved[~valid] = 0
    else:
        written &= valid
    return moved, written


# ds_swizzle_b32: the offset encodes the pattern ("DS_SWIZZLE_B32", CDNA3 ISA document; names: LLVM's AMDGPUModifierSyntax.html)

_QUAD, _ROTATE, _FFT = 0x8000, 0xC000, 0xE000


def _bitmask(and_mask: int, or_mask: int, xor_mask: int) -> int:
    return and_mask | or_mask << 5 | xor_mask << 10


def _swizzle_code(text: str) -> int:
    """Encodes an offset that LLVM writes as text: ``swizzle(SWAP,16)``."""
    match = re.fullmatch(r'swizzle\((\w+),([\w,"]+)\)', text.replace(" ", ""))
    if match is None:
        raise ValueError(f"swizzle {text!r}")
    mode = match[1]
    if mode == "BITMASK_PERM":
        bits = [{"0": (0, 0, 0), "1": (0, 1, 0), "p": (1, 0, 0), "i": (1, 0, 1)}[c] for c in match[2].strip('"')]
        return _bitmask(*(int("".join(str(bit[i]) for bit in bits), 2) for i in range(3)))
    numbers = [int(number, 0) for number in match[2].split(",")]
    if mode == "QUAD_PERM":
        return _QUAD | sum(source << 2 * i for i, source in enumerate(numbers))
    if mode == "ROTATE":
        return _ROTATE | numbers[0] << 10 | numbers[1] << 5
    if mode == "FFT":
        return _FFT | numbers[0]
    if mode == "SWAP":
        return _bitmask(31, 0, numbers[0])
    if mode == "REVERSE":
        return _bitmask(31, 0, numbers[0] - 1)
    if mode == "BROADCAST":
        return _bitmask(32 - numbers[0], numbers[1], 0)
    raise ValueError(f"swizzle {text!r}")


def swizzle_lanes(offset: object) -> np.ndarray:
    """Returns the source lane of each lane of a wave for ds_swizzle_b32. ``offset`` is a number, or text as LLVM writes it.

    Raises:
        ValueError: the text is unknown.
    """
    code = offset if isinstance(offset, int) else _swizzle_code(str(offset))
    low, mask = _LANES & 31, code & 31
    if code >= _FFT:
        reversed_ = sum(((low >> i) & 1) << (4 - i) for i in range(5))
        source = reversed_ >> mask.bit_count() | low & mask
    elif code >= _ROTATE:
        distance = (code >> 5 & 31) * (-1 if code >> 10 & 1 else 1)
        source = low & mask | (low + distance) & ~mask & 31
    elif code >= _QUAD:
        return _LANES // 4 * 4 + np.array([code >> 2 * i & 3 for i in range(4)])[_LANES % 4]
    else:
        source = (low & mask | code >> 5 & 31) ^ (code >> 10 & 31)
    return source | _LANES & 32
