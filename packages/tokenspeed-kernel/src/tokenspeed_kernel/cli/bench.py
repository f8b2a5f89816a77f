"""``bench``: how fast are kernels?"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Optional

import torch
import typer

from tokenspeed_kernel.benchmark.roofline import Roofline, measure_roofline
from tokenspeed_kernel.benchmark.run import Report, Row, bench_case, collect_metadata
from tokenspeed_kernel.cli.find import find_device, find_kernels, find_runs, made_with
from tokenspeed_kernel.cli.options import CaseNames, Device, Large, Solution, Target
from tokenspeed_kernel.cli.output import AsJson, fail, print_json, print_table, progress
from tokenspeed_kernel.numerics.verify import Status, default_device

Output = Annotated[Optional[Path], typer.Option("--output", help="Write the report to this JSON file, too.")]  # noqa: UP045
Graph = Annotated[
    int, typer.Option("--graph", min=0, help="Calls in one CUDA graph, on inputs of their own, to time without launches.")
]
Budget = Annotated[float, typer.Option("--budget", min=0.001, help="Seconds of measuring a case.")]


def bench(
    target: Target = None,
    case: CaseNames = None,
    large: Large = False,
    solution: Solution = None,
    output: Output = None,
    device: Device = None,
    budget: Budget = 0.5,
    graph: Graph = 0,
    as_json: AsJson = False,
) -> None:
    """Time kernels, after checking their results. Exit code 1 if any is wrong."""
    where = find_device(device) or default_device()
    if graph and where.type != "cuda":
        fail(f"--graph {graph}: there are CUDA graphs on GPUs only, and this would run on {where}")
    runs = find_runs(made_with(solution, find_kernels(target)), case or (), large)
    if output is not None and not output.parent.is_dir():
        fail(f"--output {output}: there is no folder {output.parent}")
    metadata = collect_metadata(_command(target, case or (), large, solution, device, budget, graph), where)
    roofline = measure_roofline(where) if where.type == "cuda" else None
    rows: list[Row] = []
    with progress(len(runs), "measuring") as begin:
        for spec, chosen in runs:
            begin(f"{spec.name}: {chosen.name}")
            rows.append(bench_case(spec, chosen, where, budget_s=budget, graph_calls=graph))
            if output is not None:  # now, not at the end: what was measured must not be lost with what comes after
                _replace(output, Report(metadata, tuple(rows), roofline).to_json() + "\n")
    report = Report(metadata, tuple(rows), roofline)
    if as_json:
        print_json(report.to_dict())
    else:
        columns = ["kernel", "case", "status", "median us", "p10", "p90", "TFLOP/s", "GB/s", "of copy", "detail"]
        print_table(columns, [_bench_cells(row, roofline) for row in rows if row.status != "skipped"])
        if roofline is not None:
            copy, read, product = roofline.copy_gb_per_s, roofline.read_gb_per_s, roofline.bf16_tflops
            typer.echo(f"\nthis device copies {copy:.4g} GB/s, reads {read:.4g} GB/s, multiplies bfloat16 at {product:.4g} TFLOP/s")
        unserved = sum(row.status == "skipped" for row in rows)
        typer.echo(f"\n{metadata.device}, torch {torch.__version__}, {metadata.date}" + f"; {unserved} skipped" * bool(unserved))
    raise typer.Exit(any(row.status in (Status.FAILED.value, Status.ERROR.value) for row in rows))


def _replace(file: Path, text: str) -> None:
    """Writes a file such that whoever reads it finds it whole, as it was or as it is."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    beside.write_text(text)
    beside.replace(file)


def _bench_cells(row: Row, roofline: Roofline | None) -> list[str]:
    if row.timing is None:
        return [row.kernel, row.case, row.status, "", "", "", "", "", "", row.reason]
    timing = row.timing
    times = [f"{value:.2f}" for value in (timing.median_us, timing.p10_us, timing.p90_us)]
    rates = ["" if value is None else f"{value:.4g}" for value in (row.tflops, row.gb_per_s)]
    share = "" if row.gb_per_s is None or roofline is None else f"{row.gb_per_s / roofline.copy_gb_per_s:.0%}"
    return [row.kernel, row.case, row.status, *times, *rates, share, f"{timing.repeats} repeats"]


def _command(
    target: str | None, cases: Sequence[str], large: bool, solution: str | None, device: str | None, budget: float, graph: int
) -> str:
    words = ["tokenspeed-kernel", "bench", *([target] if target else [])]
    words += [word for case in cases for word in ("--case", case)]
    words += ["--large"] if large else []
    words += ["--solution", solution] if solution else []
    words += ["--device", device] if device else []
    words += ["--graph", str(graph)] if graph else []
    return shlex.join([*words, "--budget", f"{budget:g}"])
