"""What programs of `grouped` are compiled for, and which ones serve what."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed_kernel_nvidia.sm90.common.launch import DTYPES
from tokenspeed_kernel_nvidia.sm90.moe.mxfp4_layout import BLOCK, PANEL_BLOCK_BYTES, PANEL_HEAD_BYTES, PANEL_STRIPS, STRIP

WARPGROUPS = 3  # that compute: 192 divides the rows of both of GPT-OSS' projections
STRIPS = PANEL_STRIPS * WARPGROUPS  # of a tile, one a warp
ROWS = STRIPS * STRIP  # of weights, of a tile
CONSUMERS = 4 * WARPGROUPS  # warps
COLUMN_WARPS = 3  # warps that gather columns, beside the one that streams weights
THREADS = 128 * (WARPGROUPS + 1)
CHUNK = 32  # columns that a warpgroup stores at a time
SHARED_BYTES = 227 * 1024  # of a CTA
OTHER_BYTES = 1024  # barriers
MAX_EXPERTS = 384
MAX_TOP_K = 8
RECORD = 4  # numbers of a tile in the schedule

# Widths that tiles of at most so many columns are computed in.
_WIDTHS = {
    64: (8, 16, 24, 32, 40, 48, 64),
    160: (16, 32, 48, 64, 80, 96, 112, 128, 144, 160),
    192: (16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192),
}
SERVED = FEW_COLUMNS, MANY_COLUMNS = 64, 160
_FEW_PAIRS = 56  # pairs an expert up to which tiles are narrow


@dataclass(frozen=True)
class Schedule:
    """A program that sorts pairs and cuts them into tiles.

    Attributes:
        columns: of a tile, at most.
    """

    columns: int

    @property
    def least(self) -> int:
        """A last tile with fewer columns shares them with the one before."""
        return self.columns // 3


@dataclass(frozen=True)
class Product:
    """A program of one of the two products.

    Attributes:
        dtype: of activations.
        gated: whether it is the first product, which gathers tokens and activates.
        columns: of a tile, at most.
        double: whether a block is decoded while the one before is multiplied by the same warp, into registers of its own.
    """

    dtype: str
    gated: bool
    columns: int
    double: bool = True

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths that a tile is computed in, ascending."""
        return _WIDTHS[self.columns]

    @property
    def blocks(self) -> int:
        """Blocks of weights of a stage: with narrow tiles memory is what is waited for, and long copies serve it better."""
        return 4 if self.columns == FEW_COLUMNS else 2

    @property
    def slot_bytes(self) -> int:
        """Of a panel's part of a stage of weights."""
        return PANEL_HEAD_BYTES + self.blocks * PANEL_BLOCK_BYTES

    @property
    def column_stages(self) -> int:
        """Blocks of columns on their way."""
        return 8 if self.columns == FEW_COLUMNS else 5

    @property
    def column_bytes(self) -> int:
        """Of a stage of columns."""
        return self.columns * BLOCK * 2

    @property
    def store_bytes(self) -> int:
        """Of a column in a warpgroup's buffer: all of its features, half as many where gates and ups have met."""
        return 64 if self.gated else 128

    @property
    def staging_bytes(self) -> int:
        """Of the buffers that results are stored from: two for each warpgroup."""
        return 2 * WARPGROUPS * CHUNK * self.store_bytes

    @property
    def weight_stages(self) -> int:
        """Stages of weights on their way: what fits."""
        left = SHARED_BYTES - OTHER_BYTES - self.staging_bytes - self.column_stages * self.column_bytes
        return left // (WARPGROUPS * self.slot_bytes)

    @property
    def consumer_registers(self) -> int:
        """With those of the loading warps all 65536 of a multiprocessor."""
        return 152

    @property
    def producer_registers(self) -> int:
        return 56


@dataclass(frozen=True)
class Combine:
    """A program that adds up what a token's slots have.

    Attributes:
        dtype: of the output.
    """

    dtype: str


def columns_for(pairs: int, experts: int) -> int:
    """The widest tile for so many pairs."""
    return FEW_COLUMNS if pairs <= _FEW_PAIRS * experts else MANY_COLUMNS


def most_tiles(pairs: int, experts: int, columns: int) -> int:
    """Tiles that any routing can need."""
    return min(pairs, experts + pairs // columns)


def every_schedule() -> list[Schedule]:
    """All that is served."""
    return [Schedule(columns) for columns in SERVED]


def every_product() -> list[Product]:
    """All that is served."""
    return [Product(dtype, gated, columns) for dtype in DTYPES.values() for gated in (True, False) for columns in SERVED]


def every_combine() -> list[Combine]:
    """All that is served."""
    return [Combine(dtype) for dtype in DTYPES.values()]
