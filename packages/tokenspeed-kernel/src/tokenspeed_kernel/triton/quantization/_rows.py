"""Splits tensors into groups with a constant stride, and chooses tiles, for all quantisation launchers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import as_rows, cdiv, next_power_of_2
from tokenspeed_kernel_base.ops.quantization.formats import swizzled_shape


class Config(NamedTuple):
    """Elements per tile, and warps per program.

    With 4 warps and 4096 elements, a thread has four 16-byte loads of 16-bit values in flight. Small tensors get smaller tiles,
    because SMs would otherwise idle.
    """

    tile: int
    warps: int


_LARGE, _MEDIUM, _SMALL = Config(4096, 4), Config(2048, 4), Config(1024, 4)


def config_for(elements: int) -> Config:
    return _LARGE if elements >= 1 << 22 else _MEDIUM if elements >= 1 << 19 else _SMALL


@dataclass(frozen=True)
class Groups:
    """The split of a tensor's rows into groups of elements that share a scale.

    Attributes:
        outer, count: number of outer rows, and groups per outer row. An outer row is one row of the tensor, or several rows with a
            constant stride.
        length: elements per group.
        limit: elements per outer row, where the outer row's last group ends.
        stride, outer_stride: distance in elements from one group to the next, and from one outer row to the next.
    """

    outer: int
    count: int
    length: int
    limit: int
    stride: int
    outer_stride: int

    @property
    def short_last(self) -> bool:
        return self.count * self.length > self.limit


def groups_of(x: Tensor, length: int) -> Groups:
    """Returns the groups of ``length`` consecutive elements of the last axis of ``x`` (two axes, the last with stride 1)."""
    rows, k = x.shape
    if length >= k:  # a group is a row
        return Groups(1, rows, k, rows * k, x.stride(0), 0)
    if k % length == 0 and x.is_contiguous():
        return Groups(1, rows * (k // length), length, rows * k, length, 0)
    return Groups(rows, cdiv(k, length), length, k, length, x.stride(0))


def packed_groups_of(x: Tensor, length: int) -> Groups:
    """Like `groups_of`, but empty groups are appended to each row up to a multiple of four groups."""
    rows, k = x.shape
    if cdiv(k, length) % 4 == 0:
        return groups_of(x, length)
    return Groups(rows, cdiv(cdiv(k, length), 4) * 4, min(length, k), k, min(length, k), x.stride(0))


def grid(groups: Groups, per_program: int) -> tuple[int]:
    return (groups.outer * cdiv(groups.count, per_program),)


def blocks_of(x: Tensor, rows: Tensor, length: int, per_program: int, tiles: bool) -> tuple[tuple[int], tuple[int, ...]]:
    """Returns the grid, and the arguments of `blocks_of_program` for blocks of ``length`` elements of x. ``rows``: x as a matrix.

    With ``tiles``, programs follow the 128x4 tiles of the scales. So the padding of the tiles is written, too.
    """
    if not tiles:
        groups = groups_of(rows, length)
        return grid(groups, per_program), (groups.count, groups.stride, groups.outer_stride, 0, 0)
    m, columns = x.shape[-2], x.shape[-1] // length
    size = math.prod(swizzled_shape(m, columns))
    return (rows.shape[0] // m * cdiv(size, per_program),), (size, length, rows.stride(0), m, columns)


def made_or(out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
    """Returns ``out`` if contiguous; otherwise a new tensor, which `finish` copies to ``out``."""
    if out is not None and out.is_contiguous():
        return out
    return like.new_empty(shape, dtype=dtype)


def finish(made: Tensor, out: Tensor | None) -> Tensor:
    """Copies ``made`` to the caller's ``out``, if there is one and it is another tensor. Returns the tensor with the result."""
    if out is None or out is made:
        return made
    return out.copy_(made)


def rows_of(x: Tensor) -> Tensor:
    """Like `as_rows`, but views 8-bit floats as uint8."""
    return as_rows(x.view(torch.uint8) if x.element_size() == 1 else x)


class MatrixTile(NamedTuple):
    rows: int
    columns: int
    warps: int


def as_matrix(x: Tensor, whole: bool = False) -> Tensor:
    """Reshapes ``[..., k]`` to ``[rows, k]`` with a last stride of 1. With ``whole``, reshapes a contiguous x to ``[1,
    elements]``.
    """
    x = x.view(torch.uint8) if x.element_size() == 1 else x
    return x.reshape(1, -1) if whole and x.is_contiguous() else as_rows(x)


def matrix_tile(matrix: Tensor, most_columns: int | None = None) -> MatrixTile:
    """Returns a tile for elementwise kernels on ``matrix``.

    ``most_columns`` limits the tile's columns, if it is a power of two of at least 32; otherwise it has no effect.
    """
    config = config_for(matrix.numel())
    columns = min(next_power_of_2(matrix.shape[1]), config.tile)
    if most_columns is not None and most_columns >= 32 and most_columns & (most_columns - 1) == 0:
        columns = min(columns, most_columns)
    return MatrixTile(config.tile // columns, columns, config.warps)
