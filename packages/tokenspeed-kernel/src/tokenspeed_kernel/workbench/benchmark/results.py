"""What a benchmark found, and the JSON file that keeps it.

Format 2. Files of format 1, which carry no number, have neither rounds nor what came with them; they are read all the same.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenspeed_kernel.workbench.benchmark.machine import GpuState
from tokenspeed_kernel.workbench.benchmark.roofline import Roofline, Share
from tokenspeed_kernel.workbench.benchmark.timing import Cache, Timing
from tokenspeed_kernel.workbench.plain import from_plain
from tokenspeed_kernel_base.storage import replace_file

FORMAT = 2
# What became of a row that was not timed because something is wrong with it.
WRONG = ("failed", "error")


@dataclass(frozen=True)
class Method:
    """How calls are timed.

    Attributes:
        cache: see `measure`.
        graph_calls: calls in one CUDA graph, fewer where they take milliseconds; 0 for no graph.
        copies: how many copies of the arguments are called in turn, as far as they fit in a few GB.
        budget_s: seconds of timing a row, all rounds together.
        rounds: stretches of time over which this is spread; between two of a row the others are measured. Each builds the
            arguments anew. Seven is the least number at which `compare` still decides if one round is spoilt.
    """

    cache: Cache = "cold"
    graph_calls: int = 0
    copies: int = 1
    budget_s: float = 0.5
    rounds: int = 7


@dataclass(frozen=True)
class Launch:
    """What a call costs besides its kernels' work, in microseconds.

    Attributes:
        host_us: until the call returned to its caller.
        event_us: its time by events, launched alone.
        graph_us: its time in a CUDA graph; None if it was not measured. What ``event_us`` is beyond this, launching takes.
    """

    host_us: float
    event_us: float
    graph_us: float | None = None


@dataclass(frozen=True)
class Row:
    """One kernel on one case.

    Attributes:
        kernel, operator, case: names.
        status: ``"measured"``, or what verifying it said of a case that was not timed.
        reason: why it was not timed.
        timing: None if it was not timed.
        tflops, gb_per_s: from the operator's cost; None without one.
        solution: what it is made with.
        share: of what the device can do; None without a cost or a roofline.
        launch: None on a CPU.
        warnings: why the measurement may not be trusted.
        reference_us: what the reference workload took before each round; if that changed, the machine did.
        state: of the GPU, in the round in which its clock was slowest; None if it cannot be known.
        version: of the package that a peer is from; empty for kernels of ours, of which the metadata tell.
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
        """By which rows of two reports are paired."""
        return (self.operator, self.case, self.kernel)


@dataclass(frozen=True)
class Metadata:
    """What a measurement was made on and with. Empty where it cannot be known."""

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
    """Rows, what they were measured on and with, what the device can do at most (None: not measured), and how they were timed
    (None: an old file, which does not say)."""

    metadata: Metadata
    rows: tuple[Row, ...]
    roofline: Roofline | None = None
    method: Method | None = None

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **dataclasses.asdict(self)}

    def to_json(self) -> str:
        """Indented, but for lists of numbers: there may be many."""
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False)
        return _NUMBERS.sub(lambda found: f"[{' '.join(found[0][1:-1].split())}]", text)

    def write(self, file: Path) -> None:
        """Writes a file, which is whole at any moment."""
        replace_file(file, self.to_json() + "\n")


def appended(before: Report, now: Report) -> Report:
    """One report of two runs of the same thing: the rows of both, with the rounds of both.

    Where a row went wrong in one of them, it went wrong. What was measured on, and when, is said as of ``now``.

    Raises:
        ValueError: the two were not made on and with the same, in the same way.
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


# A line break follows the bracket in no string: there it is written \n.
_NUMBERS = re.compile(r"\[\n[\s\d.,eE+-]*\]")


class ReportError(ValueError):
    """A file is no report of a benchmark, or of a format that is not known; the message names the file and what is wrong."""


def load_report(file: Path | str) -> Report:
    """Reads a report of any format.

    Raises:
        ReportError: see there.
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
