"""Configurations that `mla_decode` is compiled for.

Terms of these modules: a *work item* is a tile of new tokens of one sequence, with all heads. A *block* is 64 tokens of the cache;
its latents are loaded in *chunks* of 128 columns, each with its own barriers. A *group* is the set of CTAs, usually a cluster, that
compute all heads of a work item.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenspeed_kernel_nvidia.cutedsl.launch import DTYPES

LATENT = 512  # columns of the latent, which is also the value
ROPE = 64  # columns of the rotary part
ROWS = 64  # rows of a Q tile, and tokens of a block of the cache, because one wgmma is 64 x 64
RECORD_BYTES = 16  # bytes of a work item's record, which the merge kernel reads
HEADS = (16, 32, 64, 128)
PAGE_SIZES = (64, 128)
LEAST_BLOCKS = 2  # minimum blocks per group: each split of a sequence costs a partial result of up to 256 KiB
STARTING_BLOCKS = 3  # fixed cost of starting a work item, in blocks: measured on an H200 with 128 heads


@dataclass(frozen=True)
class Config:
    """Configuration of one kernel variant.

    A CTA has a tile of 64 query rows, and three consumer warpgroups. The score warpgroup keeps as many queries in registers as fit.
    It computes scores and probabilities of a block of 64 tokens, and stores the probabilities in shared memory. The two value
    warpgroups compute half of the output's columns each. In the more usual split, each of two warpgroups computes the scores of its
    own block. That split keeps all queries in shared memory. A 64 x 64 MMA then reads as many bytes of queries as of keys. Together
    these are 128 bytes per clock, the full bandwidth of shared memory.

    Attributes:
        dtype: dtype of q, the cache and the output.
        heads: query heads.
        narrow: whether partial results are float16, scaled by a power of 2 per row and value warpgroup, instead of float32. See
            `config_of`.
    """

    dtype: str
    heads: int
    narrow: bool = field(default=False, kw_only=True)

    @property
    def ranks(self) -> int:
        """The number of CTAs of a group, each with its own query heads."""
        return max(1, self.heads // ROWS)

    @property
    def cluster(self) -> int:
        """The number of CTAs of a cluster, which share loads by multicast. Each loads half of a block for
        both, so L2 is read once.
        """
        return self.ranks

    @property
    def heads_of_tile(self) -> int:
        return min(self.heads, ROWS)

    @property
    def tokens_of_tile(self) -> int:
        """New tokens of a sequence in a tile."""
        return ROWS // self.heads_of_tile

    @property
    def tokens_of_item(self) -> int:
        """New tokens of a work item, over all CTAs of the group."""
        return self.ranks * ROWS // self.heads

    @property
    def at_once(self) -> bool:
        """Whether a block's probabilities are signalled as soon as they are stored. Otherwise they are signalled after the next
        block's q @ k.

        A compute-bound kernel (two CTAs, 128 heads) saves P @ V for the time of the softmax, when no q @ k is in flight. With one
        CTA, which has at most half of the rows, the kernel is memory-bound. Blocks should then be released early, to free their
        stages.
        """
        return self.cluster == 1

    @property
    def tail(self) -> int:
        """MMAs (k = 16) of the next block's q @ k that are still in flight when probabilities are signalled.

        They keep the tensor cores busy while the value warpgroups start up.
        """
        return 8

    @property
    def latent_chunks(self) -> int:
        """Stages of the ring of latent chunks of 128 columns: two whole blocks, and three chunks of the next one."""
        return 11

    @property
    def query_chunks(self) -> int:
        """The number of chunk stages that a work item's queries occupy while they are loaded."""
        return 4

    @property
    def wide_queries(self) -> bool:
        """Whether queries have wider elements than the cache."""
        return False

    @property
    def lazy(self) -> float:
        """log2 by which the row max may grow before accumulators are rescaled."""
        return 8.0

    @property
    def lift(self) -> float:
        """log2 of the largest probability in a work item's first block."""
        return 0.0

    @property
    def stages(self) -> int:
        """Stages of the ring of rotary parts. A block's probabilities overwrite its rotary part."""
        return 3

    @property
    def kept(self) -> int:
        """Columns of queries in registers. Other columns are in the remaining shared memory."""
        return 384

    def workspace_bytes(self, groups: int) -> int:
        """Returns the bytes of the partial results and records of ``groups`` groups."""
        return groups * (2 * self.ranks * ROWS * (self.row_bytes + self.sums_bytes) + RECORD_BYTES)

    @property
    def row_bytes(self) -> int:
        """Bytes of the values in a row of a partial result."""
        return LATENT * (2 if self.narrow else 4)

    @property
    def sums_bytes(self) -> int:
        """Bytes of row max and row sum of a partial result's row; with `narrow`, one pair per value warpgroup."""
        return 16 if self.narrow else 8

    @property
    def chunk(self) -> int:
        """Columns that are stored together in a partial result: 16 bytes per lane."""
        return 16 if self.narrow else 8

    @property
    def merge_batch(self) -> int:
        """Partial results that a warp of the merge kernel has in flight.

        With 8 in float16, 1 x 8192 with 128 heads took 13.6 us on an H200; with 4, 14.2 us. With many sequences there is little to
        merge, and times differ by about 1%: 255 (with 8) and 253 us (with 4) for 16 x 32768, 257 and 260 us for 128 x 4096.
        """
        return 8 if self.narrow else 4

    # Registers per thread (setmaxnreg). The four warpgroups have 512 together, all that an SM has for 512 threads. ptxas needs 24
    # besides the operands to keep wgmma asynchronous.

    @property
    def load_registers(self) -> int:
        """With `narrow`, where records are written before partial results, 24 registers would spill."""
        return 32 if self.narrow else 24

    @property
    def score_registers(self) -> int:
        """Queries take 96 registers, scores 32."""
        return 160 if self.narrow else 168

    @property
    def value_registers(self) -> int:
        """The accumulator takes 128 registers."""
        return 160


def config_of(dtype: str, heads: int) -> Config:
    """Returns the configuration for a cache in q's dtype.

    With 128 heads partial results are float16 (`narrow`). In float32, the partial results of a few long sequences are more bytes
    than the cache. On an H200, narrow partial results and their merge reduced 16.6 us to 13.6 for 1 x 8192, 258 to 255 for 16 x
    32768, 254.1 to 253.5 for 64 x 8192, and 259.5 to 257 for 128 x 4096. With fewer heads a partial result is at most half as
    large, and the kernel is memory-bound. 64 x 8192 with 16 heads took 157.9 us. It took 157.2 us where the last CTA to arrive
    merged narrow partial results without a second launch. Kernels for an fp8 cache keep float32, because they also accumulate
    there. Sparse kernels keep float32, because `narrow` has not been measured for them.
    """
    return Config(dtype, heads, narrow=heads > ROWS)


def every_config() -> list[Config]:
    """All configurations for a cache that has q's dtype."""
    return [config_of(dtype, heads) for dtype in DTYPES.values() for heads in HEADS]


def every_merge_config() -> list[Config]:
    """All configurations of the merge kernel: those of `every_config`, and float32 configurations for the fp8
    and sparse kernels.
    """
    others = [Config(dtype, heads) for dtype in DTYPES.values() for heads in HEADS]
    return list(dict.fromkeys([*every_config(), *others]))
