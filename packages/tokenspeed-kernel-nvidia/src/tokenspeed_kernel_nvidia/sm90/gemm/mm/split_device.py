"""Device code of `mm` for few rows of weights, such as a router's: the CTAs of a cluster split k of 8 rows.

The kernel is latency-bound. Each CTA computes a range of k of its cluster's 8 rows of weights, so it reads only this range of the
activations. All CTAs together read at most twice as many bytes of activations as of weights. A lane issues one or two loads of
weights, and as many loads of activations for each 8 rows of activations. Each CTA adds its warps' partial sums, and sends the sums
to the CTA that writes the row's results.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.cute.runtime import make_fake_tensor

from tokenspeed_kernel_nvidia.cutedsl import arguments_device as arguments
from tokenspeed_kernel_nvidia.cutedsl.registers_device import load_floats, mma_m16n8k16, store_floats
from tokenspeed_kernel_nvidia.sm90.common.bulk_device import of_rank, prefetch_bulk, send_word
from tokenspeed_kernel_nvidia.sm90.gemm.mm.config import LOAD_BYTES, QUAD_BYTES, ROWS
from tokenspeed_kernel_nvidia.sm90.gemm.mm.formats_device import wait_after
from tokenspeed_kernel_nvidia.sm90.gemm.mm.memory_device import (
    Matrix,
    Table,
    Vector,
    load_words_if,
    store_number,
    type_of,
)
from tokenspeed_kernel_nvidia.sm90.gemm.mm.split_config import CLUSTER, HEAD_BYTES, WARPS, SplitConfig

_ALL = 1  # named barrier of all threads


def host(config: SplitConfig) -> Any:
    """Returns the host function that launches the kernel of a configuration."""
    return Split(config)


def fake_arguments(config: SplitConfig) -> tuple[Any, ...]:
    """Returns placeholder arguments, which have types and layouts but no memory, to compile the function that `host` returns."""
    m, n, k = (arguments.size() for _ in range(3))
    a, out = type_of(config.dtype), type_of(config.out)
    rows = cute.sym_int64(divisibility=128 // a.width)
    tensors = (
        make_fake_tensor(a, (m, k), (cute.sym_int64(divisibility=128 // a.width), 1), assumed_align=16),
        make_fake_tensor(a, (k, n), (1, rows), assumed_align=16),
        make_fake_tensor(out, (m, n), (cute.sym_int64(), cute.sym_int64()), assumed_align=out.width // 8),
    )
    return (*tensors, Int64(0), Int32(0), Int32(0), Int32(0), arguments.stream())


class Split:
    """Launches and runs the kernel of one configuration.

    A cluster of 8 CTAs computes the results of 8 rows of weights. Each CTA computes an eighth of k, which is split again among its
    16 warps. There is no ring buffer: every lane issues all its loads at once, directly to registers, right after the preceding
    kernel ends (PDL). Shared memory holds only partial sums, for the reduction over warps and, by st.async, over the cluster. The
    CTA of rank r writes the results of row r.
    """

    def __init__(self, config: SplitConfig) -> None:
        self.config = config
        self.dtype = type_of(config.dtype)
        self.out = type_of(config.out)

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        weights: cute.Tensor,
        out: cute.Tensor,
        bias: Int64,
        bias_kind: Int32,
        ctas: Int32,
        shared_bytes: Int32,
        stream: cuda.CUstream,
    ):
        row_bytes = weights.shape[0] * 2
        part = ((row_bytes + QUAD_BYTES - 1) // QUAD_BYTES + CLUSTER - 1) // CLUSTER * QUAD_BYTES
        self.kernel(
            Matrix(weights.iterator.toint(), weights.stride[1] * 2), row_bytes, part, Matrix(a.iterator.toint(), a.stride[0] * 2),
            out.shape[0], out.shape[1], Table(out.iterator.toint(), out.stride[0], out.stride[1]), Vector(bias, bias_kind),
        ).launch(
            grid=(ctas, 1, 1), block=(self.config.threads, 1, 1), cluster=(CLUSTER, 1, 1), smem=shared_bytes, stream=stream,
            use_pdl=True, min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, weights: Matrix, row_bytes: Int32, part: Int32, a: Matrix, m: Int32, n: Int32, out: Table, bias: Vector
    ):  # fmt: skip
        """Computes a CTA's range of k of 8 rows of weights, and the results of one row.

        Args:
            row_bytes: bytes of a row of weights.
            part: how many bytes of a row each CTA of a cluster computes; the last CTAs may have fewer or none.
        """
        config = self.config
        cta, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        cute.arch.griddepcontrol_launch_dependents()
        rank = cta % CLUSTER
        first = cta // CLUSTER * ROWS
        count = cutlass.min(n - first, ROWS)
        begin = rank * part
        left = cutlass.min(part, row_bytes - begin)  # may be negative
        arrived = cute.arch.get_dyn_smem(Int64, alignment=16)
        sums = arrived.toint() + HEAD_BYTES
        gathered = sums + WARPS * ROWS * 4 * m
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(arrived, 1)
                cute.arch.mbarrier_init_fence()
                cute.arch.mbarrier_arrive_and_expect_tx(arrived, m * (CLUSTER * 4))
            cute.arch.sync_warp()
        cute.arch.cluster_arrive_relaxed()
        # Prefetch weights into L2. The preceding kernel may still be writing the weights. Later loads see that kernel's writes,
        # because the prefetch goes only to L2, which is coherent.
        if warp == 1:
            if (lane < count) & (left > 0):
                prefetch_bulk(weights.row(first + lane) + begin, left)
        bias.prefetch(first, thread == 64)
        quad = warp * (config.quads * QUAD_BYTES) + lane % 4 * LOAD_BYTES
        # Lanes beyond the last row of weights read the last row; their partial sums are discarded.
        source = weights.row(first + cutlass.min(lane // 4, count - 1)) + (begin + quad)
        rows = [a.row(lane // 4 + half * ROWS) + (begin + quad) for half in range(config.halves)]
        cute.arch.cluster_wait()  # all CTAs' barriers are initialised
        wait_after([source, *rows])
        x, y = self.load(source, rows, left - quad, m)
        stored = bias.load(first + rank, (rank < count) & (thread < m))
        acc = self.multiply(x, y)
        for half in cutlass.range_constexpr(config.halves):
            token = lane // 4 + half * ROWS
            if token < m:
                pair = [acc[0][2 * half + column] + acc[1][2 * half + column] for column in range(2)]
                store_floats("shared", sums + ((warp * m + token) * ROWS + lane % 4 * 2) * 4, pair)
        cute.arch.barrier(barrier_id=_ALL, number_of_threads=config.threads)
        row = thread % ROWS
        if (thread < m * ROWS) & (row < count):
            total = Float32(0.0)
            for each in cutlass.range_constexpr(WARPS):
                total += load_floats("shared", sums + (each * m * ROWS + thread) * 4, 1)
            there = of_rank(gathered + (rank * m + thread // ROWS) * 4, row)
            send_word(there, total, of_rank(arrived.toint(), row))
        if (rank < count) & (warp == 0):
            cute.arch.mbarrier_wait(arrived, 0)
            if thread < m:
                total = Float32(0.0)
                for each in cutlass.range_constexpr(CLUSTER):
                    total += load_floats("shared", gathered + (each * m + thread) * 4, 1)
                store_number(out.at(thread, first + rank, self.out.width // 8), total + bias.number(stored), self.out)

    def load(self, source: Int64, rows: list[Int64], left: Int32, m: Int32) -> Any:
        """Loads a lane's weights and activations, with zeros beyond their ends.

        Args:
            source, rows: the lane's first address in the weights, and in each group of 8 rows of activations.
            left: number of bytes from ``source`` to the end of the CTA's range of the row.
        """
        x, y = [], []
        for each in range(self.config.quads):
            inside = each * QUAD_BYTES < left
            x.append(load_words_if(source + each * QUAD_BYTES, inside))
            y.append([])
            for half, row in enumerate(rows):
                live = inside & (cute.arch.lane_idx() // 4 + half * ROWS < m)
                y[-1].append(load_words_if(row + each * QUAD_BYTES, live))
        return x, y

    def multiply(self, x: list, y: list) -> list:
        """Computes the MMAs of the loaded weights ``x`` and activations ``y``, in two independent chains, which hide their latency.
        Returns both accumulators."""
        acc = [[Float32(0.0)] * 4, [Float32(0.0)] * 4]
        for words, activations in zip(x, y, strict=True):
            for step in range(2):
                low, high = 2 * step, 2 * step + 1
                others = [activations[1][low], activations[1][high]] if self.config.halves == 2 else [Uint32(0)] * 2
                left = [activations[0][low], others[0], activations[0][high], others[1]]
                acc[step] = [*mma_m16n8k16(self.dtype, acc[step], left, [words[low], words[high]])]
        return acc
