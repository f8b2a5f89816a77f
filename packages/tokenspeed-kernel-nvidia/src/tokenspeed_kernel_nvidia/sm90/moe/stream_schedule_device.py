"""What a CTA of `stream_device` does before and after: it finds the pairs of each expert, and leaves the counters zero."""

# mypy: ignore-errors

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, cute

from tokenspeed_kernel_nvidia.sm90.common.memory_device import exchange_add
from tokenspeed_kernel_nvidia.sm90.common.registers_device import lanes_with, load_int, warp_prefix_sum
from tokenspeed_kernel_nvidia.sm90.moe.stream_config import MAX_EXPERTS, MAX_PAIRS
from tokenspeed_kernel_nvidia.sm90.moe.stream_tile_device import DONE, ENTRIES, LEFT, READY, TICKET, Call, Shapes, entry_code

_PLACE_BIT = 9  # of what is known of a pair: below is its expert
_EXPERTS = MAX_EXPERTS // 32  # experts of a lane


class Schedule(Shapes):
    """The part of the kernel that knows which pairs belong to an expert."""

    @cute.jit
    def clear(self, counts: cute.Pointer):
        """Before ids are read: no pair was counted yet."""
        thread, _, _ = cute.arch.thread_idx()
        if thread < MAX_EXPERTS:
            counts[thread] = Int32(0)
        cute.arch.sync_threads()

    @cute.jit
    def sort_pairs(self, call: Call, counts: cute.Pointer, places: cute.Pointer):
        """Lists the pairs of each expert, and the entries. By all threads of a CTA, each CTA for itself.

        ``order`` has the pairs, expert by expert, in their order: all CTAs must have the same pairs in an entry.
        """
        thread, _, _ = cute.arch.thread_idx()
        threads = self.config.threads
        turns = -(-MAX_PAIRS // threads)  # pairs of a thread
        pairs = call.tokens * call.layer.top_k
        for turn in cutlass.range_constexpr(turns):
            pair = thread + turn * threads
            if pair < pairs:
                expert = load_int(call.ids + Int64(pair) * 4, False)
                places[pair] = cutlass.select_(expert < call.layer.experts, expert, Int32(-1))
        cute.arch.sync_threads()
        if thread < 32:
            self.count_pairs(pairs, counts, places)
            self.list_entries(call, counts)
        cute.arch.sync_threads()
        for turn in cutlass.range_constexpr(turns):
            pair = thread + turn * threads
            if pair < pairs:
                place = places[pair]
                if place >= 0:
                    call.order[call.starts[place & (1 << _PLACE_BIT) - 1] + (place >> _PLACE_BIT)] = pair
        cute.arch.sync_threads()

    @cute.jit
    def count_pairs(self, pairs: Int32, counts: cute.Pointer, places: cute.Pointer):
        """Counts the pairs of each expert, by one warp. To the expert of a pair is added how many it has before."""
        lane = cute.arch.lane_idx()
        for first in cutlass.range(0, pairs, 32, unroll=1):
            pair = first + lane
            expert = Int32(-1)
            if pair < pairs:
                expert = places[pair]
            alike = lanes_with(expert)
            before = cute.arch.popc(alike & ((Int32(1) << lane) - 1))
            if expert >= 0:
                count = counts[expert]
                cute.arch.sync_warp(alike)
                places[pair] = expert | (count + before) << _PLACE_BIT
                if before == 0:
                    counts[expert] = count + cute.arch.popc(alike)
            cute.arch.sync_warp()

    @cute.jit
    def list_entries(self, call: Call, counts: cute.Pointer):
        """Where the pairs of each expert begin, and the entries, by one warp: a lane has neighbouring experts."""
        lane = cute.arch.lane_idx()
        step = self.config.pairs
        pairs, entries = Int32(0), Int32(0)
        for each in cutlass.range_constexpr(_EXPERTS):
            count = counts[lane * _EXPERTS + each]
            pairs += count
            entries += (count + step - 1) // step
        pairs_end, entries_end = warp_prefix_sum(pairs, lane), warp_prefix_sum(entries, lane)
        at, entry = pairs_end - pairs, entries_end - entries
        for each in cutlass.range_constexpr(_EXPERTS):
            expert = lane * _EXPERTS + each
            count = counts[expert]
            call.starts[expert] = at
            done = Int32(0)
            while done < count:
                call.entries[entry] = entry_code(expert, at + done, cutlass.min(count - done, step))
                done += step
                entry += 1
            at += count
        if lane == 31:
            call.sizes[ENTRIES] = entries_end

    @cute.jit
    def leave(self, call: Call):
        """The last CTA that leaves makes all counters zero. By one warp, when no thread of the CTA reads them any more."""
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
