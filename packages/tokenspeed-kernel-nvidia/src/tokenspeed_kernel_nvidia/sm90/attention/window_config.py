"""What programs of `window` are compiled for."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed_kernel_nvidia.sm90.attention.served import GQA_RATIOS, HEAD_DIMS
from tokenspeed_kernel_nvidia.sm90.common.launch import DTYPES

WARPGROUPS = 3  # that compute; one more loads
REACH = 128  # keys before a tile's first position that are loaded, from a multiple of 8 on
SHORT = 17  # queries that 24 positions from a multiple of 8 on hold


@dataclass(frozen=True)
class Config:
    """What changes the code. Times are of one H200: 64 query heads, 8 key heads, head_dim 64, bfloat16, sinks.

    Attributes:
        dtype: of q, k, v and the output.
        head_dim: 64 or 128.
        gqa_ratio: query heads a key head.
        paged: whether keys lie in a paged cache.
        short: for sequences of few queries, of which one item is all: three items' keys are in shared memory at once.
        capped: whether scores have a limit, ``logit_cap``.
    """

    dtype: str
    head_dim: int
    gqa_ratio: int
    paged: bool
    short: bool = False
    capped: bool = False

    @property
    def heads(self) -> int:
        """Query heads of a tile. With more than 8, positions would begin between repeats of the swizzle."""
        return min(self.gqa_ratio, 8)

    @property
    def splits(self) -> int:
        """Tiles that have the query heads of a key head."""
        return self.gqa_ratio // self.heads

    @property
    def positions(self) -> int:
        """Positions of a tile."""
        return 64 // self.heads

    @property
    def keys(self) -> int:
        """Keys of a tile: columns of its scores."""
        return REACH + self.positions

    @property
    def inner(self) -> int:
        """Columns of its probabilities: whole steps of 16."""
        return (self.keys + 15) // 16 * 16

    @property
    def rows(self) -> int:
        """Keys that a stage holds: those of 128 positions, or of 24, which 17 queries may touch.

        With 192, those of 64 positions, 16 sequences of 8192 take 748 us instead of 717: more keys are loaded twice.
        """
        return 160 if self.short else 256

    @property
    def value_rows(self) -> int:
        """Values that a stage has room for: a last tile's step of 16 ends 8 rows behind the keys."""
        return self.rows + 8

    @property
    def kv_stages(self) -> int:
        """Items whose keys are in shared memory at once: 65 KiB each at head_dim 64, 41 KiB if short, 130 KiB at head_dim 128."""
        if self.head_dim == 128:
            return 1
        return 3 if self.short else 2

    @property
    def q_stages(self) -> int:
        """Tiles of queries on their way, as many for each warpgroup: what shared memory has room for. Two each do as well."""
        return WARPGROUPS * (3 if self.head_dim == 64 else 1)

    @property
    def ahead(self) -> bool:
        """Whether a tile's scores are begun before the output of the one before is finished: if registers hold both."""
        return self.head_dim == 64 and self.positions < 64

    @property
    def box(self) -> int:
        """Keys of a bulk copy: in a cache, as many as lie together whatever the size of pages."""
        return 16 if self.paged else 64

    @property
    def block(self) -> int:
        """Most positions of an item. The keys of a block may begin 8 before a multiple of 16 in a paged cache."""
        return (self.rows - REACH - 8 * self.paged) // self.positions * self.positions

    @property
    def consumer_registers(self) -> int:
        """With those of the producer nearly all 65536 of a multiprocessor."""
        return 152

    @property
    def producer_registers(self) -> int:
        """With 32 the loading warps spill."""
        return 40


def every_config() -> list[Config]:
    """All that is served."""
    return [
        Config(dtype, head_dim, gqa_ratio, paged, short, capped)
        for capped in (False, True)
        for paged in (False, True)
        for dtype in DTYPES.values()
        for head_dim in HEAD_DIMS
        for gqa_ratio in GQA_RATIOS
        for short in ((False, True) if has_short(head_dim, gqa_ratio, paged) else (False,))
    ]


def has_short(head_dim: int, gqa_ratio: int, paged: bool) -> bool:
    """Whether there is a program for short sequences: where tiles have 8 positions, and shared memory has the room."""
    return paged and head_dim == 64 and gqa_ratio >= 8
