"""The device code of `grouped` that rounds rows to float8_e4m3fn with a scale each, as `quantize_fp8` does for tokens."""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute
from cutlass.memory import SmemAllocator

from tokenspeed_kernel_nvidia.sm90.common import arguments_device as arguments
from tokenspeed_kernel_nvidia.sm90.common.memory_device import load_words
from tokenspeed_kernel_nvidia.sm90.common.registers_device import dtype_of, pack_fp8, store_floats, store_words, widened
from tokenspeed_kernel_nvidia.sm90.moe.grouped_config import CODES, PARTS, REST, ROUNDED_TOGETHER, Rounding

WARPS = 4
THREADS = 32 * WARPS
KEPT = 2  # groups of numbers that a thread keeps in registers until the row's scale is known
LARGEST = 448.0
SMALLEST_NORMAL = 2.0**-126


def host(config: Rounding) -> Any:
    """Returns the function that launches the program."""
    return RoundRows(config)


def fake_arguments(config: Rounding) -> tuple[Any, ...]:
    """Returns stand-ins for the arguments of what `host` returns."""
    size, rows = arguments.size, arguments.rows
    count, k = size(), size(divisibility=32)
    result = rows(config.dtype, count, k)
    if config.result == CODES:
        result = arguments.byte_rows(count, k)
    elif config.result == PARTS:
        result = arguments.byte_rows(size(), k)
    return rows(config.dtype, count, k), result, Int64(0), arguments.stream()


@dataclass(frozen=True)
class Rows:
    """The rows that are rounded and where the results go, as addresses.

    Attributes:
        given, given_stride: 16-bit, and elements from one row to the next.
        result, result_stride: receives codes, bytes, or values like those given; of numbers that are split, the first codes of
            a row are a row, and the second ones the next.
        scales: float32, receives one for each row.
        k: numbers of a row.
    """

    given: Int64
    given_stride: Int64
    result: Int64
    result_stride: Int64
    scales: Int64
    k: Int32


class RoundRows:
    """The kernel of one configuration: a CTA for each row."""

    def __init__(self, config: Rounding):
        self.config = config
        self.dtype = dtype_of(config.dtype)

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

        storage = SmemAllocator().allocate(Storage)
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        groups = rows.k // ROUNDED_TOGETHER
        given = rows.given + Int64(row) * (2 * rows.given_stride)
        if const_expr(not self.config.early):
            cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        kept = cute.make_rmem_tensor((KEPT, ROUNDED_TOGETHER // 2), Uint32)
        kept.fill(0)
        # Bits of magnitudes sort as the magnitudes do, with NaN the largest.
        largest = Uint32(0)
        for turn in cutlass.range_constexpr(KEPT):
            group = turn * THREADS + thread
            if group < groups:
                self.read(given, group, kept[turn, None])
            largest = self.largest_of(kept[turn, None], largest)
        for group in cutlass.range(KEPT * THREADS + thread, groups, THREADS, unroll=1):
            words = cute.make_rmem_tensor((ROUNDED_TOGETHER // 2,), Uint32)
            self.read(given, group, words)
            largest = self.largest_of(words, largest)
        for shift in cutlass.range_constexpr(5):
            largest = cutlass.max(largest, cute.arch.shuffle_sync_bfly(largest, offset=1 << shift))
        shared = storage.largest.data_ptr()
        if thread % 32 == 0:
            shared[thread // 32] = largest
        cute.arch.sync_threads()
        for warp in cutlass.range_constexpr(WARPS):
            largest = cutlass.max(largest, shared[warp])
        amax = cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[largest])
        scale = Float32(0.0)
        if const_expr(self.config.result == PARTS):
            scale = power_below(amax)
        else:
            scale = at_least(divided(amax, Float32(LARGEST)), Float32(SMALLEST_NORMAL))
        if thread == 0:
            store_floats("global", rows.scales + Int64(row) * 4, [scale])
        for turn in cutlass.range_constexpr(KEPT):
            group = turn * THREADS + thread
            if group < groups:
                self.write(rows, row, group, kept[turn, None], scale)
        for group in cutlass.range(KEPT * THREADS + thread, groups, THREADS, unroll=1):
            words = cute.make_rmem_tensor((ROUNDED_TOGETHER // 2,), Uint32)
            self.read(given, group, words)
            self.write(rows, row, group, words, scale)
        if const_expr(self.config.early):
            cute.arch.griddepcontrol_wait()

    @cute.jit
    def read(self, given: Int64, group: Int32, words: cute.Tensor):
        """Reads a group of a row's numbers, two a word."""
        for half in cutlass.range_constexpr(2):
            loaded = load_words("global", given + Int64(group) * (2 * ROUNDED_TOGETHER) + half * 16, 4)
            for at in cutlass.range_constexpr(4):
                words[4 * half + at] = loaded[at]

    @cute.jit
    def largest_of(self, words: cute.Tensor, largest: Uint32) -> Uint32:
        """Returns the bits of the largest magnitude so far, as float32."""
        for at in cutlass.range_constexpr(ROUNDED_TOGETHER // 2):
            for number in widened(self.dtype, words[at]):
                bits = cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[number])
                largest = cutlass.max(largest, bits & 0x7FFFFFFF)
        return largest

    @cute.jit
    def write(self, rows: Rows, row: Int32, group: Int32, words: cute.Tensor, scale: Float32):
        """Rounds or splits some numbers, and stores what they become."""
        if const_expr(self.config.result == PARTS):
            self.write_parts(rows, row, group, words, scale)
        else:
            self.write_rounded(rows, row, group, words, scale)

    @cute.jit
    def write_parts(self, rows: Rows, row: Int32, group: Int32, words: cute.Tensor, scale: Float32):
        """Splits some numbers. Both codes have them in the order of `write_rounded`."""
        at = rows.result + Int64(2 * row) * rows.result_stride + group * ROUNDED_TOGETHER
        numbers = []
        for word in cutlass.range_constexpr(ROUNDED_TOGETHER // 2):
            numbers += [divided(number, scale) for number in widened(self.dtype, words[word])]
        parts = [split(*(numbers[2 * lane + place] for place in (0, 8, 1, 9))) for lane in range(4)]
        for part in cutlass.range_constexpr(2):
            store_words(at + part * rows.result_stride, [both[part] for both in parts])

    @cute.jit
    def write_rounded(self, rows: Rows, row: Int32, group: Int32, words: cute.Tensor, scale: Float32):
        """Rounds some numbers. Codes are stored in the order in which products of bytes take them: see `decode_e5m2`."""
        at = Int64(row) * rows.result_stride + group * ROUNDED_TOGETHER
        numbers = []
        for word in cutlass.range_constexpr(ROUNDED_TOGETHER // 2):
            numbers += [divided(number, scale) for number in widened(self.dtype, words[word])]
        codes = []
        for lane in cutlass.range_constexpr(4):
            first = 2 * lane
            codes.append(pack_fp8(numbers[first], numbers[first + 8], numbers[first + 1], numbers[first + 9]))
        if const_expr(self.config.result == CODES):
            store_words(rows.result + at, codes)
        else:
            values = [self.values(code) for code in codes]
            for half in cutlass.range_constexpr(2):
                store_words(rows.result + 2 * at + 16 * half, [value[half] for value in values])

    def values(self, codes: Uint32) -> Any:
        """Returns the values of four codes: of the first and the third byte in one word, and of the others in another."""
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


def divided(x: Float32, y: Float32) -> Float32:
    """Returns the quotient, correctly rounded."""
    return cute.arch.inline_ptx("div.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, y])


def at_least(x: Float32, bound: Float32) -> Float32:
    """Returns the larger one. NaN stays NaN."""
    return cute.arch.inline_ptx("max.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, bound])


def power_below(x: Float32) -> Float32:
    """Returns 2^-7 times the largest power of two that is at most ``x``: numbers become less than 256. NaN for NaN and infinity."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 a, b; .reg .pred p; mov.b32 a, {$r0}; shr.u32 b, a, 23; setp.eq.u32 p, b, 255; max.u32 b, b, 8;"
        " sub.u32 b, b, 7; shl.b32 b, b, 23; selp.b32 b, 0x7FFFFFFF, b, p; mov.b32 {$w0}, b; }",
        write_only_types=[Float32],
        read_only_args=[x],
    )


def split(a: Float32, b: Float32, c: Float32, d: Float32) -> Any:
    """Returns two words of codes of four numbers, the first in the lowest byte: the nearest ones, and those of what is left."""
    first = pack_fp8(a, b, c, d)
    near = cute.arch.inline_ptx(
        "{ .reg .b16 low, high, h, l; .reg .b32 x, y; mov.b32 {low, high}, {$r0}; cvt.rn.f16x2.e4m3x2 x, low;"
        " cvt.rn.f16x2.e4m3x2 y, high; mov.b32 {l, h}, x; cvt.f32.f16 {$w0}, l; cvt.f32.f16 {$w1}, h; mov.b32 {l, h}, y;"
        " cvt.f32.f16 {$w2}, l; cvt.f32.f16 {$w3}, h; }",
        write_only_types=[Float32] * 4,
        read_only_args=[first],
    )
    return first, pack_fp8(*((number - code) * REST for number, code in zip((a, b, c, d), near, strict=True)))
