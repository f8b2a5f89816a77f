"""GEMMs with dense weights in the persistent kernel, and the normalised rows that they multiply.

A stage holds a range of k of eight rows of the weights. These rows are the MMA's columns, and tokens are its rows. A warpgroup
processes every third stage, and each of its warps every fourth chunk of 64 bytes of the stage's rows. The order of k within an MMA
does not matter. So a lane loads 16 bytes of a row and the same 16 bytes of a token, which are the operands of two MMAs.

With fp8 weights, 16 bytes of a row and 32 bytes of a token are the operands of four MMAs. The weights are converted to bfloat16,
exactly. The sums are multiplied by the rows' scales at the end, as in `mm`.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, cute

from tokenspeed_kernel_nvidia.cutedsl.memory_device import load_words, store_words_shared
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.layout import PANEL_STRIPS
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import skip
from tokenspeed_kernel_nvidia.cutedsl.registers_device import load_floats, mma_m16n8k16, store_floats, widen_fp8
from tokenspeed_kernel_nvidia.sm90.gemm.mm.memory_device import load_float_if, load_words_if
from tokenspeed_kernel_nvidia.sm90.layers.config import CHUNK_BYTES, PART_BYTES, TILE, WIDTH_PITCH
from tokenspeed_kernel_nvidia.sm90.layers.exchange_device import both_values, value_of, warp_sum
from tokenspeed_kernel_nvidia.sm90.layers.split_device import Split
from tokenspeed_kernel_nvidia.sm90.layers.tile_device import PART, QKV_PART, LayerCall
from tokenspeed_kernel_nvidia.sm90.moe.stream.config import GROUPS, MMA_WARPS

CHUNK = 8  # elements of a token that a thread normalises
BFLOAT16 = 2  # `Vector.kind` of bfloat16
_CHUNK_BITS = CHUNK_BYTES.bit_length() - 1
_STEP = PANEL_STRIPS * CHUNK_BYTES  # bytes of a row that the four warps of a warpgroup load at once
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
        # Threads beyond the tokens' end load the last chunk, but do not store it.
        column = cutlass.min(thread * CHUNK, hidden - CHUNK)
        some = self.config.at_once
        words = cute.make_rmem_tensor((some * CHUNK,), Uint32)
        words.fill(0)
        for begin in cutlass.range(0, call.tokens, some, unroll=1):
            addresses = []
            for each in cutlass.range_constexpr(some):
                token = cutlass.min(begin + each, call.tokens - 1)
                at = source + Int64(token * hidden + column) * 4
                addresses += [at, at + 16]
            self.load_words_of_all(call, addresses, words, tag)
            for each in cutlass.range_constexpr(some):
                token = begin + each
                square = Float32(0.0)
                for number in cutlass.range_constexpr(CHUNK):
                    value = value_of(words[each * CHUNK + number])
                    square += value * value
                square = warp_sum(cutlass.select_(live, square, Float32(0.0)))
                if token < call.tokens:
                    if cute.arch.lane_idx() == 0:
                        store_floats("shared", call.squares_at + (token * MMA_WARPS + warp) * 4, [square])
                    if live:
                        pairs = [each * CHUNK + 2 * pair for pair in range(4)]
                        both = [both_values(words[pair], words[pair + 1]) for pair in pairs]
                        store_words_shared(to + token * pitch + column * 2, both)

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
        """Multiplies the tokens at ``call.attended_at`` by this CTA's rows of weights, which the producer streams. Stores this
        warp's partial sums of all tiles in shared memory.

        Args:
            row_count: the number of this CTA's rows of weights.
            row_bytes: bytes of a row of weights, and of a token.
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
        loads = self.token_loads
        # Lanes without a token load nothing: for few tokens, shared memory is read mostly for the weights.
        live = lane // 4 < call.tokens
        tokens_at = call.attended_at + cutlass.min(lane // 4, call.tokens - 1) * WIDTH_PITCH + inside
        if const_expr(loads == 2):
            tokens_at += strip * CHUNK_BYTES
        row = lane // 4
        sums = cute.make_rmem_tensor((_LOADS, 4), Float32)
        for tile in cutlass.range(tiles, unroll=1):
            sums.fill(0.0)
            part = (group + 2 * (tile * parts)) % GROUPS  # the first part that this warpgroup computes
            while part < parts:
                call.pipe.wait(at)
                left_at = tokens_at + part * part_bytes
                if const_expr(loads == 2):
                    left_at += part * part_bytes
                size = cutlass.min(row_bytes - part * part_bytes, part_bytes)  # of a row
                # The two chunks of each 128 bytes of odd rows are swapped, unless rows have an odd number of chunks.
                swapped = row & ~(size >> _CHUNK_BITS) & 1
                right_at = call.ring + at.stage * self.config.stage_bytes + row * size + (inside ^ swapped << _CHUNK_BITS)
                left_bytes = size - strip * CHUNK_BYTES  # of a row, from this warp's first chunk on
                # Without a branch for each chunk, all chunks' loads are issued together.
                if left_bytes > self.least_bytes:
                    self.multiply_chunks(sums, left_at, right_at, range(_LOADS), live, left_bytes)
                    if left_bytes > _LOADS * _STEP:
                        self.multiply_chunks(sums, left_at, right_at, [_LOADS], live)
                elif const_expr(self.least_bytes > 0):
                    for each in cutlass.range_constexpr(_LOADS - 1):
                        if each * _STEP < left_bytes:
                            self.multiply_chunks(sums, left_at, right_at, [each], live)
                self.release(call, at)
                at = skip(at, GROUPS, self.stages)
                part += GROUPS
            if live:
                place = (warp * call.tokens + lane // 4) * self.config.rows_of_cta + tile * TILE + lane % 4 * 2
                both = [(sums[0, number] + sums[1, number]) + (sums[2, number] + sums[3, number]) for number in range(2)]
                store_floats("shared", call.partials_at + place * 4, both)
        # The producer pads the tiles' stages to a multiple of the number of warpgroups.
        beyond = tiles * parts % GROUPS
        if (beyond > 0) & (group >= beyond):
            call.pipe.wait(at)
            self.release(call, at)
            at = skip(at, GROUPS, self.stages)
        return at

    @property
    def token_loads(self) -> int:
        """The number of 16-byte loads of a token for 16 bytes of a row of weights."""
        return 2 // self.config.dense_bytes

    @property
    def least_bytes(self) -> int:
        """If more bytes than this are left of a row, all loads of a full stage are issued together, see `multiply_chunks`."""
        return (_LOADS - 1) * _STEP if self.config.dense == "bfloat16" else 0

    def multiply_chunks(
        self, sums: cute.Tensor, left_at: Int32, right_at: Int32, chunks: Any, live: Boolean, left_bytes: Int32 | None = None
    ) -> None:
        """Adds the MMAs of some of this warp's chunks of rows.

        Args:
            live: whether this lane has a token.
            left_bytes: the bytes that are left of a row, for fp8 weights. Chunks beyond these bytes are multiplied by 0: a row of
                2880 bytes has three or four chunks for each warp, and all warps shall issue their loads together. In place of such
                a chunk, the row's first one is loaded, which is finite or makes the row's result NaN anyway.
        """
        loads = self.token_loads
        left, right = [], []
        for each in chunks:
            known, at = live, each * _STEP
            if loads == 2 and left_bytes is not None and each > 0:
                inside = each * _STEP < left_bytes
                known, at = live & inside, cutlass.select_(inside, Int32(each * _STEP), Int32(0))
            words = []
            for load in range(loads):
                words += [*load_words_if(left_at + (each * loads * _STEP + load * CHUNK_BYTES), known, "shared")]
            left.append(words)
            right.append([*load_words("shared", right_at + at, 4)])
        for step in range(2 * loads):
            for index, each in enumerate(chunks):
                operand = (left[index][2 * step], Uint32(0), left[index][2 * step + 1], Uint32(0))
                acc = [sums[each % _LOADS, number] for number in range(4)]
                acc = mma_m16n8k16(self.dtype, acc, operand, self.operand_of(right[index], step))
                for number in range(4):
                    sums[each % _LOADS, number] = acc[number]

    def operand_of(self, words: list, step: int) -> Any:
        """Returns an MMA's operand of this lane's weights. ``words``: 16 bytes of a row."""
        return words[2 * step : 2 * step + 2] if self.token_loads == 1 else widen_fp8(self.dtype, words[step])

    def load_scale(self, call: LayerCall, column: int, rows: Int32, row_bytes: Int32, row: Int32, live: Boolean) -> Any:
        """Loads the scale of a row of fp8 weights if ``live`` holds; returns None for other weights.

        Args:
            column: the weights' column of the table of layers.
            rows, row_bytes: the number of rows of all CTAs, which the scales follow, and the bytes of a row.
            row: the index of the row.
        """
        if self.token_loads == 1:
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
