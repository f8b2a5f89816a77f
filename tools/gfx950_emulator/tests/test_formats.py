"""Tests number formats against their definitions in exact rational arithmetic, and against torch if torch has the format."""

import math
from bisect import bisect_right
from fractions import Fraction
from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gfx950_emulator import formats
from gfx950_emulator.formats import BF6, BF8, BF8_FNUZ, BF16, E8M0, F16, FP4, FP6, FP8, FP8_FNUZ, Format

SCALED = (FP8, BF8, FP6, BF6, FP4)  # gfx942, with the FNUZ formats, has no scales
FNUZ = (FP8_FNUZ, BF8_FNUZ)
SMALL = (*SCALED, *FNUZ)
ALL = (*SMALL, F16, BF16)
# name: exponent bits, mantissa bits, bias, largest value, smallest denormal (OCP OFP8 1.0, OCP MX 1.0, IEEE 754; FNUZ: Composable
# Kernel's float8.hpp)
DEFINED = {
    "fp8": (4, 3, 7, 448.0, 2.0**-9),
    "bf8": (5, 2, 15, 57344.0, 2.0**-16),
    "fp6": (2, 3, 1, 7.5, 0.125),
    "bf6": (3, 2, 3, 28.0, 0.0625),
    "fp4": (2, 1, 1, 6.0, 0.5),
    "fp8_fnuz": (4, 3, 8, 240.0, 2.0**-10),
    "bf8_fnuz": (5, 2, 16, 57344.0, 2.0**-17),
    "f16": (5, 10, 15, 65504.0, 2.0**-24),
    "bf16": (8, 7, 127, float(2**128 - 2**120), 2.0**-133),
}
SPECIAL_BITS = (
    0, 1, 0x007FFFFF, 0x00800000, 0x00800001, 0x3F800000, 0x3F7FFFFF, 0x33800000, 0x477FF000, 0x477FEFFF, 0x43E00000, 0x43E80000,
    0x43E80001, 0x47600000, 0x47700000, 0x476FFFFF, 0x7F7FFFFF, 0x7F7F7FFF, 0x7F7F8000, 0x7F800000, 0x7F800001, 0x7FC12345,
    0x7FFFFFFF, 0x3F808000, 0x3F818000, 0x3F808001,
)  # fmt: skip
float_bits = st.one_of(
    st.sampled_from([bits | sign for bits in SPECIAL_BITS for sign in (0, 0x80000000)]),
    st.integers(0, 2**32 - 1),
    # Around the range of the narrow formats
    st.builds(lambda s, e, m: s << 31 | e << 23 | m, st.integers(0, 1), st.integers(100, 146), st.integers(0, 2**23 - 1)),
    # Ties and their neighbours, which have few mantissa bits set
    st.builds(
        lambda s, e, m, low: s << 31 | e << 23 | (m << 18) + low & 0x7FFFFF,
        st.integers(0, 1), st.integers(100, 146), st.integers(0, 31), st.integers(-1, 1),
    ),
)  # fmt: skip


def as_float32(bits: list[int]) -> np.ndarray:
    return np.array(bits, np.uint32).view(np.float32)


def value_of(form: Format, code: int) -> float:
    """Returns the value by the definition of the encoding, as a Python float."""
    exponent_bits, mantissa_bits, bias, _, _ = DEFINED[form.name]
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = code & (1 << mantissa_bits) - 1
    top = (1 << exponent_bits) - 1
    if form in FNUZ and code == 0x80:
        return math.nan
    if form.name in ("bf8", "f16", "bf16") and exponent == top:
        return math.nan if mantissa else sign * math.inf
    if form.name == "fp8" and exponent == top and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


@lru_cache
def finite_values(name: str) -> list[float]:
    """Returns all finite values from 0 up. The index of a value is its encoding."""
    form = next(form for form in ALL if form.name == name)
    values = [value_of(form, code) for code in range(1 << (form.bits - 1))]
    return [value for value in values if math.isfinite(value)]


def below(form: Format, value: Fraction) -> int:
    """Returns the largest encoding whose value does not exceed `value`."""
    return bisect_right(finite_values(form.name), value) - 1


def nearest(form: Format, value: Fraction, saturate: bool) -> int:
    """Returns the encoding of the nearest value, ties to even, without a sign. `value` is not negative."""
    values = finite_values(form.name)
    low, top = below(form, value), len(values) - 1
    # A value that exceeds the largest value is rounded as if the format had one more value, at the distance of the last two values.
    after = values[low + 1] if low < top else 2 * values[top] - values[top - 1]
    middle = (Fraction(values[low]) + Fraction(after)) / 2
    code = low + (value > middle or (value == middle and low % 2 == 1))
    return overflow(form, top, saturate) if code > top else code


def overflow(form: Format, top: int, saturate: bool) -> int:
    if saturate or form.name in ("fp6", "bf6", "fp4"):
        return top
    return top + 1  # NaN of fp8 and of FNUZ formats, infinity of bf8


def narrowed(form: Format, bits: int, saturate: bool, exponent: int = 127) -> int:
    """Returns the result of V_CVT(_SCALEF32)_PK_* for one float32."""
    value = float(as_float32([bits])[0])
    sign = bits >> 31 << (form.bits - 1)
    if math.isnan(value) or exponent == 255:
        return 0x80 if form in FNUZ else sign | (1 << (form.bits - 1)) - 1
    if math.isinf(value):
        return sign | overflow(form, len(finite_values(form.name)) - 1, saturate)
    code = nearest(form, abs(Fraction(value)) / Fraction(2) ** (exponent - 127), saturate)
    return 0 if form in FNUZ and code == 0 else sign | code


@pytest.mark.parametrize("form", ALL, ids=lambda form: form.name)
def test_values_follow_the_definition(form):
    expected = np.array([value_of(form, code) for code in range(1 << form.bits)])
    assert form.values.dtype == np.float32
    np.testing.assert_array_equal(form.values, expected)
    signed = ~np.isnan(expected) if form in FNUZ else np.ones(len(expected), bool)  # the NaN of FNUZ formats has no sign
    np.testing.assert_array_equal(np.signbit(form.values)[signed], (np.arange(1 << form.bits) >> (form.bits - 1) == 1)[signed])
    finite = form.values[np.isfinite(form.values)]
    assert finite.max() == DEFINED[form.name][3]
    assert finite[finite > 0].min() == DEFINED[form.name][4]
    assert value_of(form, form.largest) == DEFINED[form.name][3]
    codes = np.arange(1 << form.bits)
    np.testing.assert_array_equal(formats.decode(form, codes), expected)


TORCH = [
    (FP8, torch.float8_e4m3fn), (BF8, torch.float8_e5m2), (FP8_FNUZ, torch.float8_e4m3fnuz), (BF8_FNUZ, torch.float8_e5m2fnuz),
]  # fmt: skip


@pytest.mark.parametrize(("form", "dtype"), TORCH, ids=lambda value: getattr(value, "name", ""))
def test_fp8_values_are_those_of_torch(form, dtype):
    expected = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
    np.testing.assert_array_equal(form.values, expected)


def test_fp4_and_fp6_values_are_the_published_ones():
    assert FP4.values[:8].tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert FP6.values[:9].tolist() == [0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0]
    assert BF6.values[[1, 3, 4, 5, 12, 31]].tolist() == [0.0625, 0.1875, 0.25, 0.3125, 1.0, 28.0]


def test_e8m0_is_a_power_of_two_and_255_is_nan():
    assert E8M0[127] == 1.0
    assert E8M0[254] == 2.0**127
    assert E8M0[0] == 2.0**-127  # a float32 denormal
    assert np.isnan(E8M0[255])
    np.testing.assert_array_equal(E8M0[1:255], [2.0 ** (byte - 127) for byte in range(1, 255)])


def test_the_scale_is_the_exponent_of_the_operand():
    operand = np.array([1.0, -1.0, 1.99, 0.0, 2.0**-130, 2.0**127, math.inf, math.nan], np.float32).view(np.uint32)
    assert formats.scale_exponent(operand).tolist() == [127, 127, 127, 0, 0, 254, 255, 255]


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("form", SMALL, ids=lambda form: form.name)
def test_encoding_rounds_every_boundary_to_nearest_even(form, saturate):
    finite = sorted({abs(float(value)) for value in form.values if math.isfinite(value)})
    beyond = 2 * finite[-1] - finite[-2]
    interesting = []
    for low, high in zip(finite, [*finite[1:], beyond], strict=True):
        interesting += [low, (low + high) / 2, high]
    points = np.array([*interesting, 2 * beyond, 3e38, 1e-30, 1e-45], np.float32)
    points = np.concatenate([points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(np.inf))])
    points = np.concatenate([points, -points])
    codes = formats.encode(form, points, saturate)
    assert codes.dtype == np.uint8
    assert codes.tolist() == [narrowed(form, int(bits), saturate) for bits in points.view(np.uint32)]


@pytest.mark.parametrize("form", SMALL, ids=lambda form: form.name)
@settings(max_examples=80, deadline=None)
@given(bits=st.lists(float_bits, min_size=1, max_size=40), saturate=st.booleans())
def test_encoding_anything(form, bits, saturate):
    assert formats.encode(form, as_float32(bits), saturate).tolist() == [narrowed(form, x, saturate) for x in bits]


@pytest.mark.parametrize("form", SCALED, ids=lambda form: form.name)
@settings(max_examples=60, deadline=None)
@given(bits=st.lists(float_bits, min_size=1, max_size=12), exponent=st.integers(0, 255), saturate=st.booleans())
def test_encoding_with_a_scale_divides_before_rounding_once(form, bits, exponent, saturate):
    values = as_float32(bits)
    expected = [narrowed(form, x, saturate, exponent) for x in bits]
    assert formats.encode_scaled(form, values, exponent, saturate).tolist() == expected
    exponents = np.full(len(bits), exponent, np.uint32)
    assert formats.encode_scaled(form, values, exponents, saturate).tolist() == expected


@pytest.mark.parametrize("form", SCALED, ids=lambda form: form.name)
@pytest.mark.parametrize("exponent", [0, 1, 20, 120, 127, 128, 250, 254])
def test_decoding_with_a_scale_multiplies_exactly(form, exponent):
    codes = np.arange(1 << form.bits)
    values = formats.decode_scaled(form, codes, exponent)
    assert values.dtype == np.float32
    for code, value in zip(codes, values, strict=True):
        exact = value_of(form, int(code)) * 2.0 ** (exponent - 127)  # exact in float64
        if math.isfinite(exact) and abs(exact) >= 2.0**128:
            exact = math.copysign(math.inf, exact)
        assert value == exact or (math.isnan(exact) and math.isnan(value)), (code, value, exact)
        assert np.signbit(value) == (code >> (form.bits - 1) == 1)


def test_decoding_with_a_nan_scale_keeps_the_sign():
    values = formats.decode_scaled(FP4, np.array([0, 8, 1, 15]), np.array([255, 255, 255, 127]))
    assert np.isnan(values[:3]).all()
    assert values[3] == -6.0
    assert np.signbit(values).tolist() == [False, True, False, True]


def test_overflow_follows_the_mode():
    values = np.array([464.0, 465.0, -1e30, math.inf, -math.inf, math.nan], np.float32)
    assert formats.encode(FP8, values).tolist() == [0x7E, 0x7F, 0xFF, 0x7F, 0xFF, 0x7F]
    assert formats.encode(FP8, values, saturate=True).tolist() == [0x7E, 0x7E, 0xFE, 0x7E, 0xFE, 0x7F]
    values = np.array([61439.0, 61440.0, -1e30, math.inf, -math.inf, math.nan], np.float32)
    assert formats.encode(BF8, values).tolist() == [0x7B, 0x7C, 0xFC, 0x7C, 0xFC, 0x7F]
    assert formats.encode(BF8, values, saturate=True).tolist() == [0x7B, 0x7B, 0xFB, 0x7B, 0xFB, 0x7F]
    values = np.array([247.9, 248.0, -1e30, math.inf, -math.inf, math.nan], np.float32)
    assert formats.encode(FP8_FNUZ, values).tolist() == [0x7F, 0x80, 0x80, 0x80, 0x80, 0x80]
    assert formats.encode(FP8_FNUZ, values, saturate=True).tolist() == [0x7F, 0x7F, 0xFF, 0x7F, 0xFF, 0x80]
    for saturate in (False, True):
        assert formats.encode(FP4, np.array([7.0, -math.inf, math.nan], np.float32), saturate).tolist() == [7, 15, 7]


@pytest.mark.parametrize("form", SCALED, ids=lambda form: form.name)
def test_a_nan_scale_makes_nan_with_the_sign_of_the_source(form):
    values = np.array([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, 1e-45, -3e38], np.float32)
    expected = [(1 << (form.bits - 1)) - 1, (1 << form.bits) - 1] * 4
    assert formats.encode_scaled(form, values, 255).tolist() == expected
    assert formats.encode_scaled(form, values, 255, saturate=True).tolist() == expected
    random = np.full(8, 0xFFFFFFFF, np.uint32)
    assert formats.encode_stochastic(form, values, random, 255).tolist() == expected
    assert formats.encode_stochastic(form, values, random, np.full(8, 255, np.uint8), saturate=True).tolist() == expected


def test_a_scale_reaches_what_float32_alone_would_lose():
    tiny = as_float32([1, 0x80000001])  # 2**-149
    assert formats.encode_scaled(FP4, tiny, 0).tolist() == [0, 8]
    assert formats.encode_scaled(FP8, np.array([2.0**-126], np.float32), 1).tolist() == [0x38]  # 2**-126 / 2**-126 = 1
    assert formats.encode_scaled(FP8, np.array([2.0**127], np.float32), 254).tolist() == [0x38]
    assert formats.encode_scaled(FP8, np.array([2.0**127], np.float32), 0, saturate=True).tolist() == [0x7E]


@pytest.mark.parametrize(("form", "dtype"), TORCH, ids=lambda value: getattr(value, "name", ""))
def test_fp8_encoding_agrees_with_torch(form, dtype):
    limit = DEFINED[form.name][3]
    values = (torch.randn(200_000, generator=torch.Generator().manual_seed(0)) * limit / 5).clamp(-limit, limit)
    values = torch.cat([values, values * 1e-4, values * 1e-6])
    expected = values.to(dtype).view(torch.uint8).numpy()
    np.testing.assert_array_equal(formats.encode(form, values.numpy()), expected)


def test_16_bit_formats_are_not_encoded_by_table():
    with pytest.raises(ValueError, match="bf16 is not one of fp8"):
        formats.encode(BF16, np.zeros(4, np.float32))
    with pytest.raises(ValueError, match="f16 is not one of fp8"):
        formats.encode_scaled(F16, np.zeros(4, np.float32), 127)


# Stochastic rounding


def stochastic(form: Format, bits: int, random: int, exponent: int, saturate: bool) -> int:
    """Rounds stochastically with Python integers: aligns the float32 significand, adds the random bits below the last kept bit, and
    truncates."""
    exponent_bits, mantissa_bits, bias, _, _ = DEFINED[form.name]
    sign, value = bits >> 31 << (form.bits - 1), float(as_float32([bits & 0x7FFFFFFF])[0])
    all_ones = (1 << (form.bits - 1)) - 1
    nan = 0x80 if form in FNUZ else sign | all_ones
    if math.isnan(value) or exponent == 255:
        return nan
    top = len(finite_values(form.name)) - 1
    infinite = (((1 << exponent_bits) - 1) << mantissa_bits) if form.name in ("bf8", "f16", "bf16") else all_ones
    too_large = top if saturate or form.name in ("fp6", "bf6", "fp4") else nan if form in FNUZ else infinite
    if math.isinf(value):
        return sign | too_large
    if value == 0:
        return 0 if form in FNUZ else sign
    mantissa, power = math.frexp(value)
    significand, power = int(mantissa * 2**24), power - 1 - (exponent - 127)
    biased = power + bias
    if biased < 1:
        significand >>= min(1 - biased, 63)
        biased = 1
    significand += random >> (9 + mantissa_bits)
    kept = significand >> (23 - mantissa_bits)  # with the implicit bit, if there is one
    code = (biased - 1 << mantissa_bits) + kept
    if form in FNUZ and code == 0:
        return 0
    return sign | (too_large if code > top else code)


@pytest.mark.parametrize("form", ALL, ids=lambda form: form.name)
@settings(max_examples=60, deadline=None)
@given(
    items=st.lists(st.tuples(float_bits, st.integers(0, 2**32 - 1)), min_size=1, max_size=12),
    exponent=st.one_of(st.just(127), st.integers(0, 255)),
    saturate=st.booleans(),
)
def test_stochastic_rounding_adds_the_upper_random_bits(form, items, exponent, saturate):
    bits, random = zip(*items, strict=True)
    expected = [stochastic(form, x, r, exponent, saturate) for x, r in items]
    for given_as in (exponent, np.full(len(items), exponent, np.uint8), np.full(len(items), exponent, np.uint32)):
        codes = formats.encode_stochastic(form, as_float32(list(bits)), np.array(random, np.uint32), given_as, saturate)
        assert codes.dtype == form.dtype
        assert codes.tolist() == expected


def test_stochastic_rounding_is_fair():
    values = np.full(100_000, 1.03, np.float32)  # between 1 and 1.125 in fp8
    random = np.random.default_rng(3).integers(0, 2**32, len(values), dtype=np.uint32)
    rounded = FP8.values[formats.encode_stochastic(FP8, values, random)]
    assert set(rounded.tolist()) == {1.0, 1.125}
    assert abs(rounded.mean() - 1.03) < 1e-3
    assert (formats.encode_stochastic(FP8, values, np.zeros_like(random)) == 0x38).all()
    assert (formats.encode_stochastic(FP8, np.ones(8, np.float32), random[:8]) == 0x38).all()  # exact values stay unchanged


def test_the_random_generator_is_a_shift_register():
    state, expected = 0x80000001, []
    for _ in range(100):
        state = (state << 1 & 0xFFFFFFFF) ^ (197 if state >> 31 else 0)
        expected.append(state)
    random, seen = np.array([0x80000001], np.uint32), []
    for _ in range(100):
        random = formats.next_random(random)
        seen.append(int(random[0]))
    assert seen == expected


# bfloat16 and float16


def test_bf16_agrees_with_torch():
    bits = np.random.default_rng(1).integers(0, 2**32, 500_000, dtype=np.uint32)
    values = np.concatenate([bits.view(np.float32), as_float32([x | s for x in SPECIAL_BITS for s in (0, 1 << 31)])])
    codes = formats.f32_to_bf16(values)
    assert codes.dtype == np.uint16
    nan = np.isnan(values)
    expected = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(codes[~nan], expected[~nan])
    # NaNs: quiet, sign and upper payload kept
    np.testing.assert_array_equal(codes[nan], (values.view(np.uint32)[nan] >> 16 | 0x40).astype(np.uint16))
    np.testing.assert_array_equal(formats.bf16_to_f32(codes).view(np.uint32), codes.astype(np.uint32) << 16)


def test_bf16_saturates_on_request():
    values = as_float32([0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7F7F7FFF, 0x7FC00000])
    assert formats.f32_to_bf16(values).tolist() == [0x7F80, 0xFF80, 0x7F80, 0xFF80, 0x7F7F, 0x7FC0]
    assert formats.f32_to_bf16(values, saturate=True).tolist() == [0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7F7F, 0x7FC0]


@settings(max_examples=200, deadline=None)
@given(pairs=st.lists(st.tuples(float_bits, float_bits), min_size=1, max_size=16), saturate=st.booleans())
def test_packed_bf16_has_the_first_operand_below(pairs, saturate):
    low, high = (as_float32(list(column)) for column in zip(*pairs, strict=True))
    packed = formats.pack_bf16(low, high, saturate)
    assert packed.dtype == np.uint32
    np.testing.assert_array_equal(packed & 0xFFFF, formats.f32_to_bf16(low, saturate))
    np.testing.assert_array_equal(packed >> 16, formats.f32_to_bf16(high, saturate))


def half_of(bits: int, saturate: bool, toward_zero: bool) -> int:
    """Converts to float16 by exact comparison with the adjacent values."""
    value, sign = float(as_float32([bits])[0]), bits >> 16 & 0x8000
    if math.isnan(value):
        return sign | 0x7C00 | bits >> 13 & 0x3FF | 0x200
    if math.isinf(value):
        return sign | 0x7C00
    exact = abs(Fraction(value))
    return sign | (below(F16, exact) if toward_zero else nearest(F16, exact, saturate))


@settings(max_examples=200, deadline=None)
@given(bits=st.lists(float_bits, min_size=1, max_size=16), saturate=st.booleans(), toward_zero=st.booleans())
def test_float16_rounding(bits, saturate, toward_zero):
    codes = formats.f32_to_f16(as_float32(bits), saturate, toward_zero)
    assert codes.dtype == np.uint16
    assert codes.tolist() == [half_of(x, saturate, toward_zero) for x in bits]


def test_float16_widening_is_exact():
    codes = np.arange(1 << 16, dtype=np.uint16)
    values = formats.f16_to_f32(codes)
    np.testing.assert_array_equal(values, [value_of(F16, int(code)) for code in codes])
    nan = np.isnan(values)
    assert (values.view(np.uint32)[nan] & 0x400000).all()
    np.testing.assert_array_equal(np.signbit(values), codes >> 15 == 1)


# Packing of 6-bit and 4-bit values


@settings(max_examples=100, deadline=None)
@given(words=st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=6, max_size=6), min_size=1, max_size=5))
def test_six_bit_elements_straddle_words(words):
    registers = np.array(words, np.uint32).T.copy()
    codes = formats.unpack6(registers)
    assert codes.dtype == np.uint8
    for lane, column in enumerate(words):
        stream = sum(word << 32 * place for place, word in enumerate(column))
        assert codes[:, lane].tolist() == [stream >> 6 * element & 63 for element in range(32)]
    np.testing.assert_array_equal(formats.pack6(codes), registers)


@settings(max_examples=50, deadline=None)
@given(words=st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4), min_size=1, max_size=5))
def test_four_bit_elements_come_low_half_first(words):
    registers = np.array(words, np.uint32).T.copy()
    codes = formats.unpack4(registers)
    for lane, column in enumerate(words):
        stream = sum(word << 32 * place for place, word in enumerate(column))
        assert codes[:, lane].tolist() == [stream >> 4 * element & 15 for element in range(32)]
    np.testing.assert_array_equal(formats.pack4(codes), registers)


def test_wrong_stream_shapes_are_refused():
    with pytest.raises(ValueError, match=r"words: expected shape \[6, lanes\], got \[5, 64\]"):
        formats.unpack6(np.zeros((5, 64), np.uint32))
    with pytest.raises(ValueError, match=r"codes: expected shape \[32, lanes\]"):
        formats.pack6(np.zeros((31, 64), np.uint8))
    with pytest.raises(ValueError, match="multiple of 8"):
        formats.pack4(np.zeros((9, 64), np.uint8))
