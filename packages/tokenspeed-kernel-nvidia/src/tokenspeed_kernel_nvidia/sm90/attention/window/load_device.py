"""The loading warps of `kernel_device`: `KvLoader` loads K and V by TMA, `QLoader` loads Q."""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, const_expr, cute

from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Cursor, advance, first_to_fill
from tokenspeed_kernel_nvidia.cutedsl.registers_device import LANES
from tokenspeed_kernel_nvidia.cutedsl.tile_scheduler_device import own_indices
from tokenspeed_kernel_nvidia.sm90.attention.window.config import REACH, Config
from tokenspeed_kernel_nvidia.sm90.attention.window.scheduler_device import Sequences, Work
from tokenspeed_kernel_nvidia.sm90.attention.window.tile_device import Rings, Shared
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import PANEL, Tma, tma_load

# Unroll factor of the loop over TMA loads of a paged cache. Without unrolling, 64 sequences with 16 new tokens take 21 us instead
# of 12.
UNROLL = 4


@dataclass(frozen=True)
class Boxes:
    """The TMA boxes of a work item's keys and values. With a paged cache, lane i holds the page of box i.

    Attributes:
        first, end: the range of box indices to load; ``end`` is exclusive.
        row: with ragged K/V, the row in k and v with which box 0 begins.
        kv_head: the KV head.
        page, token: with a paged cache, the page of this lane's box, and the index in the page of the box's first token.
    """

    first: Int32
    end: Int32
    row: Int32
    kv_head: Int32
    page: Int32
    token: Int32


@dataclass(frozen=True)
class KvLoader:
    """The warp that loads K and V of this CTA's work items, and writes each item's record to its stage."""

    config: Config
    rings: Rings
    work: Work

    @cute.jit
    def load(
        self, shared: Shared, k: Tma, v: Tma, sequences: Sequences, block: Int32, page_size: Int32, kv_heads: Int32, lane: Int32
    ):
        """Loads the keys and values of all the CTA's work items, one item per stage. Row 0 of a stage is the key `REACH` positions
        before the item's first position, or with a paged cache 8 positions earlier if that makes the row a multiple of 16, the size
        of a box. Boxes outside the sequence are not loaded.

        Args:
            block: the maximum number of query positions of a work item.
        """
        c = self.config
        k_boxes, v_boxes = self.rings.k.boxes(shared.storage.k, c.box), self.rings.v.boxes(shared.storage.v, c.box)
        index, step = own_indices()
        at = first_to_fill()
        before, group = Int32(0), Int32(0)
        while group < sequences.batch:
            blocks = self.work.blocks_of(sequences, group, before, block, kv_heads, step, lane)
            while blocks.has(index):
                item = blocks.item(index)
                tiles = self.work.tiles_of(item, block)
                row = item.position - REACH
                shift = Int32(0)
                if const_expr(c.paged):
                    shift = (row // 8) & 1
                    row -= shift * 8
                wanted = shift * 8 + tiles * c.positions + REACH + 8
                first_box = cutlass.max(-row, 0) // c.box
                after_box = (cutlass.min(cutlass.min(wanted, item.length - row), c.rows) + c.box - 1) // c.box
                page, token = Int32(0), Int32(0)  # page of this lane's box, and the box's first token in it
                if const_expr(c.paged):
                    if lane >= first_box and lane < after_box:
                        token = row + lane * c.box
                        page = sequences.page_table[group + item.lane, token // page_size]
                        token = token % page_size
                shared.kv_empty.wait(at)
                if lane == 0:
                    shared.record(at).write(
                        tiles * c.splits, item.position, item.token + item.position - item.first, item.first, item.length,
                        item.kv_head, shift,
                    )  # fmt: skip
                    count = (after_box - first_box) * (c.box * c.head_dim * 2)
                    shared.k_full.expect(at, count)
                    shared.v_full.expect(at, count)
                boxes = Boxes(first_box, after_box, item.token + row, item.kv_head, page, token)
                self.load_boxes(k, k_boxes, shared.k_full.of(at), boxes, at)
                self.load_boxes(v, v_boxes, shared.v_full.of(at), boxes, at)
                at = advance(at, c.kv_stages)
                index = blocks.next(index)
            before = blocks.end
            group += LANES
        # One more record tells the consumers that there are no more work items.
        shared.kv_empty.wait(at)
        if lane == 0:
            shared.record(at).write_end()
            shared.k_full.arrive(at)
            shared.v_full.arrive(at)

    @cute.jit
    def load_boxes(self, kv: Tma, targets: cute.Tensor, barrier: cute.Pointer, boxes: Boxes, at: Cursor):
        """Loads a work item's keys, or its values, to the ring stage ``at``. ``targets``: the ring's boxes, see `Ring.boxes`."""
        c = self.config
        for box in cutlass.range(boxes.first, boxes.end, unroll=UNROLL if c.paged else 1):
            page, token = cute.arch.shuffle_sync(boxes.page, box), boxes.row + box * c.box
            if const_expr(c.paged):
                token = cute.arch.shuffle_sync(boxes.token, box)
            for panel in cutlass.range_constexpr(self.rings.k.panels):
                if const_expr(c.paged):
                    source = cute.domain_offset((token, panel * PANEL, boxes.kv_head, page), kv.tensor)[None, None, 0, 0]
                else:
                    source = cute.domain_offset((token, panel * PANEL, boxes.kv_head), kv.tensor)[None, None, 0]
                tma_load(kv.atom, source, (c.box, PANEL), targets[None, None, box, panel, at.stage], barrier)


@dataclass(frozen=True)
class QLoader:
    """The warp that loads the Q tiles of this CTA's work items, in order."""

    config: Config
    rings: Rings
    work: Work

    @cute.jit
    def load(self, shared: Shared, q: Tma, sequences: Sequences, block: Int32, kv_heads: Int32, lane: Int32):
        """Loads the Q tiles of all the CTA's work items. This warp finds the work items itself, in the same order as `KvLoader`, so
        the two warps need no synchronisation. Rows outside the sequence hold other queries; their results are never stored."""
        c = self.config
        boxes = self.rings.q.packed_boxes(shared.storage.q, c.heads, c.positions)
        index, step = own_indices()
        at = first_to_fill()
        before, group = Int32(0), Int32(0)
        while group < sequences.batch:
            blocks = self.work.blocks_of(sequences, group, before, block, kv_heads, step, lane)
            while blocks.has(index):
                item = blocks.item(index)
                tiles = self.work.tiles_of(item, block)
                for tile in cutlass.range(tiles * c.splits, unroll=1):
                    token = item.token + item.position - item.first + tile // c.splits * c.positions
                    head = self.work.head_of(item.kv_head, tile)
                    shared.q_pipe.acquire(at)
                    if lane == 0:
                        shared.q_pipe.commit(at, 64 * c.head_dim * 2)
                    for panel in cutlass.range_constexpr(self.rings.q.panels):
                        source = cute.domain_offset(((head, token), panel * PANEL), q.tensor)
                        box = ((c.heads, c.positions), PANEL)
                        tma_load(q.atom, source, box, boxes[None, None, panel, 0, at.stage], shared.q_pipe.full.of(at))
                    at = advance(at, c.q_stages)
                index = blocks.next(index)
            before = blocks.end
            group += LANES
