# mypy: ignore-errors
"""What the products of this folder share: layouts, loads of weights, the inner product. ``mxfp4_layout`` says how weights lie in
memory.

A wave multiplies a strip of weights, two tiles of 16 rows, by a tile of tokens: rows of the result are features, columns tokens.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna4
from triton.language.extra.hip import libdevice

from tokenspeed_kernel_amd.gfx950.common.softmax_device import LOG2_E, larger


@gluon.constexpr_function
def log2(power):
    return power.bit_length() - 1


@gluon.constexpr_function
def product_layout(warps):
    """Warps are divided along features. A lane holds four neighbouring features of one token."""
    return gl.amd.AMDMFMALayout(4, [16, 16, 128], False, [warps, 1])


@gluon.constexpr_function
def weight_layout(warps, steps=4):
    """uint8 [warps, step, g, r, b] as it lies in memory: 16 bytes a lane."""
    lanes = [[0, 0, 0, 1 << bit, 0] for bit in range(4)] + [[0, 0, 1 << bit, 0, 0] for bit in range(2)]
    registers = [[0, 0, 0, 0, 1 << bit] for bit in range(4)] + [[0, 1 << bit, 0, 0, 0] for bit in range(log2(steps))]
    divided = [[1 << bit, 0, 0, 0, 0] for bit in range(log2(warps))]
    return gl.DistributedLinearLayout(registers, lanes, divided, [], [warps, steps, 4, 16, 16])


@gluon.constexpr_function
def weight_scale_layout(warps):
    """int32 [warps, g, r] as it lies in memory: a word a lane, whose bytes are the scales of four steps."""
    lanes = [[0, 0, 1 << bit] for bit in range(4)] + [[0, 1 << bit, 0] for bit in range(2)]
    return gl.DistributedLinearLayout([], lanes, [[1 << bit, 0, 0] for bit in range(log2(warps))], [], [warps, 4, 16])


@gluon.constexpr_function
def token_scale_layout(columns, warps, steps=4):
    """uint8 [columns, g, step]: what a lane needs of the tokens' scales, a byte a step for each 16 columns."""
    lanes = [[1 << bit, 0, 0] for bit in range(4)] + [[0, 1 << bit, 0] for bit in range(2)]
    registers = [[0, 0, 1 << bit] for bit in range(log2(steps))] + [[16 << bit, 0, 0] for bit in range(log2(columns // 16))]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0, 0]] * log2(warps), [], [columns, 4, steps])


@gluon.constexpr_function
def axis_layout(layout, rank, axis):
    """The layout of one axis of another layout."""
    for other in reversed(range(rank)):
        if other != axis:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.aggregate
class Strips:
    """Where a workgroup's strips lie, one for each warp.

    Attributes:
        weight, scale: pointers to the first of them, scale to words of four steps.
        offsets: int32 [warps, step, g, r, b], of the first steps of the strips' first halves, as many as are loaded at once.
        block: int32 [1, step, g, 1, 1], which 32 elements of k a lane has, counted from the first step.
        scale_offsets: int32 [warps, g, r], in words.
        blocks: of 32 elements that k has, or int32 [warps, 1, 1, 1, 1]. What memory has beyond them is not read.
        scale_blocks: the same for scales, or int32 [warps, 1, 1].
    """

    weight: gl.tensor
    scale: gl.tensor
    offsets: gl.tensor
    block: gl.tensor
    scale_offsets: gl.tensor
    blocks: gl.tensor
    scale_blocks: gl.tensor


@gluon.aggregate
class Quad:
    """Four steps of strips: two tiles of weights, uint8 [16 * warps, 256], and the words of their scales, int32 [warps, g, r].

    Scales stay words until they are used: a loop that carries bytes takes words apart, and waits for them, as soon as it asks for
    them."""

    first: gl.tensor
    second: gl.tensor
    first_scale: gl.tensor
    second_scale: gl.tensor


@gluon.jit
def strips_at(weight, scale, expert, first, strips, k, warps: gl.constexpr, AT_ONCE: gl.constexpr = 4):
    """The strips of an expert from ``first`` on, of ``strips`` that it has; the last one again in place of those beyond it. So many
    steps are loaded at once."""
    layout: gl.constexpr = weight_layout(warps, AT_ONCE)
    scale_layout: gl.constexpr = weight_scale_layout(warps)
    steps = (k + 127) // 128
    quads = (k + 511) // 512
    place = expert.to(gl.int64) * strips + first
    warp = gl.minimum(gl.arange(0, warps, axis_layout(layout, 5, 0)), strips - 1 - first)
    step = gl.arange(0, AT_ONCE, axis_layout(layout, 5, 1))
    g = gl.arange(0, 4, axis_layout(layout, 5, 2))
    r = gl.arange(0, 16, axis_layout(layout, 5, 3))
    b = gl.arange(0, 16, axis_layout(layout, 5, 4))
    offsets = warp[:, None, None, None, None] * (steps * 2048) + step[None, :, None, None, None] * 2048
    offsets += g[None, None, :, None, None] * 256 + r[None, None, None, :, None] * 16 + b[None, None, None, None, :]
    scale_warp = gl.minimum(gl.arange(0, warps, axis_layout(scale_layout, 3, 0)), strips - 1 - first)
    scale_g = gl.arange(0, 4, axis_layout(scale_layout, 3, 1))
    scale_r = gl.arange(0, 16, axis_layout(scale_layout, 3, 2))
    scale_offsets = scale_warp[:, None, None] * (quads * 128) + scale_g[None, :, None] * 16 + scale_r[None, None, :]
    return Strips(
        weight + place * steps * 2048,
        scale + place * quads * 128,
        offsets,
        step[None, :, None, None, None] * 4 + g[None, None, :, None, None],
        scale_offsets,
        gl.to_tensor(k // 32),
        gl.to_tensor(k // 32),
    )


@gluon.aggregate
class HalfQuad:
    """Weights of four steps along k, uint8 [16 * warps, 256], and the words of their scales. A warp has 16 rows, half a strip."""

    first: gl.tensor
    first_scale: gl.tensor


@gluon.jit
def expert_of(ids, warp, num_experts, top_k: gl.constexpr, SPLIT: gl.constexpr):
    """The expert of a warp's slot, some expert where it has none."""
    expert = gl.load(ids + gl.minimum(warp // SPLIT, top_k - 1))
    return gl.where((expert >= 0) & (expert < num_experts), expert, 0)


@gluon.jit
def halves_at(weight, scale, ids, half, strips, k, num_experts, top_k: gl.constexpr, SPLIT: gl.constexpr, warps: gl.constexpr):
    """For each warp the half of a strip, ``half`` counted in 16 rows, of the expert that the warp's slot has. SPLIT neighbouring
    warps have a slot, and each of them a part of k. All weights together have less than 2^31 bytes."""
    layout: gl.constexpr = weight_layout(warps)
    scale_layout: gl.constexpr = weight_scale_layout(warps)
    steps = (k + 127) // 128
    quads = (k + 511) // 512
    part_quads = (quads + SPLIT - 1) // SPLIT
    warp = gl.arange(0, warps, axis_layout(layout, 5, 0))[:, None, None, None, None]
    part = warp % SPLIT
    expert = expert_of(ids, warp, num_experts, top_k, SPLIT)
    step = gl.arange(0, 4, axis_layout(layout, 5, 1))
    g = gl.arange(0, 4, axis_layout(layout, 5, 2))
    r = gl.arange(0, 16, axis_layout(layout, 5, 3))
    b = gl.arange(0, 16, axis_layout(layout, 5, 4))
    offsets = (expert * strips * steps + part * part_quads * 4) * 2048 + step[None, :, None, None, None] * 2048
    offsets += g[None, None, :, None, None] * 256 + r[None, None, None, :, None] * 16 + b[None, None, None, None, :]
    scale_warp = gl.arange(0, warps, axis_layout(scale_layout, 3, 0))[:, None, None]
    scale_part = scale_warp % SPLIT
    scale_expert = expert_of(ids, scale_warp, num_experts, top_k, SPLIT)
    scale_g = gl.arange(0, 4, axis_layout(scale_layout, 3, 1))
    scale_r = gl.arange(0, 16, axis_layout(scale_layout, 3, 2))
    scale_offsets = (scale_expert * strips * quads + scale_part * part_quads) * 128
    scale_offsets += scale_g[None, :, None] * 16 + scale_r[None, None, :]
    blocks = gl.to_tensor(k // 32)
    scale_blocks = blocks
    if SPLIT > 1:
        blocks = gl.minimum(k // 32 - part * part_quads * 16, part_quads * 16)
        scale_blocks = gl.minimum(k // 32 - scale_part * part_quads * 16, part_quads * 16)
    return Strips(
        weight + (half // 2 * steps * 2048 + half % 2 * 1024),
        scale + (half // 2 * quads * 128 + half % 2 * 64),
        offsets,
        step[None, :, None, None, None] * 4 + g[None, None, :, None, None],
        scale_offsets,
        blocks,
        scale_blocks,
    )


@gluon.jit
def load_weight(strips, step, HALF: gl.constexpr, warps: gl.constexpr):
    """The weights of one half from ``step`` on, uint8 [16 * warps, bytes]; zeros beyond k."""
    steps: gl.constexpr = strips.offsets.shape[1]
    tile: gl.constexpr = gl.DotOperandLayout(0, product_layout(warps), 16)
    exists = strips.block < strips.blocks - step * 4
    codes = cdna4.buffer_load(strips.weight + step * 2048 + HALF * 1024, strips.offsets, mask=exists)
    return gl.convert_layout(codes.permute(0, 3, 1, 2, 4).reshape(16 * warps, 64 * steps), tile, assert_trivial=True)


@gluon.jit
def load_scale(strips, quad, HALF: gl.constexpr):
    """The words of the scales of one half's four steps."""
    exists = gl.full(strips.scale_offsets.shape, quad * 16, gl.int32, strips.scale_offsets.type.layout) < strips.scale_blocks
    return cdna4.buffer_load(strips.scale + quad * 128 + HALF * 64, strips.scale_offsets, mask=exists)


@gluon.jit
def scales_of(words, FIRST: gl.constexpr, COUNT: gl.constexpr, warps: gl.constexpr):
    """The scales of two or four steps, from a step on, as the product wants them: uint8 [16 * warps, 4 * steps]."""
    tile: gl.constexpr = gl.DotOperandLayout(0, product_layout(warps), 16)
    layout: gl.constexpr = cdna4.get_mfma_scale_layout(tile, [16 * warps, 4 * COUNT])
    low = gl.join((words >> (8 * FIRST)).to(gl.uint8), (words >> (8 * FIRST + 8)).to(gl.uint8))
    if COUNT == 4:
        high = gl.join((words >> 16).to(gl.uint8), (words >> 24).to(gl.uint8))
        low = gl.join(low, high).permute(0, 1, 2, 4, 3).reshape(warps, 4, 16, 4)
    return gl.convert_layout(low.permute(0, 2, 3, 1).reshape(16 * warps, 4 * COUNT), layout, assert_trivial=True)


@gluon.jit
def load_half_quad(strips, quad, warps: gl.constexpr):
    return HalfQuad(load_weight(strips, quad * 4, 0, warps), load_scale(strips, quad, 0))


@gluon.jit
def load_quad(strips, quad, warps: gl.constexpr):
    return Quad(
        load_weight(strips, quad * 4, 0, warps),
        load_weight(strips, quad * 4, 1, warps),
        load_scale(strips, quad, 0),
        load_scale(strips, quad, 1),
    )


@gluon.jit
def add_products(acc, weight, words, codes, scales, encoding: gl.constexpr):
    """Adds the products of four steps of weights with every plane of tokens.

    Args:
        weight, words: of a `Quad`.
        codes: of each plane, [512, columns] (packed along k: [256, columns]).
        scales: of each plane the block scales, uint8 [columns, 16]; not used where a token has one scale.
    """
    weight_scale = scales_of(words, 0, 4, acc.shape[0] // 16)
    for plane in gl.static_range(encoding.planes):
        if encoding.scales != "block":
            acc = cdna4.mfma_scaled(weight, weight_scale, "e2m1", codes[plane], None, encoding.format, acc)
        else:
            acc = cdna4.mfma_scaled(weight, weight_scale, "e2m1", codes[plane], scales[plane], encoding.format, acc)
    return acc


@gluon.jit
def activated(gate, up, swiglu, LIMITED: gl.constexpr):
    """``(up + beta) * gate * sigmoid(alpha * gate)``."""
    if LIMITED:
        gate = -larger(-gate, -swiglu.limit)  # a NaN stays one
        up = larger(-larger(-up, -swiglu.limit), -swiglu.limit)
    return (up + swiglu.beta) * libdevice.fast_dividef(gate, 1.0 + gl.exp2(gate * (-LOG2_E * swiglu.alpha)))
