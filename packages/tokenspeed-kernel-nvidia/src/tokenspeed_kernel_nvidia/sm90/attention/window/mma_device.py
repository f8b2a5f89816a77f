"""The consumer warpgroups of `kernel_device`. One GEMM gives all scores of a tile, so the softmax needs no rescale."""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import warp, warpgroup

from tokenspeed_kernel_nvidia.cutedsl import mask_device as masks
from tokenspeed_kernel_nvidia.cutedsl import softmax_device as softmax
from tokenspeed_kernel_nvidia.cutedsl.launch import LOG2_E
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Cursor, advance, first_to_read, skip
from tokenspeed_kernel_nvidia.cutedsl.registers_device import LANES, pack, quad_max, quad_sum
from tokenspeed_kernel_nvidia.cutedsl.softmax_device import Sinks
from tokenspeed_kernel_nvidia.sm90.attention.window.config import REACH, WARPGROUPS
from tokenspeed_kernel_nvidia.sm90.attention.window.tile_device import Record, Shared, Tiles
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import PANEL, Tma, tma_store
from tokenspeed_kernel_nvidia.sm90.common.wgmma_device import start_mma

# Index of the first of the warpgroups' named barriers, one per warpgroup.
WARPS = 1


@dataclass(frozen=True)
class Output:
    """Where results go.

    Attributes:
        tma: TMA stores to ``out``.
        out: ``[tokens, heads, head_dim]``.
        lse: address of float32 ``[tokens, heads]``, 0 for none.
        heads: query heads of q.
        sinks: added to the softmax's denominator.
    """

    tma: Tma
    out: cute.Tensor
    lse: Int64
    heads: Int32
    sinks: Sinks


@dataclass(frozen=True)
class Rows:
    """A thread's two rows of a tile, 8 apart.

    Attributes:
        rows: their indices.
        positions: the rows' positions, relative to the tile's first position.
        column: the first of the thread's two columns in each 8.
    """

    rows: tuple
    positions: tuple
    column: Int32


@dataclass(frozen=True)
class TilePosition:
    """A tile's location in its sequence.

    Attributes:
        position, token: the tile's first position in the sequence, and the row of q of that position.
        first, length: position of the sequence's first query, and end of its positions.
        head: the first of its query heads.
    """

    position: Int32
    token: Int32
    first: Int32
    length: Int32
    head: Int32

    @cute.jit
    def holds(self, offset: Int32):
        """Whether a position of the tile is a query of the sequence."""
        return self.position + offset >= self.first and self.position + offset < self.length


class Consumers(Tiles):
    """Mixin of the consumer warpgroups."""

    @cute.jit
    def consume(
        self,
        shared: Shared,
        output: Output,
        window_left: Int32,
        scale: Float32,
        cap_scale: Optional[Float32],
        qk: cute.TiledMma,
        pv: cute.TiledMma,
        thread: Int32,
    ):
        """Computes all tiles of a warpgroup: every third one of the CTA's."""
        c = self.config
        wg = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4 - 1
        thread = thread % 128
        lane = thread % LANES
        qk_thread, pv_thread = qk.get_slice(thread), pv.get_slice(thread)
        q_ops = qk.make_fragment_A(qk_thread.partition_A(self.q_ring.tiles(shared.storage.q)))
        k_ops = qk.make_fragment_B(qk_thread.partition_B(self.k_ring.views(shared.storage.k, c.keys)))
        v_ops = pv.make_fragment_B(pv_thread.partition_B(self.v_ring.transposed_views(shared.storage.v, c.inner)))
        scores = cute.make_rmem_tensor(qk_thread.partition_shape_C((64, c.keys)), Float32)
        acc = cute.make_rmem_tensor(pv_thread.partition_shape_C((64, c.head_dim)), Float32)
        probs = cute.make_rmem_tensor(pv_thread.partition_shape_A((64, c.inner)), self.dtype)
        row = thread // LANES * 16 + lane // 4
        mine = Rows((row, row + 8), (row // c.heads, (row + 8) // c.heads), lane % 4 * 2)

        # Cursor of the current item; `tile` is an index in it.
        kv_at = first_to_read()
        shared.k_full.wait(kv_at)
        count, tile = shared.record(kv_at).count, Int32(wg)
        kv_at, count, tile = self.seek(shared, kv_at, count, tile, lane)
        q_at = Cursor(Int32(wg), Int32(0))
        sink_0, sink_1 = self.load_sinks(shared.record(kv_at), output.sinks, tile, mine)
        eighth = tile // c.splits * (c.positions // 8) + shared.record(kv_at).shift
        if const_expr(c.ahead):
            if count > 0:
                shared.q_pipe.wait(q_at)
            start_mma(qk, scores, q_ops[None, None, None, q_at.stage], k_ops[None, None, None, eighth, kv_at.stage])
        while count > 0:
            if const_expr(not c.ahead):
                shared.q_pipe.wait(q_at)
                start_mma(qk, scores, q_ops[None, None, None, q_at.stage], k_ops[None, None, None, eighth, kv_at.stage])
            tile_at = self.tile_position(shared.record(kv_at), tile)
            sinks = (sink_0, sink_1)
            warpgroup.wait_group(0)
            if lane == 0:
                shared.q_pipe.empty.arrive(q_at)
            if const_expr(c.capped):
                softmax.cap(scores, cap_scale)
            self.mask(scores, tile_at.position, window_left, mine)
            row_max, row_sum = self.softmax(scores, probs, scale, sinks, lane)

            shared.v_ready.wait(kv_at)
            start_mma(pv, acc, probs, v_ops[None, None, None, eighth, kv_at.stage])
            inverse = []
            for r in cutlass.range_constexpr(2):
                row_sum[r] = quad_sum(row_sum[r])
                inverse.append(cute.arch.rcp_approx(row_sum[r]))
            warpgroup.wait_group(0)
            # With `ahead`, q @ k of the next tile overlaps this tile's epilogue. The result after the last tile is unused.
            tile += WARPGROUPS
            if tile >= count:
                kv_at, count, tile = self.seek(shared, kv_at, count, tile, lane)
                if const_expr(c.splits == 1):
                    sink_0, sink_1 = self.load_sinks(shared.record(kv_at), output.sinks, tile, mine)
            if const_expr(c.splits > 1):
                sink_0, sink_1 = self.load_sinks(shared.record(kv_at), output.sinks, tile, mine)
            q_at = skip(q_at, WARPGROUPS, c.q_stages)
            eighth = tile // c.splits * (c.positions // 8) + shared.record(kv_at).shift
            if const_expr(c.ahead):
                if count > 0:
                    shared.q_pipe.wait(q_at)
                start_mma(qk, scores, q_ops[None, None, None, q_at.stage], k_ops[None, None, None, eighth, kv_at.stage])

            self.store(shared, output, pv, acc, inverse, tile_at, mine, thread, wg)
            if output.lse != 0 and lane % 4 == 0:
                self.store_lse(output, row_max, row_sum, tile_at, mine)
        warpgroup.wait_group(0)
        if thread == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    # -- tiles -----------------------------------------------------------------------------------------------------------------

    @cute.jit
    def seek(self, shared: Shared, kv_at: Cursor, count: Int32, tile: Int32, lane: Int32):
        """Advances to the item that contains a tile, and releases the items before it. Count 0 means that
        there are no more items.
        """
        while count > 0 and tile >= count:
            if lane == 0:
                shared.kv_empty.arrive(kv_at)
            tile -= count
            kv_at = advance(kv_at, self.config.kv_stages)
            shared.k_full.wait(kv_at)
            count = shared.record(kv_at).count
        return kv_at, count, tile

    @cute.jit
    def tile_position(self, record: Record, tile: Int32) -> TilePosition:
        c = self.config
        position, token = record.position, record.token
        first, length = record.first, record.length
        at = tile // c.splits * c.positions
        return TilePosition(position + at, token + at, first, length, self.head_of(record, tile))

    @cute.jit
    def head_of(self, record: Record, tile: Int32) -> Int32:
        """The first query head of a tile."""
        return (record.kv_head * self.config.splits + tile % self.config.splits) * self.config.heads

    @cute.jit
    def load_sinks(self, record: Record, sinks: Sinks, tile: Int32, mine: Rows):
        """Sinks of this thread's two rows of a tile, times log2(e); -inf without sinks."""
        head = self.head_of(record, tile)
        sink_0, sink_1 = -Float32.inf, -Float32.inf
        if record.count > 0:
            sink_0, sink_1 = sinks.load_two(head, mine.rows, self.config.heads)
        return sink_0 * LOG2_E, sink_1 * LOG2_E

    # -- softmax ---------------------------------------------------------------------------------------------------------------

    @cute.jit
    def mask(self, scores: cute.Tensor, position: Int32, window_left: Int32, mine: Rows):
        """Masks the keys that queries do not see. Column c is the key at ``position - REACH + c``."""
        c = self.config
        before = REACH - position  # columns of keys before the sequence's start
        low = [cutlass.max(REACH + p - window_left, before) - mine.column for p in mine.positions]
        high = [REACH + p - mine.column for p in mine.positions]
        groups = c.keys // 8
        if window_left != REACH - 1 or before > 0:
            masks.hide_below(scores, low, 0, groups)
        else:  # with a full window, only the first `positions` columns are masked in some rows
            masks.hide_below(scores, low, 0, c.positions // 8)
        masks.hide_above(scores, high, REACH // 8, groups)

    @cute.jit
    def softmax(self, scores: cute.Tensor, probs: cute.Tensor, scale: Float32, sinks: tuple, lane: Int32):
        """Softmax of a tile: writes unnormalised probabilities, rounded to 16 bits, to ``probs``, the A operand of P @ V.

        Returns:
            the row max of this thread's two rows, and the thread's partial row sums. The partial sum of one lane of the quad
            includes the sink.
        """
        c = self.config
        groups = c.keys // 8
        words = cute.recast_tensor(probs, Int32)
        row_max, row_sum = [], []
        for r in cutlass.range_constexpr(2):
            row_max.append(cute.arch.fmax(quad_max(softmax.lane_maximum(scores, r)) * scale, sinks[r]))
            row_sum.append(softmax.exp2_ftz(sinks[r] - row_max[r]) if lane % 4 == 0 else Float32(0.0))
        for j in cutlass.range_constexpr(groups):
            for r in cutlass.range_constexpr(2):
                even = softmax.exp2_ftz(scores[4 * j + 2 * r] * scale - row_max[r])
                odd = softmax.exp2_ftz(scores[4 * j + 2 * r + 1] * scale - row_max[r])
                row_sum[r] += even + odd
                words[2 * j + r] = Int32(pack(self.dtype, even, odd))
        for j in cutlass.range_constexpr(2 * groups, c.inner // 4):
            words[j] = Int32(0)
        return row_max, row_sum

    # -- output ----------------------------------------------------------------------------------------------------------------

    @cute.jit
    def store(
        self,
        shared: Shared,
        output: Output,
        pv: cute.TiledMma,
        acc: cute.Tensor,
        inverse: list,
        tile_at: TilePosition,
        mine: Rows,
        thread: Int32,
        wg: Int32,
    ):
        """Epilogue: normalises by the row sums, and stores the tile's rows that belong to the sequence, by TMA if all do."""
        c = self.config
        rounded = cute.make_rmem_tensor(acc.shape, self.dtype)
        words = cute.recast_tensor(rounded, Int32)
        whole = tile_at.position >= tile_at.first and tile_at.position + c.positions <= tile_at.length
        for j in cutlass.range_constexpr(c.head_dim // 8):
            for r in cutlass.range_constexpr(2):
                even, odd = acc[4 * j + 2 * r] * inverse[r], acc[4 * j + 2 * r + 1] * inverse[r]
                words[2 * j + r] = Int32(pack(self.dtype, even, odd))
        if whole:
            # The previous TMA store may still be reading the buffer.
            if thread == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.barrier(barrier_id=WARPS + wg, number_of_threads=128)
            stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
            to_shared = cute.make_tiled_copy_C(stmatrix, pv).get_slice(thread)
            out_tile = self.out_ring.tiles(shared.storage.out)[None, None, wg]
            cute.copy(to_shared, to_shared.retile(rounded), to_shared.partition_D(out_tile))
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=WARPS + wg, number_of_threads=128)
            if thread == 0:
                boxes = self.out_ring.packed_boxes(shared.storage.out, c.heads, c.positions)
                for panel in cutlass.range_constexpr(self.out_ring.panels):
                    target = cute.domain_offset(((tile_at.head, tile_at.token), panel * PANEL), output.tma.tensor)
                    tma_store(output.tma.atom, target, ((c.heads, c.positions), PANEL), boxes[None, None, panel, 0, wg])
                cute.arch.cp_async_bulk_commit_group()
        else:
            for r in cutlass.range_constexpr(2):
                if tile_at.holds(mine.positions[r]):
                    target = output.out[tile_at.token + mine.positions[r], tile_at.head + mine.rows[r] % c.heads, None]
                    target_words = cute.recast_tensor(target, Int32)
                    for j in cutlass.range_constexpr(c.head_dim // 8):
                        target_words[4 * j + thread % LANES % 4] = words[2 * j + r]

    @cute.jit
    def store_lse(self, output: Output, row_max: list, row_sum: list, tile_at: TilePosition, mine: Rows):
        """Stores the LSE of the rows."""
        table = cute.make_ptr(Float32, output.lse, cute.AddressSpace.gmem)
        for r in cutlass.range_constexpr(2):
            if tile_at.holds(mine.positions[r]):
                at = Int64(tile_at.token + mine.positions[r]) * output.heads + tile_at.head + mine.rows[r] % self.config.heads
                (table + at).store((row_max[r] + softmax.log2_ftz(row_sum[r])) * softmax.LN2)
