# mypy: ignore-errors
"""Device code of `grouped`: a tile of one expert's GEMM, and the sum over the slots of a token.

A *step* is 128 elements of k, a *quad* four steps. A *strip* is 32 rows of weights, see `mxfp4_layout`; it has two *halves*.

Weights are the left operand of the MMAs (16 x 16 x 128), and encoded tokens the right one. Each wave loads its own strip from
global memory to registers. All waves share the tokens, which go through registers to padded LDS. The loop is unrolled twice: the
weights of an *even* quad are multiplied while those of the *odd* quad are in flight, and vice versa. `wide_device` has the loop for
larger tiles of tokens.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenspeed_kernel_amd.gfx950 import instructions_device as isa
from tokenspeed_kernel_amd.gfx950.moe.encode_device import ENOUGH
from tokenspeed_kernel_amd.gfx950.moe.exact_device import Source, add_exactly, passes_of, source_layout
from tokenspeed_kernel_amd.gfx950.moe.tile_device import (
    accumulator_layout,
    activated,
    add_mfmas,
    load_biases,
    load_quad,
    strips_at,
    token_scale_layout,
)
from tokenspeed_kernel_amd.gluon.layouts_device import axis_layout


@gluon.constexpr_function
def copy_layout(row_bytes, warps):
    """Returns the register layout of encoded rows on their way from global memory to LDS, uint8 [columns, row_bytes]: 16 bytes per
    lane."""
    lanes = row_bytes // 16
    return gl.BlockedLayout([1, 16], [64 // lanes, lanes], [warps, 1], [1, 0])


@gluon.aggregate
class Columns:
    """The addresses of the encoded rows and block scales of a tile's columns.

    Attributes:
        codes, scale: pointers to the encoded values and the scales of row 0 in the first plane.
        plane_codes, plane_scales: distances from one plane to the next, in elements of codes and of scale.
        offsets: int32 [columns, bytes per quad], offsets of the first quad's encoded values from ``codes``.
        place: int32 [1, bytes per quad], the index of each byte of the first quad within its row.
        row_bytes: bytes of an encoded row.
        scale_offsets: int32 [columns, 4, 4], offsets of the first quad's block scales from ``scale``.
        quads: number of quads of a row.
    """

    codes: gl.tensor
    scale: gl.tensor
    plane_codes: gl.tensor
    plane_scales: gl.tensor
    offsets: gl.tensor
    place: gl.tensor
    row_bytes: gl.tensor
    scale_offsets: gl.tensor
    quads: gl.tensor


@gluon.jit
def row_of_column(order, first, count, top_k, GATED: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr):
    """Returns the row of the encoded activations that each column of a tile reads. In the gate/up GEMM, this is the pair's token.
    In the down projection, it is the pair's index in ``order``. Columns from ``count`` on read the last valid row.
    """
    row = first + gl.minimum(gl.arange(0, COLUMNS, layout), count - 1)
    return gl.load(order + row) // top_k if GATED else row


@gluon.jit
def load_codes(columns, quad, encoding: gl.constexpr):
    """Loads the encoded values of one quad: a tuple with an entry per plane, with zeros beyond a row's end."""
    size: gl.constexpr = columns.offsets.shape[1]
    exists, _ = gl.broadcast(columns.place < columns.row_bytes - quad * size, columns.offsets)
    codes = ()
    for plane in gl.static_range(encoding.planes):
        codes += (isa.buffer_load(columns.codes + plane * columns.plane_codes + quad * size, columns.offsets, mask=exists),)
    return codes


@gluon.jit
def store_codes(shared, codes, encoding: gl.constexpr):
    """Stores a quad's encoded values to LDS. ``codes``: from `load_codes`."""
    for plane in gl.static_range(encoding.planes):
        shared.index(plane).store(codes[plane])


@gluon.jit
def load_scales(columns, quad, encoding: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr):
    """Loads the block scales of one quad: a tuple with a uint8 [columns, 16] per plane."""
    exists = gl.full(columns.scale_offsets.shape, quad, gl.int32, columns.scale_offsets.type.layout) < columns.quads
    scales = ()
    for plane in gl.static_range(encoding.planes):
        found = isa.buffer_load(columns.scale + plane * columns.plane_scales + quad * 16, columns.scale_offsets, mask=exists)
        scales += (gl.convert_layout(found.permute(0, 2, 1).reshape(COLUMNS, 16), layout, assert_trivial=True),)
    return scales


@gluon.jit
def read_codes(shared, encoding: gl.constexpr, operand: gl.constexpr):
    """Reads a quad's encoded values from LDS as right operands of MMAs: a tuple with an entry per plane."""
    codes = ()
    for plane in gl.static_range(encoding.planes):
        codes += (shared.index(plane).permute([1, 0]).load(operand),)
    return codes


@gluon.jit
def any_inexact(operands, rows, first_row, count, k, shape: gl.constexpr):
    """Returns whether some row of a tile may take exact passes, by the test `held_at_least`. The result is the same in all waves.
    ``rows``: number of encoded rows per plane."""
    if shape.encoding.planes > 1 and not shape.encoding.exact:
        lanes: gl.constexpr = max(shape.columns, 64)
        layout: gl.constexpr = gl.BlockedLayout([lanes // 64], [64], [gl.num_warps()], [0])  # each wave has all rows
        row = row_of_column(operands.order, first_row, count, shape.top_k, shape.gated, lanes, layout)
        # The results of the test follow the block scales of all planes, one byte per row.
        held = operands.scale + shape.encoding.planes * (rows.to(gl.int64) * ((k + 511) // 512 * 16))
        return gl.min(gl.load(held + row).to(gl.int32), axis=0) < ENOUGH
    return gl.to_tensor(shape.encoding.planes > 1)


@gluon.jit
def source_of(operands, first_row, count, k, COLUMNS: gl.constexpr, shape: gl.constexpr):
    """Returns the `Source` of a tile's columns: the addresses of their unencoded rows."""
    layout: gl.constexpr = source_layout(gl.num_warps())
    row = row_of_column(operands.order, first_row, count, shape.top_k, shape.gated, COLUMNS, layout)
    return Source(operands.x, row.to(gl.int64) * operands.x_stride, gl.zeros([COLUMNS], gl.int32, layout) + k)


@gluon.jit
def add_rows_exactly(first, second, own, operands, first_row, count, k, inexact, shape: gl.constexpr):
    """If ``inexact``, adds the exact passes of a tile's rows to the accumulators ``first`` and ``second``: the dot products of the
    residuals that the encoding leaves (see ``exact_device``)."""
    if inexact:
        source = source_of(operands, first_row, count, k, shape.columns, shape)
        quads = (k + 511) // 512
        first, second = add_exactly(
            first, second, own, source, passes_of(source, quads, shape.encoding), quads, 1, 2, shape.encoding
        )
    return first, second


@gluon.jit(do_not_specialize=["rows"])
def grouped_kernel(operands, rows, row_bytes, strips, k, blocks, swiglu, shape: gl.constexpr):
    """Computes a tile of one grouped GEMM. Workgroups are numbered by tile of tokens and by block of strips of weights; the block
    varies fastest.

    Args:
        operands, swiglu, shape: the tensors, the activation's parameters and the constants of the GEMM, see `grouped`.
        rows: number of encoded rows per plane.
        row_bytes: bytes of an encoded row.
        strips: number of strips of an expert's weights.
        k: the inner dimension.
        blocks: number of blocks into which an expert's strips are divided, one strip per warp.
    """
    COLUMNS: gl.constexpr = shape.columns
    warps: gl.constexpr = gl.num_warps()
    encoding: gl.constexpr = shape.encoding
    acc_layout: gl.constexpr = accumulator_layout(warps)
    operand: gl.constexpr = gl.DotOperandLayout(1, acc_layout, 16)
    size: gl.constexpr = 256 if encoding.format == "e2m1" else 512  # bytes of one quad of an encoded row
    copy: gl.constexpr = copy_layout(size, warps)
    scale_copy: gl.constexpr = token_scale_layout(COLUMNS, warps)
    token_scale: gl.constexpr = isa.mfma_scale_layout(operand, [COLUMNS, 16])
    tile = gl.program_id(0) // blocks
    block = gl.program_id(0) % blocks
    expert = gl.load(operands.tiles + tile * 4)
    first_strip = block * warps
    if (expert >= 0) & (first_strip < strips):
        first_row = gl.load(operands.tiles + tile * 4 + 1)
        count = gl.load(operands.tiles + tile * 4 + 2)
        own = strips_at(operands.weight, operands.weight_scale, expert, first_strip, strips, k, warps)
        quads = (k + 511) // 512
        even = load_quad(own, 0, warps)
        odd = load_quad(own, 1, warps)
        row = row_of_column(operands.order, first_row, count, shape.top_k, shape.gated, COLUMNS, gl.SliceLayout(1, copy))
        scale_row = row_of_column(
            operands.order, first_row, count, shape.top_k, shape.gated, COLUMNS, axis_layout(scale_copy, 3, 0)
        )
        scale_offsets = (scale_row * (quads * 16))[:, None, None] + gl.arange(0, 4, axis_layout(scale_copy, 3, 1))[
            None, :, None
        ] * 4
        place = gl.arange(0, size, gl.SliceLayout(0, copy))[None, :]
        inexact = any_inexact(operands, rows, first_row, count, k, shape)
        columns = Columns(
            operands.codes,
            operands.scale,
            rows.to(gl.int64) * row_bytes,
            rows.to(gl.int64) * quads * 16,
            (row * row_bytes)[:, None] + place,
            place,
            gl.to_tensor(row_bytes),
            scale_offsets + gl.arange(0, 4, axis_layout(scale_copy, 3, 2))[None, None, :],
            quads,
        )
        storage: gl.constexpr = gl.PaddedSharedLayout.with_identity_for([[size, 32]], [COLUMNS, size], [1, 0])
        even_shared = gl.allocate_shared_memory(operands.codes.dtype.element_ty, [encoding.planes, COLUMNS, size], storage)
        odd_shared = gl.allocate_shared_memory(operands.codes.dtype.element_ty, [encoding.planes, COLUMNS, size], storage)
        even_codes = load_codes(columns, 0, encoding)
        odd_codes = load_codes(columns, 1, encoding)
        even_scales = None
        odd_scales = None
        if encoding.scales == "block":
            even_scales = load_scales(columns, 0, encoding, COLUMNS, token_scale)
            odd_scales = load_scales(columns, 1, encoding, COLUMNS, token_scale)
        tokens = tokens_of(operands, first_row, count, shape, COLUMNS, gl.SliceLayout(0, acc_layout))
        first = gl.zeros([16 * warps, COLUMNS], gl.float32, acc_layout)
        second = gl.zeros([16 * warps, COLUMNS], gl.float32, acc_layout)
        store_codes(even_shared, even_codes, encoding)
        even_codes = load_codes(columns, 2, encoding)
        # Without this barrier, every iteration would have two barriers: one that only the first iteration needs, and one for all
        # other iterations.
        gl.barrier()
        for quad in range(0, quads, 2):
            store_codes(odd_shared, odd_codes, encoding)
            odd_codes = load_codes(columns, quad + 3, encoding)
            codes = read_codes(even_shared, encoding, operand)
            first = add_mfmas(first, even.first, even.first_scale, codes, even_scales, encoding)
            second = add_mfmas(second, even.second, even.second_scale, codes, even_scales, encoding)
            even = load_quad(own, quad + 2, warps)
            if encoding.scales == "block":
                even_scales = load_scales(columns, quad + 2, encoding, COLUMNS, token_scale)
            store_codes(even_shared, even_codes, encoding)
            even_codes = load_codes(columns, quad + 4, encoding)
            codes = read_codes(odd_shared, encoding, operand)
            first = add_mfmas(first, odd.first, odd.first_scale, codes, odd_scales, encoding)
            second = add_mfmas(second, odd.second, odd.second_scale, codes, odd_scales, encoding)
            odd = load_quad(own, quad + 3, warps)
            if encoding.scales == "block":
                odd_scales = load_scales(columns, quad + 3, encoding, COLUMNS, token_scale)
        if encoding.planes > 1:
            first, second = add_rows_exactly(first, second, own, operands, first_row, count, k, inexact, shape)
        if encoding.scales != "block":
            first *= tokens.scale[None, :]
            second *= tokens.scale[None, :]
        first, second = add_bias(first, second, operands, expert, first_strip, strips, shape)
        store_tile(operands, first, second, first_strip, strips, tokens, swiglu, shape)


@gluon.aggregate
class Tokens:
    """The columns of a tile in the epilogue.

    Attributes:
        exists: [columns], whether the column has a (token, expert) pair.
        out_row: int32 [columns], the row of ``out`` that the column's result goes to.
        scale: float32 [columns], the activations' scale; 1 with block scales.
        out_scale: reciprocal of the result's static scale; 1 without a static scale.
    """

    exists: gl.tensor
    out_row: gl.tensor
    scale: gl.tensor
    out_scale: gl.tensor


@gluon.jit
def tokens_of(operands, first_row, count, shape: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr):
    """Returns the `Tokens` of a tile with ``count`` pairs. The first pair has index ``first_row`` in ``operands.order``."""
    column = gl.arange(0, COLUMNS, layout)
    row = first_row + gl.minimum(column, gl.maximum(count, 1) - 1)
    pair = gl.load(operands.order + row)
    scale = gl.full([COLUMNS], 1.0, gl.float32, layout)
    if shape.encoding.scales == "token":
        scale = gl.load(operands.scale + (pair // shape.top_k if shape.gated else row))
    if shape.encoding.scales == "tensor":
        scale = scale * gl.load(operands.scale)
    out_scale = gl.to_tensor(1.0)
    if shape.gated and shape.encoding.scales == "tensor":
        out_scale = 1.0 / gl.load(operands.out_static)
    return Tokens(column < count, row if shape.gated else pair, scale, out_scale)


@gluon.jit
def add_bias(first, second, operands, expert, first_strip, strips, shape: gl.constexpr):
    """Adds the biases to the accumulators of a tile."""
    if shape.bias:
        first_bias, second_bias = load_biases(operands.bias, expert, first_strip, strips, gl.SliceLayout(1, first.type.layout))
        first += first_bias[:, None]
        second += second_bias[:, None]
    return first, second


@gluon.jit
def store_tile(operands, first, second, first_strip, strips, tokens, swiglu, shape: gl.constexpr):
    """Stores a tile's accumulators: in the gate/up GEMM after the activation, in the down projection directly."""
    by_row: gl.constexpr = gl.SliceLayout(1, first.type.layout)
    lane = gl.arange(0, first.shape[0], by_row)
    strip = first_strip + lane // 16
    inside = strip < strips
    row = strip * 32 + lane % 16  # row in the first half of the strip
    dtype: gl.constexpr = operands.out.dtype.element_ty
    stored = inside[:, None] & tokens.exists[None, :]
    if shape.gated:
        at = (strip * 16 + lane % 16)[:, None] + (tokens.out_row * strips * 16)[None, :]
        result = activated(first, second, swiglu, shape.limited)
        if shape.encoding.scales == "tensor":
            result *= tokens.out_scale
        isa.buffer_store(result.to(dtype), operands.out, at, mask=stored)
    else:
        at = row[:, None] + (tokens.out_row * strips * 32)[None, :]
        isa.buffer_store(first.to(dtype), operands.out, at, mask=stored)
        isa.buffer_store(second.to(dtype), operands.out, at + 16, mask=stored)


@gluon.jit
def combine_kernel(slots, weights, ids, out, hidden, out_stride, num_experts, TOP_K: gl.constexpr, BLOCK: gl.constexpr):
    """Computes ``out[token] = sum of weights[token, slot] * slots[token, slot]``, in the order of slots. A workgroup computes one
    block of features of one token."""
    layout: gl.constexpr = gl.BlockedLayout([BLOCK // (64 * gl.num_warps())], [64], [gl.num_warps()], [0])
    token = gl.program_id(0).to(gl.int64)
    feature = gl.program_id(1) * BLOCK + gl.arange(0, BLOCK, layout)
    total = gl.zeros([BLOCK], gl.float32, layout)
    for slot in gl.static_range(TOP_K):
        expert = gl.load(ids + token * TOP_K + slot)
        # The result row of a slot without an expert was not written, and may hold NaN. The slot's weight may also be NaN.
        present = (expert >= 0) & (expert < num_experts)
        weight = gl.load(weights + token * TOP_K + slot)
        known = feature < gl.where(present, hidden, 0)
        value = isa.buffer_load(slots + (token * TOP_K + slot) * hidden, feature, mask=known, other=0.0)
        total += gl.where(present, weight * value.to(gl.float32), 0.0)
    isa.buffer_store(total.to(out.dtype.element_ty), out + token * out_stride, feature, mask=feature < hidden)
