"""Configurations of the programs of `mm_fp8`, and the tiles of a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BLOCK = 128  # elements along k in a stage
ROWS = 128  # of a CTA's tile, 64 for each of two warpgroups
PAIR = 2  # CTAs of a cluster: neighbouring rows, the same columns
HALF = 128  # columns of an instruction's result
RING_BYTES = 192 * 1024
OUT_BYTES = 2  # of a result's number, which is bfloat16
PANEL = 128 // OUT_BYTES  # columns of a result that are stored at once
GROUP = 8  # rows of clusters' tiles that are done together, so that the L2 cache has what they share

# What scales belong to: 128 of a row and 128 x 128 weights; or parts of rows, of both operands, and fewer weights.
Scales = Literal["block", "column"]
# How they are stored: as float32, or an exponent (e8m0) a byte.
Stored = Literal["float32", "byte"]


@dataclass(frozen=True)
class Config:
    """Describes a program.

    Attributes:
        scales: what they belong to.
        stored: how they are stored.
        block: elements along k that a scale is for, 128 or 64.
        halves: instructions beside each other in a tile, of 128 columns each.
    """

    scales: Scales
    stored: Stored
    block: int = 128
    halves: int = 2

    @property
    def parts(self) -> int:
        """Returns how many blocks a stage has along k."""
        return BLOCK // self.block

    @property
    def panels(self) -> int:
        """Returns how many pieces of results of a warp there is room for. Scales of columns take some."""
        return 1 if self.scales == "column" else 2

    @property
    def producer_registers(self) -> int:
        return 40 if self.scales == "column" else 24

    @property
    def columns(self) -> int:
        """Returns the columns of a tile."""
        return self.halves * HALF

    @property
    def a_bytes(self) -> int:
        return ROWS * BLOCK

    @property
    def b_bytes(self) -> int:
        return self.columns * BLOCK

    @property
    def stages(self) -> int:
        return RING_BYTES // (self.a_bytes + self.b_bytes)

    @property
    def threads(self) -> int:
        return 3 * 128


@dataclass(frozen=True)
class Served:
    """Calls that are served, and the programs for them.

    Attributes:
        name: of the calls, in names of kernels.
        scales, stored, block: as in `Config`.
    """

    name: str
    scales: Scales
    stored: Stored
    block: int = 128

    def configs(self) -> list[Config]:
        return [Config(self.scales, self.stored, self.block, halves) for halves in (2, 1)]


# Where this kernel is quicker than the portable one. One H100, microseconds: with 128 columns a tile, with 256; the portable one.
#
# | m x k x n          | e8m0 blocks         | columns             | e8m0 columns        | blocks of 64        |
# |--------------------|---------------------|---------------------|---------------------|---------------------|
# | 256 x 7168 x 2048  |                     |                     | 35.7  64.3   25.2   |                     |
# | 512 x 7168 x 4096  |                     | 38.3  65.7   42.6   | 37.0  65.0   43.6   |                     |
# | 1024 x 7168 x 2048 | 30.2  49.1   37.3   |                     | 37.1  65.1   43.1   | 52.1  92.2   61.7   |
# | 4096 x 2048 x 7168 |                     | 167.9 156.7  192.4  | 149.8 142.5  182.8  |                     |
# | 4096 x 7168 x 4096 | 239.3 215.2  311.0  |                     | 288.0 276.1  344.7  | 399.3 371.5  514.9  |
#
# Three kinds of scales are left to other kernels, which are quicker. PyTorch's product serves a scale for each row: it takes 794 us
# for 8192 x 8192 x 8192, where this kernel took 837, and 1467 for 2048 x 8192 x 57344, where this one took 1546. It also serves
# float32 scales of 128 x 128 weights: 107.3 us for 4096 x 2048 x 7168, 109.0 here. The portable kernel serves mxfp8: 770 us for
# 4096 x 8192 x 8192, 1804 here.
SERVED = (
    Served("e8m0_blocks", "block", "byte"),
    Served("columns", "column", "float32"),
    Served("e8m0_columns", "column", "byte"),
    Served("blocks_of_64", "column", "float32", 64),
)
# The fewest rows of a and columns of b of a call that is served. Each of these sizes has 64 tiles of 128 columns for the 66 pairs
# of CTAs of an H100. With e8m0 scales of columns a kernel takes the same time for both sizes. So both are served for all scales,
# though the others were measured at one. Smaller calls are left to the portable kernel: with a quarter of the tiles
# (256 x 7168 x 2048) this kernel takes as long as with all of them, because most multiprocessors are idle.
SIZES = ((512, 4096), (1024, 2048))
# Elements along k: fewer have not been measured.
FEWEST_K = 2048


def config_of(scales: Scales, stored: Stored, block: int, m: int, n: int, count: int) -> Config:
    """Returns the program for some work on so many multiprocessors.

    A tile with twice the columns takes 1.6 to 1.9 times as long. So it is worth it where narrow ones take twice the rounds.
    """
    wide, narrow = (Config(scales, stored, block, halves) for halves in (2, 1))
    rounds = [-(-clusters_of(config, m, n) // (count // PAIR)) for config in (wide, narrow)]
    return wide if 2 * rounds[0] <= rounds[1] else narrow


def clusters_of(config: Config, m: int, n: int) -> int:
    """Returns how many clusters' tiles a result has."""
    return -(-m // (PAIR * ROWS)) * -(-n // config.columns)


def every_config() -> list[Config]:
    """Returns the configurations that calls are served by."""
    return [config for served in SERVED for config in served.configs()]
