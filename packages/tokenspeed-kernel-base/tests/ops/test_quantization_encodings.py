"""Tests the narrow formats against tables of all their values. The tables are computed here from the formats' definitions."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tokenspeed_kernel_base.ops.quantization import encodings
from tokenspeed_kernel_base.ops.quantization.encodings import (
    BLOCK_MX,
    FP8_MAX,
    decode_e2m1,
    decode_mxfp4,
    decode_mxfp8,
    decode_nvfp4,
    e8m0_to_float,
    encode_e2m1,
    encode_fp8,
    encode_mxfp4,
    encode_mxfp8,
    encode_nvfp4,
)

E4M3, E5M2, FNUZ = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz
E2M1 = "e2m1"
NAN, INF = math.nan, math.inf


def _value(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """Returns the value of a bit pattern of sign, exponent and mantissa. Values with exponent 0 are subnormal."""
    mantissa = code & ((1 << mantissa_bits) - 1)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    sign = -1.0 if code >> (mantissa_bits + exponent_bits) else 1.0
    steps = mantissa if exponent == 0 else mantissa + (1 << mantissa_bits)
    return sign * steps * 2.0 ** (max(exponent, 1) - bias - mantissa_bits)


def _decoded(fmt: torch.dtype | str, code: int) -> float:
    if fmt == E2M1:
        return _value(code, 2, 1, 1)
    if fmt == E4M3:
        return NAN if code & 0x7F == 0x7F else _value(code, 4, 3, 7)
    if fmt == E5M2:
        special = code & 0x7F
        if special >= 0x7C:
            return NAN if special > 0x7C else math.copysign(INF, -1.0 if code & 0x80 else 1.0)
        return _value(code, 5, 2, 15)
    return NAN if code == 0x80 else _value(code, 4, 3, 8)


def _positive(fmt: torch.dtype | str) -> list[tuple[Fraction, int]]:
    """Returns every finite nonnegative value with its bit pattern, in ascending order."""
    codes = range(8 if fmt == E2M1 else 128)
    return sorted((Fraction(v), c) for c in codes if math.isfinite(v := _decoded(fmt, c)))


_TABLES = {fmt: _positive(fmt) for fmt in (E2M1, E4M3, E5M2, FNUZ)}


def _nearest(fmt: torch.dtype | str, x: float) -> float:
    """Searches all values for the nearest one. Ties go to the even bit pattern; values above the largest saturate."""
    if math.isnan(x):
        return 0.0 if fmt == E2M1 else NAN
    table = _TABLES[fmt]
    if math.isinf(x):
        best = table[-1][0]
    else:
        best = min(table, key=lambda entry: (abs(entry[0] - abs(Fraction(x))), entry[1] & 1))[0]
    return math.copysign(float(best), x)


def _round(fmt: torch.dtype | str, x: torch.Tensor) -> list[float]:
    return (decode_e2m1(encode_e2m1(x)) if fmt == E2M1 else encode_fp8(x, fmt).float()).tolist()


def _same(got: list[float], expected: list[float], signed_zero: bool = True) -> bool:
    def key(v: float) -> object:
        return "nan" if math.isnan(v) else (v, math.copysign(1.0, v) if signed_zero else 0)

    return [key(v) for v in got] == [key(v) for v in expected]


def test_tables_have_the_known_largest_and_smallest_values() -> None:
    assert [float(_TABLES[f][-1][0]) for f in (E2M1, E4M3, E5M2, FNUZ)] == [6.0, 448.0, 57344.0, 240.0]
    assert [float(_TABLES[f][1][0]) for f in (E2M1, E4M3, E5M2, FNUZ)] == [0.5, 2.0**-9, 2.0**-16, 2.0**-10]
    assert {d: float(_TABLES[d][-1][0]) for d in FP8_MAX} == FP8_MAX


def test_decode_e2m1_takes_the_lower_nibble_first_for_all_bytes() -> None:
    decoded = decode_e2m1(torch.arange(256, dtype=torch.uint8).reshape(256, 1))
    expected = [v for byte in range(256) for v in (_decoded(E2M1, byte & 15), _decoded(E2M1, byte >> 4))]
    assert decoded.shape == (256, 2)
    assert _same(decoded.flatten().tolist(), expected)


def test_encode_e2m1_reverses_decode_for_all_bytes() -> None:
    codes = torch.arange(256, dtype=torch.uint8).reshape(8, 32)
    assert torch.equal(encode_e2m1(decode_e2m1(codes)), codes)


@pytest.mark.parametrize("dtype", [E4M3, E5M2, FNUZ], ids=str)
def test_encode_fp8_returns_every_finite_code_to_itself(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = torch.tensor([_decoded(dtype, c) for c in range(256)])
    finite = values.isfinite()
    assert torch.equal(encode_fp8(values, dtype).view(torch.uint8)[finite], codes[finite])
    assert _same(codes.view(dtype).float().tolist(), values.tolist())


@pytest.mark.parametrize("dtype", [E4M3, E5M2, FNUZ], ids=str)
def test_encode_fp8_saturates_infinities_and_makes_one_nan(dtype: torch.dtype) -> None:
    x = torch.tensor([INF, -INF, NAN, -NAN, 1e38, -1e38])
    x[3] = torch.tensor(-4194304, dtype=torch.int32).view(torch.float32)  # 0xffc00000: a NaN with its sign bit set
    largest = FP8_MAX[dtype]
    encoded = encode_fp8(x, dtype)
    assert encoded[[0, 1, 4, 5]].float().tolist() == [largest, -largest, largest, -largest]
    assert encoded.view(torch.uint8)[2:4].tolist() == [0x80 if dtype == FNUZ else 0x7F] * 2


@pytest.mark.parametrize("fmt", [E2M1, E4M3, E5M2, FNUZ], ids=str)
def test_rounding_at_and_around_every_midpoint(fmt: torch.dtype | str) -> None:
    values = [float(v) for v, _ in _TABLES[fmt]]
    points = []
    for low, high in itertools.pairwise(values):
        middle = torch.tensor((low + high) / 2)  # exact in float32: it has one mantissa bit more than the format
        points += [middle, torch.nextafter(middle, torch.tensor(-INF)), torch.nextafter(middle, torch.tensor(INF))]
    x = torch.stack(points)
    x = torch.cat((x, -x))
    x = torch.cat((x, x[:1])) if len(x) % 2 else x
    assert _same(_round(fmt, x), [_nearest(fmt, v) for v in x.tolist()], signed_zero=fmt != FNUZ)


@pytest.mark.parametrize("fmt", [E2M1, E4M3, E5M2, FNUZ], ids=str)
@settings(deadline=None)
@given(x=st.lists(st.floats(width=32), min_size=2, max_size=2))
@example(x=[-0.0, NAN])
@example(x=[-1e-45, INF])
def test_rounding_is_to_the_nearest_of_all_values(fmt: torch.dtype | str, x: list[float]) -> None:
    assert _same(_round(fmt, torch.tensor(x)), [_nearest(fmt, v) for v in x], signed_zero=fmt != FNUZ)


@pytest.mark.parametrize("fmt", [E2M1, E4M3, E5M2, FNUZ], ids=str)
@settings(deadline=None)
@given(x=st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=2))
def test_rounding_is_monotonic(fmt: torch.dtype | str, x: list[float]) -> None:
    low, high = _round(fmt, torch.tensor(sorted(x)))
    assert low <= high


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_source_dtypes_encode_like_their_float32_values(dtype: torch.dtype) -> None:
    x = (torch.randn(64, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    assert torch.equal(encode_fp8(x).view(torch.uint8), encode_fp8(x.float()).view(torch.uint8))
    assert torch.equal(encode_e2m1(x), encode_e2m1(x.float()))


def test_e8m0_is_a_power_of_two_for_all_bytes() -> None:
    decoded = e8m0_to_float(torch.arange(256, dtype=torch.uint8)).tolist()
    assert decoded[:255] == [2.0 ** (byte - 127) for byte in range(255)]
    assert math.isnan(decoded[255])


def _mx_by_hand(block: list[float], emax: int, fmt: torch.dtype | str) -> tuple[list[float], int]:
    """Quantises one block by the definition. Returns the decoded elements (before scaling) and the scale byte."""
    if not all(map(math.isfinite, block)):
        return [0.0] * len(block), 255
    amax = max(abs(v) for v in block)
    exponent = -127 if amax == 0 else max(math.frexp(amax)[1] - 1 - emax, -127)
    return [_nearest(fmt, math.ldexp(v, -exponent)) for v in block], exponent + 127


_BLOCKS = st.one_of(
    st.lists(st.floats(width=32), min_size=32, max_size=32),
    st.lists(st.floats(-8, 8, width=32), min_size=32, max_size=32),
    st.lists(st.floats(-(2.0**-120), 2.0**-120, width=32), min_size=32, max_size=32),
)


@settings(deadline=None, max_examples=25)
@given(block=_BLOCKS)
@example(block=[0.0] * 32)
@example(block=[-0.0] * 31 + [1e-45])
@example(block=[3.4028234663852886e38] * 32)
@example(block=[1.0] * 31 + [INF])
def test_mx_blocks_equal_the_specification_computed_by_hand(block: list[float]) -> None:
    packed, scale = encode_mxfp4(torch.tensor(block))
    elements, byte = _mx_by_hand(block, 2, E2M1)
    assert scale.tolist() == [byte]
    assert _same(decode_e2m1(packed).tolist(), elements)
    for dtype, emax in ((E4M3, 8), (E5M2, 15)):
        q, scale = encode_mxfp8(torch.tensor(block), dtype)
        elements, byte = _mx_by_hand(block, emax, dtype)
        assert scale.tolist() == [byte]
        assert _same(q.float().tolist(), elements)


@settings(deadline=None)
@given(block=st.lists(st.floats(-1000, 1000, width=32), min_size=32, max_size=32))
def test_mx_decoding_is_within_half_a_step_of_the_value_or_saturates(block: list[float]) -> None:
    x = torch.tensor(block, dtype=torch.float32)
    amax = x.abs().max().item()
    power = 2.0 ** max(math.frexp(amax)[1] - 1, -118) if amax else 2.0**-118  # the largest power of two up to amax
    # Above 2^e, e2m1's step is 2^(e-1); values above 6/4 of the power saturate.
    decoded = decode_mxfp4(*encode_mxfp4(x))
    assert ((decoded - x).abs() <= torch.where(x.abs() > 1.75 * power, 0.5, 0.25) * power).all()
    # e4m3's step is 2^(e-3); values above 448/256 = 1.75 of the power saturate.
    decoded = decode_mxfp8(*encode_mxfp8(x))
    assert ((decoded - x).abs() <= torch.where(x.abs() > 1.8125 * power, 1 / 4, 1 / 16) * power).all()


@settings(deadline=None)
@given(
    block=st.lists(st.floats(-6, 6, width=32).filter(lambda v: v == 0 or abs(v) > 1e-3), min_size=32, max_size=32),
    power=st.integers(-60, 60),
)
def test_mx_codes_do_not_change_with_a_power_of_two(block: list[float], power: int) -> None:
    x = torch.tensor(block, dtype=torch.float32)
    (packed, scale), (same, shifted) = encode_mxfp4(x), encode_mxfp4(x * 2.0**power)
    assert torch.equal(packed, same)
    if x.any():
        assert shifted.item() - scale.item() == power


@settings(deadline=None)
@given(codes=st.lists(st.integers(0, 255), min_size=16, max_size=16), scale=st.integers(2, 240))
def test_any_mxfp4_block_round_trips(codes: list[int], scale: int) -> None:
    x = decode_mxfp4(torch.tensor(codes, dtype=torch.uint8), torch.tensor([scale], dtype=torch.uint8))
    assert torch.equal(decode_mxfp4(*encode_mxfp4(x)), x)


@settings(deadline=None)
@given(block=_BLOCKS)
def test_quantised_blocks_round_trip(block: list[float]) -> None:
    # Not every block of e4m3 values round-trips. If 240 is the largest value, it is scaled to 480 and saturates.
    for encode, decode in ((encode_mxfp4, decode_mxfp4), (encode_mxfp8, decode_mxfp8)):
        first, scale = encode(torch.tensor(block))
        second, same = encode(decode(first, scale))
        assert torch.equal(scale, same)
        assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def test_decoding_mx_overflows_to_infinity_and_255_to_nan() -> None:
    codes = torch.full((16,), 0xF7, dtype=torch.uint8)
    assert decode_mxfp4(codes, torch.tensor([254], dtype=torch.uint8))[:2].tolist() == [INF, -INF]
    assert decode_mxfp4(codes, torch.tensor([255], dtype=torch.uint8)).isnan().all()
    assert decode_mxfp4(codes, torch.tensor([0], dtype=torch.uint8))[:2].tolist() == [6 * 2.0**-127, -6 * 2.0**-127]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_decoding_gives_the_dtype_that_was_asked_for(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, 1.5, -6.0, 0.0] * 8)
    one = torch.tensor([1.0 / 448])
    assert torch.equal(decode_mxfp4(*encode_mxfp4(x), dtype), x.to(dtype))
    assert torch.equal(decode_mxfp8(*encode_mxfp8(x), dtype), x.to(dtype))
    assert decode_nvfp4(*encode_nvfp4(x, one), one, dtype).dtype == dtype


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (0, 0), (2, 0, 32)], ids=str)
def test_empty_tensors_encode_and_decode(shape: tuple[int, ...]) -> None:
    x, one = torch.zeros(shape), torch.ones(1)
    assert decode_mxfp4(*encode_mxfp4(x)).shape == shape
    assert decode_mxfp8(*encode_mxfp8(x)).shape == shape
    assert decode_nvfp4(*encode_nvfp4(x, one), one).shape == shape
    assert encode_fp8(x).shape == shape


def test_expand_scale_cuts_short_last_blocks() -> None:
    scale = torch.arange(4.0).reshape(2, 2)
    expanded = encodings.expand_scale(scale, (2, 3), (3, 4))
    assert expanded.tolist() == [[0, 0, 0, 1], [0, 0, 0, 1], [2, 2, 2, 3]]
    assert encodings.expand_scale(scale, (1, 2), (2, 3)).tolist() == [[0, 0, 1], [2, 2, 3]]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_scales_rounded_up_are_the_smallest_at_which_nothing_saturates(dtype: torch.dtype) -> None:
    most = Fraction(torch.finfo(dtype).max)
    edges = torch.finfo(dtype).max * 2.0 ** torch.arange(-140.0, 105.0)
    amax = torch.cat((edges.nextafter(edges * 0), edges, edges.nextafter(edges * 2), torch.rand(200).exp2() * edges[:200]))
    x = torch.zeros(len(amax), BLOCK_MX)
    x[:, 7] = amax
    q, scale = encode_mxfp8(x, dtype, round_up=True)
    for magnitude, byte in zip(amax.tolist(), scale.flatten().tolist(), strict=True):
        steps = Fraction(magnitude) / Fraction(2) ** (byte - 127)
        assert steps <= most
        assert byte == 0 or 2 * steps > most, f"{magnitude} would have fitted the scale below"
    assert (q.float() <= float(most)).all()
    errors = (decode_mxfp8(q, scale) - x).abs().amax(1) / amax
    assert errors[scale.flatten() > 0].max() <= torch.finfo(dtype).eps / 2, "nothing saturates"


def test_rounding_of_scales_differs_from_448_on() -> None:
    for magnitude, down, up in ((256.0, 127, 127), (448.0, 127, 127), (449.0, 127, 128), (511.0, 127, 128), (512.0, 128, 128)):
        x = torch.full((32,), magnitude)
        assert encode_mxfp8(x)[1].item() == down
        assert encode_mxfp8(x, round_up=True)[1].item() == up
    for special in (torch.nan, torch.inf):
        x[3] = special
        q, scale = encode_mxfp8(x, round_up=True)
        assert scale.item() == 255
        assert not q.float().any()
