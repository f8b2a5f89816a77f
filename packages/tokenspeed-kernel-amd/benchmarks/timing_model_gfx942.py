"""Predicts the times of attention on an MI300X (gfx942): our kernels and the portable kernels. **For ratios only.**

    python packages/tokenspeed-kernel-amd/benchmarks/timing_model_gfx942.py --output timing_model_gfx942.json --readme

Whole calls run on the emulated MI300X, which counts instructions. `gfx950_emulator.timing.predict` computes a time from these
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

MARKS = ("<!-- predicted times on MI300X -->", "<!-- end of MI300X -->")
PAGE_SIZE, WINDOW = 64, 127
ERROR = 5e-3  # limit of the relative error of the output that is checked
# Our times must be at most this fraction of the portable kernels' times.
BAR = 0.8

ASSUMPTIONS = (
    "Only ratios are meaningful: no time below is a claim about an MI300X.",
    "Both kernels get the same inputs, and run with the same compiler (stock Triton), emulator and timing model. The portable "
    "kernels do not support caches of e4m3fnuz; they get e4m3fn, which they convert by integer operations.",
    "Whole grids are executed. The workgroup with the most work is simulated: alone, and beside as many copies of itself as fit on "
    "a CU. Workgroups are assigned to 304 CUs in turn.",
    "The floor is the time to read keys and values once from HBM at 5.3 TB/s (decode), or the time of the unmasked MFMAs at peak "
    "rate (prefill).",
    "The launches of a call run one after another. Only the achievable times include launch overhead: they count 2.3 us per "
    "launch, which was measured on MI355X, and 4.26 TB/s for HBM.",
    "Caches are ideal: no line is loaded from HBM twice in a launch, and L2 delivers 53 bytes per cycle to every CU.",
)


@dataclass(frozen=True)
class Case:
    """A call with sinks, at the shapes of GPT-OSS unless it says otherwise.

    Attributes:
        operator: ``"prefill"`` or ``"decode"``.
        sequences, length: number of sequences, and tokens of each.
        window_left: number of earlier tokens in the window; -1 without a window.
        heads, kv_heads, head_dim: sizes of q and of the keys.
        fp8: whether the cache is fp8, with a scale per KV head.
    """

    operator: str
    sequences: int
    length: int
    window_left: int = -1
    heads: int = 64
    kv_heads: int = 8
    head_dim: int = 64
    fp8: bool = False

    @property
    def name(self) -> str:
        notes = [f"{self.operator} {self.sequences} x {self.length}"]
        notes += [f"window {self.window_left + 1}"] if self.window_left >= 0 else []
        notes += [f"head_dim {self.head_dim}"] if self.head_dim != 64 else []
        notes += [f"{self.heads} heads"] if self.heads != 64 else []
        return ", ".join([*notes, *(["fp8 cache"] if self.fp8 else [])])

    @property
    def bar_us(self) -> float | None:
        """None: the bar is a ratio."""
        return None

    @property
    def floor_us(self) -> float:
        from gfx950_emulator.hardware import MI300X

        if self.operator == "decode":
            keys = self.length if self.window_left < 0 else min(self.length, self.window_left + 1)
            stored = self.sequences * keys * self.kv_heads * 2 * self.head_dim * (1 if self.fp8 else 2)
            return stored / MI300X.hbm_bytes_per_second * 1e6
        seen = sum(min(row + 1, self.length if self.window_left < 0 else self.window_left + 1) for row in range(self.length))
        flops = 4 * self.sequences * self.heads * self.head_dim * seen
        return flops / (MI300X.compute_units * 2048) / MI300X.clock_hz * 1e6

    def inputs(self, fp8: torch.dtype) -> dict[str, Any]:
        """Returns the operator's arguments; ``fp8`` is the dtype of an fp8 cache."""
        from tokenspeed_kernel_base.cases import Draw
        from tokenspeed_kernel_base.ops.attention._inputs import paged, ragged

        lengths, shape = [self.length] * self.sequences, (self.heads, self.kv_heads, self.head_dim, self.head_dim)
        draw = Draw(torch.device("cpu"), self.length)
        if self.operator == "prefill":
            return ragged(lengths, *shape, sinks=True, window_left=self.window_left)(draw)
        cache: dict[str, Any] = {"cache_dtype": torch.float8_e4m3fn, "scales": ("k_scale", "v_scale"), "scale_per_head": True}
        options = {"page_size": PAGE_SIZE, "sinks": True, "window_left": self.window_left, **(cache if self.fp8 else {})}
        inputs = paged(lengths, None, *shape, **options)(draw)
        if self.fp8:
            for name in ("k_cache", "v_cache"):
                inputs[name] = inputs[name].float().clamp(-240, 240).to(fp8)
        return inputs


CASES = [
    *(Case("decode", sequences, length) for sequences, length in ((1, 1024), (16, 1024), (16, 4096), (64, 1024))),
    Case("decode", 16, 4096, WINDOW),
    Case("decode", 16, 2048, head_dim=128),
    *(Case("decode", sequences, length, fp8=True) for sequences, length in ((1, 1024), (16, 4096))),
    Case("prefill", 1, 1024),
    Case("prefill", 4, 1024),
    Case("prefill", 1, 4096, heads=16, kv_heads=2),
    Case("prefill", 1, 1024, head_dim=128),
    Case("prefill", 4, 1024, WINDOW),
    Case("prefill", 1, 1024, WINDOW),
]


def check(case: Case, inputs: dict[str, Any], out: torch.Tensor) -> float:
    """Returns the relative error of the last sequence's output. Raises RuntimeError if the error is too large."""
    import tokenspeed_kernel as core

    last = dict(inputs)
    if case.operator == "prefill":
        last |= {name: inputs[name][-case.length :].float() for name in ("q", "k", "v")}
        last |= {"cu_seqlens": torch.tensor([0, case.length], dtype=torch.int32)}
        wanted = core.mha_prefill(**last, solution="reference")
    else:
        for name in ("k", "v"):
            scale = last.pop(f"{name}_scale", None)
            values = inputs[f"{name}_cache"].float()
            last[f"{name}_cache"] = values if scale is None else values * scale.reshape(-1, 1)
        last |= {"q": inputs["q"][-1:].float(), **{name: inputs[name][-1:] for name in ("page_table", "cache_seqlens")}}
        wanted = core.mha_decode_with_kvcache(**last, solution="reference")
    error = float((out[-len(wanted) :].float() - wanted).norm() / wanted.norm())
    if not error <= ERROR:
        raise RuntimeError(f"{case.name}: relative error {error:.1e} of the last sequence")
    return error


def measure(case: Case, side: str) -> dict[str, Any]:
    """Calls a kernel, checks its result, and predicts the times of its launches."""
    import tokenspeed_kernel as core
    from gfx950_emulator import emulated_gfx942

    function = core.mha_prefill if case.operator == "prefill" else core.mha_decode_with_kvcache
    inputs = case.inputs(torch.float8_e4m3fnuz if side == "ours" else torch.float8_e4m3fn)
    start = time.perf_counter()
    with emulated_gfx942(counters=True, sanitize=False) as emulator:
        out = function(**inputs, solution=SIDES[side])
    error = check(case, inputs, out)
    launches = list(map(predicted, emulator.launches))
    found = {**total(launches), "relative_error": error, "launches": launches}
    print(f"{side}: {case.name}: {found['us']:.2f} us ({time.perf_counter() - start:.0f} s)", file=sys.stderr, flush=True)
    return found


def table(report: dict[str, Any]) -> str:
    """Formats the report as Markdown."""
    lines = [
        "| call | floor, µs | ours, µs (launches) | portable, µs (launches) | ours / portable | achievable: ours, µs "
        "| portable, µs | ours is bound by |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        ours, portable = row["ours"], row["portable"]
        longest = max(ours["launches"], key=lambda launch: launch["us"])
        cells = [row["case"], f"{row['floor_us']:.2f}"]
        cells += [f"{side['us']:.2f} ({len(side['launches'])})" for side in (ours, portable)]
        cells += [f"{ours['us'] / portable['us']:.2f}", f"{ours['achievable_us']:.1f}", f"{portable['achievable_us']:.1f}"]
        lines.append(f"| {' | '.join([*cells, longest['bound_by']])} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    options = options_of(__doc__, arguments)
    report = report_of(Path(__file__), CASES, options.only, measure, ASSUMPTIONS, options.output)
    report["metadata"] |= {"device": "gfx942, emulated: a model of time, no measurement", "arch": "gfx942"}
    publish(report, table(report), options, README, MARKS)


if __name__ == "__main__":
    main()
