"""Device code that writes to the paged cache, for every kernel that does."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernel.triton.quantization._encode import FP8_NAMES, encode_fp8

COPIED = "copied"


def cache_format(values: torch.dtype, cache: torch.dtype) -> str:
    """The ``FORMAT`` of `as_stored` for values and a cache of these dtypes."""
    return COPIED if values == cache else FP8_NAMES[cache]


def as_storable(x: Tensor) -> Tensor:
    """8-bit floats as bytes, which every device can load and store; others as they are."""
    return x.view(torch.uint8) if x.dtype in FP8_NAMES else x


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
