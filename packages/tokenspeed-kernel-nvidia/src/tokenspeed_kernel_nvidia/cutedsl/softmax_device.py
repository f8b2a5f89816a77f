"""Online softmax on accumulator fragments, in base 2: ``exp2(score * scale - shift)`` with ``scale = softmax_scale * log2(e)``.

``row_max`` is a row's shift, in base 2. The shift need not be the exact row max: any value that keeps the exponentials in range is
correct.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from tokenspeed_kernel_nvidia.cutedsl.launch import LOG2_E
from tokenspeed_kernel_nvidia.cutedsl.registers_device import any_lane, quad_max

LN2 = 0.6931471805599453
# The initial row max. The value is finite, so that the exponentials of a row without visible keys are 0, not NaN.
LOWEST = -1.0e30


@cute.jit
def exp2(x: Float32) -> Float32:
    """Computes exp2 with CuteDSL's fast approximation."""
    return cute.math.exp2(x, fastmath=True)


@cute.jit
def exp2_ftz(x: Float32) -> Float32:
    """Computes exp2 by one ex2 instruction; flushes denormals to 0."""
    return cute.arch.inline_ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


@cute.jit
def log2_ftz(x: Float32) -> Float32:
    """Computes log2 by one lg2 instruction; flushes denormals to 0."""
    return cute.arch.inline_ptx("lg2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


@cute.jit
def reciprocal_ftz(x: Float32) -> Float32:
    """Computes 1 / x by one rcp instruction; maps infinity to 0."""
    return cute.arch.inline_ptx("rcp.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


@cute.jit
def tanh(x: Float32) -> Float32:
    """Computes tanh by one instruction; relative error at most 2^-11."""
    return cute.arch.inline_ptx("tanh.approx.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


# -- rows of an accumulator, whose layout `registers_device` describes ----------------------------------------------------------


@cute.jit
def lane_maxima(scores: cute.Tensor):
    """Returns the max over the thread's elements for each of its two accumulator rows. Four independent chains hide fmax
    latency."""
    best = [scores[i] for i in range(4)]
    for j in cutlass.range_constexpr(1, cute.size(scores) // 4):
        for i in cutlass.range_constexpr(4):
            best[i] = cute.arch.fmax(best[i], scores[4 * j + i])
    return cute.arch.fmax(best[0], best[1]), cute.arch.fmax(best[2], best[3])


@cute.jit
def lane_maximum(scores: cute.Tensor, row: cutlass.Constexpr[int]) -> Float32:
    """Returns the max over the thread's elements of one of its two accumulator rows, in two independent chains of fmax."""
    even, odd = scores[2 * row], scores[2 * row + 1]
    for j in cutlass.range_constexpr(1, cute.size(scores) // 4):
        even = cute.arch.fmax(even, scores[4 * j + 2 * row])
        odd = cute.arch.fmax(odd, scores[4 * j + 2 * row + 1])
    return cute.arch.fmax(even, odd)


@cute.jit
def cap(scores: cute.Tensor, factor: Float32) -> None:
    """Logit cap: replaces each score s by ``tanh(x)``, where ``2 * log2(e) * x`` equals ``factor * s``. Computes tanh(x) as ``1 - 2
    / (1 + exp(2 * x))``.

    The tanh instruction is not used: it has a relative error of 2^-11. With a cap of 50, the resulting error exceeds that of
    rounding P to 16 bits.
    """
    for i in cutlass.range_constexpr(cute.size(scores)):
        scores[i] = Float32(1.0) - 2.0 * reciprocal_ftz(1.0 + exp2_ftz(scores[i] * factor))


@cute.jit
def cap_by_tanh(scores: cute.Tensor, factor: Float32) -> None:
    """Like `cap`, but uses the tanh instruction, whose relative error is at most 2^-11.

    Suppose that 4096 scores of a row have random errors of that size. With scores of variance 1, outputs would have an error of
    6e-4 of their norm; rounding P to bfloat16 costs 1.5e-3. With scores of standard deviation 5 and a cap of 50, the error would be
    2.6e-3. Prefill of Gemma 2 9B (4 x 4096 tokens, head_dim 256) took 836 us on an H200 with this function, and 980 us with `cap`.
    Prefill of Gemma 2 27B (head_dim 128) took 1028 us with this function, 1295 us with `cap`, and 839 us without a cap.
    """
    each = factor * (0.5 * LN2)  # factor is 2 * log2(e) * x / s
    for i in cutlass.range_constexpr(cute.size(scores)):
        scores[i] = tanh(scores[i] * each)


@cute.jit
def exponentials(scores: cute.Tensor, row: cutlass.Constexpr[int], scale: Float32, shift: Float32) -> Float32:
    """Replaces the scores of one of this thread's two rows by ``exp2(score * scale - shift)``. Returns this thread's sum of the
    results."""
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
    """Replaces the scores of the first block of keys by their exponentials, and initialises the running max and sum of this
    thread's two rows.

    Args:
        scale: factor of the scores.
        lift: log2 of the value that a row's largest exponential gets.
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
    """Online softmax: replaces the scores of a further block of keys by their exponentials, and updates the running max and sum.

    Args:
        scale: factor of the scores; a pair if this thread's two rows have different scales.
        lazy: log2 of the factor by which exponentials may exceed ``2**lift`` before the row max is raised (lazy rescaling). So most
            blocks of keys need no rescaling of the output accumulator.
        lift: as for `softmax_first`.

    Returns:
        Whether one of this thread's row maxima grew by more than ``lazy``; for each row, the factor that rescales the earlier
        output accumulator; for each row, this thread's sum of the block's exponentials.
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
    """Returns the larger of two row maxima, and the factor that rescales accumulators from ``row_max`` to that maximum."""
    raised = cute.arch.fmax(row_max, other)
    return raised, exp2(row_max - raised)


# -- sinks -----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sinks:
    """Attention sinks: one extra score for each query head, in the softmax's denominator only.

    Attributes:
        address: global address of query head 0's sink.
        kind: the sinks' dtype, see `launch.KINDS`; 0 without sinks.
    """

    address: Int64
    kind: Int32

    @cute.jit
    def load(self, head: Int32) -> Float32:
        """Loads the sink of a query head, times log2(e). Returns -inf without sinks, which adds 0 to a row sum."""
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
        """Loads the sinks of query heads ``first + row % heads`` for two rows, not yet multiplied by log2(e)."""
        sink_0, sink_1 = -Float32.inf, -Float32.inf
        for index, dtype in enumerate((Float32, cutlass.BFloat16, cutlass.Float16)):
            if self.kind == index + 1:
                table = cute.make_tensor(cute.make_ptr(dtype, self.address, cute.AddressSpace.gmem), cute.make_layout(1 << 20))
                sink_0 = Float32(table[first + rows[0] % heads])
                sink_1 = Float32(table[first + rows[1] % heads])
        return sink_0, sink_1
