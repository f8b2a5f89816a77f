"""The device code of `mm`: the launch, the warp that loads weights, and the warps that compute.

A CTA has some rows of the weights. They come in tiles of 8 rows and `Config.chunk_bytes` of each, through a ring in shared memory:
all tiles of a group of rows for one chunk of k, then all for the next, so that activations are read once for the group. In a tile
each warp has parts of all rows, in 64 bytes that a quad of lanes shares, 16 each. What a lane holds of a row is the operand of
products as it is: which number of k is where in an instruction does not matter, as long as activations and weights agree.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.utils
from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute
from cutlass.cute.runtime import make_fake_tensor

from tokenspeed_kernel_nvidia.sm90.common import arguments_device as arguments
from tokenspeed_kernel_nvidia.sm90.common.pipeline_device import Pipeline, advance, first_to_fill, first_to_read, pipeline
from tokenspeed_kernel_nvidia.sm90.common.registers_device import mma_m16n8k16, store_floats
from tokenspeed_kernel_nvidia.sm90.gemm.mm_config import LOAD_BYTES, QUAD_BYTES, ROWS, Config
from tokenspeed_kernel_nvidia.sm90.gemm.mm_memory_device import (
    Vector,
    copy_to_shared,
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
    weights = make_fake_tensor(type_of(config.dtype), (k, n), (1, cute.sym_int64(divisibility=8)), assumed_align=16)
    out = make_fake_tensor(
        type_of(config.out), (m, n), (cute.sym_int64(), cute.sym_int64()), assumed_align=type_of(config.out).width // 8
    )
    scalars = Int64(0), Int32(0), Int32(0), Int32(0)
    return arguments.rows(config.dtype, m, k), weights, out, *scalars, arguments.stream()


@dataclass(frozen=True)
class Matrix:
    """Where rows are: the address of the first, and how many bytes further each next one is."""

    address: Int64
    pitch: Int64

    @cute.jit
    def row(self, index: Int32):
        return self.address + Int64(index) * self.pitch


@dataclass(frozen=True)
class Call:
    """What a CTA is asked for.

    Attributes:
        a, weights: rows of activations, and of weights.
        row_bytes: of weights.
        bias: added to the result.
        m: rows of activations.
        first, rows: this CTA's rows of weights.
        pipe: the barriers of the ring.
        ring, results: shared memory.
    """

    a: Matrix
    weights: Matrix
    row_bytes: Int32
    bias: Vector
    m: Int32
    first: Int32
    rows: Int32
    pipe: Pipeline
    ring: Int32
    results: cute.Pointer


class Mm:
    """The kernel of one configuration."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.dtype = type_of(config.dtype)
        self.out = type_of(config.out)
        self.threads = 32 * config.warps
        self.halves = config.tokens // 8
        self.words = config.elements // 2  # registers of activations for a load of weights
        self.group = config.tiles * ROWS  # rows
        self.chunk = config.chunk_bytes // LOAD_BYTES * config.elements  # of k

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
        stream: cuda.CUstream,
    ):
        size = self.dtype.width // 8
        self.kernel(
            Matrix(a.iterator.toint(), a.stride[0] * 2), Matrix(weights.iterator.toint(), weights.stride[1] * size),
            weights.shape[0] * size, out, Vector(bias, bias_kind), ctas, ahead,
        ).launch(
            grid=(ctas, 1, 1), block=(self.threads + (0 if self.config.direct else 32), 1, 1), stream=stream, use_pdl=True,
            min_blocks_per_mp=self.config.resident, preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, a: Matrix, weights: Matrix, row_bytes: Int32, out: cute.Tensor, bias: Vector, ctas: Int32, ahead: Int32
    ):  # fmt: skip
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta, _, _ = cute.arch.block_idx()
        n = out.shape[1]
        share = n // ctas
        more = n - share * ctas  # CTAs with a row more
        storage = cutlass.utils.SmemAllocator().allocate(storage_of(self.config))
        call = Call(
            a, weights, row_bytes, bias, out.shape[0], cta * share + cutlass.min(cta, more),
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

    @cute.jit
    def compute(self, call: Call, out: cute.Tensor, warp: Int32):
        """Multiplies what comes, a group of rows after another."""
        config = self.config
        lane = cute.arch.lane_idx()
        thread, _, _ = cute.arch.thread_idx()
        acc = cute.make_rmem_tensor((config.tiles, 4), Float32)
        now, then = (cute.make_rmem_tensor((config.loads, self.halves, self.words), Uint32) for _ in range(2))
        at = first_to_read()
        # Where this lane's part of a chunk begins, and where it lies in a stage.
        part = warp * QUAD_BYTES + lane % 4 * LOAD_BYTES
        place = call.ring + lane // 4 * config.pitch + part
        for begin in cutlass.range(0, call.rows, self.group, unroll=1):
            rows = cutlass.min(call.rows - begin, self.group)
            first = call.first + begin
            row = first + thread % self.group
            bias = Float32(0.0)  # fetched now, as it would be waited for at the end
            if thread % self.group < rows:
                bias = call.bias.load(row)
            acc.fill(0.0)
            self.load_activations(call, part, now)
            for done in cutlass.range(0, call.row_bytes, config.chunk_bytes, unroll=1):
                self.load_activations(call, done + config.chunk_bytes + part, then)
                for tile in cutlass.range_constexpr(config.tiles):
                    if tile * ROWS < rows:
                        call.pipe.wait(at)
                        words = []
                        for each in cutlass.range_constexpr(config.loads):
                            offset = each * config.warps * QUAD_BYTES
                            from_ = place + at.stage * config.stage_bytes + offset
                            # Zero behind the row's end, where the ring may hold anything: nothing times infinity is not nothing.
                            words.append(load_words_if("shared", from_, done + part + offset < call.row_bytes))
                        cute.arch.sync_warp()
                        call.pipe.release(at)
                        at = advance(at, config.stages)
                        self.multiply(acc, tile, now, words)
                now.store(then.load())
            self.finish(call, out, acc, first, rows, warp, bias)

    @cute.jit
    def compute_direct(self, call: Call, out: cute.Tensor, warp: Int32):
        """Multiplies weights that each lane loads to registers itself: a tile's next chunk as soon as it has used the last."""
        config = self.config
        lane = cute.arch.lane_idx()
        thread, _, _ = cute.arch.thread_idx()
        part = warp * QUAD_BYTES + lane % 4 * LOAD_BYTES
        acc = cute.make_rmem_tensor((config.tiles, 4), Float32)
        now, then = (cute.make_rmem_tensor((config.loads, self.halves, self.words), Uint32) for _ in range(2))
        weights = cute.make_rmem_tensor((config.tiles, config.loads, 4), Uint32)
        if const_expr(not config.early):
            cute.arch.griddepcontrol_wait()
        for tile in cutlass.range_constexpr(config.tiles):
            self.load_weights(call, tile, Int32(tile * ROWS), part, weights)
        if const_expr(config.early):
            cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        self.load_activations(call, part, now)
        begin, done = Int32(0), Int32(0)
        bias = Float32(0.0)
        acc.fill(0.0)
        while begin < call.rows:
            rows = cutlass.min(call.rows - begin, self.group)
            if done == 0 and thread % self.group < rows:
                bias = call.bias.load(call.first + begin + thread % self.group)
            next_begin, next_done = begin, done + config.chunk_bytes
            if next_done >= call.row_bytes:
                next_begin, next_done = begin + self.group, Int32(0)
            self.load_activations(call, next_done + part, then)
            for tile in cutlass.range_constexpr(config.tiles):
                self.multiply(acc, tile, now, [[weights[tile, each, word] for word in range(4)] for each in range(config.loads)])
                self.load_weights(call, tile, next_begin + tile * ROWS, next_done + part, weights)
            now.store(then.load())
            if next_done == 0:
                self.finish(call, out, acc, call.first + begin, rows, warp, bias)
                acc.fill(0.0)
            begin, done = next_begin, next_done

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

    @cute.jit
    def load_activations(self, call: Call, begin: Int32, to: cute.Tensor):
        """A lane's activations of a chunk; zeros where there are none. ``begin``: where its weights begin in a row, in bytes."""
        token = cute.arch.lane_idx() // 4
        for each in cutlass.range_constexpr(self.config.loads):
            at = begin + each * self.config.warps * QUAD_BYTES
            inside = at < call.row_bytes
            number = at // LOAD_BYTES * self.config.elements  # of k
            for half in cutlass.range_constexpr(self.halves):
                from_ = call.a.row(token + half * 8) + number * 2
                for vector in cutlass.range_constexpr(self.words // 4):
                    words = load_words_if("global", from_ + vector * 16, inside & (token + half * 8 < call.m))
                    for word in cutlass.range_constexpr(4):
                        to[each, half, vector * 4 + word] = words[word]

    @cute.jit
    def multiply(self, acc: cute.Tensor, tile: cutlass.Constexpr[int], x: cute.Tensor, weights: Any):
        """Adds the products of a tile. ``weights``: this lane's loads."""
        zero = Uint32(0)
        # Two chains of products, because each waits for the one before.
        sums = [[acc[tile, index] for index in range(4)], [Float32(0.0)] * 4]
        for each in cutlass.range_constexpr(self.config.loads):
            for step in cutlass.range_constexpr(self.words // 2):
                low, high = 2 * step, 2 * step + 1
                if const_expr(self.halves == 2):
                    left = [x[each, 0, low], x[each, 1, low], x[each, 0, high], x[each, 1, high]]
                else:
                    left = [x[each, 0, low], zero, x[each, 0, high], zero]
                sums[step % 2] = mma_m16n8k16(self.dtype, sums[step % 2], left, weights[each][low : high + 1])
        for index in cutlass.range_constexpr(4):
            acc[tile, index] = sums[0][index] + sums[1][index]

    @cute.jit
    def finish(
        self, call: Call, out: cute.Tensor, acc: cute.Tensor, first: Int32, rows: Int32, warp: Int32, bias: Float32
    ):  # fmt: skip
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
        for turn in cutlass.range_constexpr((config.tokens + step - 1) // step):
            token = thread // self.group + turn * step
            if (row < rows) & (token < call.m) & (thread < step * self.group):
                total = Float32(0.0)
                for each in cutlass.range_constexpr(config.warps):
                    total += call.results[(each * config.tokens + token) * config.result_pitch + row]
                out[token, first + row] = (total + bias).to(self.out)
        if first + rows < call.first + call.rows:  # the next group's sums go to the same place
            cute.arch.barrier(barrier_id=COMPUTE, number_of_threads=self.threads)
