"""Device code of `mm` with k split over a cluster: the launch, the loads of tokens, the wgmmas, and the reduction over the cluster.
`tile_device` has the rest of the kernel.

Each CTA of a cluster writes the results of eight rows of each tile of 64: four rows of each half. So each CTA sends its partial
sums of a tile to all CTAs of the cluster, to each those of its eight rows. A warpgroup has one buffer of partial sums. Its full
barrier counts the bytes that the eight CTAs send for a tile. When the warpgroup has added them, it arrives on its empty barrier in
all eight CTAs, and each of these sends its partial sums of the warpgroup's next tile when all eight have arrived.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

from tokenspeed_kernel_nvidia.cutedsl import arguments_device as arguments
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Cursor
from tokenspeed_kernel_nvidia.cutedsl.registers_device import dtype_of, load_floats
from tokenspeed_kernel_nvidia.sm90.common.bulk_device import of_rank
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import Tma, make_tma, tma_load
from tokenspeed_kernel_nvidia.sm90.common.wgmma_device import start_mma
from tokenspeed_kernel_nvidia.sm90.gemm.linear.mma_device import arrive_at
from tokenspeed_kernel_nvidia.sm90.gemm.mm.memory_device import Matrix, Table, Vector, store_number
from tokenspeed_kernel_nvidia.sm90.gemm.split_k.config import BLOCK, CLUSTER, HALF, SHARE, THREADS, TILE, WARPGROUPS, Config
from tokenspeed_kernel_nvidia.sm90.gemm.split_k.tile_device import Call, SplitK, send_four, weights_tma

_ADDED = 3  # named barriers of the warpgroups, from this one on: the warpgroup has read its buffer of partial sums


def host(config: Config) -> Any:
    """Returns the host function that launches the kernel of a configuration."""
    return MmSplitK(config)


def fake_arguments(config: Config) -> tuple[Any, ...]:
    """Returns placeholder arguments, which have types and layouts but no memory, to compile the function that `host` returns."""
    m, n, k = (arguments.size() for _ in range(3))
    out = make_fake_tensor(dtype_of(config.dtype), (m, n), (cute.sym_int64(), cute.sym_int64()), assumed_align=2)
    tensors = arguments.rows(config.dtype, m, k), arguments.rows(config.dtype, n, k), out
    return *tensors, Int64(0), Int32(0), Int32(0), arguments.stream()


class MmSplitK(SplitK):
    """Launches and runs the kernel of one configuration. TMA loads the tokens unchanged."""

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        weights: cute.Tensor,
        out: cute.Tensor,
        bias: Int64,
        bias_kind: Int32,
        clusters: Int32,
        stream: cuda.CUstream,
    ):
        tokens = make_tma(cpasync.CopyBulkTensorTileG2SOp(), x, (self.config.tokens, BLOCK))
        self.kernel(
            weights_tma(weights), Matrix(weights.iterator.toint(), weights.stride[0] * 2), Vector(bias, bias_kind),
            Table(out.iterator.toint(), out.stride[0], out.stride[1]), x.shape[0], weights.shape[0], x.shape[1], tokens,
            self.mma(),
        ).launch(
            grid=(CLUSTER * clusters, 1, 1), block=(THREADS, 1, 1), cluster=(CLUSTER, 1, 1), stream=stream, use_pdl=True,
            min_blocks_per_mp=1, preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        weights: Tma,
        rows: Matrix,
        bias: Vector,
        out: Table,
        m: Int32,
        n: Int32,
        k: Int32,
        x: Tma,
        mma: cute.TiledMma,
    ):
        storage = SmemAllocator().allocate(self.storage())
        cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        rank, cluster, clusters = cta % CLUSTER, cta // CLUSTER, ctas // CLUSTER
        tiles, blocks = (n + (TILE - 1)) // TILE, (k + (BLOCK - 1)) // BLOCK
        first, first_block = cluster * tiles // clusters, rank * blocks // CLUSTER
        call = Call(
            weights, rows, bias, out, m, n, k, mma, rank, cluster, clusters, first, (cluster + 1) * tiles // clusters - first,
            first_block, (rank + 1) * blocks // CLUSTER - first_block,
        )  # fmt: skip
        self.run(call, storage, x)

    @cute.jit
    def load_columns(self, call: Call, storage: Any, given: Tma):
        """Loads the CTA's blocks of all tokens, ``given``, and zeros beyond the last token and element."""
        tokens = self.config.tokens
        boxes = self.columns.boxes(storage.columns, tokens)
        cute.arch.griddepcontrol_wait()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(storage.loaded.data_ptr(), call.blocks * (tokens * BLOCK * 2))
        for block in cutlass.range(call.blocks, unroll=1):
            source = cute.domain_offset((0, (call.first_block + block) * BLOCK), given.tensor)
            tma_load(given.atom, source, (tokens, BLOCK), boxes[None, None, 0, 0, block], storage.loaded.data_ptr())

    # -- the MMA warps -------------------------------------------------------------------------------------------------------------

    @cute.jit
    def compute(self, call: Call, storage: Any, given: Tma, warp: Int32):
        """Runs an MMA warp. Its warpgroup computes every other tile."""
        c = self.config
        wg = warp // 4
        thread = cute.arch.thread_idx()[0] % 128
        pipe, sums = self.pipe(storage), self.sums(storage)
        mine = call.mma.get_slice(0)
        left = mine.make_fragment_A(mine.partition_A(self.ring.tiles(storage.ring)))
        right = mine.make_fragment_B(mine.partition_B(self.columns.tiles(storage.columns)))
        acc = cute.make_rmem_tensor(mine.partition_shape_C((TILE, c.tokens)), Float32)
        # A thread writes the results of one token for one row of each half of a tile.
        own, token = call.rank * (SHARE // 2) + thread % (SHARE // 2), thread // (SHARE // 2)
        self.await_kernel_before(storage, warp)
        cute.arch.mbarrier_wait(storage.loaded.data_ptr(), 0)
        cute.arch.cluster_wait()  # the barriers of all CTAs are initialised
        for tile in cutlass.range(wg, call.tiles, WARPGROUPS, unroll=1):
            acc.fill(0.0)
            for block in cutlass.range(call.blocks, unroll=1):
                at = self.stage_of(call, tile, block)
                pipe.wait(at)
                start_mma(call.mma, acc, left[None, None, None, at.stage], right[None, None, None, block], True)
                warpgroup.wait_group(0)
                pipe.release(at)
            turn = tile // WARPGROUPS
            sums.acquire(Cursor(wg, (turn + 1) % 2))
            self.send(call, storage, acc, warp)
            rows = [(call.first + tile) * TILE + half * HALF + own for half in range(2)]
            biases = [call.bias.load(row, (row < call.n) & (token < call.m)) for row in rows]
            sums.wait(Cursor(wg, turn % 2))
            following = tile + WARPGROUPS < call.tiles
            if (thread == 0) & following:  # expect the next bytes before any CTA may send them
                sums.commit(Cursor(wg, turn % 2), c.sent_bytes)
            totals = self.added(storage, wg, thread % (SHARE // 2), token)
            if following:
                cute.arch.barrier(barrier_id=_ADDED + wg, number_of_threads=128)
                if thread < CLUSTER:
                    arrive_at(sums.empty.of(Cursor(wg, Int32(0))).toint(), thread)
            for half in cutlass.range_constexpr(2):
                if (rows[half] < call.n) & (token < call.m):
                    result = totals[half] + call.bias.number(biases[half])
                    store_number(call.out.at(token, rows[half], 2), result, self.dtype)

    def buffer_at(self, storage: Any, wg: Int32) -> Int32:
        """Returns the shared address of a warpgroup's buffer of partial sums: float32 ``[CTA of the cluster][half][row of four]
        [token]``, where tokens are in the order of accumulators, see `place_of`."""
        return storage.buffers.data_ptr().toint() + wg * (self.config.buffer_floats * 4)

    def place_of(self, token: Int32) -> Int32:
        """Returns a token's place in a row of a buffer. A thread's accumulators of a row have four of every sixteen tokens: two
        neighbours in each group of eight. These four are adjacent in the buffer, because one st.async sends them."""
        return token // 16 * 16 + token % 8 // 2 * 4 + token % 16 // 8 * 2 + token % 2

    @cute.jit
    def send(self, call: Call, storage: Any, acc: cute.Tensor, warp: Int32):
        """Sends each CTA of the cluster this CTA's partial sums of the rows that the receiver writes."""
        c = self.config
        lane, wg = cute.arch.lane_idx(), warp // 4
        row = lane // 4
        barrier = self.sums(storage).full.of(Cursor(wg, Int32(0))).toint()
        half = warp % 4 // 2  # a warp has 16 rows of the tile, which are in this half of it
        place = (call.rank * 2 + half) * (SHARE // 2) + row % 4
        to = self.buffer_at(storage, wg) + (place * c.pitch + lane % 4 * 4) * 4
        for eight in cutlass.range_constexpr(2):  # the first and the second eight of the warp's rows
            rank = warp % 2 * 4 + 2 * eight + row // 4
            there, arrived = of_rank(to, rank), of_rank(barrier, rank)
            for sixteen in cutlass.range_constexpr(c.tokens // 16):
                values = [acc[4 * (2 * sixteen + j) + 2 * eight + column] for j in range(2) for column in range(2)]
                send_four(there + sixteen * 64, values, arrived)

    def added(self, storage: Any, wg: Int32, row: Int32, token: Int32) -> list:
        """Returns the sums of the cluster's partial sums of a row of both halves for a token, added in a fixed order."""
        c = self.config
        at = self.buffer_at(storage, wg) + (row * c.pitch + self.place_of(token)) * 4
        totals = [Float32(0.0)] * 2
        for rank in range(CLUSTER):
            for half in range(2):
                totals[half] += load_floats("shared", at + (rank * 2 + half) * (SHARE // 2 * c.pitch * 4), 1)
        return totals
