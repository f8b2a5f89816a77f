"""The epilogue's stores with an fp8 cache. Accumulators are transposed (rows are latent columns), unlike in
`store_device.Store`."""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from tokenspeed_kernel_nvidia.cutedsl.registers_device import dtype_of, pack, store_if
from tokenspeed_kernel_nvidia.cutedsl.scales_device import Scales
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.config import ROWS
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.fp8_config import Fp8Config
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.fp8_sums_device import GROUPS, MemorySums, first_column, head_of
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.results_device import Results, factor_of
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.store_device import Accumulators, Split
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.tile_device import Call, thread_of_values


@dataclass(frozen=True)
class Fp8Store:
    """Stores accumulators whose rows are columns of the latent.

    Attributes:
        sums: the parts of the accumulators that are in global memory.
    """

    config: Fp8Config
    work: Any
    results: Results
    sums: MemorySums

    def group_of(self, call: Call) -> Int32:
        return self.sums.group_of(call)

    @cute.jit
    def partial(self, call: Call, out: Accumulators, item: Int32, half: Int32, split: Split):
        """Stores the value warpgroup's columns of a work item's partial result in float32, times the cache's scale. Value warpgroup
        0 also stores row max and row sum."""
        thread = thread_of_values()
        sums_at, values_at = self.results.partial_at(call, split.first_group, self.sums.group_of(call) - split.first_group)
        _, _, tokens = self.work.tile_of(call, item)
        rows = tokens * self.config.heads_of_tile
        own = self.sums.row_sums(call, half, thread & (ROWS - 1))
        store_if(has_row(thread, half) & ((thread & 127) < rows), sums_at + (thread & 127) * 8, [own[0], own[1]])
        scale = value_scale(call)
        for pair in cutlass.range_constexpr(GROUPS // 2):
            for tile in cutlass.range_constexpr(len(out.tiles)):
                for c in cutlass.range_constexpr(2):
                    to = values_at + self.sums.own_offset(thread, pair, tile, c)
                    sums = self.sums.whole(call, out.tiles, pair, tile, c)
                    store_if(pair * 16 < rows, to, [each * scale for each in sums])

    @cute.jit
    def output(self, call: Call, out: Accumulators, item: Int32, half: Int32):
        """Normalises the value warpgroup's columns of a work item, and stores them as output, two columns at a time. Value
        warpgroup 0 also stores the LSE."""
        scale = value_scale(call)
        for pair in cutlass.range_constexpr(GROUPS // 2):
            for c in cutlass.range_constexpr(2):
                thread = thread_of_values()  # recomputed, so that addresses of all heads do not take registers at once
                targets, factors = [], []
                for group in cutlass.range_constexpr(2):
                    head = head_of(thread, 2 * pair + group, c)
                    targets.append(self.results.row_of(call, item, head))
                    factors.append(factor_of(self.sums.row_sums(call, half, head)[1]) * scale)
                for tile in cutlass.range_constexpr(len(out.tiles)):
                    sums = self.sums.whole(call, out.tiles, pair, tile, c)
                    column = first_column(thread, half, tile) + ((thread & 31) >> 2) * 2
                    for group, (to, exists) in enumerate(targets):
                        even, odd = (sums[2 * group + each] * factors[group] for each in range(2))
                        store_if(exists, to + column * 2, [pack(dtype_of(self.config.dtype), even, odd)])
        thread = thread_of_values()
        row = thread & (ROWS - 1)
        _, exists = self.results.row_of(call, item, row)
        own = self.sums.row_sums(call, half, row)
        to, value = self.results.lse_of(call, item, row, own[0], own[1])
        store_if(has_row(thread, half) & exists & (call.lse != 0), to, [value])


@cute.jit
def value_scale(call: Call) -> Float32:
    """Returns the cache's scale, the factor of P @ V."""
    return Scales(call.kv_scale, Int32(0)).of(Int32(0))


def has_row(thread: Int32, half: Int32) -> Boolean:
    """Returns whether this thread writes the row max and row sum, or the LSE, of query row ``thread % 128``."""
    return (half == 0) & ((thread & 127) < ROWS)
