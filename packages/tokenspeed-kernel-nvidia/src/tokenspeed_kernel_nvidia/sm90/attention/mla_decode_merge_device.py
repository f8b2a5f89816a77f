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
NUMBERS = 8  # of a lane: see `Sums`
TILES = ROWS // 16 * CHUNKS  # of 16 rows and `CHUNK` columns, in a unit


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
    cu_seqlens_q: Int64 | None = None


@dataclass(frozen=True)
class Sums:
    """What a lane has of a tile.

    Attributes:
        values: two of its first row, then two of the row 8 further.
        row_max, row_sum: of the two rows.
    """

    values: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor

    def scale(self, r: int, factor: Float32) -> None:
        self.row_sum[r] = self.row_sum[r] * factor
        for place in (2 * r, 2 * r + 1):
            self.values[place] = self.values[place] * factor

    def add(self, r: int, weight: Float32, row_sum: Float32, values: Any) -> None:
        """Adds others' sum and values of a row, scaled."""
        self.row_sum[r] = self.row_sum[r] + weight * row_sum
        for place in (2 * r, 2 * r + 1):
            self.values[place] = self.values[place] + weight * values[place]


class MlaMerge(Storer):
    """The kernel of one configuration."""

    @cute.jit
    def __call__(self, out: cute.Tensor, partial: Int64, lse: Int64, q_len: Int32, groups: Int32, stream: cuda.CUstream):
        c = self.config
        units = (q_len + (c.tokens_of_tile - 1)) // c.tokens_of_tile
        records = cutlass.min(out.shape[0] // q_len * units, groups)
        shares = cutlass.max(cutlass.min(CTAS // (c.ranks * records), TILES), 4)
        to = Table(out.iterator.toint(), out.stride[0], out.stride[1])
        self.kernel(units, q_len, to, lse, partial, groups, shares, None).launch(
            grid=(shares, c.ranks, records), block=(WARPS * 32, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        units: Int32,
        q_len: Int32,
        out: Table,
        lse: Int64,
        partial: Int64,
        groups: Int32,
        shares: Int32,
        cu_seqlens_q: Int64 | None,
    ):
        """Merges a CTA's share of the tiles of a unit.

        Where a unit has few partial results a warp merges all of a tile. Else warps merge some of them each, and the first one
        merges what these have: to read partial results one after another would take the time of that many loads.
        """
        share, rank, index = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        shared = cutlass.utils.SmemAllocator().allocate_array(Float32, WARPS * 32 * NUMBERS)
        call = MergeCall(units, q_len, out, lse, partial, groups, rank, cu_seqlens_q)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        record = self.record(call, index)
        unit, group, pieces = record[0], record[1], record[2]
        if pieces > 1:
            _, _, tokens = self.tile_of(call, unit)
            tiles = tokens * self.config.heads_of_tile // 16 * CHUNKS
            sums = Sums(*(cute.make_rmem_tensor(count, Float32) for count in (4, 2, 2)))
            if pieces <= BATCH:
                tile = share * WARPS + warp
                while tile < tiles:
                    self.merge(call, sums, group, pieces, tile, Int32(0))
                    self.write(call, unit, tile, sums)
                    tile += shares * WARPS
            else:
                tile = share
                while tile < tiles:
                    self.merge_together(call, sums, group, pieces, tile, warp, shared)
                    if warp == 0:
                        self.write(call, unit, tile, sums)
                    tile += shares

    @cute.jit
    def merge(self, call: MergeCall, sums: Sums, group: Int32, pieces: Int32, tile: Int32, first: Int32):
        """Merges partial results of a tile in their order, scaled to the largest maxima of those so far.

        Args:
            sums: receives what a lane has of the tile.
            first: the first of the partial results. After `BATCH` of them come those that are ``WARPS * BATCH`` further.
        """
        lane = cute.arch.lane_idx()
        row = tile // CHUNKS * 16 + (lane >> 2)
        place = self.place_of_values(tile // CHUNKS, tile % CHUNKS) + lane * 16
        sums.values.fill(0.0)
        for r in cutlass.range_constexpr(2):
            sums.row_max[r], sums.row_sum[r] = Float32(LOWEST), Float32(0.0)
        while first < pieces:
            found = []
            for each in cutlass.range_constexpr(BATCH):
                sums_at, values_at = self.piece(call, group, first + each)
                exists = first + each < pieces
                rows = [load_floats_if(exists, sums_at + (row + 8 * r) * 8, 2) for r in range(2)]
                found.append((*rows, load_floats_if(exists, values_at + place, 4)))
            for r in cutlass.range_constexpr(2):
                raised = sums.row_max[r]
                for each in cutlass.range_constexpr(BATCH):
                    raised = cutlass.select_(first + each < pieces, cute.arch.fmax(raised, found[each][r][0]), raised)
                sums.scale(r, exp2(sums.row_max[r] - raised))
                sums.row_max[r] = raised
                for each in cutlass.range_constexpr(BATCH):
                    # Where there is none, sum and values are 0, but its maximum may be too large.
                    weight = exp2(cute.arch.fmin(found[each][r][0], raised) - raised)
                    sums.add(r, weight, found[each][r][1], found[each][2])
            first += WARPS * BATCH

    @cute.jit
    def merge_together(
        self, call: MergeCall, sums: Sums, group: Int32, pieces: Int32, tile: Int32, warp: Int32, shared: cute.Pointer
    ):
        """Merges partial results of a tile by all warps of a CTA. The first one has what comes of it."""
        self.merge(call, sums, group, pieces, tile, warp * BATCH)
        at = shared + cute.arch.lane_idx()
        for each in cutlass.range_constexpr(4):
            at[(warp * NUMBERS + each) * 32] = sums.values[each]
        for r in cutlass.range_constexpr(2):
            at[(warp * NUMBERS + 4 + r) * 32] = sums.row_max[r]
            at[(warp * NUMBERS + 6 + r) * 32] = sums.row_sum[r]
        cute.arch.sync_threads()
        if warp == 0:
            for other in cutlass.range_constexpr(1, WARPS):
                theirs = [at[(other * NUMBERS + each) * 32] for each in range(NUMBERS)]
                for r in cutlass.range_constexpr(2):
                    raised = cute.arch.fmax(sums.row_max[r], theirs[4 + r])
                    sums.scale(r, exp2(sums.row_max[r] - raised))
                    sums.add(r, exp2(theirs[4 + r] - raised), theirs[6 + r], theirs[:4])
                    sums.row_max[r] = raised
        cute.arch.sync_threads()

    @cute.jit
    def write(self, call: MergeCall, unit: Int32, tile: Int32, sums: Sums):
        """Writes a lane's part of the output of a tile."""
        lane = cute.arch.lane_idx()
        chunk = tile % CHUNKS
        for r in cutlass.range_constexpr(2):
            row = tile // CHUNKS * 16 + 8 * r + (lane >> 2)
            to, _ = self.row_of(call, unit, row)
            factor = self.factor_of(sums.row_sum[r])
            pair = pack(self.dtype, sums.values[2 * r] * factor, sums.values[2 * r + 1] * factor)
            store_words(to + (chunk * CHUNK + (lane & 3) * 2) * 2, [pair])
            if chunk == 0 and lane & 3 == 0:
                self.write_lse(call, unit, row, sums.row_max[r], sums.row_sum[r])
