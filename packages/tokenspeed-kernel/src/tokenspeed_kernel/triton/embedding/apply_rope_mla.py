"""Rotary position embedding of MLA (multi-head latent attention) in one launch: rotates, concatenates, quantises and stores.

A program handles a few query heads, or the latents of a few tokens (one latent per token).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import FLOATS, FP8, TRITON, dense, launch_options, may_overlap, next_power_of_2
from tokenspeed_kernel.triton.kvcache._write import COPIED, Encoding, as_storable, encoding_for
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import dense_tensor_format, format_signature
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_most

device_code = DeviceModule(__name__ + "_device")


class Shape(NamedTuple):
    """Sizes that a model fixes: query heads, columns of a latent, tokens in a page.

    ``head_dim``, ``rotary_dim`` and ``interleaved`` describe the rotary part, for the device code of `apply_rope`.
    """

    heads: int
    rank: int
    page_size: int
    head_dim: int
    rotary_dim: int
    interleaved: bool


class Tile(NamedTuple):
    """The heads or tokens, and the columns, that one program processes. All sizes except ``warps`` are powers of two.

    Attributes:
        q_heads, tokens: heads of q that a program processes, or tokens whose latents it processes.
        rank: padded columns of a latent.
        pairs: padded number of rotary pairs of a rotary part.
        tail: unused, because all columns of the rotary part are in pairs.
        warps: warps of the program.
    """

    q_heads: int
    tokens: int
    rank: int
    pairs: int
    tail: int
    warps: int


# H200, bfloat16, 128 heads, rank 512, cold L2. 2048 tokens take 153 us (3.98 TB/s); 164 us with half the elements per program, 153
# us with twice the warps, 154 us with twice both. With conversion to fp8: 125 us, or 164 us with half the elements. 256 tokens take
# 25.5 us with either number of elements.
_Q_ELEMENTS, _KV_ELEMENTS, _WARPS = 2048, 1024, 2


@functools.cache
def tile_for(rank: int, rope: int) -> Tile:
    """Returns the tile for latents of ``rank`` columns and rotary parts of ``rope`` columns."""
    block, pairs = next_power_of_2(rank), next_power_of_2(rope // 2)
    widest = max(block, 2 * pairs)
    warps = max(_WARPS, widest // 1024)  # at most 32 elements per thread for a very long head
    return Tile(max(1, _Q_ELEMENTS // widest), max(1, _KV_ELEMENTS // widest), block, pairs, 1, warps)


@register_kernel(
    "embedding",
    "apply_rope_mla",
    solution="triton",
    capability=TRITON,
    signatures={
        format_signature(q_latent=dense_tensor_format(dtype), kv_cache=dense_tensor_format(cache))
        for dtype in FLOATS
        for cache in (dtype, *FP8)
    },
    traits={"interleaved": any, "scaled": any, "out_dtype": any, "kv_lora_rank": at_most(16384), "rope_dim": at_most(16384)},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def apply_rope_mla(
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    interleaved: bool,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
    out_dtype: torch.dtype | None,
    out: Tensor | None,
) -> Tensor:
    """Implements the operator `tokenspeed_kernel.apply_rope_mla`, which documents the arguments."""
    tokens, heads, rank = q_latent.shape
    rope = q_rope.shape[2]
    q = out
    if q is None or q.stride(2) != 1:
        q = torch.empty((tokens, heads, rank + rope), dtype=out_dtype or q_latent.dtype, device=q_latent.device)
    q_latent, q_rope, latent, k_rope, table = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (q_latent, q_rope, latent, k_rope, cos_sin_cache)
    )
    q_encoding = encoding_for(q_latent, q, q_scale)
    kv_encoding = encoding_for(latent, kv_cache, kv_scale) if kv_cache.numel() else Encoding()
    stored_q = q if q_encoding.format == COPIED else as_storable(q)
    stored_kv = kv_cache if kv_encoding.format == COPIED else as_storable(kv_cache)
    tile = tile_for(rank, rope)
    kv_programs = -(-tokens // tile.tokens) if kv_cache.numel() else 0
    q_programs = -(-tokens * heads // tile.q_heads)
    if kv_programs + q_programs:
        early = may_overlap(q.device)
        device_code.apply_rope_mla_kernel[(kv_programs + q_programs,)](
            q_latent,
            q_rope,
            latent,
            k_rope,
            positions,
            table,
            stored_q,
            stored_kv,
            slot_mapping,
            dense(q_scale),
            dense(kv_scale),
            tokens,
            kv_programs,
            *q_latent.stride()[:2],
            *q_rope.stride()[:2],
            latent.stride(0),
            k_rope.stride(0),
            positions.stride(0),
            table.stride(0),
            *stored_q.stride()[:2],
            slot_mapping.stride(0),
            *stored_kv.stride(),
            SHAPE=Shape(max(heads, 1), rank, kv_cache.shape[1], rope, rope, interleaved),
            Q_ENCODING=q_encoding,
            KV_ENCODING=kv_encoding,
            TILE=tile,
            EARLY=early,
            num_warps=tile.warps,
            **launch_options(early),
        )
    return q if out is None or out is q else out.copy_(q)
