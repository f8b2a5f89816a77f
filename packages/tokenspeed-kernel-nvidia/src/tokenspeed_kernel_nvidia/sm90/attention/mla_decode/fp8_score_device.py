"""q @ k of the score warpgroup with an fp8 cache: the counterpart of `score_device`."""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Uint32, const_expr, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from tokenspeed_kernel_nvidia.cutedsl import registers_device as registers
from tokenspeed_kernel_nvidia.cutedsl.memory_device import load_words
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Cursor, advance
from tokenspeed_kernel_nvidia.cutedsl.registers_device import dtype_of
from tokenspeed_kernel_nvidia.cutedsl.scales_device import Scales
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.config import ROPE, ROWS
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.fp8_config import STEP, STEPS, Fp8Config
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.score_device import (
    Operands,
    QkMmas,
    finish_scores,
    lane_offset,
    release_queries,
)
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.tile_device import (
    FP8,
    FP8_CHUNK_BYTES,
    LATENT_CHUNK,
    LATENT_CHUNKS,
    PANEL_BYTES,
    SCORED,
    Call,
    SharedMemory,
    thread_of_scores,
)
from tokenspeed_kernel_nvidia.sm90.common.wgmma_device import make_qk_mma

ROPE_STEPS = ROPE // STEP  # k-steps of the rotary part, which are issued first
CHUNK_STEPS = LATENT_CHUNK // STEP  # k-steps of a latent chunk


@dataclass(frozen=True)
class Fp8QkMma:
    """The score warpgroup's q @ k with e4m3 MMAs."""

    config: Fp8Config
    memory: SharedMemory
    every_factor = True  # `Notes` also hold the rescale factors of rows whose max has not grown, which are 1

    def make_mmas(self) -> QkMmas:
        """Returns the tiled MMAs of 64 query rows by 64 keys."""
        operands = warpgroup.OperandSource.RMEM, OperandMajorMode.K, OperandMajorMode.K
        op = warpgroup.MmaF8Op(FP8, FP8, Float32, (ROWS, ROWS, STEP), *operands)
        return QkMmas(cute.make_tiled_mma(op, cute.make_layout((1, 1, 1))), make_qk_mma(FP8, ROWS))

    def operands(self, call: Call, mmas: QkMmas, thread: Int32) -> Operands:
        """Returns this thread's operands of q @ k. Those in shared memory (``others``) are the low parts of 16-bit queries, or None
        with e4m3 queries. ``thread``: its index in the score warpgroup."""
        kept, others = mmas.kept.get_slice(thread), mmas.others.get_slice(thread)
        q = kept.make_fragment_A(kept.partition_shape_A((ROWS, self.config.kept)))
        keys = [
            kept.make_fragment_B(kept.partition_B(ring.tiles(memory, dtype=FP8)))
            for ring, memory in ((self.memory.latent_chunks, call.storage.latent_chunks), (self.memory.ropes, call.storage.ropes))
        ]
        low = None
        if self.config.others:
            low = others.make_fragment_A(others.partition_A(self.memory.others.tiles(call.storage.others, dtype=FP8)))
        return Operands(q, cute.recast_tensor(q, Uint32), low, *keys)

    # -- queries ---------------------------------------------------------------------------------------------------------------

    def take_queries(self, call: Call, words: cute.Tensor, at: Cursor, rope_at: Cursor):
        """Loads a tile of queries from the rings to registers, and releases their ring stages. See `QkMma.take_queries`."""
        take = self.take_narrow if self.config.fp8_queries else self.take_wide
        return take(call, words, at, rope_at)

    @cute.jit
    def take_narrow(self, call: Call, words: cute.Tensor, at: Cursor, rope_at: Cursor):
        """Does `take_queries` for e4m3 queries."""
        c = self.config
        thread = thread_of_scores()
        call.ropes.wait(rope_at)
        row = (thread >> 5) * 16 + (thread & 15)
        offset = row * ROPE + (((thread >> 4) & 1) ^ ((row >> 1) & 3)) * FP8_CHUNK_BYTES
        for step in cutlass.range_constexpr(ROPE_STEPS):
            put_words(words, step, registers.ldmatrix(self.memory.rope_at(call, rope_at) + (offset ^ (step * STEP)), False))
        first = at
        offset = lane_offset(thread)
        for chunk in cutlass.range_constexpr(LATENT_CHUNKS):
            call.latent_chunks.wait(at)
            for step in cutlass.range_constexpr(CHUNK_STEPS):
                four = registers.ldmatrix(self.memory.panel_at(call, at, 0) + (offset ^ (step * STEP)), False)
                put_words(words, ROPE_STEPS + chunk * CHUNK_STEPS + step, four)
            at = advance(at, c.latent_chunks)
        cute.arch.fence_view_async_shared()
        release_queries(self.memory, call, first)
        scale = scale_of(call)
        return at, (scale, scale)

    @cute.jit
    def take_wide(self, call: Call, words: cute.Tensor, at: Cursor, rope_at: Cursor):
        """Does `take_queries` for 16-bit queries: splits each query into two e4m3 parts.

        A query row is first scaled by a power of 2 that moves its amax to between 2^7 and 2^8. Significant low parts then do not
        underflow in e4m3.
        """
        c = self.config
        thread = thread_of_scores()
        lane = thread & 31
        row = (thread >> 5) * 16 + (lane >> 2)
        offset = row * (LATENT_CHUNK) + (((lane >> 1) & 1) ^ (row & 7)) * FP8_CHUNK_BYTES + (lane & 1) * 8
        first = at
        largest = [Float32(0.0), Float32(0.0)]
        for _ in cutlass.range_constexpr(c.query_chunks):
            call.latent_chunks.wait(at)
            for step in cutlass.range_constexpr(2):
                for each in cutlass.range_constexpr(4):
                    values = self.four_elements(call, at, offset, step, each)
                    for x in values:
                        largest[each % 2] = cute.arch.fmax(largest[each % 2], cute.math.absf(x))
            at = advance(at, c.latent_chunks)
        scale = scale_of(call)
        factors, scales = [], []
        for r in cutlass.range_constexpr(2):
            total = registers.quad_max(largest[r])
            # Exponents are biased float32 exponents: 127 is 2^0. The result is clamped, so that the scale of tiny rows stays
            # finite.
            exponent = cutlass.min(Int32(127 + 7 + 127) - (registers.bits_of(total) >> 23), 253)
            factors.append(registers.float_of(exponent << 23))
            scales.append(scale * registers.float_of((254 - exponent) << 23))
        others = call.storage.others.data_ptr().toint() + lane_offset(thread)
        # Wait until all warps have finished q @ k of the previous work item.
        cute.arch.barrier(barrier_id=SCORED, number_of_threads=128)
        at = first
        for chunk in cutlass.range_constexpr(c.query_chunks):
            for step in cutlass.range_constexpr(2):
                index = (chunk * 2 + step + ROPE_STEPS) % STEPS  # the rotary part comes first
                high, low = [], []
                for each in cutlass.range_constexpr(4):
                    values = [x * factors[each % 2] for x in self.four_elements(call, at, offset, step, each)]
                    high.append(registers.pack_fp8(*values))
                    rounded = [x for pair in registers.widen_fp8(cutlass.Float16, high[each]) for x in floats_of_pair(pair)]
                    low.append(registers.pack_fp8(*(x - y for x, y in zip(values, rounded, strict=True))))
                put_words(words, index, high)
                if const_expr(index < c.low_kept):
                    put_words(words, STEPS + index, low)
                else:
                    other = index - c.low_kept
                    to = (others ^ (other % CHUNK_STEPS * STEP)) + other // CHUNK_STEPS * PANEL_BYTES
                    registers.stmatrix(to, low)
            at = advance(at, c.latent_chunks)
        cute.arch.fence_view_async_shared()
        release_queries(self.memory, call, first)
        cute.arch.barrier(barrier_id=SCORED, number_of_threads=128)
        return at, (scales[0], scales[1])

    @cute.jit
    def four_elements(self, call: Call, at: Cursor, offset: Int32, step: cutlass.Constexpr[int], each: cutlass.Constexpr[int]):
        """Returns four adjacent elements of 16-bit queries, which one word of an fp8 A operand will hold.

        Args:
            at: the ring stage that holds the queries.
            offset: the lane's byte offset in the stage.
            step: index of the group of 32 columns in the stage.
            each: index of the word: row ``each % 2``, columns from ``16 * (each // 2)`` on within the group of 32 columns.
        """
        to = self.memory.panel_at(call, at, 0) + each % 2 * (8 * LATENT_CHUNK) + (offset ^ (step * 64 + each // 2 * 32))
        return [x for word in load_words("shared", to, 2) for x in registers.widened(dtype_of(self.config.dtype), word)]

    # -- scores ----------------------------------------------------------------------------------------------------------------

    @cute.jit
    def multiply(self, call: Call, mmas: QkMmas, ops: Operands, at: Cursor, rope_at: Cursor, is_first: cutlass.Boolean):
        """Computes q @ k of a block. Returns the scores, and the latent ring's cursor of the next block. See `QkMma.multiply`."""
        c = self.config
        scores = cute.make_rmem_tensor(mmas.kept.get_slice(0).partition_shape_C((ROWS, ROWS)), Float32)
        kept, others = cute.make_mma_atom(mmas.kept.op), cute.make_mma_atom(mmas.others.op)
        kept.set(warpgroup.Field.ACCUMULATE, False)
        others.set(warpgroup.Field.ACCUMULATE, True)
        call.ropes.wait(rope_at)
        warpgroup.fence()
        for step in cutlass.range_constexpr(ROPE_STEPS):
            self.multiply_step(kept, others, ops, scores, ops.ropes[None, None, step, rope_at.stage], step)
        for chunk in cutlass.range_constexpr(LATENT_CHUNKS):
            call.latent_chunks.wait(at)
            # opt_barrier keeps the compiler from computing the descriptors of all chunks early, which would take too many
            # registers.
            stage = cute.arch.make_warp_uniform(registers.opt_barrier(at.stage))
            for step in cutlass.range_constexpr(CHUNK_STEPS):
                index = ROPE_STEPS + chunk * CHUNK_STEPS + step
                self.multiply_step(kept, others, ops, scores, ops.latents[None, None, step, stage], index)
                if const_expr(not c.at_once and index == STEPS - 1 - c.tail):
                    warpgroup.commit_group()
            at = advance(at, c.latent_chunks)
        finish_scores(c, call, rope_at, is_first)
        return scores, at

    def multiply_step(
        self, kept: cute.MmaAtom, others: cute.MmaAtom, ops: Operands, scores: cute.Tensor, keys: cute.Tensor, index: int
    ) -> None:
        """Issues the MMAs of one k-step: those of the high query parts, and those of the low parts if there are any."""
        c = self.config
        cute.gemm(kept, scores, ops.kept[None, None, index], keys, scores)
        kept.set(warpgroup.Field.ACCUMULATE, True)
        if c.query_parts == 2:
            if index < c.low_kept:
                cute.gemm(kept, scores, ops.kept[None, None, STEPS + index], keys, scores)
            else:
                cute.gemm(others, scores, ops.others[None, None, index - c.low_kept, 0], keys, scores)

    @cute.jit
    def store_probs(self, to: Int32, offset: Int32, probs: cute.Tensor):
        """Stores probabilities as e4m3, in the token order of `fp8_value_device`."""
        thread = thread_of_scores()
        lane = thread & 31
        for r in cutlass.range_constexpr(2):
            words = []
            for sixteen in cutlass.range_constexpr(ROWS // 16):
                first = 8 * sixteen + 2 * r
                words.append(registers.pack_fp8(*(probs[first + each] for each in (0, 1, 4, 5))))
            row = (thread >> 5) * 16 + 8 * r + (lane & 7)
            registers.stmatrix(to + row * ROPE + ((lane >> 3) ^ ((row >> 1) & 3)) * FP8_CHUNK_BYTES, words)


@cute.jit
def scale_of(call: Call) -> Float32:
    """Returns the factor of q @ k: ``call.scale`` times q_scale times kv_scale."""
    return call.scale * Scales(call.q_scale, Int32(0)).of(Int32(0)) * Scales(call.kv_scale, Int32(0)).of(Int32(0))


def put_words(words: cute.Tensor, step: int, four: list) -> None:
    """Puts the four words of a k-step's A fragment into the registers ``words``."""
    for each in range(4):
        words[step * 4 + each] = four[each]


def floats_of_pair(pair: Uint32) -> list:
    """Converts the two float16 values of a register to float32."""
    return registers.widened(cutlass.Float16, pair)
