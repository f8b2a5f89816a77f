"""Predicts the times of the main calls as ranges, from the timing model's uncertain constants. **For ratios only.**

    python packages/tokenspeed-kernel-amd/benchmarks/timing_ranges.py --output timing_ranges.json --readme

`gfx950_emulator.ranges` lists the constants of the timing model that are not known exactly, with a fast and a slow value and their
sources. Each call runs once on the gfx950 emulator. Its time is then computed with the model's constants, as `timing_model` and its
siblings do, with all fast and with all slow constants, and with each constant alone. The table names the two constants, other than
the clock, that alone change the time most. Long prefills are not computed with each constant alone. The siblings check the results
of these calls.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timing_model as attention
import timing_model_mla as mla
import timing_model_mla_prompt as prompt
import timing_model_mm as mm
import timing_model_moe as moe
import torch
from timing_model import README, metadata_of, publish

MARKS = ("<!-- ranges of predicted times -->", "<!-- end of ranges -->")
ASSUMPTIONS = (
    "Only ratios are meaningful: no time below is a claim about an MI355X.",
    "The times are those of our kernels, without launch overhead.",
    "The fast and the slow times have all constants at their fast and slow values, which is less likely than any single one.",
    "Waves issue in another order if a constant changes. So a time with fast constants may be up to 2% longer than the modelled "
    "time.",
    "The range covers the constants below, and nothing of what the model omits. The times that the baseline's authors measured for "
    "prefill are 1.30 and 1.72 times the modelled times; the slow clock explains the first ratio only.",
)


@dataclass(frozen=True)
class Call:
    """A call of our kernels.

    Attributes:
        name: its name in the report.
        run: executes the call on the emulator, and returns its launches.
        seconds: returns the time of the launches, with the constants of a `gfx950_emulator.hardware.Device`.
        each: whether the time is also computed with each constant alone.
    """

    name: str
    run: Callable[[], list[Any]]
    seconds: Callable[[list[Any], Any], float]
    each: bool = True


def whole(launches: list[Any], device: Any) -> float:
    """Returns the time of launches that were executed whole."""
    from gfx950_emulator import timing

    return sum(timing.predict(launch, device=device, max_instructions=2_000_000).seconds for launch in launches)


def attends(case: attention.Case) -> Call:
    """Returns an attention call of `timing_model`."""

    def run() -> list[Any]:
        from gfx950_emulator import emulated_gfx950

        function = attention.ours(case.operator)
        inputs = (case.sample if case.operator == "prefill" else case).inputs()
        with emulated_gfx950(counters=True, sanitize=False) as emulator:
            function(inputs)
        return list(emulator.launches)

    def seconds(launches: list[Any], device: Any) -> float:
        (launch,) = launches
        return float(attention.prefill_launch(case, launch, True, device)["us"]) * 1e-6

    if case.operator == "prefill":
        return Call(case.name, run, seconds, each=case.length <= 1024)
    return Call(case.name, run, whole)


def attends_to_latents(case: mla.Case | prompt.Case) -> Call:
    """Returns a call of `timing_model_mla` or of `timing_model_mla_prompt`."""

    def run() -> list[Any]:
        import tokenspeed_kernel as core
        from gfx950_emulator import emulated_gfx950

        with emulated_gfx950(counters=True, sanitize=False) as emulator:
            getattr(core, case.operator)(**case.inputs(), solution="gluon")
        return list(emulator.launches)

    return Call(f"{case.operator} {case.name}", run, whole)


def multiplies(case: mm.Case) -> Call:
    """Returns a GEMM of `timing_model_mm` that is executed whole."""
    return Call(f"mm {case.name}", lambda: mm.run(case.inputs(case.m, case.n), "gluon"), whole)


def experts(side: str, tokens: int) -> Call:
    """Returns a layer of `timing_model_moe` that is executed whole."""

    def run() -> list[Any]:
        return moe._run(side, getattr(moe, side), moe.layer_of(side, tokens))[0]

    activations = {"ours": "fp8", "unrounded": "bf16"}[side]
    return Call(f"experts of GPT-OSS-120B, {activations} activations, tokens: {tokens}", run, whole)


CALLS = [
    *map(attends, attention.CASES),
    *map(attends_to_latents, (*mla.CASES, *prompt.CASES)),
    *(multiplies(case) for case in mm.CASES if case.m <= 64),
    *(experts("ours", tokens) for tokens in (1, 4, 16)),
    *(experts("unrounded", tokens) for tokens in (1, 16)),
]


def measure(call: Call) -> dict[str, Any]:
    """Runs a call, and predicts its time with the model's constants, at both ends, and with each end of each constant alone."""
    from gfx950_emulator import hardware as hw
    from gfx950_emulator import ranges

    start = time.perf_counter()
    launches = call.run()
    us = {"modelled_us": call.seconds(launches, hw.MI355X) * 1e6}
    us |= {f"{end}_us": call.seconds(launches, ranges.with_constants(hw.MI355X, end)) * 1e6 for end in ("fast", "slow")}
    alone = {}
    for constant in ranges.UNCERTAIN[hw.MI355X.name] if call.each else ():
        for end in ("fast", "slow"):
            device = ranges.with_constants(hw.MI355X, end, frozenset({constant.name}))
            if device != hw.MI355X:
                alone[f"{constant.name}, {end}"] = call.seconds(launches, device) * 1e6
    print(f"{call.name}: {us} ({time.perf_counter() - start:.0f} s)", file=sys.stderr, flush=True)
    return {"call": call.name, **us, "alone_us": alone}


def table(report: dict[str, Any]) -> str:
    """Formats the report as Markdown: a row per call, then a row per constant."""
    lines = [
        "| call | fast constants, µs | modelled, µs | slow constants, µs | slow / fast | the constants that alone change most |",
        "|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        modelled = row["modelled_us"]
        change = {name: us / modelled - 1 for name, us in row["alone_us"].items() if not name.startswith("clock_hz")}
        most = sorted(change, key=lambda name: -abs(change[name]))[:2]
        parts = [f"`{name.split(', ')[0]}` {change[name]:+.0%}" for name in most if abs(change[name]) >= 0.005]
        cells = [row["call"], *(f"{row[f'{end}_us']:.2f}" for end in ("fast", "modelled", "slow"))]
        lines.append(f"| {' | '.join(cells)} | {row['slow_us'] / row['fast_us']:.2f} | {', '.join(parts)} |")
    lines += ["", "| constant | fast | modelled | slow | source |", "|---|---|---|---|---|"]
    for constant in report["constants"]:
        cells = [f"`{constant['name']}`", *(f"{constant[end]:g}" for end in ("fast", "modelled", "slow"))]
        lines.append(f"| {' | '.join(cells)} | {constant['basis']}{' (assumed)' if constant['assumed'] else ''} |")
    return "\n".join(lines)


def constants() -> list[dict[str, Any]]:
    """Returns the uncertain constants of MI355X, with the model's values."""
    from gfx950_emulator import hardware as hw
    from gfx950_emulator import ranges

    return [
        {
            "name": each.name,
            "fast": each.fast,
            "modelled": getattr(hw.MI355X, each.name),
            "slow": each.slow,
            "basis": each.basis,
            "assumed": each.assumed,
        }
        for each in ranges.UNCERTAIN[hw.MI355X.name]
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where to write the report, JSON")
    parser.add_argument("--readme", action="store_true", help="put the table into the package's README")
    parser.add_argument("--only", default="", help="calls whose name matches this regular expression; others are kept")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    kept: dict[str, Any] = {}
    if options.only and options.output is not None and options.output.exists():
        kept = {row["call"]: row for row in json.loads(options.output.read_text())["rows"]}
    found = {call.name: measure(call) for call in CALLS if re.search(options.only, call.name)}
    rows = [(kept | found)[call.name] for call in CALLS if call.name in kept | found]
    report = {"metadata": metadata_of(Path(__file__), None), "assumptions": ASSUMPTIONS, "rows": rows, "constants": constants()}
    publish(report, table(report), options, README, MARKS)


if __name__ == "__main__":
    main()
