"""Plots a report of h200.py: the kernels against their baselines, in three panels.

python packages/tokenspeed-kernel-nvidia/benchmarks/plot.py            # h200.json to h200.svg
python packages/tokenspeed-kernel-nvidia/benchmarks/plot.py REPORT.json --output PICTURE.png
python packages/tokenspeed-kernel-nvidia/benchmarks/plot.py --table    # the same as Markdown
python packages/tokenspeed-kernel-nvidia/benchmarks/plot.py --readme   # the picture, and picture and Markdown into the README
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import drawing
from drawing import OURS, PORTABLE, Found, Legend, Marks, Panel, Report, us
from shapes import SHAPES

README = drawing.README
MARKS = Marks("<!-- measured -->", "<!-- end of measured -->")
# The portable kernels are left out where they would flatten the rest.
LEGEND = Legend(
    {
        "ours": "this package",
        "fa3": "FlashAttention-3",
        "fa4": "flash-attn-4",
        "cudnn": "cuDNN, no sinks",
        "flashinfer": "FlashInfer, no sinks",
        "triton": "portable (Triton)",
    },
    {"ours": OURS, "fa3": "#c2410c", "fa4": "#e0a458", "cudnn": "#6b8f71", "flashinfer": "#7e5aa8", "triton": PORTABLE},
)
_DIGITS = {"tflops": 0, "gb_per_s": 2, "ratio": 1}

# A panel's title, its groups, the plotted value of a row, and the implementations to leave out.
PANELS = (
    ("Full causal prefill, TFLOP/s (more is better)", ("prefill", "prefill head_dim 128"), "tflops", ("triton", "flashinfer")),
    ("Decode, TB/s (more is better)", ("decode", "decode of 4"), "gb_per_s", ("fa4", "cudnn")),
    (
        "Sliding window of 128, times as fast as FlashAttention-3 (more is better)",
        ("window prefill", "window extend by 16", "window decode"),
        "ratio",
        (),
    ),
)


def short(name: str, groups: Sequence[str]) -> str:
    """A shape's name without the words that the panel's title already has."""
    group = max((group for group in groups if name.startswith(group)), key=len)
    rest = name.removeprefix(group).strip()
    if group == groups[0] and "window" not in group:
        return rest
    return f"{rest}\n{group.removeprefix(groups[0]).removeprefix('window').strip() or group}".replace("head_dim ", "d ")


def values_of(of_one: Mapping[str, Mapping[str, Any]], what: str) -> dict[str, float]:
    """The plotted values of one shape, by implementation."""
    if what == "ratio":
        return {name: us(of_one["fa3"]) / us(row) for name, row in of_one.items()} if "fa3" in of_one else {}
    return {name: row[what] / (1e3 if what == "gb_per_s" else 1) for name, row in of_one.items()}


def _panels(report: Report) -> list[Panel]:
    panels = []
    for title, groups, what, left_out in PANELS:
        rows = [row for row in report["rows"] if row["kernel"] not in left_out]
        found: Found = drawing.measured(rows, [shape.name for shape in SHAPES if shape.group in groups])
        values = {name: values_of(of_one, what) for name, of_one in found.items()}
        panels.append(Panel(title, values, [short(name, groups) for name in found], _DIGITS[what], what == "ratio"))
    return panels


def draw(report: Report, file: Path) -> None:
    """Draws a report into a file, whose suffix selects the format."""
    drawing.draw(report, "Attention of GPT-OSS, bfloat16,", _panels(report), LEGEND, file)


def table(report: Report) -> str:
    """Markdown: the bars and their measurements, and one row a shape, in microseconds."""
    return drawing.table(report, [shape.name for shape in SHAPES], LEGEND)


def section(report: Report, picture: str) -> str:
    """The README section between the marks."""
    return f"## Measured\n\n![{PANELS[0][0]}; {PANELS[1][0]}; {PANELS[2][0]}]({picture})\n\n{table(report)}"


def main(words: Sequence[str] | None = None) -> None:
    drawing.run(words, __doc__, "h200", draw=draw, table=table, section=section, marks=MARKS, readme=README)


if __name__ == "__main__":
    main()
