"""Split-KV for paged decode, planned on the device.

A work item is a range of key blocks of one sequence. For each KV head (or tile of query rows), one program processes the work
item. The number of work items of a sequence depends on the lengths of all sequences, which only the device knows. The grid
depends only on host values (`SplitPlan`), and programs beyond the last work item return at once. A captured CUDA graph therefore
stays correct and balanced when lengths change.

A work item has at most ``max_blocks`` blocks, the same limit for every sequence (`blocks_per_work_item`). The work items of one
sequence differ by at most one block. Each work item stores a normalised partial output and its LSE in float32. `merge_partials`
merges the partial outputs in a fixed order. A sequence with a single work item needs no merge: its programs write the final result.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import cdiv, launch_options, next_power_of_2, sequences_at_once
from tokenspeed_kernel_base.discovery import DeviceModule

device_code = DeviceModule(__name__ + "_device")

_LENGTHS_AT_ONCE = 1024
_MERGED_AT_ONCE = 2048  # elements of partial outputs: 16 per thread
_FEW = 4  # programs per SM/CU that together take as long as a single program
_MANY = 256  # programs per SM/CU that together take as long as a single program, if most of them return at once


class Walk(NamedTuple):
    """How keys are split into blocks; compile-time constants.

    Attributes:
        q_len: the largest number of new tokens of a sequence.
        windowed: whether queries see only a window of the keys.
        block_n: keys per block.
        at_once: how many sequences' lengths a program reads at a time.
    """

    q_len: int
    windowed: bool
    block_n: int
    at_once: int


class Merge(NamedTuple):
    """Compile-time constants of `merge_work_items_kernel`.

    Attributes:
        heads, group, width: numbers of KV heads, of query heads per KV head, and of columns of a value.
        work_items, rows, block_w: number of partial results that are merged at a time, query rows of a tile, and ``width`` padded
            to a power of two.
        early: whether the kernel is launched with PDL, before the partial results are complete.
    """

    heads: int
    group: int
    width: int
    work_items: int
    rows: int
    block_w: int
    early: bool


class SplitPlan(NamedTuple):
    """The host's part of the split-KV plan, which depends only on capacities. Lengths are in key blocks.

    Attributes:
        batch: number of sequences.
        work_items: upper bound of the number of work items of all sequences, which determines the grid.
        most: upper bound of the number of work items of one sequence; 1 if no sequence is ever split.
        least: fewest key blocks of a work item.
        wave: how many work items run concurrently. A batch with little work is split into this many work items.
        waves_work_items: how many work items a batch with much work is split into.
        long: how many blocks a work item needs to amortise its overhead. Work items are at most this long, unless
            ``waves_work_items`` of them would not cover the work.
        at_once: how many sequences' lengths a program reads at a time.
    """

    batch: int
    work_items: int
    most: int
    least: int
    wave: int
    waves_work_items: int
    long: int
    at_once: int

    def walk(self, q_len: int, window_left: int, block_n: int) -> Walk:
        """Returns the `Walk` of kernels that follow the plan, for sequences of at most ``q_len`` new tokens."""
        return Walk(q_len, window_left >= 0, block_n, self.at_once)

    def partials(self, heads: int, rows: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Allocates, uninitialised, partial outputs ``[work_items, heads, rows, width]`` and their LSEs ``[work_items, heads,
        rows]``."""
        work_items = self.work_items if self.most > 1 else 0
        return (
            torch.empty((work_items, heads, rows, width), dtype=torch.float32, device=device),
            torch.empty((work_items, heads, rows), dtype=torch.float32, device=device),
        )


def plan_work_items(
    batch: int, blocks: int, heads: int, at_once: int, waves: int, long: int, least: int = 1, whole: int = 1
) -> SplitPlan:
    """Plans the split of a batch's keys into work items.

    Args:
        blocks: the largest number of key blocks of a sequence.
        heads: programs per work item: KV heads times tiles of query rows.
        at_once: programs that the device runs concurrently.
        waves: waves of programs for a batch with much work.
        long, least: how many blocks a work item needs to amortise its overhead, and its fewest key blocks, see `SplitPlan`.
        whole: if no sequence can have more key blocks than this, no sequence is split.
    """
    wave = max(1, at_once // heads)
    waves_work_items = wave * waves
    most = 1 if blocks <= whole else max(1, min(cdiv(blocks, least), waves_work_items))
    work_items = batch if most == 1 else min(batch + waves_work_items, batch * most)
    lengths = sequences_at_once(batch if most > 1 else 1, _LENGTHS_AT_ONCE)  # without a split, programs read one length
    return SplitPlan(batch, work_items, most, least, wave, waves_work_items, long, lengths)


def merge_partials(
    plan: SplitPlan,
    walk: Walk,
    partial: Tensor,
    partial_lse: Tensor,
    out: Tensor,
    lse: Tensor | None,
    sinks: Tensor | None,
    cache_seqlens: Tensor,
    capacity: int,
    window_left: int,
    sm_count: int,
    early: bool = False,
    cu_seqlens_q: Tensor | None = None,
    parts: Tensor | None = None,
) -> None:
    """Merges the partial results of every split sequence, and adds the sinks.

    Args:
        walk: the `Walk` of the attention kernel; ``capacity`` and ``window_left`` are also the attention kernel's.
        partial, partial_lse: the tensors of `SplitPlan.partials`, filled. The LSE is in base 2 and without sinks. Row r of head h
            is token ``r // group`` and query head ``h * group + r % group`` of the sequence.
        capacity: upper bound of the sequences' numbers of keys.
        lse: the output for the merged LSE, contiguous, or None.
        cu_seqlens_q: cumulative numbers of queries; given if sequences may have fewer than ``walk.q_len`` queries. Without
            ``parts``, sequences with more queries are skipped.
        parts: int32 ``[batch, 2]``, given if another kernel has computed them: the index of a sequence's first partial result, and
            the number of its partial results (1: not split).
        early: whether to launch with PDL; the device waits for the kernel that writes the partial results.
    """
    _, heads, rows, width = partial.shape
    block_w = next_power_of_2(width)
    # With few sequences, a program merges all partial results of one query row at once. With more sequences a program merges all
    # rows of a head, and with many sequences several heads. If there are many sequences, few are split, and most programs only find
    # that their sequence is not split. ``parts`` makes that check cheaper.
    programs = (_FEW if parts is None else _MANY) * sm_count
    few = plan.batch * heads * rows < programs
    at_once = 1 if few else min(next_power_of_2(rows), max(1, _MERGED_AT_ONCE // (2 * block_w)))
    work_items = min(next_power_of_2(plan.most), max(2, (2 if few else 1) * _MERGED_AT_ONCE // (block_w * at_once)))
    items = heads * cdiv(rows, at_once)
    device_code.merge_work_items_kernel[(plan.batch, items if few else min(items, max(1, programs // plan.batch)))](
        partial,
        partial_lse,
        out,
        lse,
        sinks,
        cache_seqlens,
        cu_seqlens_q,
        parts,
        plan.batch,
        capacity,
        window_left,
        plan.least,
        plan.wave,
        plan.waves_work_items,
        plan.long,
        *out.stride(),
        WALK=walk,
        MERGE=Merge(heads, rows // walk.q_len, width, work_items, at_once, block_w, early),
        num_warps=4,
        **launch_options(early),
    )
