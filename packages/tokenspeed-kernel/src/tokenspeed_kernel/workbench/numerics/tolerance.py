"""How far a kernel's result may be from the reference's, and why that far.

A tolerance has three numbers. An element may differ by ``relative`` times its own magnitude plus ``absolute`` times the root
mean square of the whole tensor: where large terms cancel, the error is of the terms' size, not of the sum's. Errors that are
each small may still all lean one way; ``norm`` bounds the whole difference, as a relative Frobenius norm.

The reference rounds once, at the end. Kernels may differ by what matrix units make necessary, and by no more: sums in another
order, and intermediates rounded to the operands' format.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

import torch

from tokenspeed_kernel_base.selection import Request
from tokenspeed_kernel_base.signature import TensorFormat


@dataclass(frozen=True)
class Tolerance:
    """Bounds on an error: per element ``relative * |expected| + absolute * rms``, overall ``norm``; all 0 is exact. The rms is that
    of what is expected, of the whole or of the element's row (its last axis), whichever is more."""

    relative: float
    absolute: float
    norm: float
    reason: str

    @property
    def exact(self) -> bool:
        return self.relative == self.absolute == self.norm == 0

    def widened(self, other: Tolerance) -> Tolerance:
        """The looser of the two, number by number."""
        if other.relative <= self.relative and other.absolute <= self.absolute and other.norm <= self.norm:
            return self
        return Tolerance(
            max(self.relative, other.relative), max(self.absolute, other.absolute), max(self.norm, other.norm), other.reason
        )


EXACT = Tolerance(0, 0, 0, "every bit is specified")

_INTEGERS = Tolerance(0, 0, 0, "integers are not rounded")

_BY_DTYPE = {
    # A sum of n terms in another order is off by about sqrt(n) units of 2^-52; 1e-12 leaves room for n = 10^6 and a few such sums.
    torch.float64: Tolerance(1e-12, 1e-12, 1e-13, "sums in another order, in float64"),
    # sqrt(4096) units of 2^-23 are 8e-6, and the hardware's exp2 and rsqrt are good to 2 units; twice that.
    torch.float32: Tolerance(2e-5, 2e-5, 1e-5, "sums of some thousand terms in another order, approximate exp2"),
    # Two units in the last place: one when an intermediate becomes an operand of a matrix unit, one when the result is rounded.
    # Both together are noise of about 0.3 units rms; the norm may be three times that.
    torch.float16: Tolerance(2**-9, 2**-9, 2**-10, "an intermediate and the result are each rounded to float16"),
    torch.bfloat16: Tolerance(2**-6, 2**-6, 2**-7, "an intermediate and the result are each rounded to bfloat16"),
    # One step of the format (a quarter to an eighth of the value): a value near the middle falls to either side. Few values are
    # near it, so the norm may be a small part of a step.
    torch.float8_e4m3fn: Tolerance(2**-3, 2**-9, 2**-6, "a value between two steps of e4m3 falls to either side"),
    torch.float8_e4m3fnuz: Tolerance(2**-3, 2**-9, 2**-6, "a value between two steps of e4m3 falls to either side"),
    torch.float8_e5m2: Tolerance(2**-2, 2**-9, 2**-5, "a value between two steps of e5m2 falls to either side"),
}

_HALVES = (torch.float16, torch.bfloat16)

# Operands in fp4 decode exactly, but kernels may scale partial sums in half precision: two more roundings to bfloat16.
_FP4_OPERANDS = Tolerance(2**-5, 2**-4, 2**-6, "partial sums of fp4 products are scaled in half precision")
# With fp8 operands the other side of a product (attention's probabilities, an activation) may be rounded to e4m3 as well: off by
# 2^-4 at most and 2.5% rms a term, 2.5% rms of the sum. Where two large terms nearly cancel, the error is more of what is left:
# with weights rounded and nothing else, 2 of 4 million elements of attention to at most 1024 keys are off by 2^-3 of a row's rms.
_FP8_PRODUCTS = Tolerance(2**-4, 2**-3 + 2**-4, 0.04, "an intermediate is rounded to fp8 to meet an fp8 operand")
# An intermediate that is quantised to fp4: a difference in the last bit of it flips some elements by one step of e2m1,
# which is up to half of the value, and now and then a whole block's scale.
_FP4_INTERMEDIATES = Tolerance(2**-3, 2**-2, 0.1, "intermediates near a rounding boundary of fp4 fall to the other side")

# Decoded values of results that kernels quantise: what is quantised differs in its last bit now and then, and then a value near
# the middle of two steps falls to either side.
# A step is up to an eighth of the value; and where the largest of a block is 512 of its scale in one result, and a little less in
# the other, it saturates at 448 there, a seventh less.
_POWERS_OF_TWO = Tolerance(2**-3 + 2**-5, 2**-9, 2**-6, "a value between two steps of e4m3 falls to either side")
_BY_FORMAT = {
    "mxfp8": _POWERS_OF_TWO,
    "fp8": _POWERS_OF_TWO,
    # A step is up to half of the value, or a quarter of the root mean square near 0, and some blocks have another scale.
    "nvfp4": Tolerance(2**-1, 2**-2, 0.1, "a value between two steps of e2m1, or of its scale, falls to either side"),
}


def tolerance_for(of: torch.dtype | TensorFormat, request: Request | None = None, *, exact: bool = False) -> Tolerance:
    """The tolerance for one output.

    Args:
        of: the output's dtype; the format of one that was decoded to be compared.
        request: the call's request; its formats say how narrow operands and intermediate values are.
        exact: the operator specifies every bit.

    Example:
        >>> import torch
        >>> tolerance_for(torch.bfloat16).relative
        0.015625
        >>> tolerance_for(torch.int32).exact
        True
    """
    if exact:
        return EXACT
    if isinstance(of, TensorFormat):
        return _BY_FORMAT[of.format].widened(_BY_DTYPE.get(of.storage_dtype, EXACT))
    if not of.is_floating_point:
        return _INTEGERS
    tolerance = _BY_DTYPE.get(of, EXACT)
    if request is None:
        return tolerance
    operands = [fmt for _, fmt in request.signature.roles]
    # Without these, float32 results would be held to their own.
    halves = Counter(fmt.storage_dtype for fmt in request.intermediates if fmt.scale is None and fmt.storage_dtype in _HALVES)
    for dtype, count in halves.items():
        tolerance = tolerance.widened(_of_several(dtype, count))
    if any(map(_is_fp4, operands)):
        tolerance = tolerance.widened(_FP4_OPERANDS)
    if any(map(_is_fp8, (*operands, *request.intermediates))):
        tolerance = tolerance.widened(_FP8_PRODUCTS)
    if any(map(_is_fp4, request.intermediates)):
        tolerance = tolerance.widened(_FP4_INTERMEDIATES)
    return tolerance


def _of_several(dtype: torch.dtype, intermediates: int) -> Tolerance:
    """For a result that so many intermediates in half precision have gone into, one after another or side by side.

    Roundings do not know of each other, so what they leave grows with the root of their number; the entry of the dtype is for one
    and the result's own. It is noise of the terms' size: the part that is relative to the element is the result's rounding still.
    """
    one = _BY_DTYPE[dtype]
    if intermediates == 1:
        return one
    factor = math.sqrt((intermediates + 1) / 2)
    name = str(dtype).removeprefix("torch.")
    reason = f"{intermediates} intermediates and the result are each rounded to {name}"
    return replace(one, absolute=one.absolute * factor, norm=one.norm * factor, reason=reason)


def _is_fp8(fmt: TensorFormat) -> bool:
    return fmt.storage_dtype.is_floating_point and fmt.storage_dtype.itemsize == 1


def _is_fp4(fmt: TensorFormat) -> bool:
    """Scaled elements in bytes are two 4-bit codes each."""
    return fmt.scale is not None and fmt.storage_dtype == torch.uint8
