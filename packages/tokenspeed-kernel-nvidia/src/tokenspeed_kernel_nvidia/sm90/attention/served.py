"""What the attention kernels for Hopper serve alike, for their configurations and declarations."""

from __future__ import annotations

from typing import Any

import torch

from tokenspeed_kernel_base.signature import dense_tensor_format, format_signature, format_signatures
from tokenspeed_kernel_nvidia.sm90.common.launch import DTYPES

# Of keys and values alike. One kernel is declared for each, because values must be as wide as keys, and traits are constrained one
# by one.
HEAD_DIMS = (64, 128)
# Those of keys and of values that are served besides.
OTHER_WIDTHS = ((192, 128), (256, 256), (96, 96), (80, 80))
PAGE_SIZES = (16, 32, 64, 128, 256)
# Query heads a key head of prefill and extend, whose tiles are whole groups of heads. Some of the ratios in between would need more
# registers than there are.
GQA_RATIOS = (1, 2, 4, 8, 16)

# Keys in a row, and in a paged cache.
RAGGED = format_signatures(("q", "k", "v"), "dense", DTYPES)
PAGED = format_signatures(("q", "k_cache", "v_cache"), "dense", DTYPES)
FP8 = torch.float8_e4m3fn
# All of them fp8.
RAGGED_FP8 = format_signatures(("q", "k", "v"), "dense", {FP8})
PAGED_ALL_FP8 = format_signatures(("q", "k_cache", "v_cache"), "dense", {FP8})
# The cache alone.
_E4M3 = dense_tensor_format(FP8)
PAGED_FP8 = frozenset(format_signature(q=dense_tensor_format(dtype), k_cache=_E4M3, v_cache=_E4M3) for dtype in DTYPES)
# A cache of latents, with queries of 16 bits or fp8.
LATENT_FP8 = frozenset(format_signature(q=dense_tensor_format(dtype), kv_cache=_E4M3) for dtype in (*DTYPES, FP8))


def traits(head_dim: int, v_head_dim: int = 0, /, **others: Any) -> dict[str, Any]:
    """Traits of a kernel for heads of this width; values are as wide as keys unless v_head_dim says otherwise."""
    widths = {"head_dim": head_dim, "v_head_dim": v_head_dim or head_dim}
    return {**widths, "gqa_ratio": set(GQA_RATIOS), "return_lse": any, "sinks": any, **others}
