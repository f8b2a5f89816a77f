"""Dequantisation of `layout` words (e2m1 values and scales) to A fragments of mma.sync or wgmma in registers."""

# mypy: ignore-errors

from __future__ import annotations

import cutlass
from cutlass import Float32, Numeric, Uint32, cute

# Dequantises a word to four registers. A multiplication moves the two parts of an e2m1 value (sign; exponent and mantissa) to their
# positions. A mask clears all other bits. In a bfloat16 these positions are bits 15 and 8...6. The bfloat16 is 2^-126 times the
# e2m1 value. fma with -0 multiplies bfloat16x2 in one instruction and keeps the sign of a zero.
BFLOAT16 = """{
.reg .b32 a, s, z;
mov.b32 z, 0x80008000;
and.b32 a, {$r0}, 0x008E008E;
mul.lo.u32 a, a, 288;
and.b32 a, a, 0x81C081C0;
fma.rn.bf16x2 {$w0}, a, {$r1}, z;
shr.u32 a, {$r0}, 3;
and.b32 s, {$r0}, 0x80008000;
lop3.b32 a, a, 0x01C001C0, s, 0xEA;
fma.rn.bf16x2 {$w2}, a, {$r1}, z;
and.b32 a, {$r0}, 0x00710071;
mul.lo.u32 a, a, 32772;
and.b32 a, a, 0x81C081C0;
fma.rn.bf16x2 {$w1}, a, {$r2}, z;
shr.u32 a, {$r0}, 6;
shl.b32 s, {$r0}, 7;
and.b32 s, s, 0x80008000;
lop3.b32 a, a, 0x01C001C0, s, 0xEA;
fma.rn.bf16x2 {$w3}, a, {$r2}, z;
}"""
# In a float16 the positions of the two parts are bits 15 and 11...9. The float16 is 2^-14 times the e2m1 value.
FLOAT16 = """{
.reg .b32 a, s;
shl.b32 a, {$r0}, 8;
and.b32 a, a, 0x8E008E00;
mul.rn.f16x2 {$w0}, a, {$r1};
and.b32 a, {$r0}, 0x8E008E00;
mul.rn.f16x2 {$w2}, a, {$r1};
and.b32 a, {$r0}, 0x00710071;
mul.lo.u32 a, a, 32800;
and.b32 a, a, 0x8E008E00;
mul.rn.f16x2 {$w1}, a, {$r2};
shr.u32 a, {$r0}, 3;
shl.b32 s, {$r0}, 7;
and.b32 s, s, 0x80008000;
lop3.b32 a, a, 0x0E000E00, s, 0xEA;
mul.rn.f16x2 {$w3}, a, {$r2};
}"""
# Converts a word to two registers of float8_e5m2, which are 2^-14 times the e2m1 values. Each register has the values of one row,
# ordered along k as their bits are in the word.
E5M2 = """{
.reg .b32 a, s;
and.b32 {$w0}, {$r0}, 0x8E8E8E8E;
shr.u32 a, {$r0}, 3;
shl.b32 s, {$r0}, 7;
and.b32 s, s, 0x80808080;
lop3.b32 {$w1}, a, 0x0E0E0E0E, s, 0xEA;
}"""

# Like E5M2, with each value multiplied by its row's scale. The upper byte of a float16 is a float8_e5m2, so the conversion is exact
# for results of at least 2^-16.
SCALED_E5M2 = (
    FLOAT16.replace(".b32 a, s;", ".b32 a, s, w, x, y, z;")
    .replace("{$w0}", "w")
    .replace("{$w1}", "x")
    .replace("{$w2}", "y")
    .replace("{$w3}", "z")[:-1]
    + "prmt.b32 {$w0}, w, y, 0x7351;\nprmt.b32 {$w1}, x, z, 0x7351;\n}"
)

# Converts the four scale bytes of a lane's two rows to two pairs, {first half of k, second half}, by their exponent fields.
BFLOAT16_PAIRS = """{
.reg .b32 a;
shl.b32 a, {$r0}, 7;
and.b32 {$w0}, a, 0x7F807F80;
shr.u32 a, {$r0}, 1;
and.b32 {$w1}, a, 0x7F807F80;
}"""
# 253 maps to 2^14, whose exponent field is 29. A byte whose upper three bits are ones keeps its lower five bits. Other bytes are
# scales about 2^29 times smaller than their row's largest scale. They become 0.
FLOAT16_PAIRS = """{
.reg .b32 a, b;
shl.b32 a, {$r0}, 1;
shl.b32 b, {$r0}, 2;
and.b32 a, a, b;
and.b32 a, a, {$r0};
shr.u32 a, a, 7;
and.b32 a, a, 0x01010101;
mul.lo.u32 a, a, 31;
and.b32 a, a, {$r0};
shl.b32 b, a, 10;
and.b32 {$w0}, b, 0x7C007C00;
shl.b32 b, a, 2;
and.b32 {$w1}, b, 0x7C007C00;
}"""
# Like FLOAT16_PAIRS, for rows whose scales are all near the row's largest: a byte has ones as its upper three bits, or is 0.
NEAR_FLOAT16_PAIRS = """{
.reg .b32 b;
shl.b32 b, {$r0}, 10;
and.b32 {$w0}, b, 0x7C007C00;
shl.b32 b, {$r0}, 2;
and.b32 {$w1}, b, 0x7C007C00;
}"""
# Converts the four scale bytes of a lane's two rows to float32, with 2^62 for a row's largest. An exponent field of 253 would
# overflow when summed.
FLOATS = (
    "{ .reg .b32 a;"
    + "".join(
        f"shr.u32 a, {{$r0}}, {8 * byte}; and.b32 a, a, 255; mad.lo.u32 a, a, 0x00800000, 0xE0000000; mov.b32 {{$w{byte}}}, a;"
        for byte in range(4)
    )
    + "}"
)
# The factor for accumulators of `decode_e5m2` values that were scaled by these scales.
E5M2_FACTOR = 2.0 ** (14 - 62)
# Instructions on 16-bit pairs can use either half of an operand for both, so this broadcast is free.
BOTH = """{
.reg .b16 low, high;
mov.b32 {low, high}, {$r0};
mov.b32 {$w0}, {low, low};
mov.b32 {$w1}, {high, high};
}"""


def multipliers(dtype: type[Numeric], scales: Uint32) -> tuple[tuple[Uint32, Uint32], tuple[Uint32, Uint32]]:
    """Returns the scales of a block as 16-bit multipliers.

    Args:
        dtype: dtype of the operand, BFloat16 or Float16.
        scales: the four scale bytes of row ``lane / 4`` of a block.

    Returns:
        for each half of the block's k, the multipliers of the lane's first and second row, each duplicated in one register.
    """
    return _multipliers(BFLOAT16_PAIRS if dtype is cutlass.BFloat16 else FLOAT16_PAIRS, scales)


def near_multipliers(scales: Uint32) -> tuple[tuple[Uint32, Uint32], tuple[Uint32, Uint32]]:
    """Returns `multipliers` of float16, if no scale but 0 is more than 2^29 times smaller than the largest of its row."""
    return _multipliers(NEAR_FLOAT16_PAIRS, scales)


def _multipliers(code: str, scales: Uint32) -> tuple[tuple[Uint32, Uint32], tuple[Uint32, Uint32]]:
    first, second = cute.arch.inline_ptx(code, write_only_types=[Uint32] * 2, read_only_args=[scales])
    first_of, second_of = (cute.arch.inline_ptx(BOTH, write_only_types=[Uint32] * 2, read_only_args=[x]) for x in (first, second))
    return tuple(zip(first_of, second_of, strict=True))


def decode(dtype: type[Numeric], word: Uint32, first: Uint32, second: Uint32) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """Dequantises a word to the four registers of an MMA's A operand, 16 rows by 16 elements of k.

    Args:
        dtype: dtype of the operand, BFloat16 or Float16.
        word: the lane's word. Words ``s`` = 0 and 1 of a block cover the first half of its k, words 2 and 3 the second half.
        first, second: the `multipliers` of that half, for row ``lane / 4`` and for the row eight further.
    """
    code = BFLOAT16 if dtype is cutlass.BFloat16 else FLOAT16
    return cute.arch.inline_ptx(code, write_only_types=[Uint32] * 4, read_only_args=[word, first, second])


def decode_scaled_e5m2(word: Uint32, first: Uint32, second: Uint32) -> tuple[Uint32, Uint32]:
    """Returns `decode_e5m2` of a word times the multipliers of its two rows. ``first`` and ``second`` hold two float16 each, see
    `multipliers`.

    The result is exact if the scale is at least 2^-15 times the largest scale of its row.
    """
    return cute.arch.inline_ptx(SCALED_E5M2, write_only_types=[Uint32] * 2, read_only_args=[word, first, second])


def decode_e5m2(word: Uint32) -> tuple[Uint32, Uint32]:
    """Returns four values of row ``lane / 4`` and four of the row eight further, as float8_e5m2 times 2^-14.

    The bytes are elements 0, 8, 1 and 9 of k, relative to the lane's first element of the word.
    """
    return cute.arch.inline_ptx(E5M2, write_only_types=[Uint32] * 2, read_only_args=[word])


def scales_of(scales: Uint32) -> tuple[Float32, Float32, Float32, Float32]:
    """Returns the scales of a block as float32: of the lane's first and second row in the first half of k, then in the second."""
    return cute.arch.inline_ptx(FLOATS, write_only_types=[Float32] * 4, read_only_args=[scales])
