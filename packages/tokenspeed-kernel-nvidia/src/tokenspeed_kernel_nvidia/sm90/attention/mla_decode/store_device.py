"""The epilogue of the value warpgroups, which stores a work item's output, or a partial result if the item spans several groups.

`merge_device` merges partial results into the output.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, const_expr, cute

from tokenspeed_kernel_nvidia.cutedsl.registers_device import (
    EXPONENT,
    any_lane,
    bits_of,
    dtype_of,
    float_of,
    pack,
    quad_max,
    scale_row,
    store_floats,
    store_if,
    store_words,
    transpose_quad,
)
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.config import Config
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.results_device import Results, factor_of
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.tile_device import (
    LATENT_CHUNK,
    PER_GROUP,
    READERS,
    Call,
    row_of_values,
    thread_of_values,
)

CHUNK = 8  # `Config.chunk` of float32 partial results
# Lower limit of the amax by which a row is scaled to float16's range, as a biased float32 exponent. A row with a smaller amax gets
# the factor of this limit. The factor also scales the row sum, which is below 2^32. So the scaled row sum stays below 2^127.
LEAST_OF_PARTIAL = 127 - 80


@dataclass(frozen=True)
class Accumulators:
    """A value warpgroup's output accumulators of a work item, in registers.

    Attributes:
        tiles: an accumulator for each tile of the warpgroup's columns.
        row_max, row_sum: row max and row sum of this thread's two rows; None if they stay in shared memory.
    """

    tiles: list
    row_max: cute.Tensor | None
    row_sum: cute.Tensor | None


@dataclass(frozen=True)
class Split:
    """The CTA groups among which a work item's blocks are divided.

    Attributes:
        first_group: the group that computes the item's first blocks.
        partials: the number of groups, which is the number of partial results.
    """

    first_group: Int32
    partials: Int32


@cute.jit
def split_of(call: Call, first: Int32, whole: Int32) -> Split:
    """Returns the CTA groups among which a work item's blocks are divided.

    Args:
        first: the queue position of the item's first block.
        whole: the item's number of blocks.
    """
    per_group = call.plan[PER_GROUP]
    first_group = first // per_group
    return Split(first_group, (first + whole - 1) // per_group - first_group + 1)


@dataclass(frozen=True)
class Epilogue:
    """The epilogue of a work item.

    Attributes:
        results: the addresses of the records.
        store: the object that stores output and partial results: `Store` or `Fp8Store`.
    """

    config: Config
    work: Any
    results: Results
    store: Any

    @cute.jit
    def write_item(self, call: Call, out: Accumulators, item: Int32, half: Int32, split: Split):
        """Stores a value warpgroup's columns of a work item: as output if one CTA group computed the whole item, otherwise as a
        partial result. ``half``: the warpgroup, 0 or 1."""
        if const_expr(self.config.narrow):  # first, so that the record's operands occupy no registers while accumulators are scaled
            self.write_record_of(call, item, split)
        if split.partials > 1:
            self.store.partial(call, out, item, half, split)
        else:
            self.store.output(call, out, item, half)
        if const_expr(not self.config.narrow):
            self.write_record_of(call, item, split)

    @cute.jit
    def write_record_of(self, call: Call, item: Int32, split: Split):
        """Writes the record of a work item, if the item has one: see `Results.record`."""
        of_item = self.work.most_items(call) <= call.groups
        index = cutlass.select_(of_item, item, self.store.group_of(call))
        begins = split.first_group == self.store.group_of(call)
        self.write_record(call, begins & (of_item | (split.partials > 1)), index, item, split.partials)

    @cute.jit
    def write_record(self, call: Call, condition: Boolean, index: Int32, item: Int32, partials: Int32):
        """If ``condition`` holds, writes record number ``index``, of a work item that begins in this CTA group."""
        to = self.results.record(call, index).toint()
        store_if(condition & (thread_of_values() == 0), to, [item, self.store.group_of(call), partials, Int32(0)])


@dataclass(frozen=True)
class Store:
    """Stores accumulators whose rows are query rows."""

    config: Config
    work: Any
    results: Results

    def group_of(self, call: Call) -> Int32:
        """Returns the index of this CTA's CTA group."""
        return call.group

    def partial(self, call: Call, out: Accumulators, item: Int32, half: Int32, split: Split) -> None:
        """Stores the value warpgroup's columns of a work item's partial result."""
        write = self.narrow_partial if self.config.narrow else self.wide_partial
        write(call, out, item, half, split)

    @cute.jit
    def wide_partial(self, call: Call, out: Accumulators, item: Int32, half: Int32, split: Split):
        """Stores a partial result in float32. Value warpgroup 0 stores row max and row sum, which both warpgroups have."""
        thread = thread_of_values()
        lane, warp = thread & 31, (thread >> 5) & 3
        sums_at, values_at = self.results.partial_at(call, split.first_group, call.group - split.first_group)
        _, _, tokens = self.work.tile_of(call, item)
        if warp * 16 < tokens * self.config.heads_of_tile:  # otherwise the item has none of this warp's rows
            if half == 0 and lane & 3 == 0:
                for r in cutlass.range_constexpr(2):
                    store_floats("global", sums_at + (row_of_values(thread) + 8 * r) * 8, [out.row_max[r], out.row_sum[r]])
            values_at += self.results.values_offset(warp, half * (LATENT_CHUNK // CHUNK)) + lane * 16
            for own in cutlass.range_constexpr(len(out.tiles)):
                for each in cutlass.range_constexpr(LATENT_CHUNK // CHUNK):
                    at = values_at + (own * READERS * (LATENT_CHUNK // CHUNK) + each) * (32 * 16)
                    store_floats("global", at, [out.tiles[own][4 * each + i] for i in range(4)])

    @cute.jit
    def narrow_partial(self, call: Call, out: Accumulators, item: Int32, half: Int32, split: Split):
        """Stores a partial result in float16.

        A row's accumulator and row sum are scaled by the same power of 2, and the row max is shifted accordingly. So the merge does
        not depend on the scale. The scale moves the row's amax to between 2^14 and 2^15, unless the row sum would leave float32's
        range.
        """
        acc = out.tiles
        _, _, tokens = self.work.tile_of(call, item)
        rows = tokens * self.config.heads_of_tile
        for r in cutlass.range_constexpr(2):
            exponent = cutlass.max(bits_of(quad_max(largest_of(acc, r))) >> 23, LEAST_OF_PARTIAL)
            factor = float_of((EXPONENT + 127 - exponent) << 23)
            for own in cutlass.range_constexpr(len(acc)):
                scale_row(acc[own], r, factor)
            thread = thread_of_values()  # recomputed, so that addresses take no registers until here
            row = row_of_values(thread) + 8 * r
            to, _ = self.results.partial_at(call, split.first_group, call.group - split.first_group)
            to += self.results.row_sums_offset(row, half)
            store_if((row < rows) & (thread & 3 == 0), to, [out.row_max[r] + Float32(exponent - EXPONENT), out.row_sum[r] * factor])
        thread = thread_of_values()
        lane, warp = thread & 31, (thread >> 5) & 3
        if warp * 16 < rows:  # otherwise the item has none of this warp's rows
            _, values_at = self.results.partial_at(call, split.first_group, call.group - split.first_group)
            values_at += self.results.values_offset(warp, half * (LATENT_CHUNK // 16)) + lane * 16
            for own in cutlass.range_constexpr(len(acc)):
                for each in cutlass.range_constexpr(LATENT_CHUNK // 16):
                    words = [pack(cutlass.Float16, acc[own][at], acc[own][at + 1]) for at in range(8 * each, 8 * each + 8, 2)]
                    store_words(values_at + (own * READERS * (LATENT_CHUNK // 16) + each) * (32 * 16), words)

    @cute.jit
    def output(self, call: Call, out: Accumulators, item: Int32, half: Int32):
        """Normalises the value warpgroup's columns of a work item, and stores them as output, 16 bytes per lane. Value warpgroup 0
        also stores the LSE."""
        acc, dtype = out.tiles, dtype_of(self.config.dtype)
        for r in cutlass.range_constexpr(2):
            thread = thread_of_values()  # recomputed, so that addresses of both rows do not take registers at once
            row = row_of_values(thread) + 8 * r
            to, exists = self.results.row_of(call, item, row)
            to += (half * LATENT_CHUNK + (thread & 3) * 8) * 2
            factor = factor_of(out.row_sum[r])
            if any_lane(exists):  # the condition is warp-uniform, but the compiler does not know this
                for own in cutlass.range_constexpr(len(acc)):
                    for four in cutlass.range_constexpr(LATENT_CHUNK // 32):
                        words = []
                        for each in cutlass.range_constexpr(4 * four, 4 * four + 4):
                            even, odd = acc[own][4 * each + 2 * r] * factor, acc[own][4 * each + 2 * r + 1] * factor
                            words.append(pack(dtype, even, odd))
                        store_words(to + (own * READERS * LATENT_CHUNK + four * 32) * 2, transpose_quad(words, thread & 3))
                if half == 0 and thread & 3 == 0:
                    self.results.write_lse(call, item, row, out.row_max[r], out.row_sum[r])


def largest_of(acc: list, r: int) -> Float32:
    """Returns the amax of a thread's elements of its row ``r`` (0 or 1)."""
    best = Float32(0.0)
    for own in acc:
        for each in range(cute.size(own) // 4):
            for c in range(2):
                best = cute.arch.fmax(best, cute.math.absf(own[4 * each + 2 * r + c]))
    return best
