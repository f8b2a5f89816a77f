"""Shapes and formats that all attention kernels for Hopper support. Configurations and declarations use this module."""

from __future__ import annotations

from typing import Any

import torch

from tokenspeed_kernel_base.signature import dense_tensor_format, format_signature, format_signatures
from tokenspeed_kernel_nvidia.cutedsl.launch import DTYPES

# Values of head_dim with an equal v_head_dim. Each has its own declaration. Traits are constrained independently, so one
# declaration for both values could not require head_dim to equal v_head_dim.
HEAD_DIMS = (64, 128)
# Further supported pairs (head_dim, v_head_dim).
OTHER_WIDTHS = ((192, 128), (256, 256), (96, 96), (80, 80))
PAGE_SIZES = (16, 32, 64, 128, 256)
# GQA group sizes (query heads per KV head) of prefill and extend, whose Q tiles hold whole groups. Some of the sizes in between
# would spill registers.
GQA_RATIOS = (1, 2, 4, 8, 16)

# K/V in ragged tensors, and in paged caches.
RAGGED = format_signatures(("q", "k", "v"), "dense", DTYPES)
PAGED = format_signatures(("q", "k_cache", "v_cache"), "dense", DTYPES)
FP8 = torch.float8_e4m3fn
# Queries and K/V in fp8.
RAGGED_FP8 = format_signatures(("q", "k", "v"), "dense", {FP8})
PAGED_ALL_FP8 = format_signatures(("q", "k_cache", "v_cache"), "dense", {FP8})
# The cache in fp8, queries in 16 bits.
_E4M3 = dense_tensor_format(FP8)
PAGED_FP8 = frozenset(format_signature(q=dense_tensor_format(dtype), k_cache=_E4M3, v_cache=_E4M3) for dtype in DTYPES)
# A latent (MLA) cache in fp8, with queries in 16 bits or fp8.
LATENT_FP8 = frozenset(format_signature(q=dense_tensor_format(dtype), kv_cache=_E4M3) for dtype in (*DTYPES, FP8))


def traits(head_dim: int, v_head_dim: int = 0, /, **others: Any) -> dict[str, Any]:
    """Returns the traits of an attention kernel for Hopper with this head_dim and v_head_dim. A v_head_dim of 0 stands for
    head_dim."""
    widths = {"head_dim": head_dim, "v_head_dim": v_head_dim or head_dim}
    return {**widths, "gqa_ratio": set(GQA_RATIOS), "return_lse": any, "sinks": any, **others}
