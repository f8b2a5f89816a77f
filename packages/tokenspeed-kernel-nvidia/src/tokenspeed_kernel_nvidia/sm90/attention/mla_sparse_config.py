"""What programs of `mla_sparse` are compiled for."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed_kernel_nvidia.sm90.attention import mla_decode_config
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode_config import HEADS
from tokenspeed_kernel_nvidia.sm90.common.launch import DTYPES

PAGE_SIZES = (1, 16, 32, 64, 128, 256)  # powers of 2, so that a shift tells a slot's page


@dataclass(frozen=True)
class Config(mla_decode_config.Config):
    """A program.

    It is one of `mla_decode`, with a warpgroup that gathers keys where that has a warp that loads blocks. A tile has the heads of
    one token, because no other token has the same keys.
    """

    @property
    def cluster(self) -> int:
        """Every CTA gathers all keys itself: a copy that can gather cannot write to another CTA."""
        return 1

    @property
    def neighbours(self) -> int:
        """CTAs that are launched as a cluster, so that those of a group run on neighbouring multiprocessors at the same time.

        They ask for the same keys at nearly the same time: on an H200, 128 tokens with 128 heads took 127 us, and 130 us without.
        """
        return self.ranks

    @property
    def at_once(self) -> bool:
        """With 16 heads, a prefill of 4096 tokens took 1703 us on an H200, and 1966 us at once; decodes took the same."""
        return False

    @property
    def load_registers(self) -> int:
        """A thread that gathers has the addresses of four rows."""
        return 32

    @property
    def score_registers(self) -> int:
        return 160


def every_config() -> list[Config]:
    """All that is served."""
    return [Config(dtype, heads) for dtype in DTYPES.values() for heads in HEADS]
