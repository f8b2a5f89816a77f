"""Dequantisation of e2m1 weights in the layouts of `layout` to A fragments of mma.sync in registers."""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Numeric, Uint32, cute

from tokenspeed_kernel_nvidia.cutedsl.mxfp4.decode_device import BOTH, multipliers

# Dequantises a word (eight e2m1 values) to four registers of bfloat16x2. The bits of an e2m1 value move to bits 15 and 8...6 of a
# bfloat16, which is then 2^-126 times the e2m1 value. Left shifts compile to multiplications, which use another pipe than the
# logical instructions. fma with -0 multiplies bfloat16x2 in one instruction.
_BFLOAT16 = """{
.reg .b32 a, b, z;
mov.b32 z, 0x80008000;
and.b32 a, {$r0}, 0x81C081C0;
fma.rn.bf16x2 {$w0}, a, {$r1}, z;
shl.b32 a, {$r0}, 3;
and.b32 a, a, 0x81C081C0;
fma.rn.bf16x2 {$w2}, a, {$r1}, z;
shl.b32 a, {$r0}, 6;
and.b32 a, a, 0x81C081C0;
fma.rn.bf16x2 {$w1}, a, {$r2}, z;
shr.u32 a, {$r0}, 5;
and.b32 a, a, 0x01400140;
shr.u32 b, {$r0}, 3;
lop3.b32 a, b, 0x00800080, a, 0xEA;
shl.b32 b, {$r0}, 1;
lop3.b32 a, b, 0x80008000, a, 0xEA;
fma.rn.bf16x2 {$w3}, a, {$r2}, z;
}"""
# Like _BFLOAT16, for float16x2: an e2m1 value's sign moves to bit 15, and the other bits to bits 11...9. The float16 is 2^-14 times
# the e2m1 value.
_FLOAT16 = """{
.reg .b32 a, b;
and.b32 a, {$r0}, 0x80008000;
shl.b32 b, {$r0}, 3;
lop3.b32 a, b, 0x0E000E00, a, 0xEA;
mul.rn.f16x2 {$w0}, a, {$r1};
and.b32 a, b, 0x80008000;
shl.b32 b, {$r0}, 6;
lop3.b32 a, b, 0x0E000E00, a, 0xEA;
mul.rn.f16x2 {$w2}, a, {$r1};
and.b32 a, b, 0x80008000;
shl.b32 b, {$r0}, 9;
lop3.b32 a, b, 0x0E000E00, a, 0xEA;
mul.rn.f16x2 {$w1}, a, {$r2};
shl.b32 b, {$r0}, 1;
and.b32 a, b, 0x80008000;
lop3.b32 a, {$r0}, 0x04000400, a, 0xEA;
shr.u32 b, {$r0}, 2;
lop3.b32 a, b, 0x0A000A00, a, 0xEA;
mul.rn.f16x2 {$w3}, a, {$r2};
}"""
# Converts two consecutive nvfp4 scale bytes: to 2^7 times their value as float16, or 2^119 times as bfloat16.
_NUMBERS = {
    cutlass.BFloat16: "{{ .reg .b32 a; prmt.b32 a, {{$r0}}, 0, {order}; mad.lo.u32 {{$w0}}, a, 16, 0x70007000; }}",
    cutlass.Float16: "{{ .reg .b32 a; prmt.b32 a, {{$r0}}, 0, {order}; shl.b32 {{$w0}}, a, 7; }}",
}


def multipliers_of(dtype: type[Numeric], weights: str, scales: Any, step: int) -> tuple[Uint32, Uint32]:
    """Returns a word's scales for rows ``lane / 4`` and ``lane / 4 + 8`` of the strip, each twice in one register.

    Args:
        dtype: dtype of the operand, BFloat16 or Float16.
        weights: the format of the weights, ``"mxfp4"`` or ``"nvfp4"``.
        scales: the block's scale words of these two rows.
        step: the word's index in its block.
    """
    if weights == "mxfp4":
        return multipliers(dtype, scales[0])[step // 2]
    order = "0x4342" if step % 2 else "0x4140"  # the two bytes of this step, each followed by a zero
    code = _NUMBERS[dtype].format(order=order)
    both = cute.arch.inline_ptx(code, write_only_types=[Uint32], read_only_args=[scales[step // 2]])
    return cute.arch.inline_ptx(BOTH, write_only_types=[Uint32] * 2, read_only_args=[both])


def decode(dtype: type[Numeric], word: Uint32, first: Uint32, second: Uint32) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """Dequantises a word to the four registers of an MMA's A operand, 16 rows by 16 elements of k.

    Args:
        dtype: dtype of the operand, BFloat16 or Float16.
        word: one of the lane's four words of a block.
        first, second: the word's scales of the lane's two rows, from `multipliers_of`.
    """
    code = _BFLOAT16 if dtype is cutlass.BFloat16 else _FLOAT16
    return cute.arch.inline_ptx(code, write_only_types=[Uint32] * 4, read_only_args=[word, first, second])
