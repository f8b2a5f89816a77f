"""Predicts the times of latent prefill and extend at DeepSeek-V3's shapes, of our kernels and of the portable kernels. **Only their
ratios are meaningful.**

    python packages/tokenspeed-kernel-amd/benchmarks/timing_model_mla_prompt.py --output timing_model_mla_prompt.json --readme

Prefill attends to expanded keys and values (`mla_prefill`), extend to a paged cache of latents (`mla_extend_with_kvcache`). Whole
calls run on the gfx950 emulator, as for `timing_model_mla`. The output is compared with the fp32 reference.
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
from timing_model_mla import ERRORS, PAGE_SIZE, RANK, ROPE, SOFTMAX_SCALE, table

MARKS = ("<!-- predicted times of MLA prompts -->", "<!-- end of MLA prompts -->")
HEAD_DIM, V_HEAD_DIM = 192, 128
MFMA_FLOPS_PER_SECOND = 2.5e15  # dense bf16; fp8 MFMAs take half the time

ASSUMPTIONS = (
    "Only ratios are meaningful: no time below is a claim about an MI355X.",
    "Both kernels get the same inputs, and run with the same compiler (stock Triton), emulator and timing model.",
    "Whole grids are executed, and the workgroup that executes the most instructions is simulated.",
    "The floor is the time of the MFMAs of all visible keys, at 2.5 PFLOP/s in bf16 and 5 in fp8.",
    "The achievable times count 2.3 us per launch, and 6.6 TB/s for HBM.",
    "Caches are ideal: no line is loaded from HBM twice in a launch, and L2 delivers 64 bytes per cycle to every CU.",
)


@dataclass(frozen=True)
class Case:
    """A causal call of one sequence.

    Attributes:
        new: new tokens of the sequence.
        length: tokens of the sequence, the new ones included. Prefill computes all of them: ``length`` is ``new``.
        heads: query heads.
        cache: the cache's dtype for extend; None for prefill.
        bar_us: the largest time that passes; None: the call is shown for information.
    """

    new: int
    length: int
    heads: int
    cache: torch.dtype | None = None
    bar_us: float | None = None

    @property
    def name(self) -> str:
        if self.cache is None:
            return f"prefill of {self.new}, {self.heads} heads"
        dtype = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8"}[self.cache]
        return f"extend by {self.new} to {self.length}, {self.heads} heads, {dtype} cache"

    @property
    def operator(self) -> str:
        return "mla_prefill" if self.cache is None else "mla_extend_with_kvcache"

    @property
    def floor_us(self) -> float:
        columns = HEAD_DIM + V_HEAD_DIM if self.cache is None else 2 * RANK + ROPE
        pairs = self.heads * self.new * (self.length - (self.new - 1) / 2)
        rate = MFMA_FLOPS_PER_SECOND * (2 if self.cache == torch.float8_e4m3fn else 1)
        return 2 * pairs * columns / rate * 1e6

    def inputs(self) -> dict[str, Any]:
        """Returns the operator's arguments."""
        draw = torch.Generator().manual_seed(self.length + self.new)
        offsets = torch.tensor([0, self.new], dtype=torch.int32)
        if self.cache is None:
            shapes = {"q": HEAD_DIM, "k": HEAD_DIM, "v": V_HEAD_DIM}
            tensors = {name: torch.randn(self.new, self.heads, dim, generator=draw).bfloat16() for name, dim in shapes.items()}
            return {**tensors, "cu_seqlens": offsets, "softmax_scale": SOFTMAX_SCALE}
        pages = -(-self.length // PAGE_SIZE)
        return {
            "q": torch.randn(self.new, self.heads, RANK + ROPE, generator=draw).bfloat16(),
            "cu_seqlens_q": offsets,
            "cu_seqlens_kv": None,
            "kv_cache": torch.randn(pages, PAGE_SIZE, RANK + ROPE, generator=draw).to(self.cache),
            "page_table": torch.randperm(pages, generator=draw).int().view(1, pages),
            "cache_seqlens": torch.tensor([self.length], dtype=torch.int32),
            "max_seqlen_q": self.new,
            "max_seqlen_k": self.length,
            "kv_lora_rank": RANK,
            "softmax_scale": SOFTMAX_SCALE,
        }


CASES = [
    Case(1024, 1024, 16),
    Case(128, 512, 128, torch.bfloat16),
    Case(128, 512, 128, torch.float8_e4m3fn),
]


def measure(case: Case, side: str) -> dict[str, Any]:
    """Calls a kernel, checks its result, and predicts the times of its launches."""
    import tokenspeed_kernel as core
    from gfx950_emulator import emulated_gfx950

    operator, inputs = getattr(core, case.operator), case.inputs()
    start = time.perf_counter()
    with emulated_gfx950(counters=True, sanitize=False) as emulator:
        out = operator(**inputs, solution=SIDES[side])
    wide = {name: inputs[name].float() for name in ("q", "k", "v", "kv_cache") if name in inputs}
    wanted = operator(**{**inputs, **wide}, solution="reference")
    error = float((out.float() - wanted).norm() / wanted.norm())
    if not error <= ERRORS[case.cache or torch.bfloat16]:
        raise RuntimeError(f"{case.name}: relative error {error:.1e}")
    launches = list(map(predicted, emulator.launches))
    found = {**total(launches), "relative_error": error, "launches": launches}
    print(f"{side}: {case.name}: {found['us']:.2f} us ({time.perf_counter() - start:.0f} s)", file=sys.stderr, flush=True)
    return found


def main(arguments: list[str] | None = None) -> None:
    options = options_of(__doc__, arguments)
    report = report_of(Path(__file__), CASES, options.only, measure, ASSUMPTIONS, options.output)
    publish(report, table(report), options, README, MARKS)


if __name__ == "__main__":
    main()
