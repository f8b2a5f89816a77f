"""Stores MLA latents and their rotary parts to the paged cache. A program handles a few tokens."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import FLOATS, FP8, TRITON, cdiv, dense, next_power_of_2
from tokenspeed_kernel.triton.kvcache._latent_groups import latent_groups
from tokenspeed_kernel.triton.kvcache._write import as_storable, encoding_for
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import dense_tensor_format, format_signature, format_signatures
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_most

device_code = DeviceModule(__name__ + "_device")


class Shape(NamedTuple):
    """Columns of a latent and of its rotary part, and tokens in a page."""

    rank: int
    rope: int
    page_size: int


class Tile(NamedTuple):
    """The tile of one program: tokens, padded columns of a latent and of a rotary part (powers of two), and warps."""

    tokens: int
    rank: int
    rope: int
    warps: int


# Elements and warps per program, the same as in `store_kv_cache`. H200, latents of 512 and rotary parts of 64, bfloat16, cold L2:
# 65536 tokens take 46 us, 3.3 TB/s.
_ELEMENTS, _WARPS = 1024, 2
# Rows without 16-byte accesses need more registers per element.
_UNALIGNED_WARPS = 4


@functools.cache
def tile_for(rank: int, rope: int) -> Tile:
    """Returns the tile for latents of ``rank`` columns and rotary parts of ``rope`` columns."""
    block, rope_block = next_power_of_2(rank), next_power_of_2(rope)
    # A very long latent gets more warps: at most 32 elements per thread.
    warps = max(_UNALIGNED_WARPS if rank % 8 or rope % 8 else _WARPS, block // 1024)
    return Tile(max(1, _ELEMENTS // max(block, rope_block)), block, rope_block, warps)


_FORMATS = format_signatures(("latent", "kv_cache"), "dense", (*FLOATS, *FP8)) | {
    format_signature(latent=dense_tensor_format(values), kv_cache=dense_tensor_format(cache)) for values in FLOATS for cache in FP8
}
_GROUPED = frozenset(
    format_signature(
        latent=dense_tensor_format(values),
        kv_cache=dense_tensor_format(torch.float8_e4m3fn),
        rope_cache=dense_tensor_format(values),
    )
    for values in (torch.float16, torch.bfloat16)
)


@register_kernel(
    "kvcache",
    "store_mla_kv_cache",
    solution="triton",
    capability=TRITON,
    signatures=_FORMATS | _GROUPED,
    traits={"scaled": any, "grouped_scales": any, "kv_lora_rank": at_most(16384), "rope_dim": at_most(16384)},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def store_mla_kv_cache(
    latent: Tensor,
    k_rope: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_scale: Tensor | None,
    kv_scale_cache: Tensor | None,
    rope_cache: Tensor | None,
) -> None:
    """Implements the operator `tokenspeed_kernel.store_mla_kv_cache`, which documents the arguments."""
    tokens, rank = latent.shape
    if not tokens or not kv_cache.numel():
        return
    encoding = encoding_for(latent, kv_cache, kv_scale)
    latent, k_rope = (x if x.stride(1) == 1 else x.contiguous() for x in (latent, k_rope))
    if kv_cache.element_size() == 1:
        latent, k_rope, kv_cache = as_storable(latent), as_storable(k_rope), as_storable(kv_cache)
    tile = tile_for(rank, k_rope.shape[1])
    device_code.store_mla_kv_cache_kernel[(cdiv(tokens, tile.tokens),)](
        latent,
        k_rope,
        kv_cache,
        slot_mapping,
        dense(kv_scale),
        kv_scale_cache,
        rope_cache,
        tokens,
        latent.stride(0),
        k_rope.stride(0),
        *kv_cache.stride(),
        slot_mapping.stride(0),
        SHAPE=Shape(rank, k_rope.shape[1], kv_cache.shape[1]),
        GROUPS=latent_groups(kv_scale_cache, rope_cache),
        ENCODING=encoding,
        TILE=tile,
        num_warps=tile.warps,
    )
