"""Tolerances: the allowed difference between a kernel's result and the reference, and its reason.

A tolerance has three numbers. An element may differ by ``relative`` times its own magnitude plus ``absolute`` times the root mean
square of the tensor. The absolute part is needed where large terms cancel: the error scales with the terms, not with their sum.
Small errors of equal sign may still add up; ``norm`` bounds the whole difference, as a relative Frobenius norm.

The reference rounds once, at the end. A kernel may differ from the reference only as far as MMAs require. The kernel may sum in
another order, and may round intermediates to the operands' format.
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
    """Bounds on the difference between a result and the expected tensor. If all three are 0, the bits must be equal.

    An element may differ by ``relative * |expected| + absolute * rms``. The relative Frobenius norm of the whole difference may
    be at most ``norm``. The rms is that of the expected tensor or, if larger, that of the element's row (the tensor's last axis).
    """

    relative: float
    absolute: float
    norm: float
    reason: str

    @property
    def exact(self) -> bool:
        return self.relative == self.absolute == self.norm == 0

    def widened(self, other: Tolerance) -> Tolerance:
        """Returns a tolerance whose bounds are each the larger one of this and the other tolerance."""
        if other.relative <= self.relative and other.absolute <= self.absolute and other.norm <= self.norm:
            return self
        return Tolerance(
            max(self.relative, other.relative), max(self.absolute, other.absolute), max(self.norm, other.norm), other.reason
        )


EXACT = Tolerance(0, 0, 0, "every bit is specified")

_INTEGERS = Tolerance(0, 0, 0, "integers are not rounded")

_BY_DTYPE = {
    # Summing n terms in another order causes an error of about sqrt(n) * 2^-52. 1e-12 leaves room for n = 10^6 and a few such sums.
    torch.float64: Tolerance(1e-12, 1e-12, 1e-13, "sums in another order, in float64"),
    # sqrt(4096) * 2^-23 is 8e-6, and the hardware's exp2 and rsqrt have errors of 2 ulp. The tolerance is more than twice the sum
    # of these errors.
    torch.float32: Tolerance(2e-5, 2e-5, 1e-5, "sums of thousands of terms in another order, approximate exp2"),
    # Two ulp: one when an intermediate is rounded to an MMA operand, one when the result is rounded. Together these cause noise of
    # about 0.3 ulp rms. The norm may be three times that.
    torch.float16: Tolerance(2**-9, 2**-9, 2**-10, "an intermediate and the result are each rounded to float16"),
    torch.bfloat16: Tolerance(2**-6, 2**-6, 2**-7, "an intermediate and the result are each rounded to bfloat16"),
    # The distance between two neighbouring values of the format (an eighth to a quarter of the value), because a value near a
    # rounding boundary may round to either side. Few values are near a boundary, so the bound of the norm is a small fraction of
    # that distance.
    torch.float8_e4m3fn: Tolerance(2**-3, 2**-9, 2**-6, "a value near a rounding boundary of e4m3 may round to either side"),
    torch.float8_e4m3fnuz: Tolerance(2**-3, 2**-9, 2**-6, "a value near a rounding boundary of e4m3 may round to either side"),
    torch.float8_e5m2: Tolerance(2**-2, 2**-9, 2**-5, "a value near a rounding boundary of e5m2 may round to either side"),
}

_FLOATS_16 = (torch.float16, torch.bfloat16)

# fp4 operands decode exactly, but kernels may scale partial sums in 16-bit floats: two more roundings to bfloat16.
_FP4_OPERANDS = Tolerance(2**-5, 2**-4, 2**-6, "partial sums of fp4 MMAs are scaled in 16-bit floats")
# With fp8 operands the other operand of an MMA (attention's probabilities, an activation) may be rounded to e4m3 as well. A term
# then has an error of at most 2^-4, and of 2.5% rms. So the sum also has an error of 2.5% rms. The relative error is larger where
# two large terms nearly cancel. Example: only attention's probabilities are rounded, over at most 1024 keys. Then 2 of 4 million
# elements have an error of 2^-3 of a row's rms.
_FP8_MMAS = Tolerance(2**-4, 2**-3 + 2**-4, 0.04, "an intermediate is rounded to fp8 for an MMA with an fp8 operand")
# An intermediate is quantised to fp4. A difference in the intermediate's last bit moves some elements to the neighbouring e2m1
# value, by up to half of the value, and occasionally changes a whole block's scale.
_FP4_INTERMEDIATES = Tolerance(2**-3, 2**-2, 0.1, "intermediates near a rounding boundary of fp4 may round to the other side")

# Decoded values of quantised results. The values before quantisation may differ in their last bit, so a value near a rounding
# boundary may round to either side. Neighbouring values differ by up to an eighth. Also, a block's amax may be a power of two in
# one result, and slightly less in the other. The other result's scale is then half as large, and its amax, almost 512 times that
# scale, saturates at 448 times, one eighth less.
_POWERS_OF_TWO = Tolerance(2**-3 + 2**-5, 2**-9, 2**-6, "a value near a rounding boundary of e4m3 may round to either side")
_BY_FORMAT = {
    "mxfp8": _POWERS_OF_TWO,
    "fp8": _POWERS_OF_TWO,
    # Neighbouring e2m1 values differ by up to half of the value, near 0 by a quarter of the root mean square. Some blocks differ in
    # their scale.
    "nvfp4": Tolerance(2**-1, 2**-2, 0.1, "a value near a rounding boundary of e2m1, or of its scale, may round to either side"),
}


def tolerance_for(of: torch.dtype | TensorFormat, request: Request | None = None, *, exact: bool = False) -> Tolerance:
    """Returns the tolerance for one output.

    Args:
        of: the output's dtype, or the format that an output was decoded from for the comparison.
        request: the call's request, whose formats tell the precision of operands and intermediates; None for the dtype alone.
        exact: whether the operator specifies every bit.

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
    # 16-bit intermediates also widen the tolerance of float32 results.
    halves = Counter(fmt.storage_dtype for fmt in request.intermediates if fmt.scale is None and fmt.storage_dtype in _FLOATS_16)
    for dtype, count in halves.items():
        tolerance = tolerance.widened(_of_several(dtype, count))
    if any(map(_is_fp4, operands)):
        tolerance = tolerance.widened(_FP4_OPERANDS)
    if any(map(_is_fp8, (*operands, *request.intermediates))):
        tolerance = tolerance.widened(_FP8_MMAS)
    if any(map(_is_fp4, request.intermediates)):
        tolerance = tolerance.widened(_FP4_INTERMEDIATES)
    return tolerance


def _of_several(dtype: torch.dtype, intermediates: int) -> Tolerance:
    """Returns the tolerance of a result that depends on several intermediates in a 16-bit float, in sequence or in parallel.

    Rounding errors are independent, so their total grows with the square root of their number. `_BY_DTYPE` covers one
    intermediate and the result's own rounding. The noise scales with the summed terms, so only ``absolute`` and ``norm`` grow;
    ``relative`` remains the result's rounding.
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
    """Returns whether a format is fp4: scaled elements stored as bytes are pairs of 4-bit values."""
    return fmt.scale is not None and fmt.storage_dtype == torch.uint8
