"""Old code beside new code, and the new one with other constants. --check OPERATOR compares results and compiles; no argument times."""

from __future__ import annotations

import contextlib
import importlib
import os
import statistics
import sys
import time
import traceback

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import torch

import tokenspeed_kernel  # noqa: F401
from tokenspeed_kernel_base.cases import nbytes
from tokenspeed_kernel_base.operator import get_operator

T = "tokenspeed_kernel.triton."


def new(family, name):
    return importlib.import_module(f"{T}{family}.{name}")


def old(name):
    return importlib.import_module(f"old_kernels.{name}")


@contextlib.contextmanager
def patched(module, **values):
    before = {key: getattr(module, key) for key in values}
    for key, value in values.items():
        setattr(module, key, value)
    try:
        yield
    finally:
        for key, value in before.items():
            setattr(module, key, value)


def gated_tile(rows, warps):
    from tokenspeed_kernel.triton.norm.rmsnorm import Tile

    return lambda hidden: Tile(rows, 128, warps)


def entries():
    """(operator, family, function name, case, [(label, module, patches)])"""
    tl = new("sampling", "token_logprobs")
    mg = new("sampling", "merge_token_logprobs")
    bd = new("speculation", "build_draft_tree")
    vp = new("speculation", "verify_draft_probs")
    rg = new("norm", "rmsnorm_gated")
    qn = new("quantization", "quantize_nvfp4")
    gq = new("activation", "gated_quantize")
    rm = new("moe", "rmsnorm_moe_topk")
    from tokenspeed_kernel.triton.quantization._rows import Config

    return [
        ("merge_token_logprobs", "decode 256, 16 parts, 64 top tokens",
         [("old", old("merge_token_logprobs"), {}), ("new", mg, {}), ("128 a warp", mg, {"_ENTRIES_A_WARP": 128}), ("512 a warp", mg, {"_ENTRIES_A_WARP": 512})]),
        ("merge_token_logprobs", "gpt-oss-120b decode 16, 8 parts, 20 top tokens", [("old", old("merge_token_logprobs"), {}), ("new", mg, {})]),
        ("token_logprobs", "llama-3 prompt 1024, 5 top tokens, bfloat16",
         [("old", old("token_logprobs"), {}), ("new", tl, {}), ("span 4096", tl, {"_LONGEST_SPAN": 4096}), ("4 span warps", tl, {"_SPAN_WARPS": 4}), ("8 row warps", tl, {"_ROW_WARPS": 8}), ("512 lanes", tl, {"_LANES": 512}), ("chunk 4096", tl, {"_CHUNK": 4096}), ("group 64", tl, {"_GROUP": 64})]),
        ("token_logprobs", "gpt-oss-120b decode 64, 20 top tokens",
         [("old", old("token_logprobs"), {}), ("new", tl, {}), ("span 4096", tl, {"_LONGEST_SPAN": 4096}), ("8 row warps", tl, {"_ROW_WARPS": 8}), ("chunk 4096", tl, {"_CHUNK": 4096})]),
        ("token_logprobs", "gpt-oss-120b decode 64, the given tokens only", [("old", old("token_logprobs"), {}), ("new", tl, {})]),
        ("token_logprobs", "gpt-oss-120b decode 1, 5 top tokens", [("old", old("token_logprobs"), {}), ("new", tl, {})]),
        ("build_draft_tree", "llama-3, eagle-2, 64 sequences", [("old", old("build_draft_tree"), {}), ("new", bd, {}), ("4 warps", bd, {"_WARPS": 4}), ("16 warps", bd, {"_WARPS": 16})]),
        ("build_draft_tree", "gpt-oss-120b, eagle-3, 16 nodes, 256 sequences", [("old", old("build_draft_tree"), {}), ("new", bd, {}), ("2 warps", bd, {"_WARPS": 2})]),
        ("verify_draft_probs", "llama-3, a tree of 16 nodes, 16 sequences",
         [("old", old("verify_draft_probs"), {}), ("new", vp, {}), ("1 between", vp, {"_SUMS_BETWEEN": 1}), ("3 between", vp, {"_SUMS_BETWEEN": 3}), ("block 2048", vp, {"_BLOCKS": {"any": 2048}})]),
        ("verify_draft_probs", "gpt-oss-120b, a chain of 4, 16 sequences",
         [("old", old("verify_draft_probs"), {}), ("new", vp, {}), ("block 2048", vp, {"_BLOCKS": {"any": 2048}})]),
        ("rmsnorm_gated", "qwen3-next prefill 8192",
         [("old", old("rmsnorm_gated"), {}), ("new", rg, {})] + [(f"{r} rows {w} warps", rg, {"tile_for": gated_tile(r, w)}) for r, w in ((8, 2), (8, 4), (16, 4), (32, 4), (4, 1))]),
        ("rmsnorm_gated", "qwen3-next decode 64",
         [("old", old("rmsnorm_gated"), {}), ("new", rg, {})] + [(f"{r} rows {w} warps", rg, {"tile_for": gated_tile(r, w)}) for r, w in ((8, 2), (8, 4), (4, 1), (16, 4))]),
        ("quantize_nvfp4", "llama-70b prefill 8192",
         [("now", qn, {})] + [(f"tile {t} warps {w}", qn, {"config_for": (lambda c: lambda n: c)(Config(t, w))}) for t, w in ((8192, 4), (8192, 8), (4096, 2), (2048, 2))]),
        ("silu_and_mul_quantize_nvfp4", "qwen3-32b prefill 8192",
         [("now", gq, {})] + [(f"{r} x {c} {w} warps", gq, {"tile_of": (lambda t: lambda *a: t)(gq.Tile(r, c, w))}) for r, c, w in ((1, 1024, 4), (1, 2048, 4), (1, 512, 2), (2, 1024, 4))]),
        ("rmsnorm_moe_topk", "16 tokens",
         [("now", rm, {}), ("8 experts 8 warps", rm, {"tile_for": lambda t, h: rm.Tile(8, 8)}), ("4 experts 4 warps", rm, {"tile_for": lambda t, h: rm.Tile(4, 4)})]),
    ]


def arguments_of(op, case):
    if case == "16 tokens":
        g = torch.Generator(device="cuda").manual_seed(1)

        def rand(*shape):
            return torch.randn(*shape, generator=g, device="cuda", dtype=torch.bfloat16)

        return {"x": rand(16, 2880), "norm_weight": rand(2880), "router_weight": rand(128, 2880).T * 0.02, "top_k": 4,
                "residual": rand(16, 2880), "router_bias": rand(128)}
    found = {each.name: each for each in op.all_cases()}
    return found[case].build("cuda")


def clone(value):
    return value.clone() if isinstance(value, torch.Tensor) else value


def call(op, module, name, arguments):
    given = dict(arguments)
    if name == "quantize_nvfp4":
        given = {"scale_layout": "linear", "out": None, "scale_out": None, **given}
    return getattr(module, name)(**given)


def as_list(result):
    return [result] if isinstance(result, torch.Tensor) else list(result)


def compare(name, first, other):
    worst = ""
    for index, (a, b) in enumerate(zip(as_list(first), as_list(other))):
        a, b = (x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x for x in (a, b))
        if not torch.equal(a, b) and not (a.is_floating_point() and torch.allclose(a, b, rtol=2e-5, atol=2e-5, equal_nan=True)):
            worst += f" output {index} DIFFERS in {(a != b).sum().item()} of {a.numel()}"
        elif not torch.equal(a, b):
            worst += f" output {index} within 2e-5"
    return worst or " same bits"


def check(wanted):
    for name, case, variants in entries():
        if name != wanted:
            continue
        op = get_operator(name)
        arguments = arguments_of(op, case)
        first = None
        for label, module, patches in variants:
            begin = time.time()
            try:
                with patched(module, **patches):
                    result = call(op, module, name, arguments)
                torch.cuda.synchronize()
                first = result if first is None else first
                print(f"{name}: {case}: {label}:{compare(name, first, result)} ({time.time() - begin:.0f} s)", flush=True)
            except Exception as error:
                print(f"{name}: {case}: {label}: FAILED {type(error).__name__} {str(error)[:300]}", flush=True)
                traceback.print_exc()


def graph_of(calls):
    for each in calls[:2]:
        each()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    kept = []
    with torch.cuda.graph(graph):
        for each in calls:
            kept.append(each())
    return graph, kept


def measure(seconds):
    end = time.time() + seconds
    lines = []
    for name, case, variants in entries():
        if time.time() > end:
            lines.append(f"{name}: {case}: no time")
            continue
        try:
            op = get_operator(name)
            arguments = arguments_of(op, case)
            size = nbytes(*(x for x in arguments.values() if isinstance(x, torch.Tensor)))
            count = max(2, min(96, int(150e6 // size) + 1))
            copies = [{key: clone(value) for key, value in arguments.items()} for _ in range(count)]
            repeat = max(1, 24 // count)
            graphs = {}
            for label, module, patches in variants:
                try:
                    with patched(module, **patches):
                        graphs[label] = graph_of([(lambda c=c: call(op, module, name, c)) for c in copies * repeat])
                except Exception as error:
                    lines.append(f"{name}: {case}: {label} FAILED {str(error)[:100]}")
            times = {label: [] for label in graphs}
            for graph, _ in graphs.values():
                graph.replay()
            for _ in range(15):
                for label, (graph, _) in graphs.items():
                    begin, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    begin.record()
                    graph.replay()
                    stop.record()
                    stop.synchronize()
                    times[label].append(begin.elapsed_time(stop) * 1e3 / (count * repeat))
            lines.append(f"{name}: {case}: " + ", ".join(f"{label} {statistics.median(t):.2f}" for label, t in times.items()))
        except Exception as error:
            lines.append(f"{name}: {case}: FAILED {str(error)[:200]}")
        print(lines[-1], flush=True)
        copies = graphs = None
        torch.cuda.empty_cache()
    print("-- us, medians of 15 graphs, cold L2")
    print("\n".join(lines), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        if len(sys.argv) > 2:
            check(sys.argv[2])
        else:
            measure(48)
