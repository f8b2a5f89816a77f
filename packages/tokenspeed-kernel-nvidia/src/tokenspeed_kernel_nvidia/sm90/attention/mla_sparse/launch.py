"""Sparse MLA on Hopper: latent attention of tokens to selected slots (top-k indices) of a paged cache, for decode and prefill.

The kernel is `mla_decode` with gathered keys. Each query token counts as a sequence, and the token's indices take the role of the
page table. With 128 heads, both CTAs of a group gather all keys of their token. One of the two reads hits in L2.

The blocks of 64 keys of all tokens, concatenated, are divided into equal ranges on the device, from topk_length. So the keys of a
few tokens are divided among all SMs, and the keys of many tokens are hardly divided. A captured CUDA graph stays correct when
topk_length changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.workspace import keeper
from tokenspeed_kernel_nvidia._machine import sm_count_of
from tokenspeed_kernel_nvidia._programs import program
from tokenspeed_kernel_nvidia._rows import deliver
from tokenspeed_kernel_nvidia.capability import CUTEDSL_HOPPER
from tokenspeed_kernel_nvidia.cutedsl.launch import DTYPES, LOG2_E, launched_on
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode import config as mla_decode_config
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.config import HEADS, LATENT, ROPE, ROWS
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.launch import mla_merge_program
from tokenspeed_kernel_nvidia.sm90.attention.mla_sparse.config import PAGE_SIZES, Config, every_config
from tokenspeed_kernel_nvidia.sm90.target import ARCH


@program(arch=ARCH, configs=every_config)
def mla_sparse_program(config: Config) -> tuple[Any, tuple[Any, ...]]:
    """The sparse MLA kernel of `kernel_device`, compiled once for each configuration."""
    from tokenspeed_kernel_nvidia.sm90.attention.mla_sparse import kernel_device

    return kernel_device.host(config), kernel_device.fake_arguments(config)


@functools.cache
def _programs_of(dtype: torch.dtype, heads: int, device: int) -> tuple[Callable[..., Any], Callable[..., Any], int, int]:
    """Returns the compiled attention and merge kernels for a call, the number of CTA groups, and the bytes of the workspace."""
    config = Config(DTYPES[dtype], heads)
    groups = max(1, sm_count_of(device) // config.ranks)
    merge = mla_merge_program(mla_decode_config.Config(DTYPES[dtype], heads))
    return mla_sparse_program(config), merge, groups, config.workspace_bytes(groups)


def mla_sparse_with_kvcache(
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    kv_lora_rank: int,
    softmax_scale: float,
    topk_length: Tensor | None,
    return_lse: bool,
    out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes latent attention of tokens to selected slots of a paged cache: launches the kernels on arguments that the operator
    has checked.

    Scales are not supported. The kernel writes partial results to a workspace, see `tokenspeed_kernel_base.workspace`. The public
    function is `tokenspeed_kernel_nvidia.mla_sparse_with_kvcache`.
    """
    tokens, heads, _ = q.shape
    top_k = indices.shape[1]
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device) if return_lse else None
    written = q.new_empty(tokens, heads, kv_lora_rank) if out is None else out
    if tokens:
        if not kv_cache.shape[0]:  # no token has a key, but the copies need a valid address
            kv_cache = kv_cache.new_zeros(1, *kv_cache.shape[1:])
        device = q.get_device()
        launch, merge, groups, nbytes = _programs_of(q.dtype, heads, device)
        workspace = keeper.get(device, torch._C._cuda_getCurrentRawStream(device), nbytes, 0)
        lse_at = 0 if lse is None else lse.data_ptr()
        if topk_length is not None:
            topk_length = topk_length.contiguous()
        others = 0 if topk_length is None else topk_length.data_ptr(), workspace.memory_at, lse_at, groups, softmax_scale * LOG2_E
        rows = launched_on(launch, (q, kv_cache), written, (indices,), others, ("kv_cache",))
        if top_k > ROWS:  # a single block is never split
            merge(rows, workspace.memory_at, lse_at, 1, groups)
        if rows is not written:
            written = deliver(rows, out)
    return written if lse is None else (written, lse)


register_kernel(
    "attention",
    "mla_sparse_with_kvcache",
    name="cutedsl_mla_sparse_with_kvcache",
    solution="cutedsl",
    capability=CUTEDSL_HOPPER,
    signatures=format_signatures(("q", "kv_cache"), "dense", DTYPES),
    traits={
        "head_dim": LATENT + ROPE,
        "v_head_dim": LATENT,
        "gqa_ratio": set(HEADS),
        "page_size": set(PAGE_SIZES),
        "return_lse": any,
    },
    aligned_caches=("kv_cache",),
    priority=Priority.SPECIALIZED,
    tags={"determinism"},
)(mla_sparse_with_kvcache)
