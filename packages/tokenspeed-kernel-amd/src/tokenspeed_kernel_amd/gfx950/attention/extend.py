"""Extend: attention of new tokens to a paged cache that already holds these tokens and all earlier ones.

The rows of a tile are all query heads of a KV head, for as many tokens as fit. For example, eight tokens with a gqa_ratio of eight
are one tile of 64 rows. The launch uses the smallest tile that holds all new tokens of the sequence with the most new tokens. So a
batch with few new tokens per sequence uses a small tile. One wave computes a tile of 16 or 32 rows, as in decode. Four waves
compute a tile of 64 or 128 rows, and share the keys in LDS. The mainloop of a tile begins at the first key visible to its first
token, and ends at the last key visible to its last token. Key blocks that every row sees entirely are not masked. A few new tokens
of a few long sequences would leave most of the device idle. So the keys of such sequences are divided into splits, as in decode.

Only the device knows how many new tokens each sequence has. In the simplest grid, every sequence has as many tiles as the sequence
with the most new tokens. In the other grid, all sequences share *slots*, one tile each. The launch uses slots if they are fewer
than 3/4 of the simplest grid's tiles. Sequence b owns the slots from ``cu_seqlens_q[b] * gqa_ratio // m + b`` on, where m is the
number of rows of a tile. A sequence gets the slots that its rows need, or one more. Finding a slot's owner takes 0.3 us of the
emulator's timing model.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tokenspeed_kernel_amd._machine import current_compute_units
from tokenspeed_kernel_amd.capability import GLUON_CDNA4
from tokenspeed_kernel_amd.gfx950.attention.decode import GFX950
from tokenspeed_kernel_amd.gluon.call import CACHES, PAGED_SIGNATURES, PAGED_TRAITS, Call, TileShape, called, lengths_at_once
from tokenspeed_kernel_amd.gluon.decode import CONFIG, attend_split_kv
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.spec import Priority

device = DeviceModule(__name__ + "_device")

# Tiles in ascending order of rows. `tile_of_stretches` selects the first tile that holds all query rows of the sequence with the
# most new tokens. If none does, it selects the last tile.
TILES = (TileShape(16, 32, 1), TileShape(32, 32, 1), TileShape(64, 64, 4), TileShape(128, 64, 4))
# For head_dim or v_head_dim 128, which need twice the registers per row. A tile of 128 rows would need 458 registers.
WIDE_TILES = TILES[:3]
# For fp8 caches. Every wave converts the keys itself, so the fewest waves that the registers allow are best. 64 sequences of 1024
# with 8 new tokens take 18.3 us of the emulator's timing model, and 24.8 us with four waves.
FP8_TILES = (TileShape(16, 64, 1), TileShape(32, 64, 1), TileShape(64, 64, 2), TileShape(128, 64, 4))
FP8_WIDE_TILES = (TileShape(16, 64, 1), TileShape(32, 64, 2), TileShape(64, 64, 4))


class Slots(NamedTuple):
    """The tiles that a launch computes: compile-time constants.

    Attributes:
        shared: whether sequences share a grid of slots; otherwise each has as many tiles as the sequence with the most new tokens.
        skipped: sequences with at most this many new tokens are skipped.
        lengths: how many values of cu_seqlens_q a workgroup loads at once; 0 if ``shared`` is false.
    """

    shared: bool
    skipped: int
    lengths: int


def grid_of(slots: int, tiles: int, batch: int, skipped: int = 0) -> tuple[int, Slots]:
    """Returns the number of workgroups for a head, and the `Slots` constant.

    Args:
        slots, tiles: the number of workgroups if sequences share slots, and if each has as many tiles as the sequence with the most
            new tokens.
        skipped: see `Slots`.
    """
    shared = 4 * slots < 3 * tiles
    return (slots if shared else tiles), Slots(shared, skipped, lengths_at_once(batch) if shared else 0)


@register_kernel(
    "attention",
    "mha_extend_with_kvcache",
    solution="gluon",
    capability=GLUON_CDNA4,
    signatures=PAGED_SIGNATURES,
    traits={**PAGED_TRAITS, "is_causal": any},
    aligned_caches=CACHES,
    priority=Priority.SPECIALIZED,
    tags={"determinism"},
)
def mha_extend_with_kvcache(
    q: Tensor,
    cu_seqlens_q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool,
    window_left: int,
    logit_cap: float,
    sinks: Tensor | None,
    return_lse: bool,
    softmax_scale: float | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Implements the operator `tokenspeed_kernel_amd.mha_extend_with_kvcache`, which checks the arguments first. ``q_scale`` is
    always None, because these kernels support no fp8 queries."""
    call = called(
        "mha_extend_with_kvcache", q, cu_seqlens_q, k_cache, v_cache, page_table, cache_seqlens, max_seqlen_q, max_seqlen_k,
        is_causal, window_left, logit_cap, sinks, return_lse, softmax_scale, k_scale, v_scale, out,
    )  # fmt: skip
    tile = tile_of_stretches(call)
    if split_kv_pays(call, tile):
        attend_split_kv(call, tile, call.max_seqlen_q, GFX950)
    else:
        attend_in_tiles(call, tile)
    return call.result


def tile_of_stretches(call: Call) -> TileShape:
    """Returns the smallest tile that holds all query rows of a sequence with ``call.max_seqlen_q`` new tokens; if none does, the
    largest tile."""
    rows = call.max_seqlen_q * call.gqa_ratio
    wide = max(call.q.shape[2], call.v_cache.shape[3]) > 64
    choice = (FP8_WIDE_TILES if wide else FP8_TILES) if call.fp8 else (WIDE_TILES if wide else TILES)
    return next((tile for tile in choice if rows <= tile.m), choice[-1])


def split_kv_pays(call: Call, tile: TileShape) -> bool:
    """Returns whether split-KV pays off. Three conditions must hold: one tile holds all query rows of a sequence, sequences may
    have more than ``CONFIG.whole`` visible keys, and there are at most as many (sequence, KV head) pairs as CUs.
    """
    one_each = call.max_seqlen_q * call.gqa_ratio <= tile.m
    many_keys = call.keys_in_view(tile, call.max_seqlen_q) > CONFIG.whole
    return one_each and many_keys and call.batch * call.kv_heads <= current_compute_units()


def slots_of(call: Call, tile: TileShape) -> int:
    """Returns an upper bound of the number of slots that the query rows of one KV head need, over all sequences."""
    return call.tokens * call.gqa_ratio // tile.m + call.batch


def attend_in_tiles(call: Call, tile: TileShape, skipped: int = 0) -> None:
    """Launches attention with one workgroup for each tile. Skips sequences with at most ``skipped`` new tokens."""
    if call.empty:
        return
    tiles = -(-call.max_seqlen_q * call.gqa_ratio // tile.m) * call.batch
    count, slots = grid_of(slots_of(call, tile), tiles, call.batch, skipped)
    device.extend_kernel[(call.kv_heads * count,)](call.operands(), *call.constants(), tile, slots, num_warps=tile.num_warps)
