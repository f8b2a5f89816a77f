"""Output of commands: coloured tables and progress in a terminal, plain text in a pipe, JSON on request; errors on stderr."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import rich.box
import rich.console
import rich.progress
import rich.table
import rich.text
import typer

from tokenspeed_kernel_base.names import did_you_mean

_STYLES = {
    "passed": "green",
    "measured": "green",
    "loaded": "green",
    "chosen": "bold green",
    "failed": "bold red",
    "error": "bold red",
    "not reached": "bold red",
    "problem": "bold red",
    "skipped": "dim",
    "rejected": "dim",
    "disabled": "dim",
}


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, allow_nan=False, default=str))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table: rows under column headings. In a pipe each row is one line, without truncation."""
    listed = [tuple(" ".join(cell.split()) for cell in row) for row in rows]
    if not sys.stdout.isatty():
        widths = [max(map(len, column)) for column in zip(columns, *listed, strict=True)]
        for row in (columns, *listed):
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in listed:
        table.add_row(*(rich.text.Text(cell, _STYLES.get(cell, "")) for cell in row))
    rich.console.Console(file=sys.stdout).print(table)


def print_wrapped(text: str, first: str = "", indent: str = "", **style: Any) -> None:
    """Prints a text in lines that fit the terminal, or 100 columns in a pipe. No word is broken.

    The first line begins with ``first``, and each further line with ``indent``. If ``first`` leaves fewer than 40 columns, the text
    begins on the next line.
    """
    width = max(shutil.get_terminal_size((100, 24)).columns, 48)
    if len(first) > width - 40:
        typer.secho(first.rstrip(), **style)
        first = indent = " " * 8
    for line in textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ):
        typer.secho(line, **style)


@contextlib.contextmanager
def progress(total: int, what: str) -> Iterator[Callable[[str], None]]:
    """Shows a progress bar if stderr is a terminal. Call the yielded function before each step, with the step's name."""
    if not sys.stderr.isatty():
        yield lambda step: None
        return
    columns = (
        rich.progress.TextColumn(what),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeRemainingColumn(),
        rich.progress.TextColumn("{task.fields[step]}", markup=False),
    )
    with rich.progress.Progress(*columns, console=rich.console.Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("", total=total, step="")
        started = False

        def begin(step: str) -> None:
            nonlocal started
            bar.update(task, advance=int(started), step=step)
            started = True

        yield begin


def fail(message: object) -> NoReturn:
    """Ends the command with a one-line usage error and exit code 2."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)


def unknown(what: str, name: str, known: Iterable[str], many: str = "") -> NoReturn:
    """Ends the command because of an unknown name.

    Args:
        what: the kind of name.
        name: the unknown name.
        known: the known names; up to eight are printed.
        many: a hint where to find the known names, printed instead of them if there are more than eight.
    """
    names = list(known)
    apart = "; " if any("," in each for each in names) else ", "
    listed = f"; there are {apart.join(names)}" if 0 < len(names) <= 8 else many and f"; {many}"
    fail(f"no {what} {name!r}{did_you_mean(name, names, repr) or listed}")
