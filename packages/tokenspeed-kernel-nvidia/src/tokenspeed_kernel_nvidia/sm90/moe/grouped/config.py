"""Configurations of the kernels of `grouped`, and the choice among them for a call."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from tokenspeed_kernel_nvidia.cutedsl.launch import DTYPES
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.layout import BLOCK, PANEL_BLOCK_BYTES, PANEL_HEAD_BYTES, PANEL_STRIPS, STRIP
from tokenspeed_kernel_nvidia.sm90.common.registers import left_by

COLUMN_WARPS = 3  # warps that gather columns; one further warp streams weights
COLUMN_BYTES = 128  # bytes of a column in a panel; a column is one row of the 128-byte swizzle
CHUNK = 32  # columns that a warpgroup stores at a time
SHARED_BYTES = 227 * 1024  # maximum shared memory of a CTA
OTHER_BYTES = 1024  # shared memory for barriers
MAX_EXPERTS = 384
SORTING_CTAS = 8  # CTAs of the cluster that sorts many pairs
MAX_TOP_K = 8
ROUNDED_TOGETHER = 16  # elements of a row that a thread rounds at once
RECORD = 4  # int32 fields of a tile in the schedule

# Kinds of GEMM inputs. `PLAIN`: rows as given. `CODES`: float8_e4m3fn with a scale for each row. `VALUES`: the quantised values of
# `CODES`, stored in 16 bits. `PARTS`: split into two float8_e4m3fn values that together have all bits of a bfloat16.
PLAIN, CODES, VALUES, PARTS = "plain", "codes", "values", "parts"
# float32 rows that may exceed float16's range. Each row is divided by a power of two and converted to float16. The MMAs treat such
# rows like `VALUES`.
FITTED = "fitted"
SPLIT = 2  # fp8 values of an element of `PARTS`
REST = 16.0  # factor of the second one
# Nonzero elements of `PARTS`, scaled to below 256, are inexact below EXACT_FROM. A row with more than a 1 / SMALL_DIVISOR of such
# elements is recomputed.
EXACT_FROM, SMALL_DIVISOR = 2.0**-6, 4


@dataclass(frozen=True)
class Tile:
    """The tile of a GEMM that a CTA computes at a time.

    Attributes:
        warpgroups: number of MMA warpgroups, each with 64 rows of weights.
        widths: the numbers of columns that loops are compiled for, ascending. A tile uses the first width that holds its columns.
        k_step: k blocks of weights that are dequantised and multiplied together: a k step.
        blocks: k blocks in a stage of weights. Narrow tiles are memory-bound, which long copies suit better.
        column_blocks: panels of columns in flight.
        registers: registers of an MMA thread.
        strips: number of strips of an MMA warp. A strip has 16 rows; all strips belong to different panels. For more than one
            strip, see `panel_device`.
        by_warps: up to this many columns, warps with several strips use mma.sync, see `warp_device`.
    """

    warpgroups: int
    widths: tuple[int, ...]
    k_step: int
    blocks: int
    column_blocks: int
    registers: int
    strips: int = 1
    by_warps: int = 0


# The tiles, each under its largest number of columns. Both projections of GPT-OSS are multiples of 192 rows. Microseconds are the
# sum of all kernels of a call, for GPT-OSS-120B's layer on an H200. With 8192 tokens, the layer ran at the power limit, between 1.7
# and 1.9 GHz. Dequantising a part of a k step after each MMA was slower than dequantising the whole k step after its last MMA.
_TILES = {
    # Elements split into two fp8 values, see `_SPLIT_PAIRS`.
    24: Tile(3, (8, 16, 24), 2, 2, 4, 160, 3),
    # fp8 activations, with block scales as for `PARTS`. Calls do not use it, because it has not been measured. Expected to take
    # 600 us for 1024 tokens, where 16-bit MMAs on the quantised values take 690. With 48 columns, registers are spilled.
    40: Tile(3, (8, 16, 24, 32, 40), 2, 2, 6, 160, 3),
    # 1024 tokens: 655, 512: 570, 256: 503. With all widths by warps: 756, 585 and 502. With all widths by panels: 650, 565 and 535.
    # With widths up to 64 columns by warps: 660, 569 and 499. With MMA groups of half a block, and the A fragments of four groups
    # in registers: 659 and 588.
    48: Tile(3, (8, 16, 32, 48), 2, 2, 8, 160, 3, 16),
    # 2048 tokens: 928 where 160 columns took 1035; 1024 tokens: 759. Measured with MMA groups of half a block.
    96: Tile(3, (32, 48, 64, 80, 96), 2, 2, 4, 160, 2),
    # 8192 tokens with fp8 MMAs: 2317. 16-bit MMAs on the quantised values took 3109 with 160 columns.
    144: Tile(2, (32, 64, 80, 96, 112, 128, 144), 1, 2, 8, 232),
    # 8192 tokens: 2996. Prefetching words was slower.
    160: Tile(3, (16, 32, 48, 64, 80, 96, 112, 128, 144, 160), 1, 2, 5, 152),
    # 8192 tokens: 2723, and 3000 when it has run for a second. Dequantisation takes time and power from the MMAs, and twice as many
    # columns amortise it. It was slower if one warpgroup dequantised for the others into shared memory: 3193.
    288: Tile(2, (32, 64, 96, 128, 160, 192, 208, 224, 240, 256, 272, 288), 1, 2, 4, 216),
}
SPLIT_COLUMNS, FEW_ROUNDED_COLUMNS = 24, 40
FEWEST_COLUMNS, FEW_COLUMNS, ROUNDED_COLUMNS, MANY_COLUMNS, MOST_COLUMNS = 48, 96, 144, 160, 288
# The supported tiles of each kind of inputs. fp8 MMAs need twice the accumulator registers.
SUPPORTED = {
    PLAIN: (FEWEST_COLUMNS, FEW_COLUMNS, MANY_COLUMNS, MOST_COLUMNS),
    CODES: (FEW_ROUNDED_COLUMNS, ROUNDED_COLUMNS),
    PARTS: (SPLIT_COLUMNS,),
    VALUES: (FEWEST_COLUMNS, FEW_COLUMNS, ROUNDED_COLUMNS, MANY_COLUMNS),
}
_SORTED_ALONE = 2048  # up to this many pairs, one CTA sorts
# Mean pairs per expert up to which elements are split. A layer of GPT-OSS-120B on an H200, with the split and without: 447 and 517
# us for 128 tokens, 453 and 493 for 256, 506 and 594 for 384, 597 and 635 for 512 (16 pairs per expert).
_SPLIT_PAIRS = 16
_FEWEST_PAIRS = 32  # up to this mean of pairs per expert, tiles are narrowest
_FEW_PAIRS = 84  # up to this mean of pairs per expert, tiles are narrow
# Mean pairs per expert up to which fp8 activations use `FEW_ROUNDED_COLUMNS`. A layer of GPT-OSS-120B on an H200, in us, with these
# columns and with 16-bit MMAs in tiles of 48 columns: 432 and 530 for 256 tokens (8 pairs per expert), 486 and 626 for 512, 655 and
# 678 for 1024.
_FEW_ROUNDED_PAIRS = 32
_VALUE_PAIRS = 56  # up to this mean of pairs per expert, fp8 activations use 16-bit MMAs
_MANY_PAIRS = 140  # up to this mean of pairs per expert, most experts' pairs are one tile of `MANY_COLUMNS`


@dataclass(frozen=True)
class Schedule:
    """Configuration of the kernel that sorts pairs and divides them into tiles.

    Attributes:
        columns: the most columns of a tile.
        ctas: the number of CTAs that sort; they form one cluster.
    """

    columns: int
    ctas: int = 1

    @property
    def least(self) -> int:
        """Below this number of columns an expert's last tile is balanced with the tile before."""
        return self.columns // 3


@dataclass(frozen=True)
class Gemm:
    """Configuration of one of the two GEMMs.

    Attributes:
        dtype: the name of the activations' dtype.
        gated: whether this is the first GEMM, which gathers tokens and applies the activation.
        columns: the most columns of a tile.
        inputs: `PLAIN`, `CODES`, `VALUES` or `PARTS`.
        wide: whether results are stored as float32, because float16 may overflow.
        repairs: whether the GEMM recomputes only tiles with columns that `PARTS` cannot represent. A negative scale marks such
            columns.
    """

    dtype: str
    gated: bool
    columns: int
    inputs: str = PLAIN
    wide: bool = False
    repairs: bool = False

    @property
    def scaled(self) -> bool:
        """Whether columns have scales."""
        return self.inputs != PLAIN

    @property
    def tile(self) -> Tile:
        """The tile that a CTA computes at a time."""
        return _TILES[self.columns]

    @property
    def bytewise(self) -> bool:
        """Whether the kernel uses fp8 MMAs."""
        return self.inputs in (CODES, PARTS)

    @property
    def slots(self) -> int:
        """The number of MMA columns of a column of the tile."""
        return SPLIT if self.inputs == PARTS else 1

    @property
    def strips(self) -> int:
        """The number of a tile's strips."""
        return PANEL_STRIPS * self.panels_of_rows

    @property
    def panels_of_rows(self) -> int:
        """The number of weight panels of a tile."""
        return self.tile.warpgroups * self.tile.strips

    @property
    def warps(self) -> int:
        """The number of MMA warps."""
        return 4 * self.tile.warpgroups

    @property
    def stage_bytes(self) -> int:
        """The bytes of a stage of weights."""
        return self.panels_of_rows * self.slot_bytes

    @property
    def several_panels(self) -> bool:
        """Whether a warpgroup has several panels of a tile."""
        return self.tile.strips > 1

    @property
    def rows(self) -> int:
        """The number of rows of weights of a tile."""
        return self.strips * STRIP

    @property
    def threads(self) -> int:
        """The number of threads of a CTA: MMA warpgroups and one producer warpgroup."""
        return 128 * (self.tile.warpgroups + 1)

    @property
    def promoted(self) -> bool:
        """Whether every two k steps are accumulated separately and then added to the accumulators in registers (promotion).

        wgmma keeps about 14 bits of an fp8 accumulator. Without promotion, the error was twice the error of `VALUES` (2.4e-2,
        1.2e-2).
        """
        return self.bytewise and not self.several_panels

    @property
    def k_step(self) -> int:
        """The number of k blocks in a k step. A pipeline stage of columns holds the same number."""
        return 2 if self.bytewise else self.tile.k_step

    @property
    def panels(self) -> int:
        """The number of panels in a stage of columns; a panel has 128 bytes of every column."""
        return self.k_step // 2 if self.bytewise else self.k_step

    @property
    def panel_k(self) -> int:
        """The number of elements of a column in a panel."""
        return self.k_step * BLOCK // self.panels

    @property
    def parts(self) -> int:
        """The number of MMAs along k of a k step, each of 32 bytes of every column."""
        return 4 * self.panels

    @property
    def slot_bytes(self) -> int:
        """The bytes of a panel of weights in a stage."""
        return PANEL_HEAD_BYTES + self.tile.blocks * PANEL_BLOCK_BYTES

    @property
    def column_stages(self) -> int:
        """The number of stages in the ring buffer of columns."""
        return self.tile.column_blocks // self.panels

    @property
    def column_bytes(self) -> int:
        """The bytes of a stage of columns."""
        return self.panels * self.slots * self.columns * COLUMN_BYTES

    @property
    def store_bytes(self) -> int:
        """The bytes of a column's results in a warpgroup's buffer; half of that if gate and up were combined."""
        return 64 if self.gated else 128

    @property
    def staging_bytes(self) -> int:
        """Bytes of the buffers from which results are stored, two for each warpgroup."""
        return 2 * self.tile.warpgroups * CHUNK * self.store_bytes

    @property
    def scale_bytes(self) -> int:
        """The bytes of the columns' scales, a copy for each warpgroup, rounded up to the alignment of columns."""
        return -(-self.tile.warpgroups * self.columns * 4 // 1024) * 1024 if self.scaled else 0

    @property
    def weight_stages(self) -> int:
        """The number of stages in the ring buffer of weights, which gets the remaining shared memory."""
        left = SHARED_BYTES - OTHER_BYTES - self.staging_bytes - self.column_stages * self.column_bytes - self.scale_bytes
        return left // self.stage_bytes

    @property
    def producer_registers(self) -> int:
        """The registers of a producer thread, which are those that the other threads leave."""
        return left_by(self.threads, self.tile.warpgroups, self.tile.registers)


@dataclass(frozen=True)
class Rounding:
    """Configuration of a kernel that converts rows to float8_e4m3fn or float16, with one scale per row.

    Attributes:
        dtype: the name of the activations' dtype.
        result: `CODES`, `VALUES` (in that dtype), `PARTS` (the dtype must be bfloat16), or `FITTED`.
        early: true if the preceding kernel does not write the rows, and had waited for all kernels before it when it triggered this
            kernel. Then rows are converted while that kernel runs, and this kernel waits for it at the end.
        wide: whether the rows are float32.
    """

    dtype: str
    result: str
    early: bool = False
    wide: bool = False


@dataclass(frozen=True)
class Combine:
    """Configuration of the kernel that adds up the results of a token's slots.

    Attributes:
        dtype: the name of the output's dtype.
    """

    dtype: str

    @property
    def wide(self) -> bool:
        """Whether results are float32, because float16's range is too small for them."""
        return self.dtype == "float16"


def inputs_for(dtype: str, pairs: int, experts: int) -> tuple[str, ...]:
    """Returns the GEMMs' kinds of inputs for a number of pairs, if activations are not quantised."""
    return (PARTS,) if dtype == "bfloat16" and pairs <= _SPLIT_PAIRS * experts else (PLAIN,)


def is_few_rounded(pairs: int, experts: int) -> bool:
    """Returns whether fp8 activations use `FEW_ROUNDED_COLUMNS` for a number of pairs."""
    return pairs <= _FEW_ROUNDED_PAIRS * experts


def codes_for(pairs: int, experts: int) -> bool:
    """Returns whether fp8 activations use fp8 MMAs for a number of pairs."""
    return is_few_rounded(pairs, experts) or pairs > _VALUE_PAIRS * experts


def columns_for(pairs: int, experts: int, inputs: tuple[str, ...] = (PLAIN,)) -> int:
    """Returns the most columns of a tile for a number of pairs."""
    if CODES in inputs:
        return ROUNDED_COLUMNS
    if PARTS in inputs:
        return SPLIT_COLUMNS
    if pairs <= _FEW_PAIRS * experts:
        return FEWEST_COLUMNS if pairs <= _FEWEST_PAIRS * experts else FEW_COLUMNS
    widest = all(MOST_COLUMNS in SUPPORTED[kind] for kind in inputs)
    return MOST_COLUMNS if widest and pairs > _MANY_PAIRS * experts else MANY_COLUMNS


def sorting_ctas(pairs: int) -> int:
    """Returns the number of CTAs that sort a number of pairs."""
    return 1 if pairs <= _SORTED_ALONE else SORTING_CTAS


def most_tiles(pairs: int, experts: int, columns: int) -> int:
    """Returns the largest number of tiles of a schedule, for any routing."""
    return min(pairs, experts + pairs // columns)


def every_schedule() -> list[Schedule]:
    """Returns all schedule configurations."""
    return [Schedule(columns, ctas) for columns in _TILES for ctas in (1, SORTING_CTAS)]


def every_gemm() -> list[Gemm]:
    """Returns all GEMM configurations."""
    every = itertools.product(DTYPES.values(), (True, False), SUPPORTED, (False, True))
    products = [Gemm(dtype, gated, columns, kind, wide) for dtype, gated, kind, wide in every for columns in SUPPORTED[kind]]
    repairs = [repair_of("bfloat16", gated) for gated in (True, False)]
    return [product for product in products if _is_supported(product)] + repairs


def repair_of(dtype: str, gated: bool) -> Gemm:
    """Returns the GEMM that recomputes tiles with elements that `PARTS` cannot represent. Its tiles have at most `SPLIT_COLUMNS`
    columns.
    """
    return Gemm(dtype, gated, FEWEST_COLUMNS, repairs=True)


def _is_supported(product: Gemm) -> bool:
    """Whether a configuration exists. float16: results of slots are always wide; activations may be, up to `MANY_COLUMNS`."""
    if product.dtype == "bfloat16":
        return not product.wide
    if product.gated:
        return product.inputs != PARTS and not (product.wide and product.columns > MANY_COLUMNS)
    return product.inputs != PARTS and product.wide


def every_rounding() -> list[Rounding]:
    """Returns all configurations of kernels that convert rows."""
    every = [Rounding(dtype, result, early) for dtype in DTYPES.values() for result in (CODES, VALUES) for early in (False, True)]
    every += [Rounding("float16", result, wide=True) for result in (CODES, VALUES, FITTED)]
    return every + [Rounding("bfloat16", PARTS, early) for early in (False, True)]


def every_combine() -> list[Combine]:
    """Returns all configurations of the sum over slots."""
    return [Combine(dtype) for dtype in DTYPES.values()]
