"""Attention in the sizes of GPT-OSS, ours beside the best there is, on one H200.

python packages/tokenspeed-kernel-nvidia/benchmarks/h200.py --output packages/tokenspeed-kernel-nvidia/benchmarks/h200.json
python packages/tokenspeed-kernel-nvidia/benchmarks/h200.py --only "decode 8K" --contestants ours,fa3 --quick
python packages/tokenspeed-kernel-nvidia/benchmarks/h200.py --only "window prefill" \\
    --our-modules mha_prefill=tokenspeed_kernel_nvidia.sm90.attention.window:mha_prefill

All contestants run in one process on the same random inputs. Each output is checked first, on a sample of rows, against a float32
reference: all rows together, and the worst. A time is the median of 51 or more: one call in a CUDA graph of several, which take
turns on copies of the inputs, more than caches hold; the rounds of all contestants alternate. Peers that are not installed are
reported as absent.

In the graph a small kernel of PyTorch's stands after each call. Some contestants launch with programmatic dependence, and so would
begin while the one before still ends if it were a call of their own, as it never is in a model. What that kernel takes, in a graph
of such kernels alone, is measured at each shape (``between_us``) and subtracted from all times there. With ``--back-to-back``
nothing stands there, as in most published figures.
"""

from __future__ import annotations

import argparse
import copy
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
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from bars import LARGEST_ERROR, LARGEST_ROW_ERROR, judge
from contestants import Call, Contestant, contestants, output_of
from shapes import SHAPES, Shape, reference_rows, relative_error, sampled_rows, worst_row_error

from tokenspeed_kernel.workbench.benchmark import (
    Launch,
    Method,
    Report,
    Row,
    Timing,
    Unsupported,
    collect_metadata,
    measure_roofline,
)
from tokenspeed_kernel.workbench.benchmark.machine import GpuState, Monitor, gpu_monitor
from tokenspeed_kernel.workbench.benchmark.timing import host_time, sample, sample_graph
from tokenspeed_kernel_base.cases import Cost
from tokenspeed_kernel_base.operator import get_operator

# So much memory is touched between two calls on the same; the device caches 50 MB.
_TOUCHED = 224 << 20
# Inputs are copied so many times at most: what prefill does on warm inputs is the same.
_COPIES, _PREFILL_COPIES = 128, 8
# A graph's start, of about ten microseconds, is part of what is measured. So there are as many calls in it, of all contestants, as
# take this long at the rates below, which no kernel reaches; or a number that makes it less than a tenth of a microsecond a call.
_GRAPH_US, _IN_GRAPH = 2000.0, 128
_BYTES_PER_US, _FLOPS_PER_US = 4.8e6, 1e9
_LAUNCHES = 20
_LONG_US = 1000.0
# A peer that is further away computes something else; so does one with such a row.
_PEER_ERROR, _PEER_ROW_ERROR = 2e-2, 8e-2
# So many of the kernels between calls stand in the graph that measures them: what starting it takes is nothing among them.
_BETWEEN = 256
_BETWEEN_IS = "a small kernel stands after each call, so that calls do not overlap; its own time (between_us) is subtracted"
_BACK_TO_BACK_IS = "nothing stands between calls: those that launch with programmatic dependence begin while the one before ends"


class Between:
    """The kernel that stands after each call in a graph: an ordinary one, on 32 numbers of its own.

    Attributes:
        us: microseconds that it takes, with what the device needs from one kernel to the next; None if there is none.
    """

    def __init__(self, device: torch.device, samples: int, back_to_back: bool = False) -> None:
        self.us: float | None = None
        if back_to_back:
            return
        self._launch = functools.partial(torch.zeros(32, device=device).add_, 1.0)
        self.us = statistics.median(sample_graph([self._launch] * _BETWEEN, device, budget_s=0.0, fewest=samples, most=samples))

    def after(self, call: Call) -> Call:
        """The call, and then this."""
        if self.us is None:
            return call

        def both() -> None:
            call()
            self._launch()

        return both


@dataclass
class Measurement:
    """A contestant at a shape, while it is being measured."""

    contestant: Contestant
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
        """Runs a step of it. Whatever a peer does, the others must not be lost with it."""
        if self.status != "measured":
            return
        try:
            with torch.no_grad():
                step()
        except Unsupported as error:
            self.status, self.reason = "skipped", str(error)
        except ImportError as error:
            self.status, self.reason = "absent", str(error)
        except Exception as error:
            self.status, self.reason = "error", f"{type(error).__name__}: {str(error)[:500]}"

    def check(self, arguments: Mapping[str, Any], rows: list[int], expected: Mapping[bool, torch.Tensor]) -> None:
        """Holds the output against the reference."""
        start = time.perf_counter()
        out = output_of(self.contestant.setup(self.shape, arguments)())
        if out.is_cuda:
            torch.cuda.synchronize(out.device)
        self.first_ms = (time.perf_counter() - start) * 1e3
        sampled, wanted = out[rows], expected[self.contestant.sinks]
        self.error, self.row_error = relative_error(sampled, wanted), worst_row_error(sampled, wanted)
        limit, row_limit = (LARGEST_ERROR, LARGEST_ROW_ERROR) if self.contestant.ours else (_PEER_ERROR, _PEER_ROW_ERROR)
        if self.error > limit:
            self.status, self.reason = "failed", f"relative error {self.error:.2g} is above {limit}"
        elif self.row_error > row_limit:
            self.status, self.reason = "failed", f"relative error {self.row_error:.2g} of the worst row is above {row_limit}"

    def time(
        self,
        copies: Sequence[Mapping[str, Any]],
        in_graph: int,
        device: torch.device,
        between: Between,
        monitor: Monitor | None,
        fewest: int,
        budget_s: float,
    ) -> None:
        """One round, of graphs of ``in_graph`` calls. The monitor looks at the device while it works."""
        if not self.rounds:
            self.calls = [self.contestant.setup(self.shape, arguments) for arguments in copies]
            self.alone_us = statistics.median(sample(self.calls, device, budget_s=0.0, fewest=3, most=3))
            # More than a few long ones would keep the device busy for nothing: the host is done with each at once.
            self.host_us = host_time(self.calls[0], device, _LAUNCHES if self.alone_us < _LONG_US else 3)
        if self.contestant.portable and self.alone_us > _LONG_US:
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
        """A `Row` of the core's reports, and what else is known.

        ``first_ms`` is what the first call took, which may have compiled a kernel or read it from a cache.
        """
        known = Row(
            self.contestant.name, f"attention.{self.shape.mode}", self.shape.name, self.status, self.reason,
            solution=self.contestant.name, version=self.contestant.version,
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


def measure_shape(
    shape: Shape,
    wanted: Iterable[Contestant],
    device: torch.device,
    *,
    rounds: int,
    fewest: int,
    budget_s: float,
    back_to_back: bool = False,
) -> list[dict[str, Any]]:
    """Measures contestants at one shape, in rounds: each once, then each again. Returns their rows."""
    op = get_operator(f"attention.{shape.mode}")
    arguments = op.complete(shape.case().build(device))
    cost = op.cost_of(arguments)
    rows = sampled_rows(shape)
    expected = {sinks: reference_rows(shape, arguments, rows, sinks=sinks) for sinks in (True, False)}
    measurements = [Measurement(contestant, shape) for contestant in wanted]
    for each in measurements:
        each.guarded(functools.partial(each.check, arguments, rows, expected))
    most = _COPIES if shape.paged else _PREFILL_COPIES
    count = max(1, min(most, math.ceil(_TOUCHED / cost.bytes)))
    copies = [arguments, *(copy.deepcopy(arguments) for _ in range(count - 1 if rounds else 0))]
    if rounds:
        monitor, between = gpu_monitor(device), Between(device, fewest, back_to_back)
        least_us = max(cost.bytes / _BYTES_PER_US, cost.flops / _FLOPS_PER_US)
        in_graph = max(count, min(_IN_GRAPH, math.ceil(_GRAPH_US / least_us)))
        for _ in range(rounds):
            for each in measurements:
                each.guarded(functools.partial(each.time, copies, in_graph, device, between, monitor, fewest, budget_s))
    return [each.row(cost) for each in measurements]


def times_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Microseconds by shape and contestant."""
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["timing"] is not None:
            times.setdefault(row["case"], {})[row["kernel"]] = row["timing"]["median_us"]
    return times


def document(
    rows: Sequence[dict[str, Any]], who: Iterable[Contestant], report: Report, *, back_to_back: bool = False
) -> dict[str, Any]:
    """What is written: a report of the core's with more in it, ``load_report`` reads it. Rows are in the shapes' order."""
    places = {shape.name: place for place, shape in enumerate(SHAPES)}
    errors = {row["case"]: row["relative_error"] for row in rows if row["kernel"] == "ours" and row["relative_error"] is not None}
    absent = {row["kernel"]: row["reason"] for row in rows if row["status"] == "absent"}
    versions = {each.name: each.version for each in who if each.name not in absent}
    ordered = sorted(rows, key=lambda row: places.get(row["case"], len(places)))
    made = report.to_dict()
    more = {
        "method": {**made["method"], "between": _BACK_TO_BACK_IS if back_to_back else _BETWEEN_IS},
        "rows": ordered,
        "versions": versions,
        "absent": absent,
    }
    return {**made, **more, "bars": judge(times_of(rows), errors, absent)}


def line_of(shape: Shape, rows: Iterable[Mapping[str, Any]]) -> str:
    """One line for a shape: microseconds and rate of each contestant."""
    cells = []
    for row in rows:
        error = row["relative_error"]
        if row["timing"] is None:
            if row["status"] == "measured":
                cells.append(f"{row['kernel']} err {error:.1e}")
            elif row["status"] not in ("skipped", "absent"):
                cells.append(f"{row['kernel']} {row['status']}: {row['reason'][:200]}")
            continue
        us = row["timing"]["median_us"]
        computes = shape.window_left < 0 and "decode" not in shape.mode
        rate = f"{row['tflops']:.0f} TF" if computes else f"{row['gb_per_s'] / 1e3:.2f} TB"
        cells.append(f"{row['kernel']} {us:.2f} us {rate} err {error:.1e} host {row['launch']['host_us']:.1f}")
    return f"{shape.name}: " + " | ".join(cells)


def write(file: Path, made: Mapping[str, Any]) -> None:
    """Such that whoever reads the file finds it whole. A row a line."""
    rows = ",\n".join(f"    {json.dumps(row, allow_nan=False)}" for row in made["rows"])
    text = json.dumps({**made, "rows": []}, indent=2, allow_nan=False).replace('"rows": []', f'"rows": [\n{rows}\n  ]')
    beside = file.with_name(f".{file.name}.new")
    beside.write_text(text + "\n")
    beside.replace(file)


def _work(shape: Shape) -> float:
    """Orders shapes by how long they take; those with a cache are all short."""
    seen = shape.window_left + 1 if shape.window_left >= 0 else shape.length
    return 0.0 if shape.paged else float(shape.batch * shape.length * seen)


def _lost(device: torch.device) -> str:
    """Why nothing more can be measured in this process, if a kernel has broken it; else empty. Frees memory."""
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="REGEX", help="shapes whose name matches; repeatable")
    parser.add_argument("--contestants", default="", metavar="NAMES", help="separated by commas; all if not given")
    parser.add_argument("--our-modules", action="append", default=[], metavar="OPERATOR=MODULE:FUNCTION", help="see above")
    parser.add_argument("--quick", action="store_true", help="one round of ten, no roofline")
    parser.add_argument("--back-to-back", action="store_true", help="nothing between calls in a graph")
    parser.add_argument("--check", action="store_true", help="check the outputs, time nothing")
    parser.add_argument("--list", action="store_true", help="print the shapes, measure nothing")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report there")
    given = parser.parse_args(words)
    shapes = [shape for shape in SHAPES if not given.only or any(re.search(pattern, shape.name) for pattern in given.only)]
    functions = dict(entry.split("=", 1) for entry in given.our_modules)
    everyone = contestants(functions)
    names = [name for name in given.contestants.split(",") if name] or [each.name for each in everyone]
    unknown = {*names} - {each.name for each in everyone}
    if unknown or not shapes:
        parser.error(f"no contestant {', '.join(sorted(unknown))}" if unknown else "no shape has such a name")
    if given.list:
        print("\n".join(shape.name for shape in shapes))
        return
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    who = [each for each in everyone if each.name in names]
    rounds, fewest, budget_s = (1, 10, 0.02) if given.quick else (3, 17, 0.03)
    if given.check:
        rounds = 0
    command = shlex.join([Path(sys.executable).name, *(sys.argv if words is None else ["h200.py", *words])])
    metadata = collect_metadata(command, device)
    method = Method("cold", _COPIES, _COPIES, budget_s * rounds, rounds)
    report = Report(metadata, (), None if given.quick or given.check else measure_roofline(device), method)
    rows: list[dict[str, Any]] = []
    made: dict[str, Any] = {}
    # What takes long comes last, and the file is written after each: whoever stops the program keeps what there is.
    for shape in sorted(shapes, key=_work):
        found = measure_shape(shape, who, device, rounds=rounds, fewest=fewest, budget_s=budget_s, back_to_back=given.back_to_back)
        rows += found
        print(line_of(shape, found), flush=True)
        made = document(rows, who, report, back_to_back=given.back_to_back)
        if given.output is not None:
            write(given.output, made)
        lost = _lost(device)
        if lost:
            print(f"stopped: {lost}")
            break
    for name, reason in made["absent"].items():
        print(f"absent: {name}: {reason}")
    for bar in made["bars"]:
        if bar["value"] is not None:
            bound = f"{'<=' if bar['most'] else '>='} {bar['bound']:g}"
            print(f"{'holds ' if bar['holds'] else 'MISSED'} {bar['name']}: {bar['value']:.4g} ({bound})")


if __name__ == "__main__":
    main()
