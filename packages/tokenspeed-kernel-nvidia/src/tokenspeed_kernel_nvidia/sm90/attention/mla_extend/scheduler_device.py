"""The tile scheduler of `mla_extend`: forms work items from the sequences' numbers of new and of cached tokens.

A work item is the new tokens of a sequence that a cluster computes together. An item's index is ``sequence * items + tile``, where
``items`` is an upper bound of a sequence's items. Indices beyond a sequence's last item are skipped.

The search for a CTA's range has two steps. `split_kv_device.divide` finds the sequence in which the range begins. For this search,
a sequence counts as all its items' blocks and starting costs, which `positions_of` computes in closed form. A second search finds
the item in that sequence.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from tokenspeed_kernel_nvidia.cutedsl import split_kv_device as split_kv
from tokenspeed_kernel_nvidia.cutedsl.registers_device import ballot, load_int
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.config import LEAST_BLOCKS, ROWS, STARTING_BLOCKS
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.tile_device import Call
from tokenspeed_kernel_nvidia.sm90.attention.mla_extend.config import Config


@dataclass(frozen=True)
class ExtendWork:
    """Forms work items for calls in which sequences have different numbers of new tokens: the counterpart of `mla_decode`'s
    `DecodeWork`.

    In these methods, a call's ``q_len`` is an upper bound of a sequence's new tokens, and ``batch`` the number of sequences.
    Methods without a docstring return what the methods of `DecodeWork` return.
    """

    config: Config

    @cute.jit
    def queries_of(self, call: Any, sequence: Int32):
        """Returns the row in q of a sequence's first new token, and the sequence's number of new tokens."""
        at = call.cu_seqlens_q + Int64(sequence) * 4
        begin = load_int(at, False)
        return begin, cutlass.max(cutlass.min(load_int(at + 4, False) - begin, call.q_len), 0)

    @cute.jit
    def tokens_of(self, call: Any, item: Int32):
        sequence = item // call.items
        first = (item - sequence * call.items) * self.config.tokens_of_item
        _, count = self.queries_of(call, sequence)
        return sequence, first, cutlass.min(count - first, self.config.tokens_of_item)

    @cute.jit
    def tile_of(self, call: Any, item: Int32):
        sequence, first, tokens = self.tokens_of(call, item)
        begin, _ = self.queries_of(call, sequence)
        own = self.tokens_before(call)
        head = call.rank * ROWS if self.config.heads > ROWS else Int32(0)
        return begin + first + own, head, cutlass.max(cutlass.min(tokens - own, self.config.tokens_of_tile), 0)

    def tokens_before(self, call: Any) -> Int32:
        """Returns the index of this CTA's first token among the tokens of a work item."""
        return call.rank * self.config.tokens_of_tile if self.config.heads <= ROWS else Int32(0)

    @cute.jit
    def next_item(self, call: Call, item: Int32) -> Int32:
        sequence, after = item // call.items, item + 1
        _, count = self.queries_of(call, sequence)
        if (after - sequence * call.items) * self.config.tokens_of_item >= count:
            sequence += 1
            is_empty = Boolean(True)
            while is_empty and sequence < call.batch:
                _, count = self.queries_of(call, sequence)
                is_empty = count == 0
                if is_empty:
                    sequence += 1
            after = sequence * call.items
        return after

    def most_items(self, call: Call) -> Int32:
        """Returns a number above the number of CTA groups, so that there is a record per CTA group. The host does not know the
        number of items."""
        return call.groups + 1

    @cute.jit
    def length_of(self, call: Call, item: Int32):
        sequence = cutlass.min(item // call.items, call.batch - 1)
        first = (item - item // call.items * call.items) * self.config.tokens_of_item
        length, before, count = self.lengths_of(call, sequence)
        end = before + cutlass.min(first + self.config.tokens_of_item, count)
        return cutlass.select_(call.is_causal != 0, end, length)

    @cute.jit
    def lengths_of(self, call: Call, sequence: Int32):
        """Returns three token counts of a sequence: all cached tokens, the prefix before the new tokens, and the new tokens."""
        length = cutlass.min(load_int(call.cache_seqlens + Int64(sequence) * 4, False), call.max_seqlen_k)
        length = cutlass.max(length, 0)
        _, count = self.queries_of(call, sequence)
        return length, cutlass.max(length - count, 0), count

    # -- tile scheduler --------------------------------------------------------------------------------------------------------

    @cute.jit
    def tiles_per_group(self, call: Call, total: Int32, blocks: Int32):
        """Returns the number of queue positions per CTA group, and 0: `positions_of` already counts the cost of starting each work
        item."""
        return cutlass.max((total + call.groups - 1) // call.groups, LEAST_BLOCKS + STARTING_BLOCKS), Int32(0)

    @cute.jit
    def tiles_of(self, call: Call, step: Int32, at_once: cutlass.Constexpr[int], lengths: cute.Tensor, counts: cute.Tensor):
        """Loads the lengths of this lane's sequences of round ``step`` into ``lengths``, and computes into ``counts`` how many
        queue positions each sequence occupies. A round has ``at_once`` sequences per lane. Returns the sum of ``counts``."""
        some = Int32(0)
        for each in cutlass.range_constexpr(at_once):
            sequence = (step * 32 + cute.arch.lane_idx()) * at_once + each
            length, before, count = self.lengths_of(call, cutlass.min(sequence, call.batch - 1))
            tiles = (count + (self.config.tokens_of_item - 1)) // self.config.tokens_of_item
            positions = self.positions_of(call, length, before, count, tiles)
            lengths[each] = length
            counts[each] = cutlass.select_(sequence < call.batch, positions, Int32(0))
            some += counts[each]
        return some

    @cute.jit
    def positions_of(self, call: Call, length: Int32, before: Int32, count: Int32, items: Int32):
        """Returns how many queue positions a sequence's first ``items`` work items occupy: their blocks, and `STARTING_BLOCKS` per
        item. Without a causal mask, all items have the same number of blocks.

        Let T be `Config.tokens_of_item`, and ``start`` be ``(before + 63 + T) // T``. With causal attention, the last token of item
        i sees ``before + (i + 1) * T`` tokens if the item has T tokens. So the item has ``(before + 63 + (i + 1) * T) // 64``
        blocks. Because T divides 64, this equals ``(start + i) // (64 / T)``.

        Args:
            length, before, count: the sequence's numbers of cached tokens, of tokens before the new tokens, and of new tokens.
        """
        tokens = self.config.tokens_of_item
        all_items = (count + (tokens - 1)) // tokens
        whole = cutlass.min(items, all_items - 1)
        start = (before + (ROWS - 1 + tokens)) // tokens
        blocks = self.sum_of_quotients(start + whole) - self.sum_of_quotients(start)
        blocks += cutlass.select_(items == all_items, (before + count + (ROWS - 1)) // ROWS, Int32(0))
        alike = items * cutlass.max((length + (ROWS - 1)) // ROWS, 1)
        positions = cutlass.select_(call.is_causal != 0, blocks, alike) + items * STARTING_BLOCKS
        return cutlass.select_(items > 0, positions, Int32(0))

    @cute.jit
    def sum_of_quotients(self, end: Int32):
        """Returns the sum of ``n // (64 / T)`` for all n from 0 to ``end - 1``, where T is `Config.tokens_of_item`."""
        each = ROWS // self.config.tokens_of_item
        parts = end // each
        return parts * (parts - 1) // 2 * each + (end - parts * each) * parts

    @cute.jit
    def divide(self, call: Call, at_once: cutlass.Constexpr[int]):
        """Finds the range of this CTA's CTA group: `split_kv_device.divide` finds the range's first sequence, then a 32-way search
        finds the first work item in that sequence. Returns what `DecodeWork.divide` returns."""
        sequence, _, offset, left, per_group, _ = split_kv.divide(self, call, at_once)
        lane = cute.arch.lane_idx()
        length, before, count = self.lengths_of(call, sequence)
        first = Int32(0)
        width = (count + (self.config.tokens_of_item - 1)) // self.config.tokens_of_item
        while width > 1:
            step = (width + 31) // 32
            skipped = lane * step
            positions = self.positions_of(call, length, before, count, first + cutlass.min(skipped, width))
            # Lane i has tested the item i steps further. The range begins at or after the last item that passes the test.
            found = cute.arch.popc(ballot((skipped < width) & (positions <= offset))) - 1
            first += found * step
            width = cutlass.min(width - found * step, step)
        offset -= self.positions_of(call, length, before, count, first)
        item = sequence * call.items + first
        return item, self.length_of(call, item), offset, left, per_group, Int32(STARTING_BLOCKS)
