"""Configurations of the programs of `mm_fp8`, and the tiles of a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BLOCK = 128  # elements along k in a stage
ROWS = 128  # of a CTA's tile, 64 for each of two warpgroups
PAIR = 2  # CTAs of a cluster: neighbouring rows, the same columns
HALF = 128  # columns of an instruction's result
RING_BYTES = 192 * 1024

# What scales belong to: whole rows and columns; 128 of a row and 128 x 128 weights; or parts of rows, of both operands, and fewer
# weights.
Scales = Literal["row", "block", "column"]
# How they are stored: as float32, or an exponent (e8m0) a byte.
Stored = Literal["float32", "byte"]


@dataclass(frozen=True)
class Config:
    """Describes a program.

    Attributes:
        scales: what they belong to.
        stored: how they are stored.
        out: dtype of the result.
        block: elements along k that a scale is for, 128, 64 or 32; where it is for all of them 128, too.
        halves: instructions beside each other in a tile, of 128 columns each.
        group: rows of clusters' tiles that are done together, so that the L2 cache has what they share.
        depth: stages whose products are summed by the matrix unit alone.
        turns: whether warpgroups hand their products to the matrix unit by turns.
    """

    scales: Scales
    stored: Stored
    out: str
    block: int = 128
    halves: int = 2
    group: int = 8
    depth: int = 1
    turns: bool = False

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
    def out_bytes(self) -> int:
        return 4 if self.out == "float32" else 2

    @property
    def panel(self) -> int:
        """Returns the columns of a result that are stored at once: 128 bytes."""
        return 128 // self.out_bytes

    @property
    def threads(self) -> int:
        return 3 * 128


@dataclass(frozen=True)
class Served:
    """Calls that are served, and the programs for them.

    Attributes:
        name: of the calls, in names of kernels.
        scales, stored, block: as in `Config`.
        outs: dtypes of results.
        halves: of a tile. The first are taken if all multiprocessors have such a tile to do, else the last.
        fewest_rows: rows of a from which on they are served. Fewer than 17 are for `mm`.
        quick: whether it was measured that the kernel is quicker than others.
    """

    name: str
    scales: Scales
    stored: Stored
    block: int = 128
    outs: tuple[str, ...] = ("bfloat16",)
    halves: tuple[int, ...] = (2, 1)
    fewest_rows: int = 17
    quick: bool = False

    def configs(self) -> list[Config]:
        return [Config(self.scales, self.stored, out, self.block, halves) for out in self.outs for halves in self.halves]


# A program that loses to other kernels wherever it is taken has no place here; a line without one neither. These have not been
# measured. One H100, float32 scales, 8192 x 8192 x 8192: of rows 874 us, PyTorch's product (which calls cuBLAS) 822; with the
# products of two stages summed by the matrix unit 838, but then sums of positive products are 0.2% too small, and else 0.06%; of
# blocks 1022 us, PyTorch's 882. 4096 x 2048 x 7168, of rows: 107 us, PyTorch's 112, Triton's 108. So PyTorch's serves those.
SERVED = (
    Served("e8m0_blocks", "block", "byte"),
    Served("columns", "column", "float32"),
    Served("e8m0_columns", "column", "byte"),
    Served("blocks_of_64", "column", "float32", 64, halves=(2,)),
    Served("mxfp8", "column", "byte", 32),
)
_SERVED = {(served.scales, served.stored, served.block): served for served in SERVED}


def config_of(scales: Scales, stored: Stored, block: int, out: str, m: int, n: int, count: int) -> Config:
    """Returns the program for some work on so many multiprocessors: that with wide tiles, if all of these have something to do."""
    served = _SERVED.get((scales, stored, block))
    first, *_, last = (2, 1) if served is None else served.halves * 2
    wide = Config(scales, stored, out, block, first)
    return wide if clusters_of(wide, m, n) >= count // PAIR else Config(scales, stored, out, block, last)


def clusters_of(config: Config, m: int, n: int) -> int:
    """Returns how many clusters' tiles a result has."""
    return -(-m // (PAIR * ROWS)) * -(-n // config.columns)


def every_config() -> list[Config]:
    """Returns the configurations that calls are served by."""
    return [config for served in SERVED for config in served.configs()]


def usual_configs() -> list[Config]:
    """Returns those of calls that need not ask for a kernel by name."""
    return [config for served in SERVED if served.quick for config in served.configs()]
