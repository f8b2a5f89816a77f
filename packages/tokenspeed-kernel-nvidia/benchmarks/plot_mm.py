"""Plots a report of h200_mm.py: decode GEMMs against PyTorch's, and against their floor.

python packages/tokenspeed-kernel-nvidia/benchmarks/plot_mm.py            # h200_mm.json to h200_mm.svg
python packages/tokenspeed-kernel-nvidia/benchmarks/plot_mm.py REPORT.json --output PICTURE.png
python packages/tokenspeed-kernel-nvidia/benchmarks/plot_mm.py --table    # the same as Markdown
python packages/tokenspeed-kernel-nvidia/benchmarks/plot_mm.py --readme   # the picture, and picture and Markdown into the README
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import drawing
from drawing import OURS, PORTABLE, Legend, Marks, Panel, Report, us
from mm_shapes import GEMMS, SHAPES, TOKENS, Gemm, Shape

MARKS = Marks("<!-- measured mm -->", "<!-- end of measured mm -->")
LEGEND = Legend(
    {"ours": "this package", "torch": "PyTorch (cuBLAS)", "triton": "portable (Triton)"},
    {"ours": OURS, "torch": "#c2410c", "triton": PORTABLE},
)
_WHAT = "microseconds (less is better)"


def _panel(report: Report, m: int, gemms: Sequence[Gemm]) -> Panel:
    names = [Shape(gemm, m).name for gemm in gemms]
    found = drawing.measured(report["rows"], names)
    values = {name: {who: us(row) for who, row in of_one.items()} for name, of_one in found.items()}
    return Panel(
        f"{m} row{'s' * (m > 1)}, {_WHAT}", values, [name.rpartition(" x ")[0].replace(" ", "\n", 1) for name in values], 1
    )


def panels(report: Report) -> list[Panel]:
    """Returns two panels, for one row and for the most rows of activations, with the GEMMs that have bars."""
    gemms = [gemm for gemm in GEMMS if gemm.bar is not None]
    return [_panel(report, m, gemms) for m in (min(TOKENS), max(TOKENS))]


def draw(report: Report, file: Path) -> None:
    """Draws a report into a file, whose suffix selects the format."""
    drawing.draw(report, "Products of a decode step", panels(report), LEGEND, file)


def _behind_an_ordinary_kernel(report: Report, name: str) -> Callable[[Mapping[str, Any]], str]:
    times = {row["case"]: row["ordinary_us"] for row in report["rows"] if row["kernel"] == name and row["ordinary_us"] is not None}
    return lambda row: drawing.three_digits(times[row["case"]]) if row["case"] in times else ""


def note(report: Report) -> str:
    """Returns how the times were taken, in sentences."""
    between = [row["between_us"] for row in report["rows"] if row["between_us"] is not None]
    worst = [row["worst_row_error"] for row in report["rows"] if row["kernel"] == "ours" and row["worst_row_error"] is not None]
    said = (
        "Medians of one call in a CUDA graph of several, which take turns on copies of the weights, more than caches hold. In the "
        "graph an rmsnorm of one row stands after each call, which lets the next kernel be launched while it works"
    )
    if between:
        said += f"; what it takes in a graph of its own ({min(between):.2f} to {max(between):.2f} us) is subtracted"
    said += '. "Ordinary": with a small kernel of PyTorch\'s there, which lets nothing be launched early.'
    if worst:
        said += f" The worst row of all that were looked at has a relative error of {max(worst):.1e} (this package)."
    return said


def table(report: Report) -> str:
    """Returns Markdown: the bars and their measurements, and one row a shape, in microseconds."""
    more = {
        "floor": lambda row: drawing.three_digits(row["floor_us"]),
        "ordinary, this package": _behind_an_ordinary_kernel(report, "ours"),
        "ordinary, PyTorch": _behind_an_ordinary_kernel(report, "torch"),
    }
    return drawing.table(report, [shape.name for shape in SHAPES], LEGEND, more=more, said=note(report))


def section(report: Report, picture: str) -> str:
    """Returns the README section between the marks."""
    return f"### Products of a decode step\n\n![Products of a decode step, {_WHAT}]({picture})\n\n{table(report)}"


def main(words: Sequence[str] | None = None) -> None:
    drawing.run(words, __doc__, "h200_mm", draw=draw, table=table, section=section, marks=MARKS, readme=drawing.README)


if __name__ == "__main__":
    main()
