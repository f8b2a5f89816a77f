"""The configurations for which the kernels of `linear` are compiled, and the function that chooses one for a call.

A *panel* is 64 rows of weights, a *strip* 16 of these rows, and a *k block* 64 elements of k. A *group* is four MMA warps, which
compute a panel, one strip each. A *slab* is some k blocks of a panel: the contents of one ring stage.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed_kernel_nvidia.cutedsl.launch import DTYPES
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.layout import BLOCK, PANEL_STRIPS
from tokenspeed_kernel_nvidia.sm90.gemm.linear.layout import LAYOUTS, block_bytes

CLUSTER = 8  # CTAs per cluster, among which k is split; each CTA writes the results of 8 rows of a panel of 64
GROUPS = 4  # number of groups of four MMA warps; each group computes its own panels
MMA_WARPS = 4 * GROUPS  # number of MMA warps
LOAD_WARP = MMA_WARPS  # index of the producer warp
FINISH_WARP = MMA_WARPS + 1  # index of the first of the warps that reduce the CTAs' partial sums
FINISHERS = 2  # number of warps that reduce the CTAs' partial sums
THREADS = 32 * (FINISH_WARP + FINISHERS)
ROWS = 8  # number of a panel's rows whose results one CTA writes
SLAB = 2  # k blocks of a panel per ring stage
HEAD_BYTES = 1024  # bytes of the mbarriers at the start of shared memory
SHARED_BYTES = 227 * 1024  # maximum shared memory per CTA
STAGES = 8  # maximum number of ring stages of a group; four groups then have 32, whose barriers one warp initialises, one per lane
# Token counts for which kernels are compiled. Microseconds on an H100, in this order: this kernel; the portable `mm` of the
# canonical weights; cuBLAS with bfloat16 weights. For 64 and 256 tokens, this kernel used wgmma with 64 tokens per launch. That
# variant was no faster than `mm`, so kernels are no longer compiled for more than 16 tokens:
#
#                                1 token           4                 16               64               256
#   8192 x 8192, nvfp4      20.7  20.9  47.1  20.6  22.0  47.7  22.8  33.6  48.0  47.4  36.1  49.0   187   77   55
#   2880 x 5120, nvfp4      10.7  10.4  12.9  10.7  10.7  12.9  11.7  14.7  13.0  26.1  22.5  13.3   101   40   16
#   8192 x 57344, nvfp4      105   122   323   107   122   324   117   160   327   227   234   335   918  467  355
#
# mxfp4 weights take the same time within 4%.
TOKENS = (8, 16)
MAX_TOKENS = max(TOKENS)
# The maximum number of k blocks of a CTA. With 16 tokens, the CTA's features take 112 KiB of shared memory, and a group has five
# ring stages.
ROOM = 56
MAX_K = CLUSTER * ROOM * BLOCK


@dataclass(frozen=True)
class Config:
    """Configuration of one kernel variant.

    Attributes:
        dtype: dtype of tokens and results.
        weights: the format of the weights, a key of `LAYOUTS`.
        tokens: the maximum number of tokens of a call, from `TOKENS`.
    """

    dtype: str
    weights: str
    tokens: int

    @property
    def panel_block_bytes(self) -> int:
        """Bytes of one k block (64 elements) of a panel (64 rows) of weights."""
        return PANEL_STRIPS * block_bytes(self.weights)

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage of the ring of weights."""
        return SLAB * self.panel_block_bytes

    @property
    def columns_bytes(self) -> int:
        """Bytes of shared memory for the CTA's slice of the tokens' features."""
        return ROOM * BLOCK * self.tokens * 2

    @property
    def buffer_bytes(self) -> int:
        """Bytes of a buffer of partial sums: those of all CTAs of the cluster, for the 8 rows of a panel whose results one CTA
        writes. Each group of MMA warps has one such buffer."""
        return CLUSTER * ROWS * self.tokens * 4

    @property
    def _before_ring(self) -> int:
        return HEAD_BYTES + self.columns_bytes + GROUPS * self.buffer_bytes

    @property
    def stages(self) -> int:
        """The number of ring stages of each group of MMA warps."""
        return min(STAGES, (SHARED_BYTES - self._before_ring) // (GROUPS * self.stage_bytes))

    @property
    def shared_bytes(self) -> int:
        """Bytes of dynamic shared memory per CTA."""
        return self._before_ring + GROUPS * self.stages * self.stage_bytes


def config_of(dtype: str, weights: str, tokens: int) -> Config:
    """Returns the configuration for a call with ``tokens`` tokens, at most `MAX_TOKENS`."""
    return Config(dtype, weights, next(most for most in TOKENS if most >= tokens))


def every_config() -> list[Config]:
    """Returns all supported configurations."""
    return [Config(dtype, weights, tokens) for dtype in DTYPES.values() for weights in LAYOUTS for tokens in TOKENS]
