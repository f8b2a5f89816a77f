"""The tile scheduler of `kernel_device`: forms work items from sequence lengths, and finds each CTA's range of blocks.

`split_kv_device` divides the blocks of all work items evenly. The producer warp publishes the CTA's range, the *plan*, in shared
memory.
"""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, Int64, const_expr, cute

from tokenspeed_kernel_nvidia.cutedsl import split_kv_device as split_kv
from tokenspeed_kernel_nvidia.cutedsl.registers_device import load_int
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.config import LEAST_BLOCKS, ROWS, STARTING_BLOCKS, Config
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.tile_device import (
    BEGIN,
    END,
    FIRST,
    ITEM,
    PER_GROUP,
    PLANNED,
    PLANNERS,
    STARTING,
    Call,
)


def items_of(config: Config, q_len: Int32) -> Int32:
    """Returns the number of work items of a sequence with ``q_len`` new tokens."""
    return (q_len + (config.tokens_of_item - 1)) // config.tokens_of_item


def blocks_of(length: Int32) -> Int32:
    """Returns the number of blocks of a work item that sees ``length`` cached tokens, at least 1."""
    return cutlass.max((length + (ROWS - 1)) // ROWS, 1)


@cute.jit
def cached_length(work: DecodeWork, call: Call, item: Int32):
    """Returns how many cached tokens a work item's last new token sees. ``item`` is clamped to the last item."""
    sequence, first, tokens = work.tokens_of(call, cutlass.min(item, call.batch - 1))
    length = cutlass.min(load_int(call.cache_seqlens + Int64(sequence) * 4, False), call.max_seqlen_k)
    return cutlass.max(length - call.q_len + first + tokens, 0)


@dataclass(frozen=True)
class DecodeWork:
    """Forms work items for calls in which all sequences have the same number of new tokens.

    Attributes:
        length: the function that `length_of` calls, with this object, a call and a work item.
    """

    config: Config
    length: Callable[[DecodeWork, Call, Int32], Int32] = cached_length

    @cute.jit
    def tokens_of(self, call: Call, item: Int32):
        """Returns a work item's sequence, the index of the item's first new token in that sequence, and the item's number of
        tokens."""
        sequence = item // call.items
        first = (item - sequence * call.items) * self.config.tokens_of_tile
        return sequence, first, cutlass.min(call.q_len - first, self.config.tokens_of_tile)

    @cute.jit
    def tile_of(self, call: Call, item: Int32):
        """Returns the first token (its row in q), the first head and the number of tokens of this CTA's tile of a work item."""
        sequence, first, tokens = self.tokens_of(call, item)
        return sequence * call.q_len + first, call.rank * ROWS, tokens

    def next_item(self, call: Call, item: Int32) -> Int32:
        """Returns the work item that follows ``item`` in the queue."""
        return item + 1

    def most_items(self, call: Call) -> Int32:
        """Returns an upper bound of the number of work items."""
        return call.batch

    def length_of(self, call: Call, item: Int32) -> Int32:
        """Returns how many cached tokens a work item's last new token sees."""
        return self.length(self, call, item)

    def visible(self, call: Call, length: Int32):
        """Returns the first visible position of a sequence (0), the block of this position (0), and the number of visible
        blocks."""
        return Int32(0), Int32(0), blocks_of(length)

    def divide(self, call: Call, at_once: int):
        """Finds the range of blocks of this CTA's CTA group: see `split_kv_device.divide`."""
        return split_kv.divide(self, call, at_once)

    def tiles_of(self, call: Call, step: Int32, at_once: int, lengths: cute.Tensor, counts: cute.Tensor) -> Int32:
        return split_kv.tiles_of(self, call, step, at_once, lengths, counts)

    @cute.jit
    def tiles_per_group(self, call: Call, total: Int32, blocks: Int32):
        """Returns the number of queue positions per CTA group, and the cost of starting a work item in positions: see `STARTING`.

        If all items have the same number of blocks, a group's range is rounded up to a multiple or a fraction of an item, unless
        this makes the range more than 1/16 longer. Rounding avoids splits: each split of an item costs partial results, which are
        twice as large as the output, and their merge. Otherwise, the starting cost gives fewer blocks to groups with many items.
        """
        starting = cutlass.select_(total == blocks * call.batch, Int32(0), Int32(STARTING_BLOCKS))
        per_group = cutlass.max((total + starting * call.batch + call.groups - 1) // call.groups, LEAST_BLOCKS)
        if starting == 0:
            # A whole number of items per group; or, if items are longer than ranges, a whole number of ranges per item.
            even = (per_group + blocks - 1) // blocks * blocks
            if blocks > per_group:
                parts = blocks // per_group
                even = (blocks + parts - 1) // parts
            if even * 16 <= per_group * 17:
                per_group = even
        return per_group, starting


# -- the plan ------------------------------------------------------------------------------------------------------------------


@cute.jit
def publish_plan(work: Any, call: Call, tells: cutlass.Constexpr[bool]):
    """Finds this CTA's work items, and writes the plan to shared memory.

    Args:
        work: the object that forms work items: `DecodeWork`, or an object with the same methods.
        tells: whether this warp signals PLANNED to the consumer warpgroups. Only one warp may signal.

    Returns:
        The first work item, the queue position of that item's first block, the begin and end positions of this CTA's range, and the
        number of tokens that the item sees.
    """
    lane = cute.arch.lane_idx()
    item, length, offset, left, per_group, starting = [Int32(0)] * 6
    if call.batch <= 32:  # a variant with less code, because instruction fetch takes most of the time
        item, length, offset, left, per_group, starting = work.divide(call, 1)
    else:
        item, length, offset, left, per_group, starting = work.divide(
            call, 4
        )  # more lengths per lane would take too many registers
    begin = call.group * per_group
    first = begin - offset + starting
    end = begin + left
    # The range may begin in the empty positions before the item's first block.
    begin = cutlass.max(begin, first)
    if lane == 0:  # other loading warps would write the same values
        call.plan[ITEM] = item
        call.plan[FIRST] = first
        call.plan[BEGIN] = begin
        call.plan[END] = end
        call.plan[PER_GROUP] = per_group
        call.plan[STARTING] = starting
    cute.arch.sync_warp()
    if const_expr(tells):
        cute.arch.barrier_arrive(barrier_id=PLANNED, number_of_threads=PLANNERS)
    return item, first, begin, end, length


def await_plan(call: Call):
    """Waits, as a consumer warp, until the plan has been written. Returns the first work item, the queue position of that item's
    first block, and the first position of this CTA's range."""
    cute.arch.barrier(barrier_id=PLANNED, number_of_threads=PLANNERS)
    return call.plan[ITEM], call.plan[FIRST], call.plan[BEGIN]
