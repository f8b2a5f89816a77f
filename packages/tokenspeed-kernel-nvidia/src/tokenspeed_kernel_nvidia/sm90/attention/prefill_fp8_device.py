"""The weights of `prefill_mma_device` where they are rounded to e4m3.

Weights are rounded as soon as they are computed, into registers of their own, so that scores are there until it is known whether
the shift of the exponents is still good. Sums of weights say so, which are computed anyway: where a thread's sum over a block is at
most the largest e4m3, so is each of the weights. Otherwise the thread's warp raises the shift to the maximum of its scores, and
computes the weights once more. That is seldom: the shift begins with a maximum too, and weights grow 50 times before it is raised.
"""

# mypy: ignore-errors

from __future__ import annotations

import cutlass
from cutlass import Float32, const_expr, cute

from tokenspeed_kernel_nvidia.sm90.common.registers_device import any_lane, opt_barrier, pack_fp8, quad_max
from tokenspeed_kernel_nvidia.sm90.common.softmax_device import exp2, lane_maxima

LARGEST = 448.0  # of e4m3


def places(word: int) -> tuple[int, ...]:
    """The accumulator's elements of which a word of the left operand is made.

    Word ``r + 2 h + 4 s`` has row r of the places 16 h to 16 h + 15 of 32 keys s, see `prefill_convert_device`.
    """
    first = 4 * (word // 4 * 4 + word // 2 % 2 * 2) + word % 2 * 2
    return first, first + 1, first + 4, first + 5


@cute.jit
def weigh(scores: cute.Tensor, words: cute.Tensor, shifts: cute.Tensor, sums: cute.Tensor, scale: Float32) -> None:
    """Writes ``exp2(score * scale - shift)``, rounded to e4m3, to ``words``, and this thread's sums of its two rows to ``sums``.

    What is too large becomes the largest e4m3.
    """
    parts = [[None, None], [None, None]]
    for i in cutlass.range_constexpr(cute.size(words)):
        row = i % 2
        weights = [exp2(scores[at] * scale - shifts[row]) for at in places(i)]
        words[i] = pack_fp8(*weights)
        for at in cutlass.range_constexpr(4):
            before = parts[row][at % 2]
            parts[row][at % 2] = weights[at] if const_expr(before is None) else before + weights[at]
    for row in cutlass.range_constexpr(2):
        sums[row] = parts[row][0] + parts[row][1]


@cute.jit
def move(words: cute.Tensor, probs: cute.Tensor) -> None:
    """Makes words the left operand of the next product with values, when the last one has been waited for.

    The compiler must not see that they are the same numbers: it would have `weigh` write to the registers of the operand, and
    products, which read them, would wait for each other.
    """
    operand = cute.recast_tensor(probs, cutlass.Uint32)
    for i in cutlass.range_constexpr(cute.size(words)):
        operand[i] = opt_barrier(words[i])


@cute.jit
def weigh_step(
    scores: cute.Tensor,
    words: cute.Tensor,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    scale: Float32,
    lift: cutlass.Constexpr[float],
):
    """Computes the weights of a further block of keys (online softmax).

    Args:
        lift: what a raised shift makes the largest weight, as a power of 2.

    Returns:
        whether this thread's weights were too large; what each row's earlier sums are to be multiplied by; this thread's sums.
    """
    of_block, factor = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
    factor.fill(1.0)
    weigh(scores, words, row_max, of_block, scale)
    grown = (of_block[0] > LARGEST) | (of_block[1] > LARGEST)
    if any_lane(grown):
        maxima = lane_maxima(scores)
        for r in cutlass.range_constexpr(2):
            raised = cute.arch.fmax(quad_max(maxima[r]) * scale - lift, row_max[r])
            factor[r] = exp2(row_max[r] - raised)
            row_max[r] = raised
            row_sum[r] = row_sum[r] * factor[r]
        weigh(scores, words, row_max, of_block, scale)
    for r in cutlass.range_constexpr(2):
        row_sum[r] = row_sum[r] + of_block[r]
    return grown, factor, of_block
