"""The epilogue of `kernel_device`: it stores a work item's output, or a partial result where the item spans several groups.

`merge_device` merges partial results into the output.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, const_expr, cute

from tokenspeed_kernel_nvidia.cutedsl.registers_device import (
    EXPONENT,
    any_lane,
    bits_of,
    float_of,
    opt_barrier,
    pack,
    quad_max,
    scale_row,
    store_floats,
    store_if,
    store_words,
)
from tokenspeed_kernel_nvidia.cutedsl.softmax_device import LN2
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.config import LATENT, RECORD_BYTES, ROWS
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.tile_device import LATENT_CHUNK, PER_GROUP, READERS, VALUES, Call, Tiles

RECORD = RECORD_BYTES // 4  # int32 words of a work item's record
CHUNK = 8  # columns that are stored together in a float32 partial result
# Lower bound, as a biased float32 exponent, of the row amax that is scaled to float16's range. A row sum is scaled by the same
# factor and is below 2^32, so it stays below 2^127.
LEAST_OF_PARTIAL = 127 - 80


def largest_of(acc: list, r: int) -> Float32:
    """Returns the amax of a thread's row."""
    best = Float32(0.0)
    for own in acc:
        for each in range(cute.size(own) // 4):
            for c in range(2):
                best = cute.arch.fmax(best, cute.math.absf(own[4 * each + 2 * r + c]))
    return best


@dataclass(frozen=True)
class Split:
    """The groups among which a work item's blocks are split.

    Attributes:
        first_group: the group that has the item's first blocks.
        partials: number of groups, and of partial results.
    """

    first_group: Int32
    partials: Int32


class Storer(Tiles):
    """Mixin of the epilogue; the merge kernel uses parts of it."""

    # -- addresses -------------------------------------------------------------------------------------------------------------

    @cute.jit
    def partial_at(self, call: Any, first_group: Int32, nth: Int32):
        """Returns the addresses of a partial result: of its rows' max and sum, and of its values.

        A group writes at most two partial results: of an item that began in an earlier group, and of one that begins in it. Values
        are in the order of the accumulator fragments, so a warp accesses 512 contiguous bytes: see `values_offset`.
        """
        slot = (first_group + nth) * 2 + cutlass.select_(nth == 0, Int32(1), Int32(0))
        at = (slot * self.config.ranks + call.rank) * ROWS
        rows = call.groups * (2 * self.config.ranks * ROWS)
        row_bytes = self.config.row_bytes
        return call.partial + Int64(rows) * row_bytes + Int64(at) * self.config.sums_bytes, call.partial + Int64(at) * row_bytes

    def values_offset(self, warp: Int32, chunk: Int32) -> Int32:
        """Returns the byte offset of a warp's 16 rows x `Config.chunk` columns in a partial result. Each lane stores 16 bytes.

        A lane has the columns ``lane % 4 * 2`` and ``lane % 4 * 2 + 1``: two values of row ``lane // 4``, then two of row
        ``lane // 4 + 8``. With `Config.narrow`, those of the columns plus 8 follow.
        """
        return (warp * (LATENT // self.config.chunk) + chunk) * (32 * 16)

    def row_sums_offset(self, row: Int32, half: Int32) -> Int32:
        """Returns the byte offset of a row's max and sum in a partial result. ``half``: the value warpgroup that scaled them."""
        return row * self.config.sums_bytes + (half * 8 if self.config.narrow else 0)

    @cute.jit
    def record(self, call: Any, index: Int32) -> cute.Pointer:
        """Returns the address of a record: a work item, its first group, and the number of groups among which it is split.

        There is a record per work item. Where items outnumber groups, there is a record per group instead: of the last item that
        begins in the group, if later groups continue it.
        """
        rows = call.groups * (2 * self.config.ranks * ROWS)
        partial_bytes = self.config.row_bytes + self.config.sums_bytes
        address = call.partial + Int64(rows) * partial_bytes + Int64(index) * (RECORD * 4)
        return cute.make_ptr(Int32, address, cute.AddressSpace.gmem)

    @cute.jit
    def row_of(self, call: Any, item: Int32, row: Int32):
        """Returns the output address of a row of a work item, and whether the row exists."""
        first, first_head, tokens = self.tile_of(call, item)
        token = row // self.config.heads_of_tile
        head = first_head + row - token * self.config.heads_of_tile
        offset = Int64(first + token) * call.out.row + Int64(head) * call.out.column
        return call.out.address + offset * 2, token < tokens

    @cute.jit
    def factor_of(self, row_sum: Float32) -> Float32:
        """Returns the factor that normalises a row's values: 1 / row_sum, or 0."""
        return cutlass.select_(row_sum == 0.0, Float32(0.0), cute.arch.rcp_approx(row_sum))

    @cute.jit
    def write_lse(self, call: Any, item: Int32, row: Int32, row_max: Float32, row_sum: Float32):
        if call.lse != 0:
            to, value = self.lse_of(call, item, row, row_max, row_sum)
            store_floats("global", to, [value])

    @cute.jit
    def lse_of(self, call: Any, item: Int32, row: Int32, row_max: Float32, row_sum: Float32):
        """Returns the address of a row's LSE, and its value."""
        first, first_head, _ = self.tile_of(call, item)
        token = row // self.config.heads_of_tile
        head = first_head + row - token * self.config.heads_of_tile
        value = (row_max + cute.math.log2(row_sum)) * LN2
        offset = Int64(first + token) * self.config.heads + head
        return call.lse + offset * 4, cutlass.select_(row_sum == 0.0, -Float32.inf, value)

    # -- epilogue of a value warpgroup -----------------------------------------------------------------------------------------

    @cute.jit
    def thread_of_values(self) -> Int32:
        """Returns this thread's index in the two value warpgroups, recomputed at each use: see `opt_barrier`."""
        thread, _, _ = cute.arch.thread_idx()
        return opt_barrier(thread) - VALUES * 128

    def row_of_values(self, thread: Int32) -> Int32:
        """The first of a thread's two rows; the other is 8 rows below."""
        return ((thread >> 5) & 3) * 16 + ((thread & 31) >> 2)

    @cute.jit
    def split_of(self, call: Call, first: Int32, whole: Int32) -> Split:
        """Returns the groups among which a work item is split.

        Args:
            first: the queue position of its first block.
            whole: its number of blocks.
        """
        per_group = call.plan[PER_GROUP]
        first_group = first // per_group
        return Split(first_group, (first + whole - 1) // per_group - first_group + 1)

    @cute.jit
    def write_item(self, call: Call, acc: list, row_max: cute.Tensor, row_sum: cute.Tensor, item: Int32, half: Int32, split: Split):
        """Stores a warpgroup's columns of a work item: as output if the item is not split, else as a partial result."""
        if const_expr(self.config.narrow):  # first, so that its operands no longer occupy registers when values are scaled
            self.write_record_of(call, item, split)
        if split.partials > 1:
            if const_expr(self.config.narrow):
                self.write_narrow(call, acc, row_max, row_sum, item, half, split)
            else:
                self.write_partial(call, acc, row_max, row_sum, item, half, split)
        else:
            self.write_output(call, acc, row_max, row_sum, item, half)
        if const_expr(not self.config.narrow):
            self.write_record_of(call, item, split)

    @cute.jit
    def write_record_of(self, call: Call, item: Int32, split: Split):
        """Writes the record of a work item, where `record` has one for it."""
        of_item = self.most_items(call) <= call.groups
        index = cutlass.select_(of_item, item, self.group_of(call))
        begins = split.first_group == self.group_of(call)
        self.write_record(call, begins & (of_item | (split.partials > 1)), index, item, split.partials)

    def group_of(self, call: Call) -> Int32:
        return call.group

    @cute.jit
    def write_record(self, call: Call, condition: Boolean, index: Int32, item: Int32, partials: Int32):
        """Writes a record of a work item that begins in this group, if ``condition`` holds."""
        to = self.record(call, index).toint()
        store_if(condition & (self.thread_of_values() == 0), to, [item, self.group_of(call), partials, Int32(0)])

    @cute.jit
    def write_partial(
        self, call: Call, acc: list, row_max: cute.Tensor, row_sum: cute.Tensor, item: Int32, half: Int32, split: Split
    ):
        thread = self.thread_of_values()
        lane, warp = thread & 31, (thread >> 5) & 3
        sums_at, values_at = self.partial_at(call, split.first_group, call.group - split.first_group)
        _, _, tokens = self.tile_of(call, item)
        if warp * 16 < tokens * self.config.heads_of_tile:  # else the item has none of this warp's rows
            if half == 0 and lane & 3 == 0:
                for r in cutlass.range_constexpr(2):
                    store_floats("global", sums_at + (self.row_of_values(thread) + 8 * r) * 8, [row_max[r], row_sum[r]])
            values_at += self.values_offset(warp, half * (LATENT_CHUNK // CHUNK)) + lane * 16
            for own in cutlass.range_constexpr(len(acc)):
                for each in cutlass.range_constexpr(LATENT_CHUNK // CHUNK):
                    at = values_at + (own * READERS * (LATENT_CHUNK // CHUNK) + each) * (32 * 16)
                    store_floats("global", at, [acc[own][4 * each + i] for i in range(4)])

    @cute.jit
    def write_narrow(
        self, call: Call, acc: list, row_max: cute.Tensor, row_sum: cute.Tensor, item: Int32, half: Int32, split: Split
    ):
        """Stores a partial result in float16.

        A row's values and row sum are scaled by the same power of 2, and its row max is shifted accordingly, so the merge does not
        depend on the scale. The scale brings the row's amax to between 2^14 and 2^15, as far as the sum stays in float32's range.
        """
        _, _, tokens = self.tile_of(call, item)
        rows = tokens * self.config.heads_of_tile
        for r in cutlass.range_constexpr(2):
            exponent = cutlass.max(bits_of(quad_max(largest_of(acc, r))) >> 23, LEAST_OF_PARTIAL)
            factor = float_of((EXPONENT + 127 - exponent) << 23)
            for own in cutlass.range_constexpr(len(acc)):
                scale_row(acc[own], r, factor)
            thread = self.thread_of_values()  # recomputed, so that addresses take no registers before
            row = self.row_of_values(thread) + 8 * r
            to, _ = self.partial_at(call, split.first_group, call.group - split.first_group)
            to += self.row_sums_offset(row, half)
            store_if((row < rows) & (thread & 3 == 0), to, [row_max[r] + Float32(exponent - EXPONENT), row_sum[r] * factor])
        thread = self.thread_of_values()
        lane, warp = thread & 31, (thread >> 5) & 3
        if warp * 16 < rows:  # else the item has none of this warp's rows
            _, values_at = self.partial_at(call, split.first_group, call.group - split.first_group)
            values_at += self.values_offset(warp, half * (LATENT_CHUNK // 16)) + lane * 16
            for own in cutlass.range_constexpr(len(acc)):
                for each in cutlass.range_constexpr(LATENT_CHUNK // 16):
                    words = [pack(cutlass.Float16, acc[own][at], acc[own][at + 1]) for at in range(8 * each, 8 * each + 8, 2)]
                    store_words(values_at + (own * READERS * (LATENT_CHUNK // 16) + each) * (32 * 16), words)

    def exchange(self, words: list, thread: Int32) -> list:
        """Transposes four words of four lanes of a quad: lane i gets word i of every lane, in order of lanes."""
        for bit in (1, 2):
            is_high = (thread & bit) != 0
            found = [None] * 4
            for low in (each for each in range(4) if not each & bit):
                mine, others = words[low], words[low | bit]
                theirs = cute.arch.shuffle_sync_bfly(cutlass.select_(is_high, mine, others), bit)
                found[low] = cutlass.select_(is_high, theirs, mine)
                found[low | bit] = cutlass.select_(is_high, others, theirs)
            words = found
        return words

    @cute.jit
    def write_output(self, call: Call, acc: list, row_max: cute.Tensor, row_sum: cute.Tensor, item: Int32, half: Int32):
        for r in cutlass.range_constexpr(2):
            thread = self.thread_of_values()  # recomputed, so that addresses of both rows do not take registers at once
            row = self.row_of_values(thread) + 8 * r
            to, exists = self.row_of(call, item, row)
            to += (half * LATENT_CHUNK + (thread & 3) * 8) * 2
            factor = self.factor_of(row_sum[r])
            if any_lane(exists):  # warp-uniform, which the compiler does not know
                for own in cutlass.range_constexpr(len(acc)):
                    for four in cutlass.range_constexpr(LATENT_CHUNK // 32):
                        words = []
                        for each in cutlass.range_constexpr(4 * four, 4 * four + 4):
                            even, odd = acc[own][4 * each + 2 * r] * factor, acc[own][4 * each + 2 * r + 1] * factor
                            words.append(pack(self.dtype, even, odd))
                        store_words(to + (own * READERS * LATENT_CHUNK + four * 32) * 2, self.exchange(words, thread))
                if half == 0 and thread & 3 == 0:
                    self.write_lse(call, item, row, row_max[r], row_sum[r])
