"""Mixed batches: one call for sequences that decode, extend and prefill.

The decode kernel computes the sequences whose rows fit its small tile. It divides long caches into splits. The extend kernel
computes all others. Only the device knows which sequences these are. So both kernels are launched for the whole batch, and each
skips the other kernel's sequences. Extend is launched first for two reasons. The host prepares the next launches while extend runs.
And decode's partial results are merged right after decode, while they are still in the GPU's caches.

One kernel computes the whole batch in three cases:

* All sequences have few new tokens (decode).
* Few new tokens of few long sequences are worth splitting (decode).
* Splitting does not pay off and all tiles fit on the device at once. Short sequences then run beside long ones (extend).
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from tokenspeed_kernel_amd._machine import current_compute_units
from tokenspeed_kernel_amd.capability import GLUON_CDNA4
from tokenspeed_kernel_amd.gfx950.attention.decode import GFX950, tile_of_rows
from tokenspeed_kernel_amd.gfx950.attention.extend import attend_in_tiles, slots_of, split_kv_pays, tile_of_stretches
from tokenspeed_kernel_amd.gluon.call import CACHES, PAGED_SIGNATURES, PAGED_TRAITS, Call, TileShape, called
from tokenspeed_kernel_amd.gluon.decode import CONFIG, attend_split_kv
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.spec import Priority


@register_kernel(
    "attention",
    "mha_with_kvcache",
    solution="gluon",
    capability=GLUON_CDNA4,
    signatures=PAGED_SIGNATURES,
    traits=PAGED_TRAITS,
    aligned_caches=CACHES,
    priority=Priority.SPECIALIZED,
    tags={"determinism"},
)
def mha_with_kvcache(
    q: Tensor,
    cu_seqlens_q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    window_left: int,
    logit_cap: float,
    sinks: Tensor | None,
    return_lse: bool,
    softmax_scale: float | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Implements the operator `tokenspeed_kernel_amd.mha_with_kvcache`, which checks the arguments first. ``q_scale`` is always
    None, because these kernels support no fp8 queries."""
    call = called(
        "mha_with_kvcache", q, cu_seqlens_q, k_cache, v_cache, page_table, cache_seqlens, max_seqlen_q, max_seqlen_k, True,
        window_left, logit_cap, sinks, return_lse, softmax_scale, k_scale, v_scale, out,
    )  # fmt: skip
    small = tile_of_rows(call, call.gqa_ratio)
    short = max(1, small.m // call.gqa_ratio)
    if call.max_seqlen_q <= short:
        if call.tokens == call.batch and call.max_seqlen_q == 1:  # one token per sequence, so no offsets are needed
            call = dataclasses.replace(call, cu_seqlens_q=None)
        attend_split_kv(call, small, call.max_seqlen_q, GFX950)
        return call.result
    tile = tile_of_stretches(call)
    if split_kv_pays(call, tile):
        attend_split_kv(call, tile, call.max_seqlen_q, GFX950)
    elif call.batch == 1 or _fits_at_once(call, tile, small, short):
        attend_in_tiles(call, tile)
    else:
        attend_in_tiles(call, tile, skipped=short)
        attend_split_kv(call, small, short, GFX950)
    return call.result


def _fits_at_once(call: Call, tile: TileShape, small: TileShape, short: int) -> bool:
    """Returns whether one launch of extend suffices: caches are too short for split-KV, and two workgroups per CU hold all tiles.
    ``short`` is the most new tokens of a sequence that decode's tile ``small`` holds; ``tile`` is extend's tile.
    """
    return call.keys_in_view(small, short) <= CONFIG.whole and slots_of(call, tile) * call.kv_heads <= 2 * current_compute_units()
