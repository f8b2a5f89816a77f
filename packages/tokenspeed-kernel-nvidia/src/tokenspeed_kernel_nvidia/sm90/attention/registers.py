"""What the attention kernels do alike with the registers of a warp: exponentials, accumulators as operands, reductions, masks.

An accumulator of wgmma or mma.sync is a flat list here. A thread holds rows r = 0, 1, which lie 8 apart, and of each of the tile's
groups of 8 columns two neighbours c = 0, 1: element ``4 * j + 2 * r + c`` is column ``8 * j + 2 * (lane % 4) + c``.
"""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Numeric, cute

from tokenspeed_kernel_nvidia.sm90.attention.launching import LOG2_E

LN2 = 0.6931471805599453
# What a running maximum begins with. Finite, so that a row that has not seen a key yet gives weights of 0 and not NaN.
LOWEST = -1.0e30


@cute.jit
def exp2(x: Float32) -> Float32:
    return cute.math.exp2(x, fastmath=True)


@cute.jit
def row_maxima(scores: cute.Tensor):
    """The maxima of what this thread holds of its two rows. Four chains side by side, because one waits for itself."""
    best = [scores[i] for i in range(4)]
    for j in cutlass.range_constexpr(1, cute.size(scores) // 4):
        for i in cutlass.range_constexpr(4):
            best[i] = cute.arch.fmax(best[i], scores[4 * j + i])
    return cute.arch.fmax(best[0], best[1]), cute.arch.fmax(best[2], best[3])


@cute.jit
def quad_max(x: Float32) -> Float32:
    """Over the four lanes that hold one row."""
    x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=1))
    return cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=2))


@cute.jit
def quad_sum(x: Float32) -> Float32:
    x += cute.arch.shuffle_sync_bfly(x, offset=1)
    return x + cute.arch.shuffle_sync_bfly(x, offset=2)


@cute.jit
def scale_row(values: cute.Tensor, row: cutlass.Constexpr[int], factor: Float32) -> None:
    for j in cutlass.range_constexpr(cute.size(values) // 4):
        values[4 * j + 2 * row] = values[4 * j + 2 * row] * factor
        values[4 * j + 2 * row + 1] = values[4 * j + 2 * row + 1] * factor


@cute.jit
def hide_from(scores: cute.Tensor, row: cutlass.Constexpr[int], limit: Int32) -> None:
    """Makes -inf of a row's columns from ``limit`` on. ``limit`` counts from this thread's first column of the tile."""
    for j in cutlass.range_constexpr(cute.size(scores) // 4):
        for c in cutlass.range_constexpr(2):
            at = 4 * j + 2 * row + c
            scores[at] = scores[at] if 8 * j + c < limit else -Float32.inf


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
def sink_of(sinks: Int64, kind: Int32, head: Int32) -> Float32:
    """A query head's sink, times log2(e).

    Args:
        sinks: where they lie.
        kind: see `launching.SINKS`; 0 for none, which weigh nothing.
    """
    sink = -Float32.inf
    if kind == 1:
        sink = cute.make_ptr(Float32, sinks, cute.AddressSpace.gmem)[head] * LOG2_E
    elif kind == 2:
        sink = cute.make_ptr(cutlass.BFloat16, sinks, cute.AddressSpace.gmem)[head].to(Float32) * LOG2_E
    elif kind == 3:
        sink = cute.make_ptr(cutlass.Float16, sinks, cute.AddressSpace.gmem)[head].to(Float32) * LOG2_E
    return sink


@cute.jit
def any_lane(condition: Boolean) -> Boolean:
    return cute.arch.vote_any_sync(condition)


@cute.jit
def ballot(condition: Boolean) -> Int32:
    return Int32(cute.arch.vote_ballot_sync(condition))


@cute.jit
def warp_prefix(x: Int32, lane: Int32) -> Int32:
    """The sum of this lane's and all lower lanes' values."""
    for shift in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(x, offset=1 << shift)
        x = x + below if lane >= 1 << shift else x
    return x


@cute.jit
def opaque(x: Int32) -> Int32:
    """The same value, unknown to the compiler: what is computed from it is not kept in registers across a loop before."""
    return Int32(cute.arch.inline_ptx("mov.u32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x]))


@cute.jit
def rounded(source: cute.Tensor, target: cute.Tensor) -> None:
    """Rounds an accumulator to the half-precision operand of the next product; their elements lie alike."""
    target.store(source.load().to(target.element_type))


def type_of(name: str) -> type[Numeric]:
    return {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[name]
