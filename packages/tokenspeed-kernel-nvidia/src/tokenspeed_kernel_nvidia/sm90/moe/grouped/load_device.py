"""The producer warps of `kernel_device`. One warp streams panels (64 rows each) of weights by bulk copies. The other warps gather
columns (rows of activations) by cp.async, because in the first GEMM, the rows of an expert's pairs are scattered. If columns are
packed, one warp copies them by bulk copies.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Int64, const_expr, cute

from tokenspeed_kernel_nvidia.cutedsl.memory_device import copy_piece
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.layout import PANEL_BLOCK_BYTES, PANEL_HEAD_BYTES, PANEL_STRIPS
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import advance, first_to_fill
from tokenspeed_kernel_nvidia.cutedsl.registers_device import load_int, opt_barrier
from tokenspeed_kernel_nvidia.sm90.common.bulk_device import bulk_load, bulk_load_to_pair
from tokenspeed_kernel_nvidia.sm90.moe.grouped.config import COLUMN_BYTES, COLUMN_WARPS, GROUP, PAIR
from tokenspeed_kernel_nvidia.sm90.moe.grouped.tile_device import Call, Item, Shapes

CHUNK_BYTES = 16  # bytes that one lane copies by one cp.async
AT_ONCE = 4  # number of columns for which a warp copies 128 bytes per cp.async, with eight lanes for each column


class Loader(Shapes):
    """The code of the producer warps."""

    @cute.jit
    def load_weights(self, call: Call, storage: Any):
        """Streams the panels of weights of all of this CTA's work items into the ring of weights. One warp does this, with one lane
        for each panel of a tile.
        """
        c = self.config
        pipe = self.weight_pipe(storage)
        lane = cute.arch.lane_idx()
        slot = storage.weights.data_ptr().toint() + lane * c.slot_bytes
        blocks, panel_bytes = call.blocks, call.panel_bytes
        index, items = self.items(call)
        at = first_to_fill()
        while items.has(index):
            item = self.read_item(call, index)
            panel = item.strip // PANEL_STRIPS
            panels = cutlass.min(call.panels - panel, c.panels_of_rows)
            if const_expr(c.paired):
                panels = cutlass.max(panels, 0)  # if the number of tiles is odd, the second CTA has no panels in the last item
            source = call.weights + (Int64(item.expert) * call.panels + panel + lane) * panel_bytes
            # A panel's head is copied with its first blocks.
            head = Int32(PANEL_HEAD_BYTES)
            left = blocks if item.count > 0 else Int32(0)
            while left > 0:
                size = head + cutlass.min(left, c.tile.blocks) * PANEL_BLOCK_BYTES
                pipe.acquire(at)
                if lane == 0:
                    pipe.commit(at, panels * size)
                cute.arch.sync_warp()
                if lane < panels:
                    to = slot + at.stage * c.stage_bytes + PANEL_HEAD_BYTES - head
                    bulk_load(to, source, size, pipe.full.of(at).toint())
                source += size
                head = Int32(0)
                left -= c.tile.blocks
                at = advance(at, c.weight_stages)
            index = items.next(index)

    @cute.jit
    def load_columns(self, call: Call, storage: Any, warp: Int32):
        """Gathers the columns of all of this CTA's work items into the ring of columns. The gathering warps take four columns each,
        round-robin.

        In a panel, a column is a row of 128 bytes in the 128-byte swizzle: its 16-byte chunks are permuted by the column index
        modulo 8.

        Args:
            warp: index of this warp among the gathering warps.
        """
        c = self.config
        pipe = self.column_pipe(storage)
        lane = cute.arch.lane_idx()
        chunk16 = lane % 8
        turns = -(-c.slots * c.columns // (AT_ONCE * COLUMN_WARPS))
        own = AT_ONCE * warp + lane // 8  # the first column that this lane gathers
        step = AT_ONCE * COLUMN_WARPS  # between this lane's columns: an odd multiple of 4, so column % 8 alternates
        begin = storage.columns.data_ptr().toint() + own * COLUMN_BYTES
        addresses = [begin + ((chunk16 ^ (own % 8)) * CHUNK_BYTES), begin + ((chunk16 ^ ((own + step) % 8)) * CHUNK_BYTES)]
        offsets = cute.make_rmem_tensor((turns,), Int32)
        numbers = CHUNK_BYTES * c.panel_k // COLUMN_BYTES  # elements of a 16-byte chunk
        stages = (call.k + (c.panel_k * c.panels - 1)) // (c.panel_k * c.panels)
        index, items = self.items(call)
        at = first_to_fill()
        while items.has(index):
            item = self.read_item(call, index)
            self.find_columns(call, item, own, offsets)
            source = call.rows + chunk16 * CHUNK_BYTES
            # In the last stage, elements beyond k are zero-filled. Their weights are zeros, but stale memory may hold NaN, and NaN
            # times zero is NaN.
            left = call.k - chunk16 * numbers
            for _ in cutlass.range(stages if item.count > 0 else 0, unroll=1):
                pipe.acquire(at)
                # `opt_barrier` hides how the addresses are computed. Otherwise the compiler would recompute them for each copy.
                in_stage = [opt_barrier(address + at.stage * c.column_bytes) for address in addresses]
                for panel in cutlass.range_constexpr(c.panels):
                    count = Int32(CHUNK_BYTES) if left > 0 else Int32(0)
                    for turn in cutlass.range_constexpr(turns):
                        if offsets[turn] >= 0:
                            behind = (panel * c.slots * c.columns + turn * step) * COLUMN_BYTES
                            copy_piece(in_stage[turn % 2], behind, source + Int64(offsets[turn]) * CHUNK_BYTES, count)
                    source += COLUMN_BYTES
                    left -= c.panel_k
                cute.arch.cp_async_mbarrier_arrive_noinc(pipe.full.of(at))
                at = advance(at, c.column_stages)
            index = items.next(index)

    @cute.jit
    def load_packed_columns(self, call: Call, storage: Any):
        """Copies half of the columns of each work item into the rings of columns of both CTAs of the cluster; the other CTA copies
        the other half. One warp does this.

        In a panel of packed columns, consecutive columns are adjacent and already swizzled. So a bulk copy moves many columns.
        """
        c = self.config
        pipe = self.column_pipe(storage)
        begin = storage.columns.data_ptr().toint()
        stages = (call.k + (c.panel_k - 1)) // c.panel_k
        index, items = self.items(call)
        at = first_to_fill()
        while items.has(index):
            item = self.read_item(call, index)
            groups = (item.count + (GROUP - 1)) // GROUP
            half = (groups + 1) // PAIR
            first, mine = Int32(0), half
            if self.rank() == 1:
                first, mine = half, groups - half
            offset = first * (GROUP * COLUMN_BYTES)
            source = call.rows + Int64(item.first) * COLUMN_BYTES + offset
            for _ in cutlass.range(stages if item.count > 0 else 0, unroll=1):
                pipe.acquire(at)
                if cute.arch.lane_idx() == 0:
                    pipe.commit(at, groups * (GROUP * COLUMN_BYTES))
                    if mine > 0:
                        to = begin + at.stage * c.column_bytes + offset
                        bulk_load_to_pair(to, source, mine * (GROUP * COLUMN_BYTES), pipe.full.of(at).toint())
                source += Int64(call.count) * COLUMN_BYTES
                at = advance(at, c.column_stages)
            index = items.next(index)

    @cute.jit
    def find_columns(self, call: Call, item: Item, own: Int32, offsets: cute.Tensor):
        """Computes where a lane's columns are in the activations, as offsets in 16-byte chunks from the first row; -1 for columns
        that the tile does not have. ``own``: the lane's first column.
        """
        chunks16 = Int32(call.row_stride // (CHUNK_BYTES * self.config.panel_k // COLUMN_BYTES))
        for turn in cutlass.range_constexpr(cute.size(offsets)):
            column = own + turn * (AT_ONCE * COLUMN_WARPS)
            offsets[turn] = Int32(-1)
            part = Int32(0)
            if const_expr(self.config.slots > 1):
                # MMA columns 2 i and 2 i + 1 are the two fp8 parts of one column. So one thread has both accumulators. The columns
                # are ordered so that one thread's columns, among every sixteen MMA columns, are neighbours.
                part = column % 2
                column = column // 16 * 8 + column % 8 // 2 * 2 + column // 8 % 2
            if column < item.count:
                row = item.first + column
                if const_expr(self.config.gated):
                    row = load_int(call.sources + Int64(row) * 4, False)
                offsets[turn] = (row * self.config.slots + part) * chunks16
