"""Scalar operands of scalar instructions: reading them, and integer arithmetic on their values.

A scalar value is an int if it is equal in all waves. If waves differ, it is an int64 array (32 bits) or uint64 array (64 bits),
with one value per wave in the same range. Integer arithmetic works on both; `select` and `per_wave` are for operations that do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from gfx950_emulator.binding import Bound, Site
from gfx950_emulator.constants import EXEC, MASK32
from gfx950_emulator.group import Group, all_lanes, no_lanes
from gfx950_emulator.operands import SCC_ID, Operand

MASK64 = (1 << 64) - 1
Value = Any  # int or numpy array, see above


def select(condition: Value, yes: Value, no: Value) -> Value:
    """Selects one of two values, for all waves together or for each wave."""
    if isinstance(condition, np.ndarray):
        return np.where(condition, yes, no)
    return yes if condition else no


def signed(value: Value) -> Value:
    """Interprets a 32-bit value as a signed integer."""
    return (value ^ 0x80000000) - 0x80000000


def per_wave(function: Callable[..., int]) -> Callable[..., Value]:
    """Returns a function that applies a function of ints to each wave's values, one wave at a time. Only rare instructions use
    it."""

    def apply(*values: Value) -> Value:
        if any(isinstance(value, np.ndarray) for value in values):
            arrays = np.broadcast_arrays(*values)
            results = [function(*(int(x) for x in row)) for row in zip(*arrays, strict=True)]
            return np.array(results, np.uint64 if max(results) > MASK32 else np.int64)
        return function(*values)

    return apply


def read32(operand: Operand) -> Callable[[Group], Value]:
    """Returns a function that reads a 32-bit scalar operand."""
    if operand.file == "literal":
        constant = int(operand.bits(np.dtype(np.uint32)))
        return lambda g: constant
    index = operand.index
    return lambda g: g.s32(index)


def read64(operand: Operand) -> Callable[[Group], Value]:
    """Returns a function that reads a 64-bit scalar operand as an integer."""
    if operand.file == "literal":
        constant = constant64(operand)
        return lambda g: constant
    index = operand.index
    return lambda g: g.s64(index)


def constant64(operand: Operand) -> int:
    """Returns a literal operand as 64 bits: integers are sign-extended, 32-bit hex is zero-extended, inline floats are double
    precision."""
    if isinstance(operand.literal, float):
        return int(operand.bits(np.dtype(np.float64)).view(np.uint64))
    return int(operand.literal) & MASK64


def scalar_bound(
    site: Site, run: Callable[[Group], None], *, writes_scc: bool = False, reads_scc: bool = False, stores: int = 1
) -> Bound:
    """Makes the `Bound` of a scalar instruction. The instruction's first ``stores`` operands are written, and the others are read.
    ``writes_scc`` and ``reads_scc`` tell how it uses SCC.
    """
    destinations, sources = site.operands[:stores], site.operands[stores:]
    writes, reads = site.ids(destinations), site.ids(sources)
    return Bound(
        run,
        (*writes, SCC_ID) if writes_scc else writes,
        (*reads, SCC_ID) if reads_scc else reads,
        "salu",
    )


def lowest_one(value: int) -> int:
    """Returns the index of the lowest set bit; -1 (as 32 bits) if there is none."""
    return (value & -value).bit_length() - 1 if value else MASK32


def lowest_zero(width: int) -> Callable[[int], int]:
    """Returns a function that gives the index of the lowest clear bit; -1 (as 32 bits) if there is none."""
    return lambda value: lowest_one(value ^ ((1 << width) - 1))


def leading_zeros(width: int) -> Callable[[int], int]:
    """Returns a function that counts the zeros above the highest set bit; -1 (as 32 bits) if no bit is set."""
    return lambda value: width - value.bit_length() if value else MASK32


def leading_signs(width: int) -> Callable[[int], int]:
    """Returns a function that counts the leading bits that equal the sign bit; -1 (as 32 bits) if all bits do."""
    return lambda value: leading_zeros(width)(value ^ ((1 << width) - 1) if value >> (width - 1) else value)


def reverse(width: int) -> Callable[[int], int]:
    """Returns a function that reverses the order of ``width`` bits."""
    return lambda value: int(f"{value:0{width}b}"[::-1], 2)


def chooses(bound: Bound, first: Iterable[int], second: Iterable[int]) -> Bound:
    """Returns a copy of ``bound`` that tells the sanitizer that SCC selects one of two operands as the result."""
    return replace(bound, extra={"choice": (tuple(first), tuple(second))})


def is_mask(g: Group, operand: Operand) -> bool:
    """Returns whether a 64-bit operand is stored as a lane mask. Reading it as lanes is then cheaper than as an integer."""
    return operand.file == "s" and (operand.index == EXEC or type(g.s[operand.index]) not in (int, np.ndarray))


def lanes_of(operand: Operand) -> Callable[[Group], np.ndarray]:
    """Returns a function that reads a 64-bit scalar operand as one bool per lane."""
    if operand.file == "literal":
        value = constant64(operand)
        if value == 0:
            return lambda g: no_lanes(g.lanes)
        if value == MASK64:
            return lambda g: all_lanes(g.lanes)
        one = np.unpackbits(np.array([value], np.uint64).view(np.uint8), bitorder="little").view(bool)
        return lambda g: np.tile(one, g.waves)
    index = operand.index
    return lambda g: g.lane_mask(index)


def any_lane(g: Group, lanes: np.ndarray) -> bool | np.ndarray:
    """Returns whether any lane of a wave is set: one bool for all waves, or one bool per wave."""
    if g.waves == 1:
        return bool(lanes.any())
    found: Any = lanes.reshape(g.waves, 64).any(axis=1)
    count = int(found.sum())
    return count > 0 if count in (0, g.waves) else found
