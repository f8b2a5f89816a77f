"""The device code of the GEMMs of `grouped`: the launch and the warp roles.

`load_device` has the producer warps, `mma_device` the MMA warpgroups, and `epilogue_device` their epilogue.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass.memory import SmemAllocator

from tokenspeed_kernel_nvidia.cutedsl import arguments_device as arguments
from tokenspeed_kernel_nvidia.sm90.moe.grouped.config import COLUMN_WARPS, Gemm
from tokenspeed_kernel_nvidia.sm90.moe.grouped.load_device import Loader
from tokenspeed_kernel_nvidia.sm90.moe.grouped.mma_device import Consumers
from tokenspeed_kernel_nvidia.sm90.moe.grouped.tile_device import Call


def host(config: Gemm) -> Any:
    """Returns the host function that launches the kernel of ``config``."""
    return GroupedGemm(config)


def fake_arguments(config: Gemm) -> tuple[Any, ...]:
    """Returns placeholder arguments, which have types and layouts but no memory, to compile the function that `host` returns."""
    size, rows = arguments.size, arguments.rows
    out = rows("float32" if config.wide else config.dtype, size(), size(divisibility=32))
    shape = size(), size(divisibility=32)
    given = arguments.byte_rows(*shape) if config.bytewise else rows(config.dtype, *shape)
    addresses = (Int64(0) for _ in range(6))
    return given, out, *addresses, Int32(0), Int32(0), *(Float32(0) for _ in range(3)), arguments.stream()


class GroupedGemm(Loader, Consumers):
    """A grouped GEMM of one configuration.

    The kernel runs n persistent CTAs, one per SM. CTA i computes work item i and every n-th item after it. A work item is a tile of
    columns by a tile of rows of one expert's weights. Roles:

    * warpgroup 0, the producer warps, releases registers. Warp 0 streams weights by bulk copies, one lane for each panel of a tile.
      Warps 1 to 3 gather the rows of activations (the columns of the MMA) by cp.async. If columns are packed, warp 1 alone copies
      them by multicast bulk copies;
    * warpgroups 1 to 2 or 3, the MMA warps, dequantise weights to A fragments in registers and issue MMAs. They also run the
      epilogue: scales, bias and activation, and stores through a buffer in shared memory.

    The two rings have barriers of their own, because a stage of weights may hold several k steps. Shared memory holds the ring of
    columns, the columns' scales, and the epilogue's buffers. The ring of weights takes the remaining memory (227 KB in all). While
    the MMAs of a k step run, the same warps dequantise the next k step. Narrow tiles are limited by memory and by dequantisation,
    wide tiles by MMAs and dequantisation.
    """

    @cute.jit
    def __call__(
        self,
        rows: cute.Tensor,
        out: cute.Tensor,
        weights: Int64,
        row_scales: Int64,
        exact: Int64,
        sources: Int64,
        tiles: Int64,
        tile_count: Int64,
        strips: Int32,
        ctas: Int32,
        alpha: Float32,
        limit: Float32,
        beta: Float32,
        stream: cuda.CUstream,
    ):
        call = Call(
            weights, strips, rows.shape[1], rows.iterator.toint(), rows.stride[0], rows.shape[0], row_scales, exact, sources, tiles,
            tile_count, out.iterator.toint(), out.stride[0], alpha, limit, beta,
        )  # fmt: skip
        cluster = {"cluster": (self.config.ctas, 1, 1)} if self.config.paired else {}
        self.kernel(call).launch(
            grid=(ctas, 1, 1), block=(self.config.threads, 1, 1), stream=stream, use_pdl=True, min_blocks_per_mp=1, **cluster
        )

    @cute.kernel
    def kernel(self, call: Call):
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = SmemAllocator().allocate(self.storage())
        if warp == 0:
            weight_pipe, column_pipe = self.weight_pipe(storage), self.column_pipe(storage)
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(c.weight_stages):
                    weight_pipe.init(stage, c.warps)
                for stage in cutlass.range_constexpr(c.column_stages):
                    column_pipe.full.init(stage, 1 if c.paired else 32 * COLUMN_WARPS)
                    column_pipe.empty.init(stage, c.ctas * c.warps)
                if const_expr(c.repairs):
                    storage.scales.data_ptr()[0] = Float32(0.0)
            cute.arch.mbarrier_init_fence()
        if const_expr(c.paired):  # the barriers of both CTAs must be initialised before either CTA multicasts
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        # Nothing above depends on the preceding kernel (PDL). The first GEMM waits here, because it needs the schedule. The second
        # GEMM can be launched only after the first GEMM has waited for the schedule. So it starts to load weights at once, and
        # waits in `work`, before it reads columns and their scales.
        if const_expr(c.gated or c.repairs):
            cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if const_expr(c.repairs):
            if self.any_beyond(call, storage):
                self.work(call, storage, warp)
        else:
            self.work(call, storage, warp)
        if const_expr(c.paired):
            # Shared memory must stay valid until the other CTA has arrived on this CTA's empty barriers for the last time.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def work(self, call: Call, storage: Any, warp: Int32):
        """Runs the role of the warp with this index in the CTA: loading weights, gathering columns, or MMAs."""
        c = self.config
        if warp < 4:
            cute.arch.setmaxregister_decrease(c.producer_registers)
            if warp == 0:
                self.load_weights(call, storage)
            else:
                if const_expr(not c.gated):
                    cute.arch.griddepcontrol_wait()
                if const_expr(c.paired):
                    if warp == 1:
                        self.load_packed_columns(call, storage)
                else:
                    self.load_columns(call, storage, warp - 1)
        else:
            cute.arch.setmaxregister_increase(c.tile.registers)
            # The MMA warps also read the columns' scales, which the preceding kernel writes along with the columns.
            if const_expr(c.scaled and not c.gated):
                cute.arch.griddepcontrol_wait()
            self.consume(call, storage)
