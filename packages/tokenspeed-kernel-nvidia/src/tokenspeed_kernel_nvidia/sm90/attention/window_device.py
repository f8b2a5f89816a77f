"""The device code of `window`: host side, and the warps that feed. `window_tile_device` has the warpgroups that compute.

A CTA has four warpgroups. The first one feeds: warp 0 brings keys and values, warp 1 queries, and warp 2 clears rows of V that are
no keys of the sequence, so that a probability of zero times what lies there is zero. The other three compute: tile c of the CTA is
of warpgroup c % 3, from Q @ K.T through softmax to the store of O, and no warpgroup ever waits for another one.

Lost, at 64 sequences with 16 new tokens over 8192, where this takes 15.8 us in graphs of 7 calls with another kernel after each: a
warp each for keys and values (16.4), that and the first keys brought to the L2 cache before the wait (16.7; back to back 14.3
instead of 14.5), a warp that finds items and has numbers of pages brought ahead of the others (16.4), and key heads of a sequence
one after another in one CTA instead of side by side in several (17.9).
"""

from typing import Any, Optional

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from tokenspeed_kernel_nvidia.sm90.attention.registers import ballot, type_of, warp_prefix
from tokenspeed_kernel_nvidia.sm90.attention.window import CONSUMERS, LANES, REACH, Config
from tokenspeed_kernel_nvidia.sm90.attention.window_tile_device import (
    COUNT,
    FIRST,
    HEAD,
    LENGTH,
    PANEL,
    POSITION,
    QUERY,
    SHIFT,
    Compute,
)

# Boxes of a cache's keys that are asked for at once. One by one, 64 sequences with 16 new tokens take 21 us instead of 12.
UNROLL = 4
FEEDERS = 128  # threads of the feeding warpgroup


def host(config: Config) -> Any:
    """The host function of a program: builds the TMA descriptors and launches."""
    return Window(config)


def fake_arguments(config: Config) -> tuple[Any, ...]:
    """Stand-ins for its arguments: dtypes, ranks and alignments, no sizes."""
    sym, dtype = cute.sym_int, type_of(config.dtype)

    def rows(*shape: Any) -> Any:
        """Of head_dim contiguous numbers each, which begin at multiples of 16 bytes."""
        strides = tuple(cute.sym_int64(divisibility=8) for _ in shape)
        return make_fake_tensor(dtype, (*shape, config.head_dim), (*strides, 1), assumed_align=16)

    def ints(*shape: Any) -> Any:
        strides = tuple(cute.sym_int64() for _ in shape[:-1])
        return make_fake_tensor(Int32, shape, (*strides, 1), assumed_align=4)

    tokens, heads, kv_heads, batch = sym(), sym(), sym(), sym()
    keys = (sym(), sym()) if config.paged else (tokens,)
    k, v = rows(*keys, kv_heads), rows(*keys, kv_heads)
    paging = (ints(batch, sym()), ints(batch)) if config.paged else (None, None)
    scalars = Int64(0), Int64(0), Int32(0), Int32(0), Int32(0), Float32(0), Int32(0)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return rows(tokens, heads), k, v, rows(tokens, heads), ints(sym()), *paging, *scalars, stream


class Window(Compute):
    """One program."""

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
        sinks_dtype: Int32,
        window_left: Int32,
        block: Int32,
        scale_log2: Float32,
        grid: Int32,
        stream,
    ):
        dtype = self.dtype
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
        tile = cute.tile_to_shape(atom, (64, self.head_dim), (0, 1))
        box = cute.tile_to_shape(atom, (self.box, PANEL), (0, 1))
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        # ((heads, tokens), head_dim): a tile takes heads of one token, then of the next one.
        tiler = ((self.heads, self.positions), self.head_dim)
        q_atom, q_tma = cpasync.make_tiled_tma_atom(load, self.folded(q), tile, tiler)
        out_atom, out_tma = cpasync.make_tiled_tma_atom(store, self.folded(out), tile, tiler)
        # (tokens, head_dim, heads) or (tokens of a page, head_dim, heads, pages).
        order = [1, 3, 2, 0] if cutlass.const_expr(self.paged) else [0, 2, 1]
        k_turned, v_turned = (cute.make_tensor(x.iterator, cute.select(x.layout, mode=order)) for x in (k, v))
        k_atom, k_tma = cpasync.make_tiled_tma_atom(load, k_turned, box, (self.box, PANEL))
        v_atom, v_tma = cpasync.make_tiled_tma_atom(load, v_turned, box, (self.box, PANEL))
        shared, registers = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
        by_k, by_n = OperandMajorMode.K, OperandMajorMode.MN
        qk = cute.make_tiled_mma(warpgroup.MmaF16BF16Op(dtype, Float32, (64, self.keys, 16), shared, by_k, by_k))
        pv = cute.make_tiled_mma(warpgroup.MmaF16BF16Op(dtype, Float32, (64, self.head_dim, 16), registers, by_k, by_n))
        page_size = k.shape[1] if cutlass.const_expr(self.paged) else Int32(1)
        self.kernel(
            q_atom, q_tma, k_atom, k_tma, v_atom, v_tma, out_atom, out_tma, out, cu_seqlens, page_table, cache_seqlens, lse, sinks,
            sinks_dtype, window_left, block, scale_log2, page_size, cute.size(k_turned, mode=[2]), q.shape[1], qk, pv,
        ).launch(
            grid=[grid, 1, 1], block=[FEEDERS + CONSUMERS * 128, 1, 1], min_blocks_per_mp=1, stream=stream, use_pdl=True
        )  # fmt: skip

    def folded(self, x: cute.Tensor) -> cute.Tensor:
        layout = cute.make_layout(((x.shape[1], x.shape[0]), x.shape[2]), stride=((x.stride[1], x.stride[0]), x.stride[2]))
        return cute.make_tensor(x.iterator, layout)

    @cute.kernel
    def kernel(
        self, q_atom: cute.CopyAtom, q_tma: cute.Tensor, k_atom: cute.CopyAtom, k_tma: cute.Tensor, v_atom: cute.CopyAtom,
        v_tma: cute.Tensor, out_atom: cute.CopyAtom, out_tma: cute.Tensor, out: cute.Tensor, cu_seqlens: cute.Tensor,
        page_table: Optional[cute.Tensor], cache_seqlens: Optional[cute.Tensor], lse: Int64, sinks: Int64, sinks_dtype: Int32,
        window_left: Int32, block: Int32, scale_log2: Float32, page_size: Int32, kv_heads: Int32, all_heads: Int32,
        qk: cute.TiledMma, pv: cute.TiledMma,
    ):  # fmt: skip
        thread = cute.arch.thread_idx()[0]
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = thread % LANES
        storage = cutlass.utils.SmemAllocator().allocate(self.storage())

        if warp_index == 0:
            for descriptor in (q_atom, k_atom, v_atom, out_atom):
                cpasync.prefetch_descriptor(descriptor)
            with cute.arch.elect_one():
                for slot in cutlass.range_constexpr(self.slots):
                    cute.arch.mbarrier_init(storage.q_full.data_ptr() + slot, 1)
                    cute.arch.mbarrier_init(storage.q_empty.data_ptr() + slot, 4)
                for stage in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(storage.k_full.data_ptr() + stage, 1)
                    cute.arch.mbarrier_init(storage.v_full.data_ptr() + stage, 1)
                    cute.arch.mbarrier_init(storage.v_ready.data_ptr() + stage, 1)
                    cute.arch.mbarrier_init(storage.kv_empty.data_ptr() + stage, CONSUMERS * 4)
            cute.arch.mbarrier_init_fence()

        # Rows of V behind a stage's keys are only ever multiplied by zero.
        panel_words = self.value_rows * PANEL // 4
        words = cute.make_layout(
            (PANEL // 4, self.value_rows, self.panels, self.stages), stride=(1, 16, panel_words, self.panels * panel_words)
        )
        v_words = cute.make_tensor(cute.recast_ptr(storage.v.data_ptr(), dtype=Int64), words)
        if thread < 128:
            for stage in cutlass.range_constexpr(self.stages):
                for panel in cutlass.range_constexpr(self.panels):
                    v_words[thread % 16, self.rows + thread // 16, panel, stage] = Int64(0)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        # The kernel before may still write what is read below, and read what is written. The next one may begin when there is room.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        if warp_index < 4:
            cute.arch.setmaxregister_decrease(self.config.feeder_registers)
            if warp_index == 0:
                self.feed_keys(
                    storage, k_atom, k_tma, v_atom, v_tma, cu_seqlens, page_table, cache_seqlens, block, page_size, kv_heads, lane
                )
            elif warp_index == 1:
                self.feed_queries(storage, q_atom, q_tma, cu_seqlens, cache_seqlens, block, kv_heads, lane)
            elif warp_index == 2:
                self.clear_values(storage, v_words, lane)
        else:
            cute.arch.setmaxregister_increase(self.config.registers)
            self.compute(
                storage, out_atom, out_tma, out, lse, sinks, sinks_dtype, window_left, scale_log2, all_heads, qk, pv, thread
            )

    @cute.jit
    def sequences(self, cu_seqlens, cache_seqlens, window, before, block, lane):
        """A sequence a lane: where its queries begin, the position of the first one, its length, and blocks so far and of it.

        Blocks of positions begin at a multiple of 8, at or before the first query. A sequence past the last has none.
        """
        index = window + lane
        begin, first, length, blocks = Int32(0), Int32(0), Int32(0), Int32(0)
        if index < cu_seqlens.shape[0] - 1:
            begin = cu_seqlens[index]
            queries = cu_seqlens[index + 1] - begin
            length = cache_seqlens[index] if cutlass.const_expr(self.paged) else queries
            first = length - queries
            if queries > 0:
                blocks = (length - first // 8 * 8 + block - 1) // block
        return begin, first, length, before + warp_prefix(blocks, lane), blocks

    @cute.jit
    def item(self, lanes, index, kv_heads, block):
        """An item, all heads of a block together: its lane, key head, first position, and number of tiles of one key head each.

        And of its sequence: where queries begin, the position of the first one, and the length.
        """
        begin, first, length, sums, blocks = lanes
        number, head = index // kv_heads, index % kv_heads
        lane = cute.arch.popc(ballot(sums <= number))  # the first whose running sum is greater
        at, start, end = (cute.arch.shuffle_sync(x, lane) for x in (begin, first, length))
        position = start // 8 * 8 + (number - cute.arch.shuffle_sync(sums - blocks, lane)) * block
        tiles = (cutlass.min(block, end - position) + self.positions - 1) // self.positions
        return lane, head, position, tiles, at, start, end

    @cute.jit
    def feed_keys(
        self, storage, k_atom, k_tma, v_atom, v_tma, cu_seqlens, page_table, cache_seqlens, block, page_size, kv_heads, lane
    ):
        """Brings an item's keys and values, and says in the stage's record what it is."""
        batch = cu_seqlens.shape[0] - 1
        record = self.records(storage)
        k_boxes, v_boxes = self.boxes(storage.k, self.rows), self.boxes(storage.v, self.value_rows)
        item = cute.arch.block_idx()[0]
        grid = cute.arch.grid_dim()[0]
        stage, phase = Int32(0), Int32(1)
        before, window = Int32(0), Int32(0)
        while window < batch:
            lanes = self.sequences(cu_seqlens, cache_seqlens, window, before, block, lane)
            last = cute.arch.shuffle_sync(lanes[3], LANES - 1)
            while item < last * kv_heads:
                who, head, position, tiles, at, start, end = self.item(lanes, item, kv_heads, block)
                row = position - REACH
                shift = Int32(0)
                if cutlass.const_expr(self.paged):
                    shift = (row // 8) & 1
                    row -= shift * 8
                wanted = shift * 8 + tiles * self.positions + REACH + 8
                first_box = cutlass.max(-row, 0) // self.box
                after_box = (cutlass.min(cutlass.min(wanted, end - row), self.rows) + self.box - 1) // self.box
                page, token = Int32(0), Int32(0)  # of the box of this lane's number
                if cutlass.const_expr(self.paged):
                    if lane >= first_box and lane < after_box:
                        token = row + lane * self.box
                        page = page_table[window + who, token // page_size]
                        token = token % page_size
                cute.arch.mbarrier_wait(storage.kv_empty.data_ptr() + stage, phase)
                if lane == 0:
                    record[COUNT, stage] = tiles * self.splits
                    record[POSITION, stage] = position
                    record[QUERY, stage] = at + position - start
                    record[FIRST, stage] = start
                    record[LENGTH, stage] = end
                    record[HEAD, stage] = head
                    record[SHIFT, stage] = shift
                    many = (after_box - first_box) * (self.box * self.head_dim * 2)
                    cute.arch.mbarrier_arrive_and_expect_tx(storage.k_full.data_ptr() + stage, many)
                    cute.arch.mbarrier_arrive_and_expect_tx(storage.v_full.data_ptr() + stage, many)
                for which in cutlass.range_constexpr(2):
                    atom = (k_atom, v_atom)[which]
                    tensor = (k_tma, v_tma)[which]
                    boxes = (k_boxes, v_boxes)[which]
                    full = (storage.k_full, storage.v_full)[which].data_ptr() + stage
                    for index in cutlass.range(first_box, after_box, unroll=UNROLL if self.paged else 1):
                        of_page, from_token = cute.arch.shuffle_sync(page, index), at + row + index * self.box
                        if cutlass.const_expr(self.paged):
                            from_token = cute.arch.shuffle_sync(token, index)
                        for panel in cutlass.range_constexpr(self.panels):
                            if cutlass.const_expr(self.paged):
                                moved = cute.domain_offset((from_token, panel * PANEL, head, of_page), tensor)[None, None, 0, 0]
                            else:
                                moved = cute.domain_offset((from_token, panel * PANEL, head), tensor)[None, None, 0]
                            source = cute.local_tile(moved, (self.box, PANEL), (0, 0))
                            into, out_of = cpasync.tma_partition(
                                atom, 0, cute.make_layout(1), cute.group_modes(boxes[None, None, index, panel, stage], 0, 2),
                                cute.group_modes(source, 0, 2),
                            )  # fmt: skip
                            cute.copy(atom, out_of, into, tma_bar_ptr=full)
                stage += 1
                if stage == self.stages:
                    stage = Int32(0)
                    phase ^= 1
                item += grid
            before = last
            window += LANES
        cute.arch.mbarrier_wait(storage.kv_empty.data_ptr() + stage, phase)
        if lane == 0:
            record[COUNT, stage] = Int32(0)
            record[SHIFT, stage] = Int32(0)  # scores of no tile are begun all the same
            cute.arch.mbarrier_arrive(storage.k_full.data_ptr() + stage)
            cute.arch.mbarrier_arrive(storage.v_full.data_ptr() + stage)

    @cute.jit
    def feed_queries(self, storage, q_atom, q_tma, cu_seqlens, cache_seqlens, block, kv_heads, lane):
        """Brings the same items' tiles of queries, one after another."""
        q_tiles = self.tiles(storage.q, self.slots)
        batch = cu_seqlens.shape[0] - 1
        item = cute.arch.block_idx()[0]
        grid = cute.arch.grid_dim()[0]
        slot, phase = Int32(0), Int32(1)
        before, window = Int32(0), Int32(0)
        tiler = ((self.heads, self.positions), self.head_dim)
        while window < batch:
            lanes = self.sequences(cu_seqlens, cache_seqlens, window, before, block, lane)
            last = cute.arch.shuffle_sync(lanes[3], LANES - 1)
            while item < last * kv_heads:
                _, head, position, tiles, at, start, _ = self.item(lanes, item, kv_heads, block)
                for tile in cutlass.range(tiles * self.splits, unroll=1):
                    token = at + position - start + tile // self.splits * self.positions
                    query_head = (head * self.splits + tile % self.splits) * self.heads
                    cute.arch.mbarrier_wait(storage.q_empty.data_ptr() + slot, phase)
                    full = storage.q_full.data_ptr() + slot
                    if lane == 0:
                        cute.arch.mbarrier_arrive_and_expect_tx(full, 64 * self.head_dim * 2)
                    moved = cute.domain_offset(((query_head, token), 0), q_tma)
                    source = cute.local_tile(moved, tiler, (0, 0))
                    into, out_of = cpasync.tma_partition(
                        q_atom,
                        0,
                        cute.make_layout(1),
                        cute.group_modes(q_tiles[None, None, slot], 0, 2),
                        cute.group_modes(source, 0, 2),
                    )
                    cute.copy(q_atom, out_of, into, tma_bar_ptr=full)
                    slot += 1
                    if slot == self.slots:
                        slot = Int32(0)
                        phase ^= 1
                item += grid
            before = last
            window += LANES

    @cute.jit
    def clear_values(self, storage, v_words, lane):
        """Passes an item's values on, when rows are zero that are before or behind the sequence."""
        record = self.records(storage)
        stage, phase = Int32(0), Int32(0)
        more = Boolean(True)
        while more:
            cute.arch.mbarrier_wait(storage.v_full.data_ptr() + stage, phase)
            count = record[COUNT, stage]
            more = count > 0
            if more:
                row = record[POSITION, stage] - REACH - record[SHIFT, stage] * 8
                behind = cutlass.min(record[SHIFT, stage] * 8 + count // self.splits * self.positions + REACH + 8, self.rows)
                from_row = record[LENGTH, stage] - row
                if row < 0 or from_row < behind:
                    for index in cutlass.range(lane, -row * 16, LANES, unroll=1):
                        for panel in cutlass.range_constexpr(self.panels):
                            v_words[index % 16, index // 16, panel, stage] = Int64(0)
                    for index in cutlass.range(from_row * 16 + lane, behind * 16, LANES, unroll=1):
                        for panel in cutlass.range_constexpr(self.panels):
                            v_words[index % 16, index // 16, panel, stage] = Int64(0)
                    cute.arch.fence_view_async_shared()
                    cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(storage.v_ready.data_ptr() + stage)
                stage += 1
                if stage == self.stages:
                    stage = Int32(0)
                    phase ^= 1
