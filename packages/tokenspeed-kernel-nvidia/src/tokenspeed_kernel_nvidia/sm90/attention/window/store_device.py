"""The epilogue of a consumer warpgroup's tile: normalises the output, and stores output and LSE."""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import warp

from tokenspeed_kernel_nvidia.cutedsl import softmax_device as softmax
from tokenspeed_kernel_nvidia.cutedsl.registers_device import LANES, pack
from tokenspeed_kernel_nvidia.cutedsl.softmax_device import Sinks
from tokenspeed_kernel_nvidia.sm90.attention.window.config import Config
from tokenspeed_kernel_nvidia.sm90.attention.window.tile_device import Rings, Rows, Shared, TilePosition
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import PANEL, Tma, tma_store

# The first of the consumer warpgroups' named barriers, one per warpgroup.
WARPS = 1


@dataclass(frozen=True)
class Output:
    """The tensors that the epilogue writes, and the sinks.

    Attributes:
        tma: the TMA view of ``out`` for stores.
        out: ``[tokens, heads, head_dim]``.
        lse: global address of the LSE, float32 ``[tokens, heads]``; 0 if the LSE is not requested.
        heads: number of query heads.
        sinks: the attention sinks, which are added to the softmax's denominator.
    """

    tma: Tma
    out: cute.Tensor
    lse: Int64
    heads: Int32
    sinks: Sinks


@dataclass(frozen=True)
class Epilogue:
    """Normalises a tile by its row sums, and stores the tile's rows that belong to the sequence."""

    config: Config
    rings: Rings

    @cute.jit
    def store(
        self,
        shared: Shared,
        output: Output,
        pv: cute.TiledMma,
        acc: cute.Tensor,
        inverse: list,
        tile_at: TilePosition,
        mine: Rows,
        thread: Int32,
        wg: Int32,
    ):
        """Normalises and stores a tile's output: by TMA if all its rows belong to the sequence, otherwise from registers, row by
        row. ``inverse``: the reciprocals of this thread's two row sums."""
        c = self.config
        rounded = cute.make_rmem_tensor(acc.shape, self.rings.dtype)
        words = cute.recast_tensor(rounded, Int32)
        whole = tile_at.position >= tile_at.first and tile_at.position + c.positions <= tile_at.length
        for j in cutlass.range_constexpr(c.head_dim // 8):
            for r in cutlass.range_constexpr(2):
                even, odd = acc[4 * j + 2 * r] * inverse[r], acc[4 * j + 2 * r + 1] * inverse[r]
                words[2 * j + r] = Int32(pack(self.rings.dtype, even, odd))
        if whole:
            self.store_tile(shared, output, pv, rounded, tile_at, thread, wg)
        else:
            for r in cutlass.range_constexpr(2):
                if tile_at.holds(mine.positions[r]):
                    target = output.out[tile_at.token + mine.positions[r], tile_at.head + mine.rows[r] % c.heads, None]
                    target_words = cute.recast_tensor(target, Int32)
                    for j in cutlass.range_constexpr(c.head_dim // 8):
                        target_words[4 * j + thread % LANES % 4] = words[2 * j + r]

    @cute.jit
    def store_tile(
        self,
        shared: Shared,
        output: Output,
        pv: cute.TiledMma,
        rounded: cute.Tensor,
        tile_at: TilePosition,
        thread: Int32,
        wg: Int32,
    ):
        """Stores all output rows of a tile by TMA, through shared memory."""
        c = self.config
        # The previous TMA store may still be reading the shared-memory buffer, so wait for that store.
        if thread == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=WARPS + wg, number_of_threads=128)
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.rings.dtype)
        to_shared = cute.make_tiled_copy_C(stmatrix, pv).get_slice(thread)
        out_tile = self.rings.out.tiles(shared.storage.out)[None, None, wg]
        cute.copy(to_shared, to_shared.retile(rounded), to_shared.partition_D(out_tile))
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=WARPS + wg, number_of_threads=128)
        if thread == 0:
            boxes = self.rings.out.packed_boxes(shared.storage.out, c.heads, c.positions)
            for panel in cutlass.range_constexpr(self.rings.out.panels):
                target = cute.domain_offset(((tile_at.head, tile_at.token), panel * PANEL), output.tma.tensor)
                tma_store(output.tma.atom, target, ((c.heads, c.positions), PANEL), boxes[None, None, panel, 0, wg])
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def store_lse(self, output: Output, row_max: list, row_sum: list, tile_at: TilePosition, mine: Rows):
        """Stores the LSE of this thread's two rows of a tile."""
        table = cute.make_ptr(Float32, output.lse, cute.AddressSpace.gmem)
        for r in cutlass.range_constexpr(2):
            if tile_at.holds(mine.positions[r]):
                at = Int64(tile_at.token + mine.positions[r]) * output.heads + tile_at.head + mine.rows[r] % self.config.heads
                (table + at).store((row_max[r] + softmax.log2_ftz(row_sum[r])) * softmax.LN2)
