"""``verify``: are kernels right?"""

from __future__ import annotations

from collections import Counter

import typer

from tokenspeed_kernel.cli.find import find_device, find_kernels, find_runs, made_with
from tokenspeed_kernel.cli.options import CaseNames, Device, Large, Plugin, Solution, Target
from tokenspeed_kernel.cli.output import AsJson, print_json, print_table, progress
from tokenspeed_kernel.numerics.verify import CaseResult, Status, verify_case
from tokenspeed_kernel.platform import current_platform


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
    runs = find_runs(made_with(solution, find_kernels(target, plugin)), case or (), large)
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
