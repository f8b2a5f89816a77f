"""Measures decode attention with other K/V tiles and numbers of CTAs per SM, on one H200.

    python packages/tokenspeed-kernel-nvidia/benchmarks/h200_decode_tiles.py --output h200_decode_tiles.json

A call is one layer of GPT-OSS-120B: 64 query heads, 8 KV heads of dimension 64, a bfloat16 cache with pages of 64 tokens. Calls run
back to back in a CUDA graph. Each reads another cache than the call before, and all caches together exceed L2, so that caches are
cold. Each variant's result is compared with that of the selected configuration. A row is printed and written as soon as it is
measured. In lengths like ``1-4096``, each sequence has a random length. ``tokens`` counts the visible tokens of all sequences.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tokenspeed_kernel.workbench.benchmark import write_result
from tokenspeed_kernel.workbench.benchmark.timing import captured, sample
from tokenspeed_kernel_nvidia import warmup
from tokenspeed_kernel_nvidia.sm90.attention.decode import launch
from tokenspeed_kernel_nvidia.sm90.attention.decode.config import CONSUMERS, Config, Work

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 64, 8, 64, 64
BLOCKS, RESIDENT = (16, 32, 64, 128), (1, 2, 3, 4)
CACHED_BYTES = 300e6  # all caches of a case together, at least; six times L2
PASSES = 3  # times that a graph reads each cache
ROUNDS = 7


@dataclass(frozen=True)
class Case:
    """Sequences of a decode step.

    Attributes:
        sequences: number of sequences.
        shortest, longest: their lengths in tokens, drawn evenly between these.
        window: the argument ``window_left``; -1 for all keys.
    """

    sequences: int
    shortest: int
    longest: int
    window: int = -1

    @property
    def work(self) -> Work:
        """The class of the work in `config_of`."""
        return "short" if self.window >= 0 else "much"

    def lengths(self) -> Tensor:
        """Returns the length of each sequence. Every run draws the same lengths."""
        bounds = self.shortest, self.longest + 1
        return torch.randint(*bounds, (self.sequences,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)

    @property
    def tokens(self) -> int:
        """The number of visible tokens of all sequences together."""
        lengths = self.lengths()
        return int((lengths if self.window < 0 else lengths.clamp(max=self.window + 1)).sum())

    def __str__(self) -> str:
        lengths = str(self.longest) if self.shortest == self.longest else f"{self.shortest}-{self.longest}"
        return f"{self.sequences} x {lengths}" + (f", window {self.window}" if self.window >= 0 else "")


CASES = (
    # Sequences of equal length. With one CTA per SM there are 16 groups of CTAs, so 16 of these sequences need not be split.
    Case(16, 1088, 1088),
    Case(20, 1088, 1088),
    Case(64, 1088, 1088),
    Case(256, 1088, 1088),
    Case(4, 32768, 32768),
    # Sequences of different lengths.
    Case(8, 512, 1536),
    Case(16, 512, 1536),
    Case(32, 512, 1536),
    Case(64, 512, 1536),
    Case(128, 512, 1536),
    Case(13, 1, 4096),
    Case(40, 1, 4096),
    Case(4, 1, 32768),
    # Layers with a window.
    Case(2, 1088, 1088, 127),
    Case(8, 1088, 1088, 127),
    Case(16, 1088, 1088, 127),
    Case(40, 1, 4096, 127),
    Case(64, 1088, 1088, 127),
    Case(96, 1088, 1088, 127),
)


def variants_of(work: Work) -> dict[str, Config]:
    """Returns the configurations to measure by name, the selected one first. Each ring has a stage for every consumer warp."""
    selected = launch.config_of("bfloat16", (HEAD_DIM, HEAD_DIM), PAGE_SIZE, HEADS // KV_HEADS, work)
    found = {"selected": selected}
    for block, resident in itertools.product(BLOCKS, RESIDENT):
        made = replace(selected, block=block, resident=resident, box=min(block, PAGE_SIZE), heads=1)
        if made.stages >= CONSUMERS:
            found[f"{block} keys, {resident} CTAs"] = made
    return found


def calls_of(case: Case, device: torch.device) -> list[Callable[[], Tensor]]:
    """Returns calls of a case, each with its own cache."""
    draw = torch.Generator(device).manual_seed(0)
    lengths = case.lengths().to(device)
    pages = -(-case.longest // PAGE_SIZE)
    shape = case.sequences * pages, PAGE_SIZE, KV_HEADS, HEAD_DIM
    copies = max(2, math.ceil(CACHED_BYTES / (4 * math.prod(shape))))
    q = torch.randn(case.sequences, HEADS, HEAD_DIM, generator=draw, device=device).bfloat16()
    sinks = torch.zeros(HEADS, device=device)

    def call() -> Callable[[], Tensor]:
        k_cache, v_cache = (torch.randn(shape, generator=draw, device=device).bfloat16() for _ in range(2))
        table = torch.randperm(case.sequences * pages, generator=draw, device=device, dtype=torch.int32).view(case.sequences, pages)
        caches = k_cache, v_cache, table, lengths
        others = pages * PAGE_SIZE, 1, case.window, 0.0, sinks, False, None, None, None, None
        return partial(launch.mha_decode_with_kvcache, q, *caches, *others)

    return [call() for _ in range(copies)]


def measured(case: Case, device: torch.device) -> Iterator[dict[str, Any]]:
    """Measures a case with all variants in turns, and yields a row for each."""
    calls = calls_of(case, device)
    wanted: list[Tensor] = []
    replays, errors = {}, {}
    for name, config in variants_of(case.work).items():
        launch._program_of.cache_clear()
        with mock.patch.object(launch, "config_of", lambda *_, config=config: config):
            got = [call().clone() for call in calls]
            wanted = wanted or got
            replays[name] = captured(calls * PASSES, device)
        errors[name] = max(float((one.float() - other.float()).abs().max()) for one, other in zip(got, wanted, strict=True))
    launch._program_of.cache_clear()
    times: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(ROUNDS):
        for name, replay in replays.items():
            times[name].append(statistics.median(sample(replay, device, budget_s=0.01, cache="warm")) / (PASSES * len(calls)))
    for name, config in variants_of(case.work).items():
        sizes = {"tokens": case.tokens, "block": config.block, "resident": config.resident}
        yield {"case": str(case), "variant": name, **sizes, "us": statistics.median(times[name]), "error": errors[name]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--jobs", type=int, default=16, help="processes that compile")
    options = parser.parse_args()
    programs = [(launch.decode_program, config) for work in ("much", "short") for config in variants_of(work).values()]
    for outcome in warmup.warm_up(programs, options.jobs):
        if outcome.error:
            raise RuntimeError(outcome.error)
    rows: list[dict[str, Any]] = []
    for case in CASES:
        for row in measured(case, torch.device("cuda", torch.cuda.current_device())):
            rows.append(row)
            print(f"{row['case']:26}{row['variant']:22}{row['us']:9.2f} us   error {row['error']:.1e}", flush=True)
            write_result(options.output, "cuda", rows=rows)


if __name__ == "__main__":
    main()
