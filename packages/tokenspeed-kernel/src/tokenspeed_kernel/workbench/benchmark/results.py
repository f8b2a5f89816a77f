"""Benchmark reports, and their JSON files.

The current format is 2. Files of format 1, which carry no format number, lack rounds and all later fields. Such reports can still
be read.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenspeed_kernel.workbench.benchmark.machine import GpuState
from tokenspeed_kernel.workbench.benchmark.roofline import Roofline, Share
from tokenspeed_kernel.workbench.benchmark.timing import Cache, Timing
from tokenspeed_kernel.workbench.plain import from_plain
from tokenspeed_kernel_base.storage import replace_file

FORMAT = 2
# The statuses of rows that failed and so were not timed.
WRONG = ("failed", "error")


@dataclass(frozen=True)
class Method:
    """How calls are timed.

    Attributes:
        cache: the caches' state before each call, see `measure`.
        graph_calls: calls per CUDA graph, fewer if calls take milliseconds; 0 for no graph.
        copies: the number of copies of the arguments that the calls cycle through; fewer if these copies exceed 8 GiB.
        budget_s: seconds of timing per row, over all rounds.
        rounds: rounds per row. Between two rounds of one row, all other rows are measured. Each round builds the arguments again.
            `compare` needs at least seven rounds to reach a verdict if other load spoils one of them.
    """

    cache: Cache = "cold"
    graph_calls: int = 0
    copies: int = 1
    budget_s: float = 0.5
    rounds: int = 7


@dataclass(frozen=True)
class Launch:
    """The launch overhead of a call, in microseconds.

    Attributes:
        host_us: the time until the call returns to its caller.
        event_us: the time between events around a single call.
        graph_us: the time of a call within a CUDA graph; None if not measured. ``event_us`` minus ``graph_us`` is launch overhead.
    """

    host_us: float
    event_us: float
    graph_us: float | None = None


@dataclass(frozen=True)
class Row:
    """The result of one kernel on one case of its operator.

    Attributes:
        kernel, operator, case: names of the kernel, the operator and the case.
        status: ``"measured"``, or the status of the verification if the case was not timed.
        reason: why the kernel was not timed.
        timing: None if the kernel was not timed.
        tflops, gb_per_s: rates, computed from the operator's cost; None if the operator declares no cost.
        solution: the kernel's backend.
        share: the fraction of the roofline that the kernel reaches; None without a cost or a roofline.
        launch: launch overhead; None on a CPU.
        warnings: why the measurement may be unreliable.
        reference_us: the time of the reference workload before each round, in microseconds. The workload is fixed, so a change of
            its time is a change of the machine.
        state: the GPU's state at its slowest clock; None if unknown.
        version: the version of a baseline's package. Empty for this project's kernels, because the metadata hold this project's
            version.
    """

    kernel: str
    operator: str
    case: str
    status: str
    reason: str = ""
    timing: Timing | None = None
    tflops: float | None = None
    gb_per_s: float | None = None
    solution: str = ""
    share: Share | None = None
    launch: Launch | None = None
    warnings: tuple[str, ...] = ()
    reference_us: tuple[float, ...] = ()
    state: GpuState | None = None
    version: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """The key by which rows of two reports are paired."""
        return (self.operator, self.case, self.kernel)


@dataclass(frozen=True)
class Metadata:
    """The hardware and software of a measurement. Unknown fields are empty."""

    device: str
    arch: str
    driver: str
    python: str
    torch: str
    triton: str
    tokenspeed_kernel: str
    git_commit: str
    command: str
    date: str


@dataclass(frozen=True)
class Report:
    """A benchmark report.

    Attributes:
        metadata: the hardware and software.
        rows: the results.
        roofline: the device's roofline; None if it was not measured.
        method: how calls were timed; None in a report of format 1.
    """

    metadata: Metadata
    rows: tuple[Row, ...]
    roofline: Roofline | None = None
    method: Method | None = None

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **dataclasses.asdict(self)}

    def write(self, file: Path) -> None:
        """Writes the report to a JSON file, atomically."""
        replace_file(file, as_text(self.to_dict()))


def as_text(report: Any) -> str:
    """Returns JSON text for a file under version control: one line per row, so that a changed row is a changed line. Keys that are
    numbers become strings, as in ``json.dumps``.
    """
    return _lines(report) + "\n"


def _lines(value: Any, indent: str = "\n") -> str:
    if isinstance(value, Mapping) and value:
        members = [f"{indent}  {json.dumps(str(name))}: {_lines(member, indent + '  ')}" for name, member in value.items()]
        return f"{{{','.join(members)}{indent}}}"
    if isinstance(value, list | tuple) and any(isinstance(member, Mapping) for member in value):
        return f"[{','.join(f'{indent}  {json.dumps(member, allow_nan=False)}' for member in value)}{indent}]"
    return json.dumps(value, allow_nan=False)


def appended(before: Report, now: Report) -> Report:
    """Merges two runs of the same measurement into one report with the rows and the rounds of both runs.

    A row that failed in either run is failed. The metadata are those of ``now``.

    Raises:
        ValueError: the runs differ in hardware, software or timing method.
    """
    for name in ("device", "driver", "python", "torch", "triton", "tokenspeed_kernel", "git_commit"):
        old, new = getattr(before.metadata, name), getattr(now.metadata, name)
        if old != new:
            raise ValueError(f"{name} was {old or 'unknown'} and is {new or 'unknown'}")
    if before.method != now.method:
        raise ValueError(f"it was timed otherwise: {before.method}, now {now.method}")
    rows = {row.key: row for row in before.rows}
    for row in now.rows:
        rows[row.key] = _joined(rows[row.key], row) if row.key in rows else row
    return dataclasses.replace(now, rows=tuple(rows.values()))


def _joined(before: Row, now: Row) -> Row:
    if before.timing is None or now.timing is None:
        return before if before.status in WRONG else now
    timing = Timing.joined(before.timing, now.timing)
    change = now.timing.median_us / timing.median_us
    return dataclasses.replace(
        now,
        timing=timing,
        tflops=now.tflops and now.tflops * change,
        gb_per_s=now.gb_per_s and now.gb_per_s * change,
        share=now.share and dataclasses.replace(now.share, part=now.share.part * change),
        warnings=tuple(dict.fromkeys([*before.warnings, *now.warnings])),
        reference_us=(*before.reference_us, *now.reference_us),
    )


class ReportError(ValueError):
    """A file is not a benchmark report, or has an unknown format; the message names the file and the error."""


def load_report(file: Path | str) -> Report:
    """Reads a report of format 1 or 2.

    Raises:
        ReportError: the file is not a benchmark report, or has an unknown format.
        OSError: the file cannot be read.
    """
    try:
        table = json.loads(Path(file).read_text())
        if not isinstance(table, dict) or "rows" not in table or "metadata" not in table:
            raise ValueError("it has no rows and metadata")
        version = table.get("format", 1)
        if version not in (1, FORMAT):
            raise ValueError(f"its format is {version!r}, this release knows 1 and {FORMAT}")
        roofline = table.get("roofline")
        if isinstance(roofline, dict) and "bf16_tflops" in roofline:  # format 1
            table["roofline"] = {**roofline, "tflops": {"bfloat16": roofline["bf16_tflops"]}}
        return from_plain(Report, table)
    except ValueError as error:
        raise ReportError(f"{file} is no benchmark report: {error}") from error
