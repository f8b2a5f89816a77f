"""The converter warps of `kernel_device`, which prepare fp8 K/V blocks for wgmma.

With fp8 MMAs, V is transposed. fp8 wgmma supports K-major operands only, so a block of V must be contiguous along the keys.
ldmatrix.trans transposes pairs of bytes, and byte permutes separate the pairs, as in FlashAttention-3 (Shah et al., 2024,
arXiv:2407.08608). The keys of V may be in any order, if the probabilities have the same order. The order used here makes an
accumulator of q @ k the A operand of P @ V without exchange between lanes. In each group of 32 keys, position ``16 h + 4 t + e``
holds key ``16 h + 8 (e // 2) + 2 t + e % 2``.

With 16-bit queries and an fp8 cache, K and V are converted to float16. One instruction converts two e4m3 values, exactly. bfloat16
queries are converted to float16 as well, see `queries_device`.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, const_expr, cute

from tokenspeed_kernel_nvidia.cutedsl.memory_device import load_words, store_words_shared
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Cursor, Pipeline, advance, first_to_fill, first_to_read
from tokenspeed_kernel_nvidia.cutedsl.registers_device import (
    ldmatrix,
    opt_barrier,
    permute_bytes,
    stmatrix,
    store_floats,
    widen_fp8,
)
from tokenspeed_kernel_nvidia.sm90.attention.prefill.config import Config
from tokenspeed_kernel_nvidia.sm90.attention.prefill.scheduler_device import Work
from tokenspeed_kernel_nvidia.sm90.attention.prefill.tile_device import Cursors, Rings, Shared

CONVERTERS = 3  # number of converter warps: all warps of the producer warpgroup except the load warp
CONVERTED = 9  # the named barrier of the converter warps
AHEAD = 4  # ldmatrix loads that a warp issues before the first store of their results


@dataclass(frozen=True)
class Converters:
    """The converter warps."""

    config: Config
    rings: Rings
    work: Work
    cursors: Cursors

    @cute.jit
    def convert(self, shared: Shared, warp: Int32, causal: Int32, window_left: Int32):
        """Converts the K/V blocks of all the CTA's tiles, in the order in which they are loaded. ``warp``: the converter warp, 0 to
        2."""
        c = self.config
        # The converters read the records of tiles, so they wait for the barriers of Q. If each warpgroup has its own Q barriers,
        # they use those of the first warpgroup. They arrive on none: the producer waits for the consumers only, and these cannot
        # finish a tile before its blocks are converted.
        q_at, raw_at, k_at, v_at = first_to_read(), first_to_read(), first_to_fill(), first_to_fill()
        shared.q_pipe.wait(q_at)
        working = shared.record(q_at).exists
        while working:
            record = shared.record(q_at)
            kv_len = record.kv_len
            first, end = self.work.blocks_seen(record.q_len, kv_len, record.position, causal, window_left)
            blocks = end - first
            if const_expr(c.fp8_cache):
                # Raw blocks arrive in the order of the loads: K of a block, then V of the preceding block.
                for i in cutlass.range(blocks + 1, unroll=1):
                    if i < blocks:
                        shared.raw_pipe.wait(raw_at)
                        shared.k_pipe.acquire(k_at)
                        self.widen_block(shared, shared.storage.k, raw_at, k_at, warp)
                        self.signal_converted(shared, shared.k_pipe, raw_at, k_at)
                        raw_at, k_at = advance(raw_at, c.raw_stages), advance(k_at, c.kv_stages)
                    if i > 0:
                        self.wait_for_values(shared, raw_at, v_at, kv_len - (end - i) * c.block_n, warp)
                        self.widen_block(shared, shared.storage.v, raw_at, v_at, warp)
                        self.signal_converted(shared, shared.v_pipe, raw_at, v_at)
                        raw_at, v_at = advance(raw_at, c.raw_stages), advance(v_at, c.kv_stages)
            else:
                for i in cutlass.range(blocks, unroll=1):
                    self.wait_for_values(shared, raw_at, v_at, kv_len - (end - 1 - i) * c.block_n, warp)
                    self.transpose_block(shared, raw_at, v_at, warp)
                    self.signal_converted(shared, shared.v_pipe, raw_at, v_at)
                    raw_at, v_at = advance(raw_at, c.raw_stages), advance(v_at, c.kv_stages)
            q_at = self.cursors.next_q(q_at)
            shared.q_pipe.wait(q_at)
            working = shared.record(q_at).exists

    @cute.jit
    def wait_for_values(self, shared: Shared, raw_at: Cursor, v_at: Cursor, valid: Int32, warp: Int32):
        """Waits until a raw V block is loaded and the stage for its converted values is empty.

        Args:
            raw_at, v_at: cursors of the raw ring and of the V ring.
            valid: number of leading rows of the block that hold tokens. Other rows may hold NaN and are zeroed; their probabilities
                are 0.
        """
        c = self.config
        shared.raw_pipe.wait(raw_at)
        if valid < c.block_n:
            block_at = shared.storage.raw.data_ptr().toint() + raw_at.stage * c.raw_bytes
            panel_bytes = c.block_n * c.raw_panel
            at = valid * c.raw_panel + (warp * 32 + cute.arch.lane_idx()) * 16
            while at < panel_bytes:
                for panel in cutlass.range_constexpr(self.rings.raw.panels):
                    store_floats("shared", block_at + panel * panel_bytes + at, [Float32(0.0)] * 4)
                at += CONVERTERS * 32 * 16
            cute.arch.barrier(barrier_id=CONVERTED, number_of_threads=CONVERTERS * 32)
        shared.v_pipe.acquire(v_at)

    @cute.jit
    def signal_converted(self, shared: Shared, pipe: Pipeline, raw_at: Cursor, at: Cursor):
        """Signals, for this warp's part of a block, *full* of the converted stage to the MMA warps, and *empty* of the raw stage to
        the TMA warp."""
        # wgmma and TMA access shared memory through the async proxy. So order this warp's stores before wgmma, and its loads before
        # the next TMA load of the raw stage.
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            pipe.full.arrive(at)
        shared.raw_pipe.release(raw_at)

    @cute.jit
    def widen_block(self, shared: Shared, memory, raw_at: Cursor, at: Cursor, warp: Int32):
        """Converts a raw fp8 block to float16, panel by panel. A lane converts 16 elements of a key at a time. ``memory``: the K
        ring or the V ring."""
        c = self.config
        source = shared.storage.raw.data_ptr().toint() + raw_at.stage * c.raw_bytes
        target = memory.data_ptr().toint() + at.stage * c.kv_bytes
        chunks = c.raw_panel // 16  # 16-byte chunks of a key's row
        keys = 32 // chunks  # keys that a warp converts per step: eight, or four
        of_panel = c.block_n // keys
        steps = self.rings.raw.panels * of_panel
        lane = opt_barrier(cute.arch.lane_idx())
        # All addresses are derived directly from that of the lane's first key. A chain of address computations would delay the
        # loads.
        row, chunk = lane // chunks, lane % chunks
        swizzle_xor = row if const_expr(keys == 4) else row // 2  # XOR mask of the swizzle, in chunks
        source += row * c.raw_panel + (chunk ^ swizzle_xor) * 16
        # Lanes that store to the second target panel begin with their upper 8 elements, to avoid two-way bank conflicts.
        late = chunk // 4
        target += late * (c.block_n * 128) + row * 128 + ((chunk % 4 * 2 + late) ^ row) * 16
        together = 3 if c.producer_registers > 32 else 1  # loads that a warp issues before its first store
        groups = (steps + CONVERTERS * together - 1) // (CONVERTERS * together)
        for group in cutlass.range(groups, unroll=1):
            loaded = []
            for index in cutlass.range_constexpr(together):
                # A warp without a last step repeats another warp's step, with the same result.
                step = cutlass.min((group * together + index) * CONVERTERS + warp, steps - 1)
                other = step % 2 * 64 if const_expr(keys == 4) else 0  # odd steps: the upper four keys of the swizzle's eight rows
                words = load_words("shared", (source ^ other) + step * (keys * c.raw_panel), 4)
                to = (target ^ other) + step * (keys * 128)
                if const_expr(self.rings.raw.panels > 1):  # an fp8 panel becomes two 16-bit panels
                    to += step // of_panel * (c.block_n * 128)
                loaded.append((words, to))
            for words, to in loaded:
                for half in cutlass.range_constexpr(2):
                    if const_expr(keys == 4):
                        some = [cutlass.select_(late == half, words[each], words[2 + each]) for each in range(2)]
                    else:
                        some = words[2 * half : 2 * half + 2]
                    store_words_shared(to ^ (half * 16), [pair for word in some for pair in widen_fp8(self.rings.mma_dtype, word)])

    @cute.jit
    def transpose_block(self, shared: Shared, raw_at: Cursor, v_at: Cursor, warp: Int32):
        """Transposes a raw V block, 32 keys x 16 columns at a time.

        AHEAD loads are issued before the first store, and no address depends on another address. Otherwise each step would wait for
        its own load, and the consumer warpgroups would wait for the block.
        """
        c = self.config
        lane, warp = opt_barrier(cute.arch.lane_idx()), opt_barrier(warp)  # recomputed: kept offsets would take registers
        chunks, in_panel = c.v_columns // 16, c.raw_panel // 16  # chunks of 16 columns: per key, per panel's row
        items = c.block_n // 32 * chunks
        swizzle_xor = lane % 8 if const_expr(c.raw_panel == 128) else lane % 8 // 2  # XOR mask of the swizzle, in chunks
        source = shared.storage.raw.data_ptr().toint() + raw_at.stage * c.raw_bytes + lane * c.raw_panel
        # The row that this lane addresses in stmatrix. Four matrices are stored: even and odd columns of V, each for key positions
        # 0 to 15 and 16 to 31. In the last four rows of a matrix, even and odd columns are exchanged, because columns that differ
        # by 8 would cause bank conflicts.
        late = lane // 16
        first_bytes, second_bytes = 0x6420 + 0x1111 * late, 0x7531 - 0x1111 * late
        column = lane % 8 * 2 + (lane // 16 ^ lane % 8 // 4)
        chunk_xor = lane // 8 % 2 ^ (column % 8 if const_expr(c.block_n == 128) else column // 2 % 4)
        target = shared.storage.v.data_ptr().toint() + v_at.stage * c.v_bytes + column * c.block_n
        steps = (items + CONVERTERS - 1) // CONVERTERS
        for first in cutlass.range_constexpr(0, steps, AHEAD):
            loaded = []
            for step in cutlass.range_constexpr(first, min(first + AHEAD, steps)):
                item = step * CONVERTERS + warp
                if const_expr((step + 1) * CONVERTERS > items):
                    item = cutlass.min(item, items - 1)  # a warp without a last item repeats another warp's item
                keys, chunk = item // chunks, item % chunks
                at = source + keys * (32 * c.raw_panel)
                if const_expr(chunks > in_panel):
                    at += chunk // in_panel * (c.block_n * c.raw_panel)
                words = ldmatrix(at + (chunk % in_panel ^ swizzle_xor) * 16, True)
                loaded.append((words, target + chunk * (16 * c.block_n) + ((keys * 2) ^ chunk_xor) * 16))
            for words, to in loaded:
                transposed = [
                    permute_bytes(words[2 * h], words[2 * h + 1], order) for order in (first_bytes, second_bytes) for h in range(2)
                ]
                stmatrix(to, transposed)
