"""From words of the layout of `_mxfp4_layout` to tiles of weights, in registers."""

from __future__ import annotations

import triton
import triton.language as tl

# Two words at once. A multiplication puts the two parts of a code where they belong; what it puts elsewhere is cut away.
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
# A code's bits belong at 15 and 11...9, which makes it 2^-14 times its value.
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
# Hopper's asynchronous products read a left operand in registers until they end, and the compiler lets those of one turn of a loop
# run on into the next, which overwrites it: some results were wrong, most often with two programs on a multiprocessor. So who is
# about to write these registers waits first. In one turn, only the first word's wait has anything to wait for.
_WAIT = "{ wgmma.wait_group.sync.aligned 0;"
_BFLOAT16_ALONE = tl.constexpr("{" + _BFLOAT16)
_BFLOAT16_DRAINED = tl.constexpr(_WAIT + _BFLOAT16)
_FLOAT16_ALONE = tl.constexpr("{" + _FLOAT16)
_FLOAT16_DRAINED = tl.constexpr(_WAIT + _FLOAT16)


@triton.jit
def decode(word, scales, dtype: tl.constexpr, PTX: tl.constexpr, DRAIN: tl.constexpr):
    """The four weight tiles of a tile of words.

    ``scales``: int32, a column of exponent fields, a byte a tile. ``PTX``: by NVIDIA's instructions, on two numbers at a time,
    where dtype has 16 bits. ``DRAIN``: the tiles may be operands of Hopper's asynchronous products.
    """
    s0 = scales & 0xFF
    s1 = (scales >> 8) & 0xFF
    s2 = (scales >> 16) & 0xFF
    s3 = (scales >> 24) & 0xFF
    if PTX and dtype == tl.bfloat16:
        # Exponent fields, each twice in a word.
        return tl.inline_asm_elementwise(
            _BFLOAT16_DRAINED if DRAIN else _BFLOAT16_ALONE,
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r",
            [word, s0 * 0x00800080, s1 * 0x00800080, s2 * 0x00800080, s3 * 0x00800080],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    if PTX and dtype == tl.float16:
        # 253 stands for 2^14 here, whose field is 29. A scale 2^29 times smaller than its row's largest becomes 0.
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
    """Codes, at bits 15 and 8...6, times scales, each put where a float32 has such bits. Only float16 rounds, its subnormals."""
    number = (code << 16).to(tl.float32, bitcast=True)
    return (number * (scale << 23).to(tl.float32, bitcast=True)).to(dtype)
