"""The producer warp of `kernel_device` for pages of one token. The warp gathers key and value vectors by page index, with
cp.async."""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, Int64, const_expr, cute

from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import nth_to_fill
from tokenspeed_kernel_nvidia.cutedsl.registers_device import LANES, load_int
from tokenspeed_kernel_nvidia.sm90.attention.decode.scheduler_device import Work
from tokenspeed_kernel_nvidia.sm90.attention.decode.tile_device import Call, Panels, Shapes

CHUNK_BYTES = 16  # bytes per cp.async
UNROLL = 4  # number of a lane's copies whose addresses are computed together


def copy_chunk(to: Any, source: Any) -> None:
    """Starts a 16-byte cp.async from global to shared memory."""
    cute.arch.inline_ptx("cp.async.cg.shared.global.L2::128B [{$r0}], [{$r1}], 16;", read_only_args=[to, source])


@dataclass(frozen=True)
class CacheRows:
    """A K or V cache with pages of one token: its global address, and its strides between tokens and between KV heads in
    elements."""

    address: Int64
    token: Int64
    head: Int64


class Gatherer:
    """The producer warp that gathers key and value vectors."""

    def __init__(self, shapes: Shapes, work: Work) -> None:
        self.config = shapes.config
        self.shapes = shapes
        self.work = work

    @cute.jit
    def load(self, call: Call, k: CacheRows, v: CacheRows):
        """Fills the ring with the CTA's K/V tiles. Sequence lengths are loaded two sequences ahead, and page indices one tile
        ahead. Each lane arrives on a stage's *full* barrier when its own cp.async copies have completed."""
        c = self.config
        sequence, length, offset, left, step = self.work.plan(call)
        # Page indices of a tile's keys: 32 keys per element, one key per lane.
        rows, next_rows = (cute.make_rmem_tensor(((c.block + LANES - 1) // LANES,), Int32) for _ in range(2))
        index = Int32(0)  # index of a tile in the CTA's range
        next_length = self.shapes.length_of(call, sequence + step)
        begin, first, count = self.shapes.visible(call, length)
        first += offset
        count -= offset
        self.rows_of(call, sequence, first * c.block, begin, length, next_rows)
        while left > 0:
            later_length = self.shapes.length_of(call, sequence + 2 * step)
            next_begin, next_first, next_count = self.shapes.visible(call, next_length)
            count, left = self.work.take(count, left)
            for tile in cutlass.range(count, unroll=1):
                for each in cutlass.range_constexpr(cute.size(rows)):
                    rows[each] = next_rows[each]
                if tile + 1 < count:
                    self.rows_of(call, sequence, (first + tile + 1) * c.block, begin, length, next_rows)
                else:
                    self.rows_of(call, sequence + step, next_first * c.block, next_begin, next_length, next_rows)
                at = nth_to_fill(index, c.stages)
                call.pipe.acquire(at)
                self.copy_rows(call, k, self.shapes.keys, rows, at.stage)
                self.copy_rows(call, v, self.shapes.values, rows, at.stage)
                cute.arch.cp_async_mbarrier_arrive_noinc(call.pipe.full.of(at))
                index += 1
            sequence += step
            length, begin, first, count = next_length, next_begin, next_first, next_count
            next_length = later_length

    @cute.jit
    def rows_of(self, call: Call, sequence: Int32, start: Int32, begin: Int32, length: Int32, rows: cute.Tensor):
        """Loads the page indices of a tile's keys to ``rows``. The first key is at position ``start``.

        Positions that no query sees are clamped to the nearest visible position, so that copies need no predicate.
        """
        table = call.page_table
        for each in cutlass.range_constexpr(cute.size(rows)):
            rows[each] = Int32(0)
            if length > 0:
                position = cutlass.min(cutlass.max(start + each * LANES + cute.arch.lane_idx(), begin), length - 1)
                offset = Int64(cutlass.min(sequence, call.batch - 1)) * table.sequence + Int64(position) * table.page
                rows[each] = load_int(table.address + offset * 4, False)

    @cute.jit
    def copy_rows(self, call: Call, cache: CacheRows, panels: cutlass.Constexpr[Panels], rows: cute.Tensor, stage: Int32):
        """Starts the copies of a tile's keys, or of its values, for the CTA's KV heads. Adjacent lanes copy chunks of the same
        vector, so that loads are coalesced."""
        c = self.config
        lane = cute.arch.lane_idx()
        element_bytes = c.kv_bytes
        chunks = panels.width * element_bytes // CHUNK_BYTES  # 16-byte chunks of a row
        in_panel = panels.row_bytes // CHUNK_BYTES
        to = call.tiles.toint() + stage * self.shapes.stage_bytes + panels.begin * element_bytes
        for head in cutlass.range_constexpr(c.heads):
            source = cache.address + Int64(call.kv_head + head) * (cache.head * element_bytes)
            for some in cutlass.range_constexpr(cute.size(rows)):
                keys = min(LANES, c.block)
                # If the loop were fully unrolled, its addresses would spill registers.
                for turn in cutlass.range((keys * chunks + LANES - 1) // LANES, unroll=UNROLL):
                    own = turn * LANES + lane
                    row, chunk = own // chunks, own % chunks
                    if const_expr(LANES % chunks == 0):  # then a lane copies the same chunk of every row
                        row, chunk = turn * (LANES // chunks) + lane // chunks, lane % chunks
                    number = cute.arch.shuffle_sync(rows[some], row % LANES)
                    offset = panels.row_at(some * LANES + row) + chunk // in_panel * panels.bytes
                    swizzled = (chunk % in_panel) ^ panels.swizzle_xor(row % 8)
                    target = to + offset + head * (self.shapes.box * panels.row_bytes) + swizzled * CHUNK_BYTES
                    from_row = source + Int64(number) * (cache.token * element_bytes) + chunk * CHUNK_BYTES
                    if const_expr(keys * chunks % LANES == 0):
                        copy_chunk(target, from_row)
                    if const_expr(keys * chunks % LANES != 0):
                        if row < keys:
                            copy_chunk(target, from_row)
