"""Measures what a page size at run time costs the extend kernel, on one H200.

    python packages/tokenspeed-kernel-nvidia/benchmarks/h200_page_sizes.py --output page_sizes.json

The kernel's program takes the page size from the cache's shape if a page has whole blocks of keys, see `Config.holds_blocks`. Here
the same calls also run with programs in which the page size is a constant. Both programs must return the same bits. They are timed
in turns, with cold caches. The exit status is 1 if the page size at run time costs more than 1% in some call.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tokenspeed_kernel.workbench.benchmark import measure, write_result
from tokenspeed_kernel_nvidia.sm90.attention.prefill import launch
from tokenspeed_kernel_nvidia.sm90.attention.prefill.config import Config

ROUNDS = 5
MOST = 1.01  # the largest acceptable ratio of the times
# Query heads, KV heads and head_dim: GPT-OSS's layers without a window, Llama 3 (8B), Gemma 2 (9B).
SHAPES = ((64, 8, 64), (32, 8, 128), (16, 8, 256))
# Sequences, their new tokens, and all their tokens.
LENGTHS = ((16, 1024, 1024), (8, 1024, 8192), (1, 8192, 8192), (64, 16, 2048))
PAGE_SIZES = (64, 128, 256)


class Constant(Config):
    """A configuration whose program has the page size as a constant."""

    @property
    def holds_blocks(self) -> bool:
        return False


def call_of(heads: int, kv_heads: int, head_dim: int, sequences: int, new: int, kv_len: int, page_size: int) -> Callable[[], Any]:
    """Returns a call of the extend kernel on random tensors, with pages in random order."""
    draw = torch.Generator("cuda").manual_seed(0)
    pages = -(-kv_len // page_size)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, device="cuda").bfloat16()

    k_cache, v_cache = (random(sequences * pages, page_size, kv_heads, head_dim) for _ in range(2))
    table = torch.randperm(sequences * pages, generator=draw, device="cuda", dtype=torch.int32).view(sequences, pages)
    cu_seqlens = torch.arange(0, sequences * new + 1, new, dtype=torch.int32, device="cuda")
    lengths = torch.full((sequences,), kv_len, dtype=torch.int32, device="cuda")
    q, out = (random(sequences * new, heads, head_dim) for _ in range(2))

    def call() -> torch.Tensor:
        launch.mha_extend_with_kvcache(
            q, cu_seqlens, k_cache, v_cache, table, lengths, kv_len, True, -1, 0.0, None, False, None, None, None, None, out
        )
        return out

    return call


def constant(call: Callable[[], Any]) -> Callable[[], Any]:
    """Returns the call with programs whose page size is a constant."""
    program_of = launch._program_of.__wrapped__

    def made(*arguments: Any) -> Any:
        with mock.patch.object(launch, "Config", Constant):
            return program_of(*arguments)

    kept: dict[Any, Any] = {}

    def fixed() -> Any:
        with mock.patch.object(launch, "_program_of", lambda *its: kept[its] if its in kept else kept.setdefault(its, made(*its))):
            return call()

    return fixed


def compared(shape: tuple[int, int, int], lengths: tuple[int, int, int], page_size: int) -> dict[str, Any]:
    """Times a call with both programs. Returns the times in microseconds, and the median of the rounds' ratios."""
    call = call_of(*shape, *lengths, page_size)
    fixed = constant(call)
    same = torch.equal(call().clone(), fixed().clone())
    rounds = [[measure(each, "cuda", budget_s=0.1).median_us for each in (call, fixed)] for _ in range(ROUNDS)]
    ratio = statistics.median(ours / theirs for ours, theirs in rounds)
    times = {
        name: statistics.median(times)
        for name, times in zip(("run_time_us", "constant_us"), zip(*rounds, strict=True), strict=True)
    }
    row = {"shape": shape, "lengths": lengths, "page_size": page_size, **times, "ratio": ratio, "same_bits": same}
    print(*(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()), flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    for shape in SHAPES:
        for page_size in PAGE_SIZES:
            if Config("bfloat16", shape[2], shape[0] // shape[1]).with_page_size(page_size).holds_blocks:
                rows += [compared(shape, lengths, page_size) for lengths in LENGTHS]
                write_result(options.output, "cuda", rows=rows)
    return int(any(row["ratio"] > MOST or not row["same_bits"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
