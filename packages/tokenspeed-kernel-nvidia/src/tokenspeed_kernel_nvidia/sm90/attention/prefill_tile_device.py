"""The consumers of `prefill_device`: products, softmax, output."""

from __future__ import annotations

from typing import Optional

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import cpasync, warp, warpgroup

from . import registers
from .prefill import Config


class Compute:
    def __init__(self, config: Config):
        self.config = config
        self.dtype = registers.type_of(config.dtype)
        self.head_dim = config.head_dim
        self.halves = config.head_dim // 64
        self.group = config.group
        self.positions = config.positions
        self.block_m = config.block_m
        self.block_n = config.block_n
        self.stages = config.stages
        self.consumers = config.block_m // 64
        self.threads = 128 * (self.consumers + 1)
        self.paged = config.page_size > 0
        self.box = min(config.page_size, self.block_n) if self.paged else self.block_n
        self.store_by_tma = 64 % config.group == 0
        self.q_bytes = config.group * config.positions * config.head_dim * 2
        self.kv_bytes = config.block_n * config.head_dim * 2

    @cute.jit
    def advance(self, stage: Int32, phase: Int32, stages: cutlass.Constexpr[int]):
        stage += 1
        if stage == stages:
            stage = Int32(0)
            phase ^= 1
        return stage, phase

    @cute.jit
    def keys_seen(self, q_len: Int32, kv_len: Int32, position: Int32, causal: Int32) -> Int32:
        """How many keys, from the first on, some row of a tile sees; 1 where there are none, because a tile walks a block."""
        seen = kv_len
        if causal != 0:
            seen = kv_len - q_len + cutlass.min(position + self.positions, q_len)
        return cutlass.max(seen, 1)

    # -- a consumer: products, softmax, output ----------------------------------------------------------------------------------

    @cute.jit
    def consume(
        self,
        storage,
        o_atom: Optional[cute.CopyAtom],
        o_tma: Optional[cute.Tensor],
        out: cute.Tensor,
        lse: Int64,
        sinks: Int64,
        sinks_kind: Int32,
        scale: Float32,
        causal: Int32,
        mma_qk: cute.TiledMma,
        mma_half: cute.TiledMma,
        mma_pv: cute.TiledMma,
    ):
        thread, _, _ = cute.arch.thread_idx()
        thread -= 128
        group_index = cute.arch.make_warp_uniform(thread // 128)
        swizzle = cute.make_swizzle(3, 4, 3)
        m, n, d = self.block_m, self.block_n, self.head_dim

        def shared(memory, rows, stages, taken):
            layout = cute.make_layout((taken, (64, self.halves), stages), stride=(64, (1, rows * 64), rows * d))
            return memory.get_tensor(layout, swizzle=swizzle)

        def shared_transposed(memory, rows, stages):
            layout = cute.make_layout(((64, self.halves), rows, stages), stride=((1, rows * 64), 64, rows * d))
            return memory.get_tensor(layout, swizzle=swizzle)

        s_q, s_k, s_half = (
            shared(storage.q, m, 2, m),
            shared(storage.k, n, self.stages, n),
            shared(storage.k, n, self.stages, n // 2),
        )
        s_v = shared_transposed(storage.v, n, self.stages)
        wg_qk, wg_pv = mma_qk.get_slice(group_index * 128), mma_pv.get_slice(group_index * 128)
        a_q, b_k = wg_qk.make_fragment_A(wg_qk.partition_A(s_q)), wg_qk.make_fragment_B(wg_qk.partition_B(s_k))
        wg_half = mma_half.get_slice(group_index * 128)
        b_half = wg_half.make_fragment_B(wg_half.partition_B(s_half))
        b_v = wg_pv.make_fragment_B(wg_pv.partition_B(s_v))
        weights = wg_pv.make_fragment_A(wg_pv.partition_shape_A((m, n)))
        acc = cute.make_rmem_tensor(wg_pv.partition_shape_C((m, d)), Float32)

        q_stage, q_phase = Int32(0), Int32(0)
        k_stage, k_phase = Int32(0), Int32(0)
        v_stage, v_phase = Int32(0), Int32(0)
        tile_info = storage.tile.data_ptr()
        if group_index == 0:
            self.give_turn(self.consumers - 1)

        cute.arch.mbarrier_wait(storage.q_full.data_ptr() + q_stage, q_phase)
        working = Boolean(tile_info[0] != 0)
        if working:
            top, total = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
            block, open_blocks, kv_len, hidden_0, hidden_1, _ = self.view(storage, q_stage, group_index, causal)
            scores = cute.make_rmem_tensor(wg_qk.partition_shape_C((m, n)), Float32)
            cute.arch.mbarrier_wait(storage.k_full.data_ptr() + k_stage, k_phase)
            self.take_turn(group_index)
            self.multiply(mma_qk, scores, a_q[None, None, None, q_stage], b_k[None, None, None, k_stage], True)
            self.give_turn(group_index)
            warpgroup.wait_group(0)
            self.release(storage.k_empty.data_ptr() + k_stage)
            k_stage, k_phase = self.advance(k_stage, k_phase, self.stages)
            self.mask(scores, (hidden_0, hidden_1), block * n)
            self.weigh(scores, top, total, scale)
            registers.rounded(scores, weights)
            acc.fill(0.0)
            while working:
                # Weights of the first block are there. Those of slots beyond the sequence are 0, but values there may be NaN.
                if kv_len < (block + 1) * n:
                    cute.arch.mbarrier_wait(storage.v_full.data_ptr() + v_stage, v_phase)
                    self.clear_beyond(storage, v_stage, kv_len - block * n, group_index)
                while block > open_blocks:
                    block -= 1
                    k_stage, k_phase, v_stage, v_phase = self.step(
                        storage, mma_qk, mma_pv, a_q[None, None, None, q_stage], b_k, b_v, weights, acc, top, total, scale,
                        k_stage, k_phase, v_stage, v_phase, group_index, (hidden_0, hidden_1), block * n, True,
                    )  # fmt: skip
                while block > 0:
                    block -= 1
                    k_stage, k_phase, v_stage, v_phase = self.step(
                        storage, mma_qk, mma_pv, a_q[None, None, None, q_stage], b_k, b_v, weights, acc, top, total, scale,
                        k_stage, k_phase, v_stage, v_phase, group_index, (hidden_0, hidden_1), block * n, False,
                    )  # fmt: skip

                # The last product with values goes together with the first one with keys of the next tile.
                next_stage, next_phase = self.advance(q_stage, q_phase, 2)
                cute.arch.mbarrier_wait(storage.q_full.data_ptr() + next_stage, next_phase)
                working = Boolean(tile_info[next_stage * 8] != 0)
                if working:
                    block, open_blocks, kv_len, hidden_0, hidden_1, narrow = self.view(storage, next_stage, group_index, causal)
                    first_key = block * n
                    if narrow:
                        self.turn_over(
                            storage, o_atom, o_tma, out, lse, sinks, sinks_kind, scale, mma_half, mma_pv,
                            a_q[None, None, None, next_stage], b_half[None, None, None, k_stage], b_v[None, None, None, v_stage],
                            weights, acc, top, total, k_stage, k_phase, v_stage, v_phase, q_stage, group_index,
                            (hidden_0, hidden_1), first_key, n // 2,
                        )  # fmt: skip
                    else:
                        self.turn_over(
                            storage, o_atom, o_tma, out, lse, sinks, sinks_kind, scale, mma_qk, mma_pv,
                            a_q[None, None, None, next_stage], b_k[None, None, None, k_stage], b_v[None, None, None, v_stage],
                            weights, acc, top, total, k_stage, k_phase, v_stage, v_phase, q_stage, group_index,
                            (hidden_0, hidden_1), first_key, n,
                        )  # fmt: skip
                    k_stage, k_phase = self.advance(k_stage, k_phase, self.stages)
                    v_stage, v_phase = self.advance(v_stage, v_phase, self.stages)
                    q_stage, q_phase = next_stage, next_phase
            cute.arch.mbarrier_wait(storage.v_full.data_ptr() + v_stage, v_phase)
            self.multiply(mma_pv, acc, weights, b_v[None, None, None, v_stage], False)
            warpgroup.wait_group(0)
            self.finish(storage, o_atom, o_tma, out, lse, sinks, sinks_kind, mma_pv, acc, top, total, q_stage, group_index)

        if const_expr(self.store_by_tma):
            if thread % 128 < 32:
                cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def place(self, group_index: Int32):
        """This thread's number among the consumers, and the first of its rows of a tile; the other one is 8 below.

        Computed anew wherever it is wanted: what follows from it would cost registers in the loops, which have none to spare.
        """
        thread = registers.opaque(cute.arch.thread_idx()[0]) - 128
        return thread, group_index * 64 + (thread % 128) // 32 * 16 + thread % 32 // 4

    @cute.jit
    def view(self, storage, q_stage: Int32, group_index: Int32, causal: Int32):
        """What a tile sees.

        Returns:
            its last block of keys; how many blocks, from the first on, all its rows see all of; keys of the sequence; the first key
            that each of this thread's two rows does not see, counted from its first column; whether nobody sees the second half of
            the last block.
        """
        tile_info = storage.tile.data_ptr() + q_stage * 8
        q_len, kv_len, position = tile_info[2], tile_info[3], tile_info[4]
        thread, row = self.place(group_index)
        column = 2 * (thread % 4)
        seen = self.keys_seen(q_len, kv_len, position, causal)
        block = (seen - 1) // self.block_n
        open_blocks, hidden_0, hidden_1 = kv_len // self.block_n, kv_len, kv_len
        if causal != 0:
            first_hidden = kv_len - q_len + position + 1
            open_blocks = cutlass.max(first_hidden, 0) // self.block_n
            hidden_0 = cutlass.min(first_hidden + row // self.group, kv_len)
            hidden_1 = cutlass.min(first_hidden + (row + 8) // self.group, kv_len)
        narrow = seen - block * self.block_n <= self.block_n // 2
        return block, open_blocks, kv_len, hidden_0 - column, hidden_1 - column, narrow

    @cute.jit
    def turn_over(
        self,
        storage,
        o_atom: Optional[cute.CopyAtom],
        o_tma: Optional[cute.Tensor],
        out: cute.Tensor,
        lse: Int64,
        sinks: Int64,
        sinks_kind: Int32,
        scale: Float32,
        mma_qk: cute.TiledMma,
        mma_pv: cute.TiledMma,
        a_q: cute.Tensor,
        b_k: cute.Tensor,
        b_v: cute.Tensor,
        weights: cute.Tensor,
        acc: cute.Tensor,
        top: cute.Tensor,
        total: cute.Tensor,
        k_stage: Int32,
        k_phase: Int32,
        v_stage: Int32,
        v_phase: Int32,
        q_stage: Int32,
        group_index: Int32,
        hidden_from: tuple,
        first_key: Int32,
        columns: cutlass.Constexpr[int],
    ):
        """From a tile to the next: the next one's first scores, and meanwhile the last weighted values of the one before."""
        scores = cute.make_rmem_tensor(mma_qk.get_slice(0).partition_shape_C((self.block_m, columns)), Float32)
        cute.arch.mbarrier_wait(storage.k_full.data_ptr() + k_stage, k_phase)
        self.take_turn(group_index)
        self.multiply(mma_qk, scores, a_q, b_k, True)
        cute.arch.mbarrier_wait(storage.v_full.data_ptr() + v_stage, v_phase)
        self.multiply(mma_pv, acc, weights, b_v, False)
        self.give_turn(group_index)
        warpgroup.wait_group(1)
        self.release(storage.k_empty.data_ptr() + k_stage)
        next_top, next_total = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        self.mask(scores, hidden_from, first_key)
        self.weigh(scores, next_top, next_total, scale)
        self.settle(acc, Boolean(False), next_total, next_total)
        self.release(storage.v_empty.data_ptr() + v_stage)
        if const_expr(columns < self.block_n):
            part = cute.make_tensor(weights.iterator, cute.make_layout(cute.size(scores)))
            registers.rounded(scores, part)
            for i in cutlass.range_constexpr(cute.size(scores), cute.size(weights)):
                weights[i] = self.dtype(0.0)
        else:
            registers.rounded(scores, weights)
        self.finish(storage, o_atom, o_tma, out, lse, sinks, sinks_kind, mma_pv, acc, top, total, q_stage, group_index)
        for r in cutlass.range_constexpr(2):
            top[r], total[r] = next_top[r], next_total[r]
        acc.fill(0.0)

    @cute.jit
    def take_turn(self, group_index: Int32):
        """Waits until the warpgroup in front has handed its products to the tensor cores."""
        cute.arch.barrier(barrier_id=1 + group_index, number_of_threads=256)

    @cute.jit
    def give_turn(self, group_index: Int32):
        """Lets the warpgroup behind this one use the tensor cores."""
        behind = group_index + 1
        if behind == self.consumers:
            behind = Int32(0)
        cute.arch.barrier_arrive(barrier_id=1 + behind, number_of_threads=256)

    @cute.jit
    def release(self, barrier: cute.Pointer):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def multiply(self, mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, fresh: cutlass.Constexpr[bool]):
        warpgroup.fence()
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, not fresh)
        for i in cutlass.range_constexpr(cute.size(a.shape[2])):
            cute.gemm(atom, acc, a[None, None, i], b[None, None, i], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    @cute.jit
    def mask(self, scores: cute.Tensor, hidden_from: tuple, first_key: Int32):
        for r in cutlass.range_constexpr(2):
            registers.hide_from(scores, r, hidden_from[r] - first_key)

    @cute.jit
    def weigh(self, scores: cute.Tensor, top: cute.Tensor, total: cute.Tensor, scale: Float32):
        """The first block's weights: scores become exp2(score * scale - top)."""
        seen = registers.row_maxima(scores)
        for r in cutlass.range_constexpr(2):
            top[r] = cute.arch.fmax(registers.quad_max(seen[r]) * scale, registers.LOWEST)
            total[r] = registers.exponentials(scores, r, scale, top[r])

    @cute.jit
    def step(
        self,
        storage,
        mma_qk: cute.TiledMma,
        mma_pv: cute.TiledMma,
        a_q: cute.Tensor,
        b_k: cute.Tensor,
        b_v: cute.Tensor,
        weights: cute.Tensor,
        acc: cute.Tensor,
        top: cute.Tensor,
        total: cute.Tensor,
        scale: Float32,
        k_stage: Int32,
        k_phase: Int32,
        v_stage: Int32,
        v_phase: Int32,
        group_index: Int32,
        hidden_from: tuple,
        first_key: Int32,
        masked: cutlass.Constexpr[bool],
    ):
        """One block further: its scores, and meanwhile the weighted values of the block before."""
        scores = cute.make_rmem_tensor(mma_qk.get_slice(0).partition_shape_C((self.block_m, self.block_n)), Float32)
        cute.arch.mbarrier_wait(storage.k_full.data_ptr() + k_stage, k_phase)
        self.take_turn(group_index)
        self.multiply(mma_qk, scores, a_q, b_k[None, None, None, k_stage], True)
        cute.arch.mbarrier_wait(storage.v_full.data_ptr() + v_stage, v_phase)
        self.multiply(mma_pv, acc, weights, b_v[None, None, None, v_stage], False)
        self.give_turn(group_index)
        warpgroup.wait_group(1)
        self.release(storage.k_empty.data_ptr() + k_stage)
        if const_expr(masked):
            self.mask(scores, hidden_from, first_key)

        # The shift need not be the maximum: it is enough that no weight exceeds 2 ** skip.
        maxima = registers.row_maxima(scores)
        seen = (maxima[0] * scale, maxima[1] * scale)
        grown = (seen[0] > top[0] + self.config.skip) | (seen[1] > top[1] + self.config.skip)
        factor = cute.make_rmem_tensor(2, Float32)
        factor.fill(1.0)
        if registers.any_lane(grown):
            for r in cutlass.range_constexpr(2):
                raised = cute.arch.fmax(registers.quad_max(seen[r]), top[r])
                factor[r] = registers.exp2(top[r] - raised)
                top[r] = raised
                total[r] = total[r] * factor[r]
        sums = [registers.exponentials(scores, r, scale, top[r]) for r in range(2)]
        for r in cutlass.range_constexpr(2):
            total[r] = total[r] + sums[r]
        self.settle(acc, grown, factor, sums)
        self.release(storage.v_empty.data_ptr() + v_stage)
        registers.rounded(scores, weights)
        k_stage, k_phase = self.advance(k_stage, k_phase, self.stages)
        v_stage, v_phase = self.advance(v_stage, v_phase, self.stages)
        return k_stage, k_phase, v_stage, v_phase

    @cute.jit
    def settle(self, acc: cute.Tensor, grown: Boolean, factor: cute.Tensor, sums: list):
        """Waits for the product with values, and rescales the sums where some lane wants it.

        No sum of weights is negative. But so the branch waits for them, and ptxas does not move the wait for the product above it:
        it did, in front of most exponentials, which then had no product to overlap with.
        """
        if registers.any_lane(grown | (sums[0] < 0.0) | (sums[1] < 0.0)):
            warpgroup.wait_group(0)
            for r in cutlass.range_constexpr(2):
                registers.scale_row(acc, r, factor[r])
        warpgroup.wait_group(0)

    @cute.jit
    def clear_beyond(self, storage, stage: Int32, valid: Int32, group_index: Int32):
        """Zeros in the values of slots from ``valid`` on. Every warpgroup does it for itself, with the same result."""
        thread = self.place(group_index)[0] % 128
        layout = cute.make_layout(
            (self.block_n, (8, 8), self.halves, self.stages),
            stride=(64, (1, 8), self.block_n * 64, self.block_n * self.head_dim),
        )
        values = storage.v.get_tensor(layout, swizzle=cute.make_swizzle(3, 4, 3))
        zeros = cute.make_rmem_tensor(8, self.dtype)
        zeros.fill(0.0)
        row = valid + thread // 8
        while row < self.block_n:
            for half in cutlass.range_constexpr(self.halves):
                cute.autovec_copy(zeros, values[row, (None, thread % 8), half, stage])
            row += 16
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=5 + group_index, number_of_threads=128)

    @cute.jit
    def finish(
        self,
        storage,
        o_atom: Optional[cute.CopyAtom],
        o_tma: Optional[cute.Tensor],
        out: cute.Tensor,
        lse: Int64,
        sinks: Int64,
        sinks_kind: Int32,
        mma_pv: cute.TiledMma,
        acc: cute.Tensor,
        top: cute.Tensor,
        total: cute.Tensor,
        q_stage: Int32,
        group_index: Int32,
    ):
        """Divides by the sum of weights, the sink's included, and stores."""
        thread, row = self.place(group_index)
        tile_info = storage.tile.data_ptr() + q_stage * 8
        start, q_len, position, head = tile_info[1], tile_info[2], tile_info[4], tile_info[5]
        self.release(storage.q_empty.data_ptr() + q_stage)
        for r in cutlass.range_constexpr(2):
            place = position + (row + 8 * r) // self.group
            query_head = head * self.group + (row + 8 * r) % self.group
            sink = registers.sink_of(sinks, sinks_kind, query_head)
            highest = cute.arch.fmax(top[r], sink)
            lowered = registers.exp2(top[r] - highest)
            weight = registers.quad_sum(total[r]) * lowered + registers.exp2(sink - highest)
            registers.scale_row(acc, r, Float32(0.0) if weight == 0.0 else lowered / weight)
            if lse != 0:
                if place < q_len and row + 8 * r < self.group * self.positions and thread % 4 == 0:
                    value = (highest + cute.math.log2(weight, fastmath=True)) * registers.LN2
                    at = Int64(start + place) * out.shape[1] + query_head
                    cute.make_ptr(Float32, lse, cute.AddressSpace.gmem)[at] = -Float32.inf if weight == 0.0 else value

        # This warpgroup's rows of the buffer are its own.
        rounded = cute.make_fragment_like(acc, self.dtype)
        registers.rounded(acc, rounded)
        if const_expr(self.store_by_tma):
            if thread % 128 < 32:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=5 + group_index, number_of_threads=128)
        d = self.head_dim
        swizzle = cute.make_swizzle(3, 4, 3)
        layout = cute.make_layout((self.block_m, (64, self.halves)), stride=(64, (1, self.block_m * 64)))
        s_o = storage.o.get_tensor(layout, swizzle=swizzle)
        store = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype)
        mine = cute.make_tiled_copy_C(store, mma_pv).get_slice(thread)
        cute.copy(store, mine.retile(rounded), mine.partition_D(s_o))
        first_row = group_index * 64
        whole = Boolean(False)
        if const_expr(self.store_by_tma):
            cute.arch.fence_view_async_shared()
            per_group = 64 // self.group
            whole = position + (group_index + 1) * per_group <= q_len
        cute.arch.barrier(barrier_id=5 + group_index, number_of_threads=128)
        if const_expr(self.store_by_tma):
            if whole:
                if thread % 128 < 32:
                    box = ((self.group, 64 // self.group), 64)
                    boxes_layout = cute.make_layout(
                        (*box, self.halves, self.consumers),
                        stride=((64, 64 * self.group), 1, self.block_m * 64, 64 * 64),
                    )
                    boxes = storage.o.get_tensor(boxes_layout, swizzle=swizzle)
                    token = start + position + group_index * per_group
                    for half in cutlass.range_constexpr(self.halves):
                        there = cute.domain_offset(((head * self.group, token), half * 64), o_tma)
                        corner = cute.local_tile(there, box, ((0, 0), 0))
                        source, target = cpasync.tma_partition(
                            o_atom,
                            0,
                            cute.make_layout(1),
                            cute.group_modes(boxes[None, None, half, group_index], 0, 2),
                            cute.group_modes(corner, 0, 2),
                        )
                        cute.copy(o_atom, source, target)
                    cute.arch.cp_async_bulk_commit_group()
        if not whole:
            chunks = d // 8
            chunk_layout = cute.make_layout((self.block_m, (8, 8), self.halves), stride=(64, (1, 8), self.block_m * 64))
            s_chunks = storage.o.get_tensor(chunk_layout, swizzle=swizzle)
            g_chunks = cute.make_tensor(
                out.iterator,
                cute.make_layout((out.shape[0], out.shape[1], 8, chunks), stride=(out.stride[0], out.stride[1], 1, 8)),
            )
            chunk = thread % chunks
            piece = cute.make_rmem_tensor(8, self.dtype)
            for i in cutlass.range_constexpr(64 * chunks // 128):
                r = first_row + i * (128 // chunks) + (thread % 128) // chunks
                place = position + r // self.group
                if place < q_len and r < self.group * self.positions:
                    cute.autovec_copy(s_chunks[r, (None, chunk % 8), chunk // 8], piece)
                    cute.autovec_copy(piece, g_chunks[start + place, head * self.group + r % self.group, None, chunk])
