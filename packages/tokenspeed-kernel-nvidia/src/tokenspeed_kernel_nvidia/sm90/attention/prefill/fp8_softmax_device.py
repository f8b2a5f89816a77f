"""The softmax of a consumer warpgroup with e4m3 probabilities.

Probabilities must be at most 448, the largest e4m3 value. Instead of computing the block's row max first, the warp computes the
probabilities with the row's current shift (row_max), and then checks whether the shift was large enough. The check uses row sums,
which are needed anyway. If a thread's row sum over a block is at most 448, so is each probability. Otherwise the warp raises the
shift to the row max of the scores, and recomputes the probabilities. The scores are still available, because the rounded
probabilities go to separate registers.

A second computation is rare. The shift starts such that the largest probability of the first block is 2^3 (`Config.lift`). So a
later probability may be up to 56 times as large.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, const_expr, cute

from tokenspeed_kernel_nvidia.cutedsl.registers_device import any_lane, opt_barrier, pack_fp8, quad_max
from tokenspeed_kernel_nvidia.cutedsl.softmax_device import exp2, lane_maxima
from tokenspeed_kernel_nvidia.sm90.attention.prefill.config import Config

LARGEST = 448.0  # the largest e4m3 value


def elements_of_word(word: int) -> tuple[int, ...]:
    """Returns the indices of the four accumulator elements that are packed into one word of P @ V's A operand.

    In lane t of a quad, word ``r + 2 h + 4 s`` packs four elements of the lane's row r. The key positions of these elements are
    ``16 h + 4 t`` to ``16 h + 4 t + 3`` in the s-th group of 32 keys, see `convert_device`.
    """
    first = 4 * (word // 4 * 4 + word // 2 % 2 * 2) + word % 2 * 2
    return first, first + 1, first + 4, first + 5


@cute.jit
def weigh(scores: cute.Tensor, words: cute.Tensor, shifts: cute.Tensor, sums: cute.Tensor, scale: Float32) -> None:
    """Writes probabilities ``exp2(score * scale - shift)``, rounded to e4m3 with saturation, to ``words``.

    ``shifts`` are the shifts of this thread's two rows. ``sums`` receives this thread's sums of the unrounded probabilities of each
    row.
    """
    parts = [[None, None], [None, None]]
    for i in cutlass.range_constexpr(cute.size(words)):
        row = i % 2
        weights = [exp2(scores[at] * scale - shifts[row]) for at in elements_of_word(i)]
        words[i] = pack_fp8(*weights)
        for at in cutlass.range_constexpr(4):
            before = parts[row][at % 2]
            parts[row][at % 2] = weights[at] if const_expr(before is None) else before + weights[at]
    for row in cutlass.range_constexpr(2):
        sums[row] = parts[row][0] + parts[row][1]


@cute.jit
def move(words: cute.Tensor, probs: cute.Tensor) -> None:
    """Moves packed probabilities to the A operand of the next P @ V, after the previous P @ V has completed.

    The move is opaque to the compiler. Otherwise `weigh` would write to the operand's registers directly. An MMA in flight still
    reads these registers, so the MMAs would be serialised.
    """
    operand = cute.recast_tensor(probs, cutlass.Uint32)
    for i in cutlass.range_constexpr(cute.size(words)):
        operand[i] = opt_barrier(words[i])


@dataclass(frozen=True)
class Fp8Softmax:
    """Softmax with e4m3 probabilities; the counterpart of `Softmax`."""

    config: Config

    @cute.jit
    def step(self, scores: cute.Tensor, row_max: cute.Tensor, row_sum: cute.Tensor, scale: Float32):
        """Online softmax: computes the probabilities of a further block of keys, and updates the running max and sum.

        Returns:
            Whether this thread's probabilities were too large at first; for each row, the factor that rescales the output
            accumulator; for each row, this thread's sum of the block's probabilities; the packed probabilities, for `put`.
        """
        words = cute.make_rmem_tensor(self.config.block_n // 8, cutlass.Uint32)
        of_block, factor = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        factor.fill(1.0)
        weigh(scores, words, row_max, of_block, scale)
        grown = (of_block[0] > LARGEST) | (of_block[1] > LARGEST)
        if any_lane(grown):
            maxima = lane_maxima(scores)
            for r in cutlass.range_constexpr(2):
                raised = cute.arch.fmax(quad_max(maxima[r]) * scale - self.config.lift, row_max[r])
                factor[r] = exp2(row_max[r] - raised)
                row_max[r] = raised
                row_sum[r] = row_sum[r] * factor[r]
            weigh(scores, words, row_max, of_block, scale)
        for r in cutlass.range_constexpr(2):
            row_sum[r] = row_sum[r] + of_block[r]
        return grown, factor, of_block, words

    def put(self, words: cute.Tensor, probs: cute.Tensor) -> None:
        """Moves packed probabilities to the A operand of the next P @ V, see `move`."""
        move(words, probs)

    @cute.jit
    def put_first(self, weights: cute.Tensor, probs: cute.Tensor):
        """Rounds the probabilities of a tile's first block to the A operand of P @ V. If the first block is half a block, zeros pad
        it."""
        words = cute.recast_tensor(probs, cutlass.Uint32)
        for i in cutlass.range_constexpr(cute.size(words)):
            elements = elements_of_word(i)
            if const_expr(elements[0] < cute.size(weights)):
                words[i] = pack_fp8(*(weights[at] for at in elements))
            else:
                words[i] = cutlass.Uint32(0)
