"""The tile scheduler of `prefill`: the query tiles of a call's sequences, and the key blocks that a tile sees."""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, const_expr, cute

from tokenspeed_kernel_nvidia.cutedsl.tile_scheduler_device import LongestFirst
from tokenspeed_kernel_nvidia.sm90.attention.prefill.config import Config
from tokenspeed_kernel_nvidia.sm90.attention.prefill.tile_device import Sequences


@dataclass(frozen=True)
class Work:
    """The kernel's work items. A work item is a tile of queries of one sequence, for one KV head. See `LongestFirst`."""

    config: Config

    def tiles(self) -> LongestFirst:
        """Returns the scheduler of the query tiles."""
        c = self.config
        # `section_mib` as a number of blocks of 16 keys and values of one KV head, with 16-bit elements.
        return LongestFirst(c.positions, (c.section_mib << 20) // (16 * 2 * sum(c.widths)), self.lengths_of)

    def lengths_of(self, sequences: Sequences, at: Int32):
        """Returns the row in q of a sequence's first query, and the sequence's numbers of queries and of keys. ``at``: the
        sequence's index in the batch."""
        start = sequences.cu_seqlens[at]
        q_len = sequences.cu_seqlens[at + 1] - start
        kv_len = q_len
        if const_expr(self.config.paged):
            kv_len = sequences.cache_seqlens[at]
        if const_expr(self.config.own_kv):
            kv_len = sequences.cache_seqlens[at + 1] - sequences.cache_seqlens[at]
        return start, q_len, kv_len

    @cute.jit
    def first_key(self, sequences: Sequences, sequence: Int32, token: Int32) -> Int32:
        """Returns the row in k and v of a sequence's first key, with ragged K/V. ``token``: the row in q of the sequence's first
        query."""
        if const_expr(self.config.own_kv):
            token = sequences.cache_seqlens[sequence]
        return token

    @cute.jit
    def keys_seen(self, q_len: Int32, kv_len: Int32, position: Int32, causal: Int32) -> Int32:
        """Returns the end of the range of keys that some row of a tile sees. The end is at least 1, because every tile processes a
        block, also if all its scores are masked. ``position``: the index in the sequence of the tile's first query."""
        seen = kv_len
        if causal != 0:
            seen = kv_len - q_len + cutlass.min(position + self.config.positions, q_len)
        return cutlass.max(seen, 1)

    @cute.jit
    def blocks_seen(self, q_len: Int32, kv_len: Int32, position: Int32, causal: Int32, window_left: Int32):
        """Returns the first block, and the end, of the range of key blocks that at least one row of a tile sees."""
        n = self.config.block_n
        end = (self.keys_seen(q_len, kv_len, position, causal) + (n - 1)) // n
        first = Int32(0)
        if const_expr(self.config.windowed):
            first = cutlass.min(cutlass.max(kv_len - q_len + position - window_left, 0) // n, end - 1)
        return first, end
