"""The base of all kernels whose k a cluster splits: shared memory, the warps' roles, and the ring of weights.

The GEMM is swap-AB. A *tile* is 64 rows of weights, the wgmma's m; tokens are the wgmma's n. A *block* is 64 elements of k. The
CTAs of a cluster compute the same tiles, each CTA with its own blocks. Clusters have different tiles in `mm`, and different tokens
in `moe.route`. So a CTA reads only an eighth of the tokens' elements, which stay in shared memory. All CTAs together then read few
bytes of tokens. If each CTA read all of 16 tokens of 4096 elements, 132 CTAs would read 132 times 128 KB, which is 73% of the bytes
of 2880 rows of weights.

The CTAs send their partial sums to each other by st.async, through distributed shared memory. Each CTA adds the cluster's partial
sums of some of the results, in a fixed order, so results are bitwise deterministic.

A stage of the ring of weights holds one block of one tile, which two TMA loads of 32 rows each copy.
"""

# mypy: ignore-errors

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import cpasync

from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import (
    Cursor,
    Pipeline,
    advance,
    first_to_fill,
    nth_to_read,
    pipeline,
)
from tokenspeed_kernel_nvidia.cutedsl.registers_device import dtype_of
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import Ring, Tma, make_tma, tma_load
from tokenspeed_kernel_nvidia.sm90.common.wgmma_device import make_qk_mma
from tokenspeed_kernel_nvidia.sm90.gemm.mm.config import PACE, PREFETCHED
from tokenspeed_kernel_nvidia.sm90.gemm.mm.memory_device import Matrix, Table, Vector
from tokenspeed_kernel_nvidia.sm90.gemm.mm.prefetch_device import prefetch_rows
from tokenspeed_kernel_nvidia.sm90.gemm.split_k.config import (
    BLOCK,
    CLUSTER,
    HALF,
    STAGE_BYTES,
    THREADS,
    TILE,
    WARPGROUPS,
    WARPS,
    Config,
)

READY = 1  # named barrier of all threads: mbarriers are initialised
COMPUTING = 2  # named barrier of the MMA warps


@dataclass(frozen=True)
class Call:
    """The arguments of a launch, and a CTA's work.

    Attributes:
        weights: TMA view of the weights ``[n, k]``.
        rows: the same weights, by address.
        bias: the bias, which is added to the result.
        out: the result, in global memory.
        m, n, k: numbers of tokens, of rows of weights, and of elements of a row.
        mma: the tiled wgmma of a tile.
        rank, cluster, clusters: the CTA's rank in its cluster, the cluster's index, and the number of clusters.
        first, tiles: the cluster's first tile, and the number of its tiles.
        first_block, blocks: the CTA's first block, and the number of its blocks.
    """

    weights: Tma
    rows: Matrix
    bias: Vector
    out: Table
    m: Int32
    n: Int32
    k: Int32
    mma: cute.TiledMma
    rank: Int32
    cluster: Int32
    clusters: Int32
    first: Int32
    tiles: Int32
    first_block: Int32
    blocks: Int32


def send_four(address: Int32, values: Any, barrier: Int32) -> None:
    """Stores four words to another CTA's shared memory; that CTA's ``barrier`` counts the bytes. ``address`` and ``barrier`` are
    results of `of_rank`."""
    cute.arch.inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}}, [{$r5}];",
        read_only_args=[address, *values, barrier],
    )


def weights_tma(weights: cute.Tensor) -> Tma:
    """Returns the TMA view of weights ``[n, k]``, whose boxes are half a tile by one block."""
    return make_tma(cpasync.CopyBulkTensorTileG2SOp(), weights, (HALF, BLOCK))


class SplitK:
    """A kernel of one configuration, in clusters of `CLUSTER` CTAs of nine warps, one CTA per SM:

    * warps 0-7: two MMA warpgroups, each of which computes every other tile, adds the cluster's partial sums, and writes results;
    * warp 8: the producer. It initialises the barriers, prefetches weights into L2 until the preceding kernel has ended (PDL), and
      then keeps the ring of weights full.

    Shared memory holds the CTA's blocks of all tokens, a buffer of partial sums for each warpgroup, and the ring of weights. The
    kernel is memory-bound: the ring's bytes in flight hide the latency of global memory, and most of a call's weights are in
    flight at once.

    A subclass implements `compute`, and `load_columns` if TMA loads the tokens.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.dtype = dtype_of(config.dtype)
        self.ring = Ring(TILE, BLOCK, config.stages)
        self.columns = Ring(config.tokens, BLOCK, config.room)

    # -- shared memory -------------------------------------------------------------------------------------------------------------

    def storage(self) -> Any:
        c = self.config

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[Int64, c.stages]
            empty: cute.struct.MemRange[Int64, c.stages]
            sums_full: cute.struct.MemRange[Int64, WARPGROUPS]
            sums_empty: cute.struct.MemRange[Int64, WARPGROUPS]
            # Barriers, each with a single phase: the tokens' TMA loads have completed, the cluster's sums of squares have arrived,
            # and the preceding kernel has ended.
            loaded: cute.struct.MemRange[Int64, 1]
            squared: cute.struct.MemRange[Int64, 1]
            ended: cute.struct.MemRange[Int64, 1]
            squares: cute.struct.Align[cute.struct.MemRange[Float32, CLUSTER * c.tokens if self.squared else 0], 16]
            buffers: cute.struct.Align[cute.struct.MemRange[Float32, WARPGROUPS * c.buffer_floats], 16]
            columns: cute.struct.Align[cute.struct.MemRange[self.dtype, self.columns.size], 1024]
            ring: cute.struct.Align[cute.struct.MemRange[self.dtype, self.ring.size], 1024]

        return Storage

    squared = False  # whether the CTAs exchange sums of squares of the tokens

    def pipe(self, storage: Any) -> Pipeline:
        """Returns the barriers of the ring of weights."""
        return pipeline(storage.full, storage.empty)

    def sums(self, storage: Any) -> Pipeline:
        """Returns the barriers of the warpgroups' buffers of partial sums. All CTAs of the cluster fill a CTA's buffers."""
        return pipeline(storage.sums_full, storage.sums_empty)

    # -- roles ---------------------------------------------------------------------------------------------------------------------

    @cute.jit
    def run(self, call: Call, storage: Any, given: Any):
        """Runs the role of the calling warp. ``given``: arguments that only `compute` and `load_columns` of the subclass read."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        # Let the next kernel start as SMs become free. The next kernel's own griddepcontrol.wait waits for the end of this kernel.
        cute.arch.griddepcontrol_launch_dependents()
        if warp == WARPS:
            cpasync.prefetch_descriptor(call.weights.atom)
            with cute.arch.elect_one():
                self.init(call, storage)
            cute.arch.mbarrier_init_fence()
            cute.arch.sync_warp()
            cute.arch.cluster_arrive()
            cute.arch.barrier_arrive(barrier_id=READY, number_of_threads=THREADS)
            self.prefetch(call, storage)
            self.load_columns(call, storage, given)
            self.load(call, storage)
            cute.arch.sync_warp()
            cute.arch.cluster_wait()
        else:
            cute.arch.cluster_arrive_relaxed()
            cute.arch.barrier(barrier_id=READY, number_of_threads=THREADS)
            self.compute(call, storage, given, warp)

    @cute.jit
    def await_kernel_before(self, storage: Any, warp: Int32):
        """An MMA warp waits until the preceding kernel has ended (PDL). The first warp then arrives on ``ended``, so that the
        producer stops the prefetch."""
        cute.arch.griddepcontrol_wait()
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(storage.ended.data_ptr())

    @cute.jit
    def init(self, call: Call, storage: Any):
        """Initialises all barriers. Sets the expected bytes of each warpgroup's first partial sums, before any CTA can send them.
        One lane calls this method."""
        pipe, sums = self.pipe(storage), self.sums(storage)
        for stage in cutlass.range_constexpr(self.config.stages):
            pipe.init(stage, 4)
        for wg in cutlass.range_constexpr(WARPGROUPS):
            sums.full.init(wg, 1)
            sums.empty.init(wg, CLUSTER)
            if wg < call.tiles:
                sums.commit(Cursor(Int32(wg), Int32(0)), self.config.sent_bytes)
        for member in (storage.loaded, storage.squared, storage.ended):
            cute.arch.mbarrier_init(member.data_ptr(), 1)
        if const_expr(self.squared):
            cute.arch.mbarrier_arrive_and_expect_tx(storage.squared.data_ptr(), CLUSTER * self.config.tokens * 4)

    def compute(self, call: Call, storage: Any, given: Any, warp: Int32) -> None:
        """Runs an MMA warp. ``given``: see `run`."""
        raise NotImplementedError

    # -- the producer --------------------------------------------------------------------------------------------------------------

    def prefetch(self, call: Call, storage: Any) -> None:
        """Prefetches this CTA's weights into L2 until the preceding kernel has ended (PDL)."""
        begin = call.first_block * (BLOCK * 2)

        def source_of(row: Int32) -> Int64:
            return call.rows.row(call.first * TILE + row) + begin

        size = cutlass.min(call.blocks * (BLOCK * 2), call.k * 2 - begin)
        rows = cutlass.select_(size > 0, cutlass.min(call.tiles * TILE, call.n - call.first * TILE), Int32(0))
        prefetch_rows(storage.ended.data_ptr(), source_of, rows, size, PREFETCHED, PACE)

    def load_columns(self, call: Call, storage: Any, given: Any) -> None:
        """Loads the tokens, if TMA loads them."""

    @cute.jit
    def load(self, call: Call, storage: Any):
        """Streams this CTA's blocks of all tiles into the ring. The blocks of the two warpgroups' tiles alternate.

        So both warpgroups work at the same time. This order also keeps each wait for a stage valid. A wait for a phase is valid
        only while the barrier is in this phase or the next one, because it names the phase by its parity. If all blocks of one tile
        came before those of the other, the second warpgroup could wait for a fill of a stage that lies two fills ahead. The parity
        of that phase is the parity of a phase that has ended, so the wait would return at once.
        """
        pipe = self.pipe(storage)
        boxes = self.ring.boxes(storage.ring, HALF)
        at = first_to_fill()
        for tile in cutlass.range(0, call.tiles, WARPGROUPS, unroll=1):
            for block in cutlass.range(call.blocks, unroll=1):
                for each in cutlass.range(cutlass.min(call.tiles - tile, WARPGROUPS), unroll=1):
                    pipe.acquire(at)
                    # The preceding kernel may have written the weights (PDL). Nothing above this wait depends on that kernel.
                    cute.arch.griddepcontrol_wait()
                    with cute.arch.elect_one():
                        pipe.commit(at, STAGE_BYTES)
                    for half in cutlass.range_constexpr(2):
                        corner = (call.first + tile + each) * TILE + half * HALF, (call.first_block + block) * BLOCK
                        source = cute.domain_offset(corner, call.weights.tensor)
                        tma_load(call.weights.atom, source, (HALF, BLOCK), boxes[None, None, half, 0, at.stage], pipe.full.of(at))
                    at = advance(at, self.config.stages)

    def stage_of(self, call: Call, tile: Int32, block: Int32) -> Cursor:
        """Returns the cursor of a block of a tile in the ring of weights, for the warpgroup that reads it; see `load`."""
        first = tile // WARPGROUPS * WARPGROUPS
        index = first * call.blocks + block * cutlass.min(call.tiles - first, WARPGROUPS) + tile % WARPGROUPS
        return nth_to_read(index, self.config.stages)

    def mma(self) -> cute.TiledMma:
        """Returns the tiled wgmma of a tile by all tokens."""
        return make_qk_mma(self.dtype, self.config.tokens)
