"""The producer warp of `kernel_device`, which loads K/V tiles by TMA, and the L2 prefetch that precedes these loads."""

# mypy: ignore-errors

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import cpasync

from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Barriers, first_to_read, nth_to_fill
from tokenspeed_kernel_nvidia.cutedsl.registers_device import any_lane, load_int
from tokenspeed_kernel_nvidia.sm90.attention.decode.scheduler_device import Work
from tokenspeed_kernel_nvidia.sm90.attention.decode.tile_device import Call, Panels, Shapes
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import Tma, swizzle

AHEAD = 2  # the number of a CTA's sequences whose first K/V are prefetched into L2
MOST_AHEAD = 256  # the maximum number of keys of a sequence that are prefetched into L2


class Loader:
    """The producer warp, which loads by TMA, and the L2 prefetch, which a consumer warp issues."""

    def __init__(self, shapes: Shapes, work: Work) -> None:
        self.config = shapes.config
        self.shapes = shapes
        self.work = work

    @cute.jit
    def load(self, call: Call, k: Tma, v: Tma):
        """Fills the ring with the CTA's K/V tiles. Sequence lengths are loaded two sequences ahead and page indices one sequence
        ahead, to hide the latency of these dependent loads. Boxes that no query sees are not loaded."""
        c = self.config
        box, boxes, block = self.shapes.box, self.shapes.boxes, c.block
        lane = cute.arch.lane_idx()
        shift = call.page_shift
        sequence, length, offset, left, step = self.work.plan(call)
        k_to, k_from = self.partition(call, k, self.shapes.keys)
        v_to, v_from = self.partition(call, v, self.shapes.values)

        box_bytes = c.kv_bytes * c.stage_elements // boxes  # of keys and values, all KV heads and panels
        index = Int32(0)  # index of a tile in the CTA's range
        next_length = self.shapes.length_of(call, sequence + step)
        begin, first, count = self.shapes.visible(call, length)
        first += offset
        count -= offset
        # `pages`: 32 entries of the sequence's page table, one per lane, beginning with entry `first_page`.
        first_page = (first * block) >> shift
        pages = pages_from(call, sequence, first_page, length)
        while left > 0:
            later_length = self.shapes.length_of(call, sequence + 2 * step)
            next_begin, next_first, next_count = self.shapes.visible(call, next_length)
            next_page = (next_first * block) >> shift
            next_pages = pages_from(call, sequence + step, next_page, next_length)
            count, left = self.work.take(count, left)
            for tile in cutlass.range(count, unroll=1):
                start = (first + tile) * block
                if (start + block - 1) >> shift >= first_page + 32:
                    first_page = start >> shift
                    pages = pages_from(call, sequence, first_page, length)
                first_box = cutlass.max(begin - start, 0) // box
                after_box = cutlass.max(cutlass.min((length - start + box - 1) // box, boxes), first_box)
                at = nth_to_fill(index, c.stages)
                call.pipe.acquire(at)
                if lane == 0:
                    call.pipe.commit(at, (after_box - first_box) * box_bytes)
                for each in cutlass.range_constexpr(boxes):
                    position = start + each * box
                    page = cute.arch.shuffle_sync(pages, (position >> shift) - first_page)
                    slot = (position - (position >> shift << shift)) // box
                    if first_box <= each < after_box:
                        for panel in cutlass.range_constexpr(max(self.shapes.keys.count, self.shapes.values.count)):
                            full = call.pipe.full.of(at)
                            if const_expr(panel < self.shapes.keys.count):
                                source, to = k_from[None, slot, panel, page], k_to[None, each, panel, at.stage]
                                cute.copy(k.atom, source, to, tma_bar_ptr=full)
                            if const_expr(panel < self.shapes.values.count):
                                source, to = v_from[None, slot, panel, page], v_to[None, each, panel, at.stage]
                                cute.copy(v.atom, source, to, tma_bar_ptr=full)
                index += 1
            sequence += step
            length, begin, first, count, first_page, pages = next_length, next_begin, next_first, next_count, next_page, next_pages
            next_length = later_length

    @cute.jit
    def prefetch_l2(self, call: Call, begun: Barriers, k: Tma, v: Tma):
        """Prefetches into L2 the K/V tiles that this CTA will probably load first. Stops when the preceding kernel has ended (PDL).

        The preceding kernel may still be writing sequence lengths and page table, so the values read here are only hints. TMA
        ignores boxes that are out of the cache's bounds, so any page index is safe.
        """
        c = self.config
        shift = call.page_shift
        _, k_from = self.partition(call, k, self.shapes.keys)
        _, v_from = self.partition(call, v, self.shapes.values)
        sequence = call.group
        while sequence < call.batch and sequence < AHEAD * call.groups:
            length = self.shapes.length_of(call, sequence, True)
            begin, first, count = self.shapes.visible(call, length)
            first_page = (first * c.block) >> shift
            pages = pages_from(call, sequence, first_page, length, True)
            boxes = cutlass.min(count, MOST_AHEAD // c.block) * self.shapes.boxes
            box = Int32(0)
            while box < boxes and not any_lane(begun.poll(first_to_read())):
                position = first * c.block + box * self.shapes.box
                page = cute.arch.shuffle_sync(pages, (position >> shift) - first_page)
                slot = (position - (position >> shift << shift)) // self.shapes.box
                if position + self.shapes.box > begin and position < length:
                    for panel in cutlass.range_constexpr(max(self.shapes.keys.count, self.shapes.values.count)):
                        if const_expr(panel < self.shapes.keys.count):
                            cute.prefetch(k.atom, k_from[None, slot, panel, page])
                        if const_expr(panel < self.shapes.values.count):
                            cute.prefetch(v.atom, v_from[None, slot, panel, page])
                box += 1
            sequence += call.groups

    @cute.jit
    def partition(self, call: Call, kv: Tma, panels: cutlass.Constexpr[Panels]):
        """Returns the TMA partitions of K or of V: the boxes in the ring, and the boxes of this CTA's KV heads in the cache."""
        c = self.config
        box, heads = self.shapes.box, c.heads
        panel = panels.columns
        row = heads * panel
        layout = cute.make_layout(
            (box, panel, heads, self.shapes.boxes, panels.count, c.stages),
            stride=(panel, 1, box * panel, box * row, c.block * row, c.stage_elements),
        )
        tiles = cute.recast_ptr(call.tiles, swizzle_=swizzle(panels.row_bytes), dtype=self.shapes.kv_dtype) + panels.begin
        source = cute.local_tile(kv.tensor, (box, panel, heads), (None, None, call.kv_head // heads, None))
        target = cute.group_modes(cute.make_tensor(tiles, layout), 0, 3)
        return cpasync.tma_partition(kv.atom, 0, cute.make_layout(1), target, cute.group_modes(source, 0, 3))


@cute.jit
def pages_from(call: Call, sequence: Int32, first_page: Int32, length: Int32, early: cutlass.Constexpr[bool] = False):
    """Loads 32 entries of a sequence's page table, one per lane, beginning with entry ``first_page``. For entries beyond
    ``length``, the sequence's number of tokens, the result is 0 without a load. ``early``: whether other threads may still write
    the page table (see `load_int`)."""
    page = Int32(0)
    at = first_page + cute.arch.lane_idx()
    if at << call.page_shift < length:
        table = call.page_table
        entry = Int64(cutlass.min(sequence, call.batch - 1)) * table.sequence + Int64(at) * table.page
        page = load_int(table.address + entry * 4, early)
    return page
