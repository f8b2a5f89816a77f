"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

# Optional rather than `| None`: typer evaluates these.
Target = Annotated[Optional[str], typer.Argument(metavar="[KERNEL|OP]", help="A kernel, or all of an operator's; all if left out.")]  # noqa: UP045
Targets = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Argument(metavar="[KERNEL|OP]...", help="Kernels, or all of the operators'; all if left out."),
]
CaseNames = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option("--case", help="Only cases of this name, or with this in their name. May be given several times."),
]
Large = Annotated[bool, typer.Option("--large", help="Also the cases that are sized for a GPU.")]
Device = Annotated[Optional[str], typer.Option("--device", help="cpu or cuda; where kernels run by default if left out.")]  # noqa: UP045
Plugin = Annotated[Optional[str], typer.Option("--plugin", help="Only kernels of this plugin.")]  # noqa: UP045
Solution = Annotated[Optional[str], typer.Option("--solution", help="Only kernels made with this.")]  # noqa: UP045
Captured = Annotated[Optional[Path], typer.Option("--from", help="Cases like the calls that were captured to this file.")]  # noqa: UP045
