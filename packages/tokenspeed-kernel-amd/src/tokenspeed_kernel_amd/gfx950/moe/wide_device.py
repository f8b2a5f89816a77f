# mypy: ignore-errors
"""Device code of `grouped` where matrix instructions are what takes time: a tile of up to 128 tokens of one expert's product.

Codes of two steps of all tokens are in LDS, those of the next two on their way through registers. A wave has the weights of two
steps in registers, and those of the next two are on their way. Tokens are multiplied in parts of 32, and parts that have none are
left out.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna4

from tokenspeed_kernel_amd.gfx950.moe.grouped_device import copy_layout, row_of_column, store_product, tokens_of
from tokenspeed_kernel_amd.gfx950.moe.tile_device import axis_layout, product_layout, scales_of, strips_at

_PART = gl.constexpr(32)


@gluon.aggregate
class Pair:
    """Two steps of both halves of strips: uint8 [16 * warps, 128]."""

    first: gl.tensor
    second: gl.tensor


@gluon.aggregate
class Words:
    """The words of the scales of four steps, of both halves of strips."""

    first: gl.tensor
    second: gl.tensor


@gluon.aggregate
class Expert:
    """An expert's strips in memory; see `Strips` for what the names mean. ``steps`` and ``quads``: of k;
    ``strips``: how many it has."""

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
    base = expert.to(gl.int64) * strips  # of fewer strips than warps, too
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
    """Two steps of a block of strips; zeros in place of strips that do not exist and beyond k."""
    layout: gl.constexpr = own.offsets.type.layout
    tile: gl.constexpr = gl.DotOperandLayout(0, product_layout(warps), 16)
    warp = gl.arange(0, warps, axis_layout(layout, 5, 0))[:, None, None, None, None]
    exists = (own.block < own.blocks - step * 4) & (warp < own.strips - first_strip)
    weight = own.weight + (first_strip * own.steps + step) * 2048
    first = cdna4.buffer_load(weight, own.offsets, mask=exists)
    second = cdna4.buffer_load(weight + 1024, own.offsets, mask=exists)
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
        cdna4.buffer_load(scale, own.scale_offsets, mask=exists), cdna4.buffer_load(scale + 64, own.scale_offsets, mask=exists)
    )


@gluon.jit
def load_columns(codes, offsets, place, first, row_bytes, PADDED: gl.constexpr):
    """Codes of two steps of all tokens from byte ``first`` of their rows on; zeros beyond a row, where rows are not padded."""
    exists = None
    if not PADDED:
        exists, _ = gl.broadcast(place < row_bytes - first, offsets)
    return cdna4.buffer_load(codes + first, offsets, mask=exists)


@gluon.jit
def read_part(shared, PART: gl.constexpr, layout: gl.constexpr):
    """Two steps of 32 tokens as the right operand, [256, 32]."""
    return shared.slice(PART * _PART, _PART, 0).permute([1, 0]).load(layout)


@gluon.jit
def multiply_part(first, second, pair, first_scale, second_scale, codes):
    first = cdna4.mfma_scaled(pair.first, first_scale, "e2m1", codes, None, "e4m3", first)
    second = cdna4.mfma_scaled(pair.second, second_scale, "e2m1", codes, None, "e4m3", second)
    return first, second


@gluon.jit
def multiply_pair(firsts, seconds, pair, words, shared, other, arrived, count, STEP: gl.constexpr, warps: gl.constexpr):
    """Adds the products of two steps, STEP and the next one of the four that words are for, with the codes in ``shared``. Each part
    is read while the one before it is multiplied. Meanwhile the codes that arrived are put into the other half of LDS."""
    layout: gl.constexpr = gl.DotOperandLayout(1, product_layout(warps), 16)
    parts: gl.constexpr = shared.shape[0] // _PART
    first_scale = scales_of(words.first, STEP, 2, warps)
    second_scale = scales_of(words.second, STEP, 2, warps)
    a0, a1, a2, a3 = firsts
    b0, b1, b2, b3 = seconds
    codes = read_part(shared, 0, layout)
    after = codes
    if parts > 1:
        after = read_part(shared, 1, layout)
    a0, b0 = multiply_part(a0, b0, pair, first_scale, second_scale, codes)
    other.store(arrived)
    if parts > 1:
        codes = after
        if parts > 2:
            after = read_part(shared, 2, layout)
        if count > _PART:
            a1, b1 = multiply_part(a1, b1, pair, first_scale, second_scale, codes)
    if parts > 2:
        codes = after
        after = read_part(shared, 3, layout)
        if count > 2 * _PART:
            a2, b2 = multiply_part(a2, b2, pair, first_scale, second_scale, codes)
        if count > 3 * _PART:
            a3, b3 = multiply_part(a3, b3, pair, first_scale, second_scale, after)
    return (a0, a1, a2, a3), (b0, b1, b2, b3)


@gluon.jit(do_not_specialize=["rows"])
def wide_kernel(operands, rows, row_bytes, strips, k, groups, swiglu, shape: gl.constexpr):
    """A tile of tokens of one product, by several blocks of strips: program (tile of tokens, group of blocks), the latter fastest.

    The blocks follow one another without a break: while one ends, the weights of the next are on their way. Tokens have one e4m3
    plane, and one scale each or together.

    Args:
        groups: of blocks of strips; a group has ``shape.blocks`` of them.
        others: see `grouped_kernel`.
    """
    COLUMNS: gl.constexpr = shape.columns
    warps: gl.constexpr = gl.num_warps()
    product: gl.constexpr = product_layout(warps)
    copy: gl.constexpr = copy_layout(256, warps)
    PADDED: gl.constexpr = shape.padded
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
        row = row_of_column(operands.order, first_row, count, shape.top_k, shape.gated, COLUMNS, gl.SliceLayout(1, copy))
        place = gl.arange(0, 256, gl.SliceLayout(0, copy))[None, :]
        offsets = (row * row_bytes)[:, None] + place
        storage: gl.constexpr = gl.PaddedSharedLayout.with_identity_for([[256, 32]], [COLUMNS, 256], [1, 0])
        even = gl.allocate_shared_memory(gl.float8e4nv, [COLUMNS, 256], storage)
        odd = gl.allocate_shared_memory(gl.float8e4nv, [COLUMNS, 256], storage)
        even.store(load_columns(operands.codes, offsets, place, 0, row_bytes, PADDED))
        arrived = load_columns(operands.codes, offsets, place, 256, row_bytes, PADDED)
        by_column: gl.constexpr = gl.SliceLayout(0, product)
        t0 = tokens_of(operands, first_row, count, shape, _PART, by_column)
        t1 = t0
        t2 = t0
        t3 = t0
        if COLUMNS > _PART:
            t1 = tokens_of(operands, first_row + gl.minimum(count - 1, _PART), count - _PART, shape, _PART, by_column)
        if COLUMNS > 2 * _PART:
            t2 = tokens_of(operands, first_row + gl.minimum(count - 1, 2 * _PART), count - 2 * _PART, shape, _PART, by_column)
            t3 = tokens_of(operands, first_row + gl.minimum(count - 1, 3 * _PART), count - 3 * _PART, shape, _PART, by_column)
        tokens = (t0, t1, t2, t3)
        zero = gl.zeros([16 * warps, _PART], gl.float32, product)
        firsts = (zero, zero, zero, zero)
        seconds = (zero, zero, zero, zero)
        quad = quads * 0
        blocks = gl.minimum((strips - strip + warps - 1) // warps, shape.blocks)
        gl.barrier()  # see `grouped_kernel`
        for _ in range(blocks * quads):
            ends = quad + 1 == quads
            next_quad = gl.where(ends, 0, quad + 1)
            next_strip = gl.where(ends, strip + warps, strip)
            next_words = load_words(own, next_strip, next_quad, warps)
            firsts, seconds = multiply_pair(firsts, seconds, low, words, even, odd, arrived, count, 0, warps)
            arrived = load_columns(operands.codes, offsets, place, next_quad * 512, row_bytes, PADDED)
            low = load_pair(own, next_strip, next_quad * 4, warps)
            firsts, seconds = multiply_pair(firsts, seconds, high, words, odd, even, arrived, count, 2, warps)
            arrived = load_columns(operands.codes, offsets, place, next_quad * 512 + 256, row_bytes, PADDED)
            high = load_pair(own, next_strip, next_quad * 4 + 2, warps)
            words = next_words
            if ends:
                for part in gl.static_range(COLUMNS // _PART):
                    if count > part * _PART:
                        store_product(
                            operands, firsts[part], seconds[part], expert, strip, strips, tokens[part], swiglu, shape
                        )  # fmt: skip
                zero = gl.zeros([16 * warps, _PART], gl.float32, product)
                firsts = (zero, zero, zero, zero)
                seconds = (zero, zero, zero, zero)
            quad = next_quad
            strip = next_strip
