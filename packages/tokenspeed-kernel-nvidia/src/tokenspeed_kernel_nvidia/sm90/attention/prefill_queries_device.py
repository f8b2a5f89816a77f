"""Queries of `prefill_mma_device` beside an fp8 cache of 16 bits."""

# mypy: ignore-errors

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Uint32, const_expr, cute

from tokenspeed_kernel_nvidia.sm90.attention.prefill_tile_device import Shared, Tiles
from tokenspeed_kernel_nvidia.sm90.common import registers_device as registers
from tokenspeed_kernel_nvidia.sm90.common.memory_device import load_words, store_words_shared
from tokenspeed_kernel_nvidia.sm90.common.pipeline_device import Cursor

WARPS = 5  # named barriers, one for each warpgroup: its four warps


class Queries(Tiles):
    """What the warpgroups that compute do to a tile's queries."""

    @cute.jit
    def place(self, wg: Int32):
        """This thread's number among the consumers, and the first of its rows of a tile; the other one is 8 below.

        Computed anew wherever it is wanted: what follows from it would cost registers in the loops, which have none to spare.
        """
        thread = registers.opt_barrier(cute.arch.thread_idx()[0]) - 128
        if const_expr(self.config.converts):
            wg = thread // 128
        return thread, wg * 64 + (thread % 128) // 32 * 16 + thread % 32 // 4

    @cute.jit
    def sync_warps(self, wg: Int32):
        """Synchronises the four warps of a warpgroup."""
        cute.arch.barrier(barrier_id=WARPS + wg, number_of_threads=128)

    @cute.jit
    def bring_to_float16(self, shared: Shared, q_at: Cursor, wg: Int32) -> Float32:
        """Rounds this warp's bfloat16 queries of a tile to float16, where they are, times a power of 2.

        That one brings the largest of them to the upper end of float16's range, so that the others keep all their bits unless they
        are 2^-22 of it. Rows that are not the sequence's become 0: they must not choose the power.

        Returns:
            what scores are to be multiplied with again.
        """
        c = self.config
        thread, _ = self.place(wg)
        # Two lanes have a row: a panel each, or half a panel. They go through its pieces from different ones on, to find them in
        # different banks.
        row = wg * 64 + thread % 128 // 2
        half = thread % 2
        record = shared.record(q_at)
        at = shared.storage.q.data_ptr().toint() + q_at.stage * c.q_bytes + row * 128
        pieces = c.head_dim // 16  # of a lane
        if const_expr(pieces == 8):
            at += half * (c.block_m * 128)
            places = [at + (row + 4 * half + i) % 8 * 16 for i in range(pieces)]
        else:
            places = [at + (half * 4 + (row + i) % 4) * 16 for i in range(pieces)]
        words = cute.make_rmem_tensor(4 * pieces, Uint32)
        for i in cutlass.range_constexpr(pieces):
            loaded = load_words("shared", places[i], 4)
            for each in cutlass.range_constexpr(4):
                words[4 * i + each] = loaded[each]
        if record.position + row // c.gqa_ratio >= record.q_len:
            words.fill(0)
        highest = Uint32(0)
        for i in cutlass.range_constexpr(4 * pieces):
            highest = cutlass.max(highest, cutlass.max((words[i] << 16) & 0x7FFFFFFF, words[i] & 0x7FFFFFFF))
        factor, inverse = registers.factors_of_float16(Int32(highest))
        for i in cutlass.range_constexpr(pieces):
            halves = [registers.widened(self.dtype, words[4 * i + each]) for each in range(4)]
            store_words_shared(places[i], [registers.pack(self.mma_dtype, low * factor, high * factor) for low, high in halves])
        cute.arch.fence_view_async_shared()
        self.sync_warps(wg)
        return inverse

    @cute.jit
    def bring_panels_to_float16(self, shared: Shared, q_at: Cursor, wg: Int32) -> Float32:
        """`bring_to_float16` where a lane has two panels of a row, more than its registers hold: they are read twice."""
        c = self.config
        thread, _ = self.place(wg)
        row = wg * 64 + thread % 128 // 2
        half = thread % 2
        record = shared.record(q_at)
        is_row = record.position + row // c.gqa_ratio < record.q_len
        panel_bytes = c.block_m * 128
        at = shared.storage.q.data_ptr().toint() + row * 128 + half * (2 * panel_bytes)
        # A lane's neighbour reads the same columns of other panels: it begins half a row further.
        places = [at + panel * panel_bytes + (row + 4 * half + i) % 8 * 16 for panel in range(2) for i in range(8)]
        highest = Uint32(0)
        for i in cutlass.range_constexpr(len(places)):
            loaded = load_words("shared", places[i], 4)
            for word in loaded:
                highest = cutlass.max(highest, cutlass.max((word << 16) & 0x7FFFFFFF, word & 0x7FFFFFFF))
        if not is_row:
            highest = Uint32(0)
        factor, inverse = registers.factors_of_float16(Int32(highest))
        for i in cutlass.range_constexpr(len(places)):
            words = [cutlass.select_(is_row, word, Uint32(0)) for word in load_words("shared", places[i], 4)]
            halves = [registers.widened(self.dtype, word) for word in words]
            store_words_shared(places[i], [registers.pack(self.mma_dtype, low * factor, high * factor) for low, high in halves])
        cute.arch.fence_view_async_shared()
        self.sync_warps(wg)
        return inverse
