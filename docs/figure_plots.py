"""Draws the plots of the page ``figures.md`` from the committed benchmark reports. `hooks.py` inserts the plots into the page.

The plots have the style and the colours of `tokenspeed-kernel report`. `stylesheet` returns the colours of both themes as CSS
variables.
"""

from __future__ import annotations

import functools
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from tokenspeed_kernel.workbench.benchmark.results import Report, Row, load_report
from tokenspeed_kernel.workbench.benchmark.roofline import share_of
from tokenspeed_kernel.workbench.benchmark.timing import Timing
from tokenspeed_kernel.workbench.report.devices import Bar, CaseBars, Device, Run, solution_of
from tokenspeed_kernel.workbench.report.palette import COLOURS, as_variables, series, stand_in, style
from tokenspeed_kernel.workbench.report.plots import (
    NARROW,
    STYLE,
    WIDE,
    Drawing,
    bars_plot,
    for_page,
    name_axis,
    place,
    roofline_plot,
)
from tokenspeed_kernel_base.cases import Cost

sys.path.append(str(Path(__file__).parents[1] / "packages/tokenspeed-kernel/benchmarks"))

import table
from backends_table import BACKENDS

PACKAGES = Path(__file__).parents[1] / "packages"
CORE, AMD = PACKAGES / "tokenspeed-kernel/benchmarks", PACKAGES / "tokenspeed-kernel-amd/benchmarks"
# The GPUs that have a report, ``<GPU>_families.json``.
GPUS = ("h200", "h100")
# The dtypes whose rooflines are drawn. The rooflines of other dtypes are close to one of these.
_ROOFS = ("bfloat16", "float8_e4m3fn")
# The roofline plot omits calls with lower rates, such as calls that move indices. They would compress the rest of the plot.
_LOWEST_TFLOPS = 0.01
# Number of calls that an operator's card shows: those that take longest.
_CALLS = 4


def stylesheet() -> str:
    """CSS with the plots' colours in the site's bright and dark themes."""
    bright, dark = style()
    return f'[data-md-color-scheme="default"] {{ {bright} }}\n[data-md-color-scheme="slate"] {{ {dark} }}\n'


# -- reports ----------------------------------------------------------------------------------------------------------------------


class Families:
    """A report of `measure_families.py`, with the operators' current names and each row's fraction of the roofline.

    Attributes:
        device: the rows that were timed.
        baselines: the names of the baselines, by the keys of their rows.
    """

    def __init__(self, file: Path) -> None:
        report = load_report(file)
        named = [table.renamed({"operator": row.operator, "case": row.case}) for row in report.rows]
        rows = [replace(row, **names) for row, names in zip(report.rows, named, strict=True)]
        flags = [row["peer"] for row in json.loads(file.read_text())["rows"]]
        self.baselines = {row.key: solution_of(row) for row, flag in zip(rows, flags, strict=True) if flag}
        timed = tuple(_with_share(row, report) for row in rows if row.timing is not None)
        self.device = Device(report.metadata.device, (Run(file.name, replace(report, rows=timed)),))

    def ours(self) -> Device:
        """The fastest of this project's kernels for each case."""
        rows = [bar.row for case in self.cases() for bar in self._of(case, False)[:1]]
        report = replace(self.device.newest, rows=tuple(rows))
        return replace(self.device, runs=(replace(self.device.runs[0], report=report),))

    def cases(self) -> list[CaseBars]:
        return [case for cases in self.device.bars().values() for case in cases]

    def _of(self, case: CaseBars, baselines: bool) -> list[Bar]:
        """The bars of a case for this project's kernels, or for the baselines; the fastest first."""
        return sorted((bar for bar in case.bars if (bar.row.key in self.baselines) == baselines), key=lambda bar: _us(bar.row))

    def compared(self) -> dict[str, list[tuple[CaseBars, float]]]:
        """By operator: the cases with a baseline, each with the speed of our fastest kernel relative to the fastest baseline."""
        found: dict[str, list[tuple[CaseBars, float]]] = {}
        for case in self.cases():
            ours, baselines = self._of(case, False), self._of(case, True)
            if ours and baselines:
                best = replace(ours[0], solution=BACKENDS[ours[0].solution])
                kept = replace(case, bars=(best, *baselines))
                found.setdefault(case.operator, []).append((kept, _us(baselines[0].row) / _us(ours[0].row)))
        return found


@functools.cache
def _families(gpu: str) -> Families:
    return Families(CORE / f"{gpu}_families.json")


def _us(row: Row) -> float:
    return math.inf if row.timing is None else row.timing.median_us


def _with_share(row: Row, report: Report) -> Row:
    """Returns the row with its fraction of the roofline. The peak depends on the operands' dtype, which is read from the case's
    name."""
    if report.roofline is None or row.tflops is None or row.gb_per_s is None:
        return row
    cost = Cost(row.tflops * 1e6 * _us(row), row.gb_per_s * 1e3 * _us(row))
    dtype = torch.float8_e4m3fn if re.search(r"fp8(?! cache)", row.case) else torch.bfloat16
    return replace(row, share=share_of(cost, _us(row), [dtype], report.roofline))


def devices_table() -> str:
    """A Markdown table of the measured GPUs, with the rates that plain PyTorch reaches on them, and the software versions."""
    rows = ["| GPU | copy | GEMM, bf16 | GEMM, fp8 | software |", "|---|--:|--:|--:|---|"]
    for gpu in GPUS:
        report = _families(gpu).device.newest
        metadata, peaks = report.metadata, report.roofline
        assert peaks is not None
        rates = [
            f"{peaks.copy_gb_per_s / 1e3:.2f} TB/s",
            *(f"{peaks.tflops[name]:.0f} TFLOP/s" for name in ("bfloat16", "float8_e4m3fn")),
        ]
        software = f"torch {metadata.torch}, Triton {metadata.triton}, driver {metadata.driver}"
        rows.append(f"| {metadata.device} | {' | '.join(rates)} | {software} |")
    return "\n".join(rows)


# -- plots ------------------------------------------------------------------------------------------------------------------------


def roofline(gpu: str) -> str:
    """Plots the calls of all operators on a GPU's roofline, in a wide drawing and in a narrow drawing for phones."""
    device = _families(gpu).ours()
    roofs = device.roofline and replace(device.roofline, tflops={name: device.roofline.tflops[name] for name in _ROOFS})
    points = [point for point in device.points() if point.tflops >= _LOWEST_TFLOPS]
    drawings = [roofline_plot(device.name, roofs, points, stand_in, width) for width in (WIDE, NARROW)]
    wide, narrow = (_inline(drawing, f"{gpu}-roofline-{drawing.width}") for drawing in drawings)
    return f'<figure class="plot roofline"><div class="wide">{wide}</div><div class="narrow">{narrow}</div></figure>'


def speeds() -> str:
    """One plot for each GPU: the speed of each operator's calls relative to the fastest baseline."""
    return _cards(_card(_families(gpu).device.name, _speeds_plot(_families(gpu)), f"{gpu}-speeds") for gpu in GPUS)


@matplotlib.rc_context(STYLE)
def _speeds_plot(found: Families) -> Drawing:
    step, top, bottom = 22, 30, 26
    ratios = {name: [ratio for _, ratio in cases] for name, cases in found.compared().items()}
    ordered = sorted(ratios, key=lambda name: statistics.geometric_mean(ratios[name]))
    height = top + bottom + step * len(ordered)
    drawing = Drawing(f"Speed relative to the fastest baseline on {found.device.name}", NARROW, height, stand_in)
    axes = drawing.axes(190, top, 12, bottom)
    axes.set_xscale("log")
    every = [ratio for of_one in ratios.values() for ratio in of_one]
    axes.set_xlim(min(every) / 1.15, max(every) * 1.15)
    axes.set_ylim(-0.6, len(ordered) - 0.4)
    axes.axvspan(1, axes.get_xlim()[1], color=stand_in("grid"), alpha=0.35, linewidth=0, zorder=0)
    axes.axvline(1, color=stand_in("faint"), linewidth=1)
    for line, name in enumerate(ordered):
        mean = statistics.geometric_mean(ratios[name])
        axes.hlines(line, min(1, mean), max(1, mean), color=stand_in(series(0 if mean >= 1 else 1)), linewidth=5, alpha=0.45)
        for case, ratio in found.compared()[name]:
            hint = f"{name}, {case.case}: {ratio:.2f} times as fast as {case.bars[1].solution}"
            colour = stand_in(series(0 if ratio >= 1 else 1))
            axes.plot([ratio], [line], "o", markersize=6, color=colour, alpha=0.9, markeredgewidth=0, gid=drawing.hint(hint))
    axes.set_yticks(range(len(ordered)), [name.partition(".")[2] for name in ordered])
    axes.tick_params(axis="y", colors=stand_in("ink"))
    axes.xaxis.set_major_locator(
        FixedLocator([part for part in (0.25, 0.5, 1, 2, 4, 8, 16) if min(every) / 1.15 < part < max(every) * 1.15])
    )
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.text(1.04, len(ordered) - 0.35, "faster →", fontsize=11, color=stand_in("faint"), va="bottom")
    axes.text(0.96, len(ordered) - 0.35, "← slower", fontsize=11, color=stand_in("faint"), va="bottom", ha="right")
    return drawing


def operators(gpu: str) -> str:
    """One card per operator: its longest calls. Each call has a bar for this project's fastest kernel and for each baseline, as
    fractions of the roofline."""
    found, cards = _families(gpu), []
    colours = dict.fromkeys(BACKENDS.values(), series(0)) | {name: series(1) for name in found.baselines.values()}
    for name, compared in sorted(found.compared().items()):
        longest = sorted(compared, key=lambda pair: -_us(pair[0].bars[0].row))[:_CALLS]
        drawing = bars_plot(name, [case for case, _ in longest], colours, of_roofline=True, paint=stand_in)
        cards.append(_card(name.partition(".")[2], drawing, f"{gpu}-{name}"))
    return _cards(cards)


def predicted() -> str:
    """Two cards with the times that the timing model predicts for an MI355X. Bars are speeds, as fractions of the faster
    implementation's speed."""
    cards = []
    for report, title in (("timing_model", "attention"), ("timing_model_moe", "moe_apply")):
        cases = []
        for row in json.loads((AMD / f"{report}.json").read_text())["rows"]:
            if not row.get("bar", True):
                continue  # the baseline of this shape was measured by others, so there is no acceptance bar
            name = row["case"] if "case" in row else f"{row['tokens']} token{'s' * (row['tokens'] > 1)}"
            times = {"this package": row["ours"]["us"], "baseline": row["peer"]["us"]}
            bars = (Bar(who, _timed(who, title, name, us), min(times.values()) / us) for who, us in times.items())
            cases.append(CaseBars(title, name, tuple(bars)))
        colours = {"this package": series(0), "baseline": series(1)}
        drawing = bars_plot(title, cases, colours, of_roofline=False, paint=stand_in)
        cards.append(_card(title, drawing, report))
    return _cards(cards)


def between_gpus() -> str:
    """One card per operator that communicates between GPUs: times over the number of rows, by implementation."""
    report = json.loads((CORE / "h200_all_reduce.json").read_text())
    names = dict.fromkeys(row["operator"] for row in report["rows"])
    rows = {name: [row for row in report["rows"] if row["operator"] == name and row["us"]] for name in names}
    return _cards([_card(name, _lines_plot(name, of_one), f"between-{name}") for name, of_one in rows.items()])


@matplotlib.rc_context(STYLE)
def _lines_plot(name: str, rows: Sequence[Mapping[str, Any]]) -> Drawing:
    """Plot of microseconds over the number of rows. The kernel of this project that the operator selects has the thick line."""
    times: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        times.setdefault(row["contestant"], []).append((row["rows"], row["us"]))
    drawing = Drawing(f"{name}: microseconds over rows", NARROW, 250 + 18 * len(times), stand_in)
    axes = drawing.axes(46, 24, 14, 44 + 18 * len(times))
    axes.set_xscale("log", base=4)
    axes.set_yscale("log")
    axes.grid(which="major", color=stand_in("grid"), linewidth=0.6)
    axes.set_xticks([size for size, _ in max(times.values(), key=len)])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())
    axes.set_xlabel("rows", fontsize=11, color=stand_in("faint"))
    name_axis(axes, "µs", stand_in)
    for number, (who, points) in enumerate(times.items()):
        style = {"color": stand_in("ink" if who == "chosen" else series(number)), "linewidth": 3.0 if who == "chosen" else 1.4}
        hint = drawing.hint(f"{who}: " + ", ".join(f"{us:.4g} µs for {size}" for size, us in points))
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, gid=hint, zorder=1 if who == "chosen" else 2, **style)
        place(drawing, 14, 10 + 18 * (len(times) - 1 - number), who, **style)
    return drawing


def _timed(kernel: str, operator: str, case: str, us: float) -> Row:
    return Row(kernel, operator, case, "predicted", timing=Timing(us, us, us, 1))


def drawn(folder: str) -> str:
    """The drawings in a package's README, in the site's colours. Phones scroll the drawings, because they are wide."""
    readme = PACKAGES / folder / "README.md"
    figures = []
    for number, (title, path) in enumerate(re.findall(r"!\[(.*?)\]\(([\w/]*\.svg)\)", readme.read_text())):
        svg = for_page((readme.parent / path).read_text(), title, f"{folder}-{number}-")
        for name, (bright, _) in COLOURS.items():
            svg = svg.replace(bright, f"var(--{name})")
        figures.append(f'<figure class="plot"><div class="scroll">{svg}</div></figure>')
    return "".join(figures)


def _card(heading: str, drawing: Drawing, prefix: str) -> str:
    return f'<figure class="card"><figcaption><code>{escape(heading)}</code></figcaption>{_inline(drawing, prefix)}</figure>'


def _cards(cards: Iterable[str]) -> str:
    return f'<div class="plot cards">{"".join(cards)}</div>'


def _inline(drawing: Drawing, prefix: str) -> str:
    return as_variables(drawing.svg(re.sub(r"\W+", "-", prefix) + "-"))


# A plot's name in a page's comment ``<!-- plot: NAME -->``, and the function that draws the plot.
PLOTS: Mapping[str, Callable[[], str]] = {
    "speeds": speeds,
    **{f"{kind.__name__} {gpu}": functools.partial(kind, gpu) for kind in (roofline, operators) for gpu in GPUS},
    "drawings of NVIDIA": functools.partial(drawn, "tokenspeed-kernel-nvidia"),
    "predicted": predicted,
    "between GPUs": between_gpus,
}
