"""How the launchers of this family cut tensors into equal groups that lie at equal distances, and choose tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import as_rows, cdiv, next_power_of_2
from tokenspeed_kernel_base.ops.quantization.formats import swizzled_shape


class Config(NamedTuple):
    """Elements of a program's tile, and its warps.

    With 8 warps and 4096 elements a thread has two loads of 16 bytes of half-precision values in flight, and eight such programs
    fill a multiprocessor. Where that would leave multiprocessors idle, tiles are smaller.
    """

    tile: int
    warps: int


_LARGE, _MEDIUM, _SMALL = Config(4096, 4), Config(2048, 4), Config(1024, 4)


def config_for(elements: int) -> Config:
    return _LARGE if elements >= 1 << 22 else _MEDIUM if elements >= 1 << 19 else _SMALL


@dataclass(frozen=True)
class Groups:
    """The groups of a tensor's rows.

    Attributes:
        outer, count: there are ``count`` groups in each of ``outer`` outer rows, which are the tensor's rows unless these lie so
            that more of them make one.
        length: elements of a group.
        limit: elements of an outer row, beyond which the last group of one does not reach.
        stride, outer_stride: elements of the tensor from one group, one outer row, to the next.
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
    """The groups of ``length`` consecutive elements of the last axis of ``x`` (two axes, the last of unit stride)."""
    rows, k = x.shape
    if length >= k:  # a group is a row
        return Groups(1, rows, k, rows * k, x.stride(0), 0)
    if k % length == 0 and x.is_contiguous():
        return Groups(1, rows * (k // length), length, rows * k, length, 0)
    return Groups(rows, cdiv(k, length), length, k, length, x.stride(0))


def packed_groups_of(x: Tensor, length: int) -> Groups:
    """`groups_of`, with as many empty groups behind each row as make their number a multiple of four."""
    rows, k = x.shape
    if cdiv(k, length) % 4 == 0:
        return groups_of(x, length)
    return Groups(rows, cdiv(cdiv(k, length), 4) * 4, min(length, k), k, min(length, k), x.stride(0))


def grid(groups: Groups, per_program: int) -> tuple[int]:
    return (groups.outer * cdiv(groups.count, per_program),)


def blocks_of(x: Tensor, rows: Tensor, length: int, per_program: int, tiles: bool) -> tuple[tuple[int], tuple[int, ...]]:
    """The grid and the numbers that `blocks_of_program` takes, for blocks of ``length`` elements of x, whose rows are ``rows``.

    With ``tiles`` programs follow the scales' tiles of 128x4, so that what completes these is written too.
    """
    if not tiles:
        groups = groups_of(rows, length)
        return grid(groups, per_program), (groups.count, groups.stride, groups.outer_stride, 0, 0)
    m, columns = x.shape[-2], x.shape[-1] // length
    size = math.prod(swizzled_shape(m, columns))
    return (rows.shape[0] // m * cdiv(size, per_program),), (size, length, rows.stride(0), m, columns)


def made_or(out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
    """``out`` where it is contiguous, else a new tensor, to be copied to ``out`` by `finish`."""
    if out is not None and out.is_contiguous():
        return out
    return like.new_empty(shape, dtype=dtype)


def finish(made: Tensor, out: Tensor | None) -> Tensor:
    """``made``, or ``out`` with what was made in it."""
    if out is None or out is made:
        return made
    return out.copy_(made)


def rows_of(x: Tensor) -> Tensor:
    """`as_rows`, 8-bit floats as uint8."""
    return as_rows(x.view(torch.uint8) if x.element_size() == 1 else x)


class MatrixTile(NamedTuple):
    rows: int
    columns: int
    warps: int


def as_matrix(x: Tensor, whole: bool = False) -> Tensor:
    """``[..., k]`` as ``[rows, k]``, the last axis of unit stride; with ``whole`` as ``[1, elements]`` where that is a view."""
    x = x.view(torch.uint8) if x.element_size() == 1 else x
    return x.reshape(1, -1) if whole and x.is_contiguous() else as_rows(x)


def matrix_tile(matrix: Tensor, most_columns: int | None = None) -> MatrixTile:
    """A tile for element-wise work. ``most_columns`` limits its columns where it is a power of two from 32 on."""
    config = config_for(matrix.numel())
    columns = min(next_power_of_2(matrix.shape[1]), config.tile)
    if most_columns is not None and most_columns >= 32 and most_columns & (most_columns - 1) == 0:
        columns = min(columns, most_columns)
    return MatrixTile(config.tile // columns, columns, config.warps)
