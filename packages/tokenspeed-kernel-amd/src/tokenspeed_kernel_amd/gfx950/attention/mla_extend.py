"""MLA extend: latent attention of new tokens to a paged cache that already holds these tokens and all earlier ones.

A row is one head of one new token, so a sequence with n new tokens and 128 heads has ``128 n`` rows. If a batch has at most as many
tiles as there are CUs, the kernel of `mla_decode` computes it, and divides the keys into splits. Otherwise a workgroup computes all
keys of a tile, and nothing has to be merged.
"""

from __future__ import annotations

from torch import Tensor

from tokenspeed_kernel_amd._machine import current_compute_units
from tokenspeed_kernel_amd.capability import GLUON_CDNA4
from tokenspeed_kernel_amd.gfx950.attention.extend import grid_of
from tokenspeed_kernel_amd.gfx950.attention.mla_decode import (
    CACHE,
    SIGNATURES,
    TRAITS,
    Operands,
    Variant,
    attend_split_kv,
    called,
    shape_of,
    tile_of,
    tiles_of,
)
from tokenspeed_kernel_amd.gluon.call import TileShape
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.spec import Priority

device = DeviceModule(__name__ + "_device")


@register_kernel(
    "attention",
    "mla_extend_with_kvcache",
    solution="gluon",
    capability=GLUON_CDNA4,
    signatures=SIGNATURES,
    traits={**TRAITS, "is_causal": any},
    aligned_caches=(CACHE,),
    priority=Priority.SPECIALIZED,
    tags={"determinism", "fp8_weights"},
)
def mla_extend_with_kvcache(
    q: Tensor,
    cu_seqlens_q: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    kv_lora_rank: int,
    softmax_scale: float,
    is_causal: bool,
    window_left: int,
    logit_cap: float,
    return_lse: bool,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
    out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Implements the operator `tokenspeed_kernel_amd.mla_extend_with_kvcache`, which checks the arguments first."""
    call = called(
        q, cu_seqlens_q, kv_cache, page_table, cache_seqlens, max_seqlen_k, kv_lora_rank, softmax_scale, is_causal, window_left,
        logit_cap, return_lse, q_scale, kv_scale, out,
    )  # fmt: skip
    q_len = min(max_seqlen_q, q.shape[0])
    if q_len and call.operands.batch:
        tile = tile_of(call.operands, q_len)
        if tiles_of(call.operands, q_len, tile) <= current_compute_units():
            attend_split_kv(call.operands, call.variant, q_len)
        else:
            attend_in_tiles(call.operands, call.variant, q_len, tile)
    return call.result


def attend_in_tiles(operands: Operands, variant: Variant, q_len: int, tile: TileShape) -> None:
    """Launches attention with one workgroup for each tile of query rows. Sequences have at most q_len new tokens.

    `extend` explains the two grids.
    """
    tokens, heads = operands.q.shape[:2]
    needed = tokens * heads // tile.m + operands.batch
    count, slots = grid_of(needed, tiles_of(operands, q_len, tile), operands.batch)
    device.mla_extend_kernel[(count,)](operands, shape_of(operands, 1), variant, tile, slots, num_warps=tile.num_warps)
