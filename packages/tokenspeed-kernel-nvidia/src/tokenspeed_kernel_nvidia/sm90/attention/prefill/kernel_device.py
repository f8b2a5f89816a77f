"""The device code of `prefill`: launch and producer warp. `mma_device` has the consumer warpgroups."""

# mypy: ignore-errors

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from tokenspeed_kernel_nvidia.cutedsl import arguments_device as arguments
from tokenspeed_kernel_nvidia.cutedsl import registers_device as registers
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Cursor, Pipeline, advance, first_to_fill
from tokenspeed_kernel_nvidia.cutedsl.scales_device import Scales
from tokenspeed_kernel_nvidia.cutedsl.softmax_device import Sinks
from tokenspeed_kernel_nvidia.cutedsl.tile_scheduler_device import LongestFirst, Queue, own_indices
from tokenspeed_kernel_nvidia.sm90.attention.prefill.config import Config
from tokenspeed_kernel_nvidia.sm90.attention.prefill.convert_device import CONVERTERS, Converters
from tokenspeed_kernel_nvidia.sm90.attention.prefill.mma_device import Consumers, Mmas, Output
from tokenspeed_kernel_nvidia.sm90.attention.prefill.tile_device import Sequences, Shared
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import PANEL, Tma, gqa_packed, make_tma, tma_load, tokens_first
from tokenspeed_kernel_nvidia.sm90.common.wgmma_device import make_pv_mma, make_qk_mma


def host(config: Config):
    """The host function that launches the kernel of a configuration."""
    return Prefill(config)


def fake_arguments(config: Config):
    """Placeholder arguments to compile the function of `host` with."""
    size, ints = arguments.size, arguments.ints
    of_q, of_kv = (
        arguments.byte_rows if fp8 else functools.partial(arguments.rows, config.dtype) for fp8 in (config.fp8, config.converts)
    )
    tokens, heads, kv_heads, batch = size(), size(), size(), size()
    q, out = of_q(tokens, heads, config.head_dim), arguments.rows(config.dtype, tokens, heads, config.widths[1])
    if config.paged:
        pages = size()
        k, v = (of_kv(pages, config.page_size, kv_heads, width) for width in config.widths)
        paging = ints(batch), ints(batch, size())
    else:
        kv_tokens = size()
        k, v = (of_kv(kv_tokens, kv_heads, width) for width in config.widths)
        paging = ints(size()) if config.own_kv else None, None
    scalars = (Int64(0), Int64(0), Int64(0), Int32(0), Float32(0), Int32(0), Int32(0), *([Int64(0), Int32(0)] * 3), Int32(0))
    scalars = *scalars, Float32(0) if config.capped else None
    return q, k, v, out, ints(size()), *paging, *scalars, arguments.stream()


@dataclass(frozen=True)
class Keys:
    """The keys and values that a tile attends to.

    Attributes:
        sequence: index in the batch.
        first: row of the sequence's first key, with ragged K/V.
        kv_len: keys of the sequence.
        kv_head: the KV head.
    """

    sequence: Int32
    first: Int32
    kv_len: Int32
    kv_head: Int32


class Prefill(Converters, Consumers):
    """The prefill kernel for one configuration: persistent and warp-specialised, one CTA per SM.

    Warp 0 of the producer warpgroup schedules tiles, and loads Q, K and V by TMA. With fp8, the producer warpgroup's other three
    warps convert blocks. Two or three consumer warpgroups compute 64 query rows each with wgmma. Shared memory holds rings of Q
    tiles and of K and V blocks (``q_stages``, ``kv_stages``), fp8 blocks before conversion, and an output tile unless outputs are
    stored from registers.
    """

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        cu_seqlens: cute.Tensor,
        cache_seqlens: Optional[cute.Tensor],
        page_table: Optional[cute.Tensor],
        counters: Int64,
        lse: Int64,
        sinks: Int64,
        sinks_kind: Int32,
        scale: Float32,
        causal: Int32,
        sms: Int32,
        q_scales: Int64,
        q_apart: Int32,
        k_scales: Int64,
        k_apart: Int32,
        v_scales: Int64,
        v_apart: Int32,
        window_left: Int32,
        to_cap: Optional[Float32],
        stream: cuda.CUstream,
    ):
        c = self.config
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        q_tma = make_tma(load, gqa_packed(q), ((c.gqa_ratio, c.q_positions), c.panel))
        k_tma = make_tma(load, tokens_first(k, c.paged), (c.box, (self.raw_ring if c.fp8_cache else self.kv_ring).columns))
        v_tma = make_tma(load, tokens_first(v, c.paged), (c.box, (self.raw_ring if c.converts else self.v_ring).columns))
        out_tma = None
        if const_expr(c.store_by_tma):
            out_tma = make_tma(store, gqa_packed(out), ((c.gqa_ratio, 64 // c.gqa_ratio), PANEL))
        mmas = Mmas(
            make_qk_mma(self.mma_dtype, c.block_n, c.warpgroups),
            make_qk_mma(self.mma_dtype, c.block_n // 2, c.warpgroups),
            make_pv_mma(self.mma_dtype, c.v_columns, c.warpgroups),
        )
        kv_heads = k.shape[2] if const_expr(c.paged) else k.shape[1]
        counter = cute.make_tensor(cute.make_ptr(Int32, counters, cute.AddressSpace.gmem, assumed_align=4), cute.make_layout(2))
        # An upper bound of tiles: each sequence may end with a partial tile.
        most = (cute.ceil_div(q.shape[0], c.positions) + cu_seqlens.shape[0] - 1) * kv_heads
        self.kernel(
            q_tma, k_tma, v_tma, out_tma, out, Sequences(cu_seqlens, cache_seqlens, page_table), counter, lse,
            Sinks(sinks, sinks_kind), scale, causal, kv_heads, mmas,
            (Scales(q_scales, q_apart), Scales(k_scales, k_apart), Scales(v_scales, v_apart)), window_left, to_cap,
        ).launch(
            grid=(cutlass.min(most, sms), 1, 1), block=(c.threads, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        q: Tma,
        k: Tma,
        v: Tma,
        out_tma: Optional[Tma],
        out: cute.Tensor,
        sequences: Sequences,
        counter: cute.Tensor,
        lse: Int64,
        sinks: Sinks,
        scale: Float32,
        causal: Int32,
        kv_heads: Int32,
        mmas: Mmas,
        scales: tuple,
        window_left: Int32,
        to_cap: Optional[Float32],
    ):
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = self.shared_of(SmemAllocator().allocate(self.storage()))
        if warp_index == 0:
            cpasync.prefetch_descriptor(q.atom)
            cpasync.prefetch_descriptor(k.atom)
            cpasync.prefetch_descriptor(v.atom)
            if const_expr(self.config.store_by_tma):
                cpasync.prefetch_descriptor(out_tma.atom)
            with cute.arch.elect_one():
                if const_expr(self.config.splits_q):
                    for wg in cutlass.range_constexpr(self.config.warpgroups):
                        shared.q_pipe.init(wg, 4)
                else:
                    for stage in cutlass.range_constexpr(self.config.q_stages):
                        shared.q_pipe.init(stage, 4 * self.config.warpgroups)
                for stage in cutlass.range_constexpr(self.config.kv_stages):
                    shared.k_pipe.init(stage, 4 * self.config.warpgroups)
                    shared.v_pipe.init(stage, 4 * self.config.warpgroups)
                    if const_expr(self.config.converts):
                        shared.v_pipe.full.init(stage, CONVERTERS)
                    if const_expr(self.config.fp8_cache):
                        shared.k_pipe.full.init(stage, CONVERTERS)
                if const_expr(self.config.converts):
                    for stage in cutlass.range_constexpr(self.config.raw_stages):
                        shared.raw_pipe.init(stage, CONVERTERS)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # PDL: everything above overlaps with the tail of the preceding kernel.
        cute.arch.griddepcontrol_wait()

        if warp_index < 4:
            cute.arch.setmaxregister_decrease(self.config.producer_registers)
            if warp_index == 0:
                self.produce(shared, q, k, v, sequences, counter, causal, kv_heads, scales, window_left)
            elif const_expr(self.config.converts):
                self.convert(shared, warp_index - 1, causal, window_left)
        else:
            cute.arch.setmaxregister_increase(self.config.consumer_registers)
            self.consume(shared, Output(out_tma, out, lse, sinks), scale, causal, window_left, to_cap, mmas)

    # -- producer warp ---------------------------------------------------------------------------------------------------------

    def tiles(self) -> LongestFirst:
        c = self.config
        return LongestFirst(c.positions, (c.section_mib << 20) // (16 * 2 * sum(c.widths)), self.lengths_of)

    def lengths_of(self, sequences: Sequences, at: Int32):
        """A sequence's first token, its number of queries and its number of keys."""
        start = sequences.cu_seqlens[at]
        q_len = sequences.cu_seqlens[at + 1] - start
        kv_len = q_len
        if const_expr(self.config.paged):
            kv_len = sequences.cache_seqlens[at]
        if const_expr(self.config.own_kv):
            kv_len = sequences.cache_seqlens[at + 1] - sequences.cache_seqlens[at]
        return start, q_len, kv_len

    @cute.jit
    def produce(
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
        """The producer warp. It finds this CTA's tiles one by one, and loads their Q, K and V as far ahead as the rings allow."""
        c = self.config
        lane = cute.arch.lane_idx()
        batch = sequences.cu_seqlens.shape[0] - 1
        index, ctas = own_indices()
        tiles, queue = self.tiles(), Queue(counter, ctas)
        search = tiles.begin()
        q_at, k_at, v_at, raw_at = first_to_fill(), first_to_fill(), first_to_fill(), first_to_fill()

        while tiles.has(search):
            search = tiles.seek(search, index, sequences, batch, kv_heads)
            if const_expr(not c.splits_q):
                shared.q_pipe.acquire(q_at)
            if tiles.has(search):
                tile = tiles.item(search, index, lane)
                keys = Keys(tile.sequence, self.first_key(sequences, tile.sequence, tile.start), tile.kv_len, tile.kv_head)
                ticket = queue.prefetch(lane)

                if const_expr(c.converts):
                    q_scales, k_scales, v_scales = scales
                    qk_scale, v_scale = q_scales.of(tile.kv_head) * k_scales.of(tile.kv_head), v_scales.of(tile.kv_head)
                    of_tile = registers.bits_of(qk_scale), registers.bits_of(v_scale)
                else:
                    of_tile = ()
                if const_expr(not c.splits_q):
                    if lane == 0:
                        shared.record(q_at).write(*tile.record, *of_tile)
                    cute.arch.sync_warp()
                first, end = self.blocks_seen(tile.q_len, tile.kv_len, tile.position, causal, window_left)

                if const_expr(not c.splits_q):
                    with cute.arch.elect_one():
                        shared.q_pipe.commit(q_at, c.q_bytes)
                    self.load_q(shared, q, q_at, tile.start + tile.position, tile.kv_head)

                # Blocks are loaded in descending order, and values one block after their keys.
                for i in cutlass.range(end - first + 1, unroll=1):
                    if i < end - first:
                        if const_expr(c.fp8_cache):
                            raw_at = self.load_raw(shared, k, raw_at, end - 1 - i, keys, sequences.page_table)
                        else:
                            k_boxes = self.kv_ring.boxes(shared.storage.k, c.box)
                            self.load_kv(k_boxes, c.kv_bytes, shared.k_pipe, k, k_at, end - 1 - i, keys, sequences.page_table)
                            k_at = advance(k_at, c.kv_stages)
                    if const_expr(c.splits_q):
                        if i == 0:  # a K stage is free before the Q stage is
                            self.load_split_q(shared, q, q_at, (*tile.record, *of_tile))
                    if i > 0:
                        if const_expr(c.converts):
                            raw_at = self.load_raw(shared, v, raw_at, end - i, keys, sequences.page_table)
                        else:
                            v_boxes = self.v_ring.boxes(shared.storage.v, c.box)
                            self.load_kv(v_boxes, c.v_bytes, shared.v_pipe, v, v_at, end - i, keys, sequences.page_table)
                            v_at = advance(v_at, c.kv_stages)

                index = queue.next(ticket)
            elif const_expr(c.splits_q):
                self.end_split_q(shared, q_at)
            else:
                if lane == 0:
                    shared.record(q_at).write_end()
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    shared.q_pipe.full.arrive(q_at)
            q_at = self.next_q(q_at)

        cute.arch.griddepcontrol_launch_dependents()
        queue.finish(lane)

    # -- loads -----------------------------------------------------------------------------------------------------------------

    @cute.jit
    def load_q(self, shared: Shared, q: Tma, at: Cursor, token: Int32, kv_head: Int32):
        """Loads a Q tile: all query heads of a KV head, from a token on."""
        c = self.config
        box = ((c.gqa_ratio, c.positions), c.panel)
        tiles = self.q_ring.packed_boxes(shared.storage.q, c.gqa_ratio, c.positions)
        for panel in cutlass.range_constexpr(self.q_ring.panels):
            source = cute.domain_offset(((kv_head * c.gqa_ratio, token), panel * c.panel), q.tensor)
            tma_load(q.atom, source, box, tiles[None, None, panel, 0, at.stage], shared.q_pipe.full.of(at))

    @cute.jit
    def load_split_q(self, shared: Shared, q: Tma, q_at: Cursor, numbers: tuple):
        """Loads each warpgroup's queries of a tile as soon as the warpgroup has released its previous queries. Writes the tile's
        records.

        Args:
            numbers: the values of the record.
        """
        c = self.config
        start, _, _, position, kv_head, *_ = numbers
        box = ((c.gqa_ratio, c.q_positions), c.panel)
        tiles = self.q_ring.packed_boxes(shared.storage.q, c.gqa_ratio, c.q_positions, c.warpgroups)
        for wg in cutlass.range_constexpr(c.warpgroups):
            at = Cursor(Int32(wg), q_at.phase)
            shared.q_pipe.acquire(at)
            if cute.arch.lane_idx() == 0:
                shared.record(Cursor(at.stage, at.phase ^ 1)).write(*numbers)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                shared.q_pipe.commit(at, c.q_bytes)
            token = start + position + wg * c.q_positions
            for panel in cutlass.range_constexpr(self.q_ring.panels):
                source = cute.domain_offset(((kv_head * c.gqa_ratio, token), panel * c.panel), q.tensor)
                tma_load(q.atom, source, box, tiles[None, None, panel, wg, 0], shared.q_pipe.full.of(at))

    @cute.jit
    def end_split_q(self, shared: Shared, q_at: Cursor):
        """Signals to each warpgroup that there are no more tiles."""
        for wg in cutlass.range_constexpr(self.config.warpgroups):
            at = Cursor(Int32(wg), q_at.phase)
            shared.q_pipe.acquire(at)
            if cute.arch.lane_idx() == 0:
                shared.record(Cursor(at.stage, at.phase ^ 1)).write_end()
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                shared.q_pipe.full.arrive(at)

    @cute.jit
    def first_key(self, sequences: Sequences, sequence: Int32, token: Int32) -> Int32:
        """The first key row of a sequence with ragged K/V. ``token``: the sequence's first query row."""
        if const_expr(self.config.own_kv):
            token = sequences.cache_seqlens[sequence]
        return token

    @cute.jit
    def load_raw(self, shared: Shared, kv: Tma, at: Cursor, block: Int32, keys: Keys, page_table: Optional[cute.Tensor]):
        """Loads an fp8 block that the converter warps convert. Returns the cursor of the next one."""
        c = self.config
        boxes = self.raw_ring.boxes(shared.storage.raw, c.box)
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
        """Loads a block of a sequence's keys, or of its values, once its stage is empty.

        Args:
            boxes: see `Ring.boxes`.
            size: bytes of the block.
        """
        c = self.config
        pipe.acquire(at)
        with cute.arch.elect_one():
            pipe.commit(at, size)
        full = pipe.full.of(at)
        columns, panels = boxes.shape[1], boxes.shape[3]
        if const_expr(c.paged):
            # A lane holds a page index. Page-table entries beyond the sequence are undefined: use its last page instead.
            pages = c.block_n // c.box
            lane = cute.arch.lane_idx()
            last = cutlass.max(keys.kv_len - 1, 0) // c.page_size
            number, slot = block * pages + lane % pages, 0
            if const_expr(c.page_size > c.block_n):  # a block lies within a page
                number, slot = block * c.block_n // c.page_size, block * c.block_n % c.page_size
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
