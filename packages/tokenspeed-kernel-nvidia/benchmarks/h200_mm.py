"""Measures decode GEMMs: this package against PyTorch, on one H200.

python packages/tokenspeed-kernel-nvidia/benchmarks/h200_mm.py --output packages/tokenspeed-kernel-nvidia/benchmarks/h200_mm.json
python packages/tokenspeed-kernel-nvidia/benchmarks/h200_mm.py --quick --only "GPT-OSS-120B (qkv|output|router) x" --variants .
python packages/tokenspeed-kernel-nvidia/benchmarks/h200_mm.py --plot --readme  # plots h200_mm.json

All implementations run in one process on the same random values. Each result is first compared with a float32 GEMM.
`tokenspeed_kernel.workbench.benchmark.runner` describes how times are measured, with one difference: the kernel between two calls
is an rmsnorm of one row, as before most GEMMs of a model. The rmsnorm uses PDL: it lets the next kernel launch while the rmsnorm
still runs. So a GEMM that supports PDL overlaps its prologue with the rmsnorm. The time of the rmsnorm alone, in a graph without
GEMMs, is subtracted. Each implementation is also measured with the runner's small PyTorch kernel between calls, which does not use
PDL (``ordinary_us``). The calls of a graph rotate over copies of the weights. The copies together have more than twice the size of
the L2 cache. All calls use the same memory for activations and results, because in a model the preceding kernel has just written
the activations.

``--variants`` also measures other configurations of our kernels, which selection never uses: see `VARIANTS`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import itertools
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from mm_shapes import GEMMS, LIMITS, SHAPES, TOKENS, Gemm, Shape

from tokenspeed_kernel.workbench.benchmark import Unsupported
from tokenspeed_kernel.workbench.benchmark.bars import at_most, no_less_accurate
from tokenspeed_kernel.workbench.benchmark.figures import Figure, Marks, Panel, Report, measured, three_digits, us
from tokenspeed_kernel.workbench.benchmark.runner import (
    Benchmark,
    Between,
    Call,
    Effort,
    Implementation,
    JsonRow,
    Measurement,
    Task,
    errors_against,
    in_graph_of,
    values_of,
)
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.ops.gemm.operands import decode_operands
from tokenspeed_kernel_base.signature import dtype_name
from tokenspeed_kernel_nvidia import _machine
from tokenspeed_kernel_nvidia.sm90.gemm.mm import launch as ours
from tokenspeed_kernel_nvidia.sm90.gemm.mm.config import config_of, sharing_of

_TOUCHED = 130e6  # bytes of all copies of the weights together; the L2 cache has 50 MB
_WIDTH = 2880  # elements of the row that the rmsnorm normalises

# Variant name -> the fields of the ring buffer kernel's configuration that the variant changes.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "ring": {},
    "not dependent": {"dependent": False},
    "no cluster": {"cluster": 1, "loads": 4, "pair": False},
    "no prefetch": {"prefetched": 0},
    "slower prefetch": {"pace": 110},
}

Inputs = Mapping[str, Any]  # all arguments of the operator


class Norm(Between):
    """The rmsnorm kernel that is launched between calls."""

    def kernel(self, device: torch.device) -> Call:
        from mm_between_device import rmsnorm

        x, weight, out = (torch.ones(_WIDTH, dtype=torch.bfloat16, device=device) for _ in range(3))
        block = 1 << (_WIDTH - 1).bit_length()
        return lambda: rmsnorm[(1,)](x, weight, out, _WIDTH, BLOCK=block, num_warps=8, launch_pdl=True)


# -- implementations ---------------------------------------------------------------------------------------------------------------


def _torchs(inputs: Inputs) -> Call:
    if inputs["b_scale"] is None:
        return functools.partial(torch.addmm, inputs["bias"], inputs["a"], inputs["b"], out=inputs["out"])
    if inputs["a_scale"] is None:
        raise Unsupported("PyTorch has no GEMM with scaled weights and activations of 16 bits")
    a_scale = inputs["a_scale"].mT.contiguous().mT  # block scales must be column-major
    call = functools.partial(
        torch._scaled_mm, inputs["a"], inputs["b"], a_scale, inputs["b_scale"], inputs["bias"], out_dtype=torch.bfloat16,
        out=inputs["out"],
    )  # fmt: skip
    try:
        call()
    except (RuntimeError, ValueError) as error:
        raise Unsupported(f"PyTorch does not multiply these: {str(error).splitlines()[0]}") from error
    return call


def _portable(inputs: Inputs) -> Call:
    values = list(inputs.values())
    return functools.partial(get_operator("gemm.mm").function.bind(*values, solution="triton"), *values)


def _own(inputs: Inputs) -> Call:
    return functools.partial(ours.mm, **{name: inputs[name] for name in inspect.signature(ours.mm).parameters})


def variant(changes: Mapping[str, Any], inputs: Inputs) -> Call:
    """Returns a call that launches the ring buffer kernel with a changed configuration, as our launcher does otherwise."""
    m, n = inputs["out"].shape
    operands = {name: inputs[name] for name in ("a", "b", "bias", "out", "a_scale", "b_scale")}
    count, row_bytes = _machine.sm_count_of(inputs["a"].get_device()), inputs["b"].shape[0] * inputs["b"].element_size()
    weights, scales = ours.kinds_of(inputs["b"], inputs["b_scale"])
    sharing = sharing_of(weights, m, n, row_bytes, count)
    found = config_of(dtype_name(inputs["a"].dtype), weights, scales, dtype_name(inputs["out"].dtype), m, sharing)
    config = dataclasses.replace(found, **changes)
    numbers = ours.numbers_of(config, m, n, row_bytes, count)
    none = ours.NO_SCALES if scales == "none" else ()
    return functools.partial(ours.mm_program(config), *ours.arguments_of(**operands, numbers=(*none, *numbers)))


def implementations(given: argparse.Namespace) -> list[Implementation]:
    """Returns all implementations. An implementation in `VARIANTS` is included if the option ``--variants`` matches its name."""
    wanted = [name for name in VARIANTS if given.variants and re.search(given.variants, name)]
    return [
        Implementation("ours", _own, "tokenspeed-kernel-nvidia", ours=True),
        Implementation("torch", _torchs, "torch"),
        Implementation("triton", _portable, "triton", ours=True, portable=True),
        *(Implementation(name, functools.partial(variant, VARIANTS[name]), "", ours=True) for name in wanted),
    ]


# -- inputs ------------------------------------------------------------------------------------------------------------------------


def inputs_of(gemm: Gemm, device: torch.device, seed: int) -> dict[str, Any]:
    """Returns random operands for the largest number of rows."""
    return get_operator("gemm.mm").complete(gemm.case(max(TOKENS)).build(device, seed))


def first_rows(inputs: Inputs, m: int) -> dict[str, Any]:
    """Returns the inputs of a GEMM of the first ``m`` rows of the activations, with memory for the result."""
    a, a_scale = inputs["a"][:m].clone(), inputs["a_scale"]
    if a_scale is not None and a_scale.ndim == 2:
        a_scale = a_scale[:m].clone()
    out = torch.empty(m, inputs["b"].shape[1], dtype=torch.bfloat16, device=a.device)
    return {**inputs, "a": a, "a_scale": a_scale, "out": out}


def tasks(shapes: Sequence[Shape], who: Sequence[Implementation], device: torch.device, effort: Effort) -> Iterator[Task]:
    """Yields the measurement tasks GEMM by GEMM, with copies of each GEMM's weights."""
    for gemm, of_gemm in itertools.groupby(shapes, lambda shape: shape.gemm):
        count = max(1, math.ceil(_TOUCHED / gemm.bytes)) if effort.rounds else 1
        every = [inputs_of(gemm, device, seed) for seed in range(count)]
        yield from (_task(shape, every, device, effort) for shape in of_gemm)


def _task(shape: Shape, every: Sequence[Inputs], device: torch.device, effort: Effort) -> Task:
    first = first_rows(every[0], shape.m)
    copies = [{**inputs, **{name: first[name] for name in ("a", "a_scale", "out")}} for inputs in every]
    wide_a, wide_b = decode_operands("mm", *(first[name] for name in ("a", "b", "a_scale", "b_scale")))
    errors = errors_against(wide_a @ wide_b + first["bias"].float())
    in_graph = in_graph_of(max(shape.gemm.floor_us, 1.0), len(copies))
    ordinary = functools.cache(lambda: Between(device, effort))

    def checked(implementation: Implementation) -> Callable[[], torch.Tensor]:
        call = implementation.setup(first)

        def run() -> torch.Tensor:
            first["out"].fill_(torch.nan)  # an element that the kernel does not write stays NaN, and fails the check
            call()
            return first["out"]

        return run

    def more(measurement: Measurement) -> dict[str, Any]:
        beside: list[float] = []

        def step() -> None:
            """Measures one round with the small PyTorch kernel between calls."""
            options: dict[str, Any] = {"budget_s": 0.0, "fewest": effort.fewest, "most": effort.fewest}
            beside.extend(measurement.timed(in_graph, device, ordinary(), **options))

        if effort.rounds:
            measurement.guarded(step)
        gemm = {"m": shape.m, "k": shape.gemm.k, "n": shape.gemm.n, "floor_us": shape.gemm.floor_us}
        return {**gemm, "ordinary_us": statistics.median(beside) if beside else None}

    return Task(
        shape,
        get_operator(shape.operator).cost_of(first),
        lambda each: [(functools.partial(checked, each), errors, LIMITS)],
        lambda each: [each.setup(inputs) for inputs in copies],
        in_graph,
        more,
    )


# -- the figure --------------------------------------------------------------------------------------------------------------------

_WHAT = "microseconds (less is better)"


def _panel(report: Report, m: int) -> Panel:
    found = measured(report, [Shape(gemm, m).name for gemm in GEMMS if gemm.bar is not None])
    values = {name: {who: us(row) for who, row in of_one.items()} for name, of_one in found.items()}
    ticks = [name.rpartition(" x ")[0].replace(" ", "\n", 1) for name in values]
    return Panel(f"{m} row{'s' * (m > 1)}, {_WHAT}", values, ticks, 1)


def _ordinary(report: Report, name: str) -> Callable[[JsonRow], str]:
    times = values_of([row for row in report["rows"] if row["kernel"] == name], "ordinary_us")
    return lambda row: three_digits(times[row["case"]][name]) if row["case"] in times else ""


FIGURE = Figure(
    title="GEMMs of a decode step",
    heading="### GEMMs of a decode step",
    alt=f"GEMMs of a decode step, {_WHAT}",
    baselines={"torch": ("PyTorch (cuBLAS)", "#c2410c")},
    shapes=[shape.name for shape in SHAPES],
    # One panel shows the smallest number of rows, one the largest. Both show the GEMMs that have bars.
    panels=lambda report: [_panel(report, m) for m in (min(TOKENS), max(TOKENS))],
    marks=Marks("<!-- measured mm -->", "<!-- end of measured mm -->"),
    readme=Path(__file__).parents[1] / "README.md",
    how=(
        "Each time is a median. A CUDA graph makes several calls, on copies of the weights that exceed the caches. "
        'In the graph an rmsnorm of one row follows each call, and launches the next kernel early (PDL){took}. "Ordinary": between '
        "calls runs a small PyTorch kernel, which launches nothing early."
    ),
    columns=lambda report: {
        "floor": lambda row: three_digits(row["floor_us"]),
        "ordinary, this package": _ordinary(report, "ours"),
        "ordinary, PyTorch": _ordinary(report, "torch"),
    },
)

BENCHMARK = Benchmark(
    file=__file__,
    description=__doc__,
    shapes=SHAPES,
    implementations=implementations,
    tasks=tasks,
    # The bar for 16 rows is 15% higher than the bar for one row.
    bars=[
        at_most(Shape(gemm, m).name, round(gemm.bar * more, 2))
        for gemm in GEMMS
        if gemm.bar is not None
        for m, more in ((1, 1.0), (16, 1.15))
    ],
    judged=lambda rows: no_less_accurate(values_of(rows, "relative_error")),
    rate=lambda row: f"{row['gb_per_s'] / 1e3:.2f} TB",
    figure=FIGURE,
    about=lambda row: f" (floor {row['floor_us']:.2f} us)",
    options=lambda parser: parser.add_argument(
        "--variants", default="", metavar="REGEX", help="other configurations with this name"
    ),
    between=Norm,
    between_is=(
        "an rmsnorm of one row stands after each call, which lets the next kernel be launched while it works; its own time "
        "(between_us) is subtracted"
    ),
)

if __name__ == "__main__":
    BENCHMARK.main()
