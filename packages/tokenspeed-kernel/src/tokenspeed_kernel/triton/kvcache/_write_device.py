"""Device code of `_write`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.quantization._encode_device import encode_fp8


@triton.jit
def slot_of(cache, slot, head, PAGE_SIZE: tl.constexpr):
    """Pointers to heads of slots of a `Cache`; meaningless where a slot is negative."""
    slot = slot.to(tl.int64)
    offset = (slot // PAGE_SIZE) * cache.page_stride + (slot % PAGE_SIZE) * cache.slot_stride
    return cache.first + (offset + head * cache.head_stride)


@triton.jit
def as_stored(values, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """Values as the cache holds them: as they are, or the bytes of an 8-bit float. NATIVE: see `abilities` of the encoder."""
    if FORMAT == "copied":
        stored = values
    else:
        stored = encode_fp8(values.to(tl.float32), FORMAT, NATIVE)
    return stored
