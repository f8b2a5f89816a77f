"""The tables of the documentation's page of figures, from the reports beside this file.

python packages/tokenspeed-kernel/benchmarks/table.py            # prints them
python packages/tokenspeed-kernel/benchmarks/table.py --write    # puts them into the page
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "figures.md"
END = "<!-- end -->"

# Kernels whose time is arithmetic, or may be; the others move bytes.
COMPUTING = ("triton_mha_prefill", "triton_mha_extend", "triton_mla", "triton_moe_apply", "triton_mm", "triton_bmm")
# Where another kernel is chosen: prepared MXFP4 weights have one of their own, and dense products are PyTorch's.
ELSEWHERE = (
    ("triton_moe_apply", r"^gpt-oss-120b (decode|prefill)(?!.*bfloat16)"),
    ("triton_mm_dense", ""),
    ("triton_bmm_dense", ""),
)
# The small cases are there to be hard, not to be fast: of these only what one step of decoding runs.
SHORTEST_US, DECODING = 20.0, r"decode (1|4|64)\b|64 rows of 2880|full layer 1 x 1024|sliding layer 64 x"


def kernels(report: dict[str, Any]) -> str:
    """Markdown: what was measured on and by which command, and for each family a table with one row a large case."""
    metadata, roofline = report["metadata"], report["roofline"]
    driver = f"driver {metadata['driver']}, " if metadata["driver"] else ""
    copy, read = roofline["copy_gb_per_s"] / 1e3, roofline["read_gb_per_s"] / 1e3
    products = (
        roofline["bf16_tflops"] if "bf16_tflops" in roofline else roofline["tflops"]["bfloat16"]
    )  # before format 2, and since
    lines = [
        f"{metadata['device']}, {driver}torch {metadata['torch']}, Triton {metadata['triton']}. It copies {copy:.2f} TB/s, reads "
        f"{read:.2f} TB/s and multiplies bfloat16 matrices at {products:.0f} TFLOP/s. Medians, cold caches, in a "
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
        share = row["gb_per_s"] / roofline["copy_gb_per_s"]
        lines.append(
            f"| `{row['kernel']}` | {row['case']} | {_three_digits(row['timing']['median_us'])} | {tflops} | "
            f"{row['gb_per_s'] / 1e3:.2f} | {share:.0%} |"
        )
    return "\n".join(lines)


def _shown(row: dict[str, Any]) -> bool:
    if any(row["kernel"] == kernel and re.search(pattern, row["case"]) for kernel, pattern in ELSEWHERE):
        return False
    return row["timing"]["median_us"] >= SHORTEST_US or bool(re.search(DECODING, row["case"]))


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def calls(report: dict[str, Any]) -> str:
    """Markdown: what a public call adds to the kernel, and what importing adds."""
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


# What stands on the page behind each mark, and the report that it is made of.
SECTIONS: dict[str, tuple[Path, Callable[[dict[str, Any]], str]]] = {
    "<!-- kernels, measured on an H200 -->": (HERE / "h200.json", kernels),
    "<!-- what a call costs -->": (HERE / "dispatch.json", calls),
}


def made(mark: str) -> str:
    """A section, from its report."""
    report, make = SECTIONS[mark]
    return make(json.loads(report.read_text()))


def shown(text: str, mark: str) -> str:
    """A section as a page has it."""
    begin = text.index(mark) + len(mark)
    return text[begin : text.index(END, begin)].strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into the page")
    write = parser.parse_args().write
    text = PAGE.read_text()
    for mark in SECTIONS:
        if not write:
            print(made(mark), end="\n\n")
        begin = text.index(mark) + len(mark)
        text = f"{text[:begin]}\n\n{made(mark)}\n\n{text[text.index(END, begin) :]}"
    if write:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
