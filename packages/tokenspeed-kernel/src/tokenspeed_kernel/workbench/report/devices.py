"""Combines several benchmark reports by device: the newest measurement of each kernel on each case, and all earlier ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tokenspeed_kernel.workbench.benchmark.results import Method, Report, Row
from tokenspeed_kernel.workbench.benchmark.roofline import Roofline, Share

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Run:
    """One benchmark report, and its name on the page."""

    name: str
    report: Report

    @property
    def label(self) -> str:
        """A short name for the run: the abbreviated commit; without a commit, month, day and time."""
        commit, date = self.report.metadata.git_commit, self.report.metadata.date
        return commit[:7] + "+" * commit.endswith("+") if commit else f"{date[5:10]} {date[11:16]}"


@dataclass(frozen=True)
class Point:
    """A report's row as a point in the roofline plot, with its FLOP per byte and TFLOP/s."""

    row: Row
    intensity: float
    tflops: float


@dataclass(frozen=True)
class Bar:
    """The fastest kernel of a backend on a case.

    ``part`` is the fraction of the roofline that the kernel reaches; without a roofline, the fraction of the fastest kernel's
    speed.
    If ``part`` is None, ``row.status`` says why.
    """

    solution: str
    row: Row
    part: float | None


@dataclass(frozen=True)
class CaseBars:
    """One bar for each backend that was measured on a case."""

    operator: str
    case: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Change:
    """Median times of one kernel on one case in microseconds, one per run; None for a run that did not measure the kernel."""

    operator: str
    case: str
    kernel: str
    times_us: tuple[float | None, ...]

    @property
    def ratios(self) -> tuple[float | None, ...]:
        """Each run's median divided by the median of the first run that measured the kernel. Example: 0.5 is half the time."""
        first = next(time_us for time_us in self.times_us if time_us is not None)
        return tuple(None if time_us is None else time_us / first for time_us in self.times_us)

    @property
    def last(self) -> float:
        """The ratio of the last run that measured the kernel."""
        return next(ratio for ratio in reversed(self.ratios) if ratio is not None)


@dataclass(frozen=True)
class Device:
    """The runs on one device, the oldest first."""

    name: str
    runs: tuple[Run, ...]

    @property
    def newest(self) -> Report:
        return self.runs[-1].report

    @property
    def roofline(self) -> Roofline | None:
        """The roofline of the newest run that measured one; None if no run did."""
        return next((run.report.roofline for run in reversed(self.runs) if run.report.roofline is not None), None)

    def rows(self) -> list[tuple[Row, Run]]:
        """Returns the newest row of each kernel and case, with the run that it is from. Skipped cases are left out."""
        newest: dict[tuple[str, str, str], tuple[Row, Run]] = {}
        for run in self.runs:
            for row in run.report.rows:
                if row.status != "skipped":
                    newest.pop(row.key, None)
                    newest[row.key] = row, run
        return sorted(newest.values(), key=lambda pair: pair[0].operator)

    def skipped(self) -> int:
        """Counts the rows of all runs whose kernel is not eligible for the case."""
        return sum(row.status == "skipped" for run in self.runs for row in run.report.rows)

    def points(self) -> list[Point]:
        """Returns the points of the roofline plot: the newest rows that have both a FLOP rate and a memory rate."""
        rows = [row for row, _ in self.rows() if row.tflops and row.gb_per_s]
        return [Point(row, 1e3 * row.tflops / row.gb_per_s, row.tflops) for row in rows if row.tflops and row.gb_per_s]

    def share(self, row: Row) -> Share | None:
        """Returns the fraction of the roofline that a row's kernel reaches; None if unknown. bfloat16 operands are assumed for old
        reports, which lack the operand dtype."""
        if row.share is not None or self.roofline is None or row.gb_per_s is None or row.tflops is None:
            return row.share
        memory = Share(row.gb_per_s / self.roofline.memory_gb_per_s, "memory")
        products = self.roofline.tflops.get("bfloat16")
        computing = Share(row.tflops / products, "bfloat16") if products else memory
        return max(memory, computing, key=lambda share: share.part)

    def bars(self) -> dict[str, list[CaseBars]]:
        """Returns the bars of each case, by operator."""
        found: dict[str, list[CaseBars]] = {}
        rows = [row for row, _ in self.rows()]
        for (operator, case), group in _grouped(rows, lambda row: (row.operator, row.case)):
            best = [_fastest(of_one) for _, of_one in _grouped(group, solution_of)]
            fastest_us = min((row.timing.median_us for row in best if row.timing is not None), default=None)
            bars = tuple(Bar(solution_of(row), row, self._part(row, fastest_us)) for row in best)
            found.setdefault(operator, []).append(CaseBars(operator, case, bars))
        return found

    def _part(self, row: Row, fastest_us: float | None) -> float | None:
        if row.timing is None or fastest_us is None:
            return None
        if self.roofline is None:
            return fastest_us / row.timing.median_us
        share = self.share(row)
        return None if share is None else share.part

    def changes(self) -> dict[str, list[Change]]:
        """Returns, by operator, the medians of each kernel and case that were measured in two or more runs."""
        found: dict[str, list[Change]] = {}
        times = [{row.key: row.timing.median_us for row in run.report.rows if row.timing is not None} for run in self.runs]
        for key in dict.fromkeys(itertools.chain(*times)):
            operator, case, kernel = key
            of_one = tuple(of_run.get(key) for of_run in times)
            if sum(time_us is not None for time_us in of_one) > 1:
                found.setdefault(operator, []).append(Change(operator, case, kernel, of_one))
        return dict(sorted(found.items()))

    def notes(self) -> list[str]:
        """Returns messages about differences between the runs, apart from the code: versions of software, and timing methods."""
        notes = []
        for what in ("driver", "python", "torch", "triton"):
            values = list(dict.fromkeys(getattr(run.report.metadata, what) or "unknown" for run in self.runs))
            if len(values) > 1:
                notes.append(f"{what}: {', then '.join(values)}")
        methods = list(dict.fromkeys(_method(run.report.method) for run in self.runs))
        if len(methods) > 1:
            notes.append(f"timing: {'; then '.join(methods)}")
        return notes


def devices_of(reports: Iterable[tuple[str, Report]]) -> list[Device]:
    """Groups named reports by device. The reports of a device are in the order of their dates."""
    runs = [Run(name, report) for name, report in reports]
    grouped = _grouped(runs, lambda run: run.report.metadata.device)
    return [Device(name, tuple(sorted(of_one, key=lambda run: run.report.metadata.date))) for name, of_one in grouped]


def solution_of(row: Row) -> str:
    """Returns the backend of a row's kernel. In old reports, which lack the backend, it is the part of the kernel's name before the
    operator's mode."""
    return row.solution or row.kernel.partition("_" + row.operator.partition(".")[2])[0]


def _fastest(rows: Sequence[Row]) -> Row:
    timed = [row for row in rows if row.timing is not None]
    return min(timed, key=lambda row: row.timing.median_us if row.timing else 0.0) if timed else rows[0]


def _method(method: Method | None) -> str:
    if method is None:
        return "not said"
    return f"{method.cache} caches" + f", {method.graph_calls} calls in a graph" * bool(method.graph_calls)


def _grouped(things: Iterable[T], key: Callable[[T], K]) -> list[tuple[K, list[T]]]:
    groups: dict[K, list[T]] = {}
    for thing in things:
        groups.setdefault(key(thing), []).append(thing)
    return [*groups.items()]
