"""The configurations that programs of `linear` are compiled for, and the choice of one of them."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed_kernel_nvidia.sm90.common.launch import DTYPES
from tokenspeed_kernel_nvidia.sm90.gemm.linear_layout import LAYOUTS, block_bytes
from tokenspeed_kernel_nvidia.sm90.moe.mxfp4_layout import BLOCK, PANEL_STRIPS

CLUSTER = 8  # CTAs that share k; each finishes 8 rows of a panel of 64
GROUPS = 4  # groups of four warps that multiply, each another panel
MULTIPLIERS = 4 * GROUPS  # warps that multiply
LOAD_WARP = MULTIPLIERS  # the warp that loads weights
FINISH_WARP = MULTIPLIERS + 1  # the first of the warps that add up what CTAs send
FINISHERS = 2
THREADS = 32 * (FINISH_WARP + FINISHERS)
ROWS = 8  # of a panel that a CTA finishes
SLAB = 2  # blocks of a panel in a stage
HEAD_BYTES = 1024  # at the beginning of shared memory: barriers
SHARED_BYTES = 227 * 1024  # shared memory that a CTA may have
STAGES = 8  # of a group at most, so that the lanes of a warp make all barriers at once
# Numbers of tokens that there are programs for. Microseconds on an H100 by this kernel, by the portable `mm` of the canonical
# weights, and by cuBLAS with weights in bfloat16. More than 16 tokens were multiplied by wgmma, 64 a launch, which was no quicker
# than `mm`, so that there are no programs for them any more:
#
#                                1 token           4                 16               64               256
#   8192 x 8192, nvfp4      20.7  20.9  47.1  20.6  22.0  47.7  22.8  33.6  48.0  47.4  36.1  49.0   187   77   55
#   2880 x 5120, nvfp4      10.7  10.4  12.9  10.7  10.7  12.9  11.7  14.7  13.0  26.1  22.5  13.3   101   40   16
#   8192 x 57344, nvfp4      105   122   323   107   122   324   117   160   327   227   234   335   918  467  355
#
# Weights in mxfp4 take the same within 4%.
TOKENS = (8, 16)
MAX_TOKENS = max(TOKENS)
# The most blocks of k of a CTA. The features of 16 tokens take 112 KiB then, and a group has five stages.
ROOM = 56
MAX_K = CLUSTER * ROOM * BLOCK


@dataclass(frozen=True)
class Config:
    """A configuration that a program is compiled for.

    Attributes:
        dtype: the dtype of tokens and results.
        weights: the format of weights, of `LAYOUTS`.
        tokens: the most tokens of a call, of `TOKENS`.
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
        return ROOM * BLOCK * self.tokens * 2

    @property
    def buffer_bytes(self) -> int:
        """The bytes of the sums that all CTAs send for a panel's rows. Each group has a buffer for them."""
        return CLUSTER * ROWS * self.tokens * 4

    @property
    def _before_ring(self) -> int:
        return HEAD_BYTES + self.columns_bytes + GROUPS * self.buffer_bytes

    @property
    def stages(self) -> int:
        """The number of stages that each group has."""
        return min(STAGES, (SHARED_BYTES - self._before_ring) // (GROUPS * self.stage_bytes))

    @property
    def shared_bytes(self) -> int:
        """The bytes of shared memory of a CTA."""
        return self._before_ring + GROUPS * self.stages * self.stage_bytes


def config_of(dtype: str, weights: str, tokens: int) -> Config:
    """Returns the program for a number of tokens, which is at most `MAX_TOKENS`."""
    return Config(dtype, weights, next(most for most in TOKENS if most >= tokens))


def every_config() -> list[Config]:
    """Returns all configurations that there are."""
    return [Config(dtype, weights, tokens) for dtype in DTYPES.values() for weights in LAYOUTS for tokens in TOKENS]
