"""Medians of a call in a CUDA graph of several on copies of the arguments in turn; graphs of all variants take turns. About 40 s."""
import statistics, sys, time
from common import *
START = time.time()
SHAPES = [(1, 8192, 128, False), (64, 8192, 16, False), (128, 4096, 16, False), (64, 8192, 16, True), (16, 32768, 128, False),
          (64, 8192, 128, False), (128, 4096, 128, False)]
rows = []
def graph_of(calls, n):
    stream = torch.cuda.Stream()
    keep = []
    with torch.cuda.stream(stream):
        for c in calls: keep.append(mla_decode.mla_decode_with_kvcache(**c))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(n): keep.append(mla_decode.mla_decode_with_kvcache(**calls[i % len(calls)]))
    return graph, keep

def measure(batch, length, heads, fp8):
    size = batch * length * 576 * (1 if fp8 else 2)
    first = call_of(batch, length, heads, fp8)
    copies = max(2, -(-150_000_000 // size))
    calls = [first] + [{**first, "kv_cache": first["kv_cache"].clone()} for _ in range(copies - 1)]
    n = max(copies, int(2500 / max(15, size / 4e6)))
    n = -(-n // copies) * copies
    graphs = {}
    for name in USED[heads, fp8]:
        if "join" in name and batch == 1: continue
        try:
            use(heads, fp8, name)
            graphs[name] = graph_of(calls, n)
        except Exception as e:
            print("failed", name, type(e).__name__, str(e)[:200], flush=True)
    times = {name: [] for name in graphs}
    for g, _ in graphs.values(): g.replay()
    torch.cuda.synchronize()
    for _ in range(9):
        for name, (g, _) in graphs.items():
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            g.replay()  # clocks and caches as in a row of them
            a.record(); g.replay(); b.record(); torch.cuda.synchronize()
            times[name].append(a.elapsed_time(b) * 1000 / n)
    found = {name: statistics.median(t) for name, t in times.items()}
    rows.append(f"{batch}x{length} h{heads}{' fp8' if fp8 else ''}: " + "; ".join(f"{k} {v:.2f}" for k, v in found.items()))
    print(rows[-1], f"[{time.time() - START:.0f}s]", flush=True)

if __name__ == "__main__":
    compile_all(12)
    for shape in SHAPES:
        if time.time() - START > 46:
            rows.append(f"{shape}: no time"); continue
        try: measure(*shape)
        except Exception as e: rows.append(f"{shape}: {type(e).__name__} {str(e)[:200]}")
        torch.cuda.empty_cache()
    print("\n--- microseconds a call"); print("\n".join(rows))
