"""Predicts the times of MLA decode, to all tokens and to chosen ones, at DeepSeek-V3's shapes: our kernel and the portable kernel.
**For ratios only.**

    python packages/tokenspeed-kernel-amd/benchmarks/timing_model_mla.py --output timing_model_mla.json --readme

Whole calls run on the gfx950 emulator, which counts instructions. `gfx950_emulator.timing.predict` computes a time from these
counts, as for `timing_model`. The output of the last sequence is compared with the fp32 reference.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timing_cases import SIDES, options_of, report_of
from timing_model import README, predicted, publish, total

MARKS = ("<!-- predicted times of MLA -->", "<!-- end of MLA -->")
RANK, ROPE, PAGE_SIZE, SOFTMAX_SCALE = 512, 64, 64, 0.1352
# Limits of the relative error of the checked output. With an fp8 cache, probabilities are rounded to fp8.
ERRORS = {torch.bfloat16: 5e-3, torch.float8_e4m3fn: 2.5e-2}

ASSUMPTIONS = (
    "Only ratios are meaningful: no time below is a claim about an MI355X.",
    "Both kernels get the same inputs, and run with the same compiler (stock Triton), emulator and timing model.",
    "Whole grids are executed. The workgroup that executes the most instructions is simulated: it computes its keys, and merges "
    "the splits of its sequence.",
    "The floor is the time to read every key once from HBM at 8 TB/s; with a top k, every chosen key.",
    "The launches of a call run one after another. Only the achievable times include launch overhead: they count 2.3 us per "
    "launch, and 6.6 TB/s for HBM.",
    "Caches are ideal: no line is loaded from HBM twice in a launch, and L2 delivers 64 bytes per cycle to every CU. Atomics and "
    "cache writebacks take no longer than other accesses.",
)


@dataclass(frozen=True)
class Case:
    """A call with one new token per sequence.

    Attributes:
        sequences, length: number of sequences, and tokens of each.
        heads: query heads.
        q, cache: dtypes.
        top_k: the number of tokens that each new token attends to, chosen at random; 0: all.
        bar_us: the largest time that passes; None: the call is shown for information.
    """

    sequences: int
    length: int
    heads: int
    q: torch.dtype = torch.bfloat16
    cache: torch.dtype = torch.bfloat16
    bar_us: float | None = None
    top_k: int = 0

    @property
    def name(self) -> str:
        chosen = f", top {self.top_k}" if self.top_k else ""
        return f"{self.sequences} x {self.length}{chosen}, {self.heads} heads, q {_name(self.q)}, cache {_name(self.cache)}"

    @property
    def operator(self) -> str:
        return "mla_sparse_with_kvcache" if self.top_k else "mla_decode_with_kvcache"

    @property
    def floor_us(self) -> float:
        from gfx950_emulator import hardware as hw

        stored = self.sequences * (self.top_k or self.length) * (RANK + ROPE) * self.cache.itemsize
        return stored / hw.MI355X.hbm_bytes_per_second * 1e6

    def inputs(self) -> dict[str, Any]:
        """Returns the operator's arguments."""
        draw = torch.Generator().manual_seed(self.length + self.sequences)
        pages = -(-self.length // PAGE_SIZE)
        places = torch.randperm(self.sequences * pages, generator=draw).int()
        shared = {
            "q": torch.randn(self.sequences, self.heads, RANK + ROPE, generator=draw).to(self.q),
            "kv_cache": torch.randn(len(places), PAGE_SIZE, RANK + ROPE, generator=draw).to(self.cache),
            "kv_lora_rank": RANK,
            "softmax_scale": SOFTMAX_SCALE,
        }
        if self.top_k:
            chosen = torch.rand(self.sequences, self.length, generator=draw).topk(self.top_k).indices.sort().values
            slots = places.view(self.sequences, pages).gather(1, chosen // PAGE_SIZE) * PAGE_SIZE + chosen % PAGE_SIZE
            return {**shared, "indices": slots.int()}
        return {
            **shared,
            "page_table": places.view(self.sequences, pages),
            "cache_seqlens": torch.full((self.sequences,), self.length, dtype=torch.int32),
            "max_seqlen_k": self.length,
        }


def _name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8"}[dtype]


E4M3 = torch.float8_e4m3fn
CASES = [
    Case(16, 2048, 16, bar_us=7.5),
    Case(16, 2048, 16, cache=E4M3, bar_us=6.0),
    Case(16, 2048, 16, q=E4M3, cache=E4M3, bar_us=6.0),
    Case(4, 2048, 64, bar_us=9.0),
    Case(4, 2048, 128, bar_us=19.0),
    Case(16, 4096, 16, top_k=2048),
    Case(16, 4096, 16, cache=E4M3, top_k=2048),
    Case(4, 4096, 128, top_k=2048),
]


def check(case: Case, inputs: dict[str, Any], out: torch.Tensor) -> float:
    """Returns the relative error of the last sequence's output. Raises RuntimeError if the error is too large."""
    import tokenspeed_kernel as core

    last = {**inputs, "q": inputs["q"][-1:].float(), "kv_cache": inputs["kv_cache"].float()}
    last |= {name: inputs[name][-1:] for name in ("page_table", "cache_seqlens", "indices") if name in inputs}
    wanted = getattr(core, case.operator)(**last, solution="reference")
    error = float((out[-1:].float() - wanted).norm() / wanted.norm())
    if not error <= ERRORS[case.cache]:
        raise RuntimeError(f"{case.name}: relative error {error:.1e} of the last sequence")
    return error


def measure(case: Case, side: str) -> dict[str, Any]:
    """Calls a kernel, checks its result, and predicts the times of its launches."""
    import tokenspeed_kernel as core
    from gfx950_emulator import emulated_gfx950

    inputs = case.inputs()
    start = time.perf_counter()
    with emulated_gfx950(counters=True, sanitize=False) as emulator:
        out = getattr(core, case.operator)(**inputs, solution=SIDES[side])
    error = check(case, inputs, out)
    launches = list(map(predicted, emulator.launches))
    found = {**total(launches), "relative_error": error, "launches": launches}
    print(f"{side}: {case.name}: {found['us']:.2f} us ({time.perf_counter() - start:.0f} s)", file=sys.stderr, flush=True)
    return found


def table(report: dict[str, Any]) -> str:
    """Formats the report as Markdown."""
    lines = [
        "| call | floor, µs | ours, µs (launches) | portable, µs (launches) | portable / ours | achievable: ours, µs "
        "| portable, µs | ours is bound by |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        ours, portable = row["ours"], row["portable"]
        cells = [row["case"], f"{row['floor_us']:.2f}"]
        cells += [f"{side['us']:.2f} ({len(side['launches'])})" for side in (ours, portable)]
        cells += [f"{portable['us'] / ours['us']:.2f}", f"{ours['achievable_us']:.1f}", f"{portable['achievable_us']:.1f}"]
        lines.append(f"| {' | '.join([*cells, ours['launches'][0]['bound_by']])} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    options = options_of(__doc__, arguments)
    report = report_of(Path(__file__), CASES, options.only, measure, ASSUMPTIONS, options.output)
    publish(report, table(report), options, README, MARKS)


if __name__ == "__main__":
    main()
