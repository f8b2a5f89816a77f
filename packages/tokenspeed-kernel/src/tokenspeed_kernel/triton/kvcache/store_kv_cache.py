"""Writing keys and values into the paged cache: a program takes a tile of heads (of whatever tokens) of both."""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch import Tensor

from tokenspeed_kernel.triton.common import FLOATS, FP8, TRITON, next_power_of_2
from tokenspeed_kernel.triton.kvcache._write import COPIED, as_storable, cache_format
from tokenspeed_kernel.triton.quantization._encode import abilities, division_steps
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import dense_tensor_format, format_signature, format_signatures
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_most

device_code = DeviceModule(__name__ + "_device")


class Shape(NamedTuple):
    """Heads of a token, columns of a head, tokens of a page."""

    heads: int
    head_dim: int
    page_size: int


class Encoding(NamedTuple):
    """How values are stored.

    Attributes:
        format, native: see `_write_device.as_stored`.
        k_scales, v_scales: how many scales there are, 0 for none.
        interpreted, steps: see `_encode_device.divide`.
    """

    format: str
    k_scales: int
    v_scales: int
    native: bool
    interpreted: bool
    steps: int


class Tile(NamedTuple):
    """What one program writes: this many heads of k and of v, each of a power of two of columns."""

    heads: int
    block: int
    warps: int


# H200, 65536 tokens of 8 heads of 64: bf16 moves 92% of what a copy does to slots in random order, 95% in rising order; larger
# tiles lose 2 to 4%. e4m3fn with scales moves 92%, with twice the warps or twice the heads 84%. 64 tokens take 1.5 us and 1.9.
_ELEMENTS, _WARPS = 1024, 2
# Heads that cannot be moved 16 bytes at a time take more registers an element; with fewer elements a thread nothing spills.
_UNALIGNED_WARPS = 4


@functools.cache
def tile_for(head_dim: int) -> Tile:
    """The tile for heads of this size."""
    block = next_power_of_2(head_dim)
    # Of a very long head no more than 32 elements a thread.
    warps = max(_UNALIGNED_WARPS if head_dim % 8 else _WARPS, block // 1024)
    return Tile(max(1, _ELEMENTS // block), block, warps)


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
    traits={"scaled": any, "per_head_scale": any, "head_dim": at_most(16384)},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def store_kv_cache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """See `tokenspeed_kernel.store_kv_cache`."""
    tokens, kv_heads, head_dim = k.shape
    if not k.numel() or not k_cache.numel():
        return
    form = cache_format(k.dtype, k_cache.dtype)
    native, interpreted, steps = False, False, 0
    if form != COPIED:
        able = abilities(k.device)
        native, interpreted, steps = able.native, able.interpreted, division_steps(k.dtype)
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    if k_cache.element_size() == 1:
        k, v, k_cache, v_cache = as_storable(k), as_storable(v), as_storable(k_cache), as_storable(v_cache)
    tile = tile_for(head_dim)
    device_code.store_kv_cache_kernel[(-(-tokens * kv_heads // tile.heads),)](
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        k_scale if k_scale is None else k_scale.contiguous(),
        v_scale if v_scale is None else v_scale.contiguous(),
        tokens,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        *k_cache.stride(),
        *v_cache.stride(),
        slot_mapping.stride(0),
        SHAPE=Shape(kv_heads, head_dim, k_cache.shape[1]),
        ENCODING=Encoding(
            format=form,
            k_scales=0 if k_scale is None else k_scale.numel(),
            v_scales=0 if v_scale is None else v_scale.numel(),
            native=native,
            interpreted=interpreted,
            steps=steps,
        ),
        TILE=tile,
        num_warps=tile.warps,
    )
