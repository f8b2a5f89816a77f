"""Generates the tables of the documentation site from the reports in this folder.

python packages/tokenspeed-kernel/benchmarks/table.py    # prints them
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from tokenspeed_kernel_base.ops.quantization.aliases import ALIASES

HERE = Path(__file__).parent

# Tables show TFLOP/s for kernels that may be compute-bound, whose names begin with one of these. All other kernels are
# memory-bound.
COMPUTING = ("triton_mha_prefill", "triton_mha_extend", "triton_mla", "triton_moe_apply", "triton_mm", "triton_bmm")
# Kernels, each with a pattern of cases. Tables leave out a kernel's rows for these cases, because selection prefers another kernel:
# weights prepared as MXFP4 have a separate kernel, and dense GEMMs run in PyTorch.
ELSEWHERE = (
    ("triton_moe_apply", r"^gpt-oss-120b (decode|prefill)(?!.*bfloat16)"),
    ("triton_mm_dense", ""),
    ("triton_bmm_dense", ""),
)
# Tables leave out cases that take less than SHORTEST_US microseconds, because such cases test correctness, not speed. Calls of a
# decode step, whose names match DECODING, are shown nevertheless.
SHORTEST_US, DECODING = 20.0, r"decode (1|4|64)\b|64 rows of 2880|full layer 1 x 1024|sliding layer 64 x"


def kernels(report: dict[str, Any]) -> str:
    """Returns the Markdown for a report of ``bench``: the device, the command, and a table per family of operators. The tables have
    one row per case that is large or is a call of a decode step."""
    metadata, roofline = report["metadata"], report["roofline"]
    driver = f"driver {metadata['driver']}, " if metadata["driver"] else ""
    copy, read = roofline["copy_gb_per_s"] / 1e3, roofline["read_gb_per_s"] / 1e3
    bf16_tflops = (
        roofline["bf16_tflops"] if "bf16_tflops" in roofline else roofline["tflops"]["bfloat16"]
    )  # reports before format 2 have the key bf16_tflops
    lines = [
        f"{metadata['device']}, {driver}torch {metadata['torch']}, Triton {metadata['triton']}. It copies {copy:.2f} TB/s, reads "
        f"{read:.2f} TB/s and multiplies bfloat16 matrices at {bf16_tflops:.0f} TFLOP/s. Medians, cold caches, in a "
        "CUDA graph; every result was checked first.",
        "",
        f"`{metadata['command']}`",
    ]
    family = ""
    for row in sorted(report["rows"], key=lambda row: row["operator"]):
        if row["timing"] is None or not _shown(row):
            continue
        if row["operator"].partition(".")[0] != family:
            family = row["operator"].partition(".")[0]
            lines += ["", f"### {family}", "", "| kernel | case | µs | TFLOP/s | TB/s | of copy |", "|---|---|--:|--:|--:|--:|"]
        computes = row["kernel"].startswith(COMPUTING)
        tflops = f"{row['tflops']:.0f}" if computes and row["tflops"] >= 1 else ""
        of_copy = row["gb_per_s"] / roofline["copy_gb_per_s"]
        lines.append(
            f"| `{row['kernel']}` | {row['case']} | {_three_digits(row['timing']['median_us'])} | {tflops} | "
            f"{row['gb_per_s'] / 1e3:.2f} | {of_copy:.0%} |"
        )
    return "\n".join(lines)


def _shown(row: dict[str, Any]) -> bool:
    if any(row["kernel"] == kernel and re.search(pattern, row["case"]) for kernel, pattern in ELSEWHERE):
        return False
    return row["timing"]["median_us"] >= SHORTEST_US or bool(re.search(DECODING, row["case"]))


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def calls(report: dict[str, Any]) -> str:
    """Returns the Markdown for a report of ``dispatch.py``: how much longer a public call takes than the kernel, and how long
    importing the package takes."""
    metadata, rows = report["metadata"], report["overhead"]
    once = [row["new_description_ns"] / 1e3 for row in rows.values()]
    lines = [
        f"{metadata['device']}, torch {metadata['torch']}, Python {metadata['python']}; every tensor on the CPU.",
        "",
        f"`{metadata['command']}`",
        "",
        "| call | nanoseconds over the kernel | of which `bind` saves |",
        "|---|--:|--:|",
        *(f"| {name} | {row['over_kernel_ns']:.0f} | {row['over_bound_ns']:.0f} |" for name, row in rows.items()),
        "",
        f"The first call of a description, of other shapes say, is checked and decided from the start: {min(once):.0f} to "
        f"{max(once):.0f} µs, once. Importing the package adds {report['import']['added_ms']:.0f} ms to importing PyTorch.",
    ]
    return "\n".join(lines)


class Figures(NamedTuple):
    """One call in a table of ``measure_families.py`` results.

    Attributes:
        family, operator, case: names of the call's family, operator and case.
        ours: the report's row of this project's fastest kernel.
        others: median times of this project's other kernels and of the baselines, by name.
        ratio: the fastest baseline's time divided by that of ``ours``; None without a baseline.
    """

    family: str
    operator: str
    case: str
    ours: dict[str, Any]
    others: dict[str, float]
    ratio: float | None

    @property
    def us(self) -> float:
        return float(self.ours["timing"]["median_us"])

    def rates(self) -> list[str]:
        """Returns the text of two cells: TB/s, and TFLOP/s (empty if below 10)."""
        tflops = self.ours["tflops"]
        return [f"{self.ours['gb_per_s'] / 1e3:.2f}", f"{tflops:.0f}" if tflops >= 10 else ""]

    def beside(self) -> str:
        return ", ".join(f"{name} {_three_digits(us)}" for name, us in self.others.items())


def renamed(row: dict[str, Any]) -> dict[str, Any]:
    """Replaces the names of operator and case in a row of an older report by their present names."""
    family, _, old = row["operator"].partition(".")
    if old not in ALIASES:
        return row
    operator, kind = ALIASES[old]
    gate = "silu_and_mul, " if old.startswith("silu_and_mul") else ""
    return {**row, "operator": f"{family}.{operator}", "case": f"{gate}{kind}: {row['case']}"}


def _figures(report: dict[str, Any]) -> Iterator[Figures]:
    """Yields the figures of each call on which a kernel was timed. Families are in the order of the report."""
    order = list(dict.fromkeys(row["family"] for row in report["rows"]))
    rows = sorted(map(renamed, report["rows"]), key=lambda row: (order.index(row["family"]), row["operator"], row["case"]))
    for (family, operator, case), found in groupby(rows, lambda row: (row["family"], row["operator"], row["case"])):
        timed = sorted((row for row in found if row["timing"]), key=lambda row: float(row["timing"]["median_us"]))
        kernels = [row for row in timed if not row["peer"]]
        if not kernels:
            continue
        others = {row["solution"]: row["timing"]["median_us"] for row in timed if row is not kernels[0]}
        baselines = [row["timing"]["median_us"] for row in timed if row["peer"]]
        ratio = baselines[0] / kernels[0]["timing"]["median_us"] if baselines else None
        yield Figures(family, operator.partition(".")[2], case, kernels[0], others, ratio)


def _measured_on(report: dict[str, Any]) -> str:
    metadata, roofline = report["metadata"], report["roofline"]
    versions = {row["solution"]: row["version"] for row in report["rows"] if row["version"] and row["timing"]}
    libs = "".join(f", {name} {version}" for name, version in versions.items())
    unmeasured, can = len(report["unmeasured"]), ""
    left = f" The run ended before {unmeasured} more calls." if unmeasured else ""
    if roofline is not None:
        copy, bf16_tflops = roofline["copy_gb_per_s"] / 1e3, roofline["tflops"]["bfloat16"]
        can = f" A copy reaches {copy:.2f} TB/s, and a bfloat16 GEMM {bf16_tflops:.0f} TFLOP/s."
    return (
        f"{metadata['device']}, driver {metadata['driver']}, torch {metadata['torch']}, Triton {metadata['triton']}{libs}, commit "
        f"{metadata['git_commit'][:12]}.{can} Each time is the median of one call. CUDA graphs make several calls, on "
        f"copies of their arguments that exceed the caches. Every result was checked first.{left}"
    )


def families(report: dict[str, Any]) -> str:
    """Returns the Markdown for a report of ``measure_families.py``: a table per family, with a row per call."""
    lines = [_measured_on(report), "", f"`{report['metadata']['command']}`"]
    for family, found in groupby(_figures(report), lambda each: each.family):
        lines += ["", f"### {family[0].upper()}{family[1:]}", ""]
        lines += ["| call | kernel | µs | TB/s | TFLOP/s | others, µs | baseline / ours |", "|---|---|--:|--:|--:|---|--:|"]
        for each in found:
            cells = [f"`{each.operator}`, {each.case}", each.ours["solution"], _three_digits(each.us), *each.rates(), each.beside()]
            lines.append(f"| {' | '.join(cells)} | {'' if each.ratio is None else f'{each.ratio:.2f}'} |")
    return "\n".join(lines)


def operators(report: dict[str, Any]) -> str:
    """Returns the Markdown for a report of ``measure_families.py``: a table with a row per operator. A row has the operator's
    longest call, and the range of the ratios of the fastest baseline's time to the time of this project's fastest kernel."""
    lines = [_measured_on(report), ""]
    lines += ["| operator | longest call | µs | TB/s | TFLOP/s | best baseline / ours |", "|---|---|--:|--:|--:|--:|"]
    for operator, found in groupby(sorted(_figures(report), key=lambda each: each.operator), lambda each: each.operator):
        calls = list(found)
        longest = max(calls, key=lambda each: each.us)
        ratios = sorted(each.ratio for each in calls if each.ratio is not None)
        beside = "" if not ratios else f"{ratios[0]:.2f}" + (f" to {ratios[-1]:.2f}" if len(ratios) > 1 else "")
        lines.append(f"| `{operator}` | {' | '.join([longest.case, _three_digits(longest.us), *longest.rates(), beside])} |")
    return "\n".join(lines)


class Section(NamedTuple):
    """A section of the documentation: the report's file, and the function that makes Markdown from the report."""

    report: Path
    make: Callable[[dict[str, Any]], str]


# The sections, by the NAME in the comment ``<!-- tables: NAME -->`` of a page of the documentation.
SECTIONS = {
    "kernels, measured on an H200": Section(HERE / "h200.json", kernels),
    "what a call costs": Section(HERE / "dispatch.json", calls),
    "operators, measured on an H100": Section(HERE / "h100_families.json", operators),
    "families, measured on an H100": Section(HERE / "h100_families.json", families),
    "operators, measured on an H200": Section(HERE / "h200_families.json", operators),
    "families, measured on an H200": Section(HERE / "h200_families.json", families),
}


def made(name: str) -> str:
    """Returns the Markdown of the section with this name."""
    section = SECTIONS[name]
    return section.make(json.loads(section.report.read_text()))


def main() -> None:
    """Prints the sections that the command line names; all sections if it names none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", nargs="*", default=[*SECTIONS], help="all by default: " + "; ".join(SECTIONS))
    for name in parser.parse_args().section:
        print(made(name), end="\n\n")


if __name__ == "__main__":
    main()
