"""The device code of `linear`: launch, warp roles, the producer warp, and the warps that reduce and write results.

`mma_device` has the MMA warps. A *panel* is 64 rows of weights, a *strip* 16 of these rows, and a *block* 64 elements of k.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_fake_tensor

from tokenspeed_kernel_nvidia.cutedsl import arguments_device as arguments
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.layout import BLOCK, PANEL, PANEL_STRIPS
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import (
    Barriers,
    Cursor,
    Pipeline,
    advance,
    first_to_fill,
)
from tokenspeed_kernel_nvidia.cutedsl.registers_device import LANES, dtype_of, load_floats
from tokenspeed_kernel_nvidia.sm90.common.bulk_device import bulk_load
from tokenspeed_kernel_nvidia.sm90.gemm.linear.config import (
    CLUSTER,
    FINISH_WARP,
    FINISHERS,
    GROUPS,
    HEAD_BYTES,
    LOAD_WARP,
    ROWS,
    SLAB,
    THREADS,
    Config,
)
from tokenspeed_kernel_nvidia.sm90.gemm.linear.mma_device import Call, MmaWarps, WorkSlice, arrive_at
from tokenspeed_kernel_nvidia.sm90.gemm.mm.memory_device import Matrix, Table, store_number


def host(config: Config) -> Any:
    """Returns the host function that launches the kernel of a configuration."""
    return Linear(config)


def fake_arguments(config: Config) -> tuple[Any, ...]:
    """Returns placeholder arguments, which have types and layouts but no memory, to compile the function that `host` returns."""
    m, n, k = (arguments.size() for _ in range(3))
    out = make_fake_tensor(dtype_of(config.dtype), (m, n), (cute.sym_int64(), cute.sym_int64()), assumed_align=2)
    return arguments.rows(config.dtype, m, k), out, *(Int64(0) for _ in range(3)), Int32(0), arguments.stream()


class Linear(MmaWarps):
    """Launches and runs the kernel of one configuration.

    The kernel is launched in clusters of 8 CTAs of 19 warps, one CTA per SM (``min_blocks_per_mp=1``, up to 227 KiB of shared
    memory):
    * warps 0-15, four groups of four: MMA. A group computes every fourth panel of the cluster, and each warp of a group a strip of
      16 rows. After each panel, the warps send their partial sums to the CTAs of the cluster that reduce them;
    * warp 16: the producer. It initialises the barriers, and keeps the ring of weights full. Each group has its own stages of the
      ring;
    * warps 17-18: the epilogue. They reduce the partial sums of the cluster's CTAs, apply row factors and bias, and write the
      results.

    Shared memory holds the barriers, this CTA's slice of the tokens' features, a buffer of partial sums for each group of MMA
    warps, and the ring of weights. The full barrier of a buffer counts the bytes that the cluster's CTAs send for a panel. When the
    epilogue has read the buffer, it arrives on the buffer's empty barrier in all CTAs of the cluster.
    """

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        out: cute.Tensor,
        weights: Int64,
        factors: Int64,
        bias: Int64,
        ctas: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(
            Matrix(x.iterator.toint(), x.stride[0] * 2), x.shape[0], x.shape[1],
            Table(out.iterator.toint(), out.stride[0], out.stride[1]), out.shape[1], weights, factors, bias,
        ).launch(
            grid=(ctas, 1, 1), block=(THREADS, 1, 1), cluster=(CLUSTER, 1, 1), smem=self.config.shared_bytes, stream=stream,
            use_pdl=True, min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        x: Matrix,
        m: Int32,
        k: Int32,
        out: Table,
        n: Int32,
        weights: Int64,
        factors: Int64,
        bias: Int64,
    ):
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        rank, cluster, clusters = cta % CLUSTER, cta // CLUSTER, ctas // CLUSTER
        panels, blocks = (n + (PANEL - 1)) // PANEL, (k + (BLOCK - 1)) // BLOCK
        first, first_block = cluster * panels // clusters, rank * blocks // CLUSTER
        work = WorkSlice(
            rank,
            first,
            (cluster + 1) * panels // clusters - first,
            first_block,
            (rank + 1) * blocks // CLUSTER - first_block,
            blocks,
        )
        barriers = cute.arch.get_dyn_smem(Int64, alignment=128)
        ring = Pipeline(Barriers(barriers), Barriers(barriers + self.stages))
        sums = Pipeline(Barriers(barriers + 2 * self.stages), Barriers(barriers + 2 * self.stages + GROUPS))
        base = barriers.toint() + HEAD_BYTES
        buffers = base + config.columns_bytes
        call = Call(
            x, m, k, out, n, weights, factors, bias, work, ring, sums, base, buffers,
            buffers + GROUPS * config.buffer_bytes,
        )  # fmt: skip
        # Let the next kernel start as SMs become free. The next kernel's own griddepcontrol.wait waits for the end of this kernel.
        cute.arch.griddepcontrol_launch_dependents()
        if warp == LOAD_WARP:
            lane = cute.arch.lane_idx()
            if lane < self.stages:
                ring.init(lane, PANEL_STRIPS)
            if lane < GROUPS:
                sums.full.init(lane, 1)
                sums.empty.init(lane, CLUSTER * FINISHERS)
            cute.arch.mbarrier_init_fence()
            cute.arch.sync_warp()
            if lane < GROUPS:
                self.expect_sums(call, Cursor(lane, Int32(0)))
            cute.arch.sync_warp()
            cute.arch.cluster_arrive()
            # The weights depend neither on the preceding kernel nor on other CTAs.
            self.load(call)
            cute.arch.sync_warp()
            cute.arch.cluster_wait()
        else:
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()  # all CTAs' barriers are initialised
            cute.arch.griddepcontrol_wait()
            if warp < LOAD_WARP:
                self.multiply(call, warp)
            else:
                self.finish(call, warp)
        # No CTA exits while other CTAs may still send to its shared memory.
        cute.arch.sync_warp()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    # -- weights -------------------------------------------------------------------------------------------------------------------

    @cute.jit
    def load(self, call: Call):
        """Loads this CTA's k blocks of all panels into the ring, in slabs of `SLAB` blocks. Slabs of the four groups' panels
        alternate."""
        config, work = self.config, call.work
        at = first_to_fill()  # the position in each group's own stages
        if cute.arch.lane_idx() == 0:
            for panel in cutlass.range(0, work.panels, GROUPS, unroll=1):
                for block in cutlass.range(0, work.blocks, SLAB, unroll=1):
                    count = cutlass.min(work.blocks - block, SLAB) * config.panel_block_bytes
                    for group in cutlass.range_constexpr(GROUPS):
                        if panel + group < work.panels:
                            stage = self.stage_of(at, group)
                            whole = Int64(work.first + panel + group) * work.all_blocks + (work.first_block + block)
                            call.ring.acquire(stage)
                            call.ring.commit(stage, count)
                            to = call.ring_at + stage.stage * config.stage_bytes
                            source = call.weights + whole * config.panel_block_bytes
                            bulk_load(to, source, count, call.ring.full.of(stage).toint())
                    at = advance(at, config.stages)

    # -- results -------------------------------------------------------------------------------------------------------------------

    @cute.jit
    def expect_sums(self, call: Call, at: Cursor):
        """Sets the bytes that the full barrier of a buffer of partial sums expects for a panel: each CTA that has k blocks sends
        its partial sums.
        """
        call.sums.commit(at, cutlass.min(call.work.all_blocks, CLUSTER) * (self.config.buffer_bytes // CLUSTER))

    @cute.jit
    def finish(self, call: Call, warp: Int32):
        """Reduces and writes this CTA's rows of all panels, in panel order. ``warp``: one of the `FINISHERS`."""
        index = (warp - FINISH_WARP) * LANES + cute.arch.lane_idx()
        for panel in cutlass.range(call.work.panels, unroll=1):
            self.finish_rows(call, Cursor(panel % GROUPS, panel // GROUPS % 2), panel, index)

    @cute.jit
    def finish_rows(self, call: Call, at: Cursor, panel: Int32, index: Int32):
        """Adds the partial sums of all CTAs for this CTA's rows of a panel, and writes the results. Each lane reduces some rows of
        one token."""
        config, work = self.config, call.work
        rows = config.tokens * ROWS // (FINISHERS * LANES)
        token, own = index % config.tokens, index // config.tokens * rows
        row = (work.first + panel) * PANEL + work.rank * ROWS + own
        factors = [load_floats("global", call.factors + Int64(row + i) * 4, 1) for i in range(rows)]
        biases = [Float32(0.0)] * rows
        if call.bias != 0:
            biases = [load_floats("global", call.bias + Int64(row + i) * 4, 1) for i in range(rows)]
        totals = [Float32(0.0)] * rows
        call.sums.wait(at)
        smem_at = call.buffers + at.stage * config.buffer_bytes + (own * config.tokens + token) * 4
        for source in cutlass.range_constexpr(CLUSTER):
            there = (source + 1) * work.all_blocks // CLUSTER > source * work.all_blocks // CLUSTER
            for i in cutlass.range_constexpr(rows):
                number = load_floats("shared", smem_at + (source * ROWS + i) * config.tokens * 4, 1)
                totals[i] += cutlass.select_(there, number, Float32(0.0))
        if index == 0:  # expect the bytes of the group's next panel before any CTA may send them
            self.expect_sums(call, at)
        cute.arch.sync_warp()
        if index % LANES < CLUSTER:
            arrive_at(call.sums.empty.of(at).toint(), index % LANES)
        for i in cutlass.range_constexpr(rows):
            if (token < call.m) & (row + i < call.n):
                store_number(call.out.at(token, row + i, 2), totals[i] * factors[i] + biases[i], self.dtype)
