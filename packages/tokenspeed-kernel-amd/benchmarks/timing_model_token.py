"""Predicts the launches and the time of a whole token of GPT-OSS-120B at batch 1 on one MI355X. **No measurement.**

    python packages/tokenspeed-kernel-amd/benchmarks/timing_model_token.py --output timing_model_token.json --readme

Each operator of a decode pass is called once on the gfx950 emulator, with the sizes of the model and the kernel that the selection
chooses. `gfx950_emulator.timing` computes a time of each launch, as for `timing_model`. The times are multiplied by the number of
calls per token. Other ways to make the same calls are shown below, without effect on the sum.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timing_cases import options_of
from timing_model import README, metadata_of, predicted, publish, total
from timing_model_moe import LAUNCH_US, layer_of, prepared
from torch import Tensor

MARKS = ("<!-- predicted time of a token -->", "<!-- end of a token -->")
LAYERS = 36
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, TOP_K, VOCABULARY = 2880, 64, 8, 64, 128, 4, 201088
CONTEXT, WINDOW, PAGE_SIZE = 1024, 128, 64
SLICE = VOCABULARY // 16  # columns of the output matrix that are executed
HBM_US_PER_BYTE = 1e6 / 8e12

ASSUMPTIONS = (
    "The emulator's timing model predicts all times: no time below is a claim about an MI355X.",
    f"Batch 1, {CONTEXT} tokens in the cache, pages of {PAGE_SIZE} tokens, bf16 weights and cache, mxfp4 experts, greedy sampling. "
    "Every second layer attends to a window of 128 tokens.",
    f"{LAUNCH_US} us per launch are added: published measurements of short kernels on MI355X suggest this value. Launches run one "
    "after another.",
    "The floor is the time to read the weights and the cache once at 8 TB/s.",
    "A sixteenth of the output matrix is executed, and its time is multiplied by 16.",
    "The launch of PyTorch that looks up the token's embedding is not counted.",
    "Caches are ideal: no line is loaded from HBM twice in a launch.",
)


@dataclass(frozen=True)
class Call:
    """An operator's call.

    Attributes:
        name: what it computes.
        make: returns a function without parameters that makes the call. It runs within the emulated GPU.
        count: calls per token.
        bytes: bytes of weights and of the cache that a call reads.
        scale: factor from the executed call to the whole call.
        other: whether this is another way to make an earlier call, which the sum leaves out.
    """

    name: str
    make: Callable[[], Callable[[], Any]]
    count: int = LAYERS
    bytes: float = 0.0
    scale: int = 1
    other: bool = False


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * scale).bfloat16()


def weight(k: int, n: int) -> Tensor:
    """Returns a weight [k, n] that is stored [n, k]."""
    return normal(n, k, scale=k**-0.5).t()


def cache() -> tuple[Tensor, Tensor]:
    pages = CONTEXT // PAGE_SIZE
    return normal(pages, PAGE_SIZE, KV_HEADS, HEAD_DIM), normal(pages, PAGE_SIZE, KV_HEADS, HEAD_DIM)


def qkv(**how: str) -> Callable[[], Any]:
    import tokenspeed_kernel as core

    keys, values = cache()
    columns = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    arguments = {
        "norm_weight": normal(HIDDEN),
        "qkv_weight": weight(HIDDEN, columns),
        "positions": torch.tensor([CONTEXT - 1]),
        "cos_sin_cache": torch.randn(CONTEXT, HEAD_DIM),
        "kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "residual": normal(1, HIDDEN),
        "bias": normal(columns),
        "k_cache": keys,
        "v_cache": values,
        "slot_mapping": torch.tensor([CONTEXT - 1]),
    }
    return lambda: core.rmsnorm_qkv_rope(normal(1, HIDDEN), **arguments, **how)


def attention(window_left: int) -> Callable[[], Any]:
    import tokenspeed_kernel as core

    keys, values = cache()
    table = torch.arange(CONTEXT // PAGE_SIZE, dtype=torch.int32)[None]
    lengths = torch.tensor([CONTEXT], dtype=torch.int32)
    sinks = torch.randn(HEADS)
    q = normal(1, HEADS, HEAD_DIM)
    return lambda: core.mha_decode_with_kvcache(q, keys, values, table, lengths, CONTEXT, window_left=window_left, sinks=sinks)


def gemm(k: int, n: int, bias: bool, **how: str) -> Callable[[], Any]:
    import tokenspeed_kernel as core

    a, b, added = normal(1, k), weight(k, n), normal(n) if bias else None
    return lambda: core.mm(a, b, bias=added, **how)


def route(**how: str) -> Callable[[], Any]:
    import tokenspeed_kernel as core

    x, residual, scale = normal(1, HIDDEN), normal(1, HIDDEN), normal(HIDDEN)
    router, bias = weight(HIDDEN, EXPERTS), normal(EXPERTS)
    return lambda: core.rmsnorm_moe_topk(x, scale, router, TOP_K, residual=residual, router_bias=bias, **how)


def experts(activation_dtype: str) -> Callable[[], Any]:
    import tokenspeed_kernel as core

    layer = layer_of("ours", 1)
    plan, weights = prepared(layer, activation_dtype, "gluon_moe_apply_mxfp4", "gfx950_mxfp4")
    inputs = layer.inputs()
    topk_weights, topk_ids = core.moe_topk(inputs["logits"], layer.top_k, solution="reference")
    return lambda: core.moe_apply(inputs["x"], weights, topk_weights, topk_ids, plan)


def norm() -> Callable[[], Any]:
    import tokenspeed_kernel as core

    x, scale, residual = normal(1, HIDDEN), normal(HIDDEN), normal(1, HIDDEN)
    return lambda: core.rmsnorm(x, scale, residual=residual)


def greedy() -> Callable[[], Any]:
    import tokenspeed_kernel as core

    logits = normal(1, VOCABULARY)
    return lambda: core.argmax(logits)


_QKV, _OUTPUT = (HIDDEN * (HEADS + 2 * KV_HEADS) * HEAD_DIM * 2, HEADS * HEAD_DIM * HIDDEN * 2)
_TOKEN = 2 * KV_HEADS * HEAD_DIM * 2  # bytes of a token in the cache of a layer
CALLS = (
    Call("norm, qkv, rope, cache write", qkv, bytes=_QKV),
    Call("attention, all tokens", lambda: attention(-1), LAYERS // 2, CONTEXT * _TOKEN),
    Call("attention, window", lambda: attention(WINDOW - 1), LAYERS // 2, WINDOW * _TOKEN),
    Call("output matrix of attention", lambda: gemm(HEADS * HEAD_DIM, HIDDEN, True), bytes=_OUTPUT),
    Call("norm, router, top-k", route, bytes=HIDDEN * EXPERTS * 2),
    Call("experts, bf16 activations", lambda: experts("none"), bytes=TOP_K * 3 * HIDDEN * HIDDEN * (1 / 2 + 1 / 32)),
    Call("last norm", norm, 1),
    Call("output matrix", lambda: gemm(HIDDEN, SLICE, False), 1, HIDDEN * VOCABULARY * 2, VOCABULARY // SLICE),
    Call("greedy sampling", greedy, 1),
    Call("norm, qkv, rope, cache write: portable kernel", lambda: qkv(solution="triton"), other=True),
    Call("norm, qkv, rope, cache write: its operators", lambda: qkv(solution="composed"), other=True),
    Call("norm, router, top-k: portable kernel", lambda: route(solution="triton"), other=True),
    Call("norm, router, top-k: its operators", lambda: route(solution="composed"), other=True),
    Call("output matrix of attention: portable", lambda: gemm(HEADS * HEAD_DIM, HIDDEN, True, solution="triton"), other=True),
    Call("experts, fp8 activations", lambda: experts("fp8"), other=True),
)


def measure(call: Call) -> dict[str, Any]:
    """Makes the call, and returns its launches with their predicted times, and what they take per token."""
    from gfx950_emulator import emulated_gfx950

    start = time.perf_counter()
    with emulated_gfx950(counters=True, sanitize=False) as emulator:
        run = call.make()
        del emulator.launches[:]
        run()
    launches = list(map(predicted, emulator.launches))
    us = total(launches)["us"] * call.scale
    print(f"{call.name}: {len(launches)} launches, {us:.2f} us ({time.perf_counter() - start:.0f} s)", file=sys.stderr, flush=True)
    return {
        "call": call.name,
        "count": call.count,
        "us": us,
        "floor_us": call.bytes * HBM_US_PER_BYTE,
        "token_us": us * call.count,
        "with_launches_us": (us + LAUNCH_US * len(launches)) * call.count,
        "other": call.other,
        "launches": launches,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the sums over a token."""
    counted = [row for row in rows if not row["other"]]
    return {
        "launches": sum(row["count"] * len(row["launches"]) for row in counted),
        "floor_us": sum(row["count"] * row["floor_us"] for row in counted),
        "us": sum(row["token_us"] for row in counted),
        "with_launches_us": sum(row["with_launches_us"] for row in counted),
    }


def table(report: dict[str, Any]) -> str:
    """Formats the report as Markdown."""
    lines = [
        f"| call | kernels | calls per token | a call's floor, µs | a call, µs | all calls, µs | with {LAUNCH_US} µs per launch |",
        "|---|---|---|---|---|---|---|",
    ]
    sums = report["summary"]
    for other in (False, True):
        for row in report["rows"]:
            if row["other"] == other:
                kernels = ", ".join(f"`{launch['kernel']}`" for launch in row["launches"])
                floor = f"{row['floor_us']:.2f}" if row["floor_us"] else ""
                cells = [row["call"], kernels, str(row["count"]), floor, f"{row['us']:.2f}"]
                cells += [f"{row[name]:.0f}" for name in ("token_us", "with_launches_us")]
                lines.append(f"| {' | '.join(cells)} |")
        if not other:
            per_token = f"**{sums['us']:.0f}** (floor {sums['floor_us']:.0f}) | **{sums['with_launches_us']:.0f}**"
            lines.append(f"| **a token** | {sums['launches']:.0f} launches | | | | {per_token} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    torch.set_num_threads(1)
    options = options_of(__doc__, arguments)
    rows = [measure(call) for call in CALLS if re.search(options.only, call.name)]
    report = {"metadata": metadata_of(Path(__file__), None), "assumptions": ASSUMPTIONS, "summary": summary(rows), "rows": rows}
    publish(report, table(report), options, README, MARKS)


if __name__ == "__main__":
    main()
