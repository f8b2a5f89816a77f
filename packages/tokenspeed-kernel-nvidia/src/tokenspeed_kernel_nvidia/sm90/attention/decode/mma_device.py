"""The consumer warps of `kernel_device`: attention of a warp's query rows to the warp's K/V tiles.

All MMAs are mma.sync.m16n8k16. The queries are the A operand of q @ k, and stay in registers for a whole sequence. The keys are
the B operand, loaded from shared memory by ldmatrix. The accumulator of q @ k has the layout of the A operand of P @ V, so a lane
uses its own probabilities, without a shuffle.
"""

# mypy: ignore-errors

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Uint32, const_expr, cute

from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import nth_to_read
from tokenspeed_kernel_nvidia.cutedsl.registers_device import (
    any_lane,
    bits_of,
    factors_of_float16,
    ldmatrix,
    load_word,
    mma_m16n8k16,
    opt_barrier,
    pack,
    permute_bytes,
    quad_max,
    store_floats,
    widen_fp8,
    widened,
)
from tokenspeed_kernel_nvidia.cutedsl.softmax_device import LOWEST, cap, exp2
from tokenspeed_kernel_nvidia.sm90.attention.decode.merge_device import Merger, Sums
from tokenspeed_kernel_nvidia.sm90.attention.decode.swap_ab_device import SwapAb
from tokenspeed_kernel_nvidia.sm90.attention.decode.tile_device import (
    DONE,
    LAZY,
    LEFT,
    OFFSET,
    PLANNED,
    SEQUENCE,
    THREADS,
    Call,
    Shapes,
)


class Consumers:
    """The consumer warps: q @ k and P @ V with mma.sync, online softmax in registers.

    The methods' arguments ``queries`` and ``sums`` are a warp's A fragments ``[tile of 16 query rows, k-step, register]``, and its
    softmax state and output accumulators.
    """

    def __init__(self, shapes: Shapes, merger: Merger, swap_ab: SwapAb) -> None:
        self.config = shapes.config
        self.shapes = shapes
        self.merger = merger
        self.swap_ab = swap_ab

    @cute.jit
    def consume(self, call: Call):
        """Computes attention to the K/V tiles that the producer warp loads."""
        c = self.config
        thread, _, _ = cute.arch.thread_idx()
        queries = cute.make_rmem_tensor((self.shapes.tiles, self.shapes.k_width // 16, 4), Uint32)
        sums = Sums(
            cute.make_rmem_tensor((self.shapes.tiles, self.shapes.v_width // 8, 2 * self.shapes.used), Float32),
            cute.make_rmem_tensor((self.shapes.tiles, 2 if c.swap_ab else self.shapes.used), Float32),
            cute.make_rmem_tensor((self.shapes.tiles, 2 if c.swap_ab else self.shapes.used), Float32),
            cute.make_rmem_tensor((c.abreast,), Float32),
        )
        if const_expr(c.heads > 1):
            self.consume_heads(call, thread // 32, queries, sums)
        else:
            self.consume_tiles(call, thread, queries, sums)

    @cute.jit
    def consume_tiles(self, call: Call, thread: Int32, queries: cute.Tensor, sums: Sums):
        """Computes one KV head by all consumer warps, one sequence of the CTA's range after another.

        The warps take the K/V tiles of the CTA's range round-robin, across the ends of sequences. So a warp always uses the same
        ring stages, see `Config.stages`. At the end of each sequence, the warps merge their partial results.
        """
        c = self.config
        parts = c.parts
        first_row = thread // 32 // parts * (16 * self.shapes.tiles)
        sink = -Float32.inf
        if thread < c.rows:
            kv_head, row = self.shapes.of_head(call, call.kv_head, thread)
            sink = call.sinks.load(kv_head * call.gqa_ratio + row % call.gqa_ratio)
        cute.arch.barrier(barrier_id=PLANNED, number_of_threads=THREADS)
        if thread < c.rows:
            call.sink_values[thread] = sink
        while call.plan[LEFT] > 0:
            sequence, offset, done = call.plan[SEQUENCE], call.plan[OFFSET], call.plan[DONE]
            length = self.shapes.length_of(call, sequence)
            begin, first, count = self.shapes.visible(call, length)
            count -= offset
            if const_expr(c.split):
                count = cutlass.min(count, call.plan[LEFT])
            self.load_queries(call, sequence, call.kv_head, first_row, queries, sums)
            # This warp's tiles are those whose index in the CTA's range is congruent to the warp's number modulo `parts`. Find the
            # first of them at or after tile number `done`. `parts` is added to keep the dividend positive, because a remainder has
            # the dividend's sign.
            turn = (opt_barrier(thread) // 32 % parts - done % parts + parts) % parts
            index = done + cute.arch.make_warp_uniform(turn)
            self.walk(call, Int32(0), index, done + count, first + offset - done, length, begin, first_row, queries, sums)
            if const_expr(c.swap_ab):
                self.swap_ab.store_partial(call, sums)
            else:
                self.merger.store_partial(call, sums)
            self.merger.merge_warps(call)

    @cute.jit
    def consume_heads(self, call: Call, warp: Int32, queries: cute.Tensor, sums: Sums):
        """Computes one KV head per consumer warp: each warp computes all K/V tiles of its KV head. So warps need no barriers and
        merge no results."""
        kv_head = call.kv_head + warp
        sinks = cute.make_rmem_tensor((self.shapes.tiles, self.shapes.used), Float32)
        for tile in cutlass.range_constexpr(self.shapes.tiles):
            for r in cutlass.range_constexpr(self.shapes.used):
                row = cute.arch.lane_idx() // 4 + tile * 16 + r * 8
                sinks[tile, r] = call.sinks.load(kv_head * call.gqa_ratio + row % call.gqa_ratio)
        cute.arch.barrier(barrier_id=PLANNED, number_of_threads=THREADS)
        sequence, index = call.group, Int32(0)
        while sequence < call.batch:
            length = self.shapes.length_of(call, sequence)
            begin, first, count = self.shapes.visible(call, length)
            self.load_queries(call, sequence, kv_head, Int32(0), queries, sums)
            tiles_at = warp * (self.shapes.box * self.shapes.keys.row_bytes)
            self.walk(call, tiles_at, index, index + count, first - index, length, begin, Int32(0), queries, sums)
            self.merger.write_sums(call, sequence, kv_head, sums, sinks)
            index += count
            sequence += call.groups

    @cute.jit
    def load_queries(self, call: Call, sequence: Int32, first_kv_head: Int32, first_row: Int32, queries: cute.Tensor, sums: Sums):
        """Loads a warp's query rows of a sequence as A fragments, and resets softmax state and accumulators. Rows without a query
        are zeros.

        With two KV heads abreast, a row of the A operand spans the columns of both heads. The row is zero in the columns of the
        other head, so one MMA chain over all columns computes the row's scores with its own head's keys.
        """
        c = self.config
        lane = cute.arch.lane_idx()
        own_row = opt_barrier(first_row + lane // 4)
        for tile in cutlass.range_constexpr(self.shapes.tiles):
            for r in cutlass.range_constexpr(2):
                for each in cutlass.range_constexpr(self.shapes.k_width // 8):
                    queries[tile, each // 2, each % 2 * 2 + r] = Uint32(0)
                if const_expr(r < self.shapes.used):
                    kv_head, row = self.shapes.of_head(call, first_kv_head, own_row + tile * 16 + r * 8)
                    token = row // call.gqa_ratio
                    sums.row_max[tile, r] = Float32(LOWEST)
                    sums.row_sum[tile, r] = Float32(0.0)
                    if token < call.q_len:
                        q_head = kv_head * call.gqa_ratio + row - token * call.gqa_ratio
                        source = call.q.at(sequence * call.q_len + token, q_head)
                        for each in cutlass.range_constexpr(c.head_dim // 8):
                            at = each * 16 + lane % 4 * 4
                            if const_expr(c.fp8):  # four adjacent elements per lane, as of the fp8 keys
                                at = each // 2 * 32 + lane % 4 * 8 + each % 2 * 4
                            chunk = (r % c.abreast * c.head_dim + each * 8) // 16
                            queries[tile, chunk, each % 2 * 2 + r] = load_word(source + at)
            for column in cutlass.range_constexpr(self.shapes.v_width // 8):
                for each in cutlass.range_constexpr(2 * self.shapes.used):
                    sums.acc[tile, column, each] = Float32(0.0)
        if const_expr(c.swap_ab):
            self.swap_ab.begin(sums)

        if const_expr(c.fp8):
            self.convert_to_float16(call, first_kv_head, queries, sums)

    @cute.jit
    def convert_to_float16(self, call: Call, kv_head: Int32, queries: cute.Tensor, sums: Sums):
        """Converts bfloat16 queries to float16 for MMAs with an fp8 cache. A power of 2 scales the queries into float16's range.
        The inverse of this power is multiplied into the factor of the scores.

        The MMAs use float16 because one instruction converts two e4m3 values to float16; a conversion to bfloat16 takes several.
        Warps with the same query rows compute the same power.
        """
        c = self.config
        scale = call.cap_scale if const_expr(c.capped) else call.scale
        scales = [scale * call.k_scales.of(kv_head * c.abreast + each) for each in range(c.abreast)]
        if const_expr(self.shapes.dtype is not cutlass.Float16):
            highest = Float32(0.0)
            for tile in cutlass.range_constexpr(self.shapes.tiles):
                for each in cutlass.range_constexpr(self.shapes.k_width // 4):
                    if const_expr(each % 2 < self.shapes.used and self.shapes.has(each % 2, each // 4 * 16, c.head_dim)):
                        low, high = widened(self.shapes.dtype, queries[tile, each // 4, each % 4])
                        highest = cute.arch.fmax(highest, cute.arch.fmax(cute.arch.fmax(low, -low), cute.arch.fmax(high, -high)))
            factor, inverse = factors_of_float16(bits_of(highest))
            for tile in cutlass.range_constexpr(self.shapes.tiles):
                for each in cutlass.range_constexpr(self.shapes.k_width // 4):
                    if const_expr(each % 2 < self.shapes.used and self.shapes.has(each % 2, each // 4 * 16, c.head_dim)):
                        low, high = widened(self.shapes.dtype, queries[tile, each // 4, each % 4])
                        queries[tile, each // 4, each % 4] = pack(self.shapes.mma_dtype, low * factor, high * factor)
            scales = [scale * inverse for scale in scales]
        for each in cutlass.range_constexpr(c.abreast):
            sums.scale[each] = scales[each]

    @cute.jit
    def walk(
        self,
        call: Call,
        tiles_at: Int32,
        index: Int32,
        end: Int32,
        shift: Int32,
        length: Int32,
        begin: Int32,
        first_row: Int32,
        queries: cute.Tensor,
        sums: Sums,
    ):
        """Accumulates a warp's K/V tiles of a sequence: the CTA's tile number ``index``, then every ``parts``-th tile before
        ``end``.

        Args:
            tiles_at: byte offset of the warp's tiles in a ring stage.
            shift: what to add to a tile's index in the CTA's range to get its index in the sequence.
            length, begin: the sequence's length, and the first position that a query sees.
            first_row: the warp's first query row.
        """
        c = self.config
        while index < end:
            at = nth_to_read(index, c.stages)
            call.pipe.wait(at)
            tile_at = call.tiles.toint() + tiles_at + at.stage * self.shapes.stage_bytes
            self.attend(call, tile_at, (index + shift) * c.block, length, begin, first_row, queries, sums)
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                call.pipe.empty.arrive(at)
            index += c.parts

    # -- one tile --------------------------------------------------------------------------------------------------------------

    @cute.jit
    def attend(
        self,
        call: Call,
        tile_at: Int32,
        start: Int32,
        length: Int32,
        begin: Int32,
        first_row: Int32,
        queries: cute.Tensor,
        sums: Sums,
    ):
        """Does one step of attention: scores, mask, softmax and P @ V of one K/V tile, which begins at position ``start`` of the
        sequence.

        Args:
            tile_at, values_at: shared-memory addresses of the tile's keys, and of its values.
        """
        c = self.config
        values_at = tile_at + self.shapes.values.begin * c.kv_bytes
        # Positions without a token may hold NaN. Their probabilities are 0, but 0 * NaN is not 0, so zero V there.
        if start < begin or start + c.block > length:
            self.clear_values(values_at, start, length, begin)
        if const_expr(c.swap_ab):
            self.swap_ab.attend(call, tile_at, values_at, start, length, queries, sums)
        else:
            self.attend_rows(call, tile_at, values_at, start, length, first_row, queries, sums)

    @cute.jit
    def attend_rows(
        self,
        call: Call,
        tile_at: Int32,
        values_at: Int32,
        start: Int32,
        length: Int32,
        first_row: Int32,
        queries: cute.Tensor,
        sums: Sums,
    ):
        """The steps of `attend` without swap-AB, with queries and probabilities as the A operands."""
        c = self.config
        scores = self.qk_mma_fp8(tile_at, queries) if const_expr(c.fp8) else self.qk_mma(tile_at, queries)
        if const_expr(c.capped):
            self.cap_scores(call, scores, sums)
        windowed = call.window_left >= 0
        if start + c.block > length - call.q_len + 1 or (windowed and start < length - 1 - call.window_left):
            self.mask(call, scores, start, length, first_row, windowed)
        probs = self.softmax_step(call, scores, sums)
        if const_expr(c.fp8):
            self.pv_mma_fp8(values_at, probs, sums)
        else:
            self.pv_mma(values_at, probs, sums)

    @cute.jit
    def cap_scores(self, call: Call, scores: cute.Tensor, sums: Sums):
        """Replaces a tile's scores by ``tanh(score / logit_cap)``, that is, by fractions of the cap from -1 to 1."""
        c = self.config
        for tile in cutlass.range_constexpr(self.shapes.tiles):
            for r in cutlass.range_constexpr(self.shapes.used):
                own = cute.make_rmem_tensor((c.block // 8, 2), Float32)
                for key in cutlass.range_constexpr(c.block // 8):
                    for each in cutlass.range_constexpr(2):
                        own[key, each] = scores[tile, key, 2 * r + each]
                cap(own, self.merger.qk_scale(sums, r) if const_expr(c.fp8) else call.cap_scale)
                for key in cutlass.range_constexpr(c.block // 8):
                    for each in cutlass.range_constexpr(2):
                        scores[tile, key, 2 * r + each] = own[key, each]

    @cute.jit
    def clear_values(self, values_at: Int32, start: Int32, length: Int32, begin: Int32):
        """Zeroes V of a tile, in shared memory, at the positions that no query sees. If several warps read the tile, each of them
        zeroes the same rows, so no barrier is needed."""
        c = self.config
        lane = cute.arch.lane_idx()
        for each in cutlass.range_constexpr((c.block * self.shapes.values.count + 31) // 32):
            row = each * 32 + lane
            position = start + row % c.block
            if row < c.block * self.shapes.values.count and (position < begin or position >= length):
                for chunk in cutlass.range_constexpr(self.shapes.values.row_bytes // 16):
                    at = row // c.block * self.shapes.values.bytes + self.shapes.values.row_at(row % c.block)
                    store_floats("shared", values_at + at + chunk * 16, [Float32(0.0)] * 4)
        # Order these stores (generic proxy) before the TMA load (async proxy) that will refill the stage.
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()

    @cute.jit
    def qk_mma(self, tile_at: Int32, queries: cute.Tensor):
        """Computes the scores q @ k of a warp's rows and a tile's keys: ``[tile of 16 query rows, group of 8 keys, element]``. An
        ldmatrix loads the B operands of two k-steps: 32 columns of eight keys."""
        c = self.config
        lane = cute.arch.lane_idx()
        lane_row = lane % 8
        lane_matrix = lane // 8
        keys = c.block // 8
        scores = cute.make_rmem_tensor((self.shapes.tiles, keys, 4), Float32)
        for key in cutlass.range_constexpr(keys):
            acc_qk = [[Float32(0.0)] * 4 for _ in range(self.shapes.tiles)]
            for chunk in cutlass.range_constexpr(0, c.head_dim // 8, 4):
                b = ldmatrix(
                    tile_at + lane_row * self.shapes.keys.row_bytes
                    + ((lane_matrix ^ self.shapes.keys.swizzle_xor(lane_row)) * 16 ^ self.shapes.keys.chunk_in_row(chunk))
                    + (self.shapes.keys.row_at(key * 8) + self.shapes.keys.panel_at(chunk)),
                    False,
                )  # fmt: skip
                for tile in cutlass.range_constexpr(self.shapes.tiles):
                    for half in cutlass.range_constexpr(min(2, c.head_dim // 16 - chunk // 2)):
                        a = [queries[tile, chunk // 2 + half, each] for each in range(4)]
                        acc_qk[tile] = mma_m16n8k16(self.shapes.dtype, acc_qk[tile], a, b[2 * half : 2 * half + 2])
            for tile in cutlass.range_constexpr(self.shapes.tiles):
                for each in cutlass.range_constexpr(4):
                    scores[tile, key, each] = acc_qk[tile][each]
        return scores

    @cute.jit
    def qk_mma_fp8(self, tile_at: Int32, queries: cute.Tensor):
        """Like `qk_mma`, for fp8 keys. A lane loads four adjacent elements of a key, which widen to the two registers of a B
        fragment.

        Each MMA depends on the preceding MMA through the accumulator. Interleaving eight groups of keys was slower. On an H200, 64
        sequences of 8192 tokens and 8 heads took 158 us instead of 143 us with head_dim 64, and 286 us instead of 256 us with
        head_dim 128.
        """
        panels = self.shapes.keys
        lane = cute.arch.lane_idx()
        at = tile_at + self.shapes.swizzled(panels, lane % 8, lane // 8)
        keys, chunks = self.config.block // 8, self.shapes.k_width // 16
        scores = cute.make_rmem_tensor((self.shapes.tiles, keys, 4), Float32)
        for key in cutlass.range_constexpr(keys):
            acc_qk = [[Float32(0.0)] * 4 for _ in range(self.shapes.tiles)]
            for chunk in cutlass.range_constexpr(0, chunks, 4):
                words = ldmatrix(
                    (at ^ panels.chunk_in_row(chunk)) + (panels.row_at(key * 8) + panels.panel_at(chunk)),
                    False,
                )
                for each in cutlass.range_constexpr(min(4, chunks - chunk)):
                    b = widen_fp8(self.shapes.mma_dtype, words[each])
                    for tile in cutlass.range_constexpr(self.shapes.tiles):
                        a = [queries[tile, chunk + each, i] for i in range(4)]
                        acc_qk[tile] = mma_m16n8k16(self.shapes.mma_dtype, acc_qk[tile], a, b)
            for tile in cutlass.range_constexpr(self.shapes.tiles):
                for each in cutlass.range_constexpr(4):
                    scores[tile, key, each] = acc_qk[tile][each]
        return scores

    @cute.jit
    def mask(self, call: Call, scores: cute.Tensor, start: Int32, length: Int32, first_row: Int32, windowed: cutlass.Boolean):
        """Masks the scores of keys after a query's position, and before the query's window."""
        lane = cute.arch.lane_idx()
        own_row = opt_barrier(first_row + lane // 4)
        for tile in cutlass.range_constexpr(self.shapes.tiles):
            for r in cutlass.range_constexpr(self.shapes.used):
                _, row = self.shapes.of_head(call, Int32(0), own_row + tile * 16 + r * 8)
                end = length - call.q_len + row // call.gqa_ratio + 1
                begin = cutlass.select_(windowed, end - 1 - call.window_left, Int32(0))
                for key in cutlass.range_constexpr(self.config.block // 8):
                    for each in cutlass.range_constexpr(2):
                        position = start + key * 8 + lane % 4 * 2 + each
                        if position < begin or position >= end:
                            scores[tile, key, 2 * r + each] = -Float32.inf

    @cute.jit
    def softmax_step(self, call: Call, scores: cute.Tensor, sums: Sums):
        """Does one step of online softmax. Returns the tile's probabilities, rounded to 16 bits, as the A operand of P @ V.

        ``sums.row_max`` is a maximum of unscaled scores. It is raised, and accumulators are rescaled, only if some row's scaled
        maximum grew by more than LAZY. Until then, probabilities may be as large as 2^LAZY, which a 16-bit float can hold. The
        output does not depend on this, because the row sum has the same factor. For the check, each lane compares its own maximum,
        and the warp votes. So a step without a rescale needs no shuffles.
        """
        c = self.config
        keys = c.block // 8
        highest = cute.make_rmem_tensor((self.shapes.tiles, self.shapes.used), Float32)
        rise = Float32(0.0)
        for tile in cutlass.range_constexpr(self.shapes.tiles):
            for r in cutlass.range_constexpr(self.shapes.used):
                scale = self.merger.scale(call, sums, r)
                own = cute.arch.fmax(scores[tile, 0, 2 * r], scores[tile, 0, 2 * r + 1])
                for key in cutlass.range_constexpr(1, keys):
                    own = cute.arch.fmax(own, cute.arch.fmax(scores[tile, key, 2 * r], scores[tile, key, 2 * r + 1]))
                highest[tile, r] = own
                rise = cute.arch.fmax(rise, (own - sums.row_max[tile, r]) * scale)
        if any_lane(rise > LAZY):
            for tile in cutlass.range_constexpr(self.shapes.tiles):
                for r in cutlass.range_constexpr(self.shapes.used):
                    own = quad_max(cute.arch.fmax(highest[tile, r], sums.row_max[tile, r]))
                    decay = exp2((sums.row_max[tile, r] - own) * self.merger.scale(call, sums, r))
                    sums.row_max[tile, r] = own
                    sums.row_sum[tile, r] *= decay
                    for column in cutlass.range_constexpr(self.shapes.v_width // 8):
                        if const_expr(self.shapes.has(r, column * 8, c.v_head_dim)):
                            sums.acc[tile, column, 2 * r] *= decay
                            sums.acc[tile, column, 2 * r + 1] *= decay

        probs = cute.make_rmem_tensor((self.shapes.tiles, keys, 2), Uint32)
        for tile in cutlass.range_constexpr(self.shapes.tiles):
            for r in cutlass.range_constexpr(2):
                if const_expr(r < self.shapes.used):
                    scale = self.merger.scale(call, sums, r)
                    shift = sums.row_max[tile, r] * scale
                    some = Float32(0.0)
                    for key in cutlass.range_constexpr(keys):
                        even = exp2(scores[tile, key, 2 * r] * scale - shift)
                        odd = exp2(scores[tile, key, 2 * r + 1] * scale - shift)
                        some += even + odd
                        probs[tile, key, r] = pack(self.shapes.mma_dtype, even, odd)
                    sums.row_sum[tile, r] += some
                else:
                    for key in cutlass.range_constexpr(keys):
                        probs[tile, key, r] = Uint32(0)
        return probs

    @cute.jit
    def pv_mma(self, values_at: Int32, probs: cute.Tensor, sums: Sums):
        """Adds P @ V of a tile to the accumulator. V is loaded by ldmatrix.trans, because its rows are the MMA's k."""
        c = self.config
        lane = cute.arch.lane_idx()
        lane_row = lane % 8
        lane_matrix = lane // 8
        row_bytes, swizzle_xor = self.shapes.values.row_bytes, self.shapes.values.swizzle_xor(lane_row)
        matrix_at = values_at + lane_row * row_bytes + lane_matrix % 2 * (8 * row_bytes) + ((lane_matrix // 2) ^ swizzle_xor) * 16
        for chunk in cutlass.range_constexpr(0, c.v_head_dim // 8, 2):
            acc = [[[Float32(0.0)] * 4, [Float32(0.0)] * 4] for _ in range(self.shapes.tiles)]
            for tile in cutlass.range_constexpr(self.shapes.tiles):
                for half in cutlass.range_constexpr(2):
                    for each in cutlass.range_constexpr(2 * self.shapes.used):
                        acc[tile][half][each] = sums.acc[tile, chunk + half, each]
            for key in cutlass.range_constexpr(0, c.block // 8, 2):
                offset = self.shapes.values.row_at(key * 8) + self.shapes.values.panel_at(chunk)
                b = ldmatrix((matrix_at ^ self.shapes.values.chunk_in_row(chunk)) + offset, True)
                for tile in cutlass.range_constexpr(self.shapes.tiles):
                    a = [probs[tile, key + each // 2, each % 2] for each in range(4)]
                    for half in cutlass.range_constexpr(2):
                        acc[tile][half] = mma_m16n8k16(self.shapes.dtype, acc[tile][half], a, b[2 * half : 2 * half + 2])
            for tile in cutlass.range_constexpr(self.shapes.tiles):
                for half in cutlass.range_constexpr(2):
                    for each in cutlass.range_constexpr(2 * self.shapes.used):
                        sums.acc[tile, chunk + half, each] = acc[tile][half][each]

    @cute.jit
    def pv_mma_fp8(self, values_at: Int32, probs: cute.Tensor, sums: Sums):
        """Like `pv_mma`, for fp8 V. ldmatrix transposes pairs of bytes. So an MMA computes only the even or only the odd columns of
        each group of 16, and `Merger.own_columns` puts adjacent columns together again."""
        c = self.config
        panels = self.shapes.values
        lane = cute.arch.lane_idx()
        at = values_at + self.shapes.swizzled(panels, lane % 8, lane // 16) + lane // 8 % 2 * (8 * panels.row_bytes)
        for chunk in cutlass.range_constexpr(0, self.shapes.v_width // 16, 2):
            parts = 2 * min(2, self.shapes.v_width // 16 - chunk)
            acc = [[[Float32(0.0)] * 4 for _ in range(4)] for _ in range(self.shapes.tiles)]
            for tile in cutlass.range_constexpr(self.shapes.tiles):
                for part in cutlass.range_constexpr(parts):
                    for each in cutlass.range_constexpr(2 * self.shapes.used):
                        if const_expr(self.shapes.has(each // 2, chunk * 16, c.v_head_dim)):
                            acc[tile][part][each] = sums.acc[tile, 2 * chunk + part, each]
            for key in cutlass.range_constexpr(0, c.block // 8, 2):
                offset = panels.row_at(key * 8) + panels.panel_at(chunk)
                words = ldmatrix((at ^ panels.chunk_in_row(chunk)) + offset, True)
                # A word has two columns of two keys; regroup it as the even column's pair and the odd column's pair.
                pairs = [widen_fp8(self.shapes.mma_dtype, permute_bytes(word, word, 0x3120)) for word in words]
                for tile in cutlass.range_constexpr(self.shapes.tiles):
                    a = [probs[tile, key + each // 2, each % 2] for each in range(4)]
                    for part in cutlass.range_constexpr(parts):
                        b = [pairs[part // 2 * 2][part % 2], pairs[part // 2 * 2 + 1][part % 2]]
                        acc[tile][part] = mma_m16n8k16(self.shapes.mma_dtype, acc[tile][part], a, b)
            for tile in cutlass.range_constexpr(self.shapes.tiles):
                for part in cutlass.range_constexpr(parts):
                    for each in cutlass.range_constexpr(2 * self.shapes.used):
                        if const_expr(self.shapes.has(each // 2, chunk * 16, c.v_head_dim)):
                            sums.acc[tile, 2 * chunk + part, each] = acc[tile][part][each]
