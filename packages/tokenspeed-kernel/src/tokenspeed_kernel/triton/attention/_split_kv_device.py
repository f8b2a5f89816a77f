"""Device code of `_split_kv`: which blocks of keys a work item has, and the merge of the work items' partial results.

`find_work_item` needs no stored schedule: every program scans the lengths of all sequences, ``WALK.at_once`` at a time, to find its
own work item. This saves the launch that would write a schedule. MLA has such a launch, see `_mla_schedule`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tokenspeed_kernel.triton.attention._online_softmax_device import LN_2, LOG2_E, finite_or_zero
from tokenspeed_kernel.triton.views_device import Rows, row_of


class Lengths(NamedTuple):
    """The number of keys of each sequence.

    Fields:
        cache_seqlens: int32 [batch].
        cu_seqlens_q: None if every sequence has ``Walk.q_len`` new tokens; else int32 [batch + 1]. A sequence with more new tokens
            than ``Walk.q_len``, or with none, is skipped: it counts as a sequence without keys.
        batch: number of sequences.
        capacity: number of keys for which the page table has entries. Lengths are clamped to this number.
        window_left: with a window, the number of keys before its own position that a query sees.
    """

    cache_seqlens: Any
    cu_seqlens_q: Any
    batch: Any
    capacity: Any
    window_left: Any


class SizeLimits(NamedTuple):
    """The limits of a work item's number of key blocks, from `SplitPlan`. ``least``: fewest key blocks. ``long``: enough key blocks
    to amortise the overhead. ``wave``, ``waves_work_items``: numbers of work items of a batch with little and with much work."""

    least: Any
    wave: Any
    waves_work_items: Any
    long: Any


@triton.jit
def first_block(length, window_left, WALK: tl.constexpr):
    """Returns the index of the key block that contains the first key that the oldest query of a sequence of ``length`` tokens
    sees."""
    if WALK.windowed:
        first = tl.maximum(length - WALK.q_len - window_left, 0) // WALK.block_n
    else:
        first = length * 0
    return first


@triton.jit
def blocks_of(length, window_left, WALK: tl.constexpr):
    """Returns the number of key blocks that some query of a sequence of ``length`` tokens sees."""
    return (length + WALK.block_n - 1) // WALK.block_n - first_block(length, window_left, WALK)


@triton.jit
def lengths_from(cache_seqlens, start, batch, capacity, AT_ONCE: tl.constexpr):
    """Loads the lengths of AT_ONCE sequences from ``start`` on. Also returns which of these sequences exist."""
    at = start + tl.arange(0, AT_ONCE)
    lengths = tl.load(cache_seqlens + at, mask=at < batch, other=0)
    return tl.minimum(tl.maximum(lengths, 0), capacity), at < batch


@triton.jit
def _eligible_lengths(lengths, start, end, WALK: tl.constexpr):
    """Like `lengths_from`, but takes a `Lengths`, ends at sequence ``end``, and returns length 0 for skipped sequences."""
    keys, real = lengths_from(lengths.cache_seqlens, start, end, lengths.capacity, WALK.at_once)
    if lengths.cu_seqlens_q is not None:
        at = start + tl.arange(0, WALK.at_once)
        new = tl.load(lengths.cu_seqlens_q + at + 1, mask=real, other=0) - tl.load(lengths.cu_seqlens_q + at, mask=real, other=0)
        keys = tl.where((new > 0) & (new <= WALK.q_len), keys, 0)
    return keys, real


@triton.jit
def eligible_length(lengths, sequence, WALK: tl.constexpr):
    """Returns the number of keys of one sequence, or 0 for a skipped sequence (see `Lengths`)."""
    length = tl.minimum(tl.maximum(tl.load(lengths.cache_seqlens + sequence), 0), lengths.capacity)
    if lengths.cu_seqlens_q is not None:
        new = tl.load(lengths.cu_seqlens_q + sequence + 1) - tl.load(lengths.cu_seqlens_q + sequence)
        length = tl.where((new > 0) & (new <= WALK.q_len), length, 0)
    return length


@triton.jit
def blocks_per_work_item(lengths, size_limits, WALK: tl.constexpr):
    """Returns the maximum number of key blocks of a work item.

    A batch with little work becomes one wave of short work items. A batch with much work becomes at most about ``waves_work_items``
    work items.
    """
    total = 0
    for start in range(0, lengths.batch, WALK.at_once):
        keys, _ = _eligible_lengths(lengths, start, lengths.batch, WALK)
        total += tl.sum(blocks_of(keys, lengths.window_left, WALK))
    finest = (total + size_limits.waves_work_items - 1) // size_limits.waves_work_items
    return tl.maximum(
        tl.maximum(finest, tl.minimum((total + size_limits.wave - 1) // size_limits.wave, size_limits.long)), size_limits.least
    )


@triton.jit
def work_items_of(blocks, max_blocks):
    """Returns the number of work items of a sequence with ``blocks`` key blocks. A sequence without keys has one work item, whose
    programs write the output for an empty set of keys.
    """
    return tl.maximum((blocks + max_blocks - 1) // max_blocks, 1)


@triton.jit
def find_work_item(work_item, max_blocks, lengths, WALK: tl.constexpr):
    """Returns ``(sequence, first)``: the sequence that owns ``work_item``, and that sequence's first work item.

    The sequence is ``batch`` if ``work_item`` is beyond the last work item.
    """
    sequence = 0
    first = 0
    before = 0
    for start in range(0, lengths.batch, WALK.at_once):
        keys, real = _eligible_lengths(lengths, start, lengths.batch, WALK)
        work_items = tl.where(real, work_items_of(blocks_of(keys, lengths.window_left, WALK), max_blocks), 0)
        ends = before + tl.cumsum(work_items, 0)
        passed = (ends <= work_item) & real
        sequence += tl.sum(passed.to(tl.int32))
        first = tl.maximum(first, tl.max(tl.where(passed, ends, 0)))
        before += tl.sum(work_items)
    return sequence, first


@triton.jit
def work_items_before(sequence, max_blocks, lengths, WALK: tl.constexpr):
    """Returns the index of a sequence's first work item: the number of work items of all earlier sequences."""
    first = 0
    for start in range(0, sequence, WALK.at_once):
        keys, real = _eligible_lengths(lengths, start, sequence, WALK)
        work_items = work_items_of(blocks_of(keys, lengths.window_left, WALK), max_blocks)
        first += tl.sum(tl.where(real, work_items, 0))
    return first


@triton.jit(do_not_specialize=["batch", "capacity", "window_left", "least", "wave", "waves_work_items", "long"])
def merge_work_items_kernel(
    partial,  # float32 [work items, heads, rows, width]
    partial_lse,  # float32 [work items, heads, rows], base 2
    out,  # [batch * q_len, heads * group, width]
    lse,  # float32 [batch * q_len, heads * group] or None
    sinks,  # [heads * group] or None
    cache_seqlens,
    cu_seqlens_q,
    parts,  # int32 [batch, 2]: index of the first partial result and number of partial results; None if the lengths determine both
    batch, capacity, window_left,
    least, wave, waves_work_items, long,
    out_token_stride, out_head_stride, out_dim_stride,
    WALK: tl.constexpr,  # `Walk`
    MERGE: tl.constexpr,  # `Merge`
):  # fmt: skip
    """Merges the partial outputs of a sequence's work items, weighted by ``exp2`` of their LSEs, in a fixed order.

    The grid is [batch, programs per sequence]. The programs of a sequence divide its (KV head, tile of ROWS query rows) pairs among
    themselves. Sequences with one work item are left alone: their attention programs have written the final result.

    The attention sink of a head is a score without a value. It enters the row max and the row sum here, because partial results
    exclude it.
    """
    HEADS: tl.constexpr = MERGE.heads
    GROUP: tl.constexpr = MERGE.group
    WIDTH: tl.constexpr = MERGE.width
    PARTIALS: tl.constexpr = MERGE.work_items
    ROWS: tl.constexpr = MERGE.rows
    BLOCK_W: tl.constexpr = MERGE.block_w
    PACKED: tl.constexpr = MERGE.group * WALK.q_len  # rows of a head in a sequence
    lengths = Lengths(cache_seqlens, cu_seqlens_q, batch, capacity, window_left)
    out_rows = Rows(out, out_token_stride, out_head_stride, out_dim_stride)
    sequence = tl.program_id(0)
    if parts is None:
        max_blocks = blocks_per_work_item(lengths, SizeLimits(least, wave, waves_work_items, long), WALK)
        work_items = work_items_of(blocks_of(eligible_length(lengths, sequence, WALK), window_left, WALK), max_blocks)
        first = work_items_before(sequence, max_blocks, lengths, WALK)
    if MERGE.early:  # PDL: the attention kernel may still run before this wait. All programs wait, also those that return at once
        tl.extra.cuda.gdc_wait()
    if parts is not None:
        first = tl.load(parts + sequence * 2)
        work_items = tl.load(parts + sequence * 2 + 1)
    if work_items == 1:
        return
    token = sequence.to(tl.int64) * WALK.q_len
    queries = WALK.q_len
    if cu_seqlens_q is not None:
        token = tl.load(cu_seqlens_q + sequence).to(tl.int64)
        queries = (tl.load(cu_seqlens_q + sequence + 1) - token).to(tl.int32)
    column = tl.arange(0, BLOCK_W)
    TILES: tl.constexpr = (PACKED + ROWS - 1) // ROWS
    for item in range(tl.program_id(1), HEADS * TILES, tl.num_programs(1)):
        head = item // TILES
        row = item % TILES * ROWS + tl.arange(0, ROWS)
        real = row < GROUP * queries
        q_head = head * GROUP + row % GROUP
        row_max = tl.full([ROWS], -float("inf"), tl.float32)
        row_sum = tl.zeros([ROWS], tl.float32)
        if sinks is not None:
            row_max = tl.load(sinks + q_head, mask=real, other=0.0).to(tl.float32) * LOG2_E
            row_sum = tl.where(row_max == -float("inf"), 0.0, 1.0)
        merged = tl.zeros([ROWS, BLOCK_W], tl.float32)
        for start in range(0, work_items, PARTIALS):
            at = start + tl.arange(0, PARTIALS)
            where = ((first + at).to(tl.int64)[:, None] * HEADS + head) * PACKED + row[None, :]
            usable = (at < work_items)[:, None] & real[None, :]
            part_lse = tl.load(partial_lse + where, mask=usable, other=-float("inf"))
            part = tl.load(
                partial + where[:, :, None] * WIDTH + column[None, None, :],
                mask=usable[:, :, None] & (column < WIDTH)[None, None, :],
                other=0.0,
            )
            raised = tl.maximum(row_max, tl.max(part_lse, 0))
            shift = finite_or_zero(raised)
            weight = tl.exp2(part_lse - shift[None, :])
            decay = tl.exp2(row_max - shift)
            row_sum = row_sum * decay + tl.sum(weight, 0)
            merged = merged * decay[:, None] + tl.sum(part * weight[:, :, None], 0)
            row_max = raised
        merged = merged / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
        row_token = token + row // GROUP
        to = row_of(out_rows, row_token[:, None], q_head[:, None]) + column[None, :] * out_dim_stride
        tl.store(to, merged.to(out.dtype.element_ty), mask=real[:, None] & (column < WIDTH)[None, :])
        if lse is not None:
            log_sum_exp = (finite_or_zero(row_max) + tl.log2(row_sum)) * LN_2
            tl.store(lse + row_token * (HEADS * GROUP) + q_head, log_sum_exp, mask=real)
