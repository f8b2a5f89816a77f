"""Tests conversions between number formats against their definition, lane by lane, in exact arithmetic.

The definitions are V_CVT_* in chapters VOP1 and VOP3 of the CDNA4 ISA document. The formats are those of the OCP 8-bit Floating
Point and Microscaling (MX) specifications. If the document leaves a result open, the tests follow `gfx950_emulator.formats`: NaNs
of fp8 and bf8 have all mantissa bits set; fp6, bf6 and fp4 saturate.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

import numpy as np
import pytest

from gfx950_emulator.snippet import Snippet

from .oracles import BF16, F16, F32, F64, NAN, SPECIAL, Binary, Case, check, lane_bits, operands, random_bits, signed

WAVES = 2
LANES = 64 * WAVES


def to_integer(form: Binary, low: int, high: int, how: Callable[[Fraction], int] = math.trunc) -> Callable[[int], int]:
    def oracle(a: int) -> int:
        if form.is_nan(a):
            return 0
        if form.is_infinite(a):
            return low if form.negative(a) else high
        return min(max(how(form.value(a)), low), high)

    return oracle


def converted(source: Binary, target: Binary, toward_zero: bool = False, saturate: bool = False) -> Callable[[int], int | str]:
    """Returns an oracle that converts a value. NaNs become quiet. They keep the upper bits of their payload, or all bits if the
    target is wider."""

    def oracle(a: int) -> int:
        sign = target.sign_bit if source.negative(a) else 0
        if source.is_nan(a):
            payload, by = a & ((1 << source.mantissa_bits) - 1), source.mantissa_bits - target.mantissa_bits
            payload = payload >> by if by >= 0 else payload << -by
            return sign | target.infinity | payload | 1 << (target.mantissa_bits - 1)
        if source.is_infinite(a):
            return sign | target.infinity
        bits = target.round(abs(source.value(a)), toward_zero=toward_zero)
        return sign | (min(bits, target.largest) if saturate else bits)

    return oracle


def quiet_nan(source: Binary, target: Binary) -> Callable[[int], int | str]:
    exact = converted(source, target)
    return lambda a: NAN if source.is_nan(a) else exact(a)


def both(one: Callable[[int], int]) -> Callable[[int, int], int]:
    return lambda a, b: one(a) | one(b) << 16


def saturated_bytes(a: int) -> int:
    low, high = (min(max(signed(x, 16), 0), 255) for x in (a, a >> 16))
    return low | high << 8


I32, U32 = (-(2**31), 2**31 - 1), (0, 2**32 - 1)
CASES = [
    *(Case(f"v_cvt_f32_{t}", "f32", (t,), lambda a: F32.round(Fraction(a)), "_e32") for t in ("i32", "u32")),
    *(Case(f"v_cvt_f64_{t}", "f64", (t,), lambda a: F64.round(Fraction(a)), "_e32") for t in ("i32", "u32")),
    *(Case(f"v_cvt_f16_{t}", "f16", (t,), lambda a: F16.round(Fraction(a)), "_e32") for t in ("i16", "u16")),
    Case("v_cvt_i32_f32", "i32", ("f32",), to_integer(F32, *I32), "_e32"),
    Case("v_cvt_u32_f32", "u32", ("f32",), to_integer(F32, *U32), "_e32"),
    Case("v_cvt_i32_f64", "i32", ("f64",), to_integer(F64, *I32), "_e32"),
    Case("v_cvt_u32_f64", "u32", ("f64",), to_integer(F64, *U32), "_e32"),
    Case("v_cvt_i16_f16", "i16", ("f16",), to_integer(F16, -32768, 32767), "_e32"),
    Case("v_cvt_u16_f16", "u16", ("f16",), to_integer(F16, 0, 65535), "_e32"),
    Case("v_cvt_rpi_i32_f32", "i32", ("f32",), to_integer(F32, *I32, lambda x: math.floor(x + Fraction(1, 2))), "_e32"),
    Case("v_cvt_flr_i32_f32", "i32", ("f32",), to_integer(F32, *I32, math.floor), "_e32"),
    Case("v_cvt_f64_f32", "f64", ("f32",), quiet_nan(F32, F64), "_e32"),
    Case("v_cvt_f32_f64", "f32", ("f64",), quiet_nan(F64, F32), "_e32"),
    Case("v_cvt_f32_f16", "f32", ("f16",), quiet_nan(F16, F32), "_e32"),
    Case("v_cvt_f16_f32", "f16", ("f32",), quiet_nan(F32, F16), "_e32"),
    Case("v_cvt_f32_bf16", "u32", ("u16",), lambda a: a << 16, "_e32"),
    *(
        Case(f"v_cvt_f32_ubyte{i}", "f32", ("u32",), lambda a, i=i: F32.round(Fraction(a >> 8 * i & 0xFF)), "_e32")
        for i in range(4)
    ),
    Case("v_cvt_pkrtz_f16_f32", "u32", ("f32", "f32"), both(converted(F32, F16, toward_zero=True))),
    Case("v_pack_b32_f16", "u32", ("f16", "f16"), lambda a, b: a | b << 16),
    Case("v_sat_pk_u8_i16", "u16", ("u32",), saturated_bytes, "_e32", keeps=True),
    Case("v_cvt_pk_f16_f32", "u32", ("f32", "f32"), both(converted(F32, F16))),
    Case("v_cvt_pk_bf16_f32", "u32", ("f32", "f32"), both(converted(F32, BF16))),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_definition(case: Case) -> None:
    check(case)


LIMIT = "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), {}\n"


@pytest.mark.parametrize("limit", [False, True])
@pytest.mark.parametrize(
    ("line", "target"),
    [("v_cvt_f16_f32 v0, v8", F16), ("v_cvt_pk_f16_f32 v0, v8, v8", F16), ("v_cvt_pk_bf16_f32 v0, v8, v8", BF16)],
)
def test_overflow_with_and_without_limit(line: str, target: Binary, limit: bool) -> None:
    """With MODE.FP16_OVFL, values that overflow become the largest finite number, and infinities stay infinite."""
    a = [*SPECIAL["f32"], *(F32.round(Fraction(x)) for x in (65519, 65520, 65536, 10**30, -(10**9)))]
    a += [0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0xFF7FFFFF]
    a = (a * 3)[:128]
    snippet = Snippet(LIMIT.format(int(limit)) + line, v={8: np.array(a, np.uint32)}, waves=2).run()
    for x, got in zip(a, snippet.v(0).tolist(), strict=True):
        one = converted(F32, target, saturate=limit)(x)
        assert got == (one if "_pk_" not in line else one | one << 16), hex(x)


@pytest.mark.parametrize("limit", [False, True])
def test_integers_beyond_float16(limit: bool) -> None:
    snippet = Snippet(LIMIT.format(int(limit)) + "v_cvt_f16_u16 v0, v1\nv_cvt_f16_u16 v2, 65519", v={1: 0xFFFF}).run()
    assert snippet.v(0)[0] == (0x7BFF if limit else 0x7C00)
    assert snippet.v(2)[0] == 0x7BFF


# Narrow formats


@dataclass(frozen=True)
class Narrow:
    exponent_bits: int
    mantissa_bits: int
    bias: int
    infinity: bool = False
    nan: bool = False
    fnuz: bool = False  # the encoding with only the sign bit set is NaN; there is no other NaN, no infinity and no -0

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def sign(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def largest(self) -> int:
        if self.infinity:
            return ((1 << self.exponent_bits) - 1 << self.mantissa_bits) - 1
        return self.sign - (2 if self.nan else 1)

    def decode(self, code: int) -> Fraction | str:
        """Returns the value, or "inf", "-inf", "nan". Zeros have no sign here."""
        magnitude, negative = code & (self.sign - 1), bool(code & self.sign)
        if self.fnuz and code == self.sign:
            return "nan"
        if magnitude > self.largest:
            infinite = self.infinity and magnitude == self.largest + 1
            return ("-inf" if negative else "inf") if infinite else "nan"
        exponent, mantissa = magnitude >> self.mantissa_bits, magnitude & ((1 << self.mantissa_bits) - 1)
        if exponent:
            mantissa |= 1 << self.mantissa_bits
        value = mantissa * Fraction(2) ** (max(exponent, 1) - self.bias - self.mantissa_bits)
        return -value if negative else value

    def overflow(self, saturate: bool) -> int:
        if saturate or not (self.infinity or self.nan or self.fnuz):
            return self.largest
        return self.largest + 1

    def nearest(self, value: Fraction) -> int:
        """Returns the nearest encoding of a magnitude, ties to even, as if the format had no largest value."""
        exponent = max(_floor_log2(value), 1 - self.bias) if value else 1 - self.bias
        units = round(value / Fraction(2) ** (exponent - self.mantissa_bits))
        return ((exponent + self.bias - 1) << self.mantissa_bits) + units


def _floor_log2(value: Fraction) -> int:
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent - (Fraction(2) ** exponent > value)


NARROW = {
    "fp8": Narrow(4, 3, 7, nan=True), "bf8": Narrow(5, 2, 15, infinity=True), "fp6": Narrow(2, 3, 1), "bf6": Narrow(3, 2, 3),
    "fp4": Narrow(2, 1, 1), "f16": Narrow(5, 10, 15, infinity=True), "bf16": Narrow(8, 7, 127, infinity=True),
}  # fmt: skip
FNUZ = {"fp8": Narrow(4, 3, 8, fnuz=True), "bf8": Narrow(5, 2, 16, fnuz=True)}
WIDE = {"f32": F32, "f16": F16, "bf16": BF16}


def encode(form: Narrow, source: Binary, bits: int, scale: int, saturate: bool, random_word: int | None = None) -> int:
    """Encodes a value divided by 2**(scale - 127). With a random word, rounds stochastically by the word's upper bits."""
    sign = form.sign if source.negative(bits) else 0
    if source.is_nan(bits) or scale == 255:
        return form.sign if form.fnuz else sign | (form.sign - 1)
    if source.is_infinite(bits):
        return sign | form.overflow(saturate)
    value = abs(source.value(bits)) / Fraction(2) ** (scale - 127)
    if random_word is None:
        code = form.nearest(value)
    elif value == 0:
        code = 0
    else:
        # The value in units of 2**(exponent - 23), the ulp of a float32 with this exponent. Lower bits are truncated.
        exponent = max(_floor_log2(value), 1 - form.bias)
        units = math.floor(value / Fraction(2) ** (exponent - 23)) + (random_word >> (9 + form.mantissa_bits))
        code = ((exponent + form.bias - 1) << form.mantissa_bits) + (units >> (23 - form.mantissa_bits))
    if form.fnuz and code == 0:
        return 0
    return sign | (form.overflow(saturate) if code > form.largest else code)


def decode(form: Narrow, target: Binary, code: int, scale: int = 127) -> int:
    """Returns the encoding's value times 2**(scale - 127)."""
    value, sign = form.decode(code), target.sign_bit if code & form.sign else 0
    if form.fnuz and value == "nan":
        sign = 0  # the only NaN of a FNUZ format has no sign
    if value == "nan" or scale == 255:
        return sign | target.infinity | 1 << (target.mantissa_bits - 1)
    if isinstance(value, str):
        return sign | target.infinity
    # The value is converted to float32 first, which is exact except for overflow and underflow.
    wide = F32.round(abs(value) * Fraction(2) ** (scale - 127))
    return sign | converted(F32, target)(wide)


def next_random(word: int) -> int:
    return (word << 1 ^ (197 if word >> 31 else 0)) & 0xFFFFFFFF


def equal(form: Binary, expected: int, got: int) -> bool:
    if form.is_nan(expected):
        return form.is_nan(got) and form.negative(got) == form.negative(expected)
    return expected == got


def scales(rng: random.Random) -> list[int]:
    """Returns float32 scale operands. The exponent is the scale; sign and mantissa are ignored."""
    exponents = [rng.choice((127, 127, 126, 130, 120, 134, 0, 1, 254, 255, rng.randint(0, 255))) for _ in range(LANES)]
    return [rng.getrandbits(1) << 31 | e << 23 | rng.getrandbits(23) for e in exponents]


def numbers(wide: str, form: Narrow, scale: list[int], rng: random.Random) -> list[int]:
    """Returns source values, ties included. Most values are in or near the range of the narrow format."""
    source, result = WIDE[wide], []
    special = SPECIAL["f32"] if wide == "f32" else [b >> 16 for b in SPECIAL["f32"]] if wide == "bf16" else SPECIAL["f16"]
    for lane in range(LANES):
        kind = rng.randint(0, 4)
        if kind == 0:
            result.append(rng.choice(special))
        elif kind == 1:
            result.append(random_bits("f32", rng) >> 16 if wide == "bf16" else random_bits(wide, rng))
        else:
            code = rng.randint(0, form.largest)
            low, high = form.decode(code), form.decode(min(code + 1, form.largest))
            value = low + (high - low) * Fraction(rng.choice((0, 1, 2, 2, 2, 3)), 4)
            exponent = (scale[lane] >> 23 & 0xFF) - 127
            bits = source.round(value * Fraction(2) ** exponent)
            result.append(bits + rng.choice((0, 0, 1)) if bits < source.largest else source.largest)
            result[-1] |= source.sign_bit if rng.random() < 0.5 else 0
    return result


def _narrowing() -> Iterator[tuple[str, str, str, str, bool]]:
    """Yields the mnemonic, the narrow and the wide format, the shape, and whether the instruction rounds stochastically."""
    for narrow, wide in product(("fp8", "bf8", "fp4"), WIDE):
        yield f"v_cvt_scalef32_pk_{narrow}_{wide}", narrow, wide, "pair", False
    for narrow, wide in product(("fp6", "bf6"), ("f16", "bf16")):
        yield f"v_cvt_scalef32_pk32_{narrow}_{wide}", narrow, wide, "32", False
    for narrow in ("fp6", "bf6"):
        yield f"v_cvt_scalef32_2xpk16_{narrow}_f32", narrow, "f32", "16 + 16", False
    for narrow, wide in product(("fp8", "bf8"), WIDE):
        yield f"v_cvt_scalef32_sr_{narrow}_{wide}", narrow, wide, "single", True
    for wide in WIDE:
        yield f"v_cvt_scalef32_sr_pk_fp4_{wide}", "fp4", wide, "pair", True
    for narrow, wide in product(("fp6", "bf6"), WIDE):
        yield f"v_cvt_scalef32_sr_pk32_{narrow}_{wide}", narrow, wide, "32", True
    for narrow in ("fp8", "bf8"):
        yield f"v_cvt_pk_{narrow}_f32", narrow, "f32", "pair", False
    for narrow in ("fp8", "bf8", "f16", "bf16"):
        yield f"v_cvt_sr_{narrow}_f32", narrow, "f32", "single", True


def _widening() -> Iterator[tuple[str, str, str, str]]:
    for narrow, wide in product(("fp8", "bf8", "fp4"), WIDE):
        yield f"v_cvt_scalef32_pk_{wide}_{narrow}", narrow, wide, "pair"
    for narrow, wide in product(("fp6", "bf6"), WIDE):
        yield f"v_cvt_scalef32_pk32_{wide}_{narrow}", narrow, wide, "32"
    for narrow, wide in product(("fp8", "bf8"), ("f32", "f16")):
        yield f"v_cvt_scalef32_{wide}_{narrow}", narrow, wide, "single"
    for narrow in ("fp8", "bf8"):
        yield f"v_cvt_f32_{narrow}", narrow, "f32", "single"
        yield f"v_cvt_pk_f32_{narrow}", narrow, "f32", "pair"


NARROWING, WIDENING = list(_narrowing()), list(_widening())
# The conversions without scales of fp8 and bf8, which gfx942 has too, with its formats.
OF_GFX942 = ("v_cvt_pk_fp8_f32", "v_cvt_pk_bf8_f32", "v_cvt_sr_fp8_f32", "v_cvt_sr_bf8_f32")
# Short conversions are tested with and without MODE.FP16_OVFL. The formats of long conversions always saturate, so each of them is
# tested once, and the mode is set for about half of them.
LIMITED = [
    ("gfx950", *row, bool(limit))
    for i, row in enumerate(NARROWING)
    for limit in ((0, 1) if row[3] in ("single", "pair") else (i % 2,))
]
LIMITED += [("gfx942", *row, limit) for row in NARROWING if row[0] in OF_GFX942 for limit in (False, True)]
TESTED = {case.name for case in CASES} | {row[0] for row in (*NARROWING, *WIDENING)}


def op_sels(name: str, narrow: str, shape: str, operand_count: int) -> list[tuple[str, int, int]]:
    """Returns the op_sel texts that select the position of the result, each with the position's first bit and width."""
    if shape in ("32", "16 + 16"):
        return [("", 0, 192)]
    code = NARROW[narrow].bits
    if (code == 8 and shape == "pair") or code == 16:  # the result is half of a register
        zeros = "0," * (operand_count - 1)
        return [("", 0, 16), (f" op_sel:[{zeros}1]", 16, 16)]
    return [("" if not i else f" op_sel:[0,0,{i & 1},{i >> 1}]", 8 * i, 8) for i in range(4)]


def source_registers(wide: str, shape: str) -> list[str]:
    """Returns the operand texts of the source values."""
    if shape == "16 + 16":
        return ["v[8:23]", "v[24:39]"]
    if shape == "32":
        return ["v[8:39]" if wide == "f32" else "v[8:23]"]
    if shape == "pair" and wide == "f32":
        return ["v8", "v9"]
    return ["v8"]


@pytest.mark.parametrize(
    ("arch", "name", "narrow", "wide", "shape", "stochastic", "limit"), LIMITED, ids=[f"{r[0]}-{r[1]}-{r[6]}" for r in LIMITED]
)
def test_narrowing(arch: str, name: str, narrow: str, wide: str, shape: str, stochastic: bool, limit: bool) -> None:
    form, source, rng = (FNUZ if arch == "gfx942" else NARROW)[narrow], WIDE[wide], random.Random(len(name) + limit)
    scaled = "scalef32" in name
    scale = scales(rng) if scaled else [F32.one] * LANES
    count = {"single": 1, "pair": 2, "32": 32, "16 + 16": 32}[shape]
    columns = [numbers(wide, form, scale, rng) for _ in range(count)]
    words = _packed(columns, wide, rng)
    if shape == "16 + 16":  # elements of the two sources alternate
        words = words[::2] + words[1::2]
    random_words = [rng.getrandbits(32) for _ in range(LANES)]
    registers = source_registers(wide, shape)
    if stochastic and shape == "pair":
        registers = ["v[8:9]"] if wide == "f32" else ["v8"]
    extra = (["v40"] if stochastic else []) + (["v41"] if scaled else [])
    on, old = [rng.random() < 0.8 for _ in range(LANES)], [rng.getrandbits(32) for _ in range(LANES)]
    v = {8 + i: np.array(word, np.uint32) for i, word in enumerate(words)}
    v |= {40: np.array(random_words, np.uint32), 41: np.array(scale, np.uint32)}
    whole = shape in ("32", "16 + 16")
    for tail, first, width in op_sels(name, narrow, shape, 1 + len(registers) + len(extra)):
        destination = "v[0:5]" if whole else "v0"
        line = f"{name} {', '.join((destination, *registers, *extra))}{tail}"
        v |= {i: np.array(old, np.uint32) for i in range(6)}
        snippet = Snippet(LIMIT.format(int(limit)) + line, v=v, s={"exec": lane_bits(on)}, waves=WAVES, arch=arch).run()
        rows = [snippet.v(i).tolist() for i in range(6 if whole else 1)]
        for lane in range(LANES):
            word, bits = random_words[lane], 0
            for i, column in enumerate(columns):
                used = word if stochastic else None
                bits |= encode(form, source, column[lane], scale[lane] >> 23 & 0xFF, limit, used) << form.bits * i
                word = next_random(word)
            got = sum(row[lane] << 32 * i for i, row in enumerate(rows))
            before = sum(old[lane] << 32 * i for i in range(len(rows)))
            field = (1 << width) - 1 << first
            wanted = before & ~field | bits << first if on[lane] else before
            if stochastic and form.bits == 16 and got != wanted:  # the payload of a NaN is not defined
                target = F16 if narrow == "f16" else BF16
                assert target.is_nan(bits)
                assert target.is_nan(got >> first & 0xFFFF)
                continue
            assert got == wanted, (line, lane, [hex(c[lane]) for c in columns], hex(scale[lane]), hex(wanted), hex(got))


def _packed(columns: list[list[int]], wide: str, rng: random.Random) -> list[list[int]]:
    """Returns values as registers: a register holds one float32 or two 16-bit values. A single 16-bit value shares its register
    with random bits."""
    if wide == "f32":
        return columns
    if len(columns) == 1:
        return [[x | rng.getrandbits(16) << 16 for x in columns[0]]]
    return [[a | b << 16 for a, b in zip(columns[i], columns[i + 1], strict=True)] for i in range(0, len(columns), 2)]


def places(name: str, narrow: str, shape: str) -> list[tuple[str, str, int]]:
    """Returns the suffix of the mnemonic, the modifiers, and the first bit of the encoded values that they select."""
    if shape == "32":
        return [("", "", 0)]
    if "scalef32" not in name:
        word = "WORD" if shape == "pair" else "BYTE"
        step, count = (16, 2) if shape == "pair" else (8, 4)
        return [("_e32", "", 0), *(("_sdwa", f"src0_sel:{word}_{i}", step * i) for i in range(count))]
    if shape == "pair" and narrow != "fp4":
        return [("", "", 0), ("", "op_sel:[1,0,0]", 16)]
    return [("", f"op_sel:[{i & 1},{i >> 1},0]" if i else "", 8 * i) for i in range(4)]


WIDENED = [("gfx950", *row) for row in WIDENING] + [("gfx942", *row) for row in WIDENING if "scalef32" not in row[0]]


@pytest.mark.parametrize(("arch", "name", "narrow", "wide", "shape"), WIDENED, ids=[f"{row[0]}-{row[1]}" for row in WIDENED])
def test_widening(arch: str, name: str, narrow: str, wide: str, shape: str) -> None:
    form, target, rng = (FNUZ if arch == "gfx942" else NARROW)[narrow], WIDE[wide], random.Random(len(name))
    scaled = "scalef32" in name
    scale = scales(rng) if scaled else [F32.one] * LANES
    words = [[rng.getrandbits(32) for _ in range(LANES)] for _ in range(6)]
    special = [0x7F, 0xFF, 0x80, 0x7E, 0x7C, 0x7D, 0xFC, 0x01, 0x81, 0x03]
    for lane in range(0, LANES, 3):
        words[0][lane] = sum(rng.choice(special) << 8 * i for i in range(4))
    on, old = [rng.random() < 0.8 for _ in range(LANES)], [rng.getrandbits(32) for _ in range(LANES)]
    count = {"single": 1, "pair": 2, "32": 32}[shape]
    registers = count if wide == "f32" else (count + 1) // 2
    destination = "v0" if registers == 1 else f"v[0:{registers - 1}]"
    v = {i: np.array(old, np.uint32) for i in range(registers)} | {32 + i: np.array(w, np.uint32) for i, w in enumerate(words)}
    v[41] = np.array(scale, np.uint32)
    source = "v[32:37]" if shape == "32" else "v32"
    for suffix, tail, first in places(name, narrow, shape):
        line = f"{name}{suffix} {destination}, {source}{', v41' if scaled else ''} {tail}"
        snippet = Snippet(line, v=v, s={"exec": lane_bits(on)}, waves=WAVES, arch=arch).run()
        rows = [snippet.v(i).tolist() for i in range(registers)]
        for lane in range(LANES):
            if not on[lane]:
                assert [row[lane] for row in rows] == [old[lane]] * registers
                continue
            bits = sum(word[lane] << 32 * i for i, word in enumerate(words)) >> first
            for i in range(count):
                code = bits >> form.bits * i & ((1 << form.bits) - 1)
                expected = decode(form, target, code, scale[lane] >> 23 & 0xFF)
                row, shift = (i, 0) if wide == "f32" else (i // 2, 16 * (i % 2))
                got = rows[row][lane] >> shift & ((1 << target.width) - 1)
                assert equal(target, expected, got), (line, lane, hex(code), hex(scale[lane]), hex(expected), hex(got))
            if count == 1 and wide == "f16":
                assert rows[0][lane] >> 16 == old[lane] >> 16


@pytest.mark.parametrize("narrow", ["fp8", "bf8"])
def test_a_single_float16_goes_to_either_half(narrow: str) -> None:
    line = f"v_cvt_scalef32_f16_{narrow} v0, v1, 1.0 op_sel:[0,1,1]"
    snippet = Snippet(line, v={0: 0x1234ABCD, 1: 0x12388856}).run()
    expected = decode(NARROW[narrow], F16, 0x38)
    assert snippet.v(0).tolist() == [expected << 16 | 0xABCD] * 64


@pytest.mark.parametrize("scale", ["s4", "1.0", "4.0", "0x42000000"])
def test_scales_that_are_uniform(scale: str) -> None:
    """The scale is a scalar register with a value per wave, or a constant. Only the scale's exponent is used."""
    per_wave = [0x3F800000, 0xC1123456]
    a, b = (operands(("f32",), LANES, seed)[0] for seed in (1, 2))
    line = f"v_cvt_scalef32_pk_fp8_f32 v0, v8, s5, {scale}" if scale == "1.0" else f"v_cvt_scalef32_pk_fp8_f32 v0, v8, v9, {scale}"
    snippet = Snippet(
        line, v={0: 0, 8: np.array(a, np.uint32), 9: np.array(b, np.uint32)}, s={4: per_wave, 5: 0x41400000}, waves=WAVES
    ).run()
    second = [0x41400000] * LANES if scale == "1.0" else b
    for lane, got in enumerate(snippet.v(0).tolist()):
        exponent = {"s4": per_wave[lane // 64] >> 23 & 0xFF, "1.0": 127, "4.0": 129, "0x42000000": 0x84}[scale]
        low, high = (encode(NARROW["fp8"], F32, x[lane], exponent, False) for x in (a, second))
        assert got == low | high << 8
