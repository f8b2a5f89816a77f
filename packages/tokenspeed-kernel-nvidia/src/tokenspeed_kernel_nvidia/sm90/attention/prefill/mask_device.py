"""The masks of a consumer warpgroup: causal attention, sliding windows, and the ends of sequences."""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, const_expr, cute

from tokenspeed_kernel_nvidia.cutedsl import mask_device as masks
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Cursor
from tokenspeed_kernel_nvidia.sm90.attention.prefill.config import Config
from tokenspeed_kernel_nvidia.sm90.attention.prefill.scheduler_device import Work
from tokenspeed_kernel_nvidia.sm90.attention.prefill.tile_device import Shared, thread_and_row


@dataclass(frozen=True)
class LowerBounds:
    """The lower bounds of the sliding windows of a tile's rows. All attributes are 0 without a window.

    Attributes:
        block: the first key block that some row sees.
        full_block: the first key block that needs no lower mask: no row's window begins after the block's first key.
        width: number of keys of a row's window, the row's own token included.
    """

    block: Int32
    full_block: Int32
    width: Int32


@dataclass(frozen=True)
class Masks:
    """Computes the bounds of the keys that a tile's rows see, and masks scores outside these bounds."""

    config: Config
    work: Work

    @cute.jit
    def upper_bounds(self, shared: Shared, q_at: Cursor, wg: Int32, causal: Int32):
        """Returns the upper bounds of the keys that a tile's rows see.

        Returns:
            The tile's last block of keys, which is computed first; the number of the sequence's leading blocks that need no causal
            mask; the number of keys of the sequence; for each of this thread's two rows, the first key that is masked, relative to
            the thread's first column; whether no row sees the second half of the last block.
        """
        c = self.config
        record = shared.record(q_at)
        q_len, kv_len, position = record.q_len, record.kv_len, record.position
        thread, row = thread_and_row(self.config, wg)
        column = 2 * (thread % 4)
        seen = self.work.keys_seen(q_len, kv_len, position, causal)
        block = (seen - 1) // c.block_n
        open_blocks, hidden_0, hidden_1 = kv_len // c.block_n, kv_len, kv_len
        if causal != 0:
            first_hidden = kv_len - q_len + position + 1
            open_blocks = cutlass.max(first_hidden, 0) // c.block_n
            hidden_0 = cutlass.min(first_hidden + row // c.gqa_ratio, kv_len)
            hidden_1 = cutlass.min(first_hidden + (row + 8) // c.gqa_ratio, kv_len)
        narrow = seen - block * c.block_n <= c.block_n // 2
        return block, open_blocks, kv_len, hidden_0 - column, hidden_1 - column, narrow

    @cute.jit
    def lower_bounds(self, shared: Shared, q_at: Cursor, wg: Int32, causal: Int32, window_left: Int32):
        """Returns the lower bounds of the windows of a tile's rows."""
        block, full_block, width = Int32(0), Int32(0), Int32(0)
        if const_expr(self.config.windowed):
            n = self.config.block_n
            record = shared.record(q_at)
            block, _ = self.work.blocks_seen(record.q_len, record.kv_len, record.position, causal, window_left)
            last = record.kv_len - record.q_len + cutlass.min(record.position + self.config.positions, record.q_len) - 1
            full_block = cutlass.max(last - window_left + n - 1, 0) // n
            width = window_left + 1
        return LowerBounds(block, full_block, width)

    @cute.jit
    def apply(self, scores: cute.Tensor, hidden_from: tuple, first_key: Int32, begin: LowerBounds):
        """Masks the scores of the block whose first key is ``first_key``: keys from ``hidden_from[r]`` on in this thread's row r,
        and keys before the row's window. ``hidden_from``: see `upper_bounds`."""
        for r in cutlass.range_constexpr(2):
            masks.hide_from(scores, r, hidden_from[r] - first_key)
            if const_expr(self.config.windowed):
                masks.hide_before(scores, r, hidden_from[r] - begin.width - first_key)
