"""The device code of `prefill`."""

from __future__ import annotations

from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.utils.hopper_helpers as hopper
from cutlass import Boolean, Float32, Int32, Int64, const_expr, cute, utils
from cutlass.cute.nvgpu import cpasync, warpgroup

from . import registers
from .prefill import Config
from .prefill_tile_device import Compute


def host(config: Config):
    return Prefill(config)


def fake_arguments(config: Config):
    sym = cute.sym_int
    dtype = registers.type_of(config.dtype)
    tokens, heads, kv_heads, batch = sym(), sym(), sym(), sym()

    def rows(*shape):
        stride = (*(cute.sym_int64(divisibility=8) for _ in shape), 1)
        return cute.runtime.make_fake_tensor(dtype, (*shape, config.head_dim), stride, assumed_align=16)

    def ints(*shape):
        return cute.runtime.make_fake_compact_tensor(Int32, shape, stride_order=tuple(reversed(range(len(shape)))), assumed_align=4)

    q, out = rows(tokens, heads), rows(tokens, heads)
    if config.page_size:
        pages = sym()
        k, v = (rows(pages, config.page_size, kv_heads) for _ in range(2))
        lengths = ints(batch)
        page_table = cute.runtime.make_fake_tensor(Int32, (batch, sym()), (cute.sym_int64(), 1), assumed_align=4)
    else:
        kv_tokens = sym()
        k, v = (rows(kv_tokens, kv_heads) for _ in range(2))
        lengths = page_table = None
    starts = ints(sym())
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    scalars = (Int64(0), Int64(0), Int64(0), Int32(0), Float32(0), Int32(0), Int32(0))
    return q, k, v, out, starts, lengths, page_table, *scalars, stream


class Prefill(Compute):
    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        starts: cute.Tensor,
        lengths: Optional[cute.Tensor],
        page_table: Optional[cute.Tensor],
        counters: Int64,
        lse: Int64,
        sinks: Int64,
        sinks_kind: Int32,
        scale: Float32,
        causal: Int32,
        processors: Int32,
        stream: cuda.CUstream,
    ):
        swizzle = cute.make_swizzle(3, 4, 3)

        def swizzled(shape, stride):
            return cute.make_composed_layout(swizzle, 0, cute.make_layout(shape, stride=stride))

        q_box = swizzled(((self.group, self.positions), 64), ((64, 64 * self.group), 1))
        kv_box = swizzled((self.box, 64), (64, 1))

        def packed(x):
            layout = cute.make_layout(((x.shape[1], x.shape[0]), x.shape[2]), stride=((x.stride[1], x.stride[0]), x.stride[2]))
            return cute.make_tensor(x.iterator, layout)

        def rows_first(x):
            order = [1, 3, 2, 0] if const_expr(self.paged) else [0, 2, 1]
            return cute.make_tensor(x.iterator, cute.select(x.layout, mode=order))

        load = cpasync.CopyBulkTensorTileG2SOp()
        q_atom, q_tma = cpasync.make_tiled_tma_atom(load, packed(q), q_box, ((self.group, self.positions), 64))
        k_atom, k_tma = cpasync.make_tiled_tma_atom(load, rows_first(k), kv_box, (self.box, 64))
        v_atom, v_tma = cpasync.make_tiled_tma_atom(load, rows_first(v), kv_box, (self.box, 64))
        o_atom, o_tma = None, None
        if const_expr(self.store_by_tma):
            o_box = swizzled(((self.group, 64 // self.group), 64), ((64, 64 * self.group), 1))
            o_atom, o_tma = cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileS2GOp(), packed(out), o_box, ((self.group, 64 // self.group), 64)
            )

        mma_qk, mma_half = (
            hopper.make_trivial_tiled_mma(
                self.dtype,
                self.dtype,
                warpgroup.OperandMajorMode.K,
                warpgroup.OperandMajorMode.K,
                Float32,
                atom_layout_mnk=(self.consumers, 1, 1),
                tiler_mn=(64, columns),
            )
            for columns in (self.block_n, self.block_n // 2)
        )
        mma_pv = hopper.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            warpgroup.OperandMajorMode.K,
            warpgroup.OperandMajorMode.MN,
            Float32,
            atom_layout_mnk=(self.consumers, 1, 1),
            tiler_mn=(64, self.head_dim),
            a_source=warpgroup.OperandSource.RMEM,
        )
        kv_heads = k.shape[2] if const_expr(self.paged) else k.shape[1]
        counter = cute.make_tensor(cute.make_ptr(Int32, counters, cute.AddressSpace.gmem, assumed_align=4), cute.make_layout(2))
        # Each sequence may end within a tile.
        most = (cute.ceil_div(q.shape[0], self.positions) + starts.shape[0] - 1) * kv_heads
        self.kernel(
            q_atom, q_tma, k_atom, k_tma, v_atom, v_tma, o_atom, o_tma,
            out, starts, lengths, page_table, counter, lse, sinks, sinks_kind, scale, causal, kv_heads, mma_qk, mma_half, mma_pv,
        ).launch(
            grid=(cutlass.min(most, processors), 1, 1), block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        q_atom: cute.CopyAtom,
        q_tma: cute.Tensor,
        k_atom: cute.CopyAtom,
        k_tma: cute.Tensor,
        v_atom: cute.CopyAtom,
        v_tma: cute.Tensor,
        o_atom: Optional[cute.CopyAtom],
        o_tma: Optional[cute.Tensor],
        out: cute.Tensor,
        starts: cute.Tensor,
        lengths: Optional[cute.Tensor],
        page_table: Optional[cute.Tensor],
        counter: cute.Tensor,
        lse: Int64,
        sinks: Int64,
        sinks_kind: Int32,
        scale: Float32,
        causal: Int32,
        kv_heads: Int32,
        mma_qk: cute.TiledMma,
        mma_half: cute.TiledMma,
        mma_pv: cute.TiledMma,
    ):
        @cute.struct
        class Storage:
            q_full: cute.struct.MemRange[cutlass.Int64, 2]
            q_empty: cute.struct.MemRange[cutlass.Int64, 2]
            k_full: cute.struct.MemRange[cutlass.Int64, self.stages]
            k_empty: cute.struct.MemRange[cutlass.Int64, self.stages]
            v_full: cute.struct.MemRange[cutlass.Int64, self.stages]
            v_empty: cute.struct.MemRange[cutlass.Int64, self.stages]
            tile: cute.struct.MemRange[Int32, 16]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, 2 * self.block_m * self.head_dim], 1024]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, self.stages * self.block_n * self.head_dim], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, self.stages * self.block_n * self.head_dim], 1024]
            o: cute.struct.Align[cute.struct.MemRange[self.dtype, self.block_m * self.head_dim], 1024]

        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = utils.SmemAllocator().allocate(Storage)
        if warp_index == 0:
            cpasync.prefetch_descriptor(q_atom)
            cpasync.prefetch_descriptor(k_atom)
            cpasync.prefetch_descriptor(v_atom)
            if const_expr(self.store_by_tma):
                cpasync.prefetch_descriptor(o_atom)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(2):
                    cute.arch.mbarrier_init(storage.q_full.data_ptr() + i, 1)
                    cute.arch.mbarrier_init(storage.q_empty.data_ptr() + i, 4 * self.consumers)
                for i in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(storage.k_full.data_ptr() + i, 1)
                    cute.arch.mbarrier_init(storage.k_empty.data_ptr() + i, 4 * self.consumers)
                    cute.arch.mbarrier_init(storage.v_full.data_ptr() + i, 1)
                    cute.arch.mbarrier_init(storage.v_empty.data_ptr() + i, 4 * self.consumers)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # Up to here the kernel before may still run.
        cute.arch.griddepcontrol_wait()

        if warp_index < 4:
            cute.arch.setmaxregister_decrease(self.config.producer_registers)
            if warp_index == 0:
                self.produce(
                    storage, q_atom, q_tma, k_atom, k_tma, v_atom, v_tma, starts, lengths, page_table, counter, causal, kv_heads
                )
        else:
            cute.arch.setmaxregister_increase(self.config.consumer_registers)
            self.consume(storage, o_atom, o_tma, out, lse, sinks, sinks_kind, scale, causal, mma_qk, mma_half, mma_pv)

    # -- the producer: which tile, and its loads --------------------------------------------------------------------------------

    @cute.jit
    def read_section(self, first: Int32, batch: Int32, starts: cute.Tensor, lengths: Optional[cute.Tensor], kv_heads: Int32):
        """Sequences from ``first`` on, one a lane, as many as have keys that fit the L2 cache together, at least one.

        Returns:
            this lane's first token, queries and keys (none beyond the section), sequences in it, heads of a turn.
        """
        lane = cute.arch.lane_idx()
        start, q_len, kv_len = Int32(0), Int32(0), Int32(0)
        at = first + lane
        if at < batch:
            start = starts[at]
            q_len = starts[at + 1] - start
            kv_len = q_len
            if const_expr(self.paged):
                kv_len = lengths[at]
        # In units of 16 keys of one head, so that no sum overflows.
        budget = (self.config.section_mib << 20) // (16 * 4 * self.head_dim)
        weight = (kv_len + 15) // 16
        weight = cutlass.min(weight, budget + 1)
        total = registers.warp_prefix(weight * kv_heads, lane)
        fits = (at < batch) & ((total <= budget) | (lane == 0))
        members = registers.ballot(fits)
        if not fits:
            q_len = Int32(0)
        count = cute.arch.popc(members)
        heads = kv_heads
        if count == 1:
            of_first = cute.arch.shuffle_sync(weight, offset=0)
            heads = cutlass.min(cutlass.max(budget // cutlass.max(of_first, 1), 1), kv_heads)
        return start, q_len, kv_len, count, heads

    @cute.jit
    def produce(
        self,
        storage,
        q_atom: cute.CopyAtom,
        q_tma: cute.Tensor,
        k_atom: cute.CopyAtom,
        k_tma: cute.Tensor,
        v_atom: cute.CopyAtom,
        v_tma: cute.Tensor,
        starts: cute.Tensor,
        lengths: Optional[cute.Tensor],
        page_table: Optional[cute.Tensor],
        counter: cute.Tensor,
        causal: Int32,
        kv_heads: Int32,
    ):
        """Finds the tiles of this CTA one after another, and loads what they need, as far ahead as there is room."""
        lane = cute.arch.lane_idx()
        batch = starts.shape[0] - 1
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        tile_info = storage.tile.data_ptr()

        # The order of tiles. Sections of sequences whose keys fit L2; in each, from the last tiles of the longest sequences down.
        # `level` is a tile's place in its sequence; `passed` counts the tiles before this level, of this and all earlier sections.
        section, members, heads, head_turn = Int32(0), Int32(0), Int32(1), Int32(0)
        start, q_len, kv_len, tiles = Int32(0), Int32(0), Int32(0), Int32(0)
        level, passed = Int32(-1), Int32(0)
        here, turn_heads = Int32(0), Int32(1)
        order = block

        q_stage, q_phase = Int32(0), Int32(1)
        k_stage, k_phase = Int32(0), Int32(1)
        v_stage, v_phase = Int32(0), Int32(1)

        working = Boolean(True)
        while working:
            # Find the tile that is `order`-th. Orders only grow, so the search goes on from the last one.
            searching = Boolean(True)
            while searching:
                if level < 0:
                    # The next turn of heads of the section, or the next section.
                    head_turn += heads
                    if head_turn >= kv_heads or members == 0:
                        section += members
                        head_turn = Int32(0)
                        if section < batch:
                            start, q_len, kv_len, members, heads = self.read_section(section, batch, starts, lengths, kv_heads)
                            tiles = (q_len + (self.positions - 1)) // self.positions
                    if section >= batch:
                        searching = Boolean(False)
                        working = Boolean(False)
                    else:
                        level = cute.arch.warp_redux_sync(tiles, "max") - 1
                        turn_heads = cutlass.min(heads, kv_heads - head_turn)
                        here = cute.arch.popc(registers.ballot(tiles > level)) * turn_heads
                else:
                    if order < passed + here:
                        searching = Boolean(False)
                    else:
                        passed += here
                        level -= 1
                        here = cute.arch.popc(registers.ballot(tiles > level)) * turn_heads

            cute.arch.mbarrier_wait(storage.q_empty.data_ptr() + q_stage, q_phase)
            if working:
                rank = order - passed
                seat = rank // turn_heads
                head = head_turn + rank - seat * turn_heads
                reach = tiles > level
                mask = registers.ballot(reach)
                before = cute.arch.popc(mask & ((1 << lane) - 1))
                owner = registers.ballot(reach & (before == seat))
                source = cute.arch.popc((owner & -owner) - 1)
                t_start = cute.arch.shuffle_sync(start, offset=source)
                t_q_len = cute.arch.shuffle_sync(q_len, offset=source)
                t_kv_len = cute.arch.shuffle_sync(kv_len, offset=source)
                sequence = section + source
                position = level * self.positions

                fetched = Int32(0)
                if lane == 0:
                    fetched = cute.arch.atomic_add(counter.iterator.llvm_ptr, Int32(1), sem="relaxed", scope="gpu")

                if lane == 0:
                    tile_info[q_stage * 8] = Int32(1)
                    tile_info[q_stage * 8 + 1] = t_start
                    tile_info[q_stage * 8 + 2] = t_q_len
                    tile_info[q_stage * 8 + 3] = t_kv_len
                    tile_info[q_stage * 8 + 4] = position
                    tile_info[q_stage * 8 + 5] = head
                cute.arch.sync_warp()
                blocks = (self.keys_seen(t_q_len, t_kv_len, position, causal) + (self.block_n - 1)) // self.block_n

                q_bar = storage.q_full.data_ptr() + q_stage
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(q_bar, self.q_bytes)
                self.load_q(storage, q_atom, q_tma, q_stage, q_bar, t_start + position, head)

                for i in cutlass.range(blocks + 1, unroll=1):
                    if i < blocks:
                        cute.arch.mbarrier_wait(storage.k_empty.data_ptr() + k_stage, k_phase)
                        self.load_kv(
                            storage.k, k_atom, k_tma, k_stage, storage.k_full.data_ptr() + k_stage,
                            blocks - 1 - i, t_start, t_kv_len, head, sequence, page_table,
                        )  # fmt: skip
                        k_stage, k_phase = self.advance(k_stage, k_phase, self.stages)
                    if i > 0:
                        cute.arch.mbarrier_wait(storage.v_empty.data_ptr() + v_stage, v_phase)
                        self.load_kv(
                            storage.v, v_atom, v_tma, v_stage, storage.v_full.data_ptr() + v_stage,
                            blocks - i, t_start, t_kv_len, head, sequence, page_table,
                        )  # fmt: skip
                        v_stage, v_phase = self.advance(v_stage, v_phase, self.stages)

                order = grid + cute.arch.shuffle_sync(fetched, offset=0)
            else:
                if lane == 0:
                    tile_info[q_stage * 8] = Int32(0)
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(storage.q_full.data_ptr() + q_stage)
            q_stage, q_phase = self.advance(q_stage, q_phase, 2)

        cute.arch.griddepcontrol_launch_dependents()
        # The last CTA that is done leaves the counters at zero, for the next launch.
        if lane == 0:
            done = cute.arch.atomic_add((counter.iterator + 1).llvm_ptr, Int32(1), sem="acq_rel", scope="gpu")
            if done == grid - 1:
                counter[0] = Int32(0)
                counter[1] = Int32(0)

    @cute.jit
    def load_q(
        self, storage, atom: cute.CopyAtom, tensor: cute.Tensor, stage: Int32, barrier: cute.Pointer, token: Int32, head: Int32
    ):
        box = ((self.group, self.positions), 64)
        layout = cute.make_layout(
            (*box, self.halves, 2),
            stride=((64, 64 * self.group), 1, self.block_m * 64, self.block_m * self.head_dim),
        )
        shared = storage.q.get_tensor(layout, swizzle=cute.make_swizzle(3, 4, 3))
        for half in cutlass.range_constexpr(self.halves):
            there = cute.domain_offset(((head * self.group, token), half * 64), tensor)
            self.tma(atom, there, box, shared[None, None, half, stage], barrier)

    @cute.jit
    def load_kv(
        self,
        memory,
        atom: cute.CopyAtom,
        tensor: cute.Tensor,
        stage: Int32,
        barrier: cute.Pointer,
        block: Int32,
        start: Int32,
        kv_len: Int32,
        head: Int32,
        sequence: Int32,
        page_table: Optional[cute.Tensor],
    ):
        boxes = self.block_n // self.box
        layout = cute.make_layout(
            (self.box, 64, boxes, self.halves, self.stages),
            stride=(64, 1, self.box * 64, self.block_n * 64, self.block_n * self.head_dim),
        )
        shared = memory.get_tensor(layout, swizzle=cute.make_swizzle(3, 4, 3))
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.kv_bytes)
        if const_expr(self.paged):
            # A lane holds a page. Pages beyond the sequence may have any number; its last page stands in for them.
            page_size = self.config.page_size
            lane = cute.arch.lane_idx()
            last = cutlass.max(kv_len - 1, 0) // page_size
            page = page_table[sequence, cutlass.min(block * boxes + lane % boxes, last)]
            for i in cutlass.range(boxes, unroll=2):
                one = cute.arch.shuffle_sync(page, offset=i)
                for half in cutlass.range_constexpr(self.halves):
                    there = cute.domain_offset((0, half * 64), tensor[None, None, head, one])
                    self.tma(atom, there, (self.box, 64), shared[None, None, i, half, stage], barrier)
        else:
            for half in cutlass.range_constexpr(self.halves):
                there = cute.domain_offset((start + block * self.block_n, half * 64), tensor[None, None, head])
                self.tma(atom, there, (self.box, 64), shared[None, None, 0, half, stage], barrier)

    @cute.jit
    def tma(self, atom: cute.CopyAtom, there: cute.Tensor, box: cutlass.Constexpr, shared: cute.Tensor, barrier: cute.Pointer):
        """Loads the first box of a tensor."""
        corner = cute.local_tile(there, box, ((0,) * len(box[0]) if isinstance(box[0], tuple) else 0, 0))
        target, source = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(corner, 0, 2)
        )
        cute.copy(atom, source, target, tma_bar_ptr=barrier)
