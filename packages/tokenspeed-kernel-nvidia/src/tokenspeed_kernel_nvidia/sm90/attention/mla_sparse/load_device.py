"""The producer warpgroup of `kernel_device`, which runs the tile scheduler, and gathers the selected keys of each token."""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint16, cute

from tokenspeed_kernel_nvidia.cutedsl.memory_device import copy_piece
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Cursor, advance, first_to_fill
from tokenspeed_kernel_nvidia.cutedsl.registers_device import ballot, load_int
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.config import LATENT, ROWS
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.scheduler_device import DecodeWork, blocks_of, publish_plan
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.tile_device import (
    CHUNK_PANELS,
    LATENT_CHUNK,
    LATENT_CHUNKS,
    PANEL_BYTES,
    STARTING,
    Call,
    SharedMemory,
    Table,
)
from tokenspeed_kernel_nvidia.sm90.attention.mla_sparse.config import Config
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import PANEL

WARPS = 4  # gathering warps
OWN = ROWS // WARPS  # rows (keys) of a block that a warp gathers
CHUNK = 16  # bytes per cp.async
LANES = PANEL * 2 // CHUNK  # lanes that copy one row of a panel
TOGETHER = 32 // LANES  # rows of a panel that a warp copies per instruction
TURNS = OWN // TOGETHER  # instructions in which a warp copies its rows of a panel


@dataclass(frozen=True)
class Gatherer:
    """The producer warpgroup.

    16-byte cp.async instructions copy keys to their positions in the 128-byte swizzle. Rows of a block without a selected key are
    zeroed, because their latents are values too, and 0 * NaN is not 0. The scores of such rows are masked, see `GatherMask`.
    """

    config: Config
    memory: SharedMemory
    work: DecodeWork

    @cute.jit
    def gather(self, call: Call, q: Table, kv: Table, warp: Int32):
        """Finds this CTA's work items, and gathers queries and blocks of keys as far ahead as the rings allow.

        Args:
            q: the queries, with tokens as rows and heads as columns.
            kv: the cache, with pages as rows and slots as columns.
            warp: this warp's index; each warp gathers its own 16 rows of a block.
        """
        item, first, begin, end, length = [Int32(0)] * 5
        if warp == 0:
            item, first, begin, end, length = publish_plan(self.work, call, True)
        else:
            item, first, begin, end, length = publish_plan(self.work, call, False)
        lane = cute.arch.lane_idx()
        own = warp * OWN + lane % OWN  # the row of a block for which this lane computes the global address
        at, rope_at = first_to_fill(), first_to_fill()
        while begin < end:
            whole = blocks_of(length)
            after = cutlass.min(whole, end - first)
            # The slot's index is loaded before a stage is free, because this load takes as long as all other steps.
            slot = slot_of(call, item, (begin - first) * ROWS + own, length)
            head = cutlass.min(call.rank * ROWS + own, self.config.heads - 1)
            source = q.address + (Int64(item) * q.row + Int64(head) * q.column) * 2
            at = self.fill(call, source, ballot(own < self.config.heads), at, rope_at, warp)
            rope_at = advance(rope_at, self.config.stages)
            for block in cutlass.range(begin - first, after, unroll=1):
                chosen = ballot(slot >= 0)
                known = cutlass.max(slot, 0)
                at_page = known >> call.page_shift
                source = kv.address + (Int64(at_page) * kv.row + Int64(known - (at_page << call.page_shift)) * kv.column) * 2
                slot = slot_of(call, item, (block + 1) * ROWS + own, length)
                at = self.fill(call, source, chosen, at, rope_at, warp)
                rope_at = advance(rope_at, self.config.stages)
            item += 1
            first += whole + call.plan[STARTING]
            begin = first
            length = self.work.length_of(call, item)

    @cute.jit
    def fill(self, call: Call, source: Int64, chosen: Int32, at: Cursor, rope_at: Cursor, warp: Int32) -> Cursor:
        """Starts the copies of a warp's rows of a block, or of the queries, to the rings. When the copies of a thread complete,
        they arrive at the stages' full barriers. Returns the latent ring's cursor after the block.

        Args:
            source: global address of the warp's row ``lane % 16``.
            chosen: a ballot mask; bit r is set if the warp's row r has a source. Other rows are zeroed.
        """
        lane = cute.arch.lane_idx()
        row, chunk = lane // LANES, lane % LANES
        sources = [of_lane(source, row + turn * TOGETHER) + chunk * CHUNK for turn in range(TURNS)]
        counts = [((chosen >> (row + turn * TOGETHER)) & 1) * CHUNK for turn in range(TURNS)]
        # Even turns copy rows 0 to 3 of each group of eight, odd turns rows 4 to 7. In the swizzle, their chunk indices differ by
        # XOR 4.
        offset = (warp * OWN + row) * (PANEL * 2) + (chunk ^ row) * CHUNK

        call.ropes.acquire(rope_at)
        if lane == 0:
            call.notes(rope_at).chosen(Uint16)[warp] = Uint16(chosen & 0xFFFF)
            call.ropes.full.arrive(rope_at)
        copy(self.memory.rope_at(call, rope_at) + offset, 0, sources, LATENT * 2, counts)
        cute.arch.cp_async_mbarrier_arrive_noinc(call.ropes.full.of(rope_at))
        for part in cutlass.range_constexpr(LATENT_CHUNKS):
            call.latent_chunks.acquire(at)
            to = self.memory.panel_at(call, at, 0) + offset
            for panel in cutlass.range_constexpr(CHUNK_PANELS):
                copy(to, panel * PANEL_BYTES, sources, (part * LATENT_CHUNK + panel * PANEL) * 2, counts)
            cute.arch.cp_async_mbarrier_arrive_noinc(call.latent_chunks.full.of(at))
            at = advance(at, self.config.latent_chunks)
        return at


@dataclass(frozen=True)
class GatherArrival:
    """Waits for gathered keys, block by block. The counterpart of `TmaArrival`."""

    config: Config

    @cute.jit
    def block(self, call: Call, at: Cursor, rope_at: Cursor):
        """Waits until a whole block is loaded and visible to MMAs.

        cp.async writes through the generic proxy, so wgmma, which reads through the async proxy, needs a fence. The fence also
        covers P @ V, because probabilities are signalled after the fence. There is one fence per block, because a fence is slow
        while MMAs run. With one fence per chunk, a prefill was 5% slower on an H200 than without fences, which would be unsafe.
        """
        call.ropes.wait(rope_at)
        for _ in cutlass.range_constexpr(LATENT_CHUNKS):
            call.latent_chunks.wait(at)
            at = advance(at, self.config.latent_chunks)
        cute.arch.fence_view_async_shared()

    def chunk(self, call: Call, at: Cursor) -> None:
        """Does nothing: `block` has waited for all chunks."""


@cute.jit
def selected_length(work: DecodeWork, call: Call, item: Int32):
    """Returns how many of a token's top-k indices are valid. ``item``, the token, is clamped to the last token."""
    length = call.max_seqlen_k
    if call.cache_seqlens != 0:
        given = load_int(call.cache_seqlens + Int64(cutlass.min(item, call.batch - 1)) * 4, False)
        length = cutlass.max(cutlass.min(given, length), 0)
    return length


@cute.jit
def slot_of(call: Call, item: Int32, index: Int32, length: Int32):
    """Returns entry ``index`` of a token's top-k indices, a cache slot; -1 without a load if ``index`` is at least ``length``."""
    slot = Int32(-1)
    if index < length:
        slot = load_int(call.page_table.address + (Int64(item) * call.page_table.row + index) * 4, False)
    return slot


def of_lane(address: Int64, lane: Int32) -> Int64:
    """Returns the ``address`` of lane ``lane`` of the warp."""
    low = cute.arch.shuffle_sync(Int32(address), lane)
    high = cute.arch.shuffle_sync(Int32(address >> 32), lane)
    return (Int64(high) << 32) | (Int64(low) & 0xFFFFFFFF)


def copy(to: Int32, behind: int, sources: list[Any], column: int, counts: list[Any]) -> None:
    """Starts the copies of one panel of this warp's rows, of keys or of queries, to shared memory.

    Args:
        to, behind: shared address of the lane's chunk of the first rows in panel 0, and byte offset of the panel.
        sources: global address of the lane's chunk of each of its rows.
        column: byte offset of the panel's columns in a row of global memory.
        counts: bytes to read per row: 16, or 0 to write zeros.
    """
    targets = (to, to ^ (TOGETHER * CHUNK))
    for turn in range(TURNS):
        copy_piece(targets[turn % 2], behind + turn * TOGETHER * PANEL * 2, sources[turn] + column, counts[turn])
