"""The measuring method, for any operator on one GPU: CUDA graphs and alternating rounds, collected in a report.

A time is the median of 51 or more measurements: one call in a CUDA graph of several, which rotate over copies of the inputs, more
than caches hold. The rounds of all implementations alternate. In the graph a small PyTorch kernel follows each call. Without it,
implementations that use PDL would overlap with a preceding call of their own, which does not happen in a model. That kernel's time,
measured at each shape in a graph of such kernels alone (``between_us``), is subtracted from all times there. With
``--back-to-back`` there is no such kernel, as in most published figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tokenspeed_kernel.workbench.benchmark import (
    Launch,
    Metadata,
    Method,
    Report,
    Row,
    Timing,
    collect_metadata,
    failure_of,
    measure_roofline,
)
from tokenspeed_kernel.workbench.benchmark.machine import GpuState, Monitor
from tokenspeed_kernel.workbench.benchmark.metadata import package_version
from tokenspeed_kernel.workbench.benchmark.timing import host_time, sample, sample_graph
from tokenspeed_kernel_base.cases import Cost

Call = Callable[[], Any]

# Bytes that are touched between two calls on the same inputs; the device caches 50 MB.
TOUCHED = 224 << 20
# The launch of a graph, about ten microseconds, is part of the measurement. A graph therefore has as many calls as take GRAPH_US at
# a rate that no kernel reaches, but at most IN_GRAPH: then the launch costs less than a tenth of a microsecond a call.
GRAPH_US, IN_GRAPH = 2000.0, 128
_LAUNCHES = 20
_LONG_US = 1000.0
# Number of kernels in the graph that measures the kernel between calls, which makes the graph's launch negligible.
_BETWEEN = 256
_BETWEEN_IS = "a small kernel stands after each call, so that calls do not overlap; its own time (between_us) is subtracted"
_BACK_TO_BACK_IS = "nothing stands between calls: those that launch with programmatic dependence begin while the one before ends"


class Shape(Protocol):
    """One call of an operator. Its name is unique; its group is where it belongs in tables and plots."""

    @property
    def name(self) -> str: ...
    @property
    def group(self) -> str: ...
    @property
    def operator(self) -> str: ...


@dataclass(frozen=True)
class Implementation:
    """An implementation that is measured: this package's or a baseline.

    Attributes:
        name: in tables.
        setup: does the work that an engine does once, and returns the call to time; its arguments depend on the benchmark.
        package: the distribution whose version is reported.
        ours: whether it is this project's, not a baseline.
        portable: whether it is this project's portable kernel, for comparison; long calls are measured only a few times.
    """

    name: str
    setup: Callable[..., Any]
    package: str
    ours: bool = False
    portable: bool = False

    @property
    def version(self) -> str:
        return package_version(self.package) if self.package else ""


@dataclass(frozen=True)
class Limits:
    """The largest allowed errors: of all rows together, and of the worst row."""

    error: float
    row_error: float


@dataclass(frozen=True)
class Effort:
    """How long to measure: rounds (0: only check outputs), minimum graphs in each, and seconds of each."""

    rounds: int
    fewest: int
    budget_s: float
    back_to_back: bool = False


class Between:
    """The kernel after each call in a graph: an ordinary one, on 32 values of its own.

    Attributes:
        us: its microseconds, with the gap between kernels; None if there is none.
    """

    def __init__(self, device: torch.device, samples: int, back_to_back: bool = False) -> None:
        self.us: float | None = None
        if back_to_back:
            return
        self._launch = functools.partial(torch.zeros(32, device=device).add_, 1.0)
        self.us = self._time(device, samples)

    def _time(self, device: torch.device, samples: int) -> float:
        return statistics.median(sample_graph([self._launch] * _BETWEEN, device, budget_s=0.0, fewest=samples, most=samples))

    def after(self, call: Call) -> Call:
        """The call, followed by this kernel."""
        if self.us is None:
            return call

        def both() -> None:
            call()
            self._launch()

        return both


@dataclass
class Measurement:
    """An implementation at a shape, while it is being measured."""

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
        """Runs one of its steps, if none has failed so far."""
        if self.status == "measured":
            failure = failure_of(step)
            self.status, self.reason = failure or (self.status, self.reason)

    def check(self, make: Callable[[], Call], errors_of: Callable[[Any], tuple[float, float]], limits: Limits) -> None:
        """Compares a call's result with the reference: its error, and the worst row's. Over several checks the largest are kept."""
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

    def time(
        self,
        make: Callable[[], list[Call]],
        in_graph: int,
        device: torch.device,
        between: Between,
        monitor: Monitor | None,
        effort: Effort,
    ) -> None:
        """One round, of graphs of ``in_graph`` calls. The monitor samples the device meanwhile."""
        fewest, budget_s = effort.fewest, effort.budget_s
        if not self.rounds:
            self.calls = make()
            self.alone_us = statistics.median(sample(self.calls, device, budget_s=0.0, fewest=3, most=3))
            # More than a few long graphs would only occupy the device: the host enqueues each at once.
            self.host_us = host_time(self.calls[0], device, _LAUNCHES if self.alone_us < _LONG_US else 3)
        if self.implementation.portable and self.alone_us > _LONG_US:
            if self.rounds:
                return
            fewest, budget_s = max(1, fewest // 4), 0.0
        several = [between.after(self.calls[index % len(self.calls)]) for index in range(in_graph)]
        options: dict[str, Any] = {"budget_s": budget_s, "fewest": fewest, "most": 4 * fewest}
        if monitor is not None:
            options["meanwhile"] = lambda: self.states.extend(filter(None, [monitor()]))
        expected_us = statistics.median(self.rounds[0]) if self.rounds else self.alone_us
        times = sample_graph(several, device, expected_us=expected_us, **options)
        self.between_us = between.us
        self.rounds.append([time_us - (between.us or 0.0) for time_us in times])

    def row(self, cost: Cost) -> dict[str, Any]:
        """A `Row` of the core's reports, with additional values.

        ``first_ms`` is the time of the first call, which may have compiled a kernel or loaded it from a cache.
        """
        known = Row(
            self.implementation.name, self.shape.operator, self.shape.name, self.status, self.reason,
            solution=self.implementation.name, version=self.implementation.version,
        )  # fmt: skip
        if self.rounds and self.status == "measured":
            timing = Timing.of(self.rounds)
            known = dataclasses.replace(
                known,
                timing=timing,
                tflops=cost.flops / timing.median_us / 1e6,
                gb_per_s=cost.bytes / timing.median_us / 1e3,
                launch=Launch(self.host_us, self.alone_us, timing.median_us),
                state=min(self.states, key=lambda state: state.sm_clock_mhz, default=None),
            )
        errors = {"relative_error": self.error, "worst_row_error": self.row_error}
        extra = {"group": self.shape.group, **errors, "first_ms": self.first_ms, "between_us": self.between_us}
        return {**dataclasses.asdict(known), **extra}


def relative_error(got: Tensor, expected: Tensor) -> float:
    """The norm of the difference over the norm of the expected values; infinite if there is a NaN."""
    error = float((got.float() - expected).norm() / expected.norm())
    return error if math.isfinite(error) else math.inf


def worst_row_error(got: Tensor, expected: Tensor) -> float:
    """The largest `relative_error` of any row, along the last axis: one wrong row is invisible among many right ones."""
    errors = (got.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    return float(errors.max()) if bool(errors.isfinite().all()) else math.inf


# -- reports -----------------------------------------------------------------------------------------------------------------------


def times_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Microseconds by shape and implementation."""
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["timing"] is not None:
            times.setdefault(row["case"], {})[row["kernel"]] = row["timing"]["median_us"]
    return times


def errors_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Relative errors by shape and implementation."""
    errors: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["relative_error"] is not None:
            errors.setdefault(row["case"], {})[row["kernel"]] = row["relative_error"]
    return errors


def absent_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Implementations that are not installed, and the reason."""
    return {row["kernel"]: row["reason"] for row in rows if row["status"] == "absent"}


def document(
    rows: Sequence[dict[str, Any]],
    who: Iterable[Implementation],
    report: Report,
    shapes: Iterable[Shape],
    judged: Sequence[Mapping[str, Any]],
    *,
    back_to_back: bool = False,
    between: str = "",
) -> dict[str, Any]:
    """The document that is written: a core report with additional values, which ``load_report`` reads. Rows are in the shapes'
    order.

    Args:
        between: a description of the kernel between calls, if it is not the small one.
    """
    places = {shape.name: place for place, shape in enumerate(shapes)}
    absent = absent_of(rows)
    made = report.to_dict()
    more = {
        "method": {**made["method"], "between": between or (_BACK_TO_BACK_IS if back_to_back else _BETWEEN_IS)},
        "rows": sorted(rows, key=lambda row: places.get(row["case"], len(places))),
        "versions": {each.name: each.version for each in who if each.name not in absent},
        "absent": absent,
        "bars": judged,
    }
    return {**made, **more}


def write(file: Path, made: Mapping[str, Any]) -> None:
    """Writes atomically, so that readers find the whole file. One line a row."""
    rows = ",\n".join(f"    {json.dumps(row, allow_nan=False)}" for row in made["rows"])
    text = json.dumps({**made, "rows": []}, indent=2, allow_nan=False).replace('"rows": []', f'"rows": [\n{rows}\n  ]')
    beside = file.with_name(f".{file.name}.new")
    beside.write_text(text + "\n")
    beside.replace(file)


def collect(
    measured: Iterable[tuple[Any, list[dict[str, Any]]]],
    line_of: Callable[[Any, list[dict[str, Any]]], str],
    document_of: Callable[[list[dict[str, Any]]], dict[str, Any]],
    output: Path | None,
    device: torch.device,
) -> dict[str, Any]:
    """Iterates over shapes and their rows, which are measured meanwhile, and prints a line for each. Returns the document.

    The document is written after each shape, so that an interrupted run keeps its results. Measuring stops once a kernel has broken
    the process.
    """
    rows: list[dict[str, Any]] = []
    made: dict[str, Any] = {}
    for shape, of_shape in measured:
        rows += of_shape
        print(line_of(shape, of_shape), flush=True)
        made = document_of(rows)
        if output is not None:
            write(output, made)
        broken = lost(device)
        if broken:
            print(f"stopped: {broken}")
            break
    return made


def cells(rows: Iterable[Mapping[str, Any]], rate_of: Callable[[Mapping[str, Any]], str]) -> list[str]:
    """For each implementation at a shape, for one line: microseconds, rate and error, or the failure."""
    said = []
    for row in rows:
        error = row["relative_error"]
        if row["timing"] is None:
            if row["status"] == "measured":
                said.append(f"{row['kernel']} err {error:.1e}")
            elif row["status"] not in ("skipped", "absent"):
                said.append(f"{row['kernel']} {row['status']}: {row['reason'][:200]}")
            continue
        us = row["timing"]["median_us"]
        said.append(f"{row['kernel']} {us:.2f} us {rate_of(row)} err {error:.1e} host {row['launch']['host_us']:.1f}")
    return said


def print_outcome(made: Mapping[str, Any]) -> None:
    """Prints which implementations were absent, and which bars hold."""
    for name, reason in made["absent"].items():
        print(f"absent: {name}: {reason}")
    for bar in made["bars"]:
        if bar["value"] is not None:
            bound = f"{'<=' if bar['most'] else '>='} {bar['bound']:g}"
            print(f"{'holds ' if bar['holds'] else 'MISSED'} {bar['name']}: {bar['value']:.4g} ({bound})")


# -- the command line --------------------------------------------------------------------------------------------------------------


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """The options that all benchmarks of this folder have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="REGEX", help="shapes whose name matches; repeatable")
    parser.add_argument("--contestants", default="", metavar="NAMES", help="separated by commas; all if not given")
    parser.add_argument("--quick", action="store_true", help="one round of ten, no roofline")
    parser.add_argument("--back-to-back", action="store_true", help="nothing between calls in a graph")
    parser.add_argument("--check", action="store_true", help="check the outputs, time nothing")
    parser.add_argument("--list", action="store_true", help="print the shapes, measure nothing")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report there")
    parser.add_argument("--commit", default="", help="of this code, where it is a copy whose checkout says another")
    return parser


def named(shapes: Iterable[Any], patterns: Sequence[str]) -> list[Any]:
    """The shapes whose name matches one of the patterns; all if there are none."""
    return [shape for shape in shapes if not patterns or any(re.search(pattern, shape.name) for pattern in patterns)]


def effort_of(given: argparse.Namespace) -> Effort:
    rounds, fewest, budget_s = (1, 10, 0.02) if given.quick else (3, 17, 0.03)
    return Effort(0 if given.check else rounds, fewest, budget_s, given.back_to_back)


def empty_report(given: argparse.Namespace, effort: Effort, words: Sequence[str], copies: int, device: torch.device) -> Report:
    """A report without rows: device, versions and settings.

    Args:
        words: the command line, the program first.
        copies: copies of the inputs that calls rotate over.
    """
    metadata: Metadata = collect_metadata(shlex.join([Path(sys.executable).name, *words]), device)
    if given.commit:
        metadata = dataclasses.replace(metadata, git_commit=given.commit)
    method = Method("cold", IN_GRAPH, copies, effort.budget_s * effort.rounds, effort.rounds)
    return Report(metadata, (), None if given.quick or given.check else measure_roofline(device), method)


def lost(device: torch.device) -> str:
    """Why the process cannot measure any more, if a kernel has broken it; else empty. Frees memory."""
    if device.type != "cuda":
        return ""
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""
