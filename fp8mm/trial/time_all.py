"""Times of all contestants at all shapes: a call in a graph of several, which take turns on copies of the operands. About 40 s."""

import statistics
import sys
import time
import traceback

import torch

import contest
from contest import BLOCKS, COLUMN, COLUMN64, MX, ROW, config, cublas, operands, own, triton

FEW = ("n", "w")
CALLS = [
    ("token 8192^3", ROW, (8192, 8192, 8192), contest.USED[ROW]),
    ("block 8192^3", BLOCKS, (8192, 8192, 8192), contest.USED[BLOCKS]),
    ("token 4096x2048x7168", ROW, (4096, 2048, 7168), contest.USED[ROW]),
    ("block 4096x2048x7168", BLOCKS, (4096, 2048, 7168), contest.USED[BLOCKS]),
    ("e8m0 col 4096x2048x7168", COLUMN, (4096, 2048, 7168), contest.USED[COLUMN]),
    ("e8m0 col 4096x7168x4096", COLUMN, (4096, 7168, 4096), contest.USED[COLUMN]),
    ("64x64 4096x7168x4096", COLUMN64, (4096, 7168, 4096), contest.USED[COLUMN64]),
    ("mxfp8 4096x8192x8192", MX, (4096, 8192, 8192), contest.USED[MX]),
    ("token 4096x7168x4096", ROW, (4096, 7168, 4096), ("w", "w.turn", "w.d2", "n")),
    ("token 2048x8192x57344", ROW, (2048, 8192, 57344), ("w", "w.turn", "w.d2")),
    ("token 4096x2048x4096 f32", ROW, (4096, 2048, 4096), FEW),
    *((f"token {m}x7168x2048", ROW, (m, 7168, 2048), FEW) for m in (128, 256, 512, 1024)),
    *((f"block {m}x7168x2048", BLOCKS, (m, 7168, 2048), FEW) for m in (512, 1024)),
    *((f"block {m}x2048x7168", BLOCKS, (m, 2048, 7168), FEW) for m in (256, 512, 1024)),
    *((f"token {m}x4096x7168", ROW, (m, 4096, 7168), FEW) for m in (256, 512, 1024)),
]


def contestants(name, kind, shape, changes, copies):
    m, k, n = shape
    dtype = torch.float32 if name.endswith("f32") else torch.bfloat16
    # Weights are copied, activations and results too: nothing is warm.
    sets = [(*operands(kind, m, k, n, seed), torch.empty(m, n, device="cuda", dtype=dtype)) for seed in range(copies)]
    makers = {"tri": triton}
    if kind in (ROW, BLOCKS):
        makers["cub"] = cublas
    stored = "float32" if dtype == torch.float32 else "bfloat16"
    for change in changes:
        makers[change] = lambda *given, change=change: own(config(kind, change, stored), *given, needs_compiled=True)
    for label, make in makers.items():
        try:
            calls = [make(*given) for given in sets]
            for call in calls[:1]:
                call()
            torch.cuda.synchronize()
            yield label, calls
        except Exception as error:
            print(f"  {name} {label}: {type(error).__name__} {str(error).splitlines()[0][:90]}", flush=True)


def copies_of(shape):
    m, k, n = shape
    return max(2, min(8, int(120e6 // (m * k + n * k + 2 * m * n)) + 1))


def graph_of(calls, count):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(count):
            calls[index % len(calls)]()
    return graph


def warm():
    for name, kind, shape, _ in CALLS:
        try:
            for _ in contestants(name, kind, shape, (), 1):
                pass
        except Exception:
            print("FAILED", name)
            traceback.print_exc()


def measure(name, kind, shape, changes):
    m, k, n = shape
    count = max(4, min(40, int(6e-3 / (2 * m * k * n / 1e15 + 4e-6)) // 4 * 4))
    graphs, times = {}, {}
    for label, calls in contestants(name, kind, shape, changes, copies_of(shape)):
        graphs[label], times[label] = graph_of(calls, count), []
    for turn in range(7):
        for label, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn:
                times[label].append(begin.elapsed_time(end) * 1e3 / count)
    return {label: statistics.median(found) for label, found in times.items()}


def main():
    begun, lines = time.time(), []
    for name, kind, shape, changes in CALLS:
        if time.time() - begun > 44:
            lines.append(f"{name}: no time left")
            continue
        try:
            found = measure(name, kind, shape, changes)
            lines.append(f"{name:25}" + " ".join(f"{label} {us:.1f}" for label, us in found.items()))
        except Exception:
            traceback.print_exc()
        print(lines[-1] if lines else "", f"({time.time() - begun:.0f} s)", file=sys.stderr, flush=True)
        torch.cuda.empty_cache()
    print("us; tri Triton, cub torch._scaled_mm without fast accumulation; ours: w 256, n 128 columns a tile")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
