"""``verify``: checks kernels against their references and their declarations."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import typer

from tokenspeed_kernel.workbench.cli.find import find_device, find_kernels, find_runs, made_with
from tokenspeed_kernel.workbench.cli.output import fail, print_json, print_table, progress
from tokenspeed_kernel.workbench.numerics.compare import Comparison
from tokenspeed_kernel.workbench.numerics.conformance import CHECKS, Finding, Options, conform, junit
from tokenspeed_kernel.workbench.numerics.shrink import Shrunk, shrink
from tokenspeed_kernel.workbench.numerics.unreached import unreached
from tokenspeed_kernel.workbench.numerics.verify import CaseResult, Status, default_device, verify_case
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.platform import current_platform, platform_of
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.spec import KernelSpec
from tokenspeed_kernel_base.storage import replace_file

# The failing calls of at most this many kernels are shrunk. If many kernels fail for one reason, a few examples show the reason.
_MOST_SHRUNK = 3


def verify(
    targets: list[str] | None,
    case: list[str] | None,
    large: bool,
    captured: Path | None,
    solution: str | None,
    plugin: str | None,
    device: str | None,
    repeat: int | None,
    conformance: bool | None,
    shrink_seconds: float,
    seed: int,
    junit_file: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    where = find_device(device)
    found = (spec for target in targets or (None,) for spec in find_kernels(target, plugin))
    specs = made_with(solution, list(dict.fromkeys(found)))
    runs = find_runs(specs, case or (), large, captured)
    whole = not case and captured is None  # if cases are selected, a kernel that runs on none of them is no error
    checks = plugin is not None if conformance is None else conformance
    if checks:
        options = Options(large, repeat, seed, shrink_seconds)
        findings = _conform(specs, None if whole else runs, where, options)
        report = {"platform": str(current_platform()), "summary": _summary(findings), "results": [f.to_dict() for f in findings]}
    else:
        results, smallest = _compare(runs, where, repeat, seed, shrink_seconds)
        missed = _unreached(specs, results, where, large) if whole else []
        results, smallest = [*results, *missed], [*smallest, *(None for _ in missed)]
        findings = [
            Finding(r.kernel, r.operator, r.case, r.status, r.reason, (r,), s) for r, s in zip(results, smallest, strict=True)
        ]
        listed = [{**r.to_dict(), "smallest": f.to_dict()["smallest"]} for r, f in zip(results, findings, strict=True)]
        report = {"platform": str(current_platform()), "summary": _summary(findings), "results": listed}
    if output is not None:
        _write(output, json.dumps(report, indent=2, allow_nan=False, default=str) + "\n")
    if junit_file is not None:
        _write(junit_file, junit(findings))
    if as_json:
        print_json(report)
    else:
        if checks:
            _show_findings(findings)
        else:
            _show_results(findings, fold=len({spec.name for spec, _ in runs}) > 1)
    raise typer.Exit(any(finding.wrong for finding in findings) or _all_skipped(findings))


def _write(file: Path, text: str) -> None:
    try:
        replace_file(file, text)
    except OSError as error:
        fail(f"{file} cannot be written: {error}")


def _summary(findings: Sequence[Finding]) -> dict[str, int]:
    counts = Counter(finding.status for finding in findings)
    return {status.value: counts[status] for status in Status}


def _all_skipped(findings: Sequence[Finding]) -> bool:
    return all(finding.status is Status.SKIPPED for finding in findings)


def _last_line(findings: Sequence[Finding]) -> None:
    parts = [f"{count} {status}" for status, count in _summary(findings).items() if count]
    typer.echo(f"\n{', '.join(parts) or 'nothing to run'} on {current_platform()}")
    if any(finding.status is not Status.SKIPPED and _was_interpreted(finding.kernel) for finding in findings):
        typer.echo(
            "note: Triton's interpreter truncates when it converts to bfloat16, and computes wrong arithmetic of bfloat16 "
            "operands: convert operands to float32, and verify bfloat16 on a GPU"
        )
    if findings and _all_skipped(findings):
        runs = "the only run was" if len(findings) == 1 else f"all {len(findings)} were"
        typer.echo(f"nothing was verified: {runs} skipped")


def _was_interpreted(kernel: str) -> bool:
    """Whether Triton's interpreter runs a kernel on this platform."""
    needs = KernelRegistry.get().get_by_name(kernel).capability.required_features
    return "triton" in needs and current_platform().is_cpu


# -- against the reference ----------------------------------------------------------------------------------------------------


def _compare(
    runs: Sequence[tuple[KernelSpec, Case]], device: torch.device | None, repeat: int | None, seed: int, seconds: float
) -> tuple[list[CaseResult], list[Shrunk | None]]:
    """Verifies each kernel of ``runs`` on its case. Returns the results, and for a few failed runs the smallest call with the same
    fault.
    """
    results: list[CaseResult] = []
    smallest: list[Shrunk | None] = []
    shrunk: set[str] = set()
    with progress(len(runs), "verifying") as begin:
        for spec, chosen in runs:
            begin(f"{spec.name}: {chosen.name}")
            results.append(result := verify_case(spec, chosen, device, seed=seed, repeat=repeat))
            smallest.append(None)
            if result.wrong and seconds and spec.name not in shrunk and len(shrunk) < _MOST_SHRUNK:
                shrunk.add(spec.name)
                smallest[-1] = shrink(spec, chosen, result, device, seed=seed, repeat=repeat, seconds=seconds)
    return results, smallest


def _unreached(
    specs: Sequence[KernelSpec], results: Sequence[CaseResult], device: torch.device | None, large: bool
) -> list[CaseResult]:
    """Returns a failed result for each kernel that ran on no case."""
    platform = platform_of(default_device() if device is None else device)
    told = (unreached(s, [r for r in results if r.kernel == s.name], platform, large=large) for s in specs)
    return [each for each in told if each is not None]


def _show_results(findings: Sequence[Finding], *, fold: bool) -> None:
    results = [result for finding in findings for result in finding.results]
    print_table(["kernel", "case", "status", "max abs", "relative", "detail"], _verify_rows(results, fold=fold))
    for finding in findings:
        if finding.wrong:
            typer.echo("\n" + "\n".join(_explained(finding)))
    _last_line(findings)


def _explained(finding: Finding) -> Iterator[str]:
    """Yields all details of a failed finding, line by line."""
    (result,) = finding.results
    yield f"{result.kernel}, {result.case}:"
    if not result.comparisons and not result.traceback:
        yield f"  {result.reason}"
    for comparison in result.comparisons:
        if comparison.fault:
            yield from (f"  {line}" for line in describe_comparison(comparison))
    if result.traceback:
        yield result.traceback.rstrip()
    if finding.shrunk is not None:
        yield from _smallest(finding.shrunk)


def _smallest(shrunk: Shrunk) -> Iterator[str]:
    found = f"of {shrunk.tried} calls that were tried" + ("" if shrunk.exhausted else ", and time was up")
    yield f"  the smallest call with the same failure, {found}:"
    yield from (f"    {line}" if line else "" for line in shrunk.reproducer.splitlines())


def describe_comparison(comparison: Comparison) -> Iterator[str]:
    """Yields the details of an output's failed comparison with the reference, line by line."""
    yield f"{comparison.name}: {comparison.fault}"
    yield (
        f"  max abs {comparison.max_abs_error:.3g}, relative Frobenius {comparison.relative_error:.3g}, "
        f"cosine {comparison.cosine:.6f}"
    )
    if comparison.places:
        yield f"  where: {comparison.places}"
    if comparison.relation:
        yield f"  {comparison.relation}"
    for element in comparison.several:
        yield f"  {element}"
    if comparison.ulps:
        yield "  units in the last place: " + ", ".join(f"{bucket}: {count}" for bucket, count in comparison.ulps)
    tolerance = comparison.tolerance
    numbers = f"relative {tolerance.relative:.3g}, absolute {tolerance.absolute:.3g} of the rms, norm {tolerance.norm:.3g}"
    yield f"  tolerance: {'every bit' if tolerance.exact else numbers} ({tolerance.reason})"


def _verify_rows(results: list[CaseResult], *, fold: bool) -> list[list[str]]:
    """Returns one table row per result. With ``fold``, all cases for which the same gate rejects a kernel share a row."""
    rows: list[list[str]] = []
    skipped: dict[tuple[str, str], tuple[int, list[CaseResult]]] = {}
    for result in results:
        worst = result.worst
        errors = ["", ""] if worst is None else [f"{worst.max_abs_error:.3g}", f"{worst.relative_error:.3g}"]
        detail = result.reason
        if result.status is Status.PASSED and worst is not None and worst.worst is not None:
            tolerance = "" if worst.tolerance.exact else f", tolerance {worst.tolerance.relative:.2g} of it"
            detail = f"worst {worst.name} {worst.worst}{tolerance}"
        if fold and result.status is Status.SKIPPED:
            index, same = skipped.setdefault((result.kernel, result.gate), (len(rows), []))
            same.append(result)
            if len(same) > 1:
                others = any(other.reason != same[0].reason for other in same)
                rows[index][1] = f"{len(same)} cases"
                rows[index][-1] = same[0].reason + (" (and the like)" if others else "")
                continue
        rows.append([result.kernel, result.case, result.status.value, *errors, detail])
    return rows


# -- conformance --------------------------------------------------------------------------------------------------------------


def _conform(
    specs: Sequence[KernelSpec], runs: Sequence[tuple[KernelSpec, Case]] | None, device: torch.device | None, options: Options
) -> list[Finding]:
    """Runs all checks on each kernel: on the cases in ``runs``, or on all cases of its operator if ``runs`` is None."""
    steps = len(find_runs(list(specs), (), options.large) if runs is None else runs) + len(specs) * len(CHECKS)
    findings: list[Finding] = []
    with progress(steps, "verifying") as options.begin:
        for spec in specs:
            cases = None if runs is None else [chosen for of, chosen in runs if of is spec]
            findings += conform(spec, default_device() if device is None else device, options, cases)
    return findings


def _show_findings(findings: Sequence[Finding]) -> None:
    for finding in findings:
        if finding.wrong:
            typer.echo(f"{finding.kernel}: {finding.check}")
            wrong = [result for result in finding.results if result.wrong]
            for result in wrong[:1]:
                for comparison in result.comparisons:
                    if comparison.fault:
                        typer.echo("\n".join(f"  {line}" for line in describe_comparison(comparison)))
                if result.traceback:
                    typer.echo(result.traceback.rstrip())
            if finding.shrunk is not None:
                typer.echo("\n".join(_smallest(finding.shrunk)))
            typer.echo("")
    rows: list[list[Any]] = [[f.kernel, f.check, f.status.value, f.detail] for f in findings]
    print_table(["kernel", "check", "status", "detail"], _folded(rows))
    _last_line(findings)


def _folded(rows: list[list[str]]) -> Iterator[list[str]]:
    """Folds the table rows of a kernel into one row if all its checks are skipped for the same reason, such as another platform."""
    for kernel in dict.fromkeys(row[0] for row in rows):
        mine = [row for row in rows if row[0] == kernel]
        if len(mine) > 1 and len({(row[2], row[3]) for row in mine}) == 1 and mine[0][2] == Status.SKIPPED.value:
            yield [kernel, "all", mine[0][2], mine[0][3]]
        else:
            yield from mine
