"""Error classes. Every error names the kernel, the instruction and, if the compiler wrote debug information, the line of the
kernel's source."""

from __future__ import annotations

from typing import Any, Protocol

_LONGEST_NAME = 120


class Located(Protocol):
    """An instruction of a kernel's text."""

    @property
    def source(self) -> tuple[str, int] | None:
        """Returns ``(file, line)`` of the kernel's source; None without debug information."""

    @property
    def where(self) -> str:
        """Returns the location of the instruction, with which a sentence can end: the source line, if known, and the instruction as
        written."""


def describe(kernel: str, instruction: Located | None) -> str:
    """Names the kernel and the instruction: ``in kernel attend, at attend.py:12 (assembly line 345): v_add_u32_e32 v0, v1, v2``."""
    short = kernel if len(kernel) < _LONGEST_NAME else f"{kernel[:60]}...{kernel[-40:]}"
    return f"in kernel {short}" + ("" if instruction is None else instruction.where)


class EmulationError(RuntimeError):
    """The emulator cannot continue. The cause is an unknown instruction or form of an instruction, or a state that hardware would
    not accept.

    Attributes:
        kernel: the kernel's name; empty if the error is not about a kernel.
        instruction: the instruction at fault, or None.
        source: ``(file, line)`` of the kernel's source, or None.
    """

    def __init__(self, message: str, kernel: str = "", instruction: Located | None = None) -> None:
        super().__init__(f"{message}\n  {describe(kernel, instruction)}" if kernel else message)
        self.message = message
        self.kernel = kernel
        self.instruction = instruction
        self.source = instruction.source if instruction is not None else None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.kernel, self.instruction)


class UnknownInstruction(EmulationError):
    """An instruction, operand or modifier that the emulator does not implement."""


class SanitizerError(EmulationError):
    """The kernel has an actual or a potential error that hardware may not report.

    Attributes:
        kind: the kind of error: ``"out-of-bounds"``, ``"race"``, ``"deadlock"``, and others that the emulator's README lists.
    """

    def __init__(self, kind: str, message: str, kernel: str = "", instruction: Located | None = None) -> None:
        super().__init__(f"{kind}: {message}", kernel, instruction)
        self.kind = kind

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.kind, self.message.removeprefix(f"{self.kind}: "), self.kernel, self.instruction)
