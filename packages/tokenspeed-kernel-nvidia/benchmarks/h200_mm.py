"""Decode GEMMs, this package against PyTorch, on one H200.

python packages/tokenspeed-kernel-nvidia/benchmarks/h200_mm.py --output packages/tokenspeed-kernel-nvidia/benchmarks/h200_mm.json
python packages/tokenspeed-kernel-nvidia/benchmarks/h200_mm.py --quick --only "GPT-OSS-120B (qkv|output|router) x" --variants .

All implementations run in one process on the same random values. Each result is checked first against a float32 GEMM.
``measuring.py`` describes how times are taken, with one difference: the kernel between calls is an rmsnorm of one row, as before
most GEMMs of a model. It uses PDL: it lets the next kernel launch as soon as it runs itself. So a GEMM that supports PDL overlaps
its prologue with it. The rmsnorm's time in a graph of its own is subtracted. Each implementation is also measured with
`measuring.py`'s small PyTorch kernel between calls, which does not use PDL (``ordinary_us``). The calls of a graph rotate over
copies of the weights, together more than twice the L2 cache's size. Activations and results are the same memory in all calls: in a
model the preceding kernel has just written the activations.

``--variants`` also measures other configurations of our kernels, which no call selects: see `VARIANTS`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

import measuring
from measuring import Between, Call, Effort, Implementation, Measurement, errors_of, relative_error, times_of, worst_row_error
from mm_shapes import LIMITS, SHAPES, TOKENS, Gemm, Shape, judge

from tokenspeed_kernel.workbench.benchmark import Report, Unsupported
from tokenspeed_kernel.workbench.benchmark.machine import gpu_monitor
from tokenspeed_kernel.workbench.benchmark.timing import sample_graph
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.ops.gemm.operands import decode_operands
from tokenspeed_kernel_base.signature import dtype_name
from tokenspeed_kernel_nvidia import _machine
from tokenspeed_kernel_nvidia.sm90.gemm.mm import launch as ours
from tokenspeed_kernel_nvidia.sm90.gemm.mm.config import config_of, sharing_of

_TOUCHED = 130e6  # bytes of weights, for an L2 cache of 50 MB
_WIDTH = 2880  # elements in a row of the rmsnorm
_BETWEEN_IS = (
    "an rmsnorm of one row stands after each call, which lets the next kernel be launched while it works; its own time "
    "(between_us) is subtracted"
)

# Changes to the configuration of the ring buffer kernel, for any call.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "ring": {},
    "not dependent": {"dependent": False},
    "no cluster": {"cluster": 1, "loads": 4, "pair": False},
    "no prefetch": {"prefetched": 0},
    "slower prefetch": {"pace": 110},
}

Inputs = Mapping[str, Any]  # all arguments of the operator


class Norm(Between):
    """The rmsnorm between calls."""

    def __init__(self, device: torch.device, samples: int) -> None:
        from mm_between_device import rmsnorm

        x, weight, out = (torch.ones(_WIDTH, dtype=torch.bfloat16, device=device) for _ in range(3))
        block = 1 << (_WIDTH - 1).bit_length()
        self._launch = lambda: rmsnorm[(1,)](x, weight, out, _WIDTH, BLOCK=block, num_warps=8, launch_pdl=True)
        self.us = self._time(device, samples)


def _torchs(inputs: Inputs) -> Call:
    if inputs["b_scale"] is None:
        return functools.partial(torch.addmm, inputs["bias"], inputs["a"], inputs["b"], out=inputs["out"])
    if inputs["a_scale"] is None:
        raise Unsupported("PyTorch has no product with scaled weights and activations of 16 bits")
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
    return functools.partial(ours.mm, **inputs)


def variant(changes: Mapping[str, Any], inputs: Inputs) -> Call:
    """Another configuration of the ring buffer kernel, launched like ours."""
    m, n = inputs["out"].shape
    operands = {name: inputs[name] for name in ("a", "b", "bias", "out", "a_scale", "b_scale")}
    count, row_bytes = _machine.multiprocessors(inputs["a"].get_device()), inputs["b"].shape[0] * inputs["b"].element_size()
    weights, scales = ours.kinds_of(inputs["b"], inputs["b_scale"])
    sharing = sharing_of(weights, m, n, row_bytes, count)
    found = config_of(dtype_name(inputs["a"].dtype), weights, scales, dtype_name(inputs["out"].dtype), m, sharing)
    config = dataclasses.replace(found, **changes)
    numbers = ours.numbers_of(config, m, n, row_bytes, count)
    none = ours.NO_SCALES if scales == "none" else ()
    return functools.partial(ours.mm_program(config), *ours.arguments_of(**operands, numbers=(*none, *numbers)))


def implementations(variants: str = "") -> list[Implementation]:
    """All implementations; those of `VARIANTS` whose name matches, if a pattern is given."""
    everyone = [
        Implementation("ours", _own, "tokenspeed-kernel-nvidia", ours=True),
        Implementation("torch", _torchs, "torch"),
        Implementation("triton", _portable, "triton", ours=True, portable=True),
    ]
    for name, changes in VARIANTS.items():
        if variants and re.search(variants, name):
            everyone.append(Implementation(name, functools.partial(variant, changes), "", ours=True))
    return everyone


def inputs_of(gemm: Gemm, device: torch.device, seed: int) -> dict[str, Any]:
    """Random operands, with the largest number of rows."""
    return get_operator("gemm.mm").complete(gemm.case(max(TOKENS)).build(device, seed))


def first_rows(inputs: Inputs, m: int) -> dict[str, Any]:
    """The first rows of activations, and memory for the result."""
    a, a_scale = inputs["a"][:m].clone(), inputs["a_scale"]
    if a_scale is not None and a_scale.ndim == 2:
        a_scale = a_scale[:m].clone()
    out = torch.empty(m, inputs["b"].shape[1], dtype=torch.bfloat16, device=a.device)
    return {**inputs, "a": a, "a_scale": a_scale, "out": out}


def measure_shape(
    shape: Shape, every: Sequence[Inputs], wanted: Iterable[Implementation], device: torch.device, effort: Effort
) -> list[dict[str, Any]]:
    """Measures implementations at one shape, in alternating rounds. Returns their rows.

    Args:
        every: the copies of inputs to rotate over, from `inputs_of`.
    """
    first = first_rows(every[0], shape.m)
    shared = {name: first[name] for name in ("a", "a_scale", "out")}
    copies = [{**inputs, **shared} for inputs in every]
    cost = get_operator(shape.operator).cost_of(first)
    wide_a, wide_b = decode_operands("mm", *(first[name] for name in ("a", "b", "a_scale", "b_scale")))
    right = wide_a @ wide_b + first["bias"].float()
    del wide_a, wide_b

    def errors(got: torch.Tensor) -> tuple[float, float]:
        return relative_error(got, right), worst_row_error(got, right)

    def checked(implementation: Implementation) -> Call:
        call = implementation.setup(first)

        def run() -> torch.Tensor:
            first["out"].fill_(torch.nan)  # so that unwritten elements are noticed
            call()
            return first["out"]

        return run

    measurements = [Measurement(each, shape) for each in wanted]
    beside: dict[str, float] = {}
    for each in measurements:
        each.guarded(functools.partial(each.check, functools.partial(checked, each.implementation), errors, LIMITS))
    if effort.rounds:
        monitor = gpu_monitor(device)
        ordinary = Between(device, effort.fewest, effort.back_to_back)
        between = ordinary if effort.back_to_back else Norm(device, effort.fewest)
        least = math.ceil(measuring.GRAPH_US / max(shape.gemm.floor_us, 1.0))
        in_graph = max(len(copies), min(measuring.IN_GRAPH, least))
        for _ in range(effort.rounds):
            for each in measurements:
                calls = functools.partial(_calls, each.implementation, copies)
                each.guarded(functools.partial(each.time, calls, in_graph, device, between, monitor, effort))
        for each in measurements:
            each.guarded(functools.partial(_time_beside, each, beside, in_graph, device, ordinary, effort))
    more = {"m": shape.m, "k": shape.gemm.k, "n": shape.gemm.n, "floor_us": shape.gemm.floor_us}
    return [{**each.row(cost), **more, "ordinary_us": beside.get(each.implementation.name)} for each in measurements]


def _time_beside(
    measurement: Measurement, found: dict[str, float], in_graph: int, device: torch.device, ordinary: Between, effort: Effort
) -> None:
    """One round with an ordinary kernel between calls."""
    several = [ordinary.after(measurement.calls[index % len(measurement.calls)]) for index in range(in_graph)]
    times = sample_graph(several, device, budget_s=0.0, fewest=effort.fewest, most=effort.fewest)
    found[measurement.implementation.name] = statistics.median(times) - (ordinary.us or 0.0)


def _calls(implementation: Implementation, copies: Sequence[Inputs]) -> list[Call]:
    return [implementation.setup(inputs) for inputs in copies]


def document(
    rows: Sequence[dict[str, Any]], who: Iterable[Implementation], report: Report, *, back_to_back: bool = False
) -> dict[str, Any]:
    """The document that is written; see `measuring.document`. Each row also has m, k, n, the floor, and ``ordinary_us``."""
    judged = judge(times_of(rows), errors_of(rows), measuring.absent_of(rows))
    between = "" if back_to_back else _BETWEEN_IS
    return measuring.document(rows, who, report, SHAPES, judged, back_to_back=back_to_back, between=between)


def line_of(shape: Shape, rows: Sequence[Mapping[str, Any]]) -> str:
    """One line for a shape: the floor, and microseconds and rate of each implementation."""

    def rate(row: Mapping[str, Any]) -> str:
        return f"{row['gb_per_s'] / 1e3:.2f} TB"

    return f"{shape.name} (floor {shape.gemm.floor_us:.2f} us): " + " | ".join(measuring.cells(rows, rate))


def short_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Microseconds, one line a shape, for printing last."""
    names = list(dict.fromkeys(row["kernel"] for row in rows))
    lines = [f"{'us':44}{'floor':>9}" + "".join(f"{name[:13]:>14}" for name in names)]
    for shape, found in itertools.groupby(rows, lambda row: row["case"]):
        of_one = {row["kernel"]: row for row in found}
        timings = [of_one[name]["timing"] if name in of_one else None for name in names]
        cells = ["-" if timing is None else f"{timing['median_us']:.2f}" for timing in timings]
        floor = next(iter(of_one.values()))["floor_us"]
        lines.append(f"{shape:44}{floor:9.2f}" + "".join(f"{cell:>14}" for cell in cells))
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    parser = measuring.parser_of(__doc__)
    parser.add_argument("--variants", default="", metavar="REGEX", help="other configurations whose name has it")
    given = parser.parse_args(words)
    shapes, everyone = measuring.named(SHAPES, given.only), implementations(given.variants)
    names = [name for name in given.contestants.split(",") if name] or [each.name for each in everyone]
    unknown = {*names} - {each.name for each in everyone}
    if unknown or not shapes:
        parser.error(f"no contestant {', '.join(sorted(unknown))}" if unknown else "no shape has such a name")
    if given.list:
        print("\n".join([*(shape.name for shape in shapes), *(each.name for each in everyone)]))
        return
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    who = [each for each in everyone if each.name in names]
    effort = measuring.effort_of(given)
    command = sys.argv if words is None else ["h200_mm.py", *words]
    report = measuring.empty_report(given, effort, command, 0, device)
    made = measure(shapes, who, device, effort, report, given.output)
    for row in {row["kernel"]: row for row in made["rows"] if row["status"] in ("error", "failed")}.values():
        print(f"{row['status']}: {row['kernel']} at {row['case']}: {row['reason']}")
    measuring.print_outcome(made)
    print(short_table(made["rows"]))


def measure(
    shapes: Sequence[Shape],
    who: Sequence[Implementation],
    device: torch.device,
    effort: Effort,
    report: Report,
    output: Path | None,
) -> dict[str, Any]:
    """Measures implementations at all shapes. Returns the document, which is written after each shape."""

    def measured() -> Iterator[tuple[Shape, list[dict[str, Any]]]]:
        for gemm, of_gemm in itertools.groupby(shapes, lambda shape: shape.gemm):
            count = max(1, math.ceil(_TOUCHED / gemm.bytes)) if effort.rounds else 1
            every = [inputs_of(gemm, device, seed) for seed in range(count)]
            for shape in of_gemm:
                yield shape, measure_shape(shape, every, who, device, effort)

    document_of = functools.partial(document, who=who, report=report, back_to_back=effort.back_to_back)
    return measuring.collect(measured(), line_of, document_of, output, device)


if __name__ == "__main__":
    main()
