"""The configurations that the kernels of `linear` are compiled for, and the choice among them."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed_kernel_nvidia.cutedsl.launch import DTYPES
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.layout import BLOCK, PANEL_STRIPS
from tokenspeed_kernel_nvidia.sm90.gemm.linear.layout import LAYOUTS, block_bytes

CLUSTER = 8  # number of CTAs that split k; each finishes 8 rows of a panel of 64
GROUPS = 4  # number of groups of four MMA warps; each group has its own panels
MMA_WARPS = 4 * GROUPS  # MMA warps
LOAD_WARP = MMA_WARPS  # the producer warp
FINISH_WARP = MMA_WARPS + 1  # the first of the warps that reduce the CTAs' partial sums
FINISHERS = 2
THREADS = 32 * (FINISH_WARP + FINISHERS)
ROWS = 8  # number of a panel's rows that one CTA finishes
SLAB = 2  # k blocks of a panel in a stage
HEAD_BYTES = 1024  # the mbarriers at the start of shared memory
SHARED_BYTES = 227 * 1024  # maximum shared memory of a CTA
STAGES = 8  # the most stages of a group, so that one warp initialises all barriers at once, one per lane
# Token counts that kernels are compiled for. Microseconds on an H100, in this order: this kernel; the portable `mm` of the
# canonical weights; cuBLAS with bfloat16 weights. For 64 and 256 tokens, this kernel used wgmma with 64 tokens per launch. It was
# no faster than `mm`, so it is not compiled for more than 16 tokens any more:
#
#                                1 token           4                 16               64               256
#   8192 x 8192, nvfp4      20.7  20.9  47.1  20.6  22.0  47.7  22.8  33.6  48.0  47.4  36.1  49.0   187   77   55
#   2880 x 5120, nvfp4      10.7  10.4  12.9  10.7  10.7  12.9  11.7  14.7  13.0  26.1  22.5  13.3   101   40   16
#   8192 x 57344, nvfp4      105   122   323   107   122   324   117   160   327   227   234   335   918  467  355
#
# mxfp4 weights take the same time within 4%.
TOKENS = (8, 16)
MAX_TOKENS = max(TOKENS)
# The most k blocks of a CTA. The features of 16 tokens then take 112 KiB, and a group has five stages.
ROOM = 56
MAX_K = CLUSTER * ROOM * BLOCK


@dataclass(frozen=True)
class Config:
    """A configuration that a kernel is compiled for.

    Attributes:
        dtype: dtype of tokens and results.
        weights: the weights' format, a key of `LAYOUTS`.
        tokens: the most tokens of a call, from `TOKENS`.
    """

    dtype: str
    weights: str
    tokens: int

    @property
    def panel_block_bytes(self) -> int:
        """Bytes of a k block of a panel."""
        return PANEL_STRIPS * block_bytes(self.weights)

    @property
    def stage_bytes(self) -> int:
        """Bytes of a ring buffer stage."""
        return SLAB * self.panel_block_bytes

    @property
    def columns_bytes(self) -> int:
        """Bytes of shared memory for the tokens."""
        return ROOM * BLOCK * self.tokens * 2

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all CTAs' partial sums for those rows of a panel that one CTA finishes. Each group has one such buffer."""
        return CLUSTER * ROWS * self.tokens * 4

    @property
    def _before_ring(self) -> int:
        return HEAD_BYTES + self.columns_bytes + GROUPS * self.buffer_bytes

    @property
    def stages(self) -> int:
        """Stages of each group."""
        return min(STAGES, (SHARED_BYTES - self._before_ring) // (GROUPS * self.stage_bytes))

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a CTA."""
        return self._before_ring + GROUPS * self.stages * self.stage_bytes


def config_of(dtype: str, weights: str, tokens: int) -> Config:
    """Returns the configuration for a number of tokens, at most `MAX_TOKENS`."""
    return Config(dtype, weights, next(most for most in TOKENS if most >= tokens))


def every_config() -> list[Config]:
    """Returns all configurations."""
    return [Config(dtype, weights, tokens) for dtype in DTYPES.values() for weights in LAYOUTS for tokens in TOKENS]
