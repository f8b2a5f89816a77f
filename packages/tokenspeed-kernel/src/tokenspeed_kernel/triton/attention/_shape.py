"""Compile-time sizes and options of multi-head attention kernels."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Shape(NamedTuple):
    """Sizes that a model fixes, and options that change the result.

    Attributes:
        heads, group: KV heads, and query heads per KV head (GQA group size).
        head_dim, v_head_dim: columns of queries and keys, and of values.
        page_size: tokens in a page; 0 where keys are contiguous and not paged.
        q_scales, k_scales, v_scales: stride between the scales of neighbouring KV heads; 0 for one scale.
        has_cap: whether scores have a logit cap.
    """

    heads: int
    group: int
    head_dim: int
    v_head_dim: int
    page_size: int
    q_scales: int
    k_scales: int
    v_scales: int
    has_cap: bool


def scales_apart(scale: Tensor | None) -> int:
    """Returns the stride between the scales of neighbouring KV heads; 0 for one scale or none."""
    return 0 if scale is None or scale.numel() == 1 else scale.stride(0)
