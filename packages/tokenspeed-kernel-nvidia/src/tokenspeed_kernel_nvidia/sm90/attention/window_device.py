"""Device code of the sliding-window kernel: see `window` for what it computes and how the work is cut.

A CTA has four warpgroups. The first one feeds: warp 0 brings keys and values, warp 1 queries, and warp 2 clears rows of V that are no
keys of the sequence, so that a probability of zero times what lies there is zero. The other three compute: tile c of the CTA is of
warpgroup c % 3, from Q @ K.T through softmax to the store of O, and no warpgroup ever waits for another one.

Layout in shared memory. Q and O tiles: 64 rows, row = position * HEADS + head. K and V: rows of 64 numbers (one panel of head_dim 64,
two of 128) in the 128-byte swizzle, whose pattern repeats every 8 rows. So a view of K or V may begin at any multiple of 8 keys, and
all tiles of an item read one copy of the keys.
"""

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from tokenspeed_kernel_nvidia.sm90.attention.registers import ballot, exp2, quad_max, quad_sum, row_maxima, type_of, warp_prefix
from tokenspeed_kernel_nvidia.sm90.attention.window import CONSUMERS, LANES, REACH, Config

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
PANEL = 64  # columns of a 128-byte swizzled row
UNROLL = 4  # boxes of keys a feeding warp asks for at once
FEEDERS = 128  # threads of the feeding warpgroup
COMPUTERS = CONSUMERS * 128
# What a stage's record says of its item, for the computing warpgroups.
COUNT, POSITION, QUERY, FIRST, LENGTH, HEAD, SHIFT, RECORD = range(8)


@cute.jit
def log2(x: Float32) -> Float32:
    return cute.arch.inline_ptx("lg2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


@cute.jit
def pack(low: Float32, high: Float32, dtype: cutlass.Constexpr) -> Int32:
    """Two numbers, rounded to 16 bits, in one register."""
    kind = "bf16x2" if cutlass.const_expr(dtype is cutlass.BFloat16) else "f16x2"
    return cute.arch.inline_ptx(f"cvt.rn.{kind}.f32 {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Int32], read_only_args=[high, low])


class Window:
    """One program: the layouts and shapes that follow from a Config, and the kernel."""

    def __init__(self, config: Config):
        self.config = config
        self.dtype = type_of(config.dtype)
        self.head_dim = config.head_dim
        self.panels = config.head_dim // PANEL
        self.heads = config.heads
        self.positions = config.positions
        self.splits = config.group // config.heads
        self.paged = config.paged
        self.stages = config.stages
        self.slots = CONSUMERS * config.queries
        self.box = config.box
        self.keys = REACH + self.positions  # columns of S
        self.inner = (self.keys + 15) // 16 * 16  # of P: whole steps of 16
        self.rows = config.rows
        self.value_rows = config.rows + 8  # a last tile's step of 16 ends 8 rows behind what a stage holds

    def host(self) -> Any:
        if self.paged:

            @cute.jit
            def attend_paged(
                q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, out: cute.Tensor, cu_seqlens: cute.Tensor, page_table: cute.Tensor,
                cache_seqlens: cute.Tensor, lse: Int64, sinks: Int64, sinks_dtype: Int32, window_left: Int32, block: Int32,
                scale_log2: Float32, grid: Int32, stream,
            ):  # fmt: skip
                self.launch(
                    q, k, v, out, cu_seqlens, page_table, cache_seqlens, lse, sinks, sinks_dtype, window_left, block, scale_log2,
                    grid, stream,
                )  # fmt: skip

            return attend_paged

        @cute.jit
        def attend(
            q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, out: cute.Tensor, cu_seqlens: cute.Tensor, lse: Int64, sinks: Int64,
            sinks_dtype: Int32, window_left: Int32, block: Int32, scale_log2: Float32, grid: Int32, stream,
        ):  # fmt: skip
            self.launch(
                q, k, v, out, cu_seqlens, None, None, lse, sinks, sinks_dtype, window_left, block, scale_log2, grid, stream
            )

        return attend

    def fake_arguments(self) -> tuple[Any, ...]:
        sym = cute.sym_int

        def rows(*shape: Any) -> Any:
            """A tensor whose last axis is contiguous, and whose rows begin at multiples of 16 bytes."""
            strides = tuple(cute.sym_int64(divisibility=8) for _ in shape[:-1])
            return make_fake_tensor(self.dtype, shape, (*strides, 1), assumed_align=16)

        def ints(*shape: Any) -> Any:
            strides = tuple(cute.sym_int64() for _ in shape[:-1])
            return make_fake_tensor(Int32, shape, (*strides, 1), assumed_align=4)

        tokens, heads, kv_heads, batch = sym(), sym(), sym(), sym()
        q, out = rows(tokens, heads, self.head_dim), rows(tokens, heads, self.head_dim)
        scalars = (Int64(0), Int64(0), Int32(0), Int32(0), Int32(0), Float32(0), Int32(0), make_fake_stream(use_tvm_ffi_env_stream=True))
        if not self.paged:
            k, v = (rows(tokens, kv_heads, self.head_dim) for _ in range(2))
            return (q, k, v, out, ints(sym()), *scalars)
        pages, size = sym(), sym()
        k, v = (rows(pages, size, kv_heads, self.head_dim) for _ in range(2))
        return (q, k, v, out, ints(sym()), ints(batch, sym()), ints(batch), *scalars)

    @cute.jit
    def launch(
        self, q, k, v, out, cu_seqlens, page_table, cache_seqlens, lse, sinks, sinks_dtype, window_left, block, scale_log2, grid, stream
    ):
        dtype = self.dtype
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
        tile = cute.tile_to_shape(atom, (64, self.head_dim), (0, 1))
        box = cute.tile_to_shape(atom, (self.box, PANEL), (0, 1))
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        # ((heads, tokens), head_dim): a tile takes heads of one token, then the next token.
        folded = [
            cute.make_tensor(
                x.iterator, cute.make_layout(((x.shape[1], x.shape[0]), x.shape[2]), stride=((x.stride[1], x.stride[0]), x.stride[2]))
            )
            for x in (q, out)
        ]
        tiler = ((self.heads, self.positions), self.head_dim)
        q_atom, q_tma = cpasync.make_tiled_tma_atom(load, folded[0], tile, tiler)
        out_atom, out_tma = cpasync.make_tiled_tma_atom(store, folded[1], tile, tiler)
        # (tokens, head_dim, heads) or (tokens of a page, head_dim, heads, pages).
        order = (1, 3, 2, 0) if cutlass.const_expr(self.paged) else (0, 2, 1)
        turned = [cute.make_tensor(x.iterator, cute.select(x.layout, mode=list(order))) for x in (k, v)]
        k_atom, k_tma = cpasync.make_tiled_tma_atom(load, turned[0], box, (self.box, PANEL))
        v_atom, v_tma = cpasync.make_tiled_tma_atom(load, turned[1], box, (self.box, PANEL))
        qk = cute.make_tiled_mma(
            warpgroup.MmaF16BF16Op(
                dtype, Float32, (64, self.keys, 16), warpgroup.OperandSource.SMEM, OperandMajorMode.K, OperandMajorMode.K
            )
        )
        pv = cute.make_tiled_mma(
            warpgroup.MmaF16BF16Op(
                dtype, Float32, (64, self.head_dim, 16), warpgroup.OperandSource.RMEM, OperandMajorMode.K, OperandMajorMode.MN
            )
        )
        page_size = k.shape[1] if cutlass.const_expr(self.paged) else Int32(1)
        kv_heads = k.shape[2] if cutlass.const_expr(self.paged) else k.shape[1]
        self.kernel(
            q_atom, q_tma, k_atom, k_tma, v_atom, v_tma, out_atom, out_tma, out, cu_seqlens, page_table, cache_seqlens, lse, sinks,
            sinks_dtype, window_left, block, scale_log2, page_size, kv_heads, q.shape[1], qk, pv,
        ).launch(grid=[grid, 1, 1], block=[FEEDERS + COMPUTERS, 1, 1], min_blocks_per_mp=1, stream=stream)  # fmt: skip

    def storage(self) -> Any:
        dtype, cells = self.dtype, self.panels * PANEL

        @cute.struct
        class Storage:
            q: cute.struct.Align[cute.struct.MemRange[dtype, self.slots * 64 * cells], 1024]
            out: cute.struct.Align[cute.struct.MemRange[dtype, CONSUMERS * 64 * cells], 1024]
            k: cute.struct.Align[cute.struct.MemRange[dtype, self.stages * self.rows * cells], 1024]
            v: cute.struct.Align[cute.struct.MemRange[dtype, self.stages * self.value_rows * cells], 1024]
            q_full: cute.struct.MemRange[Int64, self.slots]
            q_empty: cute.struct.MemRange[Int64, self.slots]
            k_full: cute.struct.MemRange[Int64, self.stages]
            v_full: cute.struct.MemRange[Int64, self.stages]
            v_ready: cute.struct.MemRange[Int64, self.stages]
            kv_empty: cute.struct.MemRange[Int64, self.stages]
            record: cute.struct.MemRange[Int32, self.stages * RECORD]

        return Storage

    @cute.kernel
    def kernel(
        self, q_atom: cute.CopyAtom, q_tma: cute.Tensor, k_atom: cute.CopyAtom, k_tma: cute.Tensor, v_atom: cute.CopyAtom,
        v_tma: cute.Tensor, out_atom: cute.CopyAtom, out_tma: cute.Tensor, out: cute.Tensor, cu_seqlens: cute.Tensor, page_table,
        cache_seqlens, lse: Int64, sinks: Int64, sinks_dtype: Int32, window_left: Int32, block: Int32, scale_log2: Float32,
        page_size: Int32, kv_heads: Int32, all_heads: Int32, qk: cute.TiledMma, pv: cute.TiledMma,
    ):  # fmt: skip
        thread = cute.arch.thread_idx()[0]
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = thread % LANES
        storage = cutlass.utils.SmemAllocator().allocate(self.storage())
        swizzle = cute.make_swizzle(3, 4, 3)
        panels, cells = self.panels, self.panels * PANEL
        k_panel, v_panel = self.rows * PANEL, self.value_rows * PANEL

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
        v_words = cute.make_tensor(
            cute.recast_ptr(storage.v.data_ptr(), dtype=Int64),
            cute.make_layout((PANEL // 4, self.value_rows, panels, self.stages), stride=(1, 16, v_panel // 4, panels * v_panel // 4)),
        )
        if thread < 128:
            for stage in cutlass.range_constexpr(self.stages):
                for panel in cutlass.range_constexpr(panels):
                    v_words[thread % 16, self.rows + thread // 16, panel, stage] = Int64(0)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()

        if warp_index < 4:
            cute.arch.setmaxregister_decrease(self.config.feeder_registers)
            if warp_index == 0:
                k_boxes = storage.k.get_tensor(
                    cute.make_layout(
                        ((8, self.box // 8), PANEL, self.rows // self.box, panels, self.stages),
                        stride=((PANEL, 8 * PANEL), 1, self.box * PANEL, k_panel, panels * k_panel),
                    ),
                    swizzle=swizzle,
                )
                v_boxes = storage.v.get_tensor(
                    cute.make_layout(
                        ((8, self.box // 8), PANEL, self.rows // self.box, panels, self.stages),
                        stride=((PANEL, 8 * PANEL), 1, self.box * PANEL, v_panel, panels * v_panel),
                    ),
                    swizzle=swizzle,
                )
                self.feed_keys(
                    storage, k_atom, k_tma, k_boxes, v_atom, v_tma, v_boxes, cu_seqlens, page_table, cache_seqlens, block, page_size,
                    kv_heads, lane,
                )  # fmt: skip
            elif warp_index == 1:
                q_tiles = storage.q.get_tensor(
                    cute.make_layout(
                        ((8, 8), (PANEL, panels), self.slots), stride=((PANEL, 8 * PANEL), (1, 64 * PANEL), 64 * cells)
                    ),
                    swizzle=swizzle,
                )
                self.feed_queries(storage, q_atom, q_tma, q_tiles, cu_seqlens, cache_seqlens, block, kv_heads, lane)
            elif warp_index == 2:
                self.clear_values(storage, v_words, lane)
        else:
            cute.arch.setmaxregister_increase(self.config.registers)
            self.compute(
                storage, swizzle, out_atom, out_tma, out, lse, sinks, sinks_dtype, window_left, scale_log2, all_heads, qk, pv, thread
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
        self, storage, k_atom, k_tma, k_boxes, v_atom, v_tma, v_boxes, cu_seqlens, page_table, cache_seqlens, block, page_size, kv_heads,
        lane,
    ):  # fmt: skip
        batch = cu_seqlens.shape[0] - 1
        record = cute.make_tensor(storage.record.data_ptr(), cute.make_layout((RECORD, self.stages)))
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
                page, token = Int32(0), at + row + lane * self.box  # of a lane's box
                if cutlass.const_expr(self.paged):
                    token = row + lane * self.box
                    if lane >= first_box and lane < after_box:
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
                    for index in cutlass.range(first_box, after_box, unroll=UNROLL):
                        of_page, from_token = cute.arch.shuffle_sync(page, index), cute.arch.shuffle_sync(token, index)
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
    def feed_queries(self, storage, q_atom, q_tma, q_tiles, cu_seqlens, cache_seqlens, block, kv_heads, lane):
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
                who, head, position, tiles, at, start, end = self.item(lanes, item, kv_heads, block)
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
                        q_atom, 0, cute.make_layout(1), cute.group_modes(q_tiles[None, None, slot], 0, 2), cute.group_modes(source, 0, 2)
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
        record = cute.make_tensor(storage.record.data_ptr(), cute.make_layout((RECORD, self.stages)))
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

    @cute.jit
    def sinks_of(self, record, sinks, sinks_dtype, stage, tile, row):
        """Sinks of two rows of a tile, 8 apart, in the units of exp2; -inf where there are none."""
        head = (record[HEAD, stage] * self.splits + tile % self.splits) * self.heads
        low, high = -Float32.inf, -Float32.inf
        if record[COUNT, stage] > 0:
            for index, dtype in enumerate((Float32, cutlass.BFloat16, cutlass.Float16)):
                if sinks_dtype == index + 1:
                    table = cute.make_tensor(cute.make_ptr(dtype, sinks, cute.AddressSpace.gmem), cute.make_layout(1 << 20))
                    low = Float32(table[head + row % self.heads])
                    high = Float32(table[head + (row + 8) % self.heads])
        return low * LOG2_E, high * LOG2_E

    @cute.jit
    def compute(
        self, storage, swizzle, out_atom, out_tma, out, lse, sinks, sinks_dtype, window_left, scale_log2, all_heads, qk, pv, thread
    ):
        dtype, panels, cells = self.dtype, self.panels, self.panels * PANEL
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4 - 1
        thread = thread % 128
        lane = thread % LANES
        k_panel, v_panel = self.rows * PANEL, self.value_rows * PANEL
        q_tiles = storage.q.get_tensor(
            cute.make_layout(((8, 8), (PANEL, panels), self.slots), stride=((PANEL, 8 * PANEL), (1, 64 * PANEL), 64 * cells)),
            swizzle=swizzle,
        )
        k_tiles = storage.k.get_tensor(  # the keys of a tile, from every eighth row
            cute.make_layout(
                ((8, self.keys // 8), (PANEL, panels), (self.rows - self.keys) // 8 + 1, self.stages),
                stride=((PANEL, 8 * PANEL), (1, k_panel), 8 * PANEL, panels * k_panel),
            ),
            swizzle=swizzle,
        )
        v_tiles = storage.v.get_tensor(
            cute.make_layout(
                ((PANEL, panels), (8, self.inner // 8), (self.value_rows - self.inner) // 8 + 1, self.stages),
                stride=((1, v_panel), (PANEL, 8 * PANEL), 8 * PANEL, panels * v_panel),
            ),
            swizzle=swizzle,
        )
        out_tiles = storage.out.get_tensor(
            cute.make_layout(((8, 8), (PANEL, panels), CONSUMERS), stride=((PANEL, 8 * PANEL), (1, 64 * PANEL), 64 * cells)),
            swizzle=swizzle,
        )
        out_tile = out_tiles[None, None, group]
        record = cute.make_tensor(storage.record.data_ptr(), cute.make_layout((RECORD, self.stages)))

        qk_thread, pv_thread = qk.get_slice(thread), pv.get_slice(thread)
        q_frag = qk.make_fragment_A(qk_thread.partition_A(q_tiles))
        k_frag = qk.make_fragment_B(qk_thread.partition_B(k_tiles))
        v_frag = pv.make_fragment_B(pv_thread.partition_B(v_tiles))
        scores = cute.make_rmem_tensor(qk_thread.partition_shape_C((64, self.keys)), Float32)
        acc = cute.make_rmem_tensor(pv_thread.partition_shape_C((64, self.head_dim)), Float32)
        weights = cute.make_rmem_tensor(pv_thread.partition_shape_A((64, self.inner)), dtype)
        words = cute.recast_tensor(weights, Int32)
        rounded = cute.make_rmem_tensor(acc.shape, dtype)
        rounded_words = cute.recast_tensor(rounded, Int32)
        # Columns 8j + column and the next one of rows `row` and row + 8 are scores 4j to 4j + 3.
        groups = self.keys // 8
        row, column = thread // LANES * 16 + lane // 4, lane % 4 * 2
        rows = (row, row + 8)
        place = [r // self.heads for r in rows]  # among the tile's positions
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
        to_shared = cute.make_tiled_copy_C(stmatrix, pv).get_slice(thread)
        out_source, out_target = to_shared.retile(rounded), to_shared.partition_D(out_tile)

        k_full, v_ready, kv_empty = (x.data_ptr() for x in (storage.k_full, storage.v_ready, storage.kv_empty))
        q_full, q_empty = storage.q_full.data_ptr(), storage.q_empty.data_ptr()
        # The item whose tiles come next; `tile` counts from its first one.
        stage, phase = Int32(0), Int32(0)
        cute.arch.mbarrier_wait(k_full + stage, phase)
        count, tile = cute.arch.make_warp_uniform(record[COUNT, stage]), Int32(group)
        stage, phase, count, tile = self.seek(record, k_full, kv_empty, stage, phase, count, tile, lane)
        slot, slot_phase = Int32(group), Int32(0)
        sink_low, sink_high = self.sinks_of(record, sinks, sinks_dtype, stage, tile, row)
        eighth = cute.arch.make_warp_uniform(tile // self.splits * (self.positions // 8) + record[SHIFT, stage])
        if cutlass.const_expr(self.config.ahead):
            if count > 0:
                cute.arch.mbarrier_wait(q_full + slot, slot_phase)
            self.multiply(qk, scores, q_frag[None, None, None, slot], k_frag[None, None, None, eighth, stage])
        while count > 0:
            if cutlass.const_expr(not self.config.ahead):
                cute.arch.mbarrier_wait(q_full + slot, slot_phase)
                self.multiply(qk, scores, q_frag[None, None, None, slot], k_frag[None, None, None, eighth, stage])
            position, query = record[POSITION, stage], record[QUERY, stage]
            first, length = record[FIRST, stage], record[LENGTH, stage]
            at = tile // self.splits * self.positions
            position, query = position + at, query + at
            head_of = (record[HEAD, stage] * self.splits + tile % self.splits) * self.heads
            sink = (sink_low, sink_high)
            warpgroup.wait_group(0)
            if lane == 0:
                cute.arch.mbarrier_arrive(q_empty + slot)

            # Column c is the key at position - REACH + c.
            hidden = REACH - position
            low = [cutlass.max(REACH + p - window_left, hidden) - column for p in place]
            high = [REACH + p - column for p in place]
            if window_left != REACH - 1 or hidden > 0:
                for j in cutlass.range_constexpr(groups):
                    for e in cutlass.range_constexpr(4):
                        if 8 * j + e % 2 < low[e // 2]:
                            scores[4 * j + e] = -Float32.inf
            else:
                for j in cutlass.range_constexpr(self.positions // 8):
                    for e in cutlass.range_constexpr(4):
                        if 8 * j + e % 2 < low[e // 2]:
                            scores[4 * j + e] = -Float32.inf
            for j in cutlass.range_constexpr(REACH // 8, groups):
                for e in cutlass.range_constexpr(4):
                    if 8 * j + e % 2 > high[e // 2]:
                        scores[4 * j + e] = -Float32.inf

            total, top = [], []
            best = row_maxima(scores)
            for h in cutlass.range_constexpr(2):
                top.append(cute.arch.fmax(quad_max(best[h]) * scale_log2, sink[h]))
                total.append(exp2(sink[h] - top[h]) if lane % 4 == 0 else Float32(0.0))
            for j in cutlass.range_constexpr(groups):
                for h in cutlass.range_constexpr(2):
                    p = exp2(scores[4 * j + 2 * h] * scale_log2 - top[h])
                    p_next = exp2(scores[4 * j + 2 * h + 1] * scale_log2 - top[h])
                    total[h] += p + p_next
                    words[2 * j + h] = pack(p, p_next, dtype)
            for j in cutlass.range_constexpr(2 * groups, self.inner // 4):
                words[j] = Int32(0)

            cute.arch.mbarrier_wait(v_ready + stage, phase)
            self.multiply(pv, acc, weights, v_frag[None, None, None, eighth, stage])
            inverse = []
            for h in cutlass.range_constexpr(2):
                total[h] = quad_sum(total[h])
                inverse.append(cute.arch.rcp_approx(total[h]))
            warpgroup.wait_group(0)
            # With `ahead`, the next tile's scores are on the way while this one's output is finished. Those of none are not used.
            tile += CONSUMERS
            if tile >= count:
                stage, phase, count, tile = self.seek(record, k_full, kv_empty, stage, phase, count, tile, lane)
                if cutlass.const_expr(self.splits == 1):
                    sink_low, sink_high = self.sinks_of(record, sinks, sinks_dtype, stage, tile, row)
            if cutlass.const_expr(self.splits > 1):
                sink_low, sink_high = self.sinks_of(record, sinks, sinks_dtype, stage, tile, row)
            slot += CONSUMERS
            if slot >= self.slots:
                slot -= self.slots
                slot_phase ^= 1
            eighth = cute.arch.make_warp_uniform(tile // self.splits * (self.positions // 8) + record[SHIFT, stage])
            if cutlass.const_expr(self.config.ahead):
                if count > 0:
                    cute.arch.mbarrier_wait(q_full + slot, slot_phase)
                self.multiply(qk, scores, q_frag[None, None, None, slot], k_frag[None, None, None, eighth, stage])

            whole = position >= first and position + self.positions <= length
            for j in cutlass.range_constexpr(self.head_dim // 8):
                for h in cutlass.range_constexpr(2):
                    rounded_words[2 * j + h] = pack(acc[4 * j + 2 * h] * inverse[h], acc[4 * j + 2 * h + 1] * inverse[h], dtype)
            if whole:
                # The store before may still read what this one overwrites.
                if thread == 0:
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)
                cute.copy(to_shared, out_source, out_target)
                cute.arch.fence_view_async_shared()
                cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)
                if thread == 0:
                    moved = cute.domain_offset(((head_of, query), 0), out_tma)
                    target = cute.local_tile(moved, ((self.heads, self.positions), self.head_dim), (0, 0))
                    from_shared, to_global = cpasync.tma_partition(
                        out_atom, 0, cute.make_layout(1), cute.group_modes(out_tile, 0, 2), cute.group_modes(target, 0, 2)
                    )
                    cute.copy(out_atom, from_shared, to_global)
                    cute.arch.cp_async_bulk_commit_group()
            else:
                for h in cutlass.range_constexpr(2):
                    if position + place[h] >= first and position + place[h] < length:
                        target = out[query + place[h], head_of + rows[h] % self.heads, None]
                        target_words = cute.recast_tensor(target, Int32)
                        for j in cutlass.range_constexpr(self.head_dim // 8):
                            target_words[4 * j + lane % 4] = rounded_words[2 * j + h]
            if lse != 0 and lane % 4 == 0:
                table = cute.make_ptr(Float32, lse, cute.AddressSpace.gmem)
                for h in cutlass.range_constexpr(2):
                    if position + place[h] >= first and position + place[h] < length:
                        where = Int64(query + place[h]) * all_heads + head_of + rows[h] % self.heads
                        (table + where).store((top[h] + log2(total[h])) * LN_2)
        warpgroup.wait_group(0)
        if thread == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def seek(self, record, k_full, kv_empty, stage, phase, count, tile, lane):
        """Goes on to the item that a tile is of, and releases those before it. A count of 0 says that there are no more."""
        while count > 0 and tile >= count:
            if lane == 0:
                cute.arch.mbarrier_arrive(kv_empty + stage)
            tile -= count
            stage += 1
            if stage == self.stages:
                stage = Int32(0)
                phase ^= 1
            cute.arch.mbarrier_wait(k_full + stage, phase)
            count = cute.arch.make_warp_uniform(record[COUNT, stage])
        return stage, phase, count, tile

    @cute.jit
    def multiply(self, mma, acc, a, b):
        """acc = a @ b, begun; a is in registers or shared memory."""
        warpgroup.fence()
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, False)
        for step in cutlass.range_constexpr(cute.size(b.shape[2])):
            cute.gemm(atom, acc, a[None, None, step], b[None, None, step], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()


def host(config: Config) -> Any:
    """The host function of a program: builds the TMA descriptors and launches."""
    return Window(config).host()


def fake_arguments(config: Config) -> tuple[Any, ...]:
    """Stand-ins for its arguments: dtypes, ranks and alignments, no sizes."""
    return Window(config).fake_arguments()
