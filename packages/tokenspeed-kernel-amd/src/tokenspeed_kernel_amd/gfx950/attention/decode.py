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
from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel_amd._machine import current_compute_units
from tokenspeed_kernel_amd.capability import GLUON_CDNA4
from tokenspeed_kernel_amd.gfx950.attention.call import PAGED_SIGNATURES, PAGED_TRAITS, Call, TileShape, called
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


class Partial(NamedTuple):
    """What units leave for the merging launch.

    Attributes:
        plan: int64 [batch], of each sequence its first unit (upper half) and how many it has.
        log_sums: float32 [units, q_len, heads], the log-sum-exp of the scores in units of log 2.
        results: float32 [units, q_len, heads, v_head_dim], the normalised output.
    """

    plan: Tensor
    log_sums: Tensor
    results: Tensor


class UnitPlan(NamedTuple):
    """How sequences are divided into units. Known to the compiler.

    Attributes:
        q_len: sequences with more new tokens, or with none, are passed over.
        window_left: the operator's.
        aligned: positions that units begin at are multiples of this.
        block_n: keys of a block.
        divided: whether sequences may have several units.
        at_once: units that the device runs at once.
        waves: as many rounds of them is much work divided into.
        long, short: blocks of a unit that is long enough, and of the shortest.
        lengths: lengths of sequences that a workgroup looks at together.
    """

    q_len: int
    window_left: int
    aligned: int
    block_n: int
    divided: bool
    at_once: int
    waves: int
    long: int
    short: int
    lengths: int


class Merge(NamedTuple):
    """How units are merged. Known to the compiler.

    Attributes:
        heads, v_head_dim, q_len: of `Partial`.
        out_token, out_head: strides of the output, in elements.
        sinks, lse: whether there are sinks, and whether the log-sum-exp is wanted.
        at_once: units that are looked at together.
    """

    heads: int
    v_head_dim: int
    q_len: int
    out_token: int
    out_head: int
    sinks: bool
    lse: bool
    at_once: int


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
    attend_in_units(call, tile_of_rows(call, max_seqlen_q * call.gqa_ratio), max_seqlen_q)
    return call.result


def tile_of_rows(call: Call, rows: int) -> TileShape:
    """The tile of one wave for so many rows of a key head; of more than it has, several are launched."""
    return TileShape(16 if rows <= 16 else 32, 64 if call.fp8 else 32, 1)


def attend_in_units(call: Call, tile: TileShape, q_len: int) -> None:
    """Attention over units, of sequences with 1 to q_len new tokens. Others are passed over; without offsets there are none.

    ``tile.stages`` is not looked at: units decide it.
    """
    if call.empty:
        return
    batch, kv_heads = call.batch, call.kv_heads
    tiles = -(-q_len * call.gqa_ratio // tile.m)
    columns = kv_heads * tiles
    in_view = call.keys_in_view(tile, q_len)
    compute_units = current_compute_units()
    few = batch * columns <= 2 * compute_units
    # 16 sequences of 8192: 34.4, with 2: 34.7, of which merging is 0.1. Widening fp8 is work for more waves: 17.9, with 1: 28.6
    waves = (3 if call.fp8 else 1) if few else CONFIG.waves // 2
    at_once = divided = 0
    if in_view > CONFIG.whole:
        at_once = max(1, 2 * compute_units // columns)
        divided = min(at_once * waves, batch * -(-in_view // CONFIG.least))
    units = batch + divided if divided > 1 else batch
    split = units > batch
    stages = (CONFIG.stages if split or tile.num_warps > 1 else 2 * CONFIG.stages) if few else 1
    if call.fp8 and tile.num_warps == 1:
        stages = max(1, stages // 2)  # window of 128: 3.2, with 4 stages 4.7; a sequence of 1024: 3.2, with 2: 3.8
    shape, strides, variant = call.constants()
    plan = UnitPlan(
        q_len=q_len,
        window_left=call.window_left,
        aligned=min(shape.page_size, tile.block_n),
        block_n=tile.block_n,
        divided=split,
        at_once=at_once,
        waves=waves,
        long=CONFIG.long // tile.block_n,
        short=max(1, CONFIG.least // tile.block_n),
        lengths=call.lengths_at_once(),
    )
    heads, parts = call.q.shape[1], units * q_len * call.q.shape[1] if split else 0
    partial = Partial(
        plan=call.q.new_empty(batch if split else 0, dtype=torch.int64),
        log_sums=call.q.new_empty(parts, dtype=torch.float32),
        results=call.q.new_empty((parts, shape.v_head_dim), dtype=torch.float32),
    )
    device.decode_kernel[(kv_heads, units, tiles)](
        call.operands(), partial, shape, strides, variant, tile._replace(stages=stages), plan, num_warps=tile.num_warps
    )
    if split:
        merge = Merge(
            heads=heads,
            v_head_dim=shape.v_head_dim,
            q_len=q_len,
            out_token=strides.out_token,
            out_head=strides.out_head,
            sinks=variant.sinks,
            lse=variant.lse,
            # A sequence has about as many units, if all are about as long.
            at_once=min(CONFIG.merged, max(4, 1 << (divided // batch - 1).bit_length())),
        )
        device.merge_kernel[(heads, q_len, batch)](
            call.cu_seqlens_q, partial, call.sinks, call.out, call.lse, merge,
            num_warps=1, waves_per_eu=4,  # 128 registers hold all loads of a step
        )  # fmt: skip
