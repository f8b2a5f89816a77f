"""``capture``: shows and merges captured calls."""

from __future__ import annotations

from pathlib import Path

import typer

from tokenspeed_kernel.workbench.cli.find import find_operator
from tokenspeed_kernel.workbench.cli.output import fail, print_json, print_table
from tokenspeed_kernel.workbench.watching import Contents, ReplayError, load, merge, replay


def show_calls(files: list[Path], op: str | None, as_json: bool) -> None:
    wanted = None if op is None else str(find_operator(op))
    total = Contents()
    for file in files:
        total.add(_load(file))
    records = [record for record in total.records if wanted in (None, record["operator"])]
    records.sort(key=lambda record: (-record["count"], record["operator"]))
    if as_json:
        print_json({"records": records, "dropped": total.dropped})
        return
    rows = []
    for record in records:
        try:
            looks = replay(record).name
        except ReplayError as error:
            looks = str(error)
        rows.append([str(record["count"]), record["operator"], record["kernel"], looks])
    print_table(["calls", "operator", "kernel", "call"], rows)
    calls = sum(record["count"] for record in records)
    typer.echo(f"\n{calls} calls of {len(records)} kinds")
    for operator, count in sorted(total.dropped.items()):
        typer.echo(f"{count} more of {operator} were not recorded: there were too many kinds")


def merge_files(files: list[Path], output: Path, as_json: bool) -> None:
    try:
        total = merge(files, output)
    except OSError as error:
        fail(error)
    calls = sum(record["count"] for record in total.records)
    if as_json:
        print_json({"file": str(output), "records": len(total.records), "calls": calls, "dropped": total.dropped})
    else:
        typer.echo(f"{calls} calls of {len(total.records)} kinds in {output}")


def _load(file: Path) -> Contents:
    try:
        return load(file)
    except OSError as error:
        fail(error)
