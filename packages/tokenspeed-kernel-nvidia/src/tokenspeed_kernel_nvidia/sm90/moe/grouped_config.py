"""What programs of `grouped` are compiled for, and which ones serve what."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from tokenspeed_kernel_nvidia.sm90.common.launch import DTYPES
from tokenspeed_kernel_nvidia.sm90.moe.mxfp4_layout import BLOCK, PANEL_BLOCK_BYTES, PANEL_HEAD_BYTES, PANEL_STRIPS, STRIP

COLUMN_WARPS = 3  # warps that gather columns, beside the one that streams weights
COLUMN_BYTES = 128  # of a column in a panel: a row of the 128-byte swizzle
CHUNK = 32  # columns that a warpgroup stores at a time
SHARED_BYTES = 227 * 1024  # of a CTA
OTHER_BYTES = 1024  # barriers
REGISTERS = 65536  # of a multiprocessor; a launch gives each thread as many, and a multiple of 8
MAX_EXPERTS = 384
MAX_TOP_K = 8
ROUNDED_TOGETHER = 16  # numbers of a row that a thread rounds
RECORD = 4  # numbers of a tile in the schedule

# What the products' inputs are: rows as they are given; rounded to codes of float8_e4m3fn, or to their values, both with a scale
# a row.
PLAIN, CODES, VALUES = "plain", "codes", "values"


@dataclass(frozen=True)
class Tile:
    """What a CTA computes at a time.

    Attributes:
        warpgroups: that compute, 64 rows of weights each.
        widths: columns that a tile is computed with, ascending.
        unit: blocks of weights that are decoded and multiplied together.
        blocks: of a stage of weights. With narrow tiles memory is what is waited for, and long copies serve it better.
        column_blocks: panels of columns on their way.
        registers: of a thread that computes.
        ahead: whether words of a unit are read while the one before is decoded, and not when they are wanted.
        turns: words of a unit that a warpgroup decodes before the next one may begin to; 0 where each decodes when it can. Those
            that decode at the same time also wait at the same time, and then nothing decodes.
    """

    warpgroups: int
    widths: tuple[int, ...]
    unit: int
    blocks: int
    column_blocks: int
    registers: int
    ahead: bool
    turns: int = 0


# By the most columns. 192 rows divide both projections of GPT-OSS. Microseconds are those of both products of GPT-OSS-120B's layer
# on an H200. Decoding a part of a unit after each product, and not all of it after all, was slower (160: 1874 and 987).
_TILES = {
    # 1024 tokens, one block a unit: 594 and 297. All kernels together took 911, and 823 with two and a quicker schedule.
    64: Tile(3, (8, 16, 24, 32, 40, 48, 64), 2, 4, 8, 152, True, 8),
    # Never timed.
    144: Tile(2, (32, 64, 80, 96, 112, 128, 144), 1, 2, 8, 232, False),
    # 8192 tokens: 1834 and 938 (read ahead 2042 and 1054; 192 columns 1999 and 1002).
    160: Tile(3, (16, 32, 48, 64, 80, 96, 112, 128, 144, 160), 1, 2, 5, 152, False),
    # Never timed. Decoding takes time from products (160: 1834, without 1514), and here twice as many columns share it.
    288: Tile(2, (32, 64, 96, 128, 160, 192, 208, 224, 240, 256, 272, 288), 1, 2, 4, 216, False),
}
FEW_COLUMNS, ROUNDED_COLUMNS, MANY_COLUMNS, MOST_COLUMNS = 64, 144, 160, 288
# By the inputs. Products of bytes need twice the registers for sums.
SERVED = {
    PLAIN: (FEW_COLUMNS, MANY_COLUMNS, MOST_COLUMNS),
    CODES: (FEW_COLUMNS, ROUNDED_COLUMNS),
    VALUES: (FEW_COLUMNS, ROUNDED_COLUMNS, MANY_COLUMNS),
}
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
        inputs: `PLAIN`, `CODES` or `VALUES`.
    """

    dtype: str
    gated: bool
    columns: int
    inputs: str = PLAIN

    @property
    def scaled(self) -> bool:
        """Whether columns have scales."""
        return self.inputs != PLAIN

    @property
    def tile(self) -> Tile:
        return _TILES[self.columns]

    @property
    def strips(self) -> int:
        """Of a tile, one a warp."""
        return PANEL_STRIPS * self.tile.warpgroups

    @property
    def rows(self) -> int:
        """Of weights, of a tile."""
        return self.strips * STRIP

    @property
    def threads(self) -> int:
        """Of a CTA: those that compute, and those that load."""
        return 128 * (self.tile.warpgroups + 1)

    @property
    def promoted(self) -> bool:
        """Whether a unit's products are summed apart, and then added in registers.

        wgmma keeps about 14 bits of a sum of products of bytes. Without this the error was twice that of `VALUES` (2.4e-2, 1.2e-2).
        """
        return self.inputs == CODES

    @property
    def unit(self) -> int:
        """Blocks of weights that are decoded and multiplied together; columns of a stage have as many."""
        return 2 if self.inputs == CODES else self.tile.unit

    @property
    def panels(self) -> int:
        """Parts of a stage of columns, of 128 bytes a column."""
        return self.unit // 2 if self.inputs == CODES else self.unit

    @property
    def panel_k(self) -> int:
        """Numbers of a column in a panel."""
        return self.unit * BLOCK // self.panels

    @property
    def parts(self) -> int:
        """Products of a unit, each over 32 bytes of a column."""
        return 4 * self.panels

    @property
    def slot_bytes(self) -> int:
        """Of a panel's part of a stage of weights."""
        return PANEL_HEAD_BYTES + self.tile.blocks * PANEL_BLOCK_BYTES

    @property
    def column_stages(self) -> int:
        """Stages of columns on their way."""
        return self.tile.column_blocks // self.panels

    @property
    def column_bytes(self) -> int:
        """Of a stage of columns."""
        return self.panels * self.columns * COLUMN_BYTES

    @property
    def store_bytes(self) -> int:
        """Of a column in a warpgroup's buffer: all of its features, half as many where gates and ups have met."""
        return 64 if self.gated else 128

    @property
    def staging_bytes(self) -> int:
        """Of the buffers that results are stored from: two for each warpgroup."""
        return 2 * self.tile.warpgroups * CHUNK * self.store_bytes

    @property
    def scale_bytes(self) -> int:
        """Of the columns' scales, which each warpgroup has; with barriers a multiple of what columns are aligned to."""
        return -(-self.tile.warpgroups * self.columns * 4 // 1024) * 1024 if self.scaled else 0

    @property
    def weight_stages(self) -> int:
        """Stages of weights on their way: what fits."""
        left = SHARED_BYTES - OTHER_BYTES - self.staging_bytes - self.column_stages * self.column_bytes - self.scale_bytes
        return left // (self.tile.warpgroups * self.slot_bytes)

    @property
    def producer_registers(self) -> int:
        """Registers of a thread that loads: what the launch gave to the CTA and the others leave.

        A warpgroup that asks for more than that waits for ever.
        """
        given = REGISTERS // self.threads // 8 * 8 * self.threads
        return (given // 128 - self.tile.warpgroups * self.tile.registers) // 8 * 8


@dataclass(frozen=True)
class Rounding:
    """A program that rounds rows to float8_e4m3fn, with a scale each.

    Attributes:
        dtype: of the rows.
        result: `CODES`, or `VALUES` of dtype.
    """

    dtype: str
    result: str


@dataclass(frozen=True)
class Combine:
    """A program that adds up what a token's slots have.

    Attributes:
        dtype: of the output.
    """

    dtype: str


def columns_for(pairs: int, experts: int, inputs: tuple[str, ...] = (PLAIN,)) -> int:
    """The widest tile for so many pairs."""
    if pairs <= _FEW_PAIRS * experts:
        return FEW_COLUMNS
    return ROUNDED_COLUMNS if CODES in inputs else MANY_COLUMNS


def most_tiles(pairs: int, experts: int, columns: int) -> int:
    """Tiles that any routing can need."""
    return min(pairs, experts + pairs // columns)


def every_schedule() -> list[Schedule]:
    """All that is served."""
    return [Schedule(columns) for columns in _TILES]


def every_product() -> list[Product]:
    """All that is served."""
    every = itertools.product(DTYPES.values(), (True, False), SERVED)
    return [Product(dtype, gated, columns, inputs) for dtype, gated, inputs in every for columns in SERVED[inputs]]


def every_rounding() -> list[Rounding]:
    """All that is served."""
    return [Rounding(dtype, result) for dtype in DTYPES.values() for result in (CODES, VALUES)]


def every_combine() -> list[Combine]:
    """All that is served."""
    return [Combine(dtype) for dtype in DTYPES.values()]
