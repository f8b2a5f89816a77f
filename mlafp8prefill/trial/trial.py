"""Trial of fp8 prefill at widths 192/128, 256 and 96, of windows of latent prefill, and of extend without causality."""

from __future__ import annotations

import functools
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch

from tokenspeed_kernel_nvidia.sm90.attention import prefill
from tokenspeed_kernel_nvidia.sm90.attention.mla_prefill import mla_prefill
from tokenspeed_kernel_nvidia.sm90.attention.prefill_config import Config, Tile

BEGUN = time.perf_counter()
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
NAN = math.nan
STATE = Path(tempfile.gettempdir()) / "mlafp8prefill_state.txt"
DEV = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Variant(Config):
    """A configuration of another tile, which its cache's key names."""

    shape: tuple[int, ...] = ()
    ordered: bool = False
    raw: int = 3

    @property
    def tile(self):
        return Tile(*self.shape)

    @property
    def turns(self):
        return self.ordered

    @property
    def raw_stages(self):
        return self.raw if self.converts else 1


def variant(shape, ordered=False, raw=3, section_mib=24):
    return functools.partial(Variant, shape=shape, ordered=ordered, raw=raw, section_mib=section_mib)


W = (192, 128)
# name -> (widths, class of its configuration)
VARIANTS = {
    "128x128 q2 kv3": (W, None),
    "192x64 q2 kv4": (W, variant((192, 64, 2, 4))),
    "128x128 q2 kv3 turns": (W, variant((128, 128, 2, 3), True)),
    "192x64 q2 kv4 turns": (W, variant((192, 64, 2, 4), True)),
    "128x128 q2 kv2": (W, variant((128, 128, 2, 2))),
    "128x64 q2 kv5": (W, variant((128, 64, 2, 5))),
    "section 48": (W, variant((128, 128, 2, 3), section_mib=48)),
}
V256 = {"128x64 turns": variant((128, 64, 2, 3), True)}
V96 = {"192x64": variant((192, 64, 2, 4)), "128x128 turns": variant((128, 128, 2, 3), True)}


def configs():
    """All programs, the most important first."""
    F = functools.partial(Config, "bfloat16")
    mla = {"head_dim": 192, "gqa_ratio": 1, "v_head_dim": 128}
    first = [F(**mla, fp8=True), F(**mla)]
    first += [make("bfloat16", **mla, fp8=True) for _, make in VARIANTS.values() if make]
    first += [F(256, 2, v_head_dim=256, fp8=True), F(256, 2, v_head_dim=256), F(96, 1, v_head_dim=96, fp8=True), F(96, 1, v_head_dim=96)]
    first += [F(**mla, fp8=True, windowed=True), F(**mla, windowed=True)]
    first += [F(**mla, fp8=True, own_kv=True), F(**mla, own_kv=True)]
    first += [make("bfloat16", 96, 1, v_head_dim=96, fp8=True) for make in V96.values()]
    first += [make("bfloat16", 256, 2, v_head_dim=256, fp8=True) for make in V256.values()]
    first += [F(256, 2, 64, v_head_dim=256, fp8=True), F(256, 2, 64, v_head_dim=256), F(192, 8, 64, v_head_dim=128, fp8=True)]
    return first


def compile_one(config):
    begun = time.perf_counter()
    program = prefill.prefill_program
    try:
        program(config)
    except Exception as error:  # reported
        return config, f"{type(error).__name__}: {error}"[:300], 0.0
    return config, "", time.perf_counter() - begun


# -- inputs and references -----------------------------------------------------------------------------------------------------


def offsets(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32, device=DEV).cumsum(0, dtype=torch.int32)


def drawn(lengths, heads, kv_heads, widths, dtype, kv_lengths=None, seed=0):
    draw = torch.Generator(DEV).manual_seed(seed)
    kv = sum(kv_lengths or lengths)
    shapes = (sum(lengths), heads, widths[0]), (kv, kv_heads, widths[0]), (kv, kv_heads, widths[1])
    return tuple(torch.randn(shape, generator=draw, device=DEV, dtype=BF16).to(dtype) for shape in shapes)


def reference(q, k, v, lengths, kv_lengths, scale, causal=True, window=-1):
    """float32 attention, sequence by sequence and head by head."""
    outs, lses = [], []
    group = q.shape[1] // k.shape[1]
    for one_q, one_k, one_v in zip(q.split(lengths), k.split(kv_lengths), v.split(kv_lengths), strict=True):
        out = torch.zeros(one_q.shape[0], q.shape[1], v.shape[2], device=DEV)
        lse = torch.full(one_q.shape[:2], -math.inf, device=DEV)
        if one_q.shape[0] and one_k.shape[0]:
            place = torch.arange(len(one_q), device=DEV)[:, None] + (len(one_k) - len(one_q))
            behind = place - torch.arange(len(one_k), device=DEV)
            hidden = torch.zeros_like(behind, dtype=torch.bool)
            if causal:
                hidden |= behind < 0
            if window >= 0:
                hidden |= behind > window
            for head in range(q.shape[1]):
                s = one_q[:, head].float() @ one_k[:, head // group].float().T * scale
                s.masked_fill_(hidden, -math.inf)
                lse[:, head] = s.logsumexp(1)
                p = torch.exp(s - lse[:, head].clamp_min(-1e30)[:, None])
                out[:, head] = p @ one_v[:, head // group].float()
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def compare(name, got, wanted, rough):
    out, lse = got
    if DEV == "cuda":
        torch.cuda.synchronize()
    error = float((out.float() - wanted[0]).norm() / wanted[0].norm().clamp_min(1e-30))
    size, off = wanted[0].norm(dim=2), (out.float() - wanted[0]).norm(dim=2)
    rows = int((off > (0.15 if rough else 0.02) * size + 1e-6).sum()) + int((off != off).sum())
    seen = wanted[1] > -math.inf
    lse_off = float((lse[seen] - wanted[1][seen]).abs().max()) if seen.any() else 0.0
    same = bool(((lse > -math.inf) == seen).all())
    fine = error <= (0.04 if rough else 5e-3) and not rows and lse_off < 4e-3 and same
    print(f"{'right' if fine else 'WRONG'} {name}: error {error:.4f}, rows off {rows} of {off.numel()}, lse off {lse_off:.1e} {same}", flush=True)
    if fine:
        note(name, "right")


def note(name, word):
    with STATE.open("a") as file:
        file.write(f"{name}\t{word}\n")


def doubtful():
    """Checks that were begun, and did not end well."""
    lines = [line.split("\t") for line in STATE.read_text().splitlines()] if STATE.exists() else []
    return {name for name, word in lines if word == "begun"} - {name for name, word in lines if word == "right"}


class using:
    def __init__(self, make):
        self.make = make

    def __enter__(self):
        prefill._program_of.cache_clear()
        prefill.Config = Config if self.make is None else self.make

    def __exit__(self, *_):
        prefill.Config = Config
        prefill._program_of.cache_clear()


def scales(heads):
    draw = torch.Generator(DEV).manual_seed(5)
    some = lambda *shape: torch.rand(shape, generator=draw, device=DEV) + 0.5  # noqa: E731
    return {"q_scale": some(heads), "k_scale": some(1), "v_scale": some(heads)}


def scaled(q, k, v, of):
    group = q.shape[1] // k.shape[1]
    return (
        q.float() * of["q_scale"].repeat_interleave(group)[:, None],
        k.float() * of["k_scale"],
        v.float() * of["v_scale"][:, None],
    )


def check_latent(name, lengths, kv_lengths=None, heads=3, dtype=E4M3, make=None, **options):
    q, k, v = drawn(lengths, heads, heads, W, dtype, kv_lengths)
    of = scales(heads) if dtype == E4M3 else {}
    out = torch.full((len(q), heads, W[1]), NAN, device=DEV, dtype=BF16)
    with using(make):
        got = mla_prefill(q, k, v, offsets(lengths), cu_seqlens_kv=None if kv_lengths is None else offsets(kv_lengths),
                          return_lse=True, softmax_scale=0.0721, out=out, **of, **options)
    wide = scaled(q, k, v, of) if of else (q, k, v)
    wanted = reference(*wide, lengths, kv_lengths or lengths, 0.0721, options.get("is_causal", True), options.get("window_left", -1))
    compare(name, got, wanted, dtype == E4M3)


def check_heads(name, lengths, heads, kv_heads, width, make=None, **options):
    q, k, v = drawn(lengths, heads, kv_heads, (width, width), E4M3)
    of = scales(kv_heads)
    out = torch.full(q.shape, NAN, device=DEV, dtype=BF16)
    with using(make):
        got = prefill.mha_prefill(q, k, v, offsets(lengths), return_lse=True, out=out, **of, **options)
    compare(name, got, reference(*scaled(q, k, v, of), lengths, lengths, width**-0.5, True, options.get("window_left", -1)), True)


def paged(k, v, kv_lengths, page_size):
    """Caches with pages in turned order, NaN behind sequences, and their page table."""
    counts = [-(-n // page_size) for n in kv_lengths]
    caches = [torch.full((sum(counts), page_size, *x.shape[1:]), NAN, device=DEV, dtype=BF16).to(x.dtype) for x in (k, v)]
    table = torch.full((len(counts), max(counts)), 2**31 - 1, dtype=torch.int32)
    free = sum(counts)
    for row, (one_k, one_v, count) in enumerate(zip(k.split(kv_lengths), v.split(kv_lengths), counts, strict=True)):
        for page in range(count):
            free -= 1
            table[row, page] = free
            some = slice(page * page_size, min((page + 1) * page_size, len(one_k)))
            for cache, x in zip(caches, (one_k, one_v), strict=True):
                cache[free, : some.stop - some.start] = x[some]
    return *caches, table.to(DEV)


def check_extend(name, lengths, kv_lengths, heads, kv_heads, widths, dtype, causal, page_size=64):
    q, k, v = drawn(lengths, heads, kv_heads, widths, dtype, kv_lengths)
    of = scales(kv_heads) if dtype == E4M3 else {}
    k_cache, v_cache, table = paged(k, v, kv_lengths, page_size)
    out = torch.full((len(q), heads, widths[1]), NAN, device=DEV, dtype=BF16)
    got = prefill.mha_extend_with_kvcache(
        q, offsets(lengths), None, k_cache, v_cache, table, torch.tensor(kv_lengths, dtype=torch.int32, device=DEV),
        max(lengths), max(kv_lengths), causal, return_lse=True, out=out, **of,
    )
    wide = scaled(q, k, v, of) if of else (q, k, v)
    compare(name, got, reference(*wide, lengths, kv_lengths, widths[0] ** -0.5, causal), dtype == E4M3)


def attempt(function, *arguments, **named):
    if time.perf_counter() - BEGUN > LIMIT:
        print("no time:", arguments[0])
        return None
    try:
        return function(*arguments, **named)
    except Exception:
        print("FAILED", arguments[0], traceback.format_exc(limit=4)[-500:], flush=True)
        return None


MANY = [3, 0, 130, 700, 1, 24, 1300]
CHECKS = {
    "latent fp8": lambda n: check_latent(n, MANY),
    "latent fp8, 3000 tokens": lambda n: check_latent(n, [3000, 1000], heads=5),
    "latent fp8, others, not causal": lambda n: check_latent(n, [5, 33, 2, 700], [70, 33, 0, 2000], is_causal=False),
    "latent fp8, others, causal": lambda n: check_latent(n, [5, 33, 2, 7, 300], [70, 33, 1, 0, 900]),
    "latent fp8, window": lambda n: check_latent(n, MANY, window_left=150),
    "latent bf16, window": lambda n: check_latent(n, MANY, dtype=BF16, window_left=150),
    "256 fp8": lambda n: check_heads(n, MANY, 4, 2, 256),
    "96 fp8": lambda n: check_heads(n, MANY, 2, 2, 96),
    "extend 256 fp8": lambda n: check_extend(n, [70, 33, 1, 300], [300, 33, 257, 900], 4, 2, (256, 256), E4M3, True),
    "extend 256 fp8, not causal": lambda n: check_extend(n, [70, 33, 1, 300], [300, 3, 257, 900], 4, 2, (256, 256), E4M3, False),
    "extend 256 bf16, not causal": lambda n: check_extend(n, [70, 33, 1, 300], [300, 3, 257, 900], 4, 2, (256, 256), BF16, False),
    "extend 192/128 fp8": lambda n: check_extend(n, [70, 33, 1, 300], [300, 33, 257, 900], 16, 2, W, E4M3, True),
}
CHECKS |= {f"latent fp8 {name}": lambda n, make=make: check_latent(n, MANY, make=make) for name, (_, make) in VARIANTS.items() if make}
CHECKS |= {f"96 fp8 {name}": lambda n, make=make: check_heads(n, MANY, 2, 2, 96, make=make) for name, make in V96.items()}
CHECKS |= {f"256 fp8 {name}": lambda n, make=make: check_heads(n, MANY, 4, 2, 256, make=make) for name, make in V256.items()}


def check():
    failed = []
    with ProcessPoolExecutor(6, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(compile_one, config) for config in configs()]):
            config, error, seconds = done.result()
            if error:
                failed.append(config)
                print("does not compile:", config, error, flush=True)
    print(f"compiled {len(configs()) - len(failed)} by {time.perf_counter() - BEGUN:.0f} s", flush=True)
    STATE.unlink(missing_ok=True)
    for name, one in CHECKS.items():
        if time.perf_counter() - BEGUN < LIMIT:
            note(name, "begun")
        attempt(one, name)
    print(f"checked by {time.perf_counter() - BEGUN:.0f} s", flush=True)
    attempt(compile_triton, "triton")
    print(f"done by {time.perf_counter() - BEGUN:.0f} s", flush=True)


# -- times ---------------------------------------------------------------------------------------------------------------------


def triton_mla(*args, **named):
    from tokenspeed_kernel.triton.attention.mla_prefill import mla_prefill as portable

    return portable(*args, **named)


def triton_mha(*args, **named):
    from tokenspeed_kernel.triton.attention.mha_prefill import mha_prefill as portable

    return portable(*args, **named)


def compile_triton(_):
    """One launch of each form that is timed, of the same sizes: tiles are chosen by them."""
    for title, case in CASES.items():
        for name in ("old", "old bf16"):
            if name in case:
                attempt(lambda _, call=case[name]: call(), f"{title} {name}")


def latent_case(lengths, heads, kv_lengths=None, **options):
    of = scales(heads)

    @functools.cache
    def inputs(dtype):
        return *drawn(lengths, heads, heads, W, dtype, kv_lengths), offsets(lengths)

    def call(function, dtype=E4M3, make=None):
        q, k, v, cu = inputs(dtype)
        with using(make):
            return function(
                q, k, v, cu, max_seqlen=max(lengths), softmax_scale=0.0721, **(of if dtype == E4M3 else {}), **options,
                **({} if kv_lengths is None else {"cu_seqlens_kv": offsets_of(tuple(kv_lengths))}),
            )  # fmt: skip

    return call


@functools.cache
def offsets_of(lengths):
    return offsets(list(lengths))


def heads_case(lengths, heads, kv_heads, width):
    of = scales(kv_heads)

    @functools.cache
    def inputs(dtype):
        return *drawn(lengths, heads, kv_heads, (width, width), dtype), offsets(lengths)

    def call(function, dtype=E4M3, make=None):
        q, k, v, cu = inputs(dtype)
        with using(make):
            return function(q, k, v, cu, max_seqlen=max(lengths), **(of if dtype == E4M3 else {}))

    return call


def extend_case(lengths, kv_lengths, heads, kv_heads, widths, causal, page_size=64):
    of = scales(kv_heads)

    @functools.cache
    def inputs(dtype):
        q, k, v = drawn(lengths, heads, kv_heads, widths, dtype, kv_lengths)
        held = torch.tensor(kv_lengths, dtype=torch.int32, device=DEV)
        return q, offsets(lengths), *paged(k, v, kv_lengths, page_size), held

    def call(function, dtype=E4M3):
        q, cu, k_cache, v_cache, table, held = inputs(dtype)
        return function(
            q, cu, None, k_cache, v_cache, table, held, max(lengths), max(kv_lengths), causal, **(of if dtype == E4M3 else {})
        )

    return call


def triton_extend(*args, **named):
    from tokenspeed_kernel.triton.attention.mha_extend_with_kvcache import mha_extend_with_kvcache as portable

    return portable(*args, **named)


def make_cases():
    prefix = extend_case([1024] * 4, [8192] * 4, 16, 8, (256, 256), False)
    latent = latent_case([8192] * 2, 16)
    window = latent_case([8192] * 2, 16, window_left=1023)
    chunk = latent_case([2048], 16, [16384], is_causal=False)
    short = latent_case([1024] * 8, 16)
    wide = heads_case([4096] * 4, 16, 8, 256)
    narrow = heads_case([4096] * 4, 32, 32, 96)
    triangle = 8192 * 8193
    return {
        "latent 2 x 8192, 16 heads": {
            "flop": 2 * 16 * 320 * triangle,
            "old": lambda: latent(triton_mla),
            "bf16": lambda: latent(mla_prefill, BF16),
            **{name: functools.partial(latent, mla_prefill, E4M3, make) for name, (_, make) in VARIANTS.items()},
        },
        "latent chunk 2048 to 16384": {
            "flop": 2 * 16 * 320 * 2048 * 16384,
            "old": lambda: chunk(triton_mla),
            "bf16": lambda: chunk(mla_prefill, BF16),
            "fp8": lambda: chunk(mla_prefill),
        },
        "latent 8 x 1024": {
            "flop": 8 * 16 * 320 * 1024 * 1025,
            "old": lambda: short(triton_mla),
            "bf16": lambda: short(mla_prefill, BF16),
            **{name: functools.partial(short, mla_prefill, E4M3, make) for name, (_, make) in list(VARIANTS.items())[:2]},
        },
        "latent 2 x 8192 in a window of 1024": {
            "flop": 2 * 16 * 320 * 2 * (8192 * 1024 - 512 * 1023),
            "old": lambda: window(triton_mla),
            "old bf16": lambda: window(triton_mla, BF16),
            "bf16": lambda: window(mla_prefill, BF16),
            "fp8": lambda: window(mla_prefill),
        },
        "256, gemma-3-12b 4 x 4096": {
            "flop": 4 * 16 * 512 * 4096 * 4097,
            "old": lambda: wide(triton_mha),
            "bf16": lambda: wide(prefill.mha_prefill, BF16),
            "fp8": lambda: wide(prefill.mha_prefill),
            **{name: functools.partial(wide, prefill.mha_prefill, E4M3, make) for name, make in V256.items()},
        },
        "96, phi-3-mini 4 x 4096": {
            "flop": 4 * 32 * 192 * 4096 * 4097,
            "old": lambda: narrow(triton_mha),
            "bf16": lambda: narrow(prefill.mha_prefill, BF16),
            "fp8": lambda: narrow(prefill.mha_prefill),
            **{name: functools.partial(narrow, prefill.mha_prefill, E4M3, make) for name, make in V96.items()},
        },
        "extend 256, 4 x 1024 of 8192, not causal": {
            "flop": 4 * 2 * 16 * 512 * 1024 * 8192,
            "old": lambda: prefix(triton_extend),
            "old bf16": lambda: prefix(triton_extend, BF16),
            "bf16": lambda: prefix(prefill.mha_extend_with_kvcache, BF16),
            "fp8": lambda: prefix(prefill.mha_extend_with_kvcache),
        },
    }


def graph_of(call):
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            call()
    return graph


def measure():
    table, doubts = [], doubtful()
    print("not timed, as their check did not end well:", sorted(doubts))
    for title, case in CASES.items():
        family = title.partition(" ")[0].rstrip(",")
        flop, calls = case["flop"], {name: call for name, call in case.items() if name != "flop"}
        calls = {name: call for name, call in calls.items() if f"{family} fp8 {name}" not in doubts}
        graphs = {}
        for name, call in calls.items():
            graph = attempt(lambda _, call=call: graph_of(call), f"{title}: {name}")
            if graph is not None:
                graphs[name] = graph
        times = {name: [] for name in graphs}
        for turn in range(15):
            for name, graph in graphs.items():
                if name.startswith("old") and turn > 5:
                    continue
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                if turn:
                    times[name].append(begin.elapsed_time(end) * 1000 / 3)
        entries = []
        for name, of in times.items():
            us = statistics.median(of)
            entries.append(f"{name} {us:.0f} us {flop / us / 1e6:.0f} TF")
            print(title, entries[-1], f"{min(of):.0f} to {max(of):.0f} after {time.perf_counter() - BEGUN:.0f} s", flush=True)
        table.append(f"{title}:")
        table += ["    " + " | ".join(entries[at : at + 4]) for at in range(0, len(entries), 4)]
        del graphs
        torch.cuda.synchronize()
    print()
    print("\n".join(table))


if __name__ == "__main__":
    LIMIT = 95 if sys.argv[1] == "check" else 45
    CASES = make_cases()
    check() if sys.argv[1] == "check" else measure()
