"""P @ V of the value warpgroups with an fp8 cache: the counterpart of `value_device`.

fp8 wgmma supports K-major operands only. Here the MMA's k is the token axis, but V is contiguous along latent columns. So P @ V is
computed swap-AB. The A operand is V transposed to columns x tokens, in registers. It is loaded by ldmatrix.trans, which transposes
pairs of bytes. The accumulator has columns of the latent as rows, and query rows as columns.

Tokens have the order in which the probabilities are stored, as in `prefill.convert_device`. In each group of 32 tokens, position
``16 h + 4 t + e`` holds token ``16 h + 8 (e // 2) + 2 t + e % 2``.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Uint32, cute
from cutlass.cute.nvgpu import warpgroup

from tokenspeed_kernel_nvidia.cutedsl import registers_device as registers
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Cursor
from tokenspeed_kernel_nvidia.cutedsl.registers_device import permute_bytes
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.config import ROWS
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.fp8_config import STEP, Fp8Config
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.fp8_sums_device import GROUPS, TILES, MemorySums, elements_of, head_of
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.store_device import Accumulators
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.tile_device import (
    FP8,
    FP8_CHUNK_BYTES,
    LATENT_CHUNK,
    LATENT_CHUNKS,
    READERS,
    Call,
    SharedMemory,
    release,
    thread_of_values,
)
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.value_device import accumulating, take_block
from tokenspeed_kernel_nvidia.sm90.common.wgmma_device import make_pv_mma

OWN = LATENT_CHUNKS // READERS  # latent chunks of a block that a value warpgroup computes
TOKEN_STEPS = ROWS // STEP  # MMAs for a tile of 64 columns and a block of 64 tokens


@dataclass(frozen=True)
class ValueOperands:
    """The MMA atom and the operands of V.T @ P.T.

    Attributes:
        atom: the MMA atom.
        values: the A operand in registers: `Fp8Config.value_buffers` tiles of V.
        words: the registers of ``values`` as 32-bit words.
        probs: the B operand: shared-memory descriptors of probabilities, by stage of the rotary ring.
    """

    atom: cute.MmaAtom
    values: cute.Tensor
    words: cute.Tensor
    probs: cute.Tensor


@dataclass(frozen=True)
class Fp8PvMma:
    """Computes V.T @ P.T with e4m3 MMAs.

    In each tile of the warpgroup's two latent chunks, a thread holds two adjacent columns of the 16 query rows that ``head_of``
    returns.

    Attributes:
        sums: the output accumulators in global memory.
    """

    config: Fp8Config
    memory: SharedMemory
    sums: MemorySums

    def make_mma(self) -> cute.TiledMma:
        """Returns the tiled MMA of 64 latent columns by 64 query rows."""
        return make_pv_mma(FP8, ROWS)

    def operands(self, call: Call, mma: cute.TiledMma, part: Any) -> ValueOperands:
        """Returns the MMA atom and the operands of this thread. ``part``: the thread's slice of ``mma``."""
        values = part.make_fragment_A(part.partition_shape_A((ROWS, self.config.value_buffers * ROWS)))
        probs = part.make_fragment_B(part.partition_B(self.memory.ropes.tiles(call.storage.ropes, dtype=FP8)))
        return ValueOperands(accumulating(mma), values, cute.recast_tensor(values, Uint32), probs)

    def accumulators(self, part: Any) -> list:
        """Returns this thread's accumulators: one for each tile of 64 latent columns that its warpgroup computes."""
        return [cute.make_rmem_tensor(part.partition_shape_C((ROWS, ROWS)), Float32) for _ in range(OWN * TILES)]

    def make_sums(self) -> tuple:
        """Returns no registers: the row max and row sum of a thread's 16 query rows stay in shared memory, see `MemorySums`."""
        return None, None

    @cute.jit
    def take_blocks(self, call: Call, ops: ValueOperands, out: Accumulators, at: Cursor, rope_at: Cursor, count: Int32):
        """Accumulates V.T @ P.T of all blocks of a work item. With more than `Fp8Config.summed` blocks, the sums of earlier blocks
        are kept in global memory. Returns the cursors of both rings after the blocks."""
        self.sums.begin(call, Float32(0.0))
        index = Int32(0)
        while index < count:
            for tile in cutlass.range_constexpr(len(out.tiles)):
                out.tiles[tile].fill(0.0)
            stop = cutlass.min(index + self.config.summed, count)
            while index < stop:
                at, rope_at = take_block(self, call, ops, out, at, rope_at, index == count - 1)
                index += 1
            if index < count:
                self.sums.add(call, out.tiles)
                self.sums.begin(call, Float32(1.0))
        return at, rope_at

    @cute.jit
    def multiply(self, call: Call, ops: ValueOperands, out: Accumulators, at: Cursor, second: Cursor, rope_at: Cursor):
        """Waits for a block's probabilities, rescales the accumulators, and adds the block's V.T @ P.T. The warpgroup's two latent
        chunks of the block, at ``at`` and ``second``, must have been loaded."""
        acc = out.tiles
        # After this wait, the score warpgroup has also zeroed the latents of slots without a token.
        call.probs_full.wait(rope_at)
        self.rescale(call, acc, rope_at)
        value_buffers = self.config.value_buffers
        for tile in cutlass.range_constexpr(len(acc)):
            cursor = second if tile // TILES else at
            if cutlass.const_expr(tile >= value_buffers):
                warpgroup.wait_group(value_buffers - 1)
            self.transpose_tile(call, ops.words, cursor, tile)
            warpgroup.fence()
            for step in cutlass.range_constexpr(TOKEN_STEPS):
                v = ops.values[None, None, tile % value_buffers * TOKEN_STEPS + step]
                cute.gemm(ops.atom, acc[tile], v, ops.probs[None, None, step, rope_at.stage], acc[tile])
            warpgroup.commit_group()
        warpgroup.wait_group(0)
        release(call.latent_chunks.empty, at, self.config.cluster)
        release(call.latent_chunks.empty, second, self.config.cluster)

    @cute.jit
    def transpose_tile(self, call: Call, words: cute.Tensor, at: Cursor, tile: cutlass.Constexpr[int]):
        """Loads a V tile (64 columns) of the latent chunk at ``at`` to registers, transposed."""
        thread = thread_of_values()
        lane, warp = thread & 31, (thread >> 5) & 3
        address = (
            self.memory.panel_at(call, at, 0) + lane * LATENT_CHUNK + ((warp + 4 * (tile % TILES)) ^ (lane & 7)) * FP8_CHUNK_BYTES
        )
        for step in cutlass.range_constexpr(TOKEN_STEPS):
            found = registers.ldmatrix(address + step * (STEP * LATENT_CHUNK), True)
            first = (tile % self.config.value_buffers * TOKEN_STEPS + step) * 4
            for half in cutlass.range_constexpr(2):
                for odd in cutlass.range_constexpr(2):
                    word = permute_bytes(found[2 * half], found[2 * half + 1], (0x6420, 0x7531)[odd])
                    words[first + 2 * half + odd] = word

    @cute.jit
    def rescale(self, call: Call, acc: list, at: Cursor):
        """If a row max has grown, rescales the row's accumulators in registers. For the row's accumulators in global memory,
        multiplies the rescale factor, which will be applied later."""
        notes = call.notes(at)
        grown = registers.load_floats("shared", notes.grown(Int32(0)).toint(), 4)
        if grown[0] + grown[1] + grown[2] + grown[3] != 0.0:
            thread = thread_of_values()
            kept = self.sums.factors_of(call, thread >> 7) + (thread & 127)
            kept[0] = kept[0] * notes.factor(thread & (ROWS - 1))[0]
            for pair in cutlass.range_constexpr(GROUPS // 2):
                for c in cutlass.range_constexpr(2):
                    thread = thread_of_values()
                    factors = [notes.factor(head_of(thread, 2 * pair + group, c))[0] for group in range(2)]
                    for tile in cutlass.range_constexpr(len(acc)):
                        for each, element in enumerate(elements_of(pair, c)):
                            acc[tile][element] = acc[tile][element] * factors[each // 2]

    def read_sums(self, call: Call, out: Accumulators, at: Cursor) -> None:
        """Copies the row max and row sum of a work item's rows, see `MemorySums.read_row_sums`."""
        self.sums.read_row_sums(call, at)
