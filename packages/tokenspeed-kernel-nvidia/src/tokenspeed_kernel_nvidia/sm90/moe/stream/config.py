"""The configurations for which the kernel of `stream` is compiled, and the functions that choose among them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from tokenspeed_kernel_nvidia.cutedsl.launch import DTYPES
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.layout import BLOCK, PANEL_BLOCK_BYTES, PANEL_HEAD_BYTES, PANEL_STRIPS, blocks_of

GROUPS = 3  # MMA warpgroups
MMA_WARPS = 4 * GROUPS  # MMA warps
LOAD_WARP = MMA_WARPS  # the producer warp
FINISH_WARP = MMA_WARPS + 1  # the first of the warps that reduce the warpgroups' partial sums
FINISHERS = 2  # number of warps that reduce the warpgroups' partial sums
THREADS = 32 * (FINISH_WARP + FINISHERS)
# Number of fp8 parts into which an element of a row is split. Each part has four of its significant bits; bfloat16 has 8, float16
# 11. Elements of fp8 activations are one fp8 value each.
PARTS = {"bfloat16": 2, "float16": 3}
MAX_PAIRS = 1024  # maximum number of (token, slot) pairs of a launch
MAX_EXPERTS = 384
MAX_TOP_K = 8
STAGES = 24  # maximum number of slabs in flight
COUNTERS = 4  # number of global counters before the entries' counters
BUFFERS = 2  # number of panels whose partial sums may wait for the reduction
SHARED_BYTES = 227 * 1024  # maximum shared memory of a CTA
LIST_BYTES = 4 * (2 * MAX_EXPERTS + 3 * MAX_PAIRS)  # bytes of the lists of experts and pairs in shared memory
OTHER_BYTES = 3 * 1024  # barriers and other small arrays
# Maximum numbers of k blocks for which kernels are compiled: inputs of up to 768, 2880, 4096 and 7168 features. Each entry maps the
# number of columns, as far as shared memory allows, to the number of blocks of a slab.
_SLABS = {12: {8: 4, 16: 4, 32: 3}, 45: {8: 5, 16: 5, 32: 5}, 64: {8: 5, 16: 5, 32: 3}, 112: {8: 5, 16: 3}}
MOST_PAIRS = 16  # maximum number of pairs of an entry; more would leave too little shared memory for the ring buffer


@dataclass(frozen=True)
class Config:
    """Configuration of one kernel variant.

    Attributes:
        dtype: dtype of tokens and output.
        blocks: the largest number of k blocks of a strip.
        columns: number of MMA columns. Each pair of an entry (pairs of one expert that are computed together) has two columns, or
            four with float16 (one of them unused), or one with fp8 activations.
        slab: the number of k blocks in a stage of the ring buffer.
        rounded: whether activations are fp8, with a scale per row.
        narrow: whether entries with at most half of the pairs use MMAs with half of the columns.
    """

    dtype: str
    blocks: int
    columns: int
    slab: int
    rounded: bool = False
    narrow: bool = False

    @property
    def parts(self) -> int:
        """The number of fp8 parts into which an element of a row is split."""
        return 1 if self.rounded else PARTS[self.dtype]

    @property
    def wide(self) -> bool:
        """Whether the first GEMM's results are float32. With float16, the results may exceed float16's range. With fp8 activations,
        float32 results are rounded only once, to fp8.
        """
        return self.rounded or self.dtype == "float16"

    @property
    def layers(self) -> int:
        """The number of 8-column MMA tiles that 4 pairs need. With one part per element, 8 pairs share an MMA tile."""
        return -(-self.parts // 2)

    @property
    def tiles(self) -> int:
        """The number of groups of 4 pairs of an expert that are computed at once."""
        return self.columns // 4 if self.parts == 1 else self.columns // (8 * self.layers)

    @property
    def pairs(self) -> int:
        """The number of pairs of an expert that share one read of the expert's weights."""
        return 4 * self.tiles

    @property
    def group(self) -> int:
        """The number of k blocks whose MMAs are issued together. The registers for the results limit this number."""
        return max(1, (40 if self.columns < 32 else 64) // self.columns)

    @property
    def narrow_group(self) -> int:
        """The same for entries that use half of the columns."""
        return 48 // (self.columns // 2)

    @property
    def rows_bytes(self) -> int:
        """Bytes of shared memory for the rows of one entry: a group of pairs that read an expert's weights together."""
        return self.blocks * BLOCK * self.columns

    @property
    def sums_bytes(self) -> int:
        """Bytes of shared memory for the partial sums of a panel: one sum per warpgroup, row and pair."""
        return GROUPS * PANEL_STRIPS * self.tiles * 256

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage: a slab, with room for the panel's head."""
        return PANEL_HEAD_BYTES + self.slab * PANEL_BLOCK_BYTES

    @property
    def stages(self) -> int:
        """The number of stages. It is a multiple of `GROUPS`, so that a warpgroup always uses the same stages."""
        used = LIST_BYTES + OTHER_BYTES + self.rows_bytes + BUFFERS * (self.sums_bytes + PANEL_HEAD_BYTES)
        return min(STAGES, (SHARED_BYTES - used) // self.stage_bytes) // GROUPS * GROUPS


def max_k() -> int:
    """Returns the largest supported number of input features."""
    return max(_SLABS) * BLOCK


def config_of(dtype: str, k: int, pairs_per_expert: float, rounded: bool = False) -> Config:
    """Returns the configuration for a layer in which both GEMMs have at most ``k`` input features. ``rounded``: whether activations
    are fp8.

    The configuration has room for twice the mean number of pairs of an expert plus two, which an expert rarely exceeds.
    """
    blocks = next(blocks for blocks in _SLABS if blocks >= blocks_of(k))
    configs = _configs(dtype, blocks, rounded)
    return next((config for config in configs if config.pairs >= 2 * pairs_per_expert + 2), configs[-1])


def _configs(dtype: str, blocks: int, rounded: bool) -> list[Config]:
    """Returns the configurations for strips of ``blocks`` k blocks, from few columns to many."""
    # With three parts and 32 columns, registers suffice for one block fewer.
    less = {32: 1} if PARTS[dtype] > 2 else {}
    every = [
        Config(dtype, blocks, columns, slab - less.get(columns, 0), rounded, _is_narrow(dtype, columns, rounded))
        for columns, slab in _SLABS[blocks].items()
    ]
    return [config for config in every if 0 < config.pairs <= MOST_PAIRS]


def _is_narrow(dtype: str, columns: int, rounded: bool) -> bool:
    """Whether a kernel also has MMAs with half of its columns. The kernel with 16 columns is chosen for 1 to 3 pairs per expert on
    average. So most entries have at most 4, and each issue of their MMAs covers 5 blocks instead of 2. With 32 columns, it covers 3
    instead of 2."""
    return not rounded and PARTS[dtype] == 2 and columns in (16, 32)


def wanted_experts(pairs: int, experts: int) -> float:
    """Returns the expected number of distinct experts for this many pairs, if they choose experts independently."""
    return experts * (1 - (1 - 1 / experts) ** pairs)


def turns_of(items: float) -> int:
    """Returns the number of ranges of w13, and of w2, that a CTA takes; ``items``: panels of w13 per CTA.

    With several ranges, faster CTAs take more of them (load balancing). Also, the first entries of w2 need not wait for all CTAs.
    But each range begins with the preparation of rows. On an H200, microseconds for GPT-OSS-120B with one, two and three ranges:
    64.4, 59.9 and 62.1 for 4 tokens; 106.3, 101.3 and 101.7 for 8; 170.2, 166.2 and 164.9 for 16; 363, 362 and 361 for 64.
    Splitting panels of w2 along k as well, so that all CTAs have equally much work, gains nothing. For 1 token: 25.2 us with whole
    panels, 25.6 us in three parts, 26.6 us in five.
    """
    return 1 if items < 8 else 2 if items < 24 else 3


def entries_of(config: Config, pairs: int, experts: int) -> int:
    """Returns the largest number of entries for this many pairs. An entry is a group of pairs that share one
    read of the weights.
    """
    return min(pairs, experts + pairs // config.pairs)


def every_config() -> list[Config]:
    """Returns all configurations."""
    every = itertools.product(DTYPES.values(), _SLABS, (False, True))
    return [config for dtype, blocks, rounded in every for config in _configs(dtype, blocks, rounded)]
