"""The README's table of measured kernels, from the report that the bench command wrote.

python packages/tokenspeed-kernel/benchmarks/table.py            # prints it
python packages/tokenspeed-kernel/benchmarks/table.py --write    # puts it into the README
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
REPORT = HERE / "h200.json"
README = HERE.parent / "README.md"
MARKS = ("<!-- measured on an H200 -->", "<!-- end -->")

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


def table(report: dict[str, Any]) -> str:
    """Markdown: what it was measured on and by which command, and one row a large case."""
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
        "",
        "| kernel | case | µs | TFLOP/s | TB/s | of copy |",
        "|---|---|---|---|---|---|",
    ]
    for row in sorted(report["rows"], key=lambda row: row["operator"]):
        if row["timing"] is None or not _shown(row):
            continue
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


def in_readme(text: str) -> str:
    """The table as the README has it now."""
    begin, end = (text.index(mark) for mark in MARKS)
    return text[begin + len(MARKS[0]) : end].strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into the README")
    made = table(json.loads(REPORT.read_text()))
    if not parser.parse_args().write:
        print(made)
        return
    text = README.read_text()
    before, after = text.index(MARKS[0]) + len(MARKS[0]), text.index(MARKS[1])
    README.write_text(f"{text[:before]}\n{made}\n{text[after:]}")


if __name__ == "__main__":
    main()
