"""The two value warpgroups of `kernel_device`, each of which computes P @ V for half of the latent's columns.

`PvMma` has the MMAs of 16-bit probabilities and values, `fp8_value_device` those with an fp8 cache.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from tokenspeed_kernel_nvidia.cutedsl import registers_device as registers
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Cursor, advance, first_to_read, skip
from tokenspeed_kernel_nvidia.cutedsl.registers_device import dtype_of
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.config import ROWS, Config
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.scheduler_device import await_plan, blocks_of
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.store_device import Accumulators, Epilogue, split_of
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.tile_device import (
    LATENT_CHUNK,
    LATENT_CHUNKS,
    READERS,
    STARTING,
    VALUES,
    Call,
    SharedMemory,
    release,
    row_of_values,
    thread_of_values,
)


@dataclass(frozen=True)
class ValueWarpgroups:
    """The value warpgroups.

    Attributes:
        pv: the object that computes P @ V: `PvMma` or `Fp8PvMma`.
        epilogue: the object that stores a work item's results.
    """

    config: Config
    work: Any
    pv: Any
    epilogue: Epilogue

    @cute.jit
    def compute(self, call: Call, mma: cute.TiledMma):
        """Computes the output of all work items of the CTA. Each warpgroup computes every other latent chunk (128 columns): 0 and
        2, or 1 and 3."""
        c = self.config
        thread, _, _ = cute.arch.thread_idx()
        thread -= VALUES * 128
        half = cute.arch.make_warp_uniform(thread // 128)
        part = mma.get_slice(thread % 128)
        ops = self.pv.operands(call, mma, part)
        acc = self.pv.accumulators(part)
        item, first, begin = await_plan(call)
        # If there is a record per CTA group, the merge kernel reads this group's record in any case. So clear the record first: no
        # partial results.
        self.epilogue.write_record(call, self.work.most_items(call) > call.groups, call.group, Int32(0), Int32(0))
        at, rope_at = first_to_read(), first_to_read()
        if half == 1:
            at = advance(at, c.latent_chunks)
        while begin < call.end():
            whole = blocks_of(self.work.length_of(call, item))
            count = cutlass.min(first + whole, call.end()) - begin
            # The value warps release the stage of the queries' rotary part, although they do not read it. Otherwise, probs_full of
            # a stage could complete two phases before a value warp waits for the first of them. A parity wait cannot distinguish a
            # phase from the second phase after it.
            call.probs_full.wait(rope_at)
            release(call.ropes.empty, rope_at, self.config.cluster)
            at, rope_at = skip(at, c.query_chunks, c.latent_chunks), advance(rope_at, c.stages)
            for own in cutlass.range_constexpr(len(acc)):
                acc[own].fill(0.0)
            out = Accumulators(acc, *self.pv.make_sums())
            at, rope_at = self.pv.take_blocks(call, ops, out, at, rope_at, count)
            split = split_of(call, first, whole)
            first += whole + call.plan[STARTING]
            begin = first
            self.epilogue.write_item(call, out, item, half, split)
            item = self.work.next_item(call, item)


# -- P @ V -----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ValueOperands:
    """The MMA atom of P @ V, and its operands P and V: shared-memory descriptors, by ring stage."""

    atom: cute.MmaAtom
    probs: cute.Tensor
    values: cute.Tensor


@dataclass(frozen=True)
class PvMma:
    """A value warpgroup's P @ V with 16-bit MMAs. Both operands are in shared memory: P in a rotary stage, V in latent chunks."""

    config: Config
    memory: SharedMemory

    def make_mma(self) -> cute.TiledMma:
        """Returns the tiled MMA of 64 query rows by a latent chunk (128 columns)."""
        operands = warpgroup.OperandSource.SMEM, OperandMajorMode.K, OperandMajorMode.MN
        op = warpgroup.MmaF16BF16Op(dtype_of(self.config.dtype), Float32, (ROWS, LATENT_CHUNK, 16), *operands)
        return cute.make_tiled_mma(op, cute.make_layout((1, 1, 1)))

    def operands(self, call: Call, mma: cute.TiledMma, part: Any) -> ValueOperands:
        """Returns the MMA atom and the operands of this thread. ``part``: the thread's slice of ``mma``."""
        return ValueOperands(
            accumulating(mma),
            part.make_fragment_A(part.partition_A(self.memory.ropes.tiles(call.storage.ropes))),
            part.make_fragment_B(part.partition_B(self.memory.latent_chunks.transposed(call.storage.latent_chunks))),
        )

    def accumulators(self, part: Any) -> list:
        """Returns this thread's accumulators: one for each latent chunk that its warpgroup computes."""
        return [
            cute.make_rmem_tensor(part.partition_shape_C((ROWS, LATENT_CHUNK)), Float32) for _ in range(LATENT_CHUNKS // READERS)
        ]

    def make_sums(self) -> tuple:
        """Returns registers for the row max and row sum of this thread's two query rows."""
        return tuple(cute.make_rmem_tensor(2, Float32) for _ in range(2))

    @cute.jit
    def take_blocks(self, call: Call, ops: ValueOperands, out: Accumulators, at: Cursor, rope_at: Cursor, count: Int32):
        """Accumulates P @ V of all blocks of a work item, and reads row max and row sum. Returns the cursors of both rings after
        the blocks."""
        index = Int32(0)
        while index < count:
            at, rope_at = take_block(self, call, ops, out, at, rope_at, index == count - 1)
            index += 1
        return at, rope_at

    @cute.jit
    def multiply(self, call: Call, ops: ValueOperands, out: Accumulators, at: Cursor, second: Cursor, rope_at: Cursor):
        """Waits for a block's probabilities, rescales the accumulators, and adds the block's P @ V. The warpgroup's two latent
        chunks of the block, at ``at`` and ``second``, must have been loaded."""
        acc = out.tiles
        call.probs_full.wait(rope_at)
        self.rescale(call, acc, rope_at)
        warpgroup.fence()
        for own in cutlass.range_constexpr(len(acc)):
            cursor = second if own else at
            for step in cutlass.range_constexpr(ROWS // 16):
                p, v = ops.probs[None, None, step, rope_at.stage], ops.values[None, None, step, cursor.stage]
                cute.gemm(ops.atom, acc[own], p, v, acc[own])
            warpgroup.commit_group()
        warpgroup.wait_group(1)
        release(call.latent_chunks.empty, at, self.config.cluster)
        warpgroup.wait_group(0)
        release(call.latent_chunks.empty, second, self.config.cluster)

    @cute.jit
    def rescale(self, call: Call, acc: list, at: Cursor):
        """Rescales the accumulators of a warp's rows, if the max of one of these rows has grown."""
        thread = thread_of_values()
        notes = call.notes(at)
        if notes.grown((thread >> 5) & 3)[0] != 0.0:
            for r in cutlass.range_constexpr(2):
                factor = notes.factor(row_of_values(thread) + 8 * r)[0]
                for own in cutlass.range_constexpr(len(acc)):
                    registers.scale_row(acc[own], r, factor)

    @cute.jit
    def read_sums(self, call: Call, out: Accumulators, at: Cursor):
        """Reads the row max and row sum of this thread's two query rows from the `Notes` of a work item's last block."""
        row = row_of_values(thread_of_values())
        for r in cutlass.range_constexpr(2):
            sums = call.notes(at).sums(row + 8 * r)
            out.row_max[r], out.row_sum[r] = sums[0], sums[1]


@cute.jit
def take_block(pv: Any, call: Call, ops: Any, out: Accumulators, at: Cursor, rope_at: Cursor, is_last: Boolean):
    """Accumulates P @ V of a block, and releases the block's ring stages. Returns the cursors of both rings after the block."""
    c = pv.config
    second = skip(at, READERS, c.latent_chunks)
    # A block's latents are loaded before its probabilities are computed. So wait for latents first, off the critical path.
    call.latent_chunks.wait(at)
    call.latent_chunks.wait(second)
    pv.multiply(call, ops, out, at, second, rope_at)
    if is_last:
        pv.read_sums(call, out, rope_at)
    cute.arch.sync_warp()
    release(call.ropes.empty, rope_at, pv.config.cluster)
    return skip(at, LATENT_CHUNKS, c.latent_chunks), advance(rope_at, c.stages)


def accumulating(mma: cute.TiledMma) -> cute.MmaAtom:
    """Returns the atom of ``mma``, set to add to its accumulator."""
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, True)
    return atom
