"""Attention in the sizes of GPT-OSS, this package against the best baselines, on one H200.

python packages/tokenspeed-kernel-nvidia/benchmarks/h200.py --output packages/tokenspeed-kernel-nvidia/benchmarks/h200.json
python packages/tokenspeed-kernel-nvidia/benchmarks/h200.py --only "decode 8K" --contestants ours,fa3 --quick
python packages/tokenspeed-kernel-nvidia/benchmarks/h200.py --only "window prefill" \\
    --our-modules mha_prefill=tokenspeed_kernel_nvidia.sm90.attention.window.launch:mha_prefill

All implementations run in one process on the same random inputs. Each output is checked first, on a sample of rows, against a
float32 reference: all rows together, and the worst row. Baselines that are not installed are reported as absent. ``measuring.py``
describes how times are taken.
"""

from __future__ import annotations

import copy
import functools
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

import measuring
from bars import LARGEST_ERROR, LARGEST_ROW_ERROR, judge
from baselines import Implementation, implementations, output_of
from measuring import Between, Effort, Limits, Measurement, errors_of, relative_error, times_of, worst_row_error
from shapes import SHAPES, Shape, reference_rows, sampled_rows

from tokenspeed_kernel.workbench.benchmark import Report
from tokenspeed_kernel.workbench.benchmark.machine import gpu_monitor
from tokenspeed_kernel_base.operator import get_operator

# Largest number of copies of the inputs: prefill takes the same time on warm inputs.
_COPIES, _PREFILL_COPIES = 128, 8
# A rate that no kernel reaches.
_BYTES_PER_US, _FLOPS_PER_US = 4.8e6, 1e9
_LIMITS = Limits(LARGEST_ERROR, LARGEST_ROW_ERROR)
# A baseline with a larger error, in all or in its worst row, computes something else.
_BASELINE_LIMITS = Limits(2e-2, 8e-2)


def measure_shape(shape: Shape, wanted: Iterable[Implementation], device: torch.device, effort: Effort) -> list[dict[str, Any]]:
    """Measures implementations at one shape, in alternating rounds. Returns their rows."""
    op = get_operator(shape.operator)
    arguments = op.complete(shape.case().build(device))
    cost = op.cost_of(arguments)
    rows = sampled_rows(shape)
    expected = {sinks: reference_rows(shape, arguments, rows, sinks=sinks) for sinks in (True, False)}

    def errors(result: Any, sinks: bool) -> tuple[float, float]:
        sampled = output_of(result)[rows]
        return relative_error(sampled, expected[sinks]), worst_row_error(sampled, expected[sinks])

    measurements = [(each, Measurement(each, shape)) for each in wanted]
    for each, measurement in measurements:
        make, errors_here = functools.partial(each.setup, shape, arguments), functools.partial(errors, sinks=each.sinks)
        measurement.guarded(functools.partial(measurement.check, make, errors_here, _LIMITS if each.ours else _BASELINE_LIMITS))
    most = _COPIES if shape.paged else _PREFILL_COPIES
    count = max(1, min(most, math.ceil(measuring.TOUCHED / cost.bytes)))
    copies = [arguments, *(copy.deepcopy(arguments) for _ in range(count - 1 if effort.rounds else 0))]
    if effort.rounds:
        monitor, between = gpu_monitor(device), Between(device, effort.fewest, effort.back_to_back)
        least_us = max(cost.bytes / _BYTES_PER_US, cost.flops / _FLOPS_PER_US)
        in_graph = max(count, min(measuring.IN_GRAPH, math.ceil(measuring.GRAPH_US / least_us)))
        for _ in range(effort.rounds):
            for each, measurement in measurements:
                calls = functools.partial(_calls, each, shape, copies)
                measurement.guarded(functools.partial(measurement.time, calls, in_graph, device, between, monitor, effort))
    return [measurement.row(cost) for _, measurement in measurements]


def _calls(implementation: Implementation, shape: Shape, copies: Sequence[Mapping[str, Any]]) -> list[measuring.Call]:
    return [implementation.setup(shape, arguments) for arguments in copies]


def document(
    rows: Sequence[dict[str, Any]], who: Iterable[Implementation], report: Report, *, back_to_back: bool = False
) -> dict[str, Any]:
    """The document that is written; see `measuring.document`."""
    errors = {shape: of_one["ours"] for shape, of_one in errors_of(rows).items() if "ours" in of_one}
    judged = judge(times_of(rows), errors, measuring.absent_of(rows))
    return measuring.document(rows, who, report, SHAPES, judged, back_to_back=back_to_back)


def line_of(shape: Shape, rows: Iterable[Mapping[str, Any]]) -> str:
    """One line for a shape: microseconds and rate of each implementation."""
    computes = shape.window_left < 0 and "decode" not in shape.mode

    def rate(row: Mapping[str, Any]) -> str:
        return f"{row['tflops']:.0f} TF" if computes else f"{row['gb_per_s'] / 1e3:.2f} TB"

    return f"{shape.name}: " + " | ".join(measuring.cells(rows, rate))


def _work(shape: Shape) -> float:
    """Sort key of shapes: by duration; those with a cache are all short."""
    seen = shape.window_left + 1 if shape.window_left >= 0 else shape.length
    return 0.0 if shape.paged else float(shape.batch * shape.length * seen)


def main(words: Sequence[str] | None = None) -> None:
    parser = measuring.parser_of(__doc__)
    parser.add_argument("--our-modules", action="append", default=[], metavar="OPERATOR=MODULE:FUNCTION", help="see above")
    given = parser.parse_args(words)
    shapes = measuring.named(SHAPES, given.only)
    functions = dict(entry.split("=", 1) for entry in given.our_modules)
    everyone = implementations(functions)
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
    effort = measuring.effort_of(given)
    command = sys.argv if words is None else ["h200.py", *words]
    report = measuring.empty_report(given, effort, command, _COPIES, device)
    # Long shapes come last.
    measured = ((shape, measure_shape(shape, who, device, effort)) for shape in sorted(shapes, key=_work))
    document_of = functools.partial(document, who=who, report=report, back_to_back=given.back_to_back)
    measuring.print_outcome(measuring.collect(measured, line_of, document_of, given.output, device))


if __name__ == "__main__":
    main()
