"""``warmup``: compiles plugins' kernels ahead of time, which would otherwise be compiled at their first call."""

from __future__ import annotations

import sys
import traceback
from importlib import metadata

import typer

from tokenspeed_kernel.workbench.cli.output import unknown
from tokenspeed_kernel_base.config import settings

# Each entry point of this group is a function that takes command-line arguments and returns an exit code. The exit code after an
# interrupt (Ctrl-C) is 130.
GROUP = "tokenspeed_kernel.warmup"
_INTERRUPTED = 130


def warmup(words: list[str] | None, plugin: str | None) -> None:
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
        except SystemExit as error:  # an argument parser exits in this way
            code = error.code
        except KeyboardInterrupt:
            typer.echo(f"interrupted while {entry.name} compiled")
            code = _INTERRUPTED
        except Exception:  # one plugin's failure must not affect the others
            traceback.print_exc(file=sys.stderr)
            code = 1
        if code == _INTERRUPTED:
            raise typer.Exit(code)
        failed |= bool(code)
    raise typer.Exit(failed)
