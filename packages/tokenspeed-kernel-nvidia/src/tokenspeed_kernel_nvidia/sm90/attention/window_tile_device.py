"""What a computing warpgroup of the sliding-window kernel does: `window_device` has the rest.

Layout in shared memory. Q and O tiles: 64 rows, row = position * heads + head. K and V: rows of 64 numbers (one panel of head_dim
64, two of 128) in the 128-byte swizzle, whose pattern repeats every 8 rows. So a view of K or V may begin at any multiple of 8
keys, and all tiles of an item read one copy of the keys.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync, warp, warpgroup

from tokenspeed_kernel_nvidia.sm90.attention.launching import LOG2_E
from tokenspeed_kernel_nvidia.sm90.attention.registers import LN2, quad_max, quad_sum, type_of
from tokenspeed_kernel_nvidia.sm90.attention.window import CONSUMERS, LANES, REACH, Config

PANEL = 64  # columns of a 128-byte swizzled row
# What a stage's record says of its item: how many tiles; its first position, and that one's row of q; the sequence's first query's
# position, and length; the key head; and how many eights of keys lie before the first tile's. A count of 0 ends the work.
COUNT, POSITION, QUERY, FIRST, LENGTH, HEAD, SHIFT, RECORD = range(8)


# With exponentials and maxima as `registers` has them, indices of tiles made uniform, and keys asked for four boxes at once, 16
# sequences of 1024 took 123 us instead of 108, and 16 of 8192 took 731 instead of 717.
@cute.jit
def exp2(x: Float32) -> Float32:
    return cute.arch.inline_ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


@cute.jit
def log2(x: Float32) -> Float32:
    return cute.arch.inline_ptx("lg2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


@cute.jit
def pack(low: Float32, high: Float32, dtype: cutlass.Constexpr) -> Int32:
    """Two numbers, rounded to 16 bits, in one register."""
    kind = "bf16x2" if cutlass.const_expr(dtype is cutlass.BFloat16) else "f16x2"
    code = f"cvt.rn.{kind}.f32 {{$w0}}, {{$r0}}, {{$r1}};"
    return cute.arch.inline_ptx(code, write_only_types=[Int32], read_only_args=[high, low])


@cute.jit
def row_max(scores: cute.Tensor, row: cutlass.Constexpr[int]) -> Float32:
    """Of what a thread holds of one of its two rows, in two chains."""
    even, odd = scores[2 * row], scores[2 * row + 1]
    for j in cutlass.range_constexpr(1, cute.size(scores) // 4):
        even = cute.arch.fmax(even, scores[4 * j + 2 * row])
        odd = cute.arch.fmax(odd, scores[4 * j + 2 * row + 1])
    return cute.arch.fmax(even, odd)


class Compute:
    """The shapes and layouts that follow from a Config, and what works on tiles."""

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

    def storage(self) -> Any:
        dtype, cells = self.dtype, self.head_dim

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

    def records(self, storage) -> cute.Tensor:
        return cute.make_tensor(storage.record.data_ptr(), cute.make_layout((RECORD, self.stages)))

    def tiles(self, part, count: int) -> cute.Tensor:
        """Of Q or O: (64 rows, head_dim, tile)."""
        layout = cute.make_layout(
            ((8, 8), (PANEL, self.panels), count), stride=((PANEL, 8 * PANEL), (1, 64 * PANEL), 64 * self.head_dim)
        )
        return part.get_tensor(layout, swizzle=cute.make_swizzle(3, 4, 3))

    def boxes(self, part, rows: int) -> cute.Tensor:
        """Of K or V, as they are filled: (keys of a box, a panel's columns, box, panel, stage)."""
        layout = cute.make_layout(
            ((8, self.box // 8), PANEL, self.rows // self.box, self.panels, self.stages),
            stride=((PANEL, 8 * PANEL), 1, self.box * PANEL, rows * PANEL, rows * self.head_dim),
        )
        return part.get_tensor(layout, swizzle=cute.make_swizzle(3, 4, 3))

    def views(self, part, rows: int, keys: int) -> cute.Tensor:
        """Of K or V, as tiles read them: (keys of a tile, head_dim, first key / 8, stage). Views overlap."""
        layout = cute.make_layout(
            ((8, keys // 8), (PANEL, self.panels), (rows - keys) // 8 + 1, self.stages),
            stride=((PANEL, 8 * PANEL), (1, rows * PANEL), 8 * PANEL, rows * self.head_dim),
        )
        return part.get_tensor(layout, swizzle=cute.make_swizzle(3, 4, 3))

    def turned_views(self, part, rows: int, keys: int) -> cute.Tensor:
        """`views` with head_dim first, as the second product's right operand."""
        layout = cute.make_layout(
            ((PANEL, self.panels), (8, keys // 8), (rows - keys) // 8 + 1, self.stages),
            stride=((1, rows * PANEL), (PANEL, 8 * PANEL), 8 * PANEL, rows * self.head_dim),
        )
        return part.get_tensor(layout, swizzle=cute.make_swizzle(3, 4, 3))

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
    def compute(self, storage, out_atom, out_tma, out, lse, sinks, sinks_dtype, window_left, scale_log2, all_heads, qk, pv, thread):
        """All tiles of a warpgroup: every third one of the CTA's."""
        dtype = self.dtype
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4 - 1
        thread = thread % 128
        lane = thread % LANES
        out_tile = self.tiles(storage.out, CONSUMERS)[None, None, group]
        record = self.records(storage)
        qk_thread, pv_thread = qk.get_slice(thread), pv.get_slice(thread)
        q_frag = qk.make_fragment_A(qk_thread.partition_A(self.tiles(storage.q, self.slots)))
        k_frag = qk.make_fragment_B(qk_thread.partition_B(self.views(storage.k, self.rows, self.keys)))
        v_frag = pv.make_fragment_B(pv_thread.partition_B(self.turned_views(storage.v, self.value_rows, self.inner)))
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
        count, tile = record[COUNT, stage], Int32(group)
        stage, phase, count, tile = self.seek(record, k_full, kv_empty, stage, phase, count, tile, lane)
        slot, slot_phase = Int32(group), Int32(0)
        sink_low, sink_high = self.sinks_of(record, sinks, sinks_dtype, stage, tile, row)
        eighth = tile // self.splits * (self.positions // 8) + record[SHIFT, stage]
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
            for h in cutlass.range_constexpr(2):
                top.append(cute.arch.fmax(quad_max(row_max(scores, h)) * scale_log2, sink[h]))
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
            eighth = tile // self.splits * (self.positions // 8) + record[SHIFT, stage]
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
                        (table + where).store((top[h] + log2(total[h])) * LN2)
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
            count = record[COUNT, stage]
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
