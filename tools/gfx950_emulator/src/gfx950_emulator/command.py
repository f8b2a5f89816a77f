"""The command line: runs a function of a file on the emulator, and shows its kernels' statistics. Needs typer and rich."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape

from gfx950_emulator import report
from gfx950_emulator.driver import Bounds, Emulator, emulated_gfx950
from gfx950_emulator.errors import EmulationError
from gfx950_emulator.program import Program
from gfx950_emulator.trace import InstructionTrace, Written

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="Runs gfx950 kernels on a CPU.")

Target = Annotated[str, typer.Argument(metavar="FILE.py::FUNCTION", help="A function without arguments, which launches kernels.")]
Sanitize = Annotated[bool, typer.Option("--sanitize/--no-sanitize", help="Look for races, missing waits, uninitialised data.")]
BoundsOption = Annotated[Bounds, typer.Option("--bounds", help="What of a tensor may be accessed: its elements or its storage.")]
Kernel = Annotated[str, typer.Option("--kernel", "-k", help="Only kernels with this in their name.")]
Top = Annotated[int, typer.Option("--top", help="Lines per table.", min=1)]


@app.command()
def run(target: Target, sanitize: Sanitize = True, bounds: BoundsOption = "view") -> None:
    """Run a function's kernels, with the sanitizer, and list them."""
    console = report.console()
    emulator, seconds = _execute(target, sanitize=sanitize, bounds=bounds)
    for launch in emulator.launches:
        console.print(f"{report.headline(launch)}, {report.number(launch.instructions)} lockstep instructions")
    checked = "nothing to complain of" if sanitize else "not sanitized"
    console.print(f"{len(emulator.launches)} launches in {seconds:.1f} s, {checked}")


@app.command()
def stats(target: Target, kernel: Kernel = "", top: Top = 15, sanitize: Sanitize = False, bounds: BoundsOption = "view") -> None:
    """Run a function's kernels and count: instructions, bytes, cache lines, bank conflicts; model the time."""
    console = report.console()
    emulator, _ = _execute(target, sanitize=sanitize, counters=True, bounds=bounds)
    chosen = [launch for launch in emulator.launches if kernel in launch.kernel]
    for launch in chosen:
        console.print(report.stats(launch, top))
        console.print()
    if not chosen:
        _fail(f"no kernel with {kernel!r} in its name was launched" if kernel else "no kernel was launched")


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
) -> None:
    """Run a function's kernels and print what one wave does: every instruction with what it wrote."""
    console = report.console()
    printer = _Printer(console, as_float)
    tracer = InstructionTrace(printer, workgroup, wave, kernel, _lanes(lanes), limit)
    _execute(target, sanitize=sanitize, tracer=tracer, bounds=bounds)
    if not tracer.told:
        _fail(
            f"nothing ran as wave {wave} of workgroup {workgroup}" + (f" in a kernel with {kernel!r} in its name" if kernel else "")
        )
    if tracer.more:
        console.print(f"[dim]stopped at {limit} instructions; --limit shows more[/]")


class _Printer:
    """Prints instructions, with a separate line wherever the source line changes."""

    def __init__(self, console: Console, as_float: bool) -> None:
        self._console, self._as_float = console, as_float
        self._location, self._program = "", None

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


def _execute(target: str, **settings: Any) -> tuple[Emulator, float]:
    """Calls the target on an emulator with these settings; an error of the kernel or the function ends the command."""
    function = _load(target)
    begin = time.perf_counter()
    with emulated_gfx950(**settings) as emulator:
        try:
            function()
        except EmulationError as error:
            _fail(str(error))
        except Exception as error:
            # The first entries are this file's.
            lines = traceback.format_exception(type(error), error, error.__traceback__.tb_next if error.__traceback__ else None)
            _fail("".join(lines).rstrip())
    return emulator, time.perf_counter() - begin


def _load(target: str) -> Callable[[], object]:
    path, separator, name = target.partition("::")
    if not separator or not name:
        raise typer.BadParameter(f"expected FILE.py::FUNCTION, got {target!r}")
    file = Path(path).resolve()
    if not file.is_file():
        raise typer.BadParameter(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise typer.BadParameter(f"{path} is not a Python file")
    sys.path.insert(0, str(file.parent))  # as `python FILE.py` does
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # Triton looks a kernel's module up here
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        _fail("".join(traceback.format_exception(type(error), error, None)).rstrip() + f"\n  while importing {path}")
    function = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == file.stem]
        raise typer.BadParameter(f"{path} has no function {name}; it has {', '.join(functions) or 'none'}")
    parameters = inspect.signature(function).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if needed:
        raise typer.BadParameter(f"{name} takes arguments ({', '.join(needed)}); it must be callable without")
    return function


def _fail(message: str) -> None:
    report.console(stderr=True).print(f"[red]{escape(message)}[/]", soft_wrap=True)
    raise typer.Exit(1)
