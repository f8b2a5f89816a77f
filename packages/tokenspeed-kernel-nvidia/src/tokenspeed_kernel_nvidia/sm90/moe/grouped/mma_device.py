"""The MMA warpgroups of `kernel_device`: the loop over work items, and the mainloop for wide tiles, with one panel (64 rows of
weights) per warpgroup. `panel_device` has the mainloops for several panels per warpgroup, `warp_device` the mainloop for few
columns, and `epilogue_device` the epilogue of all.

Weights are the A operand of wgmma, in registers. A warp has one strip of a tile: its 16 rows of the warpgroup's 64 rows. The
mainloop is software-pipelined: while the wgmmas of a k step run, the warps dequantise the weights of the next k step to the other
of two sets of A registers, and load the words of the k step after it from shared memory.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Uint32, const_expr, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from tokenspeed_kernel_nvidia.cutedsl.memory_device import load_words
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.decode_device import decode, decode_scaled_e5m2, multipliers, near_multipliers
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.layout import (
    BLOCK,
    BLOCK_BYTES,
    CODE_BYTES,
    HEAD_BYTES,
    PANEL_BLOCK_BYTES,
    PANEL_HEAD_BYTES,
    PANEL_STRIPS,
    STRIP,
)
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Cursor, advance, first_to_read
from tokenspeed_kernel_nvidia.cutedsl.registers_device import load_floats, opt_barrier
from tokenspeed_kernel_nvidia.sm90.moe.grouped.panel_device import PanelMainloop
from tokenspeed_kernel_nvidia.sm90.moe.grouped.tile_device import Call, Item, Weights
from tokenspeed_kernel_nvidia.sm90.moe.grouped.warp_device import WarpMainloop

WORDS = 4  # number of 32-bit words of e2m1 values that a lane holds of a strip's k block


class Consumers(WarpMainloop, PanelMainloop):
    """The code of the MMA warpgroups: the loop over work items, and the wgmma mainloop for one panel per warpgroup."""

    @cute.jit
    def consume(self, call: Call, storage: Any):
        """Runs an MMA warp: computes and stores its warpgroup's panels (64 rows of weights each) of all of the CTA's items. Each
        item uses the mainloop of the smallest width that holds its columns. An item without columns is skipped."""
        index, items = self.items(call)
        weights, columns = Weights(first_to_read(), Int32(0)), first_to_read()
        left = []
        if const_expr(self.config.several_panels):
            left = self.a_fragments_of_panels()
        else:
            # Double-buffered A fragments: a warp dequantises the next k step while wgmma reads this k step.
            mma = self.mma_of(8).get_slice(0)
            left = [mma.make_fragment_A(mma.partition_shape_A((self.config.rows, BLOCK * self.config.k_step))) for _ in range(2)]
            for registers in left:
                cute.recast_tensor(registers, Uint32).fill(0)
        if items.has(index):
            item = self.read_item(call, index)
            working = Boolean(True)
            while working:
                # Read the record of the next item before this item is computed, so that nothing waits for the read.
                index = items.next(index)
                following = item
                working = items.has(index)
                if working:
                    following = self.read_item(call, index)
                least = 0
                for width in self.config.tile.widths:
                    if item.count > least and item.count <= width:
                        if const_expr(width <= self.config.tile.by_warps):
                            weights, columns = self.compute_by_warps(call, storage, item, weights, columns, width)
                        elif const_expr(self.config.several_panels):
                            weights, columns = self.compute_by_panels(call, storage, item, left, weights, columns, width)
                        else:
                            weights, columns = self.compute(call, storage, item, left, weights, columns, width)
                    least = width
                item = following

    def mma_of(self, width: int) -> cute.TiledMma:
        """Returns the tiled wgmma of all MMA warpgroups, with ``width`` columns."""
        source, major = warpgroup.OperandSource.RMEM, OperandMajorMode.K
        if self.is_fp8:
            op = warpgroup.MmaF8Op(self.left_dtype, self.right_dtype, Float32, (64, width, 32), source, major, major)
        else:
            op = warpgroup.MmaF16BF16Op(self.dtype, Float32, (64, width, 16), source, major, major)
        return cute.make_tiled_mma(op, cute.make_layout((self.config.tile.warpgroups, 1, 1)))

    @cute.jit
    def compute(
        self,
        call: Call,
        storage: Any,
        item: Item,
        left: list,
        weights: Weights,
        columns: Cursor,
        width: cutlass.Constexpr[int],
    ):
        """Computes and stores this warpgroup's panel of a work item with at most ``width`` columns. Returns the positions of the
        next item's first stages in the rings of weights and columns.

        Args:
            left: two sets of A registers.
            weights, columns: the positions of the item's first stages in the rings.
        """
        c = self.config
        # Values derived from the thread index are recomputed here. Otherwise the values would occupy registers in the loops of all
        # widths.
        thread = opt_barrier(cute.arch.thread_idx()[0]) - 128
        wg = cute.arch.make_warp_uniform(thread // 128)
        # wgmma has at most 256 columns. For more columns, a tile uses two wgmmas with the same A operand.
        wgmmas = -(-width // 256)
        mma = self.mma_of(width // wgmmas)
        mine = mma.get_slice(wg * 128)
        right = cute.local_tile(self.columns(storage, width), (width // wgmmas, c.k_step * BLOCK), (None, 0, None))
        right = [mine.make_fragment_B(mine.partition_B(right[None, None, each, None])) for each in range(wgmmas)]
        acc = [cute.make_rmem_tensor(mine.partition_shape_C((c.rows, width // wgmmas)), Float32) for _ in range(wgmmas)]
        lane = thread % 32
        strip = thread // 32 % PANEL_STRIPS
        slot = storage.weights.data_ptr().toint() + wg * c.slot_bytes

        scales = self.load_scales(call, item, thread % 128, width)
        self.weight_pipe(storage).wait(weights.at)
        # The factors and biases of the lane's two rows of the strip, lane / 4 and lane / 4 + 8.
        head = slot + weights.at.stage * c.stage_bytes + strip * HEAD_BYTES + lane // 4 * 4
        heads = [load_floats("shared", head + 4 * at, 1) for at in (0, STRIP // 2, STRIP, STRIP + STRIP // 2)]
        for sums in acc:
            sums.fill(0.0)
        slot += PANEL_HEAD_BYTES + strip * BLOCK_BYTES
        weights, columns = self.multiply_all(call, storage, mma, acc, left, right, weights, columns, slot, lane)
        scales_at = self.share_scales(storage, scales, thread, wg, width)
        self.store_panel(call, storage, item, acc, heads, scales_at, thread, wg, item.strip + PANEL_STRIPS * wg, width)
        return weights, columns

    # -- the loop over k steps -------------------------------------------------------------------------------------------------

    @cute.jit
    def multiply_all(
        self,
        call: Call,
        storage: Any,
        mma: cute.TiledMma,
        totals: list,
        left: list,
        right: list,
        weights: Weights,
        columns: Cursor,
        slot: Int32,
        lane: Int32,
    ):
        """The mainloop: accumulates the MMAs of all of an item's k steps in ``totals``. Returns the positions of the next item's
        first stages in the rings of weights and columns.

        Args:
            mma: the tiled wgmma.
            totals: the accumulators, one for each wgmma side by side.
            left: two sets of A registers, for even and odd k steps.
            right: for each wgmma side by side, the B operand, all stages of the ring of columns.
            slot: shared-memory address of this warp's strip in the first stage of the ring of weights.
        """
        c = self.config
        acc = totals
        if const_expr(c.promoted):
            acc = [cute.make_rmem_tensor(sums.layout, Float32) for sums in totals]
        k_steps = (call.blocks + (c.k_step - 1)) // c.k_step
        words = self.load_words(call, weights, slot, lane, k_steps == 1)
        self.decode_words(call, words, left[0], 0, WORDS * c.k_step)
        weights, words = self.next_k_step(call, storage, weights, words, Boolean(False), slot, lane, k_steps - 1)
        before, ready = columns, Boolean(False)
        given = call, storage, mma, acc, right, slot, lane
        # Unrolled by two, so that consecutive k steps use different A registers.
        pairs = (k_steps - 1) // 2
        for pair in cutlass.range(pairs, unroll=1):
            rest = k_steps - 2 * pair
            weights, before, columns, words, ready = self.step(
                *given, left[0], left[1], weights, before, columns, words, ready, pair == 0, c.promoted, rest
            )
            weights, before, columns, words, ready = self.step(
                *given, left[1], left[0], weights, before, columns, words, ready, Boolean(False), False, rest - 1
            )
            if const_expr(c.promoted):
                self.add_sums(storage, acc, totals, before)
        if k_steps % 2 == 0:
            weights, before, columns, words, ready = self.step(
                *given, left[0], left[1], weights, before, columns, words, ready, pairs == 0, c.promoted, Int32(2)
            )
            self.multiply_k_step(storage, mma, acc, right, left[1], columns, ready, False)
            warpgroup.wait_group(1)
            self.release_columns(storage, before)
        else:
            self.multiply_k_step(storage, mma, acc, right, left[0], columns, ready, c.promoted)
            if const_expr(not c.promoted):
                warpgroup.wait_group(1)
                if pairs > 0:
                    self.release_columns(storage, before)
        if const_expr(c.promoted):
            self.add_sums(storage, acc, totals, columns)
        else:
            warpgroup.wait_group(0)
            self.release_columns(storage, columns)
        return weights, advance(columns, c.column_stages)

    @cute.jit
    def multiply_k_step(
        self,
        storage: Any,
        mma: cute.TiledMma,
        acc: list,
        right: list,
        left: cute.Tensor,
        columns: Cursor,
        ready: Boolean,
        fresh: cutlass.Constexpr[bool],
    ):
        """Issues the MMAs of a k step as one wgmma group.

        Args:
            columns: the stage of this k step in the ring of columns.
            ready: whether this k step's columns are known to have arrived.
            fresh: whether the MMAs overwrite the accumulators instead of adding to their former values.
        """
        if not ready:
            self.column_pipe(storage).wait(columns)
        warpgroup.fence()  # orders earlier register writes before the wgmmas that read the registers
        for part in cutlass.range_constexpr(self.config.parts):
            atom = cute.make_mma_atom(mma.op)
            atom.set(warpgroup.Field.ACCUMULATE, part > 0 or not fresh)
            for sums, tile in zip(acc, right, strict=True):
                cute.gemm(atom, sums, left[None, None, part], tile[None, None, part, columns.stage], sums)
        warpgroup.commit_group()

    @cute.jit
    def step(
        self,
        call: Call,
        storage: Any,
        mma: cute.TiledMma,
        acc: list,
        right: list,
        slot: Int32,
        lane: Int32,
        left: cute.Tensor,
        following: cute.Tensor,
        weights: Weights,
        before: Cursor,
        columns: Cursor,
        words: list,
        ready: Boolean,
        first: Boolean,
        fresh: cutlass.Constexpr[bool],
        k_steps: Int32,
    ):
        """Issues the MMAs of a dequantised k step, and dequantises the weights of the next k step meanwhile.

        Full barriers are polled long before the data are needed, because even a wait that succeeds at once takes a hundred cycles.

        Args:
            left: A registers with this k step's dequantised weights.
            following: A registers that receive the next k step's dequantised weights.
            weights: position of the next k step in the ring of weights.
            before: the previous k step's stage in the ring of columns, which that k step's MMAs may still read.
            columns: this k step's stage in the ring of columns.
            words: the next k step's weights, not yet dequantised; see `load_words`.
            ready: whether this k step's columns are known to have arrived.
            first: whether this is the item's first k step.
            fresh: whether this k step's MMAs overwrite the accumulators.
            k_steps: number of the item's remaining k steps, including this one; at least 2.

        Returns:
            the position in the ring of weights after the next k step; the stages in the ring of columns of this k step and of the
            next; the words of the k step after the next; and whether the next k step's columns are known to have arrived.
        """
        c = self.config
        self.multiply_k_step(storage, mma, acc, right, left, columns, ready, fresh)
        next_columns = advance(columns, c.column_stages)
        ready = self.column_pipe(storage).full.poll(next_columns)
        weights_ready = self.weight_pipe(storage).full.poll(self.following_k_step(weights, k_steps == 2).at)
        if const_expr(not fresh):
            warpgroup.wait_group(1)  # the previous k step is done
            if not first:
                self.release_columns(storage, before)
        self.decode_words(call, words, following, 0, WORDS * c.k_step)
        weights, words = self.next_k_step(call, storage, weights, words, weights_ready, slot, lane, k_steps - 2)
        return weights, columns, next_columns, words, ready

    @cute.jit
    def add_sums(self, storage: Any, acc: list, totals: list, columns: Cursor):
        """Waits for all wgmmas, releases the stage ``columns``, and adds the accumulators to ``totals`` (see `Gemm.promoted`)."""
        warpgroup.wait_group(0)
        self.release_columns(storage, columns)
        for sums, all_sums in zip(acc, totals, strict=True):
            for at in cutlass.range_constexpr(cute.size(sums)):
                all_sums[at] += sums[at]

    @cute.jit
    def following_k_step(self, weights: Weights, last: Boolean) -> Weights:
        """Returns the position in the ring of weights that follows a k step at ``weights``. ``last``: whether this k step is the
        item's last."""
        at, block = weights.at, weights.block + self.config.k_step
        if last or block == self.config.tile.blocks:
            at = advance(at, self.config.weight_stages)
            block = Int32(0)
        return Weights(at, block)

    @cute.jit
    def next_k_step(
        self,
        call: Call,
        storage: Any,
        weights: Weights,
        words: list,
        ready: Boolean,
        slot: Int32,
        lane: Int32,
        k_steps: Int32,
    ):
        """Loads the words of the next k step to registers. Releases the current k step's stage in the ring of weights if all of its
        blocks have been loaded.

        Args:
            weights: position of the current k step in the ring of weights.
            words: the words of the current k step, see `load_words`.
            ready: whether the next k step's weights are known to have arrived.
            k_steps: number of the item's k steps after the current one.

        Returns:
            the position of the next k step in the ring of weights, and the next k step's words, or ``words`` if the item has no
            next k step.
        """
        following = self.following_k_step(weights, k_steps == 0)
        if following.block == 0:
            cute.arch.sync_warp()
            self.weight_pipe(storage).release(weights.at)
        if k_steps > 0:
            if not ready:
                self.weight_pipe(storage).wait(following.at)
            words = self.load_words(call, following, slot, lane, k_steps == 1)
        return following, words

    @cute.jit
    def load_words(self, call: Call, weights: Weights, slot: Int32, lane: Int32, last: Boolean):
        """Returns the lane's 32-bit words of a k step's weights from shared memory: for each k block, the words of e2m1 values,
        then the word of block scales. ``last``: whether this is the item's last k step, which may have one block less.
        """
        c = self.config
        begin = slot + weights.at.stage * c.stage_bytes + weights.block * PANEL_BLOCK_BYTES
        words = []
        for block in cutlass.range_constexpr(c.k_step):
            words += load_words("shared", begin + block * PANEL_BLOCK_BYTES + lane * 16, WORDS)
            words.append(load_words("shared", begin + block * PANEL_BLOCK_BYTES + lane // 4 * 4 + CODE_BYTES, 1))
        if const_expr(c.k_step == 2):
            if last and call.blocks % 2 == 1:
                words[-1] = Uint32(0)  # zero scales make the weights of the missing block zeros
        return words

    @cute.jit
    def decode_words(self, call: Call, words: list, left: cute.Tensor, begin: cutlass.Constexpr[int], end: cutlass.Constexpr[int]):
        """Dequantises the words of e2m1 values from index ``begin`` to ``end`` of a k step's weights to A registers.

        The condition ``call.strips != 0`` always holds, but the compiler does not know this. So the registers' former contents are
        a possible result, and the loops of all widths use the same registers. ptxas uses the registers of a wgmma's A operand for
        nothing else. Without the condition, each width would get its own registers, and soon all registers would be taken.
        """
        if call.strips != 0:
            registers = cute.recast_tensor(left, Uint32)
            for word in cutlass.range_constexpr(begin, end):
                block, s = word // WORDS, word % WORDS
                codes, scales = words[block * (WORDS + 1) + s], words[block * (WORDS + 1) + WORDS]
                if const_expr(self.is_fp8):
                    decoded = decode_scaled_e5m2(codes, *near_multipliers(scales)[s // 2])
                else:
                    decoded = decode(self.dtype, codes, *multipliers(self.dtype, scales)[s // 2])
                for at in cutlass.range_constexpr(len(decoded)):
                    registers[len(decoded) * word + at] = decoded[at]
