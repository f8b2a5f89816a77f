"""Shapes, programs and variants of the trial of mla_extend_with_kvcache."""
import os, sys, time
from dataclasses import dataclass
import torch
from tokenspeed_kernel_nvidia.sm90.attention import mla_decode, mla_extend, mla_extend_config as mec
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode_config import Config as DecodeConfig

E4M3 = torch.float8_e4m3fn
DRY = os.environ.get("DRY") == "1"


@dataclass(frozen=True)
class Tail4(mec.Config):
    @property
    def tail(self): return 4

@dataclass(frozen=True)
class Tail14(mec.Config):
    @property
    def tail(self): return 14

@dataclass(frozen=True)
class AloneLate(mec.Config):
    @property
    def at_once(self): return False


BF16 = "bfloat16"
VARIANTS = {  # of bfloat16, by name and heads
    ("base", 128): mec.Config(BF16, 128), ("tail4", 128): Tail4(BF16, 128), ("tail14", 128): Tail14(BF16, 128),
    ("pair", 16): mec.Config(BF16, 16, 2), ("alone", 16): mec.Config(BF16, 16, 1), ("alonelate", 16): AloneLate(BF16, 16, 1),
}

def jobs():
    """Everything to compile: what takes longest and what is needed most first, variants last."""
    bf16 = "bfloat16"
    found = [("extend_fp8", mec.Fp8Config(bf16, 128, True)), ("extend_fp8", mec.Fp8Config(bf16, 16, True)), ("extend_fp8", mec.Fp8Config(bf16, 16, False))]
    found += [("extend", mec.Config(bf16, 128)), ("extend", mec.Config(bf16, 16)), ("extend", mec.Config(bf16, 16, 1))]
    found += [("merge", mec.Config(bf16, 128)), ("merge", mec.Config(bf16, 16)), ("merge", mec.Config(bf16, 16, 1))]
    found += [("decode", DecodeConfig(bf16, heads)) for heads in (128, 16)]
    found += [("extend", config) for config in VARIANTS.values() if type(config) is not mec.Config]
    found += [("dmerge", DecodeConfig(bf16, heads)) for heads in (128, 16)]
    return found

PROGRAMS = {"extend": mla_extend.mla_extend_program, "extend_fp8": mla_extend.mla_extend_fp8_program,
            "merge": mla_extend.mla_extend_merge_program, "decode": mla_decode.mla_decode_program, "dmerge": mla_decode.mla_merge_program}

def compile_one(job):
    begun = time.time()
    try:
        PROGRAMS[job[0]](job[1])
        return f"{time.time() - begun:5.1f} s {job}"
    except Exception as error:
        return f"FAILED {job}: {type(error).__name__}: {str(error)[:300]}"


def inputs(batch, new, length, heads, q_dtype=torch.bfloat16, cache_dtype=None, causal=True, device="cuda", ragged=False, seed=0):
    """A call of mla_extend_with_kvcache; new tokens and lengths of all sequences alike, or drawn."""
    g = torch.Generator(device=device); g.manual_seed(seed)
    cpu = torch.Generator(); cpu.manual_seed(seed)
    lens = [length] * batch if not ragged else torch.randint(0, length + 1, (batch,), generator=cpu).tolist()
    news = [min(new, n) if not ragged else int(torch.randint(0, min(new, n) + 1, (1,), generator=cpu)) for n in lens]
    pages_each = (length + 63) // 64
    tokens = sum(news)
    q = torch.randn(tokens, heads, 576, generator=g, device=device, dtype=torch.bfloat16)
    kv = torch.randn(batch * pages_each, 64, 576, generator=g, device=device, dtype=torch.bfloat16)
    table = torch.randperm(batch * pages_each, generator=cpu).int().view(batch, pages_each).to(device)
    offsets = torch.tensor([0, *torch.tensor(news).cumsum(0).tolist()], dtype=torch.int32, device=device)
    q_scale = kv_scale = None
    if q_dtype == E4M3:
        q, q_scale = q.to(E4M3), torch.ones((), device=device)
    if (cache_dtype or q_dtype) == E4M3:
        kv, kv_scale = kv.to(E4M3), torch.ones((), device=device)
    return dict(q=q, cu_seqlens_q=offsets, cu_seqlens_kv=None, kv_cache=kv, page_table=table,
                cache_seqlens=torch.tensor(lens, dtype=torch.int32, device=device), max_seqlen_q=new, max_seqlen_k=length,
                kv_lora_rank=512, softmax_scale=0.1352, is_causal=causal, q_scale=q_scale, kv_scale=kv_scale)


def flops(a):
    lens, off = a["cache_seqlens"].tolist(), a["cu_seqlens_q"].tolist()
    total = 0
    for b, n in enumerate(lens):
        k = off[b + 1] - off[b]
        total += k * n - (k * (k - 1) // 2 if a["is_causal"] else 0)
    return total * a["q"].shape[1] * (576 + 512) * 2


def use(name, heads):
    """Makes the launcher use a variant from here on."""
    config = VARIANTS[name, heads]
    from tokenspeed_kernel_nvidia._machine import multiprocessors
    groups = max(1, multiprocessors(0) // config.ranks)
    compute = mla_extend.mla_extend_program(config)
    merge = mla_extend.mla_extend_merge_program(mec.Config(BF16, heads, config.ranks))
    original = mla_extend.__dict__.setdefault("_original", mla_extend._programs_of)
    def of(dtype, cache, h, ranks, device):
        return (compute, merge, groups, config.workspace_bytes(groups)) if h == heads and cache == torch.bfloat16 else original(dtype, cache, h, ranks, device)
    mla_extend._programs_of = of

def standard():
    if "_original" in mla_extend.__dict__:
        mla_extend._programs_of = mla_extend._original

def triton_extend(**a):
    from tokenspeed_kernel.triton.attention.mla_extend_with_kvcache import mla_extend_with_kvcache
    return mla_extend_with_kvcache(**a)

SHAPES = {
    "S1 128h 4x512 of 4096": (dict(batch=4, new=512, length=4096, heads=128), ("bf16", 128)),
    "S2 16h 8x1024 of 8192": (dict(batch=8, new=1024, length=8192, heads=16), ("bf16", 16)),
    "S3 16h 1x8192 of 8192": (dict(batch=1, new=8192, length=8192, heads=16), ("bf16", 16)),
    "S4 128h 4x512 of 4096 fp8": (dict(batch=4, new=512, length=4096, heads=128, q_dtype=E4M3), None),
    "S5 16h 8x1024 of 8192 fp8": (dict(batch=8, new=1024, length=8192, heads=16, q_dtype=E4M3), None),
    "S6 16h 8x1024 fp8 cache": (dict(batch=8, new=1024, length=8192, heads=16, cache_dtype=E4M3), None),
    "S7 128h 32x16 of 500": (dict(batch=32, new=16, length=500, heads=128), ("bf16", 128)),
    "S8 16h 1x32 of 300": (dict(batch=1, new=32, length=300, heads=16), ("bf16", 16)),
    "S9 16h 100x60 of 700 ragged": (dict(batch=100, new=60, length=700, heads=16, ragged=True), ("bf16", 16)),
    "S10 16h 64x4 of 8192": (dict(batch=64, new=4, length=8192, heads=16), ("bf16", 16)),
    "S11 128h 64x1 of 8192": (dict(batch=64, new=1, length=8192, heads=128), ("bf16", 128)),
    "S12 16h 2x256 of 2048, all seen": (dict(batch=2, new=256, length=2048, heads=16, causal=False), ("bf16", 16)),
}
if DRY:
    for shape, _ in SHAPES.values():
        shape.update(batch=min(shape["batch"], 2), new=min(shape["new"], 5), length=min(shape["length"], 130))
