"""MLA extend on Hopper: latent attention of many new tokens of each sequence to a paged cache.

A tile of 64 query rows holds half of a token's 128 heads, or all heads of several tokens. The tile is computed as in `mla_decode`.
The two CTAs of a cluster compute the two halves of the heads, or consecutive tokens, and share loads by multicast. `config`
describes the case of few new tokens.

The kernel is persistent. The blocks (64 cached tokens) of all work items, concatenated, are divided into one equal range per
cluster. The division is computed on the device from cu_seqlens_q and cache_seqlens, so a captured CUDA graph stays correct and
balanced when these change. A cluster leaves at most two partial results: of the item in which the cluster's range begins, and of
the range's last item. A second kernel merges the partial results in a fixed order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.ops.attention._softmax import output_dtype
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import dense_tensor_format, format_signature, format_signatures
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.workspace import keeper
from tokenspeed_kernel_nvidia._machine import sm_count_of
from tokenspeed_kernel_nvidia._programs import program
from tokenspeed_kernel_nvidia._rows import deliver
from tokenspeed_kernel_nvidia.capability import CUTEDSL_HOPPER
from tokenspeed_kernel_nvidia.cutedsl.launch import LOG2_E, launched_on
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.config import HEADS, LATENT, PAGE_SIZES, ROPE, ROWS
from tokenspeed_kernel_nvidia.sm90.attention.mla_extend.config import (
    Config,
    Fp8Config,
    every_config,
    every_fp8_config,
    ranks_for,
)
from tokenspeed_kernel_nvidia.sm90.attention.supported import FP8
from tokenspeed_kernel_nvidia.sm90.target import ARCH


@program(arch=ARCH, configs=every_config)
def mla_extend_program(config: Config) -> tuple[Any, tuple[Any, ...]]:
    """The MLA extend kernel of `kernel_device` for a cache in q's dtype, compiled once for each configuration."""
    from tokenspeed_kernel_nvidia.sm90.attention.mla_extend import kernel_device

    return kernel_device.host(config), kernel_device.fake_arguments(config)


@program(arch=ARCH, configs=every_fp8_config)
def mla_extend_fp8_program(config: Fp8Config) -> tuple[Any, tuple[Any, ...]]:
    """The MLA extend kernel of `kernel_device` for an fp8 cache, compiled once for each configuration."""
    from tokenspeed_kernel_nvidia.sm90.attention.mla_extend import kernel_device

    return kernel_device.host(config), kernel_device.fake_arguments(config)


@program(arch=ARCH, configs=every_config)
def mla_extend_merge_program(config: Config) -> tuple[Any, tuple[Any, ...]]:
    """The merge kernel of `mla_decode` with the work items of MLA extend, compiled once for each configuration."""
    from tokenspeed_kernel_nvidia.sm90.attention.mla_extend import kernel_device

    return kernel_device.merge_host(config), kernel_device.fake_merge_arguments(config)


@functools.cache
def _programs_of(
    dtype: torch.dtype, cache: torch.dtype, heads: int, ranks: int, device: int
) -> tuple[Callable[..., Any], Callable[..., Any], int, int]:
    """Returns the compiled attention and merge kernels for a call, the number of CTA groups, and the bytes of the workspace."""
    config = Config("bfloat16", heads, ranks)
    groups = max(1, sm_count_of(device) // ranks)
    if cache == torch.bfloat16:
        compute = mla_extend_program(config)
    else:
        compute = mla_extend_fp8_program(Fp8Config("bfloat16", heads, dtype == FP8, ranks=ranks))
    return compute, mla_extend_merge_program(config), groups, config.workspace_bytes(groups)


def mla_extend_with_kvcache(
    q: Tensor,
    cu_seqlens_q: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    kv_lora_rank: int,
    softmax_scale: float,
    is_causal: bool,
    return_lse: bool,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
    out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes latent attention of new tokens to a paged cache that already holds them: launches the kernels on arguments that the
    operator has checked.

    Windows and logit_cap are not supported. The kernel writes partial results to a workspace, see
    `tokenspeed_kernel_base.workspace`. The public function is `tokenspeed_kernel_nvidia.mla_extend_with_kvcache`.
    """
    tokens, heads, _ = q.shape
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device) if return_lse else None
    written = q.new_empty(tokens, heads, kv_lora_rank, dtype=output_dtype(q)) if out is None else out
    if tokens and cache_seqlens.shape[0]:
        if not kv_cache.shape[0]:  # all sequences are empty, but a TMA descriptor needs memory to describe
            kv_cache = kv_cache.new_zeros(1, *kv_cache.shape[1:])
        # An upper bound of a sequence's new tokens, which sizes the index space of work items. max_seqlen_q is often too large.
        q_len = max(1, min(max_seqlen_q, tokens, max_seqlen_k if is_causal else tokens))
        device = q.get_device()
        launch, merge, groups, nbytes = _programs_of(q.dtype, kv_cache.dtype, heads, ranks_for(heads, q_len), device)
        workspace = keeper.get(device, torch._C._cuda_getCurrentRawStream(device), nbytes, 0)
        lse_at = 0 if lse is None else lse.data_ptr()
        scales = (0 if scale is None else scale.data_ptr() for scale in (q_scale, kv_scale))
        others = workspace.memory_at, lse_at, q_len, max_seqlen_k, int(is_causal), groups, softmax_scale * LOG2_E, *scales
        if kv_cache.dtype == FP8:
            kv_cache = kv_cache.view(torch.uint8)
        if q.dtype == FP8:
            q = q.view(torch.uint8)
        numbers = page_table, cache_seqlens, cu_seqlens_q.contiguous()
        rows = launched_on(launch, (q, kv_cache), written, numbers, others, ("kv_cache",))
        if max_seqlen_k > ROWS:  # a single block is never split
            merge(rows, numbers[-1], workspace.memory_at, lse_at, q_len, groups)
        if rows is not written:
            written = deliver(rows, out)
    return written if lse is None else (written, lse)


_TRAITS: dict[str, Any] = {
    "head_dim": LATENT + ROPE,
    "v_head_dim": LATENT,
    "gqa_ratio": set(HEADS),
    "page_size": set(PAGE_SIZES),
    "return_lse": any,
    "is_causal": any,
}
_E4M3 = dense_tensor_format(FP8)
register_kernel(
    "attention",
    "mla_extend_with_kvcache",
    name="cutedsl_mla_extend_with_kvcache",
    solution="cutedsl",
    capability=CUTEDSL_HOPPER,
    signatures=format_signatures(("q", "kv_cache"), "dense", {torch.bfloat16}),
    traits=_TRAITS,
    aligned_caches=("kv_cache",),
    priority=Priority.SPECIALIZED,
    tags={"determinism"},
)(mla_extend_with_kvcache)
register_kernel(
    "attention",
    "mla_extend_with_kvcache",
    name="cutedsl_mla_extend_with_kvcache_fp8",
    solution="cutedsl",
    capability=CUTEDSL_HOPPER,
    signatures=frozenset(format_signature(q=dense_tensor_format(dtype), kv_cache=_E4M3) for dtype in (torch.bfloat16, FP8)),
    traits={**_TRAITS, "scaled": any},
    aligned_caches=("kv_cache",),
    priority=Priority.SPECIALIZED,
    tags={"determinism", "fp8_weights"},
)(mla_extend_with_kvcache)
