"""The masks that the score warpgroup applies to scores."""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute

from tokenspeed_kernel_nvidia.cutedsl import mask_device as masks
from tokenspeed_kernel_nvidia.cutedsl import registers_device as registers
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Cursor, advance, skip
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.config import ROWS, Config
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.tile_device import (
    LATENT_CHUNKS,
    SCORED,
    Call,
    SharedMemory,
    thread_of_scores,
)
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import PANEL


@dataclass(frozen=True)
class TokenMask:
    """Masks the cached tokens that a query does not see.

    Attributes:
        hide: the function that masks a block's scores: `hide_later_tokens`, or a function with the same arguments.
    """

    config: Config
    memory: SharedMemory
    work: Any
    hide: Callable[..., None]

    @cute.jit
    def apply(self, call: Call, scores: cute.Tensor, item: Int32, valid: Int32, end: Cursor, rope_at: Cursor):
        """Masks the scores of keys that a query row does not see, and zeroes the block's latents beyond the end of the sequence.

        Args:
            valid: how many tokens the item's last token sees, counted from the block's first token.
            end: the latent ring's cursor after the block.
            rope_at: the rotary ring's cursor of the block.
        """
        # Otherwise, all tokens of the item see all of the block.
        if valid < ROWS + (self.config.tokens_of_item - 1):
            self.hide(self.work, call, scores, item, valid)
            clear_beyond(self.memory, call, end, valid)


@cute.jit
def hide_later_tokens(work: Any, call: Call, scores: cute.Tensor, item: Int32, valid: Int32):
    """Causal mask: masks the scores of tokens after each query's own token. ``valid``: how many tokens the item's last token sees,
    counted from the block's first token."""
    c = work.config
    thread = thread_of_scores()
    row = (thread >> 5) * 16 + ((thread & 31) >> 2)
    _, _, tokens = work.tokens_of(call, item)
    for r in cutlass.range_constexpr(2):
        limit = valid
        if const_expr(c.tokens_of_tile > 1):
            limit = valid - (tokens - 1) + (row + 8 * r) // c.heads_of_tile
        masks.hide_from(scores, r, limit - (thread & 3) * 2)


@cute.jit
def clear_beyond(memory: SharedMemory, call: Call, end: Cursor, valid: Int32):
    """Zeroes a block's latents at slots without a token. Latents are values too. Such slots may hold NaN, and 0 * NaN is not 0.

    Args:
        end: the latent ring's cursor after the block.
        valid: the number of the block's slots with a token; negative values count as 0.
    """
    thread = thread_of_scores()
    # Wait until all warps have finished q @ k of the block whose memory is overwritten.
    cute.arch.barrier(barrier_id=SCORED, number_of_threads=128)
    at = skip(end, memory.config.latent_chunks - LATENT_CHUNKS, memory.config.latent_chunks)
    for _ in cutlass.range_constexpr(LATENT_CHUNKS):
        row = cutlass.max(valid, 0) + (thread >> 3)
        while row < ROWS:
            for panel in cutlass.range_constexpr(memory.latent_chunks.panels):
                to = memory.panel_at(call, at, panel) + row * (PANEL * 2) + (thread & 7) * 16
                registers.store_floats("shared", to, [Float32(0.0)] * 4)
            row += 16
        at = advance(at, memory.config.latent_chunks)
    cute.arch.fence_view_async_shared()
