"""Measures attention in the sizes of GPT-OSS: this package against the best baselines, on one H200.

python packages/tokenspeed-kernel-nvidia/benchmarks/h200.py --output packages/tokenspeed-kernel-nvidia/benchmarks/h200.json
python packages/tokenspeed-kernel-nvidia/benchmarks/h200.py --only "decode 8K" --baselines ours,fa3 --quick
python packages/tokenspeed-kernel-nvidia/benchmarks/h200.py --only "window prefill" \\
    --our-modules mha_prefill=tokenspeed_kernel_nvidia.sm90.attention.window.launch:mha_prefill
python packages/tokenspeed-kernel-nvidia/benchmarks/h200.py --plot --readme  # plots h200.json

All implementations run in one process on the same random inputs. Before timing, a sample of each output's rows is compared with a
float32 reference. The error of all these rows together and the error of the worst row are limited. Baselines that are not installed
are reported as absent. `tokenspeed_kernel.workbench.benchmark.runner` describes how times are measured.
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from baselines import implementations, output_of
from shapes import SHAPES, Shape, reference_rows, sampled_rows

from tokenspeed_kernel.workbench.benchmark.bars import Bar, Measure, Times, against, at_most, outcome
from tokenspeed_kernel.workbench.benchmark.figures import Figure, Marks, Panel, Report, measured, us
from tokenspeed_kernel.workbench.benchmark.runner import (
    Benchmark,
    Call,
    Effort,
    Errors,
    Implementation,
    JsonRow,
    Limits,
    Task,
    errors_against,
    in_graph_of,
    values_of,
)
from tokenspeed_kernel_base.operator import get_operator

# Bytes that are read between two calls on the same inputs, so that the inputs are not in the 50 MB L2 cache.
_TOUCHED = 224 << 20
# Largest numbers of copies of the inputs. Prefill needs fewer copies, because inputs in the L2 cache do not make it faster.
_COPIES, _PREFILL_COPIES = 128, 8
# Rates that no kernel can reach. A result above these rates is a measurement error.
_BYTES_PER_US, _FLOPS_PER_US = 4.8e6, 1e9
# Largest allowed relative errors, of all checked rows together and of the worst row. The limit for a row is higher, because errors
# of rounding to bfloat16 average out less over its 64 elements than over the whole output.
LIMITS = Limits(5e-3, 2e-2)
# A baseline with larger errors computes something else, and is not compared.
_BASELINE_LIMITS = Limits(2e-2, 8e-2)


def tasks(shapes: Sequence[Shape], who: Sequence[Implementation], device: torch.device, effort: Effort) -> Iterator[Task]:
    """Yields one measurement task for each shape; long shapes come last."""
    return (_task(shape, device) for shape in sorted(shapes, key=_work))


def _task(shape: Shape, device: torch.device) -> Task:
    op = get_operator(shape.operator)
    arguments = op.complete(shape.case().build(device))
    cost = op.cost_of(arguments)
    rows = sampled_rows(shape)
    expected = {sinks: errors_against(reference_rows(shape, arguments, rows, sinks=sinks)) for sinks in (True, False)}
    count = max(1, min(_COPIES if shape.paged else _PREFILL_COPIES, math.ceil(_TOUCHED / cost.bytes)))
    copies = functools.cache(lambda: [arguments, *(copy.deepcopy(arguments) for _ in range(count - 1))])

    def checks(each: Implementation) -> Iterable[tuple[Callable[[], Call], Errors, Limits]]:
        def errors(result: Any) -> tuple[float, float]:
            return expected[each.sinks](output_of(result)[rows])

        return [(functools.partial(each.setup, shape, arguments), errors, LIMITS if each.ours else _BASELINE_LIMITS)]

    least_us = max(cost.bytes / _BYTES_PER_US, cost.flops / _FLOPS_PER_US)
    return Task(shape, cost, checks, lambda each: [each.setup(shape, given) for given in copies()], in_graph_of(least_us, count))


def _work(shape: Shape) -> float:
    """Returns the sort key of a shape, an estimate of its duration. It is 0 for all shapes with a paged cache, because these are
    short."""
    seen = shape.window_left + 1 if shape.window_left >= 0 else shape.length
    return 0.0 if shape.paged else float(shape.batch * shape.length * seen)


def rate(row: JsonRow) -> str:
    computes = row["group"] in ("prefill", "prefill head_dim 128", "extend by 1024")
    return f"{row['tflops']:.0f} TF" if computes else f"{row['gb_per_s'] / 1e3:.2f} TB"


# -- bars --------------------------------------------------------------------------------------------------------------------------

# The baselines with which bars are compared, for prefill and for decode.
PREFILL_BASELINES, DECODE_BASELINES = ("fa3", "fa4", "cudnn"), ("fa3", "flashinfer")


def _named(group: str, wanted: Callable[[Shape], bool] = lambda shape: True) -> tuple[str, ...]:
    return tuple(shape.name for shape in SHAPES if shape.group == group and wanted(shape))


def _tflops(names: Sequence[str]) -> Measure:
    """Returns a measure: the lowest TFLOP/s of our kernel at these shapes. Counts only the unmasked half of both GEMMs, q·k and
    P·v."""
    flops = {shape.name: 2 * shape.batch * shape.length**2 * shape.heads * shape.head_dim for shape in SHAPES}
    return lambda times: min(flops[name] / times[name]["ours"] / 1e6 for name in names)


def _bars() -> list[Bar]:
    prefill, decode, wide = _named("prefill"), _named("decode"), _named("prefill head_dim 128")
    long = _named("prefill", lambda shape: shape.length == 8192)
    many = ("prefill 1K x 16",)
    four = ("decode of 4 8K x 16", "decode 8K x 16")
    longest = {
        "window prefill 8K x 16": 850.0,
        "window prefill 1K x 16": 120.0,
        "window extend by 16 8K x 64": 15.0,
        "decode 8K x 16": 76.0,
        "decode 8K x 64": 262.0,
        "decode 1K x 256": 142.0,
        "decode 32K x 1": 25.0,
        "decode 1K x 1": 7.0,
        "window decode 8K x 64": 6.0,
    }
    return [
        against("prefill: best baseline, geometric mean", 1.05, prefill, PREFILL_BASELINES, mean=True),
        against("prefill: best baseline, worst shape", 0.97, prefill, PREFILL_BASELINES),
        Bar("prefill 8K: TFLOP/s, worst batch", 530, False, long, _tflops(long)),
        Bar("prefill 1K x 16: TFLOP/s", 380, False, many, _tflops(many)),
        against("prefill head_dim 128: FA3, worst shape", 1.0, wide, ("fa3",)),
        against("decode: best baseline, geometric mean", 1.15, decode, DECODE_BASELINES, mean=True),
        *(at_most(shape, bound) for shape, bound in longest.items()),
        Bar("decode of 4 over decode of 1, 8K x 16", 1.15, True, four, lambda t: t[four[0]]["ours"] / t[four[1]]["ours"]),
    ]


def judged(rows: Sequence[JsonRow]) -> list[dict[str, Any]]:
    """Compares the largest error of our kernels with the bar on errors. Returns the outcome."""
    errors: Times = values_of(rows, "relative_error")
    worst = max((of_one["ours"] for of_one in errors.values() if "ours" in of_one), default=None)
    return [outcome("relative error, worst shape", LIMITS.error, worst)]


# -- the figure --------------------------------------------------------------------------------------------------------------------

_DIGITS = {"tflops": 0, "gb_per_s": 2, "ratio": 1}
# For each panel of the plot: its title, its groups, the plotted value of a row, and the implementations to leave out. An
# implementation is left out if the values of the others would be hard to read beside its values.
_PANELS = (
    ("Full causal prefill, TFLOP/s (more is better)", ("prefill", "prefill head_dim 128"), "tflops", ("triton", "flashinfer")),
    ("Decode, TB/s (more is better)", ("decode", "decode of 4"), "gb_per_s", ("fa4", "cudnn")),
    (
        "Sliding window of 128, times as fast as FlashAttention-3 (more is better)",
        ("window prefill", "window extend by 16", "window decode"),
        "ratio",
        (),
    ),
)


def _short(name: str, groups: Sequence[str]) -> str:
    """Returns a shape's name without the words that the panel's title has."""
    group = max((group for group in groups if name.startswith(group)), key=len)
    rest = name.removeprefix(group).strip()
    if group == groups[0] and "window" not in group:
        return rest
    return f"{rest}\n{group.removeprefix(groups[0]).removeprefix('window').strip() or group}".replace("head_dim ", "d ")


def _values(of_one: Mapping[str, JsonRow], what: str) -> dict[str, float]:
    """Returns the plotted values of one shape, by implementation."""
    if what == "ratio":
        return {name: us(of_one["fa3"]) / us(row) for name, row in of_one.items()} if "fa3" in of_one else {}
    return {name: row[what] / (1e3 if what == "gb_per_s" else 1) for name, row in of_one.items()}


def panels(report: Report) -> list[Panel]:
    made = []
    for title, groups, what, left_out in _PANELS:
        found = {
            name: {who: row for who, row in of_one.items() if who not in left_out}
            for name, of_one in measured(report, [shape.name for shape in SHAPES if shape.group in groups]).items()
        }
        values = {name: _values(of_one, what) for name, of_one in found.items() if of_one}
        made.append(Panel(title, values, [_short(name, groups) for name in values], _DIGITS[what], what == "ratio"))
    return made


FIGURE = Figure(
    title="Attention of GPT-OSS, bfloat16,",
    heading="## Measured",
    alt="; ".join(title for title, *_ in _PANELS),
    baselines={
        "fa3": ("FlashAttention-3", "#c2410c"),
        "fa4": ("flash-attn-4", "#e0a458"),
        "cudnn": ("cuDNN, no sinks", "#6b8f71"),
        "flashinfer": ("FlashInfer, no sinks", "#7e5aa8"),
    },
    shapes=[shape.name for shape in SHAPES],
    panels=panels,
    marks=Marks("<!-- measured -->", "<!-- end of measured -->"),
    readme=Path(__file__).parents[1] / "README.md",
)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--our-modules", action="append", default=[], metavar="OPERATOR=MODULE:FUNCTION", help="see above")


BENCHMARK = Benchmark(
    file=__file__,
    description=__doc__,
    shapes=SHAPES,
    implementations=lambda given: implementations(dict(entry.split("=", 1) for entry in given.our_modules)),
    tasks=tasks,
    bars=_bars(),
    judged=judged,
    rate=rate,
    figure=FIGURE,
    copies=_COPIES,
    options=options,
)

if __name__ == "__main__":
    BENCHMARK.main()
