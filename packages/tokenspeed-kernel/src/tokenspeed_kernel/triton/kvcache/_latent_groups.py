"""Layout of scales and rotary parts in an MLA cache that keeps them in separate tensors."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tokenspeed_kernel_base.ops.kvcache.latent_groups import GROUP


class LatentGroups(NamedTuple):
    """How many elements of a latent share a scale, and the strides of the caches of rotary parts and scales, by page, slot and
    element.

    The strides are constexpr: Triton specialises a runtime stride only if it is a multiple of 16. Rotary parts of DeepSeek-V3.2 are
    328 elements of 16 bits apart, which is not a multiple of 16.
    """

    group: int
    rope_page: int
    rope_slot: int
    rope_dim: int
    scale_page: int
    scale_slot: int
    scale_group: int


def latent_groups(kv_scale_cache: Tensor | None, rope_cache: Tensor | None) -> LatentGroups | None:
    """Returns the layout of an MLA cache; None if a token's latent and rotary part are one row of the cache."""
    if kv_scale_cache is None or rope_cache is None:
        return None
    return LatentGroups(GROUP, *rope_cache.stride(), *kv_scale_cache.stride())
