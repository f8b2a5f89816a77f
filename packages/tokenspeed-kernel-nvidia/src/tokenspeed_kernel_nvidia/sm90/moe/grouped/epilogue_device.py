"""The epilogue of the MMA warpgroups of `kernel_device`: scales, bias and activation of the accumulators, and the stores of the
results.

Gate and up of a feature are rows g and g + 8 of a strip. So one thread has both. 16-bit results go through a buffer in shared
memory, so that neighbouring threads store neighbouring features of a column.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, const_expr, cute

from tokenspeed_kernel_nvidia.cutedsl.memory_device import load_words
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.layout import STRIP
from tokenspeed_kernel_nvidia.cutedsl.registers_device import load_floats, load_int, pack, store_floats, store_words
from tokenspeed_kernel_nvidia.cutedsl.softmax_device import LOG2_E, exp2
from tokenspeed_kernel_nvidia.sm90.moe.grouped.config import CHUNK
from tokenspeed_kernel_nvidia.sm90.moe.grouped.packing_device import CHUNKS, packed_offset
from tokenspeed_kernel_nvidia.sm90.moe.grouped.rounding_device import at_least
from tokenspeed_kernel_nvidia.sm90.moe.grouped.tile_device import Call, Item, Shapes

NUMBERS = 8  # 16-bit results that a thread stores at once
STORE = 1  # the first of the MMA warpgroups' named barriers: each orders a warpgroup's writes and reads of shared memory


def store_matrices(address: Any, words: Any) -> None:
    """Stores four 8 x 8 matrices of 16-bit elements to shared memory, transposed. A lane passes the address of one matrix
    column."""
    cute.arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *words]
    )


def at_most(x: Float32, bound: Float32) -> Float32:
    """Returns the smaller of two float32 values, or NaN if one of them is NaN."""
    return cute.arch.inline_ptx("min.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, bound])


class Epilogue(Shapes):
    """The epilogue, `store_panel`, which is the same for all mainloops. The columns' scales, which the epilogue needs, are loaded
    before the mainloop (`load_scales`)."""

    # -- scales of columns -----------------------------------------------------------------------------------------------------

    @cute.jit
    def load_scales(self, call: Call, item: Item, thread: Int32, width: cutlass.Constexpr[int]) -> list:
        """Loads this thread's share of the columns' scales from global memory. The mainloop follows, and hides the latency. Returns
        one scale for every 128 columns, none if columns have no scales. ``thread``: the index of the thread in its warpgroup."""
        scales = []
        if const_expr(self.config.scaled):
            for turn in cutlass.range_constexpr(-(-width // 128)):
                scale = Float32(0.0)
                if thread + turn * 128 < item.count:
                    row = item.first + thread + turn * 128
                    if const_expr(self.config.gated and not self.config.paired):
                        row = load_int(call.sources + Int64(row) * 4, False)
                    scale = load_floats("global", call.row_scales + Int64(row) * 4, 1)
                scales.append(scale)
        return scales

    @cute.jit
    def share_scales(self, storage: Any, scales: list, thread: Int32, wg: Int32, width: cutlass.Constexpr[int]) -> Int32:
        """Copies the columns' scales that each thread loaded to shared memory, for all threads of the warpgroup. Returns the
        shared-memory address of the scales of this thread's first two accumulator columns.
        """
        begin = storage.scales.data_ptr().toint() + wg * (4 * self.config.columns)
        if const_expr(self.config.scaled):
            for turn in cutlass.range_constexpr(len(scales)):
                if thread % 128 + turn * 128 < width:
                    store_floats("shared", begin + (thread % 128 + turn * 128) * 4, [scales[turn]])
            self.sync_warpgroup(wg)
        return begin + thread % 4 * 8

    def factors(self, heads: list, scales_at: Int32, at: int) -> list:
        """Returns the factors, row factor times column scale, of a thread's four accumulators of eight columns, by row and column.

        Args:
            heads: the factors of the thread's two rows of weights, then the biases of these rows.
            scales_at: shared-memory address of the scales of this thread's first two columns, from `share_scales`.
            at: index of the first of the four accumulators.
        """
        if not self.config.scaled:
            return [[heads[r]] * 2 for r in range(2)]
        scales = load_floats("shared", scales_at + 8 * at, 2)
        return [[heads[r] * scales[column] for column in range(2)] for r in range(2)]

    @cute.jit
    def store_panel(
        self,
        call: Call,
        storage: Any,
        item: Item,
        acc: list,
        heads: list,
        scales_at: Int32,
        thread: Int32,
        wg: Int32,
        strip: Int32,
        width: cutlass.Constexpr[int],
    ):
        """Scales the accumulators of one panel, adds biases, applies the activation in the first GEMM, and stores the results.
        ``strip``: the panel's first strip in the expert's weights.
        """
        staged = not self.config.wide
        if const_expr(not staged):
            self.store_wide(call, item, acc, heads, scales_at, thread, strip, width)
        elif const_expr(self.config.gated):
            self.store_activated(call, storage, item, acc, heads, scales_at, thread, wg, strip, width)
        else:
            self.store_sums(call, storage, item, acc, heads, scales_at, thread, wg, strip, width)
        if const_expr(staged and -(-width // CHUNK) % 2 == 1):  # the next panel reuses a buffer that other warps may still read
            self.sync_warpgroup(wg)

    # -- results ---------------------------------------------------------------------------------------------------------------

    @cute.jit
    def store_activated(
        self,
        call: Call,
        storage: Any,
        item: Item,
        acc: list,
        heads: list,
        scales_at: Int32,
        thread: Int32,
        wg: Int32,
        strip: Int32,
        width: cutlass.Constexpr[int],
    ):
        """Applies the activation to gates and ups of a panel, and stores one 16-bit feature for each pair of gate and up."""
        lane, warp = thread % 32, thread % 128 // 32
        for chunk in cutlass.range_constexpr(-(-width // CHUNK)):
            words = []
            for j in cutlass.range_constexpr(CHUNK // 8):
                at = 4 * (chunk * (CHUNK // 8) + j)
                if const_expr(at < width // 2):
                    factors = self.factors(heads, scales_at, at)
                    results = [self.activated(call, acc, heads, factors, at, column) for column in range(2)]
                    words.append(pack(self.dtype, *results))
                else:
                    words.append(words[0])  # a placeholder for columns beyond the tile, which are not stored
            # A lane addresses a column. In each column, a warp's eight features are one of four 16-byte chunks.
            buffer = self.buffer(storage, wg, chunk)
            store_matrices(buffer + lane * 64 + ((warp ^ (lane // 2 % 4)) * 16), words)
            self.sync_warpgroup(wg)
            column, chunk16 = thread % 128 // 4, thread % 4
            smem_at = buffer + column * 64 + ((chunk16 ^ (column // 2 % 4)) * 16)
            self.store_chunk_of_column(
                call, item, smem_at, chunk * CHUNK + column, (strip + chunk16) * 8, strip + chunk16 < call.strips
            )

    @cute.jit
    def store_sums(
        self,
        call: Call,
        storage: Any,
        item: Item,
        acc: list,
        heads: list,
        scales_at: Int32,
        thread: Int32,
        wg: Int32,
        strip: Int32,
        width: cutlass.Constexpr[int],
    ):
        """Stores the results of a panel in 16 bits, without an activation (second GEMM)."""
        lane, warp = thread % 32, thread % 128 // 32
        for chunk in cutlass.range_constexpr(-(-width // CHUNK)):
            buffer = self.buffer(storage, wg, chunk)
            for half in cutlass.range_constexpr(2):
                words = []
                for j in cutlass.range_constexpr(2):
                    at = 4 * (chunk * (CHUNK // 8) + 2 * half + j)
                    at = at if at < width // 2 else 0  # columns beyond the tile repeat column 0 and are not stored
                    factors = self.factors(heads, scales_at, at)
                    sums = [[self.result(acc, heads, factors, at, r, column) for column in range(2)] for r in range(2)]
                    words += [pack(self.dtype, *of_row) for of_row in sums]
                # A lane addresses eight features of a column, one of the column's eight 16-byte chunks: the first or the second
                # eight features of the lane's warp.
                column = 16 * half + lane // 16 * 8 + lane % 8
                chunk16 = 2 * warp + lane // 8 % 2
                store_matrices(buffer + column * 128 + ((chunk16 ^ (column % 8)) * 16), words)
            self.sync_warpgroup(wg)
            chunk16 = thread % 8
            for half in cutlass.range_constexpr(2):
                column = 16 * half + thread % 128 // 8
                smem_at = buffer + column * 128 + ((chunk16 ^ (column % 8)) * 16)
                inside = strip + chunk16 // 2 < call.strips
                self.store_chunk_of_column(call, item, smem_at, chunk * CHUNK + column, strip * STRIP + chunk16 * 8, inside)

    @cute.jit
    def store_wide(
        self,
        call: Call,
        item: Item,
        acc: list,
        heads: list,
        scales_at: Int32,
        thread: Int32,
        strip: Int32,
        width: cutlass.Constexpr[int],
    ):
        """Stores the results of a panel as float32 directly from registers. Eight lanes have 32 consecutive bytes of a column."""
        strip += thread % 128 // 32
        rows = 1 if self.config.gated else 2
        feature = strip * (rows * STRIP // 2) + thread % 32 // 4
        for eight in cutlass.range_constexpr(width // 8):
            factors = self.factors(heads, scales_at, 4 * eight)
            for each in cutlass.range_constexpr(2):
                column = 8 * eight + thread % 4 * 2 + each
                if const_expr(self.config.gated):
                    results = [self.activated(call, acc, heads, factors, 4 * eight, each)]
                else:
                    results = [self.result(acc, heads, factors, 4 * eight, r, each) for r in range(2)]
                if strip < call.strips and column < item.count:
                    at = call.out + (Int64(item.first + column) * call.out_stride + feature) * 4
                    for r in cutlass.range_constexpr(rows):
                        store_floats("global", at + r * (STRIP // 2 * 4), [results[r]])

    def activated(self, call: Call, acc: list, heads: list, factors: list, at: int, column: int) -> Float32:
        """Returns the activation function of the gate (a thread's first row) and the up value (second row) of a column.
        ``at``, ``column``: see `result`.
        """
        gate, up = (self.result(acc, heads, factors, at, r, column) for r in range(2))
        gate, up = at_most(gate, call.limit), at_most(up, call.limit)
        up = at_least(up, -call.limit)
        return (up + call.beta) * gate * cute.arch.rcp_approx(1.0 + exp2(-LOG2_E * call.alpha * gate))

    def result(self, acc: list, heads: list, factors: list, at: int, r: int, column: int) -> Float32:
        """Returns one of a thread's results, scaled and with bias: that of row ``r`` and column ``column`` (0 or 1) of the four
        accumulators from index ``at`` on.
        """
        each = cute.size(acc[0])
        return acc[at // each][at % each + 2 * r + column] * factors[r][column] + heads[2 + r]

    @cute.jit
    def buffer(self, storage: Any, wg: Int32, chunk: cutlass.Constexpr[int]) -> Int32:
        """Returns the shared-memory address of the warpgroup's staging buffer for the results of a chunk of columns."""
        # Two buffers alternate, so one barrier per chunk suffices.
        size = CHUNK * self.config.store_bytes
        return storage.results.data_ptr().toint() + (2 * wg + chunk % 2) * size

    @cute.jit
    def store_chunk_of_column(self, call: Call, item: Item, smem_at: Int32, column: Int32, feature: Int32, inside: Boolean):
        """Copies eight features of a column from the staging buffer at ``smem_at`` to the result, if the item has this column and
        ``inside`` is true (the result has these features).
        """
        if inside and column < item.count:
            row = item.first + column
            at = call.out + (Int64(row) * call.out_stride + feature) * 2
            if const_expr(self.config.stores_packed):
                chunk = feature // NUMBERS
                at = call.out + packed_offset(chunk // CHUNKS, row, chunk % CHUNKS, call.count)
            store_words(at, load_words("shared", smem_at, 4))

    @cute.jit
    def sync_warpgroup(self, wg: Int32):
        """Waits at a named barrier for all threads of the warpgroup with index ``wg``."""
        cute.arch.barrier(barrier_id=STORE + wg, number_of_threads=128)
