"""Dequantisation of mxfp4 weights in the layout of `layout` to A fragments of mma.sync or wgmma in registers.

A *word* is 32 bits with eight e2m1 values of two rows. A *block* is a strip's 64 elements of k, with two scales per row. There are
three ways:

* `decode` makes 16-bit operands, values times scales;
* `decode_e5m2` makes float8_e5m2 operands of the values alone, in a third of the instructions. The kernel then scales the partial
  sums of each half block (`scales_of`);
* `decode_scaled_e5m2` makes float8_e5m2 operands, values times scales, for weights that float8_e5m2 represents exactly.
"""

# mypy: ignore-errors

from __future__ import annotations

import cutlass
from cutlass import Float32, Numeric, Uint32, cute

# Dequantises a word to four registers of bfloat16x2. An e2m1 value has two bit fields: the sign, and the exponent with the
# mantissa. A multiplication (for two registers) or shifts (for the other two) move the fields to bits 15 and 8...6 of a bfloat16. A
# mask clears all other bits. The bfloat16 is 2^-126 times the e2m1 value. fma with -0 multiplies bfloat16x2 in one instruction and
# keeps the sign of a zero.
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
# Like BFLOAT16, for float16x2: the fields move to bits 15 and 11...9. The float16 is 2^-14 times the e2m1 value.
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
# in the order along k that `decode_e5m2` describes.
E5M2 = """{
.reg .b32 a, s;
and.b32 {$w0}, {$r0}, 0x8E8E8E8E;
shr.u32 a, {$r0}, 3;
shl.b32 s, {$r0}, 7;
and.b32 s, s, 0x80808080;
lop3.b32 {$w1}, a, 0x0E0E0E0E, s, 0xEA;
}"""

# Like E5M2, with each value multiplied by its row's scale in float16. The upper byte of a float16 is a float8_e5m2, so the
# conversion is exact for results of at least 2^-16.
SCALED_E5M2 = (
    FLOAT16.replace(".b32 a, s;", ".b32 a, s, w, x, y, z;")
    .replace("{$w0}", "w")
    .replace("{$w1}", "x")
    .replace("{$w2}", "y")
    .replace("{$w3}", "z")[:-1]
    + "prmt.b32 {$w0}, w, y, 0x7351;\nprmt.b32 {$w1}, x, z, 0x7351;\n}"
)

# Converts a block's four scale bytes of a lane's two rows to a bfloat16x2 per row: the scales of the block's first and second half
# of k. A scale byte becomes the bfloat16's exponent field.
BFLOAT16_PAIRS = """{
.reg .b32 a;
shl.b32 a, {$r0}, 7;
and.b32 {$w0}, a, 0x7F807F80;
shr.u32 a, {$r0}, 1;
and.b32 {$w1}, a, 0x7F807F80;
}"""
# Like BFLOAT16_PAIRS, for float16x2. Byte 253, a row's largest scale, becomes 2^14, whose exponent field is 29. A byte whose upper
# three bits are ones keeps its lower five bits as the exponent field. Other bytes are scales about 2^29 times smaller than their
# row's largest scale. These scales become 0.
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
# Like FLOAT16_PAIRS, for rows in which each scale byte is 0 or has ones as its upper three bits.
NEAR_FLOAT16_PAIRS = """{
.reg .b32 b;
shl.b32 b, {$r0}, 10;
and.b32 {$w0}, b, 0x7C007C00;
shl.b32 b, {$r0}, 2;
and.b32 {$w1}, b, 0x7C007C00;
}"""
# Converts a block's four scale bytes of a lane's two rows to float32. The exponent field is the byte minus 64, so a row's largest
# scale, whose byte is 253, becomes 2^62. With 253 itself as the exponent field, accumulators would overflow.
FLOATS = (
    "{ .reg .b32 a;"
    + "".join(
        f"shr.u32 a, {{$r0}}, {8 * byte}; and.b32 a, a, 255; mad.lo.u32 a, a, 0x00800000, 0xE0000000; mov.b32 {{$w{byte}}}, a;"
        for byte in range(4)
    )
    + "}"
)
# Factor for accumulators of `decode_e5m2` weights that were scaled by `scales_of`: undoes their 2^-14 and 2^62.
E5M2_FACTOR = 2.0 ** (14 - 62)
# Copies the lower 16 bits of a register to both halves of a register, and the upper 16 bits to both halves of another. Instructions
# on 16-bit pairs can use either half of an operand for both elements, so these copies are free.
BOTH = """{
.reg .b16 low, high;
mov.b32 {low, high}, {$r0};
mov.b32 {$w0}, {low, low};
mov.b32 {$w1}, {high, high};
}"""


def multipliers(dtype: type[Numeric], scales: Uint32) -> tuple[tuple[Uint32, Uint32], tuple[Uint32, Uint32]]:
    """Returns a block's scales, for the lane's two rows, as multipliers for `decode`.

    Args:
        dtype: dtype of the operand, BFloat16 or Float16.
        scales: the block's four scale bytes of rows ``lane / 4`` and ``lane / 4 + 8`` of the strip.

    Returns:
        For each half of the block's k: the multipliers of the lane's first and second row, each twice in one register.
    """
    return _multipliers(BFLOAT16_PAIRS if dtype is cutlass.BFloat16 else FLOAT16_PAIRS, scales)


def near_multipliers(scales: Uint32) -> tuple[tuple[Uint32, Uint32], tuple[Uint32, Uint32]]:
    """Like `multipliers` for float16, in fewer instructions. Requires that no nonzero scale is more than 2^29 times smaller than
    its row's largest scale."""
    return _multipliers(NEAR_FLOAT16_PAIRS, scales)


def _multipliers(code: str, scales: Uint32) -> tuple[tuple[Uint32, Uint32], tuple[Uint32, Uint32]]:
    """Returns the results of `multipliers`. ``code``: instructions that convert the scale bytes."""
    first, second = cute.arch.inline_ptx(code, write_only_types=[Uint32] * 2, read_only_args=[scales])
    first_of, second_of = (cute.arch.inline_ptx(BOTH, write_only_types=[Uint32] * 2, read_only_args=[x]) for x in (first, second))
    return tuple(zip(first_of, second_of, strict=True))


def decode(dtype: type[Numeric], word: Uint32, first: Uint32, second: Uint32) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """Dequantises a word to the four registers of an MMA's A operand, 16 rows by 16 elements of k.

    Args:
        dtype: dtype of the operand, BFloat16 or Float16.
        word: one of the lane's four words of a block. Words 0 and 1 cover the first half of the block's k, words 2 and 3 the
            second.
        first, second: the `multipliers` of that half of k, for rows ``lane / 4`` and ``lane / 4 + 8``.
    """
    code = BFLOAT16 if dtype is cutlass.BFloat16 else FLOAT16
    return cute.arch.inline_ptx(code, write_only_types=[Uint32] * 4, read_only_args=[word, first, second])


def decode_scaled_e5m2(word: Uint32, first: Uint32, second: Uint32) -> tuple[Uint32, Uint32]:
    """Like `decode_e5m2`, with the values of each of the word's two rows multiplied by the row's scale. ``first`` and ``second``
    are the two rows' float16 `multipliers`.

    The result is exact if the scale is at least 2^-15 times the largest scale of its row.
    """
    return cute.arch.inline_ptx(SCALED_E5M2, write_only_types=[Uint32] * 2, read_only_args=[word, first, second])


def decode_e5m2(word: Uint32) -> tuple[Uint32, Uint32]:
    """Converts a word to two registers of float8_e5m2: four values of row ``lane / 4``, and four of row ``lane / 4 + 8``.

    The results are 2^-14 times the e2m1 values. The bytes of a register are elements 0, 8, 1 and 9 along k, relative to the lane's
    first element of the word.
    """
    return cute.arch.inline_ptx(E5M2, write_only_types=[Uint32] * 2, read_only_args=[word])


def scales_of(scales: Uint32) -> tuple[Float32, Float32, Float32, Float32]:
    """Converts a block's four scale bytes to float32; a row's largest scale becomes 2^62. Returns the scales of the lane's first
    and second row for the first half of the block's k, then for the second half."""
    return cute.arch.inline_ptx(FLOATS, write_only_types=[Float32] * 4, read_only_args=[scales])
