"""Where scales and rotary parts lie, of a cache that has them apart from its latents."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tokenspeed_kernel_base.ops.kvcache.latent_groups import GROUP


class LatentGroups(NamedTuple):
    """Numbers of a latent that share a scale, and the strides of rotary parts and of scales, by page, slot and number.

    Strides are compiled in: of others the compiler knows only whether they are multiples of 16, and tokens of DeepSeek-V3.2 are
    328 numbers of 16 bits apart.
    """

    group: int
    rope_page: int
    rope_slot: int
    rope_dim: int
    scale_page: int
    scale_slot: int
    scale_group: int


def latent_groups(kv_scale_cache: Tensor | None, rope_cache: Tensor | None) -> LatentGroups | None:
    """Those of a cache; None where a token's latent and rotary part are one row."""
    if kv_scale_cache is None or rope_cache is None:
        return None
    return LatentGroups(GROUP, *rope_cache.stride(), *kv_scale_cache.stride())
