"""Configurations of the `mm_fp8` kernels, and the function that chooses one for a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BLOCK = 128  # elements along k per ring stage
ROWS = 128  # rows of a CTA's tile: each of two MMA warpgroups computes 64
PAIR = 2  # CTAs per cluster, whose tiles have neighbouring rows and the same columns
HALF = 128  # n of a wgmma
RING_BYTES = 192 * 1024  # bytes of the ring of operands
OUT_BYTES = 2  # bytes of an element of the result, which is bfloat16
PANEL = 128 // OUT_BYTES  # columns of the result that one TMA store writes
GROUP = 8  # rows of cluster tiles in a band, see `Raster`; tiles of a band that run at the same time share operands in L2
# The elements that share a scale. "block": 128 elements of a row of activations, and 128 x 128 weights. "column": 128 or 64
# elements along k of a row of activations, and of one column of weights or of several columns.
Scales = Literal["block", "column"]
# The storage format of scales: float32, or an e8m0 byte.
Stored = Literal["float32", "byte"]


@dataclass(frozen=True)
class Config:
    """Configuration of one kernel variant.

    Attributes:
        scales: granularity of the scales.
        stored: storage format of the scales.
        block: number of elements along k that share a scale, 128 or 64.
        halves: number of wgmmas side by side in a tile, each of 128 columns.
    """

    scales: Scales
    stored: Stored
    block: int = 128
    halves: int = 2

    @property
    def parts(self) -> int:
        """The number of scale blocks along k per ring stage."""
        return BLOCK // self.block

    @property
    def panels(self) -> int:
        """The number of output buffers per warp in shared memory. Scales of columns leave memory for only one buffer."""
        return 1 if self.scales == "column" else 2

    @property
    def producer_registers(self) -> int:
        """The number of registers of a producer thread. The warps that load scales of columns need more."""
        return 40 if self.scales == "column" else 24

    @property
    def columns(self) -> int:
        """The number of columns of a tile of the result."""
        return self.halves * HALF

    @property
    def a_bytes(self) -> int:
        """Bytes of the activations in a ring stage of a CTA."""
        return ROWS * BLOCK

    @property
    def b_bytes(self) -> int:
        """Bytes of the weights in a ring stage of a CTA, half of which each CTA of the cluster loads."""
        return self.columns * BLOCK

    @property
    def stages(self) -> int:
        """The number of stages of the ring of operands."""
        return RING_BYTES // (self.a_bytes + self.b_bytes)

    @property
    def threads(self) -> int:
        """The number of threads of a CTA: one producer warpgroup and two MMA warpgroups."""
        return 3 * 128


@dataclass(frozen=True)
class Supported:
    """A kind of scales for which calls are supported.

    Attributes:
        name: the name of this kind of scales in the kernels' names.
        scales, stored, block: granularity and storage format of the scales, and elements along k per scale, as in `Config`.
    """

    name: str
    scales: Scales
    stored: Stored
    block: int = 128

    def configs(self) -> list[Config]:
        """Returns the configurations for this kind of scales, with wide and narrow tiles."""
        return [Config(self.scales, self.stored, self.block, halves) for halves in (2, 1)]


# The calls for which this kernel is faster than the portable kernel. Microseconds on one H100, in this order: tiles of 128 columns,
# tiles of 256 columns, the portable kernel.
#
# | m x k x n          | e8m0 blocks         | columns             | e8m0 columns        | blocks of 64        |
# |--------------------|---------------------|---------------------|---------------------|---------------------|
# | 256 x 7168 x 2048  |                     |                     | 35.7  64.3   25.2   |                     |
# | 512 x 7168 x 4096  |                     | 38.3  65.7   42.6   | 37.0  65.0   43.6   |                     |
# | 1024 x 7168 x 2048 | 30.2  49.1   37.3   |                     | 37.1  65.1   43.1   | 52.1  92.2   61.7   |
# | 4096 x 2048 x 7168 |                     | 167.9 156.7  192.4  | 149.8 142.5  182.8  |                     |
# | 4096 x 7168 x 4096 | 239.3 215.2  311.0  |                     | 288.0 276.1  344.7  | 399.3 371.5  514.9  |
#
# Three kinds of scales are left to faster kernels. PyTorch's GEMM supports one scale per row. 8192 x 8192 x 8192 took 794 us; this
# kernel took 837 us. 2048 x 8192 x 57344 took 1467 us; this kernel took 1546 us. PyTorch's GEMM also supports float32 scales of 128
# x 128 weights. 4096 x 2048 x 7168 took 107.3 us; this kernel took 109.0 us. The portable kernel supports mxfp8. 4096 x 8192 x 8192
# took 770 us; this kernel took 1804 us.
SUPPORTED = (
    Supported("e8m0_blocks", "block", "byte"),
    Supported("columns", "column", "float32"),
    Supported("e8m0_columns", "column", "byte"),
    Supported("blocks_of_64", "column", "float32", 64),
)
# Entries (smallest m, smallest n) of eligible calls. Each entry gives 64 cluster tiles of 128 columns; an H100 runs 66 clusters at
# once. With e8m0 scales of columns, the kernel takes the same time for both entries. So both entries are used for all kinds of
# scales, although the other kinds were measured for one entry only. Smaller calls are left to the portable kernel. With a quarter
# of the tiles (256 x 7168 x 2048), this kernel takes as long as with all 64 tiles, because most SMs are idle.
SIZES = ((512, 4096), (1024, 2048))
# The smallest k of eligible calls; a smaller k has not been measured.
FEWEST_K = 2048


def config_of(scales: Scales, stored: Stored, block: int, m: int, n: int, count: int) -> Config:
    """Returns the configuration for a call on ``count`` SMs.

    A tile of 256 columns takes 1.6 to 1.9 times as long as a tile of 128. So wide tiles pay off only if narrow tiles need at least
    twice as many waves.
    """
    wide, narrow = (Config(scales, stored, block, halves) for halves in (2, 1))
    rounds = [-(-clusters_of(config, m, n) // (count // PAIR)) for config in (wide, narrow)]
    return wide if 2 * rounds[0] <= rounds[1] else narrow


def clusters_of(config: Config, m: int, n: int) -> int:
    """Returns the number of tiles of an m x n result, where a cluster of two CTAs computes one tile."""
    return -(-m // (PAIR * ROWS)) * -(-n // config.columns)


def every_config() -> list[Config]:
    """Returns all configurations that calls use."""
    return [config for kind in SUPPORTED for config in kind.configs()]
