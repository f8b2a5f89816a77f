"""The MMA warpgroups of `kernel_device`: wgmma, accumulation, epilogue.

Hopper's tensor cores accumulate fp8 with fewer bits than float32 has. So wgmma accumulates over at most 128 elements of k, as block
scales require anyway. The lanes scale these partial sums, and add them to the tile's sums in float32 registers (promotion). A
warpgroup's tile is 64 rows by one or two halves of 128 columns. The two halves use the same registers for their partial sums, one
after the other, so a warpgroup waits for its wgmmas before it adds. Meanwhile, the wgmmas of the other warpgroup run.
"""

# mypy: ignore-errors

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, const_expr, cute
from cutlass.cute.nvgpu import warpgroup

from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Cursor, Pipeline, advance, first_to_read, pipeline
from tokenspeed_kernel_nvidia.cutedsl.registers_device import float_of, load_floats, pack, stmatrix
from tokenspeed_kernel_nvidia.cutedsl.tile_scheduler_device import Raster, own_indices
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import Ring, Tma, tma_store
from tokenspeed_kernel_nvidia.sm90.common.wgmma_device import start_mma
from tokenspeed_kernel_nvidia.sm90.gemm.mm.memory_device import Vector
from tokenspeed_kernel_nvidia.sm90.gemm.mm_fp8.config import BLOCK, GROUP, HALF, PAIR, PANEL, ROWS, Config

LANES = 32
WARPS = 8  # MMA warps
WARP_ROWS = 16  # rows of a tile whose accumulators one warp has
PANEL_BYTES = WARP_ROWS * 128  # an output buffer: 64 columns of these rows
STEP = 32  # elements of k that one wgmma multiplies


@dataclass(frozen=True)
class Scales:
    """The address and strides of one operand's scales in global memory. Four consecutive blocks along k have a stride of their own,
    because e8m0 scales may be packed four to an int32.

    Attributes:
        address: address of the scale of the first line and the first block along k.
        line: stride in bytes between lines: rows of activations, or groups of rows of weights (columns of the result) with one
            scale.
        four: stride in bytes from a block along k to the fourth block after it.
        one: stride in bytes between consecutive blocks along k of the same group of four.
    """

    address: Int64
    line: Int32
    four: Int32
    one: Int32

    @cute.jit
    def at(self, line: Int32, block: Int32):
        """Returns the address of the scale of a line and a block along k."""
        return self.address + Int64(line) * self.line + (block // 4 * self.four + block % 4 * self.one)


@dataclass(frozen=True)
class Call:
    """The arguments of a launch.

    Attributes:
        a, b: TMA descriptors of the activations and the weights.
        out: TMA descriptor of the result.
        m, n: rows and columns of the result.
        blocks: number of pipeline stages along k of a tile.
        scaled: number of blocks along k that have scales.
        bias: vector that is added to each row of the result.
        a_scale, b_scale: the scales of the activations, by row, and of the weights, by column of the result.
        b_lines: number of columns of the result that share a scale of the weights.
        mma: the tiled wgmma of both warpgroups' rows with 128 columns.
    """

    a: Tma
    b: Tma
    out: Tma
    m: Int32
    n: Int32
    blocks: Int32
    scaled: Int32
    bias: Vector
    a_scale: Scales
    b_scale: Scales
    b_lines: Int32
    mma: cute.TiledMma


def load_exponent(address: Any) -> Any:
    """Loads an e8m0 scale from global memory. Returns the scale as float32."""
    byte = cute.arch.inline_ptx("ld.global.u8 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])
    # 0 means 2^-127, a subnormal float32, and 255 means NaN.
    bits = cutlass.select_(byte == 0, Int32(1 << 22), byte << 23)
    return float_of(cutlass.select_(byte == 255, Int32(0x7FC00000), bits))


class Consumers:
    """The code of the MMA warpgroups, and the layout of shared memory and tile coordinates that the producer warps use as well."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.box = config.columns // PAIR  # rows of weights that each CTA of a cluster loads
        self.a_ring = Ring(ROWS, BLOCK, config.stages, BLOCK)
        self.b_ring = Ring(HALF, BLOCK, config.halves * config.stages, BLOCK)
        # float32 scales of columns in a pipeline stage, if each column of the result has its own scale.
        self.scales_of_stage = config.parts * config.columns if config.scales == "column" else 0
        self.out_ring = Ring(WARP_ROWS, PANEL, WARPS * config.panels, PANEL)

    # -- shared memory -------------------------------------------------------------------------------------------------------------

    def storage(self) -> Any:
        c = self.config

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[cutlass.Int64, c.stages]
            empty: cute.struct.MemRange[cutlass.Int64, c.stages]
            biases_full: cute.struct.MemRange[cutlass.Int64, 1]
            biases_empty: cute.struct.MemRange[cutlass.Int64, 1]
            biases: cute.struct.Align[cute.struct.MemRange[Float32, c.columns], 16]
            scales: cute.struct.Align[cute.struct.MemRange[Float32, self.scales_of_stage * c.stages], 16]
            a: cute.struct.Align[cute.struct.MemRange[Uint8, c.stages * c.a_bytes], 1024]
            b: cute.struct.Align[cute.struct.MemRange[Uint8, c.stages * c.b_bytes], 1024]
            out: cute.struct.Align[cute.struct.MemRange[BFloat16, self.out_ring.size], 1024]

        return Storage

    def pipe(self, storage: Any) -> Pipeline:
        """Returns the barriers of the ring of operands. A stage is empty when the MMA warps of both CTAs of the cluster have read
        it, because weights are multicast to both.
        """
        return pipeline(storage.full, storage.empty)

    def biases_pipe(self, storage: Any) -> Pipeline:
        """Returns the barriers of the buffer of biases, which has a single stage."""
        return pipeline(storage.biases_full, storage.biases_empty)

    def biases(self, storage: Any) -> Int32:
        """Returns the shared-memory address of the float32 biases of a tile's columns."""
        return storage.biases.data_ptr().toint()

    def column_scales(self, storage: Any, at: Cursor) -> Int32:
        """Returns the shared-memory address of the columns' scales in the stage ``at``. The layout is float32
        ``[blocks][columns]``: for each scale block along k of the stage, one scale per column of the tile.
        """
        return storage.scales.data_ptr().toint() + at.stage * (self.scales_of_stage * 4)

    # -- tiles ---------------------------------------------------------------------------------------------------------------------

    def rank(self) -> Int32:
        """Returns the CTA's rank in its cluster."""
        return cute.arch.block_idx()[0] % PAIR

    def tiles(self, call: Call):
        """Returns the index of this cluster's first tile, and the tile scheduler."""
        index, step = own_indices(PAIR)
        return index, Raster(step, call.m, call.n, PAIR * ROWS, self.config.columns, GROUP)

    def corner(self, tile: tuple):
        """Returns the first row and column, in the result, of this CTA's part of a cluster's tile."""
        row, column = tile
        return (row * PAIR + self.rank()) * ROWS, column * self.config.columns

    # -- MMAs ----------------------------------------------------------------------------------------------------------------------

    @cute.jit
    def consume(self, call: Call, storage: Any):
        """Runs an MMA warp: computes and stores the rows of the warp's warpgroup, for all tiles of the CTA."""
        c = self.config
        thread, _, _ = cute.arch.thread_idx()
        thread -= 128
        wg = cute.arch.make_warp_uniform(thread // 128)
        pipe = self.pipe(storage)
        mine = call.mma.get_slice(wg * 128)
        kind = cutlass.Float8E4M3FN
        left = mine.make_fragment_A(mine.partition_A(self.a_ring.tiles(storage.a, dtype=kind)))
        right = mine.make_fragment_B(mine.partition_B(self.b_ring.tiles(storage.b, dtype=kind)))
        shape = mine.partition_shape_C((ROWS, HALF))
        partials = cute.make_rmem_tensor(shape, Float32)
        sums = [cute.make_rmem_tensor(shape, Float32) for _ in range(c.halves)]
        # The scales of the thread's two rows and of each half's columns: ``factors`` for this stage, ``following`` for the next
        # stage.
        factors, following = (cute.make_rmem_tensor((2 * c.parts + c.halves,), Float32) for _ in range(2))
        at, biases_at = first_to_read(), first_to_read()
        index, tiles = self.tiles(call)
        while tiles.has(index):
            row, column = self.corner(tiles.item(index))
            for half in cutlass.range_constexpr(c.halves):
                sums[half].fill(0.0)
            self.load_factors(call, following, row, column, Int32(0))
            for block in cutlass.range(call.blocks, unroll=1):
                for each in cutlass.range_constexpr(cute.size(factors)):
                    factors[each] = following[each]
                # Prefetch the next stage's scales. Nothing in this stage waits for these loads.
                self.load_factors(call, following, row, column, cutlass.min(block + 1, call.blocks - 1))
                pipe.wait(at)
                a = left[None, None, None, at.stage]
                for half in cutlass.range_constexpr(c.halves):
                    b = right[None, None, None, at.stage * c.halves + half]
                    for part in cutlass.range_constexpr(c.parts):
                        count = BLOCK // STEP // c.parts
                        start_mma(call.mma, partials, a, b, steps=count, first=part * count)
                        warpgroup.wait_group(0)
                        if const_expr(c.scales == "column"):
                            self.add_scaled(sums[half], partials, factors, self.column_scales(storage, at), half, part)
                        if const_expr(half == c.halves - 1 and part == c.parts - 1):
                            self.release(pipe, at)
                        if const_expr(c.scales == "block"):
                            self.add(sums[half], partials, factors, half)
                at = advance(at, c.stages)
            self.store(call, storage, sums, biases_at, row, column)
            biases_at = advance(biases_at, 1)
            index = tiles.next(index)
        cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def release(self, pipe: Pipeline, at: Cursor):
        """Releases a stage: this warp arrives on the empty barriers of both CTAs of the cluster."""
        lane = cute.arch.lane_idx()
        if lane < PAIR:
            cute.arch.mbarrier_arrive(pipe.empty.of(at), lane)

    @cute.jit
    def load_factors(self, call: Call, factors: cute.Tensor, row: Int32, column: Int32, block: Int32):
        """Loads the scales of a stage, for this thread's rows and columns, from global memory into ``factors``. Rows and columns
        outside the result read the scale of the last row or column, because their sums are discarded.
        """
        c = self.config
        own = row + (cute.arch.thread_idx()[0] - 128) // LANES * WARP_ROWS + cute.arch.lane_idx() // 4
        for part in cutlass.range_constexpr(c.parts):
            along = cutlass.min(block * c.parts + part, call.scaled - 1)
            for r in cutlass.range_constexpr(2):
                factors[2 * part + r] = self.load_scale(call.a_scale, cutlass.min(own + 8 * r, call.m - 1), along)
        if const_expr(c.scales == "block"):
            for half in cutlass.range_constexpr(c.halves):
                line = cutlass.min(column + half * HALF, call.n - 1) // BLOCK
                factors[2 + half] = self.load_scale(call.b_scale, line, block)

    @cute.jit
    def load_scale(self, scales: Scales, line: Int32, block: Int32):
        """Loads the scale of a line (see `Scales.line`) and a block along k from global memory. Returns the scale as float32."""
        if const_expr(self.config.stored == "byte"):
            scale = load_exponent(scales.at(line, block))
        else:
            scale = load_floats("global", scales.at(line, block), 1)
        return scale

    @cute.jit
    def add(self, sums: cute.Tensor, partials: cute.Tensor, factors: cute.Tensor, half: cutlass.Constexpr[int]):
        """Adds the scaled partial sums of a block along k to the sums of a half (128 columns), if these columns share a scale."""
        for j in cutlass.range_constexpr(cute.size(sums) // 4):
            for r in cutlass.range_constexpr(2):
                for column in cutlass.range_constexpr(2):
                    at = 4 * j + 2 * r + column
                    sums[at] = partials[at] * (factors[r] * factors[2 + half]) + sums[at]

    @cute.jit
    def add_scaled(
        self,
        sums: cute.Tensor,
        partials: cute.Tensor,
        factors: cute.Tensor,
        scales: Int32,
        half: cutlass.Constexpr[int],
        part: cutlass.Constexpr[int],
    ):
        """Adds the scaled partial sums of a block along k to the sums of a half, if each column has its own scale.
        ``scales``: shared-memory address of the columns' scales in the stage.
        """
        own = scales + cute.arch.lane_idx() % 4 * 8
        for j in cutlass.range_constexpr(cute.size(sums) // 4):
            columns = load_floats("shared", own + (part * self.config.columns + half * HALF + 8 * j) * 4, 2)
            for r in cutlass.range_constexpr(2):
                for column in cutlass.range_constexpr(2):
                    at = 4 * j + 2 * r + column
                    sums[at] = partials[at] * (factors[2 * part + r] * columns[column]) + sums[at]

    # -- results -------------------------------------------------------------------------------------------------------------------

    @cute.jit
    def store(self, call: Call, storage: Any, sums: list, biases_at: Cursor, row: Int32, column: Int32):
        """Adds the bias to the sums of a tile and stores the results. Each warp stores its 16 rows, 64 columns at a time, through
        shared memory by TMA.
        """
        c = self.config
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform((cute.arch.thread_idx()[0] - 128) // LANES)
        biases = self.biases_pipe(storage)
        biases.wait(biases_at)
        boxes = self.out_ring.boxes(storage.out, WARP_ROWS)
        for panel in cutlass.range_constexpr(c.columns // PANEL):
            buffer = warp * c.panels + panel % c.panels
            smem_at = storage.out.data_ptr().toint() + buffer * PANEL_BYTES
            # Wait until the TMA store that last used this buffer has read it.
            cute.arch.cp_async_bulk_wait_group(c.panels - 1, read=True)
            cute.arch.sync_warp()
            words = []
            for eight in cutlass.range_constexpr(PANEL // 8):
                first = panel * PANEL + eight * 8
                results = self.results(storage, sums[first // HALF], first, lane)
                words += [pack(BFloat16, *results[r]) for r in range(2)]
                if const_expr(eight % 2 == 1):
                    # Lanes 0-15 address rows of the first eight columns, lanes 16-31 rows of the second eight columns.
                    chunk16 = eight - 1 + lane // 16
                    stmatrix(smem_at + lane % 16 * 128 + ((chunk16 ^ (lane % 8)) * 16), words)
                    words = []
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
            target = cute.domain_offset((row + warp * WARP_ROWS, column + panel * PANEL), call.out.tensor)
            tma_store(call.out.atom, target, (WARP_ROWS, PANEL), boxes[None, None, 0, 0, buffer])
            cute.arch.cp_async_bulk_commit_group()
        biases.release(biases_at)

    @cute.jit
    def results(self, storage: Any, sums: cute.Tensor, first: cutlass.Constexpr[int], lane: Int32):
        """Returns a thread's results, with bias, of the eight columns from ``first`` on: two results for each of its two rows."""
        j = first % HALF // 8
        bias = load_floats("shared", self.biases(storage) + (first + lane % 4 * 2) * 4, 2)
        return [[sums[4 * j + 2 * r + column] + bias[column] for column in range(2)] for r in range(2)]
