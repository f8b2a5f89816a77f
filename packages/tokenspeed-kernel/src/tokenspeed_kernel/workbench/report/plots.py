"""Draws the plots of a report: kernels below the roofline, bars that compare backends, and times over commits.

Sizes are in pixels of the unscaled drawing. A drawing that is 380 pixels wide is readable on a phone; wide pages show several
drawings side by side.
"""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from tokenspeed_kernel.workbench.benchmark.compare import THRESHOLD
from tokenspeed_kernel.workbench.benchmark.results import Row
from tokenspeed_kernel.workbench.benchmark.roofline import Roofline
from tokenspeed_kernel.workbench.report.devices import Bar, CaseBars, Change, Point, Run
from tokenspeed_kernel.workbench.report.palette import SERIES, Paint, series

NARROW, WIDE = 380, 900
_SMALL, _PLAIN = 11.0, 12.0
_MARKERS = "osD^vPX<>"
# A history plot names at most this many kernels and cases, those whose times changed most.
_NAMED_CHANGES = 5
# matplotlib measures in points; at this resolution a pixel is a point.
_DPI = 72
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": _PLAIN,
    "svg.fonttype": "none",
    "svg.hashsalt": "tokenspeed-kernel",
    "text.parse_math": False,
    "axes.unicode_minus": False,
}

_SVG = "http://www.w3.org/2000/svg"
_XLINK = "{http://www.w3.org/1999/xlink}href"


class Drawing:
    """A matplotlib figure, and the tooltips of its parts.

    Attributes:
        title: description of the figure, also for screen readers.
        width, height: size in pixels.
    """

    def __init__(self, title: str, width: float, height: float, paint: Paint) -> None:
        self.title, self.width, self.height, self.paint = title, width, height, paint
        self.figure = Figure((width / _DPI, height / _DPI), dpi=_DPI, facecolor=paint("paper"))
        self.hints: dict[str, str] = {}

    def axes(self, left: float, top: float, right: float, bottom: float) -> Axes:
        """Adds axes to the figure. The arguments are the margins between the axes and the figure's edges, in pixels."""
        size = (self.width - left - right) / self.width, (self.height - top - bottom) / self.height
        axes = self.figure.add_axes((left / self.width, bottom / self.height, *size), facecolor="none")
        axes.tick_params(which="both", colors=self.paint("faint"), labelsize=_SMALL, length=0)
        axes.set_axisbelow(True)
        for side, spine in axes.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(self.paint("grid"))
        return axes

    def hint(self, text: str) -> str:
        """Registers a tooltip and returns its id. A part of the drawing whose ``gid`` is this id shows the tooltip."""
        name = f"hint-{len(self.hints)}"
        self.hints[name] = text
        return name

    @matplotlib.rc_context(STYLE)
    def svg(self, prefix: str) -> str:
        """Returns an ``svg`` element for an HTML page, as wide as the element's container. All ids in it begin with ``prefix``, so
        that they are unique on the page."""
        file = io.StringIO()
        self.figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        return for_page(file.getvalue(), self.title, prefix, self.hints)

    @matplotlib.rc_context(STYLE)
    def save(self, *files: Path) -> None:
        """Saves the figure in each file, with the title above it. A file's extension selects SVG, or PNG at twice the size."""
        above: dict[str, Any] = {"va": "bottom", "fontsize": 1.15 * _PLAIN, "fontweight": "bold", "color": self.paint("ink")}
        title = self.figure.text(8 / self.width, 1 + 8 / self.height, self.title, **above)
        for file in files:
            metadata = {"Date": None} if file.suffix == ".svg" else {}
            self.figure.savefig(file, dpi=2 * _DPI, metadata=metadata, bbox_inches="tight", pad_inches=10 / _DPI)
        title.remove()


def for_page(drawn: str, title: str, prefix: str, hints: Mapping[str, str] | None = None) -> str:
    """Returns matplotlib's SVG file as an ``svg`` element for an HTML page, as wide as the element's container.

    Args:
        drawn: the text of the SVG file.
        title: description of the drawing, for screen readers.
        prefix: a prefix for all ids in the element, to make them unique on the page.
        hints: the tooltips of the drawing's parts, by the ids of the parts.
    """
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK[1:-5])
    root, hints = ElementTree.fromstring(drawn), hints or {}
    for element in root.iter():
        name = element.get("id", "")
        if name in hints:
            hint = ElementTree.Element(f"{{{_SVG}}}title")
            hint.text = hints[name]
            element.insert(0, hint)
        _rename(element, prefix)
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    for metadata in root.findall(f"{{{_SVG}}}metadata"):
        root.remove(metadata)
    root.set("role", "img")
    root.set("aria-label", title)
    return ElementTree.tostring(root, encoding="unicode")


def _rename(element: ElementTree.Element, prefix: str) -> None:
    """Prefixes an SVG element's own id, and the ids of other elements to which its attributes refer."""
    for key, value in element.attrib.items():
        if key == "id":
            element.set(key, prefix + value)
        elif key == _XLINK and value.startswith("#"):
            element.set(key, f"#{prefix}{value[1:]}")
        elif "url(#" in value:
            element.set(key, value.replace("url(#", f"url(#{prefix}"))


# -- roofline -----------------------------------------------------------------------------------------------------------------


@matplotlib.rc_context(STYLE)
def roofline_plot(device: str, roofline: Roofline | None, points: Sequence[Point], paint: Paint, width: int = WIDE) -> Drawing:
    """Plots TFLOP/s over arithmetic intensity on logarithmic scales, with the device's measured roofline.

    Args:
        device: the device's name.
        roofline: the measured roofline; None to show only the points.
        points: the kernels and cases to show, at least one; each family of operators has its own colour and marker.
    """
    families = list(dict.fromkeys(_family(point.row) for point in points))
    columns = max(1, width // 130)
    legend = 20 * math.ceil(len(families) / columns)
    drawing = Drawing(f"Roofline of {device} with {len(points)} kernels and cases", width, 0.42 * width + 190 + legend, paint)
    axes = drawing.axes(52, 26, 14, 52 + legend)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(which="major", color=paint("grid"), linewidth=0.6)
    left, right = _span(point.intensity for point in points)
    bottom, top = _span(point.tflops for point in points)
    if roofline is not None:
        peaks = [rate for rate in roofline.tflops.values() if rate > 0]
        right = max([right, *(6e3 * rate / roofline.memory_gb_per_s for rate in peaks)])
        top = max([top, *(1.8 * rate for rate in peaks)])
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)
    if roofline is not None:
        _draw_roofs(drawing, axes, roofline)
    for point in points:
        number = families.index(_family(point.row))
        axes.plot(
            [point.intensity], [point.tflops], **_mark(number, paint), clip_on=True, linestyle="",
            markeredgecolor=paint("paper"), markeredgewidth=0.7,
            gid=drawing.hint(f"{point.row.operator}, {point.row.case}\n{_rates(point)}"),
        )  # fmt: skip
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        axis.set_major_locator(LogLocator(subs=(1,) if high / low > 200 else (1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("FLOP per byte", fontsize=_SMALL, color=paint("faint"))
    name_axis(axes, "TFLOP/s", paint)
    for number, family in enumerate(families):
        x = 14 + number % columns * (width - 20) / columns
        y = 12 + (legend - 20) - 20 * (number // columns)
        place(drawing, x, y, family, **_mark(number, paint))
    return drawing


def _mark(number: int, paint: Paint) -> dict[str, Any]:
    """Returns the style of the points of a family of operators. Colours repeat when all are used, with other markers."""
    marker = _MARKERS[(number + number // len(SERIES)) % len(_MARKERS)]
    return {"marker": marker, "markersize": 6.5, "color": paint(series(number))}


def _draw_roofs(drawing: Drawing, axes: Axes, roofline: Roofline) -> None:
    paint, memory = drawing.paint, roofline.memory_gb_per_s / 1e3
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    rates = sorted(((rate, name) for name, rate in roofline.tflops.items() if rate > 0), reverse=True)
    highest = rates[0][0] if rates else top
    ridge = min(highest / memory, right)
    axes.plot([left, ridge], [memory * left, memory * ridge], color=paint("ink"), linewidth=1.4)
    box = axes.get_position()
    per_decade = [
        box.height * drawing.height / math.log10(top / bottom),
        box.width * drawing.width / math.log10(right / left),
    ]
    begin = max(left, bottom / memory)
    at = begin * (ridge / begin) ** 0.5
    text = axes.text(
        at, memory * at * 1.12, f"{memory:.3g} TB/s", rotation=math.degrees(math.atan2(*per_decade)), rotation_mode="anchor",
        ha="center", va="bottom", fontsize=_SMALL, color=paint("ink"),
    )  # fmt: skip
    text.set(gid="roof-memory", zorder=4)
    for group in _alike(rates):
        rate, names = group[0][0], ", ".join(name for _, name in group)
        axes.plot([rate / memory, right], [rate, rate], color=paint("ink"), linewidth=1.4 if rate == highest else 0.8)
        text = axes.text(
            right, rate * 1.05, f"{names} {_digits(rate)}", ha="right", va="bottom", fontsize=_SMALL, color=paint("ink")
        )
        text.set(gid=f"roof-{rate:g}", zorder=4)


def _alike(rates: Sequence[tuple[float, str]]) -> list[list[tuple[float, str]]]:
    """Groups (TFLOP/s, dtype) pairs, the highest first, whose lines and labels in the plot would overlap."""
    groups: list[list[tuple[float, str]]] = []
    for rate in rates:
        if groups and rate[0] > 0.75 * groups[-1][0][0]:
            groups[-1].append(rate)
        else:
            groups.append([rate])
    return groups


def _rates(point: Point) -> str:
    timing, row = point.row.timing, point.row
    time = f"{_time(timing.median_us)}, " if timing is not None else ""
    return f"{row.kernel}: {time}{_digits(point.tflops)} TFLOP/s, {_digits(row.gb_per_s or 0)} GB/s"


def _family(row: Row) -> str:
    return row.operator.partition(".")[0]


def _span(values: Iterable[float]) -> tuple[float, float]:
    """Returns a nonempty range for a logarithmic axis: from below the smallest positive value to above the largest value."""
    listed = [value for value in values if value > 0] or [1.0]
    return min(listed) / 1.6, max(listed) * 1.6


# -- bars ---------------------------------------------------------------------------------------------------------------------

_NAME_LINE, _BAR_LINE, _GAP = 17, 15, 9


@matplotlib.rc_context(STYLE)
def bars_plot(operator: str, cases: Sequence[CaseBars], colours: Mapping[str, str], of_roofline: bool, paint: Paint) -> Drawing:
    """Plots a bar for each backend on each case of an operator: the fraction of the roofline, or of the fastest kernel's speed.

    Args:
        operator: ``"family.mode"``, for the title.
        cases: the operator's cases with their bars; at least one case.
        colours: the name of each backend's colour.
        of_roofline: whether the bars are fractions of the roofline rather than of the fastest kernel's speed.
        paint: maps the names of colours to colours.
    """
    there = list(dict.fromkeys(bar.solution for case in cases for bar in case.bars))
    height = sum(_NAME_LINE + _BAR_LINE * len(case.bars) + _GAP for case in cases) + 26
    drawing = Drawing(f"{operator}: solutions on {len(cases)} cases", NARROW, height, paint)
    axes = drawing.axes(4, 0, 4, 0)
    most = max([1.0, *(bar.part for case in cases for bar in case.bars if bar.part is not None)])
    # The space to the right of the bars is for their values.
    room = 0.5 if len(there) == 1 else 0.42
    axes.set_xlim(0, most / room)
    axes.set_ylim(height, 0)
    axes.set_axis_off()
    ends = "100% of the roofline" if of_roofline else "100% of the fastest's speed"
    for part, text, side in ((0, "0", "left"), (0.5, "50%", "center"), (1, ends, "left")):
        axes.text(part, height - 10, text, ha=side, va="center", fontsize=_SMALL, color=paint("faint"))
    axes.vlines([0.5, 1], 0, height - 22, color=paint("grid"), linewidth=0.8, zorder=0)
    y = 0.0
    for case in cases:
        axes.text(0, y + 10, _short(case.case, 54), va="center", fontsize=_PLAIN, color=paint("ink"), gid=drawing.hint(case.case))
        y += _NAME_LINE
        for bar in case.bars:
            _draw_bar(drawing, axes, bar, y + _BAR_LINE / 2, paint(colours[bar.solution]), len(there) > 1)
            y += _BAR_LINE
        y += _GAP
    return drawing


def _draw_bar(drawing: Drawing, axes: Axes, bar: Bar, y: float, colour: str, named: bool) -> None:
    timing, paint = bar.row.timing, drawing.paint
    name = f"{_short(bar.solution, 18)} " * named
    if timing is None:
        said = f"{bar.row.status}: {bar.row.reason}" if bar.row.reason else bar.row.status
        text = axes.text(0.02, y, _short(name + said, 56), va="center", fontsize=_SMALL, color=paint("bad"))
        text.set_gid(drawing.hint(f"{bar.row.kernel}: {said}"))
        return
    part = bar.part or 0.0
    hint = drawing.hint(f"{bar.row.kernel}: {_time(timing.median_us)}" + f", {bar.part:.0%}" * (bar.part is not None))
    axes.barh(y, part, height=_BAR_LINE - 4, color=colour, linewidth=0)[0].set_gid(hint)
    share = "" if bar.part is None else f" · {bar.part:.0%}"
    step = 6 * axes.get_xlim()[1] / drawing.width
    axes.text(part + step, y, f"{name}{_time(timing.median_us)}{share}", va="center", fontsize=_SMALL, color=paint("ink"))


# -- history ------------------------------------------------------------------------------------------------------------------


@matplotlib.rc_context(STYLE)
def history_plot(operator: str, changes: Sequence[Change], runs: Sequence[Run], paint: Paint) -> Drawing:
    """Plots the median times of an operator's kernels and cases over runs, each divided by its first median.

    The kernels and cases with the largest changes are named. The thick line is the geometric mean of all.
    """
    by_change = sorted(changes, key=lambda change: -abs(math.log(change.last)))
    named = [change for change in by_change if abs(math.log(change.last)) > math.log1p(THRESHOLD)][:_NAMED_CHANGES]
    lines = len(named) + 1
    drawing = Drawing(f"{operator}: times over {len(runs)} runs", NARROW, 200 + 17 * lines, paint)
    axes = drawing.axes(46, 24, 24, 34 + 17 * lines)
    axes.set_yscale("log", base=2)
    axes.grid(axis="y", color=paint("grid"), linewidth=0.6)
    places = range(len(runs))
    axes.axhspan(1 / (1 + THRESHOLD), 1 + THRESHOLD, color=paint("grid"), alpha=0.5, linewidth=0, zorder=0)
    for change in by_change[::-1]:
        known = [(place, ratio) for place, ratio in zip(places, change.ratios, strict=True) if ratio is not None]
        style: dict[str, Any] = {"color": paint("faint"), "alpha": 0.45, "linewidth": 0.8}
        if change in named:
            style = {"color": paint(series(named.index(change))), "linewidth": 1.6}
        said = f"{change.kernel}, {change.case}: {_ratio(change.last)}"
        axes.plot(*zip(*known, strict=True), marker="o", markersize=3, gid=drawing.hint(said), **style)
    means = [_mean(change.ratios[place] for change in changes) for place in places]
    axes.plot(*zip(*[(p, m) for p, m in zip(places, means, strict=True) if m], strict=True), color=paint("ink"), linewidth=2.4)
    low, high = axes.get_ylim()
    # The axis covers at least +-15%, so that noise does not fill the plot.
    axes.set_ylim(min(low, 1 / 1.15), max(high, 1.15))
    axes.set_xlim(-0.2, len(runs) - 0.8)
    every = math.ceil(len(runs) / 5)
    axes.set_xticks([*places][::-1][::every][::-1], [run.label for run in runs][::-1][::every][::-1])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    if axes.get_ylim()[1] / axes.get_ylim()[0] < 4:
        axes.set_yticks([tick for tick in (0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.4, 1.6) if low <= tick <= high or 0.87 < tick < 1.15])
    name_axis(axes, "time, first = 1", paint)
    last = next(mean for mean in reversed(means) if mean)
    place(
        drawing, 14, 10 + 17 * (lines - 1), f"{_ratio(last)}  geometric mean of {len(changes)}", color=paint("ink"), linewidth=2.4
    )
    for number, change in enumerate(named):
        text = f"{_ratio(change.last)}  {_short(change.kernel, 22)}, {_short(change.case, 24)}"
        place(drawing, 14, 10 + 17 * (lines - 2 - number), text, color=paint(series(number)), linewidth=1.6)
    return drawing


def _mean(ratios: Iterable[float | None]) -> float | None:
    known = [ratio for ratio in ratios if ratio is not None]
    return statistics.geometric_mean(known) if known else None


# -- small things -------------------------------------------------------------------------------------------------------------


def name_axis(axes: Axes, name: str, paint: Paint) -> None:
    """Adds the label of the vertical axis above the axis. Beside the axis, long tick labels would overlap the label."""
    axes.annotate(name, (0, 1), (-32, 8), "axes fraction", "offset points", fontsize=_SMALL, color=paint("faint"))


def place(drawing: Drawing, x: float, y: float, text: str, **style: Any) -> None:
    """Adds an item to the drawing's legend: a marker or a short line, and its text. ``x`` and ``y`` are pixels from the drawing's
    lower left corner."""
    across = [x] if "marker" in style else [x - 6, x + 8]
    line = Line2D(
        [each / drawing.width for each in across], [y / drawing.height] * len(across), transform=drawing.figure.transFigure, **style
    )
    drawing.figure.add_artist(line)
    drawing.figure.text(
        (x + 12) / drawing.width, y / drawing.height, text, va="center_baseline", fontsize=_SMALL, color=drawing.paint("ink")
    )


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"


def _time(time_us: float) -> str:
    return f"{_digits(time_us / 1e3)} ms" if time_us >= 1e3 else f"{_digits(time_us)} µs"


def _digits(value: float) -> str:
    """Formats a number with three significant digits; from 1000 on, with all integer digits."""
    return f"{value:.0f}" if value >= 1e3 else f"{value:.3g}"


def _ratio(ratio: float) -> str:
    return f"{ratio:.2f} ×"
