"""What `mm_device` multiplies: activations and weights as operands of instructions, and their scales.

A lane's 16 bytes of weights are 8, 16 or 32 neighbours along k. The instructions take them in pairs, in the order in which decoding
gives them; activations are put into the same order.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Numeric, Uint32, const_expr, cute

from tokenspeed_kernel_nvidia.sm90.common.memory_device import load_words
from tokenspeed_kernel_nvidia.sm90.common.registers_device import mma_m16n8k16
from tokenspeed_kernel_nvidia.sm90.gemm.mm_config import BLOCK, LOAD_BYTES, QUAD_BYTES, Config
from tokenspeed_kernel_nvidia.sm90.gemm.mm_memory_device import (
    Call,
    close_copies,
    copy_words_if,
    load_byte_if,
    load_float_if,
    load_words_if,
    type_of,
)

MX = 32  # weights that share a scale
TWO_126 = 0x7E807E80  # 2^126, twice, in bfloat16


def widen_fp8(dtype: type[Numeric], word: Any) -> Any:
    """Four e4m3 numbers as two pairs."""
    halves = (
        "{ .reg .b16 l, h; mov.b32 {l, h}, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, l; cvt.rn.f16x2.e4m3x2 {$w1}, h; }"
        if dtype is cutlass.Float16
        else "{ .reg .b16 l, h, a, b, c, d; .reg .b32 p, q; .reg .f32 e, f, g, i; mov.b32 {l, h}, {$r0}; "
        "cvt.rn.f16x2.e4m3x2 p, l; cvt.rn.f16x2.e4m3x2 q, h; mov.b32 {a, b}, p; mov.b32 {c, d}, q; "
        "cvt.f32.f16 e, a; cvt.f32.f16 f, b; cvt.f32.f16 g, c; cvt.f32.f16 i, d; "
        "cvt.rn.bf16x2.f32 {$w0}, f, e; cvt.rn.bf16x2.f32 {$w1}, i, g; }"
    )
    return cute.arch.inline_ptx(halves, write_only_types=[Uint32] * 2, read_only_args=[word])


def scaled_pair(bits: Any, scale: Any) -> Any:
    """A pair of bfloat16, times 2^126, times a pair."""
    return cute.arch.inline_ptx(
        f"{{ .reg .b32 t; mov.b32 t, {TWO_126}; mul.rn.bf16x2 t, {{$r0}}, t; mul.rn.bf16x2 {{$w0}}, t, {{$r1}}; }}",
        write_only_types=[Uint32],
        read_only_args=[bits, scale],
    )


def permute_bytes(x: Any, y: Any, order: int) -> Any:
    """Four of the bytes of two words, by the digits of ``order``."""
    return cute.arch.inline_ptx(f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {order};", write_only_types=[Uint32], read_only_args=[x, y])


def widen_mxfp4(word: Any, scale: Any) -> list[Any]:
    """Eight e2m1 codes, times a scale: pairs of the numbers j and j + 4.

    A code's sign is brought to a bfloat16's, its other three bits to where exponent and mantissa meet: that number is 2^-126 times
    the code's. 2^126 and the scale are two factors, because their product may be too large.
    """
    pairs = []
    for each in range(4):
        high = word << (12 - 4 * each)
        bits = (high & Uint32(0x80008000)) | ((high >> 6) & Uint32(0x01C001C0))
        pairs.append(scaled_pair(bits, scale))
    return pairs


def permuted(words: list[Any]) -> list[Any]:
    """Pairs of neighbours as pairs of the numbers j and j + 4 of eight."""
    pairs = []
    for eight in range(0, len(words), 4):
        for low in range(2):
            x, y = words[eight + low], words[eight + low + 2]
            pairs += [permute_bytes(x, y, 0x5410), permute_bytes(x, y, 0x7632)]
    return pairs


class Formats:
    """Activations, weights and scales of a configuration."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.dtype = type_of(config.product_dtype)
        self.halves = config.tokens // 8
        self.words = config.elements // 2  # registers of a load of weights, as operands
        self.raw_words = config.elements * config.activation_bytes // 4  # of the activations for it, as they are stored

    # -- where a lane's loads are --------------------------------------------------------------------------------------------------

    def part(self, warp: Int32):
        """The first, in a chunk of a row, in bytes."""
        return warp * (QUAD_BYTES * self.config.together) + cute.arch.lane_idx() % 4 * LOAD_BYTES

    def offset(self, each: int) -> int:
        """Of another, from the first."""
        together = self.config.together
        return (each // together * self.config.warps * together + each % together) * QUAD_BYTES

    # -- activations ---------------------------------------------------------------------------------------------------------------

    def operands(self) -> list[cute.Tensor]:
        """Room for what `fetch` brings: activations as operands, then scales of blocks, of two columns and of the activations."""
        config = self.config
        tensors = [cute.make_rmem_tensor((config.loads, self.halves, self.words), Uint32)]
        if config.scales == "block":
            tensors.append(cute.make_rmem_tensor((config.loads, 2), Float32))
            tensors.append(cute.make_rmem_tensor((config.loads, self.halves), Float32))
        return tensors

    @cute.jit
    def fetch(self, call: Call, begin: Int32, at: Int32, to: list):
        """Loads a lane's part of a chunk of activations. What are operands as they are is not waited for.

        Args:
            begin: the first of the group's rows, among this CTA's.
            at: where the lane's weights begin in a row, in bytes.
        """
        config = self.config
        lane = cute.arch.lane_idx()
        raw = cute.make_rmem_tensor((config.loads, self.halves, self.raw_words), Uint32)
        for each in cutlass.range_constexpr(config.loads):
            inside = at + self.offset(each) < call.row_bytes
            k = (at + self.offset(each)) // LOAD_BYTES * config.elements
            for half in cutlass.range_constexpr(self.halves):
                token = lane // 4 + half * 8
                from_ = call.a.row(token) + k * config.activation_bytes
                for vector in cutlass.range_constexpr(self.raw_words // 4):
                    words = load_words_if(from_ + vector * 16, inside & (token < call.m))
                    for word in cutlass.range_constexpr(4):
                        raw[each, half, vector * 4 + word] = words[word]
            if const_expr(config.scales == "block"):
                block = (call.first + begin) // BLOCK
                for which in cutlass.range_constexpr(2):
                    beside = cutlass.min(block + which, (call.n - 1) // BLOCK)
                    to[1][each, which] = load_float_if(call.b_scale.at(k // BLOCK, beside, 4), inside)
                for half in cutlass.range_constexpr(self.halves):
                    token = lane // 4 + half * 8
                    if const_expr(config.activation_bytes == 1):
                        to[2][each, half] = load_float_if(call.a_scale.at(token, k // BLOCK, 4), inside & (token < call.m))
                    else:
                        to[2][each, half] = Float32(1.0)
        for each in cutlass.range_constexpr(config.loads):
            for half in cutlass.range_constexpr(self.halves):
                words = self.ordered([raw[each, half, word] for word in range(self.raw_words)])
                for word in cutlass.range_constexpr(self.words):
                    to[0][each, half, word] = words[word]

    def ordered(self, raw: list[Any]) -> list[Any]:
        """Activations as operands."""
        if self.config.activation_bytes == 1:
            return [pair for word in raw for pair in widen_fp8(self.dtype, word)]
        return permuted(raw) if self.config.weights == "mxfp4" else raw

    # -- weights -------------------------------------------------------------------------------------------------------------------

    def coming(self) -> list[cute.Tensor]:
        """Room for tiles of weights on their way, and for their scales of 32."""
        config = self.config
        tensors = [] if config.staged else [cute.make_rmem_tensor((config.depth, config.loads, 4), Uint32)]
        if config.scales == "mx":
            tensors.append(cute.make_rmem_tensor((config.depth, config.loads), Uint32))
        return tensors

    @cute.jit
    def stage(self, call: Call, slot: Int32, row: Int32, at: Int32):
        """Starts to copy a lane's part of a tile to shared memory.

        Args:
            slot: where its first load goes. Nobody else reads it.
            row, at: see `load`.
        """
        row += cute.arch.lane_idx() // 4
        from_ = call.weights.row(call.first + row) + at
        for each in cutlass.range_constexpr(self.config.loads):
            live = (row < call.rows) & (at + self.offset(each) < call.row_bytes)
            copy_words_if(slot + each * self.config.threads * LOAD_BYTES, from_ + self.offset(each), live)
        close_copies()

    def staged(self, slot: Int32) -> list[Any]:
        """A lane's part of a tile that has come."""
        return [load_words("shared", slot + each * self.config.threads * LOAD_BYTES, 4) for each in range(self.config.loads)]

    @cute.jit
    def load(self, call: Call, slot: cutlass.Constexpr[int], row: Int32, at: Int32, to: list):
        """Starts to load a lane's part of a tile to registers.

        Args:
            slot: where it goes.
            row: the tile's first, among this CTA's. Behind the last there are zeros.
            at: where the lane's weights begin in a row, in bytes. Behind its end there are zeros.
        """
        row += cute.arch.lane_idx() // 4
        from_ = call.weights.row(call.first + row) + at
        for each in cutlass.range_constexpr(self.config.loads):
            live = (row < call.rows) & (at + self.offset(each) < call.row_bytes)
            words = load_words_if(from_ + self.offset(each), live)
            for word in cutlass.range_constexpr(4):
                to[0][slot, each, word] = words[word]
            if const_expr(self.config.scales == "mx"):
                scale = call.b_scale.at((at + self.offset(each)) // LOAD_BYTES, call.first + row, 1)
                to[1][slot, each] = load_byte_if(scale, live)

    # -- products ------------------------------------------------------------------------------------------------------------------

    @cute.jit
    def multiply(self, acc: cute.Tensor, row: Int32, edge: Int32, operands: list, loads: list, scales: list):
        """Adds the products of a tile.

        Args:
            row: the tile's first, in the group.
            edge: rows of the group before those with the next block's scales.
            operands: what `fetch` brought.
            loads: the lane's loads of weights.
            scales: of each in mxfp4.
        """
        config = self.config
        # Two chains of products, because each waits for the one before.
        sums = [[acc[index] for index in range(4)], [Float32(0.0)] * 4]
        for each in cutlass.range_constexpr(config.loads):
            words = self.widened(loads[each], scales[each])
            if const_expr(config.scales == "block"):
                apart = self.chain(operands[0], each, words, [[Float32(0.0)] * 4] * 2)
                for column in cutlass.range_constexpr(2):
                    before = row + (cute.arch.lane_idx() % 4 * 2 + column) < edge
                    scale = cutlass.select_(before, operands[1][each, 0], operands[1][each, 1])
                    for half in cutlass.range_constexpr(self.halves):
                        index = 2 * half + column
                        sums[0][index] += (apart[0][index] + apart[1][index]) * (scale * operands[2][each, half])
            else:
                sums = self.chain(operands[0], each, words, sums)
        for index in cutlass.range_constexpr(4):
            acc[index] = sums[0][index] + sums[1][index]

    def loaded(self, weights: list, slot: int) -> tuple[list[Any], list[Any]]:
        """A lane's part of a tile in registers, and its scales."""
        loads = range(self.config.loads)
        scales = [weights[1][slot, each] if len(weights) > 1 else None for each in loads]
        return [[weights[0][slot, each, word] for word in range(4)] for each in loads], scales

    def widened(self, words: Any, byte: Any) -> Any:
        """A load of weights as operands."""
        if self.config.weights == "mxfp4":
            # An e8m0 is the exponent field of a bfloat16, but for 2^-127, which is denormal, and NaN.
            bits = (byte << 7) | cutlass.select_((byte == 0) | (byte == 255), Uint32(0x40), Uint32(0))
            scale = bits | (bits << 16)
            return [pair for word in words for pair in widen_mxfp4(word, scale)]
        if self.config.weights != "dense":
            return [pair for word in words for pair in widen_fp8(self.dtype, word)]
        return words

    def chain(self, x: cute.Tensor, each: int, weights: Any, sums: Any) -> Any:
        """Both chains of products with a load of weights."""
        zero = Uint32(0)
        sums = [*sums]
        for step in range(self.words // 2):
            low, high = 2 * step, 2 * step + 1
            if self.halves == 2:
                left = [x[each, 0, low], x[each, 1, low], x[each, 0, high], x[each, 1, high]]
            else:
                left = [x[each, 0, low], zero, x[each, 0, high], zero]
            sums[step % 2] = [*mma_m16n8k16(self.dtype, sums[step % 2], left, weights[low : high + 1])]
        return sums
