"""Definitions for all warps of `kernel_device`: the arguments of a launch, the work items, and the layout of shared memory.

An *item* (work item) combines a tile of the schedule, that is, some pairs of one expert, with `Gemm.rows` rows of that expert's
weights. With n CTAs, a CTA computes every n-th item. Consecutive items have the same pairs. The tiles of the schedule with the most
pairs come first, so the launch ends with small items (load balancing).
"""

# mypy: ignore-errors

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, const_expr, cute

from tokenspeed_kernel_nvidia.cutedsl.memory_device import load_words
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.layout import BLOCK, PANEL_BLOCK_BYTES, PANEL_HEAD_BYTES, PANEL_STRIPS
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Cursor, Pipeline, pipeline
from tokenspeed_kernel_nvidia.cutedsl.registers_device import dtype_of, load_int
from tokenspeed_kernel_nvidia.cutedsl.tile_scheduler_device import RoundRobin, own_indices
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import swizzle
from tokenspeed_kernel_nvidia.sm90.moe.grouped.config import PAIR, RECORD, Gemm


@dataclass(frozen=True)
class Call:
    """The arguments of a GEMM launch. Arrays in global memory are given by their addresses.

    Attributes:
        weights: the panels of all experts' weights, see `mxfp4.layout`.
        strips: number of strips (16 rows of weights each) of one expert.
        k: number of elements of a row of activations.
        rows, row_stride: the activations, and the row pitch in elements, a multiple of 8.
        count: number of rows of activations.
        row_scales: float32, one scale for each row of activations, or of packed columns.
        exact: int32 ``[experts]``, 1 for experts that the `CODES` GEMM computes, 0 for all others. The address is 0 if this GEMM
            computes all experts.
        sources: int32, for the first GEMM, the row of activations of each column; not read if columns are packed.
        tiles: int32 ``[tiles, RECORD]``, for each tile of the schedule: the expert, the first column, and the number of columns.
        tile_count: int32, the number of tiles of the schedule.
        out, out_stride: the results, one row for each column, and the row pitch in elements.
        alpha, limit, beta: parameters of the activation function; an infinite ``limit`` does not limit values.
    """

    weights: Int64
    strips: Int32
    k: Int32
    rows: Int64
    row_stride: Int64
    count: Int32
    row_scales: Int64
    exact: Int64
    sources: Int64
    tiles: Int64
    tile_count: Int64
    out: Int64
    out_stride: Int64
    alpha: Float32
    limit: Float32
    beta: Float32

    @property
    def blocks(self) -> Int32:
        """The number of k blocks of a row of weights."""
        return (self.k + (BLOCK - 1)) // BLOCK

    @property
    def panels(self) -> Int32:
        """The number of panels of one expert's weights."""
        return (self.strips + (PANEL_STRIPS - 1)) // PANEL_STRIPS

    @property
    def panel_bytes(self) -> Int32:
        """Bytes of a panel of weights in global memory: its head and all of its k blocks."""
        return PANEL_HEAD_BYTES + self.blocks * PANEL_BLOCK_BYTES


@dataclass(frozen=True)
class Item:
    """A work item: some rows of an expert's weights by one tile of the schedule. The tile's columns are pairs of this expert.

    Attributes:
        expert: the index of the expert.
        first: the tile's first column, counted over the columns of all experts.
        count: number of columns to compute; 0 if another GEMM computes the expert, or if no column needs a repair.
        strip: the item's first strip in the expert's weights.
    """

    expert: Int32
    first: Int32
    count: Int32
    strip: Int32


@dataclass(frozen=True)
class Weights:
    """The position of a warp in the ring of weights.

    Attributes:
        at: the stage of the ring.
        block: the index of the k block in the stage.
    """

    at: Cursor
    block: Int32


class Shapes:
    """The operand shapes, the types and the layout of shared memory of a configuration."""

    def __init__(self, config: Gemm):
        self.config = config
        self.dtype = dtype_of(config.dtype)
        self.is_fp8 = config.bytewise
        self.left_dtype = cutlass.Float8E5M2 if self.is_fp8 else self.dtype
        self.right_dtype = cutlass.Float8E4M3FN if self.is_fp8 else self.dtype

    def storage(self) -> Any:
        config, dtype = self.config, self.right_dtype
        count_of_columns = config.column_stages * config.slots * config.columns * config.panels * config.panel_k
        weight_bytes = config.weight_stages * config.stage_bytes
        scale_count = max(1, config.scale_bytes // 4)

        @cute.struct
        class Storage:
            weights_full: cute.struct.MemRange[cutlass.Int64, config.weight_stages]
            weights_empty: cute.struct.MemRange[cutlass.Int64, config.weight_stages]
            columns_full: cute.struct.MemRange[cutlass.Int64, config.column_stages]
            columns_empty: cute.struct.MemRange[cutlass.Int64, config.column_stages]
            scales: cute.struct.MemRange[Float32, scale_count]
            columns: cute.struct.Align[cute.struct.MemRange[dtype, count_of_columns], 1024]
            weights: cute.struct.Align[cute.struct.MemRange[Uint8, weight_bytes], 128]
            results: cute.struct.Align[cute.struct.MemRange[Uint8, config.staging_bytes], 128]

        return Storage

    def weight_pipe(self, storage: Any) -> Pipeline:
        """Returns the barriers of the ring of weights. A stage has one slot for each panel of a tile, with `Tile.blocks` k
        blocks."""
        return pipeline(storage.weights_full, storage.weights_empty)

    def column_pipe(self, storage: Any) -> Pipeline:
        """Returns the barriers of the ring of columns. A stage has one k step of all columns of a tile."""
        return pipeline(storage.columns_full, storage.columns_empty)

    @cute.jit
    def release_columns(self, storage: Any, at: Cursor):
        """This warp releases a stage of the ring of columns. With paired CTAs, either CTA's copies write the stage in both CTAs, so
        the warp arrives on both CTAs' empty barriers.
        """
        if const_expr(self.config.paired):
            lane = cute.arch.lane_idx()
            if lane < PAIR:
                cute.arch.mbarrier_arrive(self.column_pipe(storage).empty.of(at), lane)
        else:
            self.column_pipe(storage).release(at)

    def columns(self, storage: Any, width: int) -> cute.Tensor:
        """Returns the first ``width`` columns of each stage in the ring of columns, as a tensor ``(width, k, stage)``."""
        c = self.config
        panel = c.slots * c.columns * c.panel_k
        shape, stride = (width, (c.panel_k, c.panels), c.column_stages), (c.panel_k, (1, panel), c.panels * panel)
        layout = cute.make_layout(shape, stride=stride)
        return storage.columns.get_tensor(layout, swizzle=swizzle())

    def row_tiles(self, call: Call) -> Int32:
        """Returns the number of tiles along the rows of one expert's weights; with paired CTAs, the number of pairs of tiles."""
        strips = self.config.ctas * self.config.strips
        return (call.strips + (strips - 1)) // strips

    def rank(self) -> Int32:
        """Returns the index of this CTA in its cluster of two."""
        return cute.arch.block_idx()[0] % PAIR

    def items(self, call: Call):
        """Returns the index of this CTA's first work item, and the tile scheduler. The schedule in global memory must be complete.
        Paired CTAs have the same indices.
        """
        index, step = own_indices(self.config.ctas)
        return index, RoundRobin(step, load_int(call.tile_count, False) * self.row_tiles(call))

    def is_beyond(self, call: Call, row: Int32) -> Int32:
        """Returns a negative value if two fp8 values per element (`PARTS`) cannot represent a row of activations, and 0 otherwise.
        The scale of such a row is negative."""
        return Int32(load_int(call.row_scales + Int64(row) * 4, False) & Int32(-(1 << 31)))

    @cute.jit
    def any_beyond(self, call: Call, storage: Any):
        """Returns whether the GEMM has any row of activations that `is_beyond` rejects. All threads of a CTA call this method."""
        thread, _, _ = cute.arch.thread_idx()
        beyond = Int32(0)
        for row in cutlass.range(thread, call.count, self.config.threads, unroll=4):
            beyond |= self.is_beyond(call, row)
        found = storage.scales.data_ptr()  # unused for scales here, and initialised to 0
        if cute.arch.vote_any_sync(beyond != 0):
            found[0] = Float32(1.0)
        cute.arch.sync_threads()
        return found[0] != 0.0

    @cute.jit
    def read_item(self, call: Call, index: Int32) -> Item:
        """Returns the work item with this index. Every thread reads the item's record for itself."""
        row_tiles = self.row_tiles(call)
        tile = index // row_tiles
        expert, first, count, _ = load_words("global", call.tiles + Int64(tile) * (4 * RECORD), 4)
        count = Int32(count)
        if const_expr(self.config.scaled):
            if call.exact != 0:
                if load_int(call.exact + Int64(expert) * 4, False) != (1 if self.is_fp8 else 0):
                    count = Int32(0)
        if const_expr(self.config.repairs):
            beyond = Int32(0)
            lane = cute.arch.lane_idx()
            if lane < count:
                row = Int32(first) + lane
                if const_expr(self.config.gated):
                    row = load_int(call.sources + Int64(row) * 4, False)
                beyond = self.is_beyond(call, row)
            if not cute.arch.vote_any_sync(beyond != 0):
                count = Int32(0)
        row_tile = index - tile * row_tiles
        if const_expr(self.config.paired):
            row_tile = row_tile * PAIR + self.rank()
        return Item(Int32(expert), Int32(first), count, row_tile * self.config.strips)
