"""Activation functions of feed-forward layers."""

from tokenspeed_kernel_base.ops.activation.silu_and_mul import silu_and_mul
from tokenspeed_kernel_base.ops.activation.swiglu import swiglu

__all__ = ["silu_and_mul", "swiglu"]
