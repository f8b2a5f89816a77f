"""How the CTAs of `mla_decode_device` merge partial results themselves: the last one to arrive does it.

No CTA waits for another one. Each counts itself when its partial result is there, and who finds that all others have been before
merges them, in their order, so that it does not matter who it is. Where a unit has more than `FAN` partial results, those that
follow each other are merged first, to partial results again: otherwise one CTA would read all of a long sequence.
"""

# mypy: ignore-errors

from __future__ import annotations

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from tokenspeed_kernel_nvidia.sm90.attention.mla_decode_config import FAN, LATENT, LEVELS
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode_merge_device import Sums
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode_store_device import Share, Storer
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode_tile_device import PIECE, READERS, Call
from tokenspeed_kernel_nvidia.sm90.common.memory_device import exchange_add
from tokenspeed_kernel_nvidia.sm90.common.registers_device import (
    bits_of,
    load_floats_if,
    pack,
    store_if,
    store_words,
    widened,
)
from tokenspeed_kernel_nvidia.sm90.common.softmax_device import LOWEST, exp2

ARRIVED = 6  # of the plan's numbers: how many had arrived before, for each of two warpgroups
JOINED = 6  # named barriers of the two warpgroups
TILES = LATENT // READERS // 16 // 4  # of 16 columns, of a warp
BATCH = 4  # partial results that are loaded at once
SHRINK = 4  # merged values are at most 2^SHRINK times as large as those before: see `FAN`


class Joiner(Storer):
    """The part of the kernel that merges."""

    @cute.jit
    def join(self, call: Call, unit: Int32, half: Int32, share: Share):
        """Counts this warpgroup's partial result of a unit, and merges where it was the last."""
        piece = self.group_of(call) - share.first_group
        stride, level = Int32(1), Int32(0)
        while stride < share.pieces:
            step = stride * FAN
            first = piece // step * step
            count = cutlass.min((share.pieces - first + stride - 1) // stride, FAN)
            if self.is_last(call, share.first_group, first, half, level, count):
                self.merge_some(call, unit, half, share.first_group, first, stride, count, step >= share.pieces)
                stride = step
            else:
                stride = share.pieces
            level += 1

    @cute.jit
    def is_last(self, call: Call, first_group: Int32, first: Int32, half: Int32, level: Int32, count: Int32) -> Boolean:
        """Counts a partial result that this warpgroup has stored. Returns whether all ``count`` are there."""
        thread = self.thread_of_values() & 127
        arrived = call.plan + (ARRIVED + half)
        self.meet_half(half)
        if thread == 0:
            slot = (first_group + first) * 2 + cutlass.select_(first == 0, Int32(1), Int32(0))
            at = call.counters + Int64(((slot * self.config.ranks + call.rank) * READERS + half) * LEVELS + level) * 4
            before = exchange_add(at, Int32(1))
            arrived[0] = before
            if before == count - 1:
                cute.make_ptr(Int32, at, cute.AddressSpace.gmem)[0] = Int32(0)
        self.meet_half(half)
        return arrived[0] == count - 1

    def meet_half(self, half: Int32) -> None:
        """Waits for the other warps of this warpgroup."""
        cute.arch.barrier(barrier_id=JOINED + half, number_of_threads=128)

    @cute.jit
    def merge_some(
        self, call: Call, unit: Int32, half: Int32, first_group: Int32, first: Int32, stride: Int32, count: Int32, is_whole: Boolean
    ):
        """Merges ``count`` partial results of a unit, of which ``stride`` are apart, to output or to the first one's place."""
        thread = self.thread_of_values()
        lane, warp = thread & 31, (thread >> 5) & 3
        _, _, tokens = self.place_of(call, unit)
        tile = half * (PIECE // 16) + warp * 2  # two of each of this half's pieces
        sums = Sums(*(cute.make_rmem_tensor(numbers, Float32) for numbers in (8 * TILES, 2, 2)))
        for sixteen in cutlass.range(tokens * self.config.heads_of_tile // 16, unroll=1):
            row = sixteen * 16 + (lane >> 2)
            place = self.place_of_values(sixteen, tile) + lane * 16
            rows = [self.place_of_row_sums(row + 8 * r, half) for r in range(2)]
            sums.values.fill(0.0)
            for r in cutlass.range_constexpr(2):
                sums.row_max[r], sums.row_sum[r] = Float32(LOWEST), Float32(0.0)
            begin = Int32(0)
            while begin < count:
                self.add_some(call, sums, first_group, first + begin * stride, stride, count - begin, place, rows)
                begin += BATCH
            if is_whole:
                self.write_rows(call, sums, unit, half, tile, row)
            else:
                self.meet_half(half)  # all have read what is overwritten
                self.write_merged(call, sums, first_group, first, place, rows, warp)

    def distance(self, tile: int) -> int:
        """Returns how many tiles one of a warp's is behind its first one."""
        return tile % 2 + tile // 2 * (READERS * PIECE // 16)

    @cute.jit
    def add_some(
        self, call: Call, sums: Sums, first_group: Int32, first: Int32, stride: Int32, count: Int32, place: Int32, rows: list
    ):
        """Adds up to `BATCH` partial results of a warp's tiles, all of which are asked for at once."""
        found = []
        for each in cutlass.range_constexpr(BATCH):
            sums_at, values_at = self.piece(call, first_group, first + each * stride)
            exists = each < count
            of_rows = [load_floats_if(exists, sums_at + rows[r], 2) for r in range(2)]
            words = [load_floats_if(exists, values_at + place + self.distance(tile) * (32 * 16), 4) for tile in range(TILES)]
            found.append((of_rows, words))
        for r in cutlass.range_constexpr(2):
            raised = sums.row_max[r]
            for each in cutlass.range_constexpr(BATCH):
                raised = cutlass.select_(each < count, cute.arch.fmax(raised, found[each][0][r][0]), raised)
            sums.scale(r, exp2(sums.row_max[r] - raised))
            sums.row_max[r] = raised
        for each in cutlass.range_constexpr(BATCH):
            values = [x for four in found[each][1] for word in four for x in widened(cutlass.Float16, bits_of(word))]
            for r in cutlass.range_constexpr(2):
                its_max, its_sum = found[each][0][r]
                sums.add(r, exp2(cute.arch.fmin(its_max, sums.row_max[r]) - sums.row_max[r]), its_sum, values)

    @cute.jit
    def write_rows(self, call: Call, sums: Sums, unit: Int32, half: Int32, first_tile: Int32, first_row: Int32):
        """Writes output."""
        lane = self.thread_of_values() & 31
        for r in cutlass.range_constexpr(2):
            row = first_row + 8 * r
            to, _ = self.row_of(call, unit, row)
            to += (first_tile * 16 + (lane & 3) * 2) * 2
            factor = self.factor_of(sums.row_sum[r])
            for tile in cutlass.range_constexpr(TILES):
                for eight in cutlass.range_constexpr(2):
                    pair = [sums.values[8 * tile + 4 * eight + 2 * r + each] * factor for each in range(2)]
                    store_words(to + (self.distance(tile) * 16 + eight * 8) * 2, [pack(self.dtype, *pair)])
            if first_tile == 0 and lane & 3 == 0:
                self.write_lse(call, unit, row, sums.row_max[r], sums.row_sum[r])

    @cute.jit
    def write_merged(self, call: Call, sums: Sums, first_group: Int32, first: Int32, place: Int32, rows: list, warp: Int32):
        """Writes a partial result again."""
        lane = self.thread_of_values() & 31
        sums_at, values_at = self.piece(call, first_group, first)
        shrink = 2.0**-SHRINK
        for r in cutlass.range_constexpr(2):
            own = [sums.row_max[r] + float(SHRINK), sums.row_sum[r] * shrink]
            store_if((warp == 0) & (lane & 3 == 0), sums_at + rows[r], own)
        for tile in cutlass.range_constexpr(TILES):
            numbers = [sums.values[8 * tile + each] * shrink for each in range(8)]
            words = [pack(cutlass.Float16, numbers[at], numbers[at + 1]) for at in range(0, 8, 2)]
            store_words(values_at + place + self.distance(tile) * (32 * 16), words)
