"""Device code of `mm_fp8`: the launch and the producer warps. `sum_device` has the MMA warpgroups.

The GEMM is not swap-AB: rows of activations are the wgmma's m, and columns of the result its n. The two CTAs of a cluster compute
tiles of the same columns. Each CTA loads its own rows of activations, and multicasts half of the weights to both CTAs. One warp
loads operands, another warp the bias, and two warps the scales of columns. Two warpgroups compute 64 rows of a tile each.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

from tokenspeed_kernel_nvidia.cutedsl import arguments_device as arguments
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import advance, first_to_fill
from tokenspeed_kernel_nvidia.cutedsl.registers_device import store_floats
from tokenspeed_kernel_nvidia.sm90.common.registers import left_by
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import make_tma, tma_load
from tokenspeed_kernel_nvidia.sm90.common.wgmma_device import make_qk_mma
from tokenspeed_kernel_nvidia.sm90.gemm.mm.memory_device import Vector
from tokenspeed_kernel_nvidia.sm90.gemm.mm_fp8.config import BLOCK, HALF, OUT_BYTES, PAIR, PANEL, ROWS, Config
from tokenspeed_kernel_nvidia.sm90.gemm.mm_fp8.sum_device import LANES, WARP_ROWS, WARPS, Call, Consumers, Scales

COLUMN_WARPS = 2  # warps that load scales of columns
BOTH = 0b11  # multicast mask: both CTAs of a cluster


def host(config: Config) -> Any:
    """Returns the host function that launches the kernel of a configuration."""
    return MmFp8(config)


def fake_arguments(config: Config) -> tuple[Any, ...]:
    """Returns placeholder arguments, which have types and layouts but no memory, to compile the function that `host` returns."""
    m, n, k = (arguments.size() for _ in range(3))
    result = make_fake_tensor(BFloat16, (m, n), (cute.sym_int64(divisibility=16 // OUT_BYTES), 1), assumed_align=16)
    scales = Int64(0), Int32(0), Int32(0), Int32(0)
    tensors = arguments.byte_rows(m, k), arguments.byte_rows(n, k), result
    return *tensors, Int64(0), Int32(0), *scales, *scales, Int32(0), Int32(0), arguments.stream()


class MmFp8(Consumers):
    """Launches and runs the kernel of one configuration.

    The kernel runs persistent clusters of two CTAs, one CTA per SM, with three warpgroups each:
    * warpgroup 0 releases registers. Warp 0 issues the TMA loads of operands, and warp 1 loads the bias of each tile. Warps 2 and 3
      load the scales of columns into each ring stage, if scales are per column;
    * warpgroups 1 and 2 issue wgmmas for 64 rows each of a tile of 128 x 128 or 128 x 256, apply scales, and store results by TMA.

    The ring of operands takes 192 KiB; a stage has 128 elements along k of both operands. Stages of the next tile are loaded during
    the epilogue. The MMA warps load the scales of rows, and of blocks, from global memory to registers, one stage ahead.
    """

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        out: cute.Tensor,
        bias: Int64,
        bias_kind: Int32,
        a_scale: Int64,
        a_line: Int32,
        a_four: Int32,
        a_one: Int32,
        b_scale: Int64,
        b_line: Int32,
        b_four: Int32,
        b_one: Int32,
        b_lines: Int32,
        clusters: Int32,
        stream: cuda.CUstream,
    ):
        c = self.config
        load, to_both = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileG2SMulticastOp()
        call = Call(
            make_tma(load, a, (ROWS, BLOCK)), make_tma(to_both, b, (self.box, BLOCK)),
            make_tma(cpasync.CopyBulkTensorTileS2GOp(), out, (WARP_ROWS, PANEL)), a.shape[0], b.shape[0],
            cute.ceil_div(a.shape[1], BLOCK), cute.ceil_div(a.shape[1], c.block), Vector(bias, bias_kind),
            Scales(a_scale, a_line, a_four, a_one), Scales(b_scale, b_line, b_four, b_one), b_lines,
            make_qk_mma(cutlass.Float8E4M3FN, HALF, 2),
        )  # fmt: skip
        self.kernel(call).launch(
            grid=(PAIR * clusters, 1, 1), block=(c.threads, 1, 1), cluster=(PAIR, 1, 1), stream=stream, use_pdl=True,
            min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, call: Call):
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = SmemAllocator().allocate(self.storage())
        pipe, biases = self.pipe(storage), self.biases_pipe(storage)
        if warp == 0:
            cpasync.prefetch_descriptor(call.a.atom)
            cpasync.prefetch_descriptor(call.b.atom)
            cpasync.prefetch_descriptor(call.out.atom)
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(c.stages):
                    pipe.init(stage, PAIR * WARPS)
                    if const_expr(c.scales == "column"):
                        pipe.full.init(stage, 1 + COLUMN_WARPS * LANES)
                biases.full.init(0, LANES)
                biases.empty.init(0, WARPS)
            cute.arch.mbarrier_init_fence()
        # The barriers of both CTAs must be initialised before either CTA multicasts.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        # Nothing above depends on the preceding kernel (PDL).
        cute.arch.griddepcontrol_wait()
        if warp < 4:
            cute.arch.setmaxregister_decrease(c.producer_registers)
            if warp == 0:
                self.produce(call, storage)
            elif warp == 1:
                self.load_biases(call, storage)
            elif const_expr(c.scales == "column"):
                self.load_column_scales(call, storage, warp - 2)
        else:
            cute.arch.setmaxregister_increase(left_by(c.threads, 1, c.producer_registers) // 2 // 8 * 8)
            self.consume(call, storage)
        # This CTA's shared memory must stay valid until the other CTA has arrived on this CTA's empty barriers for the last time.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    @cute.jit
    def produce(self, call: Call, storage: Any):
        """Loads the operands of all tiles of this CTA, as far ahead as the ring buffer allows."""
        c = self.config
        pipe = self.pipe(storage)
        a_boxes, b_boxes = self.a_ring.boxes(storage.a, ROWS), self.b_ring.boxes(storage.b, self.box)
        rank = self.rank()
        at = first_to_fill()
        index, tiles = self.tiles(call)
        while tiles.has(index):
            row, column = self.corner(tiles.item(index))
            for block in cutlass.range(call.blocks, unroll=1):
                pipe.acquire(at)
                with cute.arch.elect_one():
                    pipe.commit(at, c.a_bytes + c.b_bytes)
                full = pipe.full.of(at)
                source = cute.domain_offset((row, block * BLOCK), call.a.tensor)
                tma_load(call.a.atom, source, (ROWS, BLOCK), a_boxes[None, None, 0, 0, at.stage], full)
                source = cute.domain_offset((column + rank * self.box, block * BLOCK), call.b.tensor)
                if const_expr(c.halves == 2):
                    target = b_boxes[None, None, 0, 0, at.stage * 2 + rank]
                else:
                    target = b_boxes[None, None, rank, 0, at.stage]
                tma_load(call.b.atom, source, (self.box, BLOCK), target, full, BOTH)
                at = advance(at, c.stages)
            index = tiles.next(index)
        cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def load_biases(self, call: Call, storage: Any):
        """Loads the bias of this CTA's tiles to shared memory, one tile after another."""
        c = self.config
        pipe = self.biases_pipe(storage)
        lane = cute.arch.lane_idx()
        at = first_to_fill()
        index, tiles = self.tiles(call)
        while tiles.has(index):
            _, column = self.corner(tiles.item(index))
            pipe.acquire(at)
            for each in cutlass.range_constexpr(c.columns // LANES):
                own = each * LANES + lane
                bias = call.bias.number(call.bias.load(column + own, column + own < call.n))
                store_floats("shared", self.biases(storage) + own * 4, [bias])
            pipe.full.arrive(at)
            at = advance(at, 1)
            index = tiles.next(index)

    @cute.jit
    def load_column_scales(self, call: Call, storage: Any, warp: Int32):
        """Loads the scales of the tile's columns into each ring stage. The two warps (``warp`` 0 and 1) divide the columns."""
        c = self.config
        pipe = self.pipe(storage)
        lanes = COLUMN_WARPS * LANES
        lane = warp * LANES + cute.arch.lane_idx()
        each = c.columns // lanes
        scales = cute.make_rmem_tensor((c.parts, each), Float32)
        at = first_to_fill()
        index, tiles = self.tiles(call)
        while tiles.has(index):
            _, column = self.corner(tiles.item(index))
            for block in cutlass.range(call.blocks, unroll=1):
                for part in cutlass.range_constexpr(c.parts):
                    own = cutlass.min(block * c.parts + part, call.scaled - 1)
                    for i in cutlass.range_constexpr(each):
                        # Columns beyond n read the last column's scale; their sums are discarded.
                        line = cutlass.min(column + i * lanes + lane, call.n - 1) // call.b_lines
                        scales[part, i] = self.load_scale(call.b_scale, line, own)
                pipe.acquire(at)
                smem_at = self.column_scales(storage, at) + lane * 4
                for part in cutlass.range_constexpr(c.parts):
                    for i in cutlass.range_constexpr(each):
                        store_floats("shared", smem_at + (part * c.columns + i * lanes) * 4, [scales[part, i]])
                pipe.full.arrive(at)
                at = advance(at, c.stages)
            index = tiles.next(index)
