"""The configurations of the MLA extend kernel: those of `mla_decode`, used for many new tokens.

Two CTAs form a cluster. The two CTAs compute the two halves of a token's 128 heads; with fewer heads, they compute different
tokens. Multicast reads each block of the cache from L2 once for both CTAs. Without clusters, every CTA would read each block
itself. A block is 64 cached tokens, 74 KB. At full MMA rate, a tile of 64 query rows takes 1.2 us per block. With 132 CTAs, these
reads would be 8 TB/s, more than the bandwidth of L2.

If the new tokens of each sequence fit in one tile, a second CTA would have no tokens. Then a cluster has one CTA, and the kernel is
memory-bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tokenspeed_kernel_nvidia.sm90.attention.mla_decode import config as mla_decode_config
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode import fp8_config as mla_decode_fp8_config
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.config import HEADS, ROWS

RANKS = 2  # CTAs per cluster


@dataclass(frozen=True)
class Config(mla_decode_config.Config):
    """Configuration of one kernel variant for a cache in q's dtype.

    Attributes:
        ranks: CTAs per cluster; 1 if a tile of 64 rows holds all heads of a sequence's new tokens.
    """

    ranks: int = RANKS


@dataclass(frozen=True)
class Fp8Config(mla_decode_fp8_config.Fp8Config):
    """Configuration of one kernel variant for an e4m3 cache. ``ranks``: CTAs per cluster, see `Config`."""

    ranks: int = RANKS


def ranks_for(heads: int, tokens: int) -> int:
    """Returns the number of CTAs per cluster. ``tokens``: an upper bound of a sequence's new tokens."""
    return 1 if tokens * heads <= ROWS else RANKS


def _heads_and_ranks() -> Iterator[tuple[int, int]]:
    for heads in HEADS:
        for tokens in (1, ROWS):
            if tokens == ROWS or heads <= ROWS:
                yield heads, ranks_for(heads, tokens)


def every_config() -> list[Config]:
    """Returns all supported configurations for a cache in q's dtype."""
    return [Config("bfloat16", heads, ranks) for heads, ranks in _heads_and_ranks()]


def every_fp8_config() -> list[Fp8Config]:
    """Returns all supported configurations for an e4m3 cache."""
    return [Fp8Config("bfloat16", heads, narrow, ranks=ranks) for narrow in (False, True) for heads, ranks in _heads_and_ranks()]
