"""The two value warpgroups of `kernel_device`: each computes P @ V for half of the latents' columns."""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from tokenspeed_kernel_nvidia.cutedsl import registers_device as registers
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Cursor, advance, first_to_read, skip
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.config import ROWS
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.store_device import Storer
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.tile_device import (
    BEGIN,
    FIRST,
    ITEM,
    LATENT_CHUNK,
    LATENT_CHUNKS,
    PLANNED,
    PLANNERS,
    READERS,
    STARTING,
    VALUES,
    Call,
)


@dataclass(frozen=True)
class ValueOperands:
    """MMA operands of P @ V: shared-memory descriptors, by stage.

    Attributes:
        probs: probabilities.
        values: values.
    """

    probs: cute.Tensor
    values: cute.Tensor


class Valuer(Storer):
    """Mixin of the value warpgroups."""

    def make_pv_mma(self) -> cute.TiledMma:
        operands = warpgroup.OperandSource.SMEM, OperandMajorMode.K, OperandMajorMode.MN
        op = warpgroup.MmaF16BF16Op(self.dtype, Float32, (ROWS, LATENT_CHUNK, 16), *operands)
        return cute.make_tiled_mma(op, cute.make_layout((1, 1, 1)))

    @cute.jit
    def take_values(self, call: Call, mma: cute.TiledMma):
        """Computes the output of all work items of the CTA: every other chunk of its columns."""
        c = self.config
        thread, _, _ = cute.arch.thread_idx()
        thread -= VALUES * 128
        half = cute.arch.make_warp_uniform(thread // 128)
        part = mma.get_slice(thread % 128)
        ops = self.operands_of_values(call, part)
        acc = self.accumulators(part)
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, True)
        cute.arch.barrier(barrier_id=PLANNED, number_of_threads=PLANNERS)
        item, first, begin = call.plan[ITEM], call.plan[FIRST], call.plan[BEGIN]
        self.write_record(call, self.most_items(call) > call.groups, call.group, Int32(0), Int32(0))
        at, rope_at = first_to_read(), first_to_read()
        if half == 1:
            at = advance(at, c.latent_chunks)
        while begin < call.end():
            _, _, whole = self.visible(call, self.length_of(call, item))
            count = cutlass.min(first + whole, call.end()) - begin
            # The stage of the queries' rotary part. If another warp released it, probs_full could complete two phases before this
            # warp waits, and a parity wait cannot tell a phase from the one after the next.
            call.probs_full.wait(rope_at)
            self.release(call.ropes.empty, rope_at)
            at, rope_at = skip(at, c.query_chunks, c.latent_chunks), advance(rope_at, c.stages)
            for own in cutlass.range_constexpr(len(acc)):
                acc[own].fill(0.0)
            row_max, row_sum = self.make_sums()
            at, rope_at = self.take_blocks(call, atom, ops, acc, row_max, row_sum, at, rope_at, count)
            split = self.split_of(call, first, whole)
            first += whole + call.plan[STARTING]
            begin = first
            self.write_item(call, acc, row_max, row_sum, item, half, split)
            item = self.next_item(call, item)

    def operands_of_values(self, call: Call, part: Any) -> ValueOperands:
        return ValueOperands(
            part.make_fragment_A(part.partition_A(self.ropes.tiles(call.storage.ropes))),
            part.make_fragment_B(part.partition_B(self.latent_chunks.transposed(call.storage.latent_chunks))),
        )

    def accumulators(self, part: Any) -> list:
        return [
            cute.make_rmem_tensor(part.partition_shape_C((ROWS, LATENT_CHUNK)), Float32) for _ in range(LATENT_CHUNKS // READERS)
        ]

    def make_sums(self) -> tuple:
        """Returns registers for row max and row sum of this thread's two rows."""
        return tuple(cute.make_rmem_tensor(2, Float32) for _ in range(2))

    @cute.jit
    def multiply_values(
        self, call: Call, atom: cute.MmaAtom, ops: ValueOperands, acc: list, at: Cursor, second: Cursor, rope_at: Cursor
    ):
        """Waits for a block's probabilities, rescales, and adds its P @ V. Its values must have been loaded."""
        call.probs_full.wait(rope_at)
        self.rescale(call, acc, rope_at)
        warpgroup.fence()
        for own in cutlass.range_constexpr(len(acc)):
            cursor = second if own else at
            for step in cutlass.range_constexpr(ROWS // 16):
                p, v = ops.probs[None, None, step, rope_at.stage], ops.values[None, None, step, cursor.stage]
                cute.gemm(atom, acc[own], p, v, acc[own])
            warpgroup.commit_group()
        warpgroup.wait_group(1)
        self.release(call.latent_chunks.empty, at)
        warpgroup.wait_group(0)
        self.release(call.latent_chunks.empty, second)

    @cute.jit
    def take_blocks(
        self,
        call: Call,
        atom: cute.MmaAtom,
        ops: ValueOperands,
        acc: list,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        at: Cursor,
        rope_at: Cursor,
        count: Int32,
    ):
        """Adds P @ V of all blocks of a work item, and reads row max and row sum. Returns the cursors of the next item."""
        index = Int32(0)
        while index < count:
            at, rope_at = self.take_block(call, atom, ops, acc, row_max, row_sum, at, rope_at, index == count - 1)
            index += 1
        return at, rope_at

    @cute.jit
    def take_block(
        self,
        call: Call,
        atom: cute.MmaAtom,
        ops: ValueOperands,
        acc: list,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        at: Cursor,
        rope_at: Cursor,
        is_last: Boolean,
    ):
        """Adds P @ V of a block, and releases its stages."""
        c = self.config
        second = skip(at, READERS, c.latent_chunks)
        # Values are loaded before their probabilities are computed, so wait for them first, off the critical path.
        call.latent_chunks.wait(at)
        call.latent_chunks.wait(second)
        self.multiply_values(call, atom, ops, acc, at, second, rope_at)
        if is_last:
            self.read_sums(call, row_max, row_sum, rope_at)
        cute.arch.sync_warp()
        self.release(call.ropes.empty, rope_at)
        return skip(at, LATENT_CHUNKS, c.latent_chunks), advance(rope_at, c.stages)

    @cute.jit
    def rescale(self, call: Call, acc: list, at: Cursor):
        """Rescales a warp's rows where a row max has grown."""
        thread = self.thread_of_values()
        notes = call.notes(at)
        if notes.grown((thread >> 5) & 3)[0] != 0.0:
            for r in cutlass.range_constexpr(2):
                factor = notes.factor(self.row_of_values(thread) + 8 * r)[0]
                for own in cutlass.range_constexpr(len(acc)):
                    registers.scale_row(acc[own], r, factor)

    @cute.jit
    def read_sums(self, call: Call, row_max: cute.Tensor, row_sum: cute.Tensor, at: Cursor):
        """Reads row max and row sum from the notes of a work item's last block."""
        row = self.row_of_values(self.thread_of_values())
        for r in cutlass.range_constexpr(2):
            sums = call.notes(at).sums(row + 8 * r)
            row_max[r], row_sum[r] = sums[0], sums[1]
