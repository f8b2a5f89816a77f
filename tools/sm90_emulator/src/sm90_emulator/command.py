"""The command line: runs a function of a Python file on the emulator, and shows its kernels' statistics. Needs typer and rich."""

from __future__ import annotations

import importlib.util
from typing import Annotated, Literal

import typer

from kernel_emulation.command import BoundsOption, Kernel, Target, Top, application, execute, launches_of, list_launches
from kernel_emulation.report import console
from sm90_emulator import report
from sm90_emulator.driver import emulated_sm90

app = application("Runs CuteDSL and Triton kernels for sm_90 on a CPU.")

_TRITON = importlib.util.find_spec("triton") is not None

Seeds = Annotated[int, typer.Option("--seeds", help="Runs: one in order, others with warps and copies at random times.", min=1)]
Copies = Annotated[Literal["early", "late", "random"] | None, typer.Option(help="When asynchronous copies and wgmma run.")]
Uninitialised = Annotated[bool, typer.Option("--uninitialised", help="Report loads of shared memory that was never written.")]
Sanitize = Annotated[bool, typer.Option("--sanitize/--no-sanitize", help="Look for accesses before a PDL launch may make them.")]


@app.command()
def run(
    target: Target,
    seeds: Seeds = 1,
    copies: Copies = None,
    uninitialised: Uninitialised = False,
    sanitize: Sanitize = True,
    bounds: BoundsOption = "storage",
) -> None:
    """Run a function's kernels once for each seed, and list the launches."""
    for seed in range(seeds):
        emulator, seconds = execute(
            emulated_sm90, target, seed=seed, copies=copies, uninitialised=uninitialised, sanitize=sanitize, bounds=bounds,
            triton=_TRITON,
        )  # fmt: skip
        if not seed:
            list_launches(emulator, "warp instructions")
        console().print(f"{len(emulator.launches)} launches in {seconds:.1f} s with seed {seed}, nothing to complain of")


@app.command()
def stats(target: Target, kernel: Kernel = "", top: Top = 15, bounds: BoundsOption = "storage") -> None:
    """Run a function's kernels and count instructions."""
    emulator, _ = execute(emulated_sm90, target, counters=True, bounds=bounds, triton=_TRITON)
    for launch in launches_of(emulator, kernel):
        console().print(report.stats(launch, top))
        console().print()
