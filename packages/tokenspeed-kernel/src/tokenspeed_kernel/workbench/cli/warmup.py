"""``warmup``: what plugins would compile at a first call, compiled now."""

from __future__ import annotations

import sys
import traceback
from importlib import metadata
from typing import Annotated

import typer

from tokenspeed_kernel.workbench.cli.output import unknown
from tokenspeed_kernel_base.config import settings

# Functions of the words of a command line, to an exit code: 130 for one that was interrupted (Ctrl-C).
GROUP = "tokenspeed_kernel.warmup"
_INTERRUPTED = 130

Plugin = Annotated[str | None, typer.Option("--plugin", metavar="PLUGIN", help="Only this one.")]
Words = Annotated[list[str] | None, typer.Argument(metavar="[-- WORD...]", help="What to tell them.", show_default=False)]


def warmup(words: Words = None, plugin: Plugin = None) -> None:
    """Let plugins compile ahead of time what they would compile when it is first called.

    Words after -- are theirs: `tokenspeed-kernel warmup --plugin NAME -- --help` shows what one takes. A plugin warms up by an
    entry point of its name in the group "tokenspeed_kernel.warmup"; portable kernels need none. Exit code 1 if one fails, 130 if it
    is interrupted: then what is compiled by then is kept.
    """
    entries = sorted(metadata.entry_points(group=GROUP), key=lambda entry: entry.name)
    entries = [entry for entry in entries if not settings().plugin_disabled(entry.name)]
    if plugin is not None and plugin not in (names := [entry.name for entry in entries]):
        unknown("plugin that warms up", plugin, names)
    if not entries:
        typer.echo("no plugin that is installed has anything to compile")
    failed = False
    for entry in entries:
        if plugin not in (None, entry.name):
            continue
        typer.echo(f"{entry.name} ({entry.value})")
        try:
            code = entry.load()(words or [])
        except SystemExit as error:  # how a parser of words ends
            code = error.code
        except KeyboardInterrupt:
            typer.echo(f"interrupted while {entry.name} compiled")
            code = _INTERRUPTED
        except Exception:  # one plugin's failure is kept from the others
            traceback.print_exc(file=sys.stderr)
            code = 1
        if code == _INTERRUPTED:
            raise typer.Exit(code)
        failed |= bool(code)
    raise typer.Exit(failed)
