"""The masks that the score warpgroup of `mla_extend` applies to scores."""

# mypy: ignore-errors

from __future__ import annotations

import cutlass
from cutlass import Int32, cute

from tokenspeed_kernel_nvidia.cutedsl import mask_device as masks
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.tile_device import Call, thread_of_scores
from tokenspeed_kernel_nvidia.sm90.attention.mla_extend.scheduler_device import ExtendWork


@cute.jit
def hide(work: ExtendWork, call: Call, scores: cute.Tensor, item: Int32, valid: Int32):
    """Masks the scores of tokens after each query's own token if attention is causal, and of slots beyond the sequence. Arguments:
    see `mla_decode`'s `hide_later_tokens`."""
    c = work.config
    thread = thread_of_scores()
    row = (thread >> 5) * 16 + ((thread & 31) >> 2)
    limit = valid
    if cutlass.const_expr(c.tokens_of_item > 1):
        _, _, tokens = work.tokens_of(call, item)
        # The number of the block's tokens that the first new token of this CTA's tile sees.
        limit = cutlass.select_(call.is_causal != 0, valid - (tokens - 1) + work.tokens_before(call), valid)
    for r in cutlass.range_constexpr(2):
        seen = limit
        if cutlass.const_expr(c.tokens_of_tile > 1):
            seen = limit + cutlass.select_(call.is_causal != 0, (row + 8 * r) // c.heads_of_tile, Int32(0))
        masks.hide_from(scores, r, seen - (thread & 3) * 2)
