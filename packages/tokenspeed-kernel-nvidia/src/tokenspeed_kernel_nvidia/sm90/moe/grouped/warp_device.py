"""The mainloop of `mma_device` for few columns. Each warp multiplies its own strips (16 rows each) of weights by the columns, with
mma.sync.

wgmma takes 32 cycles or more to read its A operand from registers, whatever the number of columns. The time of mma.sync is
proportional to the number of columns, but mma.sync takes more instructions. A warp has at least two strips, so that each column is
loaded from shared memory once for several strips. The accumulator layout is that of wgmma, so the epilogue is the same.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Uint32, const_expr, cute

from tokenspeed_kernel_nvidia.cutedsl.memory_device import load_words
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.decode_device import decode, multipliers
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.layout import (
    BLOCK_BYTES,
    CODE_BYTES,
    HEAD_BYTES,
    PANEL_BLOCK_BYTES,
    PANEL_HEAD_BYTES,
    PANEL_STRIPS,
    STRIP,
)
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Cursor, advance
from tokenspeed_kernel_nvidia.cutedsl.registers_device import ldmatrix, load_floats, mma_m16n8k16, opt_barrier
from tokenspeed_kernel_nvidia.sm90.moe.grouped.config import COLUMN_BYTES
from tokenspeed_kernel_nvidia.sm90.moe.grouped.epilogue_device import Epilogue
from tokenspeed_kernel_nvidia.sm90.moe.grouped.tile_device import Call, Item, Weights

STEPS = 4  # MMAs along k (k = 16 each) of a k block; for each MMA, a lane needs one word of e2m1 values


class WarpMainloop(Epilogue):
    """The mainloop of MMA warps for tiles with so few columns that mma.sync is used."""

    @cute.jit
    def compute_by_warps(
        self,
        call: Call,
        storage: Any,
        item: Item,
        weights: Weights,
        columns: Cursor,
        width: cutlass.Constexpr[int],
    ):
        """Computes and stores this warp's strips of a work item with at most ``width`` columns. Returns the positions of the next
        item's first stages in the rings of weights and columns.
        """
        c = self.config
        # Values derived from the thread index are recomputed here. Otherwise the values would occupy registers in the loops of all
        # widths.
        thread = opt_barrier(cute.arch.thread_idx()[0]) - 128
        wg = cute.arch.make_warp_uniform(thread // 128)
        lane = thread % 32
        strip = thread // 32 % PANEL_STRIPS
        # A warpgroup has neighbouring panels, and a warp has one strip of each panel.
        slot = storage.weights.data_ptr().toint() + wg * (c.tile.strips * c.slot_bytes)
        scales = self.load_scales(call, item, thread % 128, width)
        self.weight_pipe(storage).wait(weights.at)
        # The factors and biases of the lane's two rows of each strip, lane / 4 and lane / 4 + 8.
        head = slot + weights.at.stage * c.stage_bytes + strip * HEAD_BYTES + lane // 4 * 4
        heads = [
            [load_floats("shared", head + each * c.slot_bytes + 4 * at, 1) for at in (0, STRIP // 2, STRIP, STRIP + STRIP // 2)]
            for each in range(c.tile.strips)
        ]
        acc = [cute.make_rmem_tensor((width // 2,), Float32) for _ in range(c.tile.strips)]
        for sums in acc:
            sums.fill(0.0)
        slot += PANEL_HEAD_BYTES + strip * BLOCK_BYTES
        # ldmatrix loads four 8 x 8 matrices, which together are 16 columns by 16 elements of k. A lane gives the address of one row
        # of a matrix: of eight elements along k of one column. The 16-byte chunks of a column are permuted by the column index
        # modulo 8. If `width` is an odd multiple of 8, the last eight columns are loaded as four matrices along k.
        column = storage.columns.data_ptr().toint() + (lane // 16 * 8 + lane % 8) * COLUMN_BYTES
        chunk16 = (lane // 8 % 2 ^ lane % 8) * 16
        odd_column = storage.columns.data_ptr().toint() + (width - 8 + lane % 8) * COLUMN_BYTES
        odd_chunk16 = (lane // 8 ^ lane % 8) * 16
        self.weight_pipe(storage).wait(weights.at)
        words = self.load_strips(weights.at, 0, slot, lane)
        k_steps = (call.blocks + (c.k_step - 1)) // c.k_step
        columns_before, weights_before = columns, weights.at
        ready = Boolean(False)
        for k_step in cutlass.range(k_steps, unroll=1):
            last = k_step + 1 == k_steps
            # If k has an odd number of blocks, the second block of the last k step is loaded but unused.
            second = self.load_strips(weights.at, 1, slot, lane)
            if not ready:
                self.column_pipe(storage).wait(columns)
            # Release the stages of a k step only when the next k step begins: all loaded values have then been used. ptxas may move
            # the arrive on an empty barrier ahead of MMAs that still wait for their loads.
            if k_step > 0:
                self.release_stages(storage, columns_before, weights_before)
            stage = columns.stage * c.column_bytes
            columns_before, weights_before = columns, weights.at
            columns = advance(columns, c.column_stages)
            weights = Weights(advance(weights.at, c.weight_stages), Int32(0))
            # Poll full barriers long before the data are needed, because even a wait that succeeds at once takes a hundred cycles.
            weights_ready = self.weight_pipe(storage).full.poll(weights.at)
            self.multiply_block(acc, words, column + stage, chunk16, odd_column + stage, odd_chunk16, width)
            ready = self.column_pipe(storage).full.poll(columns)
            if not last:
                if not weights_ready:
                    self.weight_pipe(storage).wait(weights.at)
                words = self.load_strips(weights.at, 0, slot, lane)
            if not last or call.blocks % c.k_step == 0:
                stage += c.columns * COLUMN_BYTES
                self.multiply_block(acc, second, column + stage, chunk16, odd_column + stage, odd_chunk16, width)
        scales_at = self.share_scales(storage, scales, thread, wg, width)
        for each in cutlass.range_constexpr(c.tile.strips):
            first = item.strip + (wg * c.tile.strips + each) * PANEL_STRIPS
            self.store_panel(call, storage, item, [acc[each]], heads[each], scales_at, thread, wg, first, width)
            if const_expr(each == 0):
                self.release_stages(storage, columns_before, weights_before)
        return weights, columns

    @cute.jit
    def multiply_block(
        self,
        acc: list,
        words: list,
        column: Int32,
        chunk16: Int32,
        odd_column: Int32,
        odd_chunk16: Int32,
        width: cutlass.Constexpr[int],
    ):
        """Dequantises a k block of each of the warp's strips, and issues its MMAs with the columns.

        Args:
            acc: the accumulators of each strip.
            words: this lane's words of weights and scales of the k block, from `load_strips`.
            column, chunk16: the sum is the shared-memory address that this lane passes to the block's first ldmatrix.
            odd_column, odd_chunk16: the same for the last eight columns, if ``width`` is not a multiple of 16.
            width: number of columns.
        """
        odd = []
        for step in cutlass.range_constexpr(STEPS):
            right = []
            for pair in cutlass.range_constexpr(width // 16):
                at = column + (chunk16 ^ (32 * step)) + pair * (16 * COLUMN_BYTES)
                first_low, first_high, second_low, second_high = ldmatrix(at, False)
                right += [(first_low, first_high), (second_low, second_high)]
            if const_expr(width % 16 != 0):
                if const_expr(step % 2 == 0):
                    odd = ldmatrix(odd_column + (odd_chunk16 ^ (32 * step)), False)
                right.append((odd[step % 2 * 2], odd[step % 2 * 2 + 1]))
            for each in cutlass.range_constexpr(self.config.tile.strips):
                of_strip = words[each * (STEPS + 1) : (each + 1) * (STEPS + 1)]
                left = decode(self.dtype, of_strip[step], *multipliers(self.dtype, of_strip[STEPS])[step // 2])
                for n in cutlass.range_constexpr(width // 8):
                    sums = [acc[each][4 * n + at] for at in range(4)]
                    sums = mma_m16n8k16(self.dtype, sums, left, right[n])
                    for at in cutlass.range_constexpr(4):
                        acc[each][4 * n + at] = sums[at]

    @cute.jit
    def release_stages(self, storage: Any, columns: Cursor, weights: Cursor):
        """Releases the stages of a k step in the rings of columns and weights."""
        cute.arch.sync_warp()
        self.release_columns(storage, columns)
        self.weight_pipe(storage).release(weights)

    def load_strips(self, weights: Cursor, block: int, slot: Int32, lane: Int32) -> list:
        """Returns the lane's 32-bit words of a k block from shared memory: for each of the warp's strips, the words of e2m1 values,
        then the word of scales. ``block``: index of the block in the stage ``weights``.
        """
        c = self.config
        begin = slot + weights.stage * c.stage_bytes + block * PANEL_BLOCK_BYTES
        words = []
        for each in range(c.tile.strips):
            words += load_words("shared", begin + each * c.slot_bytes + lane * 16, STEPS)
            words.append(Uint32(load_words("shared", begin + each * c.slot_bytes + lane // 4 * 4 + CODE_BYTES, 1)))
        return words
