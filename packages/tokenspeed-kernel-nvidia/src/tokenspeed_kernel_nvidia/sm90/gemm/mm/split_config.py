"""Configurations of the kernel of `split_device`, and the function that chooses one for a call."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed_kernel_nvidia.cutedsl.launch import DTYPES
from tokenspeed_kernel_nvidia.sm90.gemm.mm.config import QUAD_BYTES, ROWS, TOKENS

CLUSTER = 8  # CTAs per cluster, which split k of 8 rows of weights
WARPS = 16  # warps per CTA
QUADS = (1, 2)  # supported numbers of 64-byte parts of a row of weights per warp
HEAD_BYTES = 16  # bytes of the barrier at the start of shared memory
MOST_ROWS = 256  # maximum number of rows of weights; with more, `kernel_device` is faster, because its CTAs have more work each


@dataclass(frozen=True)
class SplitConfig:
    """Configuration of one kernel variant.

    Attributes:
        dtype: dtype of the activations and the weights.
        out: dtype of the result.
        tokens: the maximum number of rows of activations.
        quads: the number of 64-byte parts of a row of weights per warp.
    """

    dtype: str
    out: str
    tokens: int
    quads: int

    @property
    def threads(self) -> int:
        """The number of threads per CTA."""
        return 32 * WARPS

    @property
    def part_bytes(self) -> int:
        """The maximum number of bytes of a row of weights that a CTA can process."""
        return WARPS * self.quads * QUAD_BYTES

    @property
    def halves(self) -> int:
        """The number of groups of 8 rows of activations."""
        return self.tokens // ROWS


def is_split(m: int, n: int, row_bytes: int) -> bool:
    """Returns whether a call uses the kernel of `split_device`: there are few rows of weights, short enough for a cluster.

    Args:
        m, n: rows of activations and of weights.
        row_bytes: bytes of a row of weights.
    """
    return m <= max(TOKENS) and n <= MOST_ROWS and row_bytes <= CLUSTER * WARPS * max(QUADS) * QUAD_BYTES


def split_of(dtype: str, out: str, m: int, row_bytes: int) -> SplitConfig:
    """Returns the configuration for m rows of activations, and rows of weights of ``row_bytes`` bytes."""
    tokens = next(room for room in TOKENS if room >= m)
    quads = -(-row_bytes // (QUAD_BYTES * CLUSTER * WARPS))
    return SplitConfig(dtype, out, tokens, next(room for room in QUADS if room >= quads))


def split_numbers_of(m: int, n: int) -> tuple[int, int]:
    """Returns the number of CTAs for m rows of activations and n rows of weights, and the bytes of shared memory per CTA: a
    barrier, the warps' partial sums, and the partial sums that other CTAs send.
    """
    return CLUSTER * -(-n // ROWS), HEAD_BYTES + 4 * m * (WARPS * ROWS + CLUSTER)


def every_split_config() -> list[SplitConfig]:
    """Returns all configurations that calls use."""
    return [
        SplitConfig(dtype, out, tokens, quads)
        for dtype in DTYPES.values()
        for out in (dtype, "float32")
        for tokens in TOKENS
        for quads in QUADS
    ]
