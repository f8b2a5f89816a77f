"""The two value warpgroups of `mla_decode` with an fp8 cache.

fp8 wgmma takes K-major operands only. Here k is the token axis, and values are contiguous along the columns instead. So P @ V is
computed swap-AB: the A operand, values transposed to columns x tokens, comes from registers, loaded by ldmatrix.trans, which
transposes pairs of bytes. The accumulator has columns of the latent as rows, and heads as columns.

Tokens are in the order of the probabilities, as in `prefill.convert_device`: of 32 tokens, position ``16 h + 4 t + e`` holds token
``16 h + 8 (e // 2) + 2 t + e % 2``.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Uint32, cute
from cutlass.cute.nvgpu import warpgroup

from tokenspeed_kernel_nvidia.cutedsl import registers_device as registers
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Cursor
from tokenspeed_kernel_nvidia.cutedsl.registers_device import pack, permute_bytes, store_floats, store_if
from tokenspeed_kernel_nvidia.cutedsl.scales_device import Scales
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.config import ROWS
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.fp8_config import STEP
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.fp8_tile_device import CHUNK_BYTES, FP8, Fp8Tiles
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.store_device import CHUNK, Split
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.tile_device import LATENT_CHUNK, LATENT_CHUNKS, NOTES, READERS, Call
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.value_device import Valuer
from tokenspeed_kernel_nvidia.sm90.common.wgmma_device import make_pv_mma

OWN = LATENT_CHUNKS // READERS  # chunks of a warpgroup
TILES = LATENT_CHUNK // 64  # tiles of 64 columns in a chunk
GROUPS = ROWS // 8  # groups of 8 heads
TOKEN_STEPS = ROWS // STEP  # MMAs of a tile and a block
COPIED = 4  # named barriers, one per value warpgroup, for `kept_sums`


@dataclass(frozen=True)
class ValueOperands:
    """MMA operands of V.T @ P.T.

    Attributes:
        values: A operand in registers, of `Fp8Config.value_buffers` tiles.
        words: the same registers as 32-bit words.
        probs: B operand: shared-memory descriptors of probabilities, by stage.
    """

    values: cute.Tensor
    words: cute.Tensor
    probs: cute.Tensor


class Fp8Valuer(Fp8Tiles, Valuer):
    """Mixin of the value warpgroups.

    In each tile of its two chunks, a thread holds two adjacent columns of 16 heads: those of ``head_of``.
    """

    def make_pv_mma(self) -> cute.TiledMma:
        return make_pv_mma(FP8, ROWS)

    def operands_of_values(self, call: Call, part: Any) -> ValueOperands:
        values = part.make_fragment_A(part.partition_shape_A((ROWS, self.config.value_buffers * ROWS)))
        probs = part.make_fragment_B(part.partition_B(self.ropes.tiles(call.storage.ropes, dtype=FP8)))
        return ValueOperands(values, cute.recast_tensor(values, Uint32), probs)

    def accumulators(self, part: Any) -> list:
        return [cute.make_rmem_tensor(part.partition_shape_C((ROWS, ROWS)), Float32) for _ in range(OWN * TILES)]

    def make_sums(self) -> tuple:
        """Returns no registers: row max and row sum of a thread's 16 heads stay in shared memory, see `kept_sums`."""
        return None, None

    def head_of(self, thread: Int32, group: int, c: int) -> Int32:
        """Returns the row of one of a thread's 16 heads in the tile, whose rows are the heads of all its tokens."""
        return 8 * group + 2 * (thread & 3) + c

    @cute.jit
    def multiply_values(
        self, call: Call, atom: cute.MmaAtom, ops: ValueOperands, acc: list, at: Cursor, second: Cursor, rope_at: Cursor
    ):
        """Waits for a block's probabilities, rescales, and adds its V.T @ P.T. Its values must have been loaded."""
        # By then the score warpgroup has also zeroed the values of slots without a token.
        call.probs_full.wait(rope_at)
        self.rescale(call, acc, rope_at)
        value_buffers = self.config.value_buffers
        for tile in cutlass.range_constexpr(len(acc)):
            cursor = second if tile // TILES else at
            if cutlass.const_expr(tile >= value_buffers):
                warpgroup.wait_group(value_buffers - 1)
            self.transpose_tile(call, ops.words, cursor, tile)
            warpgroup.fence()
            for step in cutlass.range_constexpr(TOKEN_STEPS):
                v = ops.values[None, None, tile % value_buffers * TOKEN_STEPS + step]
                cute.gemm(atom, acc[tile], v, ops.probs[None, None, step, rope_at.stage], acc[tile])
            warpgroup.commit_group()
        warpgroup.wait_group(0)
        self.release(call.latent_chunks.empty, at)
        self.release(call.latent_chunks.empty, second)

    @cute.jit
    def transpose_tile(self, call: Call, words: cute.Tensor, at: Cursor, tile: cutlass.Constexpr[int]):
        """Loads a tile of a chunk to registers, transposed."""
        thread = self.thread_of_values()
        lane, warp = thread & 31, (thread >> 5) & 3
        address = self.panel_at(call, at, 0) + lane * LATENT_CHUNK + ((warp + 4 * (tile % TILES)) ^ (lane & 7)) * CHUNK_BYTES
        for step in cutlass.range_constexpr(TOKEN_STEPS):
            found = registers.ldmatrix(address + step * (STEP * LATENT_CHUNK), True)
            first = (tile % self.config.value_buffers * TOKEN_STEPS + step) * 4
            for half in cutlass.range_constexpr(2):
                for odd in cutlass.range_constexpr(2):
                    word = permute_bytes(found[2 * half], found[2 * half + 1], (0x6420, 0x7531)[odd])
                    words[first + 2 * half + odd] = word

    @cute.jit
    def rescale(self, call: Call, acc: list, at: Cursor):
        """Rescales heads whose max has grown, and accumulates the factors that their accumulators in memory still need."""
        notes = call.notes(at)
        grown = registers.load_floats("shared", notes.grown(Int32(0)).toint(), 4)
        if grown[0] + grown[1] + grown[2] + grown[3] != 0.0:
            thread = self.thread_of_values()
            kept = self.factors_of(call, thread >> 7) + (thread & 127)
            kept[0] = kept[0] * notes.factor(thread & (ROWS - 1))[0]
            for pair in cutlass.range_constexpr(GROUPS // 2):
                for c in cutlass.range_constexpr(2):
                    thread = self.thread_of_values()
                    factors = [notes.factor(self.head_of(thread, 2 * pair + group, c))[0] for group in range(2)]
                    for tile in cutlass.range_constexpr(len(acc)):
                        for each, element in enumerate(self.elements_of(pair, c)):
                            acc[tile][element] = acc[tile][element] * factors[each // 2]

    @cute.jit
    def group_of(self, call: Call) -> Int32:
        """Returns this CTA's group, recomputed at each use: see `opt_barrier`."""
        cta, _, _ = cute.arch.block_idx()
        return registers.opt_barrier(cta) // self.config.ranks

    def elements_of(self, pair: int, c: int) -> list[int]:
        """Returns the indices of the accumulator elements that are stored together in a partial result: two columns of a head, then
        the same columns of the head 8 further."""
        return [8 * pair + 4 * group + 2 * odd + c for group in range(2) for odd in range(2)]

    @cute.jit
    def own_sums(self, call: Call, pair: cutlass.Constexpr[int], tile: cutlass.Constexpr[int], c: cutlass.Constexpr[int]):
        """Returns the address of a thread's float32 accumulators of a tile while a work item is in progress.

        They lie in the slot of the group's second partial result, that of its last item, where the thread will store it in the end.
        """
        _, values_at = self.partial_at(call, self.group_of(call), Int32(0))
        return values_at + self.own_offset(self.thread_of_values(), pair, tile, c)

    @cute.jit
    def own_offset(self, thread: Int32, pair: cutlass.Constexpr[int], tile: cutlass.Constexpr[int], c: cutlass.Constexpr[int]):
        """Returns the byte offset of a thread's `elements_of` in a partial result."""
        lane = thread & 31
        chunk = self.first_column(thread, thread >> 7, tile) // CHUNK + (lane >> 4)
        return self.values_offset(Int32(pair), chunk) + ((2 * (lane & 3) + c) * 4 + ((lane >> 2) & 3)) * 16

    @cute.jit
    def take_blocks(
        self,
        call: Call,
        atom: cute.MmaAtom,
        ops: ValueOperands,
        acc: list,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        at: Cursor,
        rope_at: Cursor,
        count: Int32,
    ):
        """Adds V.T @ P.T of all blocks of a work item; with many blocks, accumulates in memory: see `Fp8Config.summed`."""
        self.begin_sums(call, Float32(0.0))
        index = Int32(0)
        while index < count:
            for tile in cutlass.range_constexpr(len(acc)):
                acc[tile].fill(0.0)
            stop = cutlass.min(index + self.config.summed, count)
            while index < stop:
                at, rope_at = self.take_block(call, atom, ops, acc, row_max, row_sum, at, rope_at, index == count - 1)
                index += 1
            if index < count:
                self.add_sums(call, acc)
                self.begin_sums(call, Float32(1.0))
        return at, rope_at

    @cute.jit
    def begin_sums(self, call: Call, factor: Float32):
        """Sets the factors of all heads' accumulators in memory; 0 before there are any."""
        thread = self.thread_of_values()
        self.meet_others(thread)
        (self.factors_of(call, thread >> 7) + (thread & 127))[0] = factor

    @cute.jit
    def add_sums(self, call: Call, acc: list):
        """Adds the accumulators in registers to those in memory."""
        self.meet_others(self.thread_of_values())
        for pair in cutlass.range_constexpr(GROUPS // 2):
            for c in cutlass.range_constexpr(2):
                for tile in cutlass.range_constexpr(len(acc)):
                    sums = self.whole_sums(call, acc, pair, tile, c)
                    store_floats("global", self.own_sums(call, pair, tile, c), sums)

    @cute.jit
    def whole_sums(
        self,
        call: Call,
        acc: list,
        pair: cutlass.Constexpr[int],
        tile: cutlass.Constexpr[int],
        c: cutlass.Constexpr[int],
    ):
        """Returns `elements_of` of the accumulators in registers, plus those in memory times their factors."""
        thread = self.thread_of_values()
        kept = self.factors_of(call, thread >> 7) + self.head_of(thread, 2 * pair, c)
        factors = [kept[8 * group] for group in range(2)]
        found = registers.load_floats_if((factors[0] != 0.0) | (factors[1] != 0.0), self.own_sums(call, pair, tile, c), 4)
        return [acc[tile][element] + found[each] * factors[each // 2] for each, element in enumerate(self.elements_of(pair, c))]

    def meet_others(self, thread: Int32) -> None:
        """Barrier of this warpgroup."""
        cute.arch.barrier(barrier_id=COPIED + (thread >> 7), number_of_threads=128)

    def factors_of(self, call: Call, half: Int32) -> cute.Pointer:
        """Returns the address of a warpgroup's factors of the heads' accumulators in memory.

        Each thread keeps one factor; the upper 64 threads duplicate those of the lower 64.
        """
        return call.storage.notes.data_ptr() + self.config.stages * NOTES + READERS * 2 * ROWS + half * (2 * ROWS)

    @cute.jit
    def read_sums(self, call: Call, row_max: cute.Tensor, row_sum: cute.Tensor, at: Cursor):
        """Copies row max and row sum from the notes of a work item's last block to this warpgroup's `kept_sums`."""
        thread = self.thread_of_values()
        # All warps have read those of the previous work item.
        self.meet_others(thread)
        self.sums_of(call, thread >> 7, Int32(0))[thread & 127] = call.notes(at).sums(Int32(0))[thread & 127]
        self.meet_others(thread)

    def sums_of(self, call: Call, half: Int32, row: Int32) -> cute.Pointer:
        """Returns the address of a row's max and sum in `kept_sums`."""
        return call.storage.notes.data_ptr() + self.config.stages * NOTES + (half * ROWS + row) * 2

    @cute.jit
    def value_scale(self, call: Call) -> Float32:
        return Scales(call.kv_scale, Int32(0)).of(Int32(0))

    def first_column(self, thread: Int32, half: Int32, tile: int) -> Int32:
        """Returns the first of a warp's 16 columns of a tile. A thread holds the two at ``lane // 4 * 2``."""
        return (half + tile // TILES * READERS) * LATENT_CHUNK + (tile % TILES) * 64 + ((thread >> 5) & 3) * 16

    def has_row(self, thread: Int32, half: Int32) -> Boolean:
        """Returns whether this thread writes the per-row values of the row ``thread % 128``."""
        return (half == 0) & ((thread & 127) < ROWS)

    @cute.jit
    def write_partial(
        self, call: Call, acc: list, row_max: cute.Tensor, row_sum: cute.Tensor, item: Int32, half: Int32, split: Split
    ):
        thread = self.thread_of_values()
        sums_at, values_at = self.partial_at(call, split.first_group, self.group_of(call) - split.first_group)
        _, _, tokens = self.tile_of(call, item)
        rows = tokens * self.config.heads_of_tile
        own = self.sums_of(call, half, thread & (ROWS - 1))
        store_if(self.has_row(thread, half) & ((thread & 127) < rows), sums_at + (thread & 127) * 8, [own[0], own[1]])
        scale = self.value_scale(call)
        for pair in cutlass.range_constexpr(GROUPS // 2):
            for tile in cutlass.range_constexpr(len(acc)):
                for c in cutlass.range_constexpr(2):
                    to = values_at + self.own_offset(thread, pair, tile, c)
                    sums = self.whole_sums(call, acc, pair, tile, c)
                    store_if(pair * 16 < rows, to, [each * scale for each in sums])

    @cute.jit
    def write_output(self, call: Call, acc: list, row_max: cute.Tensor, row_sum: cute.Tensor, item: Int32, half: Int32):
        scale = self.value_scale(call)
        for pair in cutlass.range_constexpr(GROUPS // 2):
            for c in cutlass.range_constexpr(2):
                thread = self.thread_of_values()  # recomputed, so that addresses of all heads do not take registers at once
                targets, factors = [], []
                for group in cutlass.range_constexpr(2):
                    head = self.head_of(thread, 2 * pair + group, c)
                    targets.append(self.row_of(call, item, head))
                    factors.append(self.factor_of(self.sums_of(call, half, head)[1]) * scale)
                for tile in cutlass.range_constexpr(len(acc)):
                    sums = self.whole_sums(call, acc, pair, tile, c)
                    column = self.first_column(thread, half, tile) + ((thread & 31) >> 2) * 2
                    for group, (to, exists) in enumerate(targets):
                        even, odd = (sums[2 * group + each] * factors[group] for each in range(2))
                        store_if(exists, to + column * 2, [pack(self.dtype, even, odd)])
        thread = self.thread_of_values()
        row = thread & (ROWS - 1)
        _, exists = self.row_of(call, item, row)
        own = self.sums_of(call, half, row)
        to, value = self.lse_of(call, item, row, own[0], own[1])
        store_if(self.has_row(thread, half) & exists & (call.lse != 0), to, [value])
