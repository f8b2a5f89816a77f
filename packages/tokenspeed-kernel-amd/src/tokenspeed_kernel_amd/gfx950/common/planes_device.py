"""Rows of q as fp8 planes: fp8 tensors whose weighted sum is q times a power of two per row.

fp8 MFMAs multiply the planes with fp8 keys directly, so keys are not converted. A plane has 4 significant bits. Two planes hold the
8 bits of bfloat16, three planes the 11 bits of float16. Each plane holds the rounding error of the planes before it, lifted by a
power of two, because the spacing of small e4m3 values is 2**-9.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenspeed_kernel_amd.gfx950 import instructions_device as isa
from tokenspeed_kernel_amd.gfx950.common.mma_device import load_keys
from tokenspeed_kernel_amd.gluon.softmax_device import larger

# Rounding errors are lifted by this power of two: the largest error of a value below 256 is 8. The largest e4m3 value is 448.
LIFT = gl.constexpr(2.0**5)


@gluon.aggregate
class Planes:
    """A tile's rows of q as operands of the QK MFMA.

    Attributes:
        high, middle, low: the planes, or q itself in ``high`` if ``count`` is 1. Planes beyond ``count`` are not used. ``middle``
            is lifted by LIFT, and ``low`` by LIFT**2.
        factor: float32 [rows], by which dot products of the planes must be multiplied; with one plane, not used.
        count: the number of planes.
        dtype: dtype of q and of the PV MFMA's operands.
    """

    high: gl.tensor
    middle: gl.tensor
    low: gl.tensor
    factor: gl.tensor
    count: gl.constexpr
    dtype: gl.constexpr


@gluon.jit
def row_factors(largest):
    """Returns the power of two that scales a row's largest magnitude, float32, into [128, 256), and the inverse of this power. The
    largest e4m3 value is 448."""
    exponent = gl.maximum(largest.to(gl.int32, bitcast=True) >> 23 & 0xFF, 16)
    return ((261 - exponent) << 23).to(gl.float32, bitcast=True), ((exponent - 7) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def leading_bits(values):
    """Rounds float32 values to e4m3. Returns the results, and the rounding errors."""
    high = values.to(gl.float8e4nv)
    return high, values - high.to(gl.float32)


@gluon.jit
def scale_rows(q, factor):
    """Returns q, [rows, columns], as float32 times ``factor``, float32 [rows]."""
    row: gl.constexpr = gl.SliceLayout(1, q.type.layout)
    return q.to(gl.float32) * gl.convert_layout(factor, row, assert_trivial=True)[:, None]


@gluon.jit
def as_planes(q, keys: gl.constexpr, row: gl.constexpr):
    """Splits 16-bit rows of q into `Planes`, for keys of dtype ``keys``. ``row``: layout of `Planes.factor`."""
    m: gl.constexpr = q.shape[0]
    if keys.primitive_bitwidth == 8:
        count: gl.constexpr = 3 if q.dtype == gl.float16 else 2
        factor, back = row_factors(gl.reduce(gl.abs(q.to(gl.float32)), 1, larger))
        high, error = leading_bits(scale_rows(q, factor))
        middle, error = leading_bits(error * LIFT)
        low = (error * LIFT).to(gl.float8e4nv)
        planes = Planes(high, middle, low, gl.convert_layout(back, row), count, q.dtype)
    else:
        planes = Planes(q, q, q, gl.full([m], 1.0, gl.float32, row), 1, q.dtype)
    return planes


@gluon.jit
def dot_products(q, keys):
    """Returns the dot products of the rows of `Planes` q and keys in LDS [keys, head_dim]. With several planes, they must be
    multiplied by ``q.factor``."""
    k = load_keys(q.high, keys)
    dots = gl.zeros([q.high.shape[0], k.shape[1]], gl.float32, q.high.type.layout.parent)
    if q.count > 2:
        dots = isa.mfma(q.low, k, dots) * (1 / LIFT)
    if q.count > 1:
        dots = isa.mfma(q.middle, k, dots) * (1 / LIFT)
    return isa.mfma(q.high, k, dots)
