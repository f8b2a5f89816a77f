"""What programs of `mla_decode` are compiled for."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenspeed_kernel_nvidia.sm90.common.launch import DTYPES

LATENT = 512  # columns of the latent, which is also the value
ROPE = 64  # columns of the rotary part
ROWS = 64  # of a tile of queries, and tokens of a block of the cache: what one wgmma instruction has
RECORD_BYTES = 16  # of what CTAs say of a unit, for those that merge partial results
HEADS = (16, 32, 64, 128)
PAGE_SIZES = (64, 128)
LEAST_SHARE = 2  # blocks of a group, where there are few: each part of a sequence costs a partial result, up to 256 KiB
STARTING_BLOCKS = 3  # whose time it takes to begin a unit: measured on an H200 with 128 heads


@dataclass(frozen=True)
class Config:
    """A program.

    A CTA has a tile of 64 query rows. Three of its warpgroups compute. The first has queries in registers, as many as there is room
    for, computes scores and probabilities of a block of 64 tokens, and puts these into shared memory. The other two have half of
    the output's columns each. The more usual division, each of two warpgroups with the scores of its own block, has all queries in
    shared memory. A product of 64 rows of queries with 64 keys then reads as many bytes for queries as for keys, together 128 a
    clock: all that shared memory has.

    Attributes:
        dtype: of q, the cache and the output.
        heads: query heads.
        narrow: whether partial results are of float16, each row of a warpgroup with a power of 2 of its own, and not of float32:
            see `config_of`.
    """

    dtype: str
    heads: int
    narrow: bool = field(default=False, kw_only=True)

    @property
    def ranks(self) -> int:
        """CTAs of a group, each with its own heads."""
        return max(1, self.heads // ROWS)

    @property
    def cluster(self) -> int:
        """CTAs of a group that share what they load. Each loads half of a block for both, so it is read from L2 once."""
        return self.ranks

    @property
    def heads_of_tile(self) -> int:
        return min(self.heads, ROWS)

    @property
    def tokens_of_tile(self) -> int:
        """New tokens of a sequence that share a tile."""
        return ROWS // self.heads_of_tile

    @property
    def at_once(self) -> bool:
        """Whether probabilities of a block are handed over as soon as they are there, or when the next block's scores are.

        Where the tensor cores have no pause they are to have the product with values to do while probabilities are computed,
        and not before, while there are scores to do. With half the rows or fewer of a cluster the memory has no pause instead,
        and blocks should leave soon to make room.
        """
        return self.cluster == 1

    @property
    def tail(self) -> int:
        """How many products of the next block's scores, of 16 columns each, still run when probabilities are handed over.

        The warpgroups that wait for probabilities need some time to begin. These products keep the tensor cores busy meanwhile.
        """
        return 8

    @property
    def pieces(self) -> int:
        """Pieces of 128 columns that shared memory has room for: two whole blocks, and three pieces of the next one."""
        return 11

    @property
    def query_pieces(self) -> int:
        """Pieces that the queries of a unit take on their way."""
        return 4

    @property
    def lazy(self) -> float:
        """A row's maximum may grow by so many powers of 2 before its sums are scaled anew."""
        return 8.0

    @property
    def lift(self) -> float:
        """The largest exponential of a unit's first block, as a power of 2."""
        return 0.0

    @property
    def stages(self) -> int:
        """Rotary parts in shared memory. Probabilities take the place of a block's rotary part."""
        return 3

    @property
    def kept(self) -> int:
        """Columns of queries in registers. The others lie in what shared memory is left."""
        return 384

    def workspace_bytes(self, groups: int) -> int:
        """Returns how many bytes partial results of so many groups take, and records of their units."""
        return groups * (2 * self.ranks * ROWS * (self.row_bytes + self.sums_bytes) + RECORD_BYTES)

    @property
    def row_bytes(self) -> int:
        """Of the values of a partial result's row."""
        return LATENT * (2 if self.narrow else 4)

    @property
    def sums_bytes(self) -> int:
        """Of the maximum and the sum of a partial result's row. Narrow ones have those for each of two warpgroups."""
        return 16 if self.narrow else 8

    @property
    def chunk(self) -> int:
        """Columns whose values lie together in a partial result: a lane has 16 bytes of them."""
        return 16 if self.narrow else 8

    @property
    def merge_batch(self) -> int:
        """Partial results that a warp of the launch that merges loads at once.

        With 8 narrow ones, 1 x 8192 with 128 heads took 13.6 us on an H200, and 14.2 us with 4. Where sequences are many, with
        little to merge, times with either were within 1%: 255 and 253 us for 16 x 32768, 257 and 260 us for 128 x 4096.
        """
        return 8 if self.narrow else 4

    # Registers of a thread; together 512 for the four warpgroups, all that a multiprocessor has for so many threads. For products
    # that do not wait for each other, the assembler wants 24 besides their operands.

    @property
    def load_registers(self) -> int:
        """Records, which are written before narrow partial results, would take local memory of 24."""
        return 32 if self.narrow else 24

    @property
    def score_registers(self) -> int:
        """Queries take 96, scores 32."""
        return 160 if self.narrow else 168

    @property
    def value_registers(self) -> int:
        """The accumulator takes 128."""
        return 160


def config_of(dtype: str, heads: int) -> Config:
    """Returns the program for a cache in q's dtype.

    Where two CTAs share 128 heads, partial results are narrow: in float32 those of a few long sequences are more bytes than the
    cache is. On an H200 they and how they are merged made 13.6 us of 16.6 for 1 x 8192, 255 of 258 for 16 x 32768, 253.5 of 254.1
    for 64 x 8192, and 257 of 259.5 for 128 x 4096. With fewer heads a partial result is half as large or less and memory decides:
    64 x 8192 with 16 heads took 157.9 us, and 157.2 where the last CTA to arrive merged narrow ones without a second launch.
    Programs for an fp8 cache keep float32, because they add sums there, and those that choose keys, because none was measured.
    """
    return Config(dtype, heads, narrow=heads > ROWS)


def every_config() -> list[Config]:
    """All that is served of a cache in q's dtype."""
    return [config_of(dtype, heads) for dtype in DTYPES.values() for heads in HEADS]


def every_merge_config() -> list[Config]:
    """All whose partial results are merged: those of every program for such a cache, and of others in float32."""
    others = [Config(dtype, heads) for dtype in DTYPES.values() for heads in HEADS]
    return list(dict.fromkeys([*every_config(), *others]))
