"""Device code of `quantize_mx`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.quantization._encode_device import (
    blocks_of_program,
    encode_e2m1,
    encode_fp8,
    larger,
    largest,
    pack_e2m1,
    pack_scaled_e2m1,
)
from tokenspeed_kernel_base.ops.quantization.encodings import BLOCK_MX

_BLOCK = tl.constexpr(BLOCK_MX)


@triton.jit
def scale_of_blocks(amax, FORMAT: tl.constexpr, UP: tl.constexpr):
    """Computes the e8m0 scales of blocks, given their amax.

    Returns the scales (int32), the bits of their reciprocals, and a mask for the encoded values. The mask is 0 for a block with an
    infinity or NaN, whose values are all encoded as +0.

    ``FORMAT``: e4m3fn, e5m2 or e2m1. ``UP``: whether to round scales up, so that no value saturates; otherwise scales are rounded
    down.
    """
    # The exponent of the format's largest power of two.
    EMAX: tl.constexpr = 2 if FORMAT == "e2m1" else (15 if FORMAT == "e5m2" else 8)
    # The mantissa bits of the format's largest value, as a float32: 6 = 1.5 * 2^2, 57344 = 1.75 * 2^15, 448 = 1.75 * 2^8.
    LARGEST: tl.constexpr = 0x400000 if FORMAT == "e2m1" else 0x600000
    # A float32's exponent field is floor(log2) + 127. The field is 0 for subnormals, which get the smallest scale in any case.
    bits = amax.to(tl.int32, bitcast=True)
    field = bits >> 23
    finite = field != 255
    if UP:  # a mantissa above LARGEST carries into the exponent field, so amax gets the next power of two
        field = (bits + (0x7FFFFF - LARGEST)) >> 23
    scale = tl.where(finite, tl.maximum(field - EMAX, 0), 255)
    # The reciprocal, 2^(127 - byte), is a normal float32 for every finite block.
    return scale, (254 - scale) << 23, tl.where(finite, 255, 0)


@triton.jit
def mxfp8_of_blocks(x, UP: tl.constexpr, NATIVE: tl.constexpr):
    """Quantises blocks, float32 ``[BLOCKS, 32]``, to e4m3 (uint8). Also returns their e8m0 scales ``[BLOCKS]``. ``UP``: whether to
    round scales up (see `scale_of_blocks`)."""
    scale, reciprocal, kept = scale_of_blocks(largest(x, 1), "e4m3fn", UP)
    code = encode_fp8(x * reciprocal[:, None].to(tl.float32, bitcast=True), "e4m3fn", NATIVE)
    return (code & kept[:, None]).to(tl.uint8), scale.to(tl.uint8)


@triton.jit
def quantize_mx_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    count,
    x_stride,
    x_outer_stride,
    rows,
    columns,
    BLOCKS: tl.constexpr,
    FP4: tl.constexpr,
    UP: tl.constexpr,
    PAIRS: tl.constexpr,
    NATIVE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Quantises ``BLOCKS`` blocks of one outer row of x; with ``TILES``, of one matrix. q and the scales are contiguous.

    ``FP4``: whether to quantise to e2m1; otherwise to e4m3. ``UP``: whether to round scales up, so that no value saturates;
    otherwise scales are rounded down.
    """
    UNIT: tl.constexpr = 2 if PAIRS else 1
    first_x, x_at, first_made, made_at, first_scale, inside, stored = blocks_of_program(
        count, x_stride, x_outer_stride, rows, columns, BLOCKS, _BLOCK, UNIT, TILES
    )
    x_ptr += first_x
    if PAIRS:
        at = tl.arange(0, _BLOCK // 2)[None, :]
        pair_ptr = x_ptr.to(tl.pointer_type(tl.int32))
        pairs = tl.load(pair_ptr + x_at[:, None] + at, mask=inside[:, None], other=0)
        low, high = (pairs << 16).to(tl.float32, bitcast=True), (pairs & -65536).to(tl.float32, bitcast=True)
        amax = largest(larger(tl.abs(low), tl.abs(high)), 1)
    else:
        at = tl.arange(0, _BLOCK)[None, :]
        x = tl.load(x_ptr + x_at[:, None] + at, mask=inside[:, None], other=0.0).to(tl.float32)
        if FP4:
            amax = largest(x, 1)
    # A missing block has an amax of 0, and so a scale of 0.
    if FP4:
        scale, reciprocal, kept = scale_of_blocks(amax, "e2m1", UP)
        tl.store(scale_ptr + first_scale + tl.arange(0, BLOCKS), scale.to(tl.uint8), mask=stored)
        reciprocal = reciprocal[:, None]
        if PAIRS:
            code = pack_scaled_e2m1(pairs, reciprocal | (reciprocal >> 16))
        else:
            code = pack_e2m1(encode_e2m1(x * reciprocal.to(tl.float32, bitcast=True), x), BLOCKS, _BLOCK)
        at = tl.arange(0, _BLOCK // 2)[None, :]
        tl.store(
            q_ptr + first_made * (_BLOCK // 2) + made_at[:, None] * (_BLOCK // 2) + at,
            (code & kept[:, None]).to(tl.uint8),
            mask=inside[:, None],
        )
    else:
        code, scale = mxfp8_of_blocks(x, UP, NATIVE)
        tl.store(scale_ptr + first_scale + tl.arange(0, BLOCKS), scale, mask=stored)
        tl.store(q_ptr + first_made * _BLOCK + made_at[:, None] * _BLOCK + at, code, mask=inside[:, None])
