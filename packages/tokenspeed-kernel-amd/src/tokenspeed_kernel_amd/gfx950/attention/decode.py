"""Decode: attention of the newest tokens of sequences to a paged cache.

Memory decides the speed. A workgroup is one wave, which needs no barriers; at head_dim 64, 18 of them fit on a compute unit, each
with 8 KB on the way. Long sequences are divided into *units*, one workgroup's share of the keys of one sequence. The lengths that
decide how are read on the device only: capacity bounds the grid, every workgroup finds its own unit, and those beyond the last one
end at once. Units of one sequence leave partial results, which a second launch merges in a fixed order; a sequence of one unit is
finished by the first. Where the host can tell that no sequence is worth dividing, as in layers with a short window, there are as
many units as sequences, and one launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed_kernel_amd._machine import current_compute_units
from tokenspeed_kernel_amd.capability import GLUON_CDNA4
from tokenspeed_kernel_amd.gfx950.attention._call import PAGED_SIGNATURES, PAGED_TRAITS, Call, Tile, called
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import Priority, register_kernel

device = DeviceModule(__name__ + "_device")


@dataclass(frozen=True)
class Config:
    """How work is cut. Figures are microseconds of the emulator's timing model, of 64 query heads and 8 key heads of dimension 64.

    Attributes:
        stages: blocks on the way in a wave where there are few workgroups, twice as many where nothing is divided; else 1. Half as
            many of 64 keys.
        waves: workgroups of a compute unit that much work is divided for; little work is for two.
        long: keys that make a unit long enough: units are shorter only as long as there are fewer than two a compute unit.
        least: keys that a unit has at least.
        whole: where no sequence shows more keys than this, none is divided.
        merged: units that the merging launch looks at together, at most.
    """

    stages: int = 2  # a sequence of 1024: 2.70, with 1: 3.01, with 4: 3.16. Window of 128: 4 stages 2.61, 2: 2.76, 8: 3.98
    waves: int = 8
    long: int = 1024  # 128 sequences of 1024: 34.2, with 512: 36.3
    least: int = 64
    whole: int = 256
    merged: int = 32  # the merging launch of a sequence of 32768: 1.5, with 16: 2.3; with 64: 1.2, but heads of 128 would spill


CONFIG = Config()


@register_kernel(
    "attention",
    "mha_decode_with_kvcache",
    solution="gluon",
    capability=GLUON_CDNA4,
    signatures=PAGED_SIGNATURES,
    traits={**PAGED_TRAITS, "multi_query": any},
    priority=Priority.SPECIALIZED,
    tags={"determinism"},
)
def mha_decode_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_k: int,
    max_seqlen_q: int = 1,
    window_left: int = -1,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    softmax_scale: float | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """See `tokenspeed_kernel_amd.mha_decode_with_kvcache`, which checks the arguments. q_scale is None."""
    call = called(
        "mha_decode_with_kvcache", q, None, k_cache, v_cache, page_table, cache_seqlens, max_seqlen_q, max_seqlen_k, True,
        window_left, logit_cap, sinks, return_lse, softmax_scale, k_scale, v_scale, out,
    )  # fmt: skip
    attend_in_units(call, tile_of_rows(call, max_seqlen_q * call.group), max_seqlen_q)
    return call.result


def tile_of_rows(call: Call, rows: int) -> Tile:
    """The tile of one wave for so many rows of a key head; of more than it has, several are launched."""
    return Tile(16 if rows <= 16 else 32, 64 if call.fp8 else 32, 1)


def attend_in_units(call: Call, tile: Tile, q_len: int) -> None:
    """Attention over units, of sequences with 1 to q_len new tokens. Others are passed over; without offsets there are none."""
    if call.empty:
        return
    config, block_n, m = CONFIG, tile.block_n, tile.m
    batch, kv_heads = call.batch, call.kv_heads
    tiles = -(-q_len * call.group // m)
    columns = kv_heads * tiles
    shown = call.shown(tile, q_len)
    compute_units = current_compute_units()
    few = batch * columns <= 2 * compute_units
    # 16 sequences of 8192: 34.4, with 2: 34.7, of which merging is 0.1. Widening fp8 is work for more waves: 17.9, with 1: 28.6
    waves = (3 if call.fp8 else 1) if few else config.waves // 2
    at_once = divided = 0
    if shown > config.whole:
        at_once = max(1, 2 * compute_units // columns)
        divided = min(at_once * waves, batch * -(-shown // config.least))
    units = batch + divided if divided > 1 else batch
    split = units > batch
    stages = (config.stages if split or tile.num_warps > 1 else 2 * config.stages) if few else 1
    if call.fp8 and tile.num_warps == 1:
        stages = max(1, stages // 2)  # window of 128: 3.2, with 4 stages 4.7; a sequence of 1024: 3.2, with 2: 3.8
    heads, v_head_dim = call.q.shape[1], call.v_cache.shape[3]
    parts = units * q_len * heads if split else 0
    part = call.q.new_empty((parts, v_head_dim), dtype=torch.float32)
    part_sum = call.q.new_empty(parts, dtype=torch.float32)
    plan = call.q.new_empty(batch if split else 0, dtype=torch.int64)  # per sequence: its first unit, and how many it has
    constants = call.constants()
    device.decode_kernel[(kv_heads, units, tiles)](
        *call.operands(), part, part_sum, plan,
        q_len=q_len, M=m, BLOCK_N=block_n, DIVIDED=split, STAGES=stages, AT_ONCE=at_once, WAVES=waves,
        LONG=config.long // block_n, SHORT=max(1, config.least // block_n), LENGTHS=call.lengths_at_once(),
        num_warps=tile.num_warps, **constants,
    )  # fmt: skip
    if split:
        # A sequence has about as many units, if all are about as long.
        merged = min(config.merged, max(4, 1 << (divided // batch - 1).bit_length()))
        device.merge_kernel[(heads, q_len, batch)](
            call.cu_seqlens_q, plan, part_sum, part, call.sinks, call.out, call.lse,
            heads=heads, q_len=q_len, MERGED=merged, num_warps=1, waves_per_eu=4,  # 128 registers hold all loads of a step
            **{name: constants[name] for name in ("out_token", "out_head", "V_HEAD_DIM", "SINKS", "LSE")},
        )  # fmt: skip
