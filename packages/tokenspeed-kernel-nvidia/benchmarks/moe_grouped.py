"""MoE experts in the size of GPT-OSS-120B's layer: time by tile width, and time of each kernel of a call.

python packages/tokenspeed-kernel-nvidia/benchmarks/moe_grouped.py
python packages/tokenspeed-kernel-nvidia/benchmarks/moe_grouped.py --tokens 1024 8192 --variants 48 160 288 160v 144c --no-portable
python packages/tokenspeed-kernel-nvidia/benchmarks/moe_grouped.py --tokens 1 16 64 128 512 --variants few 24s 48 --outliers 0 1 64

A variant is the most columns of a tile. Suffix ``s``: elements are split into two fp8 values. Suffix ``v`` or ``c``: activations
are fp8, and the MMAs are 16-bit on the quantised values, or fp8. ``few`` is the streaming kernel. ``--outliers`` gives so many
tokens one feature that is 2^20 times larger than the others and whose weights are zero. Split elements cannot represent the others,
so these tokens are computed exactly. Results of each variant are first compared with float32 for some tokens. Times are medians of
calls in a CUDA graph, without the router. Tokens are routed to experts at random.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import statistics
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.ops.moe.moe_apply import moe_apply
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights
from tokenspeed_kernel_base.platform import cpu_platform
from tokenspeed_kernel_nvidia.cutedsl.mxfp4 import layout as mxfp4_layout
from tokenspeed_kernel_nvidia.sm90.moe.grouped import launch as grouped
from tokenspeed_kernel_nvidia.sm90.moe.grouped.config import CODES, PARTS, PLAIN, VALUES
from tokenspeed_kernel_nvidia.sm90.moe.stream import launch as stream

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 128, 4, 2880, 2880
_CHECKED = 48  # tokens that are compared with float32
_GRAPH_US = 8000.0  # minimum duration of a graph
_REPLAYS = 9
Call = Callable[[], Tensor]


def draw_weights(device: torch.device) -> MoEWeights:
    random = torch.Generator(device).manual_seed(0)

    def projection(rows: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
        codes = torch.randint(0, 256, (EXPERTS, rows, k // 2), generator=random, device=device, dtype=torch.uint8)
        scale = torch.randint(118, 121, (EXPERTS, rows, k // 32), generator=random, device=device, dtype=torch.uint8)
        return codes, scale, torch.randn(EXPERTS, rows, generator=random, device=device) * 0.2

    return MoEWeights(*projection(2 * INTERMEDIATE, HIDDEN), *projection(HIDDEN, INTERMEDIATE))


def draw_tokens(count: int, outliers: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator(device).manual_seed(count)
    x = torch.randn(count, HIDDEN, generator=random, device=device).to(torch.bfloat16)
    x[:outliers, 0] = 2.0**20
    logits = torch.randn(count, EXPERTS, generator=random, device=device)
    best = logits.topk(TOP_K)
    return x, torch.softmax(best.values, -1), best.indices.int()


def microseconds(call: Call) -> float:
    """Microseconds of one call in a graph of several: the median of replays."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(3):
        call()
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    calls = max(2, min(40, round(_GRAPH_US / (1000 * begin.elapsed_time(end)))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(_REPLAYS):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1000 * begin.elapsed_time(end) / calls)
    return statistics.median(times)


def kernels_of(call: Call) -> str:
    """Microseconds of each kernel of a call, in order, by PyTorch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
    found = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    found.sort(key=lambda event: event.time_range.start)
    last = found[-(len(found) // 3) :]
    return " ".join(f"{event.time_range.elapsed_us():.0f}" for event in last)


def variant_of(name: str) -> Callable[..., Tensor]:
    if name == "few":
        return functools.partial(stream.moe_apply_few, out=None)
    kind = {"v": VALUES, "c": CODES, "s": PARTS}.get(name[-1], PLAIN)
    return functools.partial(grouped.moe_apply_many, columns=int(name.rstrip("vcs")), inputs=(kind,))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 1024, 4096, 8192])
    parser.add_argument("--variants", nargs="+", default=["24s", "48", "96", "160", "288", "160v", "144c"])
    parser.add_argument("--outliers", type=int, nargs="+", default=[0])
    parser.add_argument("--no-portable", action="store_true", help="without the portable kernel")
    parser.add_argument("--profile", action="store_true", help="with the times of each kernel")
    options = parser.parse_args(arguments)
    device = torch.device("cuda", 0)
    plan = moe_apply.plan(
        EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, weight_format="mxfp4", w13_interleaved=True, bias=True, alpha=1.702, limit=7.0,
        beta=1.0, platform=cpu_platform(), override="reference_moe_apply",
    )  # fmt: skip
    rounded = dataclasses.replace(plan, activation_dtype="fp8")
    given = draw_weights(device)
    if any(options.outliers):
        given.w13_weight[..., 0] &= 0xF0
    prepared = mxfp4_layout.prepare_weights(given, plan)
    portable = None
    if not options.no_portable:
        from tokenspeed_kernel.triton.moe import moe_apply_mxfp4

        portable = moe_apply_mxfp4.moe_apply, moe_apply_mxfp4.prepare_weights(given, plan)
    lines = []
    for tokens, outliers in itertools.product(options.tokens, options.outliers):
        x, weights, ids = draw_tokens(tokens, outliers, device)
        some = torch.arange(0, tokens, max(1, tokens // _CHECKED), device=device)
        # For each variant: the call, and its plan.
        calls: dict[str, tuple[Call, Any]] = {}
        for name in options.variants:
            of_name = rounded if name[-1] in "vc" else plan
            given_tokens = x, prepared, weights, ids, of_name
            calls[name] = functools.partial(variant_of(name), *given_tokens), of_name
        if portable is not None:
            for name, of_name in (("portable", plan), ("portable fp8", rounded)):
                calls[name] = functools.partial(portable[0], x, portable[1], weights, ids, of_name), of_name
        wanted = {
            of_name: moe_apply.operator.body(x[some].float(), given, weights[some], ids[some], of_name)
            for of_name in {of_name for _, of_name in calls.values()}
        }
        for name, (call, of_name) in calls.items():
            try:
                error = (call()[some].float() - wanted[of_name]).norm() / wanted[of_name].norm()
                again = all(torch.equal(call(), call()) for _ in range(3))
                took = microseconds(call)
                flops = 6.0 * tokens * TOP_K * HIDDEN * INTERMEDIATE
                line = f"{tokens:6} {outliers:4} {name:>12} {took:9.1f} us {flops / took / 1e6:7.0f} TFLOP/s  error {error:.1e}"
                line += "" if again else "  NOT THE SAME BITS"
                if options.profile:
                    line += f"  kernels {kernels_of(call)}"
            except Exception as problem:  # one variant must not end the others
                traceback.print_exc()
                line = f"{tokens:6} {outliers:4} {name:>12} failed: {type(problem).__name__}: {str(problem)[:80]}"
            print(line, flush=True)
            lines.append(line)
    print("\n" + "\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
