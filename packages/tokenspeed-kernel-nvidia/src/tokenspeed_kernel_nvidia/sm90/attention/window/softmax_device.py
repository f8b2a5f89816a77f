"""Masks and softmax of a tile. One GEMM computes all scores of a tile, so the row max is known before the first exponential, and
the softmax needs no rescale."""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Numeric, cute

from tokenspeed_kernel_nvidia.cutedsl import mask_device as masks
from tokenspeed_kernel_nvidia.cutedsl import softmax_device as softmax
from tokenspeed_kernel_nvidia.cutedsl.launch import LOG2_E
from tokenspeed_kernel_nvidia.cutedsl.registers_device import pack, quad_max
from tokenspeed_kernel_nvidia.cutedsl.softmax_device import Sinks
from tokenspeed_kernel_nvidia.sm90.attention.window.config import REACH, Config
from tokenspeed_kernel_nvidia.sm90.attention.window.scheduler_device import Work
from tokenspeed_kernel_nvidia.sm90.attention.window.tile_device import Record, Rows


@dataclass(frozen=True)
class TileSoftmax:
    """Sinks, masks and softmax of a consumer warpgroup's tile.

    Attributes:
        dtype: dtype of the probabilities.
    """

    config: Config
    dtype: type[Numeric]
    work: Work

    @cute.jit
    def load_sinks(self, record: Record, sinks: Sinks, tile: Int32, mine: Rows):
        """Loads the sinks of this thread's two rows of a tile, times log2(e). Returns -inf without sinks."""
        head = self.work.head_of(record.kv_head, tile)
        sink_0, sink_1 = -Float32.inf, -Float32.inf
        if record.count > 0:
            sink_0, sink_1 = sinks.load_two(head, mine.rows, self.config.heads)
        return sink_0 * LOG2_E, sink_1 * LOG2_E

    @cute.jit
    def mask(self, scores: cute.Tensor, position: Int32, window_left: Int32, mine: Rows):
        """Masks the scores of keys that queries do not see. ``position`` is the position of the tile's first query, and column c of
        the scores belongs to the key at ``position - REACH + c``."""
        c = self.config
        before = REACH - position  # number of columns whose keys are before the sequence's first token
        low = [cutlass.max(REACH + p - window_left, before) - mine.column for p in mine.positions]
        high = [REACH + p - mine.column for p in mine.positions]
        groups = c.keys // 8
        if window_left != REACH - 1 or before > 0:
            masks.hide_below(scores, low, 0, groups)
        else:  # with a full window, only the first `positions` columns are masked in some rows
            masks.hide_below(scores, low, 0, c.positions // 8)
        masks.hide_above(scores, high, REACH // 8, groups)

    @cute.jit
    def apply(self, scores: cute.Tensor, probs: cute.Tensor, scale: Float32, sinks: tuple, lane: Int32):
        """Computes the softmax of a tile: writes unnormalised probabilities, rounded to 16 bits, to ``probs``, the A operand of P @
        V.

        Returns:
            The row max of this thread's two rows, which includes the sink, and the thread's partial row sums, which the caller sums
            over the quad. One of a quad's four lanes includes the sink in its partial sum.
        """
        c = self.config
        groups = c.keys // 8
        words = cute.recast_tensor(probs, Int32)
        row_max, row_sum = [], []
        for r in cutlass.range_constexpr(2):
            row_max.append(cute.arch.fmax(quad_max(softmax.lane_maximum(scores, r)) * scale, sinks[r]))
            row_sum.append(softmax.exp2_ftz(sinks[r] - row_max[r]) if lane % 4 == 0 else Float32(0.0))
        for j in cutlass.range_constexpr(groups):
            for r in cutlass.range_constexpr(2):
                even = softmax.exp2_ftz(scores[4 * j + 2 * r] * scale - row_max[r])
                odd = softmax.exp2_ftz(scores[4 * j + 2 * r + 1] * scale - row_max[r])
                row_sum[r] += even + odd
                words[2 * j + r] = Int32(pack(self.dtype, even, odd))
        # The k of P @ V is a multiple of 16: pad the probabilities with zeros if the number of keys is not.
        for j in cutlass.range_constexpr(2 * groups, c.inner // 4):
            words[j] = Int32(0)
        return row_max, row_sum
