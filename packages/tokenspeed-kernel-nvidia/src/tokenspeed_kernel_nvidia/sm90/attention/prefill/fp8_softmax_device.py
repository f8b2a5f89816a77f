"""The softmax of a consumer warpgroup with e4m3 probabilities.

Probabilities are rounded as they are computed, into separate registers, so the scores survive until the exponents' shift (row_max)
is known to be good enough. The check uses row sums, which are needed anyway. If a thread's sum over a block is at most the largest
e4m3 value, so is each probability. Otherwise the warp raises the shift to the row max of the scores, and recomputes the
probabilities. This is rare, because the shift starts at a row max, and probabilities may grow 50 times before the shift is raised.
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
    """The accumulator elements that are packed into a word of the A operand.

    In lane t of a quad, word ``r + 2 h + 4 s`` packs four elements of the lane's row r. The key positions of these elements are
    ``16 h + 4 t`` to ``16 h + 4 t + 3`` in the s-th group of 32 keys, see `convert_device`.
    """
    first = 4 * (word // 4 * 4 + word // 2 % 2 * 2) + word % 2 * 2
    return first, first + 1, first + 4, first + 5


@cute.jit
def weigh(scores: cute.Tensor, words: cute.Tensor, shifts: cute.Tensor, sums: cute.Tensor, scale: Float32) -> None:
    """Writes ``exp2(score * scale - shift)``, rounded to e4m3 with saturation, to ``words``.

    ``sums`` receives this thread's partial row sums of its two rows, unrounded.
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

    The opaque move keeps the compiler from letting `weigh` write to the operand's registers directly. An MMA in flight still reads
    these registers, so the MMAs would be serialised.
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
        """Computes the probabilities of a further block of keys (online softmax).

        Returns:
            whether this thread's probabilities were too large; each row's rescale factor of accumulators; this thread's partial row
            sums of the block; the probabilities, for `put`.
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
        """See `move`."""
        move(words, probs)

    @cute.jit
    def put_first(self, weights: cute.Tensor, probs: cute.Tensor):
        """Rounds probabilities of a tile's first block to the A operand of P @ V. Zeros pad the probabilities of half a block."""
        words = cute.recast_tensor(probs, cutlass.Uint32)
        for i in cutlass.range_constexpr(cute.size(words)):
            elements = elements_of_word(i)
            if const_expr(elements[0] < cute.size(weights)):
                words[i] = pack_fp8(*(weights[at] for at in elements))
            else:
                words[i] = cutlass.Uint32(0)
