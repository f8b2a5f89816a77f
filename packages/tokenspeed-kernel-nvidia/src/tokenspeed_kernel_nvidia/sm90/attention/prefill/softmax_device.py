"""The softmax of a consumer warpgroup with 16-bit probabilities. `fp8_softmax_device` is the counterpart for e4m3 probabilities."""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Numeric, const_expr, cute

from tokenspeed_kernel_nvidia.cutedsl import registers_device as registers
from tokenspeed_kernel_nvidia.cutedsl import softmax_device as softmax
from tokenspeed_kernel_nvidia.sm90.attention.prefill.config import Config


@dataclass(frozen=True)
class Softmax:
    """Softmax with 16-bit probabilities.

    Attributes:
        dtype: dtype of the probabilities.
    """

    config: Config
    dtype: type[Numeric]

    @cute.jit
    def step(self, scores: cute.Tensor, row_max: cute.Tensor, row_sum: cute.Tensor, scale: Float32):
        """Online softmax of a further block of keys: replaces the block's scores with unnormalised probabilities, and updates the
        running max and sum. The row max is raised only if it grew by more than `Config.lazy`.

        Returns:
            The results of `softmax_step`, then the probabilities, for `put`.
        """
        grown, factor, of_block = softmax.softmax_step(scores, row_max, row_sum, scale, self.config.lazy)
        return grown, factor, of_block, scores

    def put(self, weights: cute.Tensor, probs: cute.Tensor) -> None:
        """Rounds a block's probabilities to the A operand of the next P @ V, after the previous P @ V has completed."""
        registers.round_to(weights, probs)

    @cute.jit
    def put_first(self, weights: cute.Tensor, probs: cute.Tensor):
        """Does `put` for a tile's first block. If the first block is half a block, zeros pad its probabilities."""
        if const_expr(cute.size(weights) < cute.size(probs)):
            part = cute.make_tensor(probs.iterator, cute.make_layout(cute.size(weights)))
            registers.round_to(weights, part)
            for i in cutlass.range_constexpr(cute.size(weights), cute.size(probs)):
                probs[i] = self.dtype(0.0)
        else:
            registers.round_to(weights, probs)
