"""Dequantises words in the layout of `_mxfp4_layout` to tiles of weights, in registers."""

from __future__ import annotations

import triton
import triton.language as tl

# Register $4 holds two 16-bit words. Each instruction (and, shift or multiplication) moves the sign and magnitude bits of one e2m1
# value of both words to their positions in a bfloat16 pair. A mask clears the other bits.
_BFLOAT16 = """
.reg .b32 a, s, z;
mov.b32 z, 0x80008000;
and.b32 a, $4, 0x81C081C0;
fma.rn.bf16x2 $0, a, $5, z;
shl.b32 a, $4, 3;
and.b32 a, a, 0x81C081C0;
fma.rn.bf16x2 $1, a, $7, z;
and.b32 a, $4, 0x40074007;
mul.lo.u32 a, a, 66;
and.b32 a, a, 0x81C081C0;
fma.rn.bf16x2 $2, a, $9, z;
shr.u32 a, $4, 3;
shl.b32 s, $4, 2;
and.b32 s, s, 0x80008000;
lop3.b32 a, a, 0x01C001C0, s, 0xEA;
fma.rn.bf16x2 $3, a, $11, z;
}
"""
# For float16, the bits go to bit 15 and bits 11 to 9. The result is 2^-14 times the e2m1 value.
_FLOAT16 = """
.reg .b32 a, s;
shl.b32 a, $4, 3;
and.b32 s, $4, 0x80008000;
lop3.b32 a, a, 0x0E000E00, s, 0xEA;
mul.rn.f16x2 $0, a, $5;
and.b32 a, $4, 0x10381038;
mul.lo.u32 a, a, 72;
and.b32 a, a, 0x8E008E00;
mul.rn.f16x2 $1, a, $7;
and.b32 a, $4, 0x40074007;
mul.lo.u32 a, a, 514;
and.b32 a, a, 0x8E008E00;
mul.rn.f16x2 $2, a, $9;
shl.b32 s, $4, 2;
and.b32 s, s, 0x80008000;
lop3.b32 a, $4, 0x0E000E00, s, 0xEA;
mul.rn.f16x2 $3, a, $11;
}
"""
# Hopper's WGMMA reads a left operand in registers until it completes. Triton lets the WGMMAs of one loop iteration overlap the next
# iteration, which overwrites the operand's registers. Some results were wrong, most often with two CTAs per SM. Therefore each
# write of these registers waits first. Within an iteration, only the first word's wait has WGMMAs to wait for.
_WAIT = "{ wgmma.wait_group.sync.aligned 0;"
_BFLOAT16_ALONE = tl.constexpr("{" + _BFLOAT16)
_BFLOAT16_DRAINED = tl.constexpr(_WAIT + _BFLOAT16)
_FLOAT16_ALONE = tl.constexpr("{" + _FLOAT16)
_FLOAT16_DRAINED = tl.constexpr(_WAIT + _FLOAT16)


@triton.jit
def decode(word, scales, dtype: tl.constexpr, PTX: tl.constexpr, DRAIN: tl.constexpr):
    """Dequantises a tile of words, of four e2m1 values each, to four tiles of weights.

    ``scales``: an int32 column of exponent fields, one byte per tile. ``PTX``: whether inline PTX dequantises two values at a
    time; only for 16-bit dtypes. ``DRAIN``: whether to wait first for outstanding WGMMAs, which may still read the registers of
    these tiles.
    """
    s0 = scales & 0xFF
    s1 = (scales >> 8) & 0xFF
    s2 = (scales >> 16) & 0xFF
    s3 = (scales >> 24) & 0xFF
    if PTX and dtype == tl.bfloat16:
        # Each exponent field becomes a pair of bfloat16 powers of two.
        return tl.inline_asm_elementwise(
            _BFLOAT16_DRAINED if DRAIN else _BFLOAT16_ALONE,
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r",
            [word, s0 * 0x00800080, s1 * 0x00800080, s2 * 0x00800080, s3 * 0x00800080],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    if PTX and dtype == tl.float16:
        # The field 253 becomes 29, which is 2^14 in float16. A scale 2^29 times smaller than its row's largest becomes 0.
        s0 = tl.maximum(s0 - 224, 0)
        s1 = tl.maximum(s1 - 224, 0)
        s2 = tl.maximum(s2 - 224, 0)
        s3 = tl.maximum(s3 - 224, 0)
        return tl.inline_asm_elementwise(
            _FLOAT16_DRAINED if DRAIN else _FLOAT16_ALONE,
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r",
            [word, s0 * 0x04000400, s1 * 0x04000400, s2 * 0x04000400, s3 * 0x04000400],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    bits = word.to(tl.int32)
    code0 = (bits & 0x8000) | (bits & 0x01C0)
    code1 = ((bits & 0x1000) << 3) | ((bits & 0x0038) << 3)
    code2 = ((bits & 0x4000) << 1) | ((bits & 0x0007) << 6)
    code3 = ((bits & 0x2000) << 2) | ((bits & 0x0E00) >> 3)
    return _scaled(code0, s0, dtype), _scaled(code1, s1, dtype), _scaled(code2, s2, dtype), _scaled(code3, s3, dtype)


@triton.jit
def _scaled(code, scale, dtype: tl.constexpr):
    """Multiplies e2m1 values, whose bits are at positions 15 and 8 to 6, by their scales in float32, and converts to ``dtype``.

    ``scale``: the scale's exponent field. The conversion is exact, except for float16 subnormals.
    """
    number = (code << 16).to(tl.float32, bitcast=True)
    return (number * (scale << 23).to(tl.float32, bitcast=True)).to(dtype)
