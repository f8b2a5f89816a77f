"""Configurations of the programs of `grouped`: what each is compiled for, and which one serves a call."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from tokenspeed_kernel_nvidia.sm90.common.launch import DTYPES
from tokenspeed_kernel_nvidia.sm90.common.registers import left_by
from tokenspeed_kernel_nvidia.sm90.moe.mxfp4_layout import BLOCK, PANEL_BLOCK_BYTES, PANEL_HEAD_BYTES, PANEL_STRIPS, STRIP

COLUMN_WARPS = 3  # warps that gather columns, beside the one that streams weights
COLUMN_BYTES = 128  # of a column in a panel, which is a row of the 128-byte swizzle
CHUNK = 32  # columns that a warpgroup stores at a time
SHARED_BYTES = 227 * 1024  # that a CTA may have
OTHER_BYTES = 1024  # that barriers take
MAX_EXPERTS = 384
SORTING_CTAS = 8  # of the cluster that sorts many pairs
MAX_TOP_K = 8
ROUNDED_TOGETHER = 16  # numbers of a row that a thread rounds
RECORD = 4  # numbers that the schedule has of a tile

# Inputs of the products: rows as they are given (`PLAIN`), or rounded to float8_e4m3fn with a scale for each row, as codes or as
# the 16-bit values that the codes stand for; or split into two float8_e4m3fn that have all bits of a bfloat16 (`PARTS`).
PLAIN, CODES, VALUES, PARTS = "plain", "codes", "values", "parts"
# What float32 rows become that may exceed float16: float16 with a power of two for each row. The MMAs take them as `VALUES`.
FITTED = "fitted"
SPLIT = 2  # codes that a number of `PARTS` is split into
REST = 16.0  # what the second one is divided by
# Numbers that are scaled to less than 256 have an error below this. Rows where more numbers than one of so many have are repaired.
EXACT_FROM, SMALL_SHARE = 2.0**-6, 4


@dataclass(frozen=True)
class Tile:
    """The part of a product that a CTA computes at a time.

    Attributes:
        warpgroups: how many warpgroups compute, each of them 64 rows of weights.
        widths: the numbers of columns that loops are compiled for, ascending; a tile takes the first that holds its columns.
        unit: how many blocks of weights are decoded and multiplied together.
        blocks: how many blocks a stage of weights has. Narrow tiles wait for memory, which long copies serve better.
        column_blocks: how many panels of columns are on their way at a time.
        registers: how many registers a computing thread has.
        strips: how many strips of 16 rows a computing warp has, each of another panel. With several, see `grouped_panel_device`.
        by_warps: the most columns with which warps that have several strips multiply by themselves, see `grouped_warp_device`.
    """

    warpgroups: int
    widths: tuple[int, ...]
    unit: int
    blocks: int
    column_blocks: int
    registers: int
    strips: int = 1
    by_warps: int = 0


# Tiles by the most columns that they have. 192 rows divide both projections of GPT-OSS. Microseconds are those of all kernels of a
# call, for GPT-OSS-120B's layer on an H200; with 8192 tokens it ran at its power limit, between 1.7 and 1.9 GHz. Decoding a part of
# a unit after each product was slower than decoding all of it after the last one.
_TILES = {
    # Numbers split into two codes, see `_SPLIT_PAIRS`.
    24: Tile(3, (8, 16, 24), 2, 2, 4, 160, 3),
    # 1024 tokens: 655, 512: 570, 256: 503. All of them by warps: 756, 585 and 502; all by panels: 650, 565 and 535. With up to 64
    # columns 660, 569 and 499. With halves of blocks as products, and left operands of four in registers: 659 and 588.
    48: Tile(3, (8, 16, 32, 48), 2, 2, 8, 160, 3, 16),
    # 2048 tokens: 928 where 160 columns took 1035; 1024 tokens: 759. That was with halves of blocks.
    96: Tile(3, (32, 48, 64, 80, 96), 2, 2, 4, 160, 2),
    # 8192 tokens with products of bytes: 2317. Their values in 16 bits took 3109 with 160 columns.
    144: Tile(2, (32, 64, 80, 96, 112, 128, 144), 1, 2, 8, 232),
    # 8192 tokens: 2996. Words that were read ahead made it slower.
    160: Tile(3, (16, 32, 48, 64, 80, 96, 112, 128, 144, 160), 1, 2, 5, 152),
    # 8192 tokens: 2723, and 3000 when it has run for a second. Decoding takes time and power from products, and twice as many
    # columns share it. A warpgroup that decodes for the others into shared memory made it slower: 3193.
    288: Tile(2, (32, 64, 96, 128, 160, 192, 208, 224, 240, 256, 272, 288), 1, 2, 4, 216),
}
SPLIT_COLUMNS = 24
FEWEST_COLUMNS, FEW_COLUMNS, ROUNDED_COLUMNS, MANY_COLUMNS, MOST_COLUMNS = 48, 96, 144, 160, 288
# The tiles that are served, by the inputs. Products of bytes need twice the registers for sums.
SERVED = {
    PLAIN: (FEWEST_COLUMNS, FEW_COLUMNS, MANY_COLUMNS, MOST_COLUMNS),
    CODES: (ROUNDED_COLUMNS,),
    PARTS: (SPLIT_COLUMNS,),
    VALUES: (FEWEST_COLUMNS, FEW_COLUMNS, ROUNDED_COLUMNS, MANY_COLUMNS),
}
_SORTED_ALONE = 2048  # pairs up to which one CTA sorts
# Pairs of an expert, on average, up to which numbers are split. A layer of GPT-OSS-120B takes on an H200, with split numbers and
# without: 447 and 517 us for 128 tokens, 453 and 493 for 256, 506 and 594 for 384, 597 and 635 for 512 (16 pairs an expert).
_SPLIT_PAIRS = 16
_FEWEST_PAIRS = 32  # pairs of an expert, on average, up to which tiles are narrowest
_FEW_PAIRS = 84  # and up to which they are narrow
_VALUE_PAIRS = 56  # and up to which values of codes are multiplied in 16 bits, in place of the codes
_MANY_PAIRS = 140  # and up to which most experts' pairs are one tile of `MANY_COLUMNS`


@dataclass(frozen=True)
class Schedule:
    """A program that sorts pairs and cuts them into tiles.

    Attributes:
        columns: the most columns that a tile has.
        ctas: how many CTAs sort, a cluster of them.
    """

    columns: int
    ctas: int = 1

    @property
    def least(self) -> int:
        """Returns the number of columns below which an expert's last tile shares those of the tile before it."""
        return self.columns // 3


@dataclass(frozen=True)
class Product:
    """A program of one of the two products.

    Attributes:
        dtype: the name of the activations' dtype.
        gated: whether it is the first product, which gathers tokens and activates.
        columns: the most columns that a tile has.
        inputs: `PLAIN`, `CODES`, `VALUES` or `PARTS`.
        wide: whether results are stored as float32, because float16 may overflow.
        repairs: whether it computes only tiles with columns that `PARTS` do not hold, once more. Their scales are negative.
    """

    dtype: str
    gated: bool
    columns: int
    inputs: str = PLAIN
    wide: bool = False
    repairs: bool = False

    @property
    def scaled(self) -> bool:
        """Returns whether columns have scales."""
        return self.inputs != PLAIN

    @property
    def tile(self) -> Tile:
        """Returns the tile that a CTA computes at a time."""
        return _TILES[self.columns]

    @property
    def bytewise(self) -> bool:
        """Returns whether bytes are multiplied."""
        return self.inputs in (CODES, PARTS)

    @property
    def slots(self) -> int:
        """Returns the number of columns that products have for a column of the tile."""
        return SPLIT if self.inputs == PARTS else 1

    @property
    def strips(self) -> int:
        """Returns the number of a tile's strips."""
        return PANEL_STRIPS * self.panels_of_rows

    @property
    def panels_of_rows(self) -> int:
        """Returns the number of panels of weights that a tile has."""
        return self.tile.warpgroups * self.tile.strips

    @property
    def warps(self) -> int:
        """Returns the number of computing warps."""
        return 4 * self.tile.warpgroups

    @property
    def stage_bytes(self) -> int:
        """Returns the bytes of a stage of weights."""
        return self.panels_of_rows * self.slot_bytes

    @property
    def several_panels(self) -> bool:
        """Returns whether a warpgroup has several panels of a tile."""
        return self.tile.strips > 1

    @property
    def rows(self) -> int:
        """Returns the number of rows of weights that a tile has."""
        return self.strips * STRIP

    @property
    def threads(self) -> int:
        """Returns the number of a CTA's threads: computing warpgroups and one that loads."""
        return 128 * (self.tile.warpgroups + 1)

    @property
    def promoted(self) -> bool:
        """Returns whether the products of each two units are summed apart and then added to the sums in registers.

        wgmma keeps about 14 bits of a sum of products of bytes. Without this the error was twice that of `VALUES` (2.4e-2, 1.2e-2).
        """
        return self.inputs == CODES

    @property
    def unit(self) -> int:
        """Returns the number of blocks that are decoded and multiplied together; a stage of columns has as many."""
        return 2 if self.bytewise else self.tile.unit

    @property
    def panels(self) -> int:
        """Returns the number of panels in a stage of columns, each with 128 bytes of every column."""
        return self.unit // 2 if self.bytewise else self.unit

    @property
    def panel_k(self) -> int:
        """Returns how many numbers of a column a panel has."""
        return self.unit * BLOCK // self.panels

    @property
    def parts(self) -> int:
        """Returns the number of a unit's products, each of which takes 32 bytes of every column."""
        return 4 * self.panels

    @property
    def slot_bytes(self) -> int:
        """Returns the bytes that a panel of weights has in a stage."""
        return PANEL_HEAD_BYTES + self.tile.blocks * PANEL_BLOCK_BYTES

    @property
    def column_stages(self) -> int:
        """Returns the number of stages in the ring of columns."""
        return self.tile.column_blocks // self.panels

    @property
    def column_bytes(self) -> int:
        """Returns the bytes of a stage of columns."""
        return self.panels * self.slots * self.columns * COLUMN_BYTES

    @property
    def store_bytes(self) -> int:
        """Returns the bytes of a column's results in a warpgroup's buffer, half as many where gates and ups have met."""
        return 64 if self.gated else 128

    @property
    def staging_bytes(self) -> int:
        """Returns the bytes of the buffers that results are stored from, two for each warpgroup."""
        return 2 * self.tile.warpgroups * CHUNK * self.store_bytes

    @property
    def scale_bytes(self) -> int:
        """Returns the bytes of the columns' scales, which each warpgroup has, rounded up to what columns are aligned to."""
        return -(-self.tile.warpgroups * self.columns * 4 // 1024) * 1024 if self.scaled else 0

    @property
    def weight_stages(self) -> int:
        """Returns the number of stages in the ring of weights, which has the shared memory that is left."""
        left = SHARED_BYTES - OTHER_BYTES - self.staging_bytes - self.column_stages * self.column_bytes - self.scale_bytes
        return left // self.stage_bytes

    @property
    def producer_registers(self) -> int:
        """Returns the registers of a loading thread: those that the other threads leave."""
        return left_by(self.threads, self.tile.warpgroups, self.tile.registers)


@dataclass(frozen=True)
class Rounding:
    """A program that rounds rows to float8_e4m3fn or float16, with a scale each.

    Attributes:
        dtype: the name of the activations' dtype.
        result: `CODES`, or `VALUES`, which are of that dtype, or `PARTS`, for which the dtype must be bfloat16, or `FITTED`.
        early: whether the kernel before has nothing to do with the rows, and had waited for all before it when it let this one
            begin: then rows are rounded while it runs, and it is waited for at the end.
        wide: whether the rows are float32.
    """

    dtype: str
    result: str
    early: bool = False
    wide: bool = False


@dataclass(frozen=True)
class Combine:
    """A program that adds up the results of a token's slots.

    Attributes:
        dtype: the name of the output's dtype.
    """

    dtype: str

    @property
    def wide(self) -> bool:
        """Returns whether results are float32: float16 has not the range for them."""
        return self.dtype == "float16"


def inputs_for(dtype: str, pairs: int, experts: int) -> tuple[str, ...]:
    """Returns what products take for so many pairs, where activations are not rounded."""
    return (PARTS,) if dtype == "bfloat16" and pairs <= _SPLIT_PAIRS * experts else (PLAIN,)


def codes_for(pairs: int, experts: int) -> bool:
    """Returns whether codes of numbers that are rounded are multiplied, for so many pairs."""
    return pairs > _VALUE_PAIRS * experts


def columns_for(pairs: int, experts: int, inputs: tuple[str, ...] = (PLAIN,)) -> int:
    """Returns the most columns of a tile, for so many pairs."""
    if CODES in inputs:
        return ROUNDED_COLUMNS
    if PARTS in inputs:
        return SPLIT_COLUMNS
    if pairs <= _FEW_PAIRS * experts:
        return FEWEST_COLUMNS if pairs <= _FEWEST_PAIRS * experts else FEW_COLUMNS
    widest = all(MOST_COLUMNS in SERVED[kind] for kind in inputs)
    return MOST_COLUMNS if widest and pairs > _MANY_PAIRS * experts else MANY_COLUMNS


def sorting_ctas(pairs: int) -> int:
    """Returns how many CTAs sort so many pairs."""
    return 1 if pairs <= _SORTED_ALONE else SORTING_CTAS


def most_tiles(pairs: int, experts: int, columns: int) -> int:
    """Returns how many tiles a schedule can have at most, whatever the routing."""
    return min(pairs, experts + pairs // columns)


def every_schedule() -> list[Schedule]:
    """Returns the configurations of all schedules that are served."""
    return [Schedule(columns, ctas) for columns in _TILES for ctas in (1, SORTING_CTAS)]


def every_product() -> list[Product]:
    """Returns the configurations of all products that are served."""
    every = itertools.product(DTYPES.values(), (True, False), SERVED, (False, True))
    products = [Product(dtype, gated, columns, kind, wide) for dtype, gated, kind, wide in every for columns in SERVED[kind]]
    repairs = [repair_of("bfloat16", gated) for gated in (True, False)]
    return [product for product in products if _is_served(product)] + repairs


def repair_of(dtype: str, gated: bool) -> Product:
    """Returns the product that computes what `PARTS` do not hold. Its tiles have at most `SPLIT_COLUMNS` columns."""
    return Product(dtype, gated, FEWEST_COLUMNS, repairs=True)


def _is_served(product: Product) -> bool:
    """Slots of float16 are always wide; activations where no limit keeps them in range, in tiles that `VALUES` have, too."""
    if product.dtype == "bfloat16":
        return not product.wide
    if product.gated:
        return product.inputs != PARTS and not (product.wide and product.columns > MANY_COLUMNS)
    return product.inputs != PARTS and product.wide


def every_rounding() -> list[Rounding]:
    """Returns the configurations of all programs that round that are served."""
    every = [Rounding(dtype, result) for dtype in DTYPES.values() for result in (CODES, VALUES)]
    every += [Rounding("float16", result, wide=True) for result in (CODES, VALUES, FITTED)]
    return every + [Rounding("bfloat16", PARTS, early) for early in (False, True)]


def every_combine() -> list[Combine]:
    """Returns the configurations of all sums over slots that are served."""
    return [Combine(dtype) for dtype in DTYPES.values()]
