"""Decode on Hopper: attention of the newest tokens of each sequence to a paged KV cache.

Decode is memory-bound, so every SM needs work, and many K/V tiles in flight, from beginning to end. The kernel is persistent. The
CTAs of all KV heads form a *group*. There are as many groups as fit on the SMs at once (one or two CTAs per SM). The K/V tiles of
all sequences, concatenated, are divided into one equal range per group. The division is computed on the device from cache_seqlens,
so a captured CUDA graph stays correct and balanced when lengths change.

A CTA is warp-specialised: one producer warp loads tiles into a ring in shared memory by TMA, four consumer warps compute. If a
sequence spans several groups (split-KV), each group writes a partial result. The last group to finish merges the partial results in
a fixed order. Sequences with few visible tokens, as in layers with a short window, are not split: groups take them round-robin. If
there are many such sequences, each consumer warp computes all tiles of one KV head. Then no partial results are merged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor

from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import FormatSignature
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_most, between
from tokenspeed_kernel_base.workspace import keeper
from tokenspeed_kernel_nvidia._machine import sm_count_of
from tokenspeed_kernel_nvidia._programs import program
from tokenspeed_kernel_nvidia.capability import CUTEDSL_HOPPER
from tokenspeed_kernel_nvidia.cutedsl.launch import CACHES, DTYPES, launched, scales_at, scales_of_scores, sinks_at
from tokenspeed_kernel_nvidia.sm90.attention.decode.config import (
    CONSUMERS,
    MERGE_BATCH,
    ROWS,
    WIDTHS,
    Config,
    Work,
    config_of,
    every_config,
)
from tokenspeed_kernel_nvidia.sm90.attention.supported import HEAD_DIMS, PAGE_SIZES, PAGED, PAGED_FP8, traits
from tokenspeed_kernel_nvidia.sm90.target import ARCH

WHOLE = 256  # a sequence with at most this many visible keys is not split
LITTLE = 2048  # if all sequences together have fewer visible keys, the class of work is "little"
FEW = 1  # with at most this many sequences, the class of work is "long"
# With at least this many (sequence, KV head) pairs in short windows, each consumer warp computes one KV head. A CTA then computes
# four pairs, and the pairs fill 1.5 CTAs per SM.
MANY = 800
# Declarations that rank before the portable kernel: head_dim and v_head_dim, smallest and largest GQA group size, new tokens per
# sequence, formats, page sizes.
_CHOSEN: list[tuple[tuple[int, int], tuple[int, int], int, frozenset[FormatSignature], tuple[int, ...]]] = []


def usual_configs() -> list[Config]:
    """Returns the configurations of `every_config` that the declarations in `_CHOSEN` use."""
    used = {
        config_of(DTYPES[q], widths, page_size, rows, work, fp8, capped, close)
        for widths, (least, most), tokens, signatures, pages in _CHOSEN
        for q, cache in {(signature.format_for("q").storage_dtype, signature.format_for("k_cache")) for signature in signatures}
        for fp8 in (cache.storage_dtype != q,)
        for rows in {_rows(ratio * new) for ratio in range(least, most + 1) for new in range(1, tokens + 1)}
        for work in get_args(Work)
        for page_size in pages
        for capped in (False, True)
        for close in (False, True)
    }
    return [config for config in every_config() if config in used]


def _rows(wanted: int) -> int:
    """Returns the number of query rows of the smallest kernel variant that has at least ``wanted`` rows."""
    return next(rows for rows in ROWS if rows >= wanted)


@program(arch=ARCH, configs=every_config, usual=usual_configs)
def decode_program(config: Config) -> tuple[Any, tuple[Any, ...]]:
    """The decode kernel of `kernel_device`, compiled once for each configuration."""
    from tokenspeed_kernel_nvidia.sm90.attention.decode import kernel_device

    return kernel_device.host(config), kernel_device.fake_arguments(config)


@functools.cache
def _program_of(
    dtype: torch.dtype,
    cache: torch.dtype,
    widths: tuple[int, int],
    page_size: int,
    heads: int,
    kv_heads: int,
    q_len: int,
    work: Work,
    capped: bool,
    close: bool,
    device: int,
) -> tuple[Callable[..., Any], int, int]:
    """Returns the compiled kernel for a call, the number of CTA groups, and the number of float32 elements for partial results: two
    per CTA group, each with accumulator, row max and row sum of all query rows."""
    rows = _rows(heads // kv_heads * q_len)
    config = config_of(DTYPES[dtype], widths, page_size, rows, work, cache != dtype, capped, close and kv_heads % 2 == 0)
    groups = max(1, config.resident * sm_count_of(device) * config.heads * config.abreast // kv_heads)
    return decode_program(config), groups, 2 * groups * kv_heads * config.rows * (widths[1] + 2) // config.abreast


def mha_decode_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_k: int,
    max_seqlen_q: int,
    window_left: int,
    logit_cap: float,
    sinks: Tensor | None,
    return_lse: bool,
    softmax_scale: float | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes attention of the newest tokens to a paged cache: launches the kernel on arguments that the operator has checked.

    The kernel writes partial results to a workspace, see `tokenspeed_kernel_base.workspace`. The public function is
    `tokenspeed_kernel_nvidia.mha_decode_with_kvcache`.
    """
    tokens, heads, head_dim = q.shape
    pages, page_size, kv_heads, _ = k_cache.shape
    v_head_dim = v_cache.shape[3]
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device) if return_lse else None
    if tokens:
        if not pages:  # all sequences are empty, but a TMA descriptor needs memory to describe
            k_cache, v_cache = (cache.new_zeros(1, *cache.shape[1:]) for cache in (k_cache, v_cache))
        device, batch = q.get_device(), tokens // max_seqlen_q
        shown = max_seqlen_k if window_left < 0 else min(max_seqlen_k, window_left + max_seqlen_q)
        work: Work = "short"
        if shown > WHOLE:
            work = "little" if batch * shown < LITTLE else "long" if batch <= FEW else "much"
        elif window_left >= 0 and batch * kv_heads >= MANY and kv_heads % CONSUMERS == 0:
            work = "many short"
        cache = k_cache.dtype
        scale, cap_scale = scales_of_scores(head_dim, softmax_scale, logit_cap)
        widths, capped = (head_dim, v_head_dim), cap_scale is not None
        # Whether the cache is fp8, and the KV heads of a token are contiguous in memory.
        close = cache != q.dtype and k_cache.stride(2) == head_dim and v_cache.stride(2) == v_head_dim
        launch, groups, floats = _program_of(
            q.dtype, cache, widths, page_size, heads, kv_heads, max_seqlen_q, work, capped, close, device
        )
        k_scale, *of_keys = scales_at(k_scale)
        v_scale, *of_values = scales_at(v_scale)
        if cache != q.dtype:
            k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
        workspace = None  # must stay alive until the launch
        partial_at = counters_at = 0
        if shown > WHOLE:
            workspace = keeper.get(device, torch._C._cuda_getCurrentRawStream(device), 4 * floats, groups * kv_heads)
            partial_at, counters_at = workspace.memory_at, workspace.counters_at
            # With so many groups per sequence, a merge takes several batches. Fewer groups, but at least one CTA per SM, leave
            # fewer partial results.
            if groups > MERGE_BATCH * batch:
                groups = max(MERGE_BATCH * batch, groups // 2)
        elif groups > batch:
            groups = batch  # sequences are not split, so further groups would have no work
        sinks, *its = sinks_at(sinks)
        lse_at = 0 if lse is None else lse.data_ptr()
        sizes = max_seqlen_q, max_seqlen_k, window_left, groups
        others = partial_at, counters_at, lse_at, *its, *sizes, scale, *of_keys, *of_values, cap_scale
        out = launched(launch, q, k_cache, v_cache, out, (page_table, cache_seqlens), others)
    elif out is None:
        out = q.new_empty(tokens, heads, v_head_dim)
    return out if lse is None else (out, lse)


def _register(
    name: str,
    widths: tuple[int, int],
    ratios: tuple[int, int],
    signatures: frozenset[FormatSignature],
    pages: tuple[int, ...],
    priority: int,
    rows: int = max(ROWS),
) -> None:
    """Declares a kernel for one pair of head dims.

    Args:
        name: part of the kernel's name.
        widths: head_dim and v_head_dim.
        ratios: the smallest and the largest GQA group size.
        pages: page sizes.
        rows: the maximum number of query rows per KV head: GQA group size times the new tokens of a sequence. At most max(ROWS).
    """
    tokens = rows // ratios[1]
    if priority > Priority.PORTABLE:
        _CHOSEN.append((widths, ratios, tokens, signatures, pages))
    register_kernel(
        "attention",
        "mha_decode_with_kvcache",
        name=f"cutedsl_mha_decode_with_kvcache_{name}" + "_".join(str(width) for width in dict.fromkeys(widths)),
        solution="cutedsl",
        capability=CUTEDSL_HOPPER,
        signatures=signatures,
        traits=traits(
            widths[0],
            v_head_dim=widths[1],
            gqa_ratio=between(*ratios),
            new_tokens=at_most(tokens),
            page_size=set(pages),
            sliding_window=any,
            multi_query=any,
            logit_cap=any,
            scaled=any,
        ),
        aligned_caches=CACHES,
        priority=priority,
        tags={"determinism"},
    )(mha_decode_with_kvcache)


_EVERY = PAGED | PAGED_FP8
for _widths in WIDTHS:
    _usual = _widths[0] in HEAD_DIMS
    if _usual:
        _register("", _widths, (1, 8), _EVERY, PAGE_SIZES, Priority.SPECIALIZED)
        _register("wide_", _widths, (9, 16), _EVERY, PAGE_SIZES, Priority.SPECIALIZED)
    else:
        if _widths[0] != 80:
            _register("", _widths, (1, 16), PAGED, PAGE_SIZES, Priority.SPECIALIZED)
        # Microseconds on an H200 for this kernel, then for the portable kernel. 64 x 4096 tokens, 2 KV heads of 256: 76.2, 79.9. 32
        # x 4096, 8 heads of 256: 132.6, 138.5. 16 x 2048, 32 heads of 96: 79.3, 83.5; of 80: 82.4, 120.4. 32 x 4096, 192/128: 91.7,
        # 103.9. More than eight query rows have not been measured.
        _register("fp8_cache_", _widths, (1, 8), PAGED_FP8, PAGE_SIZES, Priority.SPECIALIZED, 8)
    # On an H200 the portable kernel is faster for these calls, or they have not been measured. Microseconds for this kernel, then
    # for the portable kernel. 16 x 2048 tokens, 32 heads of 80, 16-bit: 118, 98.5. Pages of one token: 32 x 4096, 8 KV heads of
    # 128: 163, 140; 64 x 8192, 8 of 64, fp8: 175, 150 (in bfloat16 261, 265); 64 x 4096, 2 of 256, fp8: 92.2, 81.3.
    _register("any_cache_", _widths, (1, 16), _EVERY, (1,) if _usual else (1, *PAGE_SIZES), Priority.PORTABLE - 1)
_register("gathered_", (64, 64), (1, 16), PAGED, (1,), Priority.SPECIALIZED)
