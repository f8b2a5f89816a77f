# mypy: ignore-errors
"""Exact passes (see ``exact_device``) after the mainloop of `wide_kernel`, which has no registers for them. The rows of activations
that the planes do not represent exactly are computed again, and their results are overwritten.

`wide_kernel` calls `compute_inexact` at its end if tiles have at most 32 columns. Otherwise `exact_kernel` is launched after it,
with the same grid. A workgroup without such rows exits after the test.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenspeed_kernel_amd.gfx950.moe.exact_device import add_exactly, passes_of, wave_uniform
from tokenspeed_kernel_amd.gfx950.moe.grouped_device import Tokens, add_bias, any_inexact, source_of, store_tile, tokens_of
from tokenspeed_kernel_amd.gfx950.moe.tile_device import accumulator_layout, strips_at

_PART = gl.constexpr(32)  # columns of a tile that are computed together


@gluon.jit(do_not_specialize=["rows"])
def exact_kernel(operands, rows, row_bytes, strips, k, groups, swiglu, shape: gl.constexpr):
    """Computes the rows of a tile of tokens that need exact passes, for several blocks of strips of weights. Grid and arguments:
    see `wide_kernel`."""
    strip = gl.program_id(0) % groups * (shape.blocks * gl.num_warps())
    tile = operands.tiles + gl.program_id(0) // groups * 4
    expert = gl.load(tile)
    if (expert >= 0) & (strip < strips):
        first_row = gl.load(tile + 1)
        count = gl.load(tile + 2)
        inexact = any_inexact(operands, rows, first_row, count, k, shape)
        compute_inexact(operands, expert, first_row, count, strip, strips, k, inexact, swiglu, shape)


@gluon.jit
def compute_inexact(operands, expert, first_row, count, strip, strips, k, inexact, swiglu, shape: gl.constexpr):
    """If ``inexact``, computes the rows that need exact passes among the ``count`` rows of a tile."""
    if inexact:
        for column in range(0, count, _PART):
            compute_part(operands, expert, first_row + column, count - column, strip, strips, k, swiglu, shape)


@gluon.jit
def compute_part(operands, expert, first_row, count, strip, strips, k, swiglu, shape: gl.constexpr):
    """Computes the rows that need exact passes among 32 rows of a tile, from ``first_row`` on (or among ``count`` rows, if fewer
    remain)."""
    warps: gl.constexpr = gl.num_warps()
    acc_layout: gl.constexpr = accumulator_layout(warps)
    quads = (k + 511) // 512
    source = source_of(operands, first_row, count, k, _PART, shape)
    passes = passes_of(source, quads, shape.encoding)
    if wave_uniform(gl.max(passes, axis=0)) > 0:
        tokens = tokens_of(operands, first_row, count, shape, _PART, gl.SliceLayout(0, acc_layout))
        inexact = gl.convert_layout(passes, gl.SliceLayout(0, acc_layout)) > 0
        tokens = Tokens(tokens.exists & inexact, tokens.out_row, tokens.scale, tokens.out_scale)
        for block in range(gl.minimum((strips - strip + warps - 1) // warps, shape.blocks)):
            own = strips_at(operands.weight, operands.weight_scale, expert, strip + block * warps, strips, k, warps)
            zeros = gl.zeros([16 * warps, _PART], gl.float32, acc_layout)
            first, second = add_exactly(zeros, zeros, own, source, passes, quads, 0, 2, shape.encoding)
            first, second = add_bias(first, second, operands, expert, strip + block * warps, strips, shape)
            store_tile(operands, first, second, strip + block * warps, strips, tokens, swiglu, shape)
