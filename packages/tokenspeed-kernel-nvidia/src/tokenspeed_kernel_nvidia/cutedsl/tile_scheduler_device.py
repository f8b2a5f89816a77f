"""Tile schedulers decide which work items a CTA of a persistent kernel computes, and in which order.

Each warp role of a kernel makes its own scheduler, and all roles agree without communication::

    index, step = own_indices()
    tiles = Raster(step, m, n, ...)
    while tiles.has(index):
        item = tiles.item(index)
        ...
        index = tiles.next(index)

``has`` says whether an index belongs to a work item of the launch. ``item`` returns the work item of an index, and ``next`` the
CTA's next index.

* A static scheduler gives each of n CTAs every n-th index.
* With `Queue`, the next index comes from a counter in global memory. ``prefetch`` issues the atomic while the CTA computes its
  current item; ``next`` returns the atomic's result.
* `LongestFirst` searches for the item of an index. A CTA's indices only grow. So a search continues from the state of the CTA's
  previous search, which ``seek`` advances.

`split_kv_device` splits the keys of a batch evenly, for decode kernels.

All containers are frozen dataclasses. CuteDSL makes a frozen dataclass a loop-carried value only if the loop assigns it.
"""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute

from tokenspeed_kernel_nvidia.cutedsl.registers_device import ballot, warp_prefix_sum


def own_indices(ctas: int = 1):
    """Returns this CTA's first index, and the step to its next index, for persistent CTAs that take work items round-robin.

    Args:
        ctas: the size of a cluster; its CTAs take the same items.
    """
    first, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    return (first, step) if ctas == 1 else (first // ctas, step // ctas)


@dataclass(frozen=True)
class RoundRobin:
    """A static scheduler of ``count`` work items in the kernel's own order. ``item`` returns the index itself."""

    step: Int32
    count: Int32

    def has(self, index: Int32) -> Boolean:
        return index < self.count

    def item(self, index: Int32) -> Int32:
        return index

    def next(self, index: Int32) -> Int32:
        return index + self.step


@dataclass(frozen=True)
class Raster:
    """A static scheduler of the tiles of a GEMM's result. The result is divided into bands of ``band`` rows of tiles. Within a
    band, tiles are ordered column by column, so that concurrent tiles share operands in L2.

    Attributes:
        step: see `own_indices`.
        m, n: the result's rows and columns.
        rows, columns: rows and columns of a tile.
        band: number of rows of tiles in a band; the last band may have fewer.
    """

    step: Int32
    m: Int32
    n: Int32
    rows: int
    columns: int
    band: int

    @property
    def _down(self) -> Int32:
        return (self.m + (self.rows - 1)) // self.rows

    @property
    def _across(self) -> Int32:
        return (self.n + (self.columns - 1)) // self.columns

    def has(self, index: Int32) -> Boolean:
        return index < self._down * self._across

    def item(self, index: Int32):
        """Returns the row and the column of the index's tile, counted in tiles."""
        across = self._across
        before = index // (self.band * across)
        inside = index - before * (self.band * across)
        rows = cutlass.min(self._down - before * self.band, self.band)
        column = inside // rows
        return before * self.band + inside - column * rows, column

    def next(self, index: Int32) -> Int32:
        return index + self.step


# -- batches of sequences ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A work item of `Blocks`: a block of consecutive query positions of a sequence, for one KV head.

    Attributes:
        lane: the lane that holds the sequence in `Blocks`.
        kv_head: the KV head.
        position: the block's first position.
        token, first, length: values of the sequence, see `Blocks`.
    """

    lane: Int32
    kv_head: Int32
    position: Int32
    token: Int32
    first: Int32
    length: Int32


@dataclass(frozen=True)
class Blocks:
    """A static scheduler of the blocks of query positions of up to 32 sequences, one sequence per lane. Blocks are ordered by
    sequence; the KV heads of a block are adjacent.

    Attributes:
        step: see `own_indices`.
        token: row in q of the first query of the lane's sequence.
        first: position of that query in the sequence.
        length: number of keys of the lane's sequence.
        counts: number of blocks of the lane's sequence. The first block starts at the last multiple of 8 that is at most ``first``.
        ends: number of blocks of the lane's sequence and all earlier sequences of the batch.
        end: number of blocks of the last lane's sequence and all earlier sequences of the batch.
        size: positions per block.
        kv_heads: the number of KV heads.
    """

    step: Int32
    token: Int32
    first: Int32
    length: Int32
    counts: Int32
    ends: Int32
    end: Int32
    size: Int32
    kv_heads: Int32

    def has(self, index: Int32) -> Boolean:
        return index < self.end * self.kv_heads

    @cute.jit
    def item(self, index: Int32) -> Block:
        number, kv_head = index // self.kv_heads, index % self.kv_heads
        lane = cute.arch.popc(ballot(self.ends <= number))  # the first lane whose prefix sum exceeds number
        token, first, length = (cute.arch.shuffle_sync(x, lane) for x in (self.token, self.first, self.length))
        position = first // 8 * 8 + (number - cute.arch.shuffle_sync(self.ends - self.counts, lane)) * self.size
        return Block(lane, kv_head, position, token, first, length)

    def next(self, index: Int32) -> Int32:
        return index + self.step


# -- longest first, from a counter ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Queue:
    """A work queue: CTAs increment a counter in global memory to get their next work item's index. A CTA's first index is the CTA's
    number.

    Attributes:
        counter: int32 ``[2]``: the number of indices that CTAs took, and the number of CTAs that finished. Both are 0 before and
            after a launch.
        ctas: the number of CTAs.
    """

    counter: cute.Tensor
    ctas: Int32

    @cute.jit
    def prefetch(self, lane: Int32) -> Int32:
        """Takes the next index from the counter. The atomic is in flight until `next` uses its result."""
        ticket = Int32(0)
        if lane == 0:
            ticket = cute.arch.atomic_add(self.counter.iterator.llvm_ptr, Int32(1), sem="relaxed", scope="gpu")
        return ticket

    @cute.jit
    def next(self, ticket: Int32) -> Int32:
        return self.ctas + cute.arch.shuffle_sync(ticket, offset=0)

    @cute.jit
    def finish(self, lane: Int32) -> None:
        """Marks this CTA as finished. The last CTA to finish resets both counts for the next launch."""
        if lane == 0:
            done = cute.arch.atomic_add((self.counter.iterator + 1).llvm_ptr, Int32(1), sem="acq_rel", scope="gpu")
            if done == self.ctas - 1:
                self.counter[0] = Int32(0)
                self.counter[1] = Int32(0)


@dataclass(frozen=True)
class Search:
    """The state of a `LongestFirst` search, which is a position in the order of tiles: a level of a section, for some of the KV
    heads.

    Attributes:
        first_head: the first of the KV heads whose tiles are interleaved at this position.
        section: the first sequence of the section, which has one sequence per lane.
        start: first token of the lane's sequence.
        q_len, kv_len: numbers of queries (0 for lanes beyond the section) and of keys of the lane's sequence.
        members: number of sequences of the section.
        heads: number of KV heads of the section whose tiles are interleaved.
        tiles: number of query tiles of the lane's sequence.
        level: the current level, a tile's index in its sequence; -1 if the tiles of these KV heads are done.
        passed: number of tiles that precede this level in the order of the whole launch.
        head_count: ``heads``, or fewer if these are the section's last KV heads.
        at_level: number of tiles of this level, for these KV heads.
        found: whether the launch has a tile for the index that `seek` received.
    """

    first_head: Int32
    section: Int32
    start: Int32
    q_len: Int32
    kv_len: Int32
    members: Int32
    heads: Int32
    tiles: Int32
    level: Int32
    passed: Int32
    head_count: Int32
    at_level: Int32
    found: Boolean


@dataclass(frozen=True)
class Tile:
    """A tile of queries of a sequence, for one KV head.

    Attributes:
        sequence: index in the batch.
        start: the sequence's first token.
        q_len, kv_len: the sequence's numbers of queries and of keys.
        position: the tile's first query, counted from the sequence's first.
        kv_head: the KV head.
    """

    sequence: Int32
    start: Int32
    q_len: Int32
    kv_len: Int32
    position: Int32
    kv_head: Int32

    @property
    def record(self) -> tuple:
        """The values of this work item that the producer publishes to the consumer warps."""
        return self.start, self.q_len, self.kv_len, self.position, self.kv_head


@dataclass(frozen=True)
class LongestFirst:
    """Schedules query tiles longest first, for load balancing.

    Sequences are grouped into sections whose K/V fit in L2. Within a section, tiles are ordered by descending *level*, a tile's
    index in its sequence. With causal attention, a tile's number of keys grows with its level.

    Attributes:
        positions: queries per tile.
        budget: how many blocks of 16 keys of one KV head fit in L2. The prefix sum over sequences counts such blocks, because a sum
            of keys could overflow.
        lengths: a function of the call's sequences and an index in the batch. It returns the sequence's first token, number of
            queries and number of keys.
    """

    positions: int
    budget: int
    lengths: Callable[[Any, Int32], tuple]

    def begin(self) -> Search:
        """Returns the state before the first search."""
        none, one = Int32(0), Int32(1)
        return Search(none, none, none, none, none, none, one, none, Int32(-1), none, one, none, Boolean(True))

    def has(self, at: Search) -> Boolean:
        return at.found

    @cute.jit
    def read_section(self, first: Int32, batch: Int32, sequences: Any, kv_heads: Int32):
        """Forms the next section of consecutive sequences, one per lane. The section begins with sequence ``first``, and has at
        least one sequence.

        Returns:
            The first token, number of queries and number of keys of this lane's sequence (0 queries beyond the section); the number
            of sequences of the section; the number of KV heads whose tiles are interleaved.
        """
        lane = cute.arch.lane_idx()
        start, q_len, kv_len = Int32(0), Int32(0), Int32(0)
        at = first + lane
        if at < batch:
            start, q_len, kv_len = self.lengths(sequences, at)
        weight = (kv_len + 15) // 16
        weight = cutlass.min(weight, self.budget + 1)
        total = warp_prefix_sum(weight * kv_heads, lane)
        fits = (at < batch) & ((total <= self.budget) | (lane == 0))
        members = ballot(fits)
        if not fits:
            q_len = Int32(0)
        count = cute.arch.popc(members)
        heads = kv_heads
        if count == 1:
            of_first = cute.arch.shuffle_sync(weight, offset=0)
            heads = cutlass.min(cutlass.max(self.budget // cutlass.max(of_first, 1), 1), kv_heads)
        return start, q_len, kv_len, count, heads

    @cute.jit
    def seek(self, at: Search, index: Int32, sequences: Any, batch: Int32, kv_heads: Int32) -> Search:
        """Advances a search to the ``index``-th tile of the launch. ``at`` is the state of a search for an earlier tile."""
        section, members, heads, first_head = at.section, at.members, at.heads, at.first_head
        start, q_len, kv_len, tiles = at.start, at.q_len, at.kv_len, at.tiles
        level, passed, at_level, head_count = at.level, at.passed, at.at_level, at.head_count
        found = at.found
        searching = Boolean(True)
        while searching:
            if level < 0:
                # Continue with the next KV heads of the section, or with the next section.
                first_head += heads
                if first_head >= kv_heads or members == 0:
                    section += members
                    first_head = Int32(0)
                    if section < batch:
                        start, q_len, kv_len, members, heads = self.read_section(section, batch, sequences, kv_heads)
                        tiles = (q_len + (self.positions - 1)) // self.positions
                if section >= batch:
                    searching = Boolean(False)
                    found = Boolean(False)
                else:
                    level = cute.arch.warp_redux_sync(tiles, "max") - 1
                    head_count = cutlass.min(heads, kv_heads - first_head)
                    at_level = cute.arch.popc(ballot(tiles > level)) * head_count
            else:
                if index < passed + at_level:
                    searching = Boolean(False)
                else:
                    passed += at_level
                    level -= 1
                    at_level = cute.arch.popc(ballot(tiles > level)) * head_count
        return Search(first_head, section, start, q_len, kv_len, members, heads, tiles, level, passed, head_count, at_level, found)

    @cute.jit
    def item(self, at: Search, index: Int32, lane: Int32) -> Tile:
        """Returns the tile that `seek` found for ``index``."""
        rank = index - at.passed
        nth = rank // at.head_count
        kv_head = at.first_head + rank - nth * at.head_count
        # Find the sequence's lane: the `nth` of the lanes that have a tile at this level.
        reach = at.tiles > at.level
        mask = ballot(reach)
        before = cute.arch.popc(mask & ((1 << lane) - 1))
        owner = ballot(reach & (before == nth))
        source = cute.arch.popc((owner & -owner) - 1)
        start, q_len, kv_len = (cute.arch.shuffle_sync(x, offset=source) for x in (at.start, at.q_len, at.kv_len))
        return Tile(at.section + source, start, q_len, kv_len, at.level * self.positions, kv_head)
