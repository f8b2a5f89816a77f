"""The producer warp of `kernel_device`: it runs the tile scheduler, and loads queries and blocks of the cache by TMA."""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import cpasync

from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Cursor, Pipeline, advance, first_to_fill
from tokenspeed_kernel_nvidia.cutedsl.registers_device import dtype_of, load_int
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.config import LATENT, ROPE, ROWS, Config
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.scheduler_device import blocks_of, publish_plan
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.tile_device import (
    LATENT_CHUNK,
    LATENT_CHUNKS,
    STARTING,
    Blocks,
    Call,
    SharedMemory,
)
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import PANEL, Ring, Tma, gqa_packed, make_tma, tma_load


def tma_views(memory: SharedMemory, q: cute.Tensor, kv_cache: cute.Tensor) -> tuple[Blocks, Blocks]:
    """Returns the TMA views of q and of the cache. Loads of the cache are multicast to all CTAs of the cluster."""
    c = memory.config
    columns = memory.latent_chunks.columns
    once = cpasync.CopyBulkTensorTileG2SOp()
    shared = once if c.cluster == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()
    # ``[pages, page_size, width]`` as ``(page_size, width, pages)``
    slots_first = cute.make_tensor(kv_cache.iterator, cute.select(kv_cache.layout, mode=[1, 2, 0]))
    return (
        _boxes(once, gqa_packed(q), (c.heads_of_tile, c.tokens_of_tile), PANEL if c.wide_queries else columns),
        _boxes(shared, slots_first, ROWS, columns),
    )


def _boxes(operation: Any, tensor: cute.Tensor, rows: Any, columns: int) -> Blocks:
    latents = make_tma(operation, tensor, (rows, columns))
    return Blocks(latents, None if columns == ROPE else make_tma(operation, tensor, (rows, ROPE)))


@dataclass(frozen=True)
class Loader:
    """The producer warp.

    Attributes:
        load_queries: the function that loads a work item's queries: `load_queries` or `load_wide_queries`.
    """

    config: Config
    memory: SharedMemory
    work: Any
    load_queries: Callable[..., Cursor]

    @cute.jit
    def load(self, call: Call, q: Blocks, kv: Blocks):
        """Finds this CTA's work items, publishes the plan, and loads queries and blocks of the cache as far ahead as the rings
        allow."""
        item, first, begin, end, length = publish_plan(self.work, call, True)
        at, rope_at = first_to_fill(), first_to_fill()
        turn = call.rank
        while begin < end:
            whole = blocks_of(length)
            after = cutlass.min(whole, end - first)
            sequence, _, _ = self.work.tokens_of(call, item)
            # Load 32 page indices, one per lane, beginning with page number `first_page` of the sequence. The loads of queries hide
            # the latency of these loads.
            first_page = ((begin - first) * ROWS) >> call.page_shift
            pages = pages_from(call, sequence, first_page, length)
            at = self.load_queries(self.memory, self.work, call, q, item, at, rope_at)
            rope_at = advance(rope_at, self.config.stages)
            for block in cutlass.range(begin - first, after, unroll=1):
                start = block * ROWS
                at_page = start >> call.page_shift
                if at_page >= first_page + 32:
                    first_page = at_page
                    pages = pages_from(call, sequence, first_page, length)
                page = cute.arch.shuffle_sync(pages, at_page - first_page)
                slot = (start - (at_page << call.page_shift)) // ROWS
                at = self.load_block(call, kv, at, rope_at, page, slot, turn, start < length)
                rope_at = advance(rope_at, self.config.stages)
                turn ^= 1
            item = self.work.next_item(call, item)
            first += whole + call.plan[STARTING]
            begin = first
            length = self.work.length_of(call, item)

    @cute.jit
    def load_block(
        self, call: Call, kv: Blocks, at: Cursor, rope_at: Cursor, page: Int32, slot: Int32, turn: Int32, exists: cutlass.Boolean
    ) -> Cursor:
        """Loads a block of the cache. In a cluster, each CTA loads every other chunk for both CTAs; the CTAs swap chunks from block
        to block.

        Args:
            at, rope_at: the first ring stages to fill.
            page, slot: the block's page, and the block's index in that page.
            turn: an even number if this CTA loads the rotary part, otherwise odd.
            exists: whether the block has any token; otherwise the stages are filled without a load.
        """
        count = cutlass.select_(exists, Int32(1), Int32(0))
        full = acquire(call.ropes, rope_at, count * self.memory.ropes.row_bytes)
        if exists and self.has_turn(turn):
            source = cute.local_tile(kv.ropes.tensor, (ROWS, ROPE), (slot, LATENT // ROPE, page))
            target = self.memory.ropes.boxes(call.storage.ropes, ROWS)[None, None, 0, 0, rope_at.stage]
            self.load_panel(kv.ropes, source, target, full)
        panels, columns = self.memory.latent_chunks.panels, self.memory.latent_chunks.columns
        for chunk in cutlass.range_constexpr(LATENT_CHUNKS):
            full = acquire(call.latent_chunks, at, count * (panels * self.memory.latent_chunks.row_bytes))
            if exists and self.has_turn(turn + chunk + 1):
                for panel in cutlass.range_constexpr(panels):
                    source = cute.local_tile(kv.latents.tensor, (ROWS, columns), (slot, chunk * panels + panel, page))
                    target = self.memory.latent_chunks.boxes(call.storage.latent_chunks, ROWS)[None, None, 0, panel, at.stage]
                    self.load_panel(kv.latents, source, target, full)
            at = advance(at, self.config.latent_chunks)
        return at

    def has_turn(self, turn: Int32) -> cutlass.Boolean:
        """Whether this CTA issues a load. In a cluster, the CTAs alternate: a CTA issues the loads for which its ``turn`` is
        even."""
        return cutlass.Boolean(True) if self.config.cluster == 1 else turn % 2 == 0

    @cute.jit
    def load_panel(self, kv: Tma, source: cute.Tensor, target: cute.Tensor, full: cute.Pointer):
        """Starts the TMA load of a panel of the cache, multicast to all CTAs of the cluster."""
        target, source = cpasync.tma_partition(
            kv.atom, 0, cute.make_layout(1), cute.group_modes(target, 0, 2), cute.group_modes(source, 0, 2)
        )
        if const_expr(self.config.cluster == 1):
            cute.copy(kv.atom, source, target, tma_bar_ptr=full)
        else:
            cute.copy(kv.atom, source, target, tma_bar_ptr=full, mcast_mask=cutlass.Int16((1 << self.config.cluster) - 1))


@cute.jit
def pages_from(call: Call, sequence: Int32, first_page: Int32, length: Int32):
    """Loads 32 entries of a sequence's page table, one per lane, beginning with entry ``first_page``. For entries beyond
    ``length``, the sequence's number of tokens, the result is 0 without a load."""
    page = Int32(0)
    at = first_page + cute.arch.lane_idx()
    if at << call.page_shift < length:
        table = call.page_table
        page = load_int(table.address + (Int64(sequence) * table.row + Int64(at) * table.column) * 4, False)
    return page


@cute.jit
def acquire(pipe: Pipeline, at: Cursor, row_bytes: Int32):
    """Waits until a ring stage is empty, and sets the bytes that its full barrier expects, ``row_bytes`` for each of 64 rows.
    Returns the full barrier."""
    pipe.acquire(at)
    with cute.arch.elect_one():
        pipe.commit(at, row_bytes * ROWS)
    return pipe.full.of(at)


@cute.jit
def load_queries(memory: SharedMemory, work: Any, call: Call, q: Blocks, item: Int32, at: Cursor, rope_at: Cursor) -> Cursor:
    """Loads a work item's queries into the rings, like a block of the cache, which has the size of a Q tile. Returns the latent
    ring's cursor after the queries.

    Query rows beyond the item's tokens hold queries of the next sequence; the results of these rows are never stored.
    """
    c = memory.config
    token, head, _ = work.tile_of(call, item)
    rows = (c.heads_of_tile, c.tokens_of_tile)
    corner = (head, token)
    full = acquire(call.ropes, rope_at, Int32(memory.ropes.row_bytes))
    target = memory.ropes.packed_boxes(call.storage.ropes, *rows)[None, None, 0, 0, rope_at.stage]
    tma_load(q.ropes.atom, cute.domain_offset((corner, LATENT), q.ropes.tensor), (rows, ROPE), target, full)
    targets, columns = memory.latent_chunks.packed_boxes(call.storage.latent_chunks, *rows), memory.latent_chunks.columns
    for chunk in cutlass.range_constexpr(LATENT_CHUNKS):
        full = acquire(call.latent_chunks, at, Int32(memory.latent_chunks.panels * memory.latent_chunks.row_bytes))
        for panel in cutlass.range_constexpr(memory.latent_chunks.panels):
            source = cute.domain_offset((corner, chunk * LATENT_CHUNK + panel * columns), q.latents.tensor)
            tma_load(q.latents.atom, source, (rows, columns), targets[None, None, panel, 0, at.stage], full)
        at = advance(at, c.latent_chunks)
    return at


@cute.jit
def load_wide_queries(memory: SharedMemory, work: Any, call: Call, q: Blocks, item: Int32, at: Cursor, rope_at: Cursor) -> Cursor:
    """Does `load_queries` for 16-bit queries and an fp8 cache. The latent ring receives all columns of the queries, as chunks of 64
    columns, which have as many bytes as 128 columns of fp8 latents. The rotary ring's stage is committed with no bytes, so that
    queries occupy one stage of that ring in all configurations."""
    c = memory.config
    token, head, _ = work.tile_of(call, item)
    rows = (c.heads_of_tile, c.tokens_of_tile)
    corner = (head, token)
    acquire(call.ropes, rope_at, Int32(0))
    wide = Ring(ROWS, PANEL, c.latent_chunks)
    targets = wide.packed_boxes(call.storage.latent_chunks, *rows, dtype=dtype_of(c.dtype))
    for chunk in cutlass.range_constexpr(c.query_chunks):
        full = acquire(call.latent_chunks, at, Int32(wide.row_bytes))
        source = cute.domain_offset((corner, chunk * PANEL), q.latents.tensor)
        tma_load(q.latents.atom, source, (rows, PANEL), targets[None, None, 0, 0, at.stage], full)
        at = advance(at, c.latent_chunks)
    return at
