"""``tune``: finds the fastest kernels and configurations on this machine."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from tokenspeed_kernel.workbench import tuned
from tokenspeed_kernel.workbench.cli.find import find_device, find_kernels, find_operator, find_runs
from tokenspeed_kernel.workbench.cli.output import fail, print_json, print_table, progress
from tokenspeed_kernel.workbench.numerics.verify import default_device
from tokenspeed_kernel.workbench.tuned.tables import forget
from tokenspeed_kernel.workbench.tuning import Outcome, Trial, TrialStatus, tune_case
from tokenspeed_kernel.workbench.watching import load_cases
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.platform import PlatformInfo, platform_of
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.traits import format_traits


def tune(
    source: Path | None,
    op: str | None,
    case: list[str] | None,
    large: bool,
    kernel: list[str] | None,
    budget: float,
    device: str | None,
    listing: bool,
    clear: bool,
    stale: bool,
    export: Path | None,
    trials: bool,
    as_json: bool,
) -> None:
    actions = [name for name, given in (("--list", listing), ("--clear", clear), ("--export", export is not None)) if given]
    if len(actions) > 1 or (actions and source is not None):
        fail(f"{' and '.join([*actions, *['--from'] * (source is not None)])} do not go together")
    if stale and not clear:
        fail("--stale goes with --clear")
    operator = str(find_operator(op)) if op is not None else None
    where = find_device(device) or default_device()
    platform = platform_of(where)
    if listing:
        _list(platform, operator, as_json)
    elif clear:
        _clear(platform, operator, stale)
    elif export is not None:
        _export(platform, operator, export)
    else:
        if source is None and operator is None:
            fail("say what to tune on: --from FILE, --op OP, or both for the calls of OP in FILE")
        runs = _captured(source, operator, case or ()) if source is not None else _declared(str(operator), case or (), large)
        kernels = _kernels(kernel or (), {operator for operator, *_ in runs}) or None
        _tune(runs, where, platform, kernels, budget, trials, as_json)


def _kernels(wanted: Sequence[str], operators: set[str]) -> set[str]:
    """Returns the names of the kernels to tune. ``wanted`` names kernels, or operators whose kernels are meant. Only kernels of
    ``operators`` are returned.
    """
    found: set[str] = set()
    for name in wanted:
        mine = {spec.name for spec in find_kernels(name) if spec.operator in operators}
        if not mine:
            fail(f"--kernel {name}: it is no kernel of {', '.join(sorted(operators))}")
        found |= mine
    return found


def _declared(operator: str, wanted: Any, large: bool) -> list[tuple[str, Case, int]]:
    found = get_operator(operator)
    reference = KernelRegistry.get().get_for_operator(found.family, found.mode)[-1]
    return [(operator, case, 1) for _, case in find_runs([reference], wanted, large)]


def _captured(path: Path, operator: str | None, wanted: Any) -> list[tuple[str, Case, int]]:
    try:
        cases = load_cases(path, operator)
    except (OSError, ValueError) as error:
        fail(f"--from {path}: {error}")
    runs = [(c.operator, c.case, c.count) for c in cases if not wanted or any(w.lower() in c.case.name.lower() for w in wanted)]
    if not runs:
        fail(f"--from {path}: it has no such call")
    return runs


def _tune(
    runs: list[tuple[str, Case, int]],
    device: Any,
    platform: PlatformInfo,
    kernels: set[str] | None,
    budget: float,
    all_trials: bool,
    as_json: bool,
) -> None:
    outcomes: list[tuple[Outcome, int]] = []
    with progress(len(runs), "tuning") as begin:
        for operator, case, count in runs:
            begin(f"{operator}: {case.name}")
            try:
                made = tune_case(operator, case, device, kernels=kernels, budget_s=budget)
            except Exception as error:  # for example out of memory; an error must not lose earlier results
                made = [Outcome(operator, case.name, reason=f"{type(error).__name__}: {error}")]
            outcomes += [(outcome, count) for outcome in made]
    wrong = [t for outcome, _ in outcomes for t in outcome.trials if t.reason.startswith("verify:")]
    failed = [outcome for outcome, _ in outcomes if outcome.trials and not outcome.results]
    table = tuned.user_table(tuned.Device.of(platform))
    if as_json:
        mean = _mean_gain(outcomes)
        listed = [{**outcome.to_dict(), "count": count} for outcome, count in outcomes]
        print_json({"device": str(platform), "table": str(table) if table else None, "mean_gain": mean, "outcomes": listed})
        raise typer.Exit(bool(failed))
    columns = ["operator", "case", "untuned us", "tuned us", "gain", "kernel", "configuration", "tried", "detail"]
    print_table(columns, map(_row, outcomes))
    for outcome, _ in outcomes if all_trials else ():
        typer.echo(f"\n{outcome.operator}: {outcome.case}")
        print_table(["kernel", "configuration", "status", "us", "detail"], map(_trial_row, outcome.trials))
    for trial in wrong:
        typer.echo(f"\nwrong: {trial.kernel} {format_traits(trial.config)}: {trial.reason}")
    gains = _mean_gain(outcomes)
    if gains is not None:
        typer.echo(f"\nspeedup of tuned choices over untuned ones: {gains:.3f} (geometric mean, weighted by calls), on {platform}")
    unsaved = any(outcome.results and outcome.saved is None for outcome, _ in outcomes)
    if table is None or unsaved:
        typer.echo("results were not written" + (": tables are switched off" if table is None else f" to {table}"))
    elif any(outcome.results for outcome, _ in outcomes):
        typer.echo(f"written to {table}")
    raise typer.Exit(bool(failed))


def _row(one: tuple[Outcome, int]) -> list[str]:
    outcome, _ = one
    counts = Counter(trial.status for trial in outcome.trials)
    tried = ", ".join(f"{counts[status]} {status.value}" for status in TrialStatus if counts[status])
    if not outcome.results:
        return [outcome.operator, outcome.case, "", "", "", "", "", tried, outcome.reason]
    best, before = outcome.results[0], outcome.untuned_us
    gain = "" if outcome.gain is None else f"{outcome.gain:.3f}"
    config = format_traits(best.config) or "its own choice"
    detail = "" if best.kernel == outcome.untuned else f"instead of {outcome.untuned}"
    times = ["" if before is None else f"{before:.2f}", f"{best.us:.2f}"]
    return [outcome.operator, outcome.case, *times, gain, best.kernel, config, tried, detail]


def _trial_row(trial: Trial) -> list[str]:
    config = format_traits(trial.config) or "its own choice"
    return [trial.kernel, config, trial.status.value, "" if trial.us is None else f"{trial.us:.2f}", trial.reason]


def _mean_gain(outcomes: list[tuple[Outcome, int]]) -> float | None:
    gains = [(outcome.gain, count) for outcome, count in outcomes if outcome.gain is not None]
    total = sum(count for _, count in gains)
    return math.exp(sum(math.log(gain) * count for gain, count in gains) / total) if total else None


def _list(platform: PlatformInfo, operator: str | None, as_json: bool) -> None:
    entries = [listed for listed in tuned.all_entries(platform) if operator in (None, listed.entry.operator)]
    if as_json:
        print_json([{**listed.entry.to_dict(), "source": listed.source, "stale": listed.stale} for listed in entries])
        return
    if not entries:
        typer.echo(f"no tuned results for {platform}")
        return
    rows = []
    for listed in entries:
        entry, best = listed.entry, listed.entry.best
        others = [r.us for r in entry.results if r is not best] + [best.own_us] * bool(best.config and best.own_us)
        versus = f"{min(other for other in others if other is not None):.2f}" if others else ""
        config = format_traits(best.config) or "its own choice"
        times = [f"{best.us:.2f}", versus]
        rows.append([entry.operator, format_traits(entry.sizes), best.kernel, config, *times, listed.stale or "holds"])
    print_table(["operator", "sizes up to", "kernel", "configuration", "us", "vs", "state"], rows)
    stale = sum(bool(listed.stale) for listed in entries)
    where = ", ".join(dict.fromkeys(listed.source for listed in entries))
    typer.echo(f"\n{len(entries)} results, {stale} stale, for {platform}; in {where}")


def _clear(platform: PlatformInfo, operator: str | None, stale: bool) -> None:
    device = tuned.Device.of(platform)
    path = tuned.user_table(device)
    gone = {(listed.entry.key, listed.source) for listed in tuned.all_entries(platform) if listed.stale} if stale else None

    def keep(entry: tuned.Entry) -> bool:
        other = entry.device != device or operator not in (None, entry.operator)
        return other or (gone is not None and (entry.key, str(path)) not in gone)

    removed = tuned.remove_entries(path, keep) if path is not None else 0
    forget(keep)
    typer.echo(f"removed {removed} results for {platform}")


def _export(platform: PlatformInfo, operator: str | None, path: Path) -> None:
    holding = [listed.entry for listed in tuned.all_entries(platform) if not listed.stale]
    good = [entry for entry in holding if operator in (None, entry.operator)]
    if not good:
        fail(f"there are no results that hold for {platform}")
    if not path.parent.is_dir():
        fail(f"--export {path}: there is no folder {path.parent}")
    newest: dict[str, tuned.Entry] = {}
    for entry in good:  # the results of this machine are listed first, and are kept
        newest.setdefault(entry.key, entry)
    written = sum(tuned.save_entry(path, entry) for entry in newest.values())
    if written < len(newest):
        fail(f"--export {path}: {written} of {len(newest)} results were written")
    typer.echo(f"{written} results for {platform} are in {path}; a wheel ships it as {platform.arch}.json")
