"""The device code of `grouped` that converts a GEMM's input rows, with one scale per row. Elements are rounded to float8_e4m3fn as
`quantize_fp8` does for tokens (`CODES`, `VALUES`), split into two such values (`PARTS`), or scaled into float16's range (`FITTED`).
An input row is first divided by its scale. So a converted element times the scale of its row is the input element, up to rounding.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute
from cutlass.memory import SmemAllocator

from tokenspeed_kernel_nvidia.cutedsl import arguments_device as arguments
from tokenspeed_kernel_nvidia.cutedsl.memory_device import load_words
from tokenspeed_kernel_nvidia.cutedsl.registers_device import (
    dtype_of,
    float_of,
    pack,
    pack_fp8,
    store_floats,
    store_words,
    widened,
)
from tokenspeed_kernel_nvidia.sm90.moe.grouped.config import (
    CODES,
    EXACT_FROM,
    FITTED,
    PARTS,
    REST,
    ROUNDED_TOGETHER,
    SMALL_DIVISOR,
    Rounding,
)

WARPS = 4
THREADS = 32 * WARPS
KEPT = 2  # groups of `ROUNDED_TOGETHER` elements that a thread keeps in registers until the row's scale is known
LARGEST = 448.0  # largest float8_e4m3fn
SMALLEST_NORMAL = 2.0**-126  # smallest normal float32, the least scale


def host(config: Rounding) -> Any:
    """Returns the host function that launches the kernel of ``config``."""
    return RoundRows(config)


def fake_arguments(config: Rounding) -> tuple[Any, ...]:
    """Returns placeholder arguments, which have types and layouts but no memory, to compile the function that `host` returns."""
    size, rows = arguments.size, arguments.rows
    count, k = size(), size(divisibility=32)
    result = rows(config.dtype, count, k)
    if config.result == CODES:
        result = arguments.byte_rows(count, k)
    elif config.result == PARTS:
        result = arguments.byte_rows(size(), k)
    return rows("float32" if config.wide else config.dtype, count, k), result, Int64(0), arguments.stream()


@dataclass(frozen=True)
class Rows:
    """The arguments of a launch. Arrays are given by their global addresses.

    Attributes:
        given, given_stride: the rows to convert, in 16 bits or in float32 if `Rounding.wide`, and their row pitch in elements.
        result, result_stride: receives the converted rows, in fp8 or in 16 bits (see `Rounding.result`), and their row pitch in
            elements. `PARTS` have two rows for each input row: the first fp8 values of its elements, then the second fp8 values.
        scales: float32, receives one scale for each input row; negative for a row with too many elements that `PARTS` cannot
            represent.
        k: number of elements of an input row.
    """

    given: Int64
    given_stride: Int64
    result: Int64
    result_stride: Int64
    scales: Int64
    k: Int32


class RoundRows:
    """The kernel for one configuration: a CTA of four warps for each row.

    A thread keeps up to two groups of 16 elements in registers until the row's amax, and with it the scale, is known. So rows of up
    to 4096 elements are read only once. Longer rows are partly read again. The kernel is memory-bound.
    """

    def __init__(self, config: Rounding):
        self.config = config
        self.dtype = dtype_of(config.dtype)
        self.number_bytes = 4 if config.wide else 2
        self.words = ROUNDED_TOGETHER * self.number_bytes // 4  # 32-bit words of a group

    @cute.jit
    def __call__(self, given: cute.Tensor, result: cute.Tensor, scales: Int64, stream: cuda.CUstream):
        count, k = given.shape
        rows = Rows(given.iterator.toint(), given.stride[0], result.iterator.toint(), result.stride[0], scales, k)
        self.kernel(rows).launch(grid=(count, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, rows: Rows):
        @cute.struct
        class Storage:
            largest: cute.struct.MemRange[Uint32, WARPS]
            small: cute.struct.MemRange[Int32, WARPS]

        storage = SmemAllocator().allocate(Storage)
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        groups = rows.k // ROUNDED_TOGETHER
        given = rows.given + Int64(row) * (self.number_bytes * rows.given_stride)
        if const_expr(not self.config.early):
            cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        kept = cute.make_rmem_tensor((KEPT, self.words), Uint32)
        kept.fill(0)
        # Bit patterns of float32 magnitudes, compared as integers, have the order of the magnitudes, with NaN the largest.
        largest = Uint32(0)
        for turn in cutlass.range_constexpr(KEPT):
            group = turn * THREADS + thread
            if group < groups:
                self.read(given, group, kept[turn, None])
            largest = self.largest_of(kept[turn, None], largest)
        for group in cutlass.range(KEPT * THREADS + thread, groups, THREADS, unroll=1):
            words = cute.make_rmem_tensor((self.words,), Uint32)
            self.read(given, group, words)
            largest = self.largest_of(words, largest)
        amax = self.amax_of_row(storage.largest.data_ptr(), thread, largest)
        scale = Float32(0.0)
        if const_expr(self.config.result == PARTS):
            scale = power_below(amax, 7)
        elif const_expr(self.config.result == FITTED):
            scale = power_below(amax, 14)
        else:
            scale = scale_of(amax)
        small = Int32(0)  # elements that `PARTS` cannot represent
        for turn in cutlass.range_constexpr(KEPT):
            group = turn * THREADS + thread
            if group < groups:
                small += self.write(rows, row, group, kept[turn, None], scale)
        for group in cutlass.range(KEPT * THREADS + thread, groups, THREADS, unroll=1):
            words = cute.make_rmem_tensor((self.words,), Uint32)
            self.read(given, group, words)
            small += self.write(rows, row, group, words, scale)
        stored = scale
        if const_expr(self.config.result == PARTS):
            small = cute.arch.warp_redux_sync(small, "add")
            counts = storage.small.data_ptr()
            if thread % 32 == 0:
                counts[thread // 32] = small
            cute.arch.sync_threads()
            small = Int32(0)
            for warp in cutlass.range_constexpr(WARPS):
                small += counts[warp]
            if small * SMALL_DIVISOR > rows.k:
                stored = -scale
        if thread == 0:
            store_floats("global", rows.scales + Int64(row) * 4, [stored])
        if const_expr(self.config.early):
            cute.arch.griddepcontrol_wait()

    @cute.jit
    def read(self, given: Int64, group: Int32, words: cute.Tensor):
        """Loads a group of 16 elements of the row at the global address ``given`` into ``words``."""
        for first in cutlass.range_constexpr(0, self.words, 4):
            loaded = load_words("global", given + Int64(group) * (4 * self.words) + first * 4, 4)
            for at in cutlass.range_constexpr(4):
                words[first + at] = loaded[at]

    def numbers_of(self, word: Uint32) -> Any:
        """Returns the elements of a 32-bit word as float32: two 16-bit elements, or one float32 if `Rounding.wide`."""
        return [float_of(word)] if self.config.wide else widened(self.dtype, word)

    @cute.jit
    def largest_of(self, words: cute.Tensor, largest: Uint32) -> Uint32:
        """Returns the maximum of ``largest``, the float32 bit pattern of an amax, and the magnitudes of the 16 elements of a
        group."""
        for at in cutlass.range_constexpr(self.words):
            for number in self.numbers_of(words[at]):
                bits = cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[number])
                largest = cutlass.max(largest, bits & 0x7FFFFFFF)
        return largest

    @cute.jit
    def amax_of_row(self, maxima: cute.Pointer, thread: Int32, largest: Uint32) -> Float32:
        """Returns the row's amax. All threads of the CTA call this method.

        Args:
            maxima: an element of shared memory for each warp.
            thread: the index of the thread.
            largest: the float32 bit pattern of the amax of the thread's elements.
        """
        for shift in cutlass.range_constexpr(5):
            largest = cutlass.max(largest, cute.arch.shuffle_sync_bfly(largest, offset=1 << shift))
        if thread % 32 == 0:
            maxima[thread // 32] = largest
        cute.arch.sync_threads()
        for warp in cutlass.range_constexpr(WARPS):
            largest = cutlass.max(largest, maxima[warp])
        return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[largest])

    @cute.jit
    def write(self, rows: Rows, row: Int32, group: Int32, words: cute.Tensor, scale: Float32):
        """Converts a group of elements and stores it. Returns the number of its elements that `PARTS` cannot represent; 0 for other
        kinds of inputs.
        """
        small = Int32(0)
        if const_expr(self.config.result == PARTS):
            small = self.write_parts(rows, row, group, words, scale)
        elif const_expr(self.config.result == FITTED):
            self.write_fitted(rows, row, group, words, scale)
        else:
            self.write_rounded(rows, row, group, words, scale)
        return small

    def scaled(self, words: cute.Tensor, scale: Float32) -> list:
        """Returns the 16 elements of a group as float32, divided by the scale of their row."""
        return [divided(number, scale) for word in range(self.words) for number in self.numbers_of(words[word])]

    @cute.jit
    def write_fitted(self, rows: Rows, row: Int32, group: Int32, words: cute.Tensor, scale: Float32):
        """Converts a group of elements to float16, scaled, and stores it."""
        at = rows.result + (Int64(row) * rows.result_stride + group * ROUNDED_TOGETHER) * 2
        numbers = self.scaled(words, scale)
        pairs = [pack(self.dtype, numbers[first], numbers[first + 1]) for first in range(0, ROUNDED_TOGETHER, 2)]
        for half in cutlass.range_constexpr(2):
            store_words(at + 16 * half, pairs[4 * half : 4 * half + 4])

    @cute.jit
    def write_parts(self, rows: Rows, row: Int32, group: Int32, words: cute.Tensor, scale: Float32):
        """Splits the 16 elements of a group into two fp8 values each, and stores the first and the second values in the order in
        which `write_rounded` stores `CODES`. Returns the number of elements that two fp8 values cannot represent.
        """
        at = rows.result + Int64(2 * row) * rows.result_stride + group * ROUNDED_TOGETHER
        numbers = self.scaled(words, scale)
        parts = [split(*(numbers[2 * lane + place] for place in (0, 8, 1, 9))) for lane in range(4)]
        for part in cutlass.range_constexpr(2):
            store_words(at + part * rows.result_stride, [both[part] for both in parts])
        return sum((is_small(number) for number in numbers), Int32(0))

    @cute.jit
    def write_rounded(self, rows: Rows, row: Int32, group: Int32, words: cute.Tensor, scale: Float32):
        """Quantises a group of elements and stores it. fp8 values (`CODES`) are permuted along k like the fp8 MMAs' A operand, see
        `decode_e5m2`. 16-bit values (`VALUES`) keep the order of the elements.
        """
        at = Int64(row) * rows.result_stride + group * ROUNDED_TOGETHER
        codes = self.codes_of(words, scale)
        if const_expr(self.config.result == CODES):
            store_words(rows.result + at, codes)
        else:
            values = [self.values(code) for code in codes]
            for half in cutlass.range_constexpr(2):
                store_words(rows.result + 2 * at + 16 * half, [value[half] for value in values])

    def codes_of(self, words: cute.Tensor, scale: Float32) -> list:
        """Returns a group of elements as four words of fp8 values, permuted like the fp8 MMAs' A operand."""
        numbers = self.scaled(words, scale)
        return [pack_fp8(*(numbers[2 * lane + place] for place in (0, 8, 1, 9))) for lane in range(4)]

    def values(self, codes: Uint32) -> Any:
        """Converts a word of four fp8 values to two words of 16-bit values: the first and third value, then the second and
        fourth."""
        wide = (
            "cvt.rn.f16x2.e4m3x2 a, low; cvt.rn.f16x2.e4m3x2 b, high; prmt.b32 {$w0}, a, b, 0x5410; prmt.b32 {$w1}, a, b, 0x7632;"
        )
        if self.dtype is cutlass.BFloat16:
            narrow = "".join(
                f"mov.b32 {{h, l}}, {{$w{at}}}; cvt.f32.f16 x, h; cvt.f32.f16 y, l; cvt.rn.bf16x2.f32 {{$w{at}}}, y, x;"
                for at in range(2)
            )
        else:
            narrow = ""
        code = "{ .reg .b32 a, b; .reg .b16 low, high, h, l; .reg .f32 x, y; mov.b32 {low, high}, {$r0};" + wide + narrow + " }"
        return cute.arch.inline_ptx(code, write_only_types=[Uint32] * 2, read_only_args=[codes])


def scale_of(amax: Float32) -> Float32:
    """Returns the scale of a row of fp8 activations, as `quantize_fp8` defines it."""
    return at_least(divided(amax, Float32(LARGEST)), Float32(SMALLEST_NORMAL))


def divided(x: Float32, y: Float32) -> Float32:
    """Returns ``x / y``, rounded to the nearest float32."""
    return cute.arch.inline_ptx("div.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, y])


def at_least(x: Float32, bound: Float32) -> Float32:
    """Returns the larger of two float32 values, or NaN if one of them is NaN."""
    return cute.arch.inline_ptx("max.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, bound])


def power_below(x: Float32, octaves: int) -> Float32:
    """Returns 2^-octaves times the largest power of two that is at most ``x``. Returns NaN for NaN and infinity.

    If the elements of a row with amax ``x`` are divided by this power of two, their magnitudes are less than 2^(octaves + 1).
    """
    return cute.arch.inline_ptx(
        f"{{ .reg .b32 a, b; .reg .pred p; mov.b32 a, {{$r0}}; shr.u32 b, a, 23; setp.eq.u32 p, b, 255;"
        f" max.u32 b, b, {octaves + 1}; sub.u32 b, b, {octaves}; shl.b32 b, b, 23; selp.b32 b, 0x7FFFFFFF, b, p;"
        " mov.b32 {$w0}, b; }",
        write_only_types=[Float32],
        read_only_args=[x],
    )


def is_small(x: Float32) -> Int32:
    """Returns 1 for a scaled element that `PARTS` cannot represent, because it is too small, and 0 for all others, zero
    included."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; .reg .f32 a; .reg .b32 b; abs.f32 a, {$r0}; setp.lt.f32 p, a, {$r1}; setp.gt.and.f32 p, a, 0f00000000, p;"
        " selp.b32 {$w0}, 1, 0, p; }",
        write_only_types=[Int32],
        read_only_args=[x, Float32(EXACT_FROM)],
    )


def split(a: Float32, b: Float32, c: Float32, d: Float32) -> Any:
    """Splits four numbers into two fp8 values each. Returns a word of the four nearest fp8 values, and a word of the four
    remainders times `REST`; the values of ``a`` are in the lowest bytes.
    """
    first = pack_fp8(a, b, c, d)
    near = cute.arch.inline_ptx(
        "{ .reg .b16 low, high, h, l; .reg .b32 x, y; mov.b32 {low, high}, {$r0}; cvt.rn.f16x2.e4m3x2 x, low;"
        " cvt.rn.f16x2.e4m3x2 y, high; mov.b32 {l, h}, x; cvt.f32.f16 {$w0}, l; cvt.f32.f16 {$w1}, h; mov.b32 {l, h}, y;"
        " cvt.f32.f16 {$w2}, l; cvt.f32.f16 {$w3}, h; }",
        write_only_types=[Float32] * 4,
        read_only_args=[first],
    )
    return first, pack_fp8(*((number - code) * REST for number, code in zip((a, b, c, d), near, strict=True)))
