"""The producer warp of `kernel_device`, which schedules tiles, and loads Q, K and V by TMA. `q_load_device` has the loads of Q."""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import cutlass
from cutlass import Int32, const_expr, cute

from tokenspeed_kernel_nvidia.cutedsl import registers_device as registers
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Cursor, Pipeline, advance, first_to_fill
from tokenspeed_kernel_nvidia.cutedsl.tile_scheduler_device import Queue, own_indices
from tokenspeed_kernel_nvidia.sm90.attention.prefill.config import Config
from tokenspeed_kernel_nvidia.sm90.attention.prefill.q_load_device import QLoader, SplitQLoader
from tokenspeed_kernel_nvidia.sm90.attention.prefill.scheduler_device import Work
from tokenspeed_kernel_nvidia.sm90.attention.prefill.tile_device import Cursors, Rings, Sequences, Shared
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import Tma, tma_load


@dataclass(frozen=True)
class Keys:
    """The keys and values of the sequence and KV head that a tile attends to.

    Attributes:
        sequence: the sequence's index in the batch.
        first: with ragged K/V, the row in k and v of the sequence's first key.
        kv_len: number of keys of the sequence.
        kv_head: the KV head.
    """

    sequence: Int32
    first: Int32
    kv_len: Int32
    kv_head: Int32


@dataclass(frozen=True)
class Loader:
    """The producer warp.

    Attributes:
        queries: the object that loads Q tiles: `QLoader` or `SplitQLoader`.
    """

    config: Config
    rings: Rings
    work: Work
    cursors: Cursors
    queries: QLoader | SplitQLoader

    @cute.jit
    def load(
        self,
        shared: Shared,
        q: Tma,
        k: Tma,
        v: Tma,
        sequences: Sequences,
        counter: cute.Tensor,
        causal: Int32,
        kv_heads: Int32,
        scales: tuple,
        window_left: Int32,
    ):
        """Finds this CTA's tiles one by one, and loads their Q, K and V as far ahead as the rings allow."""
        c = self.config
        lane = cute.arch.lane_idx()
        batch = sequences.cu_seqlens.shape[0] - 1
        index, ctas = own_indices()
        tiles, queue = self.work.tiles(), Queue(counter, ctas)
        search = tiles.begin()
        q_at, k_at, v_at, raw_at = first_to_fill(), first_to_fill(), first_to_fill(), first_to_fill()

        while tiles.has(search):
            search = tiles.seek(search, index, sequences, batch, kv_heads)
            self.queries.acquire(shared, q_at)
            if tiles.has(search):
                tile = tiles.item(search, index, lane)
                keys = Keys(tile.sequence, self.work.first_key(sequences, tile.sequence, tile.start), tile.kv_len, tile.kv_head)
                ticket = queue.prefetch(lane)

                if const_expr(c.converts):
                    q_scales, k_scales, v_scales = scales
                    qk_scale, v_scale = q_scales.of(tile.kv_head) * k_scales.of(tile.kv_head), v_scales.of(tile.kv_head)
                    of_tile = registers.bits_of(qk_scale), registers.bits_of(v_scale)
                else:
                    of_tile = ()
                record = *tile.record, *of_tile
                self.queries.write(shared, q_at, record)
                first, end = self.work.blocks_seen(tile.q_len, tile.kv_len, tile.position, causal, window_left)

                self.queries.load(shared, q, q_at, record)

                # Blocks are loaded in descending order, as the consumers need them: the V of a block after the K of the next block.
                for i in cutlass.range(end - first + 1, unroll=1):
                    if i < end - first:
                        if const_expr(c.fp8_cache):
                            raw_at = self.load_raw(shared, k, raw_at, end - 1 - i, keys, sequences.page_table)
                        else:
                            k_boxes = self.rings.k.boxes(shared.storage.k, c.box)
                            self.load_kv(k_boxes, c.kv_bytes, shared.k_pipe, k, k_at, end - 1 - i, keys, sequences.page_table)
                            k_at = advance(k_at, c.kv_stages)
                    if const_expr(c.splits_q):
                        if i == 0:  # a K stage becomes free before the Q stage, so K is loaded first
                            self.queries.load_late(shared, q, q_at, record)
                    if i > 0:
                        if const_expr(c.converts):
                            raw_at = self.load_raw(shared, v, raw_at, end - i, keys, sequences.page_table)
                        else:
                            v_boxes = self.rings.v.boxes(shared.storage.v, c.box)
                            self.load_kv(v_boxes, c.v_bytes, shared.v_pipe, v, v_at, end - i, keys, sequences.page_table)
                            v_at = advance(v_at, c.kv_stages)

                index = queue.next(ticket)
            else:
                self.queries.end(shared, q_at)
            q_at = self.cursors.next_q(q_at)

        cute.arch.griddepcontrol_launch_dependents()
        queue.finish(lane)

    @cute.jit
    def load_raw(self, shared: Shared, kv: Tma, at: Cursor, block: Int32, keys: Keys, page_table: Optional[cute.Tensor]):
        """Loads a raw fp8 block of K or V, which the converter warps will convert. Returns the raw ring's next cursor."""
        c = self.config
        boxes = self.rings.raw.boxes(shared.storage.raw, c.box)
        self.load_kv(boxes, c.raw_bytes, shared.raw_pipe, kv, at, block, keys, page_table)
        return advance(at, c.raw_stages)

    @cute.jit
    def load_kv(
        self,
        boxes: cute.Tensor,
        size: cutlass.Constexpr[int],
        pipe: Pipeline,
        kv: Tma,
        at: Cursor,
        block: Int32,
        keys: Keys,
        page_table: Optional[cute.Tensor],
    ):
        """Loads a block of a sequence's keys, or of its values, once the ring stage ``at`` is empty.

        Args:
            boxes: the ring's boxes, see `Ring.boxes`.
            size: bytes of the block.
            pipe: the ring's barriers.
            block: index of the block in the sequence.
        """
        c = self.config
        pipe.acquire(at)
        with cute.arch.elect_one():
            pipe.commit(at, size)
        full = pipe.full.of(at)
        columns, panels = boxes.shape[1], boxes.shape[3]
        if const_expr(c.paged):
            # Lane i loads the page index of the block's i-th box. Page-table entries beyond the sequence are undefined, so the
            # sequence's last page is used instead. The keys of such boxes are masked, and their values are zeroed.
            pages = c.block_n // c.box
            lane = cute.arch.lane_idx()
            page_size = kv.tensor.shape[0] if const_expr(c.holds_blocks) else c.page_size
            last = cutlass.max(keys.kv_len - 1, 0) // page_size
            number, slot = block * pages + lane % pages, 0
            if const_expr(c.page_size % c.block_n == 0):  # a block lies within a page
                number, slot = block * c.block_n // page_size, block * c.block_n % page_size
            split = c.box < min(c.page_size, c.block_n)  # neither the page size nor the block size is a multiple of the other
            if const_expr(split):
                number = (block * c.block_n + lane % pages * c.box) // c.page_size
            page = page_table[keys.sequence, cutlass.min(number, last)]
            for i in cutlass.range(pages, unroll=2):
                one = cute.arch.shuffle_sync(page, offset=i)
                if const_expr(split):
                    slot = (block * c.block_n + i * c.box) % c.page_size
                for panel in cutlass.range_constexpr(panels):
                    source = cute.domain_offset((slot, panel * columns), kv.tensor[None, None, keys.kv_head, one])
                    tma_load(kv.atom, source, (c.box, columns), boxes[None, None, i, panel, at.stage], full)
        else:
            for panel in cutlass.range_constexpr(panels):
                source = cute.domain_offset((keys.first + block * c.block_n, panel * columns), kv.tensor[None, None, keys.kv_head])
                tma_load(kv.atom, source, (c.box, columns), boxes[None, None, 0, panel, at.stage], full)
