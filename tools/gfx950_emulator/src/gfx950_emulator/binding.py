"""Binds an instruction to the registers that it reads and writes, and to a function that executes it.

Each family of instructions registers a *binder* for each mnemonic (`gfx950_emulator.instructions`). `gfx950_emulator.decode` looks
binders up. A binder runs once per instruction of a kernel. It reads operands and modifiers, and returns a `Bound` whose
``run(group)`` executes the instruction. So nothing is parsed while a kernel executes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gfx950_emulator.access import Access
from gfx950_emulator.assembly import Assembly, Instruction
from gfx950_emulator.group import Group
from gfx950_emulator.operands import Operand, parse_operand
from kernel_emulation.errors import UnknownInstruction


@dataclass(frozen=True)
class Bound:
    """An instruction ready to run.

    Attributes:
        run: executes the instruction for all waves of a group.
        writes, reads: the registers, by the sanitizer's numbers (`gfx950_emulator.operands`), including implicit registers.
        unit: the execution unit: ``valu``, ``trans``, ``mfma``, ``salu``, ``smem``, ``vmem``, ``lds``, ``wait``, ``barrier``,
            ``branch``, ``end``, ``nop``.
        target: index of the instruction to which a branch jumps.
        jump: for a jump through a register: ``jump(group)`` is the index of the next instruction, or an array with an index per
            wave.
        condition: for a conditional branch: ``condition(group)`` is a bool, or an array with a bool per wave.
        demands: registers that must be initialised, because their values leave the wave or determine its control flow (addresses,
            stored data). None means no registers.
        moves: whether the instruction only moves bits, within or across lanes. Running it on a mask of uninitialised bits then
            shows which bits of the result are uninitialised.
        memory: the access of a memory instruction, see `Access`.
    """

    run: Callable[[Group], None]
    writes: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    unit: str = "valu"
    target: int | None = None
    condition: Callable[[Group], Any] | None = None
    jump: Callable[[Group], Any] | None = None
    demands: tuple[int, ...] = ()
    moves: bool = False
    memory: Access | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Logic:
    """A logical operation on lane masks, for the sanitizer. If one operand decides a bit, that bit of the other operand may be
    uninitialised.

    Attributes:
        first, second: functions that read the operands as bool [L]; the operands' registers are ``first_ids`` and ``second_ids``.
        decisive_a, decisive_b: the value of the first or second operand that alone decides the result; None if there is none.
        result_ids: registers that receive the result, without SCC.
        saved_ids: registers that receive the previous value of the second operand (a saved EXEC).
    """

    first: Callable[[Group], np.ndarray]
    second: Callable[[Group], np.ndarray]
    first_ids: tuple[int, ...]
    second_ids: tuple[int, ...]
    decisive_a: bool | None
    decisive_b: bool | None
    result_ids: tuple[int, ...]
    saved_ids: tuple[int, ...] = ()


class Site:
    """An instruction that is being bound, and the data that binders need."""

    def __init__(self, instruction: Instruction, assembly: Assembly) -> None:
        self.instruction = instruction
        self.assembly = assembly
        self.mnemonic, self.encoding = split_encoding(instruction.mnemonic)
        self.modifiers = dict(instruction.modifiers)
        self.architecture = assembly.architecture
        self._operands: list[Operand] | None = None

    @property
    def operands(self) -> list[Operand]:
        if self._operands is None:
            try:
                self._operands = [parse_operand(text, self.assembly.vgprs) for text in self.instruction.operands]
            except ValueError as error:
                raise self.unknown(str(error)) from None
        return self._operands

    def unknown(self, reason: str) -> UnknownInstruction:
        return UnknownInstruction(reason, self.assembly.name, self.instruction)

    def take(self, name: str, default: Any = None) -> Any:
        """Reads a modifier of the instruction, and marks it as understood."""
        return self.modifiers.pop(name, default)

    def done(self) -> None:
        """Raises `UnknownInstruction` if a modifier was not read. Cache hints have no effect and are ignored."""
        left = set(self.modifiers) - {"sc0", "sc1", "nt", "glc", "slc", "dlc", "scc"}
        if left:
            raise self.unknown(f"modifier {', '.join(sorted(left))} of {self.instruction.mnemonic} is not implemented")

    def ids(self, operands: Iterable[Operand]) -> tuple[int, ...]:
        return tuple(register for operand in operands for register in operand.ids)


Binder = Callable[[Site], Bound]
BINDERS: dict[str, Binder] = {}


def binder(*mnemonics: str) -> Callable[[Binder], Binder]:
    """Returns a decorator that registers a function as the binder of these mnemonics (without encoding suffix)."""

    def register(function: Binder) -> Binder:
        for mnemonic in mnemonics:
            if mnemonic in BINDERS:
                raise ValueError(f"{mnemonic} has two binders")
            BINDERS[mnemonic] = function
        return function

    return register


def split_encoding(mnemonic: str) -> tuple[str, str]:
    """Splits a mnemonic: ``"v_add_u32_dpp"`` into ``("v_add_u32", "dpp")``. The encoding is empty if the name has no suffix."""
    match = re.fullmatch(r"(\w+?)_(e32|e64|dpp|sdwa|e64_dpp)", mnemonic)
    return (match[1], match[2]) if match else (mnemonic, "")


def implicit(bound: Bound, reads: Iterable[int] = (), writes: Iterable[int] = ()) -> Bound:
    """Returns a copy of a `Bound` with additional registers that the instruction uses implicitly."""
    return replace(bound, reads=(*bound.reads, *reads), writes=(*bound.writes, *writes))
