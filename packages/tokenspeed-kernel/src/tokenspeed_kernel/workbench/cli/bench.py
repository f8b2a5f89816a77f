"""``bench``: times kernels, and compares reports."""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import typer

from tokenspeed_kernel.workbench.benchmark.baselines import Baseline, BaselineFileError, load_baselines
from tokenspeed_kernel.workbench.benchmark.compare import compare
from tokenspeed_kernel.workbench.benchmark.metadata import collect_metadata
from tokenspeed_kernel.workbench.benchmark.results import Method, Report, ReportError, appended, as_text, load_report
from tokenspeed_kernel.workbench.benchmark.roofline import Roofline, measure_roofline
from tokenspeed_kernel.workbench.benchmark.roofline_cache import cached_roofline
from tokenspeed_kernel.workbench.benchmark.run import Competitor, Measurement, method_for, rows_of, run_rounds
from tokenspeed_kernel.workbench.cli import bench_tables
from tokenspeed_kernel.workbench.cli.find import find_device, find_kernels, find_runs, made_with
from tokenspeed_kernel.workbench.cli.output import fail, print_json, print_table, progress, unknown
from tokenspeed_kernel.workbench.numerics.verify import Status, default_device
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.spec import KernelSpec

# Seconds between two writes of the results. A killed run loses at most the results of this time.
_SAVED_EVERY_S = 10.0


def bench(
    target: str | None,
    case: list[str] | None,
    large: bool,
    captured: Path | None,
    solution: str | None,
    solutions: str | None,
    baseline: list[Path] | None,
    output: Path | None,
    append: bool,
    device: str | None,
    budget: float,
    rounds: int,
    graph: int,
    cache: str | None,
    rotate: int | None,
    no_cache: bool,
    remeasure: bool,
    reports: tuple[Path, Path] | None,
    threshold: float,
    confidence: float,
    as_json: bool,
) -> None:
    chosen: dict[str, Any] = {
        "--case": case,
        "--large": large,
        "--from": captured,
        "--solution": solution,
        "--solutions": solutions,
        "--baseline": baseline,
        "--device": device,
        "--cache": cache,
        "--rotate": rotate,
        "--graph": graph,
    }
    if reports is not None:
        for name, value in {"KERNEL or OP": target, "--output": output, "--append": append, **chosen}.items():
            if value:
                fail(f"--compare measures nothing, so {name} has no effect: leave it out")
        _compare(reports, threshold, confidence, as_json)
    where = find_device(device) or default_device()
    if output is not None and not output.parent.is_dir():
        fail(f"--output {output}: there is no folder {output.parent}")
    if solution and solutions:
        fail("--solution says which to measure, --solutions which to show side by side: give one of the two")
    method = _method(where, cache, rotate, graph, budget, rounds)
    kernels = find_kernels(target)
    baselines = _baselines(baseline or (), kernels)
    wanted = [name for name in (solutions or solution or "").split(",") if name]
    runs = _runs(kernels, baselines, wanted, case or (), large, captured)
    if not runs:
        fail(
            "there is nothing to measure: these kernels have no such case"
            + "; --large takes those that are sized for a GPU" * (not large)
        )
    command = _command(target, {**chosen, "--rounds": rounds, "--budget": f"{budget:g}"})
    empty = Report(collect_metadata(command, where), (), _roofline(where, no_cache, remeasure), method)
    report = _measured(runs, where, empty, _earlier(output, append, empty), output)
    if as_json:
        print(as_text(report.to_dict()), end="")
    else:
        if solutions:
            print_table(
                *bench_tables.side_by_side(report.rows, [*dict.fromkeys([*wanted, *(each.solution for each in baselines)])])
            )
        else:
            shown = [row for row in report.rows if row.status != "skipped"]
            print_table(bench_tables.ROW_COLUMNS, map(bench_tables.row_cells, shown))
        for line in bench_tables.machine_lines(report):
            typer.echo(f"\n{line}")
    raise typer.Exit(any(row.status in (Status.FAILED.value, Status.ERROR.value) for row in report.rows))


def _command(target: str | None, options: Mapping[str, Any]) -> str:
    """Returns the command line that repeats the measurement."""
    words = ["tokenspeed-kernel", "bench", *([target] if target else [])]
    for name, value in options.items():
        for each in value if isinstance(value, list) else [value]:
            if each:
                words += [name] if each is True else [name, str(each)]
    return shlex.join(words)


def _method(where: torch.device, cache: str | None, rotate: int | None, graph: int, budget: float, rounds: int) -> Method:
    if cache not in (None, "cold", "warm"):
        unknown("state of caches", str(cache), ["cold", "warm"])
    if graph and where.type != "cuda":
        fail(f"--graph {graph}: there are CUDA graphs on GPUs only, and this would run on {where}")
    if cache == "cold" and where.type != "cuda":
        fail(f"--cache cold: caches are flushed on GPUs only, and this would run on {where}")
    return method_for(where, cache=cache, copies=rotate, graph_calls=graph, budget_s=budget, rounds=rounds)


def _baselines(files: Sequence[Path], kernels: Sequence[KernelSpec]) -> list[Baseline]:
    """Returns the baselines that the files declare for the kernels' operators."""
    operators = {spec.operator for spec in kernels}
    try:
        return [each for file in files for each in load_baselines(file) if each.operator in operators]
    except BaselineFileError as error:
        fail(error)


def _runs(
    kernels: list[KernelSpec],
    baselines: Sequence[Baseline],
    solutions: Sequence[str],
    cases: Sequence[str],
    large: bool,
    captured: Path | None,
) -> list[tuple[Competitor, Case]]:
    """Returns pairs of a kernel or baseline and a case: the kernels of the named backends (of all, if none is named) and the
    baselines, each with its cases.

    With baselines or several backends, the order is by case, so that rows to be compared are measured one after the other.
    """
    if solutions:
        foreign = {each.solution for each in baselines}
        kernels = [spec for name in solutions if name not in foreign for spec in made_with(name, kernels)]
    runs: list[tuple[Competitor, Case]] = [*(find_runs(kernels, cases, large, captured) if kernels else ())]
    for each in baselines:
        named = {case.name: case for _, case in find_runs(find_kernels(each.operator), cases, large, captured)}
        runs += [(each, case) for case in named.values()]
    if len(solutions) < 2 and not baselines:
        return runs
    place = {key: index for index, key in enumerate(dict.fromkeys((each.operator, case.name) for each, case in runs))}
    return sorted(runs, key=lambda run: place[run[0].operator, run[1].name])


def _roofline(where: torch.device, no_cache: bool, remeasure: bool) -> Roofline | None:
    if where.type != "cuda":
        return None
    try:
        return measure_roofline(where) if no_cache else cached_roofline(where, remeasure=remeasure)
    except torch.OutOfMemoryError as error:  # another process has filled the device's memory; kernels may still fit
        typer.echo(f"without a roofline: {error}", err=True)
        return None


def _earlier(output: Path | None, append: bool, empty: Report) -> Report:
    """Returns the report to which results are appended: with --append the one in file ``output``, if it exists; else an empty
    report.
    """
    if not append:
        return empty
    if output is None:
        fail("--append needs --output, the report to append to")
    if not output.exists():
        return empty
    try:
        return appended(load_report(output), empty)
    except (ReportError, OSError) as error:
        fail(error)
    except ValueError as error:
        fail(f"--append: {output} cannot be added to: {error}")


def _measured(
    runs: Sequence[tuple[Competitor, Case]], where: torch.device, empty: Report, earlier: Report, output: Path | None
) -> Report:
    """Measures each kernel or baseline on its case. The results are written to ``output`` periodically, so that a failure loses
    little.
    """
    method = empty.method
    assert method is not None
    measurements = [Measurement(competitor, case, where, method) for competitor, case in runs]
    saved = time.monotonic()

    def save() -> Report:
        now = dataclasses.replace(empty, rows=tuple(rows_of(measurements, empty.roofline)))
        report = appended(earlier, now)
        if output is not None:
            report.write(output)
        return report

    def save_now_and_then() -> None:
        nonlocal saved
        if time.monotonic() - saved > _SAVED_EVERY_S:
            save()
            saved = time.monotonic()

    try:
        with progress(len(runs) * method.rounds, "measuring") as begin:
            run_rounds(measurements, begin, save_now_and_then)
    finally:  # also after an interrupt
        report = save()
    return report


def _compare(files: tuple[Path, Path], threshold: float, confidence: float, as_json: bool) -> NoReturn:
    try:
        a, b = map(load_report, files)
    except (ReportError, OSError) as error:
        fail(error)
    comparison = compare(a, b, threshold=threshold, confidence=confidence)
    if not comparison.differences and not comparison.broken:
        fail(f"no row of {files[0]} was measured in {files[1]}, too: there is nothing to compare")
    if as_json:
        print_json({"a": str(files[0]), "b": str(files[1]), **comparison.to_dict()})
    else:
        print_table(bench_tables.DIFFERENCE_COLUMNS, bench_tables.difference_cells(comparison))
        typer.echo()
        for line in bench_tables.comparison_lines(comparison):
            typer.echo(line)
    raise typer.Exit(comparison.worse)
