"""What programs of `mla_extend` are compiled for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tokenspeed_kernel_nvidia.sm90.attention import mla_decode_config, mla_decode_fp8_config
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode_config import HEADS, ROWS

RANKS = 2  # CTAs of a cluster


class Extending:
    """How the programs of `mla_decode` are used for many new tokens.

    With any number of heads two CTAs form a cluster: they have halves of a token's 128 heads, or different tokens. What they share
    is read from L2 once. Alone, a CTA would read 74 KB for the 1.2 us in which 64 rows are multiplied with 64 tokens at full speed:
    132 of them 8 TB/s, more than L2 has.

    Where no sequence has more new tokens than a tile has room for, the other CTA would have none. Then each is alone, and memory
    decides.
    """

    heads: int
    ranks: int

    @property
    def tokens_of_unit(self) -> int:
        """New tokens of a sequence that share what is loaded."""
        return self.ranks * ROWS // self.heads


@dataclass(frozen=True)
class Config(Extending, mla_decode_config.Config):
    """A program for a cache in q's dtype.

    Attributes:
        ranks: CTAs of a cluster; 1 for few new tokens of at most 64 heads.
    """

    ranks: int = RANKS


@dataclass(frozen=True)
class Fp8Config(Extending, mla_decode_fp8_config.Fp8Config):
    """A program for an e4m3 cache. ``ranks``: as of `Config`."""

    ranks: int = RANKS


def ranks_for(heads: int, tokens: int) -> int:
    """Returns how many CTAs form a cluster, for at most so many new tokens of a sequence."""
    return 1 if tokens * heads <= ROWS else RANKS


def _heads_and_ranks() -> Iterator[tuple[int, int]]:
    for heads in HEADS:
        for tokens in (1, ROWS):
            if tokens == ROWS or heads <= ROWS:
                yield heads, ranks_for(heads, tokens)


def every_config() -> list[Config]:
    """All that is served."""
    return [Config("bfloat16", heads, ranks) for heads, ranks in _heads_and_ranks()]


def every_fp8_config() -> list[Fp8Config]:
    """All that is served."""
    return [Fp8Config("bfloat16", heads, narrow, ranks=ranks) for narrow in (False, True) for heads, ranks in _heads_and_ranks()]
