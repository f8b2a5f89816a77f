"""The emulator that runs the launches inside a ``with`` block, and keeps their reports."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kernel_emulation import emulator
from kernel_emulation.emulator import Block
from sm90_emulator import addresses, machine
from sm90_emulator.machine import Geometry, LaunchReport, Settings
from sm90_emulator.program import load


@dataclass(kw_only=True)
class Emulator(emulator.Emulator[LaunchReport]):
    """The object that `emulated_sm90` yields: settings that may be changed between launches, and the list of launches.

    Attributes:
        machine: the settings with which the machine runs launches.
        error: the exception of a launch that C code has called; it is raised when the C code returns.
    """

    machine: Settings
    error: BaseException | None = None

    def run(self, text: str, kernel: str, geometry: Geometry, parameters: bytes) -> None:
        """Runs a kernel of a PTX text, and stores the launch's report.

        Raises:
            EmulationError: the kernel failed.
        """
        program = load(self.edited(kernel, text), kernel)
        memory = [(each.start, each.end) for each in (*self.extra, *addresses.accessible(self.bounds))]
        settings = replace(self.machine, check_overlap=self.sanitize, counters=self.counters)
        self.launches.append(machine.run(program, geometry, parameters, memory, settings))


BLOCK = Block[Emulator]("emulated_sm90")
