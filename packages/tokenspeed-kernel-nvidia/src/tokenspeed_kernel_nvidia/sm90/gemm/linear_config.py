"""The configurations that programs of `linear` are compiled for, and the choice of one of them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from tokenspeed_kernel_nvidia.sm90.common.launch import DTYPES
from tokenspeed_kernel_nvidia.sm90.gemm.linear_layout import LAYOUTS, block_bytes
from tokenspeed_kernel_nvidia.sm90.moe.mxfp4_layout import BLOCK, PANEL_STRIPS, blocks_of

CLUSTER = 8  # CTAs that share k; each finishes 8 rows of a panel of 64
GROUPS = 4  # warpgroups that multiply, each another panel
MULTIPLIERS = 4 * GROUPS  # warps that multiply
LOAD_WARP = MULTIPLIERS  # the warp that loads weights
FINISH_WARP = MULTIPLIERS + 1  # the first of the warps that add up what CTAs send
FINISHERS = 2
THREADS = 32 * (FINISH_WARP + FINISHERS)
ROWS = 8  # of a panel that a CTA finishes
SLAB = 2  # blocks of a panel in a stage
HEAD_BYTES = 1024  # at the beginning of shared memory: barriers
SHARED_BYTES = 227 * 1024  # shared memory that a CTA may have
STAGES = 8  # of a warpgroup at most, so that the lanes of a warp make all barriers at once
WIDTH = 32  # the most tokens whose sums are sent together
# For each number of tokens, the most blocks of k of a CTA.
_ROOM = {8: 64, 16: 56, 32: 28, 64: 16}
MAX_TOKENS = max(_ROOM)  # of a launch
# So many tokens are multiplied by wgmma. It takes 32 cycles to read its left operand, as long as 64 columns take. mma takes as long
# as its columns do, but half as many cycles again for each. A warp reads columns from shared memory for each strip, which takes as
# long for 32 tokens as wgmma's products.
BY_WARPGROUPS = 32


@dataclass(frozen=True)
class Config:
    """A configuration that a program is compiled for.

    Attributes:
        dtype: the dtype of tokens and results.
        weights: the format of weights, of `LAYOUTS`.
        tokens: the most tokens of a launch.
    """

    dtype: str
    weights: str
    tokens: int

    @property
    def panel_block_bytes(self) -> int:
        """The bytes of a panel's block of k."""
        return PANEL_STRIPS * block_bytes(self.weights)

    @property
    def stage_bytes(self) -> int:
        """The bytes of a stage of the ring."""
        return SLAB * self.panel_block_bytes

    @property
    def columns_bytes(self) -> int:
        """The bytes of shared memory that tokens take."""
        return _ROOM[self.tokens] * BLOCK * self.tokens * 2

    @property
    def width(self) -> int:
        """The number of tokens whose sums are sent together."""
        return min(self.tokens, WIDTH)

    @property
    def buffer_bytes(self) -> int:
        """The bytes of the sums of so many tokens that all CTAs send for a panel's rows. Each warpgroup has a buffer for them."""
        return CLUSTER * ROWS * self.width * 4

    @property
    def _before_ring(self) -> int:
        return HEAD_BYTES + self.columns_bytes + GROUPS * self.buffer_bytes

    @property
    def stages(self) -> int:
        """The number of stages that each warpgroup has."""
        return min(STAGES, (SHARED_BYTES - self._before_ring) // (GROUPS * self.stage_bytes))

    @property
    def shared_bytes(self) -> int:
        """The bytes of shared memory of a CTA."""
        return self._before_ring + GROUPS * self.stages * self.stage_bytes


def config_of(dtype: str, weights: str, tokens: int) -> Config:
    """Returns the program for a number of tokens, or for most of them."""
    return Config(dtype, weights, next((room for room in _ROOM if room >= tokens), max(_ROOM)))


def blocks_of_launches(config: Config, k: int) -> list[tuple[int, int]]:
    """Returns the first block of k of each launch, and how many it has: as many as there is room for tokens' features."""
    blocks = blocks_of(k)
    launches = -(-blocks // (CLUSTER * _ROOM[config.tokens]))
    firsts = [launch * blocks // launches for launch in range(launches + 1)]
    return [(first, end - first) for first, end in itertools.pairwise(firsts)]


def every_config() -> list[Config]:
    """Returns all configurations that there are."""
    return [Config(dtype, weights, tokens) for dtype in DTYPES.values() for weights in LAYOUTS for tokens in _ROOM]
