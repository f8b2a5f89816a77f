"""Input norm and projection to queries, keys and values in the persistent kernel.

Every CTA normalises all tokens, and computes its rows of qkv. The rotary embedding is left to the CTAs that read the results, since
the two elements that are rotated together may belong to different CTAs.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute

from tokenspeed_kernel_nvidia.cutedsl.memory_device import load_words, release_add, store_words_shared
from tokenspeed_kernel_nvidia.cutedsl.registers_device import load_floats, pack, store_floats, store_words, widened
from tokenspeed_kernel_nvidia.sm90.gemm.mm.memory_device import Vector
from tokenspeed_kernel_nvidia.sm90.layers.config import OUT, QKV, WIDTH_PITCH
from tokenspeed_kernel_nvidia.sm90.layers.exchange_device import load_tagged, store_tagged, value_of, warp_sum
from tokenspeed_kernel_nvidia.sm90.layers.gemm_device import BFLOAT16, CHUNK, Gemm
from tokenspeed_kernel_nvidia.sm90.layers.tile_device import INPUT_NORM, OWN_END, OWN_FIRST, QKV_BIAS, LayerCall
from tokenspeed_kernel_nvidia.sm90.moe.stream.rows_device import PREPARING_THREADS

_SLOTS = 4  # slots of the experts' results that a thread loads at once


class Qkv(Gemm):
    """The part of the kernel that computes queries, keys and values. All MMA warps call these methods."""

    @cute.jit
    def store_input(self, call: LayerCall):
        """Stores this CTA's part of the first layer's input as tagged words. ``call``: the call of layer 0."""
        ctas, _, _ = cute.arch.grid_dim()
        cta, _, _ = cute.arch.block_idx()
        elements = call.tokens * call.layer.hidden
        element = cta * elements // ctas + self.thread()
        end = (cta + 1) * elements // ctas
        while element < end:
            value = cute.make_ptr(self.dtype, call.given.residual, cute.AddressSpace.gmem)[element]
            store_tagged(call.given.outputs + Int64(element) * 4, self.rounded(value.to(cutlass.Float32)), call.tag - 1 & 0xFFFF)
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
        # Constants are loaded before the wait.
        bias_of = Vector(call.address(QKV_BIAS), Int32(BFLOAT16))
        bias = bias_of.load(first + row, live)
        column = cutlass.min(thread * CHUNK, call.layer.hidden - CHUNK)
        norm = [*load_words("global", call.address(INPUT_NORM) + column * 2, 4)]
        if const_expr(self.config.alone):
            self.load_input(call, warp)
        else:
            ctas, _, _ = cute.arch.grid_dim()
            self.await_all(call, warp, OUT, ctas, 1)
            self.load_rows(call, warp, given.outputs, call.tag - 1 & 0xFFFF, call.attended_at, WIDTH_PITCH)
        self.synchronise()
        self.normalise_input(call, norm, column, thread * CHUNK < call.layer.hidden)
        self.synchronise()
        at = self.multiply_tiles(call, warp, at, rows, call.layer.hidden * 2, True)
        self.synchronise()
        if live:
            word = self.rounded(self.sum_of_warps(call, token, row) + bias_of.number(bias))
            store_tagged(given.attention.qkv + Int64(token * given.attention.qkv_rows + first + row) * 4, word, call.tag)
        self.publish(call, QKV)
        return at

    @cute.jit
    def load_input(self, call: LayerCall, warp: Int32):
        """Loads the token, as `load_rows` does: from the launch's input in the first layer, else from the preceding layer's slots
        and ``totals``. Keeps a copy, to which the projection is added. Also stores this CTA's part of the preceding layer's
        output."""
        thread = self.thread()
        hidden = call.layer.hidden
        live = thread * CHUNK < hidden
        column = cutlass.min(thread * CHUNK, hidden - CHUNK)
        words = cute.make_rmem_tensor((4,), Uint32)
        if call.index == 0:
            loaded = load_words("global", call.given.residual + Int64(column) * 2, 4)
            for pair in cutlass.range_constexpr(4):
                words[pair] = loaded[pair]
        else:
            self.load_output(call, column, words)
        square = Float32(0.0)
        for pair in cutlass.range_constexpr(4):
            low, high = widened(self.dtype, words[pair])
            square += low * low
            square += high * high
        square = warp_sum(cutlass.select_(live, square, Float32(0.0)))
        if cute.arch.lane_idx() == 0:
            store_floats("shared", call.squares_at + warp * 4, [square])
        if live:
            found = [words[pair] for pair in range(4)]
            store_words_shared(call.attended_at + column * 2, found)
            store_words_shared(call.input_at + column * 2, found)
            if call.index > 0:
                self.store_own(call, call.index - 1, column, words)

    @cute.jit
    def load_output(self, call: LayerCall, column: Int32, words: cute.Tensor):
        """Computes eight elements of the token after the experts, two per word: the sum over slots, plus ``totals``."""
        before = [*load_tagged(call.given.totals + Int64(column) * 4), *load_tagged(call.given.totals + Int64(column) * 4 + 16)]
        sums = cute.make_rmem_tensor((CHUNK,), Float32)
        sums.fill(0.0)
        # Without branches, so that the loads of some slots are issued together.
        for begin in cutlass.range(0, call.layer.top_k, _SLOTS, unroll=1):
            found = []
            for each in cutlass.range_constexpr(_SLOTS):
                slot = cutlass.min(begin + each, call.layer.top_k - 1)
                at = call.slots + (Int64(slot) * call.layer.hidden + column) * 4
                found.append([*load_floats("global.cg", at, 4), *load_floats("global.cg", at + 16, 4)])
            for each in cutlass.range_constexpr(_SLOTS):
                for number in cutlass.range_constexpr(CHUNK):
                    live = begin + each < call.layer.top_k
                    sums[number] += cutlass.select_(live, found[each][number], Float32(0.0))
        for pair in cutlass.range_constexpr(CHUNK // 2):
            # Round like the operator's result, then add the residual stream.
            low, high = widened(self.dtype, pack(self.dtype, sums[2 * pair], sums[2 * pair + 1]))
            words[pair] = pack(self.dtype, low + value_of(before[2 * pair]), high + value_of(before[2 * pair + 1]))

    @cute.jit
    def store_own(self, call: LayerCall, layer: Int32, column: Int32, words: cute.Tensor):
        """Stores eight elements of a layer's output, if they belong to this CTA."""
        thread = self.thread()
        if (thread >= call.kept[OWN_FIRST]) & (thread < call.kept[OWN_END]):
            to = call.output_of(layer) + Int64(column) * 2
            store_words(to, [words[0], words[1]])
            store_words(to + 8, [words[2], words[3]])

    @cute.jit
    def store_output(self, call: LayerCall):
        """Stores this CTA's part of the last layer's output, for one token. ``call``: the call of the last layer."""
        column = self.thread() * CHUNK
        if column < call.layer.hidden:
            words = cute.make_rmem_tensor((4,), Uint32)
            self.load_output(call, column, words)
            self.store_own(call, call.index, column, words)

    @cute.jit
    def normalise_input(self, call: LayerCall, norm: list, column: Int32, live: Any):
        """Normalises this thread's elements of all tokens, which it has stored itself."""
        factors = []
        for word in norm:
            factors += [*widened(self.dtype, word)]
        for token in cutlass.range(call.tokens, unroll=1):
            scale = self.scale_of(call, token)
            at = call.attended_at + token * WIDTH_PITCH + column * 2
            words = []
            for pair, word in enumerate(load_words("shared", at, 4)):
                low, high = widened(self.dtype, word)
                words.append(pack(self.dtype, low * scale * factors[2 * pair], high * scale * factors[2 * pair + 1]))
            if live:
                store_words_shared(at, words)
