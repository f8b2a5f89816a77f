"""The output projection of the persistent kernel: this CTA's rows of the weights by all tokens, plus bias and residual.

A stage holds a range of k of eight rows of the weights. These rows are the MMA's columns, and tokens are its rows. A warpgroup
processes every third stage, and each of its warps a quarter of the stage's range. The order of k within an MMA does not matter. So
a lane loads 16 bytes of a row and the same 16 bytes of a token, which are the operands of two MMAs.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from tokenspeed_kernel_nvidia.cutedsl.memory_device import load_words
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.layout import PANEL_STRIPS
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import skip
from tokenspeed_kernel_nvidia.cutedsl.registers_device import load_floats, mma_m16n8k16, store_floats
from tokenspeed_kernel_nvidia.sm90.common.bulk_device import bulk_load
from tokenspeed_kernel_nvidia.sm90.gemm.mm.memory_device import Vector
from tokenspeed_kernel_nvidia.sm90.moe.persistent.config import OUT, PART_BYTES, PART_PITCH, TILE, TILES, TOTALS, WIDTH_PITCH
from tokenspeed_kernel_nvidia.sm90.moe.persistent.exchange_device import Exchange, store_tagged, value_of
from tokenspeed_kernel_nvidia.sm90.moe.persistent.tile_device import ATTENDED, PROJECTION_BIAS, LayerCall
from tokenspeed_kernel_nvidia.sm90.moe.stream.config import GROUPS, MMA_WARPS

_LOADS = PART_BYTES // PANEL_STRIPS // 64  # number of 16-byte loads of a lane in a stage
_BFLOAT16 = 2  # `Vector.kind` of bfloat16


class Project(Exchange):
    """The part of the kernel that computes the output projection."""

    @cute.jit
    def load_attended(self, call: LayerCall, warp: Int32):
        """Waits until the preceding layer's output is complete, then copies the attention's output to shared memory.

        In a model, the attention reads that output. Here the attention is not computed, but the wait takes as long.
        """
        source = call.address(ATTENDED)  # read before the wait, which invalidates L1
        if call.index > 0:
            ctas, _, _ = cute.arch.grid_dim()
            self.meet(call, warp, call.counter_of(call.index - 1, OUT), ctas)
        if warp == 0:
            if cute.arch.lane_idx() == 0:
                size = call.given.width * 2
                cute.arch.mbarrier_arrive_and_expect_tx(call.attended_full, size * call.tokens)
                for token in cutlass.range(call.tokens, unroll=1):
                    to = call.attended_at + token * WIDTH_PITCH
                    bulk_load(to, source + Int64(token) * size, size, call.attended_full.toint(), once=False)

    @cute.jit
    def project(self, call: LayerCall, warp: Int32, at: Any):
        """Computes this CTA's rows of the projection, adds bias and residual, and stores the results as words of ``totals``.
        Returns the next position in the ring buffer."""
        thread = self.thread()
        rows, hidden = call.row_count, call.layer.hidden
        token = thread // cutlass.max(rows, 1)
        first = call.first_row
        row = first + thread - token * rows
        live = thread < call.tokens * rows
        bias_of = Vector(call.address(PROJECTION_BIAS), Int32(_BFLOAT16))
        bias = bias_of.load(row, live)
        self.load_attended(call, warp)
        residual_of = Vector(call.output_of(call.index - 1), Int32(_BFLOAT16))
        residual = residual_of.load(token * hidden + row, live)
        cute.arch.mbarrier_wait(call.attended_full, call.index & 1)
        at = self.multiply_tiles(call, warp, at)
        self.synchronise()
        if live:
            total = Float32(0.0)
            for each in cutlass.range_constexpr(MMA_WARPS):
                place = (each * call.tokens + token) * (TILES * TILE) + (row - first)
                total += load_floats("shared", call.partials_at + place * 4, 1)
            projected = value_of(self.rounded(total + bias_of.number(bias)))
            word = self.rounded(projected + residual_of.number(residual))
            store_tagged(call.given.totals + Int64(token * hidden + row) * 4, word, call.tag)
        self.publish(call, TOTALS)
        return at

    @cute.jit
    def multiply_tiles(self, call: LayerCall, warp: Int32, at: Any):
        """Stores this warp's partial sums of all tiles in shared memory. Returns the next position in the ring buffer."""
        lane = self.thread() % 32
        group, strip = warp // PANEL_STRIPS, warp % PANEL_STRIPS
        parts = call.given.width * 2 // PART_BYTES
        tiles = (call.row_count + TILE - 1) // TILE
        inside = strip * (PART_BYTES // PANEL_STRIPS) + lane % 4 * 16
        # Lanes without a token read the last token's row; their results are not stored.
        tokens_at = call.attended_at + cutlass.min(lane // 4, call.tokens - 1) * WIDTH_PITCH + inside
        rows_at = call.ring + lane // 4 * PART_PITCH + inside
        sums = cute.make_rmem_tensor((_LOADS, 4), Float32)
        for tile in cutlass.range(tiles, unroll=1):
            sums.fill(0.0)
            part = (group + 2 * (tile * parts)) % GROUPS  # the first part that this warpgroup computes
            while part < parts:
                call.pipe.wait(at)
                for each in cutlass.range_constexpr(_LOADS):
                    left = load_words("shared", tokens_at + part * PART_BYTES + each * 64, 4)
                    right = [*load_words("shared", rows_at + at.stage * self.config.stage_bytes + each * 64, 4)]
                    acc = [sums[each, number] for number in range(4)]
                    for half in cutlass.range_constexpr(2):
                        operand = (left[2 * half], Uint32(0), left[2 * half + 1], Uint32(0))
                        acc = mma_m16n8k16(self.dtype, acc, operand, right[2 * half : 2 * half + 2])
                    for number in cutlass.range_constexpr(4):
                        sums[each, number] = acc[number]
                self.release(call, at)
                at = skip(at, GROUPS, self.stages)
                part += GROUPS
            if lane // 4 < call.tokens:
                place = (warp * call.tokens + lane // 4) * (TILES * TILE) + tile * TILE + lane % 4 * 2
                both = [(sums[0, number] + sums[1, number]) + (sums[2, number] + sums[3, number]) for number in range(2)]
                store_floats("shared", call.partials_at + place * 4, both)
        # The producer pads the tiles' stages to a multiple of the number of warpgroups.
        beyond = tiles * parts % GROUPS
        if (beyond > 0) & (group >= beyond):
            call.pipe.wait(at)
            self.release(call, at)
            at = skip(at, GROUPS, self.stages)
        return at
