"""Device code of `_fp8_pairs`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _from_bits(bits, E4M3: tl.constexpr):
    """Converts fp8 values, in the low bytes of uint16, to float16."""
    if E4M3:  # shifted exponent and mantissa bits make a float16 that is 2^-8 times the value
        moved = ((bits & 0x7F) << 7) | ((bits & 0x80) << 8)
        value = moved.to(tl.float16, bitcast=True) * 256.0
        value = tl.where((bits & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)
    else:  # e5m2 is the upper byte of a float16
        value = (bits << 8).to(tl.float16, bitcast=True)
    return value


@triton.jit
def even_and_odd(x, DTYPE: tl.constexpr, FP8: tl.constexpr):
    """Converts int16 [M, N], which packs two fp8 values per element, to the MMA operands' dtype.

    Returns the even and the odd columns of the unpacked matrix [M, 2 N], each [M, N].
    """
    if FP8 == "e4m3":
        even, odd = tl.inline_asm_elementwise(
            """{
            .reg .b32 both;
            .reg .b16 low, high;
            prmt.b32 both, $2, $2, 0x3120;
            mov.b32 {low, high}, both;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=r,=r,r",
            [x],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    elif FP8 == "e5m2":
        even, odd = tl.inline_asm_elementwise(
            """
            prmt.b32 $0, $2, 0, 0x2404;
            prmt.b32 $1, $2, 0, 0x3414;
            """,
            "=&r,=r,r",
            [x],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        bits = x.to(tl.uint16, bitcast=True)
        even = _from_bits(bits & 0xFF, FP8 == "e4m3 in bits")
        odd = _from_bits(bits >> 8, FP8 == "e4m3 in bits")
    return even.to(DTYPE), odd.to(DTYPE)
