"""The consumer warpgroups of `kernel_device`: the mainloop over tiles.

A tile has one q @ k, over all keys that its rows may see, and one P @ V. So there is no loop over blocks of keys.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import cutlass
from cutlass import Float32, Int32, const_expr, cute
from cutlass.cute.nvgpu import warpgroup

from tokenspeed_kernel_nvidia.cutedsl import softmax_device as softmax
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Cursor, advance, first_to_read, skip
from tokenspeed_kernel_nvidia.cutedsl.registers_device import LANES, quad_sum
from tokenspeed_kernel_nvidia.sm90.attention.window.config import WARPGROUPS, Config
from tokenspeed_kernel_nvidia.sm90.attention.window.scheduler_device import Work
from tokenspeed_kernel_nvidia.sm90.attention.window.softmax_device import TileSoftmax
from tokenspeed_kernel_nvidia.sm90.attention.window.store_device import Epilogue, Output
from tokenspeed_kernel_nvidia.sm90.attention.window.tile_device import Rings, Rows, Shared
from tokenspeed_kernel_nvidia.sm90.common.wgmma_device import start_mma


@dataclass(frozen=True)
class Operands:
    """A warpgroup's MMA operands and accumulators.

    Attributes:
        q: shared-memory descriptors of Q tiles, by ring stage.
        k, v: shared-memory descriptors of the keys and values of a tile: by the tile's first row in the K/V stage, divided by 8
            (``eighth``), and by stage. The swizzle repeats every 8 rows, so a view may begin at each multiple of 8.
        scores: the accumulator of q @ k.
        acc: the accumulator of P @ V.
        probs: probabilities in registers, the A operand of P @ V.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    scores: cute.Tensor
    acc: cute.Tensor
    probs: cute.Tensor


@dataclass(frozen=True)
class Consumers:
    """The consumer warpgroups. The three warpgroups take the CTA's tiles round-robin, and never wait for each other."""

    config: Config
    rings: Rings
    work: Work
    softmax: TileSoftmax
    epilogue: Epilogue

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
        """Computes all tiles of this warpgroup: every third tile of the CTA."""
        c = self.config
        wg = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4 - 1
        thread = thread % 128
        lane = thread % LANES
        ops = self.operands(shared, qk, pv, thread)
        row = thread // LANES * 16 + lane // 4
        mine = Rows((row, row + 8), (row // c.heads, (row + 8) // c.heads), lane % 4 * 2)

        # `kv_at` is the cursor of the current work item, `count` its number of tiles, and `tile` the index of the current tile in
        # that item. This warpgroup's tiles may skip a whole item, which `seek` releases too.
        kv_at = first_to_read()
        shared.k_full.wait(kv_at)
        count, tile = shared.record(kv_at).count, Int32(wg)
        kv_at, count, tile = self.seek(shared, kv_at, count, tile, lane)
        q_at = Cursor(Int32(wg), Int32(0))
        sink_0, sink_1 = self.softmax.load_sinks(shared.record(kv_at), output.sinks, tile, mine)
        eighth = tile // c.splits * (c.positions // 8) + shared.record(kv_at).shift
        if const_expr(c.ahead):
            if count > 0:
                shared.q_pipe.wait(q_at)
            start_qk(qk, ops, q_at, kv_at, eighth)
        while count > 0:
            if const_expr(not c.ahead):
                shared.q_pipe.wait(q_at)
                start_qk(qk, ops, q_at, kv_at, eighth)
            tile_at = self.work.tile_position(shared.record(kv_at), tile)
            sinks = (sink_0, sink_1)
            warpgroup.wait_group(0)
            if lane == 0:
                shared.q_pipe.empty.arrive(q_at)
            if const_expr(c.capped):
                softmax.cap(ops.scores, cap_scale)
            self.softmax.mask(ops.scores, tile_at.position, window_left, mine)
            row_max, row_sum = self.softmax.apply(ops.scores, ops.probs, scale, sinks, lane)

            shared.v_ready.wait(kv_at)  # the values have been loaded, and rows outside the sequence have been zeroed
            start_mma(pv, ops.acc, ops.probs, ops.v[None, None, None, eighth, kv_at.stage])
            inverse = []
            for r in cutlass.range_constexpr(2):
                row_sum[r] = quad_sum(row_sum[r])
                inverse.append(cute.arch.rcp_approx(row_sum[r]))
            warpgroup.wait_group(0)
            # With `Config.ahead`, q @ k of the next tile overlaps this tile's epilogue. After the last tile, the result of q @ k is
            # unused.
            tile += WARPGROUPS
            if tile >= count:
                kv_at, count, tile = self.seek(shared, kv_at, count, tile, lane)
                if const_expr(c.splits == 1):
                    sink_0, sink_1 = self.softmax.load_sinks(shared.record(kv_at), output.sinks, tile, mine)
            if const_expr(c.splits > 1):
                sink_0, sink_1 = self.softmax.load_sinks(shared.record(kv_at), output.sinks, tile, mine)
            q_at = skip(q_at, WARPGROUPS, c.q_stages)
            eighth = tile // c.splits * (c.positions // 8) + shared.record(kv_at).shift
            if const_expr(c.ahead):
                if count > 0:
                    shared.q_pipe.wait(q_at)
                start_qk(qk, ops, q_at, kv_at, eighth)

            self.epilogue.store(shared, output, pv, ops.acc, inverse, tile_at, mine, thread, wg)
            if output.lse != 0 and lane % 4 == 0:
                self.epilogue.store_lse(output, row_max, row_sum, tile_at, mine)
        warpgroup.wait_group(0)
        if thread == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def operands(self, shared: Shared, qk: cute.TiledMma, pv: cute.TiledMma, thread: Int32) -> Operands:
        """Returns a thread's MMA operands and accumulators. ``thread``: its index in the warpgroup."""
        c = self.config
        qk_thread, pv_thread = qk.get_slice(thread), pv.get_slice(thread)
        return Operands(
            qk.make_fragment_A(qk_thread.partition_A(self.rings.q.tiles(shared.storage.q))),
            qk.make_fragment_B(qk_thread.partition_B(self.rings.k.views(shared.storage.k, c.keys))),
            pv.make_fragment_B(pv_thread.partition_B(self.rings.v.transposed_views(shared.storage.v, c.inner))),
            cute.make_rmem_tensor(qk_thread.partition_shape_C((64, c.keys)), Float32),
            cute.make_rmem_tensor(pv_thread.partition_shape_C((64, c.head_dim)), Float32),
            cute.make_rmem_tensor(pv_thread.partition_shape_A((64, c.inner)), self.rings.dtype),
        )

    @cute.jit
    def seek(self, shared: Shared, kv_at: Cursor, count: Int32, tile: Int32, lane: Int32):
        """Advances to the work item that contains a tile, and releases the stages of the items before it.

        Args:
            kv_at, count: the current item's cursor, and its number of tiles.
            tile: the tile's index, counted from the current item's first tile.

        Returns:
            The item's cursor, its number of tiles (0 if there are no more items), and the tile's index in the item.
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
def start_qk(qk: cute.TiledMma, ops: Operands, q_at: Cursor, kv_at: Cursor, eighth: Int32):
    """Starts q @ k of a tile. ``eighth``: the index in the stage of the tile's first key, divided by 8."""
    start_mma(qk, ops.scores, ops.q[None, None, None, q_at.stage], ops.k[None, None, None, eighth, kv_at.stage])
