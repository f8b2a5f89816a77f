"""Configurations of the programs of `mm_direct_device`, and which one serves a call."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed_kernel_nvidia.sm90.common.launch import DTYPES
from tokenspeed_kernel_nvidia.sm90.gemm.mm_config import QUAD_BYTES, ROWS

WARPS = 16  # they fill a multiprocessor's registers
# Rows of activations at most. With 16 in registers, a product with 4096 x 2880 weights took 9.2 microseconds on an H200, and 8.8
# through the ring.
DIRECT_TOKENS = 8
# How many 64 bytes of a row a warp may have in registers at once.
QUADS = (1, 2, 4, 6, 8)
HEAD_BYTES = 16  # at the beginning of shared memory: a barrier
OWN_ROWS = 64  # rows of weights that a CTA may have: a thread for each at the end


@dataclass(frozen=True)
class DirectConfig:
    """Describes a program.

    Attributes:
        dtype: of the activations and the weights.
        out: dtype of the result.
        quads: the number of 64 bytes of a row that a warp has at once.
        warps: the number of warps, which share each row of weights.
        ahead: the number of rows that a CTA brings to the L2 cache while the kernel before still works.
        pace: the cycles from one KB of those to the next; 0 if all are asked for at once.
        dependent: whether a launch may begin while the kernel before ends.
        woven: whether each load of the next tile is issued as soon as its register has been multiplied. A row of
            4096 x 2880 took 7.3 microseconds, and 7.6 otherwise.
    """

    dtype: str
    out: str
    quads: int
    warps: int = WARPS
    ahead: int = ROWS
    pace: int = 0
    dependent: bool = True
    woven: bool = True

    @property
    def threads(self) -> int:
        """Returns the number of threads that compute."""
        return 32 * self.warps

    @property
    def others(self) -> int:
        """Returns the number of threads that bring weights to the L2 cache."""
        return 32 if self.pace else 0

    @property
    def chunk_bytes(self) -> int:
        """Returns how much of a row all warps have at once."""
        return self.warps * self.quads * QUAD_BYTES


def direct_of(dtype: str, out: str, row_bytes: int) -> DirectConfig:
    """Returns the program for rows of weights of so many bytes.

    A long row is divided into chunks of similar size.
    """
    quads = -(-row_bytes // QUAD_BYTES)
    chunks = -(-quads // (WARPS * max(QUADS)))
    share = -(-quads // (WARPS * chunks))
    return DirectConfig(dtype, out, next(room for room in QUADS if room >= share))


def shared_bytes_of(config: DirectConfig, m: int, rows: int) -> int:
    """Returns the size of a CTA's shared memory: a barrier, and each warp's sums."""
    return HEAD_BYTES + 4 * config.warps * m * (-(-rows // ROWS) * ROWS)


def every_direct_config() -> list[DirectConfig]:
    """Returns the configurations that calls are served by."""
    return [DirectConfig(dtype, out, quads) for dtype in DTYPES.values() for out in (dtype, "float32") for quads in QUADS]
