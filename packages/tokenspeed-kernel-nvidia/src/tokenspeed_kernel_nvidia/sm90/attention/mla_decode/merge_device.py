"""The merge kernel of `mla_decode`, which merges the partial results of work items that span several CTA groups (split-KV).

A CTA merges some tiles (16 rows x `Config.chunk` columns) of one work item. The merge is a kernel of its own, launched after the
attention kernel. So no CTA of either kernel waits for another CTA, which might not be resident.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass.memory import SmemAllocator

from tokenspeed_kernel_nvidia.cutedsl import arguments_device as arguments
from tokenspeed_kernel_nvidia.cutedsl.registers_device import bits_of, dtype_of, load_floats_if, pack, store_words, widened
from tokenspeed_kernel_nvidia.cutedsl.softmax_device import LOWEST, exp2
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.config import LATENT, ROWS, Config
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.results_device import Results, factor_of
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.scheduler_device import DecodeWork, items_of
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.tile_device import LATENT_CHUNK, READERS, Table

WARPS = 8  # warps per CTA
# Approximate maximum of CTAs per launch. With many work items, each item gets few CTAs, which loop over the item's tiles. Most of
# these items need no merge.
CTAS = 1024


def host(config: Config) -> Any:
    """Returns the host function that launches the kernel of a configuration."""
    return MlaMerge(config)


def fake_arguments(config: Config) -> tuple[Any, ...]:
    """Returns placeholder arguments, which have types and layouts but no memory, to compile the function that `host` returns."""
    out = arguments.rows(config.dtype, arguments.size(), config.heads, LATENT)
    return out, *(Int64(0) for _ in range(2)), *(Int32(0) for _ in range(2)), arguments.stream()


@dataclass(frozen=True)
class MergeCall:
    """The merge kernel's arguments. ``items``: work items per sequence. `tile_device.Call` describes the other arguments."""

    items: Int32
    q_len: Int32
    out: Table
    lse: Int64
    partial: Int64
    groups: Int32
    rank: Int32
    cu_seqlens_q: Int64 | None = None


@dataclass(frozen=True)
class Sums:
    """A lane's fragment of a merged tile: elements of two output rows, 8 apart.

    Attributes:
        values: for each group of 8 columns of the tile, two elements of the first row, then two of the second row.
        row_max, row_sum: row max and row sum of the two rows.
    """

    values: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor

    def indices_of(self, r: int) -> list[int]:
        """Returns the indices in ``values`` of the elements of row ``r`` (0 or 1)."""
        return [i for i in range(cute.size(self.values)) if i // 2 % 2 == r]

    def scale(self, r: int, factor: Float32) -> None:
        """Multiplies the row sum and the elements of row ``r`` by ``factor``."""
        self.row_sum[r] = self.row_sum[r] * factor
        for i in self.indices_of(r):
            self.values[i] = self.values[i] * factor

    def add(self, r: int, weight: Float32, row_sum: Float32, values: Any) -> None:
        """Adds another partial result of row ``r``, times ``weight``."""
        self.row_sum[r] = self.row_sum[r] + weight * row_sum
        for i in self.indices_of(r):
            self.values[i] = self.values[i] + weight * values[i]


class Merge:
    """The merge kernel of one configuration. The grid is (CTAs per work item, ranks of a CTA group, records); a CTA has eight
    warps."""

    def __init__(self, config: Config, work: Any) -> None:
        self.config = config
        self.work = work
        self.results = Results(config, work)

    @cute.jit
    def launch(
        self,
        out: cute.Tensor,
        partial: Int64,
        lse: Int64,
        items: Int32,
        q_len: Int32,
        groups: Int32,
        records: Int32,
        cu_seqlens_q: Int64 | None,
        stream: cuda.CUstream,
    ):
        """Launches the kernel.

        Args:
            items: work items per sequence.
            records: number of records, see `Results.record`.
            out, partial, lse, q_len, groups, cu_seqlens_q: see `tile_device.Call`.
        """
        ctas = self.ctas_of_item(records)
        to = Table(out.iterator.toint(), out.stride[0], out.stride[1])
        self.kernel(items, q_len, to, lse, partial, groups, ctas, cu_seqlens_q).launch(
            grid=(ctas, self.config.ranks, records), block=(WARPS * 32, 1, 1), stream=stream, use_pdl=True
        )

    def ctas_of_item(self, records: Int32) -> Int32:
        """Returns the number of CTAs among which the tiles of a work item's output are divided."""
        return cutlass.max(cutlass.min(CTAS // (self.config.ranks * records), ROWS // 16 * self.chunks), 4)

    @property
    def chunks(self) -> int:
        """The number of tiles (16 rows x `Config.chunk` columns) in 16 output rows."""
        return LATENT // self.config.chunk

    @property
    def values(self) -> int:
        """The number of output elements that a lane holds of a tile, both rows together."""
        return self.config.chunk // 2

    @property
    def lane_floats(self) -> int:
        """The number of float32 elements of a lane's `Sums`."""
        return self.values + 4

    @cute.kernel
    def kernel(
        self,
        items: Int32,
        q_len: Int32,
        out: Table,
        lse: Int64,
        partial: Int64,
        groups: Int32,
        ctas: Int32,
        cu_seqlens_q: Int64 | None,
    ):
        """Merges this CTA's tiles of a work item.

        With few partial results, one warp merges a tile. With more partial results, each warp merges some of them for a tile, and
        the first warp merges the warps' results. One warp alone would wait for many dependent rounds of loads.
        """
        cta, rank, index = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        shared = SmemAllocator().allocate_array(Float32, WARPS * 32 * self.lane_floats)
        call = MergeCall(items, q_len, out, lse, partial, groups, rank, cu_seqlens_q)
        if const_expr(self.config.narrow):
            # PDL: this kernel may launch the dependent kernel before its own wait. The dependent kernel waits for the end of this
            # kernel, which waits for the preceding kernel. 1 x 8192 with 128 heads took 14.2 us on an H200, and 14.3 us in the
            # other order.
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        else:
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        record = self.results.record(call, index)
        item, group, partials = record[0], record[1], record[2]
        if partials > 1:
            _, _, tokens = self.work.tile_of(call, item)
            tiles = tokens * self.config.heads_of_tile // 16 * self.chunks
            sums = Sums(*(cute.make_rmem_tensor(count, Float32) for count in (self.values, 2, 2)))
            if partials <= self.config.merge_batch:
                tile = cta * WARPS + warp
                while tile < tiles:
                    self.merge(call, sums, group, partials, tile, Int32(0))
                    self.write(call, item, tile, sums)
                    tile += ctas * WARPS
            else:
                tile = cta
                while tile < tiles:
                    self.merge_together(call, sums, group, partials, tile, warp, shared)
                    if warp == 0:
                        self.write(call, item, tile, sums)
                    tile += ctas

    @cute.jit
    def merge(self, call: MergeCall, sums: Sums, group: Int32, partials: Int32, tile: Int32, first: Int32):
        """Merges partial results of a tile in a fixed order, rescaled to the running row max.

        Args:
            sums: receives the lane's fragment of the tile.
            group: the work item's first CTA group.
            partials: the number of partial results of the work item.
            tile: the tile's index in the work item's output.
            first: this warp's first partial result. The warp merges `Config.merge_batch` consecutive partial results, skips those
                of the other warps, and repeats.
        """
        lane = cute.arch.lane_idx()
        row = tile // self.chunks * 16 + (lane >> 2)
        offset = self.results.values_offset(tile // self.chunks, tile % self.chunks) + lane * 16
        half = self.half_of(tile % self.chunks)
        sums.values.fill(0.0)
        for r in cutlass.range_constexpr(2):
            sums.row_max[r], sums.row_sum[r] = Float32(LOWEST), Float32(0.0)
        while first < partials:
            found = []
            for each in cutlass.range_constexpr(self.config.merge_batch):
                sums_at, values_at = self.results.partial_at(call, group, first + each)
                exists = first + each < partials
                rows = [load_floats_if(exists, sums_at + self.results.row_sums_offset(row + 8 * r, half), 2) for r in range(2)]
                found.append((*rows, self.unpacked(load_floats_if(exists, values_at + offset, 4))))
            for r in cutlass.range_constexpr(2):
                raised = sums.row_max[r]
                for each in cutlass.range_constexpr(self.config.merge_batch):
                    raised = cutlass.select_(first + each < partials, cute.arch.fmax(raised, found[each][r][0]), raised)
                sums.scale(r, exp2(sums.row_max[r] - raised))
                sums.row_max[r] = raised
                for each in cutlass.range_constexpr(self.config.merge_batch):
                    # For an index beyond the last partial result, row max, row sum and values are loaded as 0. This row max may
                    # exceed `raised`, so fmin limits it.
                    weight = exp2(cute.arch.fmin(found[each][r][0], raised) - raised)
                    sums.add(r, weight, found[each][r][1], found[each][2])
            first += WARPS * self.config.merge_batch

    def half_of(self, chunk: Int32) -> Int32:
        """Returns which of the two value warpgroups computed the columns of tile number ``chunk`` within 16 rows."""
        return chunk * self.config.chunk // LATENT_CHUNK % READERS

    def unpacked(self, found: list) -> list:
        """Returns the elements in 16 loaded bytes of a partial result, as float32."""
        if not self.config.narrow:
            return found
        return [number for word in found for number in widened(cutlass.Float16, bits_of(word))]

    @cute.jit
    def merge_together(
        self, call: MergeCall, sums: Sums, group: Int32, partials: Int32, tile: Int32, warp: Int32, shared: cute.Pointer
    ):
        """Merges a tile's partial results by all warps of the CTA. The first warp's ``sums`` receive the result."""
        self.merge(call, sums, group, partials, tile, warp * self.config.merge_batch)
        at = shared + cute.arch.lane_idx()
        lane_floats, values = self.lane_floats, self.values
        for each in cutlass.range_constexpr(values):
            at[(warp * lane_floats + each) * 32] = sums.values[each]
        for r in cutlass.range_constexpr(2):
            at[(warp * lane_floats + values + r) * 32] = sums.row_max[r]
            at[(warp * lane_floats + values + 2 + r) * 32] = sums.row_sum[r]
        cute.arch.sync_threads()
        if warp == 0:
            for other in cutlass.range_constexpr(1, WARPS):
                theirs = [at[(other * lane_floats + each) * 32] for each in range(lane_floats)]
                for r in cutlass.range_constexpr(2):
                    raised = cute.arch.fmax(sums.row_max[r], theirs[values + r])
                    sums.scale(r, exp2(sums.row_max[r] - raised))
                    sums.add(r, exp2(theirs[values + r] - raised), theirs[values + 2 + r], theirs[:values])
                    sums.row_max[r] = raised
        cute.arch.sync_threads()

    @cute.jit
    def write(self, call: MergeCall, item: Int32, tile: Int32, sums: Sums):
        """Normalises a lane's fragment of a merged tile, and writes it to the output. The lanes that hold the first columns of a
        row also write its LSE."""
        lane = cute.arch.lane_idx()
        chunk = tile % self.chunks
        for r in cutlass.range_constexpr(2):
            row = tile // self.chunks * 16 + 8 * r + (lane >> 2)
            to, _ = self.results.row_of(call, item, row)
            factor = factor_of(sums.row_sum[r])
            for eight in cutlass.range_constexpr(self.config.chunk // 8):
                first = 4 * eight + 2 * r
                pair = pack(dtype_of(self.config.dtype), sums.values[first] * factor, sums.values[first + 1] * factor)
                store_words(to + (chunk * self.config.chunk + eight * 8 + (lane & 3) * 2) * 2, [pair])
            if chunk == 0 and lane & 3 == 0:
                self.results.write_lse(call, item, row, sums.row_max[r], sums.row_sum[r])


class MlaMerge:
    """The host function that launches the merge kernel of `mla_decode` for one configuration."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.merge = Merge(config, DecodeWork(config))

    @cute.jit
    def __call__(self, out: cute.Tensor, partial: Int64, lse: Int64, q_len: Int32, groups: Int32, stream: cuda.CUstream):
        items = items_of(self.config, q_len)
        records = cutlass.min(out.shape[0] // q_len * items, groups)
        self.merge.launch(out, partial, lse, items, q_len, groups, records, None, stream)
