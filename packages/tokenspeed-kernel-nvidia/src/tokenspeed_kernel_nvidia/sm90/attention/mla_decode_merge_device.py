"""The device code that makes the output of `mla_decode`'s partial results, which CTAs leave of units that several groups share.

It is a launch of its own, behind the one that computes. So no CTA ever waits for another one, which might not run yet.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.utils
from cutlass import Float32, Int32, Int64, cute

from tokenspeed_kernel_nvidia.sm90.attention.mla_decode_config import LATENT, ROWS, Config
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode_store_device import CHUNK, CHUNKS, Storer
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode_tile_device import Table
from tokenspeed_kernel_nvidia.sm90.common import arguments_device as arguments
from tokenspeed_kernel_nvidia.sm90.common.registers_device import load_floats_if, pack, store_words
from tokenspeed_kernel_nvidia.sm90.common.softmax_device import LOWEST, exp2

WARPS = 8  # of a CTA
BATCH = 4  # partial results that a warp loads at once
CTAS = 1024  # at most, where there are so many units that warps have several tiles each: most units have nothing to merge
NUMBERS = 6  # of a lane: four values, and the maximum and sum of its row
TILES = ROWS // 8 * CHUNKS  # of 8 rows and `CHUNK` columns, in a unit


def host(config: Config) -> Any:
    """The function that launches a program."""
    return MlaMerge(config)


def fake_arguments(config: Config) -> tuple[Any, ...]:
    """Stand-ins for what `host` takes."""
    out = arguments.rows(config.dtype, arguments.size(), config.heads, LATENT)
    return out, *(Int64(0) for _ in range(2)), *(Int32(0) for _ in range(2)), arguments.stream()


@dataclass(frozen=True)
class MergeCall:
    """What a CTA is asked for; see `mla_decode_tile_device.Call`."""

    units: Int32
    q_len: Int32
    out: Table
    lse: Int64
    partial: Int64
    groups: Int32
    rank: Int32


class MlaMerge(Storer):
    """The kernel of one configuration."""

    @cute.jit
    def __call__(self, out: cute.Tensor, partial: Int64, lse: Int64, q_len: Int32, groups: Int32, stream: cuda.CUstream):
        c = self.config
        units = (q_len + (c.tokens_of_tile - 1)) // c.tokens_of_tile
        records = cutlass.min(out.shape[0] // q_len * units, groups)
        shares = cutlass.max(cutlass.min(CTAS // (c.cluster * records), TILES), 4)
        to = Table(out.iterator.toint(), out.stride[0], out.stride[1])
        self.kernel(units, q_len, to, lse, partial, groups, shares).launch(
            grid=(shares, c.cluster, records), block=(WARPS * 32, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, units: Int32, q_len: Int32, out: Table, lse: Int64, partial: Int64, groups: Int32, shares: Int32):
        """Merges a CTA's share of the tiles of a unit.

        Where a unit has few partial results a warp merges all of a tile. Else warps merge some of them each, and the first one
        merges what these have: to read partial results one after another would take the time of that many loads.
        """
        share, rank, index = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        shared = cutlass.utils.SmemAllocator().allocate_array(Float32, WARPS * 32 * NUMBERS)
        call = MergeCall(units, q_len, out, lse, partial, groups, rank)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        record = self.record(call, index)
        unit, group, pieces = record[0], record[1], record[2]
        if pieces > 1:
            _, _, tokens = self.place_of(call, unit)
            tiles = tokens * self.config.heads_of_tile // 8 * CHUNKS
            if pieces <= BATCH:
                tile = share * WARPS + warp
                while tile < tiles:
                    values = cute.make_rmem_tensor(4, Float32)
                    row_max, row_sum = self.merge(call, values, group, pieces, tile, Int32(0))
                    self.write(call, unit, tile, values, row_max, row_sum)
                    tile += shares * WARPS
            else:
                tile = share
                while tile < tiles:
                    self.merge_together(call, unit, group, pieces, tile, warp, shared)
                    tile += shares

    @cute.jit
    def merge(self, call: MergeCall, values: cute.Tensor, group: Int32, pieces: Int32, tile: Int32, first: Int32):
        """Merges partial results of a tile in their order, scaled to the largest maximum of those so far.

        Args:
            values: receives a lane's four values.
            first: the first of the partial results. After `BATCH` of them come those that are ``WARPS * BATCH`` further.

        Returns:
            The maximum and the sum of a lane's row.
        """
        lane = cute.arch.lane_idx()
        row = tile // CHUNKS * 8 + (lane >> 2)
        place = self.place_of_values(tile // CHUNKS // 2, tile // CHUNKS % 2, tile % CHUNKS) + lane * 16
        row_max, row_sum = Float32(LOWEST), Float32(0.0)
        values.fill(0.0)
        while first < pieces:
            sums, some = [], []
            for each in cutlass.range_constexpr(BATCH):
                sums_at, values_at = self.piece(call, group, first + each)
                exists = first + each < pieces
                sums.append(load_floats_if(exists, sums_at + row * 8, 2))
                some.append(load_floats_if(exists, values_at + place, 4))
            raised = row_max
            for each in cutlass.range_constexpr(BATCH):
                raised = cutlass.select_(first + each < pieces, cute.arch.fmax(raised, sums[each][0]), raised)
            row_sum = self.add(values, [0.0] * 4, row_sum, Float32(0.0), exp2(row_max - raised), Float32(0.0))
            row_max = raised
            for each in cutlass.range_constexpr(BATCH):
                # Where there is none, sum and values are 0, but its maximum may be too large.
                weight = exp2(cute.arch.fmin(sums[each][0], raised) - raised)
                row_sum = self.add(values, some[each], row_sum, sums[each][1], Float32(1.0), weight)
            first += WARPS * BATCH
        return row_max, row_sum

    @cute.jit
    def merge_together(
        self, call: MergeCall, unit: Int32, group: Int32, pieces: Int32, tile: Int32, warp: Int32, shared: cute.Pointer
    ):
        """Merges a tile's partial results by all warps of a CTA, and writes the output."""
        values = cute.make_rmem_tensor(4, Float32)
        row_max, row_sum = self.merge(call, values, group, pieces, tile, warp * BATCH)
        to = shared + cute.arch.lane_idx()
        for each in cutlass.range_constexpr(4):
            to[(warp * NUMBERS + each) * 32] = values[each]
        to[(warp * NUMBERS + 4) * 32] = row_max
        to[(warp * NUMBERS + 5) * 32] = row_sum
        cute.arch.sync_threads()
        if warp == 0:
            for other in cutlass.range_constexpr(1, WARPS):
                theirs = [to[(other * NUMBERS + each) * 32] for each in range(NUMBERS)]
                raised = cute.arch.fmax(row_max, theirs[4])
                row_sum = self.add(values, theirs[:4], row_sum, theirs[5], exp2(row_max - raised), exp2(theirs[4] - raised))
                row_max = raised
            self.write(call, unit, tile, values, row_max, row_sum)
        cute.arch.sync_threads()

    @cute.jit
    def add(self, values: cute.Tensor, others: list, row_sum: Float32, other_sum: Float32, decay: Float32, weight: Float32):
        """Adds a partial result to a sum of some, both scaled. Returns the row's sum."""
        for each in cutlass.range_constexpr(4):
            values[each] = values[each] * decay + weight * others[each]
        return row_sum * decay + weight * other_sum

    @cute.jit
    def write(self, call: MergeCall, unit: Int32, tile: Int32, values: cute.Tensor, row_max: Float32, row_sum: Float32):
        """Writes a lane's part of the output of a tile."""
        lane = cute.arch.lane_idx()
        row, chunk = tile // CHUNKS * 8 + (lane >> 2), tile % CHUNKS
        factor = self.factor_of(row_sum)
        to, _ = self.row_of(call, unit, row)
        to += (chunk * CHUNK + (lane & 3) * 2) * 2
        for word in cutlass.range_constexpr(2):
            pair = pack(self.dtype, values[2 * word] * factor, values[2 * word + 1] * factor)
            store_words(to + word * 16, [pair])
        if chunk == 0 and lane & 3 == 0:
            self.write_lse(call, unit, row, row_max, row_sum)
