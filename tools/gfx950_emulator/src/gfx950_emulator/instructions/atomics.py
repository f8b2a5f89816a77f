"""Atomics of global memory and LDS. They are applied lane by lane in lane order, so that results are reproducible."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from gfx950_emulator.group import Group
from gfx950_emulator.memory import Fault


def check_aligned(addresses: np.ndarray, size: int) -> None:
    """Raises `Fault` unless all addresses are multiples of ``size``, because the hardware supports no unaligned atomics."""
    wrong = addresses & (size - 1)
    if wrong.any():
        raise Fault(
            "misaligned", f"atomic of {size} bytes at {int(addresses[int(wrong.argmax())]):#x}, which is no multiple of {size}"
        )


def _wrap(function: Callable[[int, int], int], bits: int) -> Callable[[int, int], int]:
    mask = (1 << bits) - 1
    return lambda old, new: function(old, new) & mask


def _signed(function: Callable[[int, int], int], bits: int) -> Callable[[int, int], int]:
    half, mask = 1 << (bits - 1), (1 << bits) - 1
    return lambda old, new: function((old ^ half) - half, (new ^ half) - half) & mask


def _floating(dtype: type, unsigned: type, function: Callable[[Any, Any], Any]) -> Callable[[int, int], int]:
    def apply(old: int, new: int) -> int:
        a, b = (np.array([x], unsigned).view(dtype)[0] for x in (old, new))
        with np.errstate(all="ignore"):
            return int(np.array([function(a, b)], dtype).view(unsigned)[0])

    return apply


def _packed(dtype_of: Callable[[int], Any], bits_of: Callable[[Any], int]) -> Callable[[int, int], int]:
    def apply(old: int, new: int) -> int:
        low, high = (bits_of(dtype_of(old >> s & 0xFFFF) + dtype_of(new >> s & 0xFFFF)) for s in (0, 16))
        return low | high << 16

    return apply


def _bf16(bits: int) -> np.float32:
    return np.uint32(bits << 16).view(np.float32)


def _to_bf16(value: np.float32) -> int:
    bits = int(np.float32(value).view(np.uint32))
    if np.isnan(value):
        return bits >> 16 | 0x40
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def _f16(bits: int) -> np.float16:
    return np.uint16(bits).view(np.float16)


def _to_f16(value: np.float16) -> int:
    return int(np.float16(value).view(np.uint16))


@cache
def operations(bits: int) -> dict[str, Callable[[int, int], int]]:
    """Returns, by name, the functions that compute an atomic's new value. A function takes the old value and the operand, both as
    bits, and returns the value to store. If either is a NaN, floating-point minimum and maximum keep the old value (the ISA
    document's ``src < tmp ? src : tmp``).
    """
    dtype, unsigned = (np.float32, np.uint32) if bits == 32 else (np.float64, np.uint64)
    table: dict[str, Callable[[int, int], int]] = {
        "swap": lambda old, new: new,
        "add": _wrap(lambda a, b: a + b, bits),
        "sub": _wrap(lambda a, b: a - b, bits),
        "smin": _signed(min, bits),
        "smax": _signed(max, bits),
        "umin": min,
        "umax": max,
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
        "inc": lambda a, b: 0 if a >= b else a + 1,
        "dec": lambda a, b: b if a == 0 or a > b else a - 1,
        f"add_f{bits}": _floating(dtype, unsigned, lambda a, b: a + b),
        f"min_f{bits}": _floating(dtype, unsigned, lambda a, b: b if b < a else a),
        f"max_f{bits}": _floating(dtype, unsigned, lambda a, b: b if b > a else a),
    }
    if bits == 32:
        table["pk_add_bf16"] = _packed(_bf16, _to_bf16)
        table["pk_add_f16"] = _packed(_f16, _to_f16)
    return table


def apply_in_order(
    cells: np.ndarray,
    places: np.ndarray,
    inside: np.ndarray | None,
    kind: str,
    operand: np.ndarray,
    compare: np.ndarray | None,
    changeable: np.ndarray | None = None,
) -> tuple[np.ndarray, bool]:
    """Applies an atomic lane by lane.

    Args:
        cells: the memory, uint8.
        places: int64 [N], the first byte of each lane.
        inside: lanes whose address is in range; None for all lanes. Lanes out of range read zero and write nothing.
        kind: a name of `operations`, or ``"cmpswap"``.
        operand: uint32 or uint64 [N].
        compare: uint32 or uint64 [N], the values with which a ``"cmpswap"`` compares.
        changeable: uint32 or uint64 [N], a mask of the bits that are in bounds. Other bits read as zero and are kept. None for all
            bits.

    Returns:
        The old values, in the operand's type, and whether any value in memory changed. Callers count only a change as progress, so
        that waves that poll with an atomic (a failing cmpswap, say) are recognised as waiting.
    """
    size = operand.dtype.itemsize
    apply: Any = operations(8 * size).get(kind)  # None for "cmpswap", which compares the operand
    before, changed = np.zeros_like(operand), False
    for i, place in enumerate(places.tolist()):
        if inside is not None and not inside[i]:
            continue
        cell = cells[place : place + size].view(operand.dtype)
        bits = -1 if changeable is None else int(changeable[i])
        kept, old = int(cell[0]) & ~bits, int(cell[0]) & bits
        before[i] = old
        if compare is None:
            new = apply(old, int(operand[i]))
        else:
            new = int(operand[i]) if old == int(compare[i]) else old
        if new & bits != old:
            cell[0], changed = kept | new & bits, True
    return before, changed


def operand_of(g: Group, row: int, lanes: np.ndarray | None, words: int) -> np.ndarray:
    """Reads an operand of the given lanes (None: all lanes): one register as uint32, or two registers as uint64."""
    values = g.U[row] if words == 1 else g.pair(row)
    return values if lanes is None else values[lanes]


def write_before(g: Group, row: int, lanes: np.ndarray | None, before: np.ndarray) -> None:
    """Writes the result of an atomic, which is the old value, to a register."""
    words = np.ascontiguousarray(before).view(np.uint32).reshape(len(before), -1).T
    rows = g.registers[row : row + len(words)]
    if lanes is None:
        rows[...] = words
    else:
        rows[:, lanes] = words
