"""What `mla_decode_device` makes of the sums that CTAs have: the output.

A unit that several groups have blocks of is merged by all of them, each with some of its rows. Every CTA leaves its sums in the
workspace, unscaled, and goes on. When it has done all its blocks, it waits for the others that have blocks of the same unit.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Int64, cute

from tokenspeed_kernel_nvidia.sm90.attention.mla_decode_config import LATENT, ROWS
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode_tile_device import (
    LEFT,
    MERGE,
    MERGERS,
    OFFSET,
    PIECE,
    READERS,
    SHARE,
    UNIT,
    VALUES,
    Call,
    Tiles,
)
from tokenspeed_kernel_nvidia.sm90.common.memory_device import acquire_int, exchange_add
from tokenspeed_kernel_nvidia.sm90.common.registers_device import load_floats, opt_barrier, pack, store_floats, store_words
from tokenspeed_kernel_nvidia.sm90.common.softmax_device import LN2, LOWEST, exp2

ROUND_ROWS = MERGERS * 4 // LATENT  # rows that the threads of a CTA merge together, 4 columns each


@dataclass(frozen=True)
class Share:
    """Who has blocks of a unit.

    Attributes:
        first_group: the group that has the first ones.
        pieces: groups that have some.
    """

    first_group: Int32
    pieces: Int32


class Merger(Tiles):
    """The part of the kernel that stores."""

    @cute.jit
    def thread_of_values(self) -> Int32:
        """Returns this thread's number in its two warpgroups, computed here and not before: see `opt_barrier`."""
        thread, _, _ = cute.arch.thread_idx()
        return opt_barrier(thread) - VALUES * 128

    def row_of_values(self, thread: Int32) -> Int32:
        """The first of a thread's two rows; the other one is 8 further."""
        return ((thread >> 5) & 3) * 16 + ((thread & 31) >> 2)

    @cute.jit
    def share(self, call: Call, offset: Int32, whole: Int32, done: Int32) -> Share:
        """Returns who has blocks of a unit.

        Args:
            offset: the first block of it that this group has.
            whole: how many it has.
            done: blocks of this group before.
        """
        blocks = call.plan[SHARE]
        start = call.group * blocks + done - offset
        first_group = start // blocks
        return Share(first_group, (start + whole - 1) // blocks - first_group + 1)

    @cute.jit
    def piece(self, call: Call, first_group: Int32, piece: Int32, row: Int32):
        """Returns where a row of a partial result lies: its maximum and sum, and its values.

        A group leaves two of them at most: of a unit that it begins in the middle of, and of one that it begins.
        """
        slot = (first_group + piece) * 2 + cutlass.select_(piece == 0, Int32(1), Int32(0))
        at = (slot * self.config.cluster + call.rank) * ROWS + row
        rows = call.groups * (2 * self.config.cluster * ROWS)
        return call.partial + Int64(rows) * (LATENT * 4) + Int64(at) * 8, call.partial + Int64(at) * (LATENT * 4)

    # -- of one CTA --------------------------------------------------------------------------------------------------------------

    @cute.jit
    def write_unit(self, call: Call, acc: list, row_max: cute.Tensor, row_sum: cute.Tensor, unit: Int32, half: Int32, share: Share):
        """Stores what a warpgroup has of a unit: output where that is all, a partial result else."""
        if share.pieces > 1:
            self.write_partial(call, acc, row_max, row_sum, half, share)
        else:
            self.write_output(call, acc, row_max, row_sum, unit, half)

    @cute.jit
    def write_partial(self, call: Call, acc: list, row_max: cute.Tensor, row_sum: cute.Tensor, half: Int32, share: Share):
        thread = self.thread_of_values()
        for r in cutlass.range_constexpr(2):
            row = self.row_of_values(thread) + 8 * r
            sums_at, values_at = self.piece(call, share.first_group, call.group - share.first_group, row)
            values_at += (half * PIECE + (thread & 3) * 2) * 4
            for own in cutlass.range_constexpr(len(acc)):
                for each in cutlass.range_constexpr(PIECE // 8):
                    two = [acc[own][4 * each + 2 * r], acc[own][4 * each + 2 * r + 1]]
                    store_floats("global", values_at + (own * READERS * PIECE + each * 8) * 4, two)
            if half == 0 and thread & 3 == 0:
                store_floats("global", sums_at, [row_max[r], row_sum[r]])
        cute.arch.barrier(barrier_id=MERGE, number_of_threads=MERGERS)
        if thread == 0:
            exchange_add(self.counter(call, share), Int32(1))

    @cute.jit
    def write_output(self, call: Call, acc: list, row_max: cute.Tensor, row_sum: cute.Tensor, unit: Int32, half: Int32):
        thread = self.thread_of_values()
        for r in cutlass.range_constexpr(2):
            row = self.row_of_values(thread) + 8 * r
            to, exists = self.row_of(call, unit, row)
            to += (half * PIECE + (thread & 3) * 2) * 2
            factor = cutlass.select_(row_sum[r] == 0.0, Float32(0.0), cute.arch.rcp_approx(row_sum[r]))
            if exists:
                for own in cutlass.range_constexpr(len(acc)):
                    for each in cutlass.range_constexpr(PIECE // 8):
                        even, odd = acc[own][4 * each + 2 * r] * factor, acc[own][4 * each + 2 * r + 1] * factor
                        store_words(to + (own * READERS * PIECE + each * 8) * 2, [pack(self.dtype, even, odd)])
                if half == 0 and thread & 3 == 0:
                    self.write_lse(call, unit, row, row_max[r], row_sum[r])

    @cute.jit
    def row_of(self, call: Call, unit: Int32, row: Int32):
        """Returns where a row of a unit lies in the output, and whether there is one."""
        sequence, first, tokens = self.place_of(call, unit)
        token = row // self.config.heads_of_tile
        head = call.rank * ROWS + row - token * self.config.heads_of_tile
        place = Int64(sequence * call.q_len + first + token) * call.out.row + Int64(head) * call.out.column
        return call.out.address + place * 2, token < tokens

    @cute.jit
    def write_lse(self, call: Call, unit: Int32, row: Int32, row_max: Float32, row_sum: Float32):
        if call.lse != 0:
            sequence, first, _ = self.place_of(call, unit)
            token = row // self.config.heads_of_tile
            head = call.rank * ROWS + row - token * self.config.heads_of_tile
            value = (row_max + cute.math.log2(row_sum)) * LN2
            place = Int64(sequence * call.q_len + first + token) * self.config.heads + head
            lse = cute.make_ptr(Float32, call.lse, cute.AddressSpace.gmem)
            lse[place] = cutlass.select_(row_sum == 0.0, -Float32.inf, value)

    # -- of several CTAs ---------------------------------------------------------------------------------------------------------

    @cute.jit
    def counter(self, call: Call, share: Share) -> Int64:
        """Returns the address of a unit's counter, of CTAs with these heads. A group begins one such unit at most."""
        return call.counters + Int64(share.first_group * self.config.cluster + call.rank) * 4

    @cute.jit
    def merge_all(self, call: Call):
        """Merges this group's part of what it has shared: the first of its units and the last one may be others' too."""
        unit, offset, left = call.plan[UNIT], call.plan[OFFSET], call.plan[LEFT]
        done = Int32(0)
        while done < left:
            _, _, whole = self.visible(call, self.length_of(call, unit))
            share = self.share(call, offset, whole, done)
            if share.pieces > 1:
                self.merge(call, unit, share)
            done += cutlass.min(whole - offset, left - done)
            unit += 1
            offset = Int32(0)

    @cute.jit
    def merge(self, call: Call, unit: Int32, share: Share):
        """Merges this group's part of a unit's rows.

        All CTAs of a launch run at once, so those that are waited for do. The counter counts each CTA twice, when its partial
        result is there and when it has seen all others': the last one leaves it at zero.
        """
        thread = self.thread_of_values()
        if thread == 0:
            counter = self.counter(call, share)
            while acquire_int(counter) < share.pieces:
                pass
            before = exchange_add(counter, Int32(1))
            if before == 2 * share.pieces - 1:
                cute.make_ptr(Int32, counter, cute.AddressSpace.gmem)[0] = Int32(0)
        cute.arch.barrier(barrier_id=MERGE, number_of_threads=MERGERS)
        if share.pieces == 2:
            self.merge_rows(call, unit, share, thread, 4, 2)
        else:
            self.merge_rows(call, unit, share, thread, 2, 4)

    @cute.jit
    def merge_rows(
        self,
        call: Call,
        unit: Int32,
        share: Share,
        thread: Int32,
        together: cutlass.Constexpr[int],
        batch: cutlass.Constexpr[int],
    ):
        """Merges rows, each from all partial results in their order.

        Args:
            together: rounds of rows at once, and
            batch: partial results at once, so that enough loads are on their way.
        """
        _, _, tokens = self.place_of(call, unit)
        rows = tokens * self.config.heads_of_tile
        step = share.pieces * ROUND_ROWS
        begin = (call.group - share.first_group) * ROUND_ROWS + thread // (LATENT // 4)
        column = thread % (LATENT // 4) * 4
        while begin < rows:
            row = [begin + each * step for each in range(together)]
            # A row's maximum, its sum, and four numbers of it.
            best = cute.make_rmem_tensor((together, 6), Float32)
            for each in cutlass.range_constexpr(together):
                best[each, 0] = Float32(LOWEST)
                for place in cutlass.range_constexpr(1, 6):
                    best[each, place] = Float32(0.0)
            for start in cutlass.range(0, share.pieces, batch, unroll=1):
                sums, values = [], []
                for each in cutlass.range_constexpr(together):
                    for other in cutlass.range_constexpr(batch):
                        piece = cutlass.min(start + other, share.pieces - 1)
                        sums_at, values_at = self.piece(call, share.first_group, piece, cutlass.min(row[each], rows - 1))
                        sums.append(load_floats("global.cg", sums_at, 2))
                        values.append(load_floats("global.cg", values_at + column * 4, 4))
                for each in cutlass.range_constexpr(together):
                    raised = best[each, 0]
                    for other in cutlass.range_constexpr(batch):
                        raised = cute.arch.fmax(raised, sums[each * batch + other][0])
                    decay = exp2(best[each, 0] - raised)
                    best[each, 0] = raised
                    for place in cutlass.range_constexpr(1, 6):
                        best[each, place] *= decay
                    for other in cutlass.range_constexpr(batch):
                        its = sums[each * batch + other]
                        weight = cutlass.select_(start + other < share.pieces, exp2(its[0] - raised), Float32(0.0))
                        best[each, 1] += weight * its[1]
                        for place in cutlass.range_constexpr(4):
                            best[each, 2 + place] += weight * values[each * batch + other][place]
            for each in cutlass.range_constexpr(together):
                if row[each] < rows:
                    to, _ = self.row_of(call, unit, row[each])
                    total = best[each, 1]
                    factor = cutlass.select_(total == 0.0, Float32(0.0), cute.arch.rcp_approx(total))
                    two = [pack(self.dtype, best[each, 2 + at] * factor, best[each, 3 + at] * factor) for at in (0, 2)]
                    store_words(to + column * 2, two)
                    if column == 0:
                        self.write_lse(call, unit, row[each], best[each, 0], total)
            begin += step * together
