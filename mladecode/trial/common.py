"""What check and time share: variants, calls, and how programs are compiled side by side."""
import os, sys, functools, time
from dataclasses import replace
import torch
from tokenspeed_kernel_nvidia.sm90.attention import mla_decode
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode_config import Config
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode_fp8_config import Fp8Config

E4M3 = torch.float8_e4m3fn
# name: (options of the computing program, options of the merging one); None: no merge is launched, right where nothing is shared
V = {
    "old": ({}, {}),
    "narrow": ({"narrow": True}, {"narrow": True}),
    "early": ({}, {"early": True}),
    "once": ({"once": True}, {}),
    "once early": ({"once": True}, {"early": True}),
    "once early 256": ({"once": True}, {"early": True, "merge_ctas": 256}),
    "narrow early": ({"narrow": True}, {"narrow": True, "early": True}),
    "narrow early b8": ({"narrow": True}, {"narrow": True, "early": True, "merge_batch": 8}),
    "narrow once early": ({"narrow": True, "once": True}, {"narrow": True, "early": True}),
    "narrow once early 256": ({"narrow": True, "once": True}, {"narrow": True, "early": True, "merge_ctas": 256}),
    "join": ({"narrow": True, "joins": True}, None),
    "once join": ({"narrow": True, "once": True, "joins": True}, None),
    "once no merge": ({"once": True}, None),
}
# heads, fp8: variants
USED = {
    (128, False): ["old", "narrow", "early", "narrow early", "narrow early b8", "narrow once early", "narrow once early 256", "once join"],
    (16, False): ["old", "early", "once", "once early", "once early 256", "join", "once join"],
    (16, True): ["old", "once", "once early 256", "once no merge"],
}

def configs(heads, fp8, name):
    compute, merge = V[name]
    made = Fp8Config("bfloat16", heads, True, **compute) if fp8 else Config("bfloat16", heads, **compute)
    return made, None if merge is None else Config("bfloat16", heads, **merge)

def programs_of(heads, fp8, name, device=0):
    compute, merge = configs(heads, fp8, name)
    launch = (mla_decode.mla_decode_fp8_program if fp8 else mla_decode.mla_decode_program)(compute)
    merges = (lambda *_: None) if merge is None else mla_decode.mla_merge_program(merge)
    groups = max(1, torch.cuda.get_device_properties(device).multi_processor_count // compute.ranks)
    return launch, merges, groups, compute.workspace_bytes(groups), compute.counters(groups) if compute.joins else 0

def use(heads, fp8, name):
    found = programs_of(heads, fp8, name)
    mla_decode._programs_of = lambda *_: found
    mla_decode.FEW = 1000000  # joins wherever the program can

def compile_one(item):
    kind, config = item
    program = {"c": mla_decode.mla_decode_program, "f": mla_decode.mla_decode_fp8_program, "m": mla_decode.mla_merge_program}[kind]
    began = time.time()
    try:
        program(config)
        return f"{time.time() - began:.0f}s"
    except Exception as e:
        return f"{kind} {config}: {type(e).__name__}: {str(e)[:300]}"

def wanted():
    items = {}
    for (heads, fp8), names in USED.items():
        for name in names:
            compute, merge = configs(heads, fp8, name)
            items[("f" if fp8 else "c", compute)] = None
            if merge is not None:
                items[("m", merge)] = None
    return list(items)

def compile_all(workers=8):
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    items = sorted(wanted(), key=lambda item: item[0] == "m")
    began = time.time()
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(compile_one, items))
    print("compiled", len(items), "in", round(time.time() - began), "s:", *found, flush=True)

def call_of(batch, length, heads, fp8=False, lengths=None, device="cuda", seed=0, scale=0.1352):
    torch.manual_seed(seed)
    lengths = lengths or [length] * batch
    per = [-(-x // 64) for x in lengths]
    pages = max(1, sum(per))
    q = torch.randn(len(lengths), heads, 576, device=device, dtype=torch.bfloat16)
    cache = torch.randn(pages, 64, 576, device=device, dtype=torch.bfloat16)
    order = torch.randperm(pages, device="cpu").to(torch.int32)
    table, at = torch.zeros(len(lengths), max(1, max(per)), dtype=torch.int32), 0
    for row, n in enumerate(per):
        table[row, :n] = order[at:at + n]
        at += n
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    given = dict(q=q, kv_cache=cache, page_table=table.to(device), cache_seqlens=seqlens, max_seqlen_k=max(lengths), kv_lora_rank=512,
                 softmax_scale=scale)
    if fp8:
        one = torch.ones(1, device=device)
        given |= dict(q=q.to(E4M3), kv_cache=cache.to(E4M3), q_scale=one, kv_scale=one)
    return given
