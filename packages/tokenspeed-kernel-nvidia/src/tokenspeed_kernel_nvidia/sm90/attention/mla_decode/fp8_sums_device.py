"""The output accumulators in global memory that `mla_decode` uses with an fp8 cache.

After every `Fp8Config.summed` blocks, the accumulators in registers are added to float32 accumulators in global memory. Longer sums
of fp8 MMAs would be inaccurate, because the tensor cores truncate the terms of each MMA. Registers and shared memory have no room
for second accumulators.
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
COPIED = 4  # the first of the value warpgroups' named barriers, one per warpgroup


@dataclass(frozen=True)
class MemorySums:
    """The output accumulators in global memory. Their rescale factors, and the rows' max and sum, are in shared memory, after the
    `Notes` of all stages."""

    config: Fp8Config
    results: Results

    @cute.jit
    def group_of(self, call: Call) -> Int32:
        """Returns the index of this CTA's CTA group. The value is recomputed at each use, see `opt_barrier`."""
        cta, _, _ = cute.arch.block_idx()
        return registers.opt_barrier(cta) // self.config.ranks

    @cute.jit
    def begin(self, call: Call, factor: Float32):
        """Sets the rescale factors of all rows' accumulators in global memory to ``factor``: 0 while that memory holds no
        accumulators yet, otherwise 1. Rescales between two additions only multiply these factors, see `Fp8PvMma.rescale`."""
        thread = thread_of_values()
        meet_others(thread)
        (self.factors_of(call, thread >> 7) + (thread & 127))[0] = factor

    @cute.jit
    def add(self, call: Call, acc: list):
        """Adds the accumulators in registers to the rescaled accumulators in global memory, and stores the sums there."""
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
        """Returns four of a thread's accumulators (see `elements_of`): those in registers, plus those in global memory times their
        rescale factors."""
        thread = thread_of_values()
        kept = self.factors_of(call, thread >> 7) + head_of(thread, 2 * pair, c)
        factors = [kept[8 * group] for group in range(2)]
        found = registers.load_floats_if((factors[0] != 0.0) | (factors[1] != 0.0), self.own_at(call, pair, tile, c), 4)
        return [acc[tile][element] + found[each] * factors[each // 2] for each, element in enumerate(elements_of(pair, c))]

    @cute.jit
    def own_at(self, call: Call, pair: cutlass.Constexpr[int], tile: cutlass.Constexpr[int], c: cutlass.Constexpr[int]):
        """Returns the global address of four of a thread's float32 accumulators (see `elements_of`) while a work item is in
        progress.

        The accumulators use the memory of the second partial result of the CTA group, which belongs to the group's last work item.
        The thread will store that final partial result at the same addresses.
        """
        _, values_at = self.results.partial_at(call, self.group_of(call), Int32(0))
        return values_at + self.own_offset(thread_of_values(), pair, tile, c)

    @cute.jit
    def own_offset(self, thread: Int32, pair: cutlass.Constexpr[int], tile: cutlass.Constexpr[int], c: cutlass.Constexpr[int]):
        """Returns the byte offset in a partial result of four of a thread's accumulators, see `elements_of`."""
        lane = thread & 31
        chunk = first_column(thread, thread >> 7, tile) // CHUNK + (lane >> 4)
        return self.results.values_offset(Int32(pair), chunk) + ((2 * (lane & 3) + c) * 4 + ((lane >> 2) & 3)) * 16

    def factors_of(self, call: Call, half: Int32) -> cute.Pointer:
        """Returns the shared-memory address of a value warpgroup's rescale factors of the accumulators in global memory, one per
        row.

        Each thread updates one factor. The upper 64 threads duplicate the factors of the lower 64.
        """
        return call.storage.notes.data_ptr() + self.config.stages * NOTES + READERS * 2 * ROWS + half * (2 * ROWS)

    @cute.jit
    def read_row_sums(self, call: Call, at: Cursor):
        """Copies the row max and row sum of all rows from the `Notes` of a work item's last block to this warpgroup's
        `row_sums`."""
        thread = thread_of_values()
        # Wait until all warps have read the factors of the previous work item.
        meet_others(thread)
        self.row_sums(call, thread >> 7, Int32(0))[thread & 127] = call.notes(at).sums(Int32(0))[thread & 127]
        meet_others(thread)

    def row_sums(self, call: Call, half: Int32, row: Int32) -> cute.Pointer:
        """Returns the shared-memory address of a row's max and sum in this warpgroup's copy, which follows the `Notes` of all
        stages."""
        return call.storage.notes.data_ptr() + self.config.stages * NOTES + (half * ROWS + row) * 2


def head_of(thread: Int32, group: int, c: int) -> Int32:
    """Returns one of a thread's 16 query rows of the tile: row ``c`` (0 or 1) of the thread's two rows in the group of eight rows
    with index ``group`` (0 to 7). A row is one head of one of the tile's tokens."""
    return 8 * group + 2 * (thread & 3) + c


def elements_of(pair: int, c: int) -> list[int]:
    """Returns the indices of four of a thread's accumulator elements, which a partial result stores together: two columns of a
    query row, then the same columns of the query row 8 further down."""
    return [8 * pair + 4 * group + 2 * odd + c for group in range(2) for odd in range(2)]


def first_column(thread: Int32, half: Int32, tile: int) -> Int32:
    """Returns the first of a warp's 16 latent columns in a tile. A thread holds two of them, at ``lane // 4 * 2``."""
    return (half + tile // TILES * READERS) * LATENT_CHUNK + (tile % TILES) * 64 + ((thread >> 5) & 3) * 16


def meet_others(thread: Int32) -> None:
    """Synchronises the threads of this value warpgroup, by the warpgroup's named barrier."""
    cute.arch.barrier(barrier_id=COPIED + (thread >> 7), number_of_threads=128)
