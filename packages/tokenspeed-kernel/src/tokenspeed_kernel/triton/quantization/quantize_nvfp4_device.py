"""Device code of `quantize_nvfp4`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.quantization._encode_device import (
    blocks_of_program,
    decode_fp8,
    divide,
    divide_any,
    encode_e2m1,
    encode_fp8,
    largest,
    pack_e2m1,
    prepare_divisor,
)
from tokenspeed_kernel_base.ops.quantization.encodings import BLOCK_NVFP4

_BLOCK = tl.constexpr(BLOCK_NVFP4)
_SIXTH = tl.constexpr(1 / 6)


@triton.jit
def nvfp4_of_blocks(x, global_scale, NATIVE: tl.constexpr, INTERPRETED: tl.constexpr, STEPS: tl.constexpr):
    """Blocks, float32 ``[BLOCKS, 16]``, as bytes of two e2m1 codes ``[BLOCKS, 8]``, and their e4m3 scales ``[BLOCKS]``: uint8."""
    amax = largest(x, 1)
    if INTERPRETED or STEPS > 1:
        wanted = tl.div_rn(tl.div_rn(amax, 6.0), global_scale)
    else:
        # A sixth of a number of at most 11 bits is nowhere near the middle of two float32: one correction gives the nearest.
        sixth = amax * _SIXTH
        sixth = tl.fma(tl.fma(sixth, 6.0, -amax), -_SIXTH, sixth)
        factor, divisor, reciprocal = prepare_divisor(global_scale, INTERPRETED)
        wanted = divide_any(sixth, factor, divisor, reciprocal, INTERPRETED, 2)
    # Neither NaN nor infinite: all comparisons with NaN are false.
    scale = encode_fp8(tl.where(amax < float("inf"), wanted, float("nan")), "e4m3fn", NATIVE)
    step = decode_fp8(scale, "e4m3fn", NATIVE) * global_scale
    factor, divisor, reciprocal = prepare_divisor(step, INTERPRETED)
    # Where the quotient overflows it may be NaN, which saturates like infinity. Blocks without a step become zeros below.
    quotient = divide(x, factor[:, None], divisor[:, None], reciprocal[:, None], INTERPRETED, STEPS)
    code = pack_e2m1(encode_e2m1(quotient, x), x.shape[0], _BLOCK) & tl.where(step > 0, 255, 0)[:, None]
    return code.to(tl.uint8), scale


@triton.jit
def quantize_nvfp4_kernel(
    x_ptr,
    global_scale_ptr,
    q_ptr,
    scale_ptr,
    count,
    x_stride,
    x_outer_stride,
    rows,
    columns,
    BLOCKS: tl.constexpr,
    NATIVE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    STEPS: tl.constexpr,
    TILES: tl.constexpr,
):
    """``BLOCKS`` blocks of one outer row, or with ``TILES`` of one matrix; q and the scales are contiguous."""
    first_x, x_at, first_made, made_at, first_scale, inside, stored = blocks_of_program(
        count, x_stride, x_outer_stride, rows, columns, BLOCKS, _BLOCK, 1, TILES
    )
    x_ptr += first_x
    at = tl.arange(0, _BLOCK)[None, :]
    x = tl.load(x_ptr + x_at[:, None] + at, mask=inside[:, None], other=0.0).to(tl.float32)
    code, scale = nvfp4_of_blocks(x, tl.load(global_scale_ptr), NATIVE, INTERPRETED, STEPS)
    if TILES:
        scale = tl.where(inside, scale, 0).to(tl.uint8)
    tl.store(scale_ptr + first_scale + tl.arange(0, BLOCKS), scale, mask=stored)
    at = tl.arange(0, _BLOCK // 2)[None, :]
    tl.store(q_ptr + first_made * (_BLOCK // 2) + made_at[:, None] * (_BLOCK // 2) + at, code, mask=inside[:, None])
