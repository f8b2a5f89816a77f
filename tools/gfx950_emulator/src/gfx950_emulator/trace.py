"""Two records of an execution: the blocks that each wave ran, for the timing model, and each instruction's results, for people."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from gfx950_emulator.constants import WAVE
from gfx950_emulator.group import Group
from gfx950_emulator.operands import SCALAR_BASE, SCC_ID
from gfx950_emulator.program import Program


class BlockTrace:
    """The blocks that waves ran, in order. There is one record for all waves that ran a block together.

    Attributes:
        records: tuples (first instruction of the block, workgroup of each wave, index of each wave in its workgroup).
    """

    def __init__(self) -> None:
        self.records: list[tuple[int, np.ndarray, np.ndarray]] = []

    def block(self, start: int, group: Group) -> None:
        self.records.append((start, group.machine.workgroups[group.slot], group.wave))

    def work(self, weights: dict[int, float]) -> dict[int, float]:
        """Returns, by workgroup, the sum of the weights of the blocks that the workgroup's waves ran."""
        if not self.records:
            return {}
        counts = [len(workgroups) for _, workgroups, _ in self.records]
        owners = np.concatenate([workgroups for _, workgroups, _ in self.records])
        values = np.repeat(np.array([weights[start] for start, _, _ in self.records], float), counts)
        workgroups, place = np.unique(owners, return_inverse=True)
        return dict(zip(workgroups.tolist(), np.bincount(place, values).tolist(), strict=True))

    def waves_of(self, workgroup: int) -> dict[int, list[int]]:
        """Returns, for each wave of a workgroup, the blocks that the wave ran, in order. A block is given by its first
        instruction."""
        waves: dict[int, list[int]] = {}
        for start, workgroups, numbers in self.records:
            for wave in numbers[workgroups == workgroup].tolist():
                waves.setdefault(wave, []).append(start)
        return waves


@dataclass(frozen=True)
class Written:
    """A register that an instruction wrote.

    Attributes:
        name: the register's name, as the assembler writes it.
        values: the chosen lanes of a vector register, or the single value of a scalar register.
    """

    name: str
    values: tuple[int, ...]


@dataclass
class InstructionTrace:
    """Reports each instruction of one wave. Calls ``write(kernel, index, active lanes, registers written)``.

    Attributes:
        workgroup, wave: the traced workgroup and wave.
        kernel: a substring of the names of kernels to trace; empty for all.
        lanes: lanes whose values are reported.
        limit: the largest number of instructions to report, over all launches.
        told, more: the number of reported instructions, and whether further instructions were not reported.
    """

    write: Callable[[Program, int, int, list[Written]], None]
    workgroup: int = 0
    wave: int = 0
    kernel: str = ""
    lanes: tuple[int, ...] = (0, 1, 2, 3)
    limit: int = 1000
    told: int = field(default=0, init=False)
    more: bool = field(default=False, init=False)

    def wants(self, program: Program) -> bool:
        """Returns whether a launch of this program is traced. The emulator calls this once per launch."""
        return self.kernel in program.assembly.name and not self.more

    def instruction(self, program: Program, group: Group, index: int) -> None:
        """Reports an instruction that a group ran, if the traced wave is in the group."""
        if self.more:
            return
        mine = np.flatnonzero((group.wave == self.wave) & (group.machine.workgroups[group.slot] == self.workgroup))
        if not len(mine):
            return
        if self.told == self.limit:
            self.more = True
            return
        self.told += 1
        place = int(mine[0])
        bound = program.bound[index]
        on = int(np.count_nonzero(group.mask[place * WAVE : (place + 1) * WAVE]))
        written = [
            Written(name_of(register, program), self._values(group, register, place)) for register in dict.fromkeys(bound.writes)
        ]
        self.write(program, index, on, written)

    def _values(self, group: Group, register: int, place: int) -> tuple[int, ...]:
        if register == SCC_ID:
            return (int(np.broadcast_to(group.scc, group.waves)[place]),)
        if register >= SCALAR_BASE:
            return (int(np.broadcast_to(group.s32(register - SCALAR_BASE), group.waves)[place]),)
        row = group.U[register]
        return tuple(int(row[place * WAVE + lane]) for lane in self.lanes)


def name_of(register: int, program: Program) -> str:
    from gfx950_emulator.sanitizer import name_of as name

    return name(register, program.assembly.vgprs)
