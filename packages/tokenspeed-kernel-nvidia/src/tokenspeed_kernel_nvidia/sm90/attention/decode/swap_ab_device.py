"""Swap-AB variant of `mma_device`: K and V are the A operands, for eight query rows and an fp8 cache.

mma.m16n8k16 has 16 rows and 8 columns. With up to eight query rows as its rows, half of the rows are padding. So half of the
registers of queries and accumulators are padding too, which is too expensive for wide heads. In this module, keys (or columns of V)
are the rows of the MMA, and query rows its columns. Lane ``4 g + t`` holds the scores of query rows 2 t and 2 t + 1 with keys g and
g + 8 of each group of 16. For the same query rows, the lane holds output columns 2 g and 2 g + 1 of each group of 16.

The accumulator of k @ q.T has keys as rows, but the B operand of V.T @ P.T needs each lane's keys to be adjacent. So `softmax`
transposes each 8 x 8 matrix of probabilities between lanes.
"""

# mypy: ignore-errors

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Uint32, const_expr, cute

from tokenspeed_kernel_nvidia.cutedsl.registers_device import (
    any_lane,
    column_max,
    column_sum,
    ldmatrix,
    mma_m16n8k16,
    opt_barrier,
    pack,
    permute_bytes,
    store_floats,
    transpose_matrix,
    widen_fp8,
)
from tokenspeed_kernel_nvidia.cutedsl.softmax_device import LOWEST, cap, exp2
from tokenspeed_kernel_nvidia.sm90.attention.decode.merge_device import Merger, Sums
from tokenspeed_kernel_nvidia.sm90.attention.decode.tile_device import LAZY, Call, Shapes


class SwapAb:
    """The swap-AB MMAs and their softmax."""

    def __init__(self, shapes: Shapes, merger: Merger) -> None:
        self.config = shapes.config
        self.shapes = shapes
        self.merger = merger

    @cute.jit
    def begin(self, sums: Sums):
        """Resets the row max and row sum of a lane's two query rows."""
        for r in cutlass.range_constexpr(2):
            sums.row_max[0, r] = Float32(LOWEST)
            sums.row_sum[0, r] = Float32(0.0)

    @cute.jit
    def attend(self, call: Call, tile_at: Int32, values_at: Int32, start: Int32, length: Int32, queries: cute.Tensor, sums: Sums):
        """Accumulates one tile of keys and values, which begins at position ``start``. V must be 0 at positions that no query
        sees."""
        c = self.config
        scores = self.qk(tile_at, queries)
        if const_expr(c.capped):
            cap(scores, self.merger.qk_scale(sums, 0))
        windowed = call.window_left >= 0
        if start + c.block > length - call.q_len + 1 or (windowed and start < length - 1 - call.window_left):
            self.mask(call, scores, start, length, windowed)
        probs = self.softmax(call, scores, sums)
        self.pv(values_at, probs, sums)

    @cute.jit
    def qk(self, tile_at: Int32, queries: cute.Tensor):
        """Computes the scores k @ q.T of a tile's keys and the query rows: ``[group of 16 keys, element]``."""
        c = self.config
        lane = cute.arch.lane_idx()
        at = tile_at + self.shapes.swizzled(self.shapes.keys, lane % 8, lane // 8)
        chunks = self.shapes.k_width // 16
        scores = cute.make_rmem_tensor((c.block // 16, 4), Float32)
        for some in cutlass.range_constexpr(c.block // 16):
            acc_qk = [Float32(0.0)] * 4
            for chunk in cutlass.range_constexpr(0, chunks, 4):
                chunk_at = at ^ self.shapes.keys.chunk_in_row(chunk)
                low, high = (
                    ldmatrix(chunk_at + (self.shapes.keys.row_at(some * 16 + half * 8) + self.shapes.keys.panel_at(chunk)), False)
                    for half in range(2)
                )
                for each in cutlass.range_constexpr(min(4, chunks - chunk)):
                    first, second = widen_fp8(self.shapes.mma_dtype, low[each]), widen_fp8(self.shapes.mma_dtype, high[each])
                    a = [first[0], second[0], first[1], second[1]]
                    b = [queries[0, chunk + each, 0], queries[0, chunk + each, 2]]
                    acc_qk = mma_m16n8k16(self.shapes.mma_dtype, acc_qk, a, b)
            for each in cutlass.range_constexpr(4):
                scores[some, each] = acc_qk[each]
        return scores

    @cute.jit
    def mask(self, call: Call, scores: cute.Tensor, start: Int32, length: Int32, windowed: cutlass.Boolean):
        """Masks the scores of keys after a query's position, and before the query's window."""
        lane = opt_barrier(cute.arch.lane_idx())
        for r in cutlass.range_constexpr(2):
            end = length - call.q_len + (lane % 4 * 2 + r) // call.gqa_ratio + 1
            begin = cutlass.select_(windowed, end - 1 - call.window_left, Int32(0))
            for key in cutlass.range_constexpr(self.config.block // 8):
                position = start + key * 8 + lane // 4
                if position < begin or position >= end:
                    scores[key // 2, key % 2 * 2 + r] = -Float32.inf

    @cute.jit
    def softmax(self, call: Call, scores: cute.Tensor, sums: Sums):
        """Does one step of online softmax. Returns the tile's probabilities, rounded to 16 bits, as the B operand of V.T @ P.T:
        ``[group of 16 keys, word]``."""
        keys = self.config.block // 16
        highest = cute.make_rmem_tensor((2,), Float32)
        rise = Float32(0.0)
        scale = self.merger.scale(call, sums, 0)
        for r in cutlass.range_constexpr(2):
            own = cute.arch.fmax(scores[0, r], scores[0, 2 + r])
            for key in cutlass.range_constexpr(1, keys):
                own = cute.arch.fmax(own, cute.arch.fmax(scores[key, r], scores[key, 2 + r]))
            highest[r] = own
            rise = cute.arch.fmax(rise, (own - sums.row_max[0, r]) * scale)
        if any_lane(rise > LAZY):
            for r in cutlass.range_constexpr(2):
                own = column_max(cute.arch.fmax(highest[r], sums.row_max[0, r]))
                decay = exp2((sums.row_max[0, r] - own) * scale)
                sums.row_max[0, r] = own
                sums.row_sum[0, r] *= decay
                for column in cutlass.range_constexpr(self.shapes.v_width // 8):
                    sums.acc[0, column, r] *= decay
        shifts = [sums.row_max[0, r] * scale for r in range(2)]
        probs = cute.make_rmem_tensor((keys, 2), Uint32)
        lane = cute.arch.lane_idx()
        for key in cutlass.range_constexpr(keys):
            for half in cutlass.range_constexpr(2):
                weights = [exp2(scores[key, 2 * half + r] * scale - shifts[r]) for r in range(2)]
                for r in cutlass.range_constexpr(2):
                    sums.row_sum[0, r] += weights[r]
                probs[key, half] = transpose_matrix(pack(self.shapes.mma_dtype, weights[0], weights[1]), lane)
        return probs

    @cute.jit
    def pv(self, values_at: Int32, probs: cute.Tensor, sums: Sums):
        """Adds V.T @ P.T of a tile to the accumulator.

        ldmatrix transposes pairs of bytes. So the first eight rows of an MMA are even columns of V, and the other eight rows odd
        columns.
        """
        panels = self.shapes.values
        lane = cute.arch.lane_idx()
        at = values_at + self.shapes.swizzled(panels, lane % 8, lane // 16) + lane // 8 % 2 * (8 * panels.row_bytes)
        chunks = self.shapes.v_width // 16
        for chunk in cutlass.range_constexpr(0, chunks, 2):
            parts = min(2, chunks - chunk)
            acc = [[sums.acc[0, 2 * (chunk + part) + each // 2, each % 2] for each in range(4)] for part in range(parts)]
            for key in cutlass.range_constexpr(self.config.block // 16):
                offset = panels.row_at(key * 16) + panels.panel_at(chunk)
                words = ldmatrix((at ^ panels.chunk_in_row(chunk)) + offset, True)
                # A word has two columns of two keys; regroup it as the even column's pair and the odd column's pair.
                pairs = [widen_fp8(self.shapes.mma_dtype, permute_bytes(word, word, 0x3120)) for word in words]
                b = [probs[key, 0], probs[key, 1]]
                for part in cutlass.range_constexpr(parts):
                    low, high = pairs[2 * part], pairs[2 * part + 1]
                    acc[part] = mma_m16n8k16(self.shapes.mma_dtype, acc[part], [low[0], low[1], high[0], high[1]], b)
            for part in cutlass.range_constexpr(parts):
                for each in cutlass.range_constexpr(4):
                    sums.acc[0, 2 * (chunk + part) + each // 2, each % 2] = acc[part][each]

    @cute.jit
    def store_partial(self, call: Call, sums: Sums):
        """Stores a consumer warp's partial results in shared memory, for `Merger.merge_warps`: the counterpart of
        `Merger.store_partial`. The stored row max is scaled, that is, a base-2 exponent."""
        c = self.config
        thread = opt_barrier(cute.arch.thread_idx()[0])
        lane = thread % 32
        first_row = thread // 32 * c.rows
        for r in cutlass.range_constexpr(2):
            row = first_row + lane % 4 * 2 + r
            row_sum = column_sum(sums.row_sum[0, r])
            if lane < 4:
                store_floats(
                    "shared", call.sums.toint() + row * 8, [sums.row_max[0, r] * self.merger.scale(call, sums, r), row_sum]
                )
            to = call.results.toint() + (row * c.width + lane // 4 * 2) * 4
            for chunk in cutlass.range_constexpr(self.shapes.v_width // 16):
                store_floats("shared", to + chunk * 64, [sums.acc[0, 2 * chunk + odd, r] for odd in range(2)])
