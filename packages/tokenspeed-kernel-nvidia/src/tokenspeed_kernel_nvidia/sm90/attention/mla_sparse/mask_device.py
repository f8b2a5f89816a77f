"""The masks that the score warpgroup of `mla_sparse` applies to scores."""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Uint32, cute

from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Cursor
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.tile_device import Call, thread_of_scores


@dataclass(frozen=True)
class GatherMask:
    """Masks the keys of a block that are not selected. The counterpart of `TokenMask`."""

    @cute.jit
    def apply(self, call: Call, scores: cute.Tensor, item: Int32, valid: Int32, end: Cursor, rope_at: Cursor):
        """Masks the scores of the block's rows that hold no selected key. The producer warps have stored a bit per row in the
        block's `Notes`. Arguments: see `TokenMask.apply`."""
        chosen = call.notes(rope_at).chosen(Uint32)
        low, high = chosen[0], chosen[1]
        if (low & high) != 0xFFFFFFFF:
            thread = thread_of_scores()
            words = [word >> ((thread & 3) * 2) for word in (low, high)]
            for j in cutlass.range_constexpr(cute.size(scores) // 4):
                for c in cutlass.range_constexpr(2):
                    is_key = (words[j // 4] >> (j % 4 * 8 + c)) & 1
                    for r in cutlass.range_constexpr(2):
                        at = 4 * j + 2 * r + c
                        scores[at] = scores[at] if is_key != 0 else -Float32.inf
