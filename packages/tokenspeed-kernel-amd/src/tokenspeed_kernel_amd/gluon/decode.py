"""Split-KV: decode of sequences whose keys several workgroups divide, on every architecture.

The keys of a long sequence are divided into *splits* (split-KV), one per workgroup. The number of splits depends on sequence
lengths, which only the device reads. The grid is therefore an upper bound: every workgroup finds its own split, and surplus
workgroups exit at once. The splits of a sequence write partial results, which a second launch merges in a fixed order. The first
launch writes the final output of a sequence with one split. If the host can tell that no sequence is worth splitting, as in layers
with a short window, every sequence has one split. Then there is only one launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel_amd._machine import current_compute_units
from tokenspeed_kernel_amd.gluon.architecture import Architecture
from tokenspeed_kernel_amd.gluon.call import Call, TileShape, lengths_at_once
from tokenspeed_kernel_base.discovery import DeviceModule

device = DeviceModule(__name__ + "_device")


@dataclass(frozen=True)
class Config:
    """Tuning of split-KV. Figures are microseconds of the emulator's timing model, at 64 query heads, 8 KV heads and head_dim 64.

    Attributes:
        stages: pipeline stages per wave if the launch has few workgroups. Without splits, a wave has twice as many stages. With fp8
            caches, a wave has half as many, since a block then has 64 keys instead of 32. If there are many workgroups, a wave has
            1 stage.
        per_unit: a small batch is divided into this many splits per CU. With brief splits, ``brief_per_unit``; with fp8 caches,
            ``fp8_per_unit``.
        brief: with ``per_unit`` splits per CU, splits of at most this many keys are brief, and latency limits the launch.
        waves: a large batch is divided into this many splits per CU.
        long: target length of a split, in keys. Splits are shorter only if longer ones would be fewer than ``per_unit`` per CU.
        least: minimum length of a split, in keys.
        whole: a number of keys. If no sequence has more visible keys, no sequence is split.
        merged: maximum number of splits that the merge kernel loads at once.
    """

    # One sequence of 1024 keys takes 2.70 us; 3.01 us with stages = 1, 3.16 us with 4. In a window of 128, where a wave has 4
    # stages, it takes 2.61 us; 2.76 us with 2 stages, 3.98 us with 8.
    stages: int = 2
    per_unit: int = 2  # 16 sequences of 8192: 34.5 us; 34.6 us with 3, which writes more partial results
    brief_per_unit: int = 3  # 16 sequences of 1024: 5.3 us; 5.5 us with 2
    # 16 sequences of 1024, 2048 and 8192: 4.8, 6.1 and 17.9 us; 6.0, 8.6 and 17.9 us with 2. The conversion of values to 16 bits
    # needs all SIMDs.
    fp8_per_unit: int = 4
    brief: int = 256
    waves: int = 8
    long: int = 1024  # 128 sequences of 1024 keys: 34.2 us; 36.3 us with 512
    least: int = 64
    whole: int = 256
    # The merge kernel for a sequence of 32768 keys takes 1.5 us; 2.3 us with 16; 1.2 us with 64, but v_head_dim 128 would spill
    # registers.
    merged: int = 32


CONFIG = Config()


class Partial(NamedTuple):
    """The splits' partial results for the merge kernel.

    Attributes:
        plan: int64 [batch]; for each sequence, the index of its first split (upper 32 bits) and its number of splits (lower 32).
        log_sums: float32 [splits, q_len, heads], the base-2 LSE of the scores within a split.
        results: float32 [splits, q_len, heads, v_head_dim], the output of a split, normalised by the split's own row sum.
    """

    plan: Tensor
    log_sums: Tensor
    results: Tensor


class SplitPlan(NamedTuple):
    """The division of sequences into splits: compile-time constants.

    Attributes:
        q_len: the most new tokens of a sequence. Sequences with more new tokens, or with none, are skipped.
        window_left: the operator's argument: visible tokens before the query's own; negative without a window.
        aligned: splits begin at positions that are multiples of this number of tokens.
        block_n: keys per block.
        split_kv: whether sequences may have several splits.
        at_once: number of splits that give every CU `Config.per_unit` workgroups.
        waves: a large batch is divided into ``waves * at_once`` splits.
        long, short: target and minimum length of a split, in blocks.
        lengths: how many sequences' lengths a workgroup loads at once.
        once: whether the batch has at most ``lengths`` sequences, so that one load reads all lengths.
        merge_cost: time to merge a partial result, as a fraction of the time of a block of keys. A sequence of n blocks finishes
            earliest with splits of ``sqrt(n * merge_cost)`` blocks; no split is shorter. 0: there is no such limit.
        skipped_splits: the number of splits of a sequence that the launch does not compute.
    """

    q_len: int
    window_left: int
    aligned: int
    block_n: int
    split_kv: bool
    at_once: int
    waves: int
    long: int
    short: int
    lengths: int
    once: bool = False
    merge_cost: float = 0.0
    skipped_splits: int = 0


class Merge(NamedTuple):
    """The merge of splits: compile-time constants.

    Attributes:
        heads, v_head_dim, q_len: sizes of the tensors of `Partial`.
        out_token, out_head: the output's strides between tokens and between heads, in elements.
        sinks, lse: whether there are sinks, and whether the LSE is requested.
        at_once: number of splits whose partial results are loaded at once.
    """

    heads: int
    v_head_dim: int
    q_len: int
    out_token: int
    out_head: int
    sinks: bool
    lse: bool
    at_once: int


def attend_split_kv(call: Call, tile: TileShape, q_len: int, architecture: Architecture) -> None:
    """Launches split-KV attention on an architecture, for sequences with 1 to q_len new tokens.

    Other sequences are skipped. If ``call.cu_seqlens_q`` is None, there are no other sequences. ``tile.stages`` is ignored and
    chosen here.
    """
    if call.empty:
        return
    batch, kv_heads = call.batch, call.kv_heads
    tiles = -(-q_len * call.gqa_ratio // tile.m)
    columns = kv_heads * tiles
    in_view = call.keys_in_view(tile, q_len)
    compute_units = current_compute_units()
    few = batch * columns <= 2 * compute_units
    per_unit = CONFIG.per_unit
    if call.fp8 or batch * in_view * columns <= CONFIG.brief * per_unit * compute_units:
        per_unit = CONFIG.fp8_per_unit if call.fp8 else CONFIG.brief_per_unit
    waves = (2 if call.fp8 else 1) if few else CONFIG.waves // per_unit
    at_once = extra_splits = 0
    if in_view > CONFIG.whole:
        at_once = max(1, per_unit * compute_units // columns)
        extra_splits = min(at_once * waves, batch * -(-in_view // CONFIG.least))
    splits = batch + extra_splits if extra_splits > 1 else batch
    has_splits = splits > batch
    stages = (CONFIG.stages if has_splits or tile.num_warps > 1 else 2 * CONFIG.stages) if few else 1
    if call.fp8 and tile.num_warps == 1:
        # Window of 128: 3.2 us, and 4.7 us with 4 stages. A sequence of 1024 keys: 3.2 us, and 3.8 us with 2 stages.
        stages = max(1, stages // 2)
    shape, strides, variant = call.constants()
    plan = SplitPlan(
        q_len=q_len,
        window_left=call.window_left,
        aligned=min(shape.page_size, tile.block_n),
        block_n=tile.block_n,
        split_kv=has_splits,
        at_once=at_once,
        waves=waves,
        long=CONFIG.long // tile.block_n,
        short=max(1, CONFIG.least // tile.block_n),
        lengths=lengths_at_once(batch),
    )
    heads = call.q.shape[1]
    parts = splits * q_len * heads if has_splits else 0
    partial = Partial(
        plan=call.q.new_empty(batch if has_splits else 0, dtype=torch.int64),
        log_sums=call.q.new_empty(parts, dtype=torch.float32),
        results=call.q.new_empty((parts, shape.v_head_dim), dtype=torch.float32),
    )
    device.decode_kernel[(kv_heads * splits * tiles,)](
        call.operands(), partial, shape, strides, variant, tile._replace(stages=stages), plan, architecture.paged.attend,
        num_warps=tile.num_warps,
    )  # fmt: skip
    if has_splits:
        merge = Merge(
            heads=heads,
            v_head_dim=shape.v_head_dim,
            q_len=q_len,
            out_token=strides.out_token,
            out_head=strides.out_head,
            sinks=variant.sinks,
            lse=variant.lse,
            # About the number of splits of each sequence if all sequences are about equally long.
            at_once=min(CONFIG.merged, max(4, 1 << (extra_splits // batch - 1).bit_length())),
        )
        device.merge_kernel[(heads * q_len * batch,)](
            call.cu_seqlens_q, partial, call.sinks, call.out, call.lse, merge,
            num_warps=1, waves_per_eu=4,  # 128 registers per lane hold all loads of one iteration
        )  # fmt: skip
