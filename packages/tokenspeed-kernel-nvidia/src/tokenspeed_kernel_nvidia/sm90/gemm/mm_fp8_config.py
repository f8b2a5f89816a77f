"""Configurations of the programs of `mm_fp8`, and the tiles of a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tokenspeed_kernel_nvidia.sm90.common.launch import DTYPES

BLOCK = 128  # elements along k in a stage, and those whose products are summed by the matrix unit alone; a scale's where there are
ROWS = 128  # of a CTA's tile, 64 for each of two warpgroups
PAIR = 2  # CTAs of a cluster: neighbouring rows, the same columns
HALF = 128  # columns of an instruction's result
RING_BYTES = 192 * 1024

# What scales there are: of whole rows and columns, or of 128 of a row and of 128 x 128 weights.
Scales = Literal["row", "block"]
# How those of blocks are stored: as float32, an exponent (e8m0) a byte, or four exponents along k in a word.
Stored = Literal["float32", "e8m0", "packed"]


@dataclass(frozen=True)
class Config:
    """Describes a program.

    Attributes:
        scales: what they belong to.
        stored: how they are stored; of whole rows and columns they are float32.
        out: dtype of the result.
        halves: instructions beside each other in a tile, of 128 columns each.
        group: rows of clusters' tiles that are done together, so that the L2 cache has what they share.
    """

    scales: Scales
    stored: Stored
    out: str
    halves: int = 2
    group: int = 8

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


def config_of(scales: Scales, stored: Stored, out: str, m: int, n: int, count: int) -> Config:
    """Returns the program for some work on so many multiprocessors: that with wide tiles, if all of these have something to do."""
    wide = Config(scales, stored, out)
    return wide if clusters_of(wide, m, n) >= count // PAIR else Config(scales, stored, out, halves=1)


def clusters_of(config: Config, m: int, n: int) -> int:
    """Returns how many clusters' tiles a result has."""
    return -(-m // (PAIR * ROWS)) * -(-n // config.columns)


OUTS = (*DTYPES.values(), "float32")
KINDS_OF_SCALES: tuple[tuple[Scales, Stored], ...] = (
    ("row", "float32"),
    ("block", "float32"),
    ("block", "e8m0"),
    ("block", "packed"),
)


def every_config() -> list[Config]:
    """Returns the configurations that calls are served by."""
    return [Config(*kind, out, halves) for kind in KINDS_OF_SCALES for out in OUTS for halves in (2, 1)]
