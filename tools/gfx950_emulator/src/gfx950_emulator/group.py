"""Waves in lockstep: their registers, and the functions through which instructions read and write registers.

A *group* is a set of waves, of one or several workgroups, with the same control flow. Every vector register is one row over all
lanes of all waves of the group. So one numpy operation executes an instruction for the whole group. A scalar register holds one of
three things, whichever is cheapest:

- a Python ``int`` in [0, 2**32), if it is equal in all waves (kernel arguments, loop counters, addresses);
- an int64 array with one such value per wave, if waves differ;
- half of a `LaneMask`, if it was written as a set of lanes (by compares, or to EXEC). A lane mask has one bool per lane, as vector
  instructions need it. It is converted to bits only if a scalar instruction reads it.

So nearly all scalar code is integer arithmetic that is written in the same way for ints and arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from gfx950_emulator.constants import EXEC, FP16_OVFL, MASK32, SCALARS, WAVE
from gfx950_emulator.outstanding import Outstanding


class LaneMask:
    """A lane mask, stored as one bool per lane. Each scalar register of a pair holds one half; `high` represents the upper half."""

    __slots__ = ("_bits", "high", "lanes")

    def __init__(self, lanes: np.ndarray) -> None:
        self.lanes = lanes
        self._bits: np.ndarray | None = None
        self.high = HighHalf(self)

    def bits(self) -> np.ndarray:
        """Returns the mask as bits: one uint64 per wave."""
        if self._bits is None:
            self._bits = np.packbits(self.lanes, bitorder="little").view(np.uint64)
        return self._bits

    def low_bits(self) -> int | np.ndarray:
        return agree((self.bits() & MASK32).astype(np.int64))


class HighHalf:
    __slots__ = ("mask",)

    def __init__(self, mask: LaneMask) -> None:
        self.mask = mask

    def high_bits(self) -> int | np.ndarray:
        return agree((self.mask.bits() >> 32).astype(np.int64))


def agree(values: np.ndarray) -> int | np.ndarray:
    """Returns one int if the values of all waves are equal, otherwise the per-wave values."""
    first = values[0]
    if len(values) == 1 or (values == first).all():
        return int(first)
    return values


@lru_cache(maxsize=4096)
def float32_of(bits: int) -> np.float32:
    return np.uint32(bits).view(np.float32)


@lru_cache(maxsize=64)
def all_lanes(lanes: int) -> np.ndarray:
    full = np.ones(lanes, bool)
    full.setflags(write=False)
    return full


@lru_cache(maxsize=64)
def no_lanes(lanes: int) -> np.ndarray:
    none = np.zeros(lanes, bool)
    none.setflags(write=False)
    return none


class Group:
    """The state of waves in lockstep.

    Attributes:
        waves: number of waves W. There are L = 64 W lanes; the lanes of a wave are adjacent.
        slot: int64 [W], the workgroup's slot in the current batch, which selects its LDS.
        wave: int64 [W], the wave's number in its workgroup.
        registers: uint32 [rows, L]; rows are v0 up, then a0 up.
        U, F, I: the rows of `registers`, viewed as uint32, float32 and int32.
        s: scalar registers by their operand code: 0 to 101, VCC 106 and 107, M0 124. EXEC is `mask`.
        mask, full: the active lanes, bool [L]; ``full`` says that all lanes are active.
        scc: the scalar condition code: a bool, or a bool per wave.
        mode: the MODE register, which is the same for all waves.
        pc: index of the next instruction.
        queue: outstanding memory operations.
        shadow: the sanitizer's state of the registers, or None.
    """

    __slots__ = (
        "F", "I", "U", "_columns", "full", "lanes", "lds", "machine", "mask", "mode", "pc", "queue", "registers", "s", "scc",
        "shadow", "slot", "wave", "waves",
    )  # fmt: skip

    def __init__(self, registers: np.ndarray, slot: np.ndarray, wave: np.ndarray, machine: Any) -> None:
        self.waves = len(slot)
        self.lanes = self.waves * WAVE
        self.slot = slot
        self.wave = wave
        self.machine = machine
        self.registers = registers
        self.U = list(registers)
        self.F = list(registers.view(np.float32))
        self.I = list(registers.view(np.int32))
        self.s: list[Any] = [0] * SCALARS
        self.mask = all_lanes(self.lanes)
        self.full = True
        self.scc: bool | np.ndarray = False
        self.mode: int = machine.mode
        self.pc = 0
        self._columns: np.ndarray | None = None
        self.lds: np.ndarray | None = None
        self.queue = Outstanding()
        self.shadow: Any = None

    @property
    def saturate(self) -> bool:
        """Whether conversions to narrow formats saturate (MODE.FP16_OVFL)."""
        return bool(self.mode & FP16_OVFL)

    # Scalar registers

    def s32(self, index: int) -> int | np.ndarray:
        """Reads a 32-bit scalar register: an int for all waves, or an int64 for each wave."""
        value = self.s[index]
        kind = type(value)
        if kind is int or kind is np.ndarray:
            if index >= EXEC:
                bits = LaneMask(self.mask)
                return bits.low_bits() if index == EXEC else bits.high.high_bits()
            return value
        return value.low_bits() if kind is LaneMask else value.high_bits()

    def s64(self, index: int) -> int | np.ndarray:
        """Reads a pair of scalar registers: an int for all waves, or a uint64 for each wave."""
        low, high = self.s32(index), self.s32(index + 1)
        if type(low) is int and type(high) is int:
            return low | high << 32
        return np.asarray(low, np.uint64) | np.asarray(high, np.uint64) << np.uint64(32)

    def set_s32(self, index: int, value: int | np.ndarray) -> None:
        """Writes a 32-bit scalar register. Values must lie in [0, 2**32)."""
        if index >= EXEC:
            low, high = self.s32(EXEC), self.s32(EXEC + 1)
            self.set_exec(self._lanes_of(*((value, high) if index == EXEC else (low, value))))
            return
        self.s[index] = value

    def set_s64(self, index: int, value: int | np.ndarray) -> None:
        low: int | np.ndarray
        high: int | np.ndarray
        if type(value) is int:
            low, high = value & MASK32, value >> 32
        else:
            value = value.astype(np.uint64, copy=False)
            low, high = (value & MASK32).astype(np.int64), (value >> 32).astype(np.int64)
        if index == EXEC:
            self.set_exec(self._lanes_of(low, high))
            return
        self.s[index], self.s[index + 1] = low, high

    def lane_mask(self, index: int) -> np.ndarray:
        """Reads a pair of scalar registers as one bool per lane."""
        if index == EXEC:
            return self.mask
        if self._is_mask(index):
            return self.s[index].lanes
        return self._lanes_of(self.s32(index), self.s32(index + 1))

    def _lanes_of(self, low: int | np.ndarray, high: int | np.ndarray) -> np.ndarray:
        if type(low) is int and type(high) is int:
            if low == MASK32 and high == MASK32:
                return all_lanes(self.lanes)
            if low == 0 and high == 0:
                return no_lanes(self.lanes)
            one = np.unpackbits(np.array([low | high << 32], np.uint64).view(np.uint8), bitorder="little").view(bool)
            return np.tile(one, self.waves)
        bits = np.empty((self.waves, 2), np.uint32)
        bits[:, 0], bits[:, 1] = low, high
        return np.unpackbits(bits.view(np.uint8).reshape(-1), bitorder="little").view(bool)

    def set_lane_mask(self, index: int, lanes: np.ndarray) -> None:
        """Writes one bool per lane to a pair of scalar registers. The array must not change afterwards."""
        if index == EXEC:
            self.set_exec(lanes)
            return
        mask = LaneMask(lanes)
        self.s[index], self.s[index + 1] = mask, mask.high

    def set_exec(self, lanes: np.ndarray) -> None:
        self.mask = lanes
        self.full = bool(lanes.all())

    # Reads by vector instructions

    def broadcast(self, index: int) -> int | np.ndarray:
        """Reads a scalar register as an operand of vector instructions: an int for all lanes, or uint32 [L]."""
        value = self.s32(index)
        return value if type(value) is int else np.repeat(value.astype(np.uint32), WAVE)

    def broadcast_u32(self, index: int) -> np.uint32 | np.ndarray:
        value = self.s32(index)
        return np.uint32(value) if type(value) is int else np.repeat(value.astype(np.uint32), WAVE)

    def broadcast_i32(self, index: int) -> np.int32 | np.ndarray:
        return self.broadcast_u32(index).view(np.int32)

    def broadcast_f32(self, index: int) -> np.float32 | np.ndarray:
        value = self.s32(index)
        return float32_of(value) if type(value) is int else np.repeat(value.astype(np.uint32), WAVE).view(np.float32)

    def broadcast_u64(self, index: int) -> np.uint64 | np.ndarray:
        value = self.s64(index)
        return np.uint64(value) if type(value) is int else np.repeat(value, WAVE)

    def pair(self, row: int) -> np.ndarray:
        """Reads two vector registers as one uint64 per lane."""
        value = self.U[row + 1].astype(np.uint64)
        value <<= np.uint64(32)
        value |= self.U[row]
        return value

    def set_pair(self, row: int, value: np.ndarray) -> None:
        """Writes a 64-bit value per lane (any 64-bit type) to two vector registers, in active lanes."""
        halves = np.ascontiguousarray(value).view(np.uint32).reshape(-1, 2)
        if self.full:
            self.U[row][...] = halves[:, 0]
            self.U[row + 1][...] = halves[:, 1]
        else:
            np.copyto(self.U[row], halves[:, 0], where=self.mask)
            np.copyto(self.U[row + 1], halves[:, 1], where=self.mask)

    def columns(self) -> np.ndarray:
        """Returns each lane's index among the lanes of all waves of the batch, int64 [L]."""
        if self._columns is None:
            first = (self.slot * self.machine.waves_per_group + self.wave) * WAVE
            self._columns = (first[:, None] + np.arange(WAVE)).reshape(-1)
        return self._columns

    def by_wave(self, row: int) -> np.ndarray:
        """Reads a vector register as uint32 [W, 64]."""
        return self.U[row].reshape(self.waves, WAVE)

    def _is_mask(self, index: int) -> bool:
        """Returns whether a pair of scalar registers holds the two halves of one lane mask."""
        low = self.s[index]
        return type(low) is LaneMask and self.s[index + 1] is low.high

    # Divergence and reconvergence

    def select(self, waves: np.ndarray) -> Group:
        """Returns a group of some of the waves, given by their indices, with its own copy of the state."""
        columns = (waves[:, None] * WAVE + np.arange(WAVE)).reshape(-1)
        part = Group(np.ascontiguousarray(self.registers[:, columns]), self.slot[waves], self.wave[waves], self.machine)
        part.s = _map_masks(self.s, lambda mask: LaneMask(mask.lanes[columns]))
        for index, value in enumerate(part.s):
            if type(value) is np.ndarray:
                part.s[index] = agree(value[waves])
        part.set_exec(self.mask[columns])
        part.scc = self.scc[waves] if isinstance(self.scc, np.ndarray) else self.scc
        part.mode, part.pc = self.mode, self.pc
        part.queue = self.queue.select(columns, self.lanes)
        if self.shadow is not None:
            part.shadow = self.shadow.select(waves, columns)
        return part

    @staticmethod
    def join(groups: list[Group]) -> Group:
        """Joins groups with the same program counter and mode into one group with the waves of all of them."""
        first = groups[0]
        whole = Group(
            np.concatenate([g.registers for g in groups], axis=1),
            np.concatenate([g.slot for g in groups]),
            np.concatenate([g.wave for g in groups]),
            first.machine,
        )
        for index in range(SCALARS - 2):
            if all(g._is_mask(index) for g in groups):
                mask = LaneMask(np.concatenate([g.s[index].lanes for g in groups]))
                whole.s[index], whole.s[index + 1] = mask, mask.high
            elif type(whole.s[index]) is not HighHalf:  # a HighHalf was written together with its lower half
                whole.s[index] = _side_by_side([g.s32(index) for g in groups], [g.waves for g in groups])
        whole.set_exec(np.concatenate([g.mask for g in groups]))
        if all(not isinstance(g.scc, np.ndarray) and g.scc == first.scc for g in groups):
            whole.scc = first.scc
        else:
            whole.scc = np.concatenate([np.broadcast_to(g.scc, g.waves) for g in groups])
        whole.mode, whole.pc = first.mode, first.pc
        whole.queue = Outstanding.join([g.queue for g in groups], [g.waves for g in groups])
        if first.shadow is not None:
            whole.shadow = first.shadow.join(groups)
        return whole


def _side_by_side(values: list[int | np.ndarray], waves: list[int]) -> int | np.ndarray:
    """Joins the values of one scalar register in several groups, each with its number of waves, into one value for all waves."""
    if all(type(value) is int and value == values[0] for value in values):
        return values[0]
    return np.concatenate([np.broadcast_to(value, count).astype(np.int64) for value, count in zip(values, waves, strict=True)])


def _map_masks(scalars: list[Any], function: Callable[[LaneMask], LaneMask]) -> list[Any]:
    """Returns the scalar registers with every lane mask replaced by the function's result. The halves of a mask stay together."""
    replaced: dict[int, LaneMask] = {}

    def of(value: object) -> object:
        mask = value.mask if type(value) is HighHalf else value
        if type(mask) is not LaneMask:
            return value
        if id(mask) not in replaced:
            replaced[id(mask)] = function(mask)
        return replaced[id(mask)] if value is mask else replaced[id(mask)].high

    return [of(value) for value in scalars]
