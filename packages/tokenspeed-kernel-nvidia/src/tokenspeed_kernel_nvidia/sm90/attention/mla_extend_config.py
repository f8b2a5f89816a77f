"""What programs of `mla_extend` are compiled for."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed_kernel_nvidia.sm90.attention import mla_decode_config, mla_decode_fp8_config
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode_config import HEADS, ROWS
from tokenspeed_kernel_nvidia.sm90.common.launch import DTYPES

RANKS = 2  # CTAs of a cluster


class Extending:
    """How the programs of `mla_decode` are used for many new tokens.

    With any number of heads two CTAs form a cluster: they have halves of a token's 128 heads, or different tokens. What they share
    is read from L2 once. To read 64 rows of the cache and to multiply them take a multiprocessor 1.2 us at full speed, 62 bytes a
    nanosecond each and 8 TB/s together, more than L2 has; a cluster needs half of that.
    """

    heads: int

    @property
    def ranks(self) -> int:
        return RANKS

    @property
    def tokens_of_unit(self) -> int:
        """New tokens of a sequence that share what is loaded."""
        return RANKS * ROWS // self.heads


@dataclass(frozen=True)
class Config(Extending, mla_decode_config.Config):
    """A program for a cache in q's dtype."""


@dataclass(frozen=True)
class Fp8Config(Extending, mla_decode_fp8_config.Fp8Config):
    """A program for an e4m3 cache."""


def every_config() -> list[Config]:
    """All that is served."""
    return [Config(dtype, heads) for dtype in DTYPES.values() for heads in HEADS]


def every_fp8_config() -> list[Fp8Config]:
    """All that is served."""
    return [Fp8Config("bfloat16", heads, fp8_queries) for fp8_queries in (False, True) for heads in HEADS]
