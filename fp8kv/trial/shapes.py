"""The calls of the trial: their tensors, and who answers them."""
import dataclasses, functools, math, os, sys
import torch
import tokenspeed_kernel
from tokenspeed_kernel_nvidia.sm90.attention import decode, prefill

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
# name: (batch, cached, new, heads, kv_heads, k width, v width, cache dtype, window, sinks)
DECODE = {
    "gpt-oss 64x8192 fp8": (64, 8192, 1, 64, 8, 64, 64, E4M3, -1, True),
    "llama-70b 32x4096 fp8": (32, 4096, 1, 64, 8, 128, 128, E4M3, -1, False),
    "gpt-oss 64x8192 bf16": (64, 8192, 1, 64, 8, 64, 64, BF16, -1, True),
    "gpt-oss 16x8192 fp8": (16, 8192, 1, 64, 8, 64, 64, E4M3, -1, True),
    "qwen3-next 64x4096 fp8 256": (64, 4096, 1, 16, 2, 256, 256, E4M3, -1, False),
    "gemma3-12b 32x4096 fp8 256": (32, 4096, 1, 16, 8, 256, 256, E4M3, -1, False),
    "phi-3 16x2048 fp8 96": (16, 2048, 1, 32, 32, 96, 96, E4M3, -1, False),
    "phi-2 16x2048 fp8 80": (16, 2048, 1, 32, 32, 80, 80, E4M3, -1, False),
    "192/128 32x4096 fp8": (32, 4096, 1, 64, 8, 192, 128, E4M3, -1, False),
    "llama 32x4096 bf16 page 1": (32, 4096, 1, 64, 8, 128, 128, BF16, -1, False),
    "gpt-oss 64x8192 fp8 page 1": (64, 8192, 1, 64, 8, 64, 64, E4M3, -1, True),
    "qwen3-next 64x4096 fp8 256 page 1": (64, 4096, 1, 16, 2, 256, 256, E4M3, -1, False),
}
EXTEND = {
    "gemma 8x1024 of 8192 fp8 256": (8, 8192, 1024, 16, 8, 256, 256, E4M3, -1, False),
    "qwen3-next 8x1024 of 8192 fp8 256": (8, 8192, 1024, 16, 2, 256, 256, E4M3, -1, False),
    "gemma 8x1024 of 8192 bf16 256": (8, 8192, 1024, 16, 8, 256, 256, BF16, -1, False),
    "gemma3 window 1024, 8x1024 fp8 256": (8, 8192, 1024, 16, 8, 256, 256, E4M3, 1023, False),
}
ALL = {**DECODE, **EXTEND}
if not torch.cuda.is_available():  # a dry run: a hundredth of it
    ALL = {name: (2, min(s[1] // 32, 200), min(s[2], 20), *s[3:]) for name, s in ALL.items()}
PAGE = 64


def made(name, seed=0):
    batch, cached, new, heads, kv_heads, k_width, v_width, dtype, window, sinks = ALL[name]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    g = torch.Generator(device=device).manual_seed(seed)
    page = 1 if "page 1" in name else PAGE
    per = -(-cached // page)
    pages = batch * per
    def cache(width):
        x = torch.empty(pages, page, kv_heads, width, dtype=dtype, device=device)
        step = max(1, pages // 8)
        for at in range(0, pages, step):
            part = x[at : at + step]
            part.copy_(torch.randn(part.shape, device=device, generator=g, dtype=torch.float32).to(dtype))
        return x
    q = torch.randn(batch * new, heads, k_width, device=device, generator=g, dtype=torch.float32).to(BF16)
    table = torch.randperm(pages, device=device, generator=g).to(torch.int32).view(batch, per)
    lengths = torch.full((batch,), cached, dtype=torch.int32, device=device)
    given = dict(q=q, k_cache=cache(k_width), v_cache=cache(v_width), page_table=table, cache_seqlens=lengths, max_seqlen_k=cached, max_seqlen_q=new)
    if sinks:
        given["sinks"] = torch.randn(heads, device=device, generator=g)
    if window >= 0:
        given["window_left"] = window
    if name in EXTEND:
        ends = torch.arange(batch + 1, dtype=torch.int32, device=device)
        given |= dict(cu_seqlens_q=ends * new, cu_seqlens_kv=ends * cached, is_causal=True)
    given["out"] = torch.empty(batch * new, heads, v_width, dtype=BF16, device=device)
    return given


def cute(name, given):
    return (prefill.mha_extend_with_kvcache if name in EXTEND else decode.mha_decode_with_kvcache)(**given)


def portable(name, given):
    operator = tokenspeed_kernel.mha_extend_with_kvcache if name in EXTEND else tokenspeed_kernel.mha_decode_with_kvcache
    return operator(**given, solution="triton")


_config_of = decode.config_of
# name: {variant: changes to the configuration}; "" is what is served.
VARIANTS = {
    "llama-70b 32x4096 fp8": {"turned 32/2": dict(turned=True), "turned 16/3": dict(turned=True, resident=3, block=16, box=16)},
    "qwen3-next 64x4096 fp8 256": {"rows": dict(turned=False, rows=16, resident=1)},
    "gemma3-12b 32x4096 fp8 256": {"rows": dict(turned=False, rows=16, resident=1)},
    "phi-3 16x2048 fp8 96": {"turned": dict(turned=True)},
    "phi-2 16x2048 fp8 80": {"turned": dict(turned=True)},
    "192/128 32x4096 fp8": {"rows": dict(turned=False, rows=16)},
    "llama 32x4096 bf16 page 1": {"two": dict(loaders=2)},
    "gpt-oss 64x8192 fp8 page 1": {"two": dict(loaders=2)},
    "qwen3-next 64x4096 fp8 256 page 1": {"two": dict(loaders=2)},
}
last = []


def vary(changes):
    """Has programs of changed configurations served."""
    def config_of(*given):
        last[:] = [dataclasses.replace(_config_of(*given), **changes)]
        return last[0]
    decode.config_of = config_of
    decode._program_of.cache_clear()


def tail(waves, shares, late=0):
    """How much of the work is left to small groups."""
    decode.WAVES, decode.SHARES, decode.LATE = waves, shares, late if waves else 1 << 60
