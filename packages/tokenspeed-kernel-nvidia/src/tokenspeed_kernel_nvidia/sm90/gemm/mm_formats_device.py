"""What `mm_device` multiplies: activations and weights as operands of instructions, and their scales.

A lane's 16 bytes of weights are 8, 16 or 32 neighbours along k. The instructions take them in pairs, in the order in which decoding
gives them; activations are put into the same order.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Numeric, Uint32, const_expr, cute

from tokenspeed_kernel_nvidia.sm90.common.registers_device import mma_m16n8k16
from tokenspeed_kernel_nvidia.sm90.gemm.mm_config import BLOCK, GROUP, LOAD_BYTES, QUAD_BYTES, ROWS, Config
from tokenspeed_kernel_nvidia.sm90.gemm.mm_memory_device import (
    Call,
    load_byte_if,
    load_float_if,
    load_words_if,
    read_byte,
    read_words_if,
    type_of,
    write_byte,
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

    def place(self, warp: Int32):
        """Where the first is in a part of a row, in bytes. Those of a warp lie next to each other."""
        return warp * (QUAD_BYTES * self.config.loads) + cute.arch.lane_idx() % 4 * LOAD_BYTES

    def offset(self, each: int) -> int:
        """Of a chunk's other loads, from the first."""
        return each // self.config.loads * self.config.part_bytes + each % self.config.loads * QUAD_BYTES

    # -- activations ---------------------------------------------------------------------------------------------------------------

    def operands(self) -> list[cute.Tensor]:
        """Room for what `fetch` brings: activations as operands, then scales of blocks, of two columns and of the activations."""
        config = self.config
        every = config.parts * config.loads
        tensors = [cute.make_rmem_tensor((every, self.halves, self.words), Uint32)]
        if config.scales == "block":
            tensors.append(cute.make_rmem_tensor((every, 2), Float32))
            tensors.append(cute.make_rmem_tensor((every, self.halves), Float32))
        return tensors

    @cute.jit
    def fetch(self, call: Call, begin: Int32, at: Int32, to: list):
        """Loads a lane's part of a chunk of activations. What are operands as they are is not waited for.

        Args:
            begin: the first of the group's rows, among this CTA's.
            at: where the lane's weights begin in this CTA's part of a row, in bytes.
        """
        config = self.config
        lane = cute.arch.lane_idx()
        every = config.parts * config.loads
        raw = cute.make_rmem_tensor((every, self.halves, self.raw_words), Uint32)
        for each in cutlass.range_constexpr(every):
            inside = at + self.offset(each) < call.row_bytes
            k = (call.begin + at + self.offset(each)) // LOAD_BYTES * config.elements
            for half in cutlass.range_constexpr(self.halves):
                token = lane // 4 + half * 8
                from_ = call.a.row(token) + k * config.activation_bytes
                for vector in cutlass.range_constexpr(self.raw_words // 4):
                    words = load_words_if(from_ + vector * 16, inside & (token < call.m))
                    for word in cutlass.range_constexpr(4):
                        raw[each, half, vector * 4 + word] = words[word]
            if const_expr(config.scales == "block"):
                # A quad's sums are of all of its lanes' parts, also where the row ends between two of them.
                quad = at + self.offset(each) - lane % 4 * LOAD_BYTES
                inside = quad < call.row_bytes
                row = (call.begin + quad) // LOAD_BYTES * config.elements // BLOCK
                block = (call.first + begin) // BLOCK
                for which in cutlass.range_constexpr(2):
                    beside = cutlass.min(block + which, (call.n - 1) // BLOCK)
                    to[1][each, which] = load_float_if(call.b_scale.at(row, beside, 4), inside)
                for half in cutlass.range_constexpr(self.halves):
                    token = lane // 4 + half * 8
                    if const_expr(config.activation_bytes == 1):
                        to[2][each, half] = load_float_if(call.a_scale.at(token, row, 4), inside & (token < call.m))
                    else:
                        to[2][each, half] = Float32(1.0)
        for each in cutlass.range_constexpr(every):
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

    @cute.jit
    def read(self, call: Call, slot: Int32, at: Int32, part: cutlass.Constexpr[int]):
        """A lane's loads of a stage.

        Args:
            slot: where the lane's first load is.
            at: where the lane's weights begin in the chunk. Behind the row's end there are zeros.
        """
        loads = []
        for each in cutlass.range_constexpr(self.config.loads):
            inside = at + self.offset(part * self.config.loads + each) < call.row_bytes
            loads.append([*read_words_if(slot + each * QUAD_BYTES, inside)])
        return loads

    # -- scales of 32, of a group, which each lane keeps for itself ------------------------------------------------------------------

    def scale_place(self, tile: Any, each: int):
        """Where a lane's scale of a load is."""
        thread, _, _ = cute.arch.thread_idx()
        return (tile * (self.config.parts * self.config.loads) + each) * self.config.threads + thread

    @cute.jit
    def keep_scales(self, call: Call, begin: Int32, rows: Int32, at: Int32):
        """Brings those of a chunk to shared memory. ``begin``: the group's first row, ``at``: where the lane's weights begin."""
        every = self.config.parts * self.config.loads
        found = []
        for tile in cutlass.range_constexpr(GROUP // ROWS):
            row = tile * ROWS + cute.arch.lane_idx() // 4
            for each in cutlass.range_constexpr(every):
                inside = (row < rows) & (at + self.offset(each) < call.row_bytes)
                column = (call.begin + at + self.offset(each)) // LOAD_BYTES
                found.append(load_byte_if(call.b_scale.at(column, call.first + begin + row, 1), inside))
        for tile in cutlass.range_constexpr(GROUP // ROWS):
            for each in cutlass.range_constexpr(every):
                write_byte(call.scales + self.scale_place(tile, each), found[tile * every + each])

    @cute.jit
    def kept_scales(self, call: Call, tile: Int32, part: cutlass.Constexpr[int]):
        """Those of a stage. ``tile``: counted in the group."""
        loads = self.config.loads
        if const_expr(self.config.scales != "mx"):
            return [None] * loads
        return [read_byte(call.scales + self.scale_place(tile, part * loads + each)) for each in range(loads)]

    # -- products ------------------------------------------------------------------------------------------------------------------

    @cute.jit
    def multiply(
        self,
        acc: cute.Tensor,
        row: Int32,
        edge: Int32,
        operands: list,
        part: cutlass.Constexpr[int],
        loads: list,
        scales: list,
    ):
        """Adds the products of a tile's stage.

        Args:
            row: the tile's first, in the group.
            edge: rows of the group before those with the next block's scales.
            operands: what `fetch` brought.
            part: which of a chunk's stages it is.
            loads: the lane's loads of weights.
            scales: of each in mxfp4.
        """
        config = self.config
        # Two chains of products, because each waits for the one before.
        sums = [[acc[index] for index in range(4)], [Float32(0.0)] * 4]
        for each in cutlass.range_constexpr(config.loads):
            words = self.widened(loads[each], scales[each])
            which = part * config.loads + each
            if const_expr(config.scales == "block"):
                apart = self.chain(operands[0], which, words, [[Float32(0.0)] * 4] * 2)
                for column in cutlass.range_constexpr(2):
                    before = row + (cute.arch.lane_idx() % 4 * 2 + column) < edge
                    scale = cutlass.select_(before, operands[1][which, 0], operands[1][which, 1])
                    for half in cutlass.range_constexpr(self.halves):
                        index = 2 * half + column
                        sums[0][index] += (apart[0][index] + apart[1][index]) * (scale * operands[2][which, half])
            else:
                sums = self.chain(operands[0], which, words, sums)
        for index in cutlass.range_constexpr(4):
            acc[index] = sums[0][index] + sums[1][index]

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
