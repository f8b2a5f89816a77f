"""The warps of `prefill_device` that transpose fp8 values.

Both operands of an fp8 product lie along the axis that is summed, so a block of values must lie key by key for each column. Matrices
of pairs of bytes are transposed on their way from shared memory to registers, and bytes of four registers are exchanged, as
FlashAttention-3 does (Shah et al., 2024, arXiv:2407.08608). The order of keys may be any that the weights have too, and so it is that
in which an accumulator's columns become the left operand without moving between lanes: of 32 keys, place ``16 h + 4 t + e`` has key
``16 h + 8 (e // 2) + 2 t + e % 2``.
"""

# mypy: ignore-errors

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute

from tokenspeed_kernel_nvidia.sm90.attention.prefill_tile_device import Shared, Tiles
from tokenspeed_kernel_nvidia.sm90.common.pipeline_device import Cursor, advance, first_to_fill, first_to_read
from tokenspeed_kernel_nvidia.sm90.common.registers_device import ldmatrix, permute_bytes, stmatrix, store_floats

TURNING_WARPS = 3  # all of the producer's but the one that loads
TURNING = 9  # their named barrier


class Turners(Tiles):
    """The part of the kernel that transposes values."""

    @cute.jit
    def turn_values(self, shared: Shared, warp: Int32, causal: Int32):
        """Transposes the values of all tiles of the CTA, in the order in which they are loaded."""
        c = self.config
        q_at, raw_at, v_at = first_to_read(), first_to_read(), first_to_fill()
        shared.q_pipe.wait(q_at)
        working = shared.record(q_at).exists
        while working:
            record = shared.record(q_at)
            kv_len = record.kv_len
            blocks = (self.keys_seen(record.q_len, kv_len, record.position, causal) + (c.block_n - 1)) // c.block_n
            for i in cutlass.range(blocks, unroll=1):
                shared.raw_pipe.wait(raw_at)
                valid = kv_len - (blocks - 1 - i) * c.block_n
                if valid < c.block_n:
                    self.clear_rows(shared, raw_at, valid, warp)
                shared.v_pipe.acquire(v_at)
                self.turn_block(shared, raw_at, v_at, warp)
                # Products read what was written here, and copies write what was read.
                cute.arch.fence_view_async_shared()
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    shared.v_pipe.full.arrive(v_at)
                shared.raw_pipe.release(raw_at)
                raw_at, v_at = advance(raw_at, c.raw_stages), advance(v_at, c.kv_stages)
            q_at = advance(q_at, c.q_stages)
            shared.q_pipe.wait(q_at)
            working = shared.record(q_at).exists

    @cute.jit
    def clear_rows(self, shared: Shared, raw_at: Cursor, valid: Int32, warp: Int32):
        """Writes zeros to the values of slots from ``valid`` on: their weights are 0, but they may be NaN."""
        c = self.config
        block_at = shared.storage.raw.data_ptr().toint() + raw_at.stage * c.kv_bytes
        at = valid * c.head_dim + (warp * 32 + cute.arch.lane_idx()) * 16
        while at < c.kv_bytes:
            store_floats("shared", block_at + at, [Float32(0.0)] * 4)
            at += TURNING_WARPS * 32 * 16
        cute.arch.barrier(barrier_id=TURNING, number_of_threads=TURNING_WARPS * 32)

    @cute.jit
    def turn_block(self, shared: Shared, raw_at: Cursor, v_at: Cursor, warp: Int32):
        """Transposes a block, 32 keys and 16 columns at a time."""
        c = self.config
        lane = cute.arch.lane_idx()
        source = shared.storage.raw.data_ptr().toint() + raw_at.stage * c.kv_bytes
        target = shared.storage.v.data_ptr().toint() + v_at.stage * c.kv_bytes
        chunks = c.head_dim // 16  # of a key, 16 columns each
        turned = lane % 8 if cutlass.const_expr(c.head_dim == 128) else lane % 8 // 2  # what the swizzle exchanges pieces by
        # A lane's row of the matrices that it stores: even columns first, then odd ones; of each, places 0 to 15 and 16 to 31.
        half = lane // 8 % 2
        column = lane % 8 * 2 + lane // 16
        for step in cutlass.range((c.block_n // 32 * chunks + TURNING_WARPS - 1) // TURNING_WARPS, unroll=2):
            item = step * TURNING_WARPS + warp
            if item < c.block_n // 32 * chunks:
                keys, chunk = item // chunks, item % chunks
                words = ldmatrix(source + (keys * 32 + lane) * c.head_dim + (chunk ^ turned) * 16, True)
                even = [permute_bytes(words[2 * h], words[2 * h + 1], 0x6420) for h in range(2)]
                odd = [permute_bytes(words[2 * h], words[2 * h + 1], 0x7531) for h in range(2)]
                row = chunk * 16 + column
                stmatrix(target + row * 128 + ((keys * 2 + half) ^ (row % 8)) * 16, [*even, *odd])
