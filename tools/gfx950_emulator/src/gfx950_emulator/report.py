"""Tables for a terminal: a launch's counters and modelled time. Needs rich."""

from __future__ import annotations

from collections import Counter

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from gfx950_emulator import ranges, timing
from gfx950_emulator.counters import Counters, Line
from gfx950_emulator.driver import LaunchReport
from kernel_emulation.report import headline, new_table, number


def stats(report: LaunchReport, top: int) -> RenderableType:
    """Returns the tables with all statistics of a launch that was executed with counters."""
    counters: Counters = report.counters
    found = ranges.predict_range(report)
    prediction = found.modelled
    parts: list[RenderableType] = [
        headline(report),
        _totals(report, counters),
        _occupancy(prediction),
        _histogram(counters),
        _time(found),
        _hot_lines(counters, top),
    ]
    lines = counters.lines()
    if any(line.accesses for line in lines):
        parts.append(_global(lines, top))
    if any(line.lds_accesses for line in lines):
        parts.append(_local(lines, top))
    return Group(*parts)


def _totals(report: LaunchReport, counters: Counters) -> Table:
    table = new_table("", "", "", left=(0, 1))
    bytes_ = {direction: counters.total("bytes", direction) for direction in ("load", "store", "atomic")}
    lines = {direction: counters.total("lines", direction) * 128 for direction in ("load", "store", "atomic")}
    flops, instructions = counters.mfma_flops, counters.instructions
    table.add_row("wave-instructions", f"{number(instructions)} ({number(report.instructions)} in lockstep)")
    table.add_row("matrix FLOP", f"{number(flops)}, {number(flops / max(instructions, 1))} per wave-instruction")
    moved = ", ".join(f"{name} {number(bytes_[name])} ({number(lines[name])} in cache lines)" for name in bytes_ if bytes_[name])
    table.add_row("global bytes", moved or "none")
    table.add_row("coalescing", f"{counters.coalescing:.0%} of touched cache lines would have been needed")
    table.add_row("memory, each line once", f"{number(counters.memory_bytes)} bytes")
    cycles, conflicts = counters.total("lds_cycles"), counters.total("lds_conflicts")
    share = f", {conflicts / cycles:.0%} of {number(cycles)} bank cycles lost to conflicts" if cycles else ""
    table.add_row("LDS bytes", f"{number(counters.total('lds_bytes'))}{share}")
    return table


def _occupancy(prediction: timing.Prediction) -> Table:
    fits = prediction.occupancy
    table = new_table("", "", "", left=(0, 1))
    registers = f"{fits.vgprs} VGPRs + {fits.agprs} AGPRs ({fits.allocated_vgprs} allocated), {fits.sgprs} SGPRs"
    table.add_row("registers", registers)
    limits = ", ".join(f"{name} {count}" for name, count in fits.limits.items())
    workgroups = f"{fits.workgroups} workgroups a compute unit, limited by {fits.limiter}"
    table.add_row("occupancy", f"{fits.waves_per_simd:g} waves a SIMD: {workgroups}")
    table.add_row("", f"[dim]workgroups that each allows: {limits}[/]")
    return table


def _histogram(counters: Counters) -> Table:
    table = new_table("Instructions by unit", "unit", "executed", "share", "most frequent", left=(0, 3))
    units, total = counters.by_unit(), counters.instructions
    frequent: dict[str, Counter[str]] = {}
    for line in counters.lines():
        frequent.setdefault(line.unit, Counter())[line.instruction.mnemonic] += line.executions
    for unit, count in units.most_common():
        names = ", ".join(f"{name} {number(times)}" for name, times in frequent[unit].most_common(3))
        table.add_row(unit, number(count), f"{count / total:.1%}", names)
    return table


def _time(found: ranges.Range) -> RenderableType:
    prediction = found.modelled
    full, alone = prediction.full, prediction.alone
    what = new_table(f"Modelled time: bound by {prediction.bound_by}", "", "", left=(0, 1))
    what.add_row("workgroup alone", f"{number(alone.cycles)} cycles")
    if full.workgroups > 1:
        what.add_row(f"{full.workgroups} on a compute unit", f"{number(full.cycles)} cycles")
    what.add_row(
        f"grid on {prediction.device.compute_units} units",
        f"{number(prediction.cycles)} cycles = {prediction.seconds * 1e6:.2f} us at {prediction.device.clock_hz / 1e9:.1f} GHz "
        f"(HBM alone {prediction.memory_seconds * 1e6:.2f} us), achievable {prediction.achievable_seconds * 1e6:.2f} us",
    )
    low, high = (end.seconds * 1e6 for end in (found.fast, found.slow))
    what.add_row("with fast, and with slow constants", f"{low:.2f} us, {high:.2f} us")
    if full.simulated < 1:
        what.add_row("simulated", f"{full.simulated:.0%} of the trace, the rest extrapolated")
    lifetime = sum(full.spent.values())
    spent = new_table("", "waves spent time on", "share", "unit", "busy", left=(0, 2))
    causes = sorted((cause for cause in full.spent if full.spent[cause]), key=lambda cause: -full.spent[cause])
    units = list(full.busy)
    for i in range(max(len(causes), len(units))):
        first = (causes[i], f"{full.spent[causes[i]] / lifetime:.1%}") if i < len(causes) else ("", "")
        second = (units[i], f"{full.busy[units[i]]:.1%}") if i < len(units) else ("", "")
        spent.add_row(*first, *second)
    return Group(what, spent, f"[yellow]{timing.NOTICE}[/]")


def _where(line: Line) -> str:
    instruction = line.instruction
    return escape(instruction.location.split(" @[", 1)[0]) if instruction.location else f"line {instruction.line}"


def _hot_lines(counters: Counters, top: int) -> Table:
    """Returns a table of the source lines, ordered by descending number of wave-instructions that were executed for them."""
    totals: dict[str, list[float]] = {}
    for line in counters.lines():
        where = _where(line) if line.instruction.location else "(no source line)"
        entry = totals.setdefault(where, [0, 0, 0, 0])
        for i, value in enumerate((line.executions, line.flops, line.lines, line.lds_conflicts)):
            entry[i] += value
    all_ = counters.instructions
    table = new_table("Source lines", "source", "executed", "share", "matrix FLOP", "cache lines", "LDS conflicts")
    for where, (executed, *rest) in sorted(totals.items(), key=lambda item: -item[1][0])[:top]:
        table.add_row(where, number(executed), f"{executed / all_:.1%}", *(number(value) if value else "" for value in rest))
    return table


def _global(lines: list[Line], top: int) -> Table:
    """Returns a table of the instructions that access global memory, ordered by descending number of cache lines."""
    columns = ("instruction", "source", "executed", "bytes each", "cache lines each", "at best")
    table = new_table("Global memory", *columns, left=(0, 1))
    for line in sorted((line for line in lines if line.accesses), key=lambda line: -line.lines)[:top]:
        each = line.lines / line.accesses
        best = line.ideal_lines / line.accesses
        table.add_row(
            escape(line.instruction.text),
            _where(line),
            number(line.executions),
            f"{line.bytes / line.accesses:.4g}",
            f"[red]{each:.3g}[/]" if each > 1.5 * best else f"{each:.3g}",
            f"{best:.3g}",
        )
    return table


def _local(lines: list[Line], top: int) -> Table:
    """Returns a table of the instructions that access LDS, ordered by descending number of conflict cycles."""
    columns = ("instruction", "source", "executed", "bytes each", "bank cycles each", "of them conflicts")
    table = new_table("LDS", *columns, left=(0, 1))
    chosen = sorted((line for line in lines if line.lds_accesses), key=lambda line: (-line.lds_conflicts, -line.lds_cycles))
    for line in chosen[:top]:
        conflicts = line.lds_conflicts / line.executions
        table.add_row(
            escape(line.instruction.text),
            _where(line),
            number(line.executions),
            f"{line.lds_bytes / line.executions:.4g}",
            f"{line.lds_cycles / line.executions:.3g}",
            f"[red]{conflicts:.3g}[/]" if conflicts else "0",
        )
    return table
