"""The loop of `grouped_mma_device` for wide tiles: some warpgroups decode weights into shared memory, and others multiply them.

A warp that decodes for itself has no product on its way most of the time: while tensor cores run, its instructions are slow, because
both want the same registers' ports. So one warpgroup does nothing else than decode for the others, some units ahead. Numbers are
decoded in the order of a left operand in registers, and lie in shared memory in rows of 128 bytes in the 128-byte swizzle.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import warpgroup

from tokenspeed_kernel_nvidia.sm90.common.pipeline_device import Cursor, Pipeline, advance, first_to_fill, first_to_read, pipeline
from tokenspeed_kernel_nvidia.sm90.common.registers_device import load_floats, opt_barrier, store_matrices
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import swizzle
from tokenspeed_kernel_nvidia.sm90.moe.grouped_tile_device import Call, Item, Shapes, Weights
from tokenspeed_kernel_nvidia.sm90.moe.mxfp4_layout import (
    BLOCK,
    BLOCK_BYTES,
    HEAD_BYTES,
    PANEL_HEAD_BYTES,
    PANEL_STRIPS,
    STRIP,
)

PRODUCT_COLUMNS = 144  # that a product may have: ptxas wants all its sums in as many registers as a thread is launched with
ROW_BYTES = 128  # of a unit's row in shared memory


class DecodedProducts(Shapes):
    """The part of the kernel that decodes, and the products of what is decoded."""

    def left_pipe(self, storage: Any) -> Pipeline:
        """Returns the ring of decoded weights. A stage is a unit of a tile's rows."""
        return pipeline(storage.left_full, storage.left_empty)

    def left_tiles(self, storage: Any) -> cute.Tensor:
        """Returns ``(row, k, stage)`` of the decoded weights of all warpgroups."""
        c = self.config
        shape = c.rows, c.panel_k, c.tile.left_stages
        return storage.left.get_tensor(cute.make_layout(shape, stride=(c.panel_k, 1, c.rows * c.panel_k)), swizzle=swizzle())

    @cute.jit
    def decode_all(self, call: Call, storage: Any):
        """Decodes the weights of all items of this CTA. Each of four warps has a strip of each computing warpgroup's rows."""
        c = self.config
        pipe = self.left_pipe(storage)
        lane, strip = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx()) % PANEL_STRIPS
        slot = storage.weights.data_ptr().toint() + PANEL_HEAD_BYTES + strip * BLOCK_BYTES
        # A lane gives the address of a row of 8 x 8 numbers. Pieces of a row are permuted by its number modulo 8.
        place = storage.left.data_ptr().toint() + (strip * STRIP + lane % STRIP) * ROW_BYTES + (lane // STRIP ^ lane % 8) * 16
        grid, _, _ = cute.arch.grid_dim()
        index, _, _ = cute.arch.block_idx()
        items = self.count_items(call)
        weights, to = Weights(first_to_read(), Int32(0)), first_to_fill()
        while index < items:
            item = self.read_item(call, index)
            units = (call.blocks + (c.unit - 1)) // c.unit if item.count > 0 else Int32(0)
            for unit in cutlass.range(units, unroll=1):
                last = unit + 1 == units
                self.weight_pipe(storage).wait(weights.at)
                words = [self.load_words(call, weights, slot + wg * c.slot_bytes, lane, last) for wg in range(c.tile.warpgroups)]
                pipe.acquire(to)
                begin = place + to.stage * (c.rows * ROW_BYTES)
                for wg in cutlass.range_constexpr(c.tile.warpgroups):
                    for part in cutlass.range_constexpr(c.parts):
                        to_part = begin + wg * (PANEL_STRIPS * STRIP * ROW_BYTES)
                        store_matrices(to_part ^ (32 * part), self.decode_part(words[wg], part), False)
                cute.arch.fence_view_async_shared()
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    pipe.full.arrive(to)
                weights = self.leave_unit(storage, weights, last)
                to = advance(to, c.tile.left_stages)
            index += grid

    @cute.jit
    def compute_decoded(
        self, call: Call, storage: Any, item: Item, lefts: Cursor, columns: Cursor, width: cutlass.Constexpr[int]
    ):
        """Computes an item with at most ``width`` columns. Returns where the rings go on."""
        c = self.config
        # What follows from the thread's number is computed anew here, or it would take registers in the loops of all widths.
        thread = opt_barrier(cute.arch.thread_idx()[0]) - 256
        wg = cute.arch.make_warp_uniform(thread // 128)
        lane, strip = thread % 32, thread // 32 % PANEL_STRIPS
        # More columns are two products with the same left operand.
        products = -(-width // PRODUCT_COLUMNS)
        mma = self.mma_of(width // products)
        mine = mma.get_slice(wg * 128)
        right = cute.local_tile(self.columns(storage, width), (width // products, c.unit * BLOCK), (None, 0, None))
        right = [mine.make_fragment_B(mine.partition_B(right[None, None, each, None])) for each in range(products)]
        left = mine.make_fragment_A(mine.partition_A(self.left_tiles(storage)))
        acc = [cute.make_rmem_tensor(mine.partition_shape_C((c.rows, width // products)), Float32) for _ in range(products)]
        scales = self.load_scales(call, item, thread % 128, width)
        # Of the rows lane / 4 and eight below: factors, biases. Rows that the last tile does not have are as those of the last panel.
        panel = cutlass.min(item.strip // PANEL_STRIPS + wg, call.panels - 1)
        head = call.weights + (Int64(item.expert) * call.panels + panel) * call.panel_bytes + strip * HEAD_BYTES + lane // 4 * 4
        heads = [load_floats("global", head + 4 * at, 1) for at in (0, STRIP // 2, STRIP, STRIP + STRIP // 2)]
        units = (call.blocks + (c.unit - 1)) // c.unit
        given = storage, mma, left, right
        if const_expr(c.promoted):
            totals = [cute.make_rmem_tensor(sums.layout, Float32) for sums in acc]
            for sums in totals:
                sums.fill(0.0)
            for _ in cutlass.range(units // 2, unroll=1):
                lefts_before, columns_before = lefts, columns
                lefts, columns = self.multiply_decoded(*given, acc, lefts, columns, True)
                lefts_after, columns_after = self.multiply_decoded(*given, acc, lefts, columns, False)
                self.leave_decoded(storage, lefts_before, columns_before, 1)
                self.leave_decoded(storage, lefts, columns, 0)
                lefts, columns = lefts_after, columns_after
                self.add_to_totals(acc, totals)
            if units % 2 == 1:
                lefts_before, columns_before = lefts, columns
                lefts, columns = self.multiply_decoded(*given, acc, lefts, columns, True)
                self.leave_decoded(storage, lefts_before, columns_before, 0)
                self.add_to_totals(acc, totals)
            acc = totals
        else:
            for sums in acc:
                sums.fill(0.0)
            lefts_before, columns_before = lefts, columns
            lefts, columns = self.multiply_decoded(*given, acc, lefts, columns, False)
            for _ in cutlass.range(units - 1, unroll=1):
                lefts_after, columns_after = self.multiply_decoded(*given, acc, lefts, columns, False)
                self.leave_decoded(storage, lefts_before, columns_before, 1)
                lefts_before, columns_before = lefts, columns
                lefts, columns = lefts_after, columns_after
            self.leave_decoded(storage, lefts_before, columns_before, 0)
        scales_at = self.share_scales(storage, scales, thread, wg, width)
        self.store_panel(call, storage, item, acc, heads, scales_at, thread, wg, item.strip + PANEL_STRIPS * wg, width)
        return lefts, columns

    @cute.jit
    def multiply_decoded(
        self,
        storage: Any,
        mma: cute.TiledMma,
        left: cute.Tensor,
        right: list,
        acc: list,
        lefts: Cursor,
        columns: Cursor,
        fresh: cutlass.Constexpr[bool],
    ):
        """Starts the products of a unit, which are a group. ``fresh``: whether sums begin with it. Returns where the rings go on."""
        self.left_pipe(storage).wait(lefts)
        self.column_pipe(storage).wait(columns)
        warpgroup.fence()
        for part in cutlass.range_constexpr(self.config.parts):
            atom = cute.make_mma_atom(mma.op)
            atom.set(warpgroup.Field.ACCUMULATE, part > 0 or not fresh)
            for sums, tile in zip(acc, right, strict=True):
                cute.gemm(atom, sums, left[None, None, part, lefts.stage], tile[None, None, part, columns.stage], sums)
        warpgroup.commit_group()
        return advance(lefts, self.config.tile.left_stages), advance(columns, self.config.column_stages)

    @cute.jit
    def leave_decoded(self, storage: Any, lefts: Cursor, columns: Cursor, behind: cutlass.Constexpr[int]):
        """Waits for the products of a unit, behind which there are so many others, and releases what they have read."""
        warpgroup.wait_group(behind)
        self.left_pipe(storage).release(lefts)
        self.column_pipe(storage).release(columns)

    @cute.jit
    def add_to_totals(self, acc: list, totals: list):
        """Adds sums to the totals."""
        for sums, all_sums in zip(acc, totals, strict=True):
            for at in cutlass.range_constexpr(cute.size(sums)):
                all_sums[at] += sums[at]
