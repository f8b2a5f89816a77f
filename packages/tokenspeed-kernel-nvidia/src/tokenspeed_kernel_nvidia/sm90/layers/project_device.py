"""The output projection of the persistent kernel: each CTA multiplies its rows of the weights by the attention's output, and adds
the bias and the residual stream, which is the layer's input."""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute

from tokenspeed_kernel_nvidia.cutedsl.memory_device import load_words
from tokenspeed_kernel_nvidia.sm90.gemm.mm.memory_device import Vector
from tokenspeed_kernel_nvidia.sm90.layers.attend_device import Attend
from tokenspeed_kernel_nvidia.sm90.layers.config import ATTENDED, TOTALS, WIDTH_PITCH
from tokenspeed_kernel_nvidia.sm90.layers.exchange_device import both_values, store_tagged, value_of
from tokenspeed_kernel_nvidia.sm90.layers.gemm_device import BFLOAT16, CHUNK
from tokenspeed_kernel_nvidia.sm90.layers.tile_device import PROJECTION, PROJECTION_BIAS, LayerCall
from tokenspeed_kernel_nvidia.sm90.moe.stream.rows_device import PREPARING_THREADS

_AT_ONCE = 2  # chunks of the attention's output that a thread loads at once: 4096 features are 1.3 chunks per thread


class Project(Attend):
    """The part of the kernel that computes the output projection. All MMA warps call these methods."""

    @cute.jit
    def load_attended(self, call: LayerCall, warp: Int32):
        """Waits for the attention's output of all heads, and loads it into shared memory."""
        attention = call.given.attention
        self.await_all(call, warp, ATTENDED, self.items_of(call))
        thread = self.thread()
        chunks = call.given.width // CHUNK  # of a token
        count = call.tokens * chunks
        words = cute.make_rmem_tensor((_AT_ONCE * CHUNK,), Uint32)
        words.fill(0)
        for begin in cutlass.range(0, count, _AT_ONCE * PREPARING_THREADS, unroll=1):
            addresses = []
            for each in cutlass.range_constexpr(_AT_ONCE):
                # Threads beyond the end load the last chunk, but do not store it.
                chunk = cutlass.min(begin + each * PREPARING_THREADS + thread, count - 1)
                at = attention.attended + Int64(chunk) * (4 * CHUNK)
                addresses += [at, at + 16]
            self.load_words_of_all(call, addresses, words, call.tag)
            for each in cutlass.range_constexpr(_AT_ONCE):
                chunk = begin + each * PREPARING_THREADS + thread
                token = Int32(0) if const_expr(self.config.tokens == 1) else chunk // chunks
                both = [both_values(words[each * CHUNK + 2 * pair], words[each * CHUNK + 2 * pair + 1]) for pair in range(4)]
                at = call.attended_at + token * WIDTH_PITCH
                self.store_operand(at, (chunk - token * chunks) * CHUNK, both, chunk < count)

    @cute.jit
    def project(self, call: LayerCall, warp: Int32, at: Any):
        """Computes this CTA's rows of the projection, adds bias and the layer's input, and stores the results as words of
        ``totals``. If ranks share the layer, the first rank adds the input. Returns the next position in the ring buffer."""
        thread = self.thread()
        rows, hidden = call.row_count, call.layer.hidden
        token, row = self.token_and_row(thread, rows)
        live = thread < call.tokens * rows
        bias_of = Vector(call.address(PROJECTION_BIAS), Int32(BFLOAT16))
        bias = bias_of.load(call.first_row + row, live)
        row_bytes = call.given.width * self.config.dense_bytes
        scale = self.load_scale(call, PROJECTION, hidden, row_bytes, call.first_row + row, live)
        element = cutlass.select_(live, token * hidden + call.first_row + row, 0)
        # These loads need no wait: `project_qkv` of this CTA has waited for all words of the input.
        ranks = range(self.config.ranks)
        before = [load_words("relaxed.gpu.global", self.addends_at(call, call.given.outputs, element, rank), 1) for rank in ranks]
        self.load_attended(call, warp)
        self.synchronise()
        at = self.multiply_tiles(call, warp, at, rows, row_bytes, False)
        self.synchronise()
        if live:
            total = self.sum_of_warps(call, token, row, scale) + bias_of.number(bias)
            if const_expr(self.config.ranks == 1):
                word = self.rounded(value_of(self.rounded(total)) + value_of(before[0]))
                store_tagged(call.given.totals + Int64(element) * 4, word, call.tag)
            else:
                residual = cutlass.select_(call.given.rank == 0, value_of(self.sum_of(before)), Float32(0.0))
                self.send(call, call.given.totals, element, [total + residual], call.tag)
        self.publish(call, TOTALS)
        return at
