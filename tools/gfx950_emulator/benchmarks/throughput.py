"""Measures the emulator's speed on kernels of the core: attention prefill and a mixture-of-experts layer.

    python tools/gfx950_emulator/benchmarks/throughput.py --output tools/gfx950_emulator/benchmarks/throughput.json

Times are wall times of the public call, medians of several calls after a first call that compiles and decodes. A *lockstep
instruction* is an instruction of a workgroup, counted once for all its waves. The emulator executes several workgroups together, so
it dispatches fewer instructions than there are lockstep instructions. Before timing, results are checked against the float32
reference.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy
import torch
import triton

import tokenspeed_kernel as tk
from gfx950_emulator import Emulator, emulated_gfx950
from tokenspeed_kernel.workbench.benchmark import as_text, collect_metadata

Work = tuple[Callable[[], torch.Tensor], torch.Tensor]


def prefill(tokens: int, heads: int, kv_heads: int) -> Callable[[], Work]:
    """Returns a function that prepares causal attention of one sequence: bfloat16, head_dim 64."""

    def make() -> Work:
        q, k, v = (torch.randn(tokens, n, 64, dtype=torch.bfloat16) for n in (heads, kv_heads, kv_heads))
        cu = torch.tensor([0, tokens], dtype=torch.int32)
        expected = tk.mha_prefill(q.float(), k.float(), v.float(), cu, max_seqlen=tokens, solution="reference")
        return lambda: tk.mha_prefill(q, k, v, cu, max_seqlen=tokens), expected

    return make


def experts(tokens: int, count: int, hidden: int) -> Callable[[], Work]:
    """Returns a function that prepares a router and MXFP4 experts: top 2, bfloat16 activations."""

    def make() -> Work:
        x, logits = torch.randn(tokens, hidden, dtype=torch.bfloat16), torch.randn(tokens, count)

        def codes(*shape: int) -> torch.Tensor:
            return torch.randint(0, 256, shape, dtype=torch.uint8)

        def scales(*shape: int) -> torch.Tensor:
            return torch.randint(120, 124, shape, dtype=torch.uint8)

        weights = tk.MoEWeights(
            codes(count, 2 * hidden, hidden // 2), scales(count, 2 * hidden, hidden // 32), None,
            codes(count, hidden, hidden // 2), scales(count, hidden, hidden // 32), None,
        )  # fmt: skip
        plan = tk.moe_apply.plan(count, 2, hidden, hidden, weight_format="mxfp4")
        prepared = tk.moe_apply.prepare(weights, plan)

        def layer() -> torch.Tensor:
            return tk.moe_apply(x, prepared, *tk.moe_topk(logits, 2), plan)

        canonical = tk.moe_apply.plan(count, 2, hidden, hidden, weight_format="mxfp4", dtype=torch.float32, solution="reference")
        routing = tk.moe_topk(logits, 2, solution="reference")
        expected = tk.moe_apply(x.float(), tk.moe_apply.prepare(weights, canonical), *routing, canonical, solution="reference")
        return layer, expected

    return make


CASES = {
    "prefill, 256 tokens, 2 heads": prefill(256, 2, 1),
    "prefill, 1024 tokens, 8 heads": prefill(1024, 8, 1),
    "MoE layer, 4 tokens, 8 experts, hidden 256": experts(4, 8, 256),
}


def measure(make: Callable[[], Work], repeats: int) -> dict[str, float]:
    torch.manual_seed(0)
    row: dict[str, float] = {}
    with emulated_gfx950() as emulator:
        work, expected = make()
        start = time.perf_counter()
        result = work()
        row["first_call_s"] = time.perf_counter() - start
        error = float((result.float() - expected).norm() / expected.norm())
        if error > 5e-3:
            raise SystemExit(f"relative error {error:.1e} of the result")
        row["relative_error"] = error
        for sanitize in (False, True):
            emulator.sanitize = sanitize
            row["sanitized_s" if sanitize else "plain_s"] = statistics.median(_seconds(work) for _ in range(repeats))
        row["lockstep_instructions"] = _instructions(emulator, work)
    for kind in ("plain", "sanitized"):
        row[f"{kind}_us_per_instruction"] = row[f"{kind}_s"] * 1e6 / row["lockstep_instructions"]
    return row


def _seconds(work: Callable[[], torch.Tensor]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _instructions(emulator: Emulator, work: Callable[[], torch.Tensor]) -> int:
    emulator.launches.clear()
    work()
    return sum(launch.wave_instructions // launch.waves for launch in emulator.launches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows = {}
    for name, make in CASES.items():
        rows[name] = measure(make, arguments.repeats)
        print(name, *(f"{key} {value:.4g}" for key, value in rows[name].items()), sep="\n  ")
    if arguments.output:
        metadata = dataclasses.asdict(collect_metadata(device="cpu")) | {
            "cores": os.cpu_count(),
            "processor": platform.processor() or platform.machine(),
            "numpy": numpy.__version__,
            "triton": triton.__version__,
            "command": "python " + " ".join(sys.argv),
        }
        arguments.output.write_text(as_text({"metadata": metadata, "rows": rows}))


if __name__ == "__main__":
    main()
