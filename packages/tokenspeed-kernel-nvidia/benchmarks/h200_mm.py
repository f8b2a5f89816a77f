"""Products of a decode step, ours beside PyTorch's, on one H200.

python packages/tokenspeed-kernel-nvidia/benchmarks/h200_mm.py --output packages/tokenspeed-kernel-nvidia/benchmarks/h200_mm.json
python packages/tokenspeed-kernel-nvidia/benchmarks/h200_mm.py --quick --only "qkv|output|router" --variants .

All contestants run in one process on the same random numbers. Each result is checked first against a product in float32. A time is
the median of one call in a CUDA graph of several, which take turns on copies of the weights: together more than twice what the L2
cache holds. As in `h200.py` a small kernel of PyTorch's stands after each call, and its own time is subtracted; with
``--back-to-back`` nothing stands there. Rounds of all contestants alternate.

``--variants`` also measures other configurations of our programs, which no call chooses: see `VARIANTS`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from measuring import Between

from tokenspeed_kernel.workbench.benchmark import Unsupported, collect_metadata
from tokenspeed_kernel.workbench.benchmark.timing import sample_graph
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.ops.gemm._inputs import dense, fp8, mx
from tokenspeed_kernel_base.ops.gemm.operands import decode_operands
from tokenspeed_kernel_base.signature import dtype_name
from tokenspeed_kernel_nvidia import _machine
from tokenspeed_kernel_nvidia.sm90.gemm import mm as ours
from tokenspeed_kernel_nvidia.sm90.gemm.mm_config import SHARED_BYTES, Config

Call = Callable[[], Any]
_TOUCHED = 130e6  # bytes of weights, of a cache of 50 MB
_LEAST_CALLS = 24  # of a graph, which takes some microseconds to start
_BYTES_PER_US = 4.35e6  # what reading takes on this device, measured
_ROWS = 16  # of activations, at most
_LARGEST_ERROR = 4e-3  # of a result's norm; rounding to bfloat16 alone is 1.7e-3


@dataclass(frozen=True)
class Shape:
    """A product ``[m, k] x [k, n]``, with a bfloat16 bias and result; weights are stored ``[n, k]``.

    Attributes:
        bar: microseconds that one row may take; 16 rows may take 15% more.
        weights: see `_MADE`.
    """

    name: str
    k: int
    n: int
    bar: float | None = None
    weights: str = "bfloat16"

    @property
    def bytes(self) -> float:
        return self.k * self.n * _BYTES[self.weights]

    def case(self, m: int) -> Case:
        return Case(self.name, _MADE[self.weights](m, self.k, self.n), large=True)


# Random operands, and bytes of a weight with its share of scales.
_MADE: Mapping[str, Callable[[int, int, int], Any]] = {
    "bfloat16": functools.partial(dense, bias=torch.bfloat16),
    "fp8 weights": functools.partial(fp8, a_scale="", b_scale="channel", a_dtype=torch.bfloat16, bias=torch.bfloat16),
    "fp8 weights, blocks": functools.partial(fp8, a_scale="", b_scale="block", a_dtype=torch.bfloat16, bias=torch.bfloat16),
    "fp8": functools.partial(fp8, a_scale="token", b_scale="channel", bias=torch.bfloat16),
    "fp8, blocks": functools.partial(fp8, a_scale="block", b_scale="block", bias=torch.bfloat16),
    "mxfp4 weights": functools.partial(mx, a="dense", b="mxfp4", bias=torch.bfloat16),
}
_BYTES = {"bfloat16": 2.0, "mxfp4 weights": 17 / 32, **dict.fromkeys([name for name in _MADE if name.startswith("fp8")], 1.0)}
SHAPES = (
    Shape("gpt-oss-120b qkv", 2880, 5120, 7.8),
    Shape("gpt-oss-120b output", 4096, 2880, 6.4),
    Shape("gpt-oss-120b router", 2880, 128, 1.8),
    Shape("gpt-oss-120b unembedding", 2880, 201088),
    Shape("gpt-oss-20b router", 2880, 32),
    Shape("llama-8b gate and up", 4096, 28672),
    Shape("llama-8b down", 14336, 4096),
    Shape("deepseek-v3 q and kv down", 7168, 2112),
    Shape("deepseek-v3 router", 7168, 256),
    Shape("qwen3-235b router", 4096, 128),
    *(Shape(f"gpt-oss-120b qkv, {name}", 2880, 5120, weights=name) for name in _MADE if name != "bfloat16"),
    Shape("llama-8b gate and up, fp8", 4096, 28672, weights="fp8"),
    Shape("deepseek-v3 q and kv down, fp8, blocks", 7168, 2112, weights="fp8, blocks"),
)
TOKENS = (1, 2, 4, 8, 16)

_KB = 1024
# What is changed of the program that serves a call, and how many bytes a CTA brings to the L2 cache ahead; "4 x 3": loads x depth.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "ahead 0": {"ahead": 0},
    "not dependent": {"dependent": False, "ahead": 0},
    "little L1": {"spare": 100},
    "16 warps, 8 x 1": {"warps": 16, "loads": 8, "depth": 1},
    "8 warps, 8 x 3": {"warps": 8, "loads": 8, "depth": 3},
    "two of 8 warps, 4 x 3": {"warps": 8, "loads": 4, "depth": 3, "resident": 2},
    "staged, 16 warps, 8 x 2": {"staged": True, "warps": 16, "loads": 8, "depth": 2},
    "staged, 16 warps, 8 x 3": {"staged": True, "warps": 16, "loads": 8, "depth": 3},
    "staged, 16 warps, 4 x 5": {"staged": True, "warps": 16, "loads": 4, "depth": 5},
    "staged, 16 w, 4 x 5, a 0": {"staged": True, "warps": 16, "loads": 4, "depth": 5, "ahead": 0},
    "staged, 8 warps, 8 x 5": {"staged": True, "warps": 8, "loads": 8, "depth": 5},
    "staged, two, 8 x 2": {"staged": True, "warps": 8, "loads": 8, "depth": 2, "resident": 2},
}


Inputs = Mapping[str, Any]  # all arguments of the operator
Setup = Callable[[Inputs], Call]


def torchs(inputs: Inputs) -> Call:
    if inputs["b_scale"] is not None:
        raise Unsupported("PyTorch multiplies dense operands here")
    return functools.partial(torch.addmm, inputs["bias"], inputs["a"], inputs["b"], out=inputs["out"])


def portable(inputs: Inputs) -> Call:
    values = list(inputs.values())
    return functools.partial(get_operator("gemm.mm").function.bind(*values, solution="triton"), *values)


def own(inputs: Inputs) -> Call:
    return functools.partial(ours.mm, **inputs)


def _operands(inputs: Inputs) -> dict[str, Any]:
    return {name: inputs[name] for name in ("a", "b", "bias", "out", "a_scale", "b_scale")}


def variant(changes: Mapping[str, Any]) -> Setup:
    """Another configuration, launched as ours is."""
    changed = {**changes}
    ahead = changed.pop("ahead", ours.AHEAD)

    def setup(inputs: Inputs) -> Call:
        n, count = inputs["b"].shape[1], _machine.multiprocessors(inputs["a"].get_device())
        ctas = min(n, changed.get("resident", 1) * count)
        config = reconfigured(inputs, changed)
        if config.shared_bytes > SHARED_BYTES // config.resident:
            raise Unsupported("wants more shared memory than there is")
        program = ours.mm_program(config)
        arguments = ours.arguments_of(**_operands(inputs), ctas=ctas, ahead=ahead)
        return functools.partial(program, *arguments)

    return setup


def reconfigured(inputs: Inputs, changes: Mapping[str, Any]) -> Config:
    """The program of a call with something changed."""
    weights, scales = ours.kinds_of(inputs["b"], inputs["b_scale"])
    return dataclasses.replace(
        ours.config_of(dtype_name(inputs["a"].dtype), weights, scales, "bfloat16", len(inputs["a"])), **changes
    )


@dataclass
class Measurement:
    """A contestant at a shape."""

    name: str
    setup: Setup
    error: float | None = None
    reason: str = ""
    first_ms: float = 0.0
    between_us: float | None = None
    rounds: list[float] = field(default_factory=list)

    def guarded(self, step: Callable[[], None]) -> None:
        """One that fails must not stop the others."""
        if self.reason:
            return
        try:
            step()
        except Exception as error:
            self.reason = f"{type(error).__name__}: {str(error)[:300]}"

    def check(self, inputs: Inputs, wanted: Tensor) -> None:
        out = inputs["out"]
        out.fill_(torch.nan)
        start = time.perf_counter()
        self.setup(inputs)()
        torch.cuda.synchronize()
        self.first_ms = (time.perf_counter() - start) * 1e3
        self.error = float((out.float() - wanted).norm() / wanted.norm())
        worst = float((out.float() - wanted).abs().max() / wanted.abs().max())
        if not (self.error <= _LARGEST_ERROR and worst <= 4 * _LARGEST_ERROR):
            self.reason = f"wrong: relative error {self.error:.2g}, of the worst number {worst:.2g}"

    def time(self, copies: Sequence[Inputs], between: Between, fewest: int) -> None:
        calls = [self.setup(inputs) for inputs in copies]
        count = max(_LEAST_CALLS, len(calls))
        several = [between.after(calls[index % len(calls)]) for index in range(count)]
        options: dict[str, Any] = {"budget_s": 0.0, "fewest": fewest, "most": fewest}
        times = sample_graph(several, copies[0]["a"].device, **options)
        self.between_us = between.us
        self.rounds.append(statistics.median(times) - (between.us or 0.0))

    @property
    def us(self) -> float | None:
        return statistics.median(self.rounds) if self.rounds and not self.reason else None


def inputs_of(shape: Shape, device: torch.device, seed: int) -> dict[str, Any]:
    op = get_operator("gemm.mm")
    return op.complete(shape.case(_ROWS).build(device, seed))


def first_rows(inputs: Inputs, m: int) -> dict[str, Any]:
    """The first rows of activations, and memory for the result."""
    a, a_scale = inputs["a"][:m].clone(), inputs["a_scale"]
    if a_scale is not None and a_scale.ndim == 2:
        a_scale = a_scale[:m].clone()
    out = torch.empty(m, inputs["b"].shape[1], dtype=torch.bfloat16, device=a.device)
    return {**inputs, "a": a, "a_scale": a_scale, "out": out}


def measure(
    shape: Shape, tokens: Iterable[int], setups: Mapping[str, Setup], device: torch.device, rounds: int, fewest: int, alone: bool
) -> list[dict[str, Any]]:
    """All contestants at one shape."""
    count = max(1, math.ceil(_TOUCHED / shape.bytes))
    every = [inputs_of(shape, device, seed) for seed in range(count)]
    rows = []
    for m in tokens:
        copies = [first_rows(inputs, m) for inputs in every]
        wide = decode_operands("mm", *(copies[0][name] for name in ("a", "b", "a_scale", "b_scale")))
        wanted = wide[0] @ wide[1] + copies[0]["bias"].float()
        measurements = [Measurement(name, setup) for name, setup in setups.items()]
        for each in measurements:
            each.guarded(functools.partial(each.check, copies[0], wanted))
        between = Between(device, fewest, alone)
        for _ in range(rounds):
            for each in measurements:
                each.guarded(functools.partial(each.time, copies, between, fewest))
        for each in measurements:
            rows.append(row_of(shape, m, each))
            print(line_of(rows[-1]), flush=True)
    return rows


def row_of(shape: Shape, m: int, found: Measurement) -> dict[str, Any]:
    us = found.us
    return {
        "case": shape.name, "weights": shape.weights, "m": m, "k": shape.k, "n": shape.n,
        "contestant": found.name, "us": us, "rounds_us": found.rounds,
        "floor_us": shape.bytes / _BYTES_PER_US, "bar_us": None if shape.bar is None else shape.bar * (1.0 if m == 1 else 1.15),
        "tb_per_s": None if us is None else shape.bytes / us / 1e6, "relative_error": found.error, "reason": found.reason,
        "between_us": found.between_us, "first_ms": found.first_ms,
    }  # fmt: skip


def line_of(row: Mapping[str, Any]) -> str:
    head = f"{row['case']:<38} m {row['m']:>2}  {row['contestant']:<26}"
    error = "" if row["relative_error"] is None else f"  err {row['relative_error']:.1e}"
    if row["us"] is None:
        return f"{head} {row['reason'] or 'not timed'}{error}"
    return f"{head} {row['us']:8.2f} us  {row['tb_per_s']:.2f} TB/s  floor {row['floor_us']:.2f}{error}"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Microseconds: a contestant a line, a shape and number of rows a column."""
    columns = list(dict.fromkeys((row["case"], row["m"]) for row in rows))
    times = {(row["contestant"], row["case"], row["m"]): row["us"] for row in rows}
    words = [f"{case.partition(' ')[2][:12]} {m}" for case, m in columns]
    lines = [f"{'':<26}" + "".join(f"{word:>16}" for word in words)]
    for name in dict.fromkeys(row["contestant"] for row in rows):
        cells = [times.get((name, *column)) for column in columns]
        lines.append(f"{name:<26}" + "".join(f"{'-' if us is None else format(us, '.2f'):>16}" for us in cells))
    return "\n".join(lines)


def judged(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What of the bars holds, for one row and for 16."""
    return [
        {"name": f"{row['case']}, m = {row['m']}: us", "bound": row["bar_us"], "value": row["us"],
         "holds": row["us"] is not None and row["us"] <= row["bar_us"]}
        for row in rows if row["contestant"] == "ours" and row["bar_us"] is not None and row["m"] in (1, 16)
    ]  # fmt: skip


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX", help="shapes whose name has it")
    parser.add_argument("--tokens", default="", metavar="NUMBERS", help="rows of activations, separated by commas")
    parser.add_argument("--variants", default="", metavar="REGEX", help="other configurations whose name has it")
    parser.add_argument("--quick", action="store_true", help="one round of ten; 1 and 16 rows, shapes with bars, unless given")
    parser.add_argument("--back-to-back", action="store_true", help="nothing between calls in a graph")
    parser.add_argument("--check", action="store_true", help="check results, time nothing")
    parser.add_argument("--list", action="store_true", help="print shapes and variants, measure nothing")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report there")
    given = parser.parse_args(words)
    shapes = [shape for shape in SHAPES if re.search(given.only, shape.name) and (given.only or shape.bar or not given.quick)]
    tokens = [int(word) for word in given.tokens.split(",") if word] or ([1, 16] if given.quick else list(TOKENS))
    setups: dict[str, Setup] = {"torch": torchs, "portable": portable, "ours": own}
    setups |= {name: variant(each) for name, each in VARIANTS.items() if given.variants and re.search(given.variants, name)}
    if given.list:
        print("\n".join([*(f"{shape.name}: k {shape.k}, n {shape.n}" for shape in shapes), *setups]))
        return
    if not shapes or any(not 0 < m <= 16 for m in tokens):
        parser.error("no shape has such a name, or rows are not between 1 and 16")
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    rounds, fewest = (0, 1) if given.check else (1, 10) if given.quick else (3, 17)
    command = shlex.join([Path(sys.executable).name, *(sys.argv if words is None else ["h200_mm.py", *words])])
    made: dict[str, Any] = {"metadata": dataclasses.asdict(collect_metadata(command, device)), "back_to_back": given.back_to_back}
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for shape in shapes:
            rows += measure(shape, tokens, setups, device, rounds, fewest, given.back_to_back)
            torch.cuda.empty_cache()
            if given.output is not None:
                report = {**made, "bars": judged(rows), "rows": rows}
                beside = given.output.with_name(f".{given.output.name}.new")
                beside.write_text(json.dumps(report, indent=1, default=str) + "\n")
                beside.replace(given.output)
    print(table(rows))
    for bar in [] if given.check else judged(rows):
        print(f"{'holds ' if bar['holds'] else 'MISSED'} {bar['name']}: {bar['value']} (<= {bar['bound']:g})")


if __name__ == "__main__":
    main()
