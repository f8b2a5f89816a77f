"""Rotary position embedding of q and k, with or without the write to the paged cache, in one launch.

A program handles a tile of heads of q or of k. With a cache write, a program that handles k also stores the same heads of v.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import FLOATS, FP8, TRITON, cdiv, dense, launch_options, may_overlap, next_power_of_2
from tokenspeed_kernel.triton.kvcache._write import COPIED, Encoding, as_storable, encoding_for
from tokenspeed_kernel.triton.repeated import Launch, Repeated
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import dense_tensor_format, format_signature, format_signatures
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_most

device_code = DeviceModule(__name__ + "_device")
_launches = Repeated(lambda: device_code.apply_rope_kernel)


class Streams(NamedTuple):
    """Defines which of a token's three M-RoPE positions (time, height, width) each rotary pair uses.

    Attributes:
        height, width: index of the first pair that uses the height (width) position. If interleaved: an upper bound, exclusive, of
            the indices of the pairs that use the height (width) position.
        interleaved: whether consecutive pairs cycle through the three positions.
    """

    height: int
    width: int
    interleaved: bool


def streams_of(mrope_section: tuple[int, ...] | None, interleaved: bool) -> Streams | None:
    """Returns the `Streams` of a call's M-RoPE arguments; None if a token has one position."""
    if mrope_section is None:
        return None
    time, height, width = mrope_section
    return Streams(3 * height, 3 * width, True) if interleaved else Streams(time, time + height, False)


class Shape(NamedTuple):
    """Sizes that a model fixes.

    Attributes:
        q_heads, k_heads: heads of q and of k.
        head_dim, rotary_dim: columns of a head, and how many of them are rotated.
        interleaved: whether neighbouring columns form a pair.
        streams: which position a pair uses, if tokens have three positions; else None.
    """

    q_heads: int
    k_heads: int
    head_dim: int
    rotary_dim: int
    interleaved: bool
    streams: Streams | None


class Write(NamedTuple):
    """Describes the write of keys and values to the cache.

    Attributes:
        wanted: whether the call writes to a cache.
        page_size: tokens in a page.
        v_head_dim: columns of a value.
        encoding: the format in which the cache stores keys and values.
    """

    wanted: bool
    page_size: int
    v_head_dim: int
    encoding: Encoding


class Tile(NamedTuple):
    """The heads and columns that one program processes. All sizes except ``warps`` are powers of two.

    Attributes:
        q_heads, k_heads: heads of q that a program processes, or heads of k (and v).
        pairs: padded number of rotary pairs of a head.
        tail: padded number of columns that are in no pair.
        v_block: padded columns of a value.
        warps: warps of the program.
    """

    q_heads: int
    k_heads: int
    pairs: int
    tail: int
    v_block: int
    warps: int


# On H200, 16384 bf16 tokens with 64 q heads and 8 k heads of 64 columns reach 93 to 95% of a copy's bandwidth with 32 elements of q
# per thread, with and without the cache write. With 16 elements: 90%. With 8 elements: 86%. 64 tokens take 1.9 us, or 2.3 us with
# four times the heads and warps per program.
_Q_ELEMENTS, _K_ELEMENTS, _WARPS = 2048, 1024, 2


@functools.cache
def tile_for(head_dim: int, rotary_dim: int, v_head_dim: int) -> Tile:
    """Returns the tile for heads of these dimensions. ``v_head_dim`` is 0 without a cache write."""
    sizes = (rotary_dim // 2, head_dim - rotary_dim, head_dim, v_head_dim)
    pairs, tail, block, v_block = (next_power_of_2(max(n, 1)) for n in sizes)
    widest = max(block, v_block)
    warps = max(_WARPS, widest // 1024)  # at most 32 elements per thread for a very long head
    return Tile(max(1, _Q_ELEMENTS // block), max(1, _K_ELEMENTS // widest), pairs, tail, v_block, warps)


_PLAIN_FORMATS = format_signatures(("q", "k"), "dense", FLOATS)
_WRITING_FORMATS = {
    format_signature(q=dense_tensor_format(dtype), k=dense_tensor_format(dtype), k_cache=dense_tensor_format(cache))
    for dtype in FLOATS
    for cache in (dtype, *FP8)
}


@register_kernel(
    "embedding",
    "apply_rope",
    solution="triton",
    capability=TRITON,
    signatures=_PLAIN_FORMATS | _WRITING_FORMATS,
    traits={
        "interleaved": any,
        "mrope": any,
        "cache_write": any,
        "scaled": any,
        "per_head_scale": any,
        "head_dim": at_most(16384),
        "v_head_dim": at_most(16384),
    },
    priority=Priority.PORTABLE,
    tags={"determinism", "batch_invariant"},
)
def apply_rope(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    interleaved: bool,
    v: Tensor | None,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    slot_mapping: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    mrope_section: tuple[int, ...] | None,
    mrope_interleaved: bool,
    q_out: Tensor | None,
    k_out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Implements the operator `tokenspeed_kernel.apply_rope`, which documents the arguments."""
    (tokens, q_heads, head_dim), k_heads = q.shape, k.shape[1]
    new_q = q_out if q_out is not None and q_out.stride(2) == 1 else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    new_k = k_out if k_out is not None and k_out.stride(2) == 1 else torch.empty(k.shape, dtype=k.dtype, device=k.device)
    q, k, table = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, cos_sin_cache))
    encoding: Encoding | None = None  # of the written keys and values; None if nothing is written
    if v is not None and k_cache is not None and v_cache is not None and slot_mapping is not None and k_cache.numel():
        encoding = encoding_for(k, k_cache, k_scale, v_scale)
        v = v if v.stride(2) == 1 else v.contiguous()
        if encoding.format != COPIED:
            k_cache, v_cache = as_storable(k_cache), as_storable(v_cache)
    tensors = (q, k, v, positions, table, new_q, new_k, k_cache, v_cache, slot_mapping, dense(k_scale), dense(v_scale))

    def describe() -> Launch:
        rotary_dim, early = table.shape[1], may_overlap(q.device)
        write, slots_stride, v_strides = Write(False, 1, 0, Encoding()), 1, (1, 1)
        cache_strides: tuple[int, ...] = (1,) * 8
        if encoding is not None and v is not None and k_cache is not None and v_cache is not None and slot_mapping is not None:
            write = Write(True, k_cache.shape[1], v.shape[2], encoding)
            slots_stride, cache_strides = slot_mapping.stride(0), (*k_cache.stride(), *v_cache.stride())
            v_strides = (v.stride(0), v.stride(1))
        tile = tile_for(head_dim, rotary_dim, write.v_head_dim)
        k_programs, q_programs = cdiv(tokens * k_heads, tile.k_heads), cdiv(tokens * q_heads, tile.q_heads)
        return Launch(
            (k_programs + q_programs,),
            (
                tokens,
                k_programs,
                q.stride(0),
                q.stride(1),
                k.stride(0),
                k.stride(1),
                *v_strides,
                new_q.stride(0),
                new_q.stride(1),
                new_k.stride(0),
                new_k.stride(1),
                positions.stride(-1),
                positions.stride(0),
                table.stride(0),
                slots_stride,
                *cache_strides,
            ),
            {
                "SHAPE": Shape(
                    max(q_heads, 1),
                    max(k_heads, 1),
                    head_dim,
                    rotary_dim,
                    interleaved,
                    streams_of(mrope_section, mrope_interleaved),
                ),
                "WRITE": write,
                "TILE": tile,
                "EARLY": early,
                "num_warps": tile.warps,
                **launch_options(early),
            },
        )

    if head_dim and tokens and q_heads + k_heads:
        _launches(tensors, (encoding, interleaved, mrope_section, mrope_interleaved), describe)
    if q_out is not None and q_out is not new_q:
        new_q = q_out.copy_(new_q)
    if k_out is not None and k_out is not new_k:
        new_k = k_out.copy_(new_k)
    return new_q, new_k
