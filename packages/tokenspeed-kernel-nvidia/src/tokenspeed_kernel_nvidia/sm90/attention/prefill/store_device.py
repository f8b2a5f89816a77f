"""The epilogue of a consumer warpgroup's tile: normalises the output, and stores output and LSE."""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import warp

from tokenspeed_kernel_nvidia.cutedsl import registers_device as registers
from tokenspeed_kernel_nvidia.cutedsl import softmax_device as softmax
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Cursor
from tokenspeed_kernel_nvidia.cutedsl.softmax_device import Sinks
from tokenspeed_kernel_nvidia.sm90.attention.prefill.config import Config
from tokenspeed_kernel_nvidia.sm90.attention.prefill.tile_device import Rings, Shared, sync_warps, thread_and_row
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import PANEL, Tma, tma_store


@dataclass(frozen=True)
class Output:
    """The tensors that the epilogue writes, and the sinks.

    Attributes:
        tma: the TMA view of ``out`` for stores; None if `Config.store_by_tma` is false.
        out: ``[tokens, heads, v_head_dim]``.
        lse: global address of the LSE, float32 ``[tokens, heads]``; 0 if the LSE is not requested.
        sinks: the attention sinks, which are added to the softmax's denominator.
    """

    tma: Optional[Tma]
    out: cute.Tensor
    lse: Int64
    sinks: Sinks


@dataclass(frozen=True)
class Sums:
    """A thread's softmax state for its two rows of a tile: output accumulator, running row max and row sum."""

    acc: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor


@dataclass(frozen=True)
class Epilogue:
    """Normalises a tile by its row sums, and stores its LSE and output.

    Attributes:
        rows: the object that stores the output: `TileStore` or `RowStore`.
    """

    config: Config
    rows: TileStore | RowStore

    @cute.jit
    def store(self, shared: Shared, output: Output, pv: cute.TiledMma, sums: Sums, q_at: Cursor, wg: Int32):
        """Epilogue: normalises by the row sum, sink included, and stores this warpgroup's rows of a tile."""
        c = self.config
        out = output.out
        thread, row = thread_and_row(self.config, wg)
        record = shared.record(q_at)
        start, q_len, position, kv_head = record.first_token, record.q_len, record.position, record.kv_head
        v_scale = record.v_scale if const_expr(c.converts) else Float32(1.0)
        if const_expr(not c.splits_q):
            shared.q_pipe.release(q_at)  # the producer may now overwrite the queries and the record, which has been read above
        for r in cutlass.range_constexpr(2):
            query = position + (row + 8 * r) // c.gqa_ratio
            q_head = kv_head * c.gqa_ratio + (row + 8 * r) % c.gqa_ratio
            sink = output.sinks.load(q_head)
            # The sink may exceed the row max, so exponentials are relative to the larger of the two.
            highest, factor = softmax.raise_to(sums.row_max[r], sink)
            total = registers.quad_sum(sums.row_sum[r]) * factor + softmax.exp2(sink - highest)
            factor = Float32(0.0) if total == 0.0 else factor / total
            registers.scale_row(sums.acc, r, factor * v_scale if const_expr(c.converts) else factor)
            if output.lse != 0:
                if query < q_len and row + 8 * r < c.gqa_ratio * c.positions and thread % 4 == 0:
                    value = (highest + cute.math.log2(total, fastmath=True)) * softmax.LN2
                    at = Int64(start + query) * out.shape[1] + q_head
                    cute.make_ptr(Float32, output.lse, cute.AddressSpace.gmem)[at] = -Float32.inf if total == 0.0 else value

        self.rows.store(shared, output, pv, sums.acc, (start, q_len, position, kv_head), thread, row, wg)


@dataclass(frozen=True)
class TileStore:
    """Stores a warpgroup's output rows through shared memory: by stmatrix to an output tile, then by TMA."""

    config: Config
    rings: Rings

    @cute.jit
    def store(
        self,
        shared: Shared,
        output: Output,
        pv: cute.TiledMma,
        acc: cute.Tensor,
        numbers: tuple,
        thread: Int32,
        row: Int32,
        wg: Int32,
    ):
        """Stores this warpgroup's output rows of a tile through shared memory; by TMA if all rows belong to the sequence.

        Args:
            numbers: the sequence's first token, its number of queries, the index in the sequence of the tile's first query, and the
                KV head.
        """
        c = self.config
        out = output.out
        start, q_len, position, kv_head = numbers
        # Each warpgroup has its own rows of the shared-memory buffer. The previous TMA store may still be reading these rows, so
        # wait for that store.
        rounded = cute.make_fragment_like(acc, self.rings.dtype)
        registers.round_to(acc, rounded)
        if const_expr(c.store_by_tma):
            if thread % 128 < 32:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
        sync_warps(wg)
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), self.rings.dtype)
        mine = cute.make_tiled_copy_C(stmatrix, pv).get_slice(thread)
        cute.copy(stmatrix, mine.retile(rounded), mine.partition_D(self.rings.out.tiles(shared.storage.out)[None, None, 0]))
        first_row = wg * 64
        whole = Boolean(False)
        if const_expr(c.store_by_tma):
            cute.arch.fence_view_async_shared()
            whole = position + (wg + 1) * (64 // c.gqa_ratio) <= q_len
        sync_warps(wg)
        if const_expr(c.store_by_tma):
            if whole:
                if thread % 128 < 32:
                    positions = 64 // c.gqa_ratio
                    boxes = self.rings.out.packed_boxes(shared.storage.out, c.gqa_ratio, positions, c.warpgroups)
                    token = start + position + wg * positions
                    for panel in cutlass.range_constexpr(self.rings.out.panels):
                        target = cute.domain_offset(((kv_head * c.gqa_ratio, token), panel * PANEL), output.tma.tensor)
                        box = ((c.gqa_ratio, positions), PANEL)
                        tma_store(output.tma.atom, target, box, boxes[None, None, panel, wg, 0])
                    cute.arch.cp_async_bulk_commit_group()
        if not whole:
            self.store_some(shared, out, start, q_len, position, kv_head, thread, first_row)

    @cute.jit
    def store_some(
        self,
        shared: Shared,
        out: cute.Tensor,
        start: Int32,
        q_len: Int32,
        position: Int32,
        kv_head: Int32,
        thread: Int32,
        first_row: Int32,
    ):
        """Copies this warpgroup's output rows that belong to the sequence from shared to global memory, 16 bytes at a time. TMA
        would also store the rows beyond the sequence's end, over the next sequence."""
        c = self.config
        chunks = c.head_dim // 8
        s_chunks = self.rings.out.chunks(shared.storage.out)
        g_chunks = cute.make_tensor(
            out.iterator,
            cute.make_layout((out.shape[0], out.shape[1], 8, chunks), stride=(out.stride[0], out.stride[1], 1, 8)),
        )
        chunk = thread % chunks
        eight = cute.make_rmem_tensor(8, self.rings.dtype)
        for i in cutlass.range_constexpr(64 * chunks // 128):
            r = first_row + i * (128 // chunks) + (thread % 128) // chunks
            query = position + r // c.gqa_ratio
            if query < q_len and r < c.gqa_ratio * c.positions:
                cute.autovec_copy(s_chunks[r, (None, chunk % 8), chunk // 8, 0], eight)
                cute.autovec_copy(eight, g_chunks[start + query, kv_head * c.gqa_ratio + r % c.gqa_ratio, None, chunk])


@dataclass(frozen=True)
class RowStore:
    """Stores a thread's output rows from registers."""

    config: Config
    rings: Rings

    @cute.jit
    def store(
        self,
        shared: Shared,
        output: Output,
        pv: cute.TiledMma,
        acc: cute.Tensor,
        numbers: tuple,
        thread: Int32,
        row: Int32,
        wg: Int32,
    ):
        """Stores this thread's two output rows of a tile from registers, 16 bytes at a time.

        Args:
            numbers: the sequence's first token, its number of queries, the index in the sequence of the tile's first query, and the
                KV head.
            row: the thread's first row; its other row is ``row + 8``.
        """
        c = self.config
        out = output.out
        start, q_len, position, kv_head = numbers
        lane = thread % 4
        for r in cutlass.range_constexpr(2):
            query = position + (row + 8 * r) // c.gqa_ratio
            q_head = kv_head * c.gqa_ratio + (row + 8 * r) % c.gqa_ratio
            is_row = (query < q_len) & (row + 8 * r < c.gqa_ratio * c.positions)
            for first in cutlass.range_constexpr(0, c.v_columns // 8, 4):
                # A lane holds two columns in each of four groups of eight. The transpose gives the lane one whole group.
                own = [
                    registers.pack(self.rings.dtype, acc[4 * j + 2 * r], acc[4 * j + 2 * r + 1]) for j in range(first, first + 4)
                ]
                words = registers.transpose_quad(own, lane)
                column = 8 * (first + lane)
                if is_row & (column < c.widths[1]):
                    at = out.iterator + (Int64(start + query) * out.stride[0] + Int64(q_head) * out.stride[1] + column)
                    registers.store_words(at.toint(), words)
