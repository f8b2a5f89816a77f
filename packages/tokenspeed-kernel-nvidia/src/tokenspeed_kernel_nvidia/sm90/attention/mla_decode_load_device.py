"""The warp of `mla_decode_device` that divides the work, and loads queries and blocks of the cache."""

# mypy: ignore-errors

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import cpasync

from tokenspeed_kernel_nvidia.sm90.attention.mla_decode_config import LATENT, ROPE, ROWS
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode_tile_device import (
    BEGIN,
    END,
    FIRST,
    PIECE,
    PIECES,
    PLANNED,
    PLANNERS,
    SHARE,
    STARTING,
    UNIT,
    Blocks,
    Call,
    Tiles,
)
from tokenspeed_kernel_nvidia.sm90.common.pipeline_device import Cursor, Pipeline, advance, first_to_fill
from tokenspeed_kernel_nvidia.sm90.common.registers_device import load_int
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import Tma, tma_load


class Loader(Tiles):
    """The part of the kernel that divides the work and loads."""

    @cute.jit
    def load(self, call: Call, q: Blocks, kv: Blocks):
        """Finds this CTA's units, says so to the other warps, and loads queries and blocks as far ahead as there is room."""
        unit, first, begin, end, length = self.plan(call, True)
        at, rope_at = first_to_fill(), first_to_fill()
        turn = call.rank
        while begin < end:
            _, _, whole = self.visible(call, length)
            after = cutlass.min(whole, end - first)
            sequence, _, _ = self.place_of(call, unit)
            # One a lane, those from `first_page` of the sequence on. Queries are loaded until they are there.
            first_page = ((begin - first) * ROWS) >> call.page_shift
            pages = self.pages_from(call, sequence, first_page, length)
            at = self.load_queries(call, q, unit, at, rope_at)
            rope_at = advance(rope_at, self.config.stages)
            for block in cutlass.range(begin - first, after, unroll=1):
                start = block * ROWS
                at_page = start >> call.page_shift
                if at_page >= first_page + 32:
                    first_page = at_page
                    pages = self.pages_from(call, sequence, first_page, length)
                page = cute.arch.shuffle_sync(pages, at_page - first_page)
                slot = (start - (at_page << call.page_shift)) // ROWS
                at = self.load_block(call, kv, at, rope_at, page, slot, turn, start < length)
                rope_at = advance(rope_at, self.config.stages)
                turn ^= 1
            unit = self.next_unit(call, unit)
            first += whole + call.plan[STARTING]
            begin = first
            length = self.length_of(call, unit)

    @cute.jit
    def plan(self, call: Call, tells: cutlass.Constexpr[bool]):
        """Finds this CTA's units, and writes the plan.

        Args:
            tells: whether to say so to the warps that compute. One warp does.

        Returns:
            The first unit, the number of its first block, that of the first block of this CTA, the number behind the last one, and
            the unit's length.
        """
        lane = cute.arch.lane_idx()
        unit, length, offset, left, share, starting = [Int32(0)] * 6
        if call.batch <= 32:  # less code, and that is what takes time here
            unit, length, offset, left, share, starting = self.divide(call, 1)
        else:
            unit, length, offset, left, share, starting = self.divide(call, 4)  # more lengths would take too many registers
        begin = call.group * share
        first = begin - offset + starting
        end = begin + left
        begin = cutlass.max(begin, first)
        if lane == 0:  # other warps that load write the same
            call.plan[UNIT] = unit
            call.plan[FIRST] = first
            call.plan[BEGIN] = begin
            call.plan[END] = end
            call.plan[SHARE] = share
            call.plan[STARTING] = starting
        cute.arch.sync_warp()
        if const_expr(tells):
            cute.arch.barrier_arrive(barrier_id=PLANNED, number_of_threads=PLANNERS)
        return unit, first, begin, end, length

    @cute.jit
    def pages_from(self, call: Call, sequence: Int32, first_page: Int32, length: Int32):
        """The numbers of 32 pages of a sequence, one a lane. Entries beyond its length are not read."""
        page = Int32(0)
        at = first_page + cute.arch.lane_idx()
        if at << call.page_shift < length:
            table = call.page_table
            page = load_int(table.address + (Int64(sequence) * table.row + Int64(at) * table.column) * 4, False)
        return page

    @cute.jit
    def acquire(self, pipe: Pipeline, at: Cursor, row_bytes: Int32):
        """Waits until there is room, and says how many bytes come for each row. Returns the barrier that they complete."""
        pipe.acquire(at)
        with cute.arch.elect_one():
            pipe.commit(at, row_bytes * ROWS)
        return pipe.full.of(at)

    @cute.jit
    def load_queries(self, call: Call, q: Blocks, unit: Int32, at: Cursor, rope_at: Cursor) -> Cursor:
        """Loads the queries of a unit as if they were a block of the cache: a tile is as large.

        Rows of tokens that the unit does not have are those of the next sequence, and nobody looks at what becomes of them.
        """
        c = self.config
        token, head, _ = self.tile_of(call, unit)
        rows = (c.heads_of_tile, c.tokens_of_tile)
        corner = (head, token)
        full = self.acquire(call.ropes, rope_at, Int32(self.ropes.row_bytes))
        target = self.ropes.packed_boxes(call.storage.ropes, *rows)[None, None, 0, 0, rope_at.stage]
        tma_load(q.ropes.atom, cute.domain_offset((corner, LATENT), q.ropes.tensor), (rows, ROPE), target, full)
        targets, columns = self.pieces.packed_boxes(call.storage.pieces, *rows), self.pieces.columns
        for piece in cutlass.range_constexpr(PIECES):
            full = self.acquire(call.pieces, at, Int32(self.pieces.panels * self.pieces.row_bytes))
            for panel in cutlass.range_constexpr(self.pieces.panels):
                source = cute.domain_offset((corner, piece * PIECE + panel * columns), q.latents.tensor)
                tma_load(q.latents.atom, source, (rows, columns), targets[None, None, panel, 0, at.stage], full)
            at = advance(at, c.pieces)
        return at

    @cute.jit
    def load_block(
        self, call: Call, kv: Blocks, at: Cursor, rope_at: Cursor, page: Int32, slot: Int32, turn: Int32, exists: cutlass.Boolean
    ) -> Cursor:
        """Loads a block of the cache. In a cluster a CTA loads every other part of it, for both; whose turn it is changes.

        Args:
            turn: even where the rotary part is this CTA's.
            exists: whether any token of it does.
        """
        count = cutlass.select_(exists, Int32(1), Int32(0))
        full = self.acquire(call.ropes, rope_at, count * self.ropes.row_bytes)
        if exists and self.has_turn(turn):
            source = cute.local_tile(kv.ropes.tensor, (ROWS, ROPE), (slot, LATENT // ROPE, page))
            target = self.ropes.boxes(call.storage.ropes, ROWS)[None, None, 0, 0, rope_at.stage]
            self.load_panel(kv.ropes, source, target, full)
        panels, columns = self.pieces.panels, self.pieces.columns
        for piece in cutlass.range_constexpr(PIECES):
            full = self.acquire(call.pieces, at, count * (panels * self.pieces.row_bytes))
            if exists and self.has_turn(turn + piece + 1):
                for panel in cutlass.range_constexpr(panels):
                    source = cute.local_tile(kv.latents.tensor, (ROWS, columns), (slot, piece * panels + panel, page))
                    target = self.pieces.boxes(call.storage.pieces, ROWS)[None, None, 0, panel, at.stage]
                    self.load_panel(kv.latents, source, target, full)
            at = advance(at, self.config.pieces)
        return at

    def has_turn(self, turn: Int32) -> cutlass.Boolean:
        return cutlass.Boolean(True) if self.config.cluster == 1 else turn % 2 == 0

    @cute.jit
    def load_panel(self, kv: Tma, source: cute.Tensor, target: cute.Tensor, full: cute.Pointer):
        """Starts the copy of a panel, to all CTAs of the cluster."""
        target, source = cpasync.tma_partition(
            kv.atom, 0, cute.make_layout(1), cute.group_modes(target, 0, 2), cute.group_modes(source, 0, 2)
        )
        if const_expr(self.config.cluster == 1):
            cute.copy(kv.atom, source, target, tma_bar_ptr=full)
        else:
            cute.copy(kv.atom, source, target, tma_bar_ptr=full, mcast_mask=cutlass.Int16((1 << self.config.cluster) - 1))
