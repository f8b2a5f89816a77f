"""The softmax of attention in registers, in powers of 2: ``exp2(score * scale - shift)`` with ``scale = softmax_scale * log2(e)``.

What is called a row's maximum here (row_max) is the shift of its exponents, in units of base 2. It need not be the maximum itself:
any number will do that keeps the exponentials in range.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from tokenspeed_kernel_nvidia.sm90.common.launch import LOG2_E
from tokenspeed_kernel_nvidia.sm90.common.registers_device import any_lane, quad_max

LN2 = 0.6931471805599453
# What a running maximum begins with. Finite, so that a row that has not seen a key yet gives weights of 0 and not NaN.
LOWEST = -1.0e30


@cute.jit
def exp2(x: Float32) -> Float32:
    return cute.math.exp2(x, fastmath=True)


@cute.jit
def exp2_ftz(x: Float32) -> Float32:
    """By one instruction, which takes denormal numbers for 0."""
    return cute.arch.inline_ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


@cute.jit
def log2_ftz(x: Float32) -> Float32:
    """By one instruction, which takes denormal numbers for 0."""
    return cute.arch.inline_ptx("lg2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


@cute.jit
def reciprocal_ftz(x: Float32) -> Float32:
    """By one instruction; 0 of infinity."""
    return cute.arch.inline_ptx("rcp.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


@cute.jit
def tanh(x: Float32) -> Float32:
    """By one instruction, off by at most 2^-11 of the result."""
    return cute.arch.inline_ptx("tanh.approx.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


# -- rows of an accumulator; for how its elements lie see `registers_device` -----------------------------------------------------


@cute.jit
def lane_maxima(scores: cute.Tensor):
    """The maxima of what this thread holds of its two rows. Four chains side by side, because one waits for itself."""
    best = [scores[i] for i in range(4)]
    for j in cutlass.range_constexpr(1, cute.size(scores) // 4):
        for i in cutlass.range_constexpr(4):
            best[i] = cute.arch.fmax(best[i], scores[4 * j + i])
    return cute.arch.fmax(best[0], best[1]), cute.arch.fmax(best[2], best[3])


@cute.jit
def lane_maximum(scores: cute.Tensor, row: cutlass.Constexpr[int]) -> Float32:
    """The maximum of what this thread holds of one of its two rows, in two chains."""
    even, odd = scores[2 * row], scores[2 * row + 1]
    for j in cutlass.range_constexpr(1, cute.size(scores) // 4):
        even = cute.arch.fmax(even, scores[4 * j + 2 * row])
        odd = cute.arch.fmax(odd, scores[4 * j + 2 * row + 1])
    return cute.arch.fmax(even, odd)


@cute.jit
def cap(scores: cute.Tensor, factor: Float32) -> None:
    """Makes ``tanh(x)`` of scores s, where ``factor * s`` is ``2 * log2(e) * x``: ``1 - 2 / (1 + exp(2 * x))``.

    The instruction for tanh is off by 2^-11 of it, which times a cap of 50 is more than the rounding of weights.
    """
    for i in cutlass.range_constexpr(cute.size(scores)):
        scores[i] = Float32(1.0) - 2.0 * reciprocal_ftz(1.0 + exp2_ftz(scores[i] * factor))


@cute.jit
def cap_by_tanh(scores: cute.Tensor, factor: Float32) -> None:
    """`cap` by the instruction for tanh, which is off by at most 2^-11 of it.

    Were the errors of 4096 scores random and as large as that, outputs would be off by 6e-4 of their norm for scores of variance 1,
    where rounding weights to bfloat16 takes 1.5e-3, and by 2.6e-3 for a standard deviation of 5 and a cap of 50. With `cap`
    instead, prefill of Gemma 2 (9B: 4 x 4096 tokens, heads of 256) took 980 us on an H200, and 836 with this; that of the 27B,
    with heads of 128, 1295 and 1028, and 839 without a cap.
    """
    each = factor * (0.5 * LN2)  # it is for powers of 2, of the double
    for i in cutlass.range_constexpr(cute.size(scores)):
        scores[i] = tanh(scores[i] * each)


@cute.jit
def exponentials(scores: cute.Tensor, row: cutlass.Constexpr[int], scale: Float32, shift: Float32) -> Float32:
    """Makes ``exp2(score * scale - shift)`` of a row's scores, and returns this thread's sum of them."""
    sums = [Float32(0.0), Float32(0.0)]
    for j in cutlass.range_constexpr(cute.size(scores) // 4):
        for c in cutlass.range_constexpr(2):
            at = 4 * j + 2 * row + c
            scores[at] = exp2(scores[at] * scale - shift)
            sums[c] = scores[at] if cutlass.const_expr(j == 0) else sums[c] + scores[at]
    return sums[0] + sums[1]


@cute.jit
def softmax_first(
    scores: cute.Tensor, row_max: cute.Tensor, row_sum: cute.Tensor, scale: Float32, lift: cutlass.Constexpr[float] = 0.0
) -> None:
    """The exponentials of a tile's first block of keys: begins the running maxima and sums of this thread's two rows.

    Args:
        lift: the largest exponential, as a power of 2.
    """
    seen = lane_maxima(scores)
    for r in cutlass.range_constexpr(2):
        row_max[r] = cute.arch.fmax(quad_max(seen[r]) * scale - lift, LOWEST)
        row_sum[r] = exponentials(scores, r, scale, row_max[r])


@cute.jit
def softmax_step(
    scores: cute.Tensor,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    scale: Any,
    lazy: cutlass.Constexpr[float],
    lift: cutlass.Constexpr[float] = 0.0,
):
    """The exponentials of a further block of keys (online softmax).

    Args:
        scale: of the scores; a pair where this thread's two rows have one each.
        lazy: how far, as a power of 2, they may exceed ``2**lift`` before the maxima are raised.
        lift: as of `softmax_first`.

    Returns:
        whether this thread's maxima rose by more; what each row's earlier sums are to be multiplied by; this thread's sums.
    """
    maxima = lane_maxima(scores)
    scales = scale if cutlass.const_expr(isinstance(scale, tuple)) else (scale, scale)
    seen = (maxima[0] * scales[0] - lift, maxima[1] * scales[1] - lift)
    grown = (seen[0] > row_max[0] + lazy) | (seen[1] > row_max[1] + lazy)
    factor = cute.make_rmem_tensor(2, Float32)
    factor.fill(1.0)
    if any_lane(grown):
        for r in cutlass.range_constexpr(2):
            raised = cute.arch.fmax(quad_max(seen[r]), row_max[r])
            factor[r] = exp2(row_max[r] - raised)
            row_max[r] = raised
            row_sum[r] = row_sum[r] * factor[r]
    sums = [exponentials(scores, r, scales[r], row_max[r]) for r in range(2)]
    for r in cutlass.range_constexpr(2):
        row_sum[r] = row_sum[r] + sums[r]
    return grown, factor, sums


@cute.jit
def raise_to(row_max: Float32, other: Float32):
    """The larger one of two maxima, and what sums that belong to ``row_max`` are multiplied by where that one takes its place."""
    raised = cute.arch.fmax(row_max, other)
    return raised, exp2(row_max - raised)


# -- sinks -----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sinks:
    """One more score for each query head, in the softmax's denominator only.

    Attributes:
        address: where they lie.
        kind: their dtype, see `launch.KINDS`; 0 for none.
    """

    address: Int64
    kind: Int32

    @cute.jit
    def load(self, head: Int32) -> Float32:
        """A query head's sink in units of base 2; -inf if there are none, which weighs nothing."""
        sink = -Float32.inf
        if self.kind == 1:
            sink = cute.make_ptr(Float32, self.address, cute.AddressSpace.gmem)[head] * LOG2_E
        elif self.kind == 2:
            sink = cute.make_ptr(cutlass.BFloat16, self.address, cute.AddressSpace.gmem)[head].to(Float32) * LOG2_E
        elif self.kind == 3:
            sink = cute.make_ptr(cutlass.Float16, self.address, cute.AddressSpace.gmem)[head].to(Float32) * LOG2_E
        return sink

    @cute.jit
    def load_two(self, first: Int32, rows: tuple, heads: cutlass.Constexpr[int]):
        """Those of query heads ``first + row % heads`` for two rows; not in units of base 2 yet."""
        sink_0, sink_1 = -Float32.inf, -Float32.inf
        for index, dtype in enumerate((Float32, cutlass.BFloat16, cutlass.Float16)):
            if self.kind == index + 1:
                table = cute.make_tensor(cute.make_ptr(dtype, self.address, cute.AddressSpace.gmem), cute.make_layout(1 << 20))
                sink_0 = Float32(table[first + rows[0] % heads])
                sink_1 = Float32(table[first + rows[1] % heads])
        return sink_0, sink_1
