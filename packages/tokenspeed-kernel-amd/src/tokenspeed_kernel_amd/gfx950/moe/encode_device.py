# mypy: ignore-errors
"""Rounds activations to the codes that the matrix cores multiply. ``encoding`` says what the codes are.

A tile of activations is float32 [rows, blocks, 32], because 32 neighbours along k share a scale.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna4

from tokenspeed_kernel_amd.gfx950.moe.tile_device import axis_layout
from tokenspeed_kernel_base.ops.quantization.encodings import SMALLEST_NORMAL

_SMALLEST_NORMAL = gl.constexpr(SMALLEST_NORMAL)


@gluon.constexpr_function
def activation_layout(rows, warps):
    """[rows, blocks, 32]: 8 elements a lane. Warps are divided among rows, as long as there are any."""
    along = min(rows, warps)
    return gl.BlockedLayout([1, 1, 8], [1, 16, 4], [along, warps // along, 1], [2, 1, 0])


@gluon.jit
def places(first, BLOCK: gl.constexpr, layout: gl.constexpr):
    """int32 [1, BLOCK / 32, 32]: the places of a row's elements from ``first`` on."""
    block = gl.arange(0, BLOCK // 32, axis_layout(layout, 3, 1))
    return first + block[None, :, None] * 32 + gl.arange(0, 32, axis_layout(layout, 3, 2))[None, None, :]


@gluon.jit
def load_activations(x, row, first, k, BLOCK: gl.constexpr, layout: gl.constexpr):
    """BLOCK elements of each row from ``first`` on, 0 beyond k. ``row``: int32 [rows], where rows of x begin."""
    at = places(first, BLOCK, layout)
    return cdna4.buffer_load(x, row[:, None, None] + at, mask=at < k, other=0.0).to(gl.float32)


@gluon.jit
def token_step(magnitudes):
    """The scale of each token, float32 [rows], as `quantize_fp8` computes it. The maximum ignores NaN, which its element keeps."""
    rows: gl.constexpr = magnitudes.shape[0]
    largest = gl.max(magnitudes.reshape(rows, magnitudes.shape[1] * 32), axis=1)
    largest = gl.convert_layout(largest, axis_layout(magnitudes.type.layout, 3, 0), assert_trivial=True)
    return gl.maximum(gl.div_rn(largest, gl.full_like(largest, 448.0)), _SMALLEST_NORMAL)


@gluon.jit
def e2m1_codes(values):
    """float32 to e2m1, ties to even, saturating: int32 0 to 15."""
    magnitude = gl.minimum(gl.abs(values), 6.0)
    # Adding a constant of the right size rounds to a multiple of its unit in the last place, to nearest even, and leaves the
    # multiple in the low bits: multiples of 0.5 below 2 (codes 0 to 4), of 1 from there (4 to 6), of 2 from 4 on (6 and 7).
    aligned = gl.where(magnitude < 2.0, 4194304.0, gl.where(magnitude < 4.0, 8388610.0, 16777224.0))
    code = (magnitude + aligned).to(gl.int32, bitcast=True) & 7
    return code | ((values.to(gl.int32, bitcast=True) >> 28) & 8)


@gluon.jit
def encode_by_token(values, step):
    """e4m3 codes, uint8 [rows, blocks, 32]. ``step``: float32 [rows], the scales.

    Multiplied by the reciprocal, a value that is within 2^-23 of the middle between two codes may get the other one. Dividing takes
    ten times as many instructions.
    """
    return (values * (1.0 / step)[:, None, None]).to(gl.float8e4nv).to(gl.uint8, bitcast=True)


@gluon.jit
def encode_by_block(values, encoding: gl.constexpr):
    """The codes of each plane, uint8 [rows, blocks, 32] (packed: [rows, blocks, 16]), and its scales, uint8 [rows, blocks].

    A block with a NaN or an infinity has the scale 255, which makes it NaN.
    """
    packed: gl.constexpr = encoding.format == "e2m1"
    # Of finite floats the bits sort as the magnitudes do; infinities and NaN lie above.
    field = gl.max(values.to(gl.int32, bitcast=True) & 0x7FFFFFFF, axis=2) >> 23
    finite = field != 255
    exponents = gl.maximum(field - (2 if packed else 7), 0 if packed else 5 * (encoding.planes - 1))
    reciprocal = gl.where(finite, (254 - exponents) << 23, 0).to(gl.float32, bitcast=True)
    left = gl.where(finite[:, :, None], values * reciprocal[:, :, None], 0.0)
    if packed:
        codes = e2m1_codes(left)
        low, high = gl.split(codes.reshape(codes.shape[0], codes.shape[1], 16, 2))
        first = (low | (high << 4)).to(gl.uint8)
    else:
        first = left.to(gl.float8e4nv)
    second = first
    third = first
    if encoding.planes > 1:
        left = (left - first.to(gl.float32)) * 32.0
        second = left.to(gl.float8e4nv)
    if encoding.planes > 2:
        third = ((left - second.to(gl.float32)) * 32.0).to(gl.float8e4nv)
    return (
        (first.to(gl.uint8, bitcast=True), second.to(gl.uint8, bitcast=True), third.to(gl.uint8, bitcast=True)),
        (
            gl.where(finite, exponents, 255).to(gl.uint8),
            gl.where(finite, exponents - 5, 255).to(gl.uint8),
            gl.where(finite, exponents - 10, 255).to(gl.uint8),
        ),
    )


@gluon.jit
def encode_row(row, k, codes, plane_codes, scale, plane_scales, width, encoding: gl.constexpr, BLOCK: gl.constexpr):
    """Encodes a row of k elements in memory.

    Args:
        row: points to it; elements have unit stride.
        codes, scale: point to where the first plane of its codes and their scales, or its one scale, belong.
        plane_codes, plane_scales: elements from one plane to the next.
        width: k padded.
    """
    layout: gl.constexpr = activation_layout(1, gl.num_warps())
    none = gl.zeros([1], gl.int32, axis_layout(layout, 3, 0))
    if encoding.by_token:
        largest = gl.zeros([1, BLOCK // 32, 32], gl.float32, layout)
        for first in range(0, k, BLOCK):
            largest = gl.maximum(largest, gl.abs(load_activations(row, none, first, k, BLOCK, layout)))
        step = token_step(largest)
        gl.store(scale + none, step)
    for first in range(0, width, BLOCK):
        values = load_activations(row, none, first, k, BLOCK, layout)
        at = places(first, BLOCK, layout)
        if encoding.by_token:
            cdna4.buffer_store(encode_by_token(values, step), codes, at, mask=at < width)
        else:
            planes, exponents = encode_by_block(values, encoding)
            # Of 16 blocks in a row, a lane of the product wants every fourth.
            block = first // 32 + gl.arange(0, BLOCK // 32, axis_layout(layout, 3, 1))[None, :]
            scale_at = block // 16 * 16 + block % 4 * 4 + block % 16 // 4
            for plane in gl.static_range(encoding.planes):
                if encoding.format == "e2m1":
                    stored: gl.constexpr = planes[plane].type.layout
                    half_block = gl.arange(0, BLOCK // 32, axis_layout(stored, 3, 1))
                    half = gl.arange(0, 16, axis_layout(stored, 3, 2))
                    half_at = first // 2 + half_block[None, :, None] * 16 + half[None, None, :]
                    cdna4.buffer_store(planes[plane], codes, half_at, mask=half_at < width // 2)
                else:
                    cdna4.buffer_store(planes[plane], codes + plane * plane_codes, at, mask=at < width)
                cdna4.buffer_store(exponents[plane], scale + plane * plane_scales, scale_at, mask=block * 32 < width)


@gluon.jit(do_not_specialize=["rows"])
def encode_kernel(x, count, codes, scale, k, width, rows, encoding: gl.constexpr, BLOCK: gl.constexpr):
    """Program: a row of x ``[rows, k]``, of which there are as many as ``count`` points to."""
    row = gl.program_id(0)
    if row < gl.load(count):
        row_bytes = width // (2 if encoding.format == "e2m1" else 1)
        row_scales = 1 if encoding.by_token else width // 32
        wide = row.to(gl.int64)
        encode_row(
            x + wide * k, k, codes + wide * row_bytes, rows.to(gl.int64) * row_bytes, scale + wide * row_scales,
            rows.to(gl.int64) * row_scales, width, encoding, BLOCK,
        )  # fmt: skip
