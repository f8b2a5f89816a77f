"""Device code of `_fp8`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def widened(x, DTYPE: tl.constexpr, FP8: tl.constexpr):
    """Elements in the dtype of the products, to which every fp8 number is exact (float16, bfloat16 or float32)."""
    if FP8 == "e4m3 in bits":  # exponent and mantissa, moved, are those of a float16 that is 2^-8 times the number
        bits = x.to(tl.uint16)
        moved = ((bits & 0x7F) << 7) | ((bits & 0x80) << 8)
        value = moved.to(tl.float16, bitcast=True) * 256.0
        value = tl.where((bits & 0x7F) == 0x7F, float("nan"), value)
    elif FP8 == "e5m2 in bits":  # the upper half of a float16
        value = (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    elif FP8 == "e4m3":  # straight to bfloat16 would take a slow instruction; the detour costs the others nothing
        value = x.to(tl.float16).to(tl.float32)
    else:
        value = x
    return value.to(DTYPE)
