"""The conversion of a tile's bfloat16 queries to float16, by the consumer warpgroups: for 16-bit queries with an fp8 cache."""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Uint32, const_expr, cute

from tokenspeed_kernel_nvidia.cutedsl import registers_device as registers
from tokenspeed_kernel_nvidia.cutedsl.memory_device import load_words, store_words_shared
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Cursor
from tokenspeed_kernel_nvidia.sm90.attention.prefill.config import Config
from tokenspeed_kernel_nvidia.sm90.attention.prefill.tile_device import Rings, Shared, sync_warps, thread_and_row


@dataclass(frozen=True)
class QueryConverter:
    """Converts a tile's bfloat16 queries to float16."""

    config: Config
    rings: Rings

    @cute.jit
    def convert_to_float16(self, shared: Shared, q_at: Cursor, wg: Int32) -> Float32:
        """Converts this warp's bfloat16 queries of a tile to float16, in place, scaled by a power of 2.

        The scale brings the warp's amax to the upper end of float16's range. Smaller values keep all their bits unless they are
        below 2^-22 of the amax. Query rows beyond the sequence become 0, so that they do not affect the amax.

        Returns:
            The inverse of the scale, by which scores must be multiplied.
        """
        c = self.config
        thread, _ = thread_and_row(self.config, wg)
        # Two lanes convert a row: each lane converts one panel, or half a panel. The conversion is in place, so the swizzle does
        # not matter. Lanes start at different 16-byte chunks, to avoid bank conflicts.
        row = wg * 64 + thread % 128 // 2
        half = thread % 2
        record = shared.record(q_at)
        at = shared.storage.q.data_ptr().toint() + q_at.stage * c.q_bytes + row * 128
        chunks = c.head_dim // 16  # 16-byte chunks that a lane converts
        if const_expr(chunks == 8):
            at += half * (c.block_m * 128)
            addresses = [at + (row + 4 * half + i) % 8 * 16 for i in range(chunks)]
        else:
            addresses = [at + (half * 4 + (row + i) % 4) * 16 for i in range(chunks)]
        words = cute.make_rmem_tensor(4 * chunks, Uint32)
        for i in cutlass.range_constexpr(chunks):
            loaded = load_words("shared", addresses[i], 4)
            for each in cutlass.range_constexpr(4):
                words[4 * i + each] = loaded[each]
        if record.position + row // c.gqa_ratio >= record.q_len:
            words.fill(0)
        highest = Uint32(0)
        for i in cutlass.range_constexpr(4 * chunks):
            highest = cutlass.max(highest, cutlass.max((words[i] << 16) & 0x7FFFFFFF, words[i] & 0x7FFFFFFF))
        factor, inverse = registers.factors_of_float16(Int32(highest))
        for i in cutlass.range_constexpr(chunks):
            pairs = [registers.widened(self.rings.dtype, words[4 * i + each]) for each in range(4)]
            store_words_shared(
                addresses[i], [registers.pack(self.rings.mma_dtype, low * factor, high * factor) for low, high in pairs]
            )
        cute.arch.fence_view_async_shared()
        sync_warps(wg)
        return inverse

    @cute.jit
    def convert_panels_to_float16(self, shared: Shared, q_at: Cursor, wg: Int32) -> Float32:
        """Does `convert_to_float16` for head_dim 256. A lane converts two panels of a row. The panels do not fit into the lane's
        registers, so the lane reads the panels twice.
        """
        c = self.config
        thread, _ = thread_and_row(self.config, wg)
        row = wg * 64 + thread % 128 // 2
        half = thread % 2
        record = shared.record(q_at)
        is_row = record.position + row // c.gqa_ratio < record.q_len
        panel_bytes = c.block_m * 128
        at = shared.storage.q.data_ptr().toint() + row * 128 + half * (2 * panel_bytes)
        # The other lane of a row reads the same columns of other panels. That lane starts half a row later, to avoid bank
        # conflicts.
        addresses = [at + panel * panel_bytes + (row + 4 * half + i) % 8 * 16 for panel in range(2) for i in range(8)]
        highest = Uint32(0)
        for i in cutlass.range_constexpr(len(addresses)):
            loaded = load_words("shared", addresses[i], 4)
            for word in loaded:
                highest = cutlass.max(highest, cutlass.max((word << 16) & 0x7FFFFFFF, word & 0x7FFFFFFF))
        if not is_row:
            highest = Uint32(0)
        factor, inverse = registers.factors_of_float16(Int32(highest))
        for i in cutlass.range_constexpr(len(addresses)):
            words = [cutlass.select_(is_row, word, Uint32(0)) for word in load_words("shared", addresses[i], 4)]
            pairs = [registers.widened(self.rings.dtype, word) for word in words]
            store_words_shared(
                addresses[i], [registers.pack(self.rings.mma_dtype, low * factor, high * factor) for low, high in pairs]
            )
        cute.arch.fence_view_async_shared()
        sync_warps(wg)
        return inverse
