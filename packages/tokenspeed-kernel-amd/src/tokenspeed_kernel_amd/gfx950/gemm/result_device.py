# mypy: ignore-errors
"""The result of a tile of `mm`: its epilogue, and the merge of a tile's splits."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenspeed_kernel_amd.gfx950 import instructions_device as isa
from tokenspeed_kernel_amd.gluon.layouts_device import log2


@gluon.jit
def fragment_offsets(rows: gl.constexpr, columns: gl.constexpr, layout: gl.constexpr):
    """Returns the offsets of a partial result's elements in memory, int32 [rows, columns]. Fragments of 16 x 16 elements are
    contiguous, so that each access of a wave is 1 KB of contiguous memory."""
    row = gl.arange(0, rows, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, columns, gl.SliceLayout(0, layout))[None, :]
    return (row // 16 * (columns // 16) + column // 16) * 256 + row % 16 * 16 + column % 16


@gluon.jit
def merge(results, like, splits: gl.constexpr):
    """Sums the partial results of a tile's splits in the order of k."""
    size: gl.constexpr = like.shape[0] * like.shape[1]
    at_once: gl.constexpr = max(1, min(splits, 16384 // size))
    offsets = fragment_offsets(like.shape[0], like.shape[1], like.type.layout)
    acc = gl.zeros_like(like)
    for first in gl.static_range(0, splits, at_once):
        parts = ()
        for i in gl.static_range(first, min(first + at_once, splits)):
            parts += (isa.buffer_load(results + i * size, offsets),)
        for i in gl.static_range(len(parts)):
            acc += parts[i]
    return acc


@gluon.constexpr_function
def wave_storage(waves, rows, columns):
    """LDS layout of the accumulators of several waves, [waves, rows, columns]. The padding moves rows to different banks."""
    bases = [[0, 0, 1 << bit] for bit in range(log2(columns))] + [[0, 1 << bit, 0] for bit in range(log2(rows))]
    return gl.PaddedSharedLayout(
        [[columns, 4]], bases + [[1 << bit, 0, 0] for bit in range(log2(waves))], [], [waves, rows, columns]
    )


@gluon.constexpr_function
def sum_layout(waves, rows, columns):
    """A register layout of [waves, rows, columns]: each lane has one element of all waves, or more adjacent ones."""
    width = max(1, rows * columns // (64 * waves))
    along = min(64, columns // width)
    return gl.BlockedLayout([waves, 1, width], [1, 64 // along, along], [1, waves, 1], [2, 1, 0])


@gluon.jit
def sum_of_waves(acc):
    """Returns the sum of the waves' accumulators, float32 [waves, rows, columns], computed through LDS with one barrier. The
    compiler's reduction would have several barriers."""
    waves: gl.constexpr = acc.shape[0]
    rows: gl.constexpr = acc.shape[1]
    columns: gl.constexpr = acc.shape[2]
    shared = gl.allocate_shared_memory(gl.float32, [waves, rows, columns], wave_storage(waves, rows, columns), acc)
    return gl.sum(shared.load(sum_layout(waves, rows, columns)), axis=0)


@gluon.jit
def load_factors(like, bias, a, b, first_row, first_column, m, shape: gl.constexpr):
    """Loads the operands of a tile's epilogue as two tuples. The first has the float32 scales of rows and of columns, or nvfp4's
    alpha; the second has the bias. A tuple is empty if the call has no such operand. ``like``: the tile's accumulator."""
    row = gl.arange(0, like.shape[0], gl.SliceLayout(1, like.type.layout))
    column = gl.arange(0, like.shape[1], gl.SliceLayout(0, like.type.layout))
    exists = column < shape.n - first_column
    scales = ()
    added = ()
    if shape.scales == "lines":
        # Buffer loads, because masked loads from pointers are branches, each with a wait.
        row_scale = a.scale + gl.to_tensor(first_row).to(gl.int64) * shape.a_scale_stride
        column_scale = b.scale + gl.to_tensor(first_column).to(gl.int64) * shape.b_scale_stride
        scales = (
            isa.buffer_load(row_scale, row * shape.a_scale_stride, mask=row < m - first_row),
            isa.buffer_load(column_scale, column * shape.b_scale_stride, mask=exists),
        )
    elif shape.scales == "nvfp4":
        scales = (gl.load(a.alpha),)
    if bias is not None:
        added = (isa.buffer_load(bias + first_column, column, mask=exists, other=0.0),)
    return scales, added


@gluon.jit
def store_tile(out, acc, factors, first_row, first_column, m, shape: gl.constexpr):
    """Epilogue: applies the scales of rows and columns, adds the bias, and stores the tile's rows and columns that exist.
    ``factors``: see `load_factors`."""
    layout: gl.constexpr = acc.type.layout
    row = gl.arange(0, acc.shape[0], gl.SliceLayout(1, layout))
    column = gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
    scales, added = factors
    if len(scales) == 1:
        acc = acc * scales[0]
    if len(scales) == 2:
        acc = acc * scales[0][:, None] * scales[1][None, :]
    if len(added) == 1:
        acc += added[0].to(gl.float32)[None, :]
    out += gl.to_tensor(first_row).to(gl.int64) * shape.out_stride + first_column
    inside = (row < m - first_row)[:, None] & (column < shape.n - first_column)[None, :]
    isa.buffer_store(acc.to(out.dtype.element_ty), out, row[:, None] * shape.out_stride + column[None, :], mask=inside)
