"""The configurations of the MLA decode kernel: tiles, stages and registers.

Terms of these modules: a *work item* is a tile of new tokens of one sequence, with all heads. A *block* is 64 tokens of the cache.
A block's latents are loaded in *chunks* of 128 columns, each with its own barriers. A *group* is the set of CTAs, usually a
cluster, that compute all heads of a work item.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenspeed_kernel_nvidia.cutedsl.launch import DTYPES

LATENT = 512  # elements of a token's latent, which is key and value
ROPE = 64  # elements of a token's rotary part, which is key only
ROWS = 64  # query rows of a Q tile, and tokens of a block of the cache, because one wgmma is 64 x 64
RECORD_BYTES = 16  # bytes of the record of a work item with partial results, which the merge kernel reads
HEADS = (16, 32, 64, 128)
PAGE_SIZES = (64, 128)
LEAST_BLOCKS = 2  # minimum number of blocks per group: each split of a sequence costs a partial result of up to 256 KiB
STARTING_BLOCKS = 3  # the time to start a work item, in units of one block's time: measured on an H200 with 128 heads


@dataclass(frozen=True)
class Config:
    """Configuration of one kernel variant.

    A CTA has a tile of 64 query rows, and three consumer warpgroups. The score warpgroup keeps as many columns of Q in registers as
    fit. It computes scores and probabilities of a block of 64 tokens, and stores the probabilities in shared memory. The two value
    warpgroups compute half of the output's columns each.

    In the more usual division of work, each of two warpgroups computes the scores of its own block, and all of Q is in shared
    memory. A 64 x 64 MMA then reads as many bytes of Q as of K. Together these are 128 bytes per clock, the full bandwidth of
    shared memory.

    Attributes:
        dtype: dtype of q, the cache and the output.
        heads: query heads.
        narrow: whether partial results of split-KV are float16, scaled by a power of 2 per row and value warpgroup, instead of
            float32. See `config_of`.
    """

    dtype: str
    heads: int
    narrow: bool = field(default=False, kw_only=True)

    @property
    def ranks(self) -> int:
        """The number of CTAs of a CTA group, each with its own query heads."""
        return max(1, self.heads // ROWS)

    @property
    def cluster(self) -> int:
        """The number of CTAs per cluster. With two, each CTA loads half of a block and multicasts it to both, so that L2 is read
        once."""
        return self.ranks

    @property
    def heads_of_tile(self) -> int:
        return min(self.heads, ROWS)

    @property
    def tokens_of_tile(self) -> int:
        """The number of new tokens of a sequence whose query rows are in one CTA's tile."""
        return ROWS // self.heads_of_tile

    @property
    def tokens_of_item(self) -> int:
        """New tokens of a work item, over all CTAs of the CTA group that computes the item."""
        return self.ranks * ROWS // self.heads

    @property
    def at_once(self) -> bool:
        """Whether the score warpgroup signals a block's probabilities to the value warpgroups as soon as they are stored. Otherwise
        it signals them after it has issued the next block's q @ k.

        A compute-bound kernel (two CTAs, 128 heads) defers P @ V to the time of the next softmax, when no q @ k is in flight. So
        the tensor cores are busy during the softmax. With one CTA, which has at most half of the rows, the kernel is memory-bound.
        Blocks should then be released early, to free their ring stages.
        """
        return self.cluster == 1

    @property
    def tail(self) -> int:
        """The number of MMAs (k = 16) of the next block's q @ k that are still in flight when a block's probabilities are
        signalled.

        These MMAs keep the tensor cores busy while the value warpgroups start P @ V.
        """
        return 8

    @property
    def latent_chunks(self) -> int:
        """Stages of the ring of latent chunks (64 tokens, 128 columns). The ring holds two whole blocks, and three chunks of the
        next block."""
        return 11

    @property
    def query_chunks(self) -> int:
        """The number of stages of the latent ring that a work item's queries occupy while they are loaded. Queries go through the
        rings, because no other shared memory is left for a whole Q tile."""
        return 4

    @property
    def wide_queries(self) -> bool:
        """Whether elements of q have more bytes than elements of the cache."""
        return False

    @property
    def lazy(self) -> float:
        """log2 of the factor by which probabilities may grow before the row max is raised and accumulators are rescaled."""
        return 8.0

    @property
    def lift(self) -> float:
        """log2 of the largest probability in a work item's first block. Probabilities are not normalised: the softmax subtracts the
        row max minus this number."""
        return 0.0

    @property
    def stages(self) -> int:
        """Stages of the ring of rotary parts (64 tokens). A block's probabilities overwrite the block's rotary part."""
        return 3

    @property
    def kept(self) -> int:
        """The number of columns of Q that the score warpgroup keeps in registers. The other columns are in shared memory outside
        the rings."""
        return 384

    def workspace_bytes(self, groups: int) -> int:
        """Returns the bytes of the partial results and records of ``groups`` CTA groups."""
        return groups * (2 * self.ranks * ROWS * (self.row_bytes + self.sums_bytes) + RECORD_BYTES)

    @property
    def row_bytes(self) -> int:
        """Bytes of the output accumulator in a row of a partial result."""
        return LATENT * (2 if self.narrow else 4)

    @property
    def sums_bytes(self) -> int:
        """Bytes of row max and row sum in a row of a partial result. With `narrow`, each value warpgroup has its own pair."""
        return 16 if self.narrow else 8

    @property
    def chunk(self) -> int:
        """The number of columns that a warp stores with one instruction, for 16 rows of a partial result: 16 bytes per lane."""
        return 16 if self.narrow else 8

    @property
    def merge_batch(self) -> int:
        """The number of partial results that a warp of the merge kernel loads at once.

        With 8 in float16, 1 x 8192 with 128 heads took 13.6 us on an H200; with 4, 14.2 us. With many sequences there is little to
        merge, and times differ by about 1%: 255 (with 8) and 253 us (with 4) for 16 x 32768, 257 and 260 us for 128 x 4096.
        """
        return 8 if self.narrow else 4

    # Registers per thread of each warpgroup (setmaxnreg). The four warpgroups' numbers sum to at most 512, because an SM has 65,536
    # registers for 512 threads. ptxas needs 24 registers besides the operands to keep wgmma asynchronous.

    @property
    def load_registers(self) -> int:
        """Registers of the load warpgroup. With `narrow`, 24 registers would spill."""
        return 32 if self.narrow else 24

    @property
    def score_registers(self) -> int:
        """Registers of the score warpgroup. Queries take 96 registers, scores 32."""
        return 160 if self.narrow else 168

    @property
    def value_registers(self) -> int:
        """Registers of each thread of a value warpgroup. The accumulators (64 x 256 per warpgroup) take 128 of these registers."""
        return 160


def config_of(dtype: str, heads: int) -> Config:
    """Returns the configuration for a cache in q's dtype.

    With 128 heads, partial results are float16 (`narrow`). In float32, the partial results of a few long sequences are more bytes
    than the cache. On an H200, narrow partial results and their merge reduced 16.6 us to 13.6 for 1 x 8192, 258 to 255 for 16 x
    32768, 254.1 to 253.5 for 64 x 8192, and 259.5 to 257 for 128 x 4096. With fewer heads, a partial result is at most half as
    large, and the kernel is memory-bound. 64 x 8192 with 16 heads took 157.9 us. The same call took 157.2 us when the last CTA to
    arrive merged narrow partial results without a second launch. Kernels for an fp8 cache keep float32 partial results, because
    they also accumulate in this memory. Sparse kernels keep float32, because `narrow` has not been measured for them.
    """
    return Config(dtype, heads, narrow=heads > ROWS)


def every_config() -> list[Config]:
    """Returns all configurations for a cache that has q's dtype."""
    return [config_of(dtype, heads) for dtype in DTYPES.values() for heads in HEADS]


def every_merge_config() -> list[Config]:
    """Returns all configurations of the merge kernel: those of `every_config`, and float32 configurations for the fp8 and sparse
    kernels.
    """
    others = [Config(dtype, heads) for dtype in DTYPES.values() for heads in HEADS]
    return list(dict.fromkeys([*every_config(), *others]))
