"""The tile scheduler of `window`: the work items of a call's sequences, and the tiles of a work item."""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import cutlass
from cutlass import Int32, const_expr, cute

from tokenspeed_kernel_nvidia.cutedsl.registers_device import LANES, warp_prefix_sum
from tokenspeed_kernel_nvidia.cutedsl.tile_scheduler_device import Block, Blocks
from tokenspeed_kernel_nvidia.sm90.attention.window.config import Config
from tokenspeed_kernel_nvidia.sm90.attention.window.tile_device import Record, TilePosition


@dataclass(frozen=True)
class Sequences:
    """The sequences of a call.

    Attributes:
        cu_seqlens: cumulative numbers of queries, ``[batch + 1]``.
        page_table: the page table of a paged cache; None with ragged K/V.
        cache_seqlens: number of each sequence's tokens in the cache; None with ragged K/V.
    """

    cu_seqlens: cute.Tensor
    page_table: Optional[cute.Tensor]
    cache_seqlens: Optional[cute.Tensor]

    @property
    def batch(self) -> Int32:
        return self.cu_seqlens.shape[0] - 1


@dataclass(frozen=True)
class Work:
    """The kernel's work items. A work item is a block of query positions of a sequence, for one KV head. CTAs take items
    round-robin; see `Blocks`."""

    config: Config

    @cute.jit
    def blocks_of(
        self, sequences: Sequences, group: Int32, before: Int32, block: Int32, kv_heads: Int32, step: Int32, lane: Int32
    ) -> Blocks:
        """Returns the scheduler of 32 consecutive sequences, one per lane.

        Args:
            group: the first of these sequences.
            before: the number of blocks of all sequences before ``group``.
            block: the query positions per block.
            step: distance between consecutive work items of a CTA, from `own_indices`.
        """
        index = group + lane
        token, first, length, blocks = Int32(0), Int32(0), Int32(0), Int32(0)
        if index < sequences.batch:
            token = sequences.cu_seqlens[index]
            queries = sequences.cu_seqlens[index + 1] - token
            length = sequences.cache_seqlens[index] if const_expr(self.config.paged) else queries
            first = length - queries
            if queries > 0:
                blocks = (length - first // 8 * 8 + block - 1) // block  # the first block begins at a multiple of 8
        ends = before + warp_prefix_sum(blocks, lane)
        return Blocks(step, token, first, length, blocks, ends, cute.arch.shuffle_sync(ends, LANES - 1), block, kv_heads)

    def tiles_of(self, item: Block, block: Int32) -> Int32:
        """Returns the number of tiles of a work item for each of the `Config.splits` groups of query heads. ``block``: see
        `blocks_of`."""
        return (cutlass.min(block, item.length - item.position) + self.config.positions - 1) // self.config.positions

    def head_of(self, kv_head: Int32, tile: Int32) -> Int32:
        """Returns the first query head of a tile. ``tile``: the index of the tile among those of its work item."""
        return (kv_head * self.config.splits + tile % self.config.splits) * self.config.heads

    @cute.jit
    def tile_position(self, record: Record, tile: Int32) -> TilePosition:
        """Returns a tile's location in its sequence. ``record``: the work item's record; ``tile``: the tile's index in the item."""
        position, token = record.position, record.token
        first, length = record.first, record.length
        at = tile // self.config.splits * self.config.positions
        return TilePosition(position + at, token + at, first, length, self.head_of(record.kv_head, tile))
