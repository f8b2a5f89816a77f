"""Options of several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Target = Annotated[str | None, typer.Argument(metavar="[KERNEL|OP]", help="A kernel, or all of an operator's; all if left out.")]
Targets = Annotated[
    list[str] | None, typer.Argument(metavar="[KERNEL|OP]...", help="Kernels, or all of the operators'; all if left out.")
]
CaseNames = Annotated[
    list[str] | None,
    typer.Option("--case", help="Only cases of this name, or with this in their name. May be given several times."),
]
Large = Annotated[bool, typer.Option("--large", help="Also the cases that are sized for a GPU.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu or cuda; where kernels run by default if left out.")]
Plugin = Annotated[str | None, typer.Option("--plugin", help="Only kernels of this plugin.")]
Solution = Annotated[str | None, typer.Option("--solution", help="Only kernels made with this.")]
Captured = Annotated[Path | None, typer.Option("--from", help="Cases like the calls that were captured to this file.")]
