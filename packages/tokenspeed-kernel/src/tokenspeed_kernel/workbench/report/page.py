"""Renders benchmark reports as an HTML page, and writes the page's plots as files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenspeed_kernel.workbench.benchmark.results import Row
from tokenspeed_kernel.workbench.report import plots
from tokenspeed_kernel.workbench.report.devices import Device, Run, solution_of
from tokenspeed_kernel.workbench.report.html import rendered
from tokenspeed_kernel.workbench.report.palette import Paint, as_variables, light, series, stand_in


@dataclass(frozen=True)
class Cell:
    """A cell of a table on the page. ``value`` is the value to sort by; None to sort by the text."""

    text: str
    value: float | str | None = None
    number: bool = False
    bad: bool = False


COLUMNS = (
    "operator", "case", "kernel", "median µs", "of roofline", "TFLOP/s", "GB/s", "p10", "p90", "launch µs", "status", "run",
)  # fmt: skip
_NUMBERS = frozenset({"median µs", "p10", "p90", "TFLOP/s", "GB/s", "of roofline", "launch µs"})
# CSS classes of columns. Narrow screens hide "minor" columns. Very narrow screens also hide "spare" columns. The text of "words"
# columns may wrap.
_ROOM = dict.fromkeys(("p10", "p90", "launch µs", "run"), "minor") | dict.fromkeys(("operator", "GB/s"), "spare")
_ROOM |= {"case": "words", "kernel": "words"}


def render_page(devices: Sequence[Device], title: str) -> str:
    """Renders HTML that needs neither another file nor a network.

    Args:
        devices: the devices and their runs; at least one device.
        title: title of the page.
    """
    rows = [_table_row(device, row, run) for device in devices for row, run in device.rows()]
    columns = [name for name in COLUMNS if any(row["cells"][name].text for row in rows)]
    return rendered(
        "page.html",
        title,
        sections=[_section(device, number) for number, device in enumerate(devices)],
        columns=[{"name": name, "number": name in _NUMBERS, "room": _ROOM.get(name, "")} for name in columns],
        rows=rows,
        choices=[
            ("device", [device.name for device in devices]),
            ("operator", sorted({row["operator"] for row in rows})),
            ("solution", sorted({row["solution"] for row in rows})),
        ],
    )


def write_plots(devices: Sequence[Device], folder: Path) -> list[Path]:
    """Writes each plot as an SVG and a PNG file. Returns the files, which are named after the device and the plot.

    Raises:
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for device in devices:
        drawings = [("roofline", roofline) for roofline in _roofline(device, light, (plots.WIDE,))]
        drawings += [(f"bars-{operator}", drawing) for operator, drawing in _bars(device, light)]
        drawings += [(f"history-{operator}", drawing) for operator, drawing in _history(device, light)]
        for name, drawing in drawings:
            files = [folder / f"{_slug(device.name)}-{_slug(name)}.{ending}" for ending in ("svg", "png")]
            drawing.save(*files)
            written += files
    return written


# -- a device -----------------------------------------------------------------------------------------------------------------


def _roofline(device: Device, paint: Paint, widths: Sequence[int]) -> Iterator[plots.Drawing]:
    points = device.points()
    for width in widths if points else ():
        yield plots.roofline_plot(device.name, device.roofline, points, paint, width)


def _bars(device: Device, paint: Paint) -> Iterator[tuple[str, plots.Drawing]]:
    # A backend has one colour in all plots of a device.
    colours = {name: series(number) for number, name in enumerate(sorted({solution_of(row) for row, _ in device.rows()}))}
    for operator, cases in device.bars().items():
        yield operator, plots.bars_plot(operator, cases, colours, device.roofline is not None, paint)


def _history(device: Device, paint: Paint) -> Iterator[tuple[str, plots.Drawing]]:
    for operator, changes in device.changes().items():
        yield operator, plots.history_plot(operator, changes, device.runs, paint)


def _section(device: Device, number: int) -> dict[str, object]:
    def inline(drawing: plots.Drawing, name: str) -> str:
        return as_variables(drawing.svg(f"d{number}-{_slug(name)}-"))

    rows = device.rows()
    wrong = [row for row, _ in rows if row.timing is None]
    wide_and_narrow = _roofline(device, stand_in, (plots.WIDE, plots.NARROW))
    kernels = {operator: sorted({row.kernel for row, _ in rows if row.operator == operator}) for operator in device.bars()}
    return {
        "id": f"device-{number}",
        "name": device.name,
        "facts": _facts(device),
        "counts": f"{len(rows) - len(wrong)} kernels and cases measured"
        + f", {len(wrong)} wrong" * bool(wrong)
        + f", {device.skipped()} left out, because the kernel is not eligible for the case" * bool(device.skipped()),
        "runs": device.runs,
        "notes": device.notes(),
        "rooflines": [inline(drawing, f"roofline-{drawing.width}") for drawing in wide_and_narrow],
        "of_roofline": device.roofline is not None,
        "unplotted": len(rows) - len(wrong) - len(device.points()),
        "bars": [(name, kernels[name], inline(drawing, f"bars-{name}")) for name, drawing in _bars(device, stand_in)],
        "history": [(name, inline(drawing, f"history-{name}")) for name, drawing in _history(device, stand_in)],
        "width": plots.NARROW,
    }


def _facts(device: Device) -> list[tuple[str, str]]:
    metadata, roofline = device.newest.metadata, device.roofline
    facts = [
        ("driver", metadata.driver),
        ("PyTorch", metadata.torch),
        ("Triton", metadata.triton),
        ("Python", metadata.python),
        ("copies", f"{roofline.copy_gb_per_s / 1e3:.3g} TB/s" if roofline else ""),
        ("reads", f"{roofline.read_gb_per_s / 1e3:.3g} TB/s" if roofline else ""),
        *((f"{name} GEMM", f"{rate:.4g} TFLOP/s") for name, rate in (roofline.tflops if roofline else {}).items()),
    ]
    return [(name, value) for name, value in facts if value]


# -- the table ----------------------------------------------------------------------------------------------------------------


def _table_row(device: Device, row: Row, run: Run) -> dict[str, Any]:
    timing, share, launch = row.timing, device.share(row), row.launch
    median_us, p10_us, p90_us = (None,) * 3 if timing is None else (timing.median_us, timing.p10_us, timing.p90_us)
    detail = "; ".join(filter(None, (row.reason, *row.warnings)))
    launching = None if launch is None else launch.host_us if launch.graph_us is None else launch.event_us - launch.graph_us
    cells: tuple[Cell, ...] = (
        Cell(row.operator),
        Cell(row.case),
        Cell(row.kernel),
        _number(median_us, ".4g"),
        _number(None if share is None else share.part, ".0%", f" {share.bound}" if share else ""),
        _number(row.tflops, ".4g"),
        _number(row.gb_per_s, ".4g"),
        _number(p10_us, ".4g"),
        _number(p90_us, ".4g"),
        _number(launching, ".3g"),
        Cell(row.status + f": {detail}" * bool(detail), bad=timing is None),
        Cell(run.label, run.report.metadata.date),
    )
    return {
        "device": device.name,
        "operator": row.operator,
        "solution": solution_of(row),
        "cells": dict(zip(COLUMNS, cells, strict=True)),
    }


def _number(value: float | None, how: str, unit: str = "") -> Cell:
    if value is None:
        return Cell("", "", number=True)
    text = f"{value:{how}}"
    return Cell((f"{value:.0f}" if "e+" in text else text) + unit, value, number=True)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
