"""Configurations for which the kernel of `moe.route` is compiled, and the function that chooses one for a call."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed_kernel_nvidia.sm90.gemm.split_k import config as split_k

TOKENS = (16, 32)  # maximum numbers of tokens of a cluster for which kernels are compiled
ROOMS = (6, 8)  # maximum numbers of k blocks of a CTA for which kernels are compiled; 6 for a hidden size of 2880
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
        """The number of tokens whose experts one CTA of the cluster selects."""
        return self.tokens // split_k.CLUSTER


def config_of(dtype: str, tokens: int, hidden: int, clusters: int) -> RouteConfig:
    """Returns the configuration for a call: the smallest number of tokens per cluster with which all clusters run at once, if there
    is one.

    Args:
        hidden: elements of a token, at most `MAX_HIDDEN`.
        clusters: the number of clusters that run at once.
    """
    found = [each for each in TOKENS if tokens <= each * clusters]
    blocks = -(-hidden // split_k.BLOCK)
    room = min(room for room in ROOMS if room * split_k.CLUSTER >= blocks)
    return RouteConfig(dtype, found[0] if found else max(TOKENS), room)


def every_config() -> list[RouteConfig]:
    """Returns all configurations that calls use."""
    return [RouteConfig("bfloat16", tokens, room) for tokens in TOKENS for room in ROOMS]
