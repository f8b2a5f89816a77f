"""Device code of `_mla_schedule`: writes the table of work items that `_mla_latent_device` reads.

The table is int32 [count, 4]: sequence (-1 for unused entries), first key block, end of the key blocks (exclusive), and the index
of the partial result (-1 if the sequence has one work item). Every program, one per sequence, computes the size of a work item by
itself, so no program waits for another.

The estimated cost of a size is the number of waves times the longest work item, plus the cost of the merge. ``CANDIDATES`` sizes
are compared at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.attention._split_kv_device import lengths_from, work_items_of

# Costs, in units of the time that one block of keys takes. _STARTING is the overhead of a work item, _MERGING the merge kernel, and
# _PARTIAL the writing and reading of one wave of partial results. Measured on an H200, where a block of 64 rows and 64 keys takes
# 2.7 us.
_STARTING = tl.constexpr(3)
_MERGING = tl.constexpr(2)
_PARTIAL = tl.constexpr(2)


@triton.jit
def _first_block(lengths, reach, BLOCK_N: tl.constexpr):
    """Returns the index of the key block that contains the first key that some query sees. ``reach``: with a window, how many of
    the sequence's last keys some query sees; else -1."""
    return tl.where(reach < 0, 0, tl.maximum(lengths - reach, 0) // BLOCK_N)


@triton.jit
def _blocks_of(lengths, reach, BLOCK_N: tl.constexpr):
    """Returns the number of a sequence's key blocks that some query sees."""
    return (lengths + BLOCK_N - 1) // BLOCK_N - _first_block(lengths, reach, BLOCK_N)


@triton.jit(do_not_specialize=["batch", "capacity", "reach", "wave", "finest_work_items", "count"])
def schedule_kernel(
    cache_seqlens,
    work_items,
    parts,
    batch,
    capacity,
    reach,
    wave,
    finest_work_items,
    count,
    LEAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CANDIDATES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program b writes the work items of sequence b. The last program also fills the unused work items with -1."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    sequence = tl.program_id(0)
    total = 0
    most = 0
    for start in range(0, batch, AT_ONCE):
        lengths, _ = lengths_from(cache_seqlens, start, batch, capacity, AT_ONCE)
        blocks = _blocks_of(lengths, reach, BLOCK_N)
        total += tl.sum(blocks)
        most = tl.maximum(most, tl.max(blocks))
    finest = tl.maximum((total + finest_work_items - 1) // finest_work_items, LEAST)
    even = (total + wave - 1) // wave
    k = tl.arange(0, CANDIDATES)  # candidate sizes: 1/4 to 2 times an even split, and one without any split
    candidates = tl.where(k == CANDIDATES - 1, most, (even * (k + CANDIDATES // 8) * 2 + CANDIDATES - 1) // CANDIDATES)
    candidates = tl.maximum(candidates, finest)
    all_work_items = tl.zeros([CANDIDATES], tl.int32)
    longest = tl.zeros([CANDIDATES], tl.int32)
    partial = tl.zeros([CANDIDATES], tl.int32)
    for start in range(0, batch, AT_ONCE):
        lengths, real = lengths_from(cache_seqlens, start, batch, capacity, AT_ONCE)
        blocks = _blocks_of(lengths, reach, BLOCK_N)[:, None]
        each = work_items_of(blocks, candidates[None, :])
        all_work_items += tl.sum(tl.where(real[:, None], each, 0), 0)
        longest = tl.maximum(longest, tl.max((blocks + each - 1) // each, 0))
        partial += tl.sum(tl.where(real[:, None] & (each > 1), each, 0), 0)
    cost = (all_work_items + wave - 1) // wave * (longest + _STARTING)
    cost += tl.where(partial > 0, _MERGING + partial * _PARTIAL // wave, 0)
    max_blocks = tl.max(tl.where(cost == tl.min(cost), candidates, 0))

    first = 0
    part = 0
    used = 0
    for start in range(0, batch, AT_ONCE):
        lengths, real = lengths_from(cache_seqlens, start, batch, capacity, AT_ONCE)
        each = tl.where(real, work_items_of(_blocks_of(lengths, reach, BLOCK_N), max_blocks), 0)
        earlier = start + tl.arange(0, AT_ONCE) < sequence
        first += tl.sum(tl.where(earlier, each, 0))
        part += tl.sum(tl.where(earlier & (each > 1), each, 0))
        used += tl.sum(each)
    length = tl.minimum(tl.maximum(tl.load(cache_seqlens + sequence), 0), capacity)
    blocks = _blocks_of(length, reach, BLOCK_N)
    first_block = _first_block(length, reach, BLOCK_N)
    mine = work_items_of(blocks, max_blocks)
    tl.store(parts + sequence * 2, part)
    tl.store(parts + sequence * 2 + 1, mine)
    lane = tl.arange(0, AT_ONCE)
    for start in range(0, mine, AT_ONCE):  # work items of a sequence differ by at most one block
        at = start + lane
        begin = first_block + at * (blocks // mine) + tl.minimum(at, blocks % mine)
        end = begin + blocks // mine + (at < blocks % mine).to(tl.int32)
        to = work_items + (first + at) * 4
        tl.store(to, tl.zeros([AT_ONCE], tl.int32) + sequence, mask=at < mine)
        tl.store(to + 1, begin, mask=at < mine)
        tl.store(to + 2, end, mask=at < mine)
        tl.store(to + 3, tl.where(mine > 1, part + at, -1), mask=at < mine)
    if sequence == batch - 1:
        for start in range(used, count, AT_ONCE):
            tl.store(work_items + (start + lane) * 4, tl.full([AT_ONCE], -1, tl.int32), mask=start + lane < count)
