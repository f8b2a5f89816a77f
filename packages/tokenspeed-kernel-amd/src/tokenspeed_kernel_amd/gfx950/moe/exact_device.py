# mypy: ignore-errors
"""Exact dot products for some rows of activations, in several passes. These are the rows in which one pass represents too few
elements exactly. A *step* is 128 elements of k, a *quad* four steps.

The planes are the e4m3 values whose sum represents an element (see `encoding`). A row takes several passes if, in one of its
blocks, one pass does not represent more than a quarter of the nonzero elements exactly. With ``encoding.exact``, one such element
suffices. Each pass encodes the residual that the preceding passes leave, with its own block scales. The planes of all passes sum to
the row's elements. A pass uses the MMAs and accumulators of the mainloop. The extra passes load weights and activations again and
are not pipelined, because models rarely have such rows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenspeed_kernel_amd.gfx950 import instructions_device as isa
from tokenspeed_kernel_amd.gfx950.moe.encode_device import (
    block_exponents,
    encode_by_block,
    magnitudes,
    places,
    residual_of,
    smallest_exponent,
)
from tokenspeed_kernel_amd.gfx950.moe.tile_device import (
    accumulator_layout,
    add_mfmas,
    load_half_quad,
    load_quad,
    token_scale_layout,
)
from tokenspeed_kernel_amd.gluon.layouts_device import axis_layout, log2, plain


@gluon.constexpr_function
def step_layout(warps):
    """Returns the register layout of one step (128 elements of k) of a tile's rows, [columns, 4, 32]: 8 adjacent elements per
    lane."""
    return gl.BlockedLayout([1, 1, 8], [4, 4, 4], [warps, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def source_layout(warps):
    """Returns the register layout of the vectors of a `Source`, [columns]."""
    return axis_layout(step_layout(warps), 3, 0)


@gluon.constexpr_function
def quad_layout(columns, warps):
    """Returns the register layout of a quad's encoded values, [columns, step, 128], that matches the right operand of MMAs. All
    warps hold the same values."""
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 0, 64], [0, 1, 0], [0, 2, 0]]
    registers += [[16 << bit, 0, 0] for bit in range(log2(columns // 16))]
    lanes = [[1 << bit, 0, 0] for bit in range(4)] + [[0, 0, 16], [0, 0, 32]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0, 0]] * log2(warps), [], [columns, 4, 128])


@gluon.aggregate
class Source:
    """Unencoded activations, one row for each column of the MMAs' right operand.

    Attributes:
        x: pointer to the tensor of activations.
        begins: int64 [columns], offset of the first element of each column's row from ``x``, in elements.
        length: int32 [columns], number of elements of each column's row.
    """

    x: gl.tensor
    begins: gl.tensor
    length: gl.tensor


@gluon.aggregate
class Shared:
    """One quad of all encoded rows in LDS, plane after plane.

    Attributes:
        codes: e4m3 [planes * 4 steps, columns, 128], the encoded values.
        scales: uint8 [planes * 4 steps, columns, 4], the block scales.
    """

    codes: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor


@gluon.jit
def wave_uniform(value):
    """Moves a scalar, equal in all lanes, to an SGPR. Branches on an SGPR need no EXEC mask."""
    layout: gl.constexpr = gl.BlockedLayout([1], [64], [gl.num_warps()], [0])
    return gl.max(gl.full([64], 0, gl.int32, layout) + value, axis=0)


@gluon.jit
def load_step(source, length, step):
    """Loads the 128 elements of k step ``step`` from all rows of ``source`` as float32 [columns, 4, 32], with zeros from element
    ``length`` (int32 [columns]) of a row on."""
    at = places(step * 128, 128, step_layout(gl.num_warps()))
    pointers = source.x + (source.begins[:, None, None] + at)
    return gl.load(pointers, mask=at < length[:, None, None], other=0.0).to(gl.float32)


@gluon.jit
def passes_for(values, encoding: gl.constexpr):
    """Returns the number of passes that represent each block exactly, int32 [rows, blocks], or 0 if one pass suffices. One pass
    suffices if it represents at least three quarters of the nonzero elements exactly, or all of them if ``encoding.exact``.

    For an amax from 2^7 to 2^8, the lowest bit that pass ``p`` (counted from 1) represents is 2^(-14 - 22 (p - 1)) with two planes,
    and 2^(-19 - 27 (p - 1)) with three. A bfloat16 element has 8 significant bits, a float32 element 24.
    """
    two: gl.constexpr = encoding.planes == 2
    exponents, finite = block_exponents(values, encoding)
    finite &= exponents > smallest_exponent(encoding)
    found = magnitudes(values)
    # One pass represents 8 bits of a bfloat16, and 12 bits of other dtypes.
    small = gl.sum((found >> 23 < (exponents - (7 if two else 8))[:, :, None]).to(gl.int32), axis=2)
    zero = gl.sum((found == 0).to(gl.int32), axis=2)
    octaves = exponents + 7 - (gl.min(gl.where(found == 0, 0x7FFFFFFF, found), axis=2) >> 23)
    passes = 1 + (octaves + 7) // 22 if two else 1 + (octaves + 23) // 27
    lost = small - zero if encoding.exact else 4 * small - 3 * zero - 32
    return gl.where(finite & (lost > 0), gl.maximum(passes, 2), 0)


@gluon.jit
def store_step(shared, step, values, encoding: gl.constexpr):
    """Encodes step number ``step`` (0 to 3) of a quad, float32 [columns, 4, 32], and stores it to LDS."""
    codes, exponents = encode_by_block(values, encoding)
    for plane in gl.static_range(encoding.planes):
        stored = codes[plane].reshape(values.shape[0], 128).to(gl.float8e4nv, bitcast=True)
        shared.codes.index(4 * plane + step).store(stored)
        shared.scales.index(4 * plane + step).store(exponents[plane])


@gluon.jit
def read_plane(shared, plane):
    """Reads a quad of one plane from LDS as the right operand of MMAs, [512, columns], and its block scales, uint8 [columns,
    16]."""
    warps: gl.constexpr = gl.num_warps()
    planes: gl.constexpr = shared.codes.shape[0] // 4
    COLUMNS: gl.constexpr = shared.codes.shape[1]
    operand: gl.constexpr = gl.DotOperandLayout(1, accumulator_layout(warps), 16)
    codes = shared.codes.reinterpret(gl.float8e4nv, [planes, 4, COLUMNS, 128], plain(3)).index(plane).permute([1, 0, 2])
    codes = codes.load(quad_layout(COLUMNS, warps)).reshape(COLUMNS, 512)
    scales = shared.scales.reinterpret(gl.uint8, [planes, 4, COLUMNS, 4], plain(3)).index(plane).permute([1, 2, 0])
    scales = scales.load(token_scale_layout(COLUMNS, warps)).permute(0, 2, 1).reshape(COLUMNS, 16)
    return (
        gl.convert_layout(codes.permute(1, 0), operand, assert_trivial=True),
        gl.convert_layout(scales, isa.mfma_scale_layout(operand, [COLUMNS, 16]), assert_trivial=True),
    )


@gluon.jit
def passes_of(source, quads, encoding: gl.constexpr):
    """Returns the number of passes that each row takes, int32 [columns]; 0 if one pass suffices. ``quads``: number of quads per
    row."""
    passes = source.length * 0
    for step in range(4 * quads):
        passes = gl.maximum(passes, gl.max(passes_for(load_step(source, source.length, step), encoding), axis=1))
    return passes


@gluon.jit
def add_exactly(first, second, own, source, passes, quads, FIRST: gl.constexpr, HALVES: gl.constexpr, encoding: gl.constexpr):
    """Adds the dot products of pass number FIRST (counted from 0) and of all later passes to a tile's accumulators, in the columns
    whose rows take several passes.

    Args:
        first, second: accumulators of the first and the second halves of strips of weights.
        own: the warps' `Strips` of weights.
        source: `Source` of the tile's columns.
        passes: int32 [columns], number of passes of each row, from `passes_of`.
        quads: number of quads per row.
        HALVES: 2, or 1 if ``own`` has only first halves. With 1, ``second`` is returned unchanged.
    """
    COLUMNS: gl.constexpr = first.shape[1]
    length = gl.where(passes > 0, source.length, 0)
    shared = Shared(
        gl.allocate_shared_memory(gl.float8e4nv, [4 * encoding.planes, COLUMNS, 128], plain(2)),
        gl.allocate_shared_memory(gl.uint8, [4 * encoding.planes, COLUMNS, 4], plain(2)),
    )
    for number in range(FIRST, wave_uniform(gl.max(passes, axis=0))):
        for quad in range(quads):
            gl.barrier()  # waits until all warps have read the planes of the previous quad
            for step in range(4):
                values = load_step(source, length, 4 * quad + step)
                for _ in range(number):
                    values = residual_of(values, encoding)
                store_step(shared, step, values, encoding)
            weights = load_quad(own, quad, gl.num_warps()) if HALVES == 2 else load_half_quad(own, quad, gl.num_warps())
            for plane in gl.static_range(encoding.planes):
                gl.barrier()  # otherwise the compiler reads all planes first, which takes more registers than the mainloop
                codes, scales = read_plane(shared, plane)
                first = add_mfmas(first, weights.first, weights.first_scale, (codes,), (scales,), encoding)
                if HALVES == 2:
                    second = add_mfmas(second, weights.second, weights.second_scale, (codes,), (scales,), encoding)
    return first, second
