"""Error classes. Every error names the kernel, the instruction and, if the compiler wrote debug information, the line of the
kernel's source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gfx950_emulator.assembly import Instruction


def describe(kernel: str, instruction: Instruction | None) -> str:
    """``in kernel attend, at attend.py:12 (assembly line 345): v_add_u32_e32 v0, v1, v2``."""
    where = f"in kernel {kernel}"
    if instruction is None:
        return where
    source = f", at {instruction.location}" if instruction.location else ""
    return f"{where}{source} (assembly line {instruction.line}): {instruction.text}"


class EmulationError(RuntimeError):
    """The emulator cannot continue: an unknown instruction or form of one, or a state that hardware would not accept.

    Attributes:
        kernel: the kernel's name.
        instruction: the instruction at fault, or None.
        source: ``(file, line)`` of the kernel's source, or None.
    """

    def __init__(self, message: str, kernel: str, instruction: Instruction | None = None) -> None:
        super().__init__(f"{message}\n  {describe(kernel, instruction)}")
        self.message = message
        self.kernel = kernel
        self.instruction = instruction
        self.source = instruction.source if instruction is not None else None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.kernel, self.instruction)


class UnknownInstruction(EmulationError):
    """An instruction, operand or modifier that the emulator does not implement."""


class SanitizerError(EmulationError):
    """The kernel has an actual or potential error that hardware would not report.

    Attributes:
        kind: ``"out-of-bounds"``, ``"uninitialised"``, ``"race"``, ``"wait"``, ``"misaligned"``, ``"barrier-divergence"`` or
            ``"deadlock"``.
    """

    def __init__(self, kind: str, message: str, kernel: str, instruction: Instruction | None = None) -> None:
        super().__init__(f"{kind}: {message}", kernel, instruction)
        self.kind = kind

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.kind, self.message.removeprefix(f"{self.kind}: "), self.kernel, self.instruction)
