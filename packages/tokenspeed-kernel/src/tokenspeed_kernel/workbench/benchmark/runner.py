"""Runs a benchmark program: measures this project's kernels and baselines at the shapes of real models, on one GPU.

A program declares a `Benchmark`: its shapes, its implementations, what to measure at a shape (a `Task`), its bars, and its figure.
The runner checks each output first, times all implementations in alternating rounds, and writes the report after each shape.

A time is the median of 51 or more measurements. A measurement is the time of a CUDA graph of several calls, divided by their
number. The calls rotate over copies of the inputs that exceed the caches. In the graph, a small PyTorch kernel follows each call.
Without this kernel, implementations that use PDL would overlap with their own preceding call, which does not happen in a model. The
small kernel's time (``between_us``) is measured at each shape, in a graph of such kernels alone, and is subtracted from all times
at that shape. With ``--back-to-back`` no kernel follows the calls, as in most published figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tokenspeed_kernel.workbench.benchmark.bars import Bar, Times
from tokenspeed_kernel.workbench.benchmark.baselines import failure_of
from tokenspeed_kernel.workbench.benchmark.figures import Figure
from tokenspeed_kernel.workbench.benchmark.machine import GpuState, Monitor, gpu_monitor
from tokenspeed_kernel.workbench.benchmark.metadata import collect_metadata, package_version
from tokenspeed_kernel.workbench.benchmark.results import Launch, Method, Report, Row, as_text
from tokenspeed_kernel.workbench.benchmark.roofline import measure_roofline
from tokenspeed_kernel.workbench.benchmark.timing import Timing, host_time, sample, sample_graph
from tokenspeed_kernel_base.cases import Cost
from tokenspeed_kernel_base.storage import replace_file

Call = Callable[[], Any]
# A function that takes a call's output and returns two relative errors: over all elements, and of the worst row.
Errors = Callable[[Any], tuple[float, float]]
JsonRow = Mapping[str, Any]

# A measurement includes the launch of the graph, about ten microseconds. So a graph repeats the call until the lower bound of the
# graph's time reaches GRAPH_US, but at most IN_GRAPH times. The launch then adds half a percent, or a tenth of a microsecond per
# call.
GRAPH_US, IN_GRAPH = 2000.0, 128
_LAUNCHES = 20
_LONG_US = 1000.0
# Number of kernels in the graph that times the kernel between calls. With this many kernels, the launch of the graph is negligible.
BETWEEN = 256
_BETWEEN_IS = "a small kernel follows each call, so that calls do not overlap; its own time (between_us) is subtracted"
_BACK_TO_BACK_IS = "no kernel runs between calls: a call that is launched with PDL overlaps the end of the preceding call"


class Shape(Protocol):
    """A shape: the description of one call of an operator. Its name is unique. Tables and plots list shapes of equal ``group``
    together."""

    @property
    def name(self) -> str: ...
    @property
    def group(self) -> str: ...
    @property
    def operator(self) -> str: ...


@dataclass(frozen=True)
class Implementation:
    """One of this project's kernels, or a baseline, as a benchmark program measures it.

    Attributes:
        name: name of the implementation in tables.
        setup: does the work that an engine does once, and returns the call to time. The program defines the arguments of ``setup``.
        package: the distribution whose version is reported.
        ours: whether the implementation belongs to this project and is no baseline.
        portable: whether it is this project's portable kernel, included for comparison. Long calls of a portable kernel are
            measured only a few times.
        on_demand: whether it is measured only if named, because its preparation takes long.
        sinks: whether its softmax supports sinks. An implementation without sinks is checked against a softmax without sinks.
    """

    name: str
    setup: Callable[..., Any]
    package: str
    ours: bool = False
    portable: bool = False
    on_demand: bool = False
    sinks: bool = True

    @property
    def version(self) -> str:
        return package_version(self.package) if self.package else ""


@dataclass(frozen=True)
class Limits:
    """The largest allowed relative errors of a call's output: over all elements, and of the worst row."""

    error: float
    row_error: float


@dataclass(frozen=True)
class Effort:
    """How long to measure: number of rounds (0: only check outputs), minimum number of graphs per round, and seconds per round."""

    rounds: int
    fewest: int
    budget_s: float
    back_to_back: bool = False


class Between:
    """The kernel that follows each call in a graph: an ordinary kernel, on 32 values of its own.

    Attributes:
        us: the time of this kernel, including the gap between kernels, in microseconds; None if no kernel follows.
    """

    def __init__(self, device: torch.device, effort: Effort) -> None:
        self._launch, self.us = self.kernel(device), None
        if not effort.back_to_back:
            calls = [self._launch] * BETWEEN
            self.us = statistics.median(sample_graph(calls, device, budget_s=0.0, fewest=effort.fewest, most=effort.fewest))

    def kernel(self, device: torch.device) -> Call:
        return functools.partial(torch.zeros(32, device=device).add_, 1.0)

    def after(self, call: Call) -> Call:
        """Returns a function that makes the call, then launches this kernel."""
        if self.us is None:
            return call

        def both() -> None:
            call()
            self._launch()

        return both


@dataclass
class Measurement:
    """The measurement of an implementation at a shape, while it is in progress."""

    implementation: Implementation
    shape: Shape
    status: str = "measured"
    reason: str = ""
    error: float | None = None
    row_error: float | None = None
    first_ms: float | None = None
    alone_us: float = 0.0
    host_us: float = 0.0
    between_us: float | None = None
    rounds: list[list[float]] = field(default_factory=list)
    states: list[GpuState] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    def guarded(self, step: Callable[[], None]) -> None:
        """Runs a step of the measurement, unless an earlier step has failed."""
        if self.status == "measured":
            failure = failure_of(step)
            self.status, self.reason = failure or (self.status, self.reason)

    def check(self, make: Callable[[], Call], errors_of: Errors, limits: Limits) -> None:
        """Makes a call and compares its output with the reference. Keeps the largest errors over several checks.

        If an error exceeds its limit, the measurement is marked as failed.
        """
        start = time.perf_counter()
        result = make()()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if self.first_ms is None:
            self.first_ms = (time.perf_counter() - start) * 1e3
        error, row_error = errors_of(result)
        self.error, self.row_error = max(error, self.error or 0.0), max(row_error, self.row_error or 0.0)
        if self.error > limits.error:
            self.status, self.reason = "failed", f"relative error {self.error:.2g} is above {limits.error}"
        elif self.row_error > limits.row_error:
            self.status, self.reason = "failed", f"relative error {self.row_error:.2g} of the worst row is above {limits.row_error}"

    def time(self, task: Task, device: torch.device, between: Between, monitor: Monitor | None, effort: Effort) -> None:
        """Times one round of calls. The monitor reads the device's state meanwhile."""
        fewest, budget_s = effort.fewest, effort.budget_s
        if not self.rounds:
            self.calls = task.calls(self.implementation)
            self.alone_us = statistics.median(sample(self.calls, device, budget_s=0.0, fewest=3, most=3))
            # The host enqueues a call at once, however long it runs. So three long calls suffice: more would only occupy the
            # device.
            self.host_us = host_time(self.calls[0], device, _LAUNCHES if self.alone_us < _LONG_US else 3)
        if self.implementation.portable and self.alone_us > _LONG_US:
            if self.rounds:
                return
            fewest, budget_s = max(1, fewest // 4), 0.0
        options: dict[str, Any] = {"budget_s": budget_s, "fewest": fewest, "most": 4 * fewest}
        if monitor is not None:
            options["meanwhile"] = lambda: self.states.extend(filter(None, [monitor()]))
        options["expected_us"] = statistics.median(self.rounds[0]) if self.rounds else self.alone_us
        self.between_us = between.us
        self.rounds.append(self.timed(task.in_graph, device, between, **options))

    def timed(self, in_graph: int, device: torch.device, between: Between, **options: Any) -> list[float]:
        """Returns a call's times in microseconds, measured in graphs of ``in_graph`` calls. The time of the kernel between calls is
        subtracted.
        """
        several = [between.after(self.calls[index % len(self.calls)]) for index in range(in_graph)]
        return [time_us - (between.us or 0.0) for time_us in sample_graph(several, device, **options)]

    def row(self, cost: Cost) -> dict[str, Any]:
        """Returns a `Row` of the workbench's reports as a dict, with additional values.

        ``first_ms`` is the time of the first call, which may include compiling a kernel or loading it from a cache.
        """
        who = self.implementation
        known = Row(
            who.name, self.shape.operator, self.shape.name, self.status, self.reason, solution=who.name, version=who.version
        )
        if self.rounds and self.status == "measured":
            known = with_times(known, self.rounds, cost)
            assert known.timing is not None
            launch = Launch(self.host_us, self.alone_us, known.timing.median_us)
            state = min(self.states, key=lambda state: state.sm_clock_mhz, default=None)
            known = dataclasses.replace(known, launch=launch, state=state)
        errors = {"relative_error": self.error, "worst_row_error": self.row_error}
        extra = {"group": self.shape.group, **errors, "first_ms": self.first_ms, "between_us": self.between_us}
        return {**dataclasses.asdict(known), **extra}


def with_times(row: Row, rounds: Sequence[Sequence[float]], cost: Cost) -> Row:
    """Returns the row with the median and spread of its rounds, and with the rates that follow from the call's cost."""
    timing = Timing.of(rounds).without_samples()
    tflops, gb_per_s = cost.flops / timing.median_us / 1e6, cost.bytes / timing.median_us / 1e3
    return dataclasses.replace(row, timing=timing, tflops=tflops, gb_per_s=gb_per_s)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Returns the norm of ``got - expected``, divided by the norm of ``expected``; infinite if there is a NaN."""
    error = float((got.float() - expected).norm() / expected.norm())
    return error if math.isfinite(error) else math.inf


def worst_row_error(got: Tensor, expected: Tensor) -> float:
    """Returns the largest `relative_error` of any row along the last axis. An average would hide one wrong row among many correct
    rows.
    """
    errors = (got.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    return float(errors.max()) if bool(errors.isfinite().all()) else math.inf


def errors_against(expected: Tensor) -> Errors:
    """Returns a function that computes both errors of an output: `relative_error` over all elements, and `worst_row_error`."""
    return lambda got: (relative_error(got, expected), worst_row_error(got, expected))


@dataclass
class Task:
    """Describes the measurements at one shape.

    Attributes:
        cost: the cost of a call, from which rates are computed.
        checks: the checks of an implementation before it is timed: a function that makes the call, the errors of the call's output,
            and their limits.
        calls: makes an implementation's calls, each on its own copy of the inputs.
        in_graph: the number of calls in a graph.
        more: returns further values of an implementation's row, measured after all rounds.
    """

    shape: Shape
    cost: Cost
    checks: Callable[[Implementation], Iterable[tuple[Callable[[], Call], Errors, Limits]]]
    calls: Callable[[Implementation], list[Call]]
    in_graph: int
    more: Callable[[Measurement], Mapping[str, Any]] = lambda measurement: {}


def in_graph_of(least_us: float, copies: int = 1) -> int:
    """Returns the number of calls in a graph, given a lower bound of a call's time; at least one call for each copy of the
    inputs.
    """
    return max(copies, min(IN_GRAPH, math.ceil(GRAPH_US / least_us)))


# -- reports -----------------------------------------------------------------------------------------------------------------------


def values_of(rows: Iterable[JsonRow], name: str = "") -> Times:
    """Returns the value ``name`` of the rows (by default the median time in microseconds), by shape and implementation."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        value = row[name] if name else row["timing"] and row["timing"]["median_us"]
        if value is not None:
            found.setdefault(row["case"], {})[row["kernel"]] = value
    return found


def absent_of(rows: Iterable[JsonRow]) -> dict[str, str]:
    """Returns the implementations that are not installed, each with the reason."""
    return {row["kernel"]: row["reason"] for row in rows if row["status"] == "absent"}


def lost(device: torch.device) -> str:
    """Returns the error if a kernel has broken the process, so that it cannot measure any more; empty if it can. Frees cached
    device memory.
    """
    if device.type != "cuda":
        return ""
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


def metadata_of(given: argparse.Namespace, command: str, device: torch.device) -> Any:
    """Returns the metadata of a report. The option ``--commit`` replaces the commit, for a copy of the code that has no checkout of
    its own.
    """
    metadata = collect_metadata(command, device)
    return dataclasses.replace(metadata, git_commit=given.commit) if given.commit else metadata


# -- programs ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Benchmark:
    """The declaration of a benchmark program.

    Attributes:
        file: the program's file; the report and the plot are beside it.
        description: the program's help text.
        shapes: all shapes, in the order of the report.
        implementations: returns all implementations for the given options; this project's come first.
        tasks: yields the tasks of the given shapes and implementations, in the order of measurement.
        bars: the acceptance bars.
        judged: returns the outcomes of further bars, computed from the rows.
        rate: returns the text of a row's rate.
        figure: the plot and the table of a report.
        about: returns a description of a shape for its line of output, from any of the shape's rows.
        copies: the number of copies of the inputs that the report states.
        options: adds the program's own command-line options.
        chosen: returns whether the options select a shape.
        between: the class of the kernel between calls.
        between_is: a description of the kernel between calls, if it is not the usual small one.
    """

    file: str
    description: str | None
    shapes: Sequence[Any]
    implementations: Callable[[argparse.Namespace], list[Implementation]]
    tasks: Callable[[Sequence[Any], Sequence[Implementation], torch.device, Effort], Iterator[Task]]
    bars: Sequence[Bar]
    judged: Callable[[Sequence[JsonRow]], list[dict[str, Any]]]
    rate: Callable[[JsonRow], str]
    figure: Figure
    about: Callable[[JsonRow], str] = lambda row: ""
    copies: int = 0
    options: Callable[[argparse.ArgumentParser], Any] = lambda parser: None
    chosen: Callable[[argparse.Namespace, Any], bool] = lambda given, shape: True
    between: type[Between] = Between
    between_is: str = _BETWEEN_IS

    # -- measuring ---------------------------------------------------------------------------------------------------------------

    def measure(self, task: Task, who: Iterable[Implementation], device: torch.device, effort: Effort) -> list[dict[str, Any]]:
        """Measures implementations at one shape, in alternating rounds. Returns a report row per implementation."""
        measurements = [Measurement(each, task.shape) for each in who]
        for each in measurements:
            for check in task.checks(each.implementation):
                each.guarded(functools.partial(each.check, *check))
        if effort.rounds:
            monitor, between = gpu_monitor(device), (Between if effort.back_to_back else self.between)(device, effort)
            for _ in range(effort.rounds):
                for each in measurements:
                    each.guarded(functools.partial(each.time, task, device, between, monitor, effort))
        more = [task.more(each) for each in measurements]
        return [{**each.row(task.cost), **values} for each, values in zip(measurements, more, strict=True)]

    def run(
        self,
        shapes: Sequence[Any],
        who: Sequence[Implementation],
        device: torch.device,
        effort: Effort,
        report: Report,
        output: Path | None = None,
    ) -> dict[str, Any]:
        """Measures the shapes, and prints a line for each. Returns the report's document, see `document`.

        The document is written after each shape, so that an interrupted run keeps its results. Measuring stops once a kernel has
        broken the process.
        """
        rows: list[dict[str, Any]] = []
        made: dict[str, Any] = {}
        for task in self.tasks(shapes, who, device, effort):
            of_shape = self.measure(task, who, device, effort)
            rows += of_shape
            print(self.line(of_shape), flush=True)
            made = self.document(rows, who, report, back_to_back=effort.back_to_back)
            if output is not None:
                replace_file(output, as_text(made))
            del task  # frees the inputs before the next task's are made
            broken = lost(device)
            if broken:
                print(f"stopped: {broken}")
                break
        return made

    def judge(self, rows: Sequence[JsonRow]) -> list[dict[str, Any]]:
        """Returns the outcome of every acceptance bar."""
        times, absent = values_of(rows), {*absent_of(rows)}
        return [*(bar.judged(times, absent) for bar in self.bars), *self.judged(rows)]

    def document(
        self, rows: Sequence[dict[str, Any]], who: Iterable[Implementation], report: Report, *, back_to_back: bool = False
    ) -> dict[str, Any]:
        """Returns the JSON document to write: a report that `load_report` reads, with additional values. Rows are in the shapes'
        order.
        """
        places, made = {shape.name: place for place, shape in enumerate(self.shapes)}, report.to_dict()
        absent = absent_of(rows)
        return {
            **made,
            "method": {**made["method"], "between": _BACK_TO_BACK_IS if back_to_back else self.between_is},
            "rows": sorted(rows, key=lambda row: places.get(row["case"], len(places))),
            "versions": {each.name: each.version for each in who if each.name not in absent},
            "absent": absent,
            "bars": self.judge(rows),
        }

    # -- printing ----------------------------------------------------------------------------------------------------------------

    def line(self, rows: Sequence[JsonRow]) -> str:
        """Returns a line of output for a shape: each implementation's time in microseconds, rate and error, or its failure."""
        said = []
        for row in rows:
            error = row["relative_error"]
            if row["timing"] is not None:
                us = row["timing"]["median_us"]
                said.append(f"{row['kernel']} {us:.2f} us {self.rate(row)} err {error:.1e} host {row['launch']['host_us']:.1f}")
            elif row["status"] == "measured":
                said.append(f"{row['kernel']} err {error:.1e}")
            elif row["status"] not in ("skipped", "absent"):
                said.append(f"{row['kernel']} {row['status']}: {row['reason'][:200]}")
        return f"{rows[0]['case']}{self.about(rows[0])}: " + " | ".join(said)

    @staticmethod
    def table(rows: Sequence[JsonRow]) -> str:
        """Returns a text table of times in microseconds, with a line per shape, to print at the end."""
        names = list(dict.fromkeys(row["kernel"] for row in rows))
        lines = [f"{'us':44}" + "".join(f"{name[:14]:>15}" for name in names)]
        for shape, found in itertools.groupby(rows, lambda row: row["case"]):
            cells = dict.fromkeys(names, "-")
            cells |= {row["kernel"]: f"{row['timing']['median_us']:.2f}" if row["timing"] else row["status"] for row in found}
            lines.append(f"{shape:44}" + "".join(f"{cell:>15}" for cell in cells.values()))
        return "\n".join(lines)

    def outcome(self, made: Mapping[str, Any]) -> str:
        """Returns the text to print at the end: failures, absent implementations, acceptance bars, and the table of times."""
        failed = {row["kernel"]: row for row in made["rows"] if row["status"] in ("error", "failed", "skipped")}
        lines = [f"{row['status']}: {name} at {row['case']}: {row['reason']}" for name, row in failed.items()]
        lines += [f"absent: {name}: {reason}" for name, reason in made["absent"].items()]
        for bar in made["bars"]:
            if bar["value"] is not None:
                bound = f"{'<=' if bar['most'] else '>='} {bar['bound']:g}"
                lines.append(f"{'holds ' if bar['holds'] else 'MISSED'} {bar['name']}: {bar['value']:.4g} ({bound})")
        return "\n".join([*lines, self.table(made["rows"])])

    # -- the command line --------------------------------------------------------------------------------------------------------

    def parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(description=self.description, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--only", action="append", default=[], metavar="REGEX", help="shapes whose name matches; repeatable")
        parser.add_argument("--baselines", default="", metavar="NAMES", help="implementations to measure, separated by commas")
        parser.add_argument("--quick", action="store_true", help="one round of ten, no roofline")
        parser.add_argument("--back-to-back", action="store_true", help="nothing between calls in a graph")
        parser.add_argument("--check", action="store_true", help="check the outputs, time nothing")
        parser.add_argument("--list", action="store_true", help="print the shapes and implementations, measure nothing")
        parser.add_argument("--output", type=Path, metavar="FILE", help="write the report, or the plot, there")
        parser.add_argument(
            "--commit", default="", help="the commit of this code, if the code is a copy whose checkout has another commit"
        )
        beside = Path(self.file).with_suffix(".json")
        parser.add_argument("--plot", type=Path, nargs="?", const=beside, metavar="REPORT", help="plot a report as .svg or .png")
        parser.add_argument("--table", type=Path, nargs="?", const=beside, metavar="REPORT", help="print a report as Markdown")
        parser.add_argument("--readme", action="store_true", help="with --plot: put picture and Markdown into the README, too")
        self.options(parser)
        return parser

    def main(self, words: Sequence[str] | None = None) -> None:
        parser = self.parser()
        given = parser.parse_args(words)
        if given.plot or given.table:
            self.show(given)
            return
        shapes = [shape for shape in self.shapes if not given.only or any(re.search(only, shape.name) for only in given.only)]
        shapes = [shape for shape in shapes if self.chosen(given, shape)]
        everyone = self.implementations(given)
        names = list(filter(None, given.baselines.split(","))) or [each.name for each in everyone if not each.on_demand]
        unknown = {*names} - {each.name for each in everyone}
        if unknown or not shapes:
            parser.error(f"no implementation {', '.join(sorted(unknown))}" if unknown else "no such shape")
        who = [each for each in everyone if each.name in names]
        if given.list:
            print("\n".join([*(shape.name for shape in shapes), *(each.name for each in who)]))
            return
        if not torch.cuda.is_available():
            parser.error("needs an NVIDIA GPU")
        device = torch.device("cuda", torch.cuda.current_device())
        effort = self.effort(given)
        command = sys.argv if words is None else [Path(self.file).name, *words]
        report = self.empty_report(given, effort, command, device)
        print(self.outcome(self.run(shapes, who, device, effort, report, given.output)))

    def effort(self, given: argparse.Namespace) -> Effort:
        rounds, fewest, budget_s = (1, 10, 0.02) if given.quick else (3, 17, 0.03)
        return Effort(0 if given.check else rounds, fewest, budget_s, given.back_to_back)

    def empty_report(self, given: argparse.Namespace, effort: Effort, words: Sequence[str], device: torch.device) -> Report:
        """Returns a report without rows. ``words``: the command line, which begins with the program."""
        method = Method("cold", IN_GRAPH, self.copies, effort.budget_s * effort.rounds, effort.rounds)
        metadata = metadata_of(given, shlex.join([Path(sys.executable).name, *words]), device)
        return Report(metadata, (), None if given.quick or given.check else measure_roofline(device), method)

    def show(self, given: argparse.Namespace) -> None:
        """Plots a report, or prints it as Markdown."""
        if given.table:
            print(self.figure.table(json.loads(given.table.read_text())))
            return
        report, picture = json.loads(given.plot.read_text()), given.output or Path(self.file).with_suffix(".svg")
        self.figure.draw(report, picture)
        if given.readme:
            self.figure.write(report, picture)
