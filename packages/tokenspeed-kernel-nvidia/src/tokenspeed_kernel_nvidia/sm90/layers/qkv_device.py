"""Input norm and projection to queries, keys and values in the persistent kernel.

Every CTA normalises all tokens, so the normalised tokens need no exchange, and computes its rows of qkv. The CTAs that read queries
and keys apply the rotary embedding: the two elements that are rotated together may be rows of different CTAs.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Int64, const_expr, cute

from tokenspeed_kernel_nvidia.cutedsl.memory_device import load_words, release_add
from tokenspeed_kernel_nvidia.cutedsl.registers_device import pack, widened
from tokenspeed_kernel_nvidia.sm90.gemm.mm.memory_device import Vector
from tokenspeed_kernel_nvidia.sm90.layers.config import OUT, QKV, WIDTH_PITCH
from tokenspeed_kernel_nvidia.sm90.layers.exchange_device import store_addend, store_tagged
from tokenspeed_kernel_nvidia.sm90.layers.gemm_device import BFLOAT16, CHUNK, Gemm
from tokenspeed_kernel_nvidia.sm90.layers.tile_device import INPUT_NORM, QKV_BIAS, QKV_WEIGHT, LayerCall
from tokenspeed_kernel_nvidia.sm90.moe.stream.rows_device import PREPARING_THREADS


class Qkv(Gemm):
    """The part of the kernel that computes queries, keys and values. All MMA warps call these methods."""

    @cute.jit
    def store_input(self, call: LayerCall):
        """Stores this CTA's range of the first layer's input as tagged words, as if a preceding layer had written it. ``call``: the
        call of layer 0.

        If ranks share the layers, each rank has the whole input. It stores the input as the first rank's addends and zeros as the
        others', all in its own memory."""
        ctas, _, _ = cute.arch.grid_dim()
        cta, _, _ = cute.arch.block_idx()
        elements = call.tokens * call.layer.hidden
        element = cta * elements // ctas + self.thread()
        end = (cta + 1) * elements // ctas
        while element < end:
            value = cute.make_ptr(self.dtype, call.given.residual, cute.AddressSpace.gmem)[element].to(cutlass.Float32)
            if const_expr(self.config.ranks == 1):
                store_tagged(call.given.outputs + Int64(element) * 4, self.rounded(value), call.tag - 1 & 0xFFFF)
            else:
                for rank in cutlass.range_constexpr(self.config.ranks):
                    to = self.addends_at(call, call.given.outputs, element, rank)
                    store_addend(to, value if rank == 0 else cutlass.Float32(0.0), call.tag - 1)
            element += PREPARING_THREADS
        if const_expr(OUT in self.config.counted):
            self.synchronise()
            if self.thread() == 0:
                release_add(call.counter_of(Int32(-1), OUT), Int32(1))

    @cute.jit
    def project_qkv(self, call: LayerCall, warp: Int32, at: Any):
        """Computes this CTA's rows of qkv, adds the bias, and stores the results as words. Returns the next position in the ring
        buffer."""
        thread = self.thread()
        given = call.given
        rows, first = call.qkv_row_count, call.qkv_first_row
        token, row = self.token_and_row(thread, rows)
        live = thread < call.tokens * rows
        # Issue the loads that do not depend on other CTAs before the wait, which hides their latency.
        bias_of = Vector(call.address(QKV_BIAS), Int32(BFLOAT16))
        bias = bias_of.load(first + row, live)
        row_bytes = call.layer.hidden * self.config.dense_bytes
        scale = self.load_scale(call, QKV_WEIGHT, given.attention.qkv_rows, row_bytes, first + row, live)
        column = cutlass.min(thread * CHUNK, call.layer.hidden - CHUNK)
        norm = [*load_words("global", call.address(INPUT_NORM) + column * 2, 4)]
        ctas, _, _ = cute.arch.grid_dim()
        self.await_all(call, warp, OUT, ctas, 1)
        self.load_rows(call, warp, given.outputs, call.tag - 1 & 0xFFFF, call.attended_at, WIDTH_PITCH)
        self.synchronise()
        self.normalise_input(call, norm, column, thread * CHUNK < call.layer.hidden)
        self.synchronise()
        at = self.multiply_tiles(call, warp, at, rows, row_bytes, True)
        self.synchronise()
        if live:
            word = self.rounded(self.sum_of_warps(call, token, row, scale) + bias_of.number(bias))
            store_tagged(given.attention.qkv + Int64(token * given.attention.qkv_rows + first + row) * 4, word, call.tag)
        self.publish(call, QKV)
        return at

    @cute.jit
    def normalise_input(self, call: LayerCall, norm: list, column: Int32, live: Any):
        """Normalises this thread's elements of all tokens in shared memory. The thread has stored these elements itself, in
        `load_rows`, so only the sums of squares need a barrier."""
        factors = []
        for word in norm:
            factors += [*widened(self.dtype, word)]
        for token in cutlass.range(call.tokens, unroll=1):
            scale = self.scale_of(call, token)
            at = call.attended_at + token * WIDTH_PITCH
            words = []
            for pair, word in enumerate(load_words("shared", at + column * 2, 4)):
                low, high = widened(self.dtype, word)
                words.append(pack(self.dtype, low * scale * factors[2 * pair], high * scale * factors[2 * pair + 1]))
            self.store_operand(at, column, words, live)
