import os, statistics, sys, time
sys.path.insert(0, os.path.dirname(__file__))
import common
import torch
from tokenspeed_kernel_nvidia.sm90.attention import mla_decode, mla_extend

BEGUN = time.time()
LIMIT = 44.0
read = torch.empty(1 << 27, dtype=torch.bfloat16, device="cuda").normal_()


def graph_of(call):
    call(); torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def turns(graphs, rounds, cold):
    times = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            if cold:
                read.sum(); read.sum()
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            a.record(); graph.replay(); b.record(); b.synchronize()
            times[name].append(a.elapsed_time(b) * 1e3)
        if time.time() - BEGUN > LIMIT:
            break
    return {name: statistics.median(found) for name, found in times.items()}


rows = []
for name, (shape, kind) in common.SHAPES.items():
    if time.time() - BEGUN > LIMIT:
        rows.append(f"{name}: no time left"); continue
    try:
        a = common.inputs(**shape)
        large = common.flops(a) > 2e11
        graphs = {}
        def add(label, call):
            try:
                graphs[label] = graph_of(call)
            except Exception as error:
                rows.append(f"{name} {label} FAILED {repr(error)[:150]}")
        add("triton", lambda: common.triton_extend(**a))
        add("new", lambda: mla_extend.mla_extend_with_kvcache(**a))
        if (large or name.startswith(("S8", "S9", "S10"))) and kind is not None:
            for variant, heads in common.VARIANTS:
                if heads == kind[1] and variant != "base" and not name.startswith("S3 "):
                    common.use(variant, heads)
                    add(variant, lambda: mla_extend.mla_extend_with_kvcache(**a))
                    common.standard()
        if name.startswith(("S10", "S11")):
            d = {k: v for k, v in a.items() if k not in ("cu_seqlens_q", "cu_seqlens_kv", "is_causal")}
            add("decode", lambda: mla_decode.mla_decode_with_kvcache(**d))
        found = turns(graphs, 14 if large else 25, not large)
        work = common.flops(a)
        rows.append(f"{name}: " + ", ".join(f"{label} {us:.1f}" + (f" ({work / us / 1e6:.0f} TF)" if large else "") for label, us in found.items()))
    except Exception as error:
        rows.append(f"{name} FAILED {repr(error)[:200]}")
    print(f"{time.time() - BEGUN:.1f}", rows[-1], flush=True)
print("--- us, medians of turns")
print("\n".join(rows))
