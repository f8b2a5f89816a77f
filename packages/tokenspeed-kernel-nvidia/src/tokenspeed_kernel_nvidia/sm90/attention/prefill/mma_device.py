"""The consumer warpgroups of `kernel_device`: wgmma, online softmax, epilogue."""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import warp, warpgroup

from tokenspeed_kernel_nvidia.cutedsl import mask_device as masks
from tokenspeed_kernel_nvidia.cutedsl import registers_device as registers
from tokenspeed_kernel_nvidia.cutedsl import softmax_device as softmax
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Cursor, advance, first_to_read, nth_to_read
from tokenspeed_kernel_nvidia.cutedsl.softmax_device import Sinks
from tokenspeed_kernel_nvidia.sm90.attention.prefill import fp8_device as fp8
from tokenspeed_kernel_nvidia.sm90.attention.prefill.queries_device import Queries
from tokenspeed_kernel_nvidia.sm90.attention.prefill.tile_device import Shared
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import PANEL, Tma, tma_store
from tokenspeed_kernel_nvidia.sm90.common.wgmma_device import start_mma

PINGPONG = 1  # named barriers for ping-pong scheduling, one per warpgroup, which give the warpgroup permission to issue its MMAs


@dataclass(frozen=True)
class Mmas:
    """The MMAs: q @ k of a block of keys and of half a block, and P @ V."""

    qk: cute.TiledMma
    qk_half: cute.TiledMma
    pv: cute.TiledMma


@dataclass(frozen=True)
class Output:
    """Where results go.

    Attributes:
        tma: TMA stores to ``out``; None where `Config.store_by_tma` is false.
        out: ``[tokens, heads, head_dim]``.
        lse: address of float32 ``[tokens, heads]``, 0 for none.
        sinks: added to the softmax's denominator.
    """

    tma: Optional[Tma]
    out: cute.Tensor
    lse: Int64
    sinks: Sinks


@dataclass(frozen=True)
class Operands:
    """A warpgroup's MMA operands. All operands except the probabilities are shared-memory descriptors, indexed by stage."""

    q: cute.Tensor
    k: cute.Tensor
    k_half: cute.Tensor
    v: cute.Tensor
    probs: cute.Tensor


@dataclass(frozen=True)
class Begin:
    """Lower bounds of a tile's windows, in blocks of keys; all 0 without a window.

    Attributes:
        block: the first block that some row sees.
        full_block: the first block that lies wholly within every row's lower bound.
        width: keys of a row's window.
    """

    block: Int32
    full_block: Int32
    width: Int32


@dataclass(frozen=True)
class Sums:
    """A thread's state for its two rows of a tile: output accumulator, running row max and row sum."""

    acc: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor


class Consumers(Queries):
    """Mixin of the consumer warpgroups. P @ V of a block overlaps with the softmax of the next block, even of the next tile."""

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
        kind = self.mma_dtype
        s_q, s_k = self.q_ring.tiles(shared.storage.q, dtype=kind), self.kv_ring.tiles(shared.storage.k, dtype=kind)
        s_half = self.kv_ring.tiles(shared.storage.k, n // 2, kind)
        if const_expr(c.fp8):
            s_v = self.transposed_ring.tiles(shared.storage.v, dtype=kind)
        else:
            s_v = self.v_ring.transposed(shared.storage.v, kind if c.fp8_cache else None)
        qk, half, pv = (mma.get_slice(wg * 128) for mma in (mmas.qk, mmas.qk_half, mmas.pv))
        ops = Operands(
            qk.make_fragment_A(qk.partition_A(s_q)),
            qk.make_fragment_B(qk.partition_B(s_k)),
            half.make_fragment_B(half.partition_B(s_half)),
            pv.make_fragment_B(pv.partition_B(s_v)),
            pv.make_fragment_A(pv.partition_shape_A((c.block_m, n))),
        )
        acc = cute.make_rmem_tensor(pv.partition_shape_C((c.block_m, c.v_columns)), Float32)

        q_at, k_at, v_at = self.first_q(wg), first_to_read(), first_to_read()
        if wg == 0:
            self.pingpong_signal(c.warpgroups - 1)

        shared.q_pipe.wait(q_at)
        working = shared.record(q_at).exists
        if working:
            sums = Sums(acc, cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32))
            # The first block of the first tile has no P @ V to overlap with.
            block, open_blocks, kv_len, hidden_0, hidden_1, _ = self.view(shared, q_at, wg, causal)
            begin = self.begin_of(shared, q_at, wg, causal, window_left)
            tile_scale = self.scale_of(shared, q_at, scale, wg)
            scores = cute.make_rmem_tensor(qk.partition_shape_C((c.block_m, n)), Float32)
            shared.k_pipe.wait(k_at)
            self.pingpong_wait(wg)
            start_mma(mmas.qk, scores, self.q_of(ops, q_at), ops.k[None, None, None, k_at.stage], steps=self.q_steps)
            self.pingpong_signal(wg)
            warpgroup.wait_group(0)
            shared.k_pipe.release(k_at)
            k_at = advance(k_at, c.kv_stages)
            if const_expr(c.capped):
                softmax.cap_by_tanh(scores, to_cap)
            self.mask(scores, (hidden_0, hidden_1), block * n, begin)
            softmax.softmax_first(scores, sums.row_max, sums.row_sum, tile_scale, c.lift)
            self.round_weights(scores, ops.probs)
            acc.fill(0.0)
            while working:
                if const_expr(c.splits_q):
                    if block == begin.block:  # the first block is also the last one
                        shared.q_pipe.release(q_at)
                # Probabilities beyond the sequence are 0, but values there may be NaN.
                if const_expr(not c.converts):  # else the converter warps have zeroed them
                    if kv_len < (block + 1) * n:
                        shared.v_pipe.wait(v_at)
                        self.clear_beyond(shared, v_at, kv_len - block * n, wg)
                while block > open_blocks:
                    block -= 1
                    k_at, v_at = self.step(
                        shared, mmas, ops, sums, tile_scale, to_cap, q_at, k_at, v_at, wg, (hidden_0, hidden_1), block * n,
                        begin, True,
                    )  # fmt: skip
                if const_expr(c.windowed):
                    while block > begin.full_block:
                        block -= 1
                        k_at, v_at = self.step(
                            shared, mmas, ops, sums, tile_scale, to_cap, q_at, k_at, v_at, wg, (hidden_0, hidden_1), block * n,
                            begin, False,
                        )  # fmt: skip
                while block > begin.block:
                    block -= 1
                    k_at, v_at = self.step(
                        shared, mmas, ops, sums, tile_scale, to_cap, q_at, k_at, v_at, wg, (hidden_0, hidden_1), block * n,
                        begin, c.windowed,
                    )  # fmt: skip

                # The last P @ V overlaps with the first q @ k of the next tile.
                next_tile = self.next_queries(q_at)
                next_at = self.queries_at(next_tile)
                shared.q_pipe.wait(next_at)
                working = shared.record(next_at).exists
                if working:
                    block, open_blocks, kv_len, hidden_0, hidden_1, narrow = self.view(shared, next_at, wg, causal)
                    begin = self.begin_of(shared, next_at, wg, causal, window_left)
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
            self.store(shared, output, mmas.pv, sums, self.queries_at(q_at), wg)

        if const_expr(c.store_by_tma):
            if thread % 128 < 32:
                cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def view(self, shared: Shared, q_at: Cursor, wg: Int32, causal: Int32):
        """Upper bounds of the keys that a tile sees.

        Returns:
            the tile's last block of keys; the number of leading blocks that need no mask at their end; keys of the sequence; for
            each of this thread's two rows the first masked key, relative to the thread's first column; whether no row sees the
            second half of the last block.
        """
        c = self.config
        record = shared.record(q_at)
        q_len, kv_len, position = record.q_len, record.kv_len, record.position
        thread, row = self.thread_and_row(wg)
        column = 2 * (thread % 4)
        seen = self.keys_seen(q_len, kv_len, position, causal)
        block = (seen - 1) // c.block_n
        open_blocks, hidden_0, hidden_1 = kv_len // c.block_n, kv_len, kv_len
        if causal != 0:
            first_hidden = kv_len - q_len + position + 1
            open_blocks = cutlass.max(first_hidden, 0) // c.block_n
            hidden_0 = cutlass.min(first_hidden + row // c.gqa_ratio, kv_len)
            hidden_1 = cutlass.min(first_hidden + (row + 8) // c.gqa_ratio, kv_len)
        narrow = seen - block * c.block_n <= c.block_n // 2
        return block, open_blocks, kv_len, hidden_0 - column, hidden_1 - column, narrow

    # -- the loop over keys ----------------------------------------------------------------------------------------------------

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
        begin: Begin,
        masked: cutlass.Constexpr[bool],
    ):
        """One block of keys: its q @ k and softmax, overlapped with P @ V of the preceding block.

        Args:
            hidden_from, first_key, begin: see `mask`.
            masked: whether some key of the block is masked in some row.
        """
        c = self.config
        q = self.q_of(ops, self.queries_at(q_at))
        scores = cute.make_rmem_tensor(mmas.qk.get_slice(0).partition_shape_C((c.block_m, c.block_n)), Float32)
        k_at = self.keys_behind(k_at, v_at)
        shared.k_pipe.wait(k_at)
        self.pingpong_wait(wg)
        start_mma(mmas.qk, scores, q, ops.k[None, None, None, k_at.stage], steps=self.q_steps)
        shared.v_pipe.wait(v_at)
        start_mma(mmas.pv, sums.acc, ops.probs, ops.v[None, None, None, v_at.stage], True)
        self.pingpong_signal(wg)
        warpgroup.wait_group(1)
        shared.k_pipe.release(k_at)
        if const_expr(c.splits_q):
            if first_key == begin.block * c.block_n:
                shared.q_pipe.release(q_at)
        if const_expr(c.capped):
            softmax.cap_by_tanh(scores, to_cap)
        if const_expr(masked):
            self.mask(scores, hidden_from, first_key, begin)
        if const_expr(c.fp8):
            words = cute.make_rmem_tensor(c.block_n // 8, cutlass.Uint32)
            grown, factor, of_block = fp8.weigh_step(scores, words, sums.row_max, sums.row_sum, scale, c.lift)
            self.finish_pv(sums.acc, grown, factor, of_block)
            shared.v_pipe.release(v_at)
            fp8.move(words, ops.probs)
        else:
            grown, factor, of_block = softmax.softmax_step(scores, sums.row_max, sums.row_sum, scale, c.lazy)
            self.finish_pv(sums.acc, grown, factor, of_block)
            shared.v_pipe.release(v_at)
            self.round_weights(scores, ops.probs)
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
        begin: Begin,
        columns: cutlass.Constexpr[int],
    ):
        """Advances to the next tile. The next tile's first q @ k and softmax overlap the last P @ V of this tile.

        Args:
            qk, k, columns: the MMA of the first block, the block's keys, and their number (a block or half a block).
        """
        c = self.config
        k_at = self.keys_behind(k_at, v_at)
        q, k = self.q_of(ops, next_at), k[None, None, None, k_at.stage]
        v = ops.v[None, None, None, v_at.stage]
        scores = cute.make_rmem_tensor(qk.get_slice(0).partition_shape_C((c.block_m, columns)), Float32)
        shared.k_pipe.wait(k_at)
        self.pingpong_wait(wg)
        start_mma(qk, scores, q, k, steps=self.q_steps)
        shared.v_pipe.wait(v_at)
        start_mma(pv, sums.acc, ops.probs, v, True)
        self.pingpong_signal(wg)
        warpgroup.wait_group(1)
        shared.k_pipe.release(k_at)
        next_max, next_sum = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        if const_expr(c.capped):
            softmax.cap_by_tanh(scores, to_cap)
        self.mask(scores, hidden_from, first_key, begin)
        softmax.softmax_first(scores, next_max, next_sum, scale, c.lift)
        self.finish_pv(sums.acc, Boolean(False), next_sum, next_sum)
        shared.v_pipe.release(v_at)
        self.round_weights(scores, ops.probs)
        self.store(shared, output, pv, sums, self.queries_at(q_at), wg)
        for r in cutlass.range_constexpr(2):
            sums.row_max[r], sums.row_sum[r] = next_max[r], next_sum[r]
        sums.acc.fill(0.0)

    def q_of(self, ops: Operands, at: Cursor) -> cute.Tensor:
        """A tile's queries, as the A operand of q @ k."""
        return ops.q[None, None, None, 0 if self.config.splits_q else at.stage]

    @property
    def q_steps(self) -> int:
        """k-steps of 32 bytes of q @ k; columns of padding are left out."""
        return -(-self.config.head_dim * self.config.bytes // 32)

    def next_queries(self, q_at: Cursor) -> Cursor:
        """Returns the next tile's Q cursor, in the form that `consume` keeps: see `queries_at`."""
        return Cursor(q_at.stage + 1, q_at.phase) if self.counts_tiles else self.next_q(q_at)

    def queries_at(self, q_at: Cursor) -> Cursor:
        """Returns a tile's Q cursor. If `counts_tiles`, ``q_at.stage`` is the tile's index."""
        return nth_to_read(q_at.stage, self.config.q_stages) if self.counts_tiles else q_at

    @property
    def counts_tiles(self) -> bool:
        """Whether `consume` keeps the tile's index instead of a cursor: one register instead of two."""
        return self.config.converts and not self.config.splits_q

    @cute.jit
    def keys_behind(self, k_at: Cursor, v_at: Cursor) -> Cursor:
        """Returns ``k_at``, the cursor after ``v_at``; recomputed where warps convert, as no register is left to keep it in."""
        return advance(v_at, self.config.kv_stages) if const_expr(self.config.converts) else k_at

    @cute.jit
    def scale_of(self, shared: Shared, q_at: Cursor, scale: Float32, wg: Int32) -> Float32:
        """Returns the factor of a tile's scores. Converts the tile's queries to float16 if the MMA needs float16."""
        if const_expr(self.config.converts):
            scale *= shared.record(q_at).qk_scale
        if const_expr(self.config.fp8_cache and self.dtype is not cutlass.Float16):
            if const_expr(self.config.head_dim == 256):
                scale *= self.convert_panels_to_float16(shared, q_at, wg)
            else:
                scale *= self.convert_to_float16(shared, q_at, wg)
        return scale

    @cute.jit
    def round_weights(self, weights: cute.Tensor, probs: cute.Tensor):
        """Rounds probabilities to the A operand of P @ V. Probabilities of half a block are padded with zeros."""
        if const_expr(self.config.fp8):
            words = cute.recast_tensor(probs, cutlass.Uint32)
            for i in cutlass.range_constexpr(cute.size(words)):
                elements = fp8.elements_of_word(i)
                if const_expr(elements[0] < cute.size(weights)):
                    words[i] = registers.pack_fp8(*(weights[at] for at in elements))
                else:
                    words[i] = cutlass.Uint32(0)
        elif const_expr(cute.size(weights) < cute.size(probs)):
            part = cute.make_tensor(probs.iterator, cute.make_layout(cute.size(weights)))
            registers.round_to(weights, part)
            for i in cutlass.range_constexpr(cute.size(weights), cute.size(probs)):
                probs[i] = self.mma_dtype(0.0)
        else:
            registers.round_to(weights, probs)

    @cute.jit
    def pingpong_wait(self, wg: Int32):
        """Ping-pong: waits until the previous warpgroup has issued its MMAs."""
        if const_expr(self.config.pingpong):
            cute.arch.barrier(barrier_id=PINGPONG + wg, number_of_threads=256)

    @cute.jit
    def pingpong_signal(self, wg: Int32):
        """Ping-pong: lets the next warpgroup issue its MMAs."""
        if const_expr(self.config.pingpong):
            behind = wg + 1
            if behind == self.config.warpgroups:
                behind = Int32(0)
            cute.arch.barrier_arrive(barrier_id=PINGPONG + behind, number_of_threads=256)

    @cute.jit
    def mask(self, scores: cute.Tensor, hidden_from: tuple, first_key: Int32, begin: Begin):
        """In the block at ``first_key``, masks keys from ``hidden_from[r]`` on in this thread's row r, and keys before the
        window."""
        for r in cutlass.range_constexpr(2):
            masks.hide_from(scores, r, hidden_from[r] - first_key)
            if const_expr(self.config.windowed):
                masks.hide_before(scores, r, hidden_from[r] - begin.width - first_key)

    @cute.jit
    def begin_of(self, shared: Shared, q_at: Cursor, wg: Int32, causal: Int32, window_left: Int32):
        """Lower bounds of a tile's windows."""
        block, full_block, width = Int32(0), Int32(0), Int32(0)
        if const_expr(self.config.windowed):
            n = self.config.block_n
            record = shared.record(q_at)
            block, _ = self.blocks_seen(record.q_len, record.kv_len, record.position, causal, window_left)
            last = record.kv_len - record.q_len + cutlass.min(record.position + self.config.positions, record.q_len) - 1
            full_block = cutlass.max(last - window_left + n - 1, 0) // n
            width = window_left + 1
        return Begin(block, full_block, width)

    @cute.jit
    def finish_pv(self, acc: cute.Tensor, grown: Boolean, factor: cute.Tensor, of_block: list):
        """Waits for P @ V, and rescales the accumulator where a lane's row max has grown.

        Sums of exponentials (``of_block``) are never negative: the condition only makes the branch depend on them. Without the
        condition, ptxas moved the wait for P @ V above the exponentials. Most exponentials then did not overlap an MMA.
        """
        if registers.any_lane(grown | (of_block[0] < 0.0) | (of_block[1] < 0.0)):
            warpgroup.wait_group(0)
            for r in cutlass.range_constexpr(2):
                registers.scale_row(acc, r, factor[r])
        warpgroup.wait_group(0)

    @cute.jit
    def clear_beyond(self, shared: Shared, v_at: Cursor, valid: Int32, wg: Int32):
        """Zeroes a block's values from row ``valid`` on. Every warpgroup zeroes all of these rows itself, with the same result."""
        c = self.config
        thread = self.thread_and_row(wg)[0] % 128
        values = self.v_ring.chunks(shared.storage.v)
        chunks = c.panel // 8  # 16-byte chunks of a panel's row
        zeros = cute.make_rmem_tensor(8, self.dtype)
        zeros.fill(0.0)
        row = valid + thread // chunks
        while row < c.block_n:
            for panel in cutlass.range_constexpr(self.v_ring.panels):
                cute.autovec_copy(zeros, values[row, (None, thread % chunks), panel, v_at.stage])
            row += 128 // chunks
        cute.arch.fence_view_async_shared()
        self.sync_warps(wg)

    # -- output ----------------------------------------------------------------------------------------------------------------

    @cute.jit
    def store(self, shared: Shared, output: Output, pv: cute.TiledMma, sums: Sums, q_at: Cursor, wg: Int32):
        """Epilogue: normalises by the row sum, sink included, and stores this warpgroup's rows of a tile."""
        c = self.config
        out = output.out
        thread, row = self.thread_and_row(wg)
        record = shared.record(q_at)
        start, q_len, position, kv_head = record.first_token, record.q_len, record.position, record.kv_head
        v_scale = record.v_scale if const_expr(c.converts) else Float32(1.0)
        if const_expr(not c.splits_q):
            shared.q_pipe.release(q_at)
        for r in cutlass.range_constexpr(2):
            query = position + (row + 8 * r) // c.gqa_ratio
            q_head = kv_head * c.gqa_ratio + (row + 8 * r) % c.gqa_ratio
            sink = output.sinks.load(q_head)
            highest, factor = softmax.raise_to(sums.row_max[r], sink)
            total = registers.quad_sum(sums.row_sum[r]) * factor + softmax.exp2(sink - highest)
            factor = Float32(0.0) if total == 0.0 else factor / total
            registers.scale_row(sums.acc, r, factor * v_scale if const_expr(c.converts) else factor)
            if output.lse != 0:
                if query < q_len and row + 8 * r < c.gqa_ratio * c.positions and thread % 4 == 0:
                    value = (highest + cute.math.log2(total, fastmath=True)) * softmax.LN2
                    at = Int64(start + query) * out.shape[1] + q_head
                    cute.make_ptr(Float32, output.lse, cute.AddressSpace.gmem)[at] = -Float32.inf if total == 0.0 else value

        if const_expr(c.stores_from_registers):
            self.store_rows(out, sums.acc, (start, q_len, position, kv_head), thread, row)
        else:
            self.store_tile(shared, output, pv, sums.acc, (start, q_len, position, kv_head), thread, wg)

    @cute.jit
    def store_tile(
        self, shared: Shared, output: Output, pv: cute.TiledMma, acc: cute.Tensor, numbers: tuple, thread: Int32, wg: Int32
    ):
        """Stores this warpgroup's rows of a tile through shared memory, by TMA where all belong to the sequence.

        Args:
            numbers: the sequence's first token, its number of queries, the tile's first query in the sequence, the KV head.
        """
        c = self.config
        out = output.out
        start, q_len, position, kv_head = numbers
        # Each warpgroup has its own rows of the buffer. The previous TMA store may still be reading them.
        rounded = cute.make_fragment_like(acc, self.dtype)
        registers.round_to(acc, rounded)
        if const_expr(c.store_by_tma):
            if thread % 128 < 32:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
        self.sync_warps(wg)
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype)
        mine = cute.make_tiled_copy_C(stmatrix, pv).get_slice(thread)
        cute.copy(stmatrix, mine.retile(rounded), mine.partition_D(self.out_ring.tiles(shared.storage.out)[None, None, 0]))
        first_row = wg * 64
        whole = Boolean(False)
        if const_expr(c.store_by_tma):
            cute.arch.fence_view_async_shared()
            whole = position + (wg + 1) * (64 // c.gqa_ratio) <= q_len
        self.sync_warps(wg)
        if const_expr(c.store_by_tma):
            if whole:
                if thread % 128 < 32:
                    positions = 64 // c.gqa_ratio
                    boxes = self.out_ring.packed_boxes(shared.storage.out, c.gqa_ratio, positions, c.warpgroups)
                    token = start + position + wg * positions
                    for panel in cutlass.range_constexpr(self.out_ring.panels):
                        target = cute.domain_offset(((kv_head * c.gqa_ratio, token), panel * PANEL), output.tma.tensor)
                        box = ((c.gqa_ratio, positions), PANEL)
                        tma_store(output.tma.atom, target, box, boxes[None, None, panel, wg, 0])
                    cute.arch.cp_async_bulk_commit_group()
        if not whole:
            self.store_some(shared, out, start, q_len, position, kv_head, thread, first_row)

    @cute.jit
    def store_some(
        self,
        shared: Shared,
        out: cute.Tensor,
        start: Int32,
        q_len: Int32,
        position: Int32,
        kv_head: Int32,
        thread: Int32,
        first_row: Int32,
    ):
        """Stores this warpgroup's output rows that belong to the sequence, 16 bytes at a time."""
        c = self.config
        chunks = c.head_dim // 8
        s_chunks = self.out_ring.chunks(shared.storage.out)
        g_chunks = cute.make_tensor(
            out.iterator,
            cute.make_layout((out.shape[0], out.shape[1], 8, chunks), stride=(out.stride[0], out.stride[1], 1, 8)),
        )
        chunk = thread % chunks
        eight = cute.make_rmem_tensor(8, self.dtype)
        for i in cutlass.range_constexpr(64 * chunks // 128):
            r = first_row + i * (128 // chunks) + (thread % 128) // chunks
            query = position + r // c.gqa_ratio
            if query < q_len and r < c.gqa_ratio * c.positions:
                cute.autovec_copy(s_chunks[r, (None, chunk % 8), chunk // 8, 0], eight)
                cute.autovec_copy(eight, g_chunks[start + query, kv_head * c.gqa_ratio + r % c.gqa_ratio, None, chunk])

    @cute.jit
    def store_rows(self, out: cute.Tensor, acc: cute.Tensor, numbers: tuple, thread: Int32, row: Int32):
        """Stores this thread's two rows of a tile from registers, 16 bytes at a time.

        Args:
            numbers: see `store_tile`.
            row: the thread's first row; its other row is ``row + 8``.
        """
        c = self.config
        start, q_len, position, kv_head = numbers
        lane = thread % 4
        for r in cutlass.range_constexpr(2):
            query = position + (row + 8 * r) // c.gqa_ratio
            q_head = kv_head * c.gqa_ratio + (row + 8 * r) % c.gqa_ratio
            is_row = (query < q_len) & (row + 8 * r < c.gqa_ratio * c.positions)
            for first in cutlass.range_constexpr(0, c.v_columns // 8, 4):
                # A lane holds two columns in each of four groups of eight. The transpose gives the lane one whole group.
                own = [registers.pack(self.dtype, acc[4 * j + 2 * r], acc[4 * j + 2 * r + 1]) for j in range(first, first + 4)]
                words = registers.transpose_quad(own, lane)
                column = 8 * (first + lane)
                if is_row & (column < c.widths[1]):
                    at = out.iterator + (Int64(start + query) * out.stride[0] + Int64(q_head) * out.stride[1] + column)
                    registers.store_words(at.toint(), words)
