"""Stores keys and values to the paged cache. A program handles a tile of (token, head) rows of k and v."""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch import Tensor

from tokenspeed_kernel.triton.common import FLOATS, FP8, TRITON, dense, next_power_of_2
from tokenspeed_kernel.triton.kvcache._write import as_storable, encoding_for
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import dense_tensor_format, format_signature, format_signatures
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_most

device_code = DeviceModule(__name__ + "_device")


class Shape(NamedTuple):
    """The sizes of a call: heads per token, columns of a key and of a value, and tokens in a page."""

    heads: int
    head_dim: int
    v_head_dim: int
    page_size: int


class Tile(NamedTuple):
    """The tile of one program: (token, head) rows, padded columns of a key (``block``) and of a value (``v_block``), and warps."""

    heads: int
    block: int
    v_block: int
    warps: int


# H200, 65536 tokens, 8 heads of 64 columns. bf16: 92% of a copy's bandwidth to slots in random order, 95% to slots in rising order;
# larger tiles lose 2 to 4%. e4m3fn with scales: 92%, or 84% with twice the warps or twice the heads. 64 tokens: 1.5 us (bf16), 1.9
# us (e4m3fn).
_ELEMENTS, _WARPS = 1024, 2
# Heads without 16-byte accesses need more registers per element. Fewer elements per thread avoid register spills.
_UNALIGNED_WARPS = 4


@functools.cache
def tile_for(head_dim: int, v_head_dim: int) -> Tile:
    """Returns the tile for heads of these dimensions."""
    block, v_block = next_power_of_2(head_dim), next_power_of_2(v_head_dim)
    widest = max(block, v_block)
    # A very long head gets more warps: at most 32 elements per thread.
    warps = max(_UNALIGNED_WARPS if head_dim % 8 or v_head_dim % 8 else _WARPS, widest // 1024)
    return Tile(max(1, _ELEMENTS // widest), block, v_block, warps)


_COPIED_FORMATS = format_signatures(("k", "k_cache"), "dense", (*FLOATS, *FP8))
_ENCODED_FORMATS = {
    format_signature(k=dense_tensor_format(values), k_cache=dense_tensor_format(cache)) for values in FLOATS for cache in FP8
}


@register_kernel(
    "kvcache",
    "store_kv_cache",
    solution="triton",
    capability=TRITON,
    signatures=_COPIED_FORMATS | _ENCODED_FORMATS,
    traits={"scaled": any, "per_head_scale": any, "head_dim": at_most(16384), "v_head_dim": at_most(16384)},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def store_kv_cache(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, k_scale: Tensor | None, v_scale: Tensor | None
) -> None:
    """Implements the operator `tokenspeed_kernel.store_kv_cache`, which documents the arguments."""
    tokens, kv_heads, head_dim = k.shape
    if not k.numel() + v.numel() or not k_cache.numel() + v_cache.numel():
        return
    encoding = encoding_for(k, k_cache, k_scale, v_scale)
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    if k_cache.element_size() == 1:
        k, v, k_cache, v_cache = as_storable(k), as_storable(v), as_storable(k_cache), as_storable(v_cache)
    tile = tile_for(head_dim, v.shape[2])
    device_code.store_kv_cache_kernel[(-(-tokens * kv_heads // tile.heads),)](
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        dense(k_scale),
        dense(v_scale),
        tokens,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        *k_cache.stride(),
        *v_cache.stride(),
        slot_mapping.stride(0),
        SHAPE=Shape(kv_heads, head_dim, v.shape[2], k_cache.shape[1]),
        ENCODING=encoding,
        TILE=tile,
        num_warps=tile.warps,
    )
