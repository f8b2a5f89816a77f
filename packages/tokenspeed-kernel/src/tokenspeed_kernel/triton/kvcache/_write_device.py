"""Device code of `_write`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.quantization._encode_device import encode_fp8


@triton.jit
def locate_slots(slots, PAGE_SIZE: tl.constexpr, page_stride, slot_stride):
    """Offsets, int64, of slots within a cache; meaningless where a slot is negative."""
    slots = slots.to(tl.int64)
    return (slots // PAGE_SIZE) * page_stride + (slots % PAGE_SIZE) * slot_stride


@triton.jit
def as_stored(values, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """Values as the cache holds them: as they are, or the bytes of an 8-bit float. NATIVE: see `abilities` of the encoder."""
    if FORMAT == "copied":
        stored = values
    else:
        stored = encode_fp8(values.to(tl.float32), FORMAT, NATIVE)
    return stored
