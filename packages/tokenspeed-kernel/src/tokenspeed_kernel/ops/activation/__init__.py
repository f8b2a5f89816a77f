"""Activation functions of feed-forward layers."""

from tokenspeed_kernel.ops.activation import triton  # noqa: F401  (registers its kernels)
from tokenspeed_kernel.ops.activation.silu_and_mul import silu_and_mul
from tokenspeed_kernel.ops.activation.swiglu import swiglu

__all__ = ["silu_and_mul", "swiglu"]
