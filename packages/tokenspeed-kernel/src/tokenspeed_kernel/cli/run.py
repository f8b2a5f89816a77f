"""Commands that run kernels: ``verify`` and ``bench``."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Optional

import torch
import typer

from tokenspeed_kernel.benchmark.roofline import Roofline, measure_roofline
from tokenspeed_kernel.benchmark.run import Report, Row, bench_case, collect_metadata
from tokenspeed_kernel.cli.find import find_device, find_kernels, find_runs
from tokenspeed_kernel.cli.output import AsJson, fail, print_json, print_table, progress, unknown
from tokenspeed_kernel.numerics.verify import CaseResult, Status, default_device, verify_case
from tokenspeed_kernel.platform import current_platform
from tokenspeed_kernel.registry import KernelSpec

# Optional rather than `| None`: typer evaluates these.
Target = Annotated[Optional[str], typer.Argument(metavar="[KERNEL|OP]", help="A kernel, or all of an operator's; all if left out.")]  # noqa: UP045
CaseNames = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option("--case", help="Only cases of this name, or with this in their name. May be given several times."),
]
Large = Annotated[bool, typer.Option("--large", help="Also the cases that are sized for a GPU.")]
Device = Annotated[Optional[str], typer.Option("--device", help="cpu or cuda; where kernels run by default if left out.")]  # noqa: UP045
Plugin = Annotated[Optional[str], typer.Option("--plugin", help="Only kernels of this plugin.")]  # noqa: UP045
Output = Annotated[Optional[Path], typer.Option("--output", help="Write the report to this JSON file, too.")]  # noqa: UP045
Solution = Annotated[Optional[str], typer.Option("--solution", help="Only kernels made with this.")]  # noqa: UP045
Graph = Annotated[
    int, typer.Option("--graph", min=0, help="Calls in one CUDA graph, on inputs of their own, to time without launches.")
]
Budget = Annotated[float, typer.Option("--budget", min=0.001, help="Seconds of measuring a case.")]


def verify(
    target: Target = None,
    case: CaseNames = None,
    large: Large = False,
    solution: Solution = None,
    plugin: Plugin = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Run kernels against their operators' references. Exit code 1 if any is wrong."""
    where = find_device(device)
    runs = find_runs(_made_with(solution, find_kernels(target, plugin)), case or (), large)
    results: list[CaseResult] = []
    with progress(len(runs), "verifying") as begin:
        for spec, chosen in runs:
            begin(f"{spec.name}: {chosen.name}")
            results.append(verify_case(spec, chosen, where))
    counts = Counter(result.status.value for result in results)
    bad = [result for result in results if result.status in (Status.FAILED, Status.ERROR)]
    if as_json:
        summary = {status.value: counts[status.value] for status in Status}
        print_json({"platform": str(current_platform()), "summary": summary, "results": [r.to_dict() for r in results]})
    else:
        one_kernel = len({spec.name for spec, _ in runs}) == 1
        print_table(["kernel", "case", "status", "max abs", "relative", "detail"], _verify_rows(results, fold=not one_kernel))
        for result in bad:
            if result.traceback:
                typer.echo(f"\n{result.kernel}, {result.case}:\n{result.traceback.rstrip()}")
        parts = [f"{counts[status.value]} {status.value}" for status in Status if counts[status.value]]
        typer.echo(f"\n{', '.join(parts) or 'nothing to run'} on {current_platform()}")
    raise typer.Exit(bool(bad))


def _made_with(solution: str | None, kernels: list[KernelSpec]) -> list[KernelSpec]:
    chosen = [spec for spec in kernels if solution in (None, spec.solution)]
    if not chosen:
        unknown("solution", str(solution), sorted({spec.solution for spec in kernels}))
    return chosen


def _verify_rows(results: list[CaseResult], *, fold: bool) -> list[list[str]]:
    """One row a result; with ``fold``, all that a kernel skipped at one gate are one row."""
    rows: list[list[str]] = []
    skipped: dict[tuple[str, str], tuple[int, list[CaseResult]]] = {}
    for result in results:
        worst = result.worst
        errors = ["", ""] if worst is None else [f"{worst.max_abs_error:.3g}", f"{worst.relative_error:.3g}"]
        detail = result.reason
        if result.status is Status.PASSED and worst is not None and worst.worst is not None:
            detail = f"worst {worst.name} {worst.worst}"
        if fold and result.status is Status.SKIPPED:
            index, same = skipped.setdefault((result.kernel, result.reason.partition(":")[0]), (len(rows), []))
            same.append(result)
            if len(same) > 1:
                others = any(other.reason != same[0].reason for other in same)
                rows[index][1] = f"{len(same)} cases"
                rows[index][-1] = same[0].reason + (" (and the like)" if others else "")
                continue
        rows.append([result.kernel, result.case, result.status.value, *errors, detail])
    return rows


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
    runs = find_runs(_made_with(solution, find_kernels(target)), case or (), large)
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
