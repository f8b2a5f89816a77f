# mypy: ignore-errors
"""Code that the MoE GEMMs of this folder share: layouts, loads of weights, MMAs. ``mxfp4_layout`` and ``fp8_block_layout`` define
the layouts of weights in memory, and the words *strip*, *half*, *step* (128 elements of k) and *quad* (four steps).

fp8 block-scaled weights are float8e4nv, mxfp4 weights are uint8. A step of fp8 weights takes twice as many loads of 16 bytes per
lane as a step of mxfp4 weights.

A wave computes a strip of weights, that is, two tiles of 16 rows. All waves share a tile of tokens. Rows of the accumulator are
features, and columns are tokens. In shapes, ``g`` is a lane's group along k (0 to 3), and ``r`` its row in a half strip (0 to 15):
lane ``16 g + r``. ``b`` is a byte of the 16 bytes that a lane loads at once.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.hip import libdevice

from tokenspeed_kernel_amd.gfx950 import instructions_device as isa
from tokenspeed_kernel_amd.gluon.layouts_device import axis_layout, log2
from tokenspeed_kernel_amd.gluon.softmax_device import LOG2_E, larger


@gluon.constexpr_function
def accumulator_layout(warps):
    """Returns the register layout of accumulators [features, tokens]. Features are divided among warps. A lane holds four
    neighbouring features of one token."""
    return isa.mfma_layout([16, 16, 128], False, [warps, 1])


@gluon.constexpr_function
def pieces_of_step(dtype):
    """Returns the number of 16-byte loads per lane that one step of a half strip of weights takes."""
    return 2 if dtype == gl.float8e4nv else 1


@gluon.constexpr_function
def words_of_quad(dtype):
    """Returns the number of 32-bit words with the scales of a quad of a half strip: mxfp4 has one per lane, fp8 one per step."""
    return 4 if dtype == gl.float8e4nv else 64


@gluon.constexpr_function
def weight_layout(warps, steps=4):
    """Returns the register layout of weights in the order of memory, [warps, 16-byte loads, g, r, b]: 16 bytes per lane and load.
    ``g`` is the lane's group along k, ``r`` its row in the half strip, ``b`` a byte."""
    lanes = [[0, 0, 0, 1 << bit, 0] for bit in range(4)] + [[0, 0, 1 << bit, 0, 0] for bit in range(2)]
    registers = [[0, 0, 0, 0, 1 << bit] for bit in range(4)] + [[0, 1 << bit, 0, 0, 0] for bit in range(log2(steps))]
    divided = [[1 << bit, 0, 0, 0, 0] for bit in range(log2(warps))]
    return gl.DistributedLinearLayout(registers, lanes, divided, [], [warps, steps, 4, 16, 16])


@gluon.constexpr_function
def weight_scale_layout(warps):
    """Returns the register layout of mxfp4 scales in the order of memory, int32 [warps, g, r]: a word per lane, whose bytes are the
    scales of a quad's four steps."""
    lanes = [[0, 0, 1 << bit] for bit in range(4)] + [[0, 1 << bit, 0] for bit in range(2)]
    return gl.DistributedLinearLayout([], lanes, [[1 << bit, 0, 0] for bit in range(log2(warps))], [], [warps, 4, 16])


@gluon.constexpr_function
def block_scale_layout(warps):
    """Returns the register layout of fp8 block scales, float32 [warps, 1, step]: every lane of a wave holds the scales of a quad's
    four steps."""
    divided = [[1 << bit, 0, 0] for bit in range(log2(warps))]
    return gl.DistributedLinearLayout([[0, 0, 1], [0, 0, 2]], [[0, 0, 0]] * 6, divided, [], [warps, 1, 4])


@gluon.constexpr_function
def rows_layout(warps):
    """Returns the register layout of a vector with a value per row of an accumulator, [warps, 16]."""
    lanes = [[0, 0]] * 4 + [[0, 4], [0, 8]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2]], lanes, [[1 << bit, 0] for bit in range(log2(warps))], [], [warps, 16])


@gluon.constexpr_function
def token_scale_layout(columns, warps, steps=4):
    """Returns the register layout of the tokens' block scales, uint8 [columns, 4 blocks of a step, steps]: for every 16 columns, a
    lane holds one byte per step."""
    lanes = [[1 << bit, 0, 0] for bit in range(4)] + [[0, 1 << bit, 0] for bit in range(2)]
    registers = [[0, 0, 1 << bit] for bit in range(log2(steps))] + [[16 << bit, 0, 0] for bit in range(log2(columns // 16))]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0, 0]] * log2(warps), [], [columns, 4, steps])


@gluon.aggregate
class Strips:
    """The addresses of a workgroup's strips of weights, one strip per warp.

    Attributes:
        weight, scale: pointers to the weights and the scales of the first warp's strip.
        offsets: int32 [warps, loads, g, r, b], byte offsets from ``weight`` of the first loads of each warp's first half strip.
            ``loads`` is the number of loads that are issued at once.
        block: int32 [1, loads, g, 1, 1], the index within its row of the 16-byte block that a lane loads.
        scale_offsets: int32 [warps, g, r] (mxfp4) or [warps, 1, step] (fp8), offsets of the first quad's scales from ``scale``, in
            words.
        blocks: number of 16-byte blocks per row, a scalar or int32 [warps, 1, 1, 1, 1]. Memory beyond these blocks is not read.
        scale_blocks: number of 32-element blocks along k, a scalar or int32 [warps, 1, 1].
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
    """One quad of both halves of the warps' strips, in registers.

    With mxfp4, weights are uint8 [16 * warps, 256], and scales are words, int32 [warps, g, r]. With fp8, weights are [16 * warps,
    512] and scales float32 [warps, 1, step]. mxfp4 scales stay words until they are used. If a loop carried bytes instead, it would
    split words into bytes right after loading them, and so wait for the loads.
    """

    first: gl.tensor
    second: gl.tensor
    first_scale: gl.tensor
    second_scale: gl.tensor


@gluon.jit
def strips_at(weight, scale, expert, first, strips, k, warps: gl.constexpr, AT_ONCE: gl.constexpr = 4):
    """Returns the `Strips` of an expert that a workgroup computes; the first warp has strip number ``first``.

    The expert has ``strips`` strips. Warps beyond the last strip read the last strip instead. ``AT_ONCE``: number of steps that are
    loaded at once.
    """
    PIECES: gl.constexpr = pieces_of_step(weight.dtype.element_ty)
    WORDS: gl.constexpr = words_of_quad(weight.dtype.element_ty)
    layout: gl.constexpr = weight_layout(warps, PIECES * AT_ONCE)
    pieces = (k * PIECES + 127) // 128
    quads = (k + 511) // 512
    place = expert.to(gl.int64) * strips + first
    warp = gl.minimum(gl.arange(0, warps, axis_layout(layout, 5, 0)), strips - 1 - first)
    step = gl.arange(0, PIECES * AT_ONCE, axis_layout(layout, 5, 1))
    g = gl.arange(0, 4, axis_layout(layout, 5, 2))
    r = gl.arange(0, 16, axis_layout(layout, 5, 3))
    b = gl.arange(0, 16, axis_layout(layout, 5, 4))
    offsets = warp[:, None, None, None, None] * (pieces * 2048) + step[None, :, None, None, None] * 2048
    offsets += g[None, None, :, None, None] * 256 + r[None, None, None, :, None] * 16 + b[None, None, None, None, :]
    warp, word = scale_places(weight.dtype.element_ty, warps)
    return Strips(
        weight + place * pieces * 2048,
        scale + place * quads * (2 * WORDS),
        offsets,
        step[None, :, None, None, None] * 4 + g[None, None, :, None, None],
        gl.minimum(warp, strips - 1 - first) * (quads * 2 * WORDS) + word,
        gl.to_tensor(PIECES * (k // 32)),
        gl.to_tensor(k // 32),
    )


@gluon.jit
def scale_places(dtype: gl.constexpr, warps: gl.constexpr):
    """Returns indices for the scale words of a quad: the warp, int32 [warps, 1, 1], and the word within the quad of a half strip,
    int32 [1, g, r] (mxfp4) or [1, 1, step] (fp8)."""
    layout: gl.constexpr = block_scale_layout(warps) if dtype == gl.float8e4nv else weight_scale_layout(warps)
    warp = gl.arange(0, warps, axis_layout(layout, 3, 0))[:, None, None]
    if dtype == gl.float8e4nv:
        word = gl.arange(0, 4, axis_layout(layout, 3, 2))[None, None, :]
    else:
        g = gl.arange(0, 4, axis_layout(layout, 3, 1))[None, :, None]
        word = g * 16 + gl.arange(0, 16, axis_layout(layout, 3, 2))[None, None, :]
    return warp, word


@gluon.aggregate
class HalfQuad:
    """One quad of weights in registers, uint8 [16 * warps, 256] (fp8: [16 * warps, 512]), and the words of their scales. A warp has
    16 rows, half a strip."""

    first: gl.tensor
    first_scale: gl.tensor


@gluon.jit
def expert_of(ids, warp, num_experts, top_k: gl.constexpr, SPLIT: gl.constexpr):
    """Returns the expert of each warp's slot; expert 0 if the slot has no valid expert."""
    expert = gl.load(ids + gl.minimum(warp // SPLIT, top_k - 1))
    return gl.where((expert >= 0) & (expert < num_experts), expert, 0)


@gluon.jit
def halves_at(weight, scale, ids, half, strips, k, num_experts, top_k: gl.constexpr, SPLIT: gl.constexpr, warps: gl.constexpr):
    """Returns `Strips` that address half a strip per warp: 16 rows of the expert of the warp's slot. The rows begin at row 16 *
    ``half``. SPLIT neighbouring warps handle one slot, each with its own split of k. All weights together must have less than 2^31
    bytes."""
    PIECES: gl.constexpr = pieces_of_step(weight.dtype.element_ty)
    WORDS: gl.constexpr = words_of_quad(weight.dtype.element_ty)
    layout: gl.constexpr = weight_layout(warps, 4 * PIECES)
    pieces = (k * PIECES + 127) // 128
    quads = (k + 511) // 512
    part_quads = (quads + SPLIT - 1) // SPLIT
    warp = gl.arange(0, warps, axis_layout(layout, 5, 0))[:, None, None, None, None]
    part = warp % SPLIT
    expert = expert_of(ids, warp, num_experts, top_k, SPLIT)
    step = gl.arange(0, 4 * PIECES, axis_layout(layout, 5, 1))
    g = gl.arange(0, 4, axis_layout(layout, 5, 2))
    r = gl.arange(0, 16, axis_layout(layout, 5, 3))
    b = gl.arange(0, 16, axis_layout(layout, 5, 4))
    offsets = (expert * strips * pieces + part * part_quads * (4 * PIECES)) * 2048 + step[None, :, None, None, None] * 2048
    offsets += g[None, None, :, None, None] * 256 + r[None, None, None, :, None] * 16 + b[None, None, None, None, :]
    scale_warp, word = scale_places(weight.dtype.element_ty, warps)
    scale_part = scale_warp % SPLIT
    scale_expert = expert_of(ids, scale_warp, num_experts, top_k, SPLIT)
    blocks = gl.to_tensor(PIECES * (k // 32))
    scale_blocks = gl.to_tensor(k // 32)
    if SPLIT > 1:
        blocks = PIECES * gl.minimum(k // 32 - part * part_quads * 16, part_quads * 16)
        scale_blocks = gl.minimum(k // 32 - scale_part * part_quads * 16, part_quads * 16)
    return Strips(
        weight + (half // 2 * pieces * 2048 + half % 2 * 1024),
        scale + (half // 2 * quads * (2 * WORDS) + half % 2 * WORDS),
        offsets,
        step[None, :, None, None, None] * 4 + g[None, None, :, None, None],
        (scale_expert * strips * quads + scale_part * part_quads) * (2 * WORDS) + word,
        blocks,
        scale_blocks,
    )


@gluon.jit
def load_weight(strips, step, HALF: gl.constexpr, warps: gl.constexpr):
    """Loads the weights of half HALF (0 or 1) of each warp's strip, beginning with step number ``step``, [16 * warps, bytes].
    Elements beyond k are zeros."""
    PIECES: gl.constexpr = pieces_of_step(strips.weight.dtype.element_ty)
    count: gl.constexpr = strips.offsets.shape[1]
    tile: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(warps), 16)
    exists = strips.block < strips.blocks - step * (4 * PIECES)
    codes = isa.buffer_load(strips.weight + step * (2048 * PIECES) + HALF * 1024, strips.offsets, mask=exists)
    return gl.convert_layout(codes.permute(0, 3, 1, 2, 4).reshape(16 * warps, 64 * count), tile, assert_trivial=True)


@gluon.jit
def load_scale(strips, quad, HALF: gl.constexpr):
    """Loads the scale words of one quad of half HALF (0 or 1) of each warp's strip."""
    WORDS: gl.constexpr = words_of_quad(strips.weight.dtype.element_ty)
    exists = gl.full(strips.scale_offsets.shape, quad * 16, gl.int32, strips.scale_offsets.type.layout) < strips.scale_blocks
    return isa.buffer_load(strips.scale + quad * (2 * WORDS) + HALF * WORDS, strips.scale_offsets, mask=exists)


@gluon.jit
def scales_of(words, FIRST: gl.constexpr, COUNT: gl.constexpr, warps: gl.constexpr):
    """Unpacks the mxfp4 scales of COUNT (2 or 4) consecutive steps of a quad, beginning with step FIRST, into the MFMA scale
    layout: uint8 [16 * warps, 4 * COUNT]. ``words``: the quad's scales, a word per lane with a byte per step."""
    tile: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(warps), 16)
    layout: gl.constexpr = isa.mfma_scale_layout(tile, [16 * warps, 4 * COUNT])
    low = gl.join((words >> (8 * FIRST)).to(gl.uint8), (words >> (8 * FIRST + 8)).to(gl.uint8))
    if COUNT == 4:
        high = gl.join((words >> 16).to(gl.uint8), (words >> 24).to(gl.uint8))
        low = gl.join(low, high).permute(0, 1, 2, 4, 3).reshape(warps, 4, 16, 4)
    return gl.convert_layout(low.permute(0, 2, 3, 1).reshape(16 * warps, 4 * COUNT), layout, assert_trivial=True)


@gluon.jit
def load_half_quad(strips, quad, warps: gl.constexpr):
    """Loads the `HalfQuad` with index ``quad``. Elements beyond k are zeros."""
    return HalfQuad(load_weight(strips, quad * 4, 0, warps), load_scale(strips, quad, 0))


@gluon.jit
def load_quad(strips, quad, warps: gl.constexpr):
    """Loads the `Quad` with index ``quad``: four loads in flight. Elements beyond k are zeros."""
    return Quad(
        load_weight(strips, quad * 4, 0, warps),
        load_weight(strips, quad * 4, 1, warps),
        load_scale(strips, quad, 0),
        load_scale(strips, quad, 1),
    )


@gluon.jit
def steps_of(tensor, AXIS: gl.constexpr, layout: gl.constexpr):
    """Splits a quad of an MMA operand, a tensor of two axes, into its four steps. AXIS: the axis that is k."""
    if AXIS == 1:
        parts = tensor.reshape(tensor.shape[0], 2, 2, tensor.shape[1] // 4).permute(0, 3, 1, 2)
    else:
        parts = tensor.reshape(2, 2, tensor.shape[0] // 4, tensor.shape[1]).permute(2, 3, 0, 1)
    even, odd = gl.split(parts)
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return (
        gl.convert_layout(first, layout, assert_trivial=True),
        gl.convert_layout(second, layout, assert_trivial=True),
        gl.convert_layout(third, layout, assert_trivial=True),
        gl.convert_layout(fourth, layout, assert_trivial=True),
    )


@gluon.jit
def factors_of(words, warps: gl.constexpr, acc_layout: gl.constexpr):
    """Returns the fp8 block scales of a quad's four steps as a tuple; each is float32 [16 * warps, 1], a value per row."""
    factors = ()
    even, odd = gl.split(words.reshape(warps, 2, 2))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    for factor in gl.static_range(4):
        factors += (factor_of((first, second, third, fourth)[factor], warps, acc_layout),)
    return factors


@gluon.jit
def factor_of(scale, warps: gl.constexpr, acc_layout: gl.constexpr):
    """Returns fp8 block scales, float32 [warps] or [warps, 1], as float32 [16 * warps, 1], a value per row."""
    by_warp: gl.constexpr = rows_layout(warps)
    one = gl.convert_layout(scale.reshape(warps), gl.SliceLayout(1, by_warp), assert_trivial=True)[:, None]
    rows, _ = gl.broadcast(one, gl.zeros([warps, 16], gl.float32, by_warp))
    return gl.convert_layout(rows.reshape(16 * warps), gl.SliceLayout(1, acc_layout), assert_trivial=True)[:, None]


@gluon.jit
def add_mfmas(acc, weight, words, codes, scales, encoding: gl.constexpr):
    """Adds the dot products of one quad of weights and of the tokens' planes to the accumulator.

    Args:
        weight, words: weights and scale words of a `Quad`.
        codes: tuple of the planes' quantised values, each [512, columns] (e2m1, packed along k: [256, columns]).
        scales: tuple of the planes' block scales, each uint8 [columns, 16]; unused if activations have no block scales.
    """
    if weight.dtype == gl.float8e4nv:
        acc = add_block_products(acc, weight, words, codes, scales, encoding)
    else:
        weight_scale = scales_of(words, 0, 4, acc.shape[0] // 16)
        for plane in gl.static_range(len(codes)):
            if encoding.scales != "block":
                acc = isa.mfma_scaled(weight, weight_scale, "e2m1", codes[plane], None, encoding.format, acc)
            else:
                acc = isa.mfma_scaled(weight, weight_scale, "e2m1", codes[plane], scales[plane], encoding.format, acc)
    return acc


@gluon.jit
def add_block_products(acc, weight, words, codes, scales, encoding: gl.constexpr):
    """Does what `add_mfmas` does, for fp8 block-scaled weights. A scale block is one step along k, so the block's scale multiplies
    the step's partial sum."""
    acc_layout: gl.constexpr = acc.type.layout
    operand: gl.constexpr = gl.DotOperandLayout(1, acc_layout, 16)
    token_scale: gl.constexpr = isa.mfma_scale_layout(operand, [acc.shape[1], 4])
    weights = steps_of(weight, 1, gl.DotOperandLayout(0, acc_layout, 16))
    factors = factors_of(words, acc.shape[0] // 16, acc_layout)
    sums = (gl.zeros_like(acc), gl.zeros_like(acc), gl.zeros_like(acc), gl.zeros_like(acc))
    for plane in gl.static_range(len(codes)):
        tokens = steps_of(codes[plane], 0, operand)
        added = ()
        if encoding.scales != "block":
            for step in gl.static_range(4):
                added += (isa.mfma_scaled(weights[step], None, "e4m3", tokens[step], None, encoding.format, sums[step]),)
        else:
            by_step = steps_of(scales[plane], 1, token_scale)
            for step in gl.static_range(4):
                added += (isa.mfma_scaled(weights[step], None, "e4m3", tokens[step], by_step[step], encoding.format, sums[step]),)
        sums = added
    for step in gl.static_range(4):
        acc += sums[step] * factors[step]
    return acc


@gluon.jit
def load_biases(bias, expert, first_strip, strips, layout: gl.constexpr):
    """Loads the biases of the first and of the second halves of the warps' strips, float32 [16 * warps] each. The first warp has
    strip ``first_strip``. Biases beyond the expert's last strip are zeros."""
    row = gl.arange(0, 16 * gl.num_warps(), layout)
    strip = first_strip + row // 16
    at = strip * 32 + row % 16
    bias += expert.to(gl.int64) * strips * 32
    return isa.buffer_load(bias, at, mask=strip < strips), isa.buffer_load(bias, at + 16, mask=strip < strips)


@gluon.jit
def activated(gate, up, swiglu, LIMITED: gl.constexpr):
    """Returns SwiGLU: ``(up + beta) * gate * sigmoid(alpha * gate)``, after gate and up are clamped if LIMITED."""
    if LIMITED:
        gate = -larger(-gate, -swiglu.limit)  # a NaN stays a NaN
        up = larger(-larger(-up, -swiglu.limit), -swiglu.limit)
    return (up + swiglu.beta) * libdevice.fast_dividef(gate, 1.0 + gl.exp2(gate * (-LOG2_E * swiglu.alpha)))
