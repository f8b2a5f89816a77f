"""Sliding-window attention with short windows, of whole sequences and of new tokens to a paged cache.

A query sees its own token and at most 127 tokens before it. A kernel that loops over blocks of keys computes two to three times the
visible scores. In this kernel, a tile is 64 rows of one KV head: `Config.heads` query heads at `Config.positions` consecutive
positions. One GEMM computes all scores of a tile: for the 128 keys before the tile's first position, and for the keys of the tile's
positions. So there is no online softmax and no rescale. A work item is a block of up to 128 query positions of a sequence, for one
KV head. The tiles of a work item share one copy of K/V in shared memory.

The declarations at the end of this file state what is supported. Windows smaller than 127 take as long as a window of 127.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_most
from tokenspeed_kernel_nvidia._machine import sm_count_of
from tokenspeed_kernel_nvidia._programs import program
from tokenspeed_kernel_nvidia.capability import CUTEDSL_HOPPER
from tokenspeed_kernel_nvidia.cutedsl.launch import CACHES, DTYPES, launched, scales_of_scores, sinks_at
from tokenspeed_kernel_nvidia.sm90.attention.supported import HEAD_DIMS, PAGE_SIZES, PAGED, RAGGED, traits
from tokenspeed_kernel_nvidia.sm90.attention.window.config import REACH, SHORT, Config, every_config, has_short
from tokenspeed_kernel_nvidia.sm90.target import ARCH


@program(arch=ARCH, configs=every_config)
def window_program(config: Config) -> tuple[Any, tuple[Any, ...]]:
    """The sliding-window kernel of `kernel_device`, compiled once for each configuration."""
    from tokenspeed_kernel_nvidia.sm90.attention.window import kernel_device

    return kernel_device.host(config), kernel_device.fake_arguments(config)


@lru_cache(maxsize=4096)
def _plan(
    dtype: torch.dtype,
    tokens: int,
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    paged: bool,
    short: bool,
    capped: bool,
    device: int,
) -> tuple[Callable[..., Any], int, int]:
    """Returns the compiled kernel for a call, the maximum number of query positions per work item, and the number of CTAs. Work
    items are smaller if there would otherwise be fewer items than SMs.

    Args:
        short: whether no sequence has more than SHORT queries.
    """
    gqa_ratio = heads // kv_heads
    config = Config(DTYPES[dtype], head_dim, gqa_ratio, paged, capped=capped)
    sms = sm_count_of(device)
    even = math.ceil(tokens * kv_heads / sms / config.positions) * config.positions
    if has_short(head_dim, gqa_ratio, paged):
        brief = replace(config, short=True)
        if short or even <= brief.block:
            config = brief
    block = max(config.positions, min(config.block, even))
    # An upper bound of the number of work items: a sequence's first item may begin up to 7 positions early, and its last item may
    # be partial.
    most = (tokens // block + 2 * batch) * kv_heads
    return window_program(config), block, min(sms, most)


def mha_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    window_left: int,
    logit_cap: float,
    sinks: Tensor | None,
    return_lse: bool,
    softmax_scale: float | None,
    out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes causal sliding-window attention of whole sequences: launches the kernel on arguments that the operator has checked.

    See `tokenspeed_kernel_nvidia.mha_prefill`.
    """
    return _launch(
        q, k, v, k.shape[1], cu_seqlens, None, None, False, window_left, logit_cap, sinks, return_lse, softmax_scale, out
    )


def mha_extend_with_kvcache(
    q: Tensor,
    cu_seqlens_q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_q: int,
    is_causal: bool,  # always True, as the traits require
    window_left: int,
    logit_cap: float,
    sinks: Tensor | None,
    return_lse: bool,
    softmax_scale: float | None,
    out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes causal sliding-window attention of new tokens to a paged cache: launches the kernel on arguments that the operator
    has checked.

    See `tokenspeed_kernel_nvidia.mha_extend_with_kvcache`.
    """
    return _launch(
        q, k_cache, v_cache, k_cache.shape[2], cu_seqlens_q, page_table, cache_seqlens, max_seqlen_q <= SHORT, window_left,
        logit_cap, sinks, return_lse, softmax_scale, out,
    )  # fmt: skip


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_heads: int,
    cu_seqlens: Tensor,
    page_table: Tensor | None,
    cache_seqlens: Tensor | None,
    short: bool,
    window_left: int,
    logit_cap: float,
    sinks: Tensor | None,
    return_lse: bool,
    softmax_scale: float | None,
    out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    tokens, heads, head_dim = q.shape
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device) if return_lse else None
    batch = cu_seqlens.shape[0] - 1
    if tokens and batch:
        scale, cap_scale = scales_of_scores(head_dim, softmax_scale, logit_cap)
        paged, capped = page_table is not None, cap_scale is not None
        launch, block, grid = _plan(q.dtype, tokens, batch, heads, kv_heads, head_dim, paged, short, capped, q.get_device())
        sinks, *its = sinks_at(sinks)
        others = 0 if lse is None else lse.data_ptr(), *its, window_left, block, scale, cap_scale, grid
        out = launched(launch, q, k, v, out, (cu_seqlens, page_table, cache_seqlens), others)
    elif out is None:
        out = torch.empty_like(q)
    return out if lse is None else (out, lse)


for _head_dim in HEAD_DIMS:
    # The kernels are eligible only with a window of at most REACH keys, the query's own token included.
    _windowed = traits(_head_dim, sliding_window={True}, window_left=at_most(REACH - 1), logit_cap=any)
    register_kernel(
        "attention",
        "mha_prefill",
        name=f"cutedsl_mha_prefill_window_{_head_dim}",
        solution="cutedsl",
        capability=CUTEDSL_HOPPER,
        signatures=RAGGED,
        traits=_windowed,
        priority=Priority.SPECIALIZED,
        tags={"determinism"},
    )(mha_prefill)
    register_kernel(
        "attention",
        "mha_extend_with_kvcache",
        name=f"cutedsl_mha_extend_with_kvcache_window_{_head_dim}",
        solution="cutedsl",
        capability=CUTEDSL_HOPPER,
        signatures=PAGED,
        traits={**_windowed, "page_size": set(PAGE_SIZES), "is_causal": {True}},
        aligned_caches=CACHES,
        priority=Priority.SPECIALIZED,
        tags={"determinism"},
    )(mha_extend_with_kvcache)
