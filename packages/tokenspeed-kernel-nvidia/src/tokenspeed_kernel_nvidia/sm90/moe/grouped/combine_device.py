"""The device code of the last kernel of `grouped`: adds up each token's expert results (slots), weighted by routing weights."""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from tokenspeed_kernel_nvidia.cutedsl import arguments_device as arguments
from tokenspeed_kernel_nvidia.cutedsl.memory_device import load_words
from tokenspeed_kernel_nvidia.cutedsl.registers_device import (
    dtype_of,
    float_of,
    load_floats,
    load_int,
    pack,
    store_words,
    widened,
)
from tokenspeed_kernel_nvidia.sm90.moe.grouped.config import Combine

THREADS = 256
NUMBERS = 8  # output elements of a thread: 16 bytes
AT_ONCE = 4  # slots of a token whose results a thread loads before it adds them


def host(config: Combine) -> Any:
    """Returns the host function that launches the kernel of ``config``."""
    return CombineSlots(config)


def fake_arguments(config: Combine) -> tuple[Any, ...]:
    """Returns placeholder arguments, which have types and layouts but no memory, to compile the function that `host` returns."""
    size, rows = arguments.size, arguments.rows
    tokens, hidden = size(), size(divisibility=32)
    results, out = rows("float32" if config.wide else config.dtype, size(), hidden), rows(config.dtype, tokens, hidden)
    return results, out, *(Int64(0) for _ in range(2)), Int32(0), arguments.stream()


@dataclass(frozen=True)
class Slots:
    """The arguments of a launch. Arrays are given by their global addresses.

    Attributes:
        results, result_stride: results of the second GEMM in 16 bits, or float32 if `Combine.wide`, one row for each (token, slot)
            pair in order of experts; and the row pitch in elements.
        positions: int32 ``[tokens, top_k]``, the row of ``results`` of each pair, or -1 for a pair without an expert.
        weights: float32 ``[tokens, top_k]``, the routing weights.
        out, out_stride: the output in 16 bits, one row for each token; and the row pitch in elements.
        tokens, top_k, hidden: number of tokens, of slots of a token, and of features of a row.
    """

    results: Int64
    result_stride: Int64
    positions: Int64
    weights: Int64
    out: Int64
    out_stride: Int64
    tokens: Int32
    top_k: Int32
    hidden: Int32


class CombineSlots:
    """The kernel of one configuration: a grid of tokens by chunks of 2048 features, with 8 features per thread. A thread issues the
    loads of up to four slots before it adds them, in float32 and in slot order. The kernel is memory-bound.
    """

    def __init__(self, config: Combine):
        self.dtype = dtype_of(config.dtype)
        self.wide = config.wide
        self.words = NUMBERS if config.wide else NUMBERS // 2  # 32-bit words of results that a thread loads for a slot

    @cute.jit
    def __call__(
        self,
        results: cute.Tensor,
        out: cute.Tensor,
        positions: Int64,
        weights: Int64,
        top_k: Int32,
        stream: cuda.CUstream,
    ):
        tokens, hidden = out.shape
        slots = Slots(
            results.iterator.toint(),
            results.stride[0],
            positions,
            weights,
            out.iterator.toint(),
            out.stride[0],
            tokens,
            top_k,
            hidden,
        )
        chunks = (hidden // NUMBERS + (THREADS - 1)) // THREADS
        self.kernel(slots).launch(grid=(tokens, chunks, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, slots: Slots):
        token, chunk, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        feature = (chunk * THREADS + thread) * NUMBERS
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if feature < slots.hidden:
            totals = cute.make_rmem_tensor((NUMBERS,), Float32)
            totals.fill(0.0)
            for first in cutlass.range(0, slots.top_k, AT_ONCE, unroll=1):
                words = cute.make_rmem_tensor((AT_ONCE, self.words), Uint32)
                weights = cute.make_rmem_tensor((AT_ONCE,), Float32)
                present = cute.make_rmem_tensor((AT_ONCE,), Int32)
                for each in cutlass.range_constexpr(AT_ONCE):
                    present[each] = Int32(-1)
                    if first + each < slots.top_k:
                        at = (Int64(token) * slots.top_k + first + each) * 4
                        present[each] = load_int(slots.positions + at, False)
                        if present[each] >= 0:  # weights and rows of absent pairs are undefined
                            weights[each] = load_floats("global", slots.weights + at, 1)
                            row = slots.results + (Int64(present[each]) * slots.result_stride + feature) * (4 if self.wide else 2)
                            for first_word in cutlass.range_constexpr(0, self.words, 4):
                                loaded = load_words("global", row + 4 * first_word, 4)
                                for word in cutlass.range_constexpr(4):
                                    words[each, first_word + word] = loaded[word]
                for each in cutlass.range_constexpr(AT_ONCE):
                    if present[each] >= 0:
                        for word in cutlass.range_constexpr(self.words):
                            numbers = [float_of(words[each, word])] if self.wide else widened(self.dtype, words[each, word])
                            for at in cutlass.range_constexpr(len(numbers)):
                                totals[len(numbers) * word + at] += weights[each] * numbers[at]
            packed = [pack(self.dtype, totals[2 * word], totals[2 * word + 1]) for word in range(NUMBERS // 2)]
            at = slots.out + (Int64(token) * slots.out_stride + feature) * 2
            store_words(at, packed)
