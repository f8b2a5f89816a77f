"""GEMMs with dense weights in the persistent kernel, and the normalised rows that they multiply.

A stage holds a range of k of eight rows of the weights. The MMA is mma.sync.m16n8k16: tokens are its rows (m), and the eight rows
of weights its columns (n). The warps of a CTA split k: a warpgroup processes every third stage, and each of its warps every fourth
chunk of 64 bytes of the stage's rows. At the end, `sum_of_warps` adds the warps' partial sums.

MMAs sum over k, so any order of k is right if both operands have the same. So a lane loads 16 consecutive bytes of a row of weights
and the same 16 bytes of a token, and uses them as the operands of two MMAs. No shuffle or ldmatrix is needed.

With fp8 weights, 16 bytes of a row and 32 bytes of a token are the operands of four MMAs. These MMAs use float16, because one
instruction converts two e4m3 values to float16; a conversion to bfloat16 takes four. So tokens are converted to float16: each 64
elements of a token (a chunk) are scaled by a power of two into float16's range. The scaling is exact for all elements that are at
least 2^-31 of the chunk's amax. A chunk's accumulators are multiplied by the inverse power of two. At the end, results are
multiplied by the scales of the rows of weights, as in `mm`.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, cute

from tokenspeed_kernel_nvidia.cutedsl.memory_device import load_words, store_words_shared
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.layout import PANEL_STRIPS
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import skip
from tokenspeed_kernel_nvidia.cutedsl.registers_device import (
    EXPONENT,
    exponent_of,
    float_of,
    load_floats,
    mma_m16n8k16,
    pack,
    store_floats,
    widen_fp8,
    widened,
)
from tokenspeed_kernel_nvidia.sm90.gemm.mm.memory_device import load_float_if, load_words_if, read_byte, write_byte
from tokenspeed_kernel_nvidia.sm90.layers.config import CHUNK_BYTES, PART_BYTES, TILE, WIDTH, WIDTH_PITCH
from tokenspeed_kernel_nvidia.sm90.layers.exchange_device import both_values, value_of, warp_sum
from tokenspeed_kernel_nvidia.sm90.layers.split_device import Split
from tokenspeed_kernel_nvidia.sm90.layers.tile_device import PART, QKV_PART, LayerCall
from tokenspeed_kernel_nvidia.sm90.moe.stream.config import GROUPS, MMA_WARPS

CHUNK = 8  # elements of a token that a thread normalises
BFLOAT16 = 2  # `Vector.kind` of bfloat16
_CHUNK_BITS = CHUNK_BYTES.bit_length() - 1
_STEP = PANEL_STRIPS * CHUNK_BYTES  # bytes of a row that the four warps of a warpgroup load at once
# Offset of a token's exponents, behind its elements: one byte for each chunk, the exponent of the factor of the chunk's
# accumulators.
_EXPONENTS = 2 * WIDTH
_LOADS = PART_BYTES // _STEP  # number of 16-byte loads of a lane in a full stage; the first warps have one more


class Gemm(Split):
    """The part of the kernel that loads rows of tokens, and multiplies them by dense weights. All MMA warps call these methods."""

    @cute.jit
    def load_rows(self, call: LayerCall, warp: Int32, source: Int64, tag: Int32, to: Int32, pitch: cutlass.Constexpr[int]):
        """Waits until all CTAs have stored their words of some rows ``[tokens, hidden]``. Loads the rows into shared memory as
        bfloat16, and stores the warps' sums of squares there."""
        thread = self.thread()
        hidden = call.layer.hidden
        live = thread * CHUNK < hidden
        # Threads beyond the end of a row load its last chunk, but do not store it: all lanes must reach `warp_sum`.
        column = cutlass.min(thread * CHUNK, hidden - CHUNK)
        some, ranks = self.config.at_once, self.config.ranks
        words = cute.make_rmem_tensor((some * ranks * CHUNK,), Uint32)
        words.fill(0)
        for begin in cutlass.range(0, call.tokens, some, unroll=1):
            addresses = [[] for _ in range(ranks)]
            for each in cutlass.range_constexpr(some):
                token = cutlass.min(begin + each, call.tokens - 1)
                for rank in cutlass.range_constexpr(ranks):
                    at = self.addends_at(call, source, token * hidden + column, rank)
                    addresses[rank] += [at, at + 16]
            if const_expr(ranks == 1):
                self.load_words_of_all(call, addresses[0], words, tag)
            else:
                self.load_addends(call, addresses, words, tag)
            for each in cutlass.range_constexpr(some):
                token = begin + each
                square = Float32(0.0)
                sums = [self.sum_of([words[(r * some + each) * CHUNK + at] for r in range(ranks)]) for at in range(CHUNK)]
                for number in cutlass.range_constexpr(CHUNK):
                    value = value_of(sums[number])
                    square += value * value
                square = warp_sum(cutlass.select_(live, square, Float32(0.0)))
                if token < call.tokens:
                    if cute.arch.lane_idx() == 0:
                        store_floats("shared", call.squares_at + (token * MMA_WARPS + warp) * 4, [square])
                    if live:
                        both = [both_values(sums[2 * pair], sums[2 * pair + 1]) for pair in range(CHUNK // 2)]
                        store_words_shared(to + token * pitch + column * 2, both)

    @cute.jit
    def store_operand(self, at: Int32, column: Int32, words: list, live: Boolean):
        """Stores eight elements of a token as an operand of `multiply_tiles`; for fp8 weights, scaled and converted to float16. All
        lanes of a warp call this method.

        Args:
            at: the address of the token.
            column: the index of the first element.
            words: the elements, bfloat16.
            live: whether they are stored. It has the same value in the eight lanes that hold a chunk (64 elements).
        """
        if const_expr(self.config.dense == "bfloat16"):
            if live:
                store_words_shared(at + column * 2, words)
        else:
            largest = Int32(0)
            for word in words:
                largest = cutlass.max(largest, cutlass.max(Int32(word << 16) & 0x7FFFFFFF, Int32(word) & 0x7FFF0000))
            for power in cutlass.range_constexpr(3):
                largest = cutlass.max(largest, cute.arch.shuffle_sync_bfly(largest, offset=1 << power))
            exponent = exponent_of(largest)
            factor = float_of((EXPONENT + 127 - exponent) << 23)
            halves = []
            for word in words:
                low, high = widened(self.dtype, word)
                halves.append(pack(cutlass.Float16, low * factor, high * factor))
            if live:
                store_words_shared(at + column * 2, halves)
                if column % CHUNK_BYTES == 0:
                    write_byte(at + _EXPONENTS + column // CHUNK_BYTES, exponent + (127 - EXPONENT))

    def scale_of(self, call: LayerCall, token: Int32) -> Float32:
        """Returns the reciprocal root mean square of a token, from the sums of squares that `load_rows` has stored."""
        square = Float32(0.0)
        for each in range(MMA_WARPS // 4):
            for part in load_floats("shared", call.squares_at + (token * MMA_WARPS + 4 * each) * 4, 4):
                square += part
        return cute.math.rsqrt(square / Float32(call.layer.hidden) + call.given.eps)

    @cute.jit
    def multiply_tiles(
        self, call: LayerCall, warp: Int32, at: Any, row_count: Int32, row_bytes: Int32, of_qkv: cutlass.Constexpr[bool]
    ):
        """The mainloop: multiplies the tokens at ``call.attended_at`` by this CTA's rows of weights, which the producer streams.
        Stores this warp's partial sums of all tiles in shared memory.

        Args:
            row_count: the number of this CTA's rows of weights.
            row_bytes: bytes of a row of weights.
            of_qkv: whether this is the GEMM of qkv.

        Returns:
            The next position in the ring buffer.
        """
        lane = self.thread() % 32
        group, strip = warp // PANEL_STRIPS, warp % PANEL_STRIPS
        part_bytes = call.kept[QKV_PART if of_qkv else PART]
        parts = (row_bytes + part_bytes - 1) // part_bytes
        tiles = (row_count + TILE - 1) // TILE
        inside = strip * CHUNK_BYTES + lane % 4 * 16
        # Lanes without a token load nothing. With few tokens, this saves most of the shared-memory reads of tokens.
        live = lane // 4 < call.tokens
        token_at = call.attended_at + cutlass.min(lane // 4, call.tokens - 1) * WIDTH_PITCH
        tokens_at = token_at + inside
        row = lane // 4
        sums = cute.make_rmem_tensor((_LOADS, 4), Float32)
        for tile in cutlass.range(tiles, unroll=1):
            sums.fill(0.0)
            part = (group + 2 * (tile * parts)) % GROUPS  # the first part that this warpgroup computes
            while part < parts:
                call.pipe.wait(at)
                size = cutlass.min(row_bytes - part * part_bytes, part_bytes)  # of a row
                # The two chunks of each 128 bytes of odd rows are swapped, unless rows have an odd number of chunks.
                swapped = row & ~(size >> _CHUNK_BITS) & 1
                right_at = call.ring + at.stage * self.config.stage_bytes + row * size + (inside ^ swapped << _CHUNK_BITS)
                left_bytes = size - strip * CHUNK_BYTES  # of a row, from this warp's first chunk on
                if const_expr(self.config.dense == "bfloat16"):
                    self.multiply_part(sums, tokens_at + part * part_bytes, right_at, left_bytes, live)
                else:
                    chunk = (part * part_bytes >> _CHUNK_BITS) + strip  # this warp's first one
                    self.multiply_fp8(sums, token_at, chunk, right_at, left_bytes, lane, live)
                self.release(call, at)
                at = skip(at, GROUPS, self.stages)
                part += GROUPS
            if live:
                place = (warp * call.tokens + lane // 4) * self.config.rows_of_cta + tile * TILE + lane % 4 * 2
                # With bfloat16 weights, accumulators 1 and 3 have their results in rows 8 to 15, see `multiply_chunks`.
                odd = 2 if self.config.dense == "bfloat16" else 0
                both = [
                    (sums[0, number] + sums[2, number]) + (sums[1, odd + number] + sums[3, odd + number]) for number in range(2)
                ]
                store_floats("shared", call.partials_at + place * 4, both)
        # The producer pads the stages to a multiple of the number of warpgroups. Release the empty stage, if this warpgroup has
        # one.
        beyond = tiles * parts % GROUPS
        if (beyond > 0) & (group >= beyond):
            call.pipe.wait(at)
            self.release(call, at)
            at = skip(at, GROUPS, self.stages)
        return at

    @cute.jit
    def multiply_part(self, sums: cute.Tensor, left_at: Int32, right_at: Int32, left_bytes: Int32, live: Boolean):
        """Issues the MMAs of this warp's chunks of a stage, which accumulate in ``sums``.

        Args:
            left_at, right_at: the addresses of this lane's first 16 bytes of its token (the MMA's left operand) and of its row of
                weights (the right operand).
            left_bytes: the bytes of a row that remain from this warp's first chunk on.
            live: whether this lane has a token.
        """
        # A full stage has no branch for each chunk, so that the loads of all chunks are issued before the first MMA.
        if left_bytes > (_LOADS - 1) * _STEP:
            self.multiply_chunks(sums, left_at, right_at, range(_LOADS), live)
            if left_bytes > _LOADS * _STEP:
                self.multiply_chunks(sums, left_at, right_at, [_LOADS], live)
        else:
            for each in cutlass.range_constexpr(_LOADS - 1):
                if each * _STEP < left_bytes:
                    self.multiply_chunks(sums, left_at, right_at, [each], live)

    def multiply_chunks(self, sums: cute.Tensor, left_at: Int32, right_at: Int32, chunks: Any, live: Boolean) -> None:
        """Issues the MMAs of some of this warp's chunks. ``live``: whether this lane has a token.

        The four words of a lane's load of a token are the left operand of two MMAs as they are, so words 1 and 3 are in rows 8 to
        15. The first MMA has the weights that belong to words 0 and 2, and its rows 0 to 7 are used. The second has the weights
        that belong to words 1 and 3, and its rows 8 to 15 are used. Each has an accumulator of its own.
        """
        left = [load_words_if(left_at + each * _STEP, live, "shared") for each in chunks]
        right = [[*load_words("shared", right_at + each * _STEP, 4)] for each in chunks]
        for half in range(2):
            for index, each in enumerate(chunks):
                to = 2 * (each % 2) + half
                acc = [sums[to, number] for number in range(4)]
                acc = mma_m16n8k16(self.dtype, acc, left[index], right[index][2 * half : 2 * half + 2])
                for number in range(4):
                    sums[to, number] = acc[number]

    @cute.jit
    def multiply_fp8(
        self, sums: cute.Tensor, token_at: Int32, chunk: Int32, right_at: Int32, left_bytes: Int32, lane: Int32, live: Boolean
    ):
        """Does `multiply_part` for fp8 weights. Uses only the first two of each four elements of ``sums``.

        Args:
            token_at: the address of this lane's token.
            chunk: the index of this warp's first chunk.
        """
        left_at, exponents_at = token_at + chunk * (2 * CHUNK_BYTES) + lane % 4 * 16, token_at + _EXPONENTS + chunk
        if left_bytes > (_LOADS - 1) * _STEP:
            self.multiply_fp8_chunks(sums, left_at, exponents_at, right_at, live, range(_LOADS), None)
            if left_bytes > _LOADS * _STEP:
                self.multiply_fp8_chunks(sums, left_at, exponents_at, right_at, live, [_LOADS], None)
        elif left_bytes > 0:
            self.multiply_fp8_chunks(sums, left_at, exponents_at, right_at, live, range(_LOADS - 1), left_bytes)

    def multiply_fp8_chunks(
        self,
        sums: cute.Tensor,
        left_at: Int32,
        exponents_at: Int32,
        right_at: Int32,
        live: Boolean,
        chunks: Any,
        left_bytes: Int32 | None,
    ) -> None:
        """Issues the MMAs of some of this warp's chunks of fp8 weights, scales their accumulators, and adds them to ``sums``.

        With ``left_bytes``, chunks beyond these bytes of a row do not exist. Their loads are issued nevertheless, so that no branch
        separates the loads: the tokens' operand is 0, and the first chunk of the weights is loaded once more. If that chunk has a
        NaN, the row's result is NaN anyway.

        A 16-byte load of a token gives a lane four words, which are the left operand without any permutation. By the operand's
        layout, words 0 and 2 belong to the MMA's rows 0 to 7, and words 1 and 3 to rows 8 to 15. But all four words are of one
        token and of different k. So there are two MMAs with this operand: one with the weights of words 0 and 2, of whose result
        rows 0 to 7 are used, and one with the weights of words 1 and 3, of whose result rows 8 to 15 are used.
        """
        left, right, exponents = [], [], []
        for each in chunks:
            known, step = live, Int32(each * PANEL_STRIPS)  # step: the distance from this warp's first chunk, in chunks
            if left_bytes is not None and each > 0:
                inside = each * _STEP < left_bytes
                known, step = live & inside, cutlass.select_(inside, step, Int32(0))
            left.append([load_words_if(left_at + (2 * each * _STEP + half * CHUNK_BYTES), known, "shared") for half in range(2)])
            right.append([*load_words("shared", right_at + step * CHUNK_BYTES, 4)])
            exponents.append(read_byte(exponents_at + step))
        acc = [[[Float32(0.0)] * 4 for _ in range(2)] for _ in chunks]
        for half in range(2):
            for index, _ in enumerate(chunks):
                weights = [pair for word in right[index][2 * half : 2 * half + 2] for pair in widen_fp8(cutlass.Float16, word)]
                for odd in range(2):
                    acc[index][odd] = mma_m16n8k16(cutlass.Float16, acc[index][odd], left[index][half], weights[odd::2])
        for index, each in enumerate(chunks):
            factor = float_of(Int32(exponents[index]) << 23)
            for number in range(2):
                sums[each % _LOADS, number] += (acc[index][0][number] + acc[index][1][2 + number]) * factor

    def load_scale(self, call: LayerCall, column: int, rows: Int32, row_bytes: Int32, row: Int32, live: Boolean) -> Any:
        """Loads the scale of a row of fp8 weights if ``live`` holds; returns None for other weights.

        Args:
            column: the weights' column of the table of layers.
            rows, row_bytes: the number of rows of all CTAs, and the bytes of a row. The scales follow these rows in memory.
            row: the index of the row.
        """
        if self.config.dense == "bfloat16":
            return None
        return load_float_if(call.address(column) + Int64(rows) * row_bytes + Int64(row) * 4, live)

    def sum_of_warps(self, call: LayerCall, token: Int32, row: Int32, scale: Any) -> Float32:
        """Returns an element of the GEMM's result without bias: the sum of the warps' partial sums, times the scale from
        `load_scale`. ``row``: the index among this CTA's rows of weights."""
        total = Float32(0.0)
        for each in range(MMA_WARPS):
            place = (each * call.tokens + token) * self.config.rows_of_cta + row
            total += load_floats("shared", call.partials_at + place * 4, 1)
        return total if scale is None else total * scale
