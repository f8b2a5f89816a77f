"""Tests vector floating-point instructions against their definition, lane by lane, in exact arithmetic (CDNA4 ISA document,
chapters VOP1 to VOP3P)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from gfx950_emulator.snippet import Snippet

from .oracles import (
    BF16,
    F16,
    F32,
    F64,
    FORMATS,
    NAN,
    Binary,
    Case,
    add,
    check,
    fma,
    lane_bits,
    multiply,
    operands,
    random_bits,
    read_lanes,
    same,
    signed,
    words,
)

Oracle = Callable[..., "int | str"]


def subtract(form: Binary, a: int, b: int) -> int | str:
    return add(form, a, b ^ form.sign_bit)


def rounded_to_integer(form: Binary, how: Callable[[Fraction], int]) -> Oracle:
    def oracle(a: int) -> int | str:
        if form.is_nan(a):
            return NAN
        if form.is_infinite(a):
            return a
        return form.round(Fraction(how(form.value(a))), negative=form.negative(a))

    return oracle


def choice(form: Binary, largest: bool) -> Oracle:
    """Returns the oracle of v_min or v_max with MODE.IEEE set. A signalling NaN has precedence over all other operands, and a
    number over a quiet NaN. -0 is below +0."""

    def oracle(a: int, b: int) -> int | str:
        if form.is_signalling(a) or form.is_signalling(b) or (form.is_nan(a) and form.is_nan(b)):
            return NAN
        if form.is_nan(a) or form.is_nan(b):
            return b if form.is_nan(a) else a
        return (max if largest else min)(a, b, key=form.key)

    return oracle


def choice_of_three(form: Binary, largest: bool) -> Oracle:
    two = choice(form, largest)

    def oracle(a: int, b: int, c: int) -> int | str:
        first = two(a, b)
        return two(form.infinity | 1 << (form.mantissa_bits - 1) if first == NAN else first, c)

    return oracle


def choice_or_nan(form: Binary, largest: bool) -> Oracle:
    def oracle(*numbers: int) -> int | str:
        if any(form.is_nan(x) for x in numbers):
            return NAN
        return (max if largest else min)(*numbers, key=form.key)

    return oracle


def median(form: Binary) -> Oracle:
    """Returns an oracle that follows the ISA's pseudocode: it returns v_max of the operands that remain after the first largest
    operand is removed. Zeros of both signs compare equal."""
    low, high, two = choice_of_three(form, False), choice_of_three(form, True), choice(form, True)

    def equal(a: int, b: int) -> bool:
        return a == b or (form.is_zero(a) and form.is_zero(b))

    def oracle(a: int, b: int, c: int) -> int | str:
        if any(form.is_nan(x) for x in (a, b, c)):
            return low(a, b, c)
        top = high(a, b, c)
        if equal(top, a):
            return two(b, c)
        return two(a, c) if equal(top, b) else two(a, b)

    return oracle


def fraction(form: Binary) -> Oracle:
    def oracle(a: int) -> int | str:
        if form.is_nan(a) or form.is_infinite(a):
            return NAN
        value = form.value(a)
        return min(form.round(value - math.floor(value)), form.one - 1)

    return oracle


def floor_log2(value: Fraction) -> int:
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent - (Fraction(2) ** exponent > value)


def frexp_exponent(form: Binary) -> Oracle:
    def oracle(a: int) -> int:
        if form.is_nan(a) or form.is_infinite(a) or form.is_zero(a):
            return 0
        return floor_log2(abs(form.value(a))) + 1

    return oracle


def frexp_mantissa(form: Binary) -> Oracle:
    def oracle(a: int) -> int | str:
        if form.is_nan(a):
            return NAN
        if form.is_infinite(a) or form.is_zero(a):
            return a
        value = form.value(a)
        return form.round(value / Fraction(2) ** (floor_log2(abs(value)) + 1))

    return oracle


def ldexp(form: Binary) -> Oracle:
    def oracle(a: int, exponent: int) -> int | str:
        if form.is_nan(a):
            return NAN
        if form.is_infinite(a) or form.is_zero(a):
            return a
        # beyond these exponents, every number overflows or becomes zero
        result = form.round(form.value(a) * Fraction(2) ** max(min(exponent, 3000), -3000))
        return result | (a & form.sign_bit)

    return oracle


def _cases() -> list[Case]:
    cases = []
    for type_, form in FORMATS.items():
        one, two, three = (type_,), (type_,) * 2, (type_,) * 3
        short = "" if type_ == "f64" else "_e32"
        cases += [
            Case(f"v_add_{type_}", type_, two, lambda a, b, f=form: add(f, a, b), short),
            Case(f"v_mul_{type_}", type_, two, lambda a, b, f=form: multiply(f, a, b), short),
            Case(f"v_min_{type_}", type_, two, choice(form, False), short),
            Case(f"v_max_{type_}", type_, two, choice(form, True), short),
            Case(f"v_fma_{type_}", type_, three, lambda a, b, c, f=form: fma(f, a, b, c), keeps=True),
            Case(f"v_floor_{type_}", type_, one, rounded_to_integer(form, math.floor), "_e32"),
            Case(f"v_ceil_{type_}", type_, one, rounded_to_integer(form, math.ceil), "_e32"),
            Case(f"v_trunc_{type_}", type_, one, rounded_to_integer(form, math.trunc), "_e32"),
            Case(f"v_rndne_{type_}", type_, one, rounded_to_integer(form, round), "_e32"),
            Case(f"v_fract_{type_}", type_, one, fraction(form), "_e32"),
            Case(f"v_frexp_mant_{type_}", type_, one, frexp_mantissa(form), "_e32"),
        ]
        integer = "i16" if type_ == "f16" else "i32"
        cases += [
            Case(f"v_frexp_exp_{integer}_{type_}", integer, one, frexp_exponent(form), "_e32"),
            Case(f"v_ldexp_{type_}", type_, (type_, integer), ldexp(form), "_e32" if type_ == "f16" else ""),
        ]
        if type_ != "f64":
            cases += [
                Case(f"v_sub_{type_}", type_, two, lambda a, b, f=form: subtract(f, a, b), "_e32"),
                Case(f"v_subrev_{type_}", type_, two, lambda a, b, f=form: subtract(f, b, a), "_e32"),
                Case(f"v_min3_{type_}", type_, three, choice_of_three(form, False), keeps=True),
                Case(f"v_max3_{type_}", type_, three, choice_of_three(form, True), keeps=True),
                Case(f"v_med3_{type_}", type_, three, median(form), keeps=True),
            ]
    for type_ in ("f32", "f64"):
        form = FORMATS[type_]
        cases.append(
            Case(f"v_fmac_{type_}", type_, (type_,) * 2, lambda a, b, c, f=form: fma(f, a, b, c), "_e32", accumulates=True),
        )
    zero_wins = lambda a, b: 0 if F32.is_zero(a) or F32.is_zero(b) else multiply(F32, a, b)  # noqa: E731
    cases += [
        Case("v_mul_legacy_f32", "f32", ("f32", "f32"), zero_wins),
        Case("v_minimum3_f32", "f32", ("f32",) * 3, choice_or_nan(F32, False)),
        Case("v_maximum3_f32", "f32", ("f32",) * 3, choice_or_nan(F32, True)),
    ]
    return cases


def exact_function(function: Callable[[float], float], form: Binary, flush: bool = False) -> Oracle:
    """Returns an oracle that computes ``function`` with the host's libm in float64 and rounds the result to ``form``."""

    def oracle(a: int) -> int | str:
        a = form.flush(a) if flush else a
        if form.is_nan(a):
            return NAN
        magnitude = math.inf if form.is_infinite(a) else float(abs(form.value(a)))
        y = function(math.copysign(magnitude, -1 if form.negative(a) else 1))
        if math.isnan(y):
            return NAN
        if math.isinf(y):
            return form.infinity | (form.sign_bit if y < 0 else 0)
        bits = form.round(Fraction(y), negative=math.copysign(1, y) < 0)
        return form.flush(bits) if flush else bits

    return oracle


def reciprocal(x: float) -> float:
    if x == 0:
        return math.copysign(math.inf, x)
    try:
        return 1 / x
    except OverflowError:
        return math.copysign(math.inf, x)


def root(x: float) -> float:
    return math.sqrt(x) if x >= 0 else math.nan


def reciprocal_root(x: float) -> float:
    return math.nan if x < 0 else reciprocal(root(x))


def power_of_two(x: float) -> float:
    return math.inf if x >= 1024 else 2.0 ** max(x, -1100)


def logarithm(x: float) -> float:
    if x == 0:
        return -math.inf
    return math.nan if x < 0 else math.log2(x)


def sine(x: float) -> float:
    """Returns the sine of an angle in revolutions; 0 beyond 256 revolutions."""
    if math.isinf(x):
        return math.nan
    if abs(x) > 256:
        return 0.0
    turns = x - round(x)
    eighths = Fraction(turns) * 4
    if x == 0 or eighths.denominator == 1:
        return x if x == 0 else {0: 0.0, 1: 1.0, -1: -1.0, 2: 0.0, -2: 0.0}[int(eighths)]
    return math.sin(2 * math.pi * turns)


def cosine(x: float) -> float:
    if math.isinf(x):
        return math.nan
    if abs(x) > 256:
        return 1.0
    turns = x - round(x)
    if Fraction(turns) * 4 % 2 == 1:
        return 0.0
    # Near its zeros, the cosine is computed as the sine of the remainder, which keeps precision.
    return math.sin(2 * math.pi * (0.25 - abs(turns)))


FUNCTIONS = {"rcp": reciprocal, "rsq": reciprocal_root, "sqrt": root, "exp": power_of_two, "log": logarithm}
CASES = _cases()
for _name, _function in FUNCTIONS.items():
    CASES += [
        Case(f"v_{_name}_f32", "f32", ("f32",), exact_function(_function, F32, flush=True), "_e32", ulp=1),
        Case(f"v_{_name}_f16", "f16", ("f16",), exact_function(_function, F16), "_e32", ulp=1),
    ]
    if _name in ("rcp", "rsq", "sqrt"):
        CASES.append(Case(f"v_{_name}_f64", "f64", ("f64",), exact_function(_function, F64), "_e32", ulp=1))
CASES += [
    Case("v_rcp_iflag_f32", "f32", ("f32",), exact_function(reciprocal, F32, flush=True), "_e32", ulp=1),
    Case("v_sin_f32", "f32", ("f32",), exact_function(sine, F32), "_e32", ulp=1),
    Case("v_cos_f32", "f32", ("f32",), exact_function(cosine, F32), "_e32", ulp=1),
    Case("v_sin_f16", "f16", ("f16",), exact_function(sine, F16), "_e32", ulp=1),
    Case("v_cos_f16", "f16", ("f16",), exact_function(cosine, F16), "_e32", ulp=1),
]

CONSTANT_OPERAND = {"v_fmamk_f32", "v_fmaak_f32"}
MIXED = {"v_fma_mix_f32", "v_fma_mixlo_f16", "v_fma_mixhi_f16"}
DOT = {"v_dot2c_f32_bf16", "v_dot2_f32_bf16", "v_dot2c_f32_f16", "v_dot2_f32_f16"}
TESTED = {case.name for case in CASES} | CONSTANT_OPERAND | MIXED | DOT | {"v_trig_preop_f64"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_definition(case: Case) -> None:
    check(case)


# Fused multiply-add with operands that reveal double rounding or a wrong precision


def _near_ties(form: Binary, rng: random.Random, lanes: int) -> list[list[int]]:
    """Returns operands for which a * b + c is nearly a tie. They include denormal results and cancellation."""
    columns: list[list[int]] = [[], [], []]
    digits, lowest = form.mantissa_bits, 1 - form.bias - form.mantissa_bits
    for lane in range(lanes):
        kind = lane % 6
        a = form.one | rng.getrandbits(digits)
        b = form.one | rng.getrandbits(digits)
        product = form.value(a) * form.value(b)
        if kind == 0:  # c nearly cancels the product
            c = form.round(-product + rng.choice((-1, 1)) * Fraction(2) ** -rng.randint(digits, 2 * digits))
        elif kind == 1:  # the product is about half an ulp of c
            c = form.one + (rng.randint(digits // 2, digits + 2) << digits) | rng.getrandbits(digits)
            unit = Fraction(2) ** (form.exponent(c) - form.bias - digits - 1)
            b = form.round(unit / form.value(a))
        elif kind == 2:  # a denormal result
            shift = rng.randint(1, digits)
            a = form.round(form.value(a) * Fraction(2) ** ((1 - form.bias) // 2 - shift))
            b = form.round(form.value(b) * Fraction(2) ** ((1 - form.bias) // 2))
            c = form.round(rng.choice((-1, 1)) * Fraction(rng.getrandbits(digits)) * Fraction(2) ** lowest)
        elif kind < 5:  # a * b is half an ulp of c, except one part in 2**(2 * digits); c is normal or denormal
            exponent = rng.randint(-3, 3) if kind == 3 else lowest
            c = form.round((rng.getrandbits(digits) | (1 << digits if kind == 3 else 0)) * Fraction(2) ** exponent)
            tiny = Fraction(2) ** -digits
            a = form.round((1 + tiny) * Fraction(2) ** (exponent // 2))
            b = form.round((1 - tiny) * Fraction(2) ** (exponent - exponent // 2 - 1))
        else:  # values at the ends of the range
            big = form.bias - 1 - rng.randint(0, 3)
            a = form.round(form.value(a) * Fraction(2) ** big)
            b = form.round(form.value(b) * Fraction(2) ** rng.choice((-big, 1, -3 * digits, 2)))
            c = form.round(-form.value(a) * form.value(b)) if rng.random() < 0.5 else random_bits(f"f{form.width}", rng)
        for column, bits in zip(columns, (a, b, c), strict=True):
            column.append(bits ^ (form.sign_bit if rng.random() < 0.5 else 0))
    return columns


@pytest.mark.parametrize("type_", ["f16", "f32", "f64"])
def test_fma_rounds_once(type_: str) -> None:
    form, lanes = FORMATS[type_], 1024
    columns = _near_ties(form, random.Random(1), lanes)
    v = {8 + 4 * i + j: w for i, column in enumerate(columns) for j, w in enumerate(words(column, form.width))}
    snippet = Snippet(
        f"v_fma_{type_} {'v[0:1], v[8:9], v[12:13], v[16:17]' if type_ == 'f64' else 'v0, v8, v12, v16'}", v=v, waves=16
    ).run()
    wrong = []
    for lane, got in enumerate(read_lanes(snippet, 0, max(form.width, 32))):
        inputs = [column[lane] for column in columns]
        if not same(type_, fma(form, *inputs), got):
            wrong.append((lane, [hex(x) for x in inputs], hex(got)))
    assert not wrong, wrong[:4]


@pytest.mark.parametrize("name", sorted(CONSTANT_OPERAND))
@pytest.mark.parametrize("constant", ["0xbf800001", "0x7f7fffff", "0x1"])
def test_fma_with_a_literal(name: str, constant: str) -> None:
    a, b = operands(("f32", "f32"), 64, 8)
    k = int(constant, 16)
    line = f"{name} v0, v8, {constant}, v12" if name == "v_fmamk_f32" else f"{name} v0, v8, v12, {constant}"
    snippet = Snippet(line, v={8: np.array(a, np.uint32), 12: np.array(b, np.uint32)}).run()
    for x, y, got in zip(a, b, read_lanes(snippet, 0, 32), strict=True):
        expected = fma(F32, x, k, y) if name == "v_fmamk_f32" else fma(F32, x, y, k)
        assert same("f32", expected, got)


# float16 and MODE.FP16_OVFL


@pytest.mark.parametrize(
    "line", ["v_add_f16 v0, v8, v12", "v_mul_f16 v0, v8, v12", "v_fma_f16 v0, v8, v12, v16", "v_ldexp_f16 v0, v8, v12"]
)
@pytest.mark.parametrize("limit", [False, True])
def test_overflow_of_float16(line: str, limit: bool) -> None:
    """With FP16_OVFL set, overflowing results become the largest number. Infinite sources stay infinite."""
    name = line.split()[0]
    types = ("f16", "i16") if "ldexp" in name else ("f16",) * (3 if "fma" in name else 2)
    columns = operands(types, 128, 3)
    columns[0][::2] = [0x7BFF, 0xFBFF, 0x7B00, 0x7C00] * 16
    columns[1][::4] = [5 if "ldexp" in name else 0x7BFF] * 32
    v = {8 + 4 * i: np.array(column, np.uint32) for i, column in enumerate(columns)}
    mode = f"s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), {int(limit)}\n"
    snippet = Snippet(mode + line, v=v, waves=2).run()
    oracle = {
        "v_add_f16": lambda a, b: add(F16, a, b),
        "v_mul_f16": lambda a, b: multiply(F16, a, b),
        "v_fma_f16": lambda a, b, c: fma(F16, a, b, c),
        "v_ldexp_f16": lambda a, b: ldexp(F16)(a, signed(b, 16)),
    }[name]
    seen = 0
    for lane, got in enumerate(read_lanes(snippet, 0, 32)):
        inputs = [column[lane] for column in columns]
        expected = oracle(*inputs)
        floats = inputs[:1] if "ldexp" in name else inputs
        overflowed = expected != NAN and F16.is_infinite(expected) and not any(F16.is_infinite(x) for x in floats)
        seen += overflowed
        if overflowed and limit:
            expected = expected & F16.sign_bit | F16.largest
        assert same("f16", expected, got & 0xFFFF), (inputs, expected, hex(got))
    assert seen > 5


# Mixed precision


@pytest.mark.parametrize("name", sorted(MIXED))
@pytest.mark.parametrize(
    ("tail", "modifiers"),
    [
        ("", ("", "", "")),
        ("op_sel_hi:[1,1,1]", ("", "", "")),
        ("op_sel:[1,0,1] op_sel_hi:[1,1,1]", ("-", "|", "-|")),
        ("op_sel:[0,1,0] op_sel_hi:[0,1,0] clamp", ("|", "-", "")),
        ("op_sel_hi:[1,0,0]", ("-", "", "-")),
    ],
    ids=["f32", "low halves", "high halves", "clamp", "mixed"],
)
@pytest.mark.parametrize("second", ["v12", "s4"])
def test_mixed_precision(name: str, tail: str, modifiers: tuple[str, ...], second: str) -> None:
    """op_sel and op_sel_hi select the sources. The float32 result is rounded once, and once more for float16."""
    upper = _bits_of(tail, "op_sel:")
    halves = _bits_of(tail, "op_sel_hi:")
    lanes = 192
    rng = random.Random(len(name) + len(tail))
    columns = []
    for half in halves:
        if half:
            low, high = operands(("f16", "f16"), lanes, rng.randint(0, 99))
            columns.append([x | y << 16 for x, y in zip(low, high, strict=True)])
        else:
            columns.append(operands(("f32",), lanes, rng.randint(0, 99))[0])
    on, old = [rng.random() < 0.8 for _ in range(lanes)], [rng.getrandbits(32) for _ in range(lanes)]
    if second == "s4":
        columns[1] = [columns[1][3]] * lanes
    texts = [
        f"{m.rstrip('|')}{'|' if '|' in m else ''}{r}{'|' if '|' in m else ''}"
        for m, r in zip(modifiers, ("v8", second, "v16"), strict=True)
    ]
    v = {0: np.array(old, np.uint32)} | {8 + 4 * i: np.array(column, np.uint32) for i, column in enumerate(columns)}
    snippet = Snippet(f"{name} v0, {', '.join(texts)} {tail}", v=v, s={4: columns[1][3], "exec": lane_bits(on)}, waves=3).run()

    def read(i: int, lane: int) -> int:
        bits = columns[i][lane]
        if halves[i]:
            bits = _f16_to_f32(bits >> 16 if upper[i] else bits & 0xFFFF)
        bits = bits & 0x7FFFFFFF if "|" in modifiers[i] else bits
        return bits ^ 0x80000000 if "-" in modifiers[i] else bits

    for lane, got in enumerate(read_lanes(snippet, 0, 32)):
        if not on[lane]:
            assert got == old[lane]
            continue
        wide = fma(F32, *(read(i, lane) for i in range(3)))
        if name == "v_fma_mix_f32":
            assert same("f32", _clamped(F32, wide) if "clamp" in tail else wide, got)
            continue
        narrow = wide if wide == NAN else _narrowed(wide)
        narrow = _clamped(F16, narrow) if "clamp" in tail else narrow
        high = name == "v_fma_mixhi_f16"
        assert same("f16", narrow, got >> 16 if high else got & 0xFFFF)
        assert (got ^ old[lane]) & (0xFFFF if high else 0xFFFF0000) == 0


@pytest.mark.parametrize("limit", [False, True])
@pytest.mark.parametrize(("name", "shift"), [("v_fma_mixlo_f16", 0), ("v_fma_mixhi_f16", 16)])
def test_overflow_of_mixed_precision(name: str, shift: int, limit: bool) -> None:
    mode = f"s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), {int(limit)}\n"
    text = f"{mode}{name} v0, v2, v3, 0\n{name} v1, v4, v3, 0"
    snippet = Snippet(text, v={0: 0, 1: 0, 2: 70000.0, 3: -2.0, 4: float("inf")}).run()
    assert snippet.v(0)[0] == (0xFBFF if limit else 0xFC00) << shift
    assert snippet.v(1)[0] == 0xFC00 << shift  # an infinite source stays infinite


def _bits_of(tail: str, key: str) -> tuple[int, ...]:
    for word in tail.split():
        if word.startswith(key):
            return tuple(int(x) for x in word[len(key) :].strip("[]").split(","))
    return (0, 0, 0)


def _f16_to_f32(bits: int) -> int:
    sign = (bits & 0x8000) << 16
    if F16.is_nan(bits):
        return sign | F32.infinity | (bits & 0x3FF) << 13
    return sign | (F32.infinity if F16.is_infinite(bits) else F32.round(F16.value(bits & 0x7FFF)))


def _narrowed(bits: int) -> int:
    sign = bits >> 16 & 0x8000
    return sign | (F16.infinity if F32.is_infinite(bits) else F16.round(F32.value(bits & 0x7FFFFFFF)))


def _clamped(form: Binary, bits: int | str) -> int:
    """Clamps a value to [0, 1]. NaN becomes 0 (DX10_CLAMP)."""
    if bits == NAN or form.negative(int(bits)):
        return 0
    return min(int(bits), form.one)


# Dot products


@pytest.mark.parametrize("name", sorted(DOT))
def test_dot_products(name: str) -> None:
    """Terms are added in the order of the ISA's pseudocode, and each sum is rounded to float32. Denormal inputs and results are
    zeros."""
    narrow, lanes = (BF16 if name.endswith("bf16") else F16), 256
    rng = random.Random(4)
    columns = []
    for _ in range(2):
        halves = [
            [rng.choice(_halves(narrow)) if rng.random() < 0.4 else _moderate(narrow, rng) for _ in range(lanes)] for _ in range(2)
        ]
        columns.append(halves)
    addend = operands(("f32",), lanes, 7)[0]
    packed = [[low | high << 16 for low, high in zip(*halves, strict=True)] for halves in columns]
    v = {
        8: np.array(packed[0], np.uint32),
        12: np.array(packed[1], np.uint32),
        16: np.array(addend, np.uint32),
        0: np.array(addend, np.uint32),
    }
    snippet = Snippet(f"{name} v0, v8, v12" + ("" if "dot2c" in name else ", v16"), v=v, waves=4).run()

    def widened(bits: int) -> int:
        bits = narrow.flush(bits)
        return bits << 16 if narrow is BF16 else _f16_to_f32(bits)

    def flushed(bits: int | str) -> int:
        return 0x7FC00000 if bits == NAN else F32.flush(int(bits))

    for lane, got in enumerate(read_lanes(snippet, 0, 32)):
        products = [flushed(multiply(F32, widened(columns[0][i][lane]), widened(columns[1][i][lane]))) for i in range(2)]
        c = flushed(addend[lane])
        first, second, third = (*products, c) if name == "v_dot2_f32_bf16" else (c, *products)
        total = flushed(add(F32, flushed(add(F32, first, second)), third))
        assert same("f32", NAN if F32.is_nan(total) else total, got), [
            hex(x) for x in (packed[0][lane], packed[1][lane], c, got, total)
        ]


@pytest.mark.parametrize("addend", [0, 0x00800000])
@pytest.mark.parametrize("halves", [0x20002000, 0x2000, 0x20000000])
def test_denormal_products_of_bfloat16_are_zeros(addend: int, halves: int) -> None:
    """The product 2**-64 * 2**-63 is flushed to zero. It adds nothing, not even to the smallest normal number or to another such
    product."""
    for name in ("v_dot2c_f32_bf16 v0, v1, v2", "v_dot2_f32_bf16 v0, v1, v2, v0"):
        snippet = Snippet(name, v={0: addend, 1: 0x1F801F80, 2: halves}).run()
        assert snippet.v(0)[0] == addend


def _halves(form: Binary) -> list[int]:
    quiet = form.infinity | 1 << (form.mantissa_bits - 1)
    return [0, form.sign_bit, 1, form.one, form.sign_bit | form.one, form.largest, form.infinity, quiet, 1 << form.mantissa_bits]


def _moderate(form: Binary, rng: random.Random) -> int:
    return rng.getrandbits(1) << 15 | (form.bias + rng.randint(-6, 6)) << form.mantissa_bits | rng.getrandbits(form.mantissa_bits)


# v_trig_preop_f64


def _two_over_pi(bits: int) -> int:
    """Returns floor(2 / pi * 2**bits). pi / 4 is computed by Gauss's formula 12 atan(1/18) + 8 atan(1/57) - 5 atan(1/239)."""
    one = 1 << (bits + 80)

    def arctangent(n: int) -> int:
        total, term, k, sign = 0, one // n, 1, 1
        while term:
            total, term, k, sign = total + sign * (term // k), term // (n * n), k + 2, -sign
        return total

    pi = 4 * (12 * arctangent(18) + 8 * arctangent(57) - 5 * arctangent(239))
    return 2 * one * (1 << bits) // pi


def test_trig_preop() -> None:
    """The result is 53 bits of 2 / pi, from bit 53 * S1 on. If the source has a large exponent, the bits start later."""
    digits = _two_over_pi(1201)
    rng = random.Random(1)
    exponents = [rng.choice((0, 1, 1023, 1076, 1077, 1078, 1100, 1500, 1967, 1968, 2046)) for _ in range(128)]
    numbers = [rng.getrandbits(52) | e << 52 | rng.getrandbits(1) << 63 for e in exponents]
    segments = [rng.getrandbits(32) if lane % 9 == 0 else lane % 4 for lane in range(128)]
    v = {8 + i: w for i, w in enumerate(words(numbers, 64))} | {12: np.array(segments, np.uint32)}
    snippet = Snippet("v_trig_preop_f64 v[0:1], v[8:9], v12", v=v, waves=2).run()
    for exponent, segment, got in zip(exponents, segments, read_lanes(snippet, 0, 64), strict=True):
        shift = 53 * (segment & 31) + max(exponent - 1077, 0)
        chunk = sum((digits >> 1200 - shift - i & 1 if shift + i <= 1200 else 0) << 52 - i for i in range(53))
        value = Fraction(chunk) * Fraction(2) ** (-53 - shift + (128 if exponent >= 1968 else 0))
        assert got == F64.round(value)
