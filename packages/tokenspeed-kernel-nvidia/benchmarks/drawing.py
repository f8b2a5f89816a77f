"""Plots and tables: shared by the benchmark scripts of this folder for their reports."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
INK, FAINT, GRID = "#1d2229", "#5b6470", "#d9dde3"
# This package has the only strong colour; the portable kernels are this project's too.
OURS, PORTABLE = "#0b62c4", "#b8bec7"
_STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 11,
    "svg.fonttype": "none",
    "svg.hashsalt": "tokenspeed-kernel",
    "axes.unicode_minus": False,
}

Report = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]
# The timed rows, by shape and implementation.
Found = Mapping[str, Mapping[str, Mapping[str, Any]]]


@dataclass(frozen=True)
class Legend:
    """Names and colours by implementation, in the order of a shape's bars."""

    labels: Mapping[str, str]
    colours: Mapping[str, str]


@dataclass(frozen=True)
class Panel:
    """One row of bars.

    Attributes:
        title: what is plotted.
        values: by shape and implementation.
        ticks: labels of the shapes.
        digits: decimals of the values above our bars.
        one: whether to draw a line at 1.
    """

    title: str
    values: Mapping[str, Mapping[str, float]]
    ticks: Sequence[str]
    digits: int = 0
    one: bool = False


def measured(rows: Rows, shapes: Sequence[str]) -> dict[str, dict[str, Mapping[str, Any]]]:
    """The timed rows of these shapes, in the shapes' order."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {name: {} for name in shapes}
    for row in rows:
        if row["case"] in found and row["timing"] is not None:
            found[row["case"]][row["kernel"]] = row
    return {name: of_one for name, of_one in found.items() if of_one}


def us(row: Mapping[str, Any]) -> float:
    return float(row["timing"]["median_us"])


def _draw_panel(axes: Axes, panel: Panel, legend: Legend) -> None:
    axes.set_title(panel.title, loc="left", fontsize=12, color=INK, pad=10)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, colors=FAINT)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(GRID)
    highest = 0.0
    for place, values in enumerate(panel.values.values()):
        names = [name for name in legend.labels if name in values]
        width = 0.84 / max(len(names), 1)
        for index, name in enumerate(names):
            left = place - 0.42 + index * width
            bar = Rectangle((left + 0.06 * width, 0), 0.88 * width, values[name], color=legend.colours[name], linewidth=0)
            axes.add_patch(bar)
            highest = max(highest, values[name])
            if name == "ours":
                text = f"{values[name]:.{panel.digits}f}"
                axes.text(left + width / 2, values[name], text, ha="center", va="bottom", fontsize=9, color=INK)
    axes.set_xlim(-0.6, max(len(panel.values), 1) - 0.4)
    axes.set_ylim(0, 1.12 * highest or 1)
    axes.set_xticks(range(len(panel.values)), panel.ticks, fontsize=9.5)
    if panel.one:
        axes.axhline(1, color=FAINT, linewidth=0.8)


@matplotlib.rc_context(_STYLE)
def draw(report: Report, title: str, panels: Sequence[Panel], legend: Legend, file: Path) -> None:
    """Draws panels into a file, whose suffix selects the format. ``title``: precedes the device's name."""
    # Inches: margins for title and legend above the panels and for the versions below them; height of a panel, and panel pitch.
    above, below, each, step = 1.21, 0.84, 2.05, 3.2
    height = above + each + step * (len(panels) - 1) + below
    figure = Figure((12, height), facecolor="white")
    for index, panel in enumerate(panels):
        bottom = height - above - each - step * index
        _draw_panel(figure.add_axes((0.055, bottom / height, 0.93, each / height)), panel, legend)
    metadata, versions = report["metadata"], report["versions"]
    drawn = {name for panel in panels for values in panel.values.values() for name in values}
    shown = [name for name in legend.labels if name in drawn]
    said = ", ".join(f"{legend.labels[name].partition(',')[0]} {versions[name]}" for name in shown if versions.get(name))
    with_what = f"driver {metadata['driver']}, torch {metadata['torch']}; {said}".strip("; ")
    figure.text(0.015, 1 - 0.23 / height, f"{title} on one {metadata['device']}", fontsize=15, color=INK, va="top")
    figure.text(0.015, 0.12 / height, with_what, fontsize=8.5, color=FAINT)
    handles = [Rectangle((0, 0), 1, 1, color=legend.colours[name]) for name in shown]
    place: Any = {"loc": "upper left", "bbox_to_anchor": (0.008, 1 - 0.4 / height), "ncols": len(shown) or 1}
    figure.legend(handles, [legend.labels[name] for name in shown], frameon=False, fontsize=10, **place)
    figure.savefig(file, dpi=110, metadata={"Date": None} if file.suffix == ".svg" else None)


# -- Markdown ----------------------------------------------------------------------------------------------------------------------


def table(
    report: Report,
    shapes: Sequence[str],
    legend: Legend,
    *,
    more: Mapping[str, Callable[[Mapping[str, Any]], str]] | None = None,
    said: str = "",
) -> str:
    """Markdown: what was measured on and how, one row a shape in microseconds, and the bars with their measurements.

    Args:
        more: additional columns before the times: title, and text from any row of the shape.
        said: how the times were taken, if that differs from `note`.
    """
    metadata, more = report["metadata"], more or {}
    names = [name for name in legend.labels if any(row["kernel"] == name and row["timing"] is not None for row in report["rows"])]
    lines = [
        f"{metadata['device']}, driver {metadata['driver']}, torch {metadata['torch']}, commit {metadata['git_commit'][:12]}.",
        "",
        f"`{metadata['command']}`",
        "",
        said or note(report),
        "",
        "| " + " | ".join(["microseconds", *more, *(legend.labels[name] for name in names), "best peer / ours"]) + " |",
        "|---|" + "---|" * (len(more) + len(names) + 1),
    ]
    for shape, found in measured(report["rows"], shapes).items():
        times = {name: us(row) for name, row in found.items()}
        baselines = [time for name, time in times.items() if name not in ("ours", "triton")]
        ratio = f"{min(baselines) / times['ours']:.2f}" if baselines and "ours" in times else ""
        any_row = next(iter(found.values()))
        cells = [text(any_row) for text in more.values()] + [three_digits(times[name]) if name in times else "" for name in names]
        lines.append(f"| {shape} | {' | '.join(cells)} | {ratio} |")
    lines += ["", "| bar | asked | measured | |", "|---|---|---|---|"]
    for bar in report["bars"]:
        asked = f"{'at most' if bar['most'] else 'at least'} {bar['bound']:g}"
        value = "not measured" if bar["value"] is None else f"{bar['value']:.3g}"
        lines.append(
            f"| {bar['name']} | {asked} | {value} | {'' if bar['holds'] is None else 'holds' if bar['holds'] else 'missed'} |"
        )
    return "\n".join(lines)


def note(report: Report) -> str:
    """How the times were taken, in sentences."""
    between = [row["between_us"] for row in report["rows"] if row["between_us"] is not None]
    worst = [row["worst_row_error"] for row in report["rows"] if row["kernel"] == "ours" and row["worst_row_error"] is not None]
    said = "Medians of one call in a CUDA graph of several, which take turns on copies of the inputs, more than caches hold."
    if between:
        took = " to ".join(dict.fromkeys(f"{time_us:.2f}" for time_us in (min(between), max(between))))
        said += (
            " In the graph a small PyTorch kernel stands after each call of every contestant, as other kernels do in a model: "
            f"calls do not overlap each other. What it takes in a graph of its own ({took} us) is subtracted."
        )
    if worst:
        said += f" The worst row of all that were looked at has a relative error of {max(worst):.1e} (this package)."
    return said


def three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


# -- the README and the command line -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Marks:
    """The marks around a generated section of the README."""

    begin: str
    end: str

    def inside(self, text: str) -> str:
        """The section between the marks of a README; empty if there is none."""
        begin, end = text.find(self.begin), text.find(self.end)
        return text[begin + len(self.begin) : end].strip() if 0 <= begin < end else ""

    def replaced(self, text: str, made: str) -> str:
        """The README with the section replaced; it must have at least the first mark."""
        begin = text.index(self.begin) + len(self.begin)
        end = text.find(self.end)
        after = text[end:] if end >= 0 else self.end + text[begin:]
        return f"{text[:begin]}\n{made}\n{after}"


def run(
    words: Sequence[str] | None,
    description: str | None,
    name: str,
    *,
    draw: Callable[[Report, Path], None],
    table: Callable[[Report], str],
    section: Callable[[Report, str], str],
    marks: Marks,
    readme: Path,
) -> None:
    """The command line of a plot: reads ``name.json`` and writes ``name.svg`` beside this file."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, nargs="?", default=HERE / f"{name}.json")
    parser.add_argument("--output", type=Path, default=HERE / f"{name}.svg", help="ends with .svg or .png")
    parser.add_argument("--table", action="store_true", help="print Markdown instead")
    parser.add_argument("--readme", action="store_true", help="put picture and Markdown into the package's README, too")
    given = parser.parse_args(words)
    report = json.loads(given.report.read_text())
    if given.table:
        print(table(report))
        return
    draw(report, given.output)
    if given.readme:
        picture = given.output.resolve().relative_to(readme.parent).as_posix()
        readme.write_text(marks.replaced(readme.read_text(), section(report, picture)))
