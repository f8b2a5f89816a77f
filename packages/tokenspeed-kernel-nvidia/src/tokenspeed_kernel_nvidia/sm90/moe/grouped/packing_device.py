"""The device code of `grouped` that makes packed columns. Packed columns are the rows of activations, sorted by expert like the
pairs, in the layout that the ring of columns has in shared memory.

Packed columns are panels of 128 bytes of k: ``[panel, row, 128 bytes]``. Consecutive rows are adjacent, so one bulk copy moves many
columns of a tile, for one panel, and it can multicast them. In a row of 128 bytes, the eight 16-byte chunks are permuted by the
row's index modulo 8, as in the 128-byte swizzle of shared memory. Each expert's rows begin at a multiple of 8. The last panel is
zero-padded.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute
from cutlass.memory import SmemAllocator

from tokenspeed_kernel_nvidia.cutedsl import arguments_device as arguments
from tokenspeed_kernel_nvidia.cutedsl.registers_device import load_int, store_floats, store_words
from tokenspeed_kernel_nvidia.sm90.moe.grouped.config import (
    CODES,
    COLUMN_BYTES,
    GROUP,
    MAX_TOP_K,
    ROUNDED_TOGETHER,
    Rounding,
)
from tokenspeed_kernel_nvidia.sm90.moe.grouped.rounding_device import (
    KEPT,
    THREADS,
    WARPS,
    RoundRows,
    scale_of,
)

CHUNK_BYTES = 16
CHUNKS = COLUMN_BYTES // CHUNK_BYTES  # chunks of a row in a panel


def packed_offset(panel: Any, row: Any, chunk: Any, rows: Any) -> Int64:
    """Returns the offset in bytes of a 16-byte chunk of packed columns.

    Args:
        panel: the index of the panel, 128 bytes of k.
        row: the index of the row.
        chunk: the index of the chunk in the row's 128 bytes.
        rows: the number of rows of a panel.
    """
    return (Int64(panel) * rows + row) * COLUMN_BYTES + (chunk ^ row % GROUP) * CHUNK_BYTES


def fake_arguments(config: Rounding) -> tuple[Any, ...]:
    """Returns placeholder arguments, which have types and layouts but no memory, to compile `PackRows`."""
    given = arguments.rows(config.dtype, arguments.size(), arguments.size(divisibility=32))
    return given, Int64(0), Int32(0), Int64(0), Int64(0), Int32(0), arguments.stream()


@dataclass(frozen=True)
class Packing:
    """The arguments of a launch. Arrays are given by their global addresses.

    Attributes:
        given, given_stride: the rows to pack, in 16 bits, and their row pitch in elements.
        packed: receives the packed columns.
        rows: number of rows of a panel of packed columns.
        scales: float32 ``[rows]``, receives the scales of quantised rows.
        positions: int32 ``[input rows, top_k]``, the packed rows that receive an input row; negative for none. If the address is 0,
            a row keeps its index.
        top_k: at most `MAX_TOP_K`.
        k: number of elements of an input row.
    """

    given: Int64
    given_stride: Int64
    packed: Int64
    rows: Int32
    scales: Int64
    positions: Int64
    top_k: Int32
    k: Int32


class PackRows(RoundRows):
    """The kernel for one configuration: a CTA of four warps for each input row. The kernel is memory-bound."""

    @cute.jit
    def __call__(
        self,
        given: cute.Tensor,
        packed: Int64,
        rows: Int32,
        scales: Int64,
        positions: Int64,
        top_k: Int32,
        stream: cuda.CUstream,
    ):
        count, k = given.shape
        packing = Packing(given.iterator.toint(), given.stride[0], packed, rows, scales, positions, top_k, k)
        self.pack(packing).launch(grid=(count, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True)

    @cute.kernel
    def pack(self, packing: Packing):
        """Packs one input row: stores it to each of its packed rows, up to `MAX_TOP_K`. So a token is read, and quantised, once for
        all of its pairs."""

        @cute.struct
        class Storage:
            largest: cute.struct.MemRange[Uint32, WARPS]

        storage = SmemAllocator().allocate(Storage)
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        groups = packing.k // ROUNDED_TOGETHER
        each = COLUMN_BYTES // (ROUNDED_TOGETHER if self.config.result == CODES else 2 * ROUNDED_TOGETHER)  # groups of a panel
        padded = (groups + (each - 1)) // each * each
        given = packing.given + Int64(row) * (2 * packing.given_stride)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        targets = cute.make_rmem_tensor((MAX_TOP_K,), Int32)
        targets.fill(-1)
        targets[0] = row
        if packing.positions != 0:
            for slot in cutlass.range_constexpr(MAX_TOP_K):
                targets[slot] = Int32(-1)
                if slot < packing.top_k:
                    targets[slot] = load_int(packing.positions + (Int64(row) * packing.top_k + slot) * 4, False)
        kept = cute.make_rmem_tensor((KEPT, self.words), Uint32)
        kept.fill(0)
        for turn in cutlass.range_constexpr(KEPT):
            if turn * THREADS + thread < groups:
                self.read(given, turn * THREADS + thread, kept[turn, None])
        scale = Float32(1.0)
        if const_expr(self.config.result == CODES):
            largest = Uint32(0)
            for turn in cutlass.range_constexpr(KEPT):
                largest = self.largest_of(kept[turn, None], largest)
            for group in cutlass.range(KEPT * THREADS + thread, groups, THREADS, unroll=1):
                words = cute.make_rmem_tensor((self.words,), Uint32)
                self.read(given, group, words)
                largest = self.largest_of(words, largest)
            scale = scale_of(self.amax_of_row(storage.largest.data_ptr(), thread, largest))
            if thread == 0:
                for slot in cutlass.range_constexpr(MAX_TOP_K):
                    if targets[slot] >= 0:
                        store_floats("global", packing.scales + Int64(targets[slot]) * 4, [scale])
        for turn in cutlass.range_constexpr(KEPT):
            if turn * THREADS + thread < padded:
                self.write_packed(packing, targets, turn * THREADS + thread, kept[turn, None], scale)
        for group in cutlass.range(KEPT * THREADS + thread, padded, THREADS, unroll=1):
            words = cute.make_rmem_tensor((self.words,), Uint32)
            words.fill(0)
            if group < groups:
                self.read(given, group, words)
            self.write_packed(packing, targets, group, words, scale)

    @cute.jit
    def write_packed(self, packing: Packing, targets: cute.Tensor, group: Int32, words: cute.Tensor, scale: Float32):
        """Stores a group of 16 elements in all packed rows of the input row: quantised in one chunk, or unchanged in two."""
        chunks = [[words[4 * half + at] for at in range(4)] for half in range(2)]
        if const_expr(self.config.result == CODES):
            chunks = [self.codes_of(words, scale)]
        for slot in cutlass.range_constexpr(MAX_TOP_K):
            if targets[slot] >= 0:
                for each in cutlass.range_constexpr(len(chunks)):
                    chunk = group * len(chunks) + each
                    at = packed_offset(chunk // CHUNKS, targets[slot], chunk % CHUNKS, packing.rows)
                    store_words(packing.packed + at, chunks[each])
