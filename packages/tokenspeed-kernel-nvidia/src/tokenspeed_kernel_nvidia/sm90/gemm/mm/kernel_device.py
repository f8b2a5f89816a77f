"""Device code of `mm`: the launch, the ring buffer of weights, the loop over tiles, and the reduction.

A CTA has a range of the weights' rows, in tiles of 8. A producer warp streams the rows by bulk copies into a ring buffer in shared
memory. A ring stage holds a range of k of a tile's rows. All other warps split k of every stage.

The activations are in shared memory as MMA operands. A *chunk* is the range of k whose activations fit in shared memory. If a chunk
is a whole row, activations are loaded only once. Otherwise the loops are nested: for each *group* of 40 rows of weights, for each
chunk, for each tile of the group. So activations are loaded once for each group. Activations are not kept in registers, because
each part of k would then need its own code. A call runs such code only a few times, so the call would stall on instruction fetches.

At the end of a group, the partial sums of all warps are added through shared memory. If the CTAs of a cluster split k, each CTA
sends its partial sums to the CTA that writes the row's results.

In a stage, a warp has a range of k of all 8 rows. Per load, each quad of lanes loads 64 bytes of one row, 16 bytes per lane.
`formats_device` converts the loaded weights to MMA operands. The order of k within an MMA does not matter, provided that
activations and weights have the same order. So a lane's 16 consecutive bytes can be the operands of successive MMAs, without
shuffles. An MMA multiplies 16 rows of activations by 8 rows of weights (mma.sync m16n8k16), even if there is only one row of
activations. Per 16 bytes of bfloat16 weights, a lane then executes two loads, two MMAs and about four moves. With FMAs, it would
execute 25 instructions.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute
from cutlass.cute.runtime import make_fake_tensor

from tokenspeed_kernel_nvidia.cutedsl import arguments_device as arguments
from tokenspeed_kernel_nvidia.cutedsl.memory_device import load_words
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Barriers, Cursor, Pipeline, first_to_fill, first_to_read
from tokenspeed_kernel_nvidia.cutedsl.registers_device import load_floats, store_floats
from tokenspeed_kernel_nvidia.sm90.common.bulk_device import bulk_load, of_rank, send_word
from tokenspeed_kernel_nvidia.sm90.gemm.mm.config import (
    BLOCK,
    GROUP,
    HEAD_BYTES,
    LOAD_BYTES,
    QUAD_BYTES,
    ROWS,
    STAGES,
    Config,
)
from tokenspeed_kernel_nvidia.sm90.gemm.mm.formats_device import COMPUTING, Formats
from tokenspeed_kernel_nvidia.sm90.gemm.mm.memory_device import (
    Call,
    Matrix,
    Places,
    Table,
    Vector,
    load_float_if,
    store_number,
    type_of,
)
from tokenspeed_kernel_nvidia.sm90.gemm.mm.prefetch_device import prefetch_rows

_READY = 1  # named barrier of all threads: mbarriers are initialised
_MADE = 3  # named barrier of the producer warp and warp 0: mbarriers are initialised


def host(config: Config) -> Any:
    """Returns the host function that launches the kernel of a configuration."""
    return Mm(config)


def fake_arguments(config: Config) -> tuple[Any, ...]:
    """Returns placeholder arguments, which have types and layouts but no memory, to compile the function that `host` returns."""
    m, n, k = (arguments.size() for _ in range(3))
    stored = cutlass.Uint8 if config.weights == "mxfp4" else type_of(config.dtype if config.weights == "dense" else config.weights)
    depth = arguments.size() if config.weights == "mxfp4" else k
    a, out = type_of(config.dtype), type_of(config.out)
    tensors = (
        make_fake_tensor(a, (m, k), (cute.sym_int64(divisibility=128 // a.width), 1), assumed_align=16),
        make_fake_tensor(stored, (depth, n), (1, cute.sym_int64(divisibility=128 // stored.width)), assumed_align=16),
        make_fake_tensor(out, (m, n), (cute.sym_int64(), cute.sym_int64()), assumed_align=out.width // 8),
    )
    scales = Int64(0), Int32(0), Int32(0)
    layout = tuple(Int32(0) for _ in range(6))
    return (*tensors, Int64(0), Int32(0), *scales, *scales, Int32(0), *layout, arguments.stream())


class Mm(Formats):
    """Launches and runs the kernel of one configuration.

    There is one persistent CTA per SM, with ``config.warps`` MMA warps and one producer warp:
    * the producer warp initialises the barriers and prefetches weights into L2 until the preceding kernel ends (PDL). After that,
      it keeps the ring of weights full, with one bulk copy per row of a stage;
    * the MMA warps store the activations (and scales) in shared memory, and split k of each stage. At the end of each group of
      ``GROUP`` rows of weights, they reduce their partial sums over warps. With ``cluster > 1``, they also reduce these partial
      sums over the cluster through distributed shared memory.

    Shared memory holds the barriers, the warps' partial sums, scales, activations, and the ring of weights, about 100 KB (200 KB
    for long GEMMs). The kernel is memory-bound. The ring's bytes in flight hide the latency of global memory.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.out = type_of(config.out)

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        weights: cute.Tensor,
        out: cute.Tensor,
        bias: Int64,
        bias_kind: Int32,
        a_scale: Int64,
        a_scale_row: Int32,
        a_scale_column: Int32,
        b_scale: Int64,
        b_scale_row: Int32,
        b_scale_column: Int32,
        ctas: Int32,
        chunk_bytes: Int32,
        stages: Int32,
        scales_at: Int32,
        activations_at: Int32,
        ring_at: Int32,
        shared_bytes: Int32,
        stream: cuda.CUstream,
    ):
        config = self.config
        size = weights.element_type.width // 8
        row_bytes, n = weights.shape[0] * size, out.shape[1]
        clusters = ctas // config.cluster
        share = n // clusters
        # The bytes of a row of weights that each CTA of a cluster computes; the last CTA may have fewer.
        part = ((row_bytes + QUAD_BYTES - 1) // QUAD_BYTES + config.cluster - 1) // config.cluster * QUAD_BYTES
        self.kernel(
            Matrix(weights.iterator.toint(), weights.stride[1] * size), row_bytes, part, share, n - share * clusters, stages,
            ring_at, Matrix(a.iterator.toint(), a.stride[0] * config.activation_bytes), out.shape[0], n, chunk_bytes,
            1.0 / Float32(chunk_bytes // LOAD_BYTES), scales_at, activations_at,
            Table(out.iterator.toint(), out.stride[0], out.stride[1]), Vector(bias, bias_kind),
            Table(a_scale, Int64(a_scale_row), Int64(a_scale_column)), Table(b_scale, Int64(b_scale_row), Int64(b_scale_column)),
        ).launch(
            grid=(ctas, 1, 1), block=(config.threads + 32, 1, 1), cluster=(config.together, 1, 1), smem=shared_bytes, stream=stream,
            use_pdl=config.dependent, min_blocks_per_mp=config.ctas_at_once, preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        weights: Matrix,
        row_bytes: Int32,
        part: Int32,
        share: Int32,
        more: Int32,
        stages: Int32,
        ring_at: Int32,
        a: Matrix,
        m: Int32,
        n: Int32,
        chunk_bytes: Int32,
        vectors_inverse: Float32,
        scales_at: Int32,
        activations_at: Int32,
        out: Table,
        bias: Vector,
        a_scale: Table,
        b_scale: Table,
    ):
        """Runs the kernel. The weights are the first arguments, because the weight loads are issued first.

        Args:
            part: how many bytes of a row of weights each CTA of a cluster computes; the last CTA may have fewer.
            share, more: the least number of rows of weights per cluster, and how many of the first clusters have one row more.
            vectors_inverse: the reciprocal of the number of 16-byte vectors of a row of weights in a chunk.
        """
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        cta, _, _ = cute.arch.block_idx()
        rank, begin = Int32(0), Int32(0)
        if const_expr(config.cluster > 1):
            rank = cta % config.cluster
            cta = cta // config.cluster
            begin = rank * part
            row_bytes = cutlass.min(part, row_bytes - begin)
        if const_expr(config.pair):
            rank = cta % 2
        barriers = cute.arch.get_dyn_smem(Int64, alignment=128)
        base = barriers.toint()
        gathered = base + HEAD_BYTES + config.warps * m * (GROUP * 4)
        call = Call(
            a, weights, out, begin, row_bytes, bias, a_scale, b_scale, m, n, cta * share + cutlass.min(cta, more),
            share + cutlass.select_(cta < more, Int32(1), Int32(0)), rank, vectors_inverse,
            Pipeline(Barriers(barriers), Barriers(barriers + STAGES)), barriers + 2 * STAGES, barriers + 2 * STAGES + 1,
            barriers + 2 * STAGES + 2,
            Places(
                base + HEAD_BYTES, base + scales_at, base + activations_at, base + ring_at, gathered,
                base + HEAD_BYTES - LOAD_BYTES, chunk_bytes, stages,
            ),
        )  # fmt: skip
        # Let the next kernel start as SMs become free. The next kernel's own griddepcontrol.wait waits for the end of this kernel.
        cute.arch.griddepcontrol_launch_dependents()
        if warp == config.warps:
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(STAGES):
                    call.pipe.init(stage, config.warps)
                cute.arch.mbarrier_init(call.activated, 1)
                cute.arch.mbarrier_init(call.ended, 1)
                if const_expr(config.cluster > 1):
                    cute.arch.mbarrier_init(call.arrived, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.sync_warp()
            if const_expr(config.together > 1):
                cute.arch.cluster_arrive()
            cute.arch.barrier_arrive(barrier_id=_READY, number_of_threads=config.threads + 32)
            cute.arch.barrier_arrive(barrier_id=_MADE, number_of_threads=64)
            if const_expr(config.prefetched > 0):
                self.prefetch(call)
            self.produce(call)
            if const_expr(config.together > 1):
                cute.arch.cluster_wait()
        else:
            if const_expr(config.together > 1):
                cute.arch.cluster_arrive_relaxed()
            if warp == 0:
                if lane < LOAD_BYTES // 4:
                    store_floats("shared", call.at.zeros + lane * 4, [Float32(0.0)])
                cute.arch.barrier(barrier_id=_MADE, number_of_threads=64)
            if const_expr(config.pair):
                cute.arch.cluster_wait()  # the barriers of both CTAs are initialised
            self.compute(call, warp)

    # -- weights -------------------------------------------------------------------------------------------------------------------

    @cute.jit
    def advance(self, call: Call, at: Cursor):
        """Returns the cursor of the next ring stage. Unlike in `pipeline_device`, the number of stages is known at run time
        only."""
        stage, phase = at.stage + 1, at.phase
        if stage == call.at.stages:
            stage = Int32(0)
            phase ^= 1
        return Cursor(stage, phase)

    def prefetch(self, call: Call) -> None:
        """Prefetches this CTA's weights into L2 until the preceding kernel has ended (PDL)."""
        config = self.config
        prefetch_rows(
            call.ended, lambda row: call.weights.row(call.first + row) + call.begin, call.rows, call.row_bytes, config.prefetched,
            config.pace,
        )  # fmt: skip

    @cute.jit
    def produce(self, call: Call):
        """Streams this CTA's weights into the ring."""
        config = self.config
        at = first_to_fill()
        for begin in cutlass.range(0, call.rows, GROUP, unroll=1):
            rows = cutlass.min(call.rows - begin, GROUP)
            done = Int32(0)
            while done < call.row_bytes:
                end = cutlass.min(done + call.at.chunk_bytes, call.row_bytes)
                for tile in cutlass.range(0, rows, ROWS, unroll=1):
                    count = cutlass.min(rows - tile, ROWS)
                    source = call.weights.row(call.first + begin + tile) + call.begin
                    for part in cutlass.range(done, end, config.part_bytes, unroll=1):
                        size = cutlass.min(end - part, config.part_bytes)
                        call.pipe.acquire(at)
                        # The preceding kernel may have written the weights (PDL). Nothing above this wait depends on that kernel.
                        cute.arch.griddepcontrol_wait()
                        # One lane issues one instruction for each row, because bulk copies take their operands from uniform
                        # registers.
                        with cute.arch.elect_one():
                            call.pipe.commit(at, count * size)
                            for row in cutlass.range_constexpr(ROWS):
                                if row < count:
                                    to = call.at.ring + at.stage * config.stage_bytes + row * config.pitch
                                    from_ = source + row * call.weights.pitch + part
                                    bulk_load(to, from_, size, call.pipe.full.of(at).toint())
                        at = self.advance(call, at)
                done = end

    # -- MMAs ----------------------------------------------------------------------------------------------------------------------

    @cute.jit
    def compute(self, call: Call, warp: Int32):
        """Runs an MMA warp, which computes one group of rows of weights after another."""
        config = self.config
        lane = cute.arch.lane_idx()
        # Byte offset of this lane's first load, in the bytes of a row that a stage holds.
        place = warp * (QUAD_BYTES * config.loads) + lane % 4 * LOAD_BYTES
        acc = cute.make_rmem_tensor((4,), Float32)
        # Shared address of this lane's partial sums of the group's first tile.
        sums = call.at.sums + ((warp * call.m + lane // 4) * GROUP + lane % 4 * 2) * 4
        own = call.at.ring + lane // 4 * config.pitch + place  # address of this lane's first load in the first stage
        at = first_to_read()
        turn = Int32(0)  # the phase of `call.activated`
        for begin in cutlass.range(0, call.rows, GROUP, unroll=1):
            rows = cutlass.min(call.rows - begin, GROUP)
            first = call.first + begin
            edge = BLOCK - first % BLOCK  # the group's first row in the next 128-row block of scales
            bias, factor = Uint32(0), Float32(1.0)
            done = Int32(0)
            while done < call.row_bytes:
                end = cutlass.min(done + call.at.chunk_bytes, call.row_bytes)
                again = (begin == 0) | (call.row_bytes > call.at.chunk_bytes)
                if again | const_expr(config.scales in ("block", "mx")):
                    if begin + done > 0:  # wait until all warps have read the previous chunk
                        cute.arch.barrier(barrier_id=COMPUTING, number_of_threads=config.threads)
                    if const_expr(config.scales != "none"):
                        if begin + done == 0:
                            self.wait_for_kernel_before(call, warp == 0)
                        self.keep_scales(call, begin, rows, done)
                    if const_expr(not config.copied):
                        if again:
                            self.keep_activations(call, done, (warp == 0) & (begin + done == 0))
                    if begin + done > 0:
                        cute.arch.barrier(barrier_id=COMPUTING, number_of_threads=config.threads)
                    else:
                        cute.arch.barrier(barrier_id=_READY, number_of_threads=config.threads + 32)
                    if const_expr(config.copied):
                        if again:
                            self.copy_activations(call, done, warp, begin + done == 0)
                            cute.arch.mbarrier_wait(call.activated, turn)
                            turn ^= 1
                if done == 0:
                    bias, factor = self.load_epilogue_operands(call, first, rows)
                for tile in cutlass.range(0, rows, ROWS, unroll=1):
                    acc.fill(0.0)
                    if done > 0:
                        self.load_partial_sums(call, acc, sums + tile * 4)
                    for part in cutlass.range(done, end, config.part_bytes, unroll=1):
                        call.pipe.wait(at)
                        slot = own + at.stage * config.stage_bytes
                        loads = []
                        for each in cutlass.range_constexpr(config.loads):
                            inside = part + place + each * QUAD_BYTES < call.row_bytes
                            from_ = cutlass.select_(inside, slot + each * QUAD_BYTES, call.at.zeros)
                            loads.append([*load_words("shared", from_, 4)])
                        self.multiply(call, acc, tile, edge, part - done + place, loads)
                        cute.arch.sync_warp()
                        call.pipe.release(at)
                        at = self.advance(call, at)
                    for half in cutlass.range_constexpr(self.halves):
                        if lane // 4 + half * 8 < call.m:
                            store_floats("shared", sums + tile * 4 + half * (8 * 4 * GROUP), [acc[2 * half], acc[2 * half + 1]])
                done = end
            self.finish(call, first, rows, bias, factor)
            if begin + GROUP < call.rows:  # the next group's partial sums reuse the memory
                cute.arch.barrier(barrier_id=COMPUTING, number_of_threads=config.threads)

    @cute.jit
    def load_partial_sums(self, call: Call, acc: cute.Tensor, place: Int32):
        """Loads the partial sums of the previous chunks of k into the accumulator. ``place``: the shared address of these partial
        sums."""
        for half in cutlass.range_constexpr(self.halves):
            if cute.arch.lane_idx() // 4 + half * 8 < call.m:
                sums = load_floats("shared", place + half * (8 * 4 * GROUP), 2)
                for column in cutlass.range_constexpr(2):
                    acc[2 * half + column] = sums[column]

    # -- results -------------------------------------------------------------------------------------------------------------------

    @property
    def own_rows(self) -> int:
        """The number of rows of weights, of each group of `GROUP` rows, whose results each CTA of a cluster writes."""
        return GROUP // self.config.cluster

    @property
    def step(self) -> int:
        """The number of rows of activations whose results all threads together write at once."""
        return self.config.threads // self.own_rows

    def row_of(self, call: Call, own: Int32) -> Int32:
        """Returns the index in the group of the ``own``-th row whose results this CTA writes. The CTAs of a cluster take rows
        round-robin, so that their numbers of rows differ by at most one.
        """
        return own * self.config.cluster + call.rank if self.config.cluster > 1 else own

    @cute.jit
    def load_epilogue_operands(self, call: Call, first: Int32, rows: Int32):
        """Loads the bias and the weights' row scale for this thread's results, before the MMAs, so that `finish` does not wait for
        the loads. Returns the bias as stored (see `Vector.load`), and the scale, 1 if rows of weights have no scale."""
        cute.arch.griddepcontrol_wait()
        thread, _, _ = cute.arch.thread_idx()
        row = self.row_of(call, thread % self.own_rows)
        factor = Float32(1.0)
        if const_expr(self.config.scales == "row"):
            factor = load_float_if(call.b_scale.at(Int32(0), first + row, 4), row < rows)
        return call.bias.load(first + row, row < rows), factor

    @cute.jit
    def finish(self, call: Call, first: Int32, rows: Int32, stored: Any, factor: Float32):
        """Adds the partial sums of all warps, then those of the cluster's CTAs, in a fixed order, and writes the results of a group
        of rows of weights.

        Args:
            first, rows: the group's first row of weights, and its number of rows.
            stored, factor: the results of `load_epilogue_operands`.
        """
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        cute.arch.barrier(barrier_id=COMPUTING, number_of_threads=config.threads)
        if const_expr(config.cluster > 1):
            self.send(call, rows)
        own = thread % self.own_rows
        row = self.row_of(call, own)
        bias = call.bias.number(stored)
        if (row < rows) & (thread < self.step * self.own_rows):
            for token in cutlass.range(thread // self.own_rows, call.m, self.step, unroll=1):
                total = Float32(0.0)
                if const_expr(config.cluster > 1):
                    for each in cutlass.range_constexpr(config.cluster):
                        total += load_floats("shared", call.at.gathered + ((each * call.m + token) * self.own_rows + own) * 4, 1)
                else:
                    total = self.sum_of(call, token, row)
                if const_expr(config.scales == "row" and config.activation_bytes == 1):
                    total *= load_floats("shared", call.at.scales + token * 4, 1)
                store_number(call.out.at(token, first + row, self.out.width // 8), total * factor + bias, self.out)

    @cute.jit
    def sum_of(self, call: Call, token: Int32, row: Int32):
        """Returns the sum of all warps' partial sums for a row of activations and a row of weights of the group, in a fixed
        order."""
        total = Float32(0.0)
        for each in cutlass.range_constexpr(self.config.warps):
            total += load_floats("shared", call.at.sums + ((each * call.m + token) * GROUP + row) * 4, 1)
        return total

    @cute.jit
    def send(self, call: Call, rows: Int32):
        """Sends each CTA of the cluster this CTA's partial sums for the rows that the receiver writes. Then waits for the partial
        sums that the CTAs of the cluster send to this CTA."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        if thread == 0:
            own = (rows - call.rank + (config.cluster - 1)) // config.cluster
            cute.arch.mbarrier_arrive_and_expect_tx(call.arrived, own * call.m * (config.cluster * 4))
        cute.arch.cluster_wait()  # all CTAs' barriers are initialised
        for index in cutlass.range(thread, call.m * GROUP, config.threads, unroll=1):
            token, row = index // GROUP, index % GROUP
            if row < rows:
                to = row % config.cluster
                place = (call.rank * call.m + token) * self.own_rows + row // config.cluster
                there = of_rank(call.at.gathered + place * 4, to)
                send_word(there, self.sum_of(call, token, row), of_rank(call.arrived.toint(), to))
        cute.arch.mbarrier_wait(call.arrived, 0)
