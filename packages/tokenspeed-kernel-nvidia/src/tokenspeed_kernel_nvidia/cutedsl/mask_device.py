"""Masks: set the scores of keys that a query does not see to -inf.

``scores`` is a thread's accumulator, whose two rows are r = 0 and 1; see `registers_device`. Column indices and limits are relative
to the thread's first column of the tile.
"""

# mypy: ignore-errors

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute


@cute.jit
def hide_from(scores: cute.Tensor, row: cutlass.Constexpr[int], limit: Int32) -> None:
    """Masks the columns from ``limit`` on, in one of the thread's two rows."""
    for j in cutlass.range_constexpr(cute.size(scores) // 4):
        for c in cutlass.range_constexpr(2):
            at = 4 * j + 2 * row + c
            scores[at] = scores[at] if 8 * j + c < limit else -Float32.inf


@cute.jit
def hide_before(scores: cute.Tensor, row: cutlass.Constexpr[int], limit: Int32) -> None:
    """Masks the columns before ``limit``, in one of the thread's two rows."""
    for j in cutlass.range_constexpr(cute.size(scores) // 4):
        for c in cutlass.range_constexpr(2):
            at = 4 * j + 2 * row + c
            scores[at] = scores[at] if 8 * j + c >= limit else -Float32.inf


@cute.jit
def hide_below(scores: cute.Tensor, limits: list, begin: cutlass.Constexpr[int], end: cutlass.Constexpr[int]) -> None:
    """Masks the columns below ``limits[r]`` in the thread's rows r = 0 and 1, but only in the groups of 8 columns from ``begin`` to
    ``end - 1``: the other groups need no mask."""
    for j in cutlass.range_constexpr(begin, end):
        for e in cutlass.range_constexpr(4):
            if 8 * j + e % 2 < limits[e // 2]:
                scores[4 * j + e] = -Float32.inf


@cute.jit
def hide_above(scores: cute.Tensor, limits: list, begin: cutlass.Constexpr[int], end: cutlass.Constexpr[int]) -> None:
    """Masks the columns above ``limits[r]`` in the thread's rows r = 0 and 1, but only in the groups of 8 columns from ``begin`` to
    ``end - 1``: the other groups need no mask."""
    for j in cutlass.range_constexpr(begin, end):
        for e in cutlass.range_constexpr(4):
            if 8 * j + e % 2 > limits[e // 2]:
                scores[4 * j + e] = -Float32.inf
