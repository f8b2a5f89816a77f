"""Tables for a terminal. Needs rich."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kernel_emulation.emulator import LaunchReport


def number(value: float) -> str:
    """Formats a count: ``950``, ``12.3k``, ``4.56M``."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    return f"{value:.0f}"


def headline(report: LaunchReport) -> str:
    grid = " x ".join(str(size) for size in report.grid)
    return f"[bold]{escape(report.kernel)}[/]  grid {grid}, {report.resources}"


def new_table(title: str, *columns: str, left: tuple[int, ...] = (0,)) -> Table:
    """Makes a table; it has no header row if all column titles are empty."""
    made = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="dim", show_header=any(columns))
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i in left else "right", overflow="fold", no_wrap=i not in left)
    return made


def console(stderr: bool = False) -> Console:
    return Console(stderr=stderr, highlight=False, soft_wrap=False)
