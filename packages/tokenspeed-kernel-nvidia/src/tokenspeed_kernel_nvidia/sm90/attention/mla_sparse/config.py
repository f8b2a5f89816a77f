"""The configurations of the sparse MLA kernel: those of `mla_decode`, with gathered keys."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed_kernel_nvidia.cutedsl.launch import DTYPES
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode import config as mla_decode_config
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.config import HEADS

PAGE_SIZES = (1, 16, 32, 64, 128, 256)  # powers of 2, so that a shift of a slot's index gives the slot's page


@dataclass(frozen=True)
class Config(mla_decode_config.Config):
    """Configuration of one kernel variant.

    The kernel differs from `mla_decode` in its producer: a warpgroup gathers keys, instead of a TMA producer warp. A tile has the
    heads of a single token, because each token has its own keys.
    """

    @property
    def cluster(self) -> int:
        """Always 1, that is, no multicast: every CTA gathers all its keys itself, because cp.async cannot multicast."""
        return 1

    @property
    def neighbours(self) -> int:
        """The number of CTAs that are launched as a cluster, so that the CTAs of a CTA group run concurrently on neighbouring SMs.

        These CTAs load the same keys at nearly the same time. On an H200, 128 tokens with 128 heads took 127 us, and 130 us without
        such clusters.
        """
        return self.ranks

    @property
    def at_once(self) -> bool:
        """False: a block's probabilities are signalled after the next block's q @ k has been issued.

        With 16 heads, a prefill of 4096 tokens took 1703 us on an H200, and 1966 us with True. Decode times were equal.
        """
        return False

    @property
    def load_registers(self) -> int:
        """Registers of a thread that gathers keys; it holds the addresses of four rows of the cache."""
        return 32

    @property
    def score_registers(self) -> int:
        return 160


def every_config() -> list[Config]:
    """Returns all supported configurations."""
    return [Config(dtype, heads) for dtype in DTYPES.values() for heads in HEADS]
