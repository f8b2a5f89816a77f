"""The configurations for which the kernel of `stream` is compiled, and the functions that choose among them.

A *pair* is a (token, slot) combination with an expert. An *entry* is a group of pairs of one expert that share one read of its
weights. A *panel* is 64 rows of an expert's weights, a *strip* 16 of these rows, and a *k block* 64 elements of k. A *slab* is some
k blocks of a panel: the contents of one stage of the ring buffer. A *range* is some consecutive panels, which one CTA computes. The
GEMMs are swap-AB: weights are the MMA's rows (m), and pairs its columns (n).
"""

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
# Number of fp8 parts into which an element of a row of activations is split. A part holds four significant bits, bfloat16 has 8,
# and float16 has 11. An element of fp8 activations is a single fp8 value.
PARTS = {"bfloat16": 2, "float16": 3}
MAX_PAIRS = 1024  # maximum number of (token, slot) pairs of a launch
MAX_EXPERTS = 384
MAX_TOP_K = 8
STAGES = 24  # maximum number of slabs in flight
COUNTERS = 4  # number of global counters before those of the entries
BUFFERS = 2  # number of buffers of partial sums, each for one panel, between the MMA warps and the epilogue warps
SHARED_BYTES = 227 * 1024  # maximum shared memory of a CTA
LIST_BYTES = 4 * (2 * MAX_EXPERTS + 3 * MAX_PAIRS)  # bytes of the lists of experts and pairs in shared memory
OTHER_BYTES = 3 * 1024  # barriers and other small arrays
# The keys are the maximum numbers of k blocks for which kernels are compiled: inputs of up to 768, 2880, 4096 and 7168 features.
# Each value maps the numbers of MMA columns whose rows fit in shared memory to the number of k blocks of a slab.
_SLABS = {12: {8: 4, 16: 4, 32: 3}, 45: {8: 5, 16: 5, 32: 5}, 64: {8: 5, 16: 5, 32: 3}, 112: {8: 5, 16: 3}}
MOST_PAIRS = 16  # maximum number of pairs of an entry; more would leave too little shared memory for the ring buffer


@dataclass(frozen=True)
class Config:
    """Configuration of one kernel variant.

    Attributes:
        dtype: dtype of tokens and output.
        blocks: the largest number of k blocks of a strip.
        columns: the number of MMA columns (n). A pair has two columns with bfloat16, four with float16 (one of them unused), and
            one with fp8 activations.
        slab: the number of k blocks in a stage of the ring buffer.
        rounded: whether activations are fp8, with a scale per row.
        narrow: whether an entry of at most ``pairs / 2`` pairs uses *narrow* MMAs, which have only the first ``columns / 2``
            columns. The other columns have no pairs. Narrow MMAs need half of the accumulator registers, so the MMAs of more k
            blocks can be issued together, see `narrow_group`.
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
        """The number of 8-column MMA tiles over which the parts of 4 pairs spread. With one part per element, 4 pairs fill half of
        an MMA tile."""
        return -(-self.parts // 2)

    @property
    def tiles(self) -> int:
        """The number of tiles of 4 pairs in an entry. A lane has the sums of one pair of each tile."""
        return self.columns // 4 if self.parts == 1 else self.columns // (8 * self.layers)

    @property
    def pairs(self) -> int:
        """The maximum number of pairs of an entry, which share one read of the expert's weights."""
        return 4 * self.tiles

    @property
    def group(self) -> int:
        """The number of k blocks whose MMAs are issued together, before a single wait. A larger number hides more of the MMAs'
        latency, but each k block takes ``columns`` accumulator registers per lane: ``columns / 2`` for each half block.
        """
        return max(1, (40 if self.columns < 32 else 64) // self.columns)

    @property
    def narrow_group(self) -> int:
        """Like `group`, for narrow MMAs, of which each k block takes ``columns / 2`` accumulator registers per lane. If the number
        exceeds `slab`, the MMAs of a whole slab are issued together.
        """
        return 48 // (self.columns // 2)

    @property
    def rows_bytes(self) -> int:
        """Bytes of shared memory for the rows of one entry: one byte for each element of k and MMA column."""
        return self.blocks * BLOCK * self.columns

    @property
    def sums_bytes(self) -> int:
        """Bytes of shared memory for the partial sums of a panel: one float32 for each warpgroup, row and pair."""
        return GROUPS * PANEL_STRIPS * self.tiles * 256

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage: a slab, with room for the panel's head."""
        return PANEL_HEAD_BYTES + self.slab * PANEL_BLOCK_BYTES

    @property
    def stages(self) -> int:
        """The number of stages of the ring buffer. It is a multiple of `GROUPS`, so that a warpgroup always uses the same
        stages."""
        used = LIST_BYTES + OTHER_BYTES + self.rows_bytes + BUFFERS * (self.sums_bytes + PANEL_HEAD_BYTES)
        return min(STAGES, (SHARED_BYTES - used) // self.stage_bytes) // GROUPS * GROUPS


def max_k() -> int:
    """Returns the largest supported number of input features."""
    return max(_SLABS) * BLOCK


def config_of(dtype: str, k: int, pairs_per_expert: float, rounded: bool = False) -> Config:
    """Returns the configuration for a layer in which both GEMMs have at most ``k`` input features.

    An entry has room for twice the mean number of pairs of an expert plus two, if a configuration is so large. An expert with more
    pairs has several entries, and each entry reads its weights.

    Args:
        dtype: dtype of tokens and output, a key of `PARTS`.
        k: the larger number of input features of the two GEMMs, at most `max_k`.
        pairs_per_expert: mean number of pairs of an expert.
        rounded: whether activations are fp8.
    """
    blocks = next(blocks for blocks in _SLABS if blocks >= blocks_of(k))
    configs = _configs(dtype, blocks, rounded)
    return next((config for config in configs if config.pairs >= 2 * pairs_per_expert + 2), configs[-1])


def _configs(dtype: str, blocks: int, rounded: bool) -> list[Config]:
    """Returns the configurations for strips of ``blocks`` k blocks, a key of `_SLABS`, from few columns to many."""
    # With three parts and 32 columns, a slab has one block fewer, because registers do not suffice.
    less = {32: 1} if PARTS[dtype] > 2 else {}
    every = [
        Config(dtype, blocks, columns, slab - less.get(columns, 0), rounded, _is_narrow(dtype, columns, rounded))
        for columns, slab in _SLABS[blocks].items()
    ]
    return [config for config in every if 0 < config.pairs <= MOST_PAIRS]


def _is_narrow(dtype: str, columns: int, rounded: bool) -> bool:
    """Returns whether a kernel has narrow MMAs, see `Config.narrow`.

    With 16 columns, an entry has up to 8 pairs, and the kernel is chosen for more than 1 and up to 3 pairs per expert on average.
    So most entries have at most 4 pairs. Narrow MMAs of up to 6 k blocks, a whole slab, are then issued together, instead of 2.
    With 32 columns, 3 k blocks are issued together instead of 2. Kernels with 8 columns have no narrow MMAs, because 8 is wgmma's
    smallest n.
    """
    return not rounded and PARTS[dtype] == 2 and columns in (16, 32)


def wanted_experts(pairs: int, experts: int) -> float:
    """Returns the expected number of distinct experts of this many pairs, if experts are independent and equally likely."""
    return experts * (1 - (1 - 1 / experts) ** pairs)


def turns_of(items: float) -> int:
    """Returns the average number of ranges of w13, and of w2, that a CTA takes. ``items``: panels of w13 per CTA.

    With several ranges per CTA, faster CTAs take more of them (load balancing). Also, the first entries of w2 need not wait for all
    CTAs. But before each range, the MMA warps prepare an entry's rows. On an H200, a layer of GPT-OSS-120B takes these microseconds
    with one, two and three ranges: 64.4, 59.9 and 62.1 for 4 tokens; 106.3, 101.3 and 101.7 for 8; 170.2, 166.2 and 164.9 for 16;
    363, 362 and 361 for 64. Splitting panels of w2 along k as well, so that all CTAs have equal work, gains nothing. For 1 token:
    25.2 us with whole panels, 25.6 us in three parts, 26.6 us in five.
    """
    return 1 if items < 8 else 2 if items < 24 else 3


def entries_of(config: Config, pairs: int, experts: int) -> int:
    """Returns the largest number of entries that this many pairs can have, over all routings."""
    return min(pairs, experts + pairs // config.pairs)


def every_config() -> list[Config]:
    """Returns all configurations."""
    every = itertools.product(DTYPES.values(), _SLABS, (False, True))
    return [config for dtype, blocks, rounded in every for config in _configs(dtype, blocks, rounded)]
