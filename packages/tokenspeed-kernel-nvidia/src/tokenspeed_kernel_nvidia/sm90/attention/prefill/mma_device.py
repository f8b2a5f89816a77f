"""The consumer warpgroups of `kernel_device`: the mainloop over blocks of keys.

A step issues q @ k of a block, then P @ V of the preceding block, and computes the block's softmax while P @ V runs. So P @ V of a
block overlaps the softmax of the next block, even if that block belongs to the next tile. P is the A operand, in registers. A
block's probabilities are written to these registers only after the preceding P @ V has read them.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import cutlass
from cutlass import Boolean, Float32, Int32, const_expr, cute
from cutlass.cute.nvgpu import warpgroup

from tokenspeed_kernel_nvidia.cutedsl import registers_device as registers
from tokenspeed_kernel_nvidia.cutedsl import softmax_device as softmax
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Cursor, advance, first_to_read
from tokenspeed_kernel_nvidia.sm90.attention.prefill.config import Config
from tokenspeed_kernel_nvidia.sm90.attention.prefill.fp8_softmax_device import Fp8Softmax
from tokenspeed_kernel_nvidia.sm90.attention.prefill.mask_device import LowerBounds, Masks
from tokenspeed_kernel_nvidia.sm90.attention.prefill.queries_device import QueryConverter
from tokenspeed_kernel_nvidia.sm90.attention.prefill.softmax_device import Softmax
from tokenspeed_kernel_nvidia.sm90.attention.prefill.store_device import Epilogue, Output, Sums
from tokenspeed_kernel_nvidia.sm90.attention.prefill.tile_device import Cursors, Rings, Shared, sync_warps, thread_and_row
from tokenspeed_kernel_nvidia.sm90.common.wgmma_device import start_mma

PINGPONG = 1  # the first named barrier of ping-pong scheduling: each warpgroup waits at its own barrier before it issues MMAs


@dataclass(frozen=True)
class Mmas:
    """The tiled MMAs: q @ k for a block of keys, q @ k for half a block, and P @ V."""

    qk: cute.TiledMma
    qk_half: cute.TiledMma
    pv: cute.TiledMma


@dataclass(frozen=True)
class Operands:
    """A warpgroup's MMA operands. The probabilities are in registers; the others are shared-memory descriptors, by ring stage."""

    q: cute.Tensor
    k: cute.Tensor
    k_half: cute.Tensor
    v: cute.Tensor
    probs: cute.Tensor


@dataclass(frozen=True)
class PingPong:
    """The barriers of the consumer warpgroups' ping-pong scheduling; see `Config.pingpong`. The warpgroups issue their MMAs in a
    fixed cyclic order. A barrier has 256 threads: those of the warpgroup that waits, and those of the one that signals."""

    config: Config

    @cute.jit
    def wait(self, wg: Int32):
        """Waits, before warpgroup ``wg`` issues MMAs, until the previous warpgroup has issued its MMAs."""
        if const_expr(self.config.pingpong):
            cute.arch.barrier(barrier_id=PINGPONG + wg, number_of_threads=256)

    @cute.jit
    def signal(self, wg: Int32):
        """Lets the next warpgroup issue its MMAs."""
        if const_expr(self.config.pingpong):
            behind = wg + 1
            if behind == self.config.warpgroups:
                behind = Int32(0)
            cute.arch.barrier_arrive(barrier_id=PINGPONG + behind, number_of_threads=256)


@dataclass(frozen=True)
class Consumers:
    """The consumer warpgroups.

    Attributes:
        masks, softmax, epilogue: the steps of a tile besides its GEMMs.
        queries: converts bfloat16 queries to float16 if the cache is fp8.
    """

    config: Config
    rings: Rings
    cursors: Cursors
    pingpong: PingPong
    queries: QueryConverter
    masks: Masks
    softmax: Softmax | Fp8Softmax
    epilogue: Epilogue

    @cute.jit
    def consume(
        self,
        shared: Shared,
        output: Output,
        scale: Float32,
        causal: Int32,
        window_left: Int32,
        to_cap: Optional[Float32],
        mmas: Mmas,
    ):
        """Computes this warpgroup's 64 rows of each tile of the CTA."""
        c = self.config
        thread, _, _ = cute.arch.thread_idx()
        thread -= 128
        wg = cute.arch.make_warp_uniform(thread // 128)
        n = c.block_n
        ops, acc = self.operands(shared, mmas, wg)

        q_at, k_at, v_at = self.cursors.first_q(wg), first_to_read(), first_to_read()
        if wg == 0:  # warpgroup 0 issues first: it signals in place of the last warpgroup, whose successor it is
            self.pingpong.signal(c.warpgroups - 1)

        shared.q_pipe.wait(q_at)
        working = shared.record(q_at).exists
        if working:
            sums = Sums(acc, cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32))
            # The first block of the first tile has no P @ V to overlap with.
            block, open_blocks, kv_len, hidden_0, hidden_1, _ = self.masks.upper_bounds(shared, q_at, wg, causal)
            begin = self.masks.lower_bounds(shared, q_at, wg, causal, window_left)
            tile_scale = self.scale_of(shared, q_at, scale, wg)
            scores = cute.make_rmem_tensor(mmas.qk.get_slice(0).partition_shape_C((c.block_m, n)), Float32)
            shared.k_pipe.wait(k_at)
            self.pingpong.wait(wg)
            start_mma(mmas.qk, scores, self.q_of(ops, q_at), ops.k[None, None, None, k_at.stage], steps=self.q_steps)
            self.pingpong.signal(wg)
            warpgroup.wait_group(0)
            shared.k_pipe.release(k_at)
            k_at = advance(k_at, c.kv_stages)
            if const_expr(c.capped):
                softmax.cap_by_tanh(scores, to_cap)
            self.masks.apply(scores, (hidden_0, hidden_1), block * n, begin)
            softmax.softmax_first(scores, sums.row_max, sums.row_sum, tile_scale, c.lift)
            self.softmax.put_first(scores, ops.probs)
            acc.fill(0.0)
            while working:
                block, k_at, v_at = self.finish_tile(
                    shared, mmas, ops, sums, tile_scale, to_cap, q_at, k_at, v_at, wg, (hidden_0, hidden_1), block, begin,
                    open_blocks, kv_len,
                )  # fmt: skip
                # This tile's last P @ V overlaps the first q @ k of the next tile.
                next_tile = self.cursors.next_queries(q_at)
                next_at = self.cursors.queries_at(next_tile)
                shared.q_pipe.wait(next_at)
                working = shared.record(next_at).exists
                if working:
                    block, open_blocks, kv_len, hidden_0, hidden_1, narrow = self.masks.upper_bounds(shared, next_at, wg, causal)
                    begin = self.masks.lower_bounds(shared, next_at, wg, causal, window_left)
                    first_key, hidden_from = block * n, (hidden_0, hidden_1)
                    tile_scale = self.scale_of(shared, next_at, scale, wg)
                    if narrow:
                        self.next_tile(
                            shared, output, tile_scale, to_cap, mmas.qk_half, mmas.pv, ops, ops.k_half, sums, q_at, next_at,
                            k_at, v_at, wg, hidden_from, first_key, begin, n // 2,
                        )  # fmt: skip
                    else:
                        self.next_tile(
                            shared, output, tile_scale, to_cap, mmas.qk, mmas.pv, ops, ops.k, sums, q_at, next_at, k_at, v_at, wg,
                            hidden_from, first_key, begin, n,
                        )  # fmt: skip
                    k_at, v_at = advance(k_at, c.kv_stages), advance(v_at, c.kv_stages)
                    q_at = next_tile
            shared.v_pipe.wait(v_at)
            start_mma(mmas.pv, acc, ops.probs, ops.v[None, None, None, v_at.stage], True)
            warpgroup.wait_group(0)
            self.epilogue.store(shared, output, mmas.pv, sums, self.cursors.queries_at(q_at), wg)

        if const_expr(c.store_by_tma):
            if thread % 128 < 32:
                cute.arch.cp_async_bulk_wait_group(0)

    def operands(self, shared: Shared, mmas: Mmas, wg: Int32):
        """Returns a warpgroup's MMA operands and output accumulator."""
        c = self.config
        n = c.block_n
        kind = self.rings.mma_dtype
        s_q, s_k = self.rings.q.tiles(shared.storage.q, dtype=kind), self.rings.k.tiles(shared.storage.k, dtype=kind)
        s_half = self.rings.k.tiles(shared.storage.k, n // 2, kind)
        if c.fp8:
            s_v = self.rings.transposed.tiles(shared.storage.v, dtype=kind)
        else:
            s_v = self.rings.v.transposed(shared.storage.v, kind if c.fp8_cache else None)
        qk, half, pv = (mma.get_slice(wg * 128) for mma in (mmas.qk, mmas.qk_half, mmas.pv))
        ops = Operands(
            qk.make_fragment_A(qk.partition_A(s_q)),
            qk.make_fragment_B(qk.partition_B(s_k)),
            half.make_fragment_B(half.partition_B(s_half)),
            pv.make_fragment_B(pv.partition_B(s_v)),
            pv.make_fragment_A(pv.partition_shape_A((c.block_m, n))),
        )
        return ops, cute.make_rmem_tensor(pv.partition_shape_C((c.block_m, c.v_columns)), Float32)

    @cute.jit
    def finish_tile(
        self,
        shared: Shared,
        mmas: Mmas,
        ops: Operands,
        sums: Sums,
        scale: Float32,
        to_cap: Optional[Float32],
        q_at: Cursor,
        k_at: Cursor,
        v_at: Cursor,
        wg: Int32,
        hidden_from: tuple,
        block: Int32,
        begin: LowerBounds,
        open_blocks: Int32,
        kv_len: Int32,
    ):
        """Computes the blocks of a tile after the first one, in descending order: first those with a causal mask, then those
        without a mask, then those that the window masks. Returns the last block, and the cursors of the next K block and V block.
        """
        c = self.config
        n = c.block_n
        if const_expr(c.splits_q):
            if block == begin.block:  # the first block is also the last one
                shared.q_pipe.release(q_at)
        # Probabilities beyond the end of the sequence are 0, but V there may be NaN, and 0 * NaN is not 0. Only the first block of
        # a tile can extend beyond the end.
        if const_expr(not c.converts):  # otherwise the converter warps have zeroed V there
            if kv_len < (block + 1) * n:
                shared.v_pipe.wait(v_at)
                self.clear_beyond(shared, v_at, kv_len - block * n, wg)
        while block > open_blocks:
            block -= 1
            k_at, v_at = self.step(
                shared, mmas, ops, sums, scale, to_cap, q_at, k_at, v_at, wg, hidden_from, block * n, begin, True
            )  # fmt: skip
        if const_expr(c.windowed):
            while block > begin.full_block:
                block -= 1
                k_at, v_at = self.step(
                    shared, mmas, ops, sums, scale, to_cap, q_at, k_at, v_at, wg, hidden_from, block * n, begin, False
                )  # fmt: skip
        while block > begin.block:
            block -= 1
            k_at, v_at = self.step(
                shared, mmas, ops, sums, scale, to_cap, q_at, k_at, v_at, wg, hidden_from, block * n, begin, c.windowed
            )  # fmt: skip
        return block, k_at, v_at

    @cute.jit
    def step(
        self,
        shared: Shared,
        mmas: Mmas,
        ops: Operands,
        sums: Sums,
        scale: Float32,
        to_cap: Optional[Float32],
        q_at: Cursor,
        k_at: Cursor,
        v_at: Cursor,
        wg: Int32,
        hidden_from: tuple,
        first_key: Int32,
        begin: LowerBounds,
        masked: cutlass.Constexpr[bool],
    ):
        """Computes q @ k and softmax of one block of keys, overlapped with P @ V of the preceding block. Returns the cursors of the
        next K block and V block.

        Args:
            hidden_from, begin: upper and lower bounds of the keys that this thread's rows see, see `Masks.apply`.
            first_key: the block's first key.
            masked: whether the block may need a mask.
        """
        c = self.config
        q = self.q_of(ops, self.cursors.queries_at(q_at))
        scores = cute.make_rmem_tensor(mmas.qk.get_slice(0).partition_shape_C((c.block_m, c.block_n)), Float32)
        k_at = self.cursors.keys_behind(k_at, v_at)
        shared.k_pipe.wait(k_at)
        self.pingpong.wait(wg)
        start_mma(mmas.qk, scores, q, ops.k[None, None, None, k_at.stage], steps=self.q_steps)
        shared.v_pipe.wait(v_at)
        start_mma(mmas.pv, sums.acc, ops.probs, ops.v[None, None, None, v_at.stage], True)
        self.pingpong.signal(wg)
        warpgroup.wait_group(1)
        shared.k_pipe.release(k_at)
        if const_expr(c.splits_q):
            if first_key == begin.block * c.block_n:
                shared.q_pipe.release(q_at)
        if const_expr(c.capped):
            softmax.cap_by_tanh(scores, to_cap)
        if const_expr(masked):
            self.masks.apply(scores, hidden_from, first_key, begin)
        grown, factor, of_block, weights = self.softmax.step(scores, sums.row_max, sums.row_sum, scale)
        self.finish_pv(sums.acc, grown, factor, of_block)
        shared.v_pipe.release(v_at)
        self.softmax.put(weights, ops.probs)
        return advance(k_at, c.kv_stages), advance(v_at, c.kv_stages)

    @cute.jit
    def next_tile(
        self,
        shared: Shared,
        output: Output,
        scale: Float32,
        to_cap: Optional[Float32],
        qk: cute.TiledMma,
        pv: cute.TiledMma,
        ops: Operands,
        k: cute.Tensor,
        sums: Sums,
        q_at: Cursor,
        next_at: Cursor,
        k_at: Cursor,
        v_at: Cursor,
        wg: Int32,
        hidden_from: tuple,
        first_key: Int32,
        begin: LowerBounds,
        columns: cutlass.Constexpr[int],
    ):
        """Finishes this tile, and computes the next tile's first block. The next tile's first q @ k and softmax overlap the last P
        @ V of this tile.

        Args:
            qk, k, columns: the tiled MMA of the next tile's first block, the K operand, and the number of keys (a block or half a
                block).
        """
        c = self.config
        k_at = self.cursors.keys_behind(k_at, v_at)
        q, k = self.q_of(ops, next_at), k[None, None, None, k_at.stage]
        v = ops.v[None, None, None, v_at.stage]
        scores = cute.make_rmem_tensor(qk.get_slice(0).partition_shape_C((c.block_m, columns)), Float32)
        shared.k_pipe.wait(k_at)
        self.pingpong.wait(wg)
        start_mma(qk, scores, q, k, steps=self.q_steps)
        shared.v_pipe.wait(v_at)
        start_mma(pv, sums.acc, ops.probs, v, True)
        self.pingpong.signal(wg)
        warpgroup.wait_group(1)
        shared.k_pipe.release(k_at)
        next_max, next_sum = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        if const_expr(c.capped):
            softmax.cap_by_tanh(scores, to_cap)
        self.masks.apply(scores, hidden_from, first_key, begin)
        softmax.softmax_first(scores, next_max, next_sum, scale, c.lift)
        # Without a rescale: this tile's row max is final. The sums only make the wait follow the exponentials, see `finish_pv`.
        self.finish_pv(sums.acc, Boolean(False), next_sum, next_sum)
        shared.v_pipe.release(v_at)
        self.softmax.put_first(scores, ops.probs)
        self.epilogue.store(shared, output, pv, sums, self.cursors.queries_at(q_at), wg)
        for r in cutlass.range_constexpr(2):
            sums.row_max[r], sums.row_sum[r] = next_max[r], next_sum[r]
        sums.acc.fill(0.0)

    def q_of(self, ops: Operands, at: Cursor) -> cute.Tensor:
        """Returns the Q tile at ``at`` as the A operand of q @ k. If `Config.splits_q`, there is one Q tile, and the stage of
        ``at`` is a warpgroup's index."""
        return ops.q[None, None, None, 0 if self.config.splits_q else at.stage]

    @property
    def q_steps(self) -> int:
        """The number of k-steps (32 bytes of head_dim) of q @ k, without those that would read padding only."""
        return -(-self.config.head_dim * self.config.bytes // 32)

    @cute.jit
    def scale_of(self, shared: Shared, q_at: Cursor, scale: Float32, wg: Int32) -> Float32:
        """Returns the factor of a tile's scores. Converts the tile's queries to float16 if the MMA needs float16."""
        if const_expr(self.config.converts):
            scale *= shared.record(q_at).qk_scale
        if const_expr(self.config.fp8_cache and self.rings.dtype is not cutlass.Float16):
            if const_expr(self.config.head_dim == 256):
                scale *= self.queries.convert_panels_to_float16(shared, q_at, wg)
            else:
                scale *= self.queries.convert_to_float16(shared, q_at, wg)
        return scale

    @cute.jit
    def finish_pv(self, acc: cute.Tensor, grown: Boolean, factor: cute.Tensor, of_block: list):
        """Waits for P @ V, and rescales the output accumulator if a row max has grown in some lane of the warp.

        Sums of exponentials (``of_block``) are never negative: the condition only makes the branch depend on these sums. Without
        the condition, ptxas moved the wait for P @ V above the exponentials. Most exponentials then did not overlap an MMA.
        """
        if registers.any_lane(grown | (of_block[0] < 0.0) | (of_block[1] < 0.0)):
            warpgroup.wait_group(0)
            for r in cutlass.range_constexpr(2):
                registers.scale_row(acc, r, factor[r])
        warpgroup.wait_group(0)

    @cute.jit
    def clear_beyond(self, shared: Shared, v_at: Cursor, valid: Int32, wg: Int32):
        """Zeroes V of a block, in shared memory, from row ``valid`` on. Every warpgroup zeroes all of these rows, with the same
        result, so warpgroups need not wait for each other."""
        c = self.config
        thread = thread_and_row(self.config, wg)[0] % 128
        values = self.rings.v.chunks(shared.storage.v)
        chunks = c.panel // 8  # 16-byte chunks of a panel's row
        zeros = cute.make_rmem_tensor(8, self.rings.dtype)
        zeros.fill(0.0)
        row = valid + thread // chunks
        while row < c.block_n:
            for panel in cutlass.range_constexpr(self.rings.v.panels):
                cute.autovec_copy(zeros, values[row, (None, thread % chunks), panel, v_at.stage])
            row += 128 // chunks
        cute.arch.fence_view_async_shared()
        sync_warps(wg)
