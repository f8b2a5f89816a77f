"""What kernels of multi-head attention are compiled for."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Shape(NamedTuple):
    """Sizes that a model fixes, and options that change what is computed.

    Attributes:
        heads, group: key heads, and query heads of each.
        head_dim, v_head_dim: columns of queries and keys, and of values.
        page_size: tokens of a page; 0 where keys lie in a row.
        q_scales, k_scales, v_scales: the distance of the scales of neighbouring key heads; 0 where all share one.
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
    """The distance of the scales of neighbouring key heads; 0 where all share one, or there is none."""
    return 0 if scale is None or scale.numel() == 1 else scale.stride(0)
