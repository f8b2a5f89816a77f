"""The warps of `stream_device` that compute: the products of strips, what becomes of them, and the weighted sums over slots.

The blocks of a strip are dealt out to the warps, each of which keeps its part of an entry's rows in registers for all of the entry's strips. So
nothing but weights is read in the loop. Sums over a strip meet in shared memory, where another warp adds them up, in a fixed order.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute

from tokenspeed_kernel_nvidia.sm90.common.launch import LOG2_E
from tokenspeed_kernel_nvidia.sm90.common.memory_device import load_words, release_add, store_half, wait_for
from tokenspeed_kernel_nvidia.sm90.common.pipeline_device import advance, first_to_fill, first_to_read
from tokenspeed_kernel_nvidia.sm90.common.registers_device import (
    load_floats,
    load_int,
    load_word,
    mma_m16n8k16,
    pack,
    store_floats,
    store_words,
)
from tokenspeed_kernel_nvidia.sm90.common.softmax_device import exp2
from tokenspeed_kernel_nvidia.sm90.moe.mxfp4_decode_device import decode, multipliers
from tokenspeed_kernel_nvidia.sm90.moe.mxfp4_layout import BLOCK_BYTES, CODE_BYTES, HEAD_BYTES
from tokenspeed_kernel_nvidia.sm90.moe.stream_config import BUFFERS, COLUMNS, MAX_TOP_K
from tokenspeed_kernel_nvidia.sm90.moe.stream_tile_device import (
    COMBINE,
    DONE,
    END,
    ENTRIES,
    READY,
    W2,
    W13,
    Call,
    Shapes,
    entry_of,
    index_of,
    is_last,
    kind_of,
    rows_of,
    strip_of,
)

CONSUMING = 1  # the named barrier of the warps that compute


class Consumers(Shapes):
    """The part of the kernel that computes."""

    # -- products ----------------------------------------------------------------------------------------------------------------

    @cute.jit
    def consume(self, call: Call, warp: Int32):
        """Computes the strips that the loading warp brings."""
        rows = cute.make_rmem_tensor((self.span, self.tiles, 8), Uint32)
        rows.fill(0)
        known = Int32(-1)  # whose rows these are
        at, to = first_to_read(), first_to_fill()
        kind = Int32(COMBINE)
        while kind != END:
            call.pipe.wait(at)
            unit = call.units[at.stage]
            kind = kind_of(unit)
            if kind == COMBINE:
                self.release(call, at)
                self.combine(call, warp, strip_of(unit))
            else:
                if kind != END and rows_of(unit) != known:
                    known = rows_of(unit)
                    if kind == W2:
                        self.meet(warp, call.counter(READY + index_of(unit)), call.layer.w13_strips)
                    self.load_rows(call, warp, unit, rows)
                to = self.multiply(call, warp, at, to, unit, rows)
            at = advance(at, self.stages)

    @cute.jit
    def release(self, call: Call, at: Any):
        """This warp has read a stage."""
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            call.pipe.empty.arrive(at)

    @cute.jit
    def meet(self, warp: Int32, flag: Int64, value: Int32):
        """All computing warps wait for a flag. One of them looks at it, so that it is not looked at by too many."""
        if warp == 0:
            if cute.arch.lane_idx() == 0:
                wait_for(flag, value)
            cute.arch.sync_warp()
        cute.arch.barrier(barrier_id=CONSUMING, number_of_threads=32 * self.warps)

    @cute.jit
    def load_rows(self, call: Call, warp: Int32, unit: Int32, rows: cute.Tensor):
        """Loads this warp's part of an entry's rows, as right operands: zeros beyond k, and where there is no pair."""
        lane = cute.arch.lane_idx()
        layer = call.layer
        entry = entry_of(call.entries[index_of(unit)])
        first = kind_of(unit) == W13
        k = cutlass.select_(first, layer.hidden, layer.intermediate)
        for tile in cutlass.range_constexpr(self.tiles):
            column = tile * COLUMNS + lane // 4
            pair = call.order[entry.first + cutlass.min(column, entry.count - 1)]
            token_at = call.x + Int64(pair // layer.top_k) * (call.x_stride * 2)
            row_at = cutlass.select_(first, token_at, call.activated + Int64(pair) * (layer.intermediate * 2))
            for each in cutlass.range_constexpr(self.span):
                for half in cutlass.range_constexpr(2):
                    at = (warp + each * self.warps) * 64 + half * 32
                    for place in cutlass.range_constexpr(4):
                        rows[each, tile, 4 * half + place] = Uint32(0)
                    if column < entry.count and at < k:
                        for place in cutlass.range_constexpr(4):
                            source = row_at + (at + place * 8 + lane % 4 * 2) * 2
                            rows[each, tile, 4 * half + place] = load_word(source)

    @cute.jit
    def multiply(self, call: Call, warp: Int32, at: Any, to: Any, unit: Int32, rows: cute.Tensor):
        """This warp's part of a strip's product goes to a buffer. Returns the next buffer."""
        lane = cute.arch.lane_idx()
        kind = kind_of(unit)
        acc = [[[Float32(0.0)] * 4 for _ in range(self.sums)] for _ in range(self.tiles)]
        strip_at = call.ring + at.stage * self.config.stage_bytes
        blocks = cutlass.select_(kind == W13, call.layer.w13_blocks, call.layer.w2_blocks)
        for each in cutlass.range_constexpr(self.span):
            # Beyond the last block rows are zero, and any weights will do.
            block = cutlass.min(warp + each * self.warps, blocks - 1)
            block_at = strip_at + HEAD_BYTES + block * BLOCK_BYTES
            words = load_words("shared", block_at + lane * 16, 4)
            scales = multipliers(self.dtype, load_words("shared", block_at + CODE_BYTES + lane // 4 * 4, 1))
            for step in cutlass.range_constexpr(4):
                a = decode(self.dtype, words[step], *scales[step // 2])
                for tile in cutlass.range_constexpr(self.tiles):
                    b = [rows[each, tile, 2 * step], rows[each, tile, 2 * step + 1]]
                    which = step % self.sums
                    acc[tile][which] = mma_m16n8k16(self.dtype, acc[tile][which], a, b)
        head = load_words("shared", strip_at + lane * 4, 1)
        self.release(call, at)
        call.partial.acquire(to)
        sums_at = call.sums + (to.stage * self.warps + warp) * (self.tiles * 512) + lane * 16
        for tile in cutlass.range_constexpr(self.tiles):
            total = acc[tile][0]
            if const_expr(self.sums == 2):
                total = [total[each] + acc[tile][1][each] for each in range(4)]
            store_floats("shared", sums_at + tile * 512, total)
        if warp == 0:
            cute.make_ptr(Uint32, call.heads + to.stage * HEAD_BYTES, cute.AddressSpace.smem)[lane] = head
            if lane == 0:
                call.partial_units[to.stage] = unit
        cute.arch.sync_warp()
        if lane == 0:
            call.partial.full.arrive(to)
        return advance(to, BUFFERS)

    # -- what becomes of a strip -------------------------------------------------------------------------------------------------

    @cute.jit
    def finish(self, call: Call):
        """Adds up the parts of strips: the first product's are activated, the second's weighted, and both stored."""
        lane = cute.arch.lane_idx()
        layer = call.layer
        pairs = cute.make_rmem_tensor((self.tiles, 2), Int32)
        weights = cute.make_rmem_tensor((self.tiles, 2), Float32)
        pairs.fill(-1)
        weights.fill(0.0)
        known, done = Int32(-1), Int32(0)
        at = first_to_read()
        unit = Int32(0)
        kind = Int32(COMBINE)
        while kind != END:
            call.partial.wait(at)
            unit = call.partial_units[at.stage]
            kind = kind_of(unit)
            if kind != END:
                if rows_of(unit) != known:
                    known = rows_of(unit)
                    self.load_pairs(call, unit, pairs, weights)
                head_at = call.heads + at.stage * HEAD_BYTES + lane // 4 * 4
                first, second, first_bias, second_bias = (self.head_number(head_at + each * 32) for each in range(4))
                for tile in cutlass.range_constexpr(self.tiles):
                    sums = self.add_up(call, at, tile, lane)
                    for c in cutlass.range_constexpr(2):
                        pair = pairs[tile, c]
                        upper, lower = sums[c] * first + first_bias, sums[2 + c] * second + second_bias
                        if pair >= 0:
                            if kind == W13:
                                feature = strip_of(unit) * 8 + lane // 4
                                to = call.activated + (Int64(pair) * layer.intermediate + feature) * 2
                                value = self.activate(call, upper, lower)
                                store_half(to, pack(self.dtype, value, value))
                            else:
                                row = strip_of(unit) * 16 + lane // 4
                                to = cute.make_ptr(Float32, call.slots, cute.AddressSpace.gmem)
                                place = Int64(pair) * layer.hidden + row
                                to[place] = upper * weights[tile, c]
                                to[place + 8] = lower * weights[tile, c]
                cute.arch.sync_warp()
                if lane == 0:
                    call.partial.empty.arrive(at)
                done += 1
                if is_last(unit):
                    if lane == 0:
                        flag = cutlass.select_(kind == W13, READY + index_of(unit), Int32(DONE))
                        release_add(call.counter(flag), done)
                    done = Int32(0)
            at = advance(at, BUFFERS)

    def head_number(self, address: Int32) -> Float32:
        """A factor or bias of a strip."""
        return cute.make_ptr(Float32, address, cute.AddressSpace.smem)[0]

    @cute.jit
    def load_pairs(self, call: Call, unit: Int32, pairs: cute.Tensor, weights: cute.Tensor):
        """The pairs of this lane's columns, -1 where there is none, and for the second product their weights."""
        entry = entry_of(call.entries[index_of(unit)])
        for tile in cutlass.range_constexpr(self.tiles):
            for c in cutlass.range_constexpr(2):
                column = tile * COLUMNS + cute.arch.lane_idx() % 4 * 2 + c
                pairs[tile, c] = Int32(-1)
                if column < entry.count:
                    pair = call.order[entry.first + column]
                    pairs[tile, c] = pair
                    if kind_of(unit) == W2:
                        weights[tile, c] = cute.make_ptr(Float32, call.weights, cute.AddressSpace.gmem)[pair]

    @cute.jit
    def add_up(self, call: Call, at: Any, tile: cutlass.Constexpr[int], lane: Int32):
        """The sum of all warps' parts, in their order: four numbers of a lane."""
        sums_at = call.sums + at.stage * (self.warps * self.tiles * 512) + tile * 512 + lane * 16
        sums = [Float32(0.0)] * 4
        for warp in cutlass.range_constexpr(self.warps):
            part = load_floats("shared", sums_at + warp * (self.tiles * 512), 4)
            sums = [sums[each] + part[each] for each in range(4)]
        return sums

    @cute.jit
    def activate(self, call: Call, gate: Float32, up: Float32) -> Float32:
        """``(up + beta) * gate * sigmoid(alpha * gate)``, of what the limit leaves."""
        layer = call.layer
        # Comparisons, and not minima: NaN stays NaN.
        gate = cutlass.select_(gate > layer.limit, layer.limit, gate)
        up = cutlass.select_(up > layer.limit, layer.limit, up)
        up = cutlass.select_(up < -layer.limit, -layer.limit, up)
        return (up + layer.beta) * gate / (1.0 + exp2(gate * (layer.alpha * -LOG2_E)))

    # -- the output --------------------------------------------------------------------------------------------------------------

    @cute.jit
    def combine(self, call: Call, warp: Int32, part: Int32):
        """Writes a part of the output: sums over slots, in their order. By all computing warps, when all products are done."""
        layer = call.layer
        self.meet(warp, call.counter(DONE), call.sizes[ENTRIES] * layer.w2_strips)
        ctas, _, _ = cute.arch.grid_dim()
        width = layer.hidden // 4
        quads = call.tokens * width
        parts = cutlass.min(quads, ctas)
        share = (quads + parts - 1) // parts
        quad = part * share + warp * 32 + cute.arch.lane_idx()
        end = cutlass.min((part + 1) * share, quads)
        while quad < end:
            token = quad // width
            column = (quad - token * width) * 4
            parts_of = cute.make_rmem_tensor((MAX_TOP_K, 4), Float32)
            parts_of.fill(0.0)
            for slot in cutlass.range_constexpr(MAX_TOP_K):
                if slot < layer.top_k:
                    pair = token * layer.top_k + slot
                    expert = load_int(call.ids + Int64(pair) * 4, False)
                    if expert >= 0 and expert < layer.experts:
                        found = load_floats("global.cg", call.slots + (Int64(pair) * layer.hidden + column) * 4, 4)
                        for each in cutlass.range_constexpr(4):
                            parts_of[slot, each] = found[each]
            total = [Float32(0.0)] * 4
            for slot in cutlass.range_constexpr(MAX_TOP_K):
                total = [total[each] + parts_of[slot, each] for each in range(4)]
            to = call.out + (Int64(token) * call.out_stride + column) * 2
            store_words(to, [pack(self.dtype, total[0], total[1]), pack(self.dtype, total[2], total[3])])
            quad += 32 * self.warps
