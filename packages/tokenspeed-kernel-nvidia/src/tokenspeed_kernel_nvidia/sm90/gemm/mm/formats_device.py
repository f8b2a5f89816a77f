"""The MMA operands of `kernel_device`: loads and conversions of activations and weights, and their scales.

The 16 bytes of weights that a lane loads at once are 8, 16 or 32 elements, consecutive along k. A register of a B operand holds two
of these elements, in the order that dequantisation produces. Activations are reordered to match when they are stored in shared
memory. So the mainloop loads them as A operands without a conversion.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, cute

from tokenspeed_kernel_nvidia.cutedsl.memory_device import load_words, store_words_shared
from tokenspeed_kernel_nvidia.cutedsl.registers_device import (
    load_floats,
    mma_m16n8k16,
    permute_bytes,
    store_floats,
    widen_fp8,
)
from tokenspeed_kernel_nvidia.sm90.common.bulk_device import bulk_load, bulk_load_to_pair
from tokenspeed_kernel_nvidia.sm90.gemm.mm.config import BLOCK, GROUP, LOAD_BYTES, QUAD_BYTES, Config
from tokenspeed_kernel_nvidia.sm90.gemm.mm.memory_device import (
    Call,
    load_byte_if,
    load_float_if,
    load_words_if,
    read_byte,
    type_of,
    write_byte,
)

COMPUTING = 2  # named barrier of the MMA warps
TWO_126 = 0x7E807E80  # two bfloat16 of 2^126


def wait_after(addresses: list[Int64]) -> None:
    """Waits for the preceding kernel (PDL), after these (nonzero) global addresses have been computed.

    The wait's predicate depends on the addresses. Otherwise the compiler would wait first and compute the addresses afterwards.
    """
    some = addresses[0]
    for address in addresses[1:]:
        some = some | address
    cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.b64 p, {$r0}, 0; @p griddepcontrol.wait; }", write_only_types=[], read_only_args=[some]
    )


def scaled_pair(bits: Any, scale: Any) -> Any:
    """Multiplies two bfloat16 in a register by 2^126, then by the two bfloat16 of ``scale``."""
    return cute.arch.inline_ptx(
        f"{{ .reg .b32 t; mov.b32 t, {TWO_126}; mul.rn.bf16x2 t, {{$r0}}, t; mul.rn.bf16x2 {{$w0}}, t, {{$r1}}; }}",
        write_only_types=[Uint32],
        read_only_args=[bits, scale],
    )


def widen_mxfp4(word: Any, scale: Any) -> list[Any]:
    """Dequantises a word of eight e2m1 values with one scale to four registers of bfloat16x2; register j holds elements j and j +
    4.

    The sign moves to bfloat16's sign bit. The other three bits move to the last two exponent bits and the first mantissa bit. This
    bfloat16 is 2^-126 times the e2m1 value. 2^126 and the scale are applied one after the other, because their product may
    overflow.
    """
    pairs = []
    for each in range(4):
        high = word << (12 - 4 * each)
        bits = (high & Uint32(0x80008000)) | ((high >> 6) & Uint32(0x01C001C0))
        pairs.append(scaled_pair(bits, scale))
    return pairs


def permuted(words: list[Any]) -> list[Any]:
    """Reorders 16-bit elements in groups of eight. Before, neighbours share a register; afterwards, elements j and j + 4 do."""
    pairs = []
    for eight in range(0, len(words), 4):
        for low in range(2):
            x, y = words[eight + low], words[eight + low + 2]
            pairs += [permute_bytes(x, y, 0x5410), permute_bytes(x, y, 0x7632)]
    return pairs


class Formats:
    """Loads and converts activations, weights and scales in the formats of a configuration."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.dtype = type_of(config.product_dtype)
        self.halves = config.tokens // 8
        self.words = config.elements // 2  # registers of the operands from one load of weights
        self.raw_words = config.elements * config.activation_bytes // 4  # registers of the matching activations as stored

    # -- activations, in shared memory ---------------------------------------------------------------------------------------------
    #
    # A vector is one 16-byte load of weights along a row. A plane holds 16 bytes of activation operands per vector. So lanes that
    # read consecutive vectors of a plane have no bank conflicts.

    def activation_pitch(self, call: Call):
        """Returns the distance between rows of activations in a plane, in bytes."""
        return call.at.chunk_bytes + QUAD_BYTES

    @cute.jit
    def wait_for_kernel_before(self, call: Call, tells: Boolean):
        """Waits until the preceding kernel has ended (PDL), because it may have written any input.

        Args:
            tells: whether the calling warp then arrives on ``call.ended``. Exactly one warp arrives, at its first wait.
        """
        cute.arch.griddepcontrol_wait()
        if tells:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(call.ended)

    @cute.jit
    def keep_activations(self, call: Call, done: Int32, first: Boolean):
        """Loads a chunk (a range of k) of the activations, and stores it as MMA operands in shared memory, with zeros beyond the
        ends of rows.

        Args:
            done: begin of the chunk, in bytes of this CTA's part of a row of weights.
            first: whether the calling warp must signal that the preceding kernel has ended; used only without scales.
        """
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        vectors = call.at.chunk_bytes // LOAD_BYTES
        pitch = self.activation_pitch(call)
        turns = 4 if const_expr(self.raw_words == 4) else 2
        for begin in cutlass.range(thread, call.m * vectors, turns * config.threads, unroll=1):
            raw = cute.make_rmem_tensor((turns, self.raw_words), Uint32)
            sources = []
            if const_expr(config.scales == "none"):
                # Addresses are computed before the wait, so that loads are issued immediately after the wait.
                sources = [self.source_of(call, begin + turn * config.threads, vectors, done) for turn in range(turns)]
                wait_after([from_ for from_, _ in sources])
                self.wait_for_kernel_before(call, first & (begin == thread))
            for turn in cutlass.range_constexpr(turns):
                if const_expr(config.scales == "none"):
                    from_, live = sources[turn]
                else:
                    from_, live = self.source_of(call, begin + turn * config.threads, vectors, done)
                for vector in cutlass.range_constexpr(self.raw_words // 4):
                    words = load_words_if(from_ + vector * 16, live)
                    for word in cutlass.range_constexpr(4):
                        raw[turn, vector * 4 + word] = words[word]
            for turn in cutlass.range_constexpr(turns):
                token, vector = self.place_of(call, begin + turn * config.threads, vectors)
                words = self.ordered([raw[turn, word] for word in range(self.raw_words)])
                if token < call.m:
                    for plane in cutlass.range_constexpr(config.planes):
                        to = call.at.activations + (plane * call.m + token) * pitch + vector * LOAD_BYTES
                        store_words_shared(to, words[plane * 4 : plane * 4 + 4])

    @cute.jit
    def copy_activations(self, call: Call, done: Int32, warp: Int32, first: Boolean):
        """Starts bulk copies of a chunk of the activations, unconverted, to shared memory, and writes zeros beyond the ends of
        rows.

        A phase of ``call.activated`` ends when the copies have completed.

        Args:
            done: begin of the chunk, in bytes of this CTA's part of a row of weights.
            first: whether this is the CTA's first chunk.
        """
        pitch = self.activation_pitch(call)
        size = cutlass.min(call.row_bytes - done, call.at.chunk_bytes)
        # Order earlier generic reads of this memory before the bulk copies' writes (async proxy).
        cute.arch.fence_view_async_shared()
        if warp == 0:
            self.wait_for_kernel_before(call, first)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(call.activated, call.m * size)
                if const_expr(self.config.pair):
                    for token in cutlass.range(call.rank, call.m, 2, unroll=1):
                        to = call.at.activations + token * pitch
                        bulk_load_to_pair(to, call.a.row(token) + done, size, call.activated.toint())
                else:
                    for token in cutlass.range(0, call.m, unroll=1):
                        from_ = call.a.row(token) + (call.begin + done)
                        bulk_load(call.at.activations + token * pitch, from_, size, call.activated.toint(), once=False)
        thread, _, _ = cute.arch.thread_idx()
        # The chunk may extend beyond the end of the rows.
        for vector in cutlass.range(size // LOAD_BYTES + thread % 16, call.at.chunk_bytes // LOAD_BYTES, 16, unroll=1):
            if thread // 16 < call.m:
                to = call.at.activations + thread // 16 * pitch + vector * LOAD_BYTES
                store_words_shared(to, [Uint32(0)] * 4)
        cute.arch.barrier(barrier_id=COMPUTING, number_of_threads=self.config.threads)

    def source_of(self, call: Call, index: Int32, vectors: Int32, done: Int32) -> Any:
        """Returns the global address of the activations that belong to vector number ``index`` of a chunk, and whether they
        exist."""
        token, vector = self.place_of(call, index, vectors)
        live = (token < call.m) & (done + vector * LOAD_BYTES < call.row_bytes)
        k = (call.begin + done) // LOAD_BYTES + vector
        return call.a.row(token) + k * (self.config.elements * self.config.activation_bytes), live

    def place_of(self, call: Call, index: Int32, vectors: Int32):
        """Returns the row, and the vector in that row, of vector number ``index`` over all rows of a chunk. ``vectors``: vectors
        per row; they are fewer than 2^17, so the division in float32 is exact."""
        token = Int32((Float32(index) + Float32(0.5)) * call.vectors_inverse)
        return token, index - token * vectors

    def ordered(self, raw: list[Any]) -> list[Any]:
        """Converts loaded activations, as words, to MMA operands in the order of the weights."""
        if self.config.activation_bytes == 1:
            return [pair for word in raw for pair in widen_fp8(self.dtype, word)]
        return permuted(raw) if self.config.weights == "mxfp4" else raw

    def activations_of(self, call: Call, half: int, unit_bytes: Int32):
        """Loads from shared memory the A operands that belong to the 16 bytes of weights at byte ``unit_bytes`` of the chunk.

        ``half``: the group of 8 rows of activations. Lanes whose row does not exist read the last row; their results are discarded.
        """
        row = cutlass.min(cute.arch.lane_idx() // 4 + half * 8, call.m - 1)
        pitch = self.activation_pitch(call)
        words = []
        for plane in range(self.config.planes):
            words += load_words("shared", call.at.activations + (plane * call.m + row) * pitch + unit_bytes, 4)
        return words

    # -- scales, in shared memory --------------------------------------------------------------------------------------------------

    @cute.jit
    def keep_scales(self, call: Call, begin: Int32, rows: Int32, done: Int32):
        """Loads the scales of a group of rows of weights (and of the activations) for a chunk, and stores them in shared memory.

        Args:
            begin: the group's first row of weights, relative to this CTA's first row.
            rows: number of rows of the group.
            done: begin of the chunk, in bytes of this CTA's part of a row of weights.
        """
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        if const_expr(config.scales == "row" and config.activation_bytes == 1):
            if thread < call.m:
                store_floats(
                    "shared", call.at.scales + thread * 4, [load_float_if(call.a_scale.at(thread, Int32(0), 4), thread < call.m)]
                )
        if const_expr(config.scales == "block"):
            blocks = call.at.chunk_bytes // BLOCK
            first = (call.begin + done) // BLOCK
            end = (call.begin + call.row_bytes + BLOCK - 1) // BLOCK
            beside = (call.first + begin) // BLOCK
            for index in cutlass.range(thread, blocks * (2 + call.m), config.threads, unroll=1):
                which = Int32((Float32(index) + Float32(0.5)) * (call.vectors_inverse * (BLOCK // LOAD_BYTES)))
                block = first + index - which * blocks
                inside = block < end
                number = Float32(1.0)
                if which < 2:
                    column = cutlass.min(beside + which, (call.n - 1) // BLOCK)
                    number = load_float_if(call.b_scale.at(block, column, 4), inside)
                else:
                    if const_expr(config.activation_bytes == 1):
                        number = load_float_if(call.a_scale.at(which - 2, block, 4), inside)
                store_floats("shared", call.at.scales + index * 4, [number])
        if const_expr(config.scales == "mx"):
            vectors = call.at.chunk_bytes // LOAD_BYTES
            first = (call.begin + done) // LOAD_BYTES
            turns = 8
            for index in cutlass.range(thread, rows * vectors, turns * config.threads, unroll=1):
                found = []
                for turn in cutlass.range_constexpr(turns):
                    row, vector = self.place_of(call, index + turn * config.threads, vectors)
                    live = (row < rows) & (done + vector * LOAD_BYTES < call.row_bytes)
                    found.append(load_byte_if(call.b_scale.at(first + vector, call.first + begin + row, 1), live))
                for turn in cutlass.range_constexpr(turns):
                    if index + turn * config.threads < rows * vectors:
                        write_byte(call.at.scales + index + turn * config.threads, found[turn])

    def scale_of(self, call: Call, row: Int32, unit_bytes: Int32):
        """Loads from shared memory the e8m0 scale of 16 bytes of mxfp4 weights; returns None for other weights.

        Args:
            row: the row of weights, relative to the group's first row.
            unit_bytes: begin of the 16 bytes in the chunk.
        """
        if self.config.scales != "mx":
            return None
        # A tile may extend past the group's last row.
        row = cutlass.min(row, GROUP - 1)
        return read_byte(call.at.scales + row * (call.at.chunk_bytes // LOAD_BYTES) + unit_bytes // LOAD_BYTES)

    # -- MMAs ----------------------------------------------------------------------------------------------------------------------

    @cute.jit
    def multiply(self, call: Call, acc: cute.Tensor, row: Int32, edge: Int32, unit_bytes: Int32, loads: list):
        """Accumulates the MMAs of one ring stage of a tile. With block scales, the MMAs of each load (64 bytes of a row, which are
        in one block) have a separate accumulator, which is scaled and added in float32.

        Args:
            row: the tile's first row of weights in the group.
            edge: the group's first row of weights whose scales are those of the next 128-row block; earlier rows use the scales of
                the block before.
            unit_bytes: begin of the lane's first load of weights in the chunk, in bytes.
            loads: the lane's loaded weights, four words per load.
        """
        config = self.config
        lane = cute.arch.lane_idx()
        # Two independent chains of MMAs hide their latency.
        sums = [[acc[index] for index in range(4)], [Float32(0.0)] * 4]
        for each in cutlass.range_constexpr(config.loads):
            here = unit_bytes + each * QUAD_BYTES
            words = self.widened(loads[each], self.scale_of(call, row + lane // 4, here))
            x = [self.activations_of(call, half, here) for half in range(self.halves)]
            if const_expr(config.scales == "block"):
                apart = self.chain(x, words, [[Float32(0.0)] * 4] * 2)
                blocks = call.at.chunk_bytes // BLOCK
                smem_at = call.at.scales + (here - lane % 4 * LOAD_BYTES) // BLOCK * 4
                pair = [load_floats("shared", smem_at, 1), load_floats("shared", smem_at + blocks * 4, 1)]
                for half in cutlass.range_constexpr(self.halves):
                    token = cutlass.min(lane // 4 + half * 8, call.m - 1)
                    other = load_floats("shared", smem_at + (2 + token) * blocks * 4, 1)
                    for column in cutlass.range_constexpr(2):
                        scale = cutlass.select_(row + (lane % 4 * 2 + column) < edge, pair[0], pair[1])
                        index = 2 * half + column
                        sums[0][index] += (apart[0][index] + apart[1][index]) * (scale * other)
            else:
                sums = self.chain(x, words, sums)
        for index in cutlass.range_constexpr(4):
            acc[index] = sums[0][index] + sums[1][index]

    def widened(self, words: Any, byte: Any) -> Any:
        """Converts one 16-byte load of weights to B operands. ``byte``: the e8m0 scale of mxfp4 weights."""
        if self.config.weights == "mxfp4":
            # e8m0 is bfloat16's exponent field, except for 2^-127, which is subnormal, and NaN.
            bits = (byte << 7) | cutlass.select_((byte == 0) | (byte == 255), Uint32(0x40), Uint32(0))
            scale = bits | (bits << 16)
            return [pair for word in words for pair in widen_mxfp4(word, scale)]
        if self.config.weights != "dense":
            return [pair for word in words for pair in widen_fp8(self.dtype, word)]
        return words

    def chain(self, x: list, weights: Any, sums: Any) -> Any:
        """Accumulates the MMAs of one 16-byte load of weights, alternately in the two accumulators of ``sums``."""
        zero = Uint32(0)
        sums = [*sums]
        for step in range(self.words // 2):
            low, high = 2 * step, 2 * step + 1
            if self.halves == 2:
                left = [x[0][low], x[1][low], x[0][high], x[1][high]]
            else:
                left = [x[0][low], zero, x[0][high], zero]
            sums[step % 2] = [*mma_m16n8k16(self.dtype, sums[step % 2], left, weights[low : high + 1])]
        return sums
