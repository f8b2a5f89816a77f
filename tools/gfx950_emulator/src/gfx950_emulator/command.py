"""The command line: runs a function of a Python file on the emulator, and shows its kernels' statistics. Needs typer and rich."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape

from gfx950_emulator import report
from gfx950_emulator.driver import emulated
from gfx950_emulator.program import Program
from gfx950_emulator.trace import InstructionTrace, Written
from kernel_emulation.command import BoundsOption, Kernel, Target, Top, application, execute, fail, launches_of, list_launches
from kernel_emulation.report import console as console_of

app = application("Runs gfx950 and gfx942 kernels on a CPU.")

Sanitize = Annotated[bool, typer.Option("--sanitize/--no-sanitize", help="Look for races, missing waits, uninitialised data.")]


Arch = Annotated[Literal["gfx950", "gfx942"], typer.Option(help="Architecture to compile for and to emulate.")]


@app.command()
def run(target: Target, sanitize: Sanitize = True, bounds: BoundsOption = "view", arch: Arch = "gfx950") -> None:
    """Run a function's kernels, with the sanitizer, and list them."""
    emulator, seconds = execute(emulated, target, arch=arch, sanitize=sanitize, bounds=bounds)
    list_launches(emulator, "lockstep instructions")
    checked = "nothing to complain of" if sanitize else "not sanitized"
    console_of().print(f"{len(emulator.launches)} launches in {seconds:.1f} s, {checked}")


@app.command()
def stats(
    target: Target,
    kernel: Kernel = "",
    top: Top = 15,
    sanitize: Sanitize = False,
    bounds: BoundsOption = "view",
    arch: Arch = "gfx950",
) -> None:
    """Run a function's kernels and count: instructions, bytes, cache lines, bank conflicts; model the time."""
    console = console_of()
    emulator, _ = execute(emulated, target, arch=arch, sanitize=sanitize, counters=True, bounds=bounds)
    for launch in launches_of(emulator, kernel):
        console.print(report.stats(launch, top))
        console.print()


@app.command()
def trace(
    target: Target,
    kernel: Kernel = "",
    workgroup: Annotated[int, typer.Option("--workgroup", "-g", help="Linear number: x + y * X + z * X * Y.", min=0)] = 0,
    wave: Annotated[int, typer.Option("--wave", "-w", help="Wave in the workgroup.", min=0)] = 0,
    lanes: Annotated[str, typer.Option(help="Lanes whose values are shown.")] = "0,1,2,3",
    limit: Annotated[int, typer.Option("--limit", "-n", help="Instructions at most.", min=1)] = 1000,
    as_float: Annotated[bool, typer.Option("--float", help="Show vector registers as float32.")] = False,
    sanitize: Sanitize = False,
    bounds: BoundsOption = "view",
    arch: Arch = "gfx950",
) -> None:
    """Run a function's kernels, and print each instruction of one wave with the values that it wrote."""
    console = console_of()
    printer = _Printer(console, as_float)
    tracer = InstructionTrace(printer, workgroup, wave, kernel, _lanes(lanes), limit)
    execute(emulated, target, arch=arch, sanitize=sanitize, tracer=tracer, bounds=bounds)
    if not tracer.told:
        fail(
            f"nothing ran as wave {wave} of workgroup {workgroup}" + (f" in a kernel with {kernel!r} in its name" if kernel else "")
        )
    if tracer.more:
        console.print(f"[dim]stopped at {limit} instructions; --limit shows more[/]")


class _Printer:
    """Prints instructions, with a separate line when the source line changes."""

    def __init__(self, console: Console, as_float: bool) -> None:
        self._console, self._as_float = console, as_float
        self._location = ""
        self._program: Program | None = None

    def __call__(self, program: Program, index: int, on: int, written: list[Written]) -> None:
        instruction = program.assembly.instructions[index]
        if program is not self._program:
            self._program = program
            self._console.print(f"[bold]{escape(program.assembly.name)}[/]")
        if instruction.location != self._location:
            self._location = instruction.location
            self._console.print(f"[dim]{escape(instruction.location)}[/]")
        lanes = "" if on == 64 else f" [yellow]({on} lanes)[/]"
        values = "  ".join(f"{item.name}={self._values(item)}" for item in written)
        self._console.print(f"{instruction.line:6}  {escape(instruction.text)}{lanes}  [cyan]{escape(values)}[/]", soft_wrap=True)

    def _values(self, written: Written) -> str:
        if self._as_float and written.name[0] in "va" and not written.name.startswith("vcc"):
            return ",".join(f"{value:.6g}" for value in np.array(written.values, np.uint32).view(np.float32))
        return ",".join(f"{value:x}" for value in written.values)


def _lanes(text: str) -> tuple[int, ...]:
    try:
        lanes = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"lanes are numbers with commas between, got {text!r}") from None
    if not all(0 <= lane < 64 for lane in lanes):
        raise typer.BadParameter(f"lanes lie between 0 and 63, got {text!r}")
    return lanes
