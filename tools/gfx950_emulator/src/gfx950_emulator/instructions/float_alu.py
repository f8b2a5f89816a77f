"""Vector floating point in float16, float32 and float64: add, multiply, min and max, exponents, mixed precision, dot products.

Rounding is to nearest even and denormals are kept, as Triton's kernels set MODE; MODE.IEEE is on. All results are exact, or rounded
once as IEEE 754 defines, except that dot products round every partial sum. NaNs are quiet as on hardware, but have the host's
payloads. Definitions: chapters VOP1 to VOP3P of AMD's CDNA4 ISA document. `gfx950_emulator.instructions.transcendental` has the
transcendental functions, and `gfx950_emulator.instructions.division` has division.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from gfx950_emulator.binding import Bound, Site, binder
from gfx950_emulator.vector import F16, F32, F64, I16, I32, MANTISSA_BITS, SMALLEST_NORMAL, U32, Form, source, vector_op

Array = Any

for _suffix, _type in (("f32", F32), ("f64", F64), ("f16", F16)):
    vector_op(f"v_add_{_suffix}", np.add, _type, _type, _type, overflows=True)
    vector_op(f"v_mul_{_suffix}", np.multiply, _type, _type, _type, overflows=True)
    if _type is not F64:
        vector_op(f"v_sub_{_suffix}", np.subtract, _type, _type, _type, overflows=True)
        vector_op(f"v_subrev_{_suffix}", lambda a, b: b - a, _type, _type, _type, overflows=True)
    vector_op(f"v_floor_{_suffix}", np.floor, _type, _type)
    vector_op(f"v_ceil_{_suffix}", np.ceil, _type, _type)
    vector_op(f"v_trunc_{_suffix}", np.trunc, _type, _type)
    vector_op(f"v_rndne_{_suffix}", np.rint, _type, _type)
vector_op("v_mul_legacy_f32", lambda a, b: np.where((a == 0) | (b == 0), np.float32(0), a * b), F32, F32, F32)


# Fused multiply-add

_LOW_28, _LOW_29, _HALF_WAY = np.uint64(0x0FFFFFFF), np.uint64(0x1FFFFFFF), np.uint64(0x10000000)
_NORMAL_32 = 2.0**-126


def fma32(a: Array, b: Array, c: Array) -> Array:
    """Returns a * b + c in float32, rounded once.

    The product is exact in float64. The sum is rounded to float64 and then to float32. Double rounding is wrong only if the float64
    result is halfway between two float32 values. Then bits 28 to 0 are 2**28, or the value is a float32 denormal.
    """
    product = np.multiply(a, b, dtype=np.float64)
    total = product + c
    if not (total.view(np.uint64) & _LOW_28).all():
        total = _safe_to_round(product, c, total)
    return total.astype(np.float32)


def _safe_to_round(product: Array, c: Array, total: Array) -> Array:
    magnitude = np.abs(total)
    middle = (total.view(np.uint64) & _LOW_29) == _HALF_WAY
    middle |= (magnitude < _NORMAL_32) & (magnitude > 0)
    return np.where(middle, round_to_odd(product, c, total), total) if middle.any() else total


def round_to_odd(a: Array, b: Array, total: Array) -> Array:
    """Returns a + b in float64, rounded to odd. ``total`` is the sum rounded to nearest. The result is whichever of the two float64
    values around an inexact sum has an odd last bit. Rounding this result to fewer bits then equals rounding once. A sum that is
    not finite is returned unchanged."""
    _, error = two_sum(a, np.asarray(b, np.float64))
    bits = np.asarray(total).view(np.int64)
    towards = np.where((error > 0) == (total > 0), 1, -1)
    return np.where((error != 0) & ((bits & 1) == 0) & np.isfinite(total), bits + towards, bits).view(np.float64)


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Returns the rounded sum a + b and its rounding error (Knuth)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def two_product(a: Array, b: Array) -> tuple[Array, Array]:
    """Returns the rounded product a * b and its rounding error (Dekker). Both are valid only if nothing overflows or underflows."""

    def split(x: Array) -> tuple[Array, Array]:
        scaled = x * 134217729.0  # 2**27 + 1
        high = scaled - (scaled - x)
        return high, x - high

    product = a * b
    (ah, al), (bh, bl) = split(a), split(b)
    return product, ((ah * bh - product) + ah * bl + al * bh) + al * bl


def fma64(a: Array, b: Array, c: Array) -> Array:
    """Returns a * b + c in float64, rounded once: the sum of the low parts is rounded to odd before it is added to the high part
    (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums"). If a part would overflow or underflow, Python integers are
    used.
    """
    product, low = two_product(a, b)
    high, rest = two_sum(c, low)
    total, remainder = two_sum(product, high)
    odd = round_to_odd(rest, remainder, rest + remainder)
    result = total + odd
    size = np.abs(product)
    inside = (size > 2.0**-960) & (size < 2.0**1000) & (np.abs(a) < 2.0**990) & (np.abs(b) < 2.0**990) & (np.abs(c) < 2.0**1000)
    if inside.all():
        return result
    finite_product = np.isfinite(a) & np.isfinite(b)
    plain = np.where(finite_product & np.isinf(c), c, a * b + c)
    result = np.where(inside, result, plain)
    extreme = finite_product & np.isfinite(c) & ~inside & (a != 0) & (b != 0)
    return one_by_one(exact_fma, extreme, result, a, b, c) if extreme.any() else result


def one_by_one(function: Callable[..., float], lanes: Array, result: Array, *sources: Array) -> Array:
    """Returns the result with some lanes recomputed, one by one, by a function of Python floats."""
    result = result.copy()
    spread = [np.broadcast_to(x, result.shape) for x in sources]
    for lane in np.argwhere(lanes):
        at = tuple(lane)
        result[at] = function(*(float(x[at]) for x in spread))
    return result


def exact_fma(a: float, b: float, c: float, exponent: int = 0) -> float:
    """Returns (a * b + c) * 2**exponent for finite floats, rounded once."""
    exact = (Fraction(a) * Fraction(b) + Fraction(c)) * Fraction(2) ** exponent
    if exact == 0:
        return a * b + c
    try:
        return exact.numerator / exact.denominator  # division of integers is rounded correctly
    except OverflowError:
        return float("inf") if exact > 0 else float("-inf")


def fma16(a: Array, b: Array, c: Array) -> Array:
    """Returns a * b + c in float16, rounded once. The product is exact in float64; an inexact float64 sum is far from any float16
    rounding tie.
    """
    return (np.multiply(a, b, dtype=np.float64) + c).astype(np.float16)


for _suffix, _type, _fma in (("f32", F32, fma32), ("f64", F64, fma64), ("f16", F16, fma16)):
    vector_op(f"v_fma_{_suffix}", _fma, _type, _type, _type, _type, overflows=True, keeps_high=True)
vector_op("v_fmac_f32", fma32, F32, F32, F32, F32, accumulates=True)
vector_op("v_fmac_f64", fma64, F64, F64, F64, F64, accumulates=True)
vector_op("v_fmamk_f32", lambda a, k, b: fma32(a, k, b), F32, F32, F32, F32)
vector_op("v_fmaak_f32", lambda a, b, k: fma32(a, b, k), F32, F32, F32, F32)


# Minimum and maximum. With MODE.IEEE on, v_min and v_max return the number if the other operand is a quiet NaN. A signalling NaN
# becomes the result, made quiet. -0 is below +0.


def _bits(a: Array) -> Array:
    return a.view(f"u{a.dtype.itemsize}")


def _signalling(a: Array) -> Array:
    quiet = _bits(a) >> MANTISSA_BITS[a.dtype.itemsize] - 1 & 1
    return np.isnan(a) & (quiet == 0)


def _choose(a: Array, b: Array, chosen: Array, equal: Callable[[Array, Array], Array]) -> Array:
    """Handles NaNs and zeros of v_min or v_max. `chosen` is the result for all other operands; `equal` combines the bits of
    operands that are equal.
    """
    a, b = np.broadcast_arrays(a, b)
    chosen = np.where(a == b, equal(_bits(a), _bits(b)).view(a.dtype), chosen)
    for x in (b, a):
        signalling = _signalling(x)
        if signalling.any():
            chosen = np.where(signalling, x + x.dtype.type(0), chosen)
    return chosen


def minimum(a: Array, b: Array) -> Array:
    least = np.minimum(a, b)
    if (np.abs(least) > 0).all():  # no operand is zero or NaN
        return least
    return _choose(a, b, np.fmin(a, b), np.bitwise_or)


def maximum(a: Array, b: Array) -> Array:
    largest = np.maximum(a, b)
    if (np.abs(largest) > 0).all():
        return largest
    return _choose(a, b, np.fmax(a, b), np.bitwise_and)


def minimum3(a: Array, b: Array, c: Array) -> Array:
    least = np.minimum(np.minimum(a, b), c)
    return least if (np.abs(least) > 0).all() else minimum(minimum(a, b), c)


def maximum3(a: Array, b: Array, c: Array) -> Array:
    largest = np.maximum(np.maximum(a, b), c)
    return largest if (np.abs(largest) > 0).all() else maximum(maximum(a, b), c)


def median(a: Array, b: Array, c: Array) -> Array:
    """Returns the median of three values. If one of them is a NaN, the result is that of v_min3."""
    middle = np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))
    if (np.abs(middle) > 0).all():
        return middle
    largest = maximum3(a, b, c)
    middle = np.where(largest == a, maximum(b, c), np.where(largest == b, maximum(a, c), maximum(a, b)))
    any_nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
    return np.where(any_nan, minimum3(a, b, c), middle) if any_nan.any() else middle


def _or_nan(function: Callable[[Array, Array], Array], plain: np.ufunc) -> Callable[[Array, Array, Array], Array]:
    """Returns IEEE 754-2019's minimum or maximum of three values, which is NaN if any operand is NaN."""

    def choose(a: Array, b: Array, c: Array) -> Array:
        chosen = plain(plain(a, b), c)
        if (np.abs(chosen) > 0).all():
            return chosen
        any_nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
        return np.where(any_nan, a + b + c, function(function(a, b), c))

    return choose


minimum3_or_nan, maximum3_or_nan = _or_nan(minimum, np.minimum), _or_nan(maximum, np.maximum)

for _suffix, _type in (("f32", F32), ("f64", F64), ("f16", F16)):
    vector_op(f"v_min_{_suffix}", minimum, _type, _type, _type)
    vector_op(f"v_max_{_suffix}", maximum, _type, _type, _type)
for _suffix, _type in (("f32", F32), ("f16", F16)):
    vector_op(f"v_min3_{_suffix}", minimum3, _type, _type, _type, _type, keeps_high=True)
    vector_op(f"v_max3_{_suffix}", maximum3, _type, _type, _type, _type, keeps_high=True)
    vector_op(f"v_med3_{_suffix}", median, _type, _type, _type, _type, keeps_high=True)
vector_op("v_minimum3_f32", minimum3_or_nan, F32, F32, F32, F32)
vector_op("v_maximum3_f32", maximum3_or_nan, F32, F32, F32, F32)

# Exponents and fractional parts


def fraction(a: Array) -> Array:
    """Returns x - floor(x), below 1."""
    below_one = np.nextafter(a.dtype.type(1), a.dtype.type(0))
    return np.minimum(a - np.floor(a), below_one)


def _exponent_of(dtype: type) -> Callable[[Array], Array]:
    """Returns a function that computes the exponent that belongs to a mantissa in [0.5, 1). The exponent is 0 for zero, infinity
    and NaN."""
    return lambda a: np.where(np.isfinite(a), np.frexp(a)[1], 0).astype(dtype)


def _mantissa(a: Array) -> Array:
    return np.where(np.isfinite(a), np.frexp(a)[0], a + a)


def ldexp(a: Array, b: Array) -> Array:
    return np.ldexp(a, np.clip(b, -5000, 5000).astype(np.int32))


for _suffix, _type, _name, _integer in (("f32", F32, "i32", I32), ("f64", F64, "i32", I32), ("f16", F16, "i16", I16)):
    vector_op(f"v_fract_{_suffix}", fraction, _type, _type)
    vector_op(f"v_frexp_exp_{_name}_{_suffix}", _exponent_of(_integer.dtype.type), _integer, _type)
    vector_op(f"v_frexp_mant_{_suffix}", _mantissa, _type, _type)
    vector_op(f"v_ldexp_{_suffix}", ldexp, _type, _type, _integer, overflows=True)

# Mixed precision


def fma32_to_16(a: Array, b: Array, c: Array) -> Array:
    return fma32(a, b, c).astype(np.float16)


@binder("v_fma_mix_f32", "v_fma_mixlo_f16", "v_fma_mixhi_f16")
def _fma_mix(site: Site) -> Bound:
    """Binds a mixed-precision FMA. Each source is float32 or, with op_sel_hi, the float16 in the register half that op_sel selects.
    The result is rounded to float32, and for mixlo and mixhi then to float16.
    """
    upper = tuple(site.take("op_sel", (0, 0, 0)))
    halves = tuple(site.take("op_sel_hi", (0, 0, 0)))
    destination, *sources = site.operands
    form, arguments = Form(), []
    for operand, half, high in zip(sources, halves, upper, strict=True):
        text = source(site, form, F16 if half else F32, operand, high=high)
        arguments.append(f"{text}.astype(np.float32)" if half else text)
    form.values["d"] = destination.index
    narrow = site.mnemonic != "v_fma_mix_f32"
    form.values["fn"] = fma32_to_16 if narrow else fma32
    result = f"limited(g, fn, {', '.join(arguments)})" if narrow else f"fn({', '.join(arguments)})"
    if site.take("clamp", False):
        result = f"clamp_result({result})"
    write = {"v_fma_mix_f32": "group_write", "v_fma_mixlo_f16": "write_low16", "v_fma_mixhi_f16": "write_high16"}[site.mnemonic]
    lines = f"{write}(g, d, np.asarray({result}).view({'u16' if narrow else 'u32'}))"
    writes, reads = site.ids([destination]), site.ids(sources)
    return Bound(form.function(lines), writes, reads)


# Dot products of packed 16-bit values, accumulated in float32. Every partial sum is rounded, in the order of the ISA's pseudocode.
# Denormal sources and results are flushed to zero (section "Denormalized and Rounding Modes").


def without_denormals(a: Array) -> Array:
    """Flushes denormals to zeros of the same sign."""
    return a * (np.abs(a) >= SMALLEST_NORMAL[a.dtype.itemsize])


def _wide_bf16(bits: Array) -> Array:
    return without_denormals((bits << np.uint32(16)).view(np.float32))


def _wide_f16(bits: Array) -> Array:
    return without_denormals(bits.astype(np.uint16).view(np.float16)).astype(np.float32)


def _dot2(widen: Callable[[Array], Array], addend_last: bool) -> Callable[[Array, Array, Array], Array]:
    def function(a: Array, b: Array, c: Array) -> Array:
        low, high = np.uint32(0xFFFF), np.uint32(16)
        first = without_denormals(widen(a & low) * widen(b & low))
        second = without_denormals(widen(a >> high) * widen(b >> high))
        terms = (first, second, without_denormals(c)) if addend_last else (without_denormals(c), first, second)
        return without_denormals(without_denormals(terms[0] + terms[1]) + terms[2])

    return function


vector_op("v_dot2c_f32_bf16", _dot2(_wide_bf16, False), F32, U32, U32, F32, accumulates=True)
vector_op("v_dot2_f32_bf16", _dot2(_wide_bf16, True), F32, U32, U32, F32)
vector_op("v_dot2c_f32_f16", _dot2(_wide_f16, False), F32, U32, U32, F32, accumulates=True)
vector_op("v_dot2_f32_f16", _dot2(_wide_f16, False), F32, U32, U32, F32)
