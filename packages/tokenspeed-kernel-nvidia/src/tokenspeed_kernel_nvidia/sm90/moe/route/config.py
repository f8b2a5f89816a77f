"""Configurations for which the kernel of `moe.route` is compiled, and the function that chooses one for a call."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed_kernel_nvidia.sm90.gemm.split_k import config as split_k

TOKENS = (16, 32)  # numbers of tokens of a cluster for which kernels are compiled
ROOMS = tuple(room for room in split_k.ROOMS if room <= 8)  # the ring then holds the router weights of all blocks of a CTA
TILES = 2  # maximum number of tiles of 64 experts: one for each warpgroup
MAX_EXPERTS = TILES * split_k.TILE
MAX_TOP_K = 32  # lanes of a warp, which hold a token's selected experts
MAX_HIDDEN = max(ROOMS) * split_k.CLUSTER * split_k.BLOCK
MAX_TOKENS = 256  # of a call: 8 clusters of 32 tokens


@dataclass(frozen=True)
class RouteConfig(split_k.Config):
    """Configuration of one kernel variant. ``tokens`` is the maximum number of tokens of a cluster."""

    @property
    def stages(self) -> int:
        """The number of stages of the ring of weights: one for each block of each tile, so that no stage is reused."""
        return TILES * self.room

    @property
    def own(self) -> int:
        """The number of tokens that one CTA of the cluster routes."""
        return self.tokens // split_k.CLUSTER


def config_of(dtype: str, tokens: int, hidden: int, clusters: int) -> RouteConfig:
    """Returns the configuration for a call.

    Args:
        clusters: the number of clusters that run at once.
    """
    found = [each for each in TOKENS if tokens <= each * clusters]
    return RouteConfig(dtype, found[0] if found else max(TOKENS), split_k.room_of(hidden))


def every_config() -> list[RouteConfig]:
    """Returns all configurations that calls use."""
    return [RouteConfig("bfloat16", tokens, room) for tokens in TOKENS for room in ROOMS]
