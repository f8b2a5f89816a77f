"""Prefill and extend: attention of whole sequences with ragged K/V, and of new tokens to a paged cache.

A tile packs all query heads of a KV head (GQA packing). With a group size of 8 at head_dim 64, a tile has 24 consecutive tokens,
that is, 192 query rows. Keys are loaded once for all rows. Less work above the diagonal is wasted than with 192 tokens of one head.
Three consumer warpgroups compute 64 rows each, over blocks of 128 keys, beginning at the diagonal and going towards the first key.
P @ V of a block overlaps the softmax of the next block, as in FlashAttention-3 (Shah et al., 2024, arXiv:2407.08608). P @ V of a
tile's last block overlaps the softmax of the next tile.

Head dims other than 64 and 128 have their own tiles, see `config.TILES`. With wide heads, shared memory holds only one Q tile. Each
warpgroup releases its 64 query rows after its last q @ k, and the rows of the next tile are loaded during the softmax. Columns that
do not fill a panel of shared memory are padded with zeros.

The kernel is persistent, with one CTA per SM and a dynamic tile scheduler. The producer warp reads the lengths of up to 32
sequences, one per lane. It orders the tiles of these sequences from most to fewest keys. An atomic counter assigns tiles to CTAs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.alignment import is_aligned
from tokenspeed_kernel_base.ops.attention._softmax import output_dtype
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import FormatSignature
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.workspace import keeper
from tokenspeed_kernel_nvidia._machine import sm_count_of
from tokenspeed_kernel_nvidia._programs import program
from tokenspeed_kernel_nvidia._rows import deliver
from tokenspeed_kernel_nvidia.capability import CUTEDSL_HOPPER
from tokenspeed_kernel_nvidia.cutedsl.launch import CACHES, DTYPES, launched, scales_at, scales_of_scores, sinks_at
from tokenspeed_kernel_nvidia.sm90.attention.prefill.config import FP8_CACHE_WIDTHS, FP8_TILES, Config, every_config
from tokenspeed_kernel_nvidia.sm90.attention.supported import (
    HEAD_DIMS,
    OTHER_WIDTHS,
    PAGE_SIZES,
    PAGED,
    PAGED_ALL_FP8,
    PAGED_FP8,
    RAGGED,
    RAGGED_FP8,
    traits,
)
from tokenspeed_kernel_nvidia.sm90.target import ARCH


@program(arch=ARCH, configs=every_config)
def prefill_program(config: Config) -> tuple[Any, Sequence[Any]]:
    """The prefill kernel of `kernel_device`, compiled once for each configuration."""
    from tokenspeed_kernel_nvidia.sm90.attention.prefill import kernel_device

    return kernel_device.host(config), kernel_device.fake_arguments(config)


@functools.cache
def _program_of(
    dtype: torch.dtype,
    cache: torch.dtype,
    head_dim: int,
    heads: int,
    kv_heads: int,
    page_size: int,
    windowed: bool,
    device: int,
    v_head_dim: int,
    capped: bool,
    own_kv: bool,
) -> tuple[Callable[..., Any], int]:
    """Returns the compiled kernel for a call, and the device's number of SMs, which is the maximum number of CTAs."""
    fp8 = dtype not in DTYPES
    name = "bfloat16" if fp8 else DTYPES[dtype]
    config = Config(
        name,
        head_dim,
        heads // kv_heads,
        fp8=fp8,
        fp8_cache=cache != dtype,
        windowed=windowed,
        v_head_dim=0 if head_dim in HEAD_DIMS else v_head_dim,
        capped=capped,
        own_kv=own_kv,
    ).with_page_size(page_size)
    return prefill_program(config), sm_count_of(device)


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
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes causal attention of whole sequences: launches the kernel on arguments that the operator has checked."""
    return attend(
        q, k, v, k.shape[1], 0, cu_seqlens, None, None, True, window_left, logit_cap, sinks, return_lse, softmax_scale, q_scale,
        k_scale, v_scale, out,
    )  # fmt: skip


def mha_extend_with_kvcache(
    q: Tensor,
    cu_seqlens_q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_k: int,
    is_causal: bool,
    window_left: int,
    logit_cap: float,
    sinks: Tensor | None,
    return_lse: bool,
    softmax_scale: float | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes attention of new tokens to a paged cache: launches the kernel on arguments that the operator has checked. Attention
    with a window is causal."""
    pages, page_size, kv_heads, _ = k_cache.shape
    if not (pages and max_seqlen_k):  # no query sees a key, but TMA loads need a valid page
        k_cache, v_cache = (cache.new_zeros(1, *cache.shape[1:]) for cache in (k_cache, v_cache))
        page_table = page_table.new_zeros(page_table.shape[0], 1)
    return attend(
        q, k_cache, v_cache, kv_heads, page_size, cu_seqlens_q, cache_seqlens, page_table, is_causal, window_left, logit_cap,
        sinks, return_lse, softmax_scale, q_scale, k_scale, v_scale, out,
    )  # fmt: skip


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_heads: int,
    page_size: int,
    cu_seqlens: Tensor,
    cache_seqlens: Tensor | None,
    page_table: Tensor | None,
    causal: bool,
    window_left: int,
    logit_cap: float,
    sinks: Tensor | None,
    return_lse: bool,
    softmax_scale: float | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Launches the prefill kernel on checked arguments. Returns the output, or the pair of output and LSE (float32 ``[tokens,
    heads]``) if ``return_lse``. Other arguments: see the operators.

    Args:
        q: ``[tokens, heads, head_dim]``.
        page_size: tokens per page if k and v are paged caches; 0 if k and v are ``[kv_tokens, kv_heads, dim]``.
        cu_seqlens: cumulative numbers of queries, ``[batch + 1]``.
        cache_seqlens: int32. With a paged cache, the sequence lengths ``[batch]``. Otherwise the offsets ``[batch + 1]`` of the
            sequences' keys, or None if these are ``cu_seqlens``.
        page_table: the page table of a paged cache, otherwise None.
    """
    tokens, heads, head_dim = q.shape
    v_head_dim = v.shape[-1]
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device) if return_lse else None
    if tokens and cu_seqlens.shape[0] > 1:
        device = q.get_device()
        own_kv = cache_seqlens is not None and not page_size
        launch, sms = _program_of(
            q.dtype, k.dtype, head_dim, heads, kv_heads, page_size, window_left >= 0, device, v_head_dim, logit_cap > 0, own_kv
        )
        workspace = keeper.get(device, torch._C._cuda_getCurrentRawStream(device), 0, 2)
        sinks, *its = sinks_at(sinks)
        scale, to_cap = scales_of_scores(head_dim, softmax_scale, logit_cap)
        q_scale, *of_q = scales_at(q_scale)
        k_scale, *of_k = scales_at(k_scale)
        v_scale, *of_v = scales_at(v_scale)
        lse_at = 0 if lse is None else lse.data_ptr()
        others = workspace.counters_at, lse_at, *its, scale, causal, sms, *of_q, *of_k, *of_v, window_left, to_cap
        if k.dtype not in DTYPES:
            k, v = k.view(torch.uint8), v.view(torch.uint8)
        given = out
        if q.dtype not in DTYPES:
            q = q.view(torch.uint8)
            if given is None or not is_aligned(given):
                out = torch.empty((tokens, heads, v_head_dim), dtype=torch.bfloat16, device=q.device)
        out = deliver(launched(launch, q, k, v, out, (cu_seqlens, cache_seqlens, page_table), others), given)
    elif out is None:
        out = q.new_empty(tokens, heads, v_head_dim, dtype=output_dtype(q))
    return out if lse is None else (out, lse)


_ALL_FP8 = RAGGED_FP8 | PAGED_ALL_FP8  # with these operands, probabilities are rounded to fp8
_PAGES = {"page_size": set(PAGE_SIZES)}
_CAUSAL = {**_PAGES, "is_causal": {True}, "sliding_window": any}
# A logit cap is supported with 16-bit operands only. Scales are supported with fp8 operands.
_FORMS: tuple[tuple[Callable[..., Any], str, frozenset[FormatSignature], dict[str, Any]], ...] = (
    (mha_prefill, "", RAGGED, {"sliding_window": any, "logit_cap": any}),
    (mha_prefill, "_fp8", RAGGED_FP8, {"sliding_window": any, "scaled": any}),
    (mha_extend_with_kvcache, "", PAGED, {**_CAUSAL, "logit_cap": any}),
    (mha_extend_with_kvcache, "_fp8", PAGED_ALL_FP8, {**_CAUSAL, "scaled": any}),
    (mha_extend_with_kvcache, "_not_causal", PAGED | PAGED_ALL_FP8, {**_PAGES, "is_causal": {False}, "scaled": any}),
)
for _widths in (*((_width, _width) for _width in HEAD_DIMS), *OTHER_WIDTHS):
    for _launcher, _form, _formats, _traits in _FORMS:
        _capped = _widths not in OTHER_WIDTHS
        if _capped:
            # At head dims 64 and 128, these kernels handle capped scores only. For short windows, they rank below the kernels of
            # `window`.
            if "logit_cap" not in _traits:
                continue
            _form, _traits = "_capped", {**_traits, "logit_cap": {True}}
        if _widths not in FP8_TILES:
            _formats = _formats - RAGGED_FP8 - PAGED_ALL_FP8
        if _formats:
            register_kernel(
                "attention",
                _launcher.__name__,
                name=f"cutedsl_{_launcher.__name__}{_form}_{'_'.join(map(str, dict.fromkeys(_widths)))}",
                solution="cutedsl",
                capability=CUTEDSL_HOPPER,
                signatures=_formats,
                traits=traits(*_widths, **_traits),
                aligned_caches=CACHES if _launcher is mha_extend_with_kvcache else (),
                priority=Priority.SPECIALIZED - _capped,
                tags={"determinism", *(("fp8_weights",) if _formats & _ALL_FP8 else ())},
            )(_launcher)

# Times for 8 sequences of 8192 tokens, 1024 of them new, on an H200: this kernel, then the portable kernel. Gemma, 16 query and 8
# KV heads: 2044 and 3048 us (this kernel with a bfloat16 cache: 1536 us). Qwen3-Next, 16 and 2 heads: 2036 and 2845 us; in a window
# of 1024 tokens: 357 and 506 us.
for _k_dim, _v_dim in FP8_CACHE_WIDTHS:
    register_kernel(
        "attention",
        "mha_extend_with_kvcache",
        name=f"cutedsl_mha_extend_with_kvcache_fp8_cache_{_k_dim}",
        solution="cutedsl",
        capability=CUTEDSL_HOPPER,
        signatures=PAGED_FP8,
        traits=traits(_k_dim, _v_dim, page_size=set(PAGE_SIZES), is_causal={True}, sliding_window=any, scaled=any),
        aligned_caches=CACHES,
        priority=Priority.SPECIALIZED,
        tags={"determinism"},
    )(mha_extend_with_kvcache)

for _head_dim in HEAD_DIMS:
    _paged = {"page_size": set(PAGE_SIZES), "scaled": any}
    _windowed = {"sliding_window": {True}}
    # With a window, the kernels of `window` rank first if eligible: for 16-bit operands and short windows.
    for _suffix, _window, _priority in (("", {}, Priority.SPECIALIZED), ("_any_window", _windowed, Priority.SPECIALIZED - 1)):
        register_kernel(
            "attention",
            "mha_prefill",
            name=f"cutedsl_mha_prefill{_suffix}_{_head_dim}",
            solution="cutedsl",
            capability=CUTEDSL_HOPPER,
            signatures=RAGGED | RAGGED_FP8,
            traits=traits(_head_dim, scaled=any, **_window),
            priority=_priority,
            tags={"determinism", "fp8_weights"},
        )(mha_prefill)
    for _suffix, _seen, _priority in (
        ("", {"is_causal": any}, Priority.SPECIALIZED),
        ("_any_window", {"is_causal": {True}, **_windowed}, Priority.SPECIALIZED - 1),
    ):
        register_kernel(
            "attention",
            "mha_extend_with_kvcache",
            name=f"cutedsl_mha_extend_with_kvcache{_suffix}_{_head_dim}",
            solution="cutedsl",
            capability=CUTEDSL_HOPPER,
            signatures=PAGED | PAGED_ALL_FP8 | PAGED_FP8,
            traits=traits(_head_dim, **_paged, **_seen),
            aligned_caches=CACHES,
            priority=_priority,
            tags={"determinism", "fp8_weights"},
        )(mha_extend_with_kvcache)
