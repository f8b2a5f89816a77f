"""Plots a report of h200_moe.py: an MoE layer against baselines, and against its floor.

python packages/tokenspeed-kernel-nvidia/benchmarks/plot_moe.py            # h200_moe.json to h200_moe.svg
python packages/tokenspeed-kernel-nvidia/benchmarks/plot_moe.py REPORT.json --output PICTURE.png
python packages/tokenspeed-kernel-nvidia/benchmarks/plot_moe.py --table    # the same as Markdown
python packages/tokenspeed-kernel-nvidia/benchmarks/plot_moe.py --readme   # the picture, and picture and Markdown into the README
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import drawing
from drawing import OURS, PORTABLE, Legend, Marks, Panel, Report, us
from moe_shapes import GPT_OSS_120B, SHAPES, Model

MARKS = Marks("<!-- measured moe -->", "<!-- end of measured moe -->")
LEGEND = Legend(
    {
        "ours": "this package",
        "triton_kernels": "triton_kernels",
        "marlin": "Marlin",
        "humming": "Humming",
        "vllm_triton": "vLLM's Triton",
        "flashinfer": "FlashInfer",
        "triton": "portable (Triton)",
    },
    {
        "ours": OURS,
        "triton_kernels": "#c2410c",
        "marlin": "#e0a458",
        "humming": "#6b8f71",
        "vllm_triton": "#a34d68",
        "flashinfer": "#7e5aa8",
        "triton": PORTABLE,
    },
)
_WHAT = "per cent of the floor (more is better)"


def _panel(report: Report, model: Model) -> Panel:
    shapes = {shape.name: shape for shape in SHAPES if shape.model == model}
    found = drawing.measured(report["rows"], list(shapes))
    values = {name: {who: 100 * row["floor_us"] / us(row) for who, row in of_one.items()} for name, of_one in found.items()}
    ticks = [f"{shapes[name].tokens}\n{shapes[name].activation_dtype}".removesuffix("\nnone") for name in values]
    return Panel(f"{model.name} by tokens, {_WHAT}", values, ticks)


def panels(report: Report) -> list[Panel]:
    """One panel for each measured model; always one for the model that has bars."""
    measured = {row["case"] for row in report["rows"] if row["timing"] is not None}
    models = dict.fromkeys([GPT_OSS_120B, *(shape.model for shape in SHAPES if shape.name in measured)])
    return [_panel(report, model) for model in models]


def draw(report: Report, file: Path) -> None:
    """Draws a report into a file, whose suffix selects the format."""
    drawing.draw(report, "Mixtures of experts, router to combined output,", panels(report), LEGEND, file)


def table(report: Report) -> str:
    """Markdown: the bars and their measurements, and one row a shape, in microseconds."""
    more = {"experts touched": lambda row: f"{row['experts']:.1f}", "floor": lambda row: drawing.three_digits(row["floor_us"])}
    return drawing.table(report, [shape.name for shape in SHAPES], LEGEND, more=more)


def section(report: Report, picture: str) -> str:
    """The README section between the marks."""
    return f"### Mixtures of experts\n\n![A layer of a mixture of experts, {_WHAT}]({picture})\n\n{table(report)}"


def main(words: Sequence[str] | None = None) -> None:
    drawing.run(words, __doc__, "h200_moe", draw=draw, table=table, section=section, marks=MARKS, readme=drawing.README)


if __name__ == "__main__":
    main()
