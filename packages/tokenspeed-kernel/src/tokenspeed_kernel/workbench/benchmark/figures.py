"""Plots and tables of a benchmark program's report: this project's kernels and the baselines side by side, and acceptance bars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_INK, _FAINT, _GRID = "#1d2229", "#5b6470", "#d9dde3"
# This project's kernels have the only strong colour. Portable kernels are grey.
_OURS, _PORTABLE = "#0b62c4", "#b8bec7"
_STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 11,
    "svg.fonttype": "none",
    "svg.hashsalt": "tokenspeed-kernel",
    "axes.unicode_minus": False,
}

Report = Mapping[str, Any]
# The timed rows, by shape and implementation.
Found = Mapping[str, Mapping[str, Mapping[str, Any]]]


@dataclass(frozen=True)
class Panel:
    """One panel of a plot: a bar chart, with a group of bars per shape and a bar per implementation.

    Attributes:
        title: title of the panel.
        values: the plotted values, by shape and implementation.
        ticks: labels of the shapes.
        digits: decimals of the values that are written above this project's bars.
        one: whether to draw a horizontal line at the value 1.
    """

    title: str
    values: Mapping[str, Mapping[str, float]]
    ticks: Sequence[str]
    digits: int = 0
    one: bool = False


@dataclass(frozen=True)
class Marks:
    """The texts that mark the beginning and the end of a generated section of a page."""

    begin: str
    end: str

    def inside(self, text: str) -> str:
        """Returns the section of a page between the marks; empty if the page has no such section."""
        begin, end = text.find(self.begin), text.find(self.end)
        return text[begin + len(self.begin) : end].strip() if 0 <= begin < end else ""

    def replaced(self, text: str, made: str) -> str:
        """Returns the page ``text`` with its section replaced by ``made``. The page must have at least the first mark."""
        begin = text.index(self.begin) + len(self.begin)
        end = text.find(self.end, begin)
        after = text[end:] if end >= 0 else self.end + text[begin:]
        return f"{text[:begin]}\n{made}\n{after}"


def measured(report: Report, shapes: Sequence[str]) -> Found:
    """Returns a report's timed rows of these shapes, by shape and implementation, in the shapes' order."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {name: {} for name in shapes}
    for row in report["rows"]:
        if row["case"] in found and row["timing"] is not None:
            found[row["case"]][row["kernel"]] = row
    return {name: of_one for name, of_one in found.items() if of_one}


def us(row: Mapping[str, Any]) -> float:
    return float(row["timing"]["median_us"])


def three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def note(report: Report, how: str = "") -> str:
    """Describes in sentences how a report's times were taken.

    ``how``: the text to return instead of the usual one, if the kernel between calls is not the usual small one. A clause with that
    kernel's time replaces ``{took}`` in this text.
    """
    between = [row["between_us"] for row in report["rows"] if row["between_us"] is not None]
    worst = [row["worst_row_error"] for row in report["rows"] if row["kernel"] == "ours" and row["worst_row_error"] is not None]
    said = how or "Each time is a median. A CUDA graph makes several calls, on copies of the inputs that exceed the caches."
    took = " to ".join(dict.fromkeys(f"{time_us:.2f}" for time_us in (min(between), max(between)))) if between else ""
    if how:
        said = how.format(took=f"; its time in a separate graph ({took} us) is subtracted" if took else "")
    elif between:
        said += (
            " In the graph, a small PyTorch kernel follows each call, as other kernels do in a model. So calls do not overlap each "
            f"other. The time of this kernel in a separate graph ({took} us) is subtracted."
        )
    if worst:
        said += f" The largest relative error of a checked row is {max(worst):.1e} (this package)."
    return said


@dataclass(frozen=True)
class Figure:
    """The plot and the table of a benchmark program.

    Attributes:
        title: the plot's title, which precedes the device's name above the panels.
        heading: heading of the generated section in the README.
        alt: the plot's text for screen readers.
        baselines: the baselines' labels and colours by name, in the order of a shape's bars; this project's kernels are added.
        shapes: the names of the shapes, in the table's order.
        panels: makes the plot's panels from a report.
        marks: the marks at the beginning and at the end of the generated section.
        readme: the page that has the generated section.
        how: the argument ``how`` of `note`.
        columns: further columns of the table before the times: a title, and a function that makes the text from any row of the
            shape.
    """

    title: str
    heading: str
    alt: str
    baselines: Mapping[str, tuple[str, str]]
    shapes: Sequence[str]
    panels: Callable[[Report], list[Panel]]
    marks: Marks
    readme: Path
    how: str = ""
    columns: Callable[[Report], Mapping[str, Callable[[Mapping[str, Any]], str]]] = field(default=lambda report: {})

    @property
    def legend(self) -> Mapping[str, tuple[str, str]]:
        return {"ours": ("this package", _OURS), **self.baselines, "triton": ("portable (Triton)", _PORTABLE)}

    def draw(self, report: Report, file: Path) -> None:
        """Draws the report's plot into a file. The file's suffix selects the format."""
        import matplotlib

        with matplotlib.rc_context(_STYLE):
            self._draw(report, self.panels(report), file)

    def _draw(self, report: Report, panels: Sequence[Panel], file: Path) -> None:
        from matplotlib.figure import Figure as Canvas
        from matplotlib.patches import Rectangle

        # In inches: margins for title and legend above the panels and for the versions below them; height of a panel, and panel
        # pitch.
        above, below, each, step = 1.21, 0.84, 2.05, 3.2
        height = above + each + step * (len(panels) - 1) + below
        figure = Canvas((12, height), facecolor="white")
        for index, panel in enumerate(panels):
            bottom = height - above - each - step * index
            self._draw_panel(figure.add_axes((0.055, bottom / height, 0.93, each / height)), panel)
        metadata, versions = report["metadata"], report["versions"]
        drawn = {name for panel in panels for values in panel.values.values() for name in values}
        shown = {name: label for name, label in self.legend.items() if name in drawn}
        libs = ", ".join(f"{label.partition(',')[0]} {versions[name]}" for name, (label, _) in shown.items() if versions.get(name))
        with_what = f"driver {metadata['driver']}, torch {metadata['torch']}; {libs}".strip("; ")
        figure.text(0.015, 1 - 0.23 / height, f"{self.title} on one {metadata['device']}", fontsize=15, color=_INK, va="top")
        figure.text(0.015, 0.12 / height, with_what, fontsize=8.5, color=_FAINT)
        handles = [Rectangle((0, 0), 1, 1, color=colour) for _, colour in shown.values()]
        place: Any = {"loc": "upper left", "bbox_to_anchor": (0.008, 1 - 0.4 / height), "ncols": len(shown) or 1}
        figure.legend(handles, [label for label, _ in shown.values()], frameon=False, fontsize=10, **place)
        figure.savefig(file, dpi=110, metadata={"Date": None} if file.suffix == ".svg" else None)

    def _draw_panel(self, axes: Any, panel: Panel) -> None:
        from matplotlib.patches import Rectangle

        axes.set_title(panel.title, loc="left", fontsize=12, color=_INK, pad=10)
        axes.grid(axis="y", color=_GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(length=0, colors=_FAINT)
        for side, spine in axes.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(_GRID)
        for place, values in enumerate(panel.values.values()):
            names = [name for name in self.legend if name in values]
            width = 0.84 / max(len(names), 1)
            for index, name in enumerate(names):
                left = place - 0.42 + index * width
                colour = self.legend[name][1]
                axes.add_patch(Rectangle((left + 0.06 * width, 0), 0.88 * width, values[name], color=colour, linewidth=0))
                if name == "ours":
                    text = f"{values[name]:.{panel.digits}f}"
                    axes.text(left + width / 2, values[name], text, ha="center", va="bottom", fontsize=9, color=_INK)
        highest = max((values[name] for values in panel.values.values() for name in self.legend if name in values), default=0.0)
        axes.set_xlim(-0.6, max(len(panel.values), 1) - 0.4)
        axes.set_ylim(0, 1.12 * highest or 1)
        axes.set_xticks(range(len(panel.values)), panel.ticks, fontsize=9.5)
        if panel.one:
            axes.axhline(1, color=_FAINT, linewidth=0.8)

    def table(self, report: Report) -> str:
        """Returns Markdown: hardware, software and method, a table of times in microseconds with a row per shape, and the
        acceptance bars with their measured values.
        """
        metadata, more = report["metadata"], self.columns(report)
        names = [name for name in self.legend if any(row["kernel"] == name and row["timing"] is not None for row in report["rows"])]
        columns = ["microseconds", *more, *(self.legend[name][0] for name in names), "best baseline / ours"]
        lines = [
            f"{metadata['device']}, driver {metadata['driver']}, torch {metadata['torch']}, commit {metadata['git_commit'][:12]}.",
            "",
            f"`{metadata['command']}`",
            "",
            note(report, self.how),
            "",
            f"| {' | '.join(columns)} |",
            "|---|" + "---|" * (len(columns) - 1),
        ]
        for shape, found in measured(report, self.shapes).items():
            times = {name: us(row) for name, row in found.items()}
            baselines = [time for name, time in times.items() if name not in ("ours", "triton")]
            ratio = f"{min(baselines) / times['ours']:.2f}" if baselines and "ours" in times else ""
            any_row = next(iter(found.values()))
            cells = [*(text(any_row) for text in more.values()), *(three_digits(times[n]) if n in times else "" for n in names)]
            lines.append(f"| {shape} | {' | '.join(cells)} | {ratio} |")
        lines += ["", "| bar | bound | measured | |", "|---|---|---|---|"]
        for bar in report["bars"]:
            bound = f"{'at most' if bar['most'] else 'at least'} {bar['bound']:g}"
            value = "not measured" if bar["value"] is None else f"{bar['value']:.3g}"
            holds = {None: "", True: "holds", False: "missed"}[bar["holds"]]
            lines.append(f"| {bar['name']} | {bound} | {value} | {holds} |")
        return "\n".join(lines)

    def section(self, report: Report, picture: str) -> str:
        """Returns the Markdown of the generated section: heading, picture and table."""
        return f"{self.heading}\n\n![{self.alt}]({picture})\n\n{self.table(report)}"

    def write(self, report: Report, picture: Path) -> None:
        """Replaces the generated section in the README."""
        made = self.section(report, picture.resolve().relative_to(self.readme.parent).as_posix())
        self.readme.write_text(self.marks.replaced(self.readme.read_text(), made))
