"""The device code of `mm`: the launch, the loop over tiles of weights, and the sums.

A CTA has some rows of the weights, in tiles of 8. A lane loads what it has of a tile itself, all at once and `Config.depth` tiles
ahead: to registers, or to shared memory that nobody else reads, so that no warp waits for another. The activations for that part of
k are in registers too, and stay there while tiles go by. So they are read once where a chunk, which is what all warps have at once,
is a whole row, and once for each group of rows where it is not. The loop's code is short: a call runs it a few times only, and
waits for code that no CTA has run yet.

At the end of a group the sums of all warps meet in shared memory.

In a tile a warp has parts of all rows, of 64 bytes that a quad of lanes shares, 16 each. `mm_formats_device` makes operands of
them: which number of k is where in an instruction does not matter, as long as activations and weights agree. Products of 16 rows of
activations and 8 rows of weights are single instructions, mma.sync m16n8k16, also where there is but one row of activations. For 16
bytes of bfloat16 a lane then has a load, two products and about four moves, and would have 25 instructions if it multiplied and
added them itself.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.utils
from cutlass import Boolean, Float32, Int32, Int64, const_expr, cute
from cutlass.cute.runtime import make_fake_tensor

from tokenspeed_kernel_nvidia.sm90.common import arguments_device as arguments
from tokenspeed_kernel_nvidia.sm90.common.registers_device import load_floats, store_floats
from tokenspeed_kernel_nvidia.sm90.gemm.mm_config import BLOCK, LOAD_BYTES, ROWS, Config
from tokenspeed_kernel_nvidia.sm90.gemm.mm_formats_device import Formats
from tokenspeed_kernel_nvidia.sm90.gemm.mm_memory_device import (
    Call,
    Matrix,
    Table,
    Vector,
    load_float_if,
    prefetch_to_l2,
    storage_of,
    type_of,
    wait_for_copies,
)


@dataclass(frozen=True)
class Cursor:
    """A tile of a chunk: the first row of its group, and its own in that, and where the chunk begins in a row, in bytes."""

    begin: Int32
    done: Int32
    row: Int32


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
        row_bytes, n = weights.shape[0] * size, out.shape[1]
        share = n // ctas
        self.kernel(
            Matrix(a.iterator.toint(), a.stride[0] * self.config.activation_bytes),
            Matrix(weights.iterator.toint(), weights.stride[1] * size), row_bytes, out, Vector(bias, bias_kind),
            Table(a_scale, a_scale_row, a_scale_column), Table(b_scale, b_scale_row, b_scale_column), share, n - share * ctas,
            (ahead + row_bytes - 1) // row_bytes,
        ).launch(
            grid=(ctas, 1, 1), block=(self.config.threads, 1, 1), stream=stream, use_pdl=self.config.dependent,
            min_blocks_per_mp=self.config.resident, preferred_smem_carveout=self.config.carveout,
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
        share: Int32,
        more: Int32,
        ahead: Int32,
    ):
        """``share``: rows of weights of each CTA; the first ``more`` have another. ``ahead``: rows to bring to the L2 cache."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta, _, _ = cute.arch.block_idx()
        storage = cutlass.utils.SmemAllocator().allocate(storage_of(self.config))
        call = Call(
            a, weights, row_bytes, bias, a_scale, b_scale, out.shape[0], out.shape[1], cta * share + cutlass.min(cta, more),
            share + cutlass.select_(cta < more, Int32(1), Int32(0)), storage.results.data_ptr(), storage.slots.data_ptr().toint(),
        )  # fmt: skip
        # Who still writes weights writes them to the L2 cache.
        for row in cutlass.range(warp, cutlass.min(call.rows, ahead), self.config.warps, unroll=1):
            with cute.arch.elect_one():
                prefetch_to_l2(call.weights.row(call.first + row), call.row_bytes)
        # Whatever ran before may have written what is read here; what runs next may begin once there is room.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        self.compute(call, out, warp)

    # -- products ------------------------------------------------------------------------------------------------------------------

    @cute.jit
    def compute(self, call: Call, out: cute.Tensor, warp: Int32):
        """Multiplies a group of rows after another."""
        config = self.config
        lane = cute.arch.lane_idx()
        part = self.part(warp)
        weights, operands = self.coming(), self.operands()
        acc = cute.make_rmem_tensor((4,), Float32)
        # This lane's sums of a tile.
        place = call.results.toint() + ((warp * config.tokens + lane // 4) * config.result_pitch + lane % 4 * 2) * 4
        at = Cursor(Int32(0), Int32(0), Int32(0))
        own = call.slots + (warp * 32 + lane) * LOAD_BYTES  # what this lane has of the first slot
        slot = Int32(0)
        if const_expr(config.staged):
            for index in cutlass.range(config.depth, unroll=1):
                self.stage(call, own + index * config.slot_bytes, at.begin + at.row, at.done + part)
                at = self.after(call, at, 0)
        else:
            for index in cutlass.range_constexpr(config.depth):
                self.load(call, index, at.begin + at.row, at.done + part, weights)
                at = self.after(call, at, index)
        for begin in cutlass.range(0, call.rows, config.group, unroll=1):
            rows = cutlass.min(call.rows - begin, config.group)
            first = call.first + begin
            edge = BLOCK - first % BLOCK
            beside = self.load_beside(call, first, rows)
            for done in cutlass.range(0, call.row_bytes, config.chunk_bytes, unroll=1):
                # Activations stay where they are if a chunk is all of a row, but scales of blocks are another group's.
                if (begin == 0) | (call.row_bytes > config.chunk_bytes) | Boolean(config.scales == "block"):
                    self.fetch(call, begin, done + part, operands)
                if const_expr(config.staged):
                    for tile in cutlass.range(0, rows, ROWS, unroll=1):
                        here = own + slot * config.slot_bytes
                        wait_for_copies(config.depth - 1)
                        loads = self.staged(here)
                        self.add(call, acc, place, done, tile, edge, operands, loads, [None] * config.loads)
                        self.stage(call, here, at.begin + at.row, at.done + part)
                        at = self.after(call, at, 0)
                        slot = cutlass.select_(slot == config.depth - 1, Int32(0), slot + 1)
                else:
                    for row in cutlass.range(0, rows, ROWS * config.depth, unroll=1):
                        for index in cutlass.range_constexpr(config.depth):
                            tile = row + index * ROWS
                            loads, scales = self.loaded(weights, index)
                            if tile < rows:
                                self.add(call, acc, place, done, tile, edge, operands, loads, scales)
                            self.load(call, index, at.begin + at.row, at.done + part, weights)
                            at = self.after(call, at, index)
            self.finish(call, out, first, rows, beside)
            if begin + config.group < call.rows:  # the next group's sums go to the same place
                cute.arch.sync_threads()

    @cute.jit
    def add(
        self,
        call: Call,
        acc: cute.Tensor,
        place: Int32,
        done: Int32,
        tile: Int32,
        edge: Int32,
        operands: list,
        loads: list,
        scales: list,
    ):
        """Adds a tile's products to this lane's sums of it. ``tile``: its first row in the group."""
        to = place + tile * 4
        acc.fill(0.0)
        if done > 0:
            self.add_before(acc, to)
        self.multiply(acc, tile, edge, operands, loads, scales)
        for half in cutlass.range_constexpr(self.halves):
            store_floats("shared", to + half * (8 * 4 * self.config.result_pitch), [acc[2 * half], acc[2 * half + 1]])

    @cute.jit
    def add_before(self, acc: cute.Tensor, place: Int32):
        """Takes the sums of the chunks before."""
        for half in cutlass.range_constexpr(self.halves):
            sums = load_floats("shared", place + half * (8 * 4 * self.config.result_pitch), 2)
            for column in cutlass.range_constexpr(2):
                acc[2 * half + column] = sums[column]

    @cute.jit
    def after(self, call: Call, at: Cursor, slot: cutlass.Constexpr[int]):
        """The tile after that in a slot. A chunk's last tiles may lie beyond the group's rows: its first has the first slot."""
        begin, done, row = at.begin, at.done, at.row + ROWS
        if const_expr(self.config.staged or slot == self.config.depth - 1):
            if row >= cutlass.min(call.rows - begin, self.config.group):
                row = Int32(0)
                done += self.config.chunk_bytes
                if done >= call.row_bytes:
                    done = Int32(0)
                    begin += self.config.group
        return Cursor(begin, done, row)

    # -- results -------------------------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Rows of activations whose results all threads write at once."""
        return self.config.threads // self.config.group

    @property
    def rounds(self) -> int:
        """How often they do."""
        return -(-self.config.tokens // self.step)

    @cute.jit
    def load_beside(self, call: Call, first: Int32, rows: Int32):
        """What a thread's numbers are multiplied by, and what is added to them. At the beginning, as it would be waited for."""
        thread, _, _ = cute.arch.thread_idx()
        row = thread % self.config.group
        bias = call.bias.load(first + row, row < rows)
        factors = cute.make_rmem_tensor((1 + self.rounds,), Float32)
        factors.fill(1.0)
        if const_expr(self.config.scales == "row"):
            factors[0] = load_float_if(call.b_scale.at(Int32(0), first + row, 4), row < rows)
            if const_expr(self.config.activation_bytes == 1):
                for turn in cutlass.range_constexpr(self.rounds):
                    token = thread // self.config.group + turn * self.step
                    factors[1 + turn] = load_float_if(call.a_scale.at(token, Int32(0), 4), token < call.m)
        return bias, factors

    @cute.jit
    def finish(self, call: Call, out: cute.Tensor, first: Int32, rows: Int32, beside: tuple):
        """Adds what the warps have, in their order, and writes it."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        cute.arch.sync_threads()
        row = thread % config.group
        stored, factors = beside
        bias = call.bias.number(stored)
        for turn in cutlass.range_constexpr(self.rounds):
            token = thread // config.group + turn * self.step
            if (row < rows) & (token < call.m) & (thread < self.step * config.group):
                total = Float32(0.0)
                for each in cutlass.range_constexpr(config.warps):
                    total += call.results[(each * config.tokens + token) * config.result_pitch + row]
                out[token, first + row] = (total * (factors[0] * factors[1 + turn]) + bias).to(self.out)
