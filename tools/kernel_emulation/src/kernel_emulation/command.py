"""Code that the emulators' command lines share. A command runs a function of a Python file on the emulator. Needs typer and
rich.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.markup import escape

from kernel_emulation import report
from kernel_emulation.emulator import Bounds, Emulator, Report, Running
from kernel_emulation.errors import EmulationError

Target = Annotated[str, typer.Argument(metavar="FILE.py::FUNCTION", help="A function without arguments, which launches kernels.")]
BoundsOption = Annotated[Bounds, typer.Option("--bounds", help="What of a tensor may be accessed: its elements or its storage.")]
Kernel = Annotated[str, typer.Option("--kernel", "-k", help="Only kernels with this in their name.")]
Top = Annotated[int, typer.Option("--top", help="Lines per table.", min=1)]


def application(summary: str) -> typer.Typer:
    """Makes a command line without commands."""
    return typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=summary)


def execute(
    block: Callable[..., contextlib.AbstractContextManager[Running]], target: str, **settings: Any
) -> tuple[Running, float]:
    """Calls the target inside the emulator's block with these settings. An error of the kernel or of the function ends the command.

    Returns:
        The emulator, and the seconds that the run took.
    """
    function = _load(target)
    begin = time.perf_counter()
    with block(**settings) as emulator:
        try:
            function()
        except EmulationError as error:
            fail(str(error))
        except Exception as error:
            # Leave out the first frame of the traceback, which is this file's.
            lines = traceback.format_exception(type(error), error, error.__traceback__.tb_next if error.__traceback__ else None)
            fail("".join(lines).rstrip())
    return emulator, time.perf_counter() - begin


def list_launches(emulator: Emulator[Any], what: str) -> None:
    """Prints each launch.

    Args:
        what: describes the instructions that are counted, for the table's heading.
    """
    for launch in emulator.launches:
        report.console().print(f"{report.headline(launch)}, {report.number(launch.instructions)} {what}")


def launches_of(emulator: Emulator[Report], kernel: str) -> list[Report]:
    """Returns the launches of kernels with ``kernel`` in their name. Ends the command with an error if there are none."""
    chosen = [launch for launch in emulator.launches if kernel in launch.kernel]
    if not chosen:
        fail(f"no kernel with {kernel!r} in its name was launched" if kernel else "no kernel was launched")
    return chosen


def fail(message: str) -> NoReturn:
    """Prints an error and ends the command."""
    report.console(stderr=True).print(f"[red]{escape(message)}[/]", soft_wrap=True)
    raise typer.Exit(1)


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
        fail("".join(traceback.format_exception(type(error), error, None)).rstrip() + f"\n  while importing {path}")
    function: Callable[[], object] | None = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == file.stem]
        raise typer.BadParameter(f"{path} has no function {name}; it has {', '.join(functions) or 'none'}")
    parameters = inspect.signature(function).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if needed:
        raise typer.BadParameter(f"{name} takes arguments ({', '.join(needed)}); it must be callable without")
    return function
