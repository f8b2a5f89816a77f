"""The emulator of the enclosing block, which runs launches and keeps their reports."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from sm90_emulator import addresses, machine
from sm90_emulator.errors import EmulationError
from sm90_emulator.machine import Geometry, LaunchReport, Settings
from sm90_emulator.program import Program


@dataclass
class Emulator:
    """The result of `emulated_sm90`.

    Attributes:
        settings: the launch settings; may be changed between launches.
        launches: reports of the launches so far.
        error: the exception of a launch whose caller is C code.
    """

    settings: Settings
    launches: list[LaunchReport] = field(default_factory=list)
    error: BaseException | None = None

    def run(self, program: Program, geometry: Geometry, parameters: bytes) -> None:
        """Runs a kernel and stores the report.

        Raises:
            EmulationError: the kernel failed.
        """
        self.launches.append(machine.run(program, geometry, parameters, addresses.accessible(), self.settings))


_current: Emulator | None = None


def current() -> Emulator | None:
    """The emulator of the enclosing block."""
    return _current


def active() -> Emulator:
    """The emulator of the enclosing block.

    Raises:
        EmulationError: there is no such block.
    """
    if _current is None:
        raise EmulationError("a kernel that was compiled or loaded for the emulator is launched outside `emulated_sm90()`")
    return _current


@contextlib.contextmanager
def activated(emulator: Emulator) -> Iterator[None]:
    """Inside the block, launches run on this emulator."""
    global _current
    _current = emulator
    try:
        yield
    finally:
        _current = None
