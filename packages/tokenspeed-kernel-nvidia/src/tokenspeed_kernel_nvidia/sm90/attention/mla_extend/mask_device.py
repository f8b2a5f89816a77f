"""Masks of the score warpgroup of `mla_extend`."""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute

from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.config import ROWS
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.mask_device import clear_beyond
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.tile_device import Call, SharedMemory, thread_of_scores
from tokenspeed_kernel_nvidia.sm90.attention.mla_extend.config import Config
from tokenspeed_kernel_nvidia.sm90.attention.mla_extend.scheduler_device import ExtendWork
from tokenspeed_kernel_nvidia.sm90.common import mask_device as masks


@dataclass(frozen=True)
class ExtendMask:
    """Each new token sees the tokens of the cache up to itself, or all of them if attention is not causal. See `DecodeMask`."""

    config: Config
    memory: SharedMemory
    work: ExtendWork

    @cute.jit
    def apply(self, call: Call, scores: cute.Tensor, item: Int32, valid: Int32, end: Any, rope_at: Any):
        if valid < ROWS + (self.config.tokens_of_item - 1):
            self.hide(call, scores, item, valid)
            clear_beyond(self.memory, call, end, valid)

    @cute.jit
    def hide(self, call: Call, scores: cute.Tensor, item: Int32, valid: Int32):
        c = self.config
        thread = thread_of_scores()
        row = (thread >> 5) * 16 + ((thread & 31) >> 2)
        limit = valid
        if cutlass.const_expr(c.tokens_of_item > 1):
            _, _, tokens = self.work.tokens_of(call, item)
            # End of what the first token of this CTA's tile sees.
            limit = cutlass.select_(call.is_causal != 0, valid - (tokens - 1) + self.work.tokens_before(call), valid)
        for r in cutlass.range_constexpr(2):
            seen = limit
            if cutlass.const_expr(c.tokens_of_tile > 1):
                seen = limit + cutlass.select_(call.is_causal != 0, (row + 8 * r) // c.heads_of_tile, Int32(0))
            masks.hide_from(scores, r, seen - (thread & 3) * 2)
