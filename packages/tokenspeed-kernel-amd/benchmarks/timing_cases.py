"""The command line and the report of the scripts that compare our kernel with the portable kernel on single calls."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from timing_model import metadata_of

SIDES = {"ours": "gluon", "portable": "triton"}
"""The names of the kernels in reports, and their solutions."""


class Case(Protocol):
    """A call: its name in reports, the largest time that passes, and the least possible time."""

    @property
    def name(self) -> str: ...
    @property
    def bar_us(self) -> float | None: ...
    @property
    def floor_us(self) -> float: ...


CaseT = TypeVar("CaseT", bound=Case)


def options_of(description: str | None, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line; None stands for the process's own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where to write the report, JSON")
    parser.add_argument("--readme", action="store_true", help="put the table into the package's README")
    parser.add_argument("--only", default="", help="cases whose name matches this regular expression; others are kept")
    return parser.parse_args(arguments)


def report_of(
    program: Path,
    cases: Sequence[CaseT],
    only: str,
    measure: Callable[[CaseT, str], Any],
    assumptions: Sequence[str],
    earlier: Path | None = None,
) -> dict[str, Any]:
    """Measures the cases, and returns the report.

    Args:
        program: the script.
        cases: the calls.
        only: a regular expression that the names of the measured cases match.
        measure: function that takes a case and a name of `SIDES`, and returns what the report has of this kernel.
        assumptions: the sentences that the report lists.
        earlier: an earlier report, which may not exist. Its rows of cases that are not measured are kept.
    """
    torch.set_num_threads(1)
    rows: dict[str, Any] = {}
    if only and earlier is not None and earlier.exists():
        rows = {row["case"]: row for row in json.loads(earlier.read_text())["rows"]}
    for case in cases:
        if re.search(only, case.name):
            sides = {side: measure(case, side) for side in SIDES}
            rows[case.name] = {"case": case.name, "bar_us": case.bar_us, "floor_us": case.floor_us, **sides}
    found = [rows[case.name] for case in cases if case.name in rows]
    return {"metadata": metadata_of(program, None), "assumptions": assumptions, "rows": found}
