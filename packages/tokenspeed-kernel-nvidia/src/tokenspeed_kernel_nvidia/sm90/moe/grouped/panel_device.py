"""The mainloops of `mma_device` in which a warpgroup multiplies several panels (64 rows each) of weights, one after another, by the
same columns. A block is 64 elements of k of a panel.

The fixed work of a stage, such as waiting for barriers, is amortised over several panels. With few columns, this fixed work took a
third of all instructions. While one block is multiplied, the next block is dequantised.

fp8 MMAs multiply weights without their scales, by columns that are split in two (`PARTS`) or by fp8 activations (`CODES`). Each
half of a block has its own scale. So the MMAs of a half block have a separate accumulator, which is scaled and added in registers.
Weights scaled before the MMAs, where float8_e5m2 represents them exactly, took 7% longer for 256 tokens of GPT-OSS-120B with fp8
activations (450 and 422 us on an H200), and 10% longer with split ones (503 and 458 us).
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Uint32, const_expr, cute
from cutlass.cute.nvgpu import warpgroup

from tokenspeed_kernel_nvidia.cutedsl.memory_device import load_words
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.decode_device import (
    E5M2_FACTOR,
    decode,
    decode_e5m2,
    multipliers,
    scales_of,
)
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
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Cursor, advance
from tokenspeed_kernel_nvidia.cutedsl.registers_device import load_floats, opt_barrier
from tokenspeed_kernel_nvidia.sm90.moe.grouped.config import REST
from tokenspeed_kernel_nvidia.sm90.moe.grouped.epilogue_device import Epilogue
from tokenspeed_kernel_nvidia.sm90.moe.grouped.tile_device import Call, Item, Weights

HALVES = 2  # halves of a k block; each half of a row of weights has one scale
WORDS = 4  # number of 32-bit words of e2m1 values that a lane holds of a strip's k block


class PanelMainloop(Epilogue):
    """The mainloops for tiles in which each warpgroup has several panels of weights."""

    def a_fragments_of_panels(self) -> list:
        """Returns the two A fragments, each for one block or half block of a panel, which the mainloops of all widths share."""
        mma = self.mma_of(8).get_slice(0)
        rows = self.config.tile.warpgroups * PANEL_STRIPS * STRIP
        shape = mma.partition_shape_A((rows, BLOCK // HALVES if self.is_fp8 else BLOCK))
        left = [mma.make_fragment_A(shape) for _ in range(2)]
        for registers in left:
            cute.recast_tensor(registers, Uint32).fill(0)
        return left

    @cute.jit
    def compute_by_panels(
        self,
        call: Call,
        storage: Any,
        item: Item,
        left: list,
        weights: Weights,
        columns: Cursor,
        width: cutlass.Constexpr[int],
    ):
        """Computes and stores this warpgroup's panels of a work item with at most ``width`` columns. Returns the positions of the
        next item's first stages in the rings of weights and columns.
        """
        c = self.config
        panels = c.tile.strips
        # Values derived from the thread index are recomputed here. Otherwise the values would occupy registers in the loops of all
        # widths.
        thread = opt_barrier(cute.arch.thread_idx()[0]) - 128
        wg = cute.arch.make_warp_uniform(thread // 128)
        lane = thread % 32
        strip = thread // 32 % PANEL_STRIPS
        slot = storage.weights.data_ptr().toint() + wg * (panels * c.slot_bytes)
        scales = self.load_scales(call, item, thread % 128, width)
        at = weights.at
        self.weight_pipe(storage).wait(at)
        # The factors and biases of the lane's two rows of each strip, lane / 4 and lane / 4 + 8.
        head = slot + at.stage * c.stage_bytes + strip * HEAD_BYTES + lane // 4 * 4
        places = (0, STRIP // 2, STRIP, STRIP + STRIP // 2)
        heads = [[load_floats("shared", head + each * c.slot_bytes + 4 * place, 1) for place in places] for each in range(panels)]
        slot += PANEL_HEAD_BYTES + strip * BLOCK_BYTES
        multiply = self.mainloop_fp8 if const_expr(c.bytewise) else self.mainloop_16bit
        sums, at, columns = multiply(call, storage, left, at, columns, slot, lane, wg, width)
        scales_at = self.share_scales(storage, scales, thread, wg, width)
        for each in cutlass.range_constexpr(panels):
            first = item.strip + (wg * panels + each) * PANEL_STRIPS
            self.store_panel(call, storage, item, [sums[each]], heads[each], scales_at, thread, wg, first, width)
        return Weights(at, Int32(0)), columns

    def operands(self, storage: Any, wg: Int32, width: int) -> Any:
        """Returns the tiled wgmma with ``width`` columns, its B operand in the ring of columns, and the shape of the accumulator of
        one panel per warpgroup.
        """
        c = self.config
        mma = self.mma_of(width)
        mine = mma.get_slice(wg * 128)
        right = cute.local_tile(self.columns(storage, width), (width, c.k_step * BLOCK), (None, 0, None))
        right = mine.make_fragment_B(mine.partition_B(right[None, None, 0, None]))
        return mma, right, mine.partition_shape_C((c.tile.warpgroups * PANEL_STRIPS * STRIP, width))

    @cute.jit
    def mainloop_16bit(
        self,
        call: Call,
        storage: Any,
        left: list,
        at: Cursor,
        columns: Cursor,
        slot: Int32,
        lane: Int32,
        wg: Int32,
        width: cutlass.Constexpr[int],
    ):
        """The mainloop with 16-bit MMAs: multiplies all dequantised blocks of this warpgroup's panels by an item's columns. Returns
        the accumulators of each panel, and the positions of the next item's first stages in the rings of weights and columns.

        The order of a k step's blocks is that of `load_part`. While the MMAs of a block run, the next block is dequantised, and the
        words of the block after it are loaded from shared memory. So during the last two blocks of a k step, words of the next k
        step are loaded, from the next stage of the ring of weights.
        """
        c = self.config
        panels = c.tile.strips
        mma, right, shape = self.operands(storage, wg, width)
        acc = [cute.make_rmem_tensor(shape, Float32) for _ in range(panels)]
        for sums in acc:
            sums.fill(0.0)
        k_steps = (call.blocks + (c.k_step - 1)) // c.k_step
        parts = c.k_step * panels  # blocks of a k step, panel by panel
        words = self.load_part(call, at, slot, lane, 0, k_steps == 1)
        self.decode_values(call, words, left[0])
        words = self.load_part(call, at, slot, lane, 1, k_steps == 1)
        before = columns
        ready = Boolean(False)
        for k_step in cutlass.range(k_steps, unroll=1):
            last = k_step + 1 == k_steps
            if not ready:
                self.column_pipe(storage).wait(columns)
            following = advance(at, c.weight_stages)
            next_columns = advance(columns, c.column_stages)
            weights_ready = Boolean(False)
            for part in cutlass.range_constexpr(parts):
                self.multiply(mma, acc[part % panels], left[part % 2], right, part // panels, columns)
                if const_expr(part == parts - 2):
                    weights_ready = self.weight_pipe(storage).full.poll(following)
                    ready = self.column_pipe(storage).full.poll(next_columns)
                if const_expr(part == parts - 1):
                    # All words of the stage are now in A registers of issued wgmmas.
                    cute.arch.sync_warp()
                    self.weight_pipe(storage).release(at)
                    at = following
                warpgroup.wait_group(1)
                if const_expr(part == 0):
                    if k_step > 0:
                        self.release_columns(storage, before)
                if const_expr(part < parts - 1):
                    self.decode_values(call, words, left[(part + 1) % 2])
                if const_expr(part < parts - 2):
                    words = self.load_part(call, at, slot, lane, part + 2, last)
                if const_expr(part == parts - 2):
                    if not last:
                        if not weights_ready:
                            self.weight_pipe(storage).wait(following)
                        words = self.load_part(call, following, slot, lane, 0, k_step + 2 == k_steps)
                if const_expr(part == parts - 1):
                    if not last:
                        self.decode_values(call, words, left[0])
                        words = self.load_part(call, following, slot, lane, 1, k_step + 2 == k_steps)
            before, columns = columns, next_columns
        warpgroup.wait_group(0)
        self.release_columns(storage, before)
        return acc, at, columns

    @cute.jit
    def mainloop_fp8(
        self,
        call: Call,
        storage: Any,
        left: list,
        at: Cursor,
        columns: Cursor,
        slot: Int32,
        lane: Int32,
        wg: Int32,
        width: cutlass.Constexpr[int],
    ):
        """The mainloop with fp8 MMAs: multiplies all blocks of this warpgroup's panels, without their scales, by an item's columns,
        and scales the partial sums of each half block. Returns the sums of each panel, and the positions of the next item's first
        stages in the rings of weights and columns.

        With few columns, this mainloop takes fewer instructions than `mainloop_16bit`. It alternates between two sets of
        accumulators and of A registers. While the MMAs of a half block run, the next half block is converted, and the partial sums
        of the previous half block are added.
        """
        c = self.config
        panels = c.tile.strips
        mma, right, shape = self.operands(storage, wg, c.slots * width)
        acc = [cute.make_rmem_tensor(shape, Float32) for _ in range(2)]
        sums = [cute.make_rmem_tensor((width // 2,), Float32) for _ in range(panels)]
        for registers in [*acc, *sums]:
            registers.fill(0.0)
        k_steps = (call.blocks + (c.k_step - 1)) // c.k_step
        blocks = c.k_step * panels  # blocks of a k step, panel by panel
        words = self.load_part(call, at, slot, lane, 0, Boolean(False))
        self.decode_half(call, words, left[0], 0)
        ready = Boolean(False)
        for k_step in cutlass.range(k_steps, unroll=1):
            last = k_step + 1 == k_steps
            if not ready:
                self.column_pipe(storage).wait(columns)
            following = advance(at, c.weight_stages)
            next_columns = advance(columns, c.column_stages)
            weights_ready = Boolean(False)
            scales = words[WORDS]
            for block in cutlass.range_constexpr(blocks):
                panel, place = block % panels, HALVES * (block // panels)
                self.multiply(mma, acc[0], left[0], right, place, columns)
                if const_expr(block == blocks - 1):
                    weights_ready = self.weight_pipe(storage).full.poll(following)
                    ready = self.column_pipe(storage).full.poll(next_columns)
                if const_expr(block > 0):
                    warpgroup.wait_group(1)
                    self.add_scaled_partials(acc[1], sums[(panel - 1) % panels], scales, 1)
                self.decode_half(call, words, left[1], 1)
                scales = words[WORDS]
                self.multiply(mma, acc[1], left[1], right, place + 1, columns)
                if const_expr(block < blocks - 1):
                    words = self.load_part(call, at, slot, lane, block + 1, last)
                    warpgroup.wait_group(1)
                    self.add_scaled_partials(acc[0], sums[panel], scales, 0)
                    self.decode_half(call, words, left[0], 0)
                else:
                    # No accumulator may be in flight across the loop's back edge, because ptxas would serialise the wgmmas.
                    warpgroup.wait_group(0)
                    self.release_columns(storage, columns)
                    self.weight_pipe(storage).release(at)
                    for half in cutlass.range_constexpr(HALVES):
                        self.add_scaled_partials(acc[half], sums[panel], scales, half)
            at, columns = following, next_columns
            if not last:
                if not weights_ready:
                    self.weight_pipe(storage).wait(at)
                words = self.load_part(call, at, slot, lane, 0, Boolean(False))
                self.decode_half(call, words, left[0], 0)
        for registers in sums:
            for each in cutlass.range_constexpr(width // 2):
                registers[each] *= E5M2_FACTOR
        return sums, at, columns

    @cute.jit
    def multiply(
        self,
        mma: cute.TiledMma,
        sums: cute.Tensor,
        left: cute.Tensor,
        right: cute.Tensor,
        part: cutlass.Constexpr[int],
        columns: Cursor,
    ):
        """Issues the wgmmas of a panel's block (16-bit) or half block (fp8) as one group.

        Args:
            sums: the accumulator. 16-bit MMAs add to the accumulator, fp8 MMAs overwrite it.
            left: A registers with the converted weights.
            right: the B operand, all stages of the ring of columns.
            part: index of the block or half block, along k, in the stage ``columns``.
        """
        warpgroup.fence()  # orders earlier register writes before the wgmmas that read the registers
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, not self.is_fp8)
        steps = cute.size(left, mode=[2])
        for step in cutlass.range_constexpr(steps):
            cute.gemm(atom, sums, left[None, None, step], right[None, None, steps * part + step, columns.stage], sums)
        warpgroup.commit_group()

    @cute.jit
    def decode_values(self, call: Call, words: list, left: cute.Tensor):
        """Dequantises the words of a block (see `load_part`), with their scales, to 16-bit A registers.

        The condition ``call.strips != 0`` always holds, but the compiler does not know this. So the registers' former contents are
        a possible result, and all mainloops use the same registers. Without the condition, ptxas gives each wgmma its own registers
        and serialises the wgmmas.
        """
        if call.strips != 0:
            registers = cute.recast_tensor(left, Uint32)
            for word in cutlass.range_constexpr(WORDS):
                decoded = decode(self.dtype, words[word], *multipliers(self.dtype, words[WORDS])[word // HALVES])
                for each in cutlass.range_constexpr(len(decoded)):
                    registers[len(decoded) * word + each] = decoded[each]

    @cute.jit
    def decode_half(self, call: Call, words: list, left: cute.Tensor, half: cutlass.Constexpr[int]):
        """Converts the words of half a block to fp8 A registers, without scales. For the condition see `decode_values`."""
        if call.strips != 0:
            registers = cute.recast_tensor(left, Uint32)
            for word in cutlass.range_constexpr(WORDS // HALVES):
                decoded = decode_e5m2(words[WORDS // HALVES * half + word])
                for each in cutlass.range_constexpr(len(decoded)):
                    registers[len(decoded) * word + each] = decoded[each]

    @cute.jit
    def add_scaled_partials(self, partials: cute.Tensor, sums: cute.Tensor, scales: Uint32, half: cutlass.Constexpr[int]):
        """Scales the partial sums of half a block and adds them to the sums of a panel. With `PARTS`, the two fp8 values of an
        element are in neighbouring MMA columns. ``scales``: the block's word of scales.
        """
        factors = scales_of(scales)
        if const_expr(self.config.slots == 1):
            for each in cutlass.range_constexpr(cute.size(sums)):
                sums[each] += partials[each] * factors[HALVES * half + each // 2 % 2]
        else:
            for tile in cutlass.range_constexpr(cute.size(sums) // 2):
                for r in cutlass.range_constexpr(2):
                    number = partials[4 * tile + 2 * r] + partials[4 * tile + 2 * r + 1] * (1.0 / REST)
                    to = tile // 2 * 4 + 2 * r + tile % 2
                    sums[to] += number * factors[HALVES * half + r]

    @cute.jit
    def load_part(self, call: Call, weights: Cursor, slot: Int32, lane: Int32, part: cutlass.Constexpr[int], last: Boolean):
        """Returns the lane's 32-bit words of one panel's k block from shared memory: the words of e2m1 values, then the word of
        scales.

        Args:
            weights: the stage in the ring of weights.
            part: index of the block in the k step: all panels of its first block along k, then all panels of its second.
            last: whether the block is in the item's last k step, which may have one block less.
        """
        c = self.config
        panel, block = part % c.tile.strips, part // c.tile.strips
        begin = slot + weights.stage * c.stage_bytes + (panel * c.slot_bytes + block * PANEL_BLOCK_BYTES)
        words = list(load_words("shared", begin + lane * 16, WORDS))
        words.append(Uint32(load_words("shared", begin + lane // 4 * 4 + CODE_BYTES, 1)))
        if const_expr(block == c.k_step - 1):
            if last and call.blocks % c.k_step != 0:
                words[-1] = Uint32(0)  # zero scales: the missing block counts as zeros
        return words
