"""Measures an MoE layer of GPT-OSS-120B with bfloat16 and with fp8 activations side by side, on one H200.

python packages/tokenspeed-kernel-nvidia/benchmarks/h200_moe_activations.py --quick
python packages/tokenspeed-kernel-nvidia/benchmarks/h200_moe_activations.py --quick --tokens 128 256 --tiles few 24s fewc 40c
python packages/tokenspeed-kernel-nvidia/benchmarks/h200_moe_activations.py --plot --readme  # plots h200_moe_activations.json

The table has a line for each number of tokens: microseconds with either dtype, their ratio, and relative errors against the
operator's definition in float64. The error that quantising activations causes in the definition itself stands beside. `h200_moe`
describes the inputs and how times are measured. ``--tiles`` adds implementations of this package, without the router.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import h200_moe
from moe_shapes import GPT_OSS_120B, Shape

from tokenspeed_kernel.workbench.benchmark import bars
from tokenspeed_kernel.workbench.benchmark.figures import Marks, Panel, Report, measured, us
from tokenspeed_kernel.workbench.benchmark.runner import Benchmark, Implementation, JsonRow

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 8192)
SHAPES = tuple(Shape(GPT_OSS_120B, tokens, dtype) for dtype in ("none", "fp8") for tokens in TOKENS)
# Numbers of tokens at which fp8 activations must take no longer than bfloat16 activations.
_NO_SLOWER = tuple(tokens for tokens in TOKENS if tokens <= 256)
_WHAT = "per cent of the floor (more is better)"  # what the figure shows
_US = {"256": 430, "1024": 640, "8192": 2800, "1024 fp8": 560, "8192 fp8": 2150}


def _no_slower(tokens: int) -> bars.Bar:
    plain, fp8 = (Shape(GPT_OSS_120B, tokens, dtype).name for dtype in ("none", "fp8"))
    name = f"{tokens}: fp8 over bfloat16"
    return bars.Bar(name, 1.0, True, (plain, fp8), lambda times: times[fp8]["ours"] / times[plain]["ours"])


BARS = [*(bars.at_most(f"{GPT_OSS_120B.name} {case}", us) for case, us in _US.items()), *map(_no_slower, _NO_SLOWER)]


def lines(rows: Sequence[JsonRow]) -> Iterator[str]:
    """Yields the lines of the table. An implementation that measures one dtype only has a dash for the other."""
    yield f"{'tokens':>6} {'kernel':>9} {'bf16 us':>9} {'fp8 us':>9} {'fp8/bf16':>9} {'bf16 err':>9} {'fp8 err':>9} {'of fp8':>9}"
    found: dict[tuple[int, str], dict[str, JsonRow]] = {}
    for row in rows:
        if row["status"] != "skipped":
            dtype = "fp8" if row["case"].endswith(" fp8") else "none"
            found.setdefault((row["tokens"], row["kernel"]), {})[dtype] = row
    for (tokens, kernel), both in sorted(found.items(), key=lambda each: each[0][0]):
        cells = [_us(both.get(dtype)) for dtype in ("none", "fp8")]
        ratio = f"{float(cells[1]) / float(cells[0]):.3f}" if all(_timed(both.get(dtype)) for dtype in ("none", "fp8")) else "-"
        errors = [_error(both.get("none"), "relative_error"), _error(both.get("fp8"), "relative_error")]
        quantised = _error(both.get("fp8"), "quantization_error")
        yield f"{tokens:>6} {kernel:>9}" + "".join(f" {cell:>9}" for cell in (*cells, ratio, *errors, quantised))


def _timed(row: JsonRow | None) -> bool:
    return row is not None and row["timing"] is not None


def _us(row: JsonRow | None) -> str:
    if row is None:
        return "-"
    return f"{row['timing']['median_us']:.1f}" if row["timing"] else row["status"]


def _error(row: JsonRow | None, name: str) -> str:
    return "-" if row is None or row[name] is None else f"{row[name]:.1e}"


def panels(report: Report) -> list[Panel]:
    """Returns a panel for each dtype of activations."""
    made = []
    for dtype, title in (("none", "bfloat16"), ("fp8", "fp8")):
        shapes = {shape.name: shape for shape in SHAPES if shape.activation_dtype == dtype}
        found = measured(report, list(shapes))
        values = {name: {who: 100 * row["floor_us"] / us(row) for who, row in of_one.items()} for name, of_one in found.items()}
        made.append(Panel(f"{title} activations by tokens, {_WHAT}", values, [str(shapes[name].tokens) for name in values]))
    return made


FIGURE = replace(
    h200_moe.FIGURE,
    title="Experts of GPT-OSS-120B, router to combined output,",
    heading="### bfloat16 and fp8 activations of experts",
    alt=f"Experts with bfloat16 and with fp8 activations, {_WHAT}",
    shapes=[shape.name for shape in SHAPES],
    panels=panels,
    marks=Marks("<!-- measured activations -->", "<!-- end of measured activations -->"),
)


@dataclass(frozen=True)
class SideBySide(Benchmark):
    """A benchmark whose table has both dtypes of activations in one line."""

    @staticmethod
    def table(rows: Sequence[JsonRow]) -> str:
        return "\n".join(lines(rows))


def found(given: argparse.Namespace) -> list[Implementation]:
    """Returns this package's implementations. The others are measured only if ``--baselines`` names them."""
    return [each if each.ours and not each.portable else replace(each, on_demand=True) for each in h200_moe.found(given)]


BENCHMARK = SideBySide(
    file=__file__,
    description=__doc__,
    shapes=SHAPES,
    implementations=found,
    tasks=h200_moe.tasks,
    bars=BARS,
    judged=lambda rows: [],
    rate=h200_moe.BENCHMARK.rate,
    figure=FIGURE,
    about=h200_moe.BENCHMARK.about,
    copies=h200_moe.BENCHMARK.copies,
    options=h200_moe.options,
    chosen=lambda given, shape: not given.tokens or shape.tokens in given.tokens,
)

if __name__ == "__main__":
    BENCHMARK.main()
