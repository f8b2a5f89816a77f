"""Measures the GEMMs around attention in decode steps of GPT-OSS-120B with 9 to 64 tokens, and the router, on one H200.

    python packages/tokenspeed-kernel-nvidia/benchmarks/h200_rows.py --output rows.json
    python packages/tokenspeed-kernel-nvidia/benchmarks/h200_rows.py --compile   # only fills the cache; needs no GPU

"qkv" is the residual add, RMSNorm, GEMM of 2880 x 5120, RoPE and cache write. "output" is the GEMM of 4096 x 2880 with a bias.
"both" is one after the other, for layer after layer. "today" is what the selection chooses; the other variants are the kernels of
`gemm.split_k` and `moe.route`, by name. "router" is the residual add, RMSNorm, GEMM of 2880 x 128, and top-4.

All variants run in one process on the same random values. Each variant's results are first compared with float64. Then calls on
the weights of several layers run in a CUDA graph, with caches evicted in between. The weights exceed the L2 cache, so every call
reads cold weights. Two times are reported per call: ``us`` with the calls back to back, and ``apart_us`` with a small PyTorch
kernel, which does not use PDL, before each call. The time of these kernels alone in a graph is subtracted from ``apart_us``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import tokenspeed_kernel as ops
from tokenspeed_kernel.workbench.benchmark import write_result
from tokenspeed_kernel.workbench.benchmark.timing import sample_graph
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_nvidia import warmup
from tokenspeed_kernel_nvidia.sm90.attention.rmsnorm_qkv_rope import launch as qkv_launch
from tokenspeed_kernel_nvidia.sm90.attention.rmsnorm_qkv_rope.split_k_config import split_k_config_of
from tokenspeed_kernel_nvidia.sm90.gemm.mm.config import config_of as mm_config_of
from tokenspeed_kernel_nvidia.sm90.gemm.mm.config import sharing_of
from tokenspeed_kernel_nvidia.sm90.gemm.mm.launch import mm_program
from tokenspeed_kernel_nvidia.sm90.gemm.split_k import launch as mm_launch
from tokenspeed_kernel_nvidia.sm90.gemm.split_k.config import MAX_TOKENS, config_of
from tokenspeed_kernel_nvidia.sm90.moe.route import launch as route_launch

EPS, PAGE_SIZE, POSITIONS = 1e-5, 64, 4096
SMS = 132  # of an H200
READ_BANDWIDTH = 4.35e6  # measured on an H200, in bytes per microsecond
MOST_ERROR = 1e-2  # relative to float64, of all elements together; a bfloat16 logit of 2 is off by up to 4e-3
KERNELS = {
    "qkv": "cutedsl_rmsnorm_qkv_rope_split_k_64",
    "output": "cutedsl_mm_split_k_bfloat16",
    "router": "cutedsl_rmsnorm_moe_topk",
}
TODAY = "today"
WHAT = ("qkv", "output", "both", "router")
# Variant name -> the fields of the configuration that the variant changes.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "split_k": {},
    "split_k, 12 stages": {"most_stages": 12},
    "split_k, 8 stages": {"most_stages": 8},
    "split_k, no prefetch": {"prefetched": 0},
}
Call = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a model's layer. The defaults are GPT-OSS-120B's. All heads have 64 elements."""

    hidden: int = 2880
    heads: int = 64
    kv_heads: int = 8
    head_dim: int = 64
    experts: int = 128
    top_k: int = 4

    @property
    def columns(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


class Layers:
    """The weights and caches of some layers, and the calls on them for one number of tokens."""

    def __init__(self, sizes: Sizes, layers: int, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        self.random = torch.Generator(device).manual_seed(0)
        s = sizes
        self.qkv = [self.normal(s.columns, s.hidden, scale=s.hidden**-0.5) for _ in range(layers)]
        self.output = [self.normal(s.hidden, s.width, scale=s.width**-0.5) for _ in range(layers)]
        self.router = [self.normal(s.experts, s.hidden, scale=s.hidden**-0.5) for _ in range(layers)]
        self.norm = 1 + self.normal(s.hidden, scale=0.1)
        self.biases = {"qkv": self.normal(s.columns), "output": self.normal(s.hidden), "router": self.normal(s.experts)}
        angles = torch.rand(POSITIONS, s.head_dim // 2, generator=self.random, device=device) * 6
        self.table = torch.cat((angles.cos(), angles.sin()), 1)
        self.use(1)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.random, device=self.device) * scale).bfloat16()

    def use(self, tokens: int) -> None:
        """Draws inputs for a number of tokens."""
        s = self.sizes
        self.x, self.residual, self.attended = (self.normal(tokens, n) for n in (s.hidden, s.hidden, s.width))
        self.caches = [torch.zeros(tokens, PAGE_SIZE, s.kv_heads, s.head_dim, device=self.device).bfloat16() for _ in range(2)]
        self.slots = torch.randperm(tokens * PAGE_SIZE, generator=self.random, device=self.device)[:tokens]
        self.positions = torch.randint(POSITIONS, (tokens,), generator=self.random, device=self.device)

    def run(self, what: str, layer: int, override: str | None = None) -> Tensor:
        """Runs an operator with a layer's weights. Returns the result that `wanted` returns in float64."""
        s = self.sizes
        if what == "qkv":
            qkv, _ = ops.rmsnorm_qkv_rope(
                self.x, self.norm, self.qkv[layer].t(), self.positions, self.table, s.kv_heads, s.head_dim, EPS,
                residual=self.residual, bias=self.biases["qkv"], k_cache=self.caches[0], v_cache=self.caches[1],
                slot_mapping=self.slots, override=override,
            )  # fmt: skip
            return qkv
        if what == "output":
            return ops.mm(self.attended, self.output[layer].t(), bias=self.biases["output"], override=override)
        _, weights, _, _ = ops.rmsnorm_moe_topk(
            self.x, self.norm, self.router[layer].t(), s.top_k, eps=EPS, residual=self.residual, router_bias=self.biases["router"],
            override=override,
        )  # fmt: skip
        return weights

    def wanted(self, what: str) -> Tensor:
        """Returns the float64 result of an operator with the first layer's weights."""
        if what == "output":
            return self.attended.double() @ self.output[0].double().t() + self.biases["output"].double()
        total = (self.x.float() + self.residual.float()).bfloat16().double()
        normed = total * (total.square().mean(-1, keepdim=True) + EPS).rsqrt() * self.norm.double()
        if what == "router":
            logits = normed @ self.router[0].double().t() + self.biases["router"].double()
            return logits.topk(self.sizes.top_k, dim=-1).values.softmax(-1)
        qkv = (normed @ self.qkv[0].double().t() + self.biases["qkv"].double()).unflatten(1, (-1, self.sizes.head_dim))
        turned = self.sizes.heads + self.sizes.kv_heads
        both = [qkv[:, : self.sizes.heads], qkv[:, self.sizes.heads : turned]]
        rotated = get_operator("embedding.apply_rope").body(*both, self.positions, self.table)
        return torch.cat([*rotated, qkv[:, turned:]], 1).flatten(1)

    def error(self, what: str, call: Call) -> float:
        """Returns the relative error of a call on the first layer, and checks the cache that it writes.

        Raises:
            ValueError: the cache does not hold k and v of the result, or an element is not finite.
        """
        for cache in self.caches:
            cache.zero_()
        got = call()
        if what == "qkv":
            k, v = got.unflatten(1, (-1, self.sizes.head_dim))[:, self.sizes.heads :].chunk(2, 1)
            for cache, of_tokens in zip(self.caches, (k, v), strict=True):
                if not torch.equal(cache.flatten(0, 1)[self.slots], of_tokens):
                    raise ValueError("the cache does not hold the result")
        if not got.isfinite().all():
            raise ValueError("the result is not finite")
        wanted = self.wanted(what)
        return float((got.double() - wanted).norm() / wanted.norm())

    def bytes(self, what: str) -> int:
        """Returns the bytes of a layer's weights."""
        return sum(weights[0].numel() * 2 for weights in self.weights(what))

    def weights(self, what: str) -> list[list[Tensor]]:
        return {"qkv": [self.qkv], "output": [self.output], "both": [self.qkv, self.output], "router": [self.router]}[what]


@contextlib.contextmanager
def changed(changes: Mapping[str, Any]) -> Iterator[None]:
    """A context manager: in its block, the launchers choose configurations with changed fields."""
    with contextlib.ExitStack() as stack:
        for module, name in ((qkv_launch, "split_k_config_of"), (mm_launch, "config_of")):
            chosen = getattr(module, name)
            made = functools.partial(lambda chosen, *sizes: dataclasses.replace(chosen(*sizes), **changes), chosen)
            stack.enter_context(mock.patch.object(module, name, made))
            module._launch_of.cache_clear()
            stack.callback(module._launch_of.cache_clear)
        yield


def calls_of(layers: Layers, what: str, variant: str) -> list[Call]:
    """Returns the calls on all layers."""
    parts = ["qkv", "output"] if what == "both" else [what]
    names = [None if variant == TODAY else KERNELS.get(part) for part in parts]

    def of_layer(index: int) -> Call:
        def run() -> Any:
            for part, name in zip(parts, names, strict=True):
                found = layers.run(part, index, name)
            return found

        return run

    return [of_layer(index) for index in range(len(layers.qkv))]


def measured(layers: Layers, what: str, variant: str, seconds: float, spacer: Call, spacer_us: float) -> dict[str, Any]:
    """Checks and times a variant. If it fails, the row has the reason.

    Args:
        spacer: launches the small kernel that stands before each call for ``apart_us``, and takes ``spacer_us``.
    """
    row: dict[str, Any] = {"what": what, "tokens": len(layers.x), "variant": variant, "us": None, "apart_us": None, "error": None}
    with changed(VARIANTS.get(variant, {})):
        try:
            calls = calls_of(layers, what, variant)
            if what != "both":
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
    """Measures all variants for some numbers of tokens."""
    scratch = torch.zeros(64, device=layers.device)

    def spacer() -> None:
        scratch.add_(1.0)

    spacer_us = statistics.median(sample_graph([spacer] * len(layers.qkv), layers.device, budget_s=seconds))
    for count in tokens:
        layers.use(count)
        for what in WHAT if count <= MAX_TOKENS else ["router"]:
            for variant in [TODAY, "split_k"] if what == "router" else [TODAY, *VARIANTS]:
                yield measured(layers, what, variant, seconds, spacer, spacer_us)


def line(row: Mapping[str, Any]) -> str:
    numbers = [f"{row[name]:9.2f}" if row[name] is not None else "        -" for name in ("us", "apart_us")]
    share = f"{100 * row['share_of_bandwidth']:5.1f}%" if row["us"] is not None else "     -"
    error = f"{row['error']:.2e}" if row["error"] is not None else ""
    name = f"{row['what']:7} {row['tokens']:3} tokens  {row['variant']:22}"
    return f"{name}{''.join(numbers)} us  {share}  {error} {row.get('note', '')}"


def programs(sizes: Sizes, tokens: Sequence[int]) -> list[tuple[Any, Any]]:
    """Returns the programs of this package that the variants launch, with their configurations."""
    found: list[tuple[Any, Any]] = [(route_launch.rmsnorm_moe_topk_program, each) for each in route_launch.every_config()]
    today = mm_config_of("bfloat16", "dense", "none", "bfloat16", 16, sharing_of("dense", 16, sizes.hidden, 2 * sizes.width, SMS))
    found.append((mm_program, today))
    for changes in VARIANTS.values():
        for count in (count for count in tokens if count <= MAX_TOKENS):
            if count > 8:
                config = split_k_config_of("bfloat16", sizes.head_dim, count, sizes.hidden)
                found.append((qkv_launch.rmsnorm_qkv_rope_split_k_program, dataclasses.replace(config, **changes)))
            config = config_of("bfloat16", count, sizes.width)
            found.append((mm_launch.mm_split_k_program, dataclasses.replace(config, **changes)))
    return [*dict.fromkeys(found)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[9, 16, 32, 64, 128, 256])
    parser.add_argument("--layers", type=int, default=12, help="layers, whose weights are read in turn")
    parser.add_argument("--seconds", type=float, default=0.03, help="seconds of timing per graph")
    parser.add_argument("--jobs", type=int, default=min(16, os.cpu_count() or 1), help="processes that compile")
    parser.add_argument("--compile", action="store_true", help="compile, and measure nothing")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    begun = time.monotonic()
    for outcome in warmup.warm_up(programs(Sizes(), given.tokens), given.jobs):
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
