"""Device code of `mm` where a CTA has few rows of weights: they go from global memory to registers.

All warps of a CTA share each row, and each has neighbouring parts of 64 bytes, as many as it has registers for. It has them of 8
rows, a tile, at once: a quad of lanes has a row's 64 bytes, 16 each, as in `mm_device`. The same parts of the activations stay in
registers while a warp goes through all tiles. Nothing is handed from warp to warp before the end, so that each loads its next tile
as soon as it has multiplied one. Rows that are longer than all warps' registers are divided into chunks, one after another.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, cute
from cutlass.cute.runtime import make_fake_tensor

from tokenspeed_kernel_nvidia.sm90.common import arguments_device as arguments
from tokenspeed_kernel_nvidia.sm90.common.memory_device import prefetch_bulk
from tokenspeed_kernel_nvidia.sm90.common.pipeline_device import Barriers, Cursor
from tokenspeed_kernel_nvidia.sm90.common.registers_device import load_floats, mma_m16n8k16, store_floats
from tokenspeed_kernel_nvidia.sm90.gemm.mm_config import LOAD_BYTES, QUAD_BYTES, ROWS
from tokenspeed_kernel_nvidia.sm90.gemm.mm_direct_config import HEAD_BYTES, OWN_ROWS, DirectConfig
from tokenspeed_kernel_nvidia.sm90.gemm.mm_formats_device import COMPUTING, wait_after
from tokenspeed_kernel_nvidia.sm90.gemm.mm_memory_device import Matrix, Table, Vector, load_words_if, store_number, type_of

_MADE = 1  # the barrier of the prefetching warp's mbarrier, for the first warp


def host(config: DirectConfig) -> Any:
    """Returns the function that launches a program."""
    return Direct(config)


def fake_arguments(config: DirectConfig) -> tuple[Any, ...]:
    """Returns stand-ins for the arguments of `host`'s function."""
    m, n, k = (arguments.size() for _ in range(3))
    a, out = type_of(config.dtype), type_of(config.out)
    rows = cute.sym_int64(divisibility=128 // a.width)
    tensors = (
        make_fake_tensor(a, (m, k), (cute.sym_int64(divisibility=128 // a.width), 1), assumed_align=16),
        make_fake_tensor(a, (k, n), (1, rows), assumed_align=16),
        make_fake_tensor(out, (m, n), (cute.sym_int64(), cute.sym_int64()), assumed_align=out.width // 8),
    )
    return (*tensors, Int64(0), Int32(0), Int32(0), Int32(0), arguments.stream())


def load_weights(address: Int64, condition: Boolean) -> Any:
    """Loads 16 bytes of weights, and brings the others of their 256 bytes to the L2 cache; or gives zeros.

    It does not say ".nc", as the kernel before may have written them.
    """
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, {$r1}, 0; "
        "mov.b32 {$w0}, 0; mov.b32 {$w1}, 0; mov.b32 {$w2}, 0; mov.b32 {$w3}, 0; "
        "@p ld.global.L1::no_allocate.L2::256B.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}]; }",
        write_only_types=[Uint32] * 4,
        read_only_args=[address, Int32(condition)],
    )


@dataclass(frozen=True)
class Work:
    """Describes the work of a CTA.

    Attributes:
        weights, a: rows of weights, of so many bytes, and of activations.
        first, count: this CTA's rows of weights.
        m: rows of activations.
        out: the result.
        bias: added to the result.
        sums: where the warps' sums are in shared memory.
        ended: the barrier whose first phase ends when the kernel before has ended.
    """

    weights: Matrix
    row_bytes: Int32
    first: Int32
    count: Int32
    a: Matrix
    m: Int32
    out: Table
    bias: Vector
    sums: Int32
    ended: Barriers


class Direct:
    """Launches and runs the kernel of one configuration."""

    def __init__(self, config: DirectConfig) -> None:
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
        config = self.config
        n, row_bytes = out.shape[1], weights.shape[0] * 2
        share = n // ctas
        self.kernel(
            Matrix(weights.iterator.toint(), weights.stride[1] * 2), row_bytes, share, n - share * ctas,
            Matrix(a.iterator.toint(), a.stride[0] * 2), out.shape[0],
            Table(out.iterator.toint(), out.stride[0], out.stride[1]), Vector(bias, bias_kind),
        ).launch(
            grid=(ctas, 1, 1), block=(config.threads + config.others, 1, 1), smem=shared_bytes, stream=stream,
            use_pdl=config.dependent, min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, weights: Matrix, row_bytes: Int32, share: Int32, more: Int32, a: Matrix, m: Int32, out: Table, bias: Vector
    ):  # fmt: skip
        """Weights come first, as their loads do.

        Args:
            share, more: rows of weights of each CTA; the first so many have another.
        """
        config = self.config
        cta, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        # What runs next may begin when there is room; its own wait is for all that is done here.
        cute.arch.griddepcontrol_launch_dependents()
        first = cta * share + cutlass.min(cta, more)
        count = share + cutlass.select_(cta < more, Int32(1), Int32(0))
        shared = cute.arch.get_dyn_smem(Int64, alignment=16)
        work = Work(weights, row_bytes, first, count, a, m, out, bias, shared.toint() + HEAD_BYTES, Barriers(shared))
        bias.prefetch(first, (warp == config.warps - 1) & (cute.arch.lane_idx() == 0))
        if const_expr(config.pace > 0):
            if warp == config.warps:
                with cute.arch.elect_one():
                    work.ended.init(0, 1)
                cute.arch.mbarrier_init_fence()
                cute.arch.sync_warp()
                cute.arch.barrier_arrive(barrier_id=_MADE, number_of_threads=64)
                self.prefetch(work)
            else:
                self.compute(work, warp)
        else:
            for turn in cutlass.range_constexpr(-(-config.ahead // config.warps)):
                row = turn * config.warps + warp
                if (row < count) & (row < config.ahead):
                    with cute.arch.elect_one():
                        prefetch_bulk(weights.row(first + row), row_bytes)
            self.compute(work, warp)

    @cute.jit
    def prefetch(self, work: Work):
        """Brings rows of weights to the L2 cache, one after another.

        The kernel before may be writing them: that is seen, because nothing is read to this multiprocessor.
        """
        config = self.config
        rows = cutlass.min(work.count, config.ahead)
        row, due = Int32(0), Int32(cute.arch.clock())
        begin = Cursor(Int32(0), Int32(0))
        over = Boolean(False)
        while (row < rows) & (not over):
            with cute.arch.elect_one():
                prefetch_bulk(work.weights.row(work.first + row), work.row_bytes)
            row += 1
            due += work.row_bytes * config.pace // 1024
            over = work.ended.poll(begin)
            while (Int32(cute.arch.clock()) - due < 0) & (not over):
                over = work.ended.poll(begin)

    @cute.jit
    def compute(self, work: Work, warp: Int32):
        """Multiplies all of a CTA's rows."""
        config = self.config
        lane = cute.arch.lane_idx()
        first, count, m, row_bytes = work.first, work.count, work.m, work.row_bytes
        tiles = (count + (ROWS - 1)) // ROWS
        pitch = tiles * (ROWS * 4)  # of a row of activations
        own = work.sums + (warp * m + lane // 4) * pitch + lane % 4 * 8  # this lane's sums of the first tile
        quad = warp * (config.quads * QUAD_BYTES) + lane % 4 * LOAD_BYTES
        x = cute.make_rmem_tensor((config.quads, 4), Uint32)
        y = cute.make_rmem_tensor((config.quads, 4), Uint32)
        acc = cute.make_rmem_tensor((2, 4), Float32)
        thread, _, _ = cute.arch.thread_idx()
        # Rows behind the last are read as the last: nobody reads their sums, and no other bytes are read for them.
        source = work.weights.row(first + cutlass.min(lane // 4, count - 1)) + quad
        wait_after([source, work.a.row(lane // 4) + quad])
        cute.arch.griddepcontrol_wait()
        self.load_tile(x, source, row_bytes - quad)
        self.load_activations(y, work, quad)
        beside = Uint32(0)
        if const_expr(config.pace > 0):
            if warp == 0:
                cute.arch.barrier(barrier_id=_MADE, number_of_threads=64)
                with cute.arch.elect_one():
                    work.ended.arrive(Cursor(Int32(0), Int32(0)))
        for begin in cutlass.range(0, row_bytes, config.chunk_bytes, unroll=1):
            place = begin + quad
            if begin > 0:
                self.load_activations(y, work, place)
            for tile in cutlass.range(0, tiles, unroll=1):
                following = tile + 1
                after = place
                if following == tiles:
                    following = Int32(0)
                    after = place + config.chunk_bytes
                source = work.weights.row(first + cutlass.min(following * ROWS + lane // 4, count - 1)) + after
                left = row_bytes - after
                # With the last tile: what is multiplied first would wait for whatever was loaded before.
                if (following == 0) & (begin + config.chunk_bytes >= row_bytes):
                    beside = work.bias.load(first + thread % OWN_ROWS, thread % OWN_ROWS < count)
                acc.fill(0.0)
                for each in cutlass.range_constexpr(config.quads):
                    self.multiply(acc, x, y, each)
                    if const_expr(config.woven):
                        self.load_quad(x, each, source, left)
                if const_expr(not config.woven):
                    if (following > 0) | (begin + config.chunk_bytes < row_bytes):
                        self.load_tile(x, source, left)
                self.keep(acc, own + tile * (ROWS * 4), m, begin > 0)
        cute.arch.barrier(barrier_id=COMPUTING, number_of_threads=config.threads)
        self.finish(work, pitch, work.bias.number(beside))

    def multiply(self, acc: cute.Tensor, x: cute.Tensor, y: cute.Tensor, each: int):
        """Adds the products of one load to two chains, because each product waits for the one before in its chain."""
        for step in range(2):
            low, high = 2 * step, 2 * step + 1
            left = [y[each, low], Uint32(0), y[each, high], Uint32(0)]
            before = [acc[step, item] for item in range(4)]
            for item, number in enumerate(mma_m16n8k16(self.dtype, before, left, [x[each, low], x[each, high]])):
                acc[step, item] = number

    @cute.jit
    def load_quad(self, x: cute.Tensor, each: cutlass.Constexpr[int], source: Int64, left: Int32):
        """Loads one 16 bytes of a lane.

        Args:
            left: bytes of the row from ``source`` on.
        """
        words = load_weights(source + each * QUAD_BYTES, each * QUAD_BYTES < left)
        for word in cutlass.range_constexpr(4):
            x[each, word] = words[word]

    @cute.jit
    def load_tile(self, x: cute.Tensor, source: Int64, left: Int32):
        """Loads what a lane has of a tile's row."""
        for each in cutlass.range_constexpr(self.config.quads):
            self.load_quad(x, each, source, left)

    @cute.jit
    def load_activations(self, y: cute.Tensor, work: Work, place: Int32):
        """Loads what a lane has of the activations, and zeros for rows that do not exist and behind their ends."""
        token = cute.arch.lane_idx() // 4
        source = work.a.row(token) + place
        for each in cutlass.range_constexpr(self.config.quads):
            words = load_words_if(source + each * QUAD_BYTES, (token < work.m) & (place + each * QUAD_BYTES < work.row_bytes))
            for word in cutlass.range_constexpr(4):
                y[each, word] = words[word]

    @cute.jit
    def keep(self, acc: cute.Tensor, place: Int32, m: Int32, again: Boolean):
        """Stores a tile's sums, added to those of the chunks before."""
        if cute.arch.lane_idx() // 4 < m:
            low, high = acc[0, 0] + acc[1, 0], acc[0, 1] + acc[1, 1]
            if again:
                before = load_floats("shared", place, 2)
                low += before[0]
                high += before[1]
            store_floats("shared", place, [low, high])

    @cute.jit
    def finish(self, work: Work, pitch: Int32, bias: Float32):
        """Adds the sums of all warps in a fixed order, and writes the results."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        row = thread % OWN_ROWS
        if row < work.count:
            for token in cutlass.range(thread // OWN_ROWS, work.m, config.threads // OWN_ROWS, unroll=1):
                total = Float32(0.0)
                for each in cutlass.range_constexpr(config.warps):
                    total += load_floats("shared", work.sums + (each * work.m + token) * pitch + row * 4, 1)
                store_number(work.out.at(token, work.first + row, self.out.width // 8), total + bias, self.out)
