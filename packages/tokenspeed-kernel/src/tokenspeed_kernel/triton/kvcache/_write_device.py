"""Device code of `_write`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.quantization._encode_device import divide, encode_fp8, prepare_divisor


@triton.jit
def slot_of(cache, slot, head, PAGE_SIZE: tl.constexpr):
    """Returns pointers to the given slots and heads of a `Cache`. Where a slot is negative, the pointer is invalid."""
    slot = slot.to(tl.int64)
    offset = (slot // PAGE_SIZE) * cache.page_stride + (slot % PAGE_SIZE) * cache.slot_stride
    return cache.first + (offset + head * cache.head_stride)


@triton.jit
def as_stored(values, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """Converts values to the cache's format: unchanged, or encoded as 8-bit floats in uint8. NATIVE: see `Encoding`."""
    if FORMAT == "copied":
        stored = values
    else:
        stored = encode_fp8(values.to(tl.float32), FORMAT, NATIVE)
    return stored


@triton.jit
def divided(values, scale, head, SCALES: tl.constexpr, ENCODING: tl.constexpr):
    """Divides values by their head's scale, in float32. SCALES is the number of scales; if it is 0, values are unchanged."""
    if SCALES == 0:
        quotient = values
    else:
        loaded = tl.load(scale + (head if SCALES > 1 else tl.zeros_like(head)))
        factor, divisor, reciprocal = prepare_divisor(loaded, ENCODING.interpreted)
        values = values.to(tl.float32)
        quotient = divide(values, factor, divisor, reciprocal, ENCODING.interpreted, ENCODING.steps)
        # `divide` returns NaN for a quotient that overflows and for an infinite value. Both become infinite here, so that they
        # saturate.
        quotient = tl.where(quotient != quotient, values * float("inf"), quotient)
    return quotient


@triton.jit
def encoded(values, scale, head, SCALES: tl.constexpr, ENCODING: tl.constexpr):
    """Divides values by their head's scale and converts them to the cache's format."""
    FORMAT: tl.constexpr = ENCODING.format
    NATIVE: tl.constexpr = ENCODING.native
    return as_stored(divided(values, scale, head, SCALES, ENCODING), FORMAT, NATIVE)
