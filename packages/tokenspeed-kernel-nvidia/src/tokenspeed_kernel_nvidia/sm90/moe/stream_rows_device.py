"""The rows of an entry as right operands: bytes of float8_e4m3 in shared memory.

Codes of weights become float8_e5m2 in fewer instructions than any 16-bit type, and products of that take bytes on both sides. So
each row has two columns: its numbers rounded to four significant bits, and what is left of them, 32 times as large. float16 has
more bits, and a third column for what is left then. A row is first multiplied by the power of 2 that brings its largest number to
at least 128 and below 256. What the columns miss of a number is at most 2^-22 of the largest, of a float16 2^-27.

Columns lie as `wgmma` wants them without a swizzle: 16 elements of k of eight columns in 128 bytes, those of the other columns
after them, and then the next 16 elements. Four pairs have the first two columns of each in one tile, and a third in the next. The
elements lie in the order in which `decode_e5m2` has those of weights: 0, 8, 1, 9, ... 15.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute

from tokenspeed_kernel_nvidia.sm90.common.memory_device import load_words, store_words_shared
from tokenspeed_kernel_nvidia.sm90.moe.stream_config import MULTIPLIERS
from tokenspeed_kernel_nvidia.sm90.moe.stream_tile_device import ROWS_AT_ONCE, W13, Call, Shapes, entry_of, index_of, kind_of

CHUNK = 16  # elements that a thread has of a row, and of k in a product's core matrix
CORE_BYTES = 128  # of 16 elements of k of eight columns
REST = 32.0  # what is left of a number is so many times as large
PREPARING = 2  # the named barrier of the warps that compute
PREPARING_THREADS = 32 * MULTIPLIERS

# Two numbers become bytes, the first the lower one, and their place is taken by what is left of them.
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


def _split(parts: int) -> str:
    """Instructions that split two numbers into so many parts."""
    head = "{ .reg .b16 both, low, high; .reg .b32 back; .reg .f32 a, b, c; mov.f32 a, {$r0}; mov.f32 b, {$r1};"
    return head + _REST.join(_ROUND.format(part=part) for part in range(parts)) + "}"


class Rows(Shapes):
    """The part of the kernel that prepares rows."""

    @cute.jit
    def prepare_rows(self, call: Call, unit: Int32, factors: cute.Tensor):
        """Prepares the rows of a unit's entry, by all computing warps, after all of them have read those before.

        Args:
            factors: receives what sums of this lane's pairs are to be multiplied by.
        """
        thread, _, _ = cute.arch.thread_idx()
        layer = call.layer
        entry = entry_of(call.entries[index_of(unit)])
        first = kind_of(unit) == W13
        k = cutlass.select_(first, layer.hidden, layer.intermediate)
        chunks = cutlass.select_(first, layer.w13_blocks, layer.w2_blocks) * 4
        for begin in cutlass.range_constexpr(0, self.config.pairs, ROWS_AT_ONCE):
            if begin < entry.count:
                self.prepare_some(call, entry, first, k, chunks, begin, thread, factors)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=PREPARING, number_of_threads=PREPARING_THREADS)

    @cute.jit
    def prepare_some(
        self,
        call: Call,
        entry: Any,
        first: Any,
        k: Int32,
        chunks: Int32,
        begin: cutlass.Constexpr[int],
        thread: Int32,
        factors: cute.Tensor,
    ):
        """Some rows together, so that their numbers are waited for once."""
        layer = call.layer
        turns = -(-self.config.blocks * 4 // PREPARING_THREADS)  # chunks of a thread
        numbers = cute.make_rmem_tensor((turns, ROWS_AT_ONCE, 8), Uint32)
        numbers.fill(0)
        for each in cutlass.range_constexpr(ROWS_AT_ONCE):
            if begin + each < entry.count:
                pair = call.order[entry.first + begin + each]
                token_at = call.x + Int64(pair // layer.top_k) * (call.x_stride * 2)
                row_at = cutlass.select_(first, token_at, call.activated + Int64(pair) * (layer.intermediate * 2))
                for turn in cutlass.range_constexpr(turns):
                    at = (thread + turn * PREPARING_THREADS) * CHUNK
                    if at < k:
                        for half in cutlass.range_constexpr(2):
                            words = load_words("global", row_at + (at + half * 8) * 2, 4)
                            for word in cutlass.range_constexpr(4):
                                numbers[turn, each, half * 4 + word] = words[word]
        # The largest of each row.
        for each in cutlass.range_constexpr(ROWS_AT_ONCE):
            largest = numbers[0, each, 0] & 0x7FFF7FFF
            for other in cutlass.range_constexpr(1, 8 * turns):
                largest = larger_halves(largest, numbers[other // 8, each, other % 8] & 0x7FFF7FFF)
            largest = cute.arch.warp_redux_sync(Int32(cutlass.max(largest & 0xFFFF, largest >> 16)), "max")
            if thread % 32 == 0:
                shared_int(call.maxima + ((thread // 32) * ROWS_AT_ONCE + each) * 4)[0] = largest
        cute.arch.barrier(barrier_id=PREPARING, number_of_threads=PREPARING_THREADS)
        for each in cutlass.range_constexpr(ROWS_AT_ONCE):
            if begin + each < entry.count:
                largest = Int32(0)
                for warp in cutlass.range_constexpr(MULTIPLIERS):
                    largest = cutlass.max(largest, shared_int(call.maxima + (warp * ROWS_AT_ONCE + each) * 4)[0])
                # The exponent field of the largest number as a float32; rows of nothing have any.
                field = cutlass.max(float_bits(self.widened(Uint32(largest))) >> 23, 8)
                scale = as_float((261 - cutlass.min(field, 254)) << 23)  # infinity is taken care of below
                column = thread % 4 + (begin + each) // 4 * 4
                if column == begin + each:
                    factor = as_float((field - 7) << 23)
                    factors[(begin + each) // 4] = cutlass.select_(field == 255, Float32(float("nan")), factor)
                for turn in cutlass.range_constexpr(turns):
                    chunk = thread + turn * PREPARING_THREADS
                    if chunk < chunks:
                        self.store_chunk(call, chunk, begin + each, scale, numbers, turn, each)
        # The maxima of the next rows go to the same place.
        cute.arch.barrier(barrier_id=PREPARING, number_of_threads=PREPARING_THREADS)

    @cute.jit
    def store_chunk(
        self,
        call: Call,
        chunk: Int32,
        row: cutlass.Constexpr[int],
        scale: Float32,
        numbers: cute.Tensor,
        turn: cutlass.Constexpr[int],
        each: cutlass.Constexpr[int],
    ):
        """Sixteen numbers of a row go to its columns."""
        words = [[] for _ in range(self.config.parts)]
        for word in cutlass.range_constexpr(4):
            # Elements 2 w and 2 w + 1 are in the word w, their partners 8 further in the word w + 4.
            low = self.split(numbers[turn, each, word], numbers[turn, each, word + 4], False, scale)
            high = self.split(numbers[turn, each, word], numbers[turn, each, word + 4], True, scale)
            for part in cutlass.range_constexpr(self.config.parts):
                words[part].append(low[part] | high[part] << 16)
        to = call.rows + (chunk * self.tiles + row // 4) * (self.layers * CORE_BYTES) + row % 4 * (2 * CHUNK)
        for part in cutlass.range_constexpr(self.config.parts):
            store_words_shared(to + part // 2 * CORE_BYTES + part % 2 * CHUNK, words[part])

    def split(self, first: Uint32, second: Uint32, high: bool, scale: Float32) -> Any:
        """The same half of two words: two bytes of each part."""
        pair = [self.widened(x >> 16 if high else x & 0xFFFF) * scale for x in (first, second)]
        parts = self.config.parts
        return cute.arch.inline_ptx(_split(parts), write_only_types=[Uint32] * parts, read_only_args=pair)

    def widened(self, bits: Uint32) -> Float32:
        """A number of the tokens' dtype, in the lower half of a word."""
        if const_expr(self.dtype is cutlass.BFloat16):
            return as_float(bits << 16)
        return cute.arch.inline_ptx(
            "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; cvt.f32.f16 {$w0}, low; }",
            write_only_types=[Float32],
            read_only_args=[bits],
        )


def larger_halves(a: Uint32, b: Uint32) -> Uint32:
    """The larger of both unsigned halves of two words: those of floats that are not negative compare alike."""
    return cute.arch.inline_ptx("max.u16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b])


def as_float(bits: Any) -> Float32:
    """The float32 that has these bits."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits])


def float_bits(x: Float32) -> Int32:
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])


def shared_int(address: Int32) -> cute.Pointer:
    """An int32 in shared memory."""
    return cute.make_ptr(Int32, address, cute.AddressSpace.smem)
