"""Measures how often ``bench --compare`` gives the right verdict: "no difference" between two measurements of one kernel, and
"slower" for the kernel with an artificial slowdown of 5%. Needs a GPU.

    python packages/tokenspeed-kernel/benchmarks/planted.py --output planted.json

There are two kernels: a memory-bound kernel that is timed by events, and a compute-bound kernel that is timed in a CUDA graph. Each
kernel is compared with itself, and with a version that is followed by a wait on the device, which makes a call 5% slower. The
length of the wait is calibrated first. The program prints how often the verdict was right.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import tokenspeed_kernel  # noqa: F401  (its operators register their kernels)
from tokenspeed_kernel.workbench.benchmark import Report, Verdict, collect_metadata, compare, write_result
from tokenspeed_kernel.workbench.benchmark.machine import gpu_monitor
from tokenspeed_kernel.workbench.benchmark.run import Measurement, method_for, rows_of
from tokenspeed_kernel.workbench.numerics import Status, verify_case
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.registry import KernelRegistry

SLOWDOWN = 0.05
SUBJECTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("triton_rmsnorm", "gpt-oss-120b prefill 16384 with residual", {}),
    ("triton_mha_prefill", "gpt-oss-120b full layer 4 x 1024", {"graph_calls": 10}),
)


class Planted:
    """A copy of a registered kernel, registered under another name, with an optional wait on the device after each call."""

    def __init__(self, name: str, case: str, device: torch.device, options: dict[str, Any]) -> None:
        registry = KernelRegistry.get()
        spec, real = registry.get_by_name(name), registry.get_impl(name)
        self.cycles = 0

        @functools.wraps(real)
        def slowed(*args: Any) -> Any:
            made = real(*args)
            if self.cycles:
                torch.cuda._sleep(self.cycles)  # type: ignore[no-untyped-call]
            return made

        self.spec = dataclasses.replace(spec, name=f"planted_{name}", solution="planted", priority=1)
        registry.register(self.spec, slowed)
        self.case = next(c for c in get_operator(spec.operator).all_cases() if c.name == case)
        verified = verify_case(self.spec, self.case, device)
        if verified.status is not Status.PASSED:
            raise SystemExit(f"{name}: {verified.reason}")
        self.device, self.monitor = device, gpu_monitor(device)
        self.method = method_for(device, budget_s=0.15, **options)
        self.metadata = collect_metadata("", device)

    def measured(self, cycles: int) -> Report:
        self.cycles = cycles
        measurement = Measurement(self.spec, self.case, self.device, self.method)
        measurement.status = "measured"  # the kernel's results are verified once, in __init__
        for _ in range(self.method.rounds):
            measurement.add_round(self.monitor)
        return Report(self.metadata, tuple(rows_of([measurement])), None, self.method)

    def calibrated(self) -> int:
        """Returns the length of the wait, in clock cycles, that makes a call slower by the fraction SLOWDOWN. The launch of the
        wait counts, too."""
        base = self.measured(0)
        timing = base.rows[0].timing
        assert timing is not None
        cycles_a_us = 1700
        cycles = SLOWDOWN * timing.median_us * cycles_a_us
        for _ in range(3):
            seen = compare(base, self.measured(int(cycles))).differences[0].ratio.value - 1
            cycles = max(1.0, cycles + (SLOWDOWN - seen) * timing.median_us * cycles_a_us)
        return int(cycles)


def check(planted: Planted, repeats: int) -> dict[str, Any]:
    begun = time.monotonic()
    cycles = planted.calibrated()
    verdicts: dict[str, list[str]] = {"same": [], "slowed": []}
    ratios: dict[str, list[float]] = {"same": [], "slowed": []}
    for _ in range(repeats):
        first = planted.measured(0)
        for kind, wait in (("same", 0), ("slowed", cycles)):
            difference = compare(first, planted.measured(wait)).differences[0]
            verdicts[kind].append(difference.verdict.value)
            ratios[kind].append(difference.ratio.value)
    timing = first.rows[0].timing
    assert timing is not None
    return {
        "kernel": planted.spec.name,
        "case": planted.case.name,
        "median_us": timing.median_us,
        "repeats": repeats,
        "no_difference": verdicts["same"].count(Verdict.SAME.value),
        "slower_seen": verdicts["slowed"].count(Verdict.SLOWER.value),
        "ratios": {kind: [min(values), statistics.median(values), max(values)] for kind, values in ratios.items()},
        "seconds": time.monotonic() - begun,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU")
    device = torch.device("cuda", 0)
    rows = []
    for name, case, how in SUBJECTS:
        rows.append(check(Planted(name, case, device, how), options.repeats))
        row = rows[-1]
        print(
            f"{name}, {case}: {row['median_us']:.1f} us; no difference {row['no_difference']} of {row['repeats']}, "
            f"slower {row['slower_seen']} of {row['repeats']}, {row['seconds']:.0f} s",
            flush=True,
        )
    write_result(options.output, device, rows=rows)


if __name__ == "__main__":
    main()
