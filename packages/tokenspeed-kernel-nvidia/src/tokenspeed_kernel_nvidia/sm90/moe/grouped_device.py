"""The device code of the products of `grouped`: the launch, and which warp does what.

`grouped_load_device` loads, `grouped_mma_device` computes.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass.memory import SmemAllocator

from tokenspeed_kernel_nvidia.sm90.common import arguments_device as arguments
from tokenspeed_kernel_nvidia.sm90.moe.grouped_config import COLUMN_WARPS, Product
from tokenspeed_kernel_nvidia.sm90.moe.grouped_load_device import Loader
from tokenspeed_kernel_nvidia.sm90.moe.grouped_mma_device import Consumers
from tokenspeed_kernel_nvidia.sm90.moe.grouped_tile_device import Call


def host(config: Product) -> Any:
    """Returns the function that launches a program."""
    return GroupedProduct(config)


def fake_arguments(config: Product) -> tuple[Any, ...]:
    """Returns stand-ins for the arguments of what `host` returns."""
    size, rows = arguments.size, arguments.rows
    out = rows("float32" if config.wide else config.dtype, size(), size(divisibility=32))
    shape = size(), size(divisibility=32)
    given = arguments.byte_rows(*shape) if config.bytewise else rows(config.dtype, *shape)
    addresses = (Int64(0) for _ in range(6))
    return given, out, *addresses, Int32(0), Int32(0), *(Float32(0) for _ in range(3)), arguments.stream()


class GroupedProduct(Loader, Consumers):
    """The kernel of one configuration."""

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
        self.kernel(call).launch(
            grid=(ctas, 1, 1), block=(self.config.threads, 1, 1), stream=stream, use_pdl=True, min_blocks_per_mp=1
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
                    column_pipe.full.init(stage, 32 * COLUMN_WARPS)
                    column_pipe.empty.init(stage, c.warps)
                if const_expr(c.repairs):
                    storage.scales.data_ptr()[0] = Float32(0.0)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # Up to here the kernel before may still run. The first product is what has waited for the schedule when the second one
        # begins: that one need only wait before it reads columns and their scales, and weights are on their way before.
        if const_expr(c.gated or c.repairs):
            cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if const_expr(c.repairs):
            if self.any_beyond(call, storage):
                self.work(call, storage, warp)
        else:
            self.work(call, storage, warp)

    @cute.jit
    def work(self, call: Call, storage: Any, warp: Int32):
        """Does what a warp's role is."""
        c = self.config
        if warp < 4:
            cute.arch.setmaxregister_decrease(c.producer_registers)
            if warp == 0:
                self.load_weights(call, storage)
            else:
                if const_expr(not c.gated):
                    cute.arch.griddepcontrol_wait()
                self.load_columns(call, storage, warp - 1)
        else:
            cute.arch.setmaxregister_increase(c.tile.registers)
            # They read the scales of columns, which the kernel before writes, as it writes the columns themselves.
            if const_expr(c.scaled and not c.gated):
                cute.arch.griddepcontrol_wait()
            self.consume(call, storage)
