"""Tests division and square root, single instructions and the sequences that LLVM emits, against exact arithmetic.

The definitions are V_DIV_SCALE, V_DIV_FMAS and V_DIV_FIXUP of the CDNA4 ISA document. Docstrings mention deviations from this
document.
"""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest

from gfx950_emulator.snippet import Snippet

from .oracles import F32, FORMATS, NAN, SPECIAL, Binary, fma, lane_bits, operands, read_lanes, same, words

TESTED = {f"v_div_{step}_{type_}" for step in ("scale", "fmas", "fixup") for type_ in ("f32", "f64")} | {"v_div_fixup_f16"}


def division_operands(type_: str, lanes: int, seed: int) -> tuple[list[int], list[int]]:
    """Returns numerators and denominators: special values, all exponents, quotients near the ends of the range, and ties among
    denormals."""
    form, rng = FORMATS[type_], random.Random(seed)
    top = (1 << form.exponent_bits) - 2
    numerators, denominators = [], []
    for lane in range(lanes):
        kind = lane % 5
        a, b = (rng.getrandbits(form.width) for _ in range(2))
        if kind == 0:
            a, b = rng.choice(SPECIAL[type_]), rng.choice(SPECIAL[type_])
        elif kind == 1:  # quotients that are denormal or almost denormal
            exponent = rng.randint(1, top - form.bias + 1)
            a = a & ~form.infinity | exponent << form.mantissa_bits
            apart = form.bias - 1 + rng.randint(-2, form.mantissa_bits + 2)
            b = b & ~form.infinity | min(exponent + apart, top) << form.mantissa_bits
        elif kind == 2:  # quotients that nearly overflow
            exponent = rng.randint(1, form.bias)
            b = b & ~form.infinity | exponent << form.mantissa_bits
            a = a & ~form.infinity | min(exponent + form.bias + rng.randint(-2, 2), top) << form.mantissa_bits
        elif kind == 3:  # operands with few bits: exact quotients, and ties of denormal quotients
            a, b = (x & ~((1 << (form.mantissa_bits - 2)) - 1) for x in (a, b))
        numerators.append(a)
        denominators.append(b)
    return numerators, denominators


def quotient(form: Binary, a: int, b: int) -> int | str:
    if form.is_nan(a) or form.is_nan(b):
        return NAN
    sign = (a ^ b) & form.sign_bit
    if form.is_infinite(a) or form.is_infinite(b):
        return NAN if form.is_infinite(a) and form.is_infinite(b) else sign | (form.infinity if form.is_infinite(a) else 0)
    if form.is_zero(b):
        return NAN if form.is_zero(a) else sign | form.infinity
    return sign | form.magnitude(form.round(abs(form.value(a) / form.value(b))))


# The code that LLVM (as of Triton 3.9) emits for gfx950 for a / b and sqrt(a). The first operand is in v1 or v[0:1], and the second
# in v2 or v[2:3]. The result replaces the first operand.
DIVIDE_F32 = """
v_div_scale_f32 v3, s[0:1], v2, v2, v1
v_rcp_f32_e32 v4, v3
v_div_scale_f32 v5, vcc, v1, v2, v1
v_fma_f32 v6, -v3, v4, 1.0
v_fmac_f32_e32 v4, v6, v4
v_mul_f32_e32 v6, v5, v4
v_fma_f32 v7, -v3, v6, v5
v_fmac_f32_e32 v6, v7, v4
v_fma_f32 v3, -v3, v6, v5
v_div_fmas_f32 v3, v3, v4, v6
v_div_fixup_f32 v1, v3, v2, v1
"""
DIVIDE_F64 = """
v_div_scale_f64 v[4:5], s[0:1], v[2:3], v[2:3], v[0:1]
v_rcp_f64_e32 v[6:7], v[4:5]
v_div_scale_f64 v[8:9], vcc, v[0:1], v[2:3], v[0:1]
v_fma_f64 v[10:11], -v[4:5], v[6:7], 1.0
v_fmac_f64_e32 v[6:7], v[6:7], v[10:11]
v_fma_f64 v[10:11], -v[4:5], v[6:7], 1.0
v_fmac_f64_e32 v[6:7], v[6:7], v[10:11]
v_mul_f64 v[10:11], v[8:9], v[6:7]
v_fma_f64 v[4:5], -v[4:5], v[10:11], v[8:9]
v_div_fmas_f64 v[4:5], v[4:5], v[6:7], v[10:11]
v_div_fixup_f64 v[0:1], v[4:5], v[2:3], v[0:1]
"""
DIVIDE_F16 = """
v_cvt_f32_f16_e32 v3, v2
v_rcp_f32_e32 v3, v3
v_fma_mix_f32 v4, v1, v3, neg(0) op_sel_hi:[1,0,0]
v_fma_mix_f32 v5, -v2, v4, v1 op_sel_hi:[1,0,1]
v_fmac_f32_e32 v4, v5, v3
v_fma_mix_f32 v5, -v2, v4, v1 op_sel_hi:[1,0,1]
v_mul_f32_e32 v3, v5, v3
v_and_b32_e32 v3, 0xff800000, v3
v_add_f32_e32 v3, v3, v4
v_cvt_f16_f32_e32 v3, v3
v_div_fixup_f16 v1, v3, v2, v1
"""
ROOT_F32 = """
v_mov_b32_e32 v3, 0x260
s_mov_b32 s0, 0xf800000
v_mul_f32_e32 v2, 0x4f800000, v1
v_cmp_gt_f32_e32 vcc, s0, v1
v_cndmask_b32_e32 v1, v1, v2, vcc
v_sqrt_f32_e32 v2, v1
v_add_u32_e32 v4, -1, v2
v_add_u32_e32 v5, 1, v2
v_fma_f32 v6, -v4, v2, v1
v_fma_f32 v7, -v5, v2, v1
v_cmp_ge_f32_e64 s[0:1], 0, v6
v_cndmask_b32_e64 v2, v2, v4, s[0:1]
v_cmp_lt_f32_e64 s[0:1], 0, v7
v_cndmask_b32_e64 v2, v2, v5, s[0:1]
v_mul_f32_e32 v4, 0x37800000, v2
v_cndmask_b32_e32 v2, v2, v4, vcc
v_cmp_class_f32_e32 vcc, v1, v3
v_cndmask_b32_e32 v1, v2, v1, vcc
"""
ROOT_F64 = """
v_mov_b32_e32 v2, 0x100
v_mov_b32_e32 v4, 0xffffff80
s_mov_b32 s0, 0
s_brev_b32 s1, 8
v_mov_b32_e32 v9, 0x260
v_cmp_gt_f64_e32 vcc, s[0:1], v[0:1]
v_cndmask_b32_e32 v2, 0, v2, vcc
v_ldexp_f64 v[0:1], v[0:1], v2
v_rsq_f64_e32 v[2:3], v[0:1]
v_cndmask_b32_e32 v10, 0, v4, vcc
v_cmp_class_f64_e32 vcc, v[0:1], v9
v_mul_f64 v[4:5], v[0:1], v[2:3]
v_mul_f64 v[2:3], v[2:3], 0.5
v_fma_f64 v[6:7], -v[2:3], v[4:5], 0.5
v_fmac_f64_e32 v[4:5], v[4:5], v[6:7]
v_fmac_f64_e32 v[2:3], v[2:3], v[6:7]
v_fma_f64 v[6:7], -v[4:5], v[4:5], v[0:1]
v_fmac_f64_e32 v[4:5], v[6:7], v[2:3]
v_fma_f64 v[6:7], -v[4:5], v[4:5], v[0:1]
v_fmac_f64_e32 v[4:5], v[6:7], v[2:3]
v_ldexp_f64 v[2:3], v[4:5], v10
v_cndmask_b32_e32 v1, v3, v1, vcc
v_cndmask_b32_e32 v0, v2, v0, vcc
"""


def square_root(form: Binary, a: int) -> int | str:
    if form.is_nan(a) or (form.negative(a) and not form.is_zero(a)):
        return NAN
    if form.is_infinite(a) or form.is_zero(a):
        return a
    # The root as an integer in units far below its last bit. One more bit says whether the root is inexact.
    exponent = 4 * form.bias
    scaled = form.value(a) * Fraction(4) ** exponent
    whole = math.isqrt(scaled.numerator // scaled.denominator)
    rest = int(whole * whole != scaled)
    return form.round(Fraction(2 * whole + rest, 2) / Fraction(2) ** exponent)


def _registers(type_: str, first: int, column: list[int]) -> dict[int, np.ndarray]:
    return {first + i: w for i, w in enumerate(words(column, FORMATS[type_].width))}


@pytest.mark.parametrize(("type_", "text"), [("f16", DIVIDE_F16), ("f32", DIVIDE_F32), ("f64", DIVIDE_F64)])
def test_division_is_rounded_correctly(type_: str, text: str) -> None:
    form, waves = FORMATS[type_], 48
    a, b = division_operands(type_, 64 * waves, 1)
    first, second = (0, 2) if type_ == "f64" else (1, 2)
    snippet = Snippet(text, v=_registers(type_, first, a) | _registers(type_, second, b), waves=waves).run()
    got = [bits & ((1 << form.width) - 1) for bits in read_lanes(snippet, first, max(form.width, 32))]
    wrong = [(hex(x), hex(y), hex(g)) for x, y, g in zip(a, b, got, strict=True) if not same(type_, quotient(form, x, y), g)]
    assert not wrong, (len(wrong), wrong[:5])


@pytest.mark.parametrize(("type_", "text"), [("f32", ROOT_F32), ("f64", ROOT_F64)])
def test_square_root_is_rounded_correctly(type_: str, text: str) -> None:
    form, waves = FORMATS[type_], 16
    rng = random.Random(3)
    a = operands((type_,), 64 * waves, 5)[0]
    for lane in range(0, len(a), 3):  # squares, and numbers next to them
        root_bits = rng.getrandbits(form.width) & (form.sign_bit - 1)
        if form.bias // 2 < form.exponent(root_bits) < form.bias * 3 // 2:
            a[lane] = form.round(form.value(root_bits) ** 2) + rng.randint(-1, 1)
    first = 0 if type_ == "f64" else 1
    snippet = Snippet(text, v=_registers(type_, first, a), waves=waves).run()
    got = read_lanes(snippet, first, form.width)
    wrong = [(hex(x), hex(g)) for x, g in zip(a, got, strict=True) if not same(type_, square_root(form, x), g)]
    assert not wrong, (len(wrong), wrong[:5])


def div_scale(form: Binary, value: int, denominator: int, numerator: int) -> tuple[int | str, bool]:
    """Returns V_DIV_SCALE's result and flag by the ISA's pseudocode, with one exception: a denominator whose reciprocal and
    quotient are denormal is scaled down, not up."""
    power, far, tiny = (64, 96, 23) if form is F32 else (128, 768, 53)
    smallest = Fraction(2) ** (1 - form.bias)

    def scaled(exponent: int) -> int | str:
        if form.is_zero(value):
            return value
        return form.round(form.value(value) * Fraction(2) ** exponent) | (value & form.sign_bit)

    same_denominator, same_numerator = value == denominator, value == numerator
    if form.is_zero(numerator) or form.is_zero(denominator):
        return NAN, False
    if form.exponent(numerator) - form.exponent(denominator) >= far:
        return (scaled(power) if same_denominator else value), True
    if form.is_denormal(denominator):
        return scaled(power), False
    reciprocal_denormal = 1 / abs(form.value(denominator)) < smallest
    quotient_denormal = abs(form.value(numerator) / form.value(denominator)) < smallest
    if reciprocal_denormal and quotient_denormal:
        return (scaled(-power) if same_denominator else value), True
    if reciprocal_denormal:
        return scaled(-power), False
    if quotient_denormal:
        return (scaled(power) if same_numerator else value), True
    return (scaled(power) if form.exponent(numerator) <= tiny else value), False


@pytest.mark.parametrize("type_", ["f32", "f64"])
@pytest.mark.parametrize("of", ["numerator", "denominator"])
def test_div_scale(type_: str, of: str) -> None:
    """Tests finite operands only, because v_div_fixup overwrites the results of other operands."""
    form, lanes = FORMATS[type_], 1280
    a, b = division_operands(type_, lanes, 2)
    a, b = ([form.one if form.exponent(x) == (1 << form.exponent_bits) - 1 else x for x in column] for column in (a, b))
    far, tiny = (96, 23) if type_ == "f32" else (768, 53)
    for i in range(0, lanes, 4):  # next to the boundaries between cases
        exponents = (tiny + i // 4 % 3 - 1, tiny) if i % 8 else (far + 5 + i // 8 % 3 - 1, 5)
        a[i], b[i] = (x & ~form.infinity | e << form.mantissa_bits for x, e in zip((a[i], b[i]), exponents, strict=True))
    value = a if of == "numerator" else b
    rng = random.Random(1)
    on = [rng.random() < 0.7 for _ in range(lanes)]
    v = {base + i: w for base, column in ((8, a), (12, b), (16, value)) for i, w in enumerate(words(column, form.width))}
    registers = ("v0", "v16", "v12", "v8") if type_ == "f32" else ("v[0:1]", "v[16:17]", "v[12:13]", "v[8:9]")
    line = f"v_div_scale_{type_} {registers[0]}, s[10:11], {', '.join(registers[1:])}"
    snippet = Snippet(line, v={0: 1, 1: 2} | v, s={"exec": lane_bits(on)}, waves=lanes // 64).run()
    flags, results = snippet.lanes(10).tolist(), read_lanes(snippet, 0, form.width)
    for lane in range(lanes):
        if not on[lane]:
            assert (results[lane], flags[lane]) == (1 if type_ == "f32" else 2 << 32 | 1, False)
            continue
        expected, flag = div_scale(form, value[lane], b[lane], a[lane])
        assert same(type_, expected, results[lane]), (hex(a[lane]), hex(b[lane]), expected, hex(results[lane]))
        assert flags[lane] == flag


def test_div_scale_of_uniform_operands() -> None:
    line = "v_div_scale_f32 v0, vcc, s4, s4, 1.0"
    snippet = Snippet(line, s={4: [0x00000001, 0x7F000000, 0x40400000]}, waves=3).run()
    expected = [div_scale(F32, x, x, F32.one) for x in (1, 0x7F000000, 0x40400000)]
    assert read_lanes(snippet, 0, 32)[::64] == [e[0] for e in expected]
    assert snippet.lanes("vcc").tolist()[::64] == [e[1] for e in expected]


@pytest.mark.parametrize("type_", ["f32", "f64"])
def test_div_fmas(type_: str) -> None:
    """The result is scaled up if S2 is at least 2, otherwise down, with one rounding."""
    form, lanes = FORMATS[type_], 512
    columns = operands((type_,) * 3, lanes, 6)
    rng = random.Random(2)
    for i in range(0, lanes, 2):  # results that become denormal when they are scaled back
        exponent = form.bias - (form.bias - (64 if type_ == "f32" else 128)) - rng.randint(-3, form.mantissa_bits + 3)
        columns[2][i] = rng.getrandbits(form.width) & ~form.infinity | exponent << form.mantissa_bits
        columns[0][i] = (
            rng.getrandbits(form.width) & ~form.infinity | max(exponent - form.mantissa_bits - 2, 1) << form.mantissa_bits
        )
        columns[1][i] = form.one | rng.getrandbits(form.mantissa_bits)
    for i in range(1, lanes, 8):  # nearly a tie of two denormals when scaled back
        kept = rng.randint(2, form.mantissa_bits - 2)
        power = 64 if type_ == "f32" else 128
        tie = Fraction(2 * rng.getrandbits(kept) + 1) * Fraction(2) ** (power - form.bias - form.mantissa_bits)
        columns[2][i] = form.round(tie)
        columns[0][i] = form.round(tie / Fraction(2) ** (3 * form.mantissa_bits)) | (form.sign_bit if rng.random() < 0.5 else 0)
        columns[1][i] = form.one
    on, scaled = ([rng.random() < 0.7 for _ in range(lanes)] for _ in range(2))
    v = {8 + 4 * i + j: w for i, column in enumerate(columns) for j, w in enumerate(words(column, form.width))}
    registers = "v0, v8, v12, v16" if type_ == "f32" else "v[0:1], v[8:9], v[12:13], v[16:17]"
    s = {"exec": lane_bits(on), "vcc": lane_bits(scaled)}
    snippet = Snippet(f"v_div_fmas_{type_} {registers}", v={0: 1, 1: 2} | v, s=s, waves=lanes // 64).run()
    power = 64 if type_ == "f32" else 128
    for lane, got in enumerate(read_lanes(snippet, 0, form.width)):
        if not on[lane]:
            assert got == (1 if type_ == "f32" else 2 << 32 | 1)
            continue
        a, b, c = (column[lane] for column in columns)
        expected = fma(form, a, b, c)
        finite = not any(form.exponent(x) == (1 << form.exponent_bits) - 1 for x in (a, b, c))
        if scaled[lane] and finite:
            exact = form.value(a) * form.value(b) + form.value(c)
            if exact:
                expected = form.round(exact * Fraction(2) ** (power if abs(form.value(c)) >= 2 else -power))
                expected |= form.sign_bit if exact < 0 else 0
        assert same(type_, expected, got), (hex(a), hex(b), hex(c), scaled[lane], expected, hex(got))


@pytest.mark.parametrize("type_", ["f16", "f32", "f64"])
def test_div_fixup(type_: str) -> None:
    """The result depends on sign and class of denominator and numerator, and on exponents that are far apart. Otherwise, it is the
    quotient with the right sign."""
    form, lanes = FORMATS[type_], 640
    numerators, denominators = division_operands(type_, lanes, 3)
    given = operands((type_,), lanes, 4)[0]
    columns = (given, denominators, numerators)
    v = {8 + 4 * i + j: w for i, column in enumerate(columns) for j, w in enumerate(words(column, form.width))}
    registers = "v[0:1], v[8:9], v[12:13], v[16:17]" if type_ == "f64" else "v0, v8, v12, v16"
    snippet = Snippet(f"v_div_fixup_{type_} {registers}", v={0: 0xABCD0000, **v}, waves=lanes // 64).run()
    under, over = {"f16": (-99, 99), "f32": (-150, 129), "f64": (-1075, 1025)}[type_]
    for got, q, b, a in zip(read_lanes(snippet, 0, max(form.width, 32)), *columns, strict=True):
        special = quotient(form, a, b)
        apart = form.exponent(a) - form.exponent(b)
        kinds = [form.is_zero(x) or form.is_infinite(x) or form.is_nan(x) for x in (a, b)]
        sign = (a ^ b) & form.sign_bit
        if any(kinds):
            expected = special
        elif apart < under:
            expected = sign
        elif apart > over:
            expected = sign | form.infinity
        else:
            expected = NAN if form.is_nan(q) else sign | form.magnitude(q)
        if type_ == "f16":
            assert got >> 16 == 0xABCD
            got &= 0xFFFF
        if expected == NAN and form.is_nan(q) and not any(kinds):
            assert form.is_nan(got)
            continue
        assert same(type_, expected, got), (hex(q), hex(b), hex(a), expected, hex(got))
