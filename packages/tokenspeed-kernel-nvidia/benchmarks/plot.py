"""The picture of a report that h200.py wrote: how fast the kernels are beside their peers, in three panels.

python packages/tokenspeed-kernel-nvidia/benchmarks/plot.py            # h200.json to h200.svg
python packages/tokenspeed-kernel-nvidia/benchmarks/plot.py REPORT.json --output PICTURE.png
python packages/tokenspeed-kernel-nvidia/benchmarks/plot.py --table    # the same as Markdown
python packages/tokenspeed-kernel-nvidia/benchmarks/plot.py --readme   # the picture, and picture and Markdown into the README
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

sys.path.insert(0, str(Path(__file__).parent))

from shapes import SHAPES

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
MARKS = ("<!-- measured -->", "<!-- end of measured -->")
# In the order of the bars of a shape. Ours has the only strong colour; the portable kernels are ours too, and are left out where
# they would flatten the rest.
LABELS = {
    "ours": "this package",
    "fa3": "FlashAttention-3",
    "fa4": "flash-attn-4",
    "cudnn": "cuDNN, no sinks",
    "flashinfer": "FlashInfer, no sinks",
    "triton": "portable (Triton)",
}
COLOURS = {
    "ours": "#0b62c4",
    "fa3": "#c2410c",
    "fa4": "#e0a458",
    "cudnn": "#6b8f71",
    "flashinfer": "#7e5aa8",
    "triton": "#b8bec7",
}
INK, FAINT, GRID = "#1d2229", "#5b6470", "#d9dde3"
_STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 11,
    "svg.fonttype": "none",
    "svg.hashsalt": "tokenspeed-kernel",
    "axes.unicode_minus": False,
}

# After the point, of the numbers above our bars.
_DIGITS = {"tflops": 0, "gb_per_s": 2, "ratio": 1}

Rows = Sequence[Mapping[str, Any]]
# A panel's title, the groups that it shows, what is drawn of a row and who is left out.
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


def measured(rows: Rows, groups: Sequence[str]) -> dict[str, dict[str, Mapping[str, Any]]]:
    """The rows that were timed, by shape and contestant, in the shapes' order."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {shape.name: {} for shape in SHAPES if shape.group in groups}
    for row in rows:
        if row["case"] in found and row["timing"] is not None:
            found[row["case"]][row["kernel"]] = row
    return {name: of_one for name, of_one in found.items() if of_one}


def short(name: str, groups: Sequence[str]) -> str:
    """A shape's name without what the panel says anyway."""
    group = max((group for group in groups if name.startswith(group)), key=len)
    rest = name.removeprefix(group).strip()
    if group == groups[0] and "window" not in group:
        return rest
    return f"{rest}\n{group.removeprefix(groups[0]).removeprefix('window').strip() or group}".replace("head_dim ", "d ")


def values_of(of_one: Mapping[str, Mapping[str, Any]], what: str) -> dict[str, float]:
    """What is drawn of one shape, by contestant."""
    if what == "ratio":
        if "fa3" not in of_one:
            return {}
        peer = of_one["fa3"]["timing"]["median_us"]
        return {name: peer / row["timing"]["median_us"] for name, row in of_one.items()}
    return {name: row[what] / (1e3 if what == "gb_per_s" else 1) for name, row in of_one.items()}


def _panel(axes: Axes, title: str, found: Mapping[str, Mapping[str, Mapping[str, Any]]], groups: Sequence[str], what: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, color=INK, pad=10)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, colors=FAINT)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(GRID)
    highest = 0.0
    for place, of_one in enumerate(found.values()):
        values = values_of(of_one, what)
        names = [name for name in LABELS if name in values]
        width = 0.84 / max(len(names), 1)
        for index, name in enumerate(names):
            left = place - 0.42 + index * width
            axes.add_patch(Rectangle((left + 0.06 * width, 0), 0.88 * width, values[name], color=COLOURS[name], linewidth=0))
            highest = max(highest, values[name])
            if name == "ours":
                text = f"{values[name]:.{_DIGITS[what]}f}"
                axes.text(left + width / 2, values[name], text, ha="center", va="bottom", fontsize=9, color=INK)
    axes.set_xlim(-0.6, max(len(found), 1) - 0.4)
    axes.set_ylim(0, 1.12 * highest or 1)
    axes.set_xticks(range(len(found)), [short(name, groups) for name in found], fontsize=9.5)
    if what == "ratio":
        axes.axhline(1, color=FAINT, linewidth=0.8)


@matplotlib.rc_context(_STYLE)
def draw(report: Mapping[str, Any], file: Path) -> None:
    """Draws a report into a file; its name's ending says the format."""
    figure = Figure((12, 10.5), facecolor="white")
    drawn: set[str] = set()
    for index, (title, groups, what, left_out) in enumerate(PANELS):
        rows = [row for row in report["rows"] if row["kernel"] not in left_out]
        found = measured(rows, groups)
        axes = figure.add_axes((0.055, 0.69 - 0.305 * index, 0.93, 0.195))
        _panel(axes, title, found, groups, what)
        drawn |= {name for of_one in found.values() for name in of_one}
    metadata = report["metadata"]
    figure.text(0.015, 0.978, f"Attention of GPT-OSS on one {metadata['device']}, bfloat16", fontsize=15, color=INK, va="top")
    versions = report["versions"]
    known = [name for name in LABELS if name in drawn and versions.get(name)]
    said = ", ".join(f"{LABELS[name].partition(',')[0]} {versions[name]}" for name in known)
    with_what = f"driver {metadata['driver']}, torch {metadata['torch']}; {said}".strip("; ")
    figure.text(0.015, 0.012, with_what, fontsize=8.5, color=FAINT)
    handles = [Rectangle((0, 0), 1, 1, color=COLOURS[name]) for name in LABELS if name in drawn]
    names = [LABELS[name] for name in LABELS if name in drawn]
    place: Any = {"loc": "upper left", "bbox_to_anchor": (0.008, 0.962), "ncols": len(names) or 1}
    figure.legend(handles, names, frameon=False, fontsize=10, **place)
    figure.savefig(file, dpi=110, metadata={"Date": None} if file.suffix == ".svg" else None)


def table(report: Mapping[str, Any]) -> str:
    """Markdown: the bars and what was measured of them, and one row a shape, in microseconds."""
    metadata = report["metadata"]
    names = [name for name in LABELS if any(row["kernel"] == name and row["timing"] is not None for row in report["rows"])]
    lines = [
        f"{metadata['device']}, driver {metadata['driver']}, torch {metadata['torch']}, commit {metadata['git_commit'][:12]}.",
        "",
        f"`{metadata['command']}`",
        "",
        note(report),
        "",
        "| microseconds | " + " | ".join(LABELS[name] for name in names) + " | best peer / ours |",
        "|---|" + "---|" * (len(names) + 1),
    ]
    for shape in SHAPES:
        found = measured(report["rows"], (shape.group,)).get(shape.name, {})
        times = {name: row["timing"]["median_us"] for name, row in found.items()}
        if not times:
            continue
        peers = [time for name, time in times.items() if name not in ("ours", "triton")]
        ratio = f"{min(peers) / times['ours']:.2f}" if peers and "ours" in times else ""
        cells = [_three_digits(times[name]) if name in times else "" for name in names]
        lines.append(f"| {shape.name} | {' | '.join(cells)} | {ratio} |")
    lines += ["", "| bar | asked | measured | |", "|---|---|---|---|"]
    for bar in report["bars"]:
        asked = f"{'at most' if bar['most'] else 'at least'} {bar['bound']:g}"
        value = "not measured" if bar["value"] is None else f"{bar['value']:.3g}"
        lines.append(
            f"| {bar['name']} | {asked} | {value} | {'' if bar['holds'] is None else 'holds' if bar['holds'] else 'missed'} |"
        )
    return "\n".join(lines)


def note(report: Mapping[str, Any]) -> str:
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


def section(report: Mapping[str, Any], picture: str) -> str:
    """What stands in the README between its marks."""
    return f"## Measured\n\n![{PANELS[0][0]}; {PANELS[1][0]}; {PANELS[2][0]}]({picture})\n\n{table(report)}"


def in_readme(text: str) -> str:
    """The section as a README has it; empty if it has none."""
    begin, end = (text.find(mark) for mark in MARKS)
    return text[begin + len(MARKS[0]) : end].strip() if 0 <= begin < end else ""


def with_section(text: str, made: str) -> str:
    """A README with another section; it has the first mark at least."""
    begin = text.index(MARKS[0]) + len(MARKS[0])
    end = text.find(MARKS[1])
    after = text[end:] if end >= 0 else MARKS[1] + text[begin:]
    return f"{text[:begin]}\n{made}\n{after}"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, nargs="?", default=HERE / "h200.json")
    parser.add_argument("--output", type=Path, default=HERE / "h200.svg", help="ends with .svg or .png")
    parser.add_argument("--table", action="store_true", help="print Markdown instead")
    parser.add_argument("--readme", action="store_true", help="put picture and Markdown into the package's README, too")
    given = parser.parse_args(words)
    report = json.loads(given.report.read_text())
    if given.table:
        print(table(report))
        return
    draw(report, given.output)
    if given.readme:
        picture = given.output.resolve().relative_to(README.parent).as_posix()
        README.write_text(with_section(README.read_text(), section(report, picture)))


if __name__ == "__main__":
    main()
