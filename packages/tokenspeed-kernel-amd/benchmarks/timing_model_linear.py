"""Predicts the times of linear layers that quantise tokens: our kernel, and separate operators. **For ratios only.**

    python packages/tokenspeed-kernel-amd/benchmarks/timing_model_linear.py --output timing_model_linear.json --readme

Whole calls run on the gfx950 emulator, as in `timing_model_mm`. The composition calls the operators that quantise, which run
portable kernels, and `mm`, which runs our kernel. Results are compared with the reference's.
"""

from __future__ import annotations

import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timing_cases import options_of
from timing_model import README, metadata_of, predicted, publish, total
from timing_model_mm import ASSUMPTIONS as ASSUMPTIONS_OF_MM
from timing_model_mm import ERROR
from timing_model_moe import LAUNCH_US

MARKS = ("<!-- predicted times of linear -->", "<!-- end of linear -->")
ASSUMPTIONS = (
    ASSUMPTIONS_OF_MM[0],
    "Both sides get the same inputs, and run with the same compiler (stock Triton), emulator and timing model. Whole grids are "
    "executed, and the workgroup that executes the most instructions is simulated.",
    "The floor is the time to read the weights at 8 TB/s.",
    f"{LAUNCH_US} us per launch: published measurements of short kernels on MI355X suggest this value.",
    ASSUMPTIONS_OF_MM[-1],
)
WEIGHTS = {"mxfp8": "mxfp4", "mxfp4": "mxfp4", "fp8": "fp8_channel", "fp8_static": "fp8_channel", "fp8_block": "fp8_block"}
SIDES: dict[str, dict[str, str]] = {"ours": {}, "composed": {"override": "composed_linear"}}


@dataclass(frozen=True)
class Case:
    """A layer: number of bf16 tokens, in-features, out-features, and the plan's activation dtype."""

    tokens: int
    k: int
    n: int
    activation_dtype: str

    @property
    def name(self) -> str:
        return f"{self.tokens} x {self.k} x {self.n}, {WEIGHTS[self.activation_dtype]}, {self.activation_dtype}"

    @property
    def floor_us(self) -> float:
        from gfx950_emulator import hardware as hw

        size = 17 / 32 if WEIGHTS[self.activation_dtype] == "mxfp4" else 1
        return self.k * self.n * size / hw.MI355X.hbm_bytes_per_second * 1e6


CASES = [Case(tokens, 2048, 4096, dtype) for tokens in (1, 16) for dtype in WEIGHTS]


def measure(case: Case, side: str) -> dict[str, Any]:
    """Calls the layer, checks its result, and returns its launches with their predicted times."""
    import tokenspeed_kernel as core
    from gfx950_emulator import emulated_gfx950
    from tokenspeed_kernel_base.cases import Draw
    from tokenspeed_kernel_base.ops.gemm.linear import _drawn

    start = time.perf_counter()
    facts = {"weight_format": WEIGHTS[case.activation_dtype], "activation_dtype": case.activation_dtype}
    how = SIDES[side]
    with emulated_gfx950(counters=True, sanitize=False) as emulator:
        plan = core.linear.plan(case.k, case.n, **facts, **how)
        x, canonical = _drawn(Draw(torch.device("cpu"), case.k), case.tokens, plan)
        weights = core.linear.prepare(canonical, plan)
        del emulator.launches[:]
        out = core.linear(x, weights, plan, **how)
    reference = core.linear.plan(case.k, case.n, device="cpu", override="reference_linear", **facts)
    wanted = core.linear(x, canonical, reference)
    error = float((out.float() - wanted.float()).norm() / wanted.float().norm())
    if not error <= ERROR:
        raise RuntimeError(f"{side}: {case.name}: relative error {error:.1e}")
    launches = list(map(predicted, emulator.launches))
    found = total(launches)["us"]
    print(f"{side}: {case.name}: {found:.2f} us ({time.perf_counter() - start:.0f} s)", file=sys.stderr, flush=True)
    return {"us": found, "with_launches_us": found + LAUNCH_US * len(launches), "relative_error": error, "launches": launches}


def table(report: dict[str, Any]) -> str:
    """Formats the report as Markdown."""
    lines = [
        "| tokens x in x out, weights, activations | floor, µs | ours, µs (launches) | composition, µs (launches) "
        f"| ours with {LAUNCH_US} µs per launch | composition | composition / ours |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        both = [row[side] for side in SIDES]
        cells = [row["case"], f"{row['floor_us']:.2f}", *(f"{each['us']:.2f} ({len(each['launches'])})" for each in both)]
        ours, composed = (each["with_launches_us"] for each in both)
        lines.append(f"| {' | '.join([*cells, f'{ours:.2f}', f'{composed:.2f}', f'{composed / ours:.2f}'])} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    torch.set_num_threads(1)
    options = options_of(__doc__, arguments)
    rows = [
        {"case": case.name, "floor_us": case.floor_us, **{side: measure(case, side) for side in SIDES}}
        for case in CASES
        if re.search(options.only, case.name)
    ]
    report = {"metadata": metadata_of(Path(__file__), None), "assumptions": ASSUMPTIONS, "rows": rows}
    publish(report, table(report), options, README, MARKS)


if __name__ == "__main__":
    main()
