"""The configurations of the sliding-window kernel: tiles, stages and registers."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed_kernel_nvidia.cutedsl.launch import DTYPES
from tokenspeed_kernel_nvidia.sm90.attention.supported import GQA_RATIOS, HEAD_DIMS

WARPGROUPS = 3  # consumer warpgroups; a CTA also has one producer warpgroup
REACH = 128  # number of keys that are loaded before a tile's first query; a multiple of 8
SHORT = 17  # at most this many consecutive queries always fit into 24 positions that begin at a multiple of 8


@dataclass(frozen=True)
class Config:
    """Configuration of one kernel variant. Times below are from an H200: 64 query heads, 8 KV heads, head_dim 64, bfloat16, sinks.

    Attributes:
        dtype: dtype of q, k, v and the output.
        head_dim: 64 or 128.
        gqa_ratio: GQA group size: query heads per KV head.
        paged: whether K and V are in a paged cache.
        short: whether the variant is for sequences of at most `SHORT` queries. Each sequence is one work item, and shared memory
            holds the K/V of three work items at once.
        capped: whether scores are capped by ``logit_cap``.
    """

    dtype: str
    head_dim: int
    gqa_ratio: int
    paged: bool
    short: bool = False
    capped: bool = False

    @property
    def heads(self) -> int:
        """Query heads per tile, at most 8, so that a tile's number of positions is a multiple of the swizzle's period of 8 rows."""
        return min(self.gqa_ratio, 8)

    @property
    def splits(self) -> int:
        """The number of tiles among which the query heads of a KV head are divided: 2 with a group size of 16, otherwise 1."""
        return self.gqa_ratio // self.heads

    @property
    def positions(self) -> int:
        """Query positions (tokens) of a tile."""
        return 64 // self.heads

    @property
    def keys(self) -> int:
        """Keys per tile: the columns of the tile's scores."""
        return REACH + self.positions

    @property
    def inner(self) -> int:
        """k of P @ V: `keys` rounded up to a multiple of 16."""
        return (self.keys + 15) // 16 * 16

    @property
    def rows(self) -> int:
        """Keys per ring stage: 256 for 128 query positions, or 160 for the 24 positions that 17 queries may span.

        Consecutive work items of a sequence both load the 128 keys between them. With stages of 192 keys, for 64 positions, 16
        sequences of 8192 take 748 us instead of 717, because more keys are loaded twice.
        """
        return 160 if self.short else 256

    @property
    def value_rows(self) -> int:
        """Rows per V stage: 8 more than `rows`. The last k-step (16 keys) of a work item's last tile may read 8 rows beyond the
        keys."""
        return self.rows + 8

    @property
    def kv_stages(self) -> int:
        """Stages of the K/V ring, one work item each. A stage has 65 KiB at head_dim 64 (41 KiB if `short`), 130 KiB at head_dim
        128."""
        if self.head_dim == 128:
            return 1
        return 3 if self.short else 2

    @property
    def q_stages(self) -> int:
        """Stages of the Q ring: as many per consumer warpgroup as fit in shared memory. Two per warpgroup are as fast as three."""
        return WARPGROUPS * (3 if self.head_dim == 64 else 1)

    @property
    def ahead(self) -> bool:
        """Whether q @ k of a tile is issued before the previous tile's epilogue. This requires registers for both accumulators."""
        return self.head_dim == 64 and self.positions < 64

    @property
    def box(self) -> int:
        """Keys per TMA box. With a paged cache, this is the smallest page size, so that a box is in one page."""
        return 16 if self.paged else 64

    @property
    def block(self) -> int:
        """The maximum number of query positions of a work item. With a paged cache, an item's keys may be loaded from 8 positions
        earlier, so that the first position is a multiple of 16.
        """
        return (self.rows - REACH - 8 * self.paged) // self.positions * self.positions

    @property
    def consumer_registers(self) -> int:
        """Registers per consumer thread (setmaxnreg). Consumers and producers together use nearly all 65536 registers of an SM."""
        return 152

    @property
    def producer_registers(self) -> int:
        """Registers per producer thread. With 32 registers the loading warps spill."""
        return 40


def every_config() -> list[Config]:
    """Returns all supported configurations."""
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
    """Whether there is a variant for short sequences: a tile must have 8 positions, and shared memory must hold three stages."""
    return paged and head_dim == 64 and gqa_ratio >= 8
