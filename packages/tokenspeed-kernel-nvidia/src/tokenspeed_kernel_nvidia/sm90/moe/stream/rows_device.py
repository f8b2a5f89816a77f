"""The rows of an entry (each the activations of one pair) as B operands: float8_e4m3 columns in shared memory.

e2m1 weights convert to float8_e5m2 in fewer instructions than to any 16-bit type, and an fp8 MMA requires that both operands are
fp8. So a bfloat16 row becomes two columns: its elements rounded to four significant bits, and the remainders, multiplied by 32.
float16 has more bits, so a third column holds the remainders of the remainders. A row is first scaled by a power of 2, so that its
amax is at least 128 and below 256. An element's error with two columns is at most 2^-22 of the row's amax. With three columns it is
at most the larger of 2^-27 of amax and 2^-12 of the element. With float16 tokens the first GEMM's results are float32, because they
may exceed float16's range.

A row of fp8 activations becomes one column: the values of `quantize_fp8`. The partial sums of this column are multiplied by the
row's scale.

Columns are in wgmma's K-major layout without swizzle. A core matrix of 128 bytes holds 16 elements of k of eight columns. The core
matrices of the next eight columns follow, then the next 16 elements of k. With two columns per pair, a core matrix has four
consecutive pairs, whose two columns are neighbours. So the first half of an entry's pairs has the first half of the columns, as
narrow MMAs require (`Config.narrow`). With three columns per pair, the next core matrix has the four pairs' third columns, at every
other column. With one column per pair, a core matrix has pairs 0, 4, 1, 5, 2, 6, 3, 7. Elements along k have the order that
`decode_e5m2` gives the weights: 0, 8, 1, 9, ... 15.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute

from tokenspeed_kernel_nvidia.cutedsl.memory_device import load_words, store_words_shared
from tokenspeed_kernel_nvidia.cutedsl.registers_device import pack_fp8, widened
from tokenspeed_kernel_nvidia.sm90.moe.stream.config import MAX_PAIRS, MMA_WARPS
from tokenspeed_kernel_nvidia.sm90.moe.stream.tile_device import (
    ROWS_AT_ONCE,
    W13,
    Call,
    Shapes,
    beyond_bit,
    entry_of,
    index_of,
    kind_of,
    pair_of,
)

CHUNK = 16  # elements of a row that a thread splits together; also the elements of k of wgmma's core matrix
CORE_BYTES = 128  # a core matrix: 16 elements of k by eight columns
SMALL_DIVISOR = 4  # at most 1 / SMALL_DIVISOR of a row's elements may be inexact
REST = 32.0  # factor of the remainders
LARGEST = 448.0  # float8_e4m3fn's largest value
PREPARING = 2  # a named barrier of the MMA warps, for the preparation of rows
PREPARING_THREADS = 32 * MMA_WARPS
ROW_WARPS = MMA_WARPS // ROWS_AT_ONCE  # warps that prepare a row together
ROW_THREADS = 32 * ROW_WARPS  # threads that prepare a row together

# `_ROUND` converts two values to fp8, the first in the lower byte. `_REST` replaces each value by 32 times its rounding error.
_ROUND = "cvt.rn.satfinite.e4m3x2.f32 both, b, a; cvt.u32.u16 {{$w{part}}}, both;"
_REST = """
cvt.rn.f16x2.e4m3x2 back, both;
mov.b32 {low, high}, back;
cvt.f32.f16 c, low;
sub.f32 a, a, c;
mul.f32 a, a, 0f42000000;
cvt.f32.f16 c, high;
sub.f32 b, b, c;
mul.f32 b, b, 0f42000000;
"""

# One Newton step, which makes an approximate reciprocal of {$r0}, {$r1}, accurate.
_RECIPROCAL = """{ .reg .f32 n, e;
neg.f32 n, {$r0};
fma.rn.f32 e, n, {$r1}, 0f3F800000;
fma.rn.f32 {$w0}, e, {$r1}, {$r1};
}"""
# Corrects an approximate quotient by its remainder, which fma computes exactly.
_QUOTIENT = """{ .reg .f32 q, e, n;
mul.rn.f32 q, {$r0}, {$r2};
neg.f32 n, {$r1};
fma.rn.f32 e, q, n, {$r0};
fma.rn.f32 {$w0}, e, {$r2}, q;
}"""


def _split(parts: int) -> str:
    """Returns instructions that split two values into ``parts`` fp8 parts."""
    head = "{ .reg .b16 both, low, high; .reg .b32 back; .reg .f32 a, b, c; mov.f32 a, {$r0}; mov.f32 b, {$r1};"
    return head + _REST.join(_ROUND.format(part=part) for part in range(parts)) + "}"


class Rows(Shapes):
    """The part of the kernel that prepares rows."""

    @cute.jit
    def prepare_rows(self, call: Call, item: Int32, factors: cute.Tensor):
        """Splits the rows of an item's entry into fp8 parts, or quantises them, and stores them in shared memory. All MMA warps
        call this method when they have issued and completed the MMAs of the previous rows.

        Half of the warps process one row, and the other half the next row. While two rows are split, the loads of the next two are
        in flight. The code is kept short, because its first execution is bound by instruction fetches.

        Args:
            factors: receives the factors of the sums of this lane's pairs, one for each tile of 4 pairs.
        """
        thread, _, _ = cute.arch.thread_idx()
        lane = thread % 32
        half, warp = thread // ROW_THREADS, thread % ROW_THREADS // 32
        layer = call.layer
        entry = entry_of(call.entries[index_of(item)])
        chunks = cutlass.select_(kind_of(item) == W13, layer.w13_blocks, layer.w2_blocks) * 4
        numbers = self.chunks_of_row(call, item, entry, half)
        for begin in cutlass.range(0, entry.count, ROWS_AT_ONCE, unroll=1):
            row = begin + half
            ahead = self.chunks_of_row(call, item, entry, row + ROWS_AT_ONCE)
            largest = cute.arch.warp_redux_sync(self.largest_of(numbers), "max")
            # Two sets of maxima alternate. So the next rows need not wait until this set has been read.
            maxima = shared_int(call.maxima + (begin // ROWS_AT_ONCE % 2 * ROWS_AT_ONCE + half) * (4 * ROW_WARPS))
            if lane == 0:
                maxima[warp] = largest
            cute.arch.barrier(barrier_id=PREPARING, number_of_threads=PREPARING_THREADS)
            largest = cute.arch.warp_redux_sync(maxima[lane % ROW_WARPS], "max")
            if row < entry.count:
                self.store_row(call, row, chunks, largest, numbers)
            numbers = ahead
        self.take_rows(call, item, entry, factors)

    @cute.jit
    def store_row(self, call: Call, row: Int32, chunks: Int32, largest: Int32, numbers: Any):
        """Splits a row into fp8 parts (or quantises it), and stores the parts, the row's factor, and each warp's count of inexact
        elements in shared memory. Half of the warps call this method.

        Args:
            row: the index of the row in the entry.
            chunks: the number of chunks of the row, including those past the row's end that MMAs read.
            largest: the bit pattern of the row's amax.
            numbers: this thread's elements.
        """
        thread, _, _ = cute.arch.thread_idx()
        # The float32 exponent field of amax; clamped, so that rows of zeros have a valid factor.
        field = cutlass.max(largest >> 23, 8)
        scale = as_float((261 - cutlass.min(field, 254)) << 23)  # the factor of a row with infinity or NaN becomes NaN below
        divisor = Float32(1.0)
        if const_expr(self.config.rounded):
            divisor = divisor_of(as_float(largest) * scale, field)
        if thread % ROW_THREADS == 0:
            nan = Int32(0x7FFFFFFF)
            factor = cutlass.select_(field == 255, nan, (field - 7) << 23)
            if const_expr(self.config.rounded):
                factor = Int32(bits_of(as_float(factor) * divisor))
            shared_int(call.factors)[row] = factor
        small = Int32(0)
        for turn in cutlass.range_constexpr(self.turns):
            chunk = thread % ROW_THREADS + turn * ROW_THREADS
            if chunk < chunks:
                some = slice(turn * self.chunk_words, (turn + 1) * self.chunk_words)
                if const_expr(self.config.rounded):
                    self.store_rounded(call, chunk, row, scale, divisor, numbers[some])
                else:
                    small += self.store_chunk(call, chunk, row, scale, numbers[some])
        if const_expr(not self.config.rounded):
            small = cute.arch.warp_redux_sync(small, "add")
            if thread % 32 == 0:
                shared_int(call.small)[row * ROW_WARPS + thread % ROW_THREADS // 32] = small

    @cute.jit
    def take_rows(self, call: Call, item: Int32, entry: Any, factors: cute.Tensor):
        """Waits until all warps have stored the rows. Loads the factors of the sums of this lane's pairs to ``factors``."""
        cute.arch.fence_view_async_shared()  # wgmma reads shared memory by the async proxy
        cute.arch.barrier(barrier_id=PREPARING, number_of_threads=PREPARING_THREADS)
        if const_expr(not self.config.rounded):
            self.mark_rows(call, item, entry)
        for tile in cutlass.range_constexpr(self.tiles):
            factors[tile] = as_float(shared_int(call.factors)[tile * 4 + cute.arch.lane_idx() % 4])

    @cute.jit
    def mark_rows(self, call: Call, item: Int32, entry: Any):
        """Marks pairs whose rows have too many elements that fp8 parts cannot represent, for the epilogue, see `exact_device`."""
        thread, _, _ = cute.arch.thread_idx()
        k = cutlass.select_(kind_of(item) == W13, call.layer.hidden, call.layer.intermediate)
        if thread < entry.count:
            small = Int32(0)
            for warp in cutlass.range_constexpr(ROW_WARPS):
                small += shared_int(call.small)[thread * ROW_WARPS + warp]
            if small * SMALL_DIVISOR > k:
                call.order[entry.first + thread] |= beyond_bit(item)

    @property
    def turns(self) -> int:
        """The number of chunks of a row that a thread prepares."""
        return -(-self.config.blocks * 4 // ROW_THREADS)

    @property
    def chunk_words(self) -> int:
        """The number of registers of a chunk. A register holds two elements, or one float32 if results are wide."""
        return CHUNK if self.wide else CHUNK // 2

    def largest_of(self, numbers: Any) -> Int32:
        """Returns the bit pattern of the amax of a thread's elements, as float32."""
        if self.wide:
            largest = numbers[0] & 0x7FFFFFFF
            for word in numbers[1:]:
                largest = cutlass.max(largest, word & 0x7FFFFFFF)
            return Int32(largest)
        largest = numbers[0] & 0x7FFF7FFF
        for word in numbers[1:]:
            largest = larger_halves(largest, word & 0x7FFF7FFF)
        return Int32(cutlass.max(largest & 0xFFFF, largest >> 16)) << 16

    @cute.jit
    def chunks_of_row(self, call: Call, item: Int32, entry: Any, row: Int32) -> Any:
        """Returns a thread's elements of a row, `chunk_words` registers per chunk. Past the row's end, and for rows that do not
        exist, the elements are zeros.
        """
        layer = call.layer
        thread, _, _ = cute.arch.thread_idx()
        first = kind_of(item) == W13
        k = cutlass.select_(first, layer.hidden, layer.intermediate)
        found = []
        pair = pair_of(call.order[cutlass.min(entry.first + row, MAX_PAIRS - 1)])
        row_at = self.address_of_row(call, first, pair)
        for turn in cutlass.range_constexpr(self.turns):
            at = (thread % ROW_THREADS + turn * ROW_THREADS) * CHUNK
            words = [Uint32(0)] * self.chunk_words
            if row < entry.count and at < k:
                if const_expr(not self.wide):
                    words = self.words_of_row(call, row_at, at, first)
                elif first:
                    words = [bits_of(number) for word in words_at(row_at + at * 2, 8) for number in widened(self.dtype, word)]
                else:
                    words = words_at(row_at + at * 4, 16)
            found += words
        return found

    def words_of_row(self, call: Call, row_at: Int64, at: Int32, first: Any) -> Any:
        """Loads sixteen elements of a row from element ``at`` on, two per register. ``row_at``: from `address_of_row`."""
        return words_at(row_at + at * 2, 8)

    def address_of_row(self, call: Call, first: Any, pair: Int32) -> Int64:
        """Returns the address of a pair's row: of its token in the first GEMM, of its activation in the second."""
        token_at = call.x + Int64(pair // call.layer.top_k) * (call.x_stride * 2)
        activated_at = call.activated + Int64(pair) * (call.layer.intermediate * (4 if self.wide else 2))
        return cutlass.select_(first, token_at, activated_at)

    @cute.jit
    def store_chunk(
        self,
        call: Call,
        chunk: Int32,
        row: Int32,
        scale: Float32,
        numbers: Any,
    ):
        """Splits a chunk of sixteen elements of a row, and stores the parts in the row's columns. Returns how many of the elements
        are inexact.

        Args:
            chunk: the index of the chunk in the row.
            row: the index of the row in the entry.
            scale: the power of 2 by which elements are multiplied.
            numbers: the elements as loaded, `chunk_words` registers.
        """
        words = [[] for _ in range(self.config.parts)]
        if const_expr(self.wide):
            values = [as_float(word) for word in numbers]
        else:
            values = [value for word in numbers for value in widened(self.dtype, word)]
        values = [value * scale for value in values]
        small = Int32(0)
        for value in values:
            # For zeros, the subtraction wraps around, so zeros do not count.
            small += Int32((bits_of(value) & 0x7FFFFFFF) - 1 < Uint32(self.exact_from - 1))
        for word in cutlass.range_constexpr(4):
            low = self.split(values[2 * word], values[2 * word + 8])
            high = self.split(values[2 * word + 1], values[2 * word + 9])
            for part in cutlass.range_constexpr(self.config.parts):
                words[part].append(low[part] | high[part] << 16)
        to = call.rows + (chunk * self.tiles + row // 4) * (self.layers * CORE_BYTES) + row % 4 * (2 * CHUNK)
        for part in cutlass.range_constexpr(self.config.parts):
            store_words_shared(to + part // 2 * CORE_BYTES + part % 2 * CHUNK, words[part])
        return small

    @cute.jit
    def store_rounded(self, call: Call, chunk: Int32, row: Int32, scale: Float32, divisor: Float32, numbers: Any):
        """Quantises a chunk of sixteen elements of a row, and stores them in the row's column. ``divisor``: the row's fp8 scale,
        for elements that have been multiplied by ``scale``. For the other arguments see `store_chunk`."""
        inverse = reciprocal(divisor)
        values = [quotient(as_float(word) * scale, divisor, inverse) for word in numbers]
        words = [pack_fp8(*(values[2 * word + place] for place in (0, 8, 1, 9))) for word in range(4)]
        core = chunk * (self.config.columns // 8) + row // 8
        store_words_shared(call.rows + core * CORE_BYTES + row % 4 * (2 * CHUNK) + row // 4 % 2 * CHUNK, words)

    @property
    def exact_from(self) -> int:
        """The float32 bit pattern of the magnitude from which the parts represent a scaled element exactly: 2^-7 with two columns,
        2^-9 with three."""
        return (127 - (9 if self.config.parts > 2 else 7)) << 23

    def split(self, first: Float32, second: Float32) -> Any:
        """Splits two values into fp8 parts. Returns one register for each part: the first value's byte is the lowest, the second's
        follows."""
        parts = self.config.parts
        return cute.arch.inline_ptx(_split(parts), write_only_types=[Uint32] * parts, read_only_args=[first, second])


def divisor_of(amax: Float32, field: Int32) -> Float32:
    """Returns the scale of a row of fp8 activations, as `quantize_fp8` defines it, for elements scaled by a power of 2.

    Args:
        amax: the amax of the scaled row, below 256.
        field: the exponent field of the row's amax before scaling, at least 8.
    """
    # The least scale is 2^-126 before scaling by 2^(134 - field). This limit matters only for ``field`` up to 9.
    least = as_float((135 - cutlass.min(field, 134)) << 23)
    return cute.arch.fmax(quotient(amax, Float32(LARGEST), Float32(1.0 / LARGEST)), least)


def quotient(x: Float32, y: Float32, inverse: Float32) -> Float32:
    """Returns x / y, correctly rounded. ``inverse`` is 1 / y, correctly rounded.

    y must be far from float32's limits. Division instructions have no such limit, but several times as much code.
    """
    return cute.arch.inline_ptx(_QUOTIENT, write_only_types=[Float32], read_only_args=[x, y, inverse])


def reciprocal(x: Float32) -> Float32:
    """Returns 1 / x, correctly rounded, for x far from float32's limits."""
    return cute.arch.inline_ptx(_RECIPROCAL, write_only_types=[Float32], read_only_args=[x, cute.arch.rcp_approx(x)])


def larger_halves(a: Uint32, b: Uint32) -> Uint32:
    """Returns the larger of each unsigned half of two words. Nonnegative floats order like unsigned integers."""
    return cute.arch.inline_ptx("max.u16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b])


def as_float(bits: Any) -> Float32:
    """Returns the float32 with this bit pattern."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits])


def bits_of(x: Float32) -> Uint32:
    """Returns the bit pattern of a float32."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[x])


def words_at(address: Int64, count: int) -> list:
    """Loads consecutive words from global memory; their number is a multiple of four."""
    return [word for first in range(0, count, 4) for word in load_words("global", address + 4 * first, 4)]


def shared_int(address: Int32) -> cute.Pointer:
    """Returns a pointer to an int32 in shared memory."""
    return cute.make_ptr(Int32, address, cute.AddressSpace.smem)
