"""Device code of `_fp8`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def widened(x, DTYPE: tl.constexpr, FP8: tl.constexpr):
    """Converts elements to the MMA operands' dtype (float16, bfloat16 or float32), which represents every fp8 value exactly."""
    if FP8 == "e4m3 in bits":  # shifted exponent and mantissa bits make a float16 that is 2^-8 times the value
        bits = x.to(tl.uint16)
        moved = ((bits & 0x7F) << 7) | ((bits & 0x80) << 8)
        value = moved.to(tl.float16, bitcast=True) * 256.0
        value = tl.where((bits & 0x7F) == 0x7F, float("nan"), value)
    elif FP8 == "e5m2 in bits":  # e5m2 is the upper byte of a float16
        value = (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    elif FP8 == "e4m3":  # through float32: the direct conversion to bfloat16 is slow; costs nothing for other dtypes
        value = x.to(tl.float16).to(tl.float32)
    else:
        value = x
    return value.to(DTYPE)
