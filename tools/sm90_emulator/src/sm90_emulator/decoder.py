"""Binds PTX instructions to operations of the machine, with a decoder that collects the operations and a table of binders."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from kernel_emulation.errors import UnknownInstruction
from sm90_emulator.assembly import Kernel, Statement, bits_of
from sm90_emulator.build import operations
from sm90_emulator.registers import NONE, SINK, Registers, room_of

Binder = Callable[["Decoder", Statement, list[str]], None]
BINDERS: dict[str, Binder] = {}
"""Maps the first word of an instruction to its binder."""


def binder(*names: str) -> Callable[[Binder], Binder]:
    """Returns a decorator that registers a binder for instructions with one of these first words."""

    def declare(function: Binder) -> Binder:
        for name in names:
            BINDERS[name] = function
        return function

    return declare


@dataclass
class Decoder:
    """Collects the machine's operations that binders emit for one kernel."""

    kernel: Kernel
    registers: Registers
    rows: list[dict[str, int]] = field(default_factory=list)
    origins: list[Statement] = field(default_factory=list)
    pool: list[int] = field(default_factory=list)
    now: Statement | None = None

    def emit(self, op: str, **fields: int) -> None:
        """Appends an operation, with the guard of the current statement."""
        statement = self.statement
        number = operations().get(op)
        if number is None:
            raise self.unknown(f"there is no operation {op}")
        row = {"op": number, "guard": -1, "d": SINK, "a": NONE, "b": NONE, "c": NONE, "e": NONE, "target": -1, **fields}
        if statement.guard is not None:
            row["guard"] = self.registers.read(statement.guard[0], "pred", statement.scope)
            row["negated"] = int(statement.guard[1])
        self.rows.append(row)
        self.origins.append(statement)

    @property
    def statement(self) -> Statement:
        """Returns the statement that is being bound."""
        assert self.now is not None
        return self.now

    def unknown(self, why: str = "unknown form of an instruction") -> UnknownInstruction:
        """Makes an error about the current statement."""
        return UnknownInstruction(why, self.kernel.name, self.statement)

    def read(self, operand: str, kind: str) -> int:
        """Returns the offset of a source operand. A symbol's address is loaded into a register first. If the instruction reads
        fewer bits than a 64-bit register has, the register's lower half is loaded into another register: `ld`, `st` and `cvt` may
        have registers wider than their type.
        """
        scope = self.statement.scope
        register = scope.register(operand)
        if register is None:
            if operand in self.kernel.shared:
                return self.symbol_address(kind, "<shared>", self.kernel.shared[operand])
            if operand in self.kernel.local:
                return self.symbol_address(kind, "<local>", self.kernel.local[operand])
            if operand in self.kernel.parameters:
                return self.registers.constant(self.kernel.parameters[operand].offset, room_of(kind))  # cvta makes it generic
            if operand.startswith(("%clock", "%globaltimer")):
                to = self.registers.temporary(kind)
                self.emit("clock", d=to, more=8 if bits_of(kind) == 64 else 4)
                return to
        place = self.registers.read(operand, kind, scope, self.statement.text)
        if register is None or room_of(register.kind) == room_of(kind):
            return place
        if bits_of(register.kind) != 64 or kind == "pred":
            raise self.unknown(f"{operand} of type {register.kind} is read as {kind}")
        lower = self.registers.temporary("b32")
        self.emit("low_of_64", d=lower, a=place)
        return lower

    def symbol_address(self, kind: str, base: str, offset: int) -> int:
        """Returns a register that holds the address of a variable in the variable's own state space."""
        place = self.registers.symbol(base)
        if offset:
            slot, place = place, self.registers.temporary("b32")
            self.emit("add_32", d=place, a=slot, b=self.registers.constant(offset, 128))
        if bits_of(kind) == 64:
            narrow, place = place, self.registers.temporary("b64")
            self.emit("widen_u32_64", d=place, a=narrow)
        return place

    def write(self, operand: str) -> int:
        """Returns the offset of a destination register."""
        return self.registers.write(operand, self.statement.scope, self.statement.text)

    def predicate(self, operand: str) -> tuple[int, int]:
        """Returns the offset of a predicate register, and whether the predicate is negated."""
        name = operand.lstrip("!").strip()
        return self.registers.read(name, "pred", self.statement.scope), int(operand.startswith("!"))

    def declared(self, operand: str) -> str:
        """Returns the declared type of a register."""
        kind = self.registers.kind_of(operand, self.statement.scope)
        if kind is None:
            raise self.unknown(f"{operand} is no register")
        return kind

    def listed(self, places: list[int]) -> dict[str, int]:
        """Stores operands in the pool. Returns the fields that refer to them."""
        at = len(self.pool)
        self.pool += places
        return {"list": at, "count": len(places)}

    def address(self, operand: str) -> dict[str, int]:
        """Returns the operation's fields for an address in brackets: a register or symbol, and an immediate offset."""
        inside = operand.strip("[] ")
        found = re.fullmatch(r"(.*?)\s*(?:([+-])\s*(-?\w+))?", inside)
        assert found is not None
        base, offset = found[1], int(found[3], 0) if found[3] else 0
        offset = -offset if found[2] == "-" else offset
        scope = self.statement.scope
        kernel = self.kernel
        if scope.register(base) is not None:
            return {"a": self.registers.read(base, "b64", scope), "wide": int(bits_of(self.declared(base)) == 64), "imm": offset}
        for names, symbol in ((kernel.shared, "<shared>"), (kernel.local, "<local>")):
            if base in names:
                return {"a": self.registers.symbol(symbol), "wide": 0, "imm": names[base] + offset}
        if base in kernel.parameters:
            return {"a": self.registers.symbol("<parameters>"), "wide": 1, "imm": kernel.parameters[base].offset + offset}
        return {"a": self.registers.read(base, "b64", scope, self.statement.text), "wide": 1, "imm": offset}


def elements(operand: str) -> list[str]:
    """Splits a vector operand in braces into its elements; any other operand is the only element."""
    return [part.strip() for part in operand.strip("{}").split(",")] if operand.startswith("{") else [operand]
