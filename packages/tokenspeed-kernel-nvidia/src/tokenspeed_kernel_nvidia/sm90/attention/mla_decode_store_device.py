"""The epilogue of `mla_decode_device`: it stores a work item's output, or a partial result where the item spans several groups.

`mla_decode_merge_device` merges partial results into the output.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, const_expr, cute

from tokenspeed_kernel_nvidia.sm90.attention.mla_decode_config import LATENT, RECORD_BYTES, ROWS
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode_tile_device import PIECE, READERS, SHARE, VALUES, Call, Tiles
from tokenspeed_kernel_nvidia.sm90.common.registers_device import (
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
from tokenspeed_kernel_nvidia.sm90.common.softmax_device import LN2

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
class Share:
    """The groups among which a work item's blocks are split.

    Attributes:
        first_group: the group that has the item's first blocks.
        pieces: number of groups, and of partial results.
    """

    first_group: Int32
    pieces: Int32


class Storer(Tiles):
    """Mixin of the epilogue; the merge kernel uses parts of it."""

    # -- addresses -------------------------------------------------------------------------------------------------------------

    @cute.jit
    def piece(self, call: Any, first_group: Int32, piece: Int32):
        """Returns the addresses of a partial result: of its rows' max and sum, and of its values.

        A group writes at most two partial results: of an item that began in an earlier group, and of one that begins in it. Values
        are in the order of the accumulator fragments, so a warp accesses 512 contiguous bytes: see `place_of_values`.
        """
        slot = (first_group + piece) * 2 + cutlass.select_(piece == 0, Int32(1), Int32(0))
        at = (slot * self.config.ranks + call.rank) * ROWS
        rows = call.groups * (2 * self.config.ranks * ROWS)
        row_bytes = self.config.row_bytes
        return call.partial + Int64(rows) * row_bytes + Int64(at) * self.config.sums_bytes, call.partial + Int64(at) * row_bytes

    def place_of_values(self, warp: Int32, chunk: Int32) -> Int32:
        """Returns the byte offset of a warp's 16 rows x `Config.chunk` columns in a partial result. Each lane stores 16 bytes.

        A lane has the columns ``lane % 4 * 2`` and ``lane % 4 * 2 + 1``: two values of row ``lane // 4``, then two of row
        ``lane // 4 + 8``. With `Config.narrow`, those of the columns plus 8 follow.
        """
        return (warp * (LATENT // self.config.chunk) + chunk) * (32 * 16)

    def place_of_row_sums(self, row: Int32, half: Int32) -> Int32:
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
        place = call.partial + Int64(rows) * partial_bytes + Int64(index) * (RECORD * 4)
        return cute.make_ptr(Int32, place, cute.AddressSpace.gmem)

    @cute.jit
    def row_of(self, call: Any, unit: Int32, row: Int32):
        """Returns the output address of a row of a work item, and whether the row exists."""
        first, first_head, tokens = self.tile_of(call, unit)
        token = row // self.config.heads_of_tile
        head = first_head + row - token * self.config.heads_of_tile
        place = Int64(first + token) * call.out.row + Int64(head) * call.out.column
        return call.out.address + place * 2, token < tokens

    @cute.jit
    def factor_of(self, row_sum: Float32) -> Float32:
        """Returns the factor that normalises a row's values: 1 / row_sum, or 0."""
        return cutlass.select_(row_sum == 0.0, Float32(0.0), cute.arch.rcp_approx(row_sum))

    @cute.jit
    def write_lse(self, call: Any, unit: Int32, row: Int32, row_max: Float32, row_sum: Float32):
        if call.lse != 0:
            to, value = self.lse_of(call, unit, row, row_max, row_sum)
            store_floats("global", to, [value])

    @cute.jit
    def lse_of(self, call: Any, unit: Int32, row: Int32, row_max: Float32, row_sum: Float32):
        """Returns the address of a row's LSE, and its value."""
        first, first_head, _ = self.tile_of(call, unit)
        token = row // self.config.heads_of_tile
        head = first_head + row - token * self.config.heads_of_tile
        value = (row_max + cute.math.log2(row_sum)) * LN2
        place = Int64(first + token) * self.config.heads + head
        return call.lse + place * 4, cutlass.select_(row_sum == 0.0, -Float32.inf, value)

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
    def share(self, call: Call, first: Int32, whole: Int32) -> Share:
        """Returns the groups among which a work item is split.

        Args:
            first: the queue position of its first block.
            whole: its number of blocks.
        """
        share = call.plan[SHARE]
        first_group = first // share
        return Share(first_group, (first + whole - 1) // share - first_group + 1)

    @cute.jit
    def write_unit(self, call: Call, acc: list, row_max: cute.Tensor, row_sum: cute.Tensor, unit: Int32, half: Int32, share: Share):
        """Stores a warpgroup's columns of a work item: as output if the item is not split, else as a partial result."""
        if const_expr(self.config.narrow):  # first, so that its operands no longer occupy registers when values are scaled
            self.write_record_of(call, unit, share)
        if share.pieces > 1:
            if const_expr(self.config.narrow):
                self.write_narrow(call, acc, row_max, row_sum, unit, half, share)
            else:
                self.write_partial(call, acc, row_max, row_sum, unit, half, share)
        else:
            self.write_output(call, acc, row_max, row_sum, unit, half)
        if const_expr(not self.config.narrow):
            self.write_record_of(call, unit, share)

    @cute.jit
    def write_record_of(self, call: Call, unit: Int32, share: Share):
        """Writes the record of a work item, where `record` has one for it."""
        of_unit = self.most_units(call) <= call.groups
        index = cutlass.select_(of_unit, unit, self.group_of(call))
        begins = share.first_group == self.group_of(call)
        self.write_record(call, begins & (of_unit | (share.pieces > 1)), index, unit, share.pieces)

    def group_of(self, call: Call) -> Int32:
        return call.group

    @cute.jit
    def write_record(self, call: Call, condition: Boolean, index: Int32, unit: Int32, pieces: Int32):
        """Writes a record of a work item that begins in this group, if ``condition`` holds."""
        to = self.record(call, index).toint()
        store_if(condition & (self.thread_of_values() == 0), to, [unit, self.group_of(call), pieces, Int32(0)])

    @cute.jit
    def write_partial(
        self, call: Call, acc: list, row_max: cute.Tensor, row_sum: cute.Tensor, unit: Int32, half: Int32, share: Share
    ):
        thread = self.thread_of_values()
        lane, warp = thread & 31, (thread >> 5) & 3
        sums_at, values_at = self.piece(call, share.first_group, call.group - share.first_group)
        _, _, tokens = self.tile_of(call, unit)
        if warp * 16 < tokens * self.config.heads_of_tile:  # else the item has none of this warp's rows
            if half == 0 and lane & 3 == 0:
                for r in cutlass.range_constexpr(2):
                    store_floats("global", sums_at + (self.row_of_values(thread) + 8 * r) * 8, [row_max[r], row_sum[r]])
            values_at += self.place_of_values(warp, half * (PIECE // CHUNK)) + lane * 16
            for own in cutlass.range_constexpr(len(acc)):
                for each in cutlass.range_constexpr(PIECE // CHUNK):
                    at = values_at + (own * READERS * (PIECE // CHUNK) + each) * (32 * 16)
                    store_floats("global", at, [acc[own][4 * each + place] for place in range(4)])

    @cute.jit
    def write_narrow(
        self, call: Call, acc: list, row_max: cute.Tensor, row_sum: cute.Tensor, unit: Int32, half: Int32, share: Share
    ):
        """Stores a partial result in float16.

        A row's values and row sum are scaled by the same power of 2, and its row max is shifted accordingly, so the merge does not
        depend on the scale. The scale brings the row's amax to between 2^14 and 2^15, as far as the sum stays in float32's range.
        """
        _, _, tokens = self.tile_of(call, unit)
        rows = tokens * self.config.heads_of_tile
        for r in cutlass.range_constexpr(2):
            exponent = cutlass.max(bits_of(quad_max(largest_of(acc, r))) >> 23, LEAST_OF_PARTIAL)
            factor = float_of((EXPONENT + 127 - exponent) << 23)
            for own in cutlass.range_constexpr(len(acc)):
                scale_row(acc[own], r, factor)
            thread = self.thread_of_values()  # recomputed, so that addresses take no registers before
            row = self.row_of_values(thread) + 8 * r
            to, _ = self.piece(call, share.first_group, call.group - share.first_group)
            to += self.place_of_row_sums(row, half)
            store_if((row < rows) & (thread & 3 == 0), to, [row_max[r] + Float32(exponent - EXPONENT), row_sum[r] * factor])
        thread = self.thread_of_values()
        lane, warp = thread & 31, (thread >> 5) & 3
        if warp * 16 < rows:  # else the item has none of this warp's rows
            _, values_at = self.piece(call, share.first_group, call.group - share.first_group)
            values_at += self.place_of_values(warp, half * (PIECE // 16)) + lane * 16
            for own in cutlass.range_constexpr(len(acc)):
                for each in cutlass.range_constexpr(PIECE // 16):
                    words = [pack(cutlass.Float16, acc[own][at], acc[own][at + 1]) for at in range(8 * each, 8 * each + 8, 2)]
                    store_words(values_at + (own * READERS * (PIECE // 16) + each) * (32 * 16), words)

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
    def write_output(self, call: Call, acc: list, row_max: cute.Tensor, row_sum: cute.Tensor, unit: Int32, half: Int32):
        for r in cutlass.range_constexpr(2):
            thread = self.thread_of_values()  # recomputed, so that addresses of both rows do not take registers at once
            row = self.row_of_values(thread) + 8 * r
            to, exists = self.row_of(call, unit, row)
            to += (half * PIECE + (thread & 3) * 8) * 2
            factor = self.factor_of(row_sum[r])
            if any_lane(exists):  # warp-uniform, which the compiler does not know
                for own in cutlass.range_constexpr(len(acc)):
                    for four in cutlass.range_constexpr(PIECE // 32):
                        words = []
                        for each in cutlass.range_constexpr(4 * four, 4 * four + 4):
                            even, odd = acc[own][4 * each + 2 * r] * factor, acc[own][4 * each + 2 * r + 1] * factor
                            words.append(pack(self.dtype, even, odd))
                        store_words(to + (own * READERS * PIECE + four * 32) * 2, self.exchange(words, thread))
                if half == 0 and thread & 3 == 0:
                    self.write_lse(call, unit, row, row_max[r], row_sum[r])
