"""The warpgroups of `grouped_device` that compute: weights decoded into registers, products, and what becomes of the sums.

Weights are the left operand of wgmma, in registers. A warp has one strip of a tile: its 16 rows of its warpgroup's 64. Gate and up
of a feature are rows g and g + 8 of a strip, which one thread has.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from tokenspeed_kernel_nvidia.sm90.common.memory_device import load_words
from tokenspeed_kernel_nvidia.sm90.common.pipeline_device import Cursor, advance, first_to_read
from tokenspeed_kernel_nvidia.sm90.common.registers_device import opt_barrier, pack
from tokenspeed_kernel_nvidia.sm90.common.softmax_device import LOG2_E, exp2
from tokenspeed_kernel_nvidia.sm90.common.wgmma_device import start_mma
from tokenspeed_kernel_nvidia.sm90.moe.grouped_config import CHUNK, ROWS, WARPGROUPS
from tokenspeed_kernel_nvidia.sm90.moe.grouped_tile_device import Call, Item, Shapes
from tokenspeed_kernel_nvidia.sm90.moe.mxfp4_decode_device import decode, multipliers
from tokenspeed_kernel_nvidia.sm90.moe.mxfp4_layout import (
    BLOCK,
    BLOCK_BYTES,
    CODE_BYTES,
    HEAD_BYTES,
    PANEL_BLOCK_BYTES,
    PANEL_HEAD_BYTES,
    PANEL_STRIPS,
    STRIP,
)

STORE = 1  # named barriers, one for each warpgroup: its buffer of results is written


@dataclass(frozen=True)
class Weights:
    """Where a warp is in the ring of weights.

    Attributes:
        at: the stage.
        block: in the stage.
    """

    at: Cursor
    block: Int32


def store_matrices(address: Any, words: Any) -> None:
    """Four 8 x 8 matrices of 16-bit numbers, transposed, to shared memory: each lane gives the address of a column's eight."""
    cute.arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *words]
    )


def at_most(x: Float32, bound: Float32) -> Float32:
    """The smaller one. NaN stays NaN."""
    return cute.arch.inline_ptx("min.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, bound])


def at_least(x: Float32, bound: Float32) -> Float32:
    """The larger one. NaN stays NaN."""
    return cute.arch.inline_ptx("max.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, bound])


class Consumers(Shapes):
    """The part of the kernel that computes."""

    @cute.jit
    def consume(self, call: Call, storage: Any):
        """All items of the CTA, 64 rows of each by a warpgroup."""
        grid, _, _ = cute.arch.grid_dim()
        index, _, _ = cute.arch.block_idx()
        items = self.count_items(call)
        weights, columns = Weights(first_to_read(), Int32(0)), first_to_read()
        mma = self.mma_of(8).get_slice(0)
        left = [mma.make_fragment_A(mma.partition_shape_A((ROWS, BLOCK))) for _ in range(2 if self.config.double else 1)]
        for registers in left:
            registers.fill(0.0)
        if index < items:
            item = self.read_item(call, index)
            working = Boolean(True)
            while working:
                # The next item is read early: nothing waits for it.
                index += grid
                following = item
                working = index < items
                if working:
                    following = self.read_item(call, index)
                least = 0
                for width in self.config.widths:
                    if item.count > least and item.count <= width:
                        weights, columns = self.compute(call, storage, item, left, weights, columns, width)
                    least = width
                item = following

    def mma_of(self, width: int) -> cute.TiledMma:
        """The products of a tile of some columns."""
        op = warpgroup.MmaF16BF16Op(
            self.dtype, Float32, (64, width, 16), warpgroup.OperandSource.RMEM, OperandMajorMode.K, OperandMajorMode.K
        )
        return cute.make_tiled_mma(op, cute.make_layout((WARPGROUPS, 1, 1)))

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
        """One item, whose columns are at most ``width``. Returns where the rings go on."""
        c = self.config
        # What follows from the thread's number is computed anew here, or it would take registers in the loops of all widths.
        thread = opt_barrier(cute.arch.thread_idx()[0]) - 128
        wg = cute.arch.make_warp_uniform(thread // 128)
        mma = self.mma_of(width)
        mine = mma.get_slice(wg * 128)
        right = mine.make_fragment_B(mine.partition_B(self.ring.tiles(storage.columns, width)))
        acc = cute.make_rmem_tensor(mine.partition_shape_C((ROWS, width)), Float32)
        lane = thread % 32
        strip = thread // 32 % PANEL_STRIPS
        slot = storage.weights.data_ptr().toint() + wg * c.slot_bytes
        blocks = call.blocks

        self.weight_pipe(storage).wait(weights.at)
        # Of the rows lane / 4 and eight below: factors, biases.
        head = slot + weights.at.stage * (WARPGROUPS * c.slot_bytes) + strip * HEAD_BYTES + lane // 4 * 4
        heads = [load_float(head + 4 * at) for at in (0, STRIP // 2, STRIP, STRIP + STRIP // 2)]
        acc.fill(0.0)
        slot += PANEL_HEAD_BYTES + strip * BLOCK_BYTES
        if const_expr(c.double):
            weights = self.decode_block(call, storage, weights, slot, lane, left[0], blocks == 1)
            # Blocks two by two, so that each of a pair has registers of its own, but the first one of an even number.
            if blocks % 2 == 0:
                self.multiply(storage, mma, acc, left[0], right, columns)
                columns = self.finish_block(storage, columns)
                weights = self.decode_block(call, storage, weights, slot, lane, left[0], blocks == 2)
            before = columns
            pairs = (blocks - 1) // 2
            for pair in cutlass.range(pairs, unroll=1):
                weights, before, columns = self.step(
                    call, storage, mma, acc, left[0], left[1], right, weights, before, columns, slot, lane, pair == 0,
                    Boolean(False),
                )  # fmt: skip
                weights, before, columns = self.step(
                    call, storage, mma, acc, left[1], left[0], right, weights, before, columns, slot, lane, Boolean(False),
                    pair + 1 == pairs,
                )  # fmt: skip
            self.multiply(storage, mma, acc, left[0], right, columns)
            if pairs > 0:
                warpgroup.wait_group(1)
                self.column_pipe(storage).release(before)
            columns = self.finish_block(storage, columns)
        else:
            # Meanwhile other warpgroups multiply.
            for block in cutlass.range(blocks, unroll=1):
                weights = self.decode_block(call, storage, weights, slot, lane, left[0], block + 1 == blocks)
                self.multiply(storage, mma, acc, left[0], right, columns)
                columns = self.finish_block(storage, columns)
        if const_expr(c.gated):
            self.store_activated(call, storage, item, acc, heads, thread, wg, width)
        else:
            self.store_sums(call, storage, item, acc, heads, thread, wg, width)
        if const_expr(-(-width // CHUNK) % 2 == 1):  # the next item begins with the buffer that others may still read
            self.sync_warpgroup(wg)
        return weights, columns

    # -- the loop over blocks --------------------------------------------------------------------------------------------------

    @cute.jit
    def multiply(self, storage: Any, mma: cute.TiledMma, acc: cute.Tensor, left: cute.Tensor, right: cute.Tensor, columns: Cursor):
        """Starts the products of a block of weights, when its columns are there."""
        self.column_pipe(storage).wait(columns)
        start_mma(mma, acc, left, right[None, None, None, columns.stage], True)

    @cute.jit
    def step(
        self,
        call: Call,
        storage: Any,
        mma: cute.TiledMma,
        acc: cute.Tensor,
        left: cute.Tensor,
        following: cute.Tensor,
        right: cute.Tensor,
        weights: Weights,
        before: Cursor,
        columns: Cursor,
        slot: Int32,
        lane: Int32,
        first: Boolean,
        last: Boolean,
    ):
        """Multiplies a block that is decoded, and meanwhile decodes the next one.

        Args:
            following: receives the next block.
            before: the columns of the block before, which may still be in use.
            first: whether there is no block before.
            last: whether the next block is the last one.

        Returns:
            where the rings go on, with the columns of this block and of the next.
        """
        self.multiply(storage, mma, acc, left, right, columns)
        words, scales = self.load_block(storage, weights, slot, lane)
        warpgroup.wait_group(1)
        if not first:
            self.column_pipe(storage).release(before)
        self.decode_words(call, words, scales, following)
        return self.leave_block(storage, weights, last), columns, advance(columns, self.config.column_stages)

    @cute.jit
    def finish_block(self, storage: Any, columns: Cursor) -> Cursor:
        """Waits for the products of a block. Returns where the ring of columns goes on."""
        warpgroup.wait_group(0)
        self.column_pipe(storage).release(columns)
        return advance(columns, self.config.column_stages)

    @cute.jit
    def decode_block(self, call: Call, storage: Any, weights: Weights, slot: Int32, lane: Int32, left: cute.Tensor, last: Boolean):
        """Decodes a block when it is there. Returns where the ring goes on."""
        words, scales = self.load_block(storage, weights, slot, lane)
        self.decode_words(call, words, scales, left)
        return self.leave_block(storage, weights, last)

    @cute.jit
    def load_block(self, storage: Any, weights: Weights, slot: Int32, lane: Int32):
        """The words and scales that a lane has of a block, when they are there."""
        self.weight_pipe(storage).wait(weights.at)
        c = self.config
        begin = slot + weights.at.stage * (WARPGROUPS * c.slot_bytes) + weights.block * PANEL_BLOCK_BYTES
        words = load_words("shared", begin + lane * 16, 4)
        return words, load_words("shared", begin + lane // 4 * 4 + CODE_BYTES, 1)

    @cute.jit
    def decode_words(self, call: Call, words: Any, scales: Uint32, left: cute.Tensor):
        """Makes the left operand of a block's four products.

        The condition always holds. It only makes what the registers had before a possible outcome, so that all loops share them:
        ptxas uses registers of wgmma's left operands for nothing else, and those that have nothing to do with one another would be
        others for each width, soon all that there are.
        """
        if call.strips != 0:
            halves = multipliers(self.dtype, scales)
            registers = cute.recast_tensor(left, Uint32)
            for s in cutlass.range_constexpr(4):
                decoded = decode(self.dtype, words[s], *halves[s // 2])
                for at in cutlass.range_constexpr(4):
                    registers[4 * s + at] = decoded[at]

    @cute.jit
    def leave_block(self, storage: Any, weights: Weights, last: Boolean) -> Weights:
        """Goes on to the next block of the ring of weights. ``last``: it is of another item, and in another stage."""
        at, block = weights.at, weights.block + 1
        if last or block == self.config.blocks:
            cute.arch.sync_warp()
            self.weight_pipe(storage).release(at)
            at = advance(at, self.config.weight_stages)
            block = Int32(0)
        return Weights(at, block)

    # -- results ---------------------------------------------------------------------------------------------------------------

    @cute.jit
    def store_activated(
        self,
        call: Call,
        storage: Any,
        item: Item,
        acc: cute.Tensor,
        heads: list,
        thread: Int32,
        wg: Int32,
        width: cutlass.Constexpr[int],
    ):
        """Activates gates and ups, and stores a feature for each pair of them."""
        lane, warp = thread % 32, thread % 128 // 32
        scale = -LOG2_E * call.alpha
        for chunk in cutlass.range_constexpr(-(-width // CHUNK)):
            words = []
            for j in cutlass.range_constexpr(CHUNK // 8):
                at = 4 * (chunk * (CHUNK // 8) + j)
                if const_expr(at < cute.size(acc)):
                    results = []
                    for column in cutlass.range_constexpr(2):
                        gate = at_most(acc[at + column] * heads[0] + heads[2], call.limit)
                        up = at_most(acc[at + 2 + column] * heads[1] + heads[3], call.limit)
                        up = at_least(up, -call.limit)
                        results.append((up + call.beta) * gate * cute.arch.rcp_approx(1.0 + exp2(scale * gate)))
                    words.append(pack(self.dtype, *results))
                else:
                    words.append(words[0])  # of columns beyond the tile's, which nobody stores
            # A lane gives the address of a column, where a warp's eight features are one piece of four.
            buffer = self.buffer(storage, wg, chunk)
            store_matrices(buffer + lane * 64 + ((warp ^ (lane // 2 % 4)) * 16), words)
            self.sync_warpgroup(wg)
            column, piece = thread % 128 // 4, thread % 4
            place = buffer + column * 64 + ((piece ^ (column // 2 % 4)) * 16)
            inside = item.strip + 4 * wg + piece < call.strips
            self.store_piece(call, item, place, chunk * CHUNK + column, (item.strip + 4 * wg + piece) * 8, inside)

    @cute.jit
    def store_sums(
        self,
        call: Call,
        storage: Any,
        item: Item,
        acc: cute.Tensor,
        heads: list,
        thread: Int32,
        wg: Int32,
        width: cutlass.Constexpr[int],
    ):
        """Stores the features of each column."""
        lane, warp = thread % 32, thread % 128 // 32
        for chunk in cutlass.range_constexpr(-(-width // CHUNK)):
            buffer = self.buffer(storage, wg, chunk)
            for half in cutlass.range_constexpr(2):
                words = []
                for j in cutlass.range_constexpr(2):
                    at = 4 * (chunk * (CHUNK // 8) + 2 * half + j)
                    for r in cutlass.range_constexpr(2):
                        first = at + 2 * r if at < cute.size(acc) else 2 * r  # of columns beyond the tile's, which nobody stores
                        words.append(pack(self.dtype, *(acc[first + column] * heads[r] + heads[2 + r] for column in range(2))))
                # A lane gives the address of a column: of the first or second eight features of a warp, two pieces of eight.
                column = 16 * half + lane // 16 * 8 + lane % 8
                piece = 2 * warp + lane // 8 % 2
                store_matrices(buffer + column * 128 + ((piece ^ (column % 8)) * 16), words)
            self.sync_warpgroup(wg)
            piece = thread % 8
            strip = item.strip + 4 * wg + piece // 2
            for half in cutlass.range_constexpr(2):
                column = 16 * half + thread % 128 // 8
                place = buffer + column * 128 + ((piece ^ (column % 8)) * 16)
                feature = (item.strip + 4 * wg) * STRIP + piece * 8
                self.store_piece(call, item, place, chunk * CHUNK + column, feature, strip < call.strips)

    @cute.jit
    def buffer(self, storage: Any, wg: Int32, chunk: cutlass.Constexpr[int]) -> Int32:
        """Where a warpgroup puts some columns, to store them together: in two places in turn, so that it need not wait twice."""
        size = CHUNK * self.config.store_bytes
        return storage.results.data_ptr().toint() + (2 * wg + chunk % 2) * size

    @cute.jit
    def store_piece(self, call: Call, item: Item, place: Int32, column: Int32, feature: Int32, inside: Boolean):
        """Stores eight features of a column, if it is one of the item's."""
        if inside and column < item.count:
            a, b, c, d = load_words("shared", place, 4)
            at = call.out + (Int64(item.first + column) * call.out_stride + feature) * 2
            cute.arch.inline_ptx("st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[at, a, b, c, d])

    @cute.jit
    def sync_warpgroup(self, wg: Int32):
        cute.arch.barrier(barrier_id=STORE + wg, number_of_threads=128)


def load_float(address: Any) -> Float32:
    """A number of shared memory."""
    return cute.arch.inline_ptx("ld.shared.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[address])
