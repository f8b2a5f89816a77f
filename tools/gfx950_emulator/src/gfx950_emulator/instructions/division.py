"""The steps of LLVM's division: v_div_scale, v_div_fmas, v_div_fixup.

LLVM divides in five steps: scale both operands (v_div_scale), compute a reciprocal, run Newton steps, scale back (v_div_fmas), and
handle special cases (v_div_fixup). Some operands would make intermediate results overflow or become denormal. Scaling moves them
into range, and VCC tells that the quotient must be scaled back.

Definitions: V_DIV_SCALE, V_DIV_FMAS and V_DIV_FIXUP of AMD's CDNA4 ISA document. The following interpretations are needed for the
correctly rounded quotient that IEEE 754, OpenCL and LLVM require:

- If both the denominator's reciprocal and the quotient are denormal, the denominator is scaled down. The document scales the
denominator up, which would overflow.
- v_div_fmas scales by 2**64 (2**128 for float64), and rounds once. v_div_fmas scales up if S2, the scaled quotient, is at least 2,
  otherwise down (as in the document of GCN3).
- v_div_fixup returns infinity if the exponents show that the quotient overflows, because the earlier steps return NaN then.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gfx950_emulator.binding import Bound, Site, binder
from gfx950_emulator.constants import VCC
from gfx950_emulator.group import Group
from gfx950_emulator.instructions.float_alu import exact_fma, fma32, fma64, one_by_one, round_to_odd
from gfx950_emulator.vector import (
    F16,
    F32,
    F64,
    MANTISSA_BITS,
    SMALLEST_NORMAL,
    VectorOp,
    bind_vector,
    getter,
    set_compare,
    vector_op,
)

Array = Any

# Constants, by the size of the floating-point type in bytes
_EXPONENT_MASK, _LOWEST_EXPONENT = {4: 0xFF, 8: 0x7FF}, {4: -126, 8: -1022}
_SCALE = {4: 64, 8: 128}
_TINY_NUMERATOR, _FAR_APART = {4: 23, 8: 53}, {4: 96, 8: 768}
_UNDERFLOW, _OVERFLOW = {4: -150, 8: -1075}, {4: 129, 8: 1025}


def _exponent(a: Array) -> Array:
    """Returns the biased exponent, int32: 0 for zeros and denormals."""
    size = a.dtype.itemsize
    return (a.view(f"u{size}") >> MANTISSA_BITS[size]).astype(np.int32) & _EXPONENT_MASK[size]


def _quotient_is_denormal(numerator: Array, denominator: Array) -> Array:
    """Returns whether |numerator / denominator| is below the smallest normal number, for finite nonzero operands."""
    (m1, e1), (m2, e2) = np.frexp(np.abs(numerator)), np.frexp(np.abs(denominator))
    return e1 - e2 - (m1 < m2) < _LOWEST_EXPONENT[numerator.dtype.itemsize]


def div_scale(value: Array, denominator: Array, numerator: Array) -> tuple[Array, Array]:
    """Returns the scaled ``value``, which is the denominator or the numerator, and whether the quotient must be scaled back."""
    dtype = value.dtype.type
    size = value.dtype.itemsize
    smallest = SMALLEST_NORMAL[size]
    up, down = dtype(2.0 ** _SCALE[size]), dtype(2.0 ** -_SCALE[size])
    one = dtype(1)
    is_denominator, is_numerator = value == denominator, value == numerator
    reciprocal = np.abs(denominator) > one / smallest
    quotient = _quotient_is_denormal(numerator, denominator)
    conditions = [
        (denominator == 0) | (numerator == 0),
        _exponent(numerator) - _exponent(denominator) >= _FAR_APART[size],
        np.abs(denominator) < smallest,
        reciprocal & quotient,
        reciprocal,
        quotient,
        _exponent(numerator) <= _TINY_NUMERATOR[size],
    ]
    factors = [
        dtype(np.nan),
        np.where(is_denominator, up, one),
        up,
        np.where(is_denominator, down, one),
        down,
        np.where(is_numerator, up, one),
        up,
    ]
    back = [False, True, False, True, False, True, False]
    return value * np.select(conditions, factors, one), np.select(conditions, back, False)


@binder("v_div_scale_f32", "v_div_scale_f64")
def _div_scale(site: Site) -> Bound:
    """D, VCC = scaled S0. S1 is the denominator, S2 the numerator, and S0 equals one of these two."""
    type_ = F32 if site.mnemonic.endswith("f32") else F64
    destination, flag, *sources = site.operands
    getters = [getter(site, operand, type_) for operand in sources]
    row = destination.index

    def run(g: Group) -> None:
        result, back = div_scale(*(np.broadcast_to(get(g), (g.lanes,)) for get in getters))
        if type_ is F64:
            g.set_pair(row, result)
        else:
            np.copyto(g.F[row], result, where=g.mask)
        set_compare(g, flag.index, back)

    return Bound(run, site.ids([destination, flag]), site.ids(sources))


def div_fmas32(a: Array, b: Array, c: Array, scaled: Array) -> Array:
    result = fma32(a, b, c)
    if scaled.any():
        product = np.multiply(a, b, dtype=np.float64)
        odd = round_to_odd(product, c, product + c)
        back = odd * np.where(np.abs(c) >= 2, 2.0**64, 2.0**-64)
        result = np.where(scaled, back.astype(np.float32), result)
    return result


def div_fmas64(a: Array, b: Array, c: Array, scaled: Array) -> Array:
    result = fma64(a, b, c)
    exact = scaled & np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    if exact.any():
        result = one_by_one(lambda x, y, z: exact_fma(x, y, z, 128 if abs(z) >= 2 else -128), exact, result, a, b, c)
    return result


@binder("v_div_fmas_f32", "v_div_fmas_f64")
def _div_fmas(site: Site) -> Bound:
    """D = S0 * S1 + S2, scaled back in lanes whose VCC bit is set."""
    type_, function = (F32, div_fmas32) if site.mnemonic.endswith("f32") else (F64, div_fmas64)
    return bind_vector(VectorOp(site.mnemonic, function, type_, (type_,) * 3), site, lanes=VCC)


def div_fixup(quotient: Array, denominator: Array, numerator: Array) -> Array:
    """Corrects special cases of the quotient. S0 is the quotient, S1 the denominator, S2 the numerator."""
    dtype, size = quotient.dtype.type, quotient.dtype.itemsize
    negative = np.signbit(denominator) ^ np.signbit(numerator)
    zero_denominator, zero_numerator = denominator == 0, numerator == 0
    infinite_denominator, infinite_numerator = np.isinf(denominator), np.isinf(numerator)
    conditions = [
        np.isnan(numerator),
        np.isnan(denominator),
        (zero_denominator & zero_numerator) | (infinite_denominator & infinite_numerator),
        zero_denominator | infinite_numerator,
        infinite_denominator | zero_numerator,
    ]
    results = [numerator + numerator, denominator + denominator, dtype(np.nan), dtype(np.inf), dtype(0)]
    if size > 2:
        apart = _exponent(numerator) - _exponent(denominator)
        conditions += [apart < _UNDERFLOW[size], apart > _OVERFLOW[size]]
        results += [dtype(0), dtype(np.inf)]
    magnitude = np.select(conditions, results, np.abs(quotient))
    return np.where(np.isnan(magnitude), magnitude, np.where(negative, -magnitude, magnitude))


for _suffix, _type in (("f32", F32), ("f64", F64), ("f16", F16)):
    vector_op(f"v_div_fixup_{_suffix}", div_fixup, _type, _type, _type, _type, keeps_high=True)
