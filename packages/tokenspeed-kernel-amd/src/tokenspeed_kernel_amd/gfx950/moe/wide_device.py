# mypy: ignore-errors
"""Device code of `grouped` for the compute-bound case: a tile of up to 128 tokens of one expert's GEMM.

A *step* is 128 elements of k, a *quad* four steps. A *strip* is 32 rows of weights, see `mxfp4_layout`; it has two *halves*.

LDS holds two steps of all tokens; the next two steps are in flight through registers. A wave holds the weights of two steps in
registers; the weights of the next two steps are in flight. MMAs take a chunk of 32 tokens at a time, and skip chunks without
tokens. All warps share the tokens in LDS, and each warp multiplies them by its own strip: weights are the left operand (rows,
features), tokens the right one (columns). In shapes, ``g`` is a lane's group along k (0 to 3).

Rows that need exact passes are computed again by the code of ``grouped_exact_device``: at the kernel's end if ``shape.exact``,
otherwise in a launch of their own.

fp8 block-scaled weights: a scale block is one step along k. So each step's dot products start from 0, and are multiplied by the
block's scale when they are added to the accumulators. Chunks have 16 tokens, so that all registers fit.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenspeed_kernel_amd.gfx950 import instructions_device as isa
from tokenspeed_kernel_amd.gfx950.moe.grouped_device import (
    add_bias,
    any_inexact,
    copy_layout,
    row_of_column,
    store_tile,
    tokens_of,
)
from tokenspeed_kernel_amd.gfx950.moe.grouped_exact_device import compute_inexact
from tokenspeed_kernel_amd.gfx950.moe.tile_device import (
    accumulator_layout,
    factor_of,
    pieces_of_step,
    scales_of,
    strips_at,
    token_scale_layout,
    words_of_quad,
)
from tokenspeed_kernel_amd.gluon.layouts_device import axis_layout, log2


@gluon.constexpr_function
def chunk_of(dtype):
    """Returns the number of tokens of a chunk. With fp8 weights, whose MMAs have accumulators of their own and whose operands take
    twice as many registers, chunks of 32 tokens would spill registers."""
    return 16 if dtype == gl.float8e4nv else 32


@gluon.constexpr_function
def scale_copy_layout(warps):
    """Returns the register layout of two steps of the tokens' block scales on their way to LDS, uint8 [columns, g, step]: 2 bytes
    per lane."""
    return gl.BlockedLayout([1, 1, 2], [16, 4, 1], [warps, 1, 1], [2, 1, 0])


@gluon.aggregate
class Pair:
    """The weights of two consecutive steps of k, for one strip per warp: ``first`` has the first half of every warp's strip,
    ``second`` the second half, uint8 [16 * warps, 128] each (fp8: [16 * warps, 256])."""

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
        pieces, quads: number of 16-byte loads per lane, and of quads, along k.
        strips: number of the expert's strips.
    """

    weight: gl.tensor
    scale: gl.tensor
    offsets: gl.tensor
    block: gl.tensor
    scale_offsets: gl.tensor
    blocks: gl.tensor
    pieces: gl.tensor
    quads: gl.tensor
    strips: gl.tensor


@gluon.jit
def expert_at(weight, scale, expert, strips, k, warps: gl.constexpr):
    """Returns the `Expert` with index ``expert``. ``weight``, ``scale``: pointers to the weights and scales of all experts;
    ``strips``, ``k``: an expert's number of strips, and its inner dimension."""
    WORDS: gl.constexpr = words_of_quad(weight.dtype.element_ty)
    own = strips_at(weight, scale, expert, 0, gl.maximum(strips, warps), k, warps, 2)
    pieces = (k * pieces_of_step(weight.dtype.element_ty) + 127) // 128
    quads = (k + 511) // 512
    base = expert.to(gl.int64) * strips  # the expert's first strip, even if it has fewer strips than warps
    return Expert(
        weight + base * pieces * 2048,
        scale + base * quads * (2 * WORDS),
        own.offsets,
        own.block,
        own.scale_offsets,
        own.blocks,
        gl.to_tensor(pieces),
        gl.to_tensor(quads),
        gl.to_tensor(strips),
    )


@gluon.jit
def load_pair(own, first_strip, step, warps: gl.constexpr):
    """Loads the weights of two steps of k from step number ``step`` on, for one strip per warp; the first warp's strip is
    ``first_strip``. Strips beyond the expert's last strip, and elements beyond k, are zeros."""
    PIECES: gl.constexpr = pieces_of_step(own.weight.dtype.element_ty)
    layout: gl.constexpr = own.offsets.type.layout
    tile: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(warps), 16)
    size: gl.constexpr = 128 * PIECES
    warp = gl.arange(0, warps, axis_layout(layout, 5, 0))[:, None, None, None, None]
    exists = (own.block < own.blocks - step * (4 * PIECES)) & (warp < own.strips - first_strip)
    weight = own.weight + (first_strip * own.pieces + step * PIECES) * 2048
    first = isa.buffer_load(weight, own.offsets, mask=exists)
    second = isa.buffer_load(weight + 1024, own.offsets, mask=exists)
    return Pair(
        gl.convert_layout(first.permute(0, 3, 1, 2, 4).reshape(16 * warps, size), tile, assert_trivial=True),
        gl.convert_layout(second.permute(0, 3, 1, 2, 4).reshape(16 * warps, size), tile, assert_trivial=True),
    )


@gluon.aggregate
class StepScales:
    """The fp8 block scales of two steps, ``even`` and ``odd``, for both halves of the warps' strips: float32 [warps, 1] each.

    They are loaded one by one. If one load had several of them, LLVM would copy them to registers of their own at the end of each
    iteration, and so wait for the load.
    """

    first_even: gl.tensor
    first_odd: gl.tensor
    second_even: gl.tensor
    second_odd: gl.tensor


@gluon.constexpr_function
def warp_scale_layout(warps):
    """Returns the register layout of a value per warp, [warps, 1], which every lane of the warp holds."""
    divided = [[1 << bit, 0] for bit in range(log2(warps))]
    return gl.DistributedLinearLayout([], [[0, 0]] * 6, divided, [], [warps, 1])


@gluon.jit
def load_step_scales(own, first_strip, step, warps: gl.constexpr):
    """Loads the fp8 block scales of two steps of k from step number ``step`` on, an even number."""
    layout: gl.constexpr = warp_scale_layout(warps)
    warp = gl.arange(0, warps, gl.SliceLayout(1, layout))[:, None]
    offsets = warp * (own.quads * 8)
    exists = warp < own.strips - first_strip
    scale = own.scale + (first_strip * own.quads + step // 4) * 8 + step % 4
    return StepScales(
        isa.buffer_load(scale, offsets, mask=exists),
        isa.buffer_load(scale + 1, offsets, mask=exists),
        isa.buffer_load(scale + 4, offsets, mask=exists),
        isa.buffer_load(scale + 5, offsets, mask=exists),
    )


@gluon.jit
def load_words(own, first_strip, quad, warps: gl.constexpr):
    """Loads the scale `Words` of a quad, for one strip per warp; the first warp's strip is ``first_strip``. Strips beyond the
    expert's last strip get zeros."""
    WORDS: gl.constexpr = words_of_quad(own.weight.dtype.element_ty)
    layout: gl.constexpr = own.scale_offsets.type.layout
    warp = gl.arange(0, warps, axis_layout(layout, 3, 0))[:, None, None]
    exists = gl.zeros(own.scale_offsets.shape, gl.int32, layout) + warp < own.strips - first_strip
    scale = own.scale + (first_strip * own.quads + quad) * (2 * WORDS)
    return Words(
        isa.buffer_load(scale, own.scale_offsets, mask=exists), isa.buffer_load(scale + WORDS, own.scale_offsets, mask=exists)
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
    """Allocates the `Shared` LDS of two steps. ``size``: bytes of two steps of an encoded row. The padding after each row moves
    rows to different banks."""
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
    """Stores two steps of the tokens to LDS. ``arrived``: the result of `load_columns`."""
    for plane in gl.static_range(encoding.planes):
        shared.codes.index(plane).store(arrived[plane])
        if encoding.scales == "block":
            shared.scales.index(plane).store(arrived[encoding.planes + plane])


@gluon.jit
def read_part(shared, ITEM: gl.constexpr, PART: gl.constexpr, encoding: gl.constexpr):
    """Reads two steps of one plane of a chunk of PART tokens from LDS: the MMAs' right operand [256, PART] (packed e2m1: [128,
    PART]), and the block scales, uint8 [PART, 8]. Without block scales, returns the operand twice. ``ITEM`` is the chunk's index
    times the number of planes, plus the plane's index."""
    warps: gl.constexpr = gl.num_warps()
    operand: gl.constexpr = gl.DotOperandLayout(1, accumulator_layout(warps), 16)
    plane: gl.constexpr = ITEM % encoding.planes
    first: gl.constexpr = ITEM // encoding.planes * PART
    codes = shared.codes.index(plane).slice(first, PART, 0).permute([1, 0]).load(operand)
    scale = codes
    if encoding.scales == "block":
        layout: gl.constexpr = isa.mfma_scale_layout(operand, [PART, 8])
        found = shared.scales.index(plane).slice(first, PART, 0).load(token_scale_layout(PART, warps, 2))
        scale = gl.convert_layout(found.permute(0, 2, 1).reshape(PART, 8), layout, assert_trivial=True)
    return codes, scale


@gluon.jit
def multiply_part(first, second, pair, first_scale, second_scale, codes, scale, encoding: gl.constexpr):
    """Adds the dot products of two steps of mxfp4 weights (`Pair`) and of a chunk of tokens to the accumulators of the first and of
    the second half strips. ``codes``, ``scale``: from `read_part`."""
    if encoding.scales == "block":
        first = isa.mfma_scaled(pair.first, first_scale, "e2m1", codes, scale, encoding.format, first)
        second = isa.mfma_scaled(pair.second, second_scale, "e2m1", codes, scale, encoding.format, second)
    else:
        first = isa.mfma_scaled(pair.first, first_scale, "e2m1", codes, None, encoding.format, first)
        second = isa.mfma_scaled(pair.second, second_scale, "e2m1", codes, None, encoding.format, second)
    return first, second


@gluon.jit
def two_steps(tensor, AXIS: gl.constexpr, layout: gl.constexpr):
    """Splits an MMA operand of two steps, a tensor of two axes, into its steps. AXIS: the axis that is k."""
    if AXIS == 1:
        parts = tensor.reshape(tensor.shape[0], 2, tensor.shape[1] // 2).permute(0, 2, 1)
    else:
        parts = tensor.reshape(2, tensor.shape[0] // 2, tensor.shape[1]).permute(1, 2, 0)
    even, odd = gl.split(parts)
    return gl.convert_layout(even, layout, assert_trivial=True), gl.convert_layout(odd, layout, assert_trivial=True)


@gluon.jit
def fp8_dots(weight, codes, scale, encoding: gl.constexpr):
    """Returns the dot products of one step of fp8 weights and of tokens."""
    layout: gl.constexpr = weight.type.layout.parent
    dots = gl.zeros([weight.shape[0], codes.shape[1]], gl.float32, layout)
    if encoding.scales == "block":
        dots = isa.mfma_scaled(weight, None, "e4m3", codes, scale, encoding.format, dots)
    else:
        dots = isa.mfma_scaled(weight, None, "e4m3", codes, None, encoding.format, dots)
    return dots


@gluon.jit
def multiply_fp8_part(pair, codes, scale, encoding: gl.constexpr):
    """Returns the dot products of the tokens of a chunk and of two steps of fp8 weights: of the first half strips (even step, odd
    step), and of the second half strips."""
    layout: gl.constexpr = pair.first.type.layout.parent
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 16)
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 16)
    first, first_odd = two_steps(pair.first, 1, left)
    second, second_odd = two_steps(pair.second, 1, left)
    even, odd = two_steps(codes, 0, right)
    even_scale = scale
    odd_scale = scale
    if encoding.scales == "block":
        even_scale, odd_scale = two_steps(scale, 1, isa.mfma_scale_layout(right, [codes.shape[1], 4]))
    return (
        fp8_dots(first, even, even_scale, encoding),
        fp8_dots(first_odd, odd, odd_scale, encoding),
        fp8_dots(second, even, even_scale, encoding),
        fp8_dots(second_odd, odd, odd_scale, encoding),
    )


@gluon.jit
def multiply_fp8_pair(firsts, seconds, pair, scales, shared, other, arrived, count, encoding: gl.constexpr):
    """Does what `multiply_pair` does, for fp8 block-scaled weights and activations with one plane. A scale block is one step along
    k, so its scale multiplies the step's dot products. ``scales``: the two steps' `StepScales`."""
    warps: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = accumulator_layout(warps)
    PART: gl.constexpr = firsts[0].shape[1]
    parts: gl.constexpr = len(firsts)
    first_even = factor_of(scales.first_even, warps, layout)
    first_odd = factor_of(scales.first_odd, warps, layout)
    second_even = factor_of(scales.second_even, warps, layout)
    second_odd = factor_of(scales.second_odd, warps, layout)
    firsts_after = ()
    seconds_after = ()
    after, scale_after = read_part(shared, 0, PART, encoding)
    for part in gl.static_range(parts):
        first = firsts[part]
        second = seconds[part]
        codes = after
        scale = scale_after
        if part + 1 < parts:
            after, scale_after = read_part(shared, part + 1, PART, encoding)
        if part == 0 or count > part * PART:
            dots = multiply_fp8_part(pair, codes, scale, encoding)
            # All MFMAs first, because LLVM would otherwise wait for each MFMA's result: 51% of the MFMAs' peak instead of 56%.
            isa.sched_barrier()
            first += dots[0] * first_even
            second += dots[2] * second_even
            first += dots[1] * first_odd
            second += dots[3] * second_odd
        if part == 0:
            store_columns(other, arrived, encoding)
        firsts_after += (first,)
        seconds_after += (second,)
    return firsts_after, seconds_after


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
    PART: gl.constexpr = firsts[0].shape[1]
    parts: gl.constexpr = shape.columns // PART
    first_scale = scales_of(words.first, STEP, 2, warps)
    second_scale = scales_of(words.second, STEP, 2, warps)
    firsts_after = ()
    seconds_after = ()
    after, scale_after = read_part(shared, 0, PART, encoding)
    for part in gl.static_range(parts):
        first = firsts[part]
        second = seconds[part]
        for plane in gl.static_range(planes):
            codes = after
            scale = scale_after
            if part * planes + plane + 1 < parts * planes:
                after, scale_after = read_part(shared, part * planes + plane + 1, PART, encoding)
            if part == 0 or count > part * PART:
                first, second = multiply_part(first, second, pair, first_scale, second_scale, codes, scale, encoding)
            if part + plane == 0:
                store_columns(other, arrived, encoding)
        firsts_after += (first,)
        seconds_after += (second,)
    return firsts_after, seconds_after


@gluon.jit
def no_sums(columns: gl.constexpr, PART: gl.constexpr, warps: gl.constexpr):
    """Returns accumulators of zeros: a tuple with a float32 [16 * warps, PART] for each chunk of the tile's ``columns`` tokens."""
    sums = ()
    for _ in gl.static_range(columns // PART):
        sums += (gl.zeros([16 * warps, PART], gl.float32, accumulator_layout(warps)),)
    return sums


@gluon.jit
def store_parts(operands, firsts, seconds, expert, strip, strips, tokens, first_row, count, swiglu, shape: gl.constexpr):
    """Applies the tokens' scales, the bias and the activation to the accumulators of a block of strips, and stores each chunk of
    tokens. ``tokens``: the `Tokens` of each chunk; if empty, they are loaded here."""
    PART: gl.constexpr = firsts[0].shape[1]
    if len(tokens) == 0:
        # Opaque to LLVM, which would otherwise compute the addresses of all chunks before the loop, and spill them.
        first_row += gl.zeros([PART], gl.int32, gl.SliceLayout(0, firsts[0].type.layout))
        first_row = gl.inline_asm_elementwise("", "=v,0", [first_row], dtype=gl.int32, is_pure=False, pack=1)
    for part in gl.static_range(shape.columns // PART):
        if count > part * PART:
            first = firsts[part]
            second = seconds[part]
            if len(tokens) > 0:
                here = tokens[part]
            else:
                here = tokens_of_part(operands, first_row, count, part, PART, shape)
            if shape.encoding.scales != "block":
                first *= here.scale[None, :]
                second *= here.scale[None, :]
            first, second = add_bias(first, second, operands, expert, strip, strips, shape)
            store_tile(operands, first, second, strip, strips, here, swiglu, shape)


@gluon.jit
def tokens_of_part(operands, first_row, count, part: gl.constexpr, PART: gl.constexpr, shape: gl.constexpr):
    """Returns the `Tokens` of a chunk of a tile of ``count`` tokens. ``first_row``: the tile's first row, a scalar or [PART]."""
    here = first_row + gl.minimum(count - 1, part * PART)
    layout: gl.constexpr = gl.SliceLayout(0, accumulator_layout(gl.num_warps()))
    return tokens_of(operands, here, count - part * PART, shape, PART, layout)


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
    PART: gl.constexpr = chunk_of(operands.weight.dtype.element_ty)
    fp8: gl.constexpr = operands.weight.dtype.element_ty == gl.float8e4nv
    size: gl.constexpr = 128 if encoding.format == "e2m1" else 256
    tile = gl.program_id(0) // groups
    strip = gl.program_id(0) % groups * (shape.blocks * warps)
    expert = gl.load(operands.tiles + tile * 4)
    if (expert >= 0) & (strip < strips):
        first_row = gl.load(operands.tiles + tile * 4 + 1)
        count = gl.load(operands.tiles + tile * 4 + 2)
        quads = (k + 511) // 512
        first_strip = strip
        if shape.exact:
            inexact = any_inexact(operands, rows, first_row, count, k, shape)
        own = expert_at(operands.weight, operands.weight_scale, expert, strips, k, warps)
        tokens = ()
        if fp8:
            # Loads in the order of the loop. If ``arrived`` came last, LLVM would wait for all loads in flight in every iteration.
            columns = columns_at(operands, rows, row_bytes, first_row, count, k, size, shape)
            even = room_for_columns(operands.codes.dtype.element_ty, size, shape)
            odd = room_for_columns(operands.codes.dtype.element_ty, size, shape)
            store_columns(even, load_columns(columns, 0, 0, shape), encoding)
            low = load_pair(own, strip, 0, warps)
            words = load_step_scales(own, strip, 0, warps)
            arrived = load_columns(columns, 0, 1, shape)
            high = load_pair(own, strip, 2, warps)
            high_words = load_step_scales(own, strip, 2, warps)
        else:
            low = load_pair(own, strip, 0, warps)
            high = load_pair(own, strip, 2, warps)
            words = load_words(own, strip, 0, warps)
            columns = columns_at(operands, rows, row_bytes, first_row, count, k, size, shape)
            even = room_for_columns(operands.codes.dtype.element_ty, size, shape)
            odd = room_for_columns(operands.codes.dtype.element_ty, size, shape)
            store_columns(even, load_columns(columns, 0, 0, shape), encoding)
            arrived = load_columns(columns, 0, 1, shape)
            for part in gl.static_range(shape.columns // PART):
                tokens += (tokens_of_part(operands, first_row, count, part, PART, shape),)
        firsts = no_sums(shape.columns, PART, warps)
        seconds = no_sums(shape.columns, PART, warps)
        quad = quads * 0
        blocks = gl.minimum((strips - strip + warps - 1) // warps, shape.blocks)
        # Without this barrier, every iteration would have two barriers: one that only the first iteration needs, and one for all
        # other iterations.
        gl.barrier()
        for _ in range(blocks * quads):
            ends = quad + 1 == quads
            next_quad = gl.where(ends, 0, quad + 1)
            next_strip = gl.where(ends, strip + warps, strip)
            if fp8:
                firsts, seconds = multiply_fp8_pair(firsts, seconds, low, words, even, odd, arrived, count, encoding)
                arrived = load_columns(columns, next_quad, 0, shape)
                low = load_pair(own, next_strip, next_quad * 4, warps)
                words = load_step_scales(own, next_strip, next_quad * 4, warps)
                firsts, seconds = multiply_fp8_pair(firsts, seconds, high, high_words, odd, even, arrived, count, encoding)
                arrived = load_columns(columns, next_quad, 1, shape)
                high = load_pair(own, next_strip, next_quad * 4 + 2, warps)
                high_words = load_step_scales(own, next_strip, next_quad * 4 + 2, warps)
            else:
                next_words = load_words(own, next_strip, next_quad, warps)
                firsts, seconds = multiply_pair(firsts, seconds, low, words, even, odd, arrived, count, 0, shape)
                arrived = load_columns(columns, next_quad, 0, shape)
                low = load_pair(own, next_strip, next_quad * 4, warps)
                firsts, seconds = multiply_pair(firsts, seconds, high, words, odd, even, arrived, count, 2, shape)
                arrived = load_columns(columns, next_quad, 1, shape)
                high = load_pair(own, next_strip, next_quad * 4 + 2, warps)
                words = next_words
            if ends:
                store_parts(operands, firsts, seconds, expert, strip, strips, tokens, first_row, count, swiglu, shape)
                firsts = no_sums(shape.columns, PART, warps)
                seconds = no_sums(shape.columns, PART, warps)
            quad = next_quad
            strip = next_strip
        if shape.exact:
            compute_inexact(operands, expert, first_row, count, first_strip, strips, k, inexact, swiglu, shape)
