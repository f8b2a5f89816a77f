"""Measures the output projection of GPT-OSS-120B's attention with 17 to 32 tokens, and the router with 9 to 256, on one H200.

    python packages/tokenspeed-kernel-nvidia/benchmarks/h200_rows.py --output rows.json
    python packages/tokenspeed-kernel-nvidia/benchmarks/h200_rows.py --compile   # only fills the cache; needs no GPU
    python packages/tokenspeed-kernel-nvidia/benchmarks/h200_rows.py --readme    # writes the table of h200_rows.json

"output" is the GEMM of 4096 x 2880 with a bias. "router" is the residual add, RMSNorm, GEMM of 2880 x 128, and top-4. The kernels
of `gemm.split_k` and `moe.route` are compared with those that selection would prefer without them.

All kernels run in one process on the same random values. Each kernel's results are first compared with float64. Then calls on
the weights of several layers run in a CUDA graph, with caches evicted in between. The weights exceed the L2 cache, so every call
reads cold weights. Two times are reported per call: ``us`` with the calls back to back, and ``apart_us`` with a small PyTorch
kernel, which does not use PDL, before each call. The time of these kernels alone in a graph is subtracted from ``apart_us``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tokenspeed_kernel as ops
from tokenspeed_kernel.triton.moe.rmsnorm_moe_topk import MOST_TOKENS
from tokenspeed_kernel.workbench.benchmark import write_result
from tokenspeed_kernel.workbench.benchmark.figures import Marks, three_digits
from tokenspeed_kernel.workbench.benchmark.timing import sample_graph
from tokenspeed_kernel_nvidia import warmup
from tokenspeed_kernel_nvidia.sm90.gemm.split_k.config import every_config
from tokenspeed_kernel_nvidia.sm90.gemm.split_k.launch import mm_split_k_program
from tokenspeed_kernel_nvidia.sm90.moe.route import launch as route_launch

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
MARKS = Marks("<!-- measured rows -->", "<!-- end of measured rows -->")
EPS = 1e-5
READ_BANDWIDTH = 4.35e6  # measured on an H200, in bytes per microsecond
MOST_ERROR = 1e-2  # relative to float64, of all elements together; a bfloat16 logit of 2 is off by up to 4e-3
OURS = {"output": "cutedsl_mm_split_k_bfloat16", "router": "cutedsl_rmsnorm_moe_topk"}
BASELINES = {
    "torch_mm_bfloat16": "PyTorch (cuBLAS)",
    "triton_rmsnorm_moe_topk": "portable (Triton)",
    "composed_rmsnorm_moe_topk": "separate kernels",
}
WHAT = {"output": range(17, 33), "router": range(9, 257)}  # the numbers of tokens of each
Call = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a model's layer. The defaults are GPT-OSS-120B's. ``width``: elements of all heads of a token."""

    hidden: int = 2880
    width: int = 4096
    experts: int = 128
    top_k: int = 4


class Layers:
    """The weights of some layers, and the calls on them for one number of tokens."""

    def __init__(self, sizes: Sizes, layers: int, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        self.random = torch.Generator(device).manual_seed(0)
        s = sizes
        self.output = [self.normal(s.hidden, s.width, scale=s.width**-0.5) for _ in range(layers)]
        self.router = [self.normal(s.experts, s.hidden, scale=s.hidden**-0.5) for _ in range(layers)]
        self.norm = 1 + self.normal(s.hidden, scale=0.1)
        self.biases = {"output": self.normal(s.hidden), "router": self.normal(s.experts)}
        self.use(1)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.random, device=self.device) * scale).bfloat16()

    def use(self, tokens: int) -> None:
        """Draws inputs for a number of tokens."""
        s = self.sizes
        self.x, self.residual, self.attended = (self.normal(tokens, n) for n in (s.hidden, s.hidden, s.width))

    def run(self, what: str, layer: int, kernel: str) -> Tensor:
        """Runs a kernel with a layer's weights. Returns the result that `wanted` returns in float64."""
        s = self.sizes
        if what == "output":
            return ops.mm(self.attended, self.output[layer].t(), bias=self.biases["output"], override=kernel)
        _, weights, _, _ = ops.rmsnorm_moe_topk(
            self.x, self.norm, self.router[layer].t(), s.top_k, eps=EPS, residual=self.residual, router_bias=self.biases["router"],
            override=kernel,
        )  # fmt: skip
        return weights

    def wanted(self, what: str) -> Tensor:
        """Returns the float64 result of an operator with the first layer's weights."""
        if what == "output":
            return self.attended.double() @ self.output[0].double().t() + self.biases["output"].double()
        total = (self.x.float() + self.residual.float()).bfloat16().double()
        normed = total * (total.square().mean(-1, keepdim=True) + EPS).rsqrt() * self.norm.double()
        logits = normed @ self.router[0].double().t() + self.biases["router"].double()
        return logits.topk(self.sizes.top_k, dim=-1).values.softmax(-1)

    def error(self, what: str, call: Call) -> float:
        """Returns the relative error of a call on the first layer.

        Raises:
            ValueError: an element is not finite.
        """
        got = call()
        if not got.isfinite().all():
            raise ValueError("the result is not finite")
        wanted = self.wanted(what)
        return float((got.double() - wanted).norm() / wanted.norm())

    def bytes(self, what: str) -> int:
        """Returns the bytes of a layer's weights."""
        return (self.output if what == "output" else self.router)[0].numel() * 2


def kernels_of(what: str, tokens: int) -> tuple[str, str]:
    """Returns the names of our kernel, and of the kernel that selection would prefer without it."""
    if what == "output":
        return OURS[what], "torch_mm_bfloat16"
    return OURS[what], "triton_rmsnorm_moe_topk" if tokens <= MOST_TOKENS else "composed_rmsnorm_moe_topk"


def measured(layers: Layers, what: str, kernel: str, seconds: float, spacer: Call, spacer_us: float) -> dict[str, Any]:
    """Checks and times a kernel. If it fails, the row has the reason.

    Args:
        spacer: launches the small kernel that stands before each call for ``apart_us``, and takes ``spacer_us``.
    """
    row: dict[str, Any] = {"what": what, "tokens": len(layers.x), "kernel": kernel, "us": None, "apart_us": None, "error": None}
    calls: list[Call] = [functools.partial(layers.run, what, index, kernel) for index in range(len(layers.output))]
    try:
        row["error"] = layers.error(what, calls[0])
        row["us"] = statistics.median(sample_graph(calls, layers.device, budget_s=seconds))
        apart = [each for call in calls for each in (spacer, call)]
        row["apart_us"] = 2 * statistics.median(sample_graph(apart, layers.device, budget_s=seconds)) - spacer_us
    except (RuntimeError, ValueError) as error:
        row["note"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if row["us"] is not None:
        row["tb_per_s"] = layers.bytes(what) / row["us"] / 1e6
        row["share_of_bandwidth"] = layers.bytes(what) / row["us"] / READ_BANDWIDTH
    return row


def rows(layers: Layers, tokens: Sequence[int], seconds: float) -> Iterator[dict[str, Any]]:
    """Measures all kernels for some numbers of tokens."""
    scratch = torch.zeros(64, device=layers.device)

    def spacer() -> None:
        scratch.add_(1.0)

    spacer_us = statistics.median(sample_graph([spacer] * len(layers.output), layers.device, budget_s=seconds))
    for count in tokens:
        layers.use(count)
        for what, served in WHAT.items():
            for kernel in kernels_of(what, count) if count in served else ():
                yield measured(layers, what, kernel, seconds, spacer, spacer_us)


def line(row: Mapping[str, Any]) -> str:
    numbers = [f"{row[name]:9.2f}" if row[name] is not None else "        -" for name in ("us", "apart_us")]
    share = f"{100 * row['share_of_bandwidth']:5.1f}%" if row["us"] is not None else "     -"
    error = f"{row['error']:.2e}" if row["error"] is not None else ""
    name = f"{row['what']:7} {row['tokens']:3} tokens  {row['kernel']:28}"
    return f"{name}{''.join(numbers)} us  {share}  {error} {row.get('note', '')}"


def programs() -> list[tuple[Any, Any]]:
    """Returns the programs of this package that are measured, with their configurations."""
    found: list[tuple[Any, Any]] = [(route_launch.rmsnorm_moe_topk_program, each) for each in route_launch.every_config()]
    return found + [(mm_split_k_program, each) for each in every_config() if each.dtype == "bfloat16"]


def section(report: Mapping[str, Any]) -> str:
    """Returns the Markdown of the README's section: how the rows were measured, and a table."""
    metadata = report["metadata"]
    lines = [
        "### GEMMs and the router of more than eight tokens",
        "",
        f"{metadata['device']}, driver {metadata['driver']}, torch {metadata['torch']}, commit {metadata['git_commit'][:12]}.",
        "",
        f"`{metadata['command']}`",
        "",
        "GPT-OSS-120B's output projection (with a bias) and router (residual add, norm, GEMM, top-4), with cold weights. Each time "
        'is a median of calls in a CUDA graph, back to back; "apart": with a small PyTorch kernel before each call, whose own time '
        "is subtracted. Baselines are the kernels that selection would prefer without this package's.",
        "",
        "| microseconds | this package | baseline | apart, this package | apart, baseline | baseline | baseline / ours |",
        "|---|---|---|---|---|---|---|",
    ]
    by_call: dict[tuple[str, int], dict[str, Mapping[str, Any]]] = {}
    for row in report["rows"]:
        by_call.setdefault((row["what"], row["tokens"]), {})[row["kernel"]] = row
    for (what, tokens), found in by_call.items():
        ours, other = (found[name] for name in kernels_of(what, tokens))
        times = [three_digits(row[name]) for name in ("us", "apart_us") for row in (ours, other)]
        lines.append(f"| {what} x {tokens} | {' | '.join(times)} | {BASELINES[other['kernel']]} | {other['us'] / ours['us']:.2f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[9, 16, 17, 24, 32, 64, 128, 256])
    parser.add_argument("--layers", type=int, default=12, help="layers, whose weights are read in turn")
    parser.add_argument("--seconds", type=float, default=0.03, help="seconds of timing per graph")
    parser.add_argument("--jobs", type=int, default=min(16, os.cpu_count() or 1), help="processes that compile")
    parser.add_argument("--compile", action="store_true", help="compile, and measure nothing")
    parser.add_argument("--readme", action="store_true", help="write the table into the README, and measure nothing")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    if given.readme:
        README.write_text(MARKS.replaced(README.read_text(), section(json.loads((HERE / "h200_rows.json").read_text()))))
        return 0
    begun = time.monotonic()
    for outcome in warmup.warm_up(programs(), given.jobs):
        if outcome.error:
            print(outcome.error, flush=True)
    print(f"compiled after {time.monotonic() - begun:.1f} s", flush=True)
    if given.compile:
        return 0
    layers = Layers(Sizes(), given.layers, torch.device("cuda"))
    found = []
    for row in rows(layers, given.tokens, given.seconds):
        print(line(row), flush=True)
        found.append(row)
        write_result(given.output, "cuda", rows=found)
    print(f"done after {time.monotonic() - begun:.1f} s")
    wrong = [row for row in found if row["us"] is None or (row["error"] or 0.0) > MOST_ERROR]
    for row in wrong:
        print("wrong:", line(row))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
