"""The score warpgroup of `kernel_device`: it holds the queries, and computes q @ k and softmax of blocks."""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Uint32, const_expr, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from tokenspeed_kernel_nvidia.cutedsl import mask_device as masks
from tokenspeed_kernel_nvidia.cutedsl import registers_device as registers
from tokenspeed_kernel_nvidia.cutedsl import softmax_device as softmax
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Cursor, advance, first_to_read, last_filled, skip
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.config import LATENT, ROPE, ROWS
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.tile_device import (
    BEGIN,
    CHUNK_PANELS,
    FIRST,
    ITEM,
    LATENT_CHUNK,
    LATENT_CHUNKS,
    PANEL_BYTES,
    PLANNED,
    PLANNERS,
    SCORED,
    SCORES,
    STARTING,
    Call,
    Tiles,
)
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import PANEL
from tokenspeed_kernel_nvidia.sm90.common.wgmma_device import make_qk_mma

STEPS = PANEL // 16  # MMAs (k = 16) of a panel


@dataclass(frozen=True)
class Operands:
    """MMA operands of q @ k. All but the queries in registers are shared-memory descriptors.

    Attributes:
        kept: queries in registers: the first columns.
        words: the same registers as 32-bit words.
        others: queries of the other columns, in shared memory.
        latents, ropes: keys, by stage.
    """

    kept: cute.Tensor
    words: cute.Tensor
    others: cute.Tensor
    latents: cute.Tensor
    ropes: cute.Tensor


@dataclass(frozen=True)
class QkMmas:
    """The MMAs with queries in registers (``kept``), and with queries in shared memory (``others``)."""

    kept: cute.TiledMma
    others: cute.TiledMma


class Scorer(Tiles):
    """Mixin of the score warpgroup."""

    def make_qk_mmas(self) -> QkMmas:
        operands = warpgroup.OperandSource.RMEM, OperandMajorMode.K, OperandMajorMode.K
        op = warpgroup.MmaF16BF16Op(self.dtype, Float32, (ROWS, ROWS, 16), *operands)
        return QkMmas(cute.make_tiled_mma(op, cute.make_layout((1, 1, 1))), make_qk_mma(self.dtype, ROWS))

    @cute.jit
    def thread_of_scores(self) -> Int32:
        """Returns this thread's index in the warpgroup, recomputed at each use: see `opt_barrier`."""
        thread, _, _ = cute.arch.thread_idx()
        return registers.opt_barrier(thread) - SCORES * 128

    @cute.jit
    def score(self, call: Call, mmas: QkMmas):
        """Computes the probabilities of all blocks of the CTA."""
        c = self.config
        thread, _, _ = cute.arch.thread_idx()
        thread -= SCORES * 128
        ops = self.operands(call, mmas, thread)
        row_max, row_sum = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
        cute.arch.barrier(barrier_id=PLANNED, number_of_threads=PLANNERS)
        item, first, begin = call.plan[ITEM], call.plan[FIRST], call.plan[BEGIN]
        at, rope_at = first_to_read(), first_to_read()
        while begin < call.end():
            length = self.length_of(call, item)
            _, _, whole = self.visible(call, length)
            count = cutlass.min(first + whole, call.end()) - begin
            at, scale = self.take_queries(call, ops.words, at, rope_at)
            self.signal_probs(call, rope_at)  # no probabilities, but the value warpgroups release this stage like all others
            rope_at = advance(rope_at, c.stages)
            for r in cutlass.range_constexpr(2):
                row_max[r] = Float32(softmax.LOWEST)
                row_sum[r] = Float32(0.0)
            valid = length - (begin - first) * ROWS  # tokens from the block's first one on that the item's last token sees
            first += whole + call.plan[STARTING]
            begin = first
            is_first = cutlass.Boolean(True)
            while count > 0:
                scores, at = self.multiply(call, mmas, ops, at, rope_at, is_first)
                is_first = cutlass.Boolean(False)
                self.mask_scores(call, scores, item, valid, at, rope_at)
                count -= 1
                self.put_probs(call, scores, row_max, row_sum, rope_at, scale)
                if count == 0:
                    self.put_sums(call, row_max, row_sum, rope_at)
                if const_expr(c.at_once):
                    self.signal_probs(call, rope_at)
                rope_at = advance(rope_at, c.stages)
                valid -= ROWS
            if const_expr(not c.at_once):
                self.signal_probs(call, last_filled(rope_at, c.stages))
            item = self.next_item(call, item)

    def operands(self, call: Call, mmas: QkMmas, thread: Int32) -> Operands:
        kept, others = mmas.kept.get_slice(thread), mmas.others.get_slice(thread)
        q = kept.make_fragment_A(kept.partition_shape_A((ROWS, self.config.kept)))
        return Operands(
            q, cute.recast_tensor(q, Uint32), others.make_fragment_A(others.partition_A(self.others.tiles(call.storage.others))),
            kept.make_fragment_B(kept.partition_B(self.latent_chunks.tiles(call.storage.latent_chunks))),
            kept.make_fragment_B(kept.partition_B(self.ropes.tiles(call.storage.ropes))),
        )  # fmt: skip

    @cute.jit
    def take_queries(self, call: Call, words: cute.Tensor, at: Cursor, rope_at: Cursor):
        """Loads the first columns of a Q tile to registers, copies the others within shared memory, and releases its stages.

        Returns the chunk cursor after the queries, and the factor of scores.
        """
        c = self.config
        thread = self.thread_of_scores()
        offset = self.lane_offset(thread)
        others = call.storage.others.data_ptr().toint() + offset
        first = at
        # All warps have finished q @ k of the previous work item.
        cute.arch.barrier(barrier_id=SCORED, number_of_threads=128)
        for panel in cutlass.range_constexpr((LATENT + ROPE) // PANEL):
            rotary = panel == LATENT // PANEL
            tile_at = self.rope_at(call, rope_at) if rotary else self.panel_at(call, at, panel % CHUNK_PANELS)
            if const_expr(rotary):
                call.ropes.wait(rope_at)
            elif const_expr(panel % CHUNK_PANELS == 0):
                call.latent_chunks.wait(at)
            for step in cutlass.range_constexpr(STEPS):
                four = registers.ldmatrix(tile_at + (offset ^ (step * 32)), False)
                if const_expr(panel * PANEL < c.kept):
                    for each in cutlass.range_constexpr(4):
                        words[(panel * STEPS + step) * 4 + each] = four[each]
                else:
                    registers.stmatrix((others ^ (step * 32)) + (panel - c.kept // PANEL) * PANEL_BYTES, four)
            if const_expr(not rotary and panel % CHUNK_PANELS == CHUNK_PANELS - 1):
                at = advance(at, c.latent_chunks)
        cute.arch.fence_view_async_shared()
        self.release_queries(call, first)
        cute.arch.barrier(barrier_id=SCORED, number_of_threads=128)
        return at, call.scale

    @cute.jit
    def release_queries(self, call: Call, at: Cursor):
        """Releases the chunk stages that held queries. The value warpgroups release the stage of the rotary part.

        The caller must have executed `fence_view_async_shared`. TMA writes belong to the async proxy, and an arrival alone does not
        order them after this warp's loads in flight.
        """
        cute.arch.sync_warp()
        for _ in cutlass.range_constexpr(self.config.query_chunks):
            self.release(call.latent_chunks.empty, at)
            at = advance(at, self.config.latent_chunks)

    @cute.jit
    def lane_offset(self, thread: Int32) -> Int32:
        """Returns the swizzled byte offset of a lane's 16 bytes in a panel, for ldmatrix of 16 rows per warp and 16 columns.

        XOR with ``32 * i`` gives that of the i-th next 16 columns, see `tiles_device`.
        """
        row = (thread >> 5) * 16 + (thread & 15)
        return row * (PANEL * 2) + (((thread >> 4) & 1) ^ (row & 7)) * 16

    @cute.jit
    def multiply(self, call: Call, mmas: QkMmas, ops: Operands, at: Cursor, rope_at: Cursor, is_first: cutlass.Boolean):
        """Computes q @ k of a block, waiting for it chunk by chunk. Returns the scores, and the chunk cursor of the next block.

        Unless `Config.at_once`, it also signals the previous block's probabilities, except at a work item's first block.
        """
        c = self.config
        scores = cute.make_rmem_tensor(mmas.kept.get_slice(0).partition_shape_C((ROWS, ROWS)), Float32)
        kept, others = cute.make_mma_atom(mmas.kept.op), cute.make_mma_atom(mmas.others.op)
        others.set(warpgroup.Field.ACCUMULATE, False)
        kept.set(warpgroup.Field.ACCUMULATE, True)
        self.wait_for_block(call, at, rope_at)
        warpgroup.fence()
        for step in cutlass.range_constexpr(STEPS):
            q = ops.others[None, None, (LATENT - c.kept) // 16 + step, 0]
            cute.gemm(others, scores, q, ops.ropes[None, None, step, rope_at.stage], scores)
            others.set(warpgroup.Field.ACCUMULATE, True)
        for chunk in cutlass.range_constexpr(LATENT_CHUNKS):
            self.wait_for_chunk(call, at)
            # Descriptors of all chunks at once would take too many registers.
            stage = cute.arch.make_warp_uniform(registers.opt_barrier(at.stage))
            for step in cutlass.range_constexpr(LATENT_CHUNK // 16):
                k = ops.latents[None, None, step, stage]
                k_step = chunk * (LATENT_CHUNK // 16) + step
                if const_expr(k_step * 16 < c.kept):
                    cute.gemm(kept, scores, ops.kept[None, None, k_step], k, scores)
                else:
                    cute.gemm(others, scores, ops.others[None, None, k_step - c.kept // 16, 0], k, scores)
                if const_expr(not c.at_once and k_step == LATENT // 16 - 1 - c.tail):
                    warpgroup.commit_group()
            at = advance(at, c.latent_chunks)
        if const_expr(c.at_once or c.tail > 0):
            warpgroup.commit_group()
        if const_expr(not c.at_once):
            warpgroup.wait_group(min(c.tail, 1))
            if not is_first:
                self.signal_probs(call, last_filled(rope_at, c.stages))
        warpgroup.wait_group(0)
        return scores, at

    def wait_for_block(self, call: Call, at: Cursor, rope_at: Cursor) -> None:
        """Waits until a block's rotary part is loaded and visible to MMAs."""
        call.ropes.wait(rope_at)

    def wait_for_chunk(self, call: Call, at: Cursor) -> None:
        """Waits until a chunk is loaded and visible to MMAs."""
        call.latent_chunks.wait(at)

    @cute.jit
    def mask_scores(self, call: Call, scores: cute.Tensor, item: Int32, valid: Int32, end: Cursor, rope_at: Cursor):
        """Masks the scores of keys that a row does not see, and zeroes latents beyond the sequence.

        Args:
            valid: tokens from the block's first one on that the item's last token sees.
            end: the chunk cursor after the block.
        """
        if valid < ROWS + (self.config.tokens_of_tile - 1):
            self.hide(call, scores, item, valid)
            self.clear_beyond(call, end, valid)

    @cute.jit
    def hide(self, call: Call, scores: cute.Tensor, item: Int32, valid: Int32):
        """Masks tokens that a row does not see. ``valid``: see `mask_scores`."""
        c = self.config
        thread = self.thread_of_scores()
        row = (thread >> 5) * 16 + ((thread & 31) >> 2)
        _, _, tokens = self.tokens_of(call, item)
        for r in cutlass.range_constexpr(2):
            limit = valid
            if const_expr(c.tokens_of_tile > 1):
                limit = valid - (tokens - 1) + (row + 8 * r) // c.heads_of_tile
            masks.hide_from(scores, r, limit - (thread & 3) * 2)

    @cute.jit
    def clear_beyond(self, call: Call, end: Cursor, valid: Int32):
        """Zeroes the latents of slots without a token: they may hold NaN, and 0 * NaN is not 0.

        Args:
            end: the chunk cursor after the block.
        """
        thread = self.thread_of_scores()
        # All warps have finished q @ k of the block that is overwritten.
        cute.arch.barrier(barrier_id=SCORED, number_of_threads=128)
        at = skip(end, self.config.latent_chunks - LATENT_CHUNKS, self.config.latent_chunks)
        for _ in cutlass.range_constexpr(LATENT_CHUNKS):
            row = cutlass.max(valid, 0) + (thread >> 3)
            while row < ROWS:
                for panel in cutlass.range_constexpr(self.latent_chunks.panels):
                    to = self.panel_at(call, at, panel) + row * (PANEL * 2) + (thread & 7) * 16
                    registers.store_floats("shared", to, [Float32(0.0)] * 4)
                row += 16
            at = advance(at, self.config.latent_chunks)
        cute.arch.fence_view_async_shared()

    @cute.jit
    def put_probs(self, call: Call, scores: cute.Tensor, row_max: cute.Tensor, row_sum: cute.Tensor, at: Cursor, scale: Any):
        """Softmax of a block: stores its probabilities over its rotary part, and the rescale factors in its notes."""
        grown, factor, _ = softmax.softmax_step(scores, row_max, row_sum, scale, self.config.lazy, self.config.lift)
        grown = registers.any_lane(grown)
        thread = self.thread_of_scores()
        lane, warp = thread & 31, thread >> 5
        notes = call.notes(at)
        if lane == 0:
            notes.grown(warp)[0] = cutlass.select_(grown, Float32(1.0), Float32(0.0))
        if (grown | cutlass.Boolean(self.every_factor)) and lane & 3 == 0:
            for r in cutlass.range_constexpr(2):
                notes.factor(warp * 16 + (lane >> 2) + 8 * r)[0] = factor[r]
        offset = self.lane_offset(thread)
        # All warps have finished q @ k with the rotary part.
        cute.arch.barrier(barrier_id=SCORED, number_of_threads=128)
        self.store_probs(self.rope_at(call, at), offset, scores)
        cute.arch.fence_view_async_shared()

    @cute.jit
    def store_probs(self, to: Int32, offset: Int32, probs: cute.Tensor):
        for step in cutlass.range_constexpr(ROWS // 16):
            words = [registers.pack(self.dtype, probs[8 * step + 2 * each], probs[8 * step + 2 * each + 1]) for each in range(4)]
            registers.stmatrix(to + (offset ^ (step * 32)), words)

    @cute.jit
    def put_sums(self, call: Call, row_max: cute.Tensor, row_sum: cute.Tensor, at: Cursor):
        """Stores row max and row sum in the notes of a work item's last block."""
        thread = self.thread_of_scores()
        for r in cutlass.range_constexpr(2):
            total = registers.quad_sum(row_sum[r])
            if thread & 3 == 0:
                sums = call.notes(at).sums((thread >> 5) * 16 + ((thread & 31) >> 2) + 8 * r)
                sums[0] = row_max[r]
                sums[1] = total

    @cute.jit
    def signal_probs(self, call: Call, at: Cursor):
        """Signals to the value warpgroups that this warp has stored its probabilities of a stage."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            call.probs_full.arrive(at)
