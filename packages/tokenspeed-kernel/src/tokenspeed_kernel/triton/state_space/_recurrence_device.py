"""Device code for both state-space recurrences."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tokenspeed_kernel.triton.common_device import softplus


class Steps(NamedTuple):
    """A head's parameters for step sizes and decays, float32: A, the bias of dt, and the lower and upper bound of a step size."""

    A: Any
    bias: Any
    least: Any
    most: Any


@triton.jit
def steps_of(A, dt_bias, head, dt_min, dt_max):
    """Loads the `Steps` of a head."""
    bias = 0.0
    if dt_bias is not None:
        bias = tl.load(dt_bias + head).to(tl.float32)
    return Steps(tl.load(A + head).to(tl.float32), bias, dt_min, dt_max)


@triton.jit
def step_sizes(dt, steps, SHAPE: tl.constexpr):
    """Computes step sizes from float32 dt: adds the bias, applies softplus if requested, then clamps. NaN stays NaN."""
    step = dt + steps.bias
    if SHAPE.softplus:
        step = softplus(step)
    step = tl.where(step < steps.least, steps.least, step)
    return tl.where(step > steps.most, steps.most, step)


@triton.jit
def skipped_and_gated(y, x, D, head, z):
    """Computes ``(y + D x) silu(z)``, float32; D and z may be None."""
    if D is not None:
        y += tl.load(D + head).to(tl.float32) * x
    if z is not None:
        y = y * (z / (1.0 + tl.exp(-z)))
    return y
