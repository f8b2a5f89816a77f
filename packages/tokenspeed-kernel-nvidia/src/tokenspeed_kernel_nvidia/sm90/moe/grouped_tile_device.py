"""What the warps of `grouped_device` share: the call, which tiles a CTA has, and its shared memory.

An *item* is a tile of the schedule, which is some pairs of one expert, times `ROWS` rows of that expert's weights. A CTA has every
so-manieth one. The schedule's longest tiles come first.
"""

# mypy: ignore-errors

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, cute

from tokenspeed_kernel_nvidia.sm90.common.memory_device import load_words
from tokenspeed_kernel_nvidia.sm90.common.pipeline_device import Pipeline, pipeline
from tokenspeed_kernel_nvidia.sm90.common.registers_device import dtype_of, load_int
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import Ring
from tokenspeed_kernel_nvidia.sm90.moe.grouped_config import RECORD, STRIPS, WARPGROUPS, Product
from tokenspeed_kernel_nvidia.sm90.moe.mxfp4_layout import BLOCK, PANEL_BLOCK_BYTES, PANEL_HEAD_BYTES, PANEL_STRIPS


@dataclass(frozen=True)
class Call:
    """A launch of one product. What is far away is given by its address.

    Attributes:
        weights: the strips.
        strips: of each expert.
        k: elements of a row of activations.
        rows, row_stride: the activations, and elements from one row to the next, a multiple of 8.
        sources: int32, the row of each column, for the first product.
        tiles: int32 ``[tiles, RECORD]``: expert, first column, columns.
        tile_count: int32, how many.
        out, out_stride: results, one row a column, and elements from one to the next.
        alpha, limit, beta: of the activation; infinity for no limit.
    """

    weights: Int64
    strips: Int32
    k: Int32
    rows: Int64
    row_stride: Int64
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
        """Blocks of k."""
        return (self.k + (BLOCK - 1)) // BLOCK

    @property
    def row_tiles(self) -> Int32:
        """Tiles of an expert's rows."""
        return (self.strips + (STRIPS - 1)) // STRIPS

    @property
    def panels(self) -> Int32:
        """Of an expert."""
        return (self.strips + (PANEL_STRIPS - 1)) // PANEL_STRIPS

    @property
    def panel_bytes(self) -> Int32:
        return PANEL_HEAD_BYTES + self.blocks * PANEL_BLOCK_BYTES


@dataclass(frozen=True)
class Item:
    """What a CTA computes at a time.

    Attributes:
        expert: whose weights.
        first: the first column, among those of all experts.
        count: columns.
        strip: the first strip.
    """

    expert: Int32
    first: Int32
    count: Int32
    strip: Int32


class Shapes:
    """What follows from a configuration."""

    def __init__(self, config: Product):
        self.config = config
        self.dtype = dtype_of(config.dtype)
        self.ring = Ring(config.columns, BLOCK, config.column_stages)

    def storage(self) -> Any:
        config, dtype = self.config, self.dtype

        @cute.struct
        class Storage:
            weights_full: cute.struct.MemRange[cutlass.Int64, config.weight_stages]
            weights_empty: cute.struct.MemRange[cutlass.Int64, config.weight_stages]
            columns_full: cute.struct.MemRange[cutlass.Int64, config.column_stages]
            columns_empty: cute.struct.MemRange[cutlass.Int64, config.column_stages]
            columns: cute.struct.Align[cute.struct.MemRange[dtype, self.ring.size], 1024]
            weights: cute.struct.Align[cute.struct.MemRange[Uint8, config.weight_stages * WARPGROUPS * config.slot_bytes], 128]
            results: cute.struct.Align[cute.struct.MemRange[Uint8, config.staging_bytes], 128]

        return Storage

    def weight_pipe(self, storage: Any) -> Pipeline:
        """The ring of weights. A stage is `Product.blocks` blocks of a tile's panels, each panel's in a slot of its own."""
        return pipeline(storage.weights_full, storage.weights_empty)

    def column_pipe(self, storage: Any) -> Pipeline:
        """The ring of columns. A stage is one block of all columns of a tile."""
        return pipeline(storage.columns_full, storage.columns_empty)

    @cute.jit
    def count_items(self, call: Call) -> Int32:
        """Of the launch. To be asked when the schedule is there."""
        return load_int(call.tile_count, False) * call.row_tiles

    @cute.jit
    def read_item(self, call: Call, index: Int32) -> Item:
        """An item. Every thread reads it for itself."""
        row_tiles = call.row_tiles
        tile = index // row_tiles
        expert, first, count, _ = load_words("global", call.tiles + Int64(tile) * (4 * RECORD), 4)
        return Item(Int32(expert), Int32(first), Int32(count), (index - tile * row_tiles) * STRIPS)
