"""Device code of decode: how work is divided and loaded. What is computed is in `decode_warps`."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.utils
from cutlass import BFloat16, Float16, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync

from tokenspeed_kernel_nvidia.sm90.attention.decode import CONSUMERS, Config
from tokenspeed_kernel_nvidia.sm90.attention.decode_instructions import load_int
from tokenspeed_kernel_nvidia.sm90.attention.decode_warps import (
    DONE,
    LEFT,
    OFFSET,
    PLANNED,
    SEQUENCE,
    SHARE,
    THREADS,
    Call,
    Rows,
    Warps,
)

LOADER = CONSUMERS  # the warp that loads
SCOUT = 0  # the warp that looks ahead before it computes
AT_ONCE = 8  # lengths that a lane looks at together
AHEAD = 2  # sequences of a CTA that it looks ahead
MOST_AHEAD = 256  # keys of each


class Decode(Warps):
    """The kernel of one configuration."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k_cache: cute.Tensor,
        v_cache: cute.Tensor,
        out: cute.Tensor,
        page_table: cute.Tensor,
        cache_seqlens: cute.Tensor,
        partial: Int64,
        counters: Int64,
        lse: Int64,
        sinks: Int64,
        sinks_kind: Int32,
        q_len: Int32,
        capacity: Int32,
        window_left: Int32,
        groups: Int32,
        scale: Float32,
        stream: cuda.CUstream,
    ):
        tiler = (self.box, 64, self.heads)
        box = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, cute.make_layout(tiler, stride=(64, 1, self.box * 64)))
        load = cpasync.CopyBulkTensorTileG2SOp()
        k = cute.make_tensor(k_cache.iterator, cute.select(k_cache.layout, mode=[1, 3, 2, 0]))
        v = cute.make_tensor(v_cache.iterator, cute.select(v_cache.layout, mode=[1, 3, 2, 0]))
        k_load, k_boxes = cpasync.make_tiled_tma_atom(load, k, box, tiler)
        v_load, v_boxes = cpasync.make_tiled_tma_atom(load, v, box, tiler)
        kv_heads = k_cache.shape[2]

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[Int64, self.stages]
            empty: cute.struct.MemRange[Int64, self.stages]
            begun: cute.struct.MemRange[Int64, 1]
            plan: cute.struct.MemRange[Int32, 8]
            sums: cute.struct.MemRange[Float32, 2 * self.parts * self.rows]
            sinks: cute.struct.MemRange[Float32, self.rows]
            results: cute.struct.Align[cute.struct.MemRange[Float32, self.config.merge_floats], 16]
            tiles: cute.struct.Align[cute.struct.MemRange[self.dtype, self.stages * self.config.stage_numbers], 1024]

        self.storage = Storage
        self.kernel(
            k_load, k_boxes, v_load, v_boxes, q.iterator.toint(), q.stride[0], q.stride[1], out.iterator.toint(), out.stride[0],
            out.stride[1], page_table.iterator.toint(), page_table.stride[0], page_table.stride[1], cache_seqlens.iterator.toint(),
            cache_seqlens.shape[0], partial, counters, lse, sinks, sinks_kind, q_len, q.shape[1] // kv_heads, kv_heads, capacity,
            window_left, groups, cute.arch.popc(k_cache.shape[1] - 1), scale,
        ).launch(
            grid=(kv_heads // self.heads, groups, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True,
            min_blocks_per_mp=self.config.resident,
            preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        k_load: cute.CopyAtom,
        k_boxes: cute.Tensor,
        v_load: cute.CopyAtom,
        v_boxes: cute.Tensor,
        q: Int64,
        q_token: Int64,
        q_head: Int64,
        out: Int64,
        out_token: Int64,
        out_head: Int64,
        page_table: Int64,
        table_row: Int64,
        table_page: Int64,
        cache_seqlens: Int64,
        batch: Int32,
        partial: Int64,
        counters: Int64,
        lse: Int64,
        sinks: Int64,
        sinks_kind: Int32,
        q_len: Int32,
        ratio: Int32,
        kv_heads: Int32,
        capacity: Int32,
        window_left: Int32,
        groups: Int32,
        page_shift: Int32,
        scale: Float32,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        head, group, _ = cute.arch.block_idx()
        storage = cutlass.utils.SmemAllocator().allocate(self.storage)
        call = Call(
            Rows(q, q_token, q_head), Rows(out, out_token, out_head), page_table, table_row, table_page, cache_seqlens, batch,
            partial, counters, lse, sinks, sinks_kind, q_len, ratio, kv_heads, capacity,
            window_left, groups, page_shift, scale, group, head * self.heads, storage.full.data_ptr(), storage.empty.data_ptr(),
            storage.plan.data_ptr(), storage.sums.data_ptr(), storage.results.data_ptr(), storage.sinks.data_ptr(),
            storage.tiles.data_ptr(),
        )  # fmt: skip
        begun = storage.begun.data_ptr()
        if warp == LOADER:
            if cute.arch.lane_idx() == 0:
                for stage in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(call.full + stage, 1)
                    cute.arch.mbarrier_init(call.empty + stage, self.config.releases)
                cute.arch.mbarrier_init(begun, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.sync_warp()
            cpasync.prefetch_descriptor(k_load)
            cpasync.prefetch_descriptor(v_load)
        else:
            self.touch(call)
        if cutlass.const_expr(not self.config.split):
            cute.arch.sync_threads()
            if warp == SCOUT:
                self.foresee(call, begun, k_load, k_boxes, v_load, v_boxes)
        # Whatever ran before may have written what is read here; what runs next may begin once there is room.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if warp == LOADER:
            if cute.arch.lane_idx() == 0:
                cute.arch.mbarrier_arrive(begun)
            self.load(call, k_load, k_boxes, v_load, v_boxes)
        else:
            self.consume(call)

    @cute.jit
    def divide(self, call: Call, at_once: cutlass.Constexpr[int]):
        """Finds the share of this CTA's group, by one warp.

        All sequences' tiles, one after another, are cut into as many equal ranges as there are groups. A group has a CTA for
        each key head.

        Args:
            at_once: how many lengths a lane looks at together.

        Returns:
            The sequence that the range begins in, that sequence's length, the tile there, how many tiles, and how many a range has.
        """
        lane = cute.arch.lane_idx()
        lengths, counts = (cute.make_rmem_tensor((at_once,), Int32) for _ in range(2))
        rounds = (call.batch + 32 * at_once - 1) // (32 * at_once)
        total = Int32(0)
        # Backwards, as the search below begins with the first.
        for back in cutlass.range(rounds, unroll=1):
            total += cute.arch.warp_redux_sync(self.tiles_of(call, rounds - 1 - back, at_once, lengths, counts), "add")
        share = (total + call.groups - 1) // call.groups
        if cutlass.const_expr(self.block == 16):  # a tile for each warp
            share = (share + self.parts - 1) // self.parts * self.parts
        start = call.group * share
        before = Int32(0)
        found = Int32(-1)
        offset = Int32(0)
        length = Int32(0)
        step = Int32(0)
        while found < 0 and step < rounds and start < total:
            some = Int32(0)
            for each in cutlass.range_constexpr(at_once):
                some += counts[each]
            ends = some
            for power in cutlass.range_constexpr(5):
                other = cute.arch.shuffle_sync_up(ends, 1 << power)
                ends += cutlass.select_(lane >= (1 << power), other, Int32(0))
            running = before + ends - some
            mine = Int32(-1)
            for each in cutlass.range_constexpr(at_once):
                if running <= start < running + counts[each]:
                    mine = (step * 32 + lane) * at_once + each
                    offset = start - running
                    length = lengths[each]
                running += counts[each]
            found = cute.arch.warp_redux_sync(mine, "max")
            offset = cute.arch.warp_redux_sync(offset, "max")
            length = cute.arch.warp_redux_sync(length, "max")
            before += cute.arch.shuffle_sync(ends, 31)
            step += 1
            if found < 0 and step < rounds:
                self.tiles_of(call, step, at_once, lengths, counts)
        return cutlass.max(found, 0), length, offset, cutlass.max(cutlass.min(share, total - start), 0), share

    @cute.jit
    def tiles_of(self, call: Call, step: Int32, at_once: cutlass.Constexpr[int], lengths: cute.Tensor, counts: cute.Tensor):
        """A lane's next sequences: their lengths and tiles. Returns how many tiles there are together."""
        some = Int32(0)
        for each in cutlass.range_constexpr(at_once):
            sequence = (step * 32 + cute.arch.lane_idx()) * at_once + each
            lengths[each] = self.length_of(call, sequence)
            _, _, count = self.shown(call, lengths[each])
            counts[each] = cutlass.select_(sequence < call.batch, count, Int32(0))
            some += counts[each]
        return some

    @cute.jit
    def load(self, call: Call, k_load: cute.CopyAtom, k_boxes: cute.Tensor, v_load: cute.CopyAtom, v_boxes: cute.Tensor):
        """Fills the ring of tiles. Lengths and numbers of pages are looked up a sequence ahead."""
        lane = cute.arch.lane_idx()
        shift = call.page_shift
        step = Int32(1)
        if cutlass.const_expr(self.config.split):
            sequence, length, offset, left, share = [Int32(0)] * 5
            if call.batch <= 32:  # less code, and that is what takes time here
                sequence, length, offset, left, share = self.divide(call, 1)
            else:
                sequence, length, offset, left, share = self.divide(call, AT_ONCE)
        else:
            sequence, offset, share, step = call.group, Int32(0), Int32(0), call.groups
            length = self.length_of(call, sequence)
            left = (call.batch - call.group + call.groups - 1) // call.groups
        if lane == 0:
            call.plan[SEQUENCE] = sequence
            call.plan[OFFSET] = offset
            call.plan[LEFT] = left
            call.plan[DONE] = Int32(0)
            call.plan[SHARE] = share
        cute.arch.sync_warp()
        cute.arch.barrier_arrive(barrier_id=PLANNED, number_of_threads=THREADS)
        k_to, k_from = self.partition(call, k_load, k_boxes, 0)
        v_to, v_from = self.partition(call, v_load, v_boxes, self.config.stage_numbers // 2)

        box_bytes = 4 * self.heads * self.box * self.head_dim
        at = Int32(0)
        next_length = self.length_of(call, sequence + step)
        low, first, count = self.shown(call, length)
        first += offset
        count -= offset
        named = (first * self.block) >> shift
        numbers = self.pages_from(call, sequence, named, length)
        while left > 0:
            later_length = self.length_of(call, sequence + 2 * step)
            next_low, next_first, next_count = self.shown(call, next_length)
            next_named = (next_first * self.block) >> shift
            next_numbers = self.pages_from(call, sequence + step, next_named, next_length)
            if cutlass.const_expr(self.config.split):
                count = cutlass.min(count, left)
                left -= count
            else:
                left -= 1
            for tile in cutlass.range(count, unroll=1):
                start = (first + tile) * self.block
                if (start + self.block - 1) >> shift >= named + 32:
                    named = start >> shift
                    numbers = self.pages_from(call, sequence, named, length)
                stage = at % self.stages
                begin = cutlass.max(low - start, 0) // self.box
                end = cutlass.max(cutlass.min((length - start + self.box - 1) // self.box, self.boxes), begin)
                cute.arch.mbarrier_wait(call.empty + stage, (at // self.stages + 1) % 2)
                if lane == 0:
                    cute.arch.mbarrier_arrive_and_expect_tx(call.full + stage, (end - begin) * box_bytes)
                for each in cutlass.range_constexpr(self.boxes):
                    position = start + each * self.box
                    page = cute.arch.shuffle_sync(numbers, (position >> shift) - named)
                    slot = (position - (position >> shift << shift)) // self.box
                    if begin <= each < end:
                        for half in cutlass.range_constexpr(self.halves):
                            full = call.full + stage
                            cute.copy(k_load, k_from[None, slot, half, page], k_to[None, each, half, stage], tma_bar_ptr=full)
                            cute.copy(v_load, v_from[None, slot, half, page], v_to[None, each, half, stage], tma_bar_ptr=full)
                at += 1
            sequence += step
            length, low, first, count, named, numbers = next_length, next_low, next_first, next_count, next_named, next_numbers
            next_length = later_length

    @cute.jit
    def foresee(
        self,
        call: Call,
        begun: cute.Pointer,
        k_load: cute.CopyAtom,
        k_boxes: cute.Tensor,
        v_load: cute.CopyAtom,
        v_boxes: cute.Tensor,
    ):
        """Brings what this CTA will probably load first to the L2 cache, until the kernel before has ended.

        That kernel may be writing all that is read here, so what is found is good for guesses only. Whatever numbers of pages are
        found, the copy engine leaves out what is not in the cache.
        """
        shift = call.page_shift
        _, k_from = self.partition(call, k_load, k_boxes, 0)
        _, v_from = self.partition(call, v_load, v_boxes, 0)
        sequence = call.group
        while sequence < call.batch and sequence < AHEAD * call.groups:
            length = self.length_of(call, sequence, True)
            low, first, count = self.shown(call, length)
            named = (first * self.block) >> shift
            numbers = self.pages_from(call, sequence, named, length, True)
            boxes = cutlass.min(count, MOST_AHEAD // self.block) * self.boxes
            box = Int32(0)
            while box < boxes and not cute.arch.vote_any_sync(cute.arch.mbarrier_test_wait(begun, 0)):
                position = first * self.block + box * self.box
                page = cute.arch.shuffle_sync(numbers, (position >> shift) - named)
                slot = (position - (position >> shift << shift)) // self.box
                if position + self.box > low and position < length:
                    for half in cutlass.range_constexpr(self.halves):
                        cute.prefetch(k_load, k_from[None, slot, half, page])
                        cute.prefetch(v_load, v_from[None, slot, half, page])
                box += 1
            sequence += call.groups

    @cute.jit
    def pages_from(self, call: Call, sequence: Int32, named: Int32, length: Int32, early: cutlass.Constexpr[bool] = False):
        """The numbers of 32 pages of a sequence, one a lane. Entries beyond its length are not looked at."""
        number = Int32(0)
        at = named + cute.arch.lane_idx()
        if at << call.page_shift < length:
            place = Int64(cutlass.min(sequence, call.batch - 1)) * call.table_row + Int64(at) * call.table_page
            number = load_int(call.page_table + place * 4, early)
        return number

    @cute.jit
    def partition(self, call: Call, load: cute.CopyAtom, boxes: cute.Tensor, first: cutlass.Constexpr[int]):
        """Boxes in the ring, whose tiles begin ``first`` elements into a stage, and boxes of this CTA's key heads in a cache."""
        row = self.heads * 64
        layout = cute.make_layout(
            (self.box, 64, self.heads, self.boxes, self.halves, self.stages),
            stride=(64, 1, self.box * 64, self.box * row, self.block * row, self.config.stage_numbers),
        )
        tiles = cute.recast_ptr(call.tiles, swizzle_=cute.make_swizzle(3, 4, 3), dtype=self.dtype) + first
        source = cute.local_tile(boxes, (self.box, 64, self.heads), (None, None, call.head // self.heads, None))
        target = cute.group_modes(cute.make_tensor(tiles, layout), 0, 3)
        return cpasync.tma_partition(load, 0, cute.make_layout(1), target, cute.group_modes(source, 0, 3))


def host(config: Config) -> Any:
    """The function that launches it."""
    return Decode(config)


def fake_arguments(config: Config) -> list[Any]:
    """Stand-ins for what `host` takes: dtypes, ranks and alignments, and which sizes are the same."""
    dtype = {"bfloat16": BFloat16, "float16": Float16}[config.dtype]
    size, stride, fake = cute.sym_int, cute.sym_int64, cute.runtime.make_fake_tensor

    def rows(*shape: Any) -> Any:
        strides = [stride(divisibility=8) for _ in shape]
        return fake(dtype, (*shape, config.head_dim), (*strides, 1), assumed_align=16)

    tokens, heads, kv_heads, batch = size(), size(), size(), size()
    cache = size(), size(divisibility=config.box), kv_heads
    page_table = fake(Int32, (batch, size()), (stride(), stride()), assumed_align=4)
    cache_seqlens = fake(Int32, (batch,), (1,), assumed_align=4)
    scalars = [*(Int64(0) for _ in range(4)), *(Int32(0) for _ in range(5)), Float32(0)]
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return [rows(tokens, heads), rows(*cache), rows(*cache), rows(tokens, heads), page_table, cache_seqlens, *scalars, stream]
