# mypy: ignore-errors
"""Device code of `grouped` for the compute-bound case: a tile of up to 128 tokens of one expert's GEMM.

A *step* is 128 elements of k, a *quad* four steps. A *strip* is 32 rows of weights, see `mxfp4_layout`; it has two *halves*.

LDS holds two steps of all tokens; the next two steps are in flight through registers. A wave holds the weights of two steps in
registers; the weights of the next two steps are in flight. MMAs take 32 tokens at a time, and skip chunks without tokens. In
shapes, ``g`` is a lane's group along k (0 to 3). Rows that need exact passes are left to ``grouped_exact_device``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenspeed_kernel_amd.gfx950 import instructions_device as isa
from tokenspeed_kernel_amd.gfx950.moe.grouped_device import add_bias, copy_layout, row_of_column, store_product, tokens_of
from tokenspeed_kernel_amd.gfx950.moe.tile_device import accumulator_layout, axis_layout, scales_of, strips_at, token_scale_layout

_PART = gl.constexpr(32)  # tokens of a chunk


@gluon.constexpr_function
def scale_copy_layout(warps):
    """Returns the register layout of two steps of the tokens' block scales on their way to LDS, uint8 [columns, g, step]: 2 bytes
    per lane."""
    return gl.BlockedLayout([1, 1, 2], [16, 4, 1], [warps, 1, 1], [2, 1, 0])


@gluon.aggregate
class Pair:
    """The weights of two consecutive steps of k, for one strip per warp: ``first`` has the first half of every warp's strip,
    ``second`` the second half, uint8 [16 * warps, 128] each."""

    first: gl.tensor
    second: gl.tensor


@gluon.aggregate
class Words:
    """The scale words of one quad, for both halves of the warps' strips."""

    first: gl.tensor
    second: gl.tensor


@gluon.aggregate
class Expert:
    """The addresses of an expert's weights. ``weight``, ``scale``, ``offsets``, ``block``, ``scale_offsets`` and ``blocks`` are as
    in `Strips`, for the expert's first strips.

    Attributes:
        steps, quads: number of steps and of quads along k.
        strips: number of the expert's strips.
    """

    weight: gl.tensor
    scale: gl.tensor
    offsets: gl.tensor
    block: gl.tensor
    scale_offsets: gl.tensor
    blocks: gl.tensor
    steps: gl.tensor
    quads: gl.tensor
    strips: gl.tensor


@gluon.jit
def expert_at(weight, scale, expert, strips, k, warps: gl.constexpr):
    own = strips_at(weight, scale, expert, 0, gl.maximum(strips, warps), k, warps, 2)
    steps = (k + 127) // 128
    quads = (k + 511) // 512
    base = expert.to(gl.int64) * strips  # the expert's first strip, even if it has fewer strips than warps
    return Expert(
        weight + base * steps * 2048,
        scale + base * quads * 128,
        own.offsets,
        own.block,
        own.scale_offsets,
        own.blocks,
        gl.to_tensor(steps),
        gl.to_tensor(quads),
        gl.to_tensor(strips),
    )


@gluon.jit
def load_pair(own, first_strip, step, warps: gl.constexpr):
    """Loads the weights of two steps of k from step number ``step`` on, for one strip per warp; the first warp's strip is
    ``first_strip``. Strips beyond the expert's last strip, and elements beyond k, are zeros."""
    layout: gl.constexpr = own.offsets.type.layout
    tile: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(warps), 16)
    warp = gl.arange(0, warps, axis_layout(layout, 5, 0))[:, None, None, None, None]
    exists = (own.block < own.blocks - step * 4) & (warp < own.strips - first_strip)
    weight = own.weight + (first_strip * own.steps + step) * 2048
    first = isa.buffer_load(weight, own.offsets, mask=exists)
    second = isa.buffer_load(weight + 1024, own.offsets, mask=exists)
    return Pair(
        gl.convert_layout(first.permute(0, 3, 1, 2, 4).reshape(16 * warps, 128), tile, assert_trivial=True),
        gl.convert_layout(second.permute(0, 3, 1, 2, 4).reshape(16 * warps, 128), tile, assert_trivial=True),
    )


@gluon.jit
def load_words(own, first_strip, quad, warps: gl.constexpr):
    layout: gl.constexpr = own.scale_offsets.type.layout
    warp = gl.arange(0, warps, axis_layout(layout, 3, 0))[:, None, None]
    exists = gl.zeros(own.scale_offsets.shape, gl.int32, layout) + warp < own.strips - first_strip
    scale = own.scale + (first_strip * own.quads + quad) * 128
    return Words(
        isa.buffer_load(scale, own.scale_offsets, mask=exists), isa.buffer_load(scale + 64, own.scale_offsets, mask=exists)
    )


@gluon.aggregate
class Columns:
    """The addresses of the encoded rows and block scales of a tile's tokens.

    Attributes:
        codes, scale: pointers to the encoded values and the scales of row 0 in the first plane.
        plane_codes, plane_scales: distances from one plane to the next, in elements of codes and of scale.
        row_bytes: bytes of an encoded row.
        offsets: int32 [columns, bytes of two steps], offsets of the first two steps' encoded values from ``codes``.
        place: int32 [1, bytes of two steps], the index of each byte of the first two steps within its row.
        scale_offsets: int32 [columns, g, 2], offsets of the first two steps' block scales from ``scale``.
    """

    codes: gl.tensor
    scale: gl.tensor
    plane_codes: gl.tensor
    plane_scales: gl.tensor
    row_bytes: gl.tensor
    offsets: gl.tensor
    place: gl.tensor
    scale_offsets: gl.tensor


@gluon.jit
def columns_at(operands, rows, row_bytes, first_row, count, k, size: gl.constexpr, shape: gl.constexpr):
    """Returns the `Columns` of a tile of tokens. ``size``: bytes of two steps of an encoded row. Other arguments: see
    `wide_kernel`."""
    copy: gl.constexpr = copy_layout(size, gl.num_warps())
    scale_copy: gl.constexpr = scale_copy_layout(gl.num_warps())
    row = row_of_column(operands.order, first_row, count, shape.top_k, shape.gated, shape.columns, gl.SliceLayout(1, copy))
    place = gl.arange(0, size, gl.SliceLayout(0, copy))[None, :]
    scale_row = row_of_column(
        operands.order, first_row, count, shape.top_k, shape.gated, shape.columns, axis_layout(scale_copy, 3, 0)
    )
    block = gl.arange(0, 4, axis_layout(scale_copy, 3, 1))[None, :, None] * 4
    row_scales = (k + 511) // 512 * 16
    return Columns(
        operands.codes,
        operands.scale,
        rows.to(gl.int64) * row_bytes,
        rows.to(gl.int64) * row_scales,
        gl.to_tensor(row_bytes),
        (row * row_bytes)[:, None] + place,
        place,
        (scale_row * row_scales)[:, None, None] + block + gl.arange(0, 2, axis_layout(scale_copy, 3, 2))[None, None, :],
    )


@gluon.aggregate
class Shared:
    """LDS for two steps of a tile of tokens: quantised values, [planes, columns, bytes], and block scales, uint8 [planes, columns,
    g, step]. Without block scales, ``scales`` is the same memory as ``codes``."""

    codes: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor


@gluon.jit
def room_for_columns(dtype: gl.constexpr, size: gl.constexpr, shape: gl.constexpr):
    storage: gl.constexpr = gl.PaddedSharedLayout.with_identity_for([[size, 32]], [shape.columns, size], [1, 0])
    codes = gl.allocate_shared_memory(dtype, [shape.encoding.planes, shape.columns, size], storage)
    scales = codes
    if shape.encoding.scales == "block":
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        scales = gl.allocate_shared_memory(gl.uint8, [shape.encoding.planes, shape.columns, 4, 2], plain)
    return Shared(codes, scales)


@gluon.jit
def load_columns(columns, quad, HALF: gl.constexpr, shape: gl.constexpr):
    """Loads the first (HALF = 0) or last (HALF = 1) two steps of a quad of all tokens. Returns a tuple: the encoded values of each
    plane, then the block scales of each plane. If rows are not padded, encoded values beyond a row's end are zeros."""
    size: gl.constexpr = columns.offsets.shape[1]
    exists = None
    if not shape.padded:
        exists, _ = gl.broadcast(columns.place < columns.row_bytes - (2 * quad + HALF) * size, columns.offsets)
    found = ()
    for plane in gl.static_range(shape.encoding.planes):
        codes = columns.codes + plane * columns.plane_codes + (2 * quad + HALF) * size
        found += (isa.buffer_load(codes, columns.offsets, mask=exists),)
    if shape.encoding.scales == "block":
        for plane in gl.static_range(shape.encoding.planes):
            scale = columns.scale + plane * columns.plane_scales + quad * 16 + HALF * 2
            found += (isa.buffer_load(scale, columns.scale_offsets),)
    return found


@gluon.jit
def store_columns(shared, arrived, encoding: gl.constexpr):
    for plane in gl.static_range(encoding.planes):
        shared.codes.index(plane).store(arrived[plane])
        if encoding.scales == "block":
            shared.scales.index(plane).store(arrived[encoding.planes + plane])


@gluon.jit
def read_part(shared, ITEM: gl.constexpr, encoding: gl.constexpr):
    """Reads two steps of one plane of a chunk of 32 tokens from LDS: the MMAs' right operand [256, 32] (packed e2m1: [128, 32]),
    and the block scales, uint8 [32, 8]. Without block scales, returns the operand twice. ``ITEM`` is the chunk's index times the
    number of planes, plus the plane's index."""
    warps: gl.constexpr = gl.num_warps()
    operand: gl.constexpr = gl.DotOperandLayout(1, accumulator_layout(warps), 16)
    plane: gl.constexpr = ITEM % encoding.planes
    first: gl.constexpr = ITEM // encoding.planes * _PART
    codes = shared.codes.index(plane).slice(first, _PART, 0).permute([1, 0]).load(operand)
    scale = codes
    if encoding.scales == "block":
        layout: gl.constexpr = isa.mfma_scale_layout(operand, [_PART, 8])
        found = shared.scales.index(plane).slice(first, _PART, 0).load(token_scale_layout(_PART, warps, 2))
        scale = gl.convert_layout(found.permute(0, 2, 1).reshape(_PART, 8), layout, assert_trivial=True)
    return codes, scale


@gluon.jit
def multiply_part(first, second, pair, first_scale, second_scale, codes, scale, encoding: gl.constexpr):
    if encoding.scales == "block":
        first = isa.mfma_scaled(pair.first, first_scale, "e2m1", codes, scale, encoding.format, first)
        second = isa.mfma_scaled(pair.second, second_scale, "e2m1", codes, scale, encoding.format, second)
    else:
        first = isa.mfma_scaled(pair.first, first_scale, "e2m1", codes, None, encoding.format, first)
        second = isa.mfma_scaled(pair.second, second_scale, "e2m1", codes, None, encoding.format, second)
    return first, second


@gluon.jit
def multiply_pair(firsts, seconds, pair, words, shared, other, arrived, count, STEP: gl.constexpr, shape: gl.constexpr):
    """Issues the MFMAs of two steps of k: all weights by all tokens, added to the accumulators. A chunk of tokens is read
    from LDS during the MMAs of the previous chunk.

    Args:
        firsts, seconds: tuples of accumulators of the first and second half strips, an entry per chunk of 32 tokens.
        pair, words: the weights of the two steps, and the scale words of their quad.
        STEP: index of the first of the two steps within the quad, 0 or 2.
        shared: the LDS buffer that holds the tokens' two steps.
        other, arrived: the LDS buffer for the next two steps, and the tokens of those steps in registers, from `load_columns`. This
            function stores ``arrived`` to ``other``.
        count: number of tokens in the tile.
    """
    warps: gl.constexpr = gl.num_warps()
    encoding: gl.constexpr = shape.encoding
    planes: gl.constexpr = encoding.planes
    parts: gl.constexpr = shape.columns // _PART
    first_scale = scales_of(words.first, STEP, 2, warps)
    second_scale = scales_of(words.second, STEP, 2, warps)
    firsts_after = ()
    seconds_after = ()
    after, scale_after = read_part(shared, 0, encoding)
    for part in gl.static_range(parts):
        first = firsts[part]
        second = seconds[part]
        for plane in gl.static_range(planes):
            codes = after
            scale = scale_after
            if part * planes + plane + 1 < parts * planes:
                after, scale_after = read_part(shared, part * planes + plane + 1, encoding)
            if part == 0 or count > part * _PART:
                first, second = multiply_part(first, second, pair, first_scale, second_scale, codes, scale, encoding)
            if part + plane == 0:
                store_columns(other, arrived, encoding)
        firsts_after += (first,)
        seconds_after += (second,)
    return firsts_after, seconds_after


@gluon.jit
def no_sums(parts: gl.constexpr, warps: gl.constexpr):
    sums = ()
    for _ in gl.static_range(parts):
        sums += (gl.zeros([16 * warps, _PART], gl.float32, accumulator_layout(warps)),)
    return sums


@gluon.jit
def store_parts(operands, firsts, seconds, expert, strip, strips, tokens, count, swiglu, shape: gl.constexpr):
    """Applies the tokens' scales, the bias and the activation to the accumulators of a block of strips, and stores each chunk of
    tokens."""
    for part in gl.static_range(shape.columns // _PART):
        if count > part * _PART:
            first = firsts[part]
            second = seconds[part]
            if shape.encoding.scales != "block":
                first *= tokens[part].scale[None, :]
                second *= tokens[part].scale[None, :]
            first, second = add_bias(first, second, operands, expert, strip, strips, shape)
            store_product(operands, first, second, strip, strips, tokens[part], swiglu, shape)


@gluon.jit(do_not_specialize=["rows"])
def wide_kernel(operands, rows, row_bytes, strips, k, groups, swiglu, shape: gl.constexpr):
    """Computes a tile of tokens for several blocks of strips of weights (a block has one strip per warp) of one grouped GEMM.
    Workgroups are numbered by tile of tokens and by group of blocks; the group varies fastest.

    The pipeline runs across blocks of strips: during the epilogue of one block, the weights of the next are in flight.

    Args:
        groups: number of groups of blocks of strips. A group has ``shape.blocks`` blocks.
        others: see `grouped_kernel`.
    """
    warps: gl.constexpr = gl.num_warps()
    encoding: gl.constexpr = shape.encoding
    parts: gl.constexpr = shape.columns // _PART
    size: gl.constexpr = 128 if encoding.format == "e2m1" else 256
    tile = gl.program_id(0) // groups
    strip = gl.program_id(0) % groups * (shape.blocks * warps)
    expert = gl.load(operands.tiles + tile * 4)
    if (expert >= 0) & (strip < strips):
        first_row = gl.load(operands.tiles + tile * 4 + 1)
        count = gl.load(operands.tiles + tile * 4 + 2)
        quads = (k + 511) // 512
        own = expert_at(operands.weight, operands.weight_scale, expert, strips, k, warps)
        low = load_pair(own, strip, 0, warps)
        high = load_pair(own, strip, 2, warps)
        words = load_words(own, strip, 0, warps)
        columns = columns_at(operands, rows, row_bytes, first_row, count, k, size, shape)
        even = room_for_columns(operands.codes.dtype.element_ty, size, shape)
        odd = room_for_columns(operands.codes.dtype.element_ty, size, shape)
        store_columns(even, load_columns(columns, 0, 0, shape), encoding)
        arrived = load_columns(columns, 0, 1, shape)
        tokens = ()
        for part in gl.static_range(parts):
            here = first_row + gl.minimum(count - 1, part * _PART)
            tokens += (tokens_of(operands, here, count - part * _PART, shape, _PART, gl.SliceLayout(0, accumulator_layout(warps))),)
        firsts = no_sums(parts, warps)
        seconds = no_sums(parts, warps)
        quad = quads * 0
        blocks = gl.minimum((strips - strip + warps - 1) // warps, shape.blocks)
        # Without this barrier, every iteration would have two barriers: one that only the first iteration needs, and one for all
        # other iterations.
        gl.barrier()
        for _ in range(blocks * quads):
            ends = quad + 1 == quads
            next_quad = gl.where(ends, 0, quad + 1)
            next_strip = gl.where(ends, strip + warps, strip)
            next_words = load_words(own, next_strip, next_quad, warps)
            firsts, seconds = multiply_pair(firsts, seconds, low, words, even, odd, arrived, count, 0, shape)
            arrived = load_columns(columns, next_quad, 0, shape)
            low = load_pair(own, next_strip, next_quad * 4, warps)
            firsts, seconds = multiply_pair(firsts, seconds, high, words, odd, even, arrived, count, 2, shape)
            arrived = load_columns(columns, next_quad, 1, shape)
            high = load_pair(own, next_strip, next_quad * 4 + 2, warps)
            words = next_words
            if ends:
                store_parts(operands, firsts, seconds, expert, strip, strips, tokens, count, swiglu, shape)
                firsts = no_sums(parts, warps)
                seconds = no_sums(parts, warps)
            quad = next_quad
            strip = next_strip
