"""The score warpgroup of `kernel_device`, which holds the queries, and computes q @ k and the softmax of each block.

`QkMma` has the MMAs of 16-bit queries and keys, `fp8_score_device` those with an fp8 cache.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Uint32, const_expr, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from tokenspeed_kernel_nvidia.cutedsl import registers_device as registers
from tokenspeed_kernel_nvidia.cutedsl import softmax_device as softmax
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Cursor, advance, first_to_read, last_filled
from tokenspeed_kernel_nvidia.cutedsl.registers_device import dtype_of
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.config import LATENT, ROPE, ROWS, Config
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.scheduler_device import await_plan, blocks_of
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.tile_device import (
    CHUNK_PANELS,
    LATENT_CHUNK,
    LATENT_CHUNKS,
    PANEL_BYTES,
    SCORED,
    SCORES,
    STARTING,
    Call,
    SharedMemory,
    release,
    thread_of_scores,
)
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import PANEL
from tokenspeed_kernel_nvidia.sm90.common.wgmma_device import make_qk_mma

STEPS = PANEL // 16  # MMAs (k = 16) per panel


@dataclass(frozen=True)
class ScoreWarpgroup:
    """The score warpgroup.

    Attributes:
        qk: the object that computes q @ k: `QkMma` or `Fp8QkMma`.
        mask: the object that masks a block's scores: `TokenMask`, or an object with the same methods.
    """

    config: Config
    memory: SharedMemory
    work: Any
    qk: Any
    mask: Any

    @cute.jit
    def compute(self, call: Call, mmas: QkMmas):
        """Computes the probabilities of all blocks of the CTA's work items."""
        c = self.config
        thread, _, _ = cute.arch.thread_idx()
        thread -= SCORES * 128
        ops = self.qk.operands(call, mmas, thread)
        row_max, row_sum = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
        item, first, begin = await_plan(call)
        at, rope_at = first_to_read(), first_to_read()
        while begin < call.end():
            length = self.work.length_of(call, item)
            whole = blocks_of(length)
            count = cutlass.min(first + whole, call.end()) - begin
            # The queries arrive in the rings, in place of a block. Their rotary stage gets no probabilities, but it is signalled
            # all the same, because the value warpgroups wait for every stage and release it.
            at, scale = self.qk.take_queries(call, ops.words, at, rope_at)
            signal_probs(call, rope_at)
            rope_at = advance(rope_at, c.stages)
            for r in cutlass.range_constexpr(2):
                row_max[r] = Float32(softmax.LOWEST)
                row_sum[r] = Float32(0.0)
            valid = (
                length - (begin - first) * ROWS
            )  # how many tokens the item's last token sees, counted from the block's first token
            first += whole + call.plan[STARTING]
            begin = first
            is_first = cutlass.Boolean(True)
            while count > 0:
                scores, at = self.qk.multiply(call, mmas, ops, at, rope_at, is_first)
                is_first = cutlass.Boolean(False)
                self.mask.apply(call, scores, item, valid, at, rope_at)
                count -= 1
                self.put_probs(call, scores, row_max, row_sum, rope_at, scale)
                if count == 0:
                    put_sums(call, row_max, row_sum, rope_at)
                if const_expr(c.at_once):
                    signal_probs(call, rope_at)
                rope_at = advance(rope_at, c.stages)
                valid -= ROWS
            if const_expr(not c.at_once):
                signal_probs(call, last_filled(rope_at, c.stages))
            item = self.work.next_item(call, item)

    @cute.jit
    def put_probs(self, call: Call, scores: cute.Tensor, row_max: cute.Tensor, row_sum: cute.Tensor, at: Cursor, scale: Any):
        """Computes the softmax of a block. Stores the block's probabilities over the block's rotary part, and the rescale factors
        in the block's `Notes`. ``at``: the block's position in the ring of rotary parts."""
        grown, factor, _ = softmax.softmax_step(scores, row_max, row_sum, scale, self.config.lazy, self.config.lift)
        grown = registers.any_lane(grown)
        thread = thread_of_scores()
        lane, warp = thread & 31, thread >> 5
        notes = call.notes(at)
        if lane == 0:
            notes.grown(warp)[0] = cutlass.select_(grown, Float32(1.0), Float32(0.0))
        if (grown | cutlass.Boolean(self.qk.every_factor)) and lane & 3 == 0:
            for r in cutlass.range_constexpr(2):
                notes.factor(warp * 16 + (lane >> 2) + 8 * r)[0] = factor[r]
        offset = lane_offset(thread)
        # Wait until all warps have finished q @ k with the rotary part, which the probabilities overwrite.
        cute.arch.barrier(barrier_id=SCORED, number_of_threads=128)
        self.qk.store_probs(self.memory.rope_at(call, at), offset, scores)
        cute.arch.fence_view_async_shared()


@cute.jit
def put_sums(call: Call, row_max: cute.Tensor, row_sum: cute.Tensor, at: Cursor):
    """Stores the row max and row sum of the query rows in the `Notes` of a work item's last block."""
    thread = thread_of_scores()
    for r in cutlass.range_constexpr(2):
        total = registers.quad_sum(row_sum[r])
        if thread & 3 == 0:
            sums = call.notes(at).sums((thread >> 5) * 16 + ((thread & 31) >> 2) + 8 * r)
            sums[0] = row_max[r]
            sums[1] = total


# -- q @ k -----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operands:
    """MMA operands of q @ k. All operands except the queries in registers are shared-memory descriptors.

    Attributes:
        kept: the columns of Q that are in registers, see `Config.kept`.
        words: the registers of ``kept`` as 32-bit words.
        others: the other columns of Q, in shared memory.
        latents, ropes: the keys' latents and rotary parts, by ring stage.
    """

    kept: cute.Tensor
    words: cute.Tensor
    others: cute.Tensor
    latents: cute.Tensor
    ropes: cute.Tensor


@dataclass(frozen=True)
class QkMmas:
    """The tiled MMAs with Q in registers (``kept``), and with Q in shared memory (``others``)."""

    kept: cute.TiledMma
    others: cute.TiledMma


@dataclass(frozen=True)
class TmaArrival:
    """Waits for keys that TMA loads, chunk by chunk."""

    def block(self, call: Call, at: Cursor, rope_at: Cursor) -> None:
        """Waits until a block's rotary part has been loaded."""
        call.ropes.wait(rope_at)

    def chunk(self, call: Call, at: Cursor) -> None:
        """Waits until a latent chunk has been loaded."""
        call.latent_chunks.wait(at)


@dataclass(frozen=True)
class QkMma:
    """q @ k with 16-bit MMAs.

    Attributes:
        arrival: the object that waits for keys: `TmaArrival`, or an object with the same methods.
    """

    config: Config
    memory: SharedMemory
    arrival: Any
    every_factor = False  # whether `Notes` also hold the rescale factors of rows whose max has not grown, which are 1

    def make_mmas(self) -> QkMmas:
        """Returns the tiled MMAs of 64 query rows by 64 keys."""
        operands = warpgroup.OperandSource.RMEM, OperandMajorMode.K, OperandMajorMode.K
        dtype = dtype_of(self.config.dtype)
        op = warpgroup.MmaF16BF16Op(dtype, Float32, (ROWS, ROWS, 16), *operands)
        return QkMmas(cute.make_tiled_mma(op, cute.make_layout((1, 1, 1))), make_qk_mma(dtype, ROWS))

    def operands(self, call: Call, mmas: QkMmas, thread: Int32) -> Operands:
        """Returns this thread's operands of q @ k. ``thread``: its index in the score warpgroup."""
        kept, others = mmas.kept.get_slice(thread), mmas.others.get_slice(thread)
        q = kept.make_fragment_A(kept.partition_shape_A((ROWS, self.config.kept)))
        return Operands(
            q,
            cute.recast_tensor(q, Uint32),
            others.make_fragment_A(others.partition_A(self.memory.others.tiles(call.storage.others))),
            kept.make_fragment_B(kept.partition_B(self.memory.latent_chunks.tiles(call.storage.latent_chunks))),
            kept.make_fragment_B(kept.partition_B(self.memory.ropes.tiles(call.storage.ropes))),
        )

    @cute.jit
    def take_queries(self, call: Call, words: cute.Tensor, at: Cursor, rope_at: Cursor):
        """Loads the first columns of a Q tile to registers, copies the others from the ring to ``storage.others``, and releases the
        tile's ring stages. Returns the latent ring's cursor after the queries, and the factor of scores.
        """
        c = self.config
        thread = thread_of_scores()
        offset = lane_offset(thread)
        others = call.storage.others.data_ptr().toint() + offset
        first = at
        # Wait until all warps have finished q @ k of the previous work item.
        cute.arch.barrier(barrier_id=SCORED, number_of_threads=128)
        for panel in cutlass.range_constexpr((LATENT + ROPE) // PANEL):
            rotary = panel == LATENT // PANEL
            tile_at = self.memory.rope_at(call, rope_at) if rotary else self.memory.panel_at(call, at, panel % CHUNK_PANELS)
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
        release_queries(self.memory, call, first)
        cute.arch.barrier(barrier_id=SCORED, number_of_threads=128)
        return at, call.scale

    @cute.jit
    def multiply(self, call: Call, mmas: QkMmas, ops: Operands, at: Cursor, rope_at: Cursor, is_first: cutlass.Boolean):
        """Computes q @ k of a block, and waits for the block chunk by chunk: first the rotary part, then the latents. Returns the
        scores, and the latent ring's cursor of the next block. See also `finish_scores`.
        """
        c = self.config
        scores = cute.make_rmem_tensor(mmas.kept.get_slice(0).partition_shape_C((ROWS, ROWS)), Float32)
        kept, others = cute.make_mma_atom(mmas.kept.op), cute.make_mma_atom(mmas.others.op)
        others.set(warpgroup.Field.ACCUMULATE, False)
        kept.set(warpgroup.Field.ACCUMULATE, True)
        self.arrival.block(call, at, rope_at)
        warpgroup.fence()
        for step in cutlass.range_constexpr(STEPS):
            q = ops.others[None, None, (LATENT - c.kept) // 16 + step, 0]
            cute.gemm(others, scores, q, ops.ropes[None, None, step, rope_at.stage], scores)
            others.set(warpgroup.Field.ACCUMULATE, True)
        for chunk in cutlass.range_constexpr(LATENT_CHUNKS):
            self.arrival.chunk(call, at)
            # opt_barrier keeps the compiler from computing the descriptors of all chunks early, which would take too many
            # registers.
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
        finish_scores(c, call, rope_at, is_first)
        return scores, at

    @cute.jit
    def store_probs(self, to: Int32, offset: Int32, probs: cute.Tensor):
        """Stores a warp's 16 rows of probabilities, rounded to 16 bits, as the A operand of P @ V.

        Args:
            to: shared-memory address of the rotary part that the probabilities overwrite.
            offset: see `lane_offset`.
        """
        dtype = dtype_of(self.config.dtype)
        for step in cutlass.range_constexpr(ROWS // 16):
            words = [registers.pack(dtype, probs[8 * step + 2 * each], probs[8 * step + 2 * each + 1]) for each in range(4)]
            registers.stmatrix(to + (offset ^ (step * 32)), words)


@cute.jit
def finish_scores(config: cutlass.Constexpr[Config], call: Call, rope_at: Cursor, is_first: cutlass.Boolean):
    """Waits for the MMAs of a block's q @ k.

    Unless `Config.at_once`, the previous block's probabilities are signalled while the last `Config.tail` MMAs are in flight. A
    work item's first block has no previous block.
    """
    if const_expr(config.at_once or config.tail > 0):
        warpgroup.commit_group()
    if const_expr(not config.at_once):
        warpgroup.wait_group(min(config.tail, 1))
        if not is_first:
            signal_probs(call, last_filled(rope_at, config.stages))
    warpgroup.wait_group(0)


@cute.jit
def release_queries(memory: SharedMemory, call: Call, at: Cursor):
    """Releases the latent ring's stages that held queries. The value warpgroups release the stage of the rotary part.

    The caller must have executed `fence_view_async_shared`. TMA writes belong to the async proxy. So an mbarrier arrival alone does
    not order the next TMA writes after this warp's loads.
    """
    cute.arch.sync_warp()
    for _ in cutlass.range_constexpr(memory.config.query_chunks):
        release(call.latent_chunks.empty, at, memory.config.cluster)
        at = advance(at, memory.config.latent_chunks)


@cute.jit
def lane_offset(thread: Int32) -> Int32:
    """Returns the swizzled byte offset of a lane's 16 bytes in a panel, for an ldmatrix of a warp's 16 rows and the first 16
    columns.

    XOR with ``32 * i`` gives the offset for the i-th group of 16 columns, see `tiles_device`.
    """
    row = (thread >> 5) * 16 + (thread & 15)
    return row * (PANEL * 2) + (((thread >> 4) & 1) ^ (row & 7)) * 16


@cute.jit
def signal_probs(call: Call, at: Cursor):
    """Signals to the value warpgroups that this warp has stored its probabilities in the rotary ring's stage ``at``."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        call.probs_full.arrive(at)
