"""Configurations of the kernels of `grouped`, and the functions that choose among them for a call.

A *pair* is a (token, slot) combination with an expert. The GEMMs are swap-AB: weights are the MMA's rows (m). A *column* (n) is the
row of activations of a pair. A *panel* of weights is 64 rows of an expert's weights, a *strip* 16 of these rows, and a *k block* 64
elements of k. A *k step* is one or two k blocks. A *panel* of columns is 128 bytes of k of all columns of a tile; each column is a
row of the 128-byte swizzle.

A CTA has two ring buffers. A stage of the ring of weights has some k blocks of all of a tile's panels of weights. A stage of the
ring of columns has one k step of all of a tile's columns.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from tokenspeed_kernel_nvidia.cutedsl.launch import DTYPES
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.layout import BLOCK, PANEL_BLOCK_BYTES, PANEL_HEAD_BYTES, PANEL_STRIPS, STRIP
from tokenspeed_kernel_nvidia.sm90.common.registers import left_by

COLUMN_WARPS = 3  # producer warps that gather columns; one further producer warp streams weights
COLUMN_BYTES = 128  # bytes of a column in a panel of shared memory, which is one row of the 128-byte swizzle
CHUNK = 32  # columns whose results a warpgroup stores at a time
SHARED_BYTES = 227 * 1024  # maximum shared memory of a CTA
OTHER_BYTES = 1024  # shared memory for barriers
MAX_EXPERTS = 384
SORTING_CTAS = 8  # CTAs of the cluster that sorts the pairs, if there are many
MAX_TOP_K = 8
PAIR = 2  # CTAs of a cluster, if two CTAs share columns (`Gemm.paired`)
GROUP = 8  # columns that the swizzle permutes together; if columns are shared, each expert's columns begin at a multiple of this
ROUNDED_TOGETHER = 16  # elements of a row that a thread converts at once
RECORD = 4  # int32 fields of a tile's record in the schedule

# Kinds of GEMM inputs (activations). `PLAIN`: rows as given, 16-bit MMAs. `CODES`: float8_e4m3fn with a scale for each row, fp8
# MMAs. `VALUES`: the quantised values of `CODES`, stored in 16 bits, 16-bit MMAs. `PARTS`: each element is split into two
# float8_e4m3fn values, fp8 MMAs. The two together represent a bfloat16 exactly, unless it is small (see `EXACT_FROM`).
PLAIN, CODES, VALUES, PARTS = "plain", "codes", "values", "parts"
# Converted from float32 rows that may exceed float16's range: each row is divided by a power of two, its scale, and rounded to
# float16. The GEMM treats such rows like `VALUES`.
FITTED = "fitted"
SPLIT = 2  # fp8 values into which `PARTS` splits an element
REST = 16.0  # factor by which the second of the two values, the remainder, is multiplied
# `PARTS` scales each row so that its amax is at least 128 and below 256. Nonzero scaled elements below EXACT_FROM are inexact. A
# row is recomputed with 16-bit MMAs if more than 1 / SMALL_DIVISOR of its elements are inexact.
EXACT_FROM, SMALL_DIVISOR = 2.0**-6, 4


@dataclass(frozen=True)
class Tile:
    """The shape of the tile of a GEMM that a CTA computes at a time, rows of weights by columns.

    Attributes:
        warpgroups: number of MMA warpgroups. Each has ``strips`` panels of weights.
        widths: the numbers of columns (the MMA's n) for which mainloops are compiled, ascending. A tile uses the first width that
            holds its columns.
        k_step: number of k blocks in a *k step*: blocks of weights that are dequantised and multiplied together.
        blocks: number of k blocks in a stage of the ring of weights.
        column_blocks: number of panels of columns in all stages of the ring of columns together, see `Gemm.panels`.
        registers: registers of an MMA thread.
        strips: number of strips of an MMA warp. A strip has 16 rows of weights; each strip of a warp belongs to another panel of 64
            rows. For more than one strip, see `panel_device`.
        by_warps: the maximum number of columns for which warps with several strips use mma.sync (`warp_device`) instead of wgmma.
    """

    warpgroups: int
    widths: tuple[int, ...]
    k_step: int
    blocks: int
    column_blocks: int
    registers: int
    strips: int = 1
    by_warps: int = 0


# The tiles, by their maximum number of columns. The comments give the microseconds of all kernels of a call together, for a layer
# of GPT-OSS-120B on an H200. Both of its projections have multiples of 192 rows of weights. With 8192 tokens, the layer ran at the
# power limit, between 1.7 and 1.9 GHz. Dequantising a part of the next k step after each MMA was slower than dequantising all of it
# after the last MMA is issued.
_TILES = {
    # For `PARTS` (elements split into two fp8 values). Times: see `_SPLIT_PAIRS`.
    24: Tile(3, (8, 16, 24), 2, 2, 4, 160, 3),
    # For fp8 activations, with block scales as for `PARTS`. Times: see `_FEW_ROUNDED_PAIRS`. With 48 columns, registers spill.
    40: Tile(3, (8, 16, 24, 32, 40), 2, 2, 6, 160, 3),
    # 1024, 512 and 256 tokens take 655, 570 and 503 us. With mma.sync (`warp_device`) for all widths: 756, 585 and 502 us. With
    # wgmma (`panel_device`) for all widths: 650, 565 and 535 us. With mma.sync for widths up to 64 columns: 660, 569 and 499 us.
    # With MMA groups of half a block, and the A fragments of four groups in registers: 659 and 588 us.
    48: Tile(3, (8, 16, 32, 48), 2, 2, 8, 160, 3, 16),
    # 2048 tokens take 928 us, and 1035 us with 160 columns. 1024 tokens take 759 us. Measured with MMA groups of half a block.
    96: Tile(3, (32, 48, 64, 80, 96), 2, 2, 4, 160, 2),
    # 8192 tokens take 2317 us with fp8 MMAs. 16-bit MMAs on the quantised values took 3109 us with 160 columns.
    144: Tile(2, (32, 64, 80, 96, 112, 128, 144), 1, 2, 8, 232),
    # 8192 tokens take 2996 us. Prefetching weights from shared memory to registers was slower.
    160: Tile(3, (16, 32, 48, 64, 80, 96, 112, 128, 144, 160), 1, 2, 5, 152),
    # 8192 tokens take 2723 us, and 3000 us after one second of running. Dequantisation takes time and power from the MMAs, and
    # twice as many columns amortise the dequantisation. When one warpgroup dequantised for the others into shared memory, the call
    # took 3193 us.
    288: Tile(2, (32, 64, 96, 128, 160, 192, 208, 224, 240, 256, 272, 288), 1, 2, 4, 216),
}
SPLIT_COLUMNS, FEW_ROUNDED_COLUMNS = 24, 40
FEWEST_COLUMNS, FEW_COLUMNS, ROUNDED_COLUMNS, MANY_COLUMNS, MOST_COLUMNS = 48, 96, 144, 160, 288
# The supported tiles of each kind of inputs, by their maximum number of columns. The widest tiles are not for fp8 MMAs, which need
# twice the accumulator registers: partial sums are accumulated separately, see `Gemm.promoted`.
SUPPORTED = {
    PLAIN: (FEWEST_COLUMNS, FEW_COLUMNS, MANY_COLUMNS, MOST_COLUMNS),
    CODES: (FEW_ROUNDED_COLUMNS, ROUNDED_COLUMNS),
    PARTS: (SPLIT_COLUMNS,),
    VALUES: (FEWEST_COLUMNS, FEW_COLUMNS, ROUNDED_COLUMNS, MANY_COLUMNS),
}
# The tile of each kind of inputs for which two CTAs can share columns.
PAIRED = {PLAIN: MOST_COLUMNS, CODES: ROUNDED_COLUMNS}
_SORTED_ALONE = 2048  # maximum number of pairs that one CTA sorts alone
# The largest mean number of pairs per expert for which `PARTS` is used. A layer of GPT-OSS-120B on an H200, with `PARTS` and
# without it: 447 and 517 us for 128 tokens, 453 and 493 for 256, 506 and 594 for 384, 597 and 635 for 512 (16 pairs per expert).
_SPLIT_PAIRS = 16
_FEWEST_PAIRS = 32  # up to this mean of pairs per expert, tiles have at most `FEWEST_COLUMNS` columns
_FEW_PAIRS = 84  # up to this mean of pairs per expert, tiles have at most `FEW_COLUMNS` columns
# Mean pairs per expert up to which fp8 activations use `FEW_ROUNDED_COLUMNS`. A layer of GPT-OSS-120B on an H200, in us, with these
# columns and with 16-bit MMAs in tiles of 48 columns: 432 and 530 for 256 tokens (8 pairs per expert), 486 and 626 for 512, 655 and
# 678 for 1024.
_FEW_ROUNDED_PAIRS = 32
_VALUE_PAIRS = 56  # up to this mean of pairs per expert, fp8 activations use 16-bit MMAs
_MANY_PAIRS = 140  # up to this mean of pairs per expert, most experts' pairs are one tile of `MANY_COLUMNS`
# Above these means of pairs per expert, two CTAs share columns. A layer of GPT-OSS-120B on an H200, in us, with the same tiles
# alone and shared. 8192 tokens (256 pairs per expert): 2999 and 2645 with bfloat16 activations, 2534 and 2471 with fp8. 1024 tokens
# (32 pairs): 738 and 762 with fp8 activations. So bfloat16 activations share all tiles of `MOST_COLUMNS`. Means between 32 and 256
# are unmeasured; with fp8 activations, the bound is in between.
_PAIRED_PAIRS = {PLAIN: _MANY_PAIRS, CODES: 128}


@dataclass(frozen=True)
class Schedule:
    """Configuration of the kernel that sorts pairs and divides them into tiles.

    Attributes:
        ctas: the number of CTAs that sort; they form one cluster.
    """

    ctas: int = 1


@dataclass(frozen=True)
class Gemm:
    """Configuration of the kernel of one of the two grouped GEMMs.

    Attributes:
        dtype: the name of the activations' dtype.
        gated: True for the first GEMM (w13), which gathers the tokens' rows and applies the activation function; False for w2.
        columns: the maximum number of columns of a tile.
        inputs: the kind of inputs: `PLAIN`, `CODES`, `VALUES` or `PARTS`.
        wide: whether results are stored as float32, because they may exceed float16's range.
        repairs: whether the GEMM recomputes only the tiles that have a column which `PARTS` cannot represent. A negative scale
            marks such a column.
        paired: whether the two CTAs of a cluster compute the same tile of columns, for neighbouring tiles of weights. Each CTA then
            loads half of the columns and multicasts them to both, so columns are read from L2 half as often. The columns are
            packed, see `packing_device`.
    """

    dtype: str
    gated: bool
    columns: int
    inputs: str = PLAIN
    wide: bool = False
    repairs: bool = False
    paired: bool = False

    @property
    def scaled(self) -> bool:
        """Whether each column, a row of activations, has a scale."""
        return self.inputs != PLAIN

    @property
    def tile(self) -> Tile:
        """The shape of the tile that a CTA computes at a time."""
        return _TILES[self.columns]

    @property
    def bytewise(self) -> bool:
        """Whether columns are fp8, and the kernel uses fp8 MMAs."""
        return self.inputs in (CODES, PARTS)

    @property
    def ctas(self) -> int:
        """The number of CTAs of a cluster."""
        return PAIR if self.paired else 1

    @property
    def stores_packed(self) -> bool:
        """Whether results are stored as the packed columns of the second GEMM."""
        return self.paired and self.gated and self.inputs == PLAIN

    @property
    def slots(self) -> int:
        """The number of MMA columns for each column of the tile: two with `PARTS`, one for each of the two fp8 values of an
        element; otherwise one."""
        return SPLIT if self.inputs == PARTS else 1

    @property
    def strips(self) -> int:
        """The number of strips (16 rows of weights each) of a tile."""
        return PANEL_STRIPS * self.panels_of_rows

    @property
    def panels_of_rows(self) -> int:
        """The number of panels of weights (64 rows each) of a tile."""
        return self.tile.warpgroups * self.tile.strips

    @property
    def warps(self) -> int:
        """The number of MMA warps."""
        return 4 * self.tile.warpgroups

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage in the ring of weights, which holds some k blocks of all of a tile's panels of weights."""
        return self.panels_of_rows * self.slot_bytes

    @property
    def several_panels(self) -> bool:
        """Whether a warpgroup computes several panels of weights of a tile."""
        return self.tile.strips > 1

    @property
    def rows(self) -> int:
        """The number of rows of weights in a tile."""
        return self.strips * STRIP

    @property
    def threads(self) -> int:
        """The number of threads of a CTA: those of the MMA warpgroups and of one producer warpgroup."""
        return 128 * (self.tile.warpgroups + 1)

    @property
    def promoted(self) -> bool:
        """Whether wgmma accumulates over two k steps at most, and the lanes add these partial sums to float32 sums in registers
        (promotion).

        wgmma keeps about 14 bits of an fp8 accumulator. Without promotion, the error was 2.4e-2, twice the error of `VALUES`
        (1.2e-2). Mainloops with several panels scale the partial sums of each half block, and so promote them anyway.
        """
        return self.bytewise and not self.several_panels

    @property
    def k_step(self) -> int:
        """The number of k blocks in a k step. A stage in the ring of columns holds the columns of one k step."""
        return 2 if self.bytewise else self.tile.k_step

    @property
    def panels(self) -> int:
        """The number of panels of columns in a stage of the ring of columns. Such a panel has 128 bytes of every column."""
        return self.k_step // 2 if self.bytewise else self.k_step

    @property
    def panel_k(self) -> int:
        """The number of elements of k of each column in a panel of columns."""
        return self.k_step * BLOCK // self.panels

    @property
    def parts(self) -> int:
        """The number of MMAs along k in a k step; each multiplies 32 bytes of every column."""
        return 4 * self.panels

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, the space for one panel of weights (its head and some k blocks) in a stage of the ring of weights."""
        return PANEL_HEAD_BYTES + self.tile.blocks * PANEL_BLOCK_BYTES

    @property
    def column_stages(self) -> int:
        """The number of stages in the ring buffer of columns."""
        return self.tile.column_blocks // self.panels

    @property
    def column_bytes(self) -> int:
        """Bytes of a stage in the ring of columns, which holds one k step of all of a tile's columns."""
        return self.panels * self.slots * self.columns * COLUMN_BYTES

    @property
    def store_bytes(self) -> int:
        """Bytes of one column's results in a warpgroup's staging buffer: 64 values of 16 bits, or 32 if the activation has combined
        gate and up.
        """
        return 64 if self.gated else 128

    @property
    def staging_bytes(self) -> int:
        """Bytes of shared memory for the epilogue's staging buffers, two for each MMA warpgroup, each for `CHUNK` columns."""
        return 2 * self.tile.warpgroups * CHUNK * self.store_bytes

    @property
    def scale_bytes(self) -> int:
        """Bytes of shared memory for the scales of a tile's columns: one copy per MMA warpgroup, rounded up to 1024, the alignment
        of the ring of columns that follows.
        """
        return -(-self.tile.warpgroups * self.columns * 4 // 1024) * 1024 if self.scaled else 0

    @property
    def weight_stages(self) -> int:
        """The number of stages in the ring of weights, which gets the shared memory that nothing else uses."""
        left = SHARED_BYTES - OTHER_BYTES - self.staging_bytes - self.column_stages * self.column_bytes - self.scale_bytes
        return left // self.stage_bytes

    @property
    def producer_registers(self) -> int:
        """The number of registers of a producer thread: as many as the MMA threads' registers leave."""
        return left_by(self.threads, self.tile.warpgroups, self.tile.registers)


@dataclass(frozen=True)
class Rounding:
    """Configuration of a kernel that converts a GEMM's input rows to float8_e4m3fn or float16, with one scale per row.

    Attributes:
        dtype: the name of the activations' dtype.
        result: the kind of inputs to make: `CODES`, `VALUES` (in ``dtype``), `PARTS` (``dtype`` must be bfloat16), or `FITTED`.
        early: whether rows are converted while the preceding kernel runs (PDL). This requires that the preceding kernel does not
            write the rows. That kernel must also have waited for all earlier kernels before it triggered this kernel. At its end,
            this kernel waits for that kernel, so that later kernels need to wait for this kernel only.
        wide: whether the rows to convert are float32.
        packed: whether the results are packed columns, see `packing_device`. ``result`` is then `CODES`, or `PLAIN` for a copy.
    """

    dtype: str
    result: str
    early: bool = False
    wide: bool = False
    packed: bool = False


@dataclass(frozen=True)
class Combine:
    """Configuration of the kernel that adds up the expert results of each token, one for each slot.

    Attributes:
        dtype: the name of the output's dtype.
    """

    dtype: str

    @property
    def wide(self) -> bool:
        """Whether the expert results to add are float32, because float16's range is too small for them."""
        return self.dtype == "float16"


def inputs_for(dtype: str, pairs: int, experts: int) -> tuple[str, ...]:
    """Returns the kinds of inputs of the GEMMs for a number of (token, slot) pairs, if activations are not fp8."""
    return (PARTS,) if dtype == "bfloat16" and pairs <= _SPLIT_PAIRS * experts else (PLAIN,)


def is_few_rounded(pairs: int, experts: int) -> bool:
    """Returns whether a call with fp8 activations and this number of pairs uses tiles of `FEW_ROUNDED_COLUMNS`."""
    return pairs <= _FEW_ROUNDED_PAIRS * experts


def codes_for(pairs: int, experts: int) -> bool:
    """Returns whether a call with fp8 activations and this number of pairs uses fp8 MMAs: for few and for many pairs per expert."""
    return is_few_rounded(pairs, experts) or pairs > _VALUE_PAIRS * experts


def columns_for(pairs: int, experts: int, inputs: tuple[str, ...] = (PLAIN,)) -> int:
    """Returns the maximum number of columns of the tiles that a call with this number of pairs uses: one of those in
    `SUPPORTED`."""
    if CODES in inputs:
        return ROUNDED_COLUMNS
    if PARTS in inputs:
        return SPLIT_COLUMNS
    if pairs <= _FEW_PAIRS * experts:
        return FEWEST_COLUMNS if pairs <= _FEWEST_PAIRS * experts else FEW_COLUMNS
    widest = all(MOST_COLUMNS in SUPPORTED[kind] for kind in inputs)
    return MOST_COLUMNS if widest and pairs > _MANY_PAIRS * experts else MANY_COLUMNS


def is_paired(dtype: str, pairs: int, experts: int, hidden: int, intermediate: int, rounded: bool) -> bool:
    """Returns whether a call uses GEMMs in which two CTAs share columns. ``rounded``: whether activations are fp8."""
    kind = CODES if rounded else PLAIN
    return pairs > _PAIRED_PAIRS[kind] * experts and can_pair(dtype, hidden, intermediate, rounded)


def can_pair(dtype: str, hidden: int, intermediate: int, rounded: bool) -> bool:
    """Returns whether two CTAs can share columns (`Gemm.paired`). ``rounded``: whether activations are fp8.

    16-bit columns must be whole panels of 64 elements: the first GEMM does not store the zeros that would pad them.
    """
    return dtype == "bfloat16" and (rounded or (hidden % BLOCK == 0 and intermediate % BLOCK == 0))


def sorting_ctas(pairs: int) -> int:
    """Returns the number of CTAs that sort a number of (token, slot) pairs by expert."""
    return 1 if pairs <= _SORTED_ALONE else SORTING_CTAS


def most_tiles(pairs: int, experts: int, columns: int) -> int:
    """Returns the largest number of tiles that a schedule can have, over all routings of the pairs to experts."""
    return min(pairs, experts + pairs // columns)


def least_columns(columns: Any) -> Any:
    """Returns the fewest columns of an expert's last tile, for tiles of at most ``columns`` columns. If the last tile would have
    fewer, the expert's last two tiles share their columns about equally. Device code calls this function too."""
    return columns // 3


def every_schedule() -> list[Schedule]:
    """Returns all configurations of the kernel that sorts pairs."""
    return [Schedule(ctas) for ctas in (1, SORTING_CTAS)]


def every_gemm() -> list[Gemm]:
    """Returns all GEMM configurations."""
    every = itertools.product(DTYPES.values(), (True, False), SUPPORTED, (False, True))
    products = [Gemm(dtype, gated, columns, kind, wide) for dtype, gated, kind, wide in every for columns in SUPPORTED[kind]]
    others = [repair_of("bfloat16", gated) for gated in (True, False)]
    others += [Gemm("bfloat16", gated, columns, kind, paired=True) for kind, columns in PAIRED.items() for gated in (True, False)]
    return [product for product in products if _is_supported(product)] + others


def repair_of(dtype: str, gated: bool) -> Gemm:
    """Returns the GEMM that recomputes tiles with elements that `PARTS` cannot represent. The tiles of that GEMM have at most
    `SPLIT_COLUMNS` columns.
    """
    return Gemm(dtype, gated, FEWEST_COLUMNS, repairs=True)


def _is_supported(product: Gemm) -> bool:
    """Returns whether a configuration is compiled. With float16, the results of the second GEMM are always float32 (`Gemm.wide`);
    those of the first GEMM may be, in tiles of up to `MANY_COLUMNS`.
    """
    if product.dtype == "bfloat16":
        return not product.wide
    if product.gated:
        return product.inputs != PARTS and not (product.wide and product.columns > MANY_COLUMNS)
    return product.inputs != PARTS and product.wide


def every_rounding() -> list[Rounding]:
    """Returns all configurations of the kernel that converts a GEMM's input rows."""
    every = [Rounding(dtype, result, early) for dtype in DTYPES.values() for result in (CODES, VALUES) for early in (False, True)]
    every += [Rounding("float16", result, wide=True) for result in (CODES, VALUES, FITTED)]
    every += [Rounding("bfloat16", PARTS, early) for early in (False, True)]
    return every + [Rounding("bfloat16", kind, packed=True) for kind in PAIRED]


def every_combine() -> list[Combine]:
    """Returns all configurations of the kernel that adds up the slots of a token."""
    return [Combine(dtype) for dtype in DTYPES.values()]
