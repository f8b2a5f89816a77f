"""Helpers for the tests of vector instructions: number formats in exact arithmetic, and the comparison of instructions with an
oracle.

An oracle is a function that computes one lane's result from Python numbers: integers for integer operands, bit patterns for
floating-point operands. The oracle is written from the ISA document's definition of the instruction and does not use the emulator.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from gfx950_emulator.snippet import Snippet

WAVE = 64
NAN = "any quiet NaN"


@dataclass(frozen=True)
class Binary:
    """An IEEE 754 binary format. Its methods take and return bit patterns."""

    exponent_bits: int
    mantissa_bits: int

    @property
    def width(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def sign_bit(self) -> int:
        return 1 << (self.width - 1)

    @property
    def infinity(self) -> int:
        return ((1 << self.exponent_bits) - 1) << self.mantissa_bits

    @property
    def largest(self) -> int:
        return self.infinity - 1

    @property
    def one(self) -> int:
        return self.bias << self.mantissa_bits

    def negative(self, bits: int) -> bool:
        return bool(bits & self.sign_bit)

    def magnitude(self, bits: int) -> int:
        return bits & (self.sign_bit - 1)

    def is_nan(self, bits: int) -> bool:
        return self.magnitude(bits) > self.infinity

    def is_signalling(self, bits: int) -> bool:
        return self.is_nan(bits) and not bits >> (self.mantissa_bits - 1) & 1

    def is_infinite(self, bits: int) -> bool:
        return self.magnitude(bits) == self.infinity

    def is_zero(self, bits: int) -> bool:
        return self.magnitude(bits) == 0

    def is_denormal(self, bits: int) -> bool:
        return 0 < self.magnitude(bits) < 1 << self.mantissa_bits

    def exponent(self, bits: int) -> int:
        """Returns the biased exponent."""
        return self.magnitude(bits) >> self.mantissa_bits

    def value(self, bits: int) -> Fraction:
        """Returns the value of a finite number."""
        exponent, mantissa = self.exponent(bits), bits & ((1 << self.mantissa_bits) - 1)
        if exponent:
            mantissa |= 1 << self.mantissa_bits
        scaled = mantissa * Fraction(2) ** (max(exponent, 1) - self.bias - self.mantissa_bits)
        return -scaled if self.negative(bits) else scaled

    def round(self, value: Fraction, negative: bool = False, toward_zero: bool = False) -> int:
        """Rounds to nearest, ties to even, or towards zero if `toward_zero`. `negative` is the sign of an exact zero."""
        if value == 0:
            return self.sign_bit if negative else 0
        sign, magnitude = (self.sign_bit, -value) if value < 0 else (0, value)
        exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
        if Fraction(2) ** exponent > magnitude:
            exponent -= 1
        exponent = max(exponent, 1 - self.bias)
        units = magnitude / Fraction(2) ** (exponent - self.mantissa_bits)
        whole = units.numerator // units.denominator
        rest = units - whole
        if not toward_zero and (rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole & 1)):
            whole += 1
        bits = ((exponent + self.bias - 1) << self.mantissa_bits) + whole
        return sign | min(bits, self.largest if toward_zero else self.infinity)

    def key(self, bits: int) -> int:
        """Returns an integer key that orders values, with -0 below +0. The difference of two keys is the values' distance in
        ulps."""
        return -1 - self.magnitude(bits) if self.negative(bits) else bits

    def flush(self, bits: int) -> int:
        """Flushes a denormal to a zero of the same sign."""
        return bits & self.sign_bit if self.is_denormal(bits) else bits


F16, F32, F64, BF16 = Binary(5, 10), Binary(8, 23), Binary(11, 52), Binary(8, 7)
FORMATS = {"f16": F16, "f32": F32, "f64": F64}


def fma(form: Binary, a: int, b: int, c: int) -> int | str:
    """Returns a * b + c, rounded once."""
    if form.is_nan(a) or form.is_nan(b) or form.is_nan(c):
        return NAN
    sign = form.negative(a) ^ form.negative(b)
    if form.is_infinite(a) or form.is_infinite(b):
        if form.is_zero(a) or form.is_zero(b) or (form.is_infinite(c) and form.negative(c) != sign):
            return NAN
        return form.infinity | (form.sign_bit if sign else 0)
    if form.is_infinite(c):
        return c
    product, addend = form.value(a) * form.value(b), form.value(c)
    both_negative = sign and form.negative(c)
    return form.round(product + addend, negative=bool(both_negative and product == 0 and addend == 0))


def add(form: Binary, a: int, b: int) -> int | str:
    return fma(form, a, form.one, b)


def multiply(form: Binary, a: int, b: int) -> int | str:
    negative_zero = form.sign_bit
    result = fma(form, a, b, negative_zero)
    if result == negative_zero and form.negative(a) == form.negative(b):
        return 0
    return result


# Operand types


def signed(value: int, width: int) -> int:
    value &= (1 << width) - 1
    return value - (1 << width) if value >> (width - 1) else value


def width_of(type_: str) -> int:
    return int(type_.lstrip("uifb"))


_INTEGERS = [
    0,
    1,
    2,
    3,
    7,
    8,
    12,
    15,
    16,
    23,
    24,
    30,
    31,
    32,
    33,
    63,
    64,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x7FFFFF,
    0x800000,
]
_INTEGERS += [0xFFFFFF, 0x0D0C0B08, 0x12345678]


def _special_integers(width: int) -> list[int]:
    top = 1 << (width - 1)
    both = [x for x in _INTEGERS if x < 1 << width] + [top - 1, top, top + 1]
    return sorted({*both, *(-x & (2 * top - 1) for x in both)})


def _special_floats(form: Binary) -> list[int]:
    normal, one, quiet = 1 << form.mantissa_bits, form.one, form.infinity | 1 << (form.mantissa_bits - 1)
    half, exponent = one - normal, normal
    positive = [
        0, 1, 2, 3, normal - 1, normal, normal + 1, 2 * normal, one - 1, one, one + 1, one + exponent, half, half - 1, half + 1,
        one + normal // 2, one + exponent + normal // 4, one + 5 * exponent + 7, form.largest, form.largest - normal, form.infinity,
        quiet, quiet | 5, form.infinity | 1, form.infinity | 3 << (form.mantissa_bits - 3),
    ]  # fmt: skip
    # near the limits of integer types, and the largest float16 in wider formats
    for value in (255, 256, 32767, 32768, 65504, 65519, 65520, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32):
        rounded = form.round(Fraction(value))
        if rounded < form.infinity:
            positive += [rounded, rounded - 1]
    return [x | sign for x in positive for sign in (0, form.sign_bit)]


SPECIAL: dict[str, list[int]] = {}
for _width in (16, 32, 64):
    for _letter in "uib":
        SPECIAL[f"{_letter}{_width}"] = _special_integers(_width)
for _name, _form in FORMATS.items():
    SPECIAL[_name] = _special_floats(_form)


def random_bits(type_: str, rng: random.Random) -> int:
    """Returns random bits. For floats, most results are values near 1, whose sums and products need rounding."""
    width = width_of(type_)
    bits = rng.getrandbits(width)
    if type_ in FORMATS and rng.random() < 0.6:
        form = FORMATS[type_]
        spread = 3 if rng.random() < 0.5 else form.mantissa_bits
        exponent = form.bias + rng.randint(-min(spread, form.bias - 2), min(spread, form.bias - 2))
        mantissa = bits & ((1 << form.mantissa_bits) - 1)
        if rng.random() < 0.3:  # few significant bits cause ties
            mantissa &= -1 << (form.mantissa_bits - rng.randint(0, 4))
        return (bits & form.sign_bit) | exponent << form.mantissa_bits | mantissa
    return bits


def operands(types: Sequence[str], lanes: int, seed: int) -> list[list[int]]:
    """Returns bit patterns for every source and lane: pairs of special values, special values with random values, and random
    values."""
    rng = random.Random(seed)
    columns: list[list[int]] = [[] for _ in types]
    pool = [SPECIAL[type_] for type_ in types]
    for lane in range(lanes):
        kind = lane % 4
        for column, type_, specials in zip(columns, types, pool, strict=True):
            special = kind < 2 or (kind == 2 and rng.random() < 0.5)
            column.append(rng.choice(specials) if special else random_bits(type_, rng))
    # every special value occurs at least once in every source, as far as there are lanes
    for place, (column, specials) in enumerate(zip(columns, pool, strict=True)):
        for i, value in enumerate(specials):
            at = (2 * i + place) * 3 % lanes
            column[at] = value
    return columns


def decoded(type_: str, bits: int) -> int:
    """Returns an oracle's input: signed integers as integers, all other types as bits."""
    return signed(bits, width_of(type_)) if type_[0] == "i" else bits


# Running


def words(column: Iterable[int], width: int) -> list[np.ndarray]:
    """Converts a column of values to registers."""
    values = [int(x) for x in column]
    return [np.array([x >> 32 * i & 0xFFFFFFFF for x in values], np.uint32) for i in range((width + 31) // 32)]


def lane_bits(mask: Sequence[bool]) -> list[int]:
    """Converts a bool per lane to 64 bits per wave."""
    return [sum(int(on) << i for i, on in enumerate(mask[at : at + WAVE])) for at in range(0, len(mask), WAVE)]


def register(file: str, index: int, width: int) -> str:
    return f"{file}{index}" if width <= 32 else f"{file}[{index}:{index + (width + 31) // 32 - 1}]"


def read_lanes(snippet: Snippet, index: int, width: int) -> list[int]:
    """Returns the lanes' values of a vector register, or of several registers as one integer."""
    rows = [snippet.v(index + i) for i in range((width + 31) // 32)]
    return [sum(int(row[lane]) << 32 * i for i, row in enumerate(rows)) for lane in range(len(rows[0]))]


def same(type_: str, expected: int | str, got: int, ulp: int = 0) -> bool:
    """Returns whether a result equals the oracle's result."""
    form = FORMATS.get(type_)
    if expected == NAN:
        return form is not None and form.is_nan(got) and not form.is_signalling(got)
    expected = int(expected) & ((1 << width_of(type_)) - 1)
    if got == expected:
        return True
    if form is None or not ulp or form.is_nan(got) or form.is_nan(expected):
        return False
    return abs(form.key(got) - form.key(expected)) <= ulp and form.negative(got) == form.negative(expected)


@dataclass(frozen=True)
class Case:
    """An instruction with its oracle.

    Attributes:
        name: the mnemonic, without the suffix of an encoding.
        result: type of the destination; ``"lanes"`` is a bit per lane in scalar registers.
        sources: types of the sources.
        oracle: function from the sources' values to the result's bits.
        suffix: suffix of the encoding, ``"_e32"``.
        tail: modifiers.
        accumulates: whether the oracle also receives the destination's old value.
        keeps: whether a 16-bit result leaves the upper half of the register unchanged.
        ulp: the permitted error.
        scalar: whether the first source may be a scalar register or an inline constant.
    """

    name: str
    result: str
    sources: tuple[str, ...]
    oracle: Callable[..., int | str]
    suffix: str = ""
    tail: str = ""
    accumulates: bool = False
    keeps: bool = False
    ulp: int = 0
    scalar: bool = True

    @property
    def destination(self) -> str:
        if self.result == "lanes":
            return "vcc" if self.suffix == "_e32" else "s[20:21]"
        return register("v", 0, width_of(self.result))

    def line(self, first: str | None = None) -> str:
        """Returns the instruction's text, with its sources in v8, v12, v16, and possibly another first source."""
        sources = [register("v", 8 + 4 * i, width_of(type_)) for i, type_ in enumerate(self.sources)]
        if first is not None:
            sources[0] = first
        return f"{self.name}{self.suffix} {', '.join((self.destination, *sources))} {self.tail}".strip()

    @property
    def lines(self) -> list[str]:
        """The texts of all instructions that `check` runs."""
        if not self.scalar:
            return [self.line()]
        return [self.line(), self.line(register("s", 4, width_of(self.sources[0]))), *(self.line(c[0]) for c in self._constants())]

    def _constants(self) -> list[tuple[str, int]]:
        type_ = self.sources[0]
        form = FORMATS.get(type_)
        if form is not None:
            return [("-4.0", form.round(Fraction(-4))), ("7", 7)]
        return [("-7", -7 & ((1 << width_of(type_)) - 1))]

    def expected(self, columns: Sequence[Sequence[int]], lane: int) -> int | str:
        return self.oracle(*(decoded(type_, column[lane]) for type_, column in zip(self.sources, columns, strict=True)))


def _seed(text: str) -> int:
    return sum((i + 1) * byte for i, byte in enumerate(text.encode()))


def check(case: Case, waves: int = 5) -> None:
    """Runs an instruction on vector registers with all lanes active, on a scalar register that differs between waves with some
    lanes active, and on inline constants."""
    _check_one(case, case.line(), waves, None, None)
    if not case.scalar:
        return
    _check_one(case, case.lines[1], 3, "wave", None)
    for text, bits in case._constants():
        _check_one(case, case.line(text), 1, None, bits)


def _check_one(case: Case, line: str, waves: int, scalar: str | None, constant: int | None) -> None:
    lanes = waves * WAVE
    rng = random.Random(_seed(line))
    width = 32 if case.result == "lanes" else width_of(case.result)
    columns = operands(case.sources, lanes, _seed(line))
    old = [rng.getrandbits(max(width, 32)) for _ in range(lanes)]
    if case.accumulates:
        old = [(o & ~((1 << width) - 1)) | x for o, x in zip(old, operands([case.result], lanes, _seed(line) + 1)[0], strict=True)]
    vectors: dict[int, np.ndarray] = {}
    scalars: dict[Any, Any] = {20: 0x55555555, 21: 0x12345678}
    for i, (type_, column) in enumerate(zip(case.sources, columns, strict=True)):
        if i == 0 and constant is not None:
            column[:] = [constant] * lanes
        elif i == 0 and scalar:
            column[:] = [column[lane // WAVE * WAVE] for lane in range(lanes)]
            for j, word in enumerate(words(column[::WAVE], width_of(type_))):
                scalars[4 + j] = word
        else:
            # the unused half of a 16-bit operand is not zero
            filled = [x | rng.getrandbits(16) << 16 for x in column] if width_of(type_) == 16 else column
            vectors |= {8 + 4 * i + j: word for j, word in enumerate(words(filled, width_of(type_)))}
    if scalar and width_of(case.sources[0]) == 16:
        scalars[4] = scalars[4] | np.uint32(0xABCD0000)
    on = [rng.random() < 0.6 for _ in range(lanes)] if scalar else [True] * lanes
    scalars["exec"] = lane_bits(on)
    vectors |= dict(enumerate(words(old, width)))
    snippet = Snippet(line, v=vectors, s=scalars, waves=waves).run()
    if case.result == "lanes":
        got = [int(x) for x in snippet.lanes("vcc" if case.suffix == "_e32" else 20)]
        wanted = [int(on[lane] and bool(case.expected(columns, lane))) for lane in range(lanes)]
        assert got == wanted, f"{line}: {_differences(columns, wanted, got, on)}"
        return
    inputs = [*columns, [x & ((1 << width) - 1) for x in old]] if case.accumulates else columns
    shown, wrong = read_lanes(snippet, 0, max(width, 32)), []
    for lane, (got_bits, before) in enumerate(zip(shown, old, strict=True)):
        if not on[lane]:
            if got_bits != before:
                wrong.append((lane, "off lane changed"))
            continue
        types = (*case.sources, case.result) if case.accumulates else case.sources
        expected = case.oracle(*(decoded(type_, column[lane]) for type_, column in zip(types, inputs, strict=True)))
        upper = (before if case.keeps else 0) >> 16 << 16 if width == 16 else 0
        low = got_bits ^ upper if width == 16 else got_bits
        if not same(case.result, expected, low, case.ulp):
            shown_expected = expected if expected == NAN else hex(int(expected) & ((1 << width) - 1))
            wrong.append((lane, [hex(c[lane]) for c in inputs], shown_expected, hex(got_bits)))
    assert not wrong, f"{line}: {len(wrong)} wrong: {wrong[:4]}"


def _differences(columns: Sequence[Sequence[int]], wanted: list[int], got: list[int], on: list[bool]) -> list[Any]:
    rows = zip(range(len(wanted)), wanted, got, strict=True)
    return [(lane, [hex(c[lane]) for c in columns], w, g, on[lane]) for lane, w, g in rows if w != g][:4]
