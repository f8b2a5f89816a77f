"""Reciprocals, roots, exponentials, logarithms, sines and cosines.

Results are computed in float64 and rounded once. Hardware may be off by 1 ulp in float32, so its last bit may differ. The float32
forms of v_rcp, v_rsq, v_sqrt, v_exp and v_log flush denormal sources and results. LLVM therefore scales their operands
(``AMDGPUCodeGenPrepare`` and ``SITargetLowering``: division, sqrt, exp2, log2). Definitions: chapter VOP1 of AMD's CDNA4 ISA
document; v_trig_preop_f64: chapter VOP3.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import ldexp
from typing import Any

import numpy as np

from gfx950_emulator.instructions.float_alu import without_denormals
from gfx950_emulator.vector import F16, F32, F64, U32, vector_op

Array = Any


def _rounded(function: Callable[[Array], Array], dtype: type) -> Callable[[Array], Array]:
    return lambda a: function(a.astype(np.float64)).astype(dtype)


def _flushed(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Wraps a float32 function: denormal sources and results are flushed to zero."""
    return lambda a: without_denormals(function(without_denormals(a).astype(np.float64)).astype(np.float32))


def _reciprocal(a: Array) -> Array:
    return np.float64(1) / a


def _reciprocal_root(a: Array) -> Array:
    return np.float64(1) / np.sqrt(a)


def _quarter_wave(turns: Array) -> Array:
    """Returns sin(2 pi turns) for turns in [-0.5, 0.5], exact at multiples of a quarter turn."""
    folded = np.where(np.abs(turns) > 0.25, np.copysign(0.5, turns) - turns, turns)
    return np.sin(2 * np.pi * folded)


def sine(a: Array) -> Array:
    """Returns the sine of an angle in revolutions; 0 beyond 256 revolutions, NaN for infinity."""
    inside = np.abs(a) <= 256
    result = _quarter_wave(np.where(inside, a - np.rint(a), 0))
    return np.where(inside, np.where(a == 0, a, result), a - a)


def cosine(a: Array) -> Array:
    """Returns the cosine of an angle in revolutions; 1 beyond 256 revolutions, NaN for infinity."""
    inside = np.abs(a) <= 256
    result = _quarter_wave(0.25 - np.abs(np.where(inside, a - np.rint(a), 0)))
    return np.where(inside, result, a - a + 1)


_FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "rcp": _reciprocal, "rsq": _reciprocal_root, "sqrt": np.sqrt, "exp": np.exp2, "log": np.log2,
}  # fmt: skip
for _name, _function in _FUNCTIONS.items():
    vector_op(f"v_{_name}_f32", _flushed(_function), F32, F32, unit="trans")
    vector_op(f"v_{_name}_f16", _rounded(_function, np.float16), F16, F16, unit="trans")
    if _name in ("rcp", "rsq", "sqrt"):
        vector_op(f"v_{_name}_f64", _function, F64, F64, unit="trans")
vector_op("v_rcp_iflag_f32", _flushed(_reciprocal), F32, F32, unit="trans")
for _name, _function in (("sin", sine), ("cos", cosine)):
    vector_op(f"v_{_name}_f32", _rounded(_function, np.float32), F32, F32, unit="trans")
    vector_op(f"v_{_name}_f16", _rounded(_function, np.float16), F16, F16, unit="trans")

# v_trig_preop_f64: 53 bits of 2 / pi, for the reduction of large arguments of sine and cosine

_DIGITS = 1201  # bits of 2 / pi in the instruction's table


@lru_cache(maxsize=1)
def _two_over_pi() -> int:
    """Returns floor(2 / pi * 2**_DIGITS), from Machin's formula pi / 4 = 4 atan(1/5) - atan(1/239)."""
    guard = 64
    one = 1 << (_DIGITS + guard)

    def arctangent_of_inverse(n: int) -> int:
        term, total, k = one // n, 0, 1
        while term:
            total += term // k if k % 4 == 1 else -(term // k)
            term //= n * n
            k += 2
        return total

    quarter = 4 * arctangent_of_inverse(5) - arctangent_of_inverse(239)
    return (one * one // (2 * quarter)) >> guard


@lru_cache(maxsize=4096)
def _segment(segment: int, exponent: int) -> float:
    """Returns bits [shift, shift + 53) of the fraction of 2 / pi, at their original exponent; zeros beyond the table's bits."""
    shift = 53 * segment + max(exponent - 1077, 0)
    bits = _two_over_pi() << (shift + 53) >> _DIGITS & ((1 << 53) - 1)
    return ldexp(bits, -53 - shift + (128 if exponent >= 1968 else 0))


def trig_preop(a: Array, b: Array) -> Array:
    exponent = (a.view(np.uint64) >> np.uint64(52)).astype(np.int64) & 0x7FF
    exponents, segments = np.broadcast_arrays(exponent, b.astype(np.int64) & 31)
    values = [_segment(int(s), int(e)) for s, e in zip(segments.flat, exponents.flat, strict=True)]
    return np.array(values).reshape(segments.shape)


vector_op("v_trig_preop_f64", trig_preop, F64, F64, U32)
