"""The producer warp of `kernel_device`, which splits the work and loads tiles, and the L2 prefetch ahead of it."""

# mypy: ignore-errors

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import cpasync

from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Barriers, first_to_read, nth_to_fill
from tokenspeed_kernel_nvidia.cutedsl.registers_device import any_lane, load_int
from tokenspeed_kernel_nvidia.cutedsl.split_kv_device import SplitKv
from tokenspeed_kernel_nvidia.sm90.attention.decode.tile_device import (
    DONE,
    LEFT,
    OFFSET,
    PER_GROUP,
    PLANNED,
    SEQUENCE,
    THREADS,
    Call,
    Panels,
    Tiles,
)
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import Tma, swizzle

AT_ONCE = 8  # sequence lengths that a lane loads per round
AHEAD = 2  # sequences of a CTA whose K/V are prefetched into L2
MOST_AHEAD = 256  # prefetched keys of each


class Loader(SplitKv, Tiles):
    """Mixin of the producer warp: tile scheduler, TMA loads, L2 prefetch."""

    @cute.jit
    def tiles_per_group(self, call: Call, total: Int32, _: Int32):
        """Returns the tiles per group, and 0: starting a sequence has no fixed cost here."""
        per_group = (total + call.groups - 1) // call.groups
        if const_expr(self.block == 16):  # a multiple of the warps, so that each has a tile
            per_group = (per_group + self.parts - 1) // self.parts * self.parts
        return per_group, Int32(0)

    @cute.jit
    def plan(self, call: Call):
        """Finds this CTA's range of tiles, writes it to the plan, and signals PLANNED to the consumer warps.

        Returns:
            The first sequence, its length, the tile offset in it, the tiles (without split-KV: the sequences) of the range, and the
            stride from one sequence to the next.
        """
        lane = cute.arch.lane_idx()
        step = Int32(1)
        if const_expr(self.config.split):
            sequence, length, offset, left, per_group, _none = [Int32(0)] * 6
            if call.batch <= 32:  # less code: here the time goes into instruction fetch
                sequence, length, offset, left, per_group, _none = self.divide(call, 1)
            else:
                sequence, length, offset, left, per_group, _none = self.divide(call, AT_ONCE)
        else:
            sequence, offset, per_group, step = call.group, Int32(0), Int32(0), call.groups
            length = self.length_of(call, sequence)
            left = (call.batch - call.group + call.groups - 1) // call.groups
        if lane == 0:
            call.plan[SEQUENCE] = sequence
            call.plan[OFFSET] = offset
            call.plan[LEFT] = left
            call.plan[DONE] = Int32(0)
            call.plan[PER_GROUP] = per_group
        cute.arch.sync_warp()
        cute.arch.barrier_arrive(barrier_id=PLANNED, number_of_threads=THREADS)
        return sequence, length, offset, left, step

    @cute.jit
    def take(self, count: Int32, left: Int32):
        """Returns how many of a sequence's ``count`` tiles this CTA computes, and the tiles (or sequences) left afterwards."""
        if const_expr(self.config.split):
            count = cutlass.min(count, left)
            left -= count
        else:
            left -= 1
        return count, left

    @cute.jit
    def load(self, call: Call, k: Tma, v: Tma):
        """Fills the ring of tiles. Sequence lengths and page indices are loaded one sequence ahead."""
        lane = cute.arch.lane_idx()
        shift = call.page_shift
        sequence, length, offset, left, step = self.plan(call)
        k_to, k_from = self.partition(call, k, self.keys)
        v_to, v_from = self.partition(call, v, self.values)

        box_bytes = self.config.kv_bytes * self.config.stage_elements // self.boxes
        index = Int32(0)  # of a tile in the CTA's whole range
        next_length = self.length_of(call, sequence + step)
        begin, first, count = self.visible(call, length)
        first += offset
        count -= offset
        # `pages`: entries of the page table, one per lane, from `first_page` of the sequence on.
        first_page = (first * self.block) >> shift
        pages = self.pages_from(call, sequence, first_page, length)
        while left > 0:
            later_length = self.length_of(call, sequence + 2 * step)
            next_begin, next_first, next_count = self.visible(call, next_length)
            next_page = (next_first * self.block) >> shift
            next_pages = self.pages_from(call, sequence + step, next_page, next_length)
            count, left = self.take(count, left)
            for tile in cutlass.range(count, unroll=1):
                start = (first + tile) * self.block
                if (start + self.block - 1) >> shift >= first_page + 32:
                    first_page = start >> shift
                    pages = self.pages_from(call, sequence, first_page, length)
                first_box = cutlass.max(begin - start, 0) // self.box
                after_box = cutlass.max(cutlass.min((length - start + self.box - 1) // self.box, self.boxes), first_box)
                at = nth_to_fill(index, self.stages)
                call.pipe.acquire(at)
                if lane == 0:
                    call.pipe.commit(at, (after_box - first_box) * box_bytes)
                for each in cutlass.range_constexpr(self.boxes):
                    position = start + each * self.box
                    page = cute.arch.shuffle_sync(pages, (position >> shift) - first_page)
                    slot = (position - (position >> shift << shift)) // self.box
                    if first_box <= each < after_box:
                        for panel in cutlass.range_constexpr(max(self.keys.count, self.values.count)):
                            full = call.pipe.full.of(at)
                            if const_expr(panel < self.keys.count):
                                source, to = k_from[None, slot, panel, page], k_to[None, each, panel, at.stage]
                                cute.copy(k.atom, source, to, tma_bar_ptr=full)
                            if const_expr(panel < self.values.count):
                                source, to = v_from[None, slot, panel, page], v_to[None, each, panel, at.stage]
                                cute.copy(v.atom, source, to, tma_bar_ptr=full)
                index += 1
            sequence += step
            length, begin, first, count, first_page, pages = next_length, next_begin, next_first, next_count, next_page, next_pages
            next_length = later_length

    @cute.jit
    def prefetch_l2(self, call: Call, begun: Barriers, k: Tma, v: Tma):
        """Prefetches into L2 the K/V tiles that this CTA will probably load first, until the preceding kernel has ended (PDL).

        The preceding kernel may still be writing lengths and page table, so the values read here are only hints. TMA ignores boxes
        that are out of the cache's bounds, so any page index is safe.
        """
        shift = call.page_shift
        _, k_from = self.partition(call, k, self.keys)
        _, v_from = self.partition(call, v, self.values)
        sequence = call.group
        while sequence < call.batch and sequence < AHEAD * call.groups:
            length = self.length_of(call, sequence, True)
            begin, first, count = self.visible(call, length)
            first_page = (first * self.block) >> shift
            pages = self.pages_from(call, sequence, first_page, length, True)
            boxes = cutlass.min(count, MOST_AHEAD // self.block) * self.boxes
            box = Int32(0)
            while box < boxes and not any_lane(begun.poll(first_to_read())):
                position = first * self.block + box * self.box
                page = cute.arch.shuffle_sync(pages, (position >> shift) - first_page)
                slot = (position - (position >> shift << shift)) // self.box
                if position + self.box > begin and position < length:
                    for panel in cutlass.range_constexpr(max(self.keys.count, self.values.count)):
                        if const_expr(panel < self.keys.count):
                            cute.prefetch(k.atom, k_from[None, slot, panel, page])
                        if const_expr(panel < self.values.count):
                            cute.prefetch(v.atom, v_from[None, slot, panel, page])
                box += 1
            sequence += call.groups

    @cute.jit
    def pages_from(self, call: Call, sequence: Int32, first_page: Int32, length: Int32, early: cutlass.Constexpr[bool] = False):
        """The page indices of 32 pages of a sequence, one per lane. Entries beyond its length are not read, and 0 here."""
        page = Int32(0)
        at = first_page + cute.arch.lane_idx()
        if at << call.page_shift < length:
            table = call.page_table
            entry = Int64(cutlass.min(sequence, call.batch - 1)) * table.sequence + Int64(at) * table.page
            page = load_int(table.address + entry * 4, early)
        return page

    @cute.jit
    def partition(self, call: Call, kv: Tma, panels: cutlass.Constexpr[Panels]):
        """TMA partitions: the boxes in the ring, and the boxes of this CTA's KV heads in a cache."""
        panel = panels.columns
        row = self.heads * panel
        layout = cute.make_layout(
            (self.box, panel, self.heads, self.boxes, panels.count, self.stages),
            stride=(panel, 1, self.box * panel, self.box * row, self.block * row, self.config.stage_elements),
        )
        tiles = cute.recast_ptr(call.tiles, swizzle_=swizzle(panels.row_bytes), dtype=self.kv_dtype) + panels.begin
        source = cute.local_tile(kv.tensor, (self.box, panel, self.heads), (None, None, call.kv_head // self.heads, None))
        target = cute.group_modes(cute.make_tensor(tiles, layout), 0, 3)
        return cpasync.tma_partition(kv.atom, 0, cute.make_layout(1), target, cute.group_modes(source, 0, 3))
