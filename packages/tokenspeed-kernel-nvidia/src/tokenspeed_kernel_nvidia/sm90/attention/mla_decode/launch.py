"""MLA decode on Hopper: latent attention of the newest tokens of each sequence to a paged cache.

The latents, shared by all heads, are both keys and values. With 128 heads, a cached token's 1152 bytes take 278,528 FLOPs, so the
kernel is compute-bound; with 16 heads it is memory-bound. One warpgroup of a CTA computes scores, and two compute P @ V: see
`config.Config`. With 128 heads, two CTAs of 64 heads form a cluster and share loads by multicast.

The kernel is persistent: one CTA per SM. The blocks (64 tokens) of all sequences, concatenated, are divided into one equal range
per cluster (split-KV). The division is computed on the device from cache_seqlens, so a captured CUDA graph stays correct and
balanced when lengths change. If a sequence spans several ranges, each range leaves a partial result. A second kernel merges the
partial results in a fixed order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.ops.attention._softmax import output_dtype
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.workspace import keeper
from tokenspeed_kernel_nvidia._machine import sm_count_of
from tokenspeed_kernel_nvidia._programs import program
from tokenspeed_kernel_nvidia._rows import deliver
from tokenspeed_kernel_nvidia.capability import CUTEDSL_HOPPER
from tokenspeed_kernel_nvidia.cutedsl.launch import DTYPES, LOG2_E, launched_on
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.config import (
    HEADS,
    LATENT,
    PAGE_SIZES,
    ROPE,
    ROWS,
    Config,
    config_of,
    every_config,
    every_merge_config,
)
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.fp8_config import Fp8Config, every_fp8_config
from tokenspeed_kernel_nvidia.sm90.attention.supported import LATENT_FP8
from tokenspeed_kernel_nvidia.sm90.target import ARCH


@program(arch=ARCH, configs=every_config)
def mla_decode_program(config: Config) -> tuple[Any, tuple[Any, ...]]:
    """The MLA decode kernel of `kernel_device` for a cache in q's dtype, compiled once for each configuration."""
    from tokenspeed_kernel_nvidia.sm90.attention.mla_decode import kernel_device

    return kernel_device.host(config), kernel_device.fake_arguments(config)


@program(arch=ARCH, configs=every_fp8_config)
def mla_decode_fp8_program(config: Fp8Config) -> tuple[Any, tuple[Any, ...]]:
    """The MLA decode kernel of `kernel_device` for an fp8 cache, compiled once for each configuration."""
    from tokenspeed_kernel_nvidia.sm90.attention.mla_decode import kernel_device

    return kernel_device.host(config), kernel_device.fake_arguments(config)


@program(arch=ARCH, configs=every_merge_config)
def mla_merge_program(config: Config) -> tuple[Any, tuple[Any, ...]]:
    """The merge kernel of `merge_device`, compiled once for each configuration."""
    from tokenspeed_kernel_nvidia.sm90.attention.mla_decode import merge_device

    return merge_device.host(config), merge_device.fake_arguments(config)


@functools.cache
def _programs_of(
    dtype: torch.dtype, cache: torch.dtype, heads: int, device: int
) -> tuple[Callable[..., Any], Callable[..., Any], int, int]:
    """Returns the compiled attention and merge kernels for a call, the number of CTA groups, and the bytes of the workspace."""
    if cache in DTYPES:
        config = config_of(DTYPES[dtype], heads)
        compute = mla_decode_program(config)
    else:
        config = Config(DTYPES.get(dtype, "bfloat16"), heads)
        compute = mla_decode_fp8_program(Fp8Config(config.dtype, heads, dtype not in DTYPES))
    groups = max(1, sm_count_of(device) // config.ranks)
    return compute, mla_merge_program(config), groups, config.workspace_bytes(groups)


def mla_decode_with_kvcache(
    q: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_k: int,
    kv_lora_rank: int,
    softmax_scale: float,
    max_seqlen_q: int,
    return_lse: bool,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
    out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes latent attention of the newest tokens to a paged cache: launches the kernels on arguments that the operator has
    checked.

    Windows, logit_cap and tree masks are not supported. The kernel writes partial results to a workspace, see
    `tokenspeed_kernel_base.workspace`. The public function is `tokenspeed_kernel_nvidia.mla_decode_with_kvcache`.
    """
    tokens, heads, _ = q.shape
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device) if return_lse else None
    written = q.new_empty(tokens, heads, kv_lora_rank, dtype=output_dtype(q)) if out is None else out
    if tokens:
        if not kv_cache.shape[0]:  # all sequences are empty, but a TMA descriptor needs memory to describe
            kv_cache = kv_cache.new_zeros(1, *kv_cache.shape[1:])
        device = q.get_device()
        launch, merge, groups, nbytes = _programs_of(q.dtype, kv_cache.dtype, heads, device)
        workspace = keeper.get(device, torch._C._cuda_getCurrentRawStream(device), nbytes, 0)
        lse_at = 0 if lse is None else lse.data_ptr()
        scales: tuple[int | None, ...] = (None, None)
        if kv_cache.dtype not in DTYPES:
            scales = 0 if q_scale is None else q_scale.data_ptr(), 0 if kv_scale is None else kv_scale.data_ptr()
            kv_cache = kv_cache.view(torch.uint8)
            if q.dtype not in DTYPES:
                q = q.view(torch.uint8)
        others = workspace.memory_at, lse_at, max_seqlen_q, max_seqlen_k, groups, softmax_scale * LOG2_E, *scales
        rows = launched_on(launch, (q, kv_cache), written, (page_table, cache_seqlens), others, ("kv_cache",))
        if max_seqlen_k > ROWS:  # a single block is never split
            merge(rows, workspace.memory_at, lse_at, max_seqlen_q, groups)
        if rows is not written:
            written = deliver(rows, out)
    return written if lse is None else (written, lse)


_TRAITS: dict[str, Any] = {
    "head_dim": LATENT + ROPE,
    "v_head_dim": LATENT,
    "gqa_ratio": set(HEADS),
    "page_size": set(PAGE_SIZES),
    "return_lse": any,
    "multi_query": any,
}
register_kernel(
    "attention",
    "mla_decode_with_kvcache",
    name="cutedsl_mla_decode_with_kvcache",
    solution="cutedsl",
    capability=CUTEDSL_HOPPER,
    signatures=format_signatures(("q", "kv_cache"), "dense", DTYPES),
    traits=_TRAITS,
    aligned_caches=("kv_cache",),
    priority=Priority.SPECIALIZED,
    tags={"determinism"},
)(mla_decode_with_kvcache)
register_kernel(
    "attention",
    "mla_decode_with_kvcache",
    name="cutedsl_mla_decode_with_kvcache_fp8",
    solution="cutedsl",
    capability=CUTEDSL_HOPPER,
    signatures=LATENT_FP8,
    traits={**_TRAITS, "scaled": any},
    aligned_caches=("kv_cache",),
    priority=Priority.SPECIALIZED,
    tags={"determinism", "fp8_weights"},
)(mla_decode_with_kvcache)
