"""The epilogue of `kernel_device`: merges the partial results of warps and CTAs (split-KV), and writes the output.

A warp's partial result of a query row consists of the running row max, the row sum of exponentials, and the output accumulator.
Partial results of the same row over different keys are rescaled to the largest row max and added.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute

from tokenspeed_kernel_nvidia.cutedsl.registers_device import (
    load_floats,
    opt_barrier,
    pack,
    quad_sum,
    store_floats,
    store_words,
)
from tokenspeed_kernel_nvidia.cutedsl.softmax_device import LN2, LOWEST, exp2, raise_to
from tokenspeed_kernel_nvidia.sm90.attention.decode.config import CONSUMERS, MERGE_BATCH
from tokenspeed_kernel_nvidia.sm90.attention.decode.tile_device import BEFORE, DONE, LEFT, OFFSET, PER_GROUP, SEQUENCE, Call, Shapes

MERGERS = 32 * CONSUMERS  # number of threads that merge: all threads of the consumer warps
MERGE = 2  # the named barrier of these threads


@dataclass(frozen=True)
class Sums:
    """A consumer warp's softmax state and output accumulators. A lane holds one or two rows of each tile of 16 query rows.

    Attributes:
        acc: ``[tile of query rows, group of 8 columns, element]``, see `registers_device`.
        row_max, row_sum: ``[tile of query rows, row]``. ``row_max`` is not scaled; `Merger.scale` makes it a base-2 exponent.
            ``row_sum`` covers this lane's keys only, so it is summed over the quad at the end.
        scale: factors of q @ k with an fp8 cache: ``scale`` or ``cap_scale`` of the call, times the key scale, times the inverse of
            the factor that scaled q to float16. There is one factor for each of the KV heads that are side by side.
    """

    acc: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor
    scale: cute.Tensor


class Merger:
    """The epilogue: merges partial results and writes the output."""

    def __init__(self, shapes: Shapes) -> None:
        self.config = shapes.config
        self.shapes = shapes

    # -- results of one warp -----------------------------------------------------------------------------------------------------

    @cute.jit
    def write_sums(self, call: Call, sequence: Int32, kv_head: Int32, sums: Sums, sinks: cute.Tensor):
        """Writes the output for a sequence and a KV head that this warp has computed alone."""
        lane = cute.arch.lane_idx()
        for tile in cutlass.range_constexpr(self.shapes.tiles):
            for r in cutlass.range_constexpr(self.shapes.used):
                row_sum = quad_sum(sums.row_sum[tile, r])
                factor, logarithm = self.normalise(sums.row_max[tile, r] * self.scale(call, sums, r), row_sum, sinks[tile, r])
                factor = self.times_v_scale(call, factor, kv_head)
                row = lane // 4 + tile * 16 + r * 8
                token = row // call.gqa_ratio
                q_head = kv_head * call.gqa_ratio + row - token * call.gqa_ratio
                if token < call.q_len:
                    to = call.out.at(sequence * call.q_len + token, q_head) + lane % 4 * (2 * self.shapes.together)
                    for column in cutlass.range_constexpr(0, self.config.v_head_dim // 4, self.shapes.together):
                        own = [number * factor for number in self.own_columns(sums, tile, r, column)]
                        words = [pack(self.shapes.dtype, own[at], own[at + 1]) for at in range(0, self.shapes.together, 2)]
                        store_words(to + column * 8, words)
                    if call.lse != 0 and lane % 4 == 0:
                        self.write_lse(call, sequence, token, q_head, logarithm)

    def scale(self, call: Call, sums: Sums, r: int) -> Float32:
        """Returns the factor that converts scores of a lane's ``r``-th row to base 2; it includes log2(e)."""
        c = self.config
        return self.qk_scale(sums, r) if c.fp8 and not c.capped else call.scale

    def qk_scale(self, sums: Sums, r: int) -> Float32:
        """Returns the factor by which q @ k of this lane's ``r``-th row is multiplied with an fp8 cache."""
        return sums.scale[r % self.config.abreast]

    @cute.jit
    def times_v_scale(self, call: Call, factor: Float32, kv_head: Int32) -> Float32:
        """Returns an accumulator's factor, multiplied by the V scale of an fp8 cache."""
        if const_expr(self.config.fp8):
            factor *= call.v_scales.of(kv_head)
        return factor

    def own_columns(self, sums: Sums, tile: int, r: int, column: int) -> list[Any]:
        """Returns this lane's adjacent elements, two or four, of an accumulator row. The quad's four lanes hold adjacent elements
        of the row, beginning at the KV head's column ``4 * column``.

        With an fp8 cache, ldmatrix transposes pairs of bytes. So an MMA computes only the even or only the odd columns of each
        group of 16.
        """
        c = self.config
        column += r % c.abreast * self.shapes.fours
        if c.fp8:
            return [sums.acc[tile, column // 2 + odd, 2 * r + pair] for pair in range(2) for odd in range(2)]
        return [sums.acc[tile, column // 2, 2 * r + each] for each in range(2)]

    # -- results of the warps of a CTA -------------------------------------------------------------------------------------------

    @cute.jit
    def store_partial(self, call: Call, sums: Sums):
        """Stores a consumer warp's partial results in shared memory, for `merge_warps`. The stored row max is scaled, that is, a
        base-2 exponent."""
        c = self.config
        thread, _, _ = cute.arch.thread_idx()
        thread = opt_barrier(thread)
        lane = thread % 32
        warp = thread // 32
        first_row = warp % c.parts * c.rows + warp // c.parts * (16 * self.shapes.tiles)
        for tile in cutlass.range_constexpr(self.shapes.tiles):
            for r in cutlass.range_constexpr(self.shapes.used):
                row_sum = quad_sum(sums.row_sum[tile, r])
                row = first_row + tile * 16 + r * 8 + lane // 4
                if lane % 4 == 0:
                    store_floats(
                        "shared", call.sums.toint() + row * 8, [sums.row_max[tile, r] * self.scale(call, sums, r), row_sum]
                    )
                to = call.results.toint() + (row * c.width + lane % 4 * self.shapes.together) * 4
                for column in cutlass.range_constexpr(0, c.v_head_dim // 4, self.shapes.together):
                    store_floats("shared", to + column * 16, self.own_columns(sums, tile, r, column))

    @cute.jit
    def merge_warps(self, call: Call):
        """Merges the partial results of a CTA's warps for a sequence. Writes the output if this CTA has computed the whole
        sequence. Otherwise (split-KV) writes a partial result, which the last CTA to arrive merges. Then updates the plan (the
        CTA's progress in shared memory) for the CTA's next sequence. A thread merges four adjacent elements of an output row at a
        time.
        """
        c = self.config
        rows, parts = c.rows, c.parts
        thread, _, _ = cute.arch.thread_idx()
        thread = opt_barrier(thread)
        sequence, offset, left, done = call.plan[SEQUENCE], call.plan[OFFSET], call.plan[LEFT], call.plan[DONE]
        _, _, whole = self.shapes.visible(call, self.shapes.length_of(call, sequence))
        # Wait until all warps have stored their partial results, and have read the plan, which changes below.
        cute.arch.barrier(barrier_id=MERGE, number_of_threads=MERGERS)
        first_group = call.group
        partials = Int32(1)
        if const_expr(c.split):
            per_group = call.plan[PER_GROUP]
            start = call.group * per_group + done - offset  # index of the sequence's first tile among the tiles of all groups
            first_group = start // per_group
            partials = (start + whole - 1) // per_group - first_group + 1
        for item in cutlass.range((rows * self.shapes.fours + MERGERS - 1) // MERGERS, unroll=1):
            index = item * MERGERS + thread
            row = index // self.shapes.fours
            column = index % self.shapes.fours * 4
            sums = [load_floats("shared", call.sums.toint() + (each * rows + row) * 8, 2) for each in range(parts)]
            row_max = sums[0][0]
            for each in cutlass.range_constexpr(1, parts):
                row_max = cute.arch.fmax(row_max, sums[each][0])
            row_sum = Float32(0.0)
            merged = [Float32(0.0)] * 4
            for each in cutlass.range_constexpr(parts):
                weight = exp2(sums[each][0] - row_max)
                row_sum += weight * sums[each][1]
                result = load_floats("shared", call.results.toint() + ((each * rows + row) * c.width + column) * 4, 4)
                merged = [merged[i] + weight * result[i] for i in range(4)]
            if self.shapes.of_head(call, call.kv_head, row)[1] < call.gqa_ratio * call.q_len:
                if partials > 1:
                    sums_at, results_at = self.shapes.partial_at(call, call.group, offset == 0, row)
                    store_floats("global", results_at + column * 4, merged)
                    if column == 0:
                        store_floats("global", sums_at, [row_max, row_sum])
                else:
                    self.write(call, sequence, row, column, row_max, row_sum, merged)
        if const_expr(c.split):
            self.join(call, sequence, first_group, partials)
        if thread == 0:
            if const_expr(c.split):
                count = cutlass.min(whole - offset, left)
                call.plan[SEQUENCE] = sequence + 1
                call.plan[LEFT] = left - count
                call.plan[DONE] = done + count
            else:
                call.plan[SEQUENCE] = sequence + call.groups
                call.plan[LEFT] = left - 1
                call.plan[DONE] = done + whole
            call.plan[OFFSET] = Int32(0)
        cute.arch.barrier(barrier_id=MERGE, number_of_threads=MERGERS)

    # -- results of several CTAs -------------------------------------------------------------------------------------------------

    @cute.jit
    def join(self, call: Call, sequence: Int32, first_group: Int32, partials: Int32):
        """Counts the arrived partial results of a sequence that spans several CTA groups. The CTA that arrives last merges them.

        At most one such sequence begins in a CTA group. So the sequence uses the counter of the CTA group in which it begins.
        """
        thread, _, _ = cute.arch.thread_idx()
        if partials > 1:
            # All threads have stored their elements of the partial result before thread 0 releases them to the other CTAs.
            cute.arch.barrier(barrier_id=MERGE, number_of_threads=MERGERS)
            if thread == 0:
                counter = cute.make_ptr(Int32, call.counters, cute.AddressSpace.gmem) + (first_group * call.kv_heads + call.kv_head)
                before = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
                call.plan[BEFORE] = before
                if before == partials - 1:
                    counter[0] = Int32(0)  # for the next launch
            cute.arch.barrier(barrier_id=MERGE, number_of_threads=MERGERS)
            if call.plan[BEFORE] == partials - 1:
                self.merge_partials(call, sequence, first_group, partials)

    @cute.jit
    def merge_partials(self, call: Call, sequence: Int32, first_group: Int32, partials: Int32):
        """Merges the partial results of a sequence from all its CTA groups, in a fixed order, MERGE_BATCH at a time. All loads of a
        batch are in flight at once. Indices beyond the last partial result repeat it, with weight 0."""
        thread, _, _ = cute.arch.thread_idx()
        thread = opt_barrier(thread)
        for item in cutlass.range((self.config.rows * self.shapes.fours + MERGERS - 1) // MERGERS, unroll=1):
            index = item * MERGERS + thread
            row = index // self.shapes.fours
            column = index % self.shapes.fours * 4
            if self.shapes.of_head(call, call.kv_head, row)[1] < call.gqa_ratio * call.q_len:
                row_max = Float32(LOWEST)
                row_sum = Float32(0.0)
                merged = cute.make_rmem_tensor((4,), Float32)
                merged.fill(0.0)
                for begin in cutlass.range(0, partials, MERGE_BATCH, unroll=1):
                    # Other SMs have written these results. So load from L2 (cg), because L1 may have stale lines.
                    sums = []
                    results = []
                    for each in cutlass.range_constexpr(MERGE_BATCH):
                        which = cutlass.min(begin + each, partials - 1)
                        sums_at, results_at = self.shapes.partial_at(call, first_group + which, which == 0, row)
                        sums.append(load_floats("global.cg", sums_at, 2))
                        results.append(load_floats("global.cg", results_at + column * 4, 4))
                    raised = row_max
                    for each in cutlass.range_constexpr(MERGE_BATCH):
                        raised = cute.arch.fmax(raised, sums[each][0])
                    decay = exp2(row_max - raised)
                    row_sum *= decay
                    for i in cutlass.range_constexpr(4):
                        merged[i] *= decay
                    for each in cutlass.range_constexpr(MERGE_BATCH):
                        weight = cutlass.select_(begin + each < partials, exp2(sums[each][0] - raised), Float32(0.0))
                        row_sum += weight * sums[each][1]
                        for i in cutlass.range_constexpr(4):
                            merged[i] += weight * results[each][i]
                    row_max = raised
                self.write(call, sequence, row, column, row_max, row_sum, [merged[i] for i in range(4)])

    # -- output ------------------------------------------------------------------------------------------------------------------

    @cute.jit
    def write(self, call: Call, sequence: Int32, row: Int32, column: Int32, row_max: Float32, row_sum: Float32, merged: Any):
        """Adds the sink to the row sum, normalises four elements of an output row, and stores them."""
        kv_head, own_row = self.shapes.of_head(call, call.kv_head, row)
        token = own_row // call.gqa_ratio
        q_head = kv_head * call.gqa_ratio + own_row - token * call.gqa_ratio
        factor, logarithm = self.normalise(row_max, row_sum, call.sink_values[row])
        factor = self.times_v_scale(call, factor, kv_head)
        to = call.out.at(sequence * call.q_len + token, q_head) + column * 2
        store_words(to, [pack(self.shapes.dtype, merged[at] * factor, merged[at + 1] * factor) for at in (0, 2)])
        if call.lse != 0 and column == 0:
            self.write_lse(call, sequence, token, q_head, logarithm)

    @cute.jit
    def normalise(self, row_max: Float32, row_sum: Float32, sink: Float32):
        """Returns the factor that normalises a row's accumulator, and the row's LSE (natural logarithm). Both include the sink. A
        row without visible keys and without a sink gets the factor 0 and the LSE -inf. ``row_max`` and ``sink`` are base-2
        exponents.
        """
        raised, decay = raise_to(row_max, sink)
        total = row_sum * decay + exp2(sink - raised)
        return cutlass.select_(total == 0.0, Float32(0.0), decay / total), (raised + cute.math.log2(total)) * LN2

    @cute.jit
    def write_lse(self, call: Call, sequence: Int32, token: Int32, q_head: Int32, logarithm: Float32):
        """Writes the LSE of a query head and a token. ``token``: the token's index among the sequence's new tokens."""
        at = (Int64(sequence) * call.q_len + token) * (call.kv_heads * self.config.abreast * call.gqa_ratio) + q_head
        cute.make_ptr(Float32, call.lse, cute.AddressSpace.gmem)[at] = logarithm
