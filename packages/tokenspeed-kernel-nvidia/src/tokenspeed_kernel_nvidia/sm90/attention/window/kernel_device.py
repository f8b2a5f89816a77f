"""The device code of `window`: the launch, the work items, and the producer warps. `mma_device` has the consumers.

Slower alternatives, for 64 sequences of 16 new tokens over 8192, where this kernel takes 15.8 us in graphs of 7 calls with another
kernel after each: separate warps for keys and values (16.4 us); the same with an L2 prefetch of the first keys before the PDL wait
(16.7 us; back to back 14.3 us instead of 14.5); a scheduler warp that prefetches page indices ahead of the other warps (16.4 us);
the KV heads of a sequence one after another in one CTA instead of in several CTAs (17.9 us).
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from tokenspeed_kernel_nvidia.cutedsl import arguments_device as arguments
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import advance, first_to_fill, first_to_read
from tokenspeed_kernel_nvidia.cutedsl.registers_device import LANES, warp_prefix_sum
from tokenspeed_kernel_nvidia.cutedsl.softmax_device import Sinks
from tokenspeed_kernel_nvidia.cutedsl.tile_scheduler_device import Block, Blocks, own_indices
from tokenspeed_kernel_nvidia.sm90.attention.window.config import REACH, WARPGROUPS, Config
from tokenspeed_kernel_nvidia.sm90.attention.window.mma_device import Consumers, Output
from tokenspeed_kernel_nvidia.sm90.attention.window.tile_device import Shared
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import PANEL, Tma, gqa_packed, make_tma, tma_load, tokens_first
from tokenspeed_kernel_nvidia.sm90.common.wgmma_device import make_pv_mma, make_qk_mma

# Unrolled TMA loads of a paged cache. Without unrolling, 64 sequences with 16 new tokens take 21 us instead of 12.
UNROLL = 4
PRODUCERS = 128  # threads of the producer warpgroup


def host(config: Config) -> Any:
    """The host function that launches the kernel of a configuration."""
    return Window(config)


def fake_arguments(config: Config) -> tuple[Any, ...]:
    """Placeholder arguments to compile the function of `host` with."""
    size, rows, ints = arguments.size, arguments.rows, arguments.ints
    tokens, heads, kv_heads, batch = size(), size(), size(), size()
    keys = (size(), size()) if config.paged else (tokens,)
    k, v = (rows(config.dtype, *keys, kv_heads, config.head_dim) for _ in range(2))
    q, out = (rows(config.dtype, tokens, heads, config.head_dim) for _ in range(2))
    paging = (ints(batch, size()), ints(batch)) if config.paged else (None, None)
    scalars = Int64(0), Int64(0), Int32(0), Int32(0), Int32(0), Float32(0), Float32(0) if config.capped else None, Int32(0)
    return q, k, v, out, ints(size()), *paging, *scalars, arguments.stream()


@dataclass(frozen=True)
class Sequences:
    """The sequences of a call.

    Attributes:
        cu_seqlens: cumulative lengths of the queries.
        page_table: None with ragged K/V.
        cache_seqlens: tokens of each sequence in the cache; None with ragged K/V.
    """

    cu_seqlens: cute.Tensor
    page_table: Optional[cute.Tensor]
    cache_seqlens: Optional[cute.Tensor]

    @property
    def batch(self) -> Int32:
        return self.cu_seqlens.shape[0] - 1


class Window(Consumers):
    """The sliding-window kernel of one configuration: warp-specialised, with a static round-robin schedule of work items.

    A CTA has four warpgroups. In the producer warpgroup, warp 0 loads K and V by TMA, and warp 1 loads Q. Warp 2 zeroes rows of V
    beyond the sequence, so that 0 * NaN does not occur. The three consumer warpgroups take the CTA's tiles round-robin. Each
    computes a tile from q @ k through softmax to the store of O. They never wait for each other.
    """

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        cu_seqlens: cute.Tensor,
        page_table: Optional[cute.Tensor],
        cache_seqlens: Optional[cute.Tensor],
        lse: Int64,
        sinks: Int64,
        sinks_kind: Int32,
        window_left: Int32,
        block: Int32,
        scale: Float32,
        cap_scale: Optional[Float32],
        grid: Int32,
        stream,
    ):
        c = self.config
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        q_tma = make_tma(load, gqa_packed(q), ((c.heads, c.positions), PANEL))
        out_tma = make_tma(store, gqa_packed(out), ((c.heads, c.positions), PANEL))
        k_tma = make_tma(load, tokens_first(k, c.paged), (c.box, PANEL))
        v_tma = make_tma(load, tokens_first(v, c.paged), (c.box, PANEL))
        page_size = k.shape[1] if const_expr(c.paged) else Int32(1)
        kv_heads = k.shape[2] if const_expr(c.paged) else k.shape[1]
        self.kernel(
            q_tma, k_tma, v_tma, out_tma, out, Sequences(cu_seqlens, page_table, cache_seqlens), lse, Sinks(sinks, sinks_kind),
            window_left, block, scale, cap_scale, page_size, kv_heads, q.shape[1], make_qk_mma(self.dtype, c.keys),
            make_pv_mma(self.dtype, c.head_dim),
        ).launch(
            grid=[grid, 1, 1], block=[PRODUCERS + WARPGROUPS * 128, 1, 1], min_blocks_per_mp=1, stream=stream, use_pdl=True
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        q: Tma,
        k: Tma,
        v: Tma,
        out_tma: Tma,
        out: cute.Tensor,
        sequences: Sequences,
        lse: Int64,
        sinks: Sinks,
        window_left: Int32,
        block: Int32,
        scale: Float32,
        cap_scale: Optional[Float32],
        page_size: Int32,
        kv_heads: Int32,
        heads: Int32,
        qk: cute.TiledMma,
        pv: cute.TiledMma,
    ):
        thread = cute.arch.thread_idx()[0]
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = thread % LANES
        shared = Shared(SmemAllocator().allocate(self.storage()))
        if warp_index == 0:
            for tma in (q, k, v, out_tma):
                cpasync.prefetch_descriptor(tma.atom)
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(self.config.q_stages):
                    shared.q_pipe.init(stage, 4)
                for stage in cutlass.range_constexpr(self.config.kv_stages):
                    shared.k_full.init(stage, 1)
                    shared.v_full.init(stage, 1)
                    shared.v_ready.init(stage, 1)
                    shared.kv_empty.init(stage, WARPGROUPS * 4)
            cute.arch.mbarrier_init_fence()

        # Rows of V after a stage's keys only ever meet probabilities of 0: zero them once.
        value_words = self.value_words(shared)
        if thread < 128:
            for stage in cutlass.range_constexpr(self.config.kv_stages):
                for panel in cutlass.range_constexpr(self.v_ring.panels):
                    value_words[thread % 16, self.config.rows + thread // 16, panel, stage] = Int64(0)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        # PDL: the preceding kernel may still write our inputs or read our outputs; the next one may launch as SMs become free.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        if warp_index < 4:
            cute.arch.setmaxregister_decrease(self.config.producer_registers)
            if warp_index == 0:
                self.load_keys(shared, k, v, sequences, block, page_size, kv_heads, lane)
            elif warp_index == 1:
                self.load_queries(shared, q, sequences, block, kv_heads, lane)
            elif warp_index == 2:
                self.clear_values(shared, value_words, lane)
        else:
            cute.arch.setmaxregister_increase(self.config.consumer_registers)
            self.consume(shared, Output(out_tma, out, lse, heads, sinks), window_left, scale, cap_scale, qk, pv, thread)

    # -- work items ------------------------------------------------------------------------------------------------------------

    @cute.jit
    def blocks_of(
        self, sequences: Sequences, group: Int32, before: Int32, block: Int32, kv_heads: Int32, step: Int32, lane: Int32
    ) -> Blocks:
        """Schedules the sequences from ``group`` on, one per lane. ``before``: blocks of all sequences before them."""
        index = group + lane
        token, first, length, blocks = Int32(0), Int32(0), Int32(0), Int32(0)
        if index < sequences.batch:
            token = sequences.cu_seqlens[index]
            queries = sequences.cu_seqlens[index + 1] - token
            length = sequences.cache_seqlens[index] if const_expr(self.config.paged) else queries
            first = length - queries
            if queries > 0:
                blocks = (length - first // 8 * 8 + block - 1) // block
        ends = before + warp_prefix_sum(blocks, lane)
        return Blocks(step, token, first, length, blocks, ends, cute.arch.shuffle_sync(ends, LANES - 1), block, kv_heads)

    def tiles_of(self, item: Block, block: Int32) -> Int32:
        """The tiles of a work item per split of the query heads."""
        return (cutlass.min(block, item.length - item.position) + self.config.positions - 1) // self.config.positions

    # -- producer warps --------------------------------------------------------------------------------------------------------

    @cute.jit
    def load_keys(
        self, shared: Shared, k: Tma, v: Tma, sequences: Sequences, block: Int32, page_size: Int32, kv_heads: Int32, lane: Int32
    ):
        """Loads K and V of this CTA's items, and writes each item's record to its stage."""
        c = self.config
        k_boxes, v_boxes = self.k_ring.boxes(shared.storage.k, c.box), self.v_ring.boxes(shared.storage.v, c.box)
        index, step = own_indices()
        at = first_to_fill()
        before, group = Int32(0), Int32(0)
        while group < sequences.batch:
            blocks = self.blocks_of(sequences, group, before, block, kv_heads, step, lane)
            while blocks.has(index):
                item = blocks.item(index)
                tiles = self.tiles_of(item, block)
                row = item.position - REACH
                shift = Int32(0)
                if const_expr(c.paged):
                    shift = (row // 8) & 1
                    row -= shift * 8
                wanted = shift * 8 + tiles * c.positions + REACH + 8
                first_box = cutlass.max(-row, 0) // c.box
                after_box = (cutlass.min(cutlass.min(wanted, item.length - row), c.rows) + c.box - 1) // c.box
                page, token = Int32(0), Int32(0)  # of the box with this lane's index
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
                for kv, boxes, full in ((k, k_boxes, shared.k_full), (v, v_boxes, shared.v_full)):
                    barrier = full.of(at)
                    for box in cutlass.range(first_box, after_box, unroll=UNROLL if c.paged else 1):
                        of_page, from_token = cute.arch.shuffle_sync(page, box), item.token + row + box * c.box
                        if const_expr(c.paged):
                            from_token = cute.arch.shuffle_sync(token, box)
                        for panel in cutlass.range_constexpr(self.k_ring.panels):
                            if const_expr(c.paged):
                                source = cute.domain_offset((from_token, panel * PANEL, item.kv_head, of_page), kv.tensor)
                                source = source[None, None, 0, 0]
                            else:
                                source = cute.domain_offset((from_token, panel * PANEL, item.kv_head), kv.tensor)[None, None, 0]
                            tma_load(kv.atom, source, (c.box, PANEL), boxes[None, None, box, panel, at.stage], barrier)
                at = advance(at, c.kv_stages)
                index = blocks.next(index)
            before = blocks.end
            group += LANES
        shared.kv_empty.wait(at)
        if lane == 0:
            shared.record(at).write_end()
            shared.k_full.arrive(at)
            shared.v_full.arrive(at)

    @cute.jit
    def load_queries(self, shared: Shared, q: Tma, sequences: Sequences, block: Int32, kv_heads: Int32, lane: Int32):
        """Loads the Q tiles of the same items, in order."""
        c = self.config
        boxes = self.q_ring.packed_boxes(shared.storage.q, c.heads, c.positions)
        index, step = own_indices()
        at = first_to_fill()
        before, group = Int32(0), Int32(0)
        while group < sequences.batch:
            blocks = self.blocks_of(sequences, group, before, block, kv_heads, step, lane)
            while blocks.has(index):
                item = blocks.item(index)
                tiles = self.tiles_of(item, block)
                for tile in cutlass.range(tiles * c.splits, unroll=1):
                    token = item.token + item.position - item.first + tile // c.splits * c.positions
                    head = (item.kv_head * c.splits + tile % c.splits) * c.heads
                    shared.q_pipe.acquire(at)
                    if lane == 0:
                        shared.q_pipe.commit(at, 64 * c.head_dim * 2)
                    for panel in cutlass.range_constexpr(self.q_ring.panels):
                        source = cute.domain_offset(((head, token), panel * PANEL), q.tensor)
                        box = ((c.heads, c.positions), PANEL)
                        tma_load(q.atom, source, box, boxes[None, None, panel, 0, at.stage], shared.q_pipe.full.of(at))
                    at = advance(at, c.q_stages)
                index = blocks.next(index)
            before = blocks.end
            group += LANES

    @cute.jit
    def clear_values(self, shared: Shared, value_words: cute.Tensor, lane: Int32):
        """Zeroes rows of V before and after the sequence, then signals ``v_ready`` to the consumer warpgroups."""
        c = self.config
        at = first_to_read()
        more = Boolean(True)
        while more:
            shared.v_full.wait(at)
            record = shared.record(at)
            count = record.count
            more = count > 0
            if more:
                row = record.position - REACH - record.shift * 8
                behind = cutlass.min(record.shift * 8 + count // c.splits * c.positions + REACH + 8, c.rows)
                from_row = record.length - row
                if row < 0 or from_row < behind:
                    for index in cutlass.range(lane, -row * 16, LANES, unroll=1):
                        for panel in cutlass.range_constexpr(self.v_ring.panels):
                            value_words[index % 16, index // 16, panel, at.stage] = Int64(0)
                    for index in cutlass.range(from_row * 16 + lane, behind * 16, LANES, unroll=1):
                        for panel in cutlass.range_constexpr(self.v_ring.panels):
                            value_words[index % 16, index // 16, panel, at.stage] = Int64(0)
                    cute.arch.fence_view_async_shared()
                    cute.arch.sync_warp()
                if lane == 0:
                    shared.v_ready.arrive(at)
                at = advance(at, c.kv_stages)
