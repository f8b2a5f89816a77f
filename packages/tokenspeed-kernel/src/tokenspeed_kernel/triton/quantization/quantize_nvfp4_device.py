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
    larger,
    largest,
    pack_e2m1,
    prepare_divisor,
)
from tokenspeed_kernel_base.ops.quantization.encodings import BLOCK_NVFP4

_BLOCK = tl.constexpr(BLOCK_NVFP4)
_HALF = tl.constexpr(BLOCK_NVFP4 // 2)
_SIXTH = tl.constexpr(1 / 6)


@triton.jit
def nvfp4_of_blocks(x, global_scale, NATIVE: tl.constexpr, INTERPRETED: tl.constexpr, STEPS: tl.constexpr):
    """Quantises blocks, float32 ``[BLOCKS, 16]``, to packed e2m1 ``[BLOCKS, 8]``.

    Returns the packed values, and the blocks' e4m3 scales ``[BLOCKS]``. Both are uint8.
    """
    scale, step = _scale_of_blocks(largest(x, 1), global_scale, NATIVE, INTERPRETED, STEPS)
    code = _codes(x, prepare_divisor(step, INTERPRETED), INTERPRETED, STEPS)
    return (code & _kept(step)).to(tl.uint8), scale


@triton.jit
def _scale_of_blocks(amax, global_scale, NATIVE: tl.constexpr, INTERPRETED: tl.constexpr, STEPS: tl.constexpr):
    """Returns ``(scale, step)`` for blocks, given their amax: the e4m3 scales (uint8), and the steps.

    A block's step is the divisor of its elements: the decoded scale times the global scale.
    """
    if INTERPRETED or STEPS > 1:
        sixth = tl.div_rn(amax, 6.0)
        wanted = tl.div_rn(sixth, global_scale)
    else:
        # One correction gives the nearest quotient. A sixth of a value with at most 11 significant bits is never close to the
        # midpoint of two float32 values.
        sixth = amax * _SIXTH
        sixth = tl.fma(tl.fma(sixth, 6.0, -amax), -_SIXTH, sixth)
        factor, divisor, reciprocal = prepare_divisor(global_scale, INTERPRETED)
        wanted = divide_any(sixth, factor, divisor, reciprocal, INTERPRETED, 2)
    # A block of zeros gives 0 / 0 if the global scale is 0.
    wanted = tl.where(sixth == 0.0, 0.0, wanted)
    # The comparison is false for NaN and for infinity.
    scale = encode_fp8(tl.where(amax < float("inf"), wanted, float("nan")), "e4m3fn", NATIVE)
    return scale, decode_fp8(scale, "e4m3fn", NATIVE) * global_scale


@triton.jit
def _codes(x, prepared, INTERPRETED: tl.constexpr, STEPS: tl.constexpr):
    """Divides blocks (or half blocks) by their steps, and encodes the quotients as pairs of e2m1 values, one byte per int32.

    ``prepared``: the result of `prepare_divisor` for the steps.
    """
    factor, divisor, reciprocal = prepared
    # A quotient that overflows may be NaN, which saturates like infinity. Blocks with step 0 become zeros, see `_kept`.
    quotient = divide(x, factor[:, None], divisor[:, None], reciprocal[:, None], INTERPRETED, STEPS)
    return pack_e2m1(encode_e2m1(quotient, x), x.shape[0], x.shape[1])


@triton.jit
def _kept(step):
    """Returns a bit mask for the encoded bytes of each block: 0 if the block's step is 0 or NaN, so that its bytes become 0."""
    return tl.where(step > 0, 255, 0)[:, None]


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
    """Quantises ``BLOCKS`` blocks of one outer row of x; with ``TILES``, of one matrix. q and the scales are contiguous."""
    first_x, x_at, first_made, made_at, first_scale, inside, stored = blocks_of_program(
        count, x_stride, x_outer_stride, rows, columns, BLOCKS, _BLOCK, 1, TILES
    )
    # Load a block in two halves, each with one load of one thread. One thread then holds a whole block, and the block's scale is
    # computed once.
    x_ptr += first_x
    at = tl.arange(0, _HALF)[None, :]
    low = tl.load(x_ptr + x_at[:, None] + at, mask=inside[:, None], other=0.0).to(tl.float32)
    high = tl.load(x_ptr + x_at[:, None] + (at + _HALF), mask=inside[:, None], other=0.0).to(tl.float32)
    amax = larger(largest(low, 1), largest(high, 1))
    scale, step = _scale_of_blocks(amax, tl.load(global_scale_ptr), NATIVE, INTERPRETED, STEPS)
    prepared = prepare_divisor(step, INTERPRETED)
    codes = tl.join(_codes(low, prepared, INTERPRETED, STEPS), _codes(high, prepared, INTERPRETED, STEPS))
    code = (codes.permute(0, 2, 1).reshape(BLOCKS, _BLOCK // 2) & _kept(step)).to(tl.uint8)
    if TILES:
        scale = tl.where(inside, scale, 0).to(tl.uint8)
    tl.store(scale_ptr + first_scale + tl.arange(0, BLOCKS), scale, mask=stored)
    at = tl.arange(0, _BLOCK // 2)[None, :]
    tl.store(q_ptr + first_made * (_BLOCK // 2) + made_at[:, None] * (_BLOCK // 2) + at, code, mask=inside[:, None])
