"""The prologue of a CTA of `kernel_device`, which sorts the pairs by expert, and its end, which resets the global counters.

Each CTA sorts all pairs for itself, in shared memory. So no CTA waits for another CTA's lists. All CTAs must get the same lists,
because the index of an entry is part of the work items' indices.
"""

# mypy: ignore-errors

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, cute

from tokenspeed_kernel_nvidia.cutedsl.memory_device import exchange_add
from tokenspeed_kernel_nvidia.cutedsl.registers_device import LANES, lanes_with, load_int, warp_prefix_sum
from tokenspeed_kernel_nvidia.sm90.moe.stream.config import MAX_EXPERTS, THREADS
from tokenspeed_kernel_nvidia.sm90.moe.stream.tile_device import DONE, ENTRIES, LEFT, READY, TICKET, Call, Shapes, entry_code

_INDEX_BIT = 9  # `experts_of_pairs` packs a pair's expert below this bit, and its index among the expert's pairs above
_TOTAL_BIT = 16  # a packed total has the number of pairs below this bit, and the number of entries above


class Schedule(Shapes):
    """The part of the kernel that makes the lists of each expert's pairs."""

    @cute.jit
    def clear(self, counts: cute.Pointer):
        """Zeroes each expert's count of pairs. All threads of the CTA call this method, before `sort_pairs`. It is separate because
        it can run before the preceding kernel has ended (PDL)."""
        thread, _, _ = cute.arch.thread_idx()
        if thread < MAX_EXPERTS:
            counts[thread] = Int32(0)
        cute.arch.sync_threads()

    @cute.jit
    def sort_pairs(self, call: Call, counts: cute.Pointer, totals: cute.Pointer):
        """Lists the pairs of each expert, and the entries. All threads of a CTA call this method.

        ``order`` has the pairs sorted by expert. The counting sort is stable, so an entry has the same pairs in all CTAs.
        ``experts_of_pairs`` is negative for pairs without an expert of this rank. Loops are not unrolled: the code runs once per
        launch, so instruction fetches take longer than execution.

        Args:
            counts: int32 ``[MAX_EXPERTS]`` in shared memory, zeros; receives the number of pairs of each expert.
            totals: int32, one for each warp, in shared memory; overwritten.
        """
        experts_of_pairs = call.experts_of_pairs
        thread, _, _ = cute.arch.thread_idx()
        pairs = call.tokens * call.layer.top_k
        for pair in cutlass.range(thread, pairs, THREADS, unroll=1):
            expert = load_int(call.ids + Int64(pair) * 4, False)
            experts_of_pairs[pair] = cutlass.select_(expert < call.layer.experts, expert, Int32(-1))
        cute.arch.sync_threads()
        if thread < 32:
            self.count_pairs(pairs, counts, experts_of_pairs)
        cute.arch.sync_threads()
        self.list_entries(call, counts, totals)
        for pair in cutlass.range(thread, pairs, THREADS, unroll=1):
            place = experts_of_pairs[pair]
            if place >= 0:
                call.order[call.starts[place & (1 << _INDEX_BIT) - 1] + (place >> _INDEX_BIT)] = pair
        cute.arch.sync_threads()

    @cute.jit
    def sort_few_pairs(self, call: Call):
        """Makes the lists of `sort_pairs` for at most 32 pairs, one per lane. One warp calls this method."""
        lane = cute.arch.lane_idx()
        expert = Int32(-1)
        if lane < call.tokens * call.layer.top_k:
            expert = load_int(call.ids + Int64(lane) * 4, False)
        self.list_few_pairs(call, expert)

    @cute.jit
    def list_few_pairs(self, call: Call, expert: Int32):
        """Makes the lists of `sort_pairs` for at most 32 pairs, except ``starts``. One warp calls this method. ``expert``: the
        expert of this lane's pair, or a negative number.

        Unlike in `sort_pairs`, the experts have the order in which they first occur.
        """
        lane = cute.arch.lane_idx()
        step = self.config.pairs
        real = expert >= 0 and expert < call.layer.experts
        expert = cutlass.select_(real, expert, Int32(-1))
        alike = lanes_with(expert)
        before = cute.arch.popc(alike & ((Int32(1) << lane) - 1))  # the index of the pair among its expert's pairs
        count = cute.arch.popc(alike)
        # The numbers of pairs and of entries of each expert, packed, in the lane of the expert's first pair; 0 in other lanes.
        both = cutlass.select_(real and before == 0, count | (count + step - 1) // step << _TOTAL_BIT, Int32(0))
        ends = warp_prefix_sum(both, lane)
        first_lane = cute.arch.popc((alike & -alike) - 1)
        start = cute.arch.shuffle_sync(ends - both, first_lane)
        at, entry = (start & (1 << _TOTAL_BIT) - 1) + before, (start >> _TOTAL_BIT) + before // step
        call.experts_of_pairs[lane] = expert
        if real:
            call.order[at] = lane
            if before % step == 0:
                call.entries[entry] = entry_code(expert, at, cutlass.min(count - before, step))
        if lane == LANES - 1:
            call.sizes[ENTRIES] = ends >> _TOTAL_BIT

    @cute.jit
    def count_pairs(self, pairs: Int32, counts: cute.Pointer, experts_of_pairs: cute.Pointer):
        """Counts the pairs of each expert. Stores each pair's index among its expert's pairs in `experts_of_pairs`. One warp calls
        this method.
        """
        lane = cute.arch.lane_idx()
        for first in cutlass.range(0, pairs, 32, unroll=1):
            pair = first + lane
            expert = Int32(-1)
            if pair < pairs:
                expert = experts_of_pairs[pair]
            alike = lanes_with(expert)
            before = cute.arch.popc(alike & ((Int32(1) << lane) - 1))
            count = Int32(0)
            if expert >= 0:
                count = counts[expert]
            cute.arch.sync_warp()
            if expert >= 0:
                experts_of_pairs[pair] = expert | (count + before) << _INDEX_BIT
                if before == 0:
                    counts[expert] = count + cute.arch.popc(alike)
            cute.arch.sync_warp()

    @cute.jit
    def list_entries(self, call: Call, counts: cute.Pointer, totals: cute.Pointer):
        """Lists the start of each expert's pairs, and the entries, by a prefix sum over the experts. Thread i handles expert i."""
        thread, _, _ = cute.arch.thread_idx()
        lane, warp = thread % 32, thread // 32
        step = self.config.pairs
        count = Int32(0)
        if thread < MAX_EXPERTS:
            count = counts[thread]
        # The numbers of pairs and of entries, packed.
        both = count | (count + step - 1) // step << _TOTAL_BIT
        ends = warp_prefix_sum(both, lane)
        if lane == 31:
            totals[warp] = ends
        cute.arch.sync_threads()
        before = Int32(0)
        if lane < warp:
            before = totals[lane]
        before = cute.arch.warp_redux_sync(before, "add") + ends - both
        at, entry = before & (1 << _TOTAL_BIT) - 1, before >> _TOTAL_BIT
        if thread < MAX_EXPERTS:
            call.starts[thread] = at
            for done in cutlass.range(0, count, step, unroll=1):
                call.entries[entry] = entry_code(thread, at + done, cutlass.min(count - done, step))
                entry += 1
        if thread == MAX_EXPERTS - 1:
            call.sizes[ENTRIES] = entry
        cute.arch.sync_threads()

    @cute.jit
    def leave(self, call: Call):
        """Resets all global counters for the next launch, if this CTA is the last one to call this method. One warp calls it, once
        no thread of the CTA needs the counters any more.
        """
        lane = cute.arch.lane_idx()
        ctas, _, _ = cute.arch.grid_dim()
        before = Int32(0)
        if lane == 0:
            before = exchange_add(call.counter(LEFT), Int32(1))
        before = cute.arch.shuffle_sync(before, 0)
        if before == ctas - 1:
            flags = cute.make_ptr(Int32, call.counters, cute.AddressSpace.gmem)
            if lane == 0:
                flags[TICKET] = Int32(0)
                flags[DONE] = Int32(0)
                flags[LEFT] = Int32(0)
            entry = lane
            while entry < call.sizes[ENTRIES]:
                flags[READY + entry] = Int32(0)
                entry += 32
