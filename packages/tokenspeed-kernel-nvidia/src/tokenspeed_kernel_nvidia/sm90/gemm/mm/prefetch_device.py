"""Prefetch of weights into L2 while the preceding kernel runs (PDL)."""

# mypy: ignore-errors

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, cute

from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Barriers, Cursor
from tokenspeed_kernel_nvidia.sm90.common.bulk_device import prefetch_bulk
from tokenspeed_kernel_nvidia.sm90.gemm.mm.config import PREFETCH_BYTES


@cute.jit
def prefetch_rows(
    ended: cute.Pointer,
    source_of: cutlass.Constexpr,
    rows: Int32,
    row_bytes: Int32,
    most: cutlass.Constexpr[int],
    pace: cutlass.Constexpr[int],
):
    """Prefetches rows of weights into L2, `PREFETCH_BYTES` at a time, until the preceding kernel has ended (PDL). One warp calls
    this function.

    The preceding kernel may still be writing the weights. Later loads see the kernel's writes, because the prefetch goes only to
    L2, which is coherent.

    Args:
        ended: the barrier whose first phase ends when the preceding kernel has ended.
        source_of: a function of a row's index, which returns the global address of the row's first byte.
        rows, row_bytes: the number of rows, and the bytes of each; a multiple of 16.
        most: the maximum number of bytes to prefetch.
        pace: clock cycles from a prefetch to the next, per KB prefetched. The delay keeps the preceding kernel's loads from
            queueing behind many prefetches.
    """
    barrier = Barriers(ended)
    begin = Cursor(Int32(0), Int32(0))
    row, done, left = Int32(0), Int32(0), Int32(most)
    due = Int32(cute.arch.clock())
    over = barrier.poll(begin)
    while (row < rows) & (left > 0) & (not over):
        size = cutlass.min(row_bytes - done, PREFETCH_BYTES)
        with cute.arch.elect_one():
            prefetch_bulk(source_of(row) + Int64(done), size)
        due += size * pace // 1024
        left -= size
        done += size
        if done >= row_bytes:
            row += 1
            done = Int32(0)
        over = barrier.poll(begin)
        while (Int32(cute.arch.clock()) - due < 0) & (not over):
            over = barrier.poll(begin)
