"""Accumulators of `mla_decode` with an fp8 cache that lie in global memory: see `Fp8Config.summed`.

After `summed` blocks, the accumulators in registers are added to float32 accumulators in global memory.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute

from tokenspeed_kernel_nvidia.cutedsl import registers_device as registers
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Cursor
from tokenspeed_kernel_nvidia.cutedsl.registers_device import store_floats
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.config import ROWS
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.fp8_config import Fp8Config
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.results_device import Results
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.store_device import CHUNK
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.tile_device import LATENT_CHUNK, NOTES, READERS, Call, thread_of_values

TILES = LATENT_CHUNK // 64  # tiles of 64 columns in a chunk
GROUPS = ROWS // 8  # groups of 8 heads
COPIED = 4  # named barriers, one per value warpgroup, for `MemorySums.row_sums`


@dataclass(frozen=True)
class MemorySums:
    """Accumulators in global memory. Their rescale factors, row max and row sum are behind the notes in shared memory."""

    config: Fp8Config
    results: Results

    @cute.jit
    def group_of(self, call: Call) -> Int32:
        """Returns this CTA's group. Recomputed at each use, see `opt_barrier`."""
        cta, _, _ = cute.arch.block_idx()
        return registers.opt_barrier(cta) // self.config.ranks

    @cute.jit
    def begin(self, call: Call, factor: Float32):
        """Sets the factors of all heads' accumulators in memory; 0 before there are any."""
        thread = thread_of_values()
        meet_others(thread)
        (self.factors_of(call, thread >> 7) + (thread & 127))[0] = factor

    @cute.jit
    def add(self, call: Call, acc: list):
        """Adds the accumulators in registers to those in memory."""
        meet_others(thread_of_values())
        for pair in cutlass.range_constexpr(GROUPS // 2):
            for c in cutlass.range_constexpr(2):
                for tile in cutlass.range_constexpr(len(acc)):
                    sums = self.whole(call, acc, pair, tile, c)
                    store_floats("global", self.own_at(call, pair, tile, c), sums)

    @cute.jit
    def whole(
        self,
        call: Call,
        acc: list,
        pair: cutlass.Constexpr[int],
        tile: cutlass.Constexpr[int],
        c: cutlass.Constexpr[int],
    ):
        """Returns `elements_of` of the accumulators in registers, plus those in memory times their factors."""
        thread = thread_of_values()
        kept = self.factors_of(call, thread >> 7) + head_of(thread, 2 * pair, c)
        factors = [kept[8 * group] for group in range(2)]
        found = registers.load_floats_if((factors[0] != 0.0) | (factors[1] != 0.0), self.own_at(call, pair, tile, c), 4)
        return [acc[tile][element] + found[each] * factors[each // 2] for each, element in enumerate(elements_of(pair, c))]

    @cute.jit
    def own_at(self, call: Call, pair: cutlass.Constexpr[int], tile: cutlass.Constexpr[int], c: cutlass.Constexpr[int]):
        """Returns the address of a thread's float32 accumulators of a tile while a work item is in progress.

        They are in the slot of the group's second partial result, which belongs to its last item. There the thread will store the
        final partial result.
        """
        _, values_at = self.results.partial_at(call, self.group_of(call), Int32(0))
        return values_at + self.own_offset(thread_of_values(), pair, tile, c)

    @cute.jit
    def own_offset(self, thread: Int32, pair: cutlass.Constexpr[int], tile: cutlass.Constexpr[int], c: cutlass.Constexpr[int]):
        """Returns the byte offset of a thread's `elements_of` in a partial result."""
        lane = thread & 31
        chunk = first_column(thread, thread >> 7, tile) // CHUNK + (lane >> 4)
        return self.results.values_offset(Int32(pair), chunk) + ((2 * (lane & 3) + c) * 4 + ((lane >> 2) & 3)) * 16

    def factors_of(self, call: Call, half: Int32) -> cute.Pointer:
        """Returns the shared-memory address of a warpgroup's rescale factors, one a head, for the accumulators in global memory.

        Each thread keeps one factor. The upper 64 threads duplicate the factors of the lower 64.
        """
        return call.storage.notes.data_ptr() + self.config.stages * NOTES + READERS * 2 * ROWS + half * (2 * ROWS)

    @cute.jit
    def read_row_sums(self, call: Call, at: Cursor):
        """Copies row max and row sum of all rows that the score warps stored for a work item's last block to `row_sums`."""
        thread = thread_of_values()
        # All warps have read the factors of the previous work item.
        meet_others(thread)
        self.row_sums(call, thread >> 7, Int32(0))[thread & 127] = call.notes(at).sums(Int32(0))[thread & 127]
        meet_others(thread)

    def row_sums(self, call: Call, half: Int32, row: Int32) -> cute.Pointer:
        """Returns the address of a row's max and sum in this warpgroup's copy, which is behind the notes."""
        return call.storage.notes.data_ptr() + self.config.stages * NOTES + (half * ROWS + row) * 2


def head_of(thread: Int32, group: int, c: int) -> Int32:
    """Returns the row of one of a thread's 16 heads in the tile. The rows are the heads of all the tile's tokens."""
    return 8 * group + 2 * (thread & 3) + c


def elements_of(pair: int, c: int) -> list[int]:
    """Returns the indices of the accumulator elements that are stored together in a partial result: two columns of a head, then the
    same columns of the head 8 rows further."""
    return [8 * pair + 4 * group + 2 * odd + c for group in range(2) for odd in range(2)]


def first_column(thread: Int32, half: Int32, tile: int) -> Int32:
    """Returns the first of a warp's 16 columns of a tile. A thread holds the two at ``lane // 4 * 2``."""
    return (half + tile // TILES * READERS) * LATENT_CHUNK + (tile % TILES) * 64 + ((thread >> 5) & 3) * 16


def meet_others(thread: Int32) -> None:
    """Barrier of this warpgroup."""
    cute.arch.barrier(barrier_id=COPIED + (thread >> 7), number_of_threads=128)
