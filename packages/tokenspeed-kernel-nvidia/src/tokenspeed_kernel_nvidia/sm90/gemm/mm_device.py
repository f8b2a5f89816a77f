"""The device code of `mm`: the launch, the warp that loads weights, and the warps that compute.

A CTA has some rows of the weights. They come in tiles of 8 rows and `Config.chunk_bytes` of each, through a ring in shared memory:
all tiles of a group of rows for one chunk of k, then all for the next, so that activations are read once for the group. In a tile
each warp has parts of all rows, of 64 bytes that a quad of lanes shares, 16 each. `mm_formats_device` makes operands of them: which
number of k is where in an instruction does not matter, as long as activations and weights agree.

Products of 16 rows of activations and 8 rows of weights are single instructions, mma.sync m16n8k16, also where there is but one row
of activations: for 16 bytes of bfloat16 a lane then has a load, two products and about four moves, and would have 25 instructions
if it multiplied and added them itself.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.utils
from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute
from cutlass.cute.runtime import make_fake_tensor

from tokenspeed_kernel_nvidia.sm90.common import arguments_device as arguments
from tokenspeed_kernel_nvidia.sm90.common.pipeline_device import advance, first_to_fill, first_to_read, pipeline
from tokenspeed_kernel_nvidia.sm90.common.registers_device import store_floats
from tokenspeed_kernel_nvidia.sm90.gemm.mm_config import BLOCK, LOAD_BYTES, QUAD_BYTES, ROWS, Config
from tokenspeed_kernel_nvidia.sm90.gemm.mm_formats_device import Formats
from tokenspeed_kernel_nvidia.sm90.gemm.mm_memory_device import (
    Call,
    Matrix,
    Table,
    Vector,
    copy_to_shared,
    load_float_if,
    load_words_if,
    prefetch_to_l2,
    storage_of,
    type_of,
)

COMPUTE = 1  # the named barrier of the warps that compute


def host(config: Config) -> Any:
    """The function that launches a program."""
    return Mm(config)


def fake_arguments(config: Config) -> tuple[Any, ...]:
    """Stand-ins for what `host` takes."""
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
    return (*tensors, Int64(0), Int32(0), Int32(0), Int32(0), *scales, *scales, arguments.stream())


class Mm(Formats):
    """The kernel of one configuration."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.out = type_of(config.out)
        self.threads = 32 * config.warps
        self.group = config.tiles * ROWS  # rows

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        weights: cute.Tensor,
        out: cute.Tensor,
        bias: Int64,
        bias_kind: Int32,
        ctas: Int32,
        ahead: Int32,
        a_scale: Int64,
        a_scale_row: Int32,
        a_scale_column: Int32,
        b_scale: Int64,
        b_scale_row: Int32,
        b_scale_column: Int32,
        stream: cuda.CUstream,
    ):
        size = weights.element_type.width // 8
        self.kernel(
            Matrix(a.iterator.toint(), a.stride[0] * self.config.activation_bytes),
            Matrix(weights.iterator.toint(), weights.stride[1] * size), weights.shape[0] * size, out, Vector(bias, bias_kind),
            Table(a_scale, a_scale_row, a_scale_column), Table(b_scale, b_scale_row, b_scale_column), ctas, ahead,
        ).launch(
            grid=(ctas, 1, 1), block=(self.threads + (0 if self.config.direct else 32), 1, 1), stream=stream, use_pdl=True,
            min_blocks_per_mp=self.config.resident, preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        a: Matrix,
        weights: Matrix,
        row_bytes: Int32,
        out: cute.Tensor,
        bias: Vector,
        a_scale: Table,
        b_scale: Table,
        ctas: Int32,
        ahead: Int32,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta, _, _ = cute.arch.block_idx()
        n = out.shape[1]
        share = n // ctas
        more = n - share * ctas  # CTAs with a row more
        storage = cutlass.utils.SmemAllocator().allocate(storage_of(self.config))
        call = Call(
            a, weights, row_bytes, bias, a_scale, b_scale, out.shape[0], n, cta * share + cutlass.min(cta, more),
            share + cutlass.select_(cta < more, Int32(1), Int32(0)), pipeline(storage.full, storage.empty),
            storage.ring.data_ptr().toint(), storage.results.data_ptr(),
        )  # fmt: skip
        if const_expr(self.config.direct):
            self.compute_direct(call, out, warp)
        else:
            self.run(call, out, warp, ahead)

    @cute.jit
    def run(self, call: Call, out: cute.Tensor, warp: Int32, ahead: Int32):
        """With a ring."""
        if warp == self.config.warps:
            if cute.arch.lane_idx() == 0:
                for stage in cutlass.range_constexpr(self.config.stages):
                    call.pipe.init(stage, self.config.warps)
            cute.arch.mbarrier_init_fence()
            cute.arch.sync_warp()
        cute.arch.sync_threads()
        if warp == self.config.warps:
            if const_expr(not self.config.early):
                self.prefetch(call, ahead)
                cute.arch.griddepcontrol_wait()
            self.load(call)
        else:
            # Whatever ran before may have written what is read here; what runs next may begin once there is room.
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
            self.compute(call, out, warp)

    # -- weights -------------------------------------------------------------------------------------------------------------------

    @cute.jit
    def prefetch(self, call: Call, ahead: Int32):
        """Brings up to ``ahead`` bytes of this CTA's weights to the L2 cache. Who still writes them writes them there."""
        rows = cutlass.min(call.rows, (ahead + call.row_bytes - 1) // call.row_bytes)
        for row in cutlass.range(cute.arch.lane_idx(), rows, 32, unroll=1):
            prefetch_to_l2(call.weights.row(call.first + row), call.row_bytes)

    @cute.jit
    def load(self, call: Call):
        """Fills the ring."""
        at = first_to_fill()
        for begin in cutlass.range(0, call.rows, self.group, unroll=1):
            rows = cutlass.min(call.rows - begin, self.group)
            for done in cutlass.range(0, call.row_bytes, self.config.chunk_bytes, unroll=1):
                size = cutlass.min(call.row_bytes - done, self.config.chunk_bytes)
                for row in cutlass.range(0, rows, ROWS, unroll=1):
                    live = cutlass.min(rows - row, ROWS)
                    call.pipe.acquire(at)
                    full = call.pipe.full.of(at)
                    to = call.ring + at.stage * self.config.stage_bytes
                    from_ = call.weights.row(call.first + begin + row) + done
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full, live * size)
                        for each in cutlass.range_constexpr(ROWS):
                            if each < live:
                                copy_to_shared(to + each * self.config.pitch, from_ + each * call.weights.pitch, size, full.toint())
                    at = advance(at, self.config.stages)

    # -- products ------------------------------------------------------------------------------------------------------------------

    @cute.jit
    def compute(self, call: Call, out: cute.Tensor, warp: Int32):
        """Multiplies what comes, a group of rows after another."""
        config = self.config
        lane = cute.arch.lane_idx()
        acc = cute.make_rmem_tensor((config.tiles, 4), Float32)
        fetched, operands = self.fetched(), self.ready()
        at = first_to_read()
        # Where this lane's part of a chunk begins, and where it lies in a stage.
        part = warp * QUAD_BYTES + lane % 4 * LOAD_BYTES
        place = call.ring + lane // 4 * config.pitch + part
        self.begin(call, part, fetched, operands)
        for begin in cutlass.range(0, call.rows, self.group, unroll=1):
            rows = cutlass.min(call.rows - begin, self.group)
            first = call.first + begin
            edge = BLOCK - first % BLOCK
            beside = self.load_beside(call, first, rows)
            acc.fill(0.0)
            for done in cutlass.range(0, call.row_bytes, config.chunk_bytes, unroll=1):
                next_begin, next_done = self.after(call, begin, done)
                self.fetch(call, next_begin, next_done + part, fetched)
                for tile in cutlass.range_constexpr(config.tiles):
                    if tile * ROWS < rows:
                        call.pipe.wait(at)
                        words = []
                        for each in cutlass.range_constexpr(config.loads):
                            offset = each * config.warps * QUAD_BYTES
                            from_ = place + at.stage * config.stage_bytes + offset
                            # Zero behind the row's end, where the ring may hold anything: nothing times infinity is not nothing.
                            words.append(load_words_if("shared", from_, done + part + offset < call.row_bytes))
                        # A load that was issued may not have read yet. The arrival would overtake it, and so would the stage's next
                        # copy, which is another proxy's write.
                        cute.arch.fence_view_async_shared()
                        cute.arch.sync_warp()
                        call.pipe.release(at)
                        at = advance(at, config.stages)
                        self.multiply(acc, tile, edge, operands, words)
                self.prepare(fetched, operands)
            self.finish(call, out, acc, first, rows, warp, beside)

    @cute.jit
    def after(self, call: Call, begin: Int32, done: Int32):
        """The chunk after this one: of the same group, or of the next."""
        done += self.config.chunk_bytes
        if done >= call.row_bytes:
            begin += self.group
            done = Int32(0)
        return begin, done

    @cute.jit
    def compute_direct(self, call: Call, out: cute.Tensor, warp: Int32):
        """Multiplies weights that each lane loads to registers itself: a tile's next chunk as soon as it has used the last."""
        config = self.config
        part = warp * QUAD_BYTES + cute.arch.lane_idx() % 4 * LOAD_BYTES
        acc = cute.make_rmem_tensor((config.tiles, 4), Float32)
        fetched, operands = self.fetched(), self.ready()
        weights = cute.make_rmem_tensor((config.tiles, config.loads, 4), Uint32)
        if const_expr(not config.early):
            cute.arch.griddepcontrol_wait()
        for tile in cutlass.range_constexpr(config.tiles):
            self.load_weights(call, tile, Int32(tile * ROWS), part, weights)
        if const_expr(config.early):
            cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        self.begin(call, part, fetched, operands)
        for begin in cutlass.range(0, call.rows, self.group, unroll=1):
            rows = cutlass.min(call.rows - begin, self.group)
            first = call.first + begin
            edge = BLOCK - first % BLOCK
            beside = self.load_beside(call, first, rows)
            acc.fill(0.0)
            for done in cutlass.range(0, call.row_bytes, config.chunk_bytes, unroll=1):
                next_begin, next_done = self.after(call, begin, done)
                self.fetch(call, next_begin, next_done + part, fetched)
                for tile in cutlass.range_constexpr(config.tiles):
                    words = [[weights[tile, each, word] for word in range(4)] for each in range(config.loads)]
                    self.multiply(acc, tile, edge, operands, words)
                    self.load_weights(call, tile, next_begin + tile * ROWS, next_done + part, weights)
                self.prepare(fetched, operands)
            self.finish(call, out, acc, first, rows, warp, beside)

    @cute.jit
    def load_weights(self, call: Call, tile: cutlass.Constexpr[int], row: Int32, begin: Int32, to: cute.Tensor):
        """A lane's weights of a tile, whose first row is ``row``; zeros where there are none."""
        row += cute.arch.lane_idx() // 4
        from_ = call.weights.row(call.first + row) + begin
        for each in cutlass.range_constexpr(self.config.loads):
            offset = each * self.config.warps * QUAD_BYTES
            words = load_words_if("global", from_ + offset, (row < call.rows) & (begin + offset < call.row_bytes))
            for word in cutlass.range_constexpr(4):
                to[tile, each, word] = words[word]

    # -- results -------------------------------------------------------------------------------------------------------------------

    @property
    def rounds(self) -> int:
        """How often all threads write a number each."""
        step = self.threads // self.group
        return (self.config.tokens + step - 1) // step

    @cute.jit
    def load_beside(self, call: Call, first: Int32, rows: Int32):
        """What a thread's numbers are multiplied by, and what is added to them. At the beginning, as it would be waited for."""
        thread, _, _ = cute.arch.thread_idx()
        row = thread % self.group
        bias = Float32(0.0)
        if row < rows:
            bias = call.bias.load(first + row)
        factors = cute.make_rmem_tensor((self.rounds,), Float32)
        factors.fill(1.0)
        if const_expr(self.config.scales == "row"):
            scale = load_float_if(call.b_scale.at(Int32(0), first + row, 4), row < rows)
            for turn in cutlass.range_constexpr(self.rounds):
                factors[turn] = scale
                if const_expr(self.config.activation_bytes == 1):
                    token = thread // self.group + turn * (self.threads // self.group)
                    factors[turn] *= load_float_if(call.a_scale.at(token, Int32(0), 4), token < call.m)
        return bias, factors

    @cute.jit
    def finish(self, call: Call, out: cute.Tensor, acc: cute.Tensor, first: Int32, rows: Int32, warp: Int32, beside: tuple):
        """Adds what the warps have, in their order, and writes it."""
        config = self.config
        lane = cute.arch.lane_idx()
        thread, _, _ = cute.arch.thread_idx()
        for half in cutlass.range_constexpr(self.halves):
            token = lane // 4 + half * 8
            if token < call.m:
                to = call.results.toint() + ((warp * config.tokens + token) * config.result_pitch + lane % 4 * 2) * 4
                for tile in cutlass.range_constexpr(config.tiles):
                    if tile * ROWS < rows:
                        store_floats("shared", to + tile * (4 * ROWS), [acc[tile, 2 * half], acc[tile, 2 * half + 1]])
        cute.arch.barrier(barrier_id=COMPUTE, number_of_threads=self.threads)
        row = thread % self.group
        step = self.threads // self.group
        bias, factors = beside
        for turn in cutlass.range_constexpr(self.rounds):
            token = thread // self.group + turn * step
            if (row < rows) & (token < call.m) & (thread < step * self.group):
                total = Float32(0.0)
                for each in cutlass.range_constexpr(config.warps):
                    total += call.results[(each * config.tokens + token) * config.result_pitch + row]
                out[token, first + row] = (total * factors[turn] + bias).to(self.out)
        if first + rows < call.first + call.rows:  # the next group's sums go to the same place
            cute.arch.barrier(barrier_id=COMPUTE, number_of_threads=self.threads)
