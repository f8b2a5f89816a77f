"""Exact dot products of `stream`, for rows that fp8 parts cannot represent.

A row is scaled by its amax before it is split, so a row with outliers loses small elements, see `rows_device`. The MMA warps detect
such rows while they split rows. The epilogue warps then replace these rows' sums. They read the weights again from global memory,
and compute the dot products in float32 with FMAs. This takes many times as long as the MMAs, but models rarely have such rows.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute

from tokenspeed_kernel_nvidia.cutedsl.memory_device import load_words
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.decode_device import E5M2_FACTOR, decode_e5m2, scales_of
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.layout import BLOCK, BLOCK_BYTES, CODE_BYTES, PANEL_BLOCK_BYTES, PANEL_HEAD_BYTES
from tokenspeed_kernel_nvidia.cutedsl.registers_device import load_floats, widened
from tokenspeed_kernel_nvidia.sm90.moe.stream.rows_device import Rows
from tokenspeed_kernel_nvidia.sm90.moe.stream.tile_device import W13, Call, entry_of, index_of, kind_of, panel_of

HALVES = 2  # halves of a block; each half has a scale
# Converts four float8_e5m2 to float32. A float8_e5m2 is the upper byte of a float16.
_FLOATS = """{
.reg .b32 p, q;
.reg .b16 a, b, c, d;
prmt.b32 p, {$r0}, 0, 0x1404;
prmt.b32 q, {$r0}, 0, 0x3424;
mov.b32 {a, b}, p;
mov.b32 {c, d}, q;
cvt.f32.f16 {$w0}, a;
cvt.f32.f16 {$w1}, b;
cvt.f32.f16 {$w2}, c;
cvt.f32.f16 {$w3}, d;
}"""


def floats_of(word: Uint32) -> Any:
    """Converts a word of four float8_e5m2 values to float32."""
    return cute.arch.inline_ptx(_FLOATS, write_only_types=[Float32] * 4, read_only_args=[word])


class ExactDotProducts(Rows):
    """The part of the kernel that computes dot products without tensor cores, for rows that the fp8 parts do not represent."""

    @cute.jit
    def exact_dot_products(self, call: Call, item: Int32, strip: Int32, pair: Int32):
        """Returns a pair's dot products with two rows of a strip, ``lane / 4`` and ``lane / 4 + 8``, without the row factors. They
        replace the MMAs' sums. All lanes of an epilogue warp call this method; the four lanes of a quad split k."""
        layer = call.layer
        lane = cute.arch.lane_idx()
        first = kind_of(item) == W13
        k = cutlass.select_(first, layer.hidden, layer.intermediate)
        blocks = cutlass.select_(first, layer.w13_blocks, layer.w2_blocks)
        panels = cutlass.select_(first, layer.w13_items, layer.w2_items)
        size = cutlass.select_(first, layer.w13_bytes, layer.w2_bytes)
        expert = entry_of(call.entries[index_of(item)]).expert
        panel = (Int64(expert) * panels + panel_of(item)) * size
        at = cutlass.select_(first, layer.w13, layer.w2) + panel + PANEL_HEAD_BYTES + Int64(strip) * BLOCK_BYTES
        row = self.address_of_row(call, first, pair)
        upper, lower = Float32(0.0), Float32(0.0)
        for block in cutlass.range(blocks, unroll=1):
            words = load_words("global", at + lane * 16, 2 * HALVES)
            scales = scales_of(load_words("global", at + CODE_BYTES + lane // 4 * 4, 1))
            for half in cutlass.range_constexpr(HALVES):
                begin = block * BLOCK + half * (BLOCK // HALVES)
                if begin < k:
                    sums = [Float32(0.0), Float32(0.0)]
                    for word in cutlass.range_constexpr(2):
                        # The order of the lane's elements along k, as `decode_e5m2` gives it: 0, 8, 1 and 9.
                        near = self.two_numbers(row, first, begin + word * 16 + lane % 4 * 2)
                        far = self.two_numbers(row, first, begin + word * 16 + lane % 4 * 2 + 8)
                        numbers = (near[0], far[0], near[1], far[1])
                        for r, codes in enumerate(decode_e5m2(words[2 * half + word])):
                            for weight, number in zip(floats_of(codes), numbers, strict=True):
                                sums[r] += weight * number
                    upper += sums[0] * scales[2 * half]
                    lower += sums[1] * scales[2 * half + 1]
            at += PANEL_BLOCK_BYTES
        for shift in cutlass.range_constexpr(2):
            upper += cute.arch.shuffle_sync_bfly(upper, offset=1 << shift)
            lower += cute.arch.shuffle_sync_bfly(lower, offset=1 << shift)
        return upper * E5M2_FACTOR, lower * E5M2_FACTOR

    @cute.jit
    def two_numbers(self, row: Int64, first: Any, at: Int32):
        """Returns two consecutive elements of a row, as float32."""
        if const_expr(not self.wide):
            return list(widened(self.dtype, load_words("global", row + Int64(at) * 2, 1)))
        numbers = [Float32(0.0), Float32(0.0)]
        if first:
            numbers = list(widened(self.dtype, load_words("global", row + Int64(at) * 2, 1)))
        else:
            numbers = list(load_floats("global", row + Int64(at) * 4, 2))
        return numbers
