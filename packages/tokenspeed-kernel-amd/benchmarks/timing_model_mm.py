"""Predicts the times of GEMMs: our kernel and the portable kernels. **For ratios only.**

    python packages/tokenspeed-kernel-amd/benchmarks/timing_model_mm.py --output timing_model_mm.json --readme

Calls run on the gfx950 emulator, which counts instructions. `gfx950_emulator.timing` computes a time from these counts, as for
`timing_model`. Calls with few rows are executed whole, by both kernels. Calls with many rows are sampled: the emulator executes
SAMPLED tiles of the configuration that the whole call has, with its k. A tile is simulated alone, and beside as many
copies of itself as fit on a CU and as the CU has. The outputs are compared with the fp32 reference.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from timing_cases import SIDES, options_of, report_of
from timing_model import README, predicted, publish, total

MARKS = ("<!-- predicted times of GEMM -->", "<!-- end of GEMM -->")
SAMPLED = (8, 4)  # tiles along m, which are rasterised together, and along n. Most loads hit L2, as in the whole call
ERROR = 3e-3  # limit of the relative error of the bfloat16 output

ASSUMPTIONS = (
    "Only ratios are meaningful: no time below is a claim about an MI355X.",
    "Both kernels get the same inputs, and run with the same compiler (stock Triton), emulator and timing model.",
    "Up to 64 rows, whole grids are executed, and the workgroup that executes the most instructions is simulated.",
    f"With more rows, {SAMPLED[0]} x {SAMPLED[1]} tiles of our kernel are executed. Tiles are assigned to 256 CUs in turn. The "
    "time of a CU is the time of its tiles at full occupancy, or of one tile alone if that takes longer. The portable kernels are "
    "not executed.",
    "The floor is the larger of two times: of moving the operands and the result once at 8 TB/s, and of the MFMAs at their "
    "peak rate.",
    "The launches of a call run one after another. Launch overhead is not included.",
    "Caches are ideal: no line is loaded from HBM twice in a launch, and L2 delivers 64 bytes per cycle to every CU. Atomics and "
    "cache writebacks take no longer than other accesses.",
)


@dataclass(frozen=True)
class Case:
    """A call with a bfloat16 result and a weight that is stored ``[n, k]``.

    Attributes:
        m, k, n: sizes.
        format: format of both operands. ``"fp8"`` has scales per token and channel, ``"fp8 blocks"`` per 128 elements of a token
            and per 128 x 128 weights.
        bar_us: the largest time that passes; None: the call is shown for information.
    """

    m: int
    k: int
    n: int
    format: str
    bar_us: float | None = None

    @property
    def name(self) -> str:
        return f"{self.m} x {self.k} x {self.n}, {self.format}"

    @property
    def pair_bytes(self) -> int:
        return {"mxfp4": 1, "nvfp4": 1, "bfloat16": 4}.get(self.format, 2)

    @property
    def whole(self) -> bool:
        return self.m <= 64

    @property
    def memory_us(self) -> float:
        from gfx950_emulator import hardware as hw

        lines = self.m + self.n
        scales = {
            "bfloat16": 0,
            "nvfp4": lines * self.k // 16,
            "fp8": 4 * lines,
            "fp8 blocks": 4 * -(-self.k // 128) * (self.m + -(-self.n // 128)),
        }.get(self.format, lines * self.k // 32)
        return (lines * self.k * self.pair_bytes / 2 + scales + 2 * self.m * self.n) / hw.MI355X.hbm_bytes_per_second * 1e6

    @property
    def floor_us(self) -> float:
        from gfx950_emulator import hardware as hw

        flops_per_cycle = hw.MI355X.compute_units * 16384 / self.pair_bytes
        return max(self.memory_us, 2 * self.m * self.k * self.n / flops_per_cycle / hw.MI355X.clock_hz * 1e6)

    def inputs(self, m: int, n: int) -> dict[str, Any]:
        """Returns the operator's arguments, for these sizes instead of the call's."""
        from tokenspeed_kernel_base.cases import Draw
        from tokenspeed_kernel_base.ops.gemm._inputs import dense, fp8, micro

        make = {
            "bfloat16": lambda: dense(m, self.k, n),
            "fp8": lambda: fp8(m, self.k, n, a_scale="token", b_scale="channel"),
            "fp8 blocks": lambda: fp8(m, self.k, n, a_scale="block", b_scale="block"),
        }.get(self.format, lambda: micro(m, self.k, n, a=self.format, b=self.format))
        return make()(Draw(torch.device("cpu"), self.k))


CASES = [
    *(Case(m, 2048, 4096, fmt, 1.6) for m in (1, 16) for fmt in ("mxfp8", "mxfp4", "fp8", "fp8 blocks")),
    *(Case(m, 2048, 4096, fmt) for m in (1, 16) for fmt in ("nvfp4", "bfloat16")),
    *(Case(16, 4096, 2048, fmt) for fmt in ("mxfp8", "mxfp4")),
    *(Case(64, 2048, 4096, fmt) for fmt in ("mxfp8", "mxfp4")),
    *(Case(2048, 1024, 2048, fmt, 3.5) for fmt in ("mxfp8", "mxfp4")),
    *(Case(2048, 1024, 2048, fmt) for fmt in ("fp8", "fp8 blocks")),
    Case(4096, 1024, 4096, "mxfp8", 12.0),
    Case(4096, 1024, 4096, "mxfp4"),
    *(Case(4096, 1024, 4096, fmt) for fmt in ("fp8", "fp8 blocks")),
    Case(4096, 2048, 4096, "mxfp8"),
    *(Case(8192, 8192, 8192, fmt) for fmt in ("mxfp8", "mxfp4")),
]


def run(arguments: dict[str, Any], solution: str) -> list[Any]:
    """Calls a kernel, checks its result, and returns its launches."""
    import tokenspeed_kernel as core
    from gfx950_emulator import emulated_gfx950

    with emulated_gfx950(counters=True, sanitize=False) as emulator:
        out = core.mm(**arguments, solution=solution)
    wanted = core.mm(**arguments, out_dtype=torch.float32, solution="reference")
    error = float((out.float() - wanted).norm() / wanted.norm())
    if not error <= ERROR:
        raise RuntimeError(f"{solution}: relative error {error:.1e}")
    return emulator.launches


def measure_whole(case: Case, solution: str) -> dict[str, Any]:
    launches = list(map(predicted, run(case.inputs(case.m, case.n), solution)))
    return {**total(launches), "launches": launches}


def measure_sample(case: Case) -> dict[str, Any]:
    """Predicts our kernel's time from a part of the call's tiles."""
    from gfx950_emulator import hardware as hw
    from gfx950_emulator import timing
    from tokenspeed_kernel_amd.gfx950.gemm import mm as launcher

    rows, columns = SAMPLED
    block_scales = case.format == "fp8 blocks"
    config = launcher.config_of(case.m, case.n, hw.MI355X.compute_units, case.pair_bytes, block_scales, case.k)
    tiles = -(-case.m // config.block_m) * -(-case.n // config.block_n)
    # As many CUs as tiles: the whole call does not split k either.
    as_whole = {"config_of": lambda *_: config, "current_compute_units": lambda: rows * columns}
    with mock.patch.multiple(launcher, **as_whole):
        (launch,) = run(case.inputs(rows * config.block_m, columns * config.block_n), "gluon")
    costs = timing.instruction_costs(launch.counters)
    trace = timing.instructions_of(launch.counters, 0)
    fits = timing.occupancy(launch.program.assembly, launch.waves, launch.lds)
    of_cu = -(-tiles // hw.MI355X.compute_units)
    together = min(fits.workgroups, of_cu)
    alone = timing.simulate(costs, [trace], 10**6)
    full = timing.simulate(costs, [trace] * together, 10**6)
    cycles = max(alone.cycles, of_cu * full.cycles / together)
    found = {
        "kernel": launch.kernel,
        "waves": launch.waves,
        "waves_per_simd": fits.waves_per_simd,
        "tiles": tiles,
        "alone_cycles": alone.cycles,
        "together_cycles": full.cycles,
        "together": together,
        "mfma_busy": round(full.busy["MFMA"], 3),
        "bound_by": full.bound_by,
    }
    return {"us": max(cycles / hw.MI355X.clock_hz * 1e6, case.memory_us), "launches": [found]}


def measure(case: Case, side: str) -> dict[str, Any] | None:
    if not case.whole and side != "ours":
        return None
    start = time.perf_counter()
    found = measure_whole(case, SIDES[side]) if case.whole else measure_sample(case)
    print(f"{side}: {case.name}: {found['us']:.2f} us ({time.perf_counter() - start:.0f} s)", file=sys.stderr, flush=True)
    return found


def table(report: dict[str, Any]) -> str:
    """Formats the report as Markdown."""
    lines = [
        "| m x k x n, operands | floor, µs | ours, µs (launches) | portable, µs (launches) | portable / ours | ours is bound by |",
        "|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        ours, portable = row["ours"], row["portable"]
        cells = [row["case"], f"{row['floor_us']:.2f}", f"{ours['us']:.2f} ({len(ours['launches'])})"]
        cells += ["", ""] if portable is None else [f"{portable['us']:.2f} ({len(portable['launches'])})"]
        cells += [] if portable is None else [f"{portable['us'] / ours['us']:.2f}"]
        lines.append(f"| {' | '.join([*cells, ours['launches'][0]['bound_by']])} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    options = options_of(__doc__, arguments)
    report = report_of(Path(__file__), CASES, options.only, measure, ASSUMPTIONS, options.output)
    publish(report, table(report), options, README, MARKS)


if __name__ == "__main__":
    main()
