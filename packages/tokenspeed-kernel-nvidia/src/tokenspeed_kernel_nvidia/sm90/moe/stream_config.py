"""The configurations that programs of `stream` are compiled for, and the choice of one of them."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed_kernel_nvidia.sm90.common.launch import DTYPES
from tokenspeed_kernel_nvidia.sm90.moe.mxfp4_layout import BLOCK, PANEL_BLOCK_BYTES, PANEL_HEAD_BYTES, PANEL_STRIPS, blocks_of

GROUPS = 3  # warpgroups that compute
MULTIPLIERS = 4 * GROUPS  # warps that compute
LOAD_WARP = MULTIPLIERS  # the warp that loads
FINISH_WARP = MULTIPLIERS + 1  # the first of the warps that add up the sums of the warpgroups
FINISHERS = 2  # the number of these warps
THREADS = 32 * (FINISH_WARP + FINISHERS)
# Bytes that a number of a row is split into, each with four of its significant bits: bfloat16 has 8, float16 11.
PARTS = {"bfloat16": 2, "float16": 3}
MAX_PAIRS = 1024  # (token, slot) pairs of a launch
MAX_EXPERTS = 384
MAX_TOP_K = 8
STAGES = 24  # the most slabs that are on their way at once
COUNTERS = 4  # counters in global memory that stand in front of those of entries
BUFFERS = 2  # units whose sums may wait to be added up
SHARED_BYTES = 227 * 1024  # shared memory that a CTA may have
LIST_BYTES = 4 * (2 * MAX_EXPERTS + 3 * MAX_PAIRS)  # the lists of experts and pairs, see `stream_tile_device`
OTHER_BYTES = 3 * 1024  # barriers and other small things
# Blocks of the widest strips that programs are made for: inputs of 768, 2880, 4096 and 7168 features; and columns, as many as
# memory allows. Each with the blocks of a slab.
_SLABS = {12: {8: 4, 16: 4, 32: 3}, 45: {8: 5, 16: 5, 32: 5}, 64: {8: 5, 16: 5, 32: 3}, 112: {8: 5, 16: 3}}


@dataclass(frozen=True)
class Config:
    """A configuration that a program is compiled for.

    Attributes:
        dtype: the dtype of tokens and output.
        blocks: the largest number of blocks that a strip may have.
        columns: the columns of a product: two for each pair of an expert that is computed at once, four for float16.
        slab: the number of blocks in a stage of the ring.
    """

    dtype: str
    blocks: int
    columns: int
    slab: int

    @property
    def parts(self) -> int:
        """The number of bytes that a number of a row is split into."""
        return PARTS[self.dtype]

    @property
    def wide(self) -> bool:
        """Whether the results of the first product are float32: float16 has not the range for them."""
        return self.dtype == "float16"

    @property
    def layers(self) -> int:
        """The number of tiles of 8 columns that 4 pairs need."""
        return -(-self.parts // 2)

    @property
    def tiles(self) -> int:
        """The number of sets of 4 pairs of an expert that are computed at once."""
        return self.columns // (8 * self.layers)

    @property
    def pairs(self) -> int:
        """The number of pairs of an expert that share the reading of its weights."""
        return 4 * self.tiles

    @property
    def group(self) -> int:
        """The number of blocks whose products are begun together: registers have room for the results of so many."""
        return max(1, (40 if self.columns < 32 else 64) // self.columns)

    @property
    def rows_bytes(self) -> int:
        """The bytes of shared memory that the rows of an entry take."""
        return self.blocks * BLOCK * self.columns

    @property
    def sums_bytes(self) -> int:
        """The bytes of shared memory that the sums of a unit take: each warpgroup has one for each row and pair."""
        return GROUPS * PANEL_STRIPS * self.tiles * 256

    @property
    def stage_bytes(self) -> int:
        """The bytes of a stage, which is a slab with room for the head of the panel."""
        return PANEL_HEAD_BYTES + self.slab * PANEL_BLOCK_BYTES

    @property
    def stages(self) -> int:
        """The number of stages. It is a multiple of `GROUPS`, so that a warpgroup always has the same ones."""
        used = LIST_BYTES + OTHER_BYTES + self.rows_bytes + BUFFERS * (self.sums_bytes + PANEL_HEAD_BYTES)
        return min(STAGES, (SHARED_BYTES - used) // self.stage_bytes) // GROUPS * GROUPS


def max_k() -> int:
    """Returns the largest number of input features that there is a program for."""
    return max(_SLABS) * BLOCK


def config_of(dtype: str, k: int, pairs_per_expert: float) -> Config:
    """Returns the configuration for a layer whose two products have inputs of at most ``k`` features.

    An expert rarely has more than twice the mean number of pairs, and two more.
    """
    blocks = next(blocks for blocks in _SLABS if blocks >= blocks_of(k))
    configs = _configs(dtype, blocks)
    return next((config for config in configs if config.pairs >= 2 * pairs_per_expert + 2), configs[-1])


def _configs(dtype: str, blocks: int) -> list[Config]:
    """Returns the configurations for strips of so many blocks, from few columns to many."""
    # With three parts and most columns, registers suffice for a block less.
    less = {32: 1} if PARTS[dtype] > 2 else {}
    every = [Config(dtype, blocks, columns, slab - less.get(columns, 0)) for columns, slab in _SLABS[blocks].items()]
    return [config for config in every if config.tiles]


def wanted_experts(pairs: int, experts: int) -> float:
    """Returns how many experts so many pairs choose on average, if they choose independently."""
    return experts * (1 - (1 - 1 / experts) ** pairs)


def turns_of(units: float) -> int:
    """Returns how many ranges of w13, and of w2, a CTA takes one after another, if there are so many units of w13 for each CTA.

    With several, those that are quick do more, and the first entries of w2 need not wait for all CTAs. But each range begins with
    preparing rows. On an H200, microseconds for GPT-OSS-120B with one, two and three: 4 tokens 64.4, 59.9, 62.1; 8 tokens 106.3,
    101.3, 101.7; 16 tokens 170.2, 166.2, 164.9; 64 tokens 363, 362, 361. Cutting panels of w2 along k as well, so that all CTAs
    have equally many of few, gains nothing: 1 token 25.2 whole, 25.6 in three pieces, 26.6 in five.
    """
    return 1 if units < 8 else 2 if units < 24 else 3


def entries_of(config: Config, pairs: int, experts: int) -> int:
    """Returns the largest number of entries that so many pairs can make: of groups that weights are read for."""
    return min(pairs, experts + pairs // config.pairs)


def every_config() -> list[Config]:
    """Returns all configurations that there are."""
    return [config for dtype in DTYPES.values() for blocks in _SLABS for config in _configs(dtype, blocks)]
