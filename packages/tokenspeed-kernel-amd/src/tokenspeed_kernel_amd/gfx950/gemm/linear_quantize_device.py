# mypy: ignore-errors
"""Device code of `linear` for many tokens: the launch that quantises tokens before `mm_kernel`.

A workgroup has four waves, and each wave quantises a token of its own. So amax reductions need no barrier. With a scale per token,
a wave reads its token twice: for the amax, and to quantise it. Otherwise, workgroups also divide k into blocks of 512 elements.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenspeed_kernel_amd.gfx950 import instructions_device as isa
from tokenspeed_kernel_amd.gfx950.gemm.operands_device import STEP
from tokenspeed_kernel_amd.gfx950.moe.encode_device import (
    activation_layout,
    encode_e4m3,
    load_activations,
    magnitudes,
    token_step,
)
from tokenspeed_kernel_amd.gluon.layouts_device import axis_layout

BLOCK_K = gl.constexpr(512)  # elements of k that are quantised at once
WAVES = gl.constexpr(4)


@gluon.jit
def quantize_by_block(values, format: gl.constexpr):
    """Quantises 16-bit floats [rows, blocks, 32] like `quantize_mxfp8` (``format`` e4m3) and `quantize_mxfp4` (e2m1).

    If a block contains infinity or NaN, its scale is NaN, as the operators' scale is, but its codes differ from the operators'
    codes.

    Returns uint8 [rows, blocks, 32] (e2m1: packed to [rows, blocks, 16]), and the e8m0 scales, int32 [rows, blocks]."""
    largest = gl.max(magnitudes(values), axis=2).to(gl.int16).to(values.dtype, bitcast=True).to(gl.float32)
    field = largest.to(gl.int32, bitcast=True) >> 23
    exponents = gl.maximum(field - (2 if format == "e2m1" else 8), 0)
    values = values.to(gl.float32)
    if format == "e2m1":
        low, high = gl.split(values.reshape(values.shape[0], values.shape[1], 16, 2))
        # The instruction reads the exponent field of the scale. Scales with a field of 0 are 2^-127 there, too.
        scale, _ = gl.broadcast((exponents << 23).to(gl.float32, bitcast=True)[:, :, None], values)
        scale, _ = gl.split(scale.reshape(values.shape[0], values.shape[1], 16, 2))
        codes = gl.inline_asm_elementwise(
            "v_mov_b32 $0, 0\n\tv_cvt_scalef32_pk_fp4_f32 $0, $1, $2, $3", "=&v,v,v,v", [low, high, scale],
            dtype=gl.int32, is_pure=True, pack=1,
        ).to(gl.uint8)  # fmt: skip
    else:
        reciprocal = ((254 - exponents) << 23).to(gl.float32, bitcast=True)
        codes = (values * reciprocal[:, :, None]).to(gl.float8e4nv).to(gl.uint8, bitcast=True)
    return codes, gl.where(field != 255, exponents, 255)


@gluon.jit
def steps_of_row(values):
    """Views a chunk of 512 elements of each row, [rows, 16, 32], as rows of one step: [4 * rows, 4, 32]."""
    return values.reshape(values.shape[0] * 4, 4, 32)


@gluon.jit
def static_step(static, values):
    """Repeats the static scale for each row of ``values``: float32 [rows]."""
    rows: gl.constexpr = values.shape[0]
    return gl.full([rows], 1.0, gl.float32, axis_layout(values.type.layout, 3, 0)) * static


@gluon.jit
def quantize_kernel(x, x_stride, static, m, k, codes, scale, scale_stride, quantization: gl.constexpr, format: gl.constexpr):
    """Quantises four tokens. The grid is [tokens / 4, blocks of 512 elements], or [tokens / 4, 1] with a scale per token.

    Args:
        x, x_stride: the tokens, and their row stride in elements.
        static: pointer to the static scale of the tokens, or None.
        codes: contiguous [m, k], or [m, k / 2] in e2m1.
        scale, scale_stride: float32 [m, 1] ("token"), float32 [m, blocks of 128] ("block"), or uint8 [m, blocks of 32, padded with
            zeros to a multiple of 4] ("mx"); contiguous, and the row stride.
        quantization: ``"mx"``, ``"block"`` (128 elements), ``"token"`` or ``"static"``.
    """
    layout: gl.constexpr = activation_layout(WAVES, WAVES)
    first_row = gl.program_id(0) * WAVES
    x += first_row.to(gl.int64) * x_stride
    codes += first_row.to(gl.int64) * (k // 2 if format == "e2m1" else k)
    row = gl.arange(0, WAVES, axis_layout(layout, 3, 0))
    left = m - first_row
    begins = gl.minimum(row, left - 1) * x_stride
    if quantization == "token":
        largest = magnitudes(load_activations(x, begins, 0, k, BLOCK_K, layout))
        for first in range(BLOCK_K, k, BLOCK_K):
            largest = gl.maximum(largest, magnitudes(load_activations(x, begins, first, k, BLOCK_K, layout)))
        step = token_step(largest, x.dtype.element_ty)
        gl.store(scale + first_row + row, step, mask=row < left)
        for first in range(0, k, BLOCK_K):
            values = load_activations(x, begins, first, k, BLOCK_K, layout).to(gl.float32)
            store_rows(encode_e4m3(values, step, True), codes, first, left, k)
    else:
        first = gl.program_id(1) * BLOCK_K
        values = load_activations(x, begins, first, k, BLOCK_K, layout)
        if quantization == "mx":
            quantised, exponents = quantize_by_block(values, format)
            store_scale_rows(exponents.to(gl.uint8), scale, first_row, scale_stride, first // 32, left, scale_stride)
            store_rows(quantised, codes, first // 2 if format == "e2m1" else first, left, k // 2 if format == "e2m1" else k)
        elif quantization == "block":
            values = steps_of_row(values)
            step = token_step(magnitudes(values), x.dtype.element_ty)
            quantised = encode_e4m3(values.to(gl.float32), step, True)
            store_scale_rows(step.reshape(WAVES, 4), scale, first_row, scale_stride, first // STEP, left, (k + STEP - 1) // STEP)
            store_rows(quantised.reshape(WAVES, 16, 32), codes, first, left, k)
        else:
            step = static_step(gl.load(static), values)
            store_rows(encode_e4m3(values.to(gl.float32), step, True), codes, first, left, k)


@gluon.jit
def store_rows(quantised, codes, first, rows, size):
    """Stores a chunk of quantised rows, uint8 [4, 16, bytes of a block], from byte ``first`` of each row on. A row has ``size``
    bytes."""
    layout: gl.constexpr = quantised.type.layout
    width: gl.constexpr = quantised.shape[2]
    row = gl.arange(0, WAVES, axis_layout(layout, 3, 0))[:, None, None]
    block = gl.arange(0, 16, axis_layout(layout, 3, 1))[None, :, None]
    place = first + block * width + gl.arange(0, width, axis_layout(layout, 3, 2))[None, None, :]
    isa.buffer_store(quantised, codes, row * size + place, mask=(row < rows) & (place < size))


@gluon.jit
def store_scale_rows(found, scale, first_row, stride, first, rows, count):
    """Stores scales of four rows, [4, scales], from scale ``first`` of each row on. A row has ``count`` scales."""
    layout: gl.constexpr = found.type.layout
    row = gl.arange(0, WAVES, gl.SliceLayout(1, layout))[:, None]
    place = first + gl.arange(0, found.shape[1], gl.SliceLayout(0, layout))[None, :]
    isa.buffer_store(found, scale + first_row.to(gl.int64) * stride, row * stride + place, mask=(row < rows) & (place < count))
